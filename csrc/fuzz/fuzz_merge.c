/*
 * pb_kvcache_merge_nearest on any sizes and any bits, in memory of exactly the size it is told: it answers with finite
 * rows, those that are protected as they were, or refuses and leaves the outputs as they were.
 */
#include <float.h>

#include "input.h"

/* Floats of any bits from the input, or small ones. */
static float *filled(input *in, size_t count, bool small)
{
    float *floats = malloc((count + 1) * sizeof *floats);
    MUST(floats != NULL);
    for (size_t i = 0; i < count; ++i) {
        const uint32_t bits = take(in, small ? 1 : 4);
        floats[i] = (float)bits / 32.0f - 4.0f;
        if (!small) {
            memcpy(floats + i, &bits, sizeof bits);
        }
    }
    return floats;
}

static bool finite(const float *floats, size_t count)
{
    bool all = true;
    for (size_t i = 0; i < count; ++i) {
        all = all && floats[i] >= -FLT_MAX && floats[i] <= FLT_MAX;
    }
    return all;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    input in = {data, size};
    uint32_t kept[160];
    size_t bytes = 0;
    const bool small = take(&in, 1) % 4 != 0;
    pb_kvcache_merge merge = {.n = 1 + take(&in, 1) % 150,
                              .head_dim = 1 + take(&in, 1) % 20,
                              .protect = take(&in, 1) % 16,
                              .num_queries = 1 + take(&in, 1) % 6,
                              .kept = kept};
    const uint32_t scale = take(&in, 4);
    merge.scale = 0.25f;
    if (take(&in, 1) % 4 == 0) {
        memcpy(&merge.scale, &scale, sizeof scale);
    }
    merge.window = take(&in, 1) % 8; /* often none that fits */
    merge.row_stride = merge.head_dim + take(&in, 1) % 3;
    const uint32_t steps = 1 + take(&in, 1) % 9;
    for (uint32_t at = take(&in, 1) % 8; at < merge.n; at += 1 + take(&in, 1) % steps) {
        kept[merge.num_kept++] = at;
    }
    const size_t elements = (merge.n - 1) * merge.row_stride + merge.head_dim;
    float *keys = filled(&in, elements, small);
    float *values = filled(&in, elements, true);
    float *queries = filled(&in, merge.num_queries * merge.head_dim, small);
    float *lse = take(&in, 1) % 2 == 0 ? NULL : filled(&in, merge.num_queries, small);
    merge.keys = keys;
    merge.values = values;
    merge.queries = queries;
    merge.lse = lse;

    MUST(pb_kvcache_merge_workspace_size(&merge, &bytes) == PB_KVCACHE_OK);
    const size_t rows = merge.num_kept * merge.head_dim;
    void *workspace = malloc(bytes);
    float *out_keys = malloc((rows + 1) * sizeof(float));
    float *out_values = malloc((rows + 1) * sizeof(float));
    float *bias = malloc((merge.num_kept + 1) * sizeof(float));
    MUST(workspace != NULL && out_keys != NULL && out_values != NULL && bias != NULL);
    memset(out_keys, 1, (rows + 1) * sizeof(float));
    memset(out_values, 1, (rows + 1) * sizeof(float));
    memset(bias, 1, (merge.num_kept + 1) * sizeof(float));
    const pb_kvcache_status status = pb_kvcache_merge_nearest(&merge, workspace, bytes, out_keys, out_values,
                                                              merge.head_dim, rows, bias, merge.num_kept);
    const bool fits = merge.window <= merge.n && (merge.window == 0 || merge.num_queries % merge.window == 0);
    MUST((status == PB_KVCACHE_ERROR_WINDOW) <= !fits && (fits || status != PB_KVCACHE_OK));
    MUST(status == PB_KVCACHE_OK || status == PB_KVCACHE_ERROR_SCALE || status == PB_KVCACHE_ERROR_WINDOW
         || status == PB_KVCACHE_ERROR_ROW_VALUE || status == PB_KVCACHE_ERROR_LOGIT);
    if (status == PB_KVCACHE_OK) {
        MUST(finite(out_keys, rows) && finite(out_values, rows) && finite(bias, merge.num_kept));
        for (size_t i = 0; i < merge.num_kept; ++i) {
            const float *key = keys + kept[i] * merge.row_stride;
            const bool last = merge.num_kept - i <= merge.protect || merge.num_kept == merge.n;
            MUST(!last || memcmp(out_keys + i * merge.head_dim, key, merge.head_dim * sizeof(float)) == 0);
            MUST(!last || bias[i] == 0.0f);
        }
    }
    const size_t from = status == PB_KVCACHE_OK ? rows : 0; /* what nobody may have written */
    for (size_t i = from; i <= rows; ++i) {
        MUST(memcmp(out_keys + i, "\1\1\1\1", 4) == 0 && memcmp(out_values + i, "\1\1\1\1", 4) == 0);
    }
    MUST(memcmp(bias + (status == PB_KVCACHE_OK ? merge.num_kept : 0), "\1\1\1\1", 4) == 0);
    free(keys);
    free(values);
    free(queries);
    free(lse);
    free(workspace);
    free(out_keys);
    free(out_values);
    free(bias);
    return 0;
}
