/*
 * What one decode step of a whole model costs: 32 layers that keep 1,024 positions on average, as one stack and as 32
 * independent caches. Medians of interleaved repetitions. Build with -DPB_KVCACHE_BENCH=ON.
 */
#define _POSIX_C_SOURCE 200809L
#include <stdio.h>
#include <stdlib.h>

#include "clock.h"
#include "pb_kvcache.h"

enum { LAYERS = 32, BUDGET = 1024, MOST = 2 * BUDGET, REPETITIONS = 31, STEPS = 200 };

static void measure(uint32_t ratio)
{
    const pb_kvcache_stack_params params = {LAYERS, BUDGET, ratio, 32, 16, 7, 0, 0};
    pb_kvcache_stack *stack = pb_kvcache_stack_create(&params, NULL, NULL);
    pb_kvcache *caches[LAYERS];
    float *weights = malloc(LAYERS * MOST * sizeof *weights);
    const float *attn[LAYERS];
    size_t lengths[LAYERS];
    size_t offsets[LAYERS + 1];
    uint32_t victims[LAYERS];
    /* Weights, and the caches that are driven one by one */
    uint32_t state = 1;
    for (size_t i = 0; i < LAYERS * MOST; ++i) {
        state = state * 1664525u + 1013904223u;
        weights[i] = (float)(state >> 8) * 0x1p-24f;
    }
    for (uint32_t layer = 0; layer < LAYERS; ++layer) {
        const pb_kvcache_pyramidkv_params one = {BUDGET, layer, LAYERS, ratio, 32, 16, 7, 0, 0};
        caches[layer] = pb_kvcache_pyramidkv.create(&one, NULL, NULL);
        attn[layer] = weights + (size_t)layer * MOST;
    }
    /* Steps, each through the stack and then through the caches */
    double step[REPETITIONS];
    double evict[REPETITIONS];
    double apart[REPETITIONS];
    uint32_t pos = 0;
    for (int repetition = -MOST / STEPS - 1; repetition < REPETITIONS; ++repetition) { /* below 0: filling up */
        double in_step = 0.0;
        double in_evict = 0.0;
        double in_apart = 0.0;
        for (int i = 0; i < STEPS; ++i) {
            for (uint32_t layer = 0; layer < LAYERS; ++layer) {
                lengths[layer] = pb_kvcache_kept_count(caches[layer]);
            }
            ++pos;
            const double start = now();
            pb_kvcache_stack_on_decode_step(stack, pos, attn, lengths);
            const double middle = now();
            pb_kvcache_stack_evict(stack, victims, LAYERS, offsets, LAYERS + 1);
            const double end = now();
            for (uint32_t layer = 0; layer < LAYERS; ++layer) {
                pb_kvcache_pyramidkv.on_decode_step(caches[layer], pos, attn[layer], lengths[layer]);
                pb_kvcache_pyramidkv.evict(caches[layer], UINT32_MAX, victims, LAYERS);
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
    printf("%d layers, ratio %u, %zu kept: step %6.1f us, evict %6.1f us; 32 caches alone %6.1f us, %.2f times that\n",
           LAYERS, (unsigned)ratio, pb_kvcache_stack_resident(stack), stepped * 1e6, evicted * 1e6, alone * 1e6,
           alone / (stepped + evicted));
    for (uint32_t layer = 0; layer < LAYERS; ++layer) {
        pb_kvcache_pyramidkv.destroy(caches[layer]);
    }
    pb_kvcache_stack_destroy(stack);
    free(weights);
}

int main(void)
{
    measure(1);
    measure(4);
    return 0;
}
