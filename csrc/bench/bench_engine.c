/*
 * What engines ask of a policy beside a step: evictions that are put off, drafts that are taken back, states. Medians of
 * interleaved repetitions. Build with -DPB_KVCACHE_BENCH=ON.
 */
#define _POSIX_C_SOURCE 200809L
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "clock.h"
#include "pb_kvcache.h"

enum { REPETITIONS = 21, STEPS = 1024, EVERY = 16, DRAFTS = 4, RECENT = 32 };

typedef struct cache {
    const pb_kvcache_vtable *vtable;
    pb_kvcache *policy;
    uint32_t every; /* steps from eviction to eviction */
    uint32_t pos;
} cache;

static cache new_cache(const pb_kvcache_vtable *vtable, uint32_t budget, uint32_t every, uint32_t max_rollback)
{
    const pb_kvcache_snapkv_params snapkv = {budget, RECENT, 16, 7, every - 1, max_rollback};
    const pb_kvcache_h2o_params h2o = {budget, RECENT, every - 1, max_rollback};
    const void *params = vtable == &pb_kvcache_snapkv ? (const void *)&snapkv : (const void *)&h2o;
    return (cache){vtable, vtable->create(params, NULL, NULL), every, 0};
}

static void step(cache *c, const float *attn)
{
    c->vtable->on_decode_step(c->policy, ++c->pos, attn, pb_kvcache_kept_count(c->policy));
}

/* Microseconds a step, evictions included. */
static double decode(cache *c, const float *attn, uint32_t budget)
{
    uint32_t victims[EVERY];
    const double start = now();
    for (uint32_t i = 1; i <= STEPS; ++i) {
        step(c, attn);
        if (i % c->every == 0) {
            c->vtable->evict(c->policy, budget, victims, c->every);
        }
    }
    return (now() - start) / STEPS * 1e6;
}

/* Microseconds of four drafts, and of taking them back. */
static double draft(cache *c, const float *attn, double *back)
{
    double in_step = 0.0;
    *back = 0.0;
    for (uint32_t i = 0; i < STEPS / DRAFTS; ++i) {
        const double start = now();
        for (int n = 0; n < DRAFTS; ++n) {
            step(c, attn);
        }
        const double middle = now();
        pb_kvcache_rollback(c->policy, DRAFTS);
        *back += now() - middle;
        in_step += middle - start;
        c->pos -= DRAFTS;
    }
    *back = *back / (STEPS / DRAFTS) * 1e6;
    return in_step / (STEPS / DRAFTS) * 1e6;
}

static void measure(const char *name, const pb_kvcache_vtable *vtable, uint32_t budget)
{
    cache each = new_cache(vtable, budget, 1, 0);
    cache late = new_cache(vtable, budget, EVERY, 0);
    cache drafting = new_cache(vtable, budget, EVERY, DRAFTS);
    float *attn = malloc((budget + EVERY) * sizeof *attn);
    uint32_t state = 1;
    for (size_t i = 0; i < budget + EVERY; ++i) {
        state = state * 1664525u + 1013904223u;
        attn[i] = (float)(state >> 8) * 0x1p-24f;
    }
    while (each.pos + 1 < budget) {
        step(&each, attn);
        step(&late, attn);
        step(&drafting, attn);
    }
    const size_t bytes = pb_kvcache_state_bytes(drafting.policy);
    unsigned char *data = malloc(bytes);
    unsigned char *copied = malloc(bytes);
    enum { EACH, LATE, DRAFT, BACK, SAVE, LOAD, COPY, MEASURED };
    double times[MEASURED][REPETITIONS];
    for (int r = 0; r < REPETITIONS; ++r) {
        times[EACH][r] = decode(&each, attn, budget);
        times[LATE][r] = decode(&late, attn, budget);
        times[DRAFT][r] = draft(&drafting, attn, &times[BACK][r]);
        double start = now();
        pb_kvcache_save(drafting.policy, data, bytes);
        times[SAVE][r] = (now() - start) * 1e6;
        start = now();
        if (pb_kvcache_load(drafting.policy, data, bytes) != PB_KVCACHE_OK) {
            abort();
        }
        times[LOAD][r] = (now() - start) * 1e6;
        start = now();
        memcpy(copied, data, bytes);
        times[COPY][r] = (now() - start) * 1e6;
        data[40 + r % 4] = copied[40 + r % 4];
    }
    double at[MEASURED];
    for (int m = 0; m < MEASURED; ++m) {
        at[m] = median(times[m], REPETITIONS);
    }
    printf("%-6s %5u kept: a step and its eviction %6.2f us, evicting every %d steps %6.2f us (x%.1f)\n", name,
           (unsigned)budget, at[EACH], EVERY, at[LATE], at[EACH] / at[LATE]);
    printf("             %d drafts %6.2f us, taking them back %5.2f us; save %4zu KiB %6.1f us, load %6.1f us, memcpy "
           "%5.1f us\n",
           DRAFTS, at[DRAFT], at[BACK], bytes / 1024, at[SAVE], at[LOAD], at[COPY]);
    free(copied);
    free(data);
    free(attn);
    vtable->destroy(each.policy);
    vtable->destroy(late.policy);
    vtable->destroy(drafting.policy);
}

int main(void)
{
    measure("snapkv", &pb_kvcache_snapkv, 512);
    measure("snapkv", &pb_kvcache_snapkv, 4096);
    measure("h2o", &pb_kvcache_h2o, 4096);
    return 0;
}
