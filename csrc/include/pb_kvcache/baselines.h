/*
 * Baselines: simpler policies to compare with, behind the same interface and the same checks.
 *
 *   sliding_window  the newest positions stay
 *   streaming_llm   the first positions and the newest stay (arXiv 2309.17453)
 *   h2o             the least attention since it joined goes (arXiv 2306.14048)
 *   tova            the least attention in the latest observed step goes (arXiv 2401.06104)
 *   scissorhands    the fewest votes go, one for more than an even share of a step (arXiv 2305.17118)
 *
 * All evict to `budget` and hold at most budget + 1 + spare positions. On a tie the lower position goes first. A call
 * costs O(kept), and there is no history ring. Memory: 4 bytes a position, 12 where attention is remembered.
 */
#ifndef PB_KVCACHE_BASELINES_H
#define PB_KVCACHE_BASELINES_H

#include <stdint.h>

#include "pb_kvcache/policy.h"

PB_KVCACHE_EXTERN_C_BEGIN

/* cdef: begin */
/* Drop the oldest. Attention is checked and not used: no score. */
typedef struct pb_kvcache_sliding_window_params {
    uint32_t budget;       /* positions kept, > 0 */
    uint32_t spare;        /* steps that may pass without an eviction, beyond the first */
    uint32_t max_rollback; /* the last steps that can be taken back */
} pb_kvcache_sliding_window_params;

PB_KVCACHE_POLICY(sliding_window) /* refused, in this order: _BUDGET, _TOO_LARGE */

/* Drop the oldest, but never a position below `sinks`. Attention is checked and not used: no score. */
typedef struct pb_kvcache_streaming_llm_params {
    uint32_t budget;       /* positions kept, > 0 */
    uint32_t sinks;        /* positions 0 .. sinks-1 are never dropped, < budget. 0 is a sliding window */
    uint32_t spare;        /* steps that may pass without an eviction, beyond the first */
    uint32_t max_rollback; /* the last steps that can be taken back */
} pb_kvcache_streaming_llm_params;

PB_KVCACHE_POLICY(streaming_llm) /* refused, in this order: _BUDGET, _SINKS, _TOO_LARGE */

/* Heavy hitters: drop the lowest sum, in double, of the attention received since the position joined: the score. */
typedef struct pb_kvcache_h2o_params {
    uint32_t budget;        /* positions kept, > 0 */
    uint32_t recent_window; /* newest positions, never dropped on score, < budget */
    uint32_t spare;         /* steps that may pass without an eviction, beyond the first */
    uint32_t max_rollback;  /* the last steps that can be taken back */
} pb_kvcache_h2o_params;

PB_KVCACHE_POLICY(h2o) /* refused, in this order: _BUDGET, _RECENT_WINDOW, _TOO_LARGE */

/*
 * Drop the lowest attention of the latest observed step: the score. A position that joined after that step, or that was
 * seeded without attention, has received none. It scores 0 and is never dropped before an observed step has weighed it,
 * whatever the budget asked for. So `evict` drops at most the observed positions, and pb_kvcache_evict_count says how
 * many. A cache full of positions never observed stays full until it is seeded or reset.
 */
typedef struct pb_kvcache_tova_params {
    uint32_t budget;       /* positions kept, > 0 */
    uint32_t spare;        /* steps that may pass without an eviction, beyond the first */
    uint32_t max_rollback; /* the last steps that can be taken back */
} pb_kvcache_tova_params;

PB_KVCACHE_POLICY(tova) /* refused, in this order: _BUDGET, _TOO_LARGE */

/*
 * Drop the fewest votes: the score. In one observed step each position whose weight is greater than 1.0 / attn_len,
 * compared in double, gets a vote.
 */
typedef struct pb_kvcache_scissorhands_params {
    uint32_t budget;        /* positions kept, > 0 */
    uint32_t recent_window; /* newest positions, never dropped on score, < budget */
    uint32_t spare;         /* steps that may pass without an eviction, beyond the first */
    uint32_t max_rollback;  /* the last steps that can be taken back */
} pb_kvcache_scissorhands_params;

PB_KVCACHE_POLICY(scissorhands) /* refused, in this order: _BUDGET, _RECENT_WINDOW, _TOO_LARGE */
/* cdef: end */

#define PB_KVCACHE_SLIDING_WINDOW_PARAMS_DEFAULT { 512u, 0u, 0u }
#define PB_KVCACHE_STREAMING_LLM_PARAMS_DEFAULT { 512u, 4u, 0u, 0u }
#define PB_KVCACHE_H2O_PARAMS_DEFAULT { 512u, 32u, 0u, 0u }
#define PB_KVCACHE_TOVA_PARAMS_DEFAULT { 512u, 0u, 0u }
#define PB_KVCACHE_SCISSORHANDS_PARAMS_DEFAULT { 512u, 32u, 0u, 0u }

PB_KVCACHE_EXTERN_C_END

#endif
