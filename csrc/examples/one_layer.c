/*
 * One layer's cache through a short generation: observe, evict, move the tensors.
 *
 * The attention here is made up. An engine hands over its own. For the caches of all layers at once, with one call per
 * token, use a stack. For the selection after a prompt, the kernels of select.h.
 */
#include <inttypes.h>
#include <stdio.h>

#include <pb_kvcache.h>

int main(void)
{
    /* Layer 3 of 4, 16 positions a layer on average: the deepest layer of a pyramid keeps the fewest. */
    pb_kvcache_pyramidkv_params params = PB_KVCACHE_PYRAMIDKV_PARAMS_DEFAULT;
    params.budget = 16;
    params.layer = 3;
    params.num_layers = 4;
    params.recent_window = 2;
    params.pool_kernel = 3;
    const pb_kvcache_status refused = pb_kvcache_pyramidkv_check(&params);
    if (refused != PB_KVCACHE_OK) {
        fprintf(stderr, "%s\n", pb_kvcache_status_str(refused));
        return 1;
    }
    pb_kvcache *cache = pb_kvcache_pyramidkv.create(&params, NULL, NULL);
    if (cache == NULL) {
        return 1;
    }

    float attn[17]; /* the capacity: the larger of the share and the budget, plus one */
    uint32_t victims[17];
    for (uint32_t pos = 1; pos <= 12; ++pos) {
        const size_t kept = pb_kvcache_kept_count(cache);
        for (size_t i = 0; i < kept; ++i) {
            attn[i] = i == 0 ? 0.5f : 0.5f / (float)kept; /* a sink, and little elsewhere */
        }
        if (pb_kvcache_pyramidkv.on_decode_step(cache, pos, attn, kept) != PB_KVCACHE_OK) {
            return 1;
        }
        /* UINT32_MAX: down to this layer's own budget, not to the average */
        const size_t dropped = pb_kvcache_pyramidkv.evict(cache, UINT32_MAX, victims, 17);
        for (size_t i = 0; i < dropped; ++i) {
            printf("token %2" PRIu32 ": drop position %" PRIu32 "\n", pos, victims[i]);
        }
    }

    uint32_t kept[17];
    const size_t count = pb_kvcache_kept_count(cache);
    if (pb_kvcache_kept(cache, kept, 17) != PB_KVCACHE_OK) {
        return 1;
    }
    printf("layer 3 evicts to %" PRIu32 " positions; kept:", pb_kvcache_effective_budget(cache));
    for (size_t i = 0; i < count; ++i) {
        printf(" %" PRIu32, kept[i]);
    }
    printf("\n");
    pb_kvcache_pyramidkv.destroy(cache);
    return 0;
}
