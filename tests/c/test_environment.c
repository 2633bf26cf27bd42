/*
 * Any floating-point environment: subnormal numbers flushed (FTZ), read as 0 (DAZ), both, and four rounding modes. Which
 * positions win may change. That all of them are written, ascending, distinct and in range may not.
 */
#include <fenv.h>
#include <stdlib.h>
#include <string.h>

#include "bits.h"
#include "check.h"
#include "kernels.h"
#include "lanes.h"

#if defined(__SSE2__)
#include <xmmintrin.h>
#define MODES 4u
#else
#define MODES 1u
#endif

#define GUARD 0xA5A5A5A5u

/* true where the machine has the environment, which then holds. Environment 0 is the default one. */
static bool enter(unsigned environment)
{
    static const int roundings[] = {FE_TONEAREST,
#ifdef FE_UPWARD
                                    FE_UPWARD,
#endif
#ifdef FE_DOWNWARD
                                    FE_DOWNWARD,
#endif
#ifdef FE_TOWARDZERO
                                    FE_TOWARDZERO
#endif
    };
    const unsigned rounding = environment / MODES;
    if (rounding >= sizeof roundings / sizeof roundings[0] || fesetround(roundings[rounding]) != 0) {
        return false;
    }
#if defined(__SSE2__)
    static const unsigned flush[MODES] = {0, 0x8000u, 0x0040u, 0x8040u};
    _mm_setcsr((_mm_getcsr() & ~0x8040u) | flush[environment % MODES]);
#endif
    return true;
}

static void leave(void)
{
    (void)enter(0);
}

static uint32_t state = 1;

static uint32_t next(void)
{
    state ^= state << 13;
    state ^= state >> 17;
    state ^= state << 5;
    return state;
}

/* Zeros of both signs, subnormal numbers, ties and normal numbers, by their bits. */
static float number(unsigned kind)
{
    const uint32_t sign = kind >= 3 ? next() & SIGN : 0;
    const uint32_t r = next();
    switch (r % (kind % 3 + 2)) {
    case 0: return float_of(r & 64u ? SIGN : 0); /* weights, too, may be -0.0 */
    case 1: return float_of((next() & 0x007FFFFFu) | sign);
    case 2: return float_of(0x3F000000u | sign);
    default: return float_of((0x00800000u + next() % 0x3F000000u) | sign);
    }
}

#define KINDS 6u

/* `count` numbers in memory of exactly their size, before a guard. */
static uint32_t *guarded(size_t count)
{
    uint32_t *array = malloc((count + 1) * sizeof *array);
    for (size_t i = 0; i <= count; ++i) {
        array[i] = GUARD;
    }
    return array;
}

static bool good(const uint32_t *chosen, size_t count, size_t n)
{
    bool ok = chosen[count] == GUARD;
    for (size_t i = 0; i < count; ++i) {
        ok = ok && chosen[i] < n && (i == 0 || chosen[i] > chosen[i - 1]);
    }
    return ok;
}

/* By keys, the choice is the same in every environment: the reference is made of integers alone. */
static bool highest(const uint32_t *chosen, size_t count, const float *scores, size_t n)
{
    int32_t worst = INT32_MAX;
    for (size_t i = 0; i < count; ++i) {
        const int32_t key = key_of(scores[chosen[i]]);
        worst = key < worst ? key : worst;
    }
    bool passed = false; /* one equal to the worst was left */
    bool ok = true;
    for (size_t i = 0, taken = 0; i < n && count > 0; ++i) {
        const int32_t key = key_of(scores[i]);
        if (taken < count && chosen[taken] == i) {
            ok = ok && !(passed && key == worst);
            ++taken;
        } else {
            ok = ok && key <= worst;
            passed = passed || key == worst;
        }
    }
    return ok;
}

static void choose_and_pool(size_t n, unsigned kind)
{
    float *scores = malloc(n * sizeof *scores);
    double *doubles = malloc(n * sizeof *doubles);
    double *pooled_doubles = malloc(n * sizeof *doubles);
    for (size_t i = 0; i < n; ++i) {
        scores[i] = number(kind);
        doubles[i] = i % 7 == 0 ? 0x1p-1060 * (double)(i % 5) : (double)scores[i];
    }
    const size_t counts[] = {0, 1, 2, n / 16, n / 2, n - 1, n};
    for (size_t c = 0; c < sizeof counts / sizeof counts[0]; ++c) {
        const size_t count = counts[c];
        const uint32_t asked = (uint32_t)count;
        uint32_t *chosen = guarded(count);
        CHECK(pb_kvcache_select_top(scores, n, 1, n, &asked, PB_KVCACHE_NAN_REFUSE, chosen, n, count) == PB_KVCACHE_OK);
        CHECK(good(chosen, count, n) && highest(chosen, count, scores, n));
        uint32_t *again = guarded(count);
        pb_kvcache_priv_choose_highest(scores, n, count, again);
        CHECK(memcmp(chosen, again, (count + 1) * sizeof *again) == 0);
        pb_kvcache_priv_choose_lowest(doubles, n, count, again);
        CHECK(good(again, count, n));
        free(again);
        free(chosen);
    }
    /* The passes themselves at every level: one answer, and no step beyond count where the ties are said to be more. */
    const int32_t bounds[] = {-INFINITY_KEY, -5, 0, 1, key_of(0.5f), INFINITY_KEY};
    for (unsigned level = 0; level < PB_KVCACHE_PRIV_LEVELS; ++level) {
        const pb_kvcache_priv_lanes *lanes = pb_kvcache_priv_lanes_at(level);
        for (size_t b = 0; lanes != NULL && b + 1 < sizeof bounds / sizeof bounds[0]; ++b) {
            size_t reach = 0;
            size_t above = 0;
            size_t inside = 0;
            for (size_t i = 0; i < n; ++i) {
                const int32_t key = key_of(scores[i]);
                reach += key >= bounds[b + 1];
                inside += key > bounds[b] && key < bounds[b + 1];
                above += key > bounds[b];
            }
            size_t from_high;
            int32_t *keys = malloc((64 + 1) * sizeof *keys);
            keys[64] = (int32_t)0x12345678;
            CHECK(lanes->between(scores, n, bounds[b], bounds[b + 1], &from_high, keys, 64) == inside);
            CHECK(from_high == reach && keys[64] == (int32_t)0x12345678);
            CHECK(lanes->reaching(scores, n, bounds[b + 1]) == reach);
            free(keys);
            uint32_t *chosen = guarded(above);
            lanes->above(scores, n, bounds[b], 0, above, chosen);
            CHECK(good(chosen, above, n));
            free(chosen);
            const size_t fewer = above / 2;
            chosen = guarded(fewer);
            lanes->above(scores, n, bounds[b], n, fewer, chosen);
            CHECK(good(chosen, fewer, n));
            free(chosen);
        }
    }
    /* Pools: a maximum is one of its neighbours; every place is written */
    for (size_t kernel = 1; kernel <= 9; kernel += 4) {
        for (int pooling = PB_KVCACHE_POOL_MAX; pooling <= PB_KVCACHE_POOL_AVERAGE; ++pooling) {
            size_t size;
            CHECK(pb_kvcache_pool_scores_workspace_size(n, (pb_kvcache_pooling)pooling, kernel, &size)
                  == PB_KVCACHE_OK);
            void *workspace = malloc(size + 1);
            float *pooled = malloc(n * sizeof *pooled);
            memset(pooled, 0xFF, n * sizeof *pooled); /* NaNs */
            CHECK(pb_kvcache_pool_scores(scores, n, 1, n, (pb_kvcache_pooling)pooling, kernel, PB_KVCACHE_NAN_REFUSE,
                                         workspace, size, pooled, n, n)
                  == PB_KVCACHE_OK);
            bool all = true;
            for (size_t i = 0; i < n; ++i) {
                all = all && is_finite(pooled[i]);
            }
            CHECK(all);
            free(pooled);
            free(workspace);
        }
        memset(pooled_doubles, 0xFF, n * sizeof *pooled_doubles);
        pb_kvcache_priv_pool_max(doubles, n, kernel, pooled_doubles);
        bool all = true;
        for (size_t i = 0; i < n; ++i) {
            all = all && (bits_of_double(pooled_doubles[i]) & (UINT64_MAX >> 1)) < INFINITY_BITS_64;
        }
        CHECK(all);
    }
    free(pooled_doubles);
    free(doubles);
    free(scores);
}

/* The whole selection from attention of each dtype, as probabilities and as logits. */
static void selection(size_t n, unsigned kind, int dtype, int logits)
{
    enum { WINDOW = 3 };
    const size_t size = dtype == PB_KVCACHE_FLOAT32 ? 4 : 2;
    unsigned char *data = malloc(WINDOW * n * size);
    for (size_t i = 0; i < WINDOW * n; ++i) {
        const uint32_t bits = bits_of(number(logits ? kind : kind % 3));
        const uint16_t half = (uint16_t)(dtype == PB_KVCACHE_BFLOAT16 ? bits >> 16 : (bits & SIGN) >> 16 | (bits & 0x3BFFu));
        if (size == 4) {
            memcpy(data + i * 4, &bits, 4);
        } else {
            memcpy(data + i * 2, &half, 2);
        }
    }
    if (!logits && dtype == PB_KVCACHE_FLOAT16) { /* -0.0 is the only probability with a sign */
        for (size_t i = 1; i < WINDOW * n * 2; i += 2) {
            uint16_t half;
            memcpy(&half, data + i - 1, 2);
            half = half & 0x7FFFu ? half & 0x7FFFu : half;
            memcpy(data + i - 1, &half, 2);
        }
    }
    const pb_kvcache_attention attn = {.data = data, .dtype = (pb_kvcache_dtype)dtype, .logits = logits, .scale = 0.125f,
                                       .num_q_heads = 1, .num_kv_heads = 1, .window = WINDOW, .n = n,
                                       .head_stride = (ptrdiff_t)(WINDOW * n), .row_stride = (ptrdiff_t)n};
    for (int pooling = PB_KVCACHE_POOL_MAX; pooling <= PB_KVCACHE_POOL_AVERAGE; ++pooling) {
        const pb_kvcache_select_params params
            = {PB_KVCACHE_REDUCE_MEAN, (pb_kvcache_pooling)pooling, 5, PB_KVCACHE_NAN_REFUSE};
        const uint32_t budget = (uint32_t)(WINDOW + n / 3);
        size_t needed = 0;
        CHECK(pb_kvcache_select_workspace_size(&attn, &params, 0, 1, &needed) == PB_KVCACHE_OK);
        void *workspace = malloc(needed);
        uint32_t *kept = guarded(budget);
        uint32_t *again = guarded(budget);
        CHECK(pb_kvcache_select(&attn, &params, &budget, 0, 1, workspace, needed, kept, budget, budget)
              == PB_KVCACHE_OK);
        CHECK(good(kept, budget, n) && kept[budget - WINDOW] == n - WINDOW);
        CHECK(pb_kvcache_select(&attn, &params, &budget, 0, 1, workspace, needed, again, budget, budget)
              == PB_KVCACHE_OK);
        CHECK(memcmp(kept, again, budget * sizeof *kept) == 0);
        /* What was selected is what compaction takes */
        uint32_t *rows = malloc(n * sizeof *rows);
        for (size_t i = 0; i < n; ++i) {
            rows[i] = (uint32_t)i;
        }
        const pb_kvcache_rows layout = {rows, 1, n, 4, 0, 4};
        CHECK(pb_kvcache_compact(&layout, 0, 1, kept, budget, &budget) == PB_KVCACHE_OK);
        CHECK(memcmp(rows, kept, budget * sizeof *rows) == 0);
        free(rows);
        free(again);
        free(kept);
        free(workspace);
    }
    free(data);
}

static void policies(unsigned kind)
{
    static const pb_kvcache_vtable *const all[] = {&pb_kvcache_snapkv,       &pb_kvcache_pyramidkv, &pb_kvcache_h2o,
                                                   &pb_kvcache_sliding_window, &pb_kvcache_tova,
                                                   &pb_kvcache_streaming_llm, &pb_kvcache_scissorhands};
    for (size_t p = 0; p < sizeof all / sizeof all[0]; ++p) {
        pb_kvcache *cache = all[p]->create(NULL, NULL, NULL);
        const uint32_t capacity = pb_kvcache_capacity(cache);
        float *attn = malloc(capacity * sizeof *attn);
        for (uint32_t pos = 1; pos < capacity + 8; ++pos) {
            const size_t kept = pb_kvcache_kept_count(cache);
            for (size_t i = 0; i < kept; ++i) {
                attn[i] = number(kind % 3);
            }
            CHECK(all[p]->on_decode_step(cache, pos, attn, kept) == PB_KVCACHE_OK);
            const uint32_t budget = pos == capacity + 4 ? capacity / 2 : UINT32_MAX; /* many at once, too */
            const size_t count = pb_kvcache_evict_count(cache, budget);
            uint32_t *victims = guarded(count);
            CHECK(all[p]->evict(cache, budget, victims, count) == count && good(victims, count, (size_t)pos + 1));
            free(victims);
        }
        free(attn);
        all[p]->destroy(cache);
    }
}

static void stack(unsigned kind)
{
    enum { LAYERS = 3 };
    const pb_kvcache_stack_params params = {LAYERS, 12, 4, 2, 4, 3};
    pb_kvcache_stack *caches = pb_kvcache_stack_create(&params, NULL, NULL);
    float weights[LAYERS][32];
    const float *attn[LAYERS] = {weights[0], weights[1], weights[2]};
    for (uint32_t pos = 1; pos < 60; ++pos) {
        size_t lengths[LAYERS];
        size_t offsets[LAYERS + 1];
        for (uint32_t layer = 0; layer < LAYERS; ++layer) {
            lengths[layer] = pb_kvcache_kept_count(pb_kvcache_stack_layer(caches, layer));
            for (size_t i = 0; i < lengths[layer]; ++i) {
                weights[layer][i] = number(kind % 3);
            }
        }
        CHECK(pb_kvcache_stack_on_decode_step(caches, pos, attn, lengths) == PB_KVCACHE_OK);
        const size_t count = pb_kvcache_stack_evict_count(caches);
        uint32_t *victims = guarded(count);
        CHECK(pb_kvcache_stack_evict(caches, victims, count, offsets, LAYERS + 1) == PB_KVCACHE_OK);
        CHECK(offsets[LAYERS] == count && victims[count] == GUARD);
        for (size_t i = 0; i < count; ++i) {
            CHECK(victims[i] <= pos);
        }
        free(victims);
    }
    pb_kvcache_stack_destroy(caches);
}

#define LAYERS 37u

/* Budgets of every shape: integers decide, so that they are those of the default environment. */
static void plans(uint32_t *budgets)
{
    double curve[LAYERS];
    for (size_t i = 0; i < LAYERS; ++i) {
        const uint64_t bits = (i % 3 == 0 ? 0 : (uint64_t)(1023 - i) << 52) + 1 + i * 12345; /* subnormal ones, too */
        memcpy(curve + i, &bits, sizeof bits);
    }
    for (int shape = PB_KVCACHE_PLAN_UNIFORM; shape <= PB_KVCACHE_PLAN_WEIGHTS; ++shape) {
        pb_kvcache_plan_params params = PB_KVCACHE_PLAN_PARAMS_DEFAULT;
        params.total = 12345;
        params.maximum = 999;
        params.shape = (pb_kvcache_plan_shape)shape;
        params.ratio = 3.3;
        params.weights = shape == PB_KVCACHE_PLAN_WEIGHTS ? curve : NULL;
        CHECK(pb_kvcache_plan(&params, budgets + (size_t)shape * LAYERS, LAYERS) == PB_KVCACHE_OK);
    }
}

/* One of each zero, and the lower index wins; neither is below the other. */
static void zeros_are_equal(void)
{
    float scores[5000];
    double doubles[3] = {0.0, 0.0, 1.0};
    uint32_t chosen[2500];
    const uint64_t minus = (uint64_t)1 << 63;
    const uint32_t count = 2500;
    for (size_t i = 0; i < 5000; ++i) {
        scores[i] = float_of(i % 2 == 0 ? SIGN : 0);
    }
    CHECK(pb_kvcache_select_top(scores, 0, 1, 5000, &count, PB_KVCACHE_NAN_REFUSE, chosen, count, count)
          == PB_KVCACHE_OK);
    bool first = true;
    for (uint32_t i = 0; i < count; ++i) {
        first = first && chosen[i] == i;
    }
    CHECK(first);
    memcpy(doubles + 1, &minus, sizeof minus);
    pb_kvcache_priv_choose_lowest(doubles, 3, 1, chosen);
    CHECK(chosen[0] == 0);
    CHECK(key_of(float_of(SIGN)) == 0 && key_of_double(doubles[1]) == 0);
}

int main(void)
{
    static const size_t sizes[] = {2, 15, 16, 17, 333, 4095, 4096, 4097, 5000};
    uint32_t want[4 * LAYERS];
    uint32_t got[4 * LAYERS];
    unsigned environments = 0;
    leave();
    plans(want);
    for (unsigned environment = 0; environment < 4 * MODES; ++environment) {
        if (!enter(environment)) {
            continue;
        }
        ++environments;
        for (unsigned kind = 0; kind < KINDS; ++kind) {
            for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; ++s) {
                choose_and_pool(sizes[s], kind);
                if (sizes[s] > 16) {
                    selection(sizes[s], kind, (int)((kind + s) % 3), (int)(s % 2));
                }
            }
            stack(kind);
        }
        policies(environment);
        plans(got);
        zeros_are_equal();
        CHECK(memcmp(got, want, sizeof got) == 0);
    }
    leave();
    CHECK(environments > 0);
    return END();
}
