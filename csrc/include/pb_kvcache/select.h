/*
 * Prefill selection: which positions of a prompt each KV head keeps (arXiv 2404.14469, arXiv 2406.02069).
 *
 * Once the prompt is processed, its last `window` queries have looked at every position before them. That attention,
 * averaged over the window and over the query heads that share a KV head, is the score of a position. A position may
 * also have a weight, by which its score is multiplied. Scores are pooled over neighbours. The best positions stay, and
 * with them the last `protect` (the paper's rule: the window) and the first `sinks` (the paper's: none).
 *
 *     pb_kvcache_select_workspace_size(&attn, &params, 0, attn.num_kv_heads, &size);
 *     pb_kvcache_select(&attn, &params, budgets, 0, attn.num_kv_heads, workspace, size, indices, stride, capacity);
 *     pb_kvcache_compact(&keys, 0, keys.num_heads, indices, stride, budgets);        (compact.h)
 *
 * Stateless functions over the caller's arrays. Nothing is allocated: scratch memory is the `workspace`, of any
 * alignment, whose size a function tells. Work is divided among threads by KV heads: each thread calls with its own
 * range first_head .. end_head - 1 and its own workspace, and with the same output array. Row h of an output belongs to
 * KV head h whatever the range. Inputs are read only. An output may overlap neither an input nor the workspace.
 *
 * Of row w the n - window + w + 1 columns that the query may see are read, and of probabilities no more than the first
 * n - protect. A padded sequence is the part of it that is valid: `data` moved to its first column and a smaller n.
 *
 * An array may be NULL where nothing of it is read or written: no heads, no scores, every count 0.
 *
 * Arithmetic: float, in an order that is part of the definition, so that the bits are the same everywhere.
 *   logits   t = x * scale, e = exp(t - max t), p = e * (1 / sum e). exp is within 1 ulp and 0 below -87.25. The sum is
 *            made of 64 interleaved sums in float per 1024 columns, folded in halves, and of these in double. A logit
 *            of -inf is a position that the query does not see, p = 0.
 *   score    the p of a position added over the window, oldest query first, divided by the window, also where not every
 *            query of the window sees the position. Over the query heads of the group added in order and, for the mean,
 *            divided by their number, or the maximum over them.
 *   weight   the score times the weight, in float. Without weights no product is made.
 */
#ifndef PB_KVCACHE_SELECT_H
#define PB_KVCACHE_SELECT_H

#include <stddef.h>
#include <stdint.h>

#include "pb_kvcache/api.h"
#include "pb_kvcache/status.h"

PB_KVCACHE_EXTERN_C_BEGIN

/* cdef: begin */
typedef enum pb_kvcache_dtype {
    PB_KVCACHE_FLOAT32 = 0,
    PB_KVCACHE_FLOAT16 = 1, /* IEEE 754 binary16 */
    PB_KVCACHE_BFLOAT16 = 2 /* the upper half of a binary32 */
} pb_kvcache_dtype;

/* How the query heads of a group become one score. */
typedef enum pb_kvcache_reduce {
    PB_KVCACHE_REDUCE_MEAN = 0,
    PB_KVCACHE_REDUCE_MAX = 1,
    PB_KVCACHE_REDUCE_SUM = 2
} pb_kvcache_reduce;

/* How the scores of neighbours become one. */
typedef enum pb_kvcache_pooling {
    PB_KVCACHE_POOL_MAX = 0,
    PB_KVCACHE_POOL_AVERAGE = 1
} pb_kvcache_pooling;

/* What an average divides by at the ends of a row, where neighbours are missing. A maximum is the same with both. */
typedef enum pb_kvcache_edge {
    PB_KVCACHE_EDGE_COUNT = 0, /* the number of neighbours that there are */
    PB_KVCACHE_EDGE_KERNEL = 1 /* the kernel: what lies beyond the ends counts as zeros */
} pb_kvcache_edge;

/*
 * What is done about numbers that are none. _LOWEST: a NaN or +inf (logits: also after scaling) is left out of its
 * query's softmax. A position for which any query of the group has one gets the score -inf, is left out of its
 * neighbours' pools and ranks below everything else. A query that sees nothing adds nothing. In scores every NaN and
 * infinity counts as -inf.
 */
typedef enum pb_kvcache_nan {
    PB_KVCACHE_NAN_REFUSE = 0,
    PB_KVCACHE_NAN_LOWEST = 1
} pb_kvcache_nan;

/*
 * The attention of the last `window` queries of a prompt of n positions, by query head: element (h, w, i) is at
 * data + h * head_stride + w * row_stride + i and says how much query n - window + w of head h looks at position i.
 * Query heads h * g .. h * g + g - 1 belong to KV head h, g = num_q_heads / num_kv_heads.
 */
typedef struct pb_kvcache_attention {
    const void *data; /* aligned for its elements */
    pb_kvcache_dtype dtype;
    int logits;          /* 0: probabilities, >= 0. Else raw products, which are scaled, masked and softmaxed here */
    float scale;         /* what logits are multiplied by, > 0 and finite; not read for probabilities */
    size_t num_q_heads;  /* a multiple of num_kv_heads */
    size_t num_kv_heads; /* > 0 */
    size_t window;       /* 0 < window <= n */
    size_t n;            /* at most 2^32 - 1 */
    ptrdiff_t head_stride; /* in elements; any */
    ptrdiff_t row_stride;  /* in elements; any */
} pb_kvcache_attention;

/*
 * How attention is scored, scores are weighed and pooled, and what stays whatever its score. The rule of the paper:
 * protect = window, sinks = 0, weights = NULL.
 *
 * Weights: row h of KV head h starts at weights + h * weights_stride. Its first n - protect floats are read, one for
 * each scored position; so a row of n, one for each position, does as well. Finite and >= 0.
 */
typedef struct pb_kvcache_select_params {
    pb_kvcache_reduce reduce;   /* how the query heads of a group become one score */
    pb_kvcache_pooling pooling; /* how the scores of neighbours become one */
    size_t kernel;              /* neighbours pooled, the position itself included; odd. 1: none */
    pb_kvcache_edge edge;       /* what an average divides by at the ends */
    pb_kvcache_nan nan;         /* what is done about numbers that are none */
    size_t protect;             /* last positions that are always kept and have no score: 0 < protect < n */
    size_t sinks;               /* first positions that are always kept. Their scores are pooled like others */
    const float *weights;       /* what scores are multiplied by before they are pooled. NULL: nothing */
    size_t weights_stride;      /* floats from row to row */
} pb_kvcache_select_params;

/*
 * Bytes of scratch that pb_kvcache_window_scores needs.
 *
 *   attn                  the attention; its values are not read
 *   first_head, end_head  the range of KV heads, end_head excluded
 *   size                  becomes the number of bytes
 *
 * PB_KVCACHE_ERROR_NULL, _OPTION, _SCALE, _WINDOW, _TOO_LARGE, _HEADS, _HEAD_RANGE, _ALIGNMENT.
 */
PB_KVCACHE_API pb_kvcache_status pb_kvcache_window_scores_workspace_size(const pb_kvcache_attention *attn,
                                                                         size_t first_head, size_t end_head,
                                                                         size_t *size);

/*
 * Scores of the n - protect positions before the protected ones, for each KV head of the range.
 *
 *   attn                  the attention, read only
 *   reduce                how the query heads of a group become one score
 *   nan                   what is done about numbers that are none
 *   protect               the last positions, which get no score: 0 < protect < n. The paper's rule: the window
 *   first_head, end_head  the range of KV heads, end_head excluded
 *   workspace             scratch of workspace_size bytes, at least what the function above says
 *   scores                row h starts at scores + h * scores_stride and gets n - protect floats
 *   scores_stride         floats from row to row, at least n - protect
 *   capacity              floats in the whole array
 *
 * The errors of the function above, _PROTECT, _WORKSPACE, _STRIDE, _CAPACITY, _OVERLAP. _ATTN_VALUE for a probability
 * that is negative, or not finite under _NAN_REFUSE. _LOGIT for NaN or +inf, and _MASKED for a query that sees nothing,
 * both under _NAN_REFUSE. _SCORE where a score overflows.
 */
PB_KVCACHE_API pb_kvcache_status pb_kvcache_window_scores(const pb_kvcache_attention *attn, pb_kvcache_reduce reduce,
                                                          pb_kvcache_nan nan, size_t protect, size_t first_head,
                                                          size_t end_head, void *workspace, size_t workspace_size,
                                                          float *scores, size_t scores_stride, size_t capacity);

/*
 * Bytes of scratch that pb_kvcache_pool_scores needs: 0 for the maximum.
 *
 *   n        scores in a row
 *   pooling  maximum or average
 *   kernel   neighbours pooled, the position itself included; odd
 *   size     becomes the number of bytes
 *
 * PB_KVCACHE_ERROR_NULL, _POOL_KERNEL, _OPTION, _TOO_LARGE.
 */
PB_KVCACHE_API pb_kvcache_status pb_kvcache_pool_scores_workspace_size(size_t n, pb_kvcache_pooling pooling,
                                                                       size_t kernel, size_t *size);

/*
 * Pool each row of scores over the neighbours i-(kernel-1)/2 .. i+(kernel-1)/2, clamped at both ends. The average's sum
 * is made in double of blocks of 1, 2, 4, ... neighbours, from the left, that make up the kernel (itself clamped to
 * 2n - 1), a block of 2w being the sum of two of w. It is divided by how many neighbours there are, or under
 * PB_KVCACHE_EDGE_KERNEL by the kernel (not clamped), then rounded to float. What _NAN_LOWEST leaves out counts in
 * neither number.
 *
 *   scores           row h starts at scores + h * stride, read only
 *   stride           floats from row to row
 *   num_heads        rows
 *   n                scores in a row
 *   pooling, kernel  as above
 *   edge             what an average divides by at the ends. Checked for a maximum too, and then without effect
 *   nan              what is done about numbers that are none
 *   workspace        scratch of workspace_size bytes, at least what the function above says. NULL where that is 0
 *   pooled           row h starts at pooled + h * pooled_stride and gets n floats
 *   pooled_stride    floats from row to row, at least n
 *   capacity         floats in the whole array
 *
 * PB_KVCACHE_ERROR_NULL, _POOL_KERNEL, _OPTION, _TOO_LARGE, _WORKSPACE, _ALIGNMENT, _STRIDE, _CAPACITY, _OVERLAP.
 * _SCORE for a NaN or infinity under _NAN_REFUSE.
 */
PB_KVCACHE_API pb_kvcache_status pb_kvcache_pool_scores(const float *scores, size_t stride, size_t num_heads, size_t n,
                                                        pb_kvcache_pooling pooling, size_t kernel, pb_kvcache_edge edge,
                                                        pb_kvcache_nan nan, void *workspace, size_t workspace_size,
                                                        float *pooled, size_t pooled_stride, size_t capacity);

/*
 * Indices of the highest scores of each row, ascending. The lower index wins a tie. O(n). -0.0 equals 0.0.
 *
 *   scores          row h starts at scores + h * stride, read only
 *   stride          floats from row to row
 *   num_heads       rows
 *   n               scores in a row, at most 2^32 - 1
 *   counts          how many of each row, num_heads numbers of at most n
 *   nan             what is done about numbers that are none
 *   indices         row h starts at indices + h * indices_stride and gets counts[h] indices
 *   indices_stride  elements from row to row, at least the largest count
 *   capacity        elements in the whole array
 *
 * PB_KVCACHE_ERROR_NULL, _OPTION, _TOO_LARGE, _ALIGNMENT, _STRIDE, _CAPACITY, _OVERLAP. _COUNT for a count above n.
 * _SCORE for a NaN or infinity under _NAN_REFUSE.
 */
PB_KVCACHE_API pb_kvcache_status pb_kvcache_select_top(const float *scores, size_t stride, size_t num_heads, size_t n,
                                                       const uint32_t *counts, pb_kvcache_nan nan, uint32_t *indices,
                                                       size_t indices_stride, size_t capacity);

/*
 * Bytes of scratch that pb_kvcache_select_from_scores needs.
 *
 *   params  everything but reduce and sinks is read. Whether there are weights changes the size, their values do not
 *   n       positions of the prompt, at most 2^32 - 1
 *   size    becomes the number of bytes
 *
 * PB_KVCACHE_ERROR_NULL, _PROTECT, _OPTION, _POOL_KERNEL, _TOO_LARGE.
 */
PB_KVCACHE_API pb_kvcache_status pb_kvcache_select_from_scores_workspace_size(const pb_kvcache_select_params *params,
                                                                              size_t n, size_t *size);

/*
 * What each head keeps, by scores that are there already: the scores are weighed and pooled, and the
 * budgets[h] - protect - sinks best positions, the sinks and the protected ones stay. Where budgets[h] >= n that is
 * every position, and the rows of scores and weights are not read.
 *
 *   scores          row h starts at scores + h * stride, n - protect floats, read only
 *   stride          floats from row to row
 *   num_heads       rows
 *   n               positions of the prompt, at most 2^32 - 1
 *   params          everything but reduce is read
 *   budgets         positions kept of each row, num_heads numbers, each at least protect + sinks
 *   workspace       scratch of workspace_size bytes, at least what the function above says
 *   indices         row h starts at indices + h * indices_stride and gets min(n, budgets[h]) ascending positions
 *   indices_stride  elements from row to row, at least the most that a row gets
 *   capacity        elements in the whole array
 *
 * The errors of the function above, _WORKSPACE, _ALIGNMENT, _STRIDE, _CAPACITY, _OVERLAP. _BUDGET_WINDOW for a budget
 * below protect + sinks. _SCORE for a NaN or infinity under _NAN_REFUSE, and for a product that overflows.
 * _SELECT_WEIGHT for a weight that is negative or not finite.
 */
PB_KVCACHE_API pb_kvcache_status pb_kvcache_select_from_scores(const float *scores, size_t stride, size_t num_heads,
                                                               size_t n, const pb_kvcache_select_params *params,
                                                               const uint32_t *budgets, void *workspace,
                                                               size_t workspace_size, uint32_t *indices,
                                                               size_t indices_stride, size_t capacity);

/*
 * Bytes of scratch that pb_kvcache_select needs.
 *
 *   attn                  the attention; its values are not read
 *   params                how it is scored, weighed and pooled
 *   first_head, end_head  the range of KV heads, end_head excluded
 *   size                  becomes the number of bytes
 *
 * The errors of pb_kvcache_window_scores_workspace_size, _PROTECT, _POOL_KERNEL.
 */
PB_KVCACHE_API pb_kvcache_status pb_kvcache_select_workspace_size(const pb_kvcache_attention *attn,
                                                                  const pb_kvcache_select_params *params,
                                                                  size_t first_head, size_t end_head, size_t *size);

/*
 * The whole chain: pb_kvcache_window_scores, then pb_kvcache_select_from_scores, for each KV head of the range. Where
 * budgets[h] >= n every position is kept, and the attention of the head is not read.
 *
 *   attn                  the attention, read only
 *   params                how it is scored, weighed and pooled
 *   budgets               positions kept of each head, num_kv_heads numbers, each at least protect + sinks
 *   first_head, end_head  the range of KV heads, end_head excluded
 *   workspace             scratch of workspace_size bytes, at least what the function above says
 *   indices               row h starts at indices + h * indices_stride and gets min(n, budgets[h]) ascending positions
 *   indices_stride        elements from row to row, at least the most that a row gets
 *   capacity              elements in the whole array
 *
 * The errors of pb_kvcache_select_workspace_size, pb_kvcache_window_scores and pb_kvcache_select_from_scores.
 */
PB_KVCACHE_API pb_kvcache_status pb_kvcache_select(const pb_kvcache_attention *attn,
                                                   const pb_kvcache_select_params *params, const uint32_t *budgets,
                                                   size_t first_head, size_t end_head, void *workspace,
                                                   size_t workspace_size, uint32_t *indices, size_t indices_stride,
                                                   size_t capacity);

/*
 * pb_kvcache_select for all KV heads of a layer, whose budgets may differ, without gaps: head h keeps the positions
 * indices[offsets[h]] .. indices[offsets[h + 1] - 1], ascending. pb_kvcache_compact_ragged (compact.h) takes both. One
 * call a layer serves a model whose heads have budgets of their own. Threads divide the layers.
 *
 *   attn, params, budgets  as for pb_kvcache_select
 *   workspace              scratch of workspace_size bytes, at least what pb_kvcache_select_workspace_size says of all heads
 *   indices                gets the sum of min(n, budgets[h]) positions
 *   capacity               elements in the whole array
 *   offsets                gets num_kv_heads + 1 numbers: where each head begins in `indices`, and the end of the last
 *
 * The errors of pb_kvcache_select. On an error neither array has changed.
 */
PB_KVCACHE_API pb_kvcache_status pb_kvcache_select_ragged(const pb_kvcache_attention *attn,
                                                          const pb_kvcache_select_params *params,
                                                          const uint32_t *budgets, void *workspace,
                                                          size_t workspace_size, uint32_t *indices, size_t capacity,
                                                          size_t *offsets);
/* cdef: end */

PB_KVCACHE_EXTERN_C_END

#endif
