#include "bits.h"
#include "checks.h"
#include "kernels.h"
#include "lanes.h"

/* Unsigned keys in the order of the scores. */
static uint64_t lowest_key(double score)
{
    return (uint64_t)key_of_double(score) ^ ((uint64_t)1 << 63);
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

/* The reverse order, so that the highest score has the lowest key. Whatever is not finite comes last. */
static uint32_t highest_key(float score)
{
    return is_finite(score) ? (uint32_t)INT32_MAX - (uint32_t)key_of(score) : UINT32_MAX;
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

/* The rank-th highest of n keys, rank from 1, known to be in least .. most: the largest key that as many reach. */
static int32_t nth_highest(const pb_kvcache_priv_lanes *lanes, const int32_t *keys, size_t n, size_t rank,
                           int32_t least, int32_t most)
{
    while (least < most) {
        const uint32_t distance = (uint32_t)most - (uint32_t)least;
        const int32_t middle = (int32_t)((uint32_t)least + distance / 2 + 1);
        if (n - lanes->below(keys, n, middle) >= rank) {
            least = middle;
        } else {
            most = middle - 1;
        }
    }
    return least;
}

/* Two keys that the key of some rank in all scores is almost surely between, from n of them among which it has about
 * this rank: three standard deviations to either side. A bound that the sample does not reach stays as it was. */
static void bracket(const pb_kvcache_priv_lanes *lanes, const int32_t *keys, size_t n, size_t rank, int32_t *low,
                    int32_t *high)
{
    const size_t variance = rank * (n - rank) / n;
    size_t margin = 2;
    while (margin * margin < 9 * variance) {
        ++margin;
    }
    if (rank > margin) {
        *high = nth_highest(lanes, keys, n, rank - margin, *low, *high);
    }
    if (rank + margin <= n) {
        *low = nth_highest(lanes, keys, n, rank + margin, *low, *high);
    }
}

/*
 * A choice in two passes over the scores. A sample, evenly spaced, tells two values that the threshold, the count-th
 * highest score, is almost surely between. The first pass counts what is above them, which proves it, and collects what
 * is between: a few per cent, in which the threshold is found. Where it is too much for the buffer, what was collected
 * is the next sample. The second pass writes the indices. Where the guess was wrong the histograms decide: the same
 * answer, later. Microseconds for 2,048 of 32,768 scores, Zen 5: 9 with AVX-512, 50 without, 100 by histograms.
 */
#define SAMPLE 512u
#define BETWEEN 4096u    /* 16 KB of stack */
#define WORTHWHILE 4096u /* scores. Below, the histograms are as fast */
#define ROUNDS 4

void pb_kvcache_priv_choose_highest_of_numbers(const float *scores, size_t n, size_t count, uint32_t *chosen)
{
    const pb_kvcache_priv_lanes *lanes = pb_kvcache_priv_lanes_best();
    int32_t keys[BETWEEN + PB_KVCACHE_PRIV_LANES];
    if (n < WORTHWHILE || count <= 1 || count >= n) {
        pb_kvcache_priv_choose_highest(scores, n, count, chosen);
        return;
    }
    /* The first sample, and the threshold's rank in it */
    for (size_t i = 0; i < SAMPLE; ++i) {
        keys[i] = key_of(scores[i * (n / SAMPLE)]);
    }
    size_t known = SAMPLE;
    size_t rank = (size_t)((uint64_t)count * SAMPLE / n);
    int32_t low = -INFINITY_KEY;
    int32_t high = INFINITY_KEY;
    for (int round = 0; round < ROUNDS; ++round) {
        size_t from_high;
        bracket(lanes, keys, known, rank, &low, &high);
        const size_t found
            = lanes->between(scores, n, low, high, &from_high, keys, BETWEEN + PB_KVCACHE_PRIV_LANES);
        if (count <= from_high) { /* not between: at the upper bound? */
            const size_t above = lanes->reaching(scores, n, high + 1);
            if (count <= above) {
                break;
            }
            lanes->above(scores, n, high, count - above, count, chosen);
            return;
        }
        if (count > from_high + found) { /* at the lower one? */
            if (count > lanes->reaching(scores, n, low)) {
                break;
            }
            lanes->above(scores, n, low, count - from_high - found, count, chosen);
            return;
        }
        if (found <= BETWEEN) { /* all that are between are at hand */
            const int32_t key = nth_highest(lanes, keys, found, count - from_high, low + 1, high - 1);
            const size_t above = from_high + found - lanes->below(keys, found, key + 1);
            lanes->above(scores, n, key, count - above, count, chosen);
            return;
        }
        known = BETWEEN; /* the next sample */
        rank = (size_t)((uint64_t)(count - from_high) * BETWEEN / found);
    }
    pb_kvcache_priv_choose_highest(scores, n, count, chosen);
}

pb_kvcache_status pb_kvcache_select_top(const float *scores, size_t stride, size_t num_heads, size_t n,
                                        const uint32_t *counts, pb_kvcache_nan nan, uint32_t *indices,
                                        size_t indices_stride, size_t capacity)
{
    size_t most = 0;
    /* Checks: options and counts, the arrays, what overlaps */
    const bool empty = num_heads == 0 || n == 0;
    if ((scores == NULL && !empty) || (counts == NULL && num_heads > 0)) {
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
    if (empty) {
        return PB_KVCACHE_OK;
    }
    if (indices == NULL && most > 0) {
        return PB_KVCACHE_ERROR_NULL;
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
    const pb_kvcache_priv_lanes *lanes = pb_kvcache_priv_lanes_best();
    for (size_t head = 0; most > 0 && head < num_heads; ++head) {
        const float *row = scores + head * stride;
        uint32_t *chosen = indices + head * indices_stride;
        if (nan == PB_KVCACHE_NAN_REFUSE || lanes->finite(row, n)) {
            pb_kvcache_priv_choose_highest_of_numbers(row, n, counts[head], chosen);
        } else {
            pb_kvcache_priv_choose_highest(row, n, counts[head], chosen);
        }
    }
    return PB_KVCACHE_OK;
}
