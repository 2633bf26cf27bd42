#include "internal.h"

#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)

const char *pb_kvcache_version(void)
{
    return TEXT(PB_KVCACHE_VERSION_MAJOR) "." TEXT(PB_KVCACHE_VERSION_MINOR) "." TEXT(PB_KVCACHE_VERSION_PATCH);
}

const char *pb_kvcache_status_str(pb_kvcache_status status)
{
    switch (status) {
    case PB_KVCACHE_OK: return "success";
    case PB_KVCACHE_ERROR_NULL: return "a required pointer is NULL";
    case PB_KVCACHE_ERROR_BUDGET: return "budget must be greater than 0";
    case PB_KVCACHE_ERROR_OBS_WINDOW: return "obs_window must be greater than 0";
    case PB_KVCACHE_ERROR_RECENT_WINDOW: return "recent_window must be smaller than budget";
    case PB_KVCACHE_ERROR_POOL_KERNEL: return "pool_kernel must be odd";
    case PB_KVCACHE_ERROR_NUM_LAYERS: return "num_layers must be greater than 0";
    case PB_KVCACHE_ERROR_LAYER: return "layer must be smaller than num_layers";
    case PB_KVCACHE_ERROR_PYRAMID_RATIO: return "pyramid_ratio must be greater than 0";
    case PB_KVCACHE_ERROR_TOO_LARGE: return "a capacity or a size in bytes is too large for this platform";
    case PB_KVCACHE_ERROR_NO_MEMORY: return "out of memory";
    case PB_KVCACHE_ERROR_POSITION: return "positions must ascend: each must exceed all before it";
    case PB_KVCACHE_ERROR_ATTN_LEN: return "attn_len must equal the number of kept positions";
    case PB_KVCACHE_ERROR_ATTN_VALUE: return "attention weights must be finite and >= 0";
    case PB_KVCACHE_ERROR_FULL: return "the cache has no room for another position";
    case PB_KVCACHE_ERROR_NOT_KEPT: return "the position is not kept";
    case PB_KVCACHE_ERROR_CAPACITY: return "the output array is too small";
    case PB_KVCACHE_ERROR_MISMATCH: return "the two objects differ in policy or parameters";
    case PB_KVCACHE_ERROR_UNSUPPORTED: return "the policy does not have this";
    case PB_KVCACHE_ERROR_STATE: return "the bytes must be a whole saved state, undamaged";
    case PB_KVCACHE_ERROR_STATE_VERSION: return "the saved state must be of this version";
    case PB_KVCACHE_ERROR_ROLLBACK: return "no more steps can be taken back than are remembered";
    case PB_KVCACHE_ERROR_PLAN_SHAPE: return "shape must be one of the plan's shapes";
    case PB_KVCACHE_ERROR_PLAN_MULTIPLE: return "multiple_of must be greater than 0";
    case PB_KVCACHE_ERROR_PLAN_TOTAL: return "total must be a multiple of multiple_of";
    case PB_KVCACHE_ERROR_PLAN_OVERFLOW: return "total must not exceed what num_layers budgets of 32 bits hold";
    case PB_KVCACHE_ERROR_PLAN_RATIO: return "ratio must be finite and greater than 0";
    case PB_KVCACHE_ERROR_PLAN_WEIGHTS: return "weights must be given for the shape that reads them, and for no other";
    case PB_KVCACHE_ERROR_PLAN_WEIGHT: return "weights must be finite and greater than 0";
    case PB_KVCACHE_ERROR_PLAN_BOUNDS: return "a layer's minimum must not exceed its maximum";
    case PB_KVCACHE_ERROR_PLAN_BLOCK: return "a multiple of multiple_of must lie between a layer's minimum and maximum";
    case PB_KVCACHE_ERROR_PLAN_MINIMUM:
        return "total must be at least the sum of the minimums, rounded up to multiples";
    case PB_KVCACHE_ERROR_DIVIDE_UNITS: return "num_units must be greater than 0";
    case PB_KVCACHE_ERROR_DIVIDE_GRID: return "the grid must have a point, and its points must be above 0 and ascend";
    case PB_KVCACHE_ERROR_DIVIDE_LOSS: return "losses must be finite";
    case PB_KVCACHE_ERROR_DIVIDE_BELOW: return "a unit's minimum must not lie below the grid's first point";
    case PB_KVCACHE_ERROR_WINDOW:
        return "window must be above 0 and smaller than n; an attention's may be n, a merge's must divide num_queries";
    case PB_KVCACHE_ERROR_HEADS: return "num_kv_heads must be greater than 0 and divide num_q_heads";
    case PB_KVCACHE_ERROR_HEAD_RANGE: return "first_head and end_head must be a range of the KV heads";
    case PB_KVCACHE_ERROR_OPTION: return "an enumeration has a value that is not in its list";
    case PB_KVCACHE_ERROR_SCALE: return "scale must be finite and greater than 0";
    case PB_KVCACHE_ERROR_ALIGNMENT: return "an array must be aligned for its elements";
    case PB_KVCACHE_ERROR_STRIDE: return "rows that are written must not overlap";
    case PB_KVCACHE_ERROR_OVERLAP: return "an output must not overlap an input or the workspace";
    case PB_KVCACHE_ERROR_WORKSPACE: return "the workspace is too small";
    case PB_KVCACHE_ERROR_LOGIT: return "logits must not be NaN or +inf, before or after scaling";
    case PB_KVCACHE_ERROR_MASKED: return "every query must see a position: all its logits are -inf";
    case PB_KVCACHE_ERROR_SCORE: return "scores must be finite";
    case PB_KVCACHE_ERROR_COUNT: return "no more indices can be chosen than there are scores";
    case PB_KVCACHE_ERROR_BUDGET_WINDOW:
        return "budget must not be smaller than what is always kept: the window, or protect and sinks";
    case PB_KVCACHE_ERROR_INDEX: return "indices must be below n and ascend";
    case PB_KVCACHE_ERROR_PROTECT: return "protect must be greater than 0 and smaller than n";
    case PB_KVCACHE_ERROR_SELECT_WEIGHT: return "weights of positions must be finite and not negative";
    case PB_KVCACHE_ERROR_ROW_VALUE: return "keys, values, queries and lse must be finite";
    case PB_KVCACHE_ERROR_SINKS: return "sinks must be smaller than budget";
    case PB_KVCACHE_ERROR_BLOCK_SIZE: return "block_size must be greater than 0";
    case PB_KVCACHE_ERROR_NUM_CACHES: return "num_caches must be greater than 0";
    case PB_KVCACHE_ERROR_CACHE: return "cache must be smaller than num_caches";
    }
    return "unknown status";
}
