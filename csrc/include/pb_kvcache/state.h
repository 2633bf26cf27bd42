/*
 * State: what a cache or a stack holds and remembers, as bytes. For prefixes that are used again, and for sequences
 * that move to another process or machine.
 *
 *     bytes = pb_kvcache_state_bytes(cache);
 *     pb_kvcache_save(cache, data, bytes);
 *     ...
 *     pb_kvcache_load(other, data, bytes);        // of the same policy and parameters. Drops the same victims from now on
 *
 * Equal states give equal bytes, on every machine. Everything is little-endian:
 *
 *   offset  bytes  what
 *        0      8  the letters "pbkvstat"
 *        8      4  version of this layout, 1
 *       12      4  1 for a cache, 2 for a stack
 *       16      8  bytes in all
 *       24      8  the stack's peak of resident positions, 0 for a cache
 *       32      4  caches that follow: 1, or the stack's layers
 *       36      4  0
 *       40         the caches
 *     last      8  checksum of everything before it: FNV-1a of 64 bits over numbers of 4 bytes instead of single ones
 *
 * A cache, of numbers of 4 bytes: its policy (1 snapkv and pyramidkv, 2 sliding_window and streaming_llm, 3 h2o, 4
 * tova, 5 scissorhands), effective budget, capacity, recent window, sinks, obs_window, pool_kernel; the next ring slot,
 * the kept count, the newest positions that no step has weighed (tova); the kept positions; for h2o, tova and
 * scissorhands the scores, as doubles of 8 bytes; for snapkv and pyramidkv the columns of each ring slot, then the
 * slots' weights as floats.
 */
#ifndef PB_KVCACHE_STATE_H
#define PB_KVCACHE_STATE_H

#include <stddef.h>
#include <stdint.h>

#include "pb_kvcache/policy.h"
#include "pb_kvcache/stack.h"

PB_KVCACHE_EXTERN_C_BEGIN

/* cdef: begin */
/* Bytes that pb_kvcache_save writes now; 0 for NULL. They change with what is held. */
PB_KVCACHE_API size_t pb_kvcache_state_bytes(const pb_kvcache *policy);

/*
 * Write what the cache holds and remembers.
 *
 *   data      gets the bytes, at any address
 *   capacity  how many it has room for, at least pb_kvcache_state_bytes
 *
 * PB_KVCACHE_ERROR_NULL, _CAPACITY: nothing is written.
 */
PB_KVCACHE_API pb_kvcache_status pb_kvcache_save(const pb_kvcache *policy, void *data, size_t capacity);

/*
 * Make the cache hold and remember exactly what the saved one did. The bytes may come from anywhere: whatever they are,
 * they are refused or leave the cache in a state that calls could have led to.
 *
 *   data  the bytes, at any address
 *   size  how many, all of them
 *
 * PB_KVCACHE_ERROR_NULL. _STATE where the bytes are no state, damaged, or of another number. _STATE_VERSION where they
 * are of another version. _MISMATCH where they are of a stack, of another policy or of other parameters. Nothing has
 * changed then.
 */
PB_KVCACHE_API pb_kvcache_status pb_kvcache_load(pb_kvcache *policy, const void *data, size_t size);

/* The same for a stack, its peak included. Loading changes all layers or none. */
PB_KVCACHE_API size_t pb_kvcache_stack_state_bytes(const pb_kvcache_stack *stack);
PB_KVCACHE_API pb_kvcache_status pb_kvcache_stack_save(const pb_kvcache_stack *stack, void *data, size_t capacity);
PB_KVCACHE_API pb_kvcache_status pb_kvcache_stack_load(pb_kvcache_stack *stack, const void *data, size_t size);
/* cdef: end */

PB_KVCACHE_EXTERN_C_END

#endif
