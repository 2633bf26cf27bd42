/*
 * How long pb_kvcache_plan takes: the median over many calls, for each shape, without bounds and with both active.
 *
 *     cmake -S csrc -B build-bench -DPB_KVCACHE_BENCH=ON && cmake --build build-bench && build-bench/bench_plan
 *
 * Goal: 128 layers in under 60 us, with and without a minimum and a maximum that both clamp. Planning happens once a
 * prompt.
 */
#define _POSIX_C_SOURCE 199309L

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "clock.h"
#include "pb_kvcache.h"

enum { ROUNDS = 401, MOST_LAYERS = 1024 };

static uint32_t budgets[MOST_LAYERS];
static double weights[MOST_LAYERS];

static double median_us(const pb_kvcache_plan_params *params, size_t num_layers)
{
    double times[ROUNDS];
    enum { CALLS = 16 };
    for (int round = 0; round < ROUNDS; ++round) {
        const double start = now();
        for (int call = 0; call < CALLS; ++call) {
            if (pb_kvcache_plan(params, budgets, num_layers) != PB_KVCACHE_OK) {
                fprintf(stderr, "bench_plan: the plan was refused\n");
                exit(1);
            }
        }
        times[round] = (now() - start) / CALLS;
    }
    return median(times, ROUNDS) * 1e6;
}

static size_t count(uint32_t value, size_t num_layers)
{
    size_t n = 0;
    for (size_t layer = 0; layer < num_layers; ++layer) {
        n += budgets[layer] == value;
    }
    return n;
}

int main(void)
{
    static const char *const names[] = {"uniform", "pyramid 4", "pyramid 39", "pyramid 2.7", "geometric 4", "measured"};
    static const pb_kvcache_plan_shape shapes[] = {
        PB_KVCACHE_PLAN_UNIFORM, PB_KVCACHE_PLAN_PYRAMID,   PB_KVCACHE_PLAN_PYRAMID,
        PB_KVCACHE_PLAN_PYRAMID, PB_KVCACHE_PLAN_GEOMETRIC, PB_KVCACHE_PLAN_WEIGHTS,
    };
    static const double ratios[] = {1.0, 4.0, 39.0, 2.7, 4.0, 1.0};
    uint32_t state = 1;
    for (size_t layer = 0; layer < MOST_LAYERS; ++layer) {
        state = state * 1664525u + 1013904223u;
        weights[layer] = 0.25 + (double)state / 4294967296.0;
    }
    printf("pb_kvcache %s: microseconds a plan, median of %d\n\n", pb_kvcache_version(), ROUNDS);
    printf("%-12s %6s %10s %10s   %s\n", "shape", "layers", "unclamped", "clamped", "at minimum, maximum");
    for (size_t layers = 32; layers <= MOST_LAYERS; layers *= layers < 128 ? 4 : 8) {
        for (size_t i = 0; i < sizeof names / sizeof names[0]; ++i) {
            pb_kvcache_plan_params params = PB_KVCACHE_PLAN_PARAMS_DEFAULT;
            params.total = 513 * (uint64_t)layers + 7;
            params.shape = shapes[i];
            params.ratio = ratios[i];
            params.weights = shapes[i] == PB_KVCACHE_PLAN_WEIGHTS ? weights : NULL;
            const double free_us = median_us(&params, layers);
            params.minimum = 400;
            params.maximum = 600;
            const double clamped_us = median_us(&params, layers);
            printf("%-12s %6zu %10.2f %10.2f   %zu, %zu\n", names[i], layers, free_us, clamped_us, count(400, layers),
                   count(600, layers));
        }
    }
    return 0;
}
