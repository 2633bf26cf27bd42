/*
 * SnapKV (arXiv 2404.14469) at decode time: keep what the last few tokens attended to, and the neighbours of that.
 *
 * The score of a position is the attention it received over the last `obs_window` observed steps, summed in double.
 * Scores are pooled: each becomes the maximum over `pool_kernel` kept neighbours, so that a phrase stays whole. The
 * lowest pooled scores are dropped, the lower position first on a tie. The newest `recent_window` positions are safe.
 *
 * Capacity: budget + 1 + spare positions. Memory, all of it at creation: about 300 bytes, obs_window * 8, and for each
 * position of the capacity obs_window * 4 + 20.
 */
#ifndef PB_KVCACHE_SNAPKV_H
#define PB_KVCACHE_SNAPKV_H

#include <stdint.h>

#include "pb_kvcache/policy.h"

PB_KVCACHE_EXTERN_C_BEGIN

/* cdef: begin */
typedef struct pb_kvcache_snapkv_params {
    uint32_t budget;        /* positions kept, > 0 */
    uint32_t recent_window; /* newest positions, never dropped on score, < budget */
    uint32_t obs_window;    /* observed decode steps that make the score, > 0 */
    uint32_t pool_kernel;   /* kept neighbours pooled, odd */
    uint32_t spare;         /* steps that may pass without an eviction, beyond the first */
    uint32_t max_rollback;  /* the last steps that can be taken back */
} pb_kvcache_snapkv_params;

/* Refused, the first in this order: _BUDGET, _OBS_WINDOW, _RECENT_WINDOW, _POOL_KERNEL, _TOO_LARGE. */
PB_KVCACHE_POLICY(snapkv)
/* cdef: end */

#define PB_KVCACHE_SNAPKV_PARAMS_DEFAULT { 512u, 32u, 16u, 7u, 0u, 0u }

PB_KVCACHE_EXTERN_C_END

#endif
