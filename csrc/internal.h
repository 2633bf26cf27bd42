/*
 * What the library's sources share among themselves. Nothing here is installed. Every name that the linker sees starts
 * with pb_kvcache_priv_ and is hidden in a shared library.
 *
 * Who calls whom, each only what stands above it:
 *
 *   bits.h                                floats by their bits
 *   lanes.h                               inner loops, by instruction set
 *   checks.h                              what several functions check
 *   kernels.h: score.c, pool.c, choose.c  score, pool, choose
 *   select.c | policy.c, snapkv.c, pyramidkv.c, baselines.c, stack.c, hold.c
 *
 * allocator.c, budget.c, compact.c, plan.c and status.c stand beside these. They call at most checks.c.
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
#error "pb_kvcache needs floats without excess precision: -msse2 -mfpmath=sse, on s390x -fexcess-precision=fast"
#endif

/* The caller's allocator, or malloc and free for NULL. false where one of its functions is NULL. */
bool pb_kvcache_priv_allocator(const pb_allocator *allocator, pb_allocator *out);

/* ---- Policies ---- */

/* What makes one policy differ from another. Indices count kept positions in ascending order. */
typedef struct pb_kvcache_priv_rules {
    /* Take in one observed step: attn[0 .. kept_count-1]. NULL: attention is not read. */
    void (*observe)(pb_kvcache *policy, const float *attn);
    /* Indices of the `count` positions to drop, ascending, among first .. first+candidates-1. */
    void (*choose)(pb_kvcache *policy, size_t first, size_t candidates, size_t count, uint32_t *chosen);
    /* Remove the chosen indices from what is remembered. kept_count is still the old one. NULL: nothing remembered. */
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
    size_t unobserved; /* newest positions that no observed step has weighed, never dropped. 0 for all but TOVA */
    double *scores;    /* what is remembered of each kept position. SnapKV: scratch */
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
