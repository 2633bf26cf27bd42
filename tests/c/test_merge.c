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
        const size_t later = merge->window == 0 ? 0 : merge->window - 1 - q % merge->window;
        for (size_t j = 0; j < merge->n - later; ++j) {
            sum += exp((double)merge->scale * product(queries + q * DIM, keys + j * STRIDE));
        }
        normaliser[q] = merge->lse == NULL ? log(sum) : (double)lse[q];
        for (size_t j = 0; j < merge->n; ++j) {
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
    for (size_t j = 0; j < merge->n; ++j) {
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

/* The last positions' queries see nothing that follows them, also where a whole block does, or where all are few. */
static void test_window(void)
{
    const size_t sizes[5] = {N, 130, 128, 129, 118};
    const size_t windows[3] = {1, 3, QUERIES};
    for (size_t round = 0; round < 15; ++round) {
        pb_kvcache_merge merge = small();
        fill();
        merge.n = sizes[round % 5];
        merge.window = windows[round / 5];
        for (size_t d = 0; d < DIM && round % 2 == 1; ++d) { /* what follows weighs most */
            keys[(merge.n - 1) * STRIDE + d] = 2.0f * queries[d];
        }
        CHECK(run(&merge) == PB_KVCACHE_OK);
        compare(&merge, 2e-5);
    }
    /* Of two queries the first sees one of two keys. Its own share is 1, and that of the other as that of exp(2). */
    const float two_keys[2] = {0.0f, 2.0f};
    const float two_queries[2] = {1.0f, 0.0f};
    const uint32_t first = 0;
    pb_kvcache_merge merge = {two_keys, two_keys, 1, 2, 1, &first, 1, 0, two_queries, 2, NULL, 2, 1.0f};
    CHECK(run(&merge) == PB_KVCACHE_OK);
    const double own = (1.0 + 0.5) / 2.0;
    const double other = (exp(2.0) + 0.5) / 2.0;
    CHECK(fabs((double)out_values[0] - 2.0 * other / (own + other)) < 1e-6);
    merge.lse = lse; /* which then counts */
    lse[0] = 0.0f;
    lse[1] = (float)log(2.0);
    CHECK(run(&merge) == PB_KVCACHE_OK);
    CHECK(fabs((double)out_values[0] - 2.0 * other / (own + other)) < 1e-6);
    /* It sees a share of exp(100) more of what follows than a float holds. */
    const float far_keys[2] = {0.0f, 100.0f};
    merge = (pb_kvcache_merge){far_keys, two_keys, 1, 2, 1, &first, 1, 0, two_queries, 2, NULL, 2, 1.0f};
    CHECK(run(&merge) == PB_KVCACHE_ERROR_LOGIT && untouched());
    /* And what it sees is too far below 0. */
    const float low_keys[2] = {-1e15f, 0.0f};
    merge = (pb_kvcache_merge){low_keys, two_keys, 1, 2, 1, &first, 1, 0, two_queries, 2, NULL, 2, 1e30f};
    CHECK(run(&merge) == PB_KVCACHE_ERROR_LOGIT && untouched());
}

/* The same bits on every compiler, flag set, instruction set and byte order: a hash (FNV-1a) of all that is written. */
static void test_bits(void)
{
    uint32_t hash = 2166136261u;
    state = 7;
    for (size_t round = 0; round < 6; ++round) {
        pb_kvcache_merge merge = small();
        fill();
        for (size_t q = 0; q < QUERIES; ++q) {
            lse[q] = 5.0f + drawn();
        }
        merge.lse = round % 2 == 0 || round > 3 ? NULL : lse;
        merge.scale = round < 2 ? 0.25f : 3.0f;
        merge.window = round < 4 ? 0 : round == 4 ? 3 : QUERIES;
        CHECK(run(&merge) == PB_KVCACHE_OK);
        for (size_t i = 0; i < KEPT; ++i) {
            for (size_t d = 0; d < DIM; ++d) {
                hash = (hash ^ bits_of(out_keys[i * OUT + d])) * 16777619u;
                hash = (hash ^ bits_of(out_values[i * OUT + d])) * 16777619u;
            }
            hash = (hash ^ bits_of(bias[i])) * 16777619u;
        }
        const uint32_t pinned = round < 3 ? hash : round == 3 ? 0x9347CCC3u : round == 4 ? 0x151F5636u : 0xDE64895Au;
        CHECK(hash == pinned);
        if (hash != pinned) {
            printf("hash %08x\n", (unsigned)hash);
        }
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
    merge = (pb_kvcache_merge){two_keys, two_keys, 2, 2, 2, &first, 1, 0, two_queries, 2, NULL, 0, 1.0f};
    CHECK(run(&merge) == PB_KVCACHE_OK && fabsf(bias[0] - 450.0f) < 1e-3f && out_keys[0] == 0.0f);
    /* The evicted key's share is below what a float can weigh. */
    const float lone_keys[4] = {100.0f, 0.0f, 0.0f, 1.0f};
    const float lone_query[2] = {1.0f, 0.0f};
    merge = (pb_kvcache_merge){lone_keys, lone_keys, 2, 2, 2, &first, 1, 0, lone_query, 1, NULL, 0, 1.0f};
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

/* Every instruction set makes the same products, sums of their terms in order, with any number of rows. */
static void test_columns(void)
{
    enum { ROWS = 37, MOST = 40, COLUMNS = PB_KVCACHE_PRIV_COLUMNS };
    static float columns[MOST * COLUMNS];
    static float rows[ROWS * MOST];
    static float dots[(ROWS + 1) * COLUMNS];
    for (unsigned level = 0; level < PB_KVCACHE_PRIV_LEVELS; ++level) {
        const pb_kvcache_priv_lanes *lanes = pb_kvcache_priv_lanes_at(level);
        for (size_t dim = 1; lanes != NULL && dim <= MOST; ++dim) {
            const size_t count = dim == MOST ? ROWS : dim % ROWS;
            for (size_t i = 0; i < dim * COLUMNS; ++i) {
                columns[i] = drawn();
            }
            for (size_t i = 0; i < count * dim; ++i) {
                rows[i] = drawn();
            }
            memset(dots, 1, sizeof dots);
            lanes->columns(columns, rows, count, dim, dots);
            bool same = true;
            for (size_t row = 0; row < count; ++row) {
                for (size_t i = 0; i < COLUMNS; ++i) {
                    float sum = 0.0f;
                    for (size_t d = 0; d < dim; ++d) {
                        const float term = columns[d * COLUMNS + i] * rows[row * dim + d];
                        sum += term;
                    }
                    same = same && bits_of(sum) == bits_of(dots[row * COLUMNS + i]);
                }
            }
            CHECK(same && bits_of(dots[count * COLUMNS]) == 0x01010101u);
        }
    }
}

/* Of equal products the first is kept. One that is no number is kept nowhere. */
static void test_keep_larger(void)
{
    enum { ROWS = 9, COLUMNS = PB_KVCACHE_PRIV_COLUMNS };
    static float dots[ROWS * COLUMNS];
    for (unsigned level = 0; level < PB_KVCACHE_PRIV_LEVELS; ++level) {
        const pb_kvcache_priv_lanes *lanes = pb_kvcache_priv_lanes_at(level);
        for (size_t round = 0; lanes != NULL && round < 20; ++round) {
            float best[COLUMNS];
            uint32_t at[COLUMNS];
            bool right = true;
            for (size_t i = 0; i < ROWS * COLUMNS; ++i) {
                const float whole = (float)(int)(4.0f * drawn());
                dots[i] = whole == 2.0f ? NAN : whole == 3.0f ? INFINITY : whole == -3.0f ? -INFINITY : whole;
            }
            for (size_t i = 0; i < COLUMNS; ++i) {
                best[i] = i % 3 == 0 ? 1.0f : minus_infinity();
                at[i] = 5;
            }
            lanes->keep_larger(dots, ROWS, 70, best, at);
            for (size_t i = 0; i < COLUMNS; ++i) {
                float most = i % 3 == 0 ? 1.0f : minus_infinity();
                uint32_t place = 5;
                for (uint32_t row = 0; row < ROWS; ++row) {
                    place = dots[row * COLUMNS + i] > most ? 70 + row : place;
                    most = dots[row * COLUMNS + i] > most ? dots[row * COLUMNS + i] : most;
                }
                right = right && at[i] == place && bits_of(best[i]) == bits_of(most);
            }
            CHECK(right);
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
    REFUSED(merge.window = N + 1, PB_KVCACHE_ERROR_WINDOW);
    REFUSED(merge.window = 2, PB_KVCACHE_ERROR_WINDOW);
    REFUSED(merge.window = 2 * QUERIES, PB_KVCACHE_ERROR_WINDOW);
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
    test_window();
    test_bits();
    test_ties();
    test_identity();
    test_far_logits();
    test_environments();
    test_columns();
    test_keep_larger();
    test_refusals();
    return END();
}
