#include <string.h>

#include "checks.h"

/* One block of memory: this struct with its layers' pointers, then the layers' caches, each aligned for a double. */
struct pb_kvcache_stack {
    pb_allocator allocator;
    size_t bytes;
    size_t resident;
    size_t peak_resident;
    uint32_t num_layers;
    pb_kvcache *layers[];
};

/* Bytes rounded up, so that a double can follow. `bytes` is at most PTRDIFF_MAX, the answer at most PTRDIFF_MAX + 1. */
static size_t aligned(size_t bytes)
{
    return (bytes + sizeof(double) - 1) / sizeof(double) * sizeof(double);
}

static pb_kvcache_status layer_shape(const pb_kvcache_stack_params *params, const uint32_t *budgets, uint32_t layer,
                                     pb_kvcache_priv_shape *shape)
{
    if (budgets != NULL) {
        const pb_kvcache_snapkv_params snapkv = {budgets[layer], params->recent_window, params->obs_window,
                                                 params->pool_kernel, params->spare, params->max_rollback};
        return pb_kvcache_priv_snapkv_shape(&snapkv, snapkv.budget, shape);
    }
    const pb_kvcache_pyramidkv_params pyramidkv
        = {params->budget,        layer,              params->num_layers, params->pyramid_ratio, params->recent_window,
           params->obs_window,    params->pool_kernel, params->spare,      params->max_rollback};
    return pb_kvcache_priv_pyramidkv_shape(&pyramidkv, shape);
}

/* Bytes before the first cache. num_layers is at most PB_KVCACHE_STACK_MAX_LAYERS: the product fits 32 bits. */
static size_t header_bytes(uint32_t num_layers)
{
    return aligned(offsetof(struct pb_kvcache_stack, layers) + num_layers * sizeof(pb_kvcache *));
}

/* Bytes of the whole stack; *layer becomes the first layer that refuses. */
static pb_kvcache_status total_bytes(const pb_kvcache_stack_params *params, const uint32_t *budgets, uint32_t *layer,
                                     size_t *bytes)
{
    *layer = 0;
    if (params == NULL) {
        return PB_KVCACHE_ERROR_NULL;
    }
    if (params->num_layers == 0) {
        return PB_KVCACHE_ERROR_NUM_LAYERS;
    }
    if (params->num_layers > PB_KVCACHE_STACK_MAX_LAYERS) {
        return PB_KVCACHE_ERROR_TOO_LARGE;
    }
    size_t total = header_bytes(params->num_layers);
    for (; *layer < params->num_layers; ++*layer) {
        pb_kvcache_priv_shape shape;
        const pb_kvcache_status status = layer_shape(params, budgets, *layer, &shape);
        if (status != PB_KVCACHE_OK) {
            return status;
        }
        total += aligned(shape.bytes); /* at most PTRDIFF_MAX + (PTRDIFF_MAX + 1): fits a size_t */
        if (total > PTRDIFF_MAX) {
            *layer = 0;
            return PB_KVCACHE_ERROR_TOO_LARGE;
        }
    }
    *bytes = total;
    return PB_KVCACHE_OK;
}

pb_kvcache_status pb_kvcache_stack_check(const pb_kvcache_stack_params *params, const uint32_t *budgets,
                                         uint32_t *layer)
{
    uint32_t first;
    size_t bytes;
    const pb_kvcache_status status = total_bytes(params, budgets, &first, &bytes);
    if (layer != NULL) {
        *layer = first;
    }
    return status;
}

/* Count again what the layers hold, after something else than a step or an eviction. */
static void count_resident(pb_kvcache_stack *stack)
{
    stack->resident = 0;
    for (uint32_t layer = 0; layer < stack->num_layers; ++layer) {
        stack->resident += stack->layers[layer]->kept_count;
    }
    if (stack->peak_resident < stack->resident) {
        stack->peak_resident = stack->resident;
    }
}

pb_kvcache_stack *pb_kvcache_stack_create(const pb_kvcache_stack_params *params, const uint32_t *budgets,
                                          const pb_allocator *allocator)
{
    uint32_t layer;
    size_t bytes;
    pb_allocator chosen;
    if (total_bytes(params, budgets, &layer, &bytes) != PB_KVCACHE_OK
        || !pb_kvcache_priv_allocator(allocator, &chosen)) {
        return NULL;
    }
    pb_kvcache_stack *stack = chosen.alloc(chosen.ctx, bytes);
    if (stack == NULL) {
        return NULL;
    }
    stack->allocator = chosen;
    stack->bytes = bytes;
    stack->num_layers = params->num_layers;
    size_t offset = header_bytes(stack->num_layers); /* this and every size below was checked with the total */
    for (layer = 0; layer < stack->num_layers; ++layer) {
        pb_kvcache_priv_shape shape;
        (void)layer_shape(params, budgets, layer, &shape);
        stack->layers[layer] = pb_kvcache_priv_place((unsigned char *)stack + offset, &shape);
        offset += aligned(shape.bytes);
    }
    stack->peak_resident = 0;
    count_resident(stack);
    return stack;
}

void pb_kvcache_stack_destroy(pb_kvcache_stack *stack)
{
    if (stack != NULL) {
        const pb_allocator allocator = stack->allocator;
        allocator.free(allocator.ctx, stack, stack->bytes);
    }
}

pb_kvcache_status pb_kvcache_stack_step_check(const pb_kvcache_stack *stack, uint32_t pos, const float *const *attn,
                                              const size_t *attn_lens, uint32_t *layer)
{
    uint32_t first = 0;
    pb_kvcache_status status = stack == NULL ? PB_KVCACHE_ERROR_NULL : PB_KVCACHE_OK;
    while (status == PB_KVCACHE_OK && first < stack->num_layers) {
        const float *weights = attn == NULL ? NULL : attn[first];
        if (weights != NULL && attn_lens == NULL) {
            status = PB_KVCACHE_ERROR_NULL;
        } else {
            status = pb_kvcache_priv_step_check(stack->layers[first], pos, weights,
                                                weights == NULL ? 0 : attn_lens[first]);
        }
        first += status == PB_KVCACHE_OK;
    }
    if (layer != NULL) {
        *layer = first;
    }
    return status;
}

pb_kvcache_status pb_kvcache_stack_on_decode_step(pb_kvcache_stack *stack, uint32_t pos, const float *const *attn,
                                                  const size_t *attn_lens)
{
    const pb_kvcache_status status = pb_kvcache_stack_step_check(stack, pos, attn, attn_lens, NULL);
    if (status != PB_KVCACHE_OK) {
        return status;
    }
    for (uint32_t layer = 0; layer < stack->num_layers; ++layer) {
        pb_kvcache_priv_step(stack->layers[layer], pos, attn == NULL ? NULL : attn[layer]);
    }
    stack->resident += stack->num_layers;
    if (stack->peak_resident < stack->resident) {
        stack->peak_resident = stack->resident;
    }
    return PB_KVCACHE_OK;
}

size_t pb_kvcache_stack_evict_count(const pb_kvcache_stack *stack)
{
    size_t count = 0;
    for (uint32_t layer = 0; stack != NULL && layer < stack->num_layers; ++layer) {
        count += pb_kvcache_evict_count(stack->layers[layer], UINT32_MAX);
    }
    return count;
}

pb_kvcache_status pb_kvcache_stack_evict(pb_kvcache_stack *stack, uint32_t *victims, size_t capacity, size_t *offsets,
                                         size_t offsets_capacity)
{
    const size_t count = pb_kvcache_stack_evict_count(stack);
    if (stack == NULL || offsets == NULL || (victims == NULL && count > 0)) {
        return PB_KVCACHE_ERROR_NULL;
    }
    if (capacity < count || offsets_capacity <= stack->num_layers) {
        return PB_KVCACHE_ERROR_CAPACITY;
    }
    if (pb_kvcache_priv_overlap(victims, count * sizeof *victims, offsets,
                                ((size_t)stack->num_layers + 1) * sizeof *offsets)) {
        return PB_KVCACHE_ERROR_OVERLAP;
    }
    size_t written = 0;
    for (uint32_t layer = 0; layer < stack->num_layers; ++layer) {
        offsets[layer] = written;
        if (written < count) { /* none left to write: victims may be NULL */
            written += pb_kvcache_priv_evict(stack->layers[layer], UINT32_MAX, victims + written, count - written);
        }
    }
    offsets[stack->num_layers] = written;
    stack->resident -= written;
    return PB_KVCACHE_OK;
}

size_t pb_kvcache_stack_evict_rows_count(const pb_kvcache_stack *stack, uint32_t multiple_of)
{
    size_t count = 0;
    for (uint32_t layer = 0; stack != NULL && layer < stack->num_layers; ++layer) {
        count += pb_kvcache_evict_rows_count(stack->layers[layer], UINT32_MAX, multiple_of);
    }
    return count;
}

/* How many rows a layer tells of an eviction. */
static size_t rows_told(const pb_kvcache *cache, uint32_t multiple_of, pb_kvcache_row_set which)
{
    const size_t count = pb_kvcache_evict_rows_count(cache, UINT32_MAX, multiple_of);
    return which == PB_KVCACHE_ROWS_VICTIMS ? count : cache->kept_count - count;
}

/* The elements from `rows` to the end of the last layer's. false where the stride is too small or the product large. */
static bool rows_span(const pb_kvcache_stack *stack, uint32_t multiple_of, pb_kvcache_row_set which,
                      size_t rows_stride, size_t *span)
{
    const uint32_t last = stack->num_layers - 1;
    for (uint32_t layer = 0; layer < last; ++layer) {
        if (rows_told(stack->layers[layer], multiple_of, which) > rows_stride) {
            return false;
        }
    }
    return pb_kvcache_priv_mul(last, rows_stride, span)
           && pb_kvcache_priv_add(*span, rows_told(stack->layers[last], multiple_of, which), span)
           && *span <= PTRDIFF_MAX / sizeof(uint32_t);
}

pb_kvcache_status pb_kvcache_stack_evict_rows(pb_kvcache_stack *stack, uint32_t multiple_of, pb_kvcache_row_set which,
                                              uint32_t *victims, size_t capacity, size_t *offsets,
                                              size_t offsets_capacity, uint32_t *rows, size_t rows_stride,
                                              size_t rows_capacity, uint32_t *counts, size_t counts_capacity)
{
    /* Checks: pointers, options, room, memory */
    const size_t count = pb_kvcache_stack_evict_rows_count(stack, multiple_of);
    if (stack == NULL || offsets == NULL || (victims == NULL && count > 0) || (counts == NULL && rows != NULL)) {
        return PB_KVCACHE_ERROR_NULL;
    }
    const pb_kvcache_status status = pb_kvcache_priv_rows_asked_ok(multiple_of, which);
    if (status != PB_KVCACHE_OK) {
        return status;
    }
    size_t span = 0;
    if (capacity < count || offsets_capacity <= stack->num_layers
        || (rows != NULL
            && (counts_capacity < stack->num_layers || !rows_span(stack, multiple_of, which, rows_stride, &span)
                || rows_capacity < span))) {
        return PB_KVCACHE_ERROR_CAPACITY;
    }
    const struct {
        const void *array;
        size_t bytes;
    } outputs[] = {{victims, count * sizeof *victims},
                   {offsets, ((size_t)stack->num_layers + 1) * sizeof *offsets},
                   {rows, span * sizeof *rows},
                   {counts, rows == NULL ? 0 : stack->num_layers * sizeof *counts}};
    for (size_t i = 0; i < sizeof outputs / sizeof outputs[0]; ++i) {
        for (size_t j = 0; j < i; ++j) {
            if (pb_kvcache_priv_overlap(outputs[i].array, outputs[i].bytes, outputs[j].array, outputs[j].bytes)) {
                return PB_KVCACHE_ERROR_OVERLAP;
            }
        }
    }
    /* Layer after layer */
    size_t written = 0;
    for (uint32_t layer = 0; layer < stack->num_layers; ++layer) {
        pb_kvcache *cache = stack->layers[layer];
        const size_t dropped = pb_kvcache_evict_rows_count(cache, UINT32_MAX, multiple_of);
        offsets[layer] = written;
        if (rows != NULL) {
            counts[layer] = (uint32_t)rows_told(cache, multiple_of, which);
        }
        pb_kvcache_priv_drop(cache, dropped, dropped > 0 ? victims + written : NULL, which,
                             rows == NULL ? NULL : rows + layer * rows_stride);
        written += dropped;
    }
    offsets[stack->num_layers] = written;
    stack->resident -= written;
    return PB_KVCACHE_OK;
}

pb_kvcache_status pb_kvcache_stack_kept(const pb_kvcache_stack *stack, uint32_t *positions, size_t capacity,
                                        size_t *offsets, size_t offsets_capacity)
{
    if (stack == NULL || offsets == NULL || (positions == NULL && stack->resident > 0)) {
        return PB_KVCACHE_ERROR_NULL;
    }
    if (capacity < stack->resident || offsets_capacity <= stack->num_layers) {
        return PB_KVCACHE_ERROR_CAPACITY;
    }
    if (pb_kvcache_priv_overlap(positions, stack->resident * sizeof *positions, offsets,
                                ((size_t)stack->num_layers + 1) * sizeof *offsets)) {
        return PB_KVCACHE_ERROR_OVERLAP;
    }
    size_t written = 0;
    for (uint32_t layer = 0; layer < stack->num_layers; ++layer) {
        const pb_kvcache *cache = stack->layers[layer];
        offsets[layer] = written;
        if (cache->kept_count > 0) {
            memcpy(positions + written, cache->kept, cache->kept_count * sizeof(uint32_t));
        }
        written += cache->kept_count;
    }
    offsets[stack->num_layers] = written;
    return PB_KVCACHE_OK;
}

uint32_t pb_kvcache_stack_num_layers(const pb_kvcache_stack *stack)
{
    return stack == NULL ? 0 : stack->num_layers;
}

const pb_kvcache *pb_kvcache_stack_layer(const pb_kvcache_stack *stack, uint32_t layer)
{
    return stack == NULL || layer >= stack->num_layers ? NULL : stack->layers[layer];
}

pb_kvcache_status pb_kvcache_stack_budgets(const pb_kvcache_stack *stack, uint32_t *budgets, size_t capacity)
{
    if (stack == NULL || budgets == NULL) {
        return PB_KVCACHE_ERROR_NULL;
    }
    if (capacity < stack->num_layers) {
        return PB_KVCACHE_ERROR_CAPACITY;
    }
    for (uint32_t layer = 0; layer < stack->num_layers; ++layer) {
        budgets[layer] = stack->layers[layer]->shape.effective;
    }
    return PB_KVCACHE_OK;
}

size_t pb_kvcache_stack_resident(const pb_kvcache_stack *stack)
{
    return stack == NULL ? 0 : stack->resident;
}

size_t pb_kvcache_stack_peak_resident(const pb_kvcache_stack *stack)
{
    return stack == NULL ? 0 : stack->peak_resident;
}

size_t pb_kvcache_stack_memory_bytes(const pb_kvcache_stack *stack)
{
    return stack == NULL ? 0 : stack->bytes;
}

pb_kvcache_status pb_kvcache_stack_reset(pb_kvcache_stack *stack)
{
    if (stack == NULL) {
        return PB_KVCACHE_ERROR_NULL;
    }
    for (uint32_t layer = 0; layer < stack->num_layers; ++layer) {
        (void)pb_kvcache_reset(stack->layers[layer]);
    }
    stack->peak_resident = 0;
    count_resident(stack);
    return PB_KVCACHE_OK;
}

pb_kvcache_status pb_kvcache_stack_seed(pb_kvcache_stack *stack, uint32_t layer, const uint32_t *positions,
                                        size_t count, const float *attn, size_t rows)
{
    if (stack == NULL) {
        return PB_KVCACHE_ERROR_NULL;
    }
    if (layer >= stack->num_layers) {
        return PB_KVCACHE_ERROR_LAYER;
    }
    const pb_kvcache_status status = pb_kvcache_seed(stack->layers[layer], positions, count, attn, rows);
    if (status == PB_KVCACHE_OK) {
        count_resident(stack);
    }
    return status;
}

uint32_t pb_kvcache_stack_rollback_count(const pb_kvcache_stack *stack)
{
    uint32_t count = stack == NULL ? 0 : UINT32_MAX;
    for (uint32_t layer = 0; stack != NULL && layer < stack->num_layers; ++layer) {
        count = stack->layers[layer]->num_undo < count ? stack->layers[layer]->num_undo : count;
    }
    return count;
}

pb_kvcache_status pb_kvcache_stack_rollback(pb_kvcache_stack *stack, uint32_t count)
{
    if (stack == NULL) {
        return PB_KVCACHE_ERROR_NULL;
    }
    if (count > pb_kvcache_stack_rollback_count(stack)) {
        return PB_KVCACHE_ERROR_ROLLBACK;
    }
    for (uint32_t layer = 0; layer < stack->num_layers; ++layer) {
        (void)pb_kvcache_rollback(stack->layers[layer], count);
    }
    count_resident(stack);
    return PB_KVCACHE_OK;
}

pb_kvcache_status pb_kvcache_stack_copy(pb_kvcache_stack *stack, const pb_kvcache_stack *source)
{
    if (stack == NULL || source == NULL) {
        return PB_KVCACHE_ERROR_NULL;
    }
    bool same = stack->num_layers == source->num_layers;
    for (uint32_t layer = 0; same && layer < stack->num_layers; ++layer) {
        same = pb_kvcache_priv_same_shape(stack->layers[layer], source->layers[layer]);
    }
    if (!same) {
        return PB_KVCACHE_ERROR_MISMATCH;
    }
    for (uint32_t layer = 0; layer < stack->num_layers; ++layer) {
        (void)pb_kvcache_copy(stack->layers[layer], source->layers[layer]);
    }
    stack->resident = source->resident;
    stack->peak_resident = source->peak_resident;
    return PB_KVCACHE_OK;
}

size_t pb_kvcache_stack_state_bytes(const pb_kvcache_stack *stack)
{
    return stack == NULL ? 0 : pb_kvcache_priv_state_bytes(stack->layers, stack->num_layers);
}

pb_kvcache_status pb_kvcache_stack_save(const pb_kvcache_stack *stack, void *data, size_t capacity)
{
    return stack == NULL ? PB_KVCACHE_ERROR_NULL
                         : pb_kvcache_priv_save(stack->layers, stack->num_layers, &stack->peak_resident, data,
                                                capacity);
}

pb_kvcache_status pb_kvcache_stack_load(pb_kvcache_stack *stack, const void *data, size_t size)
{
    if (stack == NULL) {
        return PB_KVCACHE_ERROR_NULL;
    }
    const pb_kvcache_status status
        = pb_kvcache_priv_load(stack->layers, stack->num_layers, &stack->peak_resident, data, size);
    if (status == PB_KVCACHE_OK) {
        count_resident(stack);
    }
    return status;
}
