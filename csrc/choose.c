#include <string.h>

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
    double lowest;
    return (uint32_t)pb_kvcache_priv_lanes_best()->lowest(scores, n, 1, &lowest);
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

#define CHOOSE choose_lowest_by_histograms
#define SCORE double
#define KEY uint64_t
#define KEY_BITS 64
#define KEY_OF lowest_key
#define FIRST first_lowest
#include "choose_body.h"

#define CHOOSE choose_highest_by_histograms
#define SCORE float
#define KEY uint32_t
#define KEY_BITS 32
#define KEY_OF highest_key
#define FIRST first_highest
#include "choose_body.h"

void pb_kvcache_priv_choose_highest(const float *scores, size_t n, size_t count, uint32_t *chosen)
{
    choose_highest_by_histograms(scores, n, count, chosen);
}

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

/* ---- The same choice among doubles: the lowest ---- */

#define FEW 32u            /* chosen in one pass, where there are as many times as many scores */
#define KEYS 2048u         /* 16 KB of stack */
#define SAMPLE_OF_KEYS 512u

/* The rank-th lowest of n keys, rank from 1, and how many are lower. Eight bits at a time, from the highest on in which
 * the keys differ. Only those that begin as it does stay, in other places. */
static int64_t nth_lowest(int64_t *keys, size_t n, size_t rank, size_t *lower)
{
    *lower = 0;
    for (;;) {
        uint64_t differing = 0;
        for (size_t i = 1; i < n; ++i) {
            differing |= (uint64_t)keys[i] ^ (uint64_t)keys[0];
        }
        if (differing == 0) {
            return keys[0];
        }
        int shift = 0;
        while (differing >> shift > 255) {
            ++shift;
        }
        /* The sign has to be turned where keys differ in it */
        const unsigned turn = shift == 56 ? 128u : 0u;
        uint32_t histogram[256] = {0};
        for (size_t i = 0; i < n; ++i) {
            ++histogram[(((uint64_t)keys[i] >> shift) & 255u) ^ turn];
        }
        size_t digit = 0;
        size_t before = 0;
        while (digit < 255 && before + histogram[digit] < rank) {
            before += histogram[digit];
            ++digit;
        }
        size_t kept = 0;
        for (size_t i = 0; i < n; ++i) {
            const int64_t key = keys[i];
            keys[kept] = key;
            kept += (size_t)(((((uint64_t)key >> shift) & 255u) ^ turn) == digit);
        }
        n = kept;
        rank -= before;
        *lower += before;
    }
}

/* How many keys are at the low bound or below, and how many strictly between the bounds. */
typedef struct split {
    size_t to_low;
    size_t inside;
} split;

/* Count all n scores, and collect the first KEYS of the keys strictly between. `keys` has room for one more. */
static split split_keys(const double *scores, size_t n, int64_t low, int64_t high, int64_t *keys)
{
    size_t below_high = 0;
    size_t inside = 0;
    size_t stored = 0;
    for (size_t i = 0; i < n; ++i) {
        const int64_t key = key_of_double(scores[i]);
        const size_t below = (size_t)(key < high);
        const size_t between = below & (size_t)(key > low);
        keys[stored] = key;
        below_high += below;
        inside += between;
        stored += between & (size_t)(stored < KEYS);
    }
    return (split){below_high - inside, inside};
}

/* How many keys are below a bound? */
static size_t count_lower(const double *scores, size_t n, int64_t bound)
{
    size_t lower = 0;
    for (size_t i = 0; i < n; ++i) {
        lower += (size_t)(key_of_double(scores[i]) < bound);
    }
    return lower;
}

/* Indices of the keys below the threshold and of the first `ties` that equal it, ascending: at most `count`. */
static void write_lowest(const double *scores, size_t n, int64_t threshold, size_t ties, size_t count, uint32_t *chosen)
{
    size_t written = 0;
    size_t i = 0;
    for (; ties > 0 && written < count && i < n; ++i) {
        const int64_t key = key_of_double(scores[i]);
        chosen[written] = (uint32_t)i;
        written += (size_t)(key <= threshold);
        ties -= (size_t)(key == threshold);
    }
    for (; written < count && i < n; ++i) {
        chosen[written] = (uint32_t)i;
        written += (size_t)(key_of_double(scores[i]) < threshold);
    }
}

/* The keys of some rank in all scores are almost surely between low and high: three standard deviations to either side
 * of where the rank would be among the n keys of a sample. `copy` is scratch. */
static void bracket_lowest(const int64_t *keys, size_t n, size_t rank, int64_t *copy, int64_t *low, int64_t *high)
{
    const size_t variance = rank * (n - rank) / n;
    size_t margin = 2;
    size_t lower;
    while (margin * margin < 9 * variance) {
        ++margin;
    }
    if (rank > margin) {
        memcpy(copy, keys, n * sizeof *keys);
        *low = nth_lowest(copy, n, rank - margin, &lower);
    }
    if (rank + margin <= n) {
        memcpy(copy, keys, n * sizeof *keys);
        *high = nth_lowest(copy, n, rank + margin, &lower);
    }
}

/*
 * A few of many in one pass: the lowest so far in order, and what is not below the last of them is passed over. 16 of
 * 4,096: 26 us by samples, 3.4 by this.
 */
static void choose_few_lowest(const double *scores, size_t n, size_t count, uint32_t *chosen)
{
    int64_t lowest[FEW];
    for (size_t i = 0; i < count; ++i) {
        lowest[i] = INT64_MAX;
    }
    for (size_t i = 0; i < n; ++i) {
        /* A score's bits are its key, or those of a negative number and then below any key that is not negative. */
        const int64_t worst = lowest[count - 1];
        if (worst >= 0 && (int64_t)bits_of_double(scores[i]) >= worst) {
            continue;
        }
        const int64_t key = key_of_double(scores[i]);
        size_t place = count;
        for (; place > 0 && key < lowest[place - 1]; --place) {
            if (place < count) {
                lowest[place] = lowest[place - 1];
                chosen[place] = chosen[place - 1];
            }
        }
        if (place < count) {
            lowest[place] = key;
            chosen[place] = (uint32_t)i;
        }
    }
    for (size_t i = 1; i < count; ++i) { /* ascending */
        const uint32_t index = chosen[i];
        size_t place = i;
        for (; place > 0 && chosen[place - 1] > index; --place) {
            chosen[place] = chosen[place - 1];
        }
        chosen[place] = index;
    }
}

void pb_kvcache_priv_choose_lowest(const double *scores, size_t n, size_t count, uint32_t *chosen)
{
    int64_t keys[KEYS + 1];
    int64_t copy[KEYS + 1];
    int64_t low = INT64_MIN;
    int64_t high = INT64_MAX;
    if (count <= 1 || count >= n) {
        choose_lowest_by_histograms(scores, n, count, chosen);
        return;
    }
    if (count <= FEW && count <= n / FEW) {
        choose_few_lowest(scores, n, count, chosen);
        return;
    }
    /* The first sample, and the threshold's rank in it. Of few scores all keys are at hand. */
    size_t known = 0;
    size_t rank = 0;
    if (n > KEYS) {
        for (size_t i = 0; i < SAMPLE_OF_KEYS; ++i) {
            keys[i] = key_of_double(scores[i * (n / SAMPLE_OF_KEYS)]);
        }
        known = SAMPLE_OF_KEYS;
        rank = (size_t)((uint64_t)count * known / n);
    }
    for (int round = 0; round < ROUNDS; ++round) {
        if (known > 0) {
            bracket_lowest(keys, known, rank, copy, &low, &high);
        }
        const split found = split_keys(scores, n, low, high, keys);
        if (count <= found.to_low) { /* not between: at the lower bound? */
            const size_t lower = count_lower(scores, n, low);
            if (count <= lower) {
                break;
            }
            write_lowest(scores, n, low, count - lower, count, chosen);
            return;
        }
        if (count > found.to_low + found.inside) { /* at the upper one? */
            if (count > count_lower(scores, n, high + 1)) {
                break;
            }
            write_lowest(scores, n, high, count - found.to_low - found.inside, count, chosen);
            return;
        }
        rank = count - found.to_low;
        if (found.inside <= KEYS) { /* all that are between are at hand */
            size_t lower;
            const int64_t key = nth_lowest(keys, found.inside, rank, &lower);
            write_lowest(scores, n, key, rank - lower, count, chosen);
            return;
        }
        known = KEYS; /* the next sample */
        rank = (size_t)((uint64_t)rank * KEYS / found.inside);
    }
    choose_lowest_by_histograms(scores, n, count, chosen);
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
