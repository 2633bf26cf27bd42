/*
 * The obvious way to write what one SnapKV cache does at decode: a reference for speed and for the victims. One loop
 * for each line of the definition, the ring by slot, a victim at a time.
 */
#ifndef BENCH_PLAIN_H
#define BENCH_PLAIN_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct plain_cache {
    size_t budget;
    size_t recent_window;
    size_t obs_window;
    size_t pool_kernel;
    size_t kept_count;
    size_t cursor;
    uint32_t *kept;
    float *history; /* obs_window rows of budget + 1 */
    double *scores;
    double *pooled;
} plain_cache;

static inline plain_cache plain_create(size_t budget, size_t recent_window, size_t obs_window, size_t pool_kernel)
{
    plain_cache cache = {budget, recent_window, obs_window, pool_kernel, 1, 0, NULL, NULL, NULL, NULL};
    cache.kept = calloc(budget + 1, sizeof *cache.kept);
    cache.history = calloc(obs_window * (budget + 1), sizeof *cache.history);
    cache.scores = calloc(budget + 1, sizeof *cache.scores);
    cache.pooled = calloc(budget + 1, sizeof *cache.pooled);
    return cache;
}

static inline void plain_destroy(plain_cache *cache)
{
    free(cache->kept);
    free(cache->history);
    free(cache->scores);
    free(cache->pooled);
}

static inline void plain_copy(plain_cache *cache, const plain_cache *source)
{
    const size_t width = source->budget + 1;
    cache->kept_count = source->kept_count;
    cache->cursor = source->cursor;
    memcpy(cache->kept, source->kept, width * sizeof *cache->kept);
    memcpy(cache->history, source->history, source->obs_window * width * sizeof *cache->history);
}

static inline void plain_step(plain_cache *cache, uint32_t pos, const float *attn)
{
    const size_t width = cache->budget + 1;
    float *row = cache->history + cache->cursor * width;
    for (size_t i = 0; i < cache->kept_count; ++i) {
        row[i] = attn[i];
    }
    for (size_t slot = 0; slot < cache->obs_window; ++slot) {
        cache->history[slot * width + cache->kept_count] = 0.0f;
    }
    cache->cursor = (cache->cursor + 1) % cache->obs_window;
    cache->kept[cache->kept_count++] = pos;
}

/* Victims in the order in which they go. */
static inline size_t plain_evict(plain_cache *cache, size_t budget, uint32_t *victims)
{
    const size_t width = cache->budget + 1;
    const size_t half = cache->pool_kernel / 2;
    const size_t n = cache->kept_count;
    for (size_t i = 0; i < n; ++i) {
        double sum = 0.0;
        for (size_t slot = 0; slot < cache->obs_window; ++slot) {
            sum += (double)cache->history[slot * width + i];
        }
        cache->scores[i] = sum;
    }
    for (size_t i = 0; i < n; ++i) {
        const size_t first = i > half ? i - half : 0;
        const size_t last = i + half < n ? i + half : n - 1;
        double most = cache->scores[first];
        for (size_t j = first + 1; j <= last; ++j) {
            most = cache->scores[j] > most ? cache->scores[j] : most;
        }
        cache->pooled[i] = most;
    }
    size_t count = 0;
    while (cache->kept_count > budget && cache->kept_count > cache->recent_window) {
        size_t lowest = 0;
        for (size_t i = 1; i < cache->kept_count - cache->recent_window; ++i) {
            if (cache->pooled[i] < cache->pooled[lowest]) {
                lowest = i;
            }
        }
        victims[count++] = cache->kept[lowest];
        const size_t behind = cache->kept_count - lowest - 1;
        memmove(cache->kept + lowest, cache->kept + lowest + 1, behind * sizeof *cache->kept);
        memmove(cache->pooled + lowest, cache->pooled + lowest + 1, behind * sizeof *cache->pooled);
        for (size_t slot = 0; slot < cache->obs_window; ++slot) {
            float *row = cache->history + slot * width + lowest;
            memmove(row, row + 1, behind * sizeof *row);
        }
        --cache->kept_count;
    }
    return count;
}

#endif
