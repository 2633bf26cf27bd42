/* Merging, beside the same formulas in double. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "bits.h"
#include "check.h"
#include "environment.h"
#include "lanes.h"

enum { N = 150, DIM = 21, STRIDE = 24, KEPT = 40, PROTECT = 6, QUERIES = 9, OUT = 23 };

static uint32_t state = 1;

static float drawn(void)
{
    state = state * 1664525u + 1013904223u;
    return (float)((int32_t)(state >> 16) - 32768) / 16384.0f;
}

static float keys[N * STRIDE];
static float values[N * STRIDE];
static float queries[QUERIES * DIM];
static float lse[QUERIES];
static uint32_t kept[N];
static float out_keys[N * OUT];
static float out_values[N * OUT];
static float bias[N];
static double workspace[1 << 14];

static pb_kvcache_merge small(void)
{
    const pb_kvcache_merge merge = {.keys = keys,
                                    .values = values,
                                    .row_stride = STRIDE,
                                    .n = N,
                                    .head_dim = DIM,
                                    .kept = kept,
                                    .num_kept = KEPT,
                                    .protect = PROTECT,
                                    .queries = queries,
                                    .num_queries = QUERIES,
                                    .scale = 0.25f};
    return merge;
}

static void fill(void)
{
    for (size_t i = 0; i < N * STRIDE; ++i) {
        keys[i] = drawn();
        values[i] = drawn();
    }
    for (size_t i = 0; i < QUERIES * DIM; ++i) {
        queries[i] = drawn();
    }
    for (uint32_t i = 0; i < KEPT; ++i) {
        kept[i] = 3u * i + i % 3u;
    }
}

static void clear(void)
{
    memset(out_keys, 1, sizeof out_keys);
    memset(out_values, 1, sizeof out_values);
    memset(bias, 1, sizeof bias);
}

static bool untouched(void)
{
    bool same = true;
    for (size_t i = 0; i < N * OUT; ++i) {
        same = same && bits_of(out_keys[i]) == 0x01010101u && bits_of(out_values[i]) == 0x01010101u;
    }
    for (size_t i = 0; i < N; ++i) {
        same = same && bits_of(bias[i]) == 0x01010101u;
    }
    return same;
}

static size_t size_of(const pb_kvcache_merge *merge)
{
    size_t size = 0;
    CHECK(pb_kvcache_merge_workspace_size(merge, &size) == PB_KVCACHE_OK && size <= sizeof workspace);
    return size;
}

static pb_kvcache_status run(const pb_kvcache_merge *merge)
{
    clear();
    return pb_kvcache_merge_nearest(merge, workspace, size_of(merge), out_keys, out_values, OUT, sizeof out_keys / 4, bias,
                                    N);
}

static double product(const float *a, const float *b)
{
    double sum = 0.0;
    for (size_t d = 0; d < DIM; ++d) {
        sum += (double)a[d] * (double)b[d];
    }
    return sum;
}

/* Compare the rows of the last run with the formulas. `free`: rows that may take others in. */
static void compare(const pb_kvcache_merge *merge, double tolerance)
{
    static double a[N];
    static bool stays[N];
    double normaliser[QUERIES];
    size_t taken[KEPT] = {0};
    double total[KEPT];
    double key[KEPT][DIM];
    double value[KEPT][DIM];
    const size_t free = KEPT - merge->protect;
    memset(a, 0, sizeof a);
    memset(stays, 0, sizeof stays);
    for (size_t q = 0; q < QUERIES; ++q) {
        double sum = 0.0;
        for (size_t j = 0; j < N; ++j) {
            sum += exp((double)merge->scale * product(queries + q * DIM, keys + j * STRIDE));
        }
        normaliser[q] = merge->lse == NULL ? log(sum) : (double)lse[q];
        for (size_t j = 0; j < N; ++j) {
            a[j] += exp((double)merge->scale * product(queries + q * DIM, keys + j * STRIDE) - normaliser[q]) / QUERIES;
        }
    }
    for (size_t i = 0; i < KEPT; ++i) {
        stays[kept[i]] = true;
        total[i] = a[kept[i]];
        for (size_t d = 0; d < DIM; ++d) {
            key[i][d] = a[kept[i]] * (double)keys[kept[i] * STRIDE + d];
            value[i][d] = a[kept[i]] * (double)values[kept[i] * STRIDE + d];
        }
    }
    for (size_t j = 0; j < N; ++j) {
        size_t nearest = 0;
        double most = -2.0;
        for (size_t i = 0; !stays[j] && i < free; ++i) {
            const float *row = keys + kept[i] * STRIDE;
            const double cosine = product(keys + j * STRIDE, row) / sqrt(product(row, row));
            nearest = cosine > most || i == 0 ? i : nearest;
            most = cosine > most || i == 0 ? cosine : most;
        }
        if (!stays[j]) {
            ++taken[nearest];
            total[nearest] += a[j];
            for (size_t d = 0; d < DIM; ++d) {
                key[nearest][d] += a[j] * (double)keys[j * STRIDE + d];
                value[nearest][d] += a[j] * (double)values[j * STRIDE + d];
            }
        }
    }
    for (size_t i = 0; i < KEPT; ++i) {
        double mean = 0.0;
        for (size_t q = 0; q < QUERIES; ++q) {
            double logit = 0.0;
            for (size_t d = 0; d < DIM; ++d) {
                logit += (double)queries[q * DIM + d] * key[i][d] / total[i];
            }
            mean += exp((double)merge->scale * logit - normaliser[q]) / QUERIES;
        }
        bool close = taken[i] == 0 ? bias[i] == 0.0f : fabs((double)bias[i] - (log(total[i]) - log(mean))) < tolerance;
        for (size_t d = 0; d < DIM; ++d) {
            close = close && fabs((double)out_keys[i * OUT + d] - key[i][d] / total[i]) < tolerance
                    && fabs((double)out_values[i * OUT + d] - value[i][d] / total[i]) < tolerance;
        }
        CHECK(close);
        CHECK(taken[i] > 0 || memcmp(out_keys + i * OUT, keys + kept[i] * STRIDE, DIM * sizeof(float)) == 0);
    }
    CHECK(bits_of(out_keys[KEPT * OUT]) == 0x01010101u && bits_of(bias[KEPT]) == 0x01010101u);
    CHECK(bits_of(out_keys[DIM]) == 0x01010101u && bits_of(out_values[DIM]) == 0x01010101u);
}

static void test_values(void)
{
    for (size_t round = 0; round < 8; ++round) {
        pb_kvcache_merge merge = small();
        fill();
        for (size_t q = 0; q < QUERIES; ++q) {
            lse[q] = 5.0f + drawn();
        }
        merge.protect = round == 2 ? 0 : round == 3 ? KEPT - 1 : PROTECT;
        merge.lse = round % 2 == 0 ? NULL : lse;
        CHECK(run(&merge) == PB_KVCACHE_OK);
        compare(&merge, 2e-5);
    }
}

/* The same bits on every compiler, flag set, instruction set and byte order: a hash (FNV-1a) of all that is written. */
static void test_bits(void)
{
    uint32_t hash = 2166136261u;
    state = 7;
    for (size_t round = 0; round < 4; ++round) {
        pb_kvcache_merge merge = small();
        fill();
        for (size_t q = 0; q < QUERIES; ++q) {
            lse[q] = 5.0f + drawn();
        }
        merge.lse = round % 2 == 0 ? NULL : lse;
        merge.scale = round < 2 ? 0.25f : 3.0f;
        CHECK(run(&merge) == PB_KVCACHE_OK);
        for (size_t i = 0; i < KEPT; ++i) {
            for (size_t d = 0; d < DIM; ++d) {
                hash = (hash ^ bits_of(out_keys[i * OUT + d])) * 16777619u;
                hash = (hash ^ bits_of(out_values[i * OUT + d])) * 16777619u;
            }
            hash = (hash ^ bits_of(bias[i])) * 16777619u;
        }
    }
    CHECK(hash == 0x9347CCC3u);
    if (hash != 0x9347CCC3u) {
        printf("hash %08x\n", (unsigned)hash);
    }
}

/* The keys of row 0 and 1 point the same way, and all evicted ones with them: the lower row takes everything. */
static void test_ties(void)
{
    fill();
    for (size_t j = 0; j < N; ++j) {
        for (size_t d = 0; d < DIM; ++d) {
            keys[j * STRIDE + d] = d == 0 ? (float)(1u << j % 5) : 0.0f;
        }
    }
    const pb_kvcache_merge merge = small();
    CHECK(run(&merge) == PB_KVCACHE_OK);
    CHECK(bias[0] > 1.0f);
    for (size_t i = 1; i < KEPT; ++i) {
        CHECK(bias[i] == 0.0f && memcmp(out_values + i * OUT, values + kept[i] * STRIDE, DIM * sizeof(float)) == 0);
    }
}

/* Nothing is evicted, or every row is protected: the rows stay bit for bit. No row at all is fine, too. */
static void test_identity(void)
{
    fill();
    keys[1] = -0.0f;
    pb_kvcache_merge merge = small();
    merge.protect = KEPT;
    for (size_t round = 0; round < 3; ++round) {
        if (round == 1) {
            merge.protect = SIZE_MAX;
        } else if (round == 2) {
            merge.num_kept = N;
            merge.protect = 0;
            for (uint32_t i = 0; i < N; ++i) {
                kept[i] = i;
            }
        }
        CHECK(run(&merge) == PB_KVCACHE_OK);
        for (size_t i = 0; i < merge.num_kept; ++i) {
            CHECK(memcmp(out_keys + i * OUT, keys + kept[i] * STRIDE, DIM * sizeof(float)) == 0);
            CHECK(memcmp(out_values + i * OUT, values + kept[i] * STRIDE, DIM * sizeof(float)) == 0);
            CHECK(bits_of(bias[i]) == 0);
        }
    }
    merge.num_kept = 0;
    merge.kept = NULL;
    CHECK(run(&merge) == PB_KVCACHE_OK && untouched());
    size_t size = size_of(&merge);
    CHECK(pb_kvcache_merge_nearest(&merge, workspace, size, NULL, NULL, OUT, 0, NULL, 0) == PB_KVCACHE_OK);
}

/* One row takes everything. Logits that lie far apart: shares of 0, and biases that are the exact ones. */
static void test_far_logits(void)
{
    pb_kvcache_merge merge = small();
    for (size_t round = 0; round < 4; ++round) {
        fill();
        for (size_t i = 0; i < N * STRIDE; ++i) {
            keys[i] *= round < 2 ? 1.0f : 100.0f;
        }
        merge.num_kept = round % 2 == 0 ? 1 : KEPT;
        merge.protect = 0;
        CHECK(run(&merge) == PB_KVCACHE_OK);
        bool finite = true;
        for (size_t i = 0; i < merge.num_kept; ++i) {
            finite = finite && is_finite(bias[i]);
            for (size_t d = 0; d < DIM; ++d) {
                finite = finite && is_finite(out_keys[i * OUT + d]) && is_finite(out_values[i * OUT + d]);
            }
        }
        CHECK(finite);
    }
    /* Each of two queries sees one of two opposite keys. Their mean is 0, of which both see exp(-450). */
    const float two_keys[4] = {30.0f, 0.0f, -30.0f, 0.1f};
    const float two_queries[4] = {15.0f, 0.0f, -15.0f, 0.0f};
    const uint32_t first = 0;
    merge = (pb_kvcache_merge){two_keys, two_keys, 2, 2, 2, &first, 1, 0, two_queries, 2, NULL, 1.0f};
    CHECK(run(&merge) == PB_KVCACHE_OK && fabsf(bias[0] - 450.0f) < 1e-3f && out_keys[0] == 0.0f);
    /* The evicted key's share is below what a float can weigh. */
    const float lone_keys[4] = {100.0f, 0.0f, 0.0f, 1.0f};
    const float lone_query[2] = {1.0f, 0.0f};
    merge = (pb_kvcache_merge){lone_keys, lone_keys, 2, 2, 2, &first, 1, 0, lone_query, 1, NULL, 1.0f};
    CHECK(run(&merge) == PB_KVCACHE_OK && bias[0] == 0.0f && out_keys[0] == 100.0f && out_keys[1] == 0.0f);
}

/* Other rounding modes and flushed subnormal numbers change last digits, and nothing becomes infinite or NaN. */
static void test_environments(void)
{
    for (unsigned environment = 0; environment < ENVIRONMENTS; ++environment) {
        for (size_t kind = 0; kind < 3; ++kind) {
            const pb_kvcache_merge merge = small();
            fill();
            for (size_t i = 0; i < N * STRIDE; ++i) {
                keys[i] *= kind == 0 ? 1.0f : kind == 1 ? 1e-39f : 30.0f;
                values[i] *= kind == 1 ? 1e-44f : 1.0f;
            }
            environment_enter(environment);
            const pb_kvcache_status status = run(&merge);
            environment_leave();
            CHECK(status == PB_KVCACHE_OK);
            bool good = true;
            for (size_t i = 0; i < KEPT; ++i) {
                good = good && is_finite(bias[i]) && (kind > 0 || fabsf(bias[i]) < 20.0f);
                for (size_t d = 0; d < DIM; ++d) {
                    good = good && fabsf(out_keys[i * OUT + d]) < 61.0f && fabsf(out_values[i * OUT + d]) < 2.1f;
                }
            }
            CHECK(good);
        }
    }
}

/* Every instruction set makes the same products. */
static void test_levels(void)
{
    const pb_kvcache_priv_lanes *portable = pb_kvcache_priv_lanes_at(0);
    for (unsigned level = 1; level < PB_KVCACHE_PRIV_LEVELS; ++level) {
        const pb_kvcache_priv_lanes *lanes = pb_kvcache_priv_lanes_at(level);
        for (size_t dim = 1; lanes != NULL && dim <= 40; ++dim) {
            float *columns = malloc(dim * PB_KVCACHE_PRIV_COLUMNS * sizeof *columns);
            float *query = malloc(3 * dim * sizeof *query);
            float dots[3 * PB_KVCACHE_PRIV_COLUMNS];
            float other[3 * PB_KVCACHE_PRIV_COLUMNS];
            for (size_t i = 0; i < dim * PB_KVCACHE_PRIV_COLUMNS; ++i) {
                columns[i] = drawn();
            }
            for (size_t i = 0; i < 3 * dim; ++i) {
                query[i] = drawn();
            }
            lanes->columns(columns, query, 3, dim, dots);
            portable->columns(columns, query, 3, dim, other);
            CHECK(memcmp(dots, other, sizeof other) == 0);
            free(columns);
            free(query);
        }
    }
}

static void test_refusals(void)
{
    pb_kvcache_merge merge = small();
    size_t size = 9;
    fill();
    const size_t needed = size_of(&merge);
    const size_t all = KEPT * OUT - (OUT - DIM);
    clear();
#define MERGED(m, w, w_size, k, v, stride, capacity, b, b_capacity)                                                   \
    pb_kvcache_merge_nearest(m, w, w_size, k, v, stride, capacity, b, b_capacity)
#define REFUSED(change, status)                                                                                       \
    do {                                                                                                              \
        merge = small();                                                                                              \
        change;                                                                                                       \
        CHECK(MERGED(&merge, workspace, sizeof workspace, out_keys, out_values, OUT, all, bias, KEPT) == (status));   \
    } while (0)
    CHECK(pb_kvcache_merge_workspace_size(NULL, &size) == PB_KVCACHE_ERROR_NULL && size == 9);
    CHECK(pb_kvcache_merge_workspace_size(&merge, NULL) == PB_KVCACHE_ERROR_NULL);
    merge.n = 0;
    CHECK(pb_kvcache_merge_workspace_size(&merge, &size) == PB_KVCACHE_ERROR_HEADS && size == 9);
    merge = small();
    CHECK(MERGED(NULL, workspace, needed, out_keys, out_values, OUT, all, bias, KEPT) == PB_KVCACHE_ERROR_NULL);
    CHECK(MERGED(&merge, NULL, needed, out_keys, out_values, OUT, all, bias, KEPT) == PB_KVCACHE_ERROR_NULL);
    CHECK(MERGED(&merge, workspace, needed, NULL, out_values, OUT, all, bias, KEPT) == PB_KVCACHE_ERROR_NULL);
    CHECK(MERGED(&merge, workspace, needed, out_keys, NULL, OUT, all, bias, KEPT) == PB_KVCACHE_ERROR_NULL);
    CHECK(MERGED(&merge, workspace, needed, out_keys, out_values, OUT, all, NULL, KEPT) == PB_KVCACHE_ERROR_NULL);
    CHECK(MERGED(&merge, workspace, needed - 1, out_keys, out_values, OUT, all, bias, KEPT) == PB_KVCACHE_ERROR_WORKSPACE);
    CHECK(MERGED(&merge, workspace, needed, out_keys, out_values, DIM - 1, all, bias, KEPT) == PB_KVCACHE_ERROR_STRIDE);
    CHECK(MERGED(&merge, workspace, needed, out_keys, out_values, OUT, all - 1, bias, KEPT) == PB_KVCACHE_ERROR_CAPACITY);
    CHECK(MERGED(&merge, workspace, needed, out_keys, out_values, OUT, all, bias, KEPT - 1) == PB_KVCACHE_ERROR_CAPACITY);
    CHECK(MERGED(&merge, workspace, needed, out_keys, out_values, SIZE_MAX / 8, all, bias, KEPT)
          == PB_KVCACHE_ERROR_TOO_LARGE);
    CHECK(MERGED(&merge, workspace, needed, keys, out_values, OUT, all, bias, KEPT) == PB_KVCACHE_ERROR_OVERLAP);
    CHECK(MERGED(&merge, workspace, needed, out_keys, values, OUT, all, bias, KEPT) == PB_KVCACHE_ERROR_OVERLAP);
    CHECK(MERGED(&merge, workspace, needed, out_keys, out_keys + OUT, OUT, all, bias, KEPT) == PB_KVCACHE_ERROR_OVERLAP);
    CHECK(MERGED(&merge, workspace, needed, out_keys, out_values, OUT, all, out_keys, KEPT) == PB_KVCACHE_ERROR_OVERLAP);
    CHECK(MERGED(&merge, workspace, needed, out_keys, out_values, OUT, all, queries, KEPT) == PB_KVCACHE_ERROR_OVERLAP);
    CHECK(MERGED(&merge, keys, sizeof keys < needed ? needed : sizeof keys, out_keys, out_values, OUT, all, bias, KEPT)
          == PB_KVCACHE_ERROR_OVERLAP);
    CHECK(MERGED(&merge, workspace, needed, (float *)(void *)workspace, out_values, OUT, all, bias, KEPT)
          == PB_KVCACHE_ERROR_OVERLAP);
    memset(keys + kept[0] * STRIDE, 0, DIM * sizeof(float)); /* a key without a direction takes its ties */
    CHECK(run(&merge) == PB_KVCACHE_OK && out_values[0] == out_values[0] && bias[0] == bias[0]);
    fill();
    clear();
    REFUSED(merge.keys = NULL, PB_KVCACHE_ERROR_NULL);
    REFUSED(merge.values = NULL, PB_KVCACHE_ERROR_NULL);
    REFUSED(merge.queries = NULL, PB_KVCACHE_ERROR_NULL);
    REFUSED(merge.kept = NULL, PB_KVCACHE_ERROR_NULL);
    REFUSED(merge.n = 0, PB_KVCACHE_ERROR_HEADS);
    REFUSED(merge.head_dim = 0, PB_KVCACHE_ERROR_HEADS);
    REFUSED(merge.num_queries = 0, PB_KVCACHE_ERROR_HEADS);
#if SIZE_MAX > UINT32_MAX
    REFUSED(merge.n = (size_t)UINT32_MAX + 1, PB_KVCACHE_ERROR_TOO_LARGE);
#endif
#if SIZE_MAX > UINT32_MAX
    REFUSED(merge.num_kept = (size_t)UINT32_MAX + 1, PB_KVCACHE_ERROR_TOO_LARGE);
#endif
    REFUSED(merge.head_dim = SIZE_MAX / 16, PB_KVCACHE_ERROR_TOO_LARGE);
    REFUSED(merge.num_queries = SIZE_MAX / 4 - 16, PB_KVCACHE_ERROR_TOO_LARGE); /* its bytes fit, the sum does not */
    REFUSED(merge.num_queries = SIZE_MAX / 8, PB_KVCACHE_ERROR_TOO_LARGE);
    REFUSED(merge.row_stride = SIZE_MAX / 8, PB_KVCACHE_ERROR_TOO_LARGE);
    REFUSED(merge.row_stride = DIM - 1, PB_KVCACHE_ERROR_STRIDE);
    REFUSED(merge.scale = 0.0f, PB_KVCACHE_ERROR_SCALE);
    REFUSED(merge.scale = INFINITY, PB_KVCACHE_ERROR_SCALE);
    REFUSED(merge.scale = NAN, PB_KVCACHE_ERROR_SCALE);
    REFUSED(merge.n = kept[KEPT - 1], PB_KVCACHE_ERROR_INDEX);
    const void *odd = (const unsigned char *)(const void *)keys + 2;
    memcpy(&merge.keys, &odd, sizeof odd);
    const float *askew = merge.keys;
    REFUSED(merge.keys = askew, PB_KVCACHE_ERROR_ALIGNMENT);
    REFUSED(merge.queries = askew, PB_KVCACHE_ERROR_ALIGNMENT);
    float *odd_out;
    odd = (const unsigned char *)(const void *)out_keys + 2;
    memcpy(&odd_out, &odd, sizeof odd);
    merge = small();
    CHECK(MERGED(&merge, workspace, needed, odd_out, out_values, OUT, all, bias, KEPT) == PB_KVCACHE_ERROR_ALIGNMENT);
    CHECK(MERGED(&merge, workspace, needed, out_keys, out_values, OUT, all, odd_out, KEPT) == PB_KVCACHE_ERROR_ALIGNMENT);
    REFUSED(merge.lse = askew, PB_KVCACHE_ERROR_ALIGNMENT);
    kept[7] = kept[6];
    REFUSED((void)0, PB_KVCACHE_ERROR_INDEX);
    fill();
    /* What is no number, in each of the arrays */
    float *const places[4] = {keys + 149 * STRIDE + DIM - 1, values + 3 * STRIDE, queries + 40, lse + 8};
    const uint32_t bad[3] = {0x7FC00000u, 0x7F800000u, 0xFF800000u};
    for (size_t i = 0; i < 12; ++i) {
        const float good = *places[i / 3];
        memcpy(places[i / 3], bad + i % 3, sizeof good);
        REFUSED(merge.lse = lse, PB_KVCACHE_ERROR_ROW_VALUE);
        *places[i / 3] = good;
    }
    /* Products and shares beyond a float */
    queries[0] = 3e38f;
    keys[0] = 3e38f;
    REFUSED((void)0, PB_KVCACHE_ERROR_LOGIT);
    fill();
    queries[0] = 1e15f;
    keys[0] = 1e15f;
    REFUSED(merge.scale = 1e30f, PB_KVCACHE_ERROR_LOGIT);
    for (size_t j = 0; j < N; ++j) {
        keys[j * STRIDE] = 0.0f;
    }
    for (size_t q = 0; q < QUERIES; ++q) {
        queries[q * DIM] = 0.0f;
    }
    queries[0] = -1e15f; /* no query's largest product is too large, but that of a kept row far below 0 is */
    keys[kept[0] * STRIDE] = 1e15f;
    REFUSED(merge.scale = 1e30f, PB_KVCACHE_ERROR_LOGIT);
    fill();
    lse[3] = -3e38f;
    REFUSED(merge.lse = lse, PB_KVCACHE_ERROR_LOGIT);
    CHECK(untouched());
    lse[3] = 0.0f;
    keys[DIM] = NAN; /* between rows, where nothing is read */
    merge = small();
    CHECK(MERGED(&merge, workspace, needed, out_keys, out_values, OUT, all, bias, KEPT) == PB_KVCACHE_OK);
    CHECK(!untouched());
}

int main(void)
{
    test_values();
    test_bits();
    test_ties();
    test_identity();
    test_far_logits();
    test_environments();
    test_levels();
    test_refusals();
    return END();
}
