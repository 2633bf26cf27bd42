/*
 * The prompt of a whole model under a budget for every KV head: curves become budgets, one call a layer chooses what each
 * head keeps, and one more leaves its keys and values side by side in exactly the memory that the budgets take.
 *
 * The curves, the attention and the keys here are made up. `pb-kvcache plan --curves` divides measured curves. An engine
 * hands over its own attention, keys and values.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include <pb_kvcache.h>

enum { LAYERS = 4, KV_HEADS = 2, GROUP = 3, WINDOW = 8, TOKENS = 256, HEAD_DIM = 16, POINTS = 4, AVERAGE = 32 };
enum { HEADS = LAYERS * KV_HEADS, QUERY_HEADS = KV_HEADS * GROUP };

typedef float prompt_rows[KV_HEADS][TOKENS][HEAD_DIM];

static float weights[QUERY_HEADS][WINDOW][TOKENS]; /* what the prompt's last queries gave to each position */

/* One layer's prompt: heads further up look at fewer positions. */
static void run_layer(uint32_t layer, prompt_rows keys)
{
    for (size_t head = 0; head < KV_HEADS; ++head) {
        for (size_t token = 0; token < TOKENS; ++token) {
            for (size_t i = 0; i < HEAD_DIM; ++i) {
                keys[head][token][i] = (float)(token * HEAD_DIM + i);
            }
        }
    }
    for (size_t head = 0; head < QUERY_HEADS; ++head) {
        const size_t every = 2 + 5 * layer + head / GROUP;
        for (size_t query = 0; query < WINDOW; ++query) {
            for (size_t token = 0; token < TOKENS; ++token) {
                weights[head][query][token] = token % every == 0 ? 1.0f / (float)(TOKENS / every + 1) : 0.0f;
            }
        }
    }
}

static int fail(pb_kvcache_status status)
{
    fprintf(stderr, "%s\n", pb_kvcache_status_str(status));
    return 1;
}

/* Budgets of all heads from what each loses at a few of them. Head h has enough with 256, 128, 85, ... positions. */
static pb_kvcache_status plan(uint32_t budgets[HEADS])
{
    static const uint32_t grid[POINTS] = {WINDOW + 1, 32, 96, 256};
    static unsigned char workspace[4096];
    double losses[HEADS][POINTS];
    size_t bytes;
    for (size_t head = 0; head < HEADS; ++head) {
        for (size_t point = 0; point < POINTS; ++point) {
            const double enough = 256.0 / (double)(head + 1);
            const double lacks = grid[point] < enough ? 1.0 - grid[point] / enough : 0.0;
            losses[head][point] = enough * lacks * lacks;
        }
    }
    pb_kvcache_divide_params params = PB_KVCACHE_DIVIDE_PARAMS_DEFAULT;
    params.grid = grid;
    params.num_points = POINTS;
    params.losses = losses[0];
    params.total = (uint64_t)AVERAGE * HEADS;
    const pb_kvcache_status status = pb_kvcache_divide_workspace_size(HEADS, POINTS, &bytes);
    return status != PB_KVCACHE_OK ? status : pb_kvcache_divide(&params, workspace, sizeof workspace, budgets, HEADS);
}

int main(void)
{
    uint32_t budgets[HEADS];
    pb_kvcache_status status = plan(budgets);
    if (status != PB_KVCACHE_OK) {
        return fail(status);
    }
    const pb_kvcache_attention attn = {.data = weights,
                                       .num_q_heads = QUERY_HEADS,
                                       .num_kv_heads = KV_HEADS,
                                       .window = WINDOW,
                                       .n = TOKENS,
                                       .head_stride = WINDOW * TOKENS,
                                       .row_stride = TOKENS};
    const pb_kvcache_select_params params = {.pooling = PB_KVCACHE_POOL_MAX, .kernel = 7, .protect = WINDOW};
    size_t workspace_bytes;
    status = pb_kvcache_select_workspace_size(&attn, &params, 0, KV_HEADS, &workspace_bytes);
    if (status != PB_KVCACHE_OK) {
        return fail(status);
    }
    void *workspace = malloc(workspace_bytes);
    float *held[LAYERS] = {NULL};
    size_t rows = 0;
    for (uint32_t layer = 0; workspace != NULL && status == PB_KVCACHE_OK && layer < LAYERS; ++layer) {
        uint32_t kept[KV_HEADS * TOKENS];
        size_t offsets[KV_HEADS + 1];
        prompt_rows *keys = malloc(sizeof *keys);
        if (keys == NULL) {
            break;
        }
        run_layer(layer, *keys);
        status = pb_kvcache_select_ragged(&attn, &params, budgets + layer * KV_HEADS, workspace, workspace_bytes, kept,
                                          KV_HEADS * TOKENS, offsets);
        /* In place: the rows move to the front, and the memory behind them goes back. The values would follow. */
        const pb_kvcache_rows layer_keys = {*keys, KV_HEADS, TOKENS, HEAD_DIM * sizeof(float), sizeof **keys,
                                            HEAD_DIM * sizeof(float)};
        if (status == PB_KVCACHE_OK) {
            status = pb_kvcache_compact_ragged(&layer_keys, kept, offsets, *keys, sizeof *keys);
        }
        if (status != PB_KVCACHE_OK) {
            free(keys);
            break;
        }
        const size_t bytes = offsets[KV_HEADS] * HEAD_DIM * sizeof(float);
        held[layer] = realloc(keys, bytes);
        rows += offsets[KV_HEADS];
        for (size_t head = 0; head < KV_HEADS; ++head) {
            printf("layer %" PRIu32 ", head %zu: %3zu rows from row %zu on, the first of position %" PRIu32 "\n", layer,
                   head, offsets[head + 1] - offsets[head], offsets[head], kept[offsets[head]]);
        }
    }
    printf("%zu of %d rows held, %d on average a head\n", rows, HEADS * TOKENS, AVERAGE);
    for (size_t layer = 0; layer < LAYERS; ++layer) {
        free(held[layer]);
    }
    free(workspace);
    if (status != PB_KVCACHE_OK) {
        return fail(status);
    }
    return rows == (size_t)AVERAGE * HEADS ? 0 : 1;
}
