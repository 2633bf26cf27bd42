/*
 * What a call answers. 0 is success. Every failure is a negative code whose value never changes meaning.
 *
 * Ranges: -1 to -29 the core, -30 to -49 the planner, -50 to -69 the prefill selection, -70 to -89 baselines and
 * stacks, -90 to -99 blocks.
 */
#ifndef PB_KVCACHE_STATUS_H
#define PB_KVCACHE_STATUS_H

#include "pb_kvcache/api.h"

PB_KVCACHE_EXTERN_C_BEGIN

/* cdef: begin */
typedef enum pb_kvcache_status {
    PB_KVCACHE_OK = 0,
    /* A pointer that the call needs is NULL. */
    PB_KVCACHE_ERROR_NULL = -1,
    /* budget is 0. */
    PB_KVCACHE_ERROR_BUDGET = -2,
    /* obs_window is 0. */
    PB_KVCACHE_ERROR_OBS_WINDOW = -3,
    /* recent_window is not smaller than budget. */
    PB_KVCACHE_ERROR_RECENT_WINDOW = -4,
    /* pool_kernel is even or 0. */
    PB_KVCACHE_ERROR_POOL_KERNEL = -5,
    /* num_layers is 0. */
    PB_KVCACHE_ERROR_NUM_LAYERS = -6,
    /* layer is not smaller than num_layers. */
    PB_KVCACHE_ERROR_LAYER = -7,
    /* pyramid_ratio is 0. */
    PB_KVCACHE_ERROR_PYRAMID_RATIO = -8,
    /* The capacity does not fit 32 bits, or a size in bytes does not fit this target's address space. */
    PB_KVCACHE_ERROR_TOO_LARGE = -9,
    /* The allocator returned NULL. */
    PB_KVCACHE_ERROR_NO_MEMORY = -10,
    /* A position is not greater than the one before it, or than every kept position. */
    PB_KVCACHE_ERROR_POSITION = -11,
    /* attn_len is not the kept count. */
    PB_KVCACHE_ERROR_ATTN_LEN = -12,
    /* An attention weight is negative, infinite or NaN. */
    PB_KVCACHE_ERROR_ATTN_VALUE = -13,
    /* The cache has no room for another position. */
    PB_KVCACHE_ERROR_FULL = -14,
    /* The position is not kept. */
    PB_KVCACHE_ERROR_NOT_KEPT = -15,
    /* An output array is too small. */
    PB_KVCACHE_ERROR_CAPACITY = -16,
    /* The two objects differ in policy or parameters. */
    PB_KVCACHE_ERROR_MISMATCH = -17,
    /* The policy has no such thing (a sliding window has no score). */
    PB_KVCACHE_ERROR_UNSUPPORTED = -18,
    /* The bytes are no saved state, damaged, or of another number. */
    PB_KVCACHE_ERROR_STATE = -19,
    /* The saved state is of another version. */
    PB_KVCACHE_ERROR_STATE_VERSION = -20,
    /* More steps are to be taken back than can be. */
    PB_KVCACHE_ERROR_ROLLBACK = -21,
    /* The plan's shape is none of the list. */
    PB_KVCACHE_ERROR_PLAN_SHAPE = -30,
    /* multiple_of is 0: of a plan, or of an eviction. */
    PB_KVCACHE_ERROR_PLAN_MULTIPLE = -31,
    /* total is not a multiple of multiple_of. */
    PB_KVCACHE_ERROR_PLAN_TOTAL = -32,
    /* total is more than num_layers budgets of 32 bits hold, and there is no maximum. */
    PB_KVCACHE_ERROR_PLAN_OVERFLOW = -33,
    /* ratio is not finite or not greater than 0. */
    PB_KVCACHE_ERROR_PLAN_RATIO = -34,
    /* weights are missing, or given for a shape that has its own. */
    PB_KVCACHE_ERROR_PLAN_WEIGHTS = -35,
    /* A weight is not finite or not greater than 0. */
    PB_KVCACHE_ERROR_PLAN_WEIGHT = -36,
    /* A layer's minimum is above its maximum. */
    PB_KVCACHE_ERROR_PLAN_BOUNDS = -37,
    /* No multiple of multiple_of lies between a layer's minimum and its maximum. */
    PB_KVCACHE_ERROR_PLAN_BLOCK = -38,
    /* total is below the sum of the minimums, each rounded up to a multiple of multiple_of. */
    PB_KVCACHE_ERROR_PLAN_MINIMUM = -39,
    /* num_units is 0. */
    PB_KVCACHE_ERROR_DIVIDE_UNITS = -40,
    /* The grid is empty, or a point of it is 0 or not above the one before it. */
    PB_KVCACHE_ERROR_DIVIDE_GRID = -41,
    /* A loss is NaN or infinite. */
    PB_KVCACHE_ERROR_DIVIDE_LOSS = -42,
    /* A unit's minimum is below the grid's first point. */
    PB_KVCACHE_ERROR_DIVIDE_BELOW = -43,
    /* window is 0 or not smaller than n. Of an attention it may be n. Of a merge, above n or no divisor of num_queries. */
    PB_KVCACHE_ERROR_WINDOW = -50,
    /* num_kv_heads is 0 or does not divide num_q_heads, or num_q_heads is 0. */
    PB_KVCACHE_ERROR_HEADS = -51,
    /* first_head and end_head are not a range of the KV heads. */
    PB_KVCACHE_ERROR_HEAD_RANGE = -52,
    /* An enumeration has a value that is not in its list. */
    PB_KVCACHE_ERROR_OPTION = -53,
    /* scale is not finite or not greater than 0. */
    PB_KVCACHE_ERROR_SCALE = -54,
    /* An array is not aligned for its elements. */
    PB_KVCACHE_ERROR_ALIGNMENT = -55,
    /* Strides make rows overlap that are written. */
    PB_KVCACHE_ERROR_STRIDE = -56,
    /* An output overlaps an input or the workspace. */
    PB_KVCACHE_ERROR_OVERLAP = -57,
    /* The workspace is too small. */
    PB_KVCACHE_ERROR_WORKSPACE = -58,
    /* A logit is NaN or +inf, before or after scaling. */
    PB_KVCACHE_ERROR_LOGIT = -59,
    /* A query sees no position: all its logits are -inf. */
    PB_KVCACHE_ERROR_MASKED = -60,
    /* A score is NaN or infinite. */
    PB_KVCACHE_ERROR_SCORE = -61,
    /* More indices are asked for than there are scores. */
    PB_KVCACHE_ERROR_COUNT = -62,
    /* A budget is smaller than what is always kept: the window, or protect and sinks. */
    PB_KVCACHE_ERROR_BUDGET_WINDOW = -63,
    /* An index is not below n or does not ascend. */
    PB_KVCACHE_ERROR_INDEX = -64,
    /* protect is 0 or not smaller than n. */
    PB_KVCACHE_ERROR_PROTECT = -65,
    /* A position's weight is negative, infinite or NaN. */
    PB_KVCACHE_ERROR_SELECT_WEIGHT = -66,
    /* A key, value, query or lse is NaN or infinite. */
    PB_KVCACHE_ERROR_ROW_VALUE = -69,
    /* sinks is not smaller than budget. */
    PB_KVCACHE_ERROR_SINKS = -70,
    /* num_caches is 0. */
    PB_KVCACHE_ERROR_NUM_CACHES = -71,
    /* cache is not smaller than num_caches. */
    PB_KVCACHE_ERROR_CACHE = -72,
    /* block_size is 0. */
    PB_KVCACHE_ERROR_BLOCK_SIZE = -90
} pb_kvcache_status;

/* One English sentence that says which rule was broken: a static string, also for a code that is not in the list. */
PB_KVCACHE_API const char *pb_kvcache_status_str(pb_kvcache_status status);
/* cdef: end */

PB_KVCACHE_EXTERN_C_END

#endif
