/*
 * Merging: the rows that an eviction leaves out join the kept rows whose keys are nearest, instead of being deleted.
 *
 * One KV head a call. Engines that evict a prompt's rows hand in all of them and the kept positions, and store the
 * merged rows with a bias each, which attention adds to the row's scaled logits:
 *
 *     const pb_kvcache_merge head = {.keys = k, .values = v, .row_stride = 64, .n = 4096, .head_dim = 64, .kept = kept,
 *                                    .num_kept = 512, .protect = 32, .queries = q, .num_queries = 96, .window = 32,
 *                                    .scale = 0.125f};
 *     pb_kvcache_merge_workspace_size(&head, &size);
 *     pb_kvcache_merge_nearest(&head, workspace, size, keys, values, 64, 512 * 64, bias, 512);
 *
 * The last `protect` kept rows, the window's, take nothing in. With P = exp(scale * q . k - lse), a position's share of
 * a query's attention, and a its mean over the queries:
 *
 *   1. Each evicted row goes to the kept row whose key is nearest by cosine, the lower of two.
 *   2. A kept row and what it takes in become their means weighted by a, keys and values alike.
 *   3. Its bias is log(sum of a) - log(mean over queries of exp(scale * q . key - lse)), of the new key.
 *
 * A row that takes in less than 1e-30 of the attention stays as it is, with a bias of 0. So do protected rows.
 *
 * Stateless and without allocation: scratch memory is the `workspace`, of any alignment.
 *
 * Arithmetic, in an order that is part of the definition, so that the bits are the same everywhere: products are sums of
 * floats in the order of the elements, exp is that of select.h. A position's shares are added in float in the order of
 * the queries, rows in float and what they weigh in double in the order of the positions. Exponentials of what a query
 * sees are added as in select.h within blocks of 64 positions, and over them in double. Lengths and logarithms are
 * double.
 */
#ifndef PB_KVCACHE_MERGE_H
#define PB_KVCACHE_MERGE_H

#include <stddef.h>
#include <stdint.h>

#include "pb_kvcache/api.h"
#include "pb_kvcache/status.h"

PB_KVCACHE_EXTERN_C_BEGIN

/* cdef: begin */
/* The rows of one KV head, of which some are kept, and queries that weigh them. */
typedef struct pb_kvcache_merge {
    const float *keys;    /* n rows of head_dim floats, after rotation */
    const float *values;  /* n rows of head_dim floats */
    size_t row_stride;    /* floats from one row to the next, of keys and of values, at least head_dim */
    size_t n;             /* positions, > 0 and below 2^32 */
    size_t head_dim;      /* > 0 */
    const uint32_t *kept; /* num_kept ascending positions below n */
    size_t num_kept;      /* 0 or more */
    size_t protect;       /* last kept rows that take nothing in. num_kept or more: every row stays as it is */
    const float *queries; /* num_queries rows of head_dim floats, side by side, after rotation */
    size_t num_queries;   /* > 0 */
    const float *lse;     /* the log of each query's softmax denominator. NULL: over the keys that it sees */
    size_t window;        /* 0: a query sees all n. Else they are runs of the last `window` positions', at most n, a run
                             for each query head of the group: query i of a run sees the first n - window + 1 + i */
    float scale;          /* what products are multiplied by, > 0 and finite */
} pb_kvcache_merge;

/*
 * Bytes of scratch that pb_kvcache_merge_nearest needs. It grows with num_kept * head_dim, with n and num_queries, never
 * with num_kept * n.
 *
 *   merge  its arrays are not read
 *   size   becomes the number of bytes
 *
 * PB_KVCACHE_ERROR_NULL, _HEADS (n, head_dim or num_queries 0), _TOO_LARGE.
 */
PB_KVCACHE_API pb_kvcache_status pb_kvcache_merge_workspace_size(const pb_kvcache_merge *merge, size_t *size);

/*
 * The merged rows of one KV head, and their biases.
 *
 *   merge                      the rows and queries, read only
 *   workspace, workspace_size  scratch, at least what the function above says
 *   keys, values               kept row i gets head_dim floats at keys + i * stride and at values + i * stride
 *   stride                     floats from row to row of both, at least head_dim
 *   capacity                   floats in each of both arrays
 *   bias                       becomes num_kept floats
 *   bias_capacity              floats in `bias`
 *
 * The errors of the function above, _SCALE, _WINDOW, _INDEX (kept), _ALIGNMENT, _STRIDE, _CAPACITY, _WORKSPACE,
 * _OVERLAP. _ROW_VALUE for a key, value, query or lse that is NaN or infinite. _LOGIT for a product or a share that is
 * too large for a float. Outputs are then untouched.
 */
PB_KVCACHE_API pb_kvcache_status pb_kvcache_merge_nearest(const pb_kvcache_merge *merge, void *workspace,
                                                          size_t workspace_size, float *keys, float *values,
                                                          size_t stride, size_t capacity, float *bias,
                                                          size_t bias_capacity);
/* cdef: end */

PB_KVCACHE_EXTERN_C_END

#endif
