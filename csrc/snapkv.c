#include "internal.h"
#include "kernels.h"

static void choose(pb_kvcache *policy, size_t first, size_t most, size_t count, uint32_t *chosen)
{
    (void)first; /* no sinks: the candidates start at index 0 */
    pb_kvcache_priv_ring_sums(policy);
    if (count == 1) {
        chosen[0] = (uint32_t)pb_kvcache_priv_pool_lowest(policy->scores, policy->kept_count,
                                                          policy->shape.pool_kernel, most);
        return;
    }
    pb_kvcache_priv_pool_max(policy->scores, policy->kept_count, policy->shape.pool_kernel, policy->scores);
    pb_kvcache_priv_choose_lowest(policy->scores, most, count, chosen);
}

static const pb_kvcache_priv_rules snapkv_rules = {.kind = PB_KVCACHE_PRIV_SNAPKV,
                                                   .observe = pb_kvcache_priv_ring_observe,
                                                   .choose = choose,
                                                   .forget = pb_kvcache_priv_ring_forget,
                                                   .join = NULL,
                                                   .clear = pb_kvcache_priv_ring_clear,
                                                   .score = pb_kvcache_priv_ring_score};

pb_kvcache_status pb_kvcache_priv_snapkv_shape(const pb_kvcache_snapkv_params *params, uint32_t effective,
                                               pb_kvcache_priv_shape *shape)
{
    if (params->budget == 0) {
        return PB_KVCACHE_ERROR_BUDGET;
    }
    if (params->obs_window == 0) {
        return PB_KVCACHE_ERROR_OBS_WINDOW;
    }
    if (params->recent_window >= params->budget) {
        return PB_KVCACHE_ERROR_RECENT_WINDOW;
    }
    if (params->pool_kernel % 2 == 0) {
        return PB_KVCACHE_ERROR_POOL_KERNEL;
    }
    const uint64_t most = effective > params->budget ? effective : params->budget;
    const uint64_t capacity = most + 1 + params->spare;
    if (capacity > UINT32_MAX) {
        return PB_KVCACHE_ERROR_TOO_LARGE;
    }
    *shape = (pb_kvcache_priv_shape){.rules = &snapkv_rules,
                                     .effective = effective,
                                     .capacity = (uint32_t)capacity,
                                     .recent_window = params->recent_window,
                                     .obs_window = params->obs_window,
                                     .pool_kernel = params->pool_kernel,
                                     .max_rollback = params->max_rollback,
                                     .doubles = 2};
    return pb_kvcache_priv_set_bytes(shape);
}

static const pb_kvcache_snapkv_params snapkv_defaults = PB_KVCACHE_SNAPKV_PARAMS_DEFAULT;

static pb_kvcache_status shape_of(const pb_kvcache_snapkv_params *params, pb_kvcache_priv_shape *shape)
{
    const pb_kvcache_snapkv_params *chosen = params == NULL ? &snapkv_defaults : params;
    return pb_kvcache_priv_snapkv_shape(chosen, chosen->budget, shape);
}

pb_kvcache_status pb_kvcache_snapkv_check(const pb_kvcache_snapkv_params *params)
{
    pb_kvcache_priv_shape shape;
    return shape_of(params, &shape);
}

static pb_kvcache *create(const void *params, const pb_allocator *allocator, pb_rng *rng)
{
    pb_kvcache_priv_shape shape;
    (void)rng;
    return shape_of(params, &shape) == PB_KVCACHE_OK ? pb_kvcache_priv_new(&shape, allocator) : NULL;
}

const pb_kvcache_vtable pb_kvcache_snapkv = {create, pb_kvcache_priv_on_decode_step, pb_kvcache_priv_evict,
                                             pb_kvcache_priv_memory_bytes, pb_kvcache_priv_destroy};
