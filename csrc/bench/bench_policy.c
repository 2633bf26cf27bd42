/*
 * What one SnapKV cache at its budget costs: a decode step, an eviction of one position, an eviction of half of them.
 * Beside them the plain loops of plain.h, which are compiled for this machine, and a copy of the step's weights. All of
 * it interleaved, warm; medians over the calls, which another program's turn in between does not move.
 * Both must drop the same positions.
 *
 *     cmake -S csrc -B build-bench -DPB_KVCACHE_BENCH=ON && cmake --build build-bench
 *     taskset -c 1 build-bench/bench_policy
 *
 * For a processor without AVX2 and AVX-512: -DCMAKE_C_FLAGS=-DPB_KVCACHE_PORTABLE.
 */
#define _POSIX_C_SOURCE 200809L
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "clock.h"
#include "pb_kvcache.h"
#include "plain.h"

enum {
    BLOCK = 64, /* calls of one kind in a row, so that each finds what it needs where it left it */
    CALLS = 1024,
    HALVES = 15,
    MOST_HALVED = 4096, /* the plain loop takes seconds for half of 65,536 */
    STRIDE = 16,
    RECENT_WINDOW = 32,
    OBS_WINDOW = 16,
    POOL_KERNEL = 7
};

static volatile float sink; /* so that the copies are made */

/* Seconds of each call. */
static double copies[CALLS];
static double steps[2][CALLS]; /* the library's, the plain loop's */
static double evicts[2][CALLS];
static double halves[2][HALVES];

static pb_kvcache *new_cache(const pb_kvcache_snapkv_params *params)
{
    pb_kvcache *cache = pb_kvcache_snapkv.create(params, NULL, NULL);
    if (cache == NULL) {
        fprintf(stderr, "bench_policy: no memory\n");
        exit(1);
    }
    return cache;
}

static int by_position(const void *a, const void *b)
{
    const uint32_t x = *(const uint32_t *)a;
    const uint32_t y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

static void same(const uint32_t *victims, uint32_t *plain_victims, size_t count, size_t plain_count)
{
    qsort(plain_victims, plain_count, sizeof *plain_victims, by_position);
    if (count != plain_count || memcmp(victims, plain_victims, count * sizeof *victims) != 0) {
        fprintf(stderr, "bench_policy: the plain loop drops others\n");
        exit(1);
    }
}

static void measure(uint32_t budget)
{
    pb_kvcache_snapkv_params params = PB_KVCACHE_SNAPKV_PARAMS_DEFAULT;
    params.budget = budget;
    params.recent_window = RECENT_WINDOW;
    params.obs_window = OBS_WINDOW;
    params.pool_kernel = POOL_KERNEL;
    pb_kvcache *cache = new_cache(&params);
    pb_kvcache *full = new_cache(&params);
    plain_cache plain = plain_create(budget, RECENT_WINDOW, OBS_WINDOW, POOL_KERNEL);
    plain_cache plain_full = plain_create(budget, RECENT_WINDOW, OBS_WINDOW, POOL_KERNEL);
    /* Weights of a step, and rows to copy them to */
    const int calls = budget > 4096 ? CALLS / 4 : CALLS;
    const size_t weights = budget + BLOCK * STRIDE;
    float *attn = malloc(weights * sizeof *attn);
    float *others = malloc(weights * sizeof *others);
    float *rows = malloc(OBS_WINDOW * (size_t)budget * sizeof *rows);
    uint32_t *victims = malloc(budget * sizeof *victims);
    uint32_t *plain_victims = malloc(budget * sizeof *plain_victims);
    uint32_t state = 1;
    uint32_t pos = 0;
    for (size_t i = 0; i < weights; ++i) {
        state = state * 1664525u + 1013904223u;
        attn[i] = (float)(state >> 8) * 0x1p-24f;
        others[i] = attn[i];
    }
    memset(rows, 0, OBS_WINDOW * (size_t)budget * sizeof *rows);
    while (pb_kvcache_kept_count(cache) < budget) {
        ++pos;
        pb_kvcache_snapkv.on_decode_step(cache, pos, attn, pb_kvcache_kept_count(cache));
        plain_step(&plain, pos, attn);
    }
    for (int first = -BLOCK; first < calls; first += BLOCK) { /* below 0: warming up */
        double at[4][BLOCK + 1];
        double copied[BLOCK];
        double evicted[BLOCK];
        uint32_t dropped[BLOCK];
        const uint32_t before = pos;
        for (int i = 0; i < BLOCK; ++i) {
            at[0][i] = now();
            pb_kvcache_snapkv.on_decode_step(cache, ++pos, attn + i * STRIDE, budget);
            at[1][i] = now();
            pb_kvcache_snapkv.evict(cache, budget, dropped + i, 1);
            const double end = now(); /* the caches are as a step finds them */
            memcpy(rows + (size_t)(i % OBS_WINDOW) * budget, others + i * STRIDE, budget * sizeof *attn);
            copied[i] = now() - end;
            evicted[i] = end - at[1][i];
            sink = rows[(size_t)(i % OBS_WINDOW) * budget + (size_t)i];
        }
        pos = before;
        for (int i = 0; i < BLOCK; ++i) {
            at[2][i] = now();
            plain_step(&plain, ++pos, attn + i * STRIDE);
            at[3][i] = now();
            const size_t count = plain_evict(&plain, budget, plain_victims);
            same(dropped + i, plain_victims, 1, count);
        }
        at[2][BLOCK] = now();
        for (int i = 0; i < BLOCK && first >= 0; ++i) {
            copies[first + i] = copied[i];
            steps[0][first + i] = at[1][i] - at[0][i];
            steps[1][first + i] = at[3][i] - at[2][i];
            evicts[0][first + i] = evicted[i];
            evicts[1][first + i] = at[2][i + 1] - at[3][i];
        }
    }
    for (int i = -1; budget <= MOST_HALVED && i < HALVES; ++i) {
        pb_kvcache_copy(full, cache);
        plain_copy(&plain_full, &plain);
        const double start = now();
        const size_t count = pb_kvcache_snapkv.evict(full, budget / 2, victims, budget);
        const double middle = now();
        const size_t plain_count = plain_evict(&plain_full, budget / 2, plain_victims);
        const double end = now();
        same(victims, plain_victims, count, plain_count);
        if (i >= 0) {
            halves[0][i] = middle - start;
            halves[1][i] = end - middle;
        }
    }
    /* Report */
    double us[6];
    const double copy = median(copies, (size_t)calls) * 1e6;
    for (int which = 0; which < 2; ++which) {
        us[which] = median(steps[which], (size_t)calls) * 1e6;
        us[2 + which] = median(evicts[which], (size_t)calls) * 1e6;
        us[4 + which] = median(halves[which], HALVES) * 1e6;
    }
    printf("%6u %8.2f %8.2f %6.2f %6.1f   %8.2f %8.2f %6.1f", (unsigned)budget, us[0], us[1], us[0] / copy,
           us[1] / us[0], us[2], us[3], us[3] / us[2]);
    if (budget <= MOST_HALVED) {
        printf("   %8.1f %10.1f %6.0f", us[4], us[5], us[5] / us[4]);
    }
    printf("\n");
    fflush(stdout);
    pb_kvcache_snapkv.destroy(cache);
    pb_kvcache_snapkv.destroy(full);
    plain_destroy(&plain);
    plain_destroy(&plain_full);
    free(attn);
    free(others);
    free(rows);
    free(victims);
    free(plain_victims);
}

int main(void)
{
    printf("pb_kvcache %s: microseconds, obs_window %d, pool_kernel %d\n\n", pb_kvcache_version(), (int)OBS_WINDOW,
           (int)POOL_KERNEL);
    printf("%6s %8s %8s %6s %6s   %8s %8s %6s   %8s %10s %6s\n", "kept", "step", "plain", "copies", "x", "evict 1",
           "plain", "x", "half", "plain", "x");
    for (uint32_t budget = 128; budget <= 65536; budget *= budget < 1024 ? 8 : 4) {
        measure(budget);
    }
    return 0;
}
