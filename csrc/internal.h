/*
 * What the library's sources share among themselves. Nothing here is installed; every name that the linker sees starts
 * with pb_kvcache_priv_ and is hidden in a shared library.
 */
#ifndef PB_KVCACHE_INTERNAL_H
#define PB_KVCACHE_INTERNAL_H

#include <float.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "pb_kvcache.h"

/* The results are defined to the bit, so the arithmetic has to be IEEE 754 without excess precision. */
#if defined(__FAST_MATH__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__)
#error "pb_kvcache must not be compiled with -ffast-math or -ffinite-math-only"
#endif
#if defined(FLT_EVAL_METHOD) && FLT_EVAL_METHOD != 0
#error "pb_kvcache needs float and double without excess precision: compile with -msse2 -mfpmath=sse (32-bit x86) or -fexcess-precision=fast (gcc on s390x)"
#endif

/* ---- Kernels: score, pool, choose. Stateless, over arrays; used by the policies and by the prefill selection. ---- */

/*
 * Column sums of `num_rows` rows of float weights, in double: sums[i] = 0.0 + rows[0][i] + rows[1][i] + ..., in this
 * order, for i < n. Row r starts at rows + r * stride and has lengths[r] columns (<= n); a column beyond them counts
 * as 0. `sums` does not overlap the rows.
 */
void pb_kvcache_priv_column_sums(const float *rows, size_t stride, const uint32_t *lengths, size_t num_rows, size_t n,
                                 double *sums);

/*
 * Maximum over the neighbours i-(kernel-1)/2 .. i+(kernel-1)/2, clamped at both ends: pooled[i] for i < n. `kernel` is
 * odd and may exceed n. No NaN. `pooled` does not overlap `scores`.
 */
void pb_kvcache_priv_pool_max(const double *scores, size_t n, size_t kernel, double *pooled);

/*
 * Indices of the `count` lowest of n scores (count <= n), ties to the lower index, ascending, to `chosen`. O(n), no
 * allocation. No NaN; -0.0 equals 0.0.
 */
void pb_kvcache_priv_choose_lowest(const double *scores, size_t n, size_t count, uint32_t *chosen);

/* true where every weight is finite and >= 0 (-0.0 is). */
bool pb_kvcache_priv_weights_ok(const float *weights, size_t n);

/* Indices of the `count` highest of n < 2^32 scores, as above; what is not finite ranks below everything else. */
void pb_kvcache_priv_choose_highest(const float *scores, size_t n, size_t count, uint32_t *chosen);

/* The same, for scores of which none is NaN or +inf. */
void pb_kvcache_priv_choose_highest_of_numbers(const float *scores, size_t n, size_t count, uint32_t *chosen);

/* One row of pb_kvcache_pool_scores; NaN and infinities count as -inf. `workspace`: doubles, see below. */
void pb_kvcache_priv_pool(const float *scores, size_t n, pb_kvcache_pooling pooling, size_t kernel, double *workspace,
                          float *pooled);
pb_kvcache_status pb_kvcache_priv_pool_doubles(size_t n, pb_kvcache_pooling pooling, size_t kernel, size_t *doubles);

/* ---- Prefill selection ---- */

#define PB_KVCACHE_PRIV_SEEN_BAD 1u      /* NaN or +inf */
#define PB_KVCACHE_PRIV_SEEN_NEGATIVE 2u /* below 0 */

/* The inner loops, by pb_kvcache_dtype, as one instruction set's copies. See lanes_body.h. Every copy gives the same
 * bits. */
typedef struct pb_kvcache_priv_lanes {
    bool (*top[3])(const void *row, size_t n, float *top);
    double (*exps[3])(const void *row, size_t n, float scale, float top, float *e, const void *next);
    uint32_t (*sums[3])(const void *rows, ptrdiff_t stride, size_t num_rows, size_t n, float *sums);
    void (*convert[3])(const void *row, size_t n, float *floats);
    void (*add_scaled)(const float *e, size_t n, float factor, float *sums);
    bool (*finite)(const float *x, size_t n);
    size_t (*below)(const int32_t *keys, size_t n, int32_t pivot); /* how many of fewer than 2^32 */
    /* The rest is over n < 2^32 scores of which none is NaN. How many are >= threshold? */
    size_t (*reaching)(const float *x, size_t n, float threshold);
    /* How many are strictly between low < high, and their keys: all, or as many of the first as `capacity` - 16.
     * Keys are integers that order as the scores do. Also how many are >= high. */
    size_t (*between)(const float *x, size_t n, float low, float high, size_t *from_high, int32_t *keys,
                      size_t capacity);
    /* Indices of what exceeds the threshold and of the first `ties` that equal it, `count` in all, ascending. */
    void (*above)(const float *x, size_t n, float threshold, size_t ties, size_t count, uint32_t *chosen);
} pb_kvcache_priv_lanes;

#define PB_KVCACHE_PRIV_LEVELS 3u

/* Level 0 is portable C, higher ones need more; NULL where the level does not exist or this processor lacks it. */
const pb_kvcache_priv_lanes *pb_kvcache_priv_lanes_at(unsigned level);
const pb_kvcache_priv_lanes *pb_kvcache_priv_lanes_best(void);

/* exp(t) for t <= 0, as the softmax uses it. */
float pb_kvcache_priv_exp(float t);

/* Scratch of one KV head: rows of n floats. */
#define PB_KVCACHE_PRIV_SCRATCH_ROWS 3u
typedef struct pb_kvcache_priv_scratch {
    float *sums; /* of the window's rows */
    float *exps;
    float *copy; /* of a row that needs repair */
} pb_kvcache_priv_scratch;
pb_kvcache_priv_scratch pb_kvcache_priv_scratch_at(float *floats, size_t n);

/* Scores of one KV head, n - window floats. Arguments are checked; values are not. */
pb_kvcache_status pb_kvcache_priv_head_scores(const pb_kvcache_attention *attn, pb_kvcache_reduce reduce,
                                              pb_kvcache_nan nan, size_t kv_head,
                                              const pb_kvcache_priv_scratch *scratch, float *scores);

pb_kvcache_status pb_kvcache_priv_attention_ok(const pb_kvcache_attention *attn, size_t first_head, size_t end_head);
bool pb_kvcache_priv_overlaps_attention(const pb_kvcache_attention *attn, size_t first_head, size_t end_head,
                                        const void *array, size_t bytes);
bool pb_kvcache_priv_nan_ok(pb_kvcache_nan nan);
bool pb_kvcache_priv_reduce_ok(pb_kvcache_reduce reduce);

/* Rows first .. end-1 of `width` elements, `stride` elements apart, within an array of `capacity`, not overlapping. */
pb_kvcache_status pb_kvcache_priv_rows_ok(const void *rows, size_t size, size_t stride, size_t first, size_t end,
                                          size_t width, size_t capacity);
pb_kvcache_status pb_kvcache_priv_scores_ok(const float *scores, size_t stride, size_t num_heads, size_t n,
                                            pb_kvcache_nan nan);

/* Bytes from the first element of the first row to the end of the last; false where they do not fit. */
bool pb_kvcache_priv_span_bytes(size_t rows, size_t stride, size_t width, size_t size, size_t *bytes);
bool pb_kvcache_priv_overlap(const void *a, size_t a_bytes, const void *b, size_t b_bytes);
bool pb_kvcache_priv_aligned(const void *pointer, size_t size);

/* The first address in the workspace that is a whole cache line; workspace sizes include the slack. */
#define PB_KVCACHE_PRIV_ALIGNMENT 64u
void *pb_kvcache_priv_align(void *workspace);

/* a * b and a + b for sizes: false where they do not fit, and then *out is untouched. */
bool pb_kvcache_priv_mul(size_t a, size_t b, size_t *out);
bool pb_kvcache_priv_add(size_t a, size_t b, size_t *out);

/* The caller's allocator, or malloc and free for NULL. false where one of its functions is NULL. */
bool pb_kvcache_priv_allocator(const pb_allocator *allocator, pb_allocator *out);

/* ---- Policies ---- */

/* What makes one policy differ from another. Indices count kept positions in ascending order. */
typedef struct pb_kvcache_priv_rules {
    /* Take in one observed step: attn[0 .. kept_count-1]. NULL: attention is not read. */
    void (*observe)(pb_kvcache *policy, const float *attn);
    /* Indices of the `count` positions to drop, ascending, among first .. first+candidates-1. */
    void (*choose)(pb_kvcache *policy, size_t first, size_t candidates, size_t count, uint32_t *chosen);
    /* Remove the chosen indices from what is remembered; kept_count is still the old one. NULL: nothing remembered. */
    void (*forget)(pb_kvcache *policy, const uint32_t *chosen, size_t count);
    /* Position `kept[kept_count]` is about to join: its state starts from nothing. NULL: nothing to do. */
    void (*join)(pb_kvcache *policy);
    /* Forget everything. NULL: nothing to do. */
    void (*clear)(pb_kvcache *policy);
    /* The score of a kept index. NULL: the policy has none. */
    double (*score)(const pb_kvcache *policy, size_t index);
} pb_kvcache_priv_rules;

/* Everything that creation decides: two caches with equal shapes have equal layouts. Fields a policy lacks are 0. */
typedef struct pb_kvcache_priv_shape {
    const pb_kvcache_priv_rules *rules;
    uint32_t effective;     /* what it evicts down to */
    uint32_t capacity;      /* the most that it holds */
    uint32_t recent_window; /* newest positions, never dropped */
    uint32_t sinks;         /* positions below this are never dropped */
    uint32_t obs_window;    /* ring slots */
    uint32_t pool_kernel;
    uint32_t doubles; /* arrays of `capacity` doubles: 0 none, 1 `scores`, 2 `scores` and `pooled` */
    size_t bytes;     /* of the whole object */
} pb_kvcache_priv_shape;

/*
 * One block of memory: this struct, then the arrays that it points to, each of `capacity` elements except `lengths`
 * (obs_window) and `history` (obs_window rows of `capacity`). A column of a ring row beyond its length counts as 0, so
 * neither creation nor a step has to write zeros.
 */
struct pb_kvcache {
    pb_kvcache_priv_shape shape;
    pb_allocator allocator; /* alloc is NULL where the memory belongs to someone else: a stack */
    size_t kept_count;
    uint32_t cursor;   /* the ring slot that the next observed step fills */
    size_t unobserved; /* TOVA: newest positions that no observed step has weighed, never dropped; others: 0 */
    double *scores;    /* SnapKV: scratch; others: what they remember of each kept position */
    double *pooled;    /* SnapKV: scratch */
    uint32_t *kept;    /* ascending */
    uint32_t *lengths; /* columns that each ring slot holds */
    float *history;    /* by ring slot */
};

/* The shape of a SnapKV cache that evicts to `effective` and can hold max(effective, params->budget) + 1 positions. */
pb_kvcache_status pb_kvcache_priv_snapkv_shape(const pb_kvcache_snapkv_params *params, uint32_t effective,
                                               pb_kvcache_priv_shape *shape);
pb_kvcache_status pb_kvcache_priv_pyramidkv_shape(const pb_kvcache_pyramidkv_params *params,
                                                  pb_kvcache_priv_shape *shape);

/* Work out shape->bytes from the other fields. PB_KVCACHE_ERROR_TOO_LARGE. */
pb_kvcache_status pb_kvcache_priv_set_bytes(pb_kvcache_priv_shape *shape);

/* A new cache in `memory` (shape->bytes of it, aligned for any type), holding position 0. It owns nothing. */
pb_kvcache *pb_kvcache_priv_place(void *memory, const pb_kvcache_priv_shape *shape);

/* A new cache from the allocator; NULL where there is no memory or the allocator lacks a function. */
pb_kvcache *pb_kvcache_priv_new(const pb_kvcache_priv_shape *shape, const pb_allocator *allocator);

/* A decode step in two halves, for a stack: would it be refused, and take it in. `policy` is not NULL. */
pb_kvcache_status pb_kvcache_priv_step_check(const pb_kvcache *policy, uint32_t pos, const float *attn,
                                             size_t attn_len);
void pb_kvcache_priv_step(pb_kvcache *policy, uint32_t pos, const float *attn);

/* true where both have the same policy and parameters. */
bool pb_kvcache_priv_same_shape(const pb_kvcache *policy, const pb_kvcache *source);

/* The vtable functions that all policies have in common. */
pb_kvcache_status pb_kvcache_priv_on_decode_step(pb_kvcache *policy, uint32_t pos, const float *attn, size_t attn_len);
size_t pb_kvcache_priv_evict(pb_kvcache *policy, uint32_t budget, uint32_t *victims, size_t capacity);
size_t pb_kvcache_priv_memory_bytes(const pb_kvcache *policy);
void pb_kvcache_priv_destroy(pb_kvcache *policy);

/* Close the gaps that the chosen ascending indices leave in an array of `n` elements of `size` bytes. */
void pb_kvcache_priv_close_gaps(void *array, size_t n, size_t size, const uint32_t *chosen, size_t count);

#endif
