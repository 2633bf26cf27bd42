/*
 * PyramidKV (arXiv 2406.02069) at decode time: SnapKV, evicting down to this layer's share of the budget.
 *
 * The effective budget is max(pb_kvcache_pyramid_budget(budget, layer, num_layers, pyramid_ratio), recent_window + 1).
 * With one layer, or a ratio of 1, this is SnapKV, bit for bit. Ask it to evict to the effective budget, not to
 * `budget`: see policy.h.
 *
 * Capacity: max(effective budget, budget) + 1 + spare positions. Memory as SnapKV's.
 */
#ifndef PB_KVCACHE_PYRAMIDKV_H
#define PB_KVCACHE_PYRAMIDKV_H

#include <stdint.h>

#include "pb_kvcache/budget.h"
#include "pb_kvcache/policy.h"

PB_KVCACHE_EXTERN_C_BEGIN

/* cdef: begin */
typedef struct pb_kvcache_pyramidkv_params {
    uint32_t budget;        /* positions kept per layer on average, > 0 */
    uint32_t layer;         /* the layer that this instance serves, < num_layers */
    uint32_t num_layers;    /* layers that share the budget, > 0 */
    uint32_t pyramid_ratio; /* the first layer's share over the last one's, > 0 */
    uint32_t recent_window; /* newest positions, never dropped on score, < budget */
    uint32_t obs_window;    /* observed decode steps that make the score, > 0 */
    uint32_t pool_kernel;   /* kept neighbours pooled, odd */
    uint32_t spare;         /* steps that may pass without an eviction, beyond the first */
    uint32_t max_rollback;  /* the last steps that can be taken back */
} pb_kvcache_pyramidkv_params;

/* Refused, the first in this order: _BUDGET, _OBS_WINDOW, _RECENT_WINDOW, _POOL_KERNEL, _NUM_LAYERS, _LAYER,
 * _PYRAMID_RATIO, _TOO_LARGE. */
PB_KVCACHE_POLICY(pyramidkv)
/* cdef: end */

#define PB_KVCACHE_PYRAMIDKV_PARAMS_DEFAULT { 512u, 0u, 1u, 4u, 32u, 16u, 7u, 0u, 0u }

PB_KVCACHE_EXTERN_C_END

#endif
