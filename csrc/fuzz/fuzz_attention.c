/*
 * pb_kvcache_decode_weights on any sizes and any bits, in memory of exactly the size it is told: it answers with weights
 * that are at least 0 and finite, or refuses and leaves them as they were.
 */
#include <float.h>

#include "input.h"

/* Bytes from the input, repeated where it ends. */
static void *filled(input *in, size_t size)
{
    unsigned char *bytes = malloc(size);
    MUST(bytes != NULL);
    for (size_t i = 0; i < size; ++i) {
        bytes[i] = (unsigned char)take(in, 1);
    }
    return bytes;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    input in = {data, size};
    uint64_t offsets[4];
    uint32_t counts[4];
    uint32_t cache = 99;
    size_t rows = 0;
    size_t bytes = 0;
    pb_kvcache_decode_attention attn = {.dtype = (pb_kvcache_dtype)(take(&in, 1) % 3),
                                        .reduce = (pb_kvcache_reduce)(take(&in, 1) % 3),
                                        .num_caches = 1 + take(&in, 1) % 4,
                                        .group = 1 + take(&in, 1) % 3,
                                        .head_dim = 1 + take(&in, 1) % 40};
    for (size_t c = 0; c < attn.num_caches; ++c) {
        offsets[c] = rows + take(&in, 1) % 3;
        counts[c] = take(&in, 1) % 70;
        rows = (size_t)offsets[c] + counts[c];
    }
    const uint32_t scale = take(&in, 4);
    const uint32_t softcap = take(&in, 1) % 2 == 0 ? 0 : take(&in, 4);
    memcpy(&attn.scale, &scale, sizeof scale);
    memcpy(&attn.softcap, &softcap, sizeof softcap);
    attn.key_stride = attn.head_dim + take(&in, 1) % 3;
    attn.key_capacity = rows == 0 ? attn.head_dim : (rows - 1) * attn.key_stride + attn.head_dim;
    attn.offsets = offsets;
    attn.counts = counts;
    const size_t element = attn.dtype == PB_KVCACHE_FLOAT32 ? 4 : 2;
    const size_t q_heads = attn.num_caches * attn.group;
    void *queries = filled(&in, q_heads * attn.head_dim * element);
    void *keys = filled(&in, attn.key_capacity * element);
    float *sinks = take(&in, 1) % 2 == 0 ? NULL : filled(&in, q_heads * sizeof *sinks);
    attn.queries = queries;
    attn.keys = keys;
    attn.sinks = sinks;
    MUST(pb_kvcache_decode_weights_workspace_size(&attn, &bytes) == PB_KVCACHE_OK);
    void *workspace = malloc(bytes);
    float *weights = malloc(attn.num_caches * 70 * sizeof *weights);
    MUST(workspace != NULL && weights != NULL);
    for (size_t i = 0; i < attn.num_caches * 70; ++i) {
        weights[i] = -1.0f;
    }
    const pb_kvcache_status status
        = pb_kvcache_decode_weights(&attn, workspace, bytes, weights, 70, attn.num_caches * 70, &cache);
    MUST(status == PB_KVCACHE_OK || status == PB_KVCACHE_ERROR_SCALE || status == PB_KVCACHE_ERROR_LOGIT);
    MUST(status != PB_KVCACHE_OK || cache == attn.num_caches);
    MUST(status != PB_KVCACHE_ERROR_LOGIT || cache < attn.num_caches);
    for (size_t c = 0; c < attn.num_caches; ++c) {
        for (size_t i = 0; i < 70; ++i) {
            const float weight = weights[c * 70 + i];
            MUST(status == PB_KVCACHE_OK && i < counts[c] ? weight >= 0.0f && weight <= FLT_MAX : weight == -1.0f);
        }
    }
    free(queries);
    free(keys);
    free(sinks);
    free(workspace);
    free(weights);
    return 0;
}
