/*
 * The caches of all layers of a model through a short generation: one call per token takes in every layer's attention,
 * one call names every layer's victims, and the peak says how large an arena for keys and values must be.
 *
 * The attention here is made up. An engine hands over its own. For a single layer the functions of policy.h suffice.
 */
#include <inttypes.h>
#include <stdio.h>

#include <pb_kvcache.h>

enum { LAYERS = 4, TOKENS = 40, MOST = 32 };

int main(void)
{
    pb_kvcache_stack_params params = PB_KVCACHE_STACK_PARAMS_DEFAULT(LAYERS);
    params.budget = 12; /* shares 19, 14, 9 and 4 */
    params.recent_window = 2;
    params.pool_kernel = 3;
    uint32_t layer;
    const pb_kvcache_status refused = pb_kvcache_stack_check(&params, NULL, &layer);
    if (refused != PB_KVCACHE_OK) {
        fprintf(stderr, "layer %" PRIu32 ": %s\n", layer, pb_kvcache_status_str(refused));
        return 1;
    }
    pb_kvcache_stack *stack = pb_kvcache_stack_create(&params, NULL, NULL);
    if (stack == NULL) {
        return 1;
    }

    float weights[LAYERS][MOST];
    const float *attn[LAYERS]; /* a NULL here would be a layer that was not observed */
    size_t lengths[LAYERS];
    uint32_t victims[LAYERS * MOST];
    size_t offsets[LAYERS + 1];
    for (uint32_t pos = 1; pos < TOKENS; ++pos) {
        for (layer = 0; layer < LAYERS; ++layer) {
            lengths[layer] = pb_kvcache_kept_count(pb_kvcache_stack_layer(stack, layer));
            for (size_t i = 0; i < lengths[layer]; ++i) {
                weights[layer][i] = i == 0 ? 0.5f : 0.5f / (float)lengths[layer]; /* a sink, and little elsewhere */
            }
            attn[layer] = weights[layer];
        }
        if (pb_kvcache_stack_on_decode_step(stack, pos, attn, lengths) != PB_KVCACHE_OK) {
            return 1;
        }
        if (pb_kvcache_stack_evict(stack, victims, LAYERS * MOST, offsets, LAYERS + 1) != PB_KVCACHE_OK) {
            return 1;
        }
        /* Layer l drops victims[offsets[l]] .. victims[offsets[l + 1] - 1]: move its keys and values now. */
    }

    uint32_t budgets[LAYERS];
    if (pb_kvcache_stack_budgets(stack, budgets, LAYERS) != PB_KVCACHE_OK) {
        return 1;
    }
    for (layer = 0; layer < LAYERS; ++layer) {
        printf("layer %" PRIu32 " keeps %zu of %d positions, its budget is %" PRIu32 "\n", layer,
               pb_kvcache_kept_count(pb_kvcache_stack_layer(stack, layer)), TOKENS, budgets[layer]);
    }
    printf("%zu positions held, %zu at the peak, %zu bytes of policy\n", pb_kvcache_stack_resident(stack),
           pb_kvcache_stack_peak_resident(stack), pb_kvcache_stack_memory_bytes(stack));
    pb_kvcache_stack_destroy(stack);
    return 0;
}
