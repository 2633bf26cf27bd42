/*
 * Decode-time policies: which positions of one layer's cache stay while tokens are generated.
 *
 * An instance serves one layer (or one KV head of it) of one sequence. It sees attention weights, never keys or values,
 * and tells which positions to drop. The caller moves the tensors. Positions are absolute token indices and are never
 * renumbered. A step of decoding, for any policy of this library:
 *
 *     const pb_kvcache_vtable *policy = &pb_kvcache_snapkv;
 *     pb_kvcache_snapkv_params params = PB_KVCACHE_SNAPKV_PARAMS_DEFAULT;
 *     pb_kvcache *cache = policy->create(&params, NULL, NULL);                    // holds position 0
 *     ...
 *     policy->on_decode_step(cache, pos, attn, pb_kvcache_kept_count(cache));     // attn over the kept positions
 *     count = pb_kvcache_evict_count(cache, UINT32_MAX);                          // over the effective budget?
 *     if (count > 0)                                                              // victims has room for `count`
 *         policy->evict(cache, UINT32_MAX, victims, count);                       // ascending positions
 *     ...
 *     policy->destroy(cache);
 *
 * A budget of UINT32_MAX asks each cache to keep its own effective budget. That is the `budget` of its parameters for
 * every policy but PyramidKV, whose layers keep more or less than the average.
 *
 * Capacity: max(effective budget, budget) + 1 + spare positions. One step fits before an eviction, and `spare` more,
 * for engines that put evictions off or free memory in blocks. An eviction drops what is too much at that time, with
 * the scores of that time.
 *
 * Rows: a caller that moves tensors needs rows, the places that positions have in the kept order. pb_kvcache_evict_rows
 * gives them in the form that pb_kvcache_compact takes.
 *
 * Memory, all of it taken at creation: a fixed part of about 100 bytes (snapkv, pyramidkv: 300 and obs_window * 8), and
 * for each position of the capacity 4 bytes (sliding_window, streaming_llm), 12 (h2o, tova, scissorhands) or
 * obs_window * 4 + 20 (snapkv, pyramidkv).
 *
 * With max_rollback the last steps can be taken back, as speculative decoding needs it. Each costs 20 bytes, and for
 * each position 4 (snapkv, pyramidkv) or 8 (h2o, tova, scissorhands). A ring takes obs_window * 4 more.
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
     * A new cache that holds position 0.
     *
     *   params     the policy's own parameter struct; NULL means its defaults
     *   allocator  where memory comes from; NULL means malloc and free
     *   rng        never read
     *
     * Returns NULL where the parameters are refused (the policy's `_check` function says why) or memory is short. Then
     * nothing is leaked.
     */
    pb_kvcache *(*create)(const void *params, const pb_allocator *allocator, pb_rng *rng);

    /*
     * The token at `pos` was decoded. Its attention is taken in, then `pos` joins the kept set.
     *
     *   pos       the token's position, above every kept one
     *   attn      attn[i] is the weight that the i-th kept position, in ascending order, received from the token: the
     *             model's own attention, finite and >= 0, not renormalised. What the token gave to itself and to
     *             positions that are not kept is left out. Read during the call only. NULL: this step was not observed,
     *             and what the policy remembers stays as it was
     *   attn_len  the kept count; ignored where attn is NULL
     *
     * PB_KVCACHE_ERROR_NULL, _POSITION, _ATTN_LEN, _ATTN_VALUE, _FULL: nothing has changed.
     */
    pb_kvcache_status (*on_decode_step)(pb_kvcache *policy, uint32_t pos, const float *attn, size_t attn_len);

    /*
     * Drop positions until min(budget, effective budget) are kept. Protected ones are spared, even where that leaves
     * more.
     *
     *   budget    how many to keep; UINT32_MAX asks for the effective budget
     *   victims   gets the dropped positions, ascending
     *   capacity  how many `victims` has room for
     *
     * Returns how many were dropped. Where `victims` is NULL or too small, with a capacity below
     * pb_kvcache_evict_count(policy, budget), it returns 0 and nothing has changed.
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
 * Copy the kept positions out.
 *
 *   positions  gets them, ascending
 *   capacity   how many it has room for, at least the kept count
 *
 * PB_KVCACHE_ERROR_NULL, _CAPACITY.
 */
PB_KVCACHE_API pb_kvcache_status pb_kvcache_kept(const pb_kvcache *policy, uint32_t *positions, size_t capacity);

/* 1 where `pos` is kept, else 0 (also for NULL). */
PB_KVCACHE_API int pb_kvcache_contains(const pb_kvcache *policy, uint32_t pos);

/* What the cache evicts down to when it is asked for no less; 0 for NULL. */
PB_KVCACHE_API uint32_t pb_kvcache_effective_budget(const pb_kvcache *policy);

/* The most positions that the cache can hold; 0 for NULL. */
PB_KVCACHE_API uint32_t pb_kvcache_capacity(const pb_kvcache *policy);

/*
 * The policy's own score of a kept position, before pooling. For SnapKV and PyramidKV it is the sum of the position's
 * ring history.
 *
 *   pos    a kept position
 *   score  becomes the score
 *
 * PB_KVCACHE_ERROR_NULL, _NOT_KEPT. _UNSUPPORTED for a policy without a score.
 */
PB_KVCACHE_API pb_kvcache_status pb_kvcache_window_score(const pb_kvcache *policy, uint32_t pos, double *score);

/*
 * How many positions `evict` would drop now: the capacity that it needs. 0 for NULL, and where nothing is to go.
 *
 *   budget  as for `evict`
 */
PB_KVCACHE_API size_t pb_kvcache_evict_count(const pb_kvcache *policy, uint32_t budget);

/* Which rows an eviction tells. A row is an index into the kept positions as they were before it. */
typedef enum pb_kvcache_row_set {
    PB_KVCACHE_ROWS_KEPT = 0,   /* those that stay: what pb_kvcache_compact moves to the front */
    PB_KVCACHE_ROWS_VICTIMS = 1 /* those that leave, in the order of the victims */
} pb_kvcache_row_set;

/*
 * How many positions pb_kvcache_evict_rows would drop now. 0 for NULL, for a multiple_of of 0, and where nothing is to
 * go.
 *
 *   budget, multiple_of  as below
 */
PB_KVCACHE_API size_t pb_kvcache_evict_rows_count(const pb_kvcache *policy, uint32_t budget, uint32_t multiple_of);

/*
 * An eviction for a caller that moves tensors or frees blocks: `evict`, and also which rows leave or stay. It can leave
 * whole blocks.
 *
 *   budget            how many to keep; UINT32_MAX asks for the effective budget
 *   multiple_of       rows of a block, > 0. What is to be kept, min(budget, effective budget), is rounded down to a
 *                     multiple. Where that is less than the protected positions, or nothing although something is to be
 *                     kept, the smallest multiple that is not. 1: keep as many as `evict`
 *   which             the rows that are told
 *   victims           gets the dropped positions, ascending; NULL where none is dropped
 *   victims_capacity  how many it has room for, at least pb_kvcache_evict_rows_count
 *   rows              NULL, or gets the rows, ascending: as many as are kept after the call, or as are dropped. Where
 *                     nothing is dropped all rows stay
 *   rows_capacity     how many it has room for; not read where rows is NULL
 *
 * PB_KVCACHE_ERROR_NULL, _PLAN_MULTIPLE, _OPTION, _CAPACITY, _OVERLAP (of victims and rows): nothing has changed.
 */
PB_KVCACHE_API pb_kvcache_status pb_kvcache_evict_rows(pb_kvcache *policy, uint32_t budget, uint32_t multiple_of,
                                                       pb_kvcache_row_set which, uint32_t *victims,
                                                       size_t victims_capacity, uint32_t *rows, size_t rows_capacity);

/* Back to a new cache: position 0 kept, nothing remembered. PB_KVCACHE_ERROR_NULL. */
PB_KVCACHE_API pb_kvcache_status pb_kvcache_reset(pb_kvcache *policy);

/*
 * Start from a prompt: replace the kept set, and what is remembered of it, as if the observed steps had been decoded.
 *
 *   positions  the positions to hold, strictly ascending; NULL where count is 0
 *   count      how many, at most the capacity. With none there is nothing to observe
 *   attn       the observed steps, oldest first, each of `count` weights: rows * count floats. NULL where rows is 0
 *   rows       how many steps were observed
 *
 * PB_KVCACHE_ERROR_NULL, _FULL (count above the capacity), _POSITION, _ATTN_VALUE, _TOO_LARGE: nothing has changed.
 */
PB_KVCACHE_API pb_kvcache_status pb_kvcache_seed(pb_kvcache *policy, const uint32_t *positions, size_t count,
                                                 const float *attn, size_t rows);

/* How many steps pb_kvcache_rollback can take back now; 0 for NULL. At most max_rollback. An eviction that drops
 * something, a seed, a reset and a load make it 0. */
PB_KVCACHE_API uint32_t pb_kvcache_rollback_count(const pb_kvcache *policy);

/*
 * Take back the last steps, observed or not: everything is as before them, bit for bit.
 *
 *   count  how many, at most pb_kvcache_rollback_count
 *
 * PB_KVCACHE_ERROR_NULL, _ROLLBACK: nothing has changed.
 */
PB_KVCACHE_API pb_kvcache_status pb_kvcache_rollback(pb_kvcache *policy, uint32_t count);

/*
 * Make `policy` hold and remember exactly what `source` does, without allocating: for beam search and for prompts that
 * are reused.
 *
 *   source  a cache of the same policy and parameters
 *
 * PB_KVCACHE_ERROR_NULL. _MISMATCH where the policies or their parameters differ.
 */
PB_KVCACHE_API pb_kvcache_status pb_kvcache_copy(pb_kvcache *policy, const pb_kvcache *source);
/* cdef: end */

/*
 * The public names of a policy: the constant through which it is used, and the function that answers why creation would
 * refuse its parameters, PB_KVCACHE_OK where only memory can stop it.
 *
 *   params  the policy's parameters; NULL means its defaults
 */
#define PB_KVCACHE_POLICY(name)                                      \
    PB_KVCACHE_API extern const pb_kvcache_vtable pb_kvcache_##name; \
    PB_KVCACHE_API pb_kvcache_status pb_kvcache_##name##_check(const pb_kvcache_##name##_params *params);

PB_KVCACHE_EXTERN_C_END

#endif
