/*
 * libFuzzer target: the choice, the selection and every policy in any floating-point environment, which the first byte
 * picks. Whatever it is, every output is written, and positions are distinct, ascending and in range. Built with
 * -fsanitize=fuzzer,address,undefined.
 */
#include "../../tests/c/environment.h"
#include "input.h"

/* Zeros of both signs, subnormals, the least normals and a few ties, or any finite weight. */
static float weight(input *in)
{
    const uint32_t kind = take(in, 1);
    uint32_t bits = kind < 0x40   ? 0
                    : kind < 0x80 ? take(in, 2) << 7
                    : kind < 0xC0 ? 0x00700000u + take(in, 2) * 16
                                  : take(in, 4) & 0x7FFFFFFFu;
    float value;
    if (bits >= 0x7F800000u || bits < 0x00000010u) {
        bits = (kind & 3u) * 0x3E800000u / 4;
    }
    memcpy(&value, &bits, sizeof value);
    return value;
}

static void ascend(const uint32_t *positions, size_t count, uint64_t end)
{
    for (size_t i = 0; i < count; ++i) {
        MUST(positions[i] < end && (i == 0 || positions[i] > positions[i - 1]));
    }
}

/* Scores of either sign, in memory of exactly their size. The choice is by integers: the same in every environment. */
static void choice(input *in, unsigned environment)
{
    const size_t n = 1 + take(in, 2) % 5000;
    const uint32_t count = (uint32_t)(take(in, 2) % (n + 1));
    const uint32_t step = take(in, 1) % 61 + 1; /* the fuzzer's numbers again and again: ties */
    float *scores = malloc(n * sizeof *scores);
    uint32_t *usual = malloc(count * sizeof *usual + 1);
    uint32_t *chosen = malloc(count * sizeof *chosen + 1);
    for (size_t i = 0; i < n; ++i) {
        scores[i] = i < step ? weight(in) : scores[i - step];
        scores[i] = i % 5 == 4 ? -scores[i] : scores[i];
    }
    MUST(pb_kvcache_select_top(scores, n, 1, n, &count, PB_KVCACHE_NAN_REFUSE, usual, count, count) == PB_KVCACHE_OK);
    memset(chosen, 0xFF, count * sizeof *chosen);
    environment_enter(environment);
    const pb_kvcache_status status
        = pb_kvcache_select_top(scores, n, 1, n, &count, PB_KVCACHE_NAN_REFUSE, chosen, count, count);
    environment_leave();
    MUST(status == PB_KVCACHE_OK && memcmp(usual, chosen, count * sizeof *chosen) == 0);
    ascend(chosen, count, n);
    free(scores);
    free(usual);
    free(chosen);
}

static void selection(input *in, unsigned environment)
{
    const size_t window = 1 + take(in, 1) % 4;
    const size_t n = window + 1 + take(in, 1);
    const uint32_t budget = (uint32_t)(window + take(in, 1) % (n - window + 1));
    const uint32_t options = take(in, 1);
    float *data = malloc(window * n * sizeof *data);
    for (size_t i = 0; i < window * n; ++i) {
        data[i] = weight(in);
        data[i] = data[i] < 1e30f ? data[i] : 1.0f; /* sums stay finite */
    }
    const pb_kvcache_attention attn = {.data = data,
                                       .dtype = PB_KVCACHE_FLOAT32,
                                       .logits = (int)(options & 1u),
                                       .scale = 0.5f,
                                       .num_q_heads = 1,
                                       .num_kv_heads = 1,
                                       .window = window,
                                       .n = n,
                                       .head_stride = (ptrdiff_t)(window * n),
                                       .row_stride = (ptrdiff_t)n};
    const pb_kvcache_select_params params = {.reduce = (pb_kvcache_reduce)(options / 2 % 3),
                                             .pooling = (pb_kvcache_pooling)(options / 8 % 2),
                                             .kernel = 1 + 2 * (options / 16 % 8),
                                             .edge = (pb_kvcache_edge)(options / 128),
                                             .nan = PB_KVCACHE_NAN_REFUSE,
                                             .protect = window};
    size_t size = 0;
    MUST(pb_kvcache_select_workspace_size(&attn, &params, 0, 1, &size) == PB_KVCACHE_OK);
    void *workspace = malloc(size);
    uint32_t *kept = malloc(budget * sizeof *kept);
    memset(kept, 0xFF, budget * sizeof *kept);
    environment_enter(environment);
    const pb_kvcache_status status
        = pb_kvcache_select(&attn, &params, &budget, 0, 1, workspace, size, kept, budget, budget);
    environment_leave();
    MUST(status == PB_KVCACHE_OK);
    ascend(kept, budget, n);
    free(data);
    free(workspace);
    free(kept);
}

static void policy(input *in, unsigned environment)
{
    static const uint32_t params[7][9] = {{9, 2, 3, 3}, {9, 1, 3, 2, 2, 3, 3}, {9}, {9, 2}, {9, 2}, {9}, {9, 2}};
    static const pb_kvcache_vtable *const all[7]
        = {&pb_kvcache_snapkv, &pb_kvcache_pyramidkv, &pb_kvcache_sliding_window, &pb_kvcache_streaming_llm,
           &pb_kvcache_h2o,    &pb_kvcache_tova,      &pb_kvcache_scissorhands};
    const size_t which = take(in, 1) % 7;
    const pb_kvcache_vtable *vtable = all[which];
    pb_kvcache *cache = vtable->create(params[which], NULL, NULL);
    MUST(cache != NULL);
    environment_enter(environment);
    for (uint32_t pos = 1; in->left > 0 && pos < 64; ++pos) {
        const size_t count = pb_kvcache_kept_count(cache);
        float *attn = malloc(count * sizeof *attn + 1);
        for (size_t i = 0; i < count; ++i) {
            attn[i] = weight(in);
        }
        MUST(vtable->on_decode_step(cache, pos, attn, count) == PB_KVCACHE_OK);
        free(attn);
        const uint32_t budget = take(in, 1) % 16 == 0 ? take(in, 1) % 9 : UINT32_MAX;
        const size_t leaving = pb_kvcache_evict_count(cache, budget);
        uint32_t *victims = malloc(leaving * sizeof *victims + 1);
        memset(victims, 0xFF, leaving * sizeof *victims);
        MUST(vtable->evict(cache, budget, victims, leaving) == leaving);
        ascend(victims, leaving, pos + 1);
        MUST(pb_kvcache_kept_count(cache) == count + 1 - leaving);
        free(victims);
    }
    environment_leave();
    vtable->destroy(cache);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    input in = {data, size};
    const unsigned environment = take(&in, 1) % ENVIRONMENTS;
    const uint32_t kind = take(&in, 1);
    if (kind % 8 == 0) {
        choice(&in, environment);
    } else if (kind % 4 == 1) {
        selection(&in, environment);
    } else {
        policy(&in, environment);
    }
    return 0;
}
