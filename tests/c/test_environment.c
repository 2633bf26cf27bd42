/*
 * Every kernel and policy in every floating-point environment (environment.h): no access out of bounds, every output
 * written, positions distinct, ascending and in range. What is decided by integers alone is the same in all of them.
 */
#include <stdlib.h>
#include <string.h>

#include "bits.h"
#include "check.h"
#include "checks.h"
#include "environment.h"
#include "kernels.h"
#include "lanes.h"

#if defined(__SANITIZE_ADDRESS__)
#define GUARD 0u /* the sanitizer sees a step too far */
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define GUARD 0u
#endif
#endif
#ifndef GUARD
#define GUARD 64u
#endif

static uint32_t state = 1;

static uint32_t draw(void)
{
    state = state * 1664525u + 1013904223u;
    return state >> 8;
}

/* ---- Memory of exactly the size that is needed, with a pattern behind it ---- */

static void *guarded(size_t bytes)
{
    unsigned char *memory = malloc(bytes + GUARD + 1);
    memset(memory, 0xA5, bytes + GUARD);
    unsigned char *exact = malloc(bytes + GUARD + (bytes + GUARD == 0));
    memcpy(exact, memory, bytes + GUARD);
    free(memory);
    return exact;
}

static bool intact(const void *memory, size_t bytes)
{
    const unsigned char *end = (const unsigned char *)memory + bytes;
    bool good = true;
    for (size_t i = 0; i < GUARD; ++i) {
        good = good && end[i] == 0xA5;
    }
    return good;
}

/* ---- Numbers that environments disagree on ---- */

enum { KINDS = 6 };

/* Zeros of both signs, subnormals and normals; ties; or all of them below 0 as well. */
static float number(unsigned kind)
{
    const uint32_t random = draw();
    switch (kind) {
    case 0: return float_of(random % 2 == 0 ? 0u : SIGN);
    case 1: return float_of(random % 0x00800000u);                          /* zero and subnormals */
    case 2: return random % 3 == 0 ? float_of(random % 9) : (float)(random % 1000) * 0x1p-130f;
    case 3: return random % 4 == 0 ? 0.0f : float_of(0x00700000u + random % 0x00200000u); /* about the least normal */
    case 4: return (float)(random % 4) * 0.25f;
    default: return float_of(random % 0x01000000u | (random % 2 == 0 ? SIGN : 0u));
    }
}

/* The same, as attention: nothing below 0. */
static float weight(unsigned kind)
{
    return float_of(bits_of(number(kind)) & ~SIGN);
}

static bool ascending(const uint32_t *positions, size_t count, size_t n)
{
    bool good = true;
    for (size_t i = 0; i < count; ++i) {
        good = good && positions[i] < n && (i == 0 || positions[i] > positions[i - 1]);
    }
    return good;
}

/* ---- The choice: by integers, so the same in every environment ---- */

static void choice_of(unsigned environment, unsigned kind, size_t n)
{
    const size_t counts[] = {0, 1, 2, n / 16, n / 2, n - 1, n};
    float *scores = guarded(n * sizeof *scores);
    double *doubles = guarded(n * sizeof *doubles);
    for (size_t i = 0; i < n; ++i) {
        scores[i] = number(kind);
        doubles[i] = (double)scores[i];
    }
    for (size_t c = 0; c < sizeof counts / sizeof counts[0]; ++c) {
        const size_t count = counts[c] < n ? counts[c] : n;
        const uint32_t wanted = (uint32_t)count;
        uint32_t *usual = guarded(count * sizeof *usual);
        uint32_t *chosen = guarded(count * sizeof *chosen);
        pb_kvcache_priv_choose_highest(scores, n, count, usual);
        environment_enter(environment);
        pb_kvcache_priv_choose_highest_of_numbers(scores, n, count, chosen);
        environment_leave();
        CHECK(memcmp(usual, chosen, count * sizeof *chosen) == 0 && intact(chosen, count * sizeof *chosen));
        memset(chosen, 0xA5, count * sizeof *chosen);
        environment_enter(environment);
        const pb_kvcache_status status
            = pb_kvcache_select_top(scores, n, 1, n, &wanted, PB_KVCACHE_NAN_REFUSE, chosen, count, count);
        environment_leave();
        CHECK(status == PB_KVCACHE_OK && memcmp(usual, chosen, count * sizeof *chosen) == 0);
        CHECK(ascending(chosen, count, n) && intact(chosen, count * sizeof *chosen));
        environment_enter(environment);
        pb_kvcache_priv_choose_lowest(doubles, n, count, chosen);
        environment_leave();
        CHECK(ascending(chosen, count, n) && intact(chosen, count * sizeof *chosen));
        free(usual);
        free(chosen);
    }
    free(scores);
    free(doubles);
}

/* Every instruction set's copies of the passes, with bounds that are scores and with more asked for than there is. */
static void passes_of(unsigned environment, unsigned kind, size_t n)
{
    enum { ROOM = 2 * PB_KVCACHE_PRIV_LANES };
    float *scores = guarded(n * sizeof *scores);
    for (size_t i = 0; i < n; ++i) {
        scores[i] = number(kind);
    }
    const int32_t one = key_of(scores[n / 3]);
    const int32_t other = key_of(scores[n / 2]);
    const int32_t low = one < other ? one : other;
    const int32_t high = one < other ? other : one;
    size_t from_high[2];
    const pb_kvcache_priv_lanes *plain = pb_kvcache_priv_lanes_at(0);
    const size_t reaching = plain->reaching(scores, n, high);
    int32_t *usual_keys = guarded(ROOM * sizeof *usual_keys);
    const size_t found = plain->between(scores, n, low, high, &from_high[0], usual_keys, ROOM);
    const size_t kept = found < ROOM - PB_KVCACHE_PRIV_LANES ? found : ROOM - PB_KVCACHE_PRIV_LANES;
    for (unsigned level = 0; level < PB_KVCACHE_PRIV_LEVELS; ++level) {
        const pb_kvcache_priv_lanes *lanes = pb_kvcache_priv_lanes_at(level);
        if (lanes == NULL) {
            continue;
        }
        int32_t *keys = guarded(ROOM * sizeof *keys);
        uint32_t *chosen = guarded(reaching * sizeof *chosen);
        environment_enter(environment);
        const size_t here = lanes->between(scores, n, low, high, &from_high[1], keys, ROOM);
        const size_t reached = lanes->reaching(scores, n, high);
        lanes->above(scores, n, high, n, reaching, chosen); /* more ties than there are */
        environment_leave();
        CHECK(here == found && from_high[1] == from_high[0] && reached == reaching);
        CHECK(memcmp(keys, usual_keys, kept * sizeof *keys) == 0 && intact(keys, ROOM * sizeof *keys));
        CHECK(ascending(chosen, reaching, n) && intact(chosen, reaching * sizeof *chosen));
        /* Counts that are wrong end with the room or with the scores. */
        environment_enter(environment);
        lanes->above(scores, n, low, n, reaching / 2, chosen);
        lanes->above(scores, n, INFINITY_KEY, 0, reaching, chosen);
        environment_leave();
        CHECK(intact(chosen, reaching * sizeof *chosen));
        free(keys);
        free(chosen);
    }
    free(usual_keys);
    free(scores);
}

/* The decode kernels of every instruction set: the same bits as the plainest one has in this environment. */
static void decode_kernels(unsigned environment, unsigned kind, size_t n)
{
    enum { ROWS = 3, KERNEL = 7 };
    const size_t windows = n - KERNEL + 1;
    float *rows[ROWS];
    double *from = guarded(n * sizeof *from);
    double *usual = guarded(n * sizeof *usual);
    for (size_t row = 0; row < ROWS; ++row) {
        rows[row] = guarded(n * sizeof **rows);
        for (size_t i = 0; i < n; ++i) {
            rows[row][i] = weight(kind);
        }
    }
    for (size_t i = 0; i < n; ++i) {
        from[i] = (double)weight(kind);
    }
    const float *const read[ROWS] = {rows[0], rows[1], rows[2]};
    environment_enter(environment);
    for (size_t i = 0; i < n; ++i) {
        volatile double sum = from[i];
        for (size_t row = 0; row < ROWS; ++row) {
            sum += (double)rows[row][i];
        }
        usual[i] = sum;
    }
    environment_leave();
    for (unsigned level = 0; level < PB_KVCACHE_PRIV_LEVELS; ++level) {
        const pb_kvcache_priv_lanes *lanes = pb_kvcache_priv_lanes_at(level);
        if (lanes == NULL) {
            continue;
        }
        double *sums = guarded(n * sizeof *sums);
        double lowest;
        environment_enter(environment);
        lanes->add_rows(read, ROWS, from, n, n, sums);
        const size_t at = lanes->lowest(usual, windows, KERNEL, &lowest);
        const size_t lowest_at = pb_kvcache_priv_lanes_at(0)->lowest(usual, windows, KERNEL, &lowest);
        const bool plain = lanes->plain_weights(rows[0], n);
        environment_leave();
        CHECK(memcmp(usual, sums, n * sizeof *sums) == 0 && intact(sums, n * sizeof *sums));
        CHECK(at < windows && at == lowest_at && plain);
        const float old = rows[0][n - 1];
        rows[0][n - 1] = float_of(SIGN | 1u); /* below 0 where subnormal numbers are flushed, too */
        environment_enter(environment);
        const bool refused = !lanes->plain_weights(rows[0], n) && !pb_kvcache_priv_weights_ok(rows[0], n);
        environment_leave();
        CHECK(refused);
        rows[0][n - 1] = old;
        free(sums);
    }
    for (size_t row = 0; row < ROWS; ++row) {
        free(rows[row]);
    }
    free(from);
    free(usual);
}

/* -0.0 is 0.0: of zeros of both signs the lower positions stay, and the lower ones go. */
static void zeros(unsigned environment)
{
    enum { N = 5000, COUNT = 77 };
    float *scores = guarded(N * sizeof *scores);
    double *doubles = guarded(N * sizeof *doubles);
    uint32_t chosen[2][COUNT];
    bool good = true;
    for (size_t i = 0; i < N; ++i) {
        scores[i] = number(0);
        doubles[i] = i % 3 == 0 ? -0.0 : 0.0;
    }
    environment_enter(environment);
    pb_kvcache_priv_choose_highest_of_numbers(scores, N, COUNT, chosen[0]);
    pb_kvcache_priv_choose_lowest(doubles, N, COUNT, chosen[1]);
    environment_leave();
    for (uint32_t i = 0; i < COUNT; ++i) {
        good = good && chosen[0][i] == i && chosen[1][i] == i;
    }
    environment_enter(environment);
    pb_kvcache_priv_choose_highest_of_numbers(scores, N, 1, chosen[0]);
    pb_kvcache_priv_choose_lowest(doubles, N, 1, chosen[1]);
    environment_leave();
    CHECK(good && chosen[0][0] == 0 && chosen[1][0] == 0);
    free(scores);
    free(doubles);
}

/* ---- The prefill selection ---- */

static void selection(unsigned environment, unsigned kind, size_t n, pb_kvcache_pooling pooling, size_t kernel, int logits)
{
    enum { Q_HEADS = 4, KV_HEADS = 2, WINDOW = 3 };
    float *data = guarded(Q_HEADS * WINDOW * n * sizeof *data);
    for (size_t i = 0; i < Q_HEADS * WINDOW * n; ++i) {
        data[i] = logits ? number(kind) : weight(kind);
    }
    const pb_kvcache_attention attn = {.data = data,
                                       .dtype = PB_KVCACHE_FLOAT32,
                                       .logits = logits,
                                       .scale = 0.125f,
                                       .num_q_heads = Q_HEADS,
                                       .num_kv_heads = KV_HEADS,
                                       .window = WINDOW,
                                       .n = n,
                                       .head_stride = (ptrdiff_t)(WINDOW * n),
                                       .row_stride = (ptrdiff_t)n};
    /* The paper's rule, and one with sinks, weights and less protected than the window */
    const size_t protect = kind % 2 == 0 ? WINDOW : WINDOW / 2;
    const size_t scored = n - protect;
    float *weights = guarded(KV_HEADS * scored * sizeof *weights);
    for (size_t i = 0; i < KV_HEADS * scored; ++i) {
        weights[i] = 0.5f * (float)(i % 4);
    }
    const pb_kvcache_select_params params = {.reduce = (pb_kvcache_reduce)(kind % 3),
                                             .pooling = pooling,
                                             .kernel = kernel,
                                             .edge = (pb_kvcache_edge)(kind % 2),
                                             .protect = protect,
                                             .sinks = kind % 2 == 0 ? 0 : 1,
                                             .weights = kind % 2 == 0 ? NULL : weights,
                                             .weights_stride = scored};
    const uint32_t budgets[KV_HEADS] = {(uint32_t)(WINDOW + scored / 2), (uint32_t)n};
    size_t size = 0;
    CHECK(pb_kvcache_select_workspace_size(&attn, &params, 0, KV_HEADS, &size) == PB_KVCACHE_OK);
    unsigned char *workspace = guarded(size);
    uint32_t *kept = guarded(KV_HEADS * n * sizeof *kept);
    uint32_t *again = guarded(KV_HEADS * n * sizeof *again);
    float *scores = guarded(KV_HEADS * scored * sizeof *scores);
    enum { BLOCK = 4 };
    const size_t all_blocks = (n - 1) / BLOCK + 1;
    const uint32_t block_budgets[KV_HEADS] = {(uint32_t)(all_blocks / 2 + 2) * BLOCK, (uint32_t)all_blocks * BLOCK};
    uint32_t *blocks = guarded(KV_HEADS * all_blocks * sizeof *blocks);
    environment_enter(environment);
    const pb_kvcache_status selected
        = pb_kvcache_select(&attn, &params, budgets, 0, KV_HEADS, workspace, size, kept, n, KV_HEADS * n);
    const pb_kvcache_status scored_ = pb_kvcache_window_scores(&attn, params.reduce, params.nan, protect, 0, KV_HEADS,
                                                               workspace, size, scores, scored, KV_HEADS * scored);
    const pb_kvcache_status from_scores
        = pb_kvcache_select_from_scores(scores, scored, KV_HEADS, n, &params, budgets, workspace, size, again, n,
                                        KV_HEADS * n);
    const pb_kvcache_status in_blocks
        = pb_kvcache_block_select(scores, scored, KV_HEADS, n, protect, BLOCK, params.reduce, params.nan, block_budgets,
                                  workspace, size, blocks, all_blocks, KV_HEADS * all_blocks);
    environment_leave();
    CHECK(in_blocks == PB_KVCACHE_OK);
    for (size_t head = 0; head < KV_HEADS; ++head) {
        const size_t wanted = block_budgets[head] / BLOCK < all_blocks ? block_budgets[head] / BLOCK : all_blocks;
        CHECK(ascending(blocks + head * all_blocks, wanted, all_blocks));
    }
    CHECK(intact(blocks, KV_HEADS * all_blocks * sizeof *blocks));
    free(blocks);
    CHECK(selected == PB_KVCACHE_OK && scored_ == PB_KVCACHE_OK && from_scores == PB_KVCACHE_OK);
    for (size_t head = 0; head < KV_HEADS; ++head) {
        const uint32_t *row = kept + head * n;
        CHECK(ascending(row, budgets[head], n) && row[budgets[head] - 1] == n - 1);
        CHECK(memcmp(row, again + head * n, budgets[head] * sizeof *row) == 0); /* the same calls, the same bits */
    }
    CHECK(intact(workspace, size) && intact(kept, KV_HEADS * n * sizeof *kept)
          && intact(scores, KV_HEADS * scored * sizeof *scores));
    free(workspace);
    free(kept);
    free(again);
    free(scores);
    free(weights);
    free(data);
}

/* ---- Policies ---- */

/* One step and an eviction. Returns false where something is not as promised. */
static bool decode(const pb_kvcache_vtable *policy, pb_kvcache *cache, uint32_t pos, uint32_t budget, unsigned kind)
{
    const size_t count = pb_kvcache_kept_count(cache);
    float *attn = guarded(count * sizeof *attn);
    uint32_t *kept = guarded((count + 1) * sizeof *kept);
    for (size_t i = 0; i < count; ++i) {
        attn[i] = weight(kind);
    }
    bool good = policy->on_decode_step(cache, pos, attn, count) == PB_KVCACHE_OK;
    good = good && pb_kvcache_kept(cache, kept, count + 1) == PB_KVCACHE_OK && ascending(kept, count + 1, pos + 1);
    const size_t leaving = pb_kvcache_evict_count(cache, budget);
    uint32_t *victims = guarded(leaving * sizeof *victims);
    good = good && policy->evict(cache, budget, victims, leaving) == leaving;
    good = good && ascending(victims, leaving, pos + 1) && intact(victims, leaving * sizeof *victims);
    size_t at = 0;
    for (size_t i = 0; good && i < leaving; ++i) { /* each was kept, and no longer is */
        while (at <= count && kept[at] < victims[i]) {
            ++at;
        }
        good = at <= count && kept[at] == victims[i] && pb_kvcache_contains(cache, victims[i]) == 0;
    }
    good = good && pb_kvcache_kept_count(cache) == count + 1 - leaving;
    free(attn);
    free(kept);
    free(victims);
    return good;
}

static void policies(unsigned environment, unsigned kind)
{
    static const pb_kvcache_snapkv_params snapkv = {40, 4, 5, 3, 0, 0};
    static const pb_kvcache_pyramidkv_params pyramidkv = {40, 1, 4, 3, 4, 5, 3, 0, 0};
    static const pb_kvcache_sliding_window_params sliding_window = {40, 0, 0};
    static const pb_kvcache_streaming_llm_params streaming_llm = {40, 3, 0, 0};
    static const pb_kvcache_h2o_params h2o = {40, 4, 0, 0};
    static const pb_kvcache_tova_params tova = {40, 0, 0};
    static const pb_kvcache_scissorhands_params scissorhands = {40, 4, 0, 0};
    const struct {
        const pb_kvcache_vtable *policy;
        const void *params;
    } all[] = {{&pb_kvcache_snapkv, &snapkv},
               {&pb_kvcache_pyramidkv, &pyramidkv},
               {&pb_kvcache_sliding_window, &sliding_window},
               {&pb_kvcache_streaming_llm, &streaming_llm},
               {&pb_kvcache_h2o, &h2o},
               {&pb_kvcache_tova, &tova},
               {&pb_kvcache_scissorhands, &scissorhands}};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; ++i) {
        pb_kvcache *cache = all[i].policy->create(all[i].params, NULL, NULL);
        bool good = cache != NULL;
        environment_enter(environment);
        for (uint32_t pos = 1; good && pos < 160; ++pos) {
            /* Mostly one victim, now and then many. */
            const uint32_t budget = pos % 37 == 0 ? 11 : UINT32_MAX;
            good = decode(all[i].policy, cache, pos, budget, kind);
        }
        environment_leave();
        CHECK(good);
        all[i].policy->destroy(cache);
    }
}

static void stack(unsigned environment, unsigned kind)
{
    enum { LAYERS = 3, MOST = 64 };
    static const uint32_t budgets[LAYERS] = {30, 12, 20};
    const pb_kvcache_stack_params params = {LAYERS, 0, 0, 4, 5, 3, 0, 0};
    pb_kvcache_stack *caches = pb_kvcache_stack_create(&params, budgets, NULL);
    float rows[LAYERS][MOST];
    const float *attn[LAYERS] = {rows[0], rows[1], rows[2]};
    size_t lens[LAYERS];
    size_t offsets[LAYERS + 1];
    bool good = caches != NULL;
    environment_enter(environment);
    for (uint32_t pos = 1; good && pos < 120; ++pos) {
        for (uint32_t layer = 0; layer < LAYERS; ++layer) {
            lens[layer] = pb_kvcache_kept_count(pb_kvcache_stack_layer(caches, layer));
            for (size_t i = 0; i < lens[layer]; ++i) {
                rows[layer][i] = weight(kind);
            }
        }
        good = pb_kvcache_stack_on_decode_step(caches, pos, attn, lens) == PB_KVCACHE_OK;
        const size_t count = pb_kvcache_stack_evict_count(caches);
        uint32_t *victims = guarded(count * sizeof *victims);
        good = good && pb_kvcache_stack_evict(caches, victims, count, offsets, LAYERS + 1) == PB_KVCACHE_OK;
        good = good && offsets[LAYERS] == count && intact(victims, count * sizeof *victims);
        for (uint32_t layer = 0; good && layer < LAYERS; ++layer) {
            good = ascending(victims + offsets[layer], offsets[layer + 1] - offsets[layer], pos + 1);
        }
        free(victims);
    }
    environment_leave();
    CHECK(good);
    pb_kvcache_stack_destroy(caches);
}

/* ---- What is integer arithmetic altogether ---- */

static void plans(unsigned environment)
{
    enum { LAYERS = 33 };
    double weights[LAYERS];
    uint32_t usual[LAYERS];
    uint32_t budgets[LAYERS];
    for (uint32_t round = 0; round < 24; ++round) {
        pb_kvcache_plan_params p = PB_KVCACHE_PLAN_PARAMS_DEFAULT;
        for (size_t layer = 0; layer < LAYERS; ++layer) {
            weights[layer] = layer % 5 == 0 ? 4.9e-324 * (1 + draw() % 99) : 1.0 / (1 + draw() % 1000);
        }
        p.shape = (pb_kvcache_plan_shape)(round % 4);
        p.weights = p.shape == PB_KVCACHE_PLAN_WEIGHTS ? weights : NULL;
        p.ratio = round % 3 == 0 ? 4.9e-324 * (1 + draw() % 9) : 1.0 / (1 + draw() % 100) + draw() % 9;
        p.total = 512 * LAYERS + draw() % 1000;
        p.minimum = round % 2 == 0 ? 1 : 300;
        p.maximum = round % 2 == 0 ? UINT32_MAX : 900;
        CHECK(pb_kvcache_plan(&p, usual, LAYERS) == PB_KVCACHE_OK);
        environment_enter(environment);
        const pb_kvcache_status status = pb_kvcache_plan(&p, budgets, LAYERS);
        environment_leave();
        CHECK(status == PB_KVCACHE_OK && memcmp(usual, budgets, sizeof usual) == 0);
    }
}

int main(void)
{
    static const size_t lengths[] = {1, 5, 16, 17, 300, 4095, 4096, 5003};
    for (unsigned environment = 0; environment < ENVIRONMENTS; ++environment) {
        for (unsigned kind = 0; kind < KINDS; ++kind) {
            for (size_t l = 0; l < sizeof lengths / sizeof lengths[0]; ++l) {
                choice_of(environment, kind, lengths[l]);
                passes_of(environment, kind, lengths[l]);
            }
            selection(environment, kind, 41, PB_KVCACHE_POOL_MAX, 5, 0);
            selection(environment, kind, 41, PB_KVCACHE_POOL_AVERAGE, 5, 0);
            selection(environment, kind, 5003, PB_KVCACHE_POOL_MAX, 7, 1);
            selection(environment, kind, 5003, PB_KVCACHE_POOL_AVERAGE, 1, 1);
            decode_kernels(environment, kind, 7);
            decode_kernels(environment, kind, 203);
            policies(environment, kind);
            stack(environment, kind);
        }
        zeros(environment);
        plans(environment);
    }
    printf("%u floating-point environments\n", ENVIRONMENTS);
    return END();
}
