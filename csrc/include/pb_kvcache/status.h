/*
 * What a call answers. 0 is success; every failure is a negative code whose value never changes meaning.
 *
 * Ranges: -1 to -29 the core, -30 to -49 the planner, -50 to -69 the prefill selection, -70 to -89 baselines and
 * stacks.
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
    /* sinks is not smaller than budget. */
    PB_KVCACHE_ERROR_SINKS = -70
} pb_kvcache_status;

/* One English sentence that says which rule was broken; a static string, also for a code that is not in the list. */
PB_KVCACHE_API const char *pb_kvcache_status_str(pb_kvcache_status status);
/* cdef: end */

PB_KVCACHE_EXTERN_C_END

#endif
