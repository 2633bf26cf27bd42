/*
 * The decode kernels of every instruction set against the plainest loops, bit for bit, and whole SnapKV caches against
 * a model that keeps every row whole: with gaps that are noted, closed and forgotten, and sums that go on from a prefix.
 */
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "checks.h"
#include "kernels.h"
#include "lanes.h"

static uint32_t state = 1;

static uint32_t draw(void)
{
    state = state * 1664525u + 1013904223u;
    return state >> 8;
}

/* Weights with many ties, zeros, and what a sum in float would round. */
static float weight(unsigned kind)
{
    const uint32_t random = draw();
    switch (kind) {
    case 0: return (float)(random % 4) * 0.25f;
    case 1: return (float)random * 0x1p-24f;
    case 2: return random % 5 == 0 ? 0.0f : (float)(random % 1000) * 0x1p-149f;
    default: return random % 7 == 0 ? -0.0f : (float)(random % 1000) * (random % 2 == 0 ? 1e30f : 1e-30f);
    }
}

/* ---- The kernels ---- */

static void test_add_rows(const pb_kvcache_priv_lanes *lanes)
{
    enum { ROWS = 5, MOST = 150, SHIFT = 3 };
    for (size_t n = 0; n <= MOST; ++n) {
        const size_t room = n + (n % 3 == 0 ? 0 : draw() % 80);
        float *memory[ROWS]; /* of exactly the size that may be read, at every alignment */
        const float *rows[ROWS];
        double *from = malloc((room + SHIFT + 1) * sizeof *from);
        double *sums = malloc((n + 1) * sizeof *sums);
        for (size_t row = 0; row < ROWS; ++row) {
            const size_t before = draw() % 17;
            memory[row] = malloc((before + room + 1) * sizeof **memory);
            rows[row] = memory[row] + before + 1;
            for (size_t i = 0; i <= before + room; ++i) {
                memory[row][i] = weight((unsigned)(n % 4));
            }
        }
        for (size_t num_rows = 0; num_rows <= ROWS; num_rows += ROWS) {
            for (size_t i = 0; i < room + SHIFT; ++i) {
                from[i] = (double)weight(1);
            }
            bool good = true;
            sums[n] = -1.0;
            for (int with = 0; with < 2; ++with) {
                lanes->add_rows(rows, num_rows, with ? from + SHIFT : NULL, n, room, sums);
                for (size_t i = 0; i < n; ++i) {
                    double sum = with ? from[SHIFT + i] : 0.0;
                    for (size_t row = 0; row < num_rows; ++row) {
                        sum += (double)rows[row][i];
                    }
                    good = good && memcmp(&sum, &sums[i], sizeof sum) == 0;
                }
            }
            CHECK(good && sums[n] == -1.0);
            /* Onto itself, further to the front: what lies behind stays. */
            const double behind = from[n];
            lanes->add_rows(rows, num_rows, from + SHIFT, n, room, from);
            CHECK(memcmp(from, sums, n * sizeof *sums) == 0);
            CHECK(n < SHIFT || memcmp(&from[n], &behind, sizeof behind) == 0);
        }
        for (size_t row = 0; row < ROWS; ++row) {
            free(memory[row]);
        }
        free(from);
        free(sums);
    }
}

static void test_lowest(const pb_kvcache_priv_lanes *lanes)
{
    static const size_t kernels[] = {1, 2, 3, 7, 15, 31};
    for (size_t n = 0; n <= 150; ++n) {
        for (size_t k = 0; k < sizeof kernels / sizeof kernels[0]; ++k) {
            const size_t kernel = kernels[k];
            double *scores = malloc((n + kernel) * sizeof *scores);
            for (size_t i = 0; i < n + kernel - 1; ++i) {
                const uint32_t random = draw();
                scores[i] = n % 2 == 0 ? (double)(random % 5) * (random % 2 == 0 ? 0.25 : -0.25) : (double)random;
                scores[i] = n % 16 == 7 ? HUGE_VAL : scores[i];
            }
            double best = HUGE_VAL;
            size_t best_at = 0;
            for (size_t i = 0; i < n; ++i) {
                double most = scores[i];
                for (size_t j = i; j < i + kernel; ++j) {
                    most = scores[j] > most ? scores[j] : most;
                }
                if (most < best) {
                    best = most;
                    best_at = i;
                }
            }
            double lowest;
            CHECK(lanes->lowest(scores, n, kernel, &lowest) == best_at && lowest == best);
            free(scores);
        }
    }
}

static void test_plain_weights(const pb_kvcache_priv_lanes *lanes)
{
    enum { N = 83 };
    const float bad[] = {NAN, -NAN, INFINITY, -INFINITY, -1.0f, -1e-45f, -0.0f};
    float weights[N];
    for (size_t i = 0; i < N; ++i) {
        weights[i] = i % 3 == 0 ? 3.4028234e38f : i % 3 == 1 ? 0.0f : 1e-45f;
    }
    for (size_t n = 0; n <= N; ++n) {
        CHECK(lanes->plain_weights(weights, n));
    }
    for (size_t at = 0; at < N; ++at) {
        const float good = weights[at];
        for (size_t i = 0; i < sizeof bad / sizeof bad[0]; ++i) {
            weights[at] = bad[i];
            CHECK(!lanes->plain_weights(weights, N) && lanes->plain_weights(weights, at));
        }
        weights[at] = good;
    }
}

/* Also where there is no inside, and where the kernel is wider than everything. */
static void test_pool_lowest(void)
{
    double scores[90];
    double pooled[90];
    for (size_t n = 1; n <= 90; ++n) {
        for (size_t kernel = 1; kernel <= 2 * n + 3; kernel += 2) {
            const size_t most = 1 + draw() % n;
            size_t lowest = 0;
            for (size_t i = 0; i < n; ++i) {
                scores[i] = (double)(draw() % (n % 2 == 0 ? 4 : 1000));
            }
            for (size_t i = 0; i < n; ++i) {
                pooled[i] = scores[i];
                for (size_t j = i > kernel / 2 ? i - kernel / 2 : 0; j < n && j <= i + kernel / 2; ++j) {
                    pooled[i] = scores[j] > pooled[i] ? scores[j] : pooled[i];
                }
                lowest = i < most && pooled[i] < pooled[lowest] ? i : lowest;
            }
            double again[90];
            memcpy(again, scores, n * sizeof *scores);
            pb_kvcache_priv_pool_max(again, n, kernel, again);
            CHECK(memcmp(again, pooled, n * sizeof *pooled) == 0);
            CHECK(pb_kvcache_priv_pool_lowest(scores, n, kernel, most) == lowest);
        }
    }
}

/* ---- The choice ---- */

static const double *sorted_scores;

static int by_score(const void *a, const void *b)
{
    const uint32_t x = *(const uint32_t *)a;
    const uint32_t y = *(const uint32_t *)b;
    const double difference = sorted_scores[x] - sorted_scores[y];
    return difference != 0.0 ? (difference > 0.0) - (difference < 0.0) : (x > y) - (x < y);
}

static void check_choice(const double *scores, size_t n, size_t count)
{
    uint32_t *order = malloc(n * sizeof *order);
    uint32_t *chosen = malloc((count + 1) * sizeof *chosen);
    bool *wanted = calloc(n, sizeof *wanted);
    for (uint32_t i = 0; i < n; ++i) {
        order[i] = i;
    }
    sorted_scores = scores;
    qsort(order, n, sizeof *order, by_score);
    for (size_t i = 0; i < count; ++i) {
        wanted[order[i]] = true;
    }
    chosen[count] = 99;
    pb_kvcache_priv_choose_lowest(scores, n, count, chosen);
    bool good = chosen[count] == 99;
    for (size_t i = 0; i < count; ++i) {
        good = good && chosen[i] < n && wanted[chosen[i]] && (i == 0 || chosen[i] > chosen[i - 1]);
    }
    CHECK(good);
    free(order);
    free(chosen);
    free(wanted);
}

/* Also where the sample tells nothing of the rest: it is taken every n / 512 scores. */
static void test_choice(void)
{
    enum { N = 20000, EVERY = N / 512 };
    double *scores = malloc(N * sizeof *scores);
    static const size_t counts[] = {2, 3, 31, 32, 33, 100, N / 2, N - 100, N - 1};
    for (unsigned kind = 0; kind < 8; ++kind) {
        for (size_t i = 0; i < N; ++i) {
            const bool sampled = i % EVERY == 0;
            const double random = (double)draw();
            switch (kind) {
            case 0: scores[i] = random; break;
            case 1: scores[i] = random * 0x1p-1074; break;
            case 2: scores[i] = (double)(draw() % 3); break;
            case 3: scores[i] = sampled ? 1e9 + random : random * 1e-9; break;
            case 4: scores[i] = sampled ? random * 1e-9 : 1e9 + random; break;
            case 5: scores[i] = i < 3000 ? 5.0 + random * 0x1p-30 : random; break; /* the first of what is between */
            case 6: scores[i] = sampled ? 1.0 : i % 2 == 0 ? 0.5 + random * 1e-12 : 1.5 + random; break;
            default: scores[i] = (i % 3 == 0 ? -1.0 : 1.0) * (double)(draw() % 100) * 0.5; break;
            }
        }
        for (size_t c = 0; c < sizeof counts / sizeof counts[0]; ++c) {
            check_choice(scores, N, counts[c]);
            check_choice(scores, N / 4, counts[c] < N / 4 ? counts[c] : N / 8);
            check_choice(scores, 2048, counts[c] < 2048 ? counts[c] : 1024);
            check_choice(scores, 2049, counts[c] < 2049 ? counts[c] : 1025);
        }
    }
    free(scores);
}

/* ---- Whole caches ---- */

enum { MOST = 700, MOST_SLOTS = 70 };

typedef struct model {
    size_t slots;
    size_t recent;
    size_t kernel;
    size_t n;
    size_t cursor;
    uint32_t kept[MOST + 1];
    float rows[MOST_SLOTS][MOST + 1]; /* 0 where nothing was observed */
} model;

static double model_sum(const model *m, size_t i)
{
    double sum = 0.0;
    for (size_t slot = 0; slot < m->slots; ++slot) {
        sum += (double)m->rows[slot][i];
    }
    return sum;
}

static void model_step(model *m, uint32_t pos, const float *attn)
{
    if (attn != NULL) {
        memcpy(m->rows[m->cursor], attn, m->n * sizeof *attn);
        m->cursor = (m->cursor + 1) % m->slots;
    }
    for (size_t slot = 0; slot < m->slots; ++slot) {
        m->rows[slot][m->n] = 0.0f;
    }
    m->kept[m->n++] = pos;
}

/* Victims, ascending. */
static size_t model_evict(model *m, size_t budget, uint32_t *victims)
{
    static double sums[MOST + 1];
    static double pooled[MOST + 1];
    static bool gone[MOST + 1];
    const size_t half = m->kernel / 2;
    const size_t candidates = m->n > m->recent ? m->n - m->recent : 0;
    const size_t excess = m->n > budget ? m->n - budget : 0;
    const size_t count = excess < candidates ? excess : candidates;
    for (size_t i = 0; i < m->n; ++i) {
        sums[i] = model_sum(m, i);
    }
    for (size_t i = 0; i < m->n; ++i) {
        gone[i] = false;
        pooled[i] = sums[i];
        for (size_t j = i > half ? i - half : 0; j < m->n && j <= i + half; ++j) {
            pooled[i] = sums[j] > pooled[i] ? sums[j] : pooled[i];
        }
    }
    for (size_t victim = 0; victim < count; ++victim) {
        size_t lowest = candidates;
        for (size_t i = 0; i < candidates; ++i) {
            lowest = !gone[i] && (lowest == candidates || pooled[i] < pooled[lowest]) ? i : lowest;
        }
        gone[lowest] = true;
    }
    size_t to = 0;
    size_t written = 0;
    for (size_t i = 0; i < m->n; ++i) {
        if (gone[i]) {
            victims[written++] = m->kept[i];
            continue;
        }
        for (size_t slot = 0; slot < m->slots; ++slot) {
            m->rows[slot][to] = m->rows[slot][i];
        }
        m->kept[to++] = m->kept[i];
    }
    m->n = to;
    return written;
}

static bool equal_scores(const pb_kvcache *cache, const model *m)
{
    for (size_t i = 0; i < m->n; ++i) {
        double score;
        const double sum = model_sum(m, i);
        if (pb_kvcache_window_score(cache, m->kept[i], &score) != PB_KVCACHE_OK
            || memcmp(&sum, &score, sizeof sum) != 0) {
            return false;
        }
    }
    return pb_kvcache_kept_count(cache) == m->n;
}

static void run(uint32_t budget, uint32_t recent, uint32_t slots, uint32_t kernel, unsigned kind, int steps)
{
    static model m;
    static uint32_t victims[2][MOST + 1];
    static float attn[MOST + 1];
    pb_kvcache_snapkv_params params = PB_KVCACHE_SNAPKV_PARAMS_DEFAULT;
    params.budget = budget;
    params.recent_window = recent;
    params.obs_window = slots;
    params.pool_kernel = kernel;
    pb_kvcache *cache = pb_kvcache_snapkv.create(&params, NULL, NULL);
    pb_kvcache *other = pb_kvcache_snapkv.create(&params, NULL, NULL);
    uint32_t pos = 0;
    bool good = true;
    memset(&m, 0, sizeof m);
    m.slots = slots;
    m.recent = recent;
    m.kernel = kernel;
    m.n = 1;
    for (int step = 0; good && step < steps; ++step) {
        const uint32_t what = draw() % 64;
        const bool full = m.n > budget;
        for (size_t i = 0; i < m.n; ++i) {
            attn[i] = weight(kind);
        }
        if (!full) {
            const bool blind = what % 8 == 0;
            pos += 1 + draw() % 2;
            if (what % 16 == 1 && !blind) { /* a refused step changes nothing */
                const size_t at = draw() % m.n;
                const float old = attn[at];
                attn[at] = -1.0f;
                good = pb_kvcache_snapkv.on_decode_step(cache, pos, attn, m.n) == PB_KVCACHE_ERROR_ATTN_VALUE
                       && equal_scores(cache, &m);
                attn[at] = old;
            }
            good = good && pb_kvcache_snapkv.on_decode_step(cache, pos, blind ? NULL : attn, m.n) == PB_KVCACHE_OK;
            model_step(&m, pos, blind ? NULL : attn);
        }
        if (full || what < 4) { /* mostly one, sometimes a few, rarely many */
            size_t target = budget;
            if (what < 12) {
                target = m.n > what ? m.n - what : 1;
            } else if (what == 63) {
                target = 1 + draw() % budget;
            }
            const size_t count = pb_kvcache_snapkv.evict(cache, (uint32_t)target, victims[0], MOST + 1);
            good = good && model_evict(&m, target < budget ? target : budget, victims[1]) == count
                   && memcmp(victims[0], victims[1], count * sizeof victims[0][0]) == 0;
        }
        if (what == 62) { /* the copy goes on instead */
            good = good && pb_kvcache_copy(other, cache) == PB_KVCACHE_OK;
            pb_kvcache *copied = other;
            other = cache;
            cache = copied;
        }
        if (what % 32 == 31 || budget < 50) {
            good = good && equal_scores(cache, &m);
        }
        if (what == 61 && draw() % 8 == 0) {
            pos = 0;
            good = good && pb_kvcache_reset(cache) == PB_KVCACHE_OK;
            m.n = 1;
            m.cursor = 0;
            m.kept[0] = 0;
            memset(m.rows, 0, sizeof m.rows);
        }
    }
    CHECK(good && equal_scores(cache, &m));
    pb_kvcache_snapkv.destroy(cache);
    pb_kvcache_snapkv.destroy(other);
}

int main(void)
{
    for (unsigned level = 0; level < PB_KVCACHE_PRIV_LEVELS; ++level) {
        const pb_kvcache_priv_lanes *lanes = pb_kvcache_priv_lanes_at(level);
        if (lanes != NULL) {
            test_add_rows(lanes);
            test_lowest(lanes);
            test_plain_weights(lanes);
        }
    }
    test_pool_lowest();
    test_choice();
    for (unsigned kind = 0; kind < 4; ++kind) {
        run(5, 0, 1, 1, kind, 400);
        run(20, 4, 3, 3, kind, 800);
        run(40, 4, 16, 7, kind, 1500);
        run(200, 32, 16, 7, kind, 2000);
        run(300, 0, 70, 33, kind, 1500);
        run(699, 32, 16, 5, kind, 1800);
    }
    return END();
}
