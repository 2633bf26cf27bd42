/*
 * What one decode step of a whole model costs: a cache for each of 32 layers, or for each of 8 KV heads of them, as one
 * stack and as independent caches. Medians of interleaved repetitions. Build with -DPB_KVCACHE_BENCH=ON.
 */
#define _POSIX_C_SOURCE 200809L
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

#include "clock.h"
#include "pb_kvcache.h"

enum { MOST_CACHES = 256, REPETITIONS = 15, STEPS = 32 };

static void measure(uint32_t num_caches, uint32_t budget, uint32_t ratio)
{
    const size_t most = 2 * (size_t)budget;
    const pb_kvcache_stack_params params = {num_caches, budget, ratio, 32, 16, 7, 0, 0};
    pb_kvcache_stack *stack = pb_kvcache_stack_create(&params, NULL, NULL);
    pb_kvcache *caches[MOST_CACHES];
    float *weights = malloc(num_caches * most * sizeof *weights);
    const float *attn[MOST_CACHES];
    size_t lengths[MOST_CACHES];
    size_t offsets[MOST_CACHES + 1];
    uint32_t victims[MOST_CACHES];
    /* Weights, and the caches that are driven one by one */
    uint32_t state = 1;
    for (size_t i = 0; i < num_caches * most; ++i) {
        state = state * 1664525u + 1013904223u;
        weights[i] = (float)(state >> 8) * 0x1p-24f;
    }
    for (uint32_t layer = 0; layer < num_caches; ++layer) {
        const pb_kvcache_pyramidkv_params one = {budget, layer, num_caches, ratio, 32, 16, 7, 0, 0};
        caches[layer] = pb_kvcache_pyramidkv.create(&one, NULL, NULL);
        attn[layer] = weights + layer * most;
    }
    /* Steps, each through the stack and then through the caches */
    double step[REPETITIONS];
    double evict[REPETITIONS];
    double apart[REPETITIONS];
    uint32_t pos = 0;
    for (int repetition = -(int)(most / STEPS) - 2; repetition < REPETITIONS; ++repetition) { /* below 0: filling up */
        double in_step = 0.0;
        double in_evict = 0.0;
        double in_apart = 0.0;
        for (int i = 0; i < STEPS; ++i) {
            for (uint32_t layer = 0; layer < num_caches; ++layer) {
                lengths[layer] = pb_kvcache_kept_count(caches[layer]);
            }
            ++pos;
            const double start = now();
            const bool filling = repetition < -1; /* without attention */
            pb_kvcache_stack_on_decode_step(stack, pos, filling ? NULL : attn, lengths);
            const double middle = now();
            pb_kvcache_stack_evict(stack, victims, num_caches, offsets, num_caches + 1);
            const double end = now();
            for (uint32_t layer = 0; layer < num_caches; ++layer) {
                pb_kvcache_pyramidkv.on_decode_step(caches[layer], pos, filling ? NULL : attn[layer], lengths[layer]);
                pb_kvcache_pyramidkv.evict(caches[layer], UINT32_MAX, victims, num_caches);
            }
            in_apart += now() - end;
            in_evict += end - middle;
            in_step += middle - start;
        }
        if (repetition >= 0) {
            step[repetition] = in_step / STEPS;
            evict[repetition] = in_evict / STEPS;
            apart[repetition] = in_apart / STEPS;
        }
    }
    /* Report */
    const double stepped = median(step, REPETITIONS);
    const double evicted = median(evict, REPETITIONS);
    const double alone = median(apart, REPETITIONS);
    printf("%3u caches, ratio %u, %7zu kept: step %6.1f us, evict %6.1f us; alone %6.1f us, %.2f times that\n",
           (unsigned)num_caches, (unsigned)ratio, pb_kvcache_stack_resident(stack), stepped * 1e6, evicted * 1e6,
           alone * 1e6, alone / (stepped + evicted));
    fflush(stdout);
    for (uint32_t layer = 0; layer < num_caches; ++layer) {
        pb_kvcache_pyramidkv.destroy(caches[layer]);
    }
    pb_kvcache_stack_destroy(stack);
    free(weights);
}

int main(void)
{
    measure(32, 1024, 1);
    measure(32, 1024, 4);
    measure(MOST_CACHES, 1024, 1);
    measure(MOST_CACHES, 4096, 1);
    return 0;
}
