/*
 * Caches whose rows lie in slots in any order, held at their budgets: one call a decode step for all of them.
 *
 * Keys carry their rotation with them, so attention does not need rows in order of position, and an engine need not
 * close a gap. A cache that keeps c positions has their rows in its slots 0 .. c - 1. The next token's row goes to slot
 * c. Once its budget is full a victim leaves with every step, and the newest row moves to the slot that the victim
 * leaves: one row a cache and step. Each cache is SnapKV, bit for bit, and knows which slot has which position. So
 * weights come as attention makes them, by slot.
 *
 * A model has a cache for each sequence and KV head of a layer, for example: cache s * heads + h. Their budgets may
 * differ, and so may their positions.
 *
 *     const pb_kvcache_hold_params params = PB_KVCACHE_HOLD_PARAMS_DEFAULT(6);    // 2 sequences, 3 heads
 *     pb_kvcache_hold *hold = pb_kvcache_hold_create(&params, budgets, NULL);
 *     pb_kvcache_hold_seed(hold, cache, positions, count, attn, rows);            // each; row i is in slot i
 *     ...
 *     // write the new token's row of each cache to its slot kept_count, attend over the slots 0 .. kept_count
 *     pb_kvcache_hold_step(hold, pos, NULL, weights, stride, 6 * stride, moves, 6, &count);
 *     pb_kvcache_hold_move(keys, ..., moves, count);                              // and the values
 *     pb_kvcache_hold_destroy(hold);
 *
 * Memory, all of it at creation: what the caches take (snapkv.h), each rounded up to 8 bytes. 4 bytes for each position
 * that a cache can hold, and for each that the largest can hold. Two pointers a cache, and about 80 bytes.
 */
#ifndef PB_KVCACHE_HOLD_H
#define PB_KVCACHE_HOLD_H

#include <stddef.h>
#include <stdint.h>

#include "pb_kvcache/policy.h"

PB_KVCACHE_EXTERN_C_BEGIN

/* cdef: begin */
/* The most caches together. It bounds the time that a check takes. */
#define PB_KVCACHE_HOLD_MAX_CACHES 1048576

/* What all caches have in common. */
typedef struct pb_kvcache_hold_params {
    uint32_t num_caches;    /* > 0, at most PB_KVCACHE_HOLD_MAX_CACHES */
    uint32_t recent_window; /* newest positions of each cache, never dropped on score, < its budget */
    uint32_t obs_window;    /* observed decode steps that make the score, > 0 */
    uint32_t pool_kernel;   /* kept neighbours pooled, odd */
} pb_kvcache_hold_params;

/* A row to copy within a cache. */
typedef struct pb_kvcache_slot_move {
    uint32_t cache;
    uint32_t from; /* a slot: the newest row's */
    uint32_t to;   /* a slot: the victim's */
} pb_kvcache_slot_move;

/* The caches and their slots. It must not be used by two threads at once. */
typedef struct pb_kvcache_hold pb_kvcache_hold;

/*
 * Why would creation refuse? PB_KVCACHE_OK where only memory can stop it.
 *
 *   params   the parameters
 *   budgets  num_caches numbers: what each cache keeps, greater than recent_window
 *   cache    NULL, or becomes the first cache that breaks the rule: 0 for a rule about all of them, num_caches where
 *            none is broken
 *
 * _NULL (params, budgets), _NUM_CACHES, _TOO_LARGE (num_caches), then for the first cache that has one, in
 * this order: _BUDGET, _OBS_WINDOW, _RECENT_WINDOW, _POOL_KERNEL, _TOO_LARGE. Last _TOO_LARGE for all together.
 */
PB_KVCACHE_API pb_kvcache_status pb_kvcache_hold_check(const pb_kvcache_hold_params *params, const uint32_t *budgets,
                                                       uint32_t *cache);

/*
 * New caches in one allocation, each holding position 0 in slot 0.
 *
 *   params, budgets  as above, read during the call only
 *   allocator        where memory comes from; NULL means malloc and free
 *
 * Returns NULL where the parameters are refused or memory is short. Then nothing is leaked.
 */
PB_KVCACHE_API pb_kvcache_hold *pb_kvcache_hold_create(const pb_kvcache_hold_params *params, const uint32_t *budgets,
                                                       const pb_allocator *allocator);

/* Give everything back. NULL is fine. */
PB_KVCACHE_API void pb_kvcache_hold_destroy(pb_kvcache_hold *hold);

/*
 * Start one cache from a prompt, as pb_kvcache_seed does. The row of positions[i] is in slot i.
 *
 *   cache                         which one
 *   positions, count, attn, rows  as for pb_kvcache_seed. `count` is at most the cache's budget
 *
 * PB_KVCACHE_ERROR_CACHE where there is no such cache. _FULL where count is above the budget. The statuses of
 * pb_kvcache_seed: nothing has changed.
 */
PB_KVCACHE_API pb_kvcache_status pb_kvcache_hold_seed(pb_kvcache_hold *hold, uint32_t cache, const uint32_t *positions,
                                                      size_t count, const float *attn, size_t rows);

/*
 * One token was decoded: every cache takes in its attention, the token joins what the cache keeps, and where that is
 * above its budget a victim leaves. All caches are checked before anything changes.
 *
 *   pos               num_caches positions: the token's in each cache, above every kept one
 *   joins             NULL, or num_caches flags. Where one is 0 the token is none of this cache's (padding, a sequence
 *                     that has ended): the cache stays as it is, its position and its weights are not read
 *   weights           a row for each cache: weights[cache * weights_stride + slot] is what the row in `slot` received
 *                     from the token, the model's own attention, not renormalised. The slots of kept positions are
 *                     read, the token's own is not. NULL: the step was not observed
 *   weights_stride    from one cache's weights to the next one's
 *   weights_capacity  how many `weights` holds, at least (num_caches - 1) * weights_stride + the most kept by one cache
 *   moves             gets the rows to copy, at most one a cache, caches ascending. The victim may be the token itself
 *                     (recent_window 0): then nothing moves
 *   moves_capacity    how many `moves` has room for, at least num_caches
 *   num_moves         gets how many there are
 *
 * PB_KVCACHE_ERROR_NULL, _CAPACITY (weights, moves), _ALIGNMENT, _STRIDE, _TOO_LARGE (weights), _OVERLAP (moves and
 * num_moves), _POSITION, _ATTN_VALUE: nothing has changed.
 */
PB_KVCACHE_API pb_kvcache_status pb_kvcache_hold_step(pb_kvcache_hold *hold, const uint32_t *pos, const uint8_t *joins,
                                                      const float *weights, size_t weights_stride,
                                                      size_t weights_capacity, pb_kvcache_slot_move *moves,
                                                      size_t moves_capacity, size_t *num_moves);

/*
 * What would hold_step answer about its positions and weights, and which cache refuses? Nothing changes.
 *
 *   pos, joins, weights, weights_stride, weights_capacity  as above
 *   cache  NULL, or becomes the first cache that refuses, 0 for an array as a whole, num_caches where none does
 *
 * The statuses of hold_step.
 */
PB_KVCACHE_API pb_kvcache_status pb_kvcache_hold_step_check(const pb_kvcache_hold *hold, const uint32_t *pos,
                                                            const uint8_t *joins, const float *weights,
                                                            size_t weights_stride, size_t weights_capacity,
                                                            uint32_t *cache);

/*
 * Do what a step's moves ask for, in the rows of K or of V.
 *
 *   rows        row `slot` of cache c is the row_bytes bytes from rows + (offsets[c] + slot) * row_stride
 *   offsets     num_caches rows: where each cache's slot 0 is. Caches of one room each: c * room
 *   num_caches  how many there are
 *   row_stride  bytes from one row to the next one
 *   row_bytes   bytes of a row
 *   capacity    how many bytes `rows` holds
 *   moves       what a step gave, for example; done in that order
 *   num_moves   how many there are
 *
 * PB_KVCACHE_ERROR_NULL. _CACHE where a move is of none of the caches, _CAPACITY where it is not within `rows`: nothing
 * has changed.
 */
PB_KVCACHE_API pb_kvcache_status pb_kvcache_hold_move(void *rows, const uint64_t *offsets, uint32_t num_caches,
                                                      size_t row_stride, size_t row_bytes, size_t capacity,
                                                      const pb_kvcache_slot_move *moves, size_t num_moves);

/* How many caches there are; 0 for NULL. */
PB_KVCACHE_API uint32_t pb_kvcache_hold_num_caches(const pb_kvcache_hold *hold);

/*
 * One cache, to be read with the functions of policy.h while the caches live. It belongs to them.
 *
 *   cache  which one
 *
 * Returns NULL where there is no such cache.
 */
PB_KVCACHE_API const pb_kvcache *pb_kvcache_hold_cache(const pb_kvcache_hold *hold, uint32_t cache);

/*
 * Copy out where the rows of one cache are.
 *
 *   cache     which one
 *   slots     gets the slot of each kept position, positions ascending: beside what pb_kvcache_kept gives
 *   capacity  how many it has room for, at least the kept count
 *
 * PB_KVCACHE_ERROR_NULL, _CACHE where there is no such cache, _CAPACITY.
 */
PB_KVCACHE_API pb_kvcache_status pb_kvcache_hold_slots(const pb_kvcache_hold *hold, uint32_t cache, uint32_t *slots,
                                                       size_t capacity);

/* Bytes that the caches took from their allocator; 0 for NULL. */
PB_KVCACHE_API size_t pb_kvcache_hold_memory_bytes(const pb_kvcache_hold *hold);

/*
 * Make one cache hold and remember exactly what another one does, its slots included, without allocating: a beam that
 * goes on as another, for example.
 *
 *   cache         which one changes
 *   source        the same object or another one
 *   source_cache  one of its caches, with the same parameters and budget
 *
 * PB_KVCACHE_ERROR_NULL, _CACHE where there is no such cache. _MISMATCH where the two differ: nothing has changed.
 */
PB_KVCACHE_API pb_kvcache_status pb_kvcache_hold_copy(pb_kvcache_hold *hold, uint32_t cache,
                                                      const pb_kvcache_hold *source, uint32_t source_cache);
/* cdef: end */

#define PB_KVCACHE_HOLD_PARAMS_DEFAULT(num_caches) { (num_caches), 32u, 16u, 7u }

PB_KVCACHE_EXTERN_C_END

#endif
