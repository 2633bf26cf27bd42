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
 *   select.c, attention.c, merge.c, blocks.c | ring.c, rollback.c, policy.c, snapkv.c, pyramidkv.c, baselines.c, state.c, stack.c, hold.c
 *
 * allocator.c, budget.c, compact.c, divide.c, plan.c and status.c stand beside these. They call at most checks.c.
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

/* The rules' names in saved states: pinned. */
typedef enum pb_kvcache_priv_kind {
    PB_KVCACHE_PRIV_SNAPKV = 1, /* and pyramidkv */
    PB_KVCACHE_PRIV_OLDEST = 2, /* sliding_window and streaming_llm */
    PB_KVCACHE_PRIV_H2O = 3,
    PB_KVCACHE_PRIV_TOVA = 4,
    PB_KVCACHE_PRIV_SCISSORHANDS = 5
} pb_kvcache_priv_kind;

/* What makes one policy differ from another. Indices count kept positions in ascending order. */
typedef struct pb_kvcache_priv_rules {
    pb_kvcache_priv_kind kind;
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
    uint32_t max_rollback;
    uint32_t doubles; /* arrays of `capacity` doubles: 0 none, 1 `scores`, 2 `scores` and `prefix` */
    size_t bytes;     /* of the whole object */
} pb_kvcache_priv_shape;

/* What a step has overwritten. Its scores are in `saved`. */
typedef struct pb_kvcache_priv_undo {
    uint32_t row;        /* that the slot had: one more row of the ring while the step had no attention */
    uint32_t length;     /* the indices that the slot had */
    uint32_t seen;       /* and the gaps that there were when it was written */
    uint32_t observed;   /* 0: only a position joined */
    uint32_t unobserved; /* as it was */
} pb_kvcache_priv_undo;

/*
 * One block of memory: this struct, then the arrays that it points to, each of `capacity` elements except `lengths`,
 * `seen` and `row_of_slot` (obs_window), `gaps` (PB_KVCACHE_PRIV_GAPS where there is a ring), `undo` (max_rollback),
 * `history` (obs_window + max_rollback rows of `capacity`) and `saved` (max_rollback rows of `capacity`). An index of a
 * ring row beyond its length counts as 0, so neither creation nor a step has to write zeros. ring.c says what is in the
 * ring.
 */
#define PB_KVCACHE_PRIV_GAPS 32u
struct pb_kvcache {
    pb_kvcache_priv_shape shape;
    pb_allocator allocator; /* alloc is NULL where the memory belongs to someone else: a stack */
    size_t kept_count;
    uint32_t cursor;   /* the ring slot that the next observed step fills */
    size_t unobserved; /* newest positions that no observed step has weighed, never dropped. 0 for all but TOVA */
    double *scores;    /* what is remembered of each kept position. SnapKV: scratch */
    double *prefix;    /* SnapKV: sums of the ring slots below `summed` */
    double *saved;     /* rows of scores, by place in `undo`. NULL where none are remembered */
    uint32_t *kept;    /* ascending */
    uint32_t *lengths; /* indices that each ring slot holds */
    uint32_t *seen;    /* gaps that there were when each ring slot was written */
    uint32_t *gaps;
    uint32_t *row_of_slot;      /* the row of `history` that a ring slot has. NULL: slot s has row s */
    pb_kvcache_priv_undo *undo; /* the last steps, the oldest at `undo_first`, in a circle */
    float *history;             /* by row */
    uint32_t gap_count;
    uint32_t summed;      /* ring slots from 0 on whose sums `prefix` holds. 0: of none */
    uint32_t summed_seen; /* gaps that there were when it was written */
    size_t summed_length; /* indices that it holds */
    uint32_t undo_first;
    uint32_t num_undo;
};

/* The weights of a ring slot. */
static inline float *pb_kvcache_priv_slot(const pb_kvcache *policy, uint32_t slot)
{
    const size_t row = policy->row_of_slot == NULL ? slot : policy->row_of_slot[slot];
    return policy->history + row * policy->shape.capacity;
}

/* What a step is about to overwrite goes on the list of the last steps. max_rollback is not 0. `observed`: the policy
 * will take in attention. */
void pb_kvcache_priv_remember(pb_kvcache *policy, bool observed);

/* Nothing can be taken back from here on. */
void pb_kvcache_priv_forget_steps(pb_kvcache *policy);

/* Copy the list of the last steps. The rest has been copied. */
void pb_kvcache_priv_copy_steps(pb_kvcache *policy, const pb_kvcache *source);

/* ---- The ring of SnapKV: ring.c ---- */

void pb_kvcache_priv_ring_clear(pb_kvcache *policy);

/* A step's weights go to the slot at the cursor, which moves on. */
void pb_kvcache_priv_ring_observe(pb_kvcache *policy, const float *attn);

/* scores[i] = 0.0 + slot 0's weight of index i + slot 1's + ..., for every kept index. */
void pb_kvcache_priv_ring_sums(pb_kvcache *policy);
double pb_kvcache_priv_ring_score(const pb_kvcache *policy, size_t index);

/* Remove the chosen ascending indices, of which there is at least one. kept_count is still the old one. Writes to
 * `scores`. */
void pb_kvcache_priv_ring_forget(pb_kvcache *policy, const uint32_t *chosen, size_t count);

/* The weights that a slot holds from an index on, and how many of them lie side by side: 0 where it holds none. */
const float *pb_kvcache_priv_ring_run(const pb_kvcache *policy, uint32_t slot, size_t index, size_t *run);

/* The elements of a row or of the prefix that holds `length` indices, written when there were `seen` gaps: with those
 * that count no more. */
size_t pb_kvcache_priv_ring_elements(const pb_kvcache *policy, size_t length, uint32_t seen);

/* Take over the ring of a cache of the same shape, all but the cursor. */
void pb_kvcache_priv_ring_copy(pb_kvcache *policy, const pb_kvcache *source);

/* ---- Shapes and calls ---- */

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

/*
 * The state of several caches as bytes. `peak` is NULL for one cache, and a stack's for its layers. Writing changes no
 * cache. Loading changes all of them and the peak, or nothing.
 */
size_t pb_kvcache_priv_state_bytes(pb_kvcache *const *caches, uint32_t num_caches);
pb_kvcache_status pb_kvcache_priv_save(pb_kvcache *const *caches, uint32_t num_caches, const size_t *peak, void *data,
                                       size_t capacity);
pb_kvcache_status pb_kvcache_priv_load(pb_kvcache *const *caches, uint32_t num_caches, size_t *peak, const void *data,
                                       size_t size);

/* What an eviction is asked beside its budget: PB_KVCACHE_ERROR_PLAN_MULTIPLE, _OPTION. */
pb_kvcache_status pb_kvcache_priv_rows_asked_ok(uint32_t multiple_of, pb_kvcache_row_set which);

/* Drop `count` positions, as many as pb_kvcache_evict_rows_count says, and tell the rows that leave or stay. `rows` may
 * be NULL, and `victims` where nothing is dropped. */
void pb_kvcache_priv_drop(pb_kvcache *policy, size_t count, uint32_t *victims, pb_kvcache_row_set which,
                          uint32_t *rows);

/* Close the gaps that the chosen ascending indices leave in an array of `n` elements of `size` bytes. */
void pb_kvcache_priv_close_gaps(void *array, size_t n, size_t size, const uint32_t *chosen, size_t count);

#endif
