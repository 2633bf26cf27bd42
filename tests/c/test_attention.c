/* The attention of one new token, beside the same formula in double. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "bits.h"
#include "check.h"
#include "lanes.h"

enum { CACHES = 3, GROUP = 2, DIM = 21, ROWS = 200, STRIDE = 90 };

static uint32_t state = 1;

static float drawn(void)
{
    state = state * 1664525u + 1013904223u;
    return (float)((int32_t)(state >> 16) - 32768) / 16384.0f;
}

static float queries[CACHES * GROUP * DIM];
static float keys[ROWS * (DIM + 2)];
static float sinks[CACHES * GROUP];
static const uint64_t offsets[CACHES] = {3, 110, 100};
static const uint32_t counts[CACHES] = {70, 90, 1};
static unsigned char workspace[1 << 16];

static pb_kvcache_decode_attention small(void)
{
    const pb_kvcache_decode_attention attn = {.queries = queries,
                                              .keys = keys,
                                              .num_caches = CACHES,
                                              .group = GROUP,
                                              .head_dim = DIM,
                                              .key_stride = DIM + 2,
                                              .key_capacity = sizeof keys / sizeof *keys,
                                              .offsets = offsets,
                                              .counts = counts,
                                              .scale = 0.5f};
    return attn;
}

static size_t size_of(const pb_kvcache_decode_attention *attn)
{
    size_t size = 0;
    CHECK(pb_kvcache_decode_weights_workspace_size(attn, &size) == PB_KVCACHE_OK && size <= sizeof workspace);
    return size;
}

/* The weight of one slot, from floats. */
static double expected(const pb_kvcache_decode_attention *attn, size_t cache, size_t slot)
{
    double result = 0.0;
    for (size_t g = 0; g < GROUP; ++g) {
        const float *query = queries + (cache * GROUP + g) * DIM;
        double sum = attn->sinks == NULL ? 0.0 : exp((double)sinks[cache * GROUP + g]);
        double own = 0.0;
        for (size_t i = 0; i < counts[cache]; ++i) {
            double logit = 0.0;
            for (size_t d = 0; d < DIM; ++d) {
                logit += (double)query[d] * (double)keys[(offsets[cache] + i) * (DIM + 2) + d];
            }
            logit *= (double)attn->scale;
            if (attn->softcap > 0.0f) {
                logit = (double)attn->softcap * tanh(logit / (double)attn->softcap);
            }
            sum += exp(logit);
            own = i == slot ? exp(logit) : own;
        }
        const double p = own / sum;
        result = attn->reduce == PB_KVCACHE_REDUCE_MAX ? (p > result ? p : result) : result + p;
    }
    return attn->reduce == PB_KVCACHE_REDUCE_MEAN ? result / GROUP : result;
}

static void test_values(void)
{
    for (size_t i = 0; i < sizeof queries / sizeof *queries; ++i) {
        queries[i] = drawn();
    }
    for (size_t i = 0; i < sizeof keys / sizeof *keys; ++i) {
        keys[i] = drawn();
    }
    for (size_t i = 0; i < CACHES * GROUP; ++i) {
        sinks[i] = drawn() * 2.0f;
    }
    for (unsigned kind = 0; kind < 12; ++kind) {
        float weights[CACHES * STRIDE];
        uint32_t cache = 9;
        pb_kvcache_decode_attention attn = small();
        attn.reduce = (pb_kvcache_reduce)(kind % 3);
        attn.softcap = kind / 3 % 2 == 0 ? 0.0f : 1.5f;
        attn.sinks = kind / 6 == 0 ? NULL : sinks;
        for (size_t i = 0; i < CACHES * STRIDE; ++i) {
            weights[i] = -1.0f;
        }
        CHECK(pb_kvcache_decode_weights(&attn, workspace, size_of(&attn), weights, STRIDE, CACHES * STRIDE, &cache)
              == PB_KVCACHE_OK);
        CHECK(cache == CACHES);
        for (size_t c = 0; c < CACHES; ++c) {
            for (size_t i = 0; i < STRIDE; ++i) {
                const double found = (double)weights[c * STRIDE + i];
                CHECK(i < counts[c] ? fabs(found - expected(&attn, c, i)) < 2e-6 : found < -0.5);
            }
        }
    }
}

/* Elements of 16 bits that are exact as floats give the bits of these floats. A cache without slots gets nothing. */
static void test_dtypes(void)
{
    uint16_t half_queries[CACHES * GROUP * DIM];
    static uint16_t half_keys[ROWS * (DIM + 2)];
    static float whole[CACHES * GROUP * DIM];
    static float whole_keys[ROWS * (DIM + 2)];
    const uint32_t some[CACHES] = {70, 0, 1};
    for (unsigned dtype = PB_KVCACHE_FLOAT16; dtype <= PB_KVCACHE_BFLOAT16; ++dtype) {
        float by_half[CACHES * STRIDE];
        float by_float[CACHES * STRIDE];
        memset(by_half, 0, sizeof by_half);
        memset(by_float, 0, sizeof by_float);
        for (size_t i = 0; i < sizeof whole / sizeof *whole; ++i) { /* 1.0 to 2.0, by the bits */
            const uint16_t fraction = (uint16_t)(i * 37 % 128);
            half_queries[i] = (uint16_t)(dtype == PB_KVCACHE_FLOAT16 ? 0x3C00u + 8u * fraction : 0x3F80u + fraction);
            whole[i] = 1.0f + (float)fraction / 128.0f;
        }
        for (size_t i = 0; i < sizeof whole_keys / sizeof *whole_keys; ++i) {
            const uint16_t fraction = (uint16_t)(i * 59 % 128);
            half_keys[i] = (uint16_t)(dtype == PB_KVCACHE_FLOAT16 ? 0xBC00u + 8u * fraction : 0xBF80u + fraction);
            whole_keys[i] = -1.0f - (float)fraction / 128.0f;
        }
        pb_kvcache_decode_attention attn = small();
        attn.counts = some;
        attn.queries = whole;
        attn.keys = whole_keys;
        const size_t size = size_of(&attn);
        CHECK(pb_kvcache_decode_weights(&attn, workspace, size, by_float, STRIDE, CACHES * STRIDE, NULL) == PB_KVCACHE_OK);
        attn.dtype = (pb_kvcache_dtype)dtype;
        attn.queries = half_queries;
        attn.keys = half_keys;
        CHECK(pb_kvcache_decode_weights(&attn, workspace, size, by_half, STRIDE, CACHES * STRIDE, NULL) == PB_KVCACHE_OK);
        CHECK(memcmp(by_half, by_float, sizeof by_half) == 0 && by_half[0] > 0.0f && by_half[STRIDE] == 0.0f);
    }
}

/* Every instruction set makes the same products, and reads no more than it has to. */
static void test_levels(void)
{
    const pb_kvcache_priv_lanes *portable = pb_kvcache_priv_lanes_at(0);
    for (unsigned level = 1; level < PB_KVCACHE_PRIV_LEVELS; ++level) {
        const pb_kvcache_priv_lanes *lanes = pb_kvcache_priv_lanes_at(level);
        for (size_t dim = 1; lanes != NULL && dim <= 40; ++dim) {
            const size_t n = 5;
            float *rows = malloc(n * dim * sizeof *rows);
            float *query = malloc(2 * dim * sizeof *query);
            float *key = malloc(dim * sizeof *key);
            float *dots = malloc(2 * n * sizeof *dots);
            float other[10];
            for (size_t i = 0; i < n * dim; ++i) {
                rows[i] = drawn();
            }
            for (size_t i = 0; i < 2 * dim; ++i) {
                query[i] = drawn();
            }
            lanes->dots[PB_KVCACHE_FLOAT32](rows, dim, n, query, 2, dim, key, dots);
            portable->dots[PB_KVCACHE_FLOAT32](rows, dim, n, query, 2, dim, key, other);
            CHECK(memcmp(dots, other, sizeof other) == 0);
            free(rows);
            free(query);
            free(key);
            free(dots);
        }
    }
}

static void test_refusals(void)
{
    float weights[CACHES * STRIDE];
    size_t size = 9;
    uint32_t cache = 9;
    const size_t all = CACHES * STRIDE;
    pb_kvcache_decode_attention attn = small();
    const size_t needed = size_of(&attn);
    memset(weights, 1, sizeof weights);

#define REFUSED(change, status)                                                                                       \
    do {                                                                                                              \
        attn = small();                                                                                               \
        change;                                                                                                       \
        CHECK(pb_kvcache_decode_weights(&attn, workspace, needed, weights, STRIDE, all, &cache) == (status));         \
    } while (0)
    CHECK(pb_kvcache_decode_weights_workspace_size(NULL, &size) == PB_KVCACHE_ERROR_NULL && size == 9);
    CHECK(pb_kvcache_decode_weights_workspace_size(&attn, NULL) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_decode_weights(NULL, workspace, needed, weights, STRIDE, all, NULL) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_decode_weights(&attn, NULL, needed, weights, STRIDE, all, NULL) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_decode_weights(&attn, workspace, needed, NULL, STRIDE, all, NULL) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_decode_weights(&attn, workspace, needed - 1, weights, STRIDE, all, NULL)
          == PB_KVCACHE_ERROR_WORKSPACE);
    CHECK(pb_kvcache_decode_weights(&attn, workspace, needed, weights, STRIDE - 1, all, NULL)
          == PB_KVCACHE_ERROR_STRIDE);
    CHECK(pb_kvcache_decode_weights(&attn, workspace, needed, weights, STRIDE, all - 1, NULL)
          == PB_KVCACHE_ERROR_CAPACITY);
    CHECK(pb_kvcache_decode_weights(&attn, workspace, needed, (float *)(void *)workspace, STRIDE, all, NULL)
          == PB_KVCACHE_ERROR_OVERLAP);
    CHECK(pb_kvcache_decode_weights(&attn, workspace, needed, keys, STRIDE, all, NULL) == PB_KVCACHE_ERROR_OVERLAP);
    CHECK(pb_kvcache_decode_weights(&attn, queries, sizeof queries < needed ? needed : sizeof queries, weights, STRIDE,
                                    all, NULL)
          == PB_KVCACHE_ERROR_OVERLAP);
    REFUSED(attn.queries = NULL, PB_KVCACHE_ERROR_NULL);
    REFUSED(attn.keys = NULL, PB_KVCACHE_ERROR_NULL);
    REFUSED(attn.offsets = NULL, PB_KVCACHE_ERROR_NULL);
    REFUSED(attn.counts = NULL, PB_KVCACHE_ERROR_NULL);
    REFUSED(attn.num_caches = 0, PB_KVCACHE_ERROR_HEADS);
    REFUSED(attn.group = 0, PB_KVCACHE_ERROR_HEADS);
    REFUSED(attn.head_dim = 0, PB_KVCACHE_ERROR_HEADS);
    REFUSED(attn.group = SIZE_MAX / 4, PB_KVCACHE_ERROR_TOO_LARGE);
    REFUSED(attn.head_dim = SIZE_MAX / 16, PB_KVCACHE_ERROR_TOO_LARGE);
    REFUSED(attn.key_capacity = SIZE_MAX / 2, PB_KVCACHE_ERROR_TOO_LARGE);
    REFUSED(attn.dtype = (pb_kvcache_dtype)3, PB_KVCACHE_ERROR_OPTION);
    REFUSED(attn.reduce = (pb_kvcache_reduce)3, PB_KVCACHE_ERROR_OPTION);
    REFUSED(attn.scale = 0.0f, PB_KVCACHE_ERROR_SCALE);
    REFUSED(attn.scale = INFINITY, PB_KVCACHE_ERROR_SCALE);
    REFUSED(attn.softcap = -1.0f, PB_KVCACHE_ERROR_SCALE);
    REFUSED(attn.softcap = NAN, PB_KVCACHE_ERROR_SCALE);
    REFUSED(attn.keys = (const unsigned char *)keys + 1, PB_KVCACHE_ERROR_ALIGNMENT);
    REFUSED(attn.queries = (const unsigned char *)queries + 2, PB_KVCACHE_ERROR_ALIGNMENT);
    REFUSED(attn.key_capacity = SIZE_MAX / 4, PB_KVCACHE_ERROR_TOO_LARGE);
    attn = small();
    attn.group = 0;
    CHECK(pb_kvcache_decode_weights_workspace_size(&attn, &size) == PB_KVCACHE_ERROR_HEADS && size == 9);
    /* Arrays that are not aligned, or lie over what is written */
    const void *odd = (const unsigned char *)(const void *)sinks + 2;
    const void *half = (const unsigned char *)(const void *)offsets + 4;
    memcpy(&attn.sinks, &odd, sizeof odd);
    const float *askew = attn.sinks;
    memcpy(&attn.offsets, &half, sizeof half);
    const uint64_t *shifted = attn.offsets;
    REFUSED(attn.sinks = askew, PB_KVCACHE_ERROR_ALIGNMENT);
    REFUSED(attn.offsets = shifted, PB_KVCACHE_ERROR_ALIGNMENT);
    const void *uneven = (const unsigned char *)(const void *)counts + 2;
    memcpy(&attn.counts, &uneven, sizeof uneven);
    const uint32_t *off = attn.counts;
    REFUSED(attn.counts = off, PB_KVCACHE_ERROR_ALIGNMENT);
    attn = small();
    attn.sinks = weights;
    CHECK(pb_kvcache_decode_weights(&attn, workspace, needed, weights, STRIDE, all, NULL) == PB_KVCACHE_ERROR_OVERLAP);
    memset(workspace, 0, 64);
    attn = small();
    attn.sinks = (const float *)(const void *)workspace;
    CHECK(pb_kvcache_decode_weights(&attn, workspace, needed, weights, STRIDE, all, NULL) == PB_KVCACHE_ERROR_OVERLAP);
    REFUSED(attn.key_stride = DIM - 1, PB_KVCACHE_ERROR_STRIDE);
    REFUSED(attn.key_capacity = DIM - 1, PB_KVCACHE_ERROR_CAPACITY);
    REFUSED(attn.key_capacity = 199 * (DIM + 2) + DIM - 1, PB_KVCACHE_ERROR_CAPACITY);
    const uint64_t far[CACHES] = {3, UINT64_MAX, 100};
    REFUSED(attn.offsets = far, PB_KVCACHE_ERROR_CAPACITY);
    CHECK(cache == 9);
    /* What is no number, of the second cache, and a sink that is none */
    const float good = keys[110 * (DIM + 2)];
    const uint32_t bad[4] = {0x7FC00000u, 0x7F800000u, 0xFF800000u, 0x7F7FFFFFu};
    for (size_t i = 0; i < 4; ++i) {
        float value;
        memcpy(&value, bad + i, sizeof value);
        keys[110 * (DIM + 2)] = value;
        REFUSED(attn.scale = 16.0f, PB_KVCACHE_ERROR_LOGIT);
        CHECK(cache == 1);
    }
    keys[110 * (DIM + 2)] = good;
    sinks[4] = NAN;
    REFUSED(attn.sinks = sinks, PB_KVCACHE_ERROR_LOGIT);
    CHECK(cache == 2);
    for (size_t i = 0; i < all; ++i) {
        CHECK(bits_of(weights[i]) == 0x01010101u);
    }
    attn = small();
    attn.key_capacity = 199 * (DIM + 2) + DIM; /* up to the last element that is read */
    CHECK(pb_kvcache_decode_weights(&attn, workspace, needed, weights, STRIDE, all, NULL) == PB_KVCACHE_OK);
}

int main(void)
{
    test_values();
    test_dtypes();
    test_levels();
    test_refusals();
    return END();
}
