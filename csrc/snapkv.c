#include <string.h>

#include "internal.h"
#include "kernels.h"

static void observe(pb_kvcache *policy, const float *attn)
{
    if (policy->kept_count > 0) {
        memcpy(pb_kvcache_priv_slot(policy, policy->cursor), attn, policy->kept_count * sizeof(float));
    }
    policy->lengths[policy->cursor] = (uint32_t)policy->kept_count;
    policy->cursor = policy->cursor + 1 < policy->shape.obs_window ? policy->cursor + 1 : 0;
}

static void choose(pb_kvcache *policy, size_t first, size_t most, size_t count, uint32_t *chosen)
{
    const pb_kvcache_priv_shape *shape = &policy->shape;
    (void)first; /* no sinks: the candidates start at index 0 */
    pb_kvcache_priv_column_sums(policy->history, shape->capacity, policy->row_of_slot, policy->lengths,
                                shape->obs_window, policy->kept_count, policy->scores);
    pb_kvcache_priv_pool_max(policy->scores, policy->kept_count, shape->pool_kernel, policy->pooled);
    pb_kvcache_priv_choose_lowest(policy->pooled, most, count, chosen);
}

static void forget(pb_kvcache *policy, const uint32_t *chosen, size_t count)
{
    for (uint32_t slot = 0; slot < policy->shape.obs_window; ++slot) {
        uint32_t *length = policy->lengths + slot;
        size_t held = count; /* chosen indices that this slot has a column for */
        while (held > 0 && chosen[held - 1] >= *length) {
            --held;
        }
        pb_kvcache_priv_close_gaps(pb_kvcache_priv_slot(policy, slot), *length, sizeof(float), chosen, held);
        *length -= (uint32_t)held;
    }
}

static void clear(pb_kvcache *policy)
{
    memset(policy->lengths, 0, policy->shape.obs_window * sizeof(uint32_t));
}

static double score(const pb_kvcache *policy, size_t index)
{
    double sum = 0.0;
    for (uint32_t slot = 0; slot < policy->shape.obs_window; ++slot) {
        if (index < policy->lengths[slot]) {
            sum += (double)pb_kvcache_priv_slot(policy, slot)[index];
        }
    }
    return sum;
}

static const pb_kvcache_priv_rules snapkv_rules = {
    .kind = PB_KVCACHE_PRIV_SNAPKV,
    .observe = observe,
    .choose = choose,
    .forget = forget,
    .join = NULL,
    .clear = clear,
    .score = score};

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
