/*
 * Decode-time policies: which positions of one layer's cache stay while tokens are generated.
 *
 * An instance serves one layer of one sequence. It sees attention weights, never keys or values, and tells which
 * positions to drop; the caller moves the tensors. Positions are absolute token indices and are never renumbered.
 *
 *     pb_kvcache_snapkv_params params = PB_KVCACHE_SNAPKV_PARAMS_DEFAULT;
 *     pb_kvcache *cache = pb_kvcache_snapkv.create(&params, NULL, NULL);         // holds position 0
 *     ...
 *     pb_kvcache_snapkv.on_decode_step(cache, pos, attn, attn_len);              // attn over the kept positions
 *     if (pb_kvcache_kept_count(cache) > params.budget)
 *         n = pb_kvcache_snapkv.evict(cache, params.budget, victims, capacity);  // ascending positions
 *     pb_kvcache_snapkv.destroy(cache);
 *
 * Threads: nothing is shared between instances. One instance must not be used by two threads at once.
 */
#ifndef PB_KVCACHE_POLICY_H
#define PB_KVCACHE_POLICY_H

#include <stddef.h>
#include <stdint.h>

#include "pb_kvcache/allocator.h"
#include "pb_kvcache/api.h"
#include "pb_kvcache/status.h"

PB_KVCACHE_EXTERN_C_BEGIN

/* Budgets at which the `decode-4096` trace is usually replayed: a sixteenth, an eighth and a quarter of its length. */
#define PB_KVCACHE_BUDGET_SMALL 256u
#define PB_KVCACHE_BUDGET_MEDIUM 512u
#define PB_KVCACHE_BUDGET_LARGE 1024u

/* cdef: begin */
/* One layer's cache: its kept positions and what its policy remembers of them. */
typedef struct pb_kvcache pb_kvcache;

/* A policy. Every policy of this library is an exported constant of this type. */
typedef struct pb_kvcache_vtable {
    /*
     * A new cache that holds position 0. `params` points to the policy's own parameter struct and NULL means its
     * defaults; `allocator` NULL means malloc and free; `rng` is never read. NULL where the parameters are refused
     * (the policy's `_check` function says why) or memory is short; then nothing is leaked.
     */
    pb_kvcache *(*create)(const void *params, const pb_allocator *allocator, pb_rng *rng);

    /*
     * The token at `pos` was decoded. attn[i] is the weight that the i-th kept position, in ascending order, received
     * from it: the model's own attention, not renormalised, so attn_len is the kept count and the weights are finite
     * and >= 0. `attn` is read during the call only. A NULL `attn` (attn_len is then ignored) means that this step
     * was not observed: what the policy remembers stays as it was. Then `pos`, which must exceed every kept position,
     * joins the kept set.
     * PB_KVCACHE_ERROR_NULL, _POSITION, _ATTN_LEN, _ATTN_VALUE, _FULL: nothing has changed.
     */
    pb_kvcache_status (*on_decode_step)(pb_kvcache *policy, uint32_t pos, const float *attn, size_t attn_len);

    /*
     * Drop positions until min(budget, effective budget) are kept, sparing the protected ones even where that leaves
     * more. Writes the dropped positions, ascending, and returns how many. Where `victims` is too small
     * (capacity < pb_kvcache_evict_count(policy, budget)) or NULL it returns 0 and nothing has changed.
     */
    size_t (*evict)(pb_kvcache *policy, uint32_t budget, uint32_t *victims, size_t capacity);

    /* Bytes that the cache took from its allocator; 0 for NULL. */
    size_t (*memory_bytes)(const pb_kvcache *policy);

    /* Give everything back. NULL is fine. */
    void (*destroy)(pb_kvcache *policy);
} pb_kvcache_vtable;

/* How many positions are kept; 0 for NULL. */
PB_KVCACHE_API size_t pb_kvcache_kept_count(const pb_kvcache *policy);

/*
 * Copy the kept positions, ascending, to `positions`, which has room for `capacity` of them.
 * PB_KVCACHE_ERROR_NULL; PB_KVCACHE_ERROR_CAPACITY below the kept count.
 */
PB_KVCACHE_API pb_kvcache_status pb_kvcache_kept(const pb_kvcache *policy, uint32_t *positions, size_t capacity);

/* 1 where `pos` is kept, else 0 (also for NULL). */
PB_KVCACHE_API int pb_kvcache_contains(const pb_kvcache *policy, uint32_t pos);

/* What the cache evicts down to when it is asked for no less; 0 for NULL. */
PB_KVCACHE_API uint32_t pb_kvcache_effective_budget(const pb_kvcache *policy);

/* The most positions that the cache can hold; 0 for NULL. */
PB_KVCACHE_API uint32_t pb_kvcache_capacity(const pb_kvcache *policy);

/*
 * The policy's own score of a kept position, before pooling; for SnapKV and PyramidKV the sum of its ring history.
 * PB_KVCACHE_ERROR_NULL, _NOT_KEPT; _UNSUPPORTED for a policy without a score.
 */
PB_KVCACHE_API pb_kvcache_status pb_kvcache_window_score(const pb_kvcache *policy, uint32_t pos, double *score);

/* How many positions `evict(policy, budget, ...)` would drop now: the capacity that it needs. 0 for NULL. */
PB_KVCACHE_API size_t pb_kvcache_evict_count(const pb_kvcache *policy, uint32_t budget);

/* Back to a new cache: position 0 kept, nothing remembered. PB_KVCACHE_ERROR_NULL. */
PB_KVCACHE_API pb_kvcache_status pb_kvcache_reset(pb_kvcache *policy);

/*
 * Start from a prompt: the kept set becomes `positions`, `count` of them, strictly ascending (none is allowed, and then
 * there is nothing to observe), and what the policy remembers becomes the `rows` observed steps in `attn`, oldest
 * first, each of `count` weights (row-major, rows * count floats), as if they had been decoded. `attn` NULL with rows
 * 0: nothing observed.
 * PB_KVCACHE_ERROR_NULL, _FULL (count above the capacity), _POSITION, _ATTN_VALUE, _TOO_LARGE: nothing has changed.
 */
PB_KVCACHE_API pb_kvcache_status pb_kvcache_seed(pb_kvcache *policy, const uint32_t *positions, size_t count,
                                                 const float *attn, size_t rows);

/*
 * Make `policy` hold and remember exactly what `source` does, without allocating: for beam search and for prompts that
 * are reused. PB_KVCACHE_ERROR_NULL; PB_KVCACHE_ERROR_MISMATCH unless both have the same policy and parameters.
 */
PB_KVCACHE_API pb_kvcache_status pb_kvcache_copy(pb_kvcache *policy, const pb_kvcache *source);
/* cdef: end */

PB_KVCACHE_EXTERN_C_END

#endif
