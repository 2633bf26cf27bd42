/*
 * The attention of one new token, reduced to what a policy is shown: from queries and keys to one weight a slot.
 *
 * Attention functions give their output and not their weights. A policy that watches a decode step needs the weights. So
 * they are worked out once more here, in one call for all caches of a layer: one for each sequence and KV head, for
 * example, each with its own number of rows in one buffer.
 *
 *     const pb_kvcache_decode_attention attn = {.queries = q, .keys = k, .dtype = PB_KVCACHE_FLOAT32, .num_caches = 6,
 *                                               .group = 3, .head_dim = 64, .key_stride = 64, .key_capacity = size,
 *                                               .offsets = offsets, .counts = counts, .scale = 0.125f};
 *     pb_kvcache_decode_weights_workspace_size(&attn, &size);
 *     pb_kvcache_decode_weights(&attn, workspace, size, weights, stride, 6 * stride, NULL);
 *     pb_kvcache_hold_step(hold, pos, NULL, weights, stride, 6 * stride, moves, 6, &count);      (hold.h)
 *
 * Stateless, like the functions of select.h. Nothing is allocated: scratch memory is the `workspace`, of any alignment.
 *
 * Arithmetic: float, in an order that is part of the definition, so that the bits are the same everywhere.
 *   logit    the products of a query's and a key's elements in 16 interleaved sums, folded in halves, times scale.
 *            softcap c > 0: c * tanh(logit / c), tanh x being (1 - e) / (1 + e) with e = exp(-2 |x|), with x's sign
 *   softmax  as of logits in select.h, with exp and its sums, a query head's sink added to the sum at its end
 *   weight   the p of a slot added over the query heads of the group in order and, for the mean, divided by their number,
 *            or the maximum over them
 */
#ifndef PB_KVCACHE_ATTENTION_H
#define PB_KVCACHE_ATTENTION_H

#include <stddef.h>
#include <stdint.h>

#include "pb_kvcache/select.h"

PB_KVCACHE_EXTERN_C_BEGIN

/* cdef: begin */
/* What one new token's query heads meet: query head g of cache c is at queries + (c * group + g) * head_dim, row `slot`
 * of cache c at keys + (offsets[c] + slot) * key_stride, both in elements. */
typedef struct pb_kvcache_decode_attention {
    const void *queries;     /* aligned for its elements */
    const void *keys;        /* aligned for its elements */
    pb_kvcache_dtype dtype;  /* of both */
    pb_kvcache_reduce reduce; /* how the query heads of a group become one weight */
    size_t num_caches;       /* > 0 */
    size_t group;            /* query heads of a cache, > 0 */
    size_t head_dim;         /* > 0 */
    size_t key_stride;       /* from one row to the next one, at least head_dim */
    size_t key_capacity;     /* elements in `keys` */
    const uint64_t *offsets; /* num_caches rows: where each cache's slot 0 is */
    const uint32_t *counts;  /* num_caches numbers: slots that each cache's queries see, the new token's own included */
    float scale;             /* what products are multiplied by, > 0 and finite */
    float softcap;           /* 0: none. Else > 0 and finite */
    const float *sinks;      /* NULL, or num_caches * group finite logits that take part in a softmax and have no slot */
} pb_kvcache_decode_attention;

/*
 * Bytes of scratch that pb_kvcache_decode_weights needs.
 *
 *   attn  queries, keys, offsets and sinks are not read
 *   size  becomes the number of bytes
 *
 * PB_KVCACHE_ERROR_NULL, _HEADS (num_caches, group or head_dim 0), _ALIGNMENT (counts), _TOO_LARGE.
 */
PB_KVCACHE_API pb_kvcache_status pb_kvcache_decode_weights_workspace_size(const pb_kvcache_decode_attention *attn,
                                                                          size_t *size);

/*
 * The weight that each slot received.
 *
 *   attn                       the queries and keys, read only
 *   workspace, workspace_size  scratch, at least what the function above says
 *   weights                    cache c gets counts[c] floats from weights + c * stride
 *   stride                     floats from cache to cache, at least the largest count
 *   capacity                   floats in the whole array
 *   cache                      NULL, or becomes the first cache whose logits are refused, num_caches where none is. Other
 *                              refusals leave it as it was
 *
 * The errors of the function above, _OPTION, _SCALE (scale, softcap), _ALIGNMENT, _STRIDE, _CAPACITY (keys, weights),
 * _WORKSPACE, _OVERLAP. _LOGIT for a logit or sink that is NaN or infinite. `weights` is then untouched.
 */
PB_KVCACHE_API pb_kvcache_status pb_kvcache_decode_weights(const pb_kvcache_decode_attention *attn, void *workspace,
                                                           size_t workspace_size, float *weights, size_t stride,
                                                           size_t capacity, uint32_t *cache);
/* cdef: end */

PB_KVCACHE_EXTERN_C_END

#endif
