/*
 * Threads divide the work by ranges of heads, over shared inputs and one output array: the same answers as one thread,
 * and nothing that a thread sanitizer reports. Where there are no threads there is nothing to test.
 */
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "pb_kvcache.h"

#if defined(_WIN32)

int main(void)
{
    CHECK(1);
    return END();
}

#else

#include <pthread.h>

enum { THREADS = 4, KV_HEADS = 8, Q_HEADS = 16, WINDOW = 4, N = 700, KEPT = 90, DIM = 8, ROUNDS = 20 };

/* What all threads read, and what each writes its own rows of. */
typedef struct shared {
    pb_kvcache_attention attn;
    pb_kvcache_select_params params;
    uint32_t budgets[KV_HEADS];
    float *scores;
    uint32_t *kept;
    uint32_t *from_scores;
    float *keys;
} shared;

typedef struct share {
    shared *all;
    size_t first;
    size_t end;
    int failed;
} share;

static void *work(void *argument)
{
    share *mine = argument;
    shared *all = mine->all;
    const size_t scored = N - WINDOW;
    const size_t heads = mine->end - mine->first;
    size_t size = 0;
    int failed = pb_kvcache_select_workspace_size(&all->attn, &all->params, mine->first, mine->end, &size) != 0;
    void *workspace = malloc(size);
    failed |= pb_kvcache_window_scores(&all->attn, all->params.reduce, all->params.nan, WINDOW, mine->first,
                                       mine->end, workspace, size, all->scores, scored, KV_HEADS * scored)
              != PB_KVCACHE_OK;
    failed |= pb_kvcache_select(&all->attn, &all->params, all->budgets, mine->first, mine->end, workspace, size,
                                all->kept, KEPT, KV_HEADS * KEPT)
              != PB_KVCACHE_OK;
    failed |= pb_kvcache_select_from_scores(all->scores + mine->first * scored, scored, heads, N, &all->params,
                                            all->budgets + mine->first, workspace, size,
                                            all->from_scores + mine->first * KEPT, KEPT, heads * KEPT)
              != PB_KVCACHE_OK;
    const pb_kvcache_rows rows
        = {all->keys, KV_HEADS, N, DIM * sizeof(float), N * DIM * sizeof(float), DIM * sizeof(float)};
    failed |= pb_kvcache_compact(&rows, mine->first, mine->end, all->kept, KEPT, all->budgets) != PB_KVCACHE_OK;
    free(workspace);
    mine->failed = failed;
    return NULL;
}

/* One pass over all heads by so many threads. */
static void run(shared *all, size_t threads)
{
    pthread_t started[THREADS];
    share shares[THREADS];
    int failed = 0;
    for (size_t i = 0; i < KV_HEADS * N * DIM; ++i) {
        all->keys[i] = (float)i;
    }
    for (size_t t = 0; t < threads; ++t) {
        shares[t] = (share){all, KV_HEADS * t / threads, KV_HEADS * (t + 1) / threads, 1};
        failed |= pthread_create(&started[t], NULL, work, &shares[t]);
    }
    for (size_t t = 0; t < threads; ++t) {
        failed |= pthread_join(started[t], NULL) | shares[t].failed;
    }
    CHECK(failed == 0);
}

int main(void)
{
    uint32_t state = 1;
    float *logits = malloc(Q_HEADS * WINDOW * N * sizeof *logits);
    for (size_t i = 0; i < Q_HEADS * WINDOW * N; ++i) {
        state = state * 1664525u + 1013904223u;
        logits[i] = (float)(int32_t)(state >> 8) * 0x1p-21f;
    }
    shared all[2];
    for (int i = 0; i < 2; ++i) {
        all[i].attn = (pb_kvcache_attention){.data = logits,
                                             .dtype = PB_KVCACHE_FLOAT32,
                                             .logits = 1,
                                             .scale = 0.5f,
                                             .num_q_heads = Q_HEADS,
                                             .num_kv_heads = KV_HEADS,
                                             .window = WINDOW,
                                             .n = N,
                                             .head_stride = WINDOW * N,
                                             .row_stride = N};
        all[i].params = (pb_kvcache_select_params){.kernel = 5, .protect = WINDOW};
        for (size_t head = 0; head < KV_HEADS; ++head) {
            all[i].budgets[head] = KEPT;
        }
        all[i].scores = malloc(KV_HEADS * (N - WINDOW) * sizeof(float));
        all[i].kept = malloc(KV_HEADS * KEPT * sizeof(uint32_t));
        all[i].from_scores = malloc(KV_HEADS * KEPT * sizeof(uint32_t));
        all[i].keys = malloc(KV_HEADS * N * DIM * sizeof(float));
    }
    run(&all[0], 1);
    for (int round = 0; round < ROUNDS; ++round) {
        run(&all[1], THREADS);
        CHECK(memcmp(all[0].scores, all[1].scores, KV_HEADS * (N - WINDOW) * sizeof(float)) == 0);
        CHECK(memcmp(all[0].kept, all[1].kept, KV_HEADS * KEPT * sizeof(uint32_t)) == 0);
        CHECK(memcmp(all[0].kept, all[1].from_scores, KV_HEADS * KEPT * sizeof(uint32_t)) == 0);
        CHECK(memcmp(all[0].keys, all[1].keys, KV_HEADS * N * DIM * sizeof(float)) == 0);
    }
    for (int i = 0; i < 2; ++i) {
        free(all[i].scores);
        free(all[i].kept);
        free(all[i].from_scores);
        free(all[i].keys);
    }
    free(logits);
    return END();
}

#endif
