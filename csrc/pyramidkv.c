#include "internal.h"

static const pb_kvcache_pyramidkv_params pyramidkv_defaults = PB_KVCACHE_PYRAMIDKV_PARAMS_DEFAULT;

pb_kvcache_status pb_kvcache_priv_pyramidkv_shape(const pb_kvcache_pyramidkv_params *params,
                                                  pb_kvcache_priv_shape *shape)
{
    const pb_kvcache_pyramidkv_params *chosen = params == NULL ? &pyramidkv_defaults : params;
    const pb_kvcache_snapkv_params snapkv = {chosen->budget, chosen->recent_window, chosen->obs_window,
                                             chosen->pool_kernel, chosen->spare, chosen->max_rollback};
    pb_kvcache_priv_shape checked;
    /* First the rules that both policies have. What is too large is known only with the share. */
    const pb_kvcache_status status = pb_kvcache_priv_snapkv_shape(&snapkv, chosen->budget, &checked);
    if (status != PB_KVCACHE_OK && status != PB_KVCACHE_ERROR_TOO_LARGE) {
        return status;
    }
    if (chosen->num_layers == 0) {
        return PB_KVCACHE_ERROR_NUM_LAYERS;
    }
    if (chosen->layer >= chosen->num_layers) {
        return PB_KVCACHE_ERROR_LAYER;
    }
    if (chosen->pyramid_ratio == 0) {
        return PB_KVCACHE_ERROR_PYRAMID_RATIO;
    }
    const uint32_t share
        = pb_kvcache_pyramid_budget(chosen->budget, chosen->layer, chosen->num_layers, chosen->pyramid_ratio);
    /* recent_window + 1 fits: the window is smaller than the budget. A saturated share is refused as too large. */
    const uint32_t floor = chosen->recent_window + 1;
    return pb_kvcache_priv_snapkv_shape(&snapkv, share > floor ? share : floor, shape);
}

pb_kvcache_status pb_kvcache_pyramidkv_check(const pb_kvcache_pyramidkv_params *params)
{
    pb_kvcache_priv_shape shape;
    return pb_kvcache_priv_pyramidkv_shape(params, &shape);
}

static pb_kvcache *create(const void *params, const pb_allocator *allocator, pb_rng *rng)
{
    pb_kvcache_priv_shape shape;
    (void)rng;
    return pb_kvcache_priv_pyramidkv_shape(params, &shape) == PB_KVCACHE_OK ? pb_kvcache_priv_new(&shape, allocator)
                                                                           : NULL;
}

const pb_kvcache_vtable pb_kvcache_pyramidkv = {create, pb_kvcache_priv_on_decode_step, pb_kvcache_priv_evict,
                                                pb_kvcache_priv_memory_bytes, pb_kvcache_priv_destroy};
