#include <string.h>

#include "internal.h"

/* Unsigned keys in the order of the scores, with -0.0 equal to 0.0. */
static uint64_t lowest_key(double score)
{
    uint64_t bits;
    score += 0.0;
    memcpy(&bits, &score, sizeof bits);
    return (bits >> 63) != 0 ? ~bits : bits | ((uint64_t)1 << 63);
}

/* A step's usual eviction: comparing the scores themselves is faster than their keys. */
static uint32_t first_lowest(const double *scores, size_t n)
{
    size_t best = 0;
    for (size_t i = 1; i < n; ++i) {
        if (scores[i] < scores[best]) {
            best = i;
        }
    }
    return (uint32_t)best;
}

/* The reverse order, so that the highest score has the lowest key; whatever is not finite comes last. */
static uint32_t highest_key(float score)
{
    uint32_t bits;
    score += 0.0f;
    memcpy(&bits, &score, sizeof bits);
    if ((bits & 0x7F800000u) == 0x7F800000u) {
        return UINT32_MAX;
    }
    return (bits >> 31) != 0 ? bits : bits ^ 0x7FFFFFFFu;
}

static uint32_t first_highest(const float *scores, size_t n)
{
    uint32_t best = 0;
    uint32_t best_key = highest_key(scores[0]);
    for (size_t i = 1; i < n; ++i) {
        const uint32_t key = highest_key(scores[i]);
        if (key < best_key) {
            best = (uint32_t)i;
            best_key = key;
        }
    }
    return best;
}

#define CHOOSE pb_kvcache_priv_choose_lowest
#define SCORE double
#define KEY uint64_t
#define KEY_BITS 64
#define KEY_OF lowest_key
#define FIRST first_lowest
#include "choose_body.h"

#define CHOOSE pb_kvcache_priv_choose_highest
#define SCORE float
#define KEY uint32_t
#define KEY_BITS 32
#define KEY_OF highest_key
#define FIRST first_highest
#include "choose_body.h"

pb_kvcache_status pb_kvcache_select_top(const float *scores, size_t stride, size_t num_heads, size_t n,
                                        const uint32_t *counts, pb_kvcache_nan nan, uint32_t *indices,
                                        size_t indices_stride, size_t capacity)
{
    size_t most = 0;
    if (scores == NULL || counts == NULL || indices == NULL) {
        return PB_KVCACHE_ERROR_NULL;
    }
    if (!pb_kvcache_priv_nan_ok(nan)) {
        return PB_KVCACHE_ERROR_OPTION;
    }
    for (size_t head = 0; head < num_heads; ++head) {
        if (counts[head] > n) {
            return PB_KVCACHE_ERROR_COUNT;
        }
        most = counts[head] > most ? counts[head] : most;
    }
    pb_kvcache_status status = pb_kvcache_priv_scores_ok(scores, stride, num_heads, n, nan);
    if (status == PB_KVCACHE_OK) {
        status = pb_kvcache_priv_rows_ok(indices, sizeof *indices, indices_stride, 0, num_heads, most, capacity);
    }
    if (status != PB_KVCACHE_OK) {
        return status;
    }
    size_t input_bytes;
    size_t output_bytes;
    (void)pb_kvcache_priv_span_bytes(num_heads, stride, n, sizeof *scores, &input_bytes);
    (void)pb_kvcache_priv_span_bytes(num_heads, indices_stride, most, sizeof *indices, &output_bytes);
    if (pb_kvcache_priv_overlap(scores, input_bytes, indices, output_bytes)
        || pb_kvcache_priv_overlap(counts, num_heads * sizeof *counts, indices, output_bytes)) {
        return PB_KVCACHE_ERROR_OVERLAP;
    }
    for (size_t head = 0; head < num_heads; ++head) {
        pb_kvcache_priv_choose_highest(scores + head * stride, n, counts[head], indices + head * indices_stride);
    }
    return PB_KVCACHE_OK;
}
