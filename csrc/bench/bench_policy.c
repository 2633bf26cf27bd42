/*
 * What one decode step costs: on_decode_step and evict of one SnapKV cache at its budget, and a memcpy of as many bytes
 * as its history holds, for scale. Medians of interleaved repetitions. Build with -DPB_KVCACHE_BENCH=ON.
 */
#define _POSIX_C_SOURCE 200809L
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "clock.h"
#include "pb_kvcache.h"

enum { REPETITIONS = 31, STEPS = 2000 };

static void measure(uint32_t budget)
{
    const pb_kvcache_snapkv_params params = {budget, 32, 16, 7, 0, 0};
    pb_kvcache *cache = pb_kvcache_snapkv.create(&params, NULL, NULL);
    float *attn = malloc((budget + 1) * sizeof *attn);
    const size_t history = (size_t)params.obs_window * budget * sizeof(float);
    char *from = malloc(history);
    char *to = malloc(history);
    double step[REPETITIONS];
    double evict[REPETITIONS];
    double copy[REPETITIONS];
    uint32_t state = 1;
    uint32_t pos = 0;
    uint32_t victim = 0;
    for (size_t i = 0; i <= budget; ++i) {
        state = state * 1664525u + 1013904223u;
        attn[i] = (float)(state >> 8) * 0x1p-24f;
    }
    memset(from, 1, history);
    while (pb_kvcache_kept_count(cache) < budget) {
        pb_kvcache_snapkv.on_decode_step(cache, ++pos, attn, pb_kvcache_kept_count(cache));
    }
    for (int repetition = 0; repetition < REPETITIONS; ++repetition) {
        double in_step = 0.0;
        double in_evict = 0.0;
        for (int i = 0; i < STEPS; ++i) {
            const double start = now();
            pb_kvcache_snapkv.on_decode_step(cache, ++pos, attn, budget);
            const double middle = now();
            pb_kvcache_snapkv.evict(cache, budget, &victim, 1);
            in_evict += now() - middle;
            in_step += middle - start;
        }
        const double start = now();
        for (int i = 0; i < STEPS; ++i) {
            memcpy(to, from, history);
            from[i % (int)history] = to[(i + 1) % (int)history];
        }
        copy[repetition] = (now() - start) / STEPS;
        step[repetition] = in_step / STEPS;
        evict[repetition] = in_evict / STEPS;
    }
    const double copied = median(copy, REPETITIONS);
    const double stepped = median(step, REPETITIONS);
    const double evicted = median(evict, REPETITIONS);
    printf("%6u kept: step %6.2f us, evict %6.2f us; memcpy of the history's %4zu KiB %5.2f us; "
           "both calls %.1f copies\n",
           (unsigned)budget, stepped * 1e6, evicted * 1e6, history / 1024, copied * 1e6, (stepped + evicted) / copied);
    free(from);
    free(to);
    free(attn);
    pb_kvcache_snapkv.destroy(cache);
}

int main(void)
{
    measure(128);
    measure(512);
    measure(1024);
    measure(4096);
    return 0;
}
