/* One layer's share of a pyramid: how many positions each layer of a model keeps. PyramidKV, arXiv 2406.02069. */
#ifndef PB_KVCACHE_BUDGET_H
#define PB_KVCACHE_BUDGET_H

#include <stddef.h>
#include <stdint.h>

#include "pb_kvcache/api.h"
#include "pb_kvcache/status.h"

PB_KVCACHE_EXTERN_C_BEGIN

/* cdef: begin */
/*
 * One layer's share: an arithmetic sequence whose mean is `budget`, floored once,
 *
 *     floor( 2*budget*( r*(L-1) - layer*(r-1) ) / ( (r+1)*(L-1) ) )        budget itself where L = 1
 *
 *   budget         positions that a layer keeps on average
 *   layer          the layer, < num_layers
 *   num_layers     layers that share the budget (L)
 *   pyramid_ratio  the first layer's share over the last one's (r), > 0
 *
 * Exact for every argument. A share above UINT32_MAX answers UINT32_MAX. `layer >= num_layers` or a ratio of 0 answers
 * 0. Flooring loses up to num_layers - 1 positions of the total. The recent window is not considered here.
 */
PB_KVCACHE_API uint32_t pb_kvcache_pyramid_budget(uint32_t budget, uint32_t layer, uint32_t num_layers,
                                                  uint32_t pyramid_ratio);

/*
 * The shares of layers 0 .. num_layers-1 in one call.
 *
 *   budget, num_layers, pyramid_ratio  as above
 *   shares                             gets num_layers shares
 *   capacity                           how many `shares` has room for
 *
 * Unlike the single share this refuses what it cannot answer: num_layers 0 (PB_KVCACHE_ERROR_NUM_LAYERS), ratio 0
 * (_PYRAMID_RATIO), `shares` NULL (_NULL), too small an array (_CAPACITY), a share above UINT32_MAX (_TOO_LARGE).
 */
PB_KVCACHE_API pb_kvcache_status pb_kvcache_pyramid_budgets(uint32_t budget, uint32_t num_layers,
                                                            uint32_t pyramid_ratio, uint32_t *shares,
                                                            size_t capacity);
/* cdef: end */

PB_KVCACHE_EXTERN_C_END

#endif
