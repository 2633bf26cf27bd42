/*
 * Everything is counted in multiples of `multiple_of` ("blocks"). A unit's hull becomes runs: blocks that follow one
 * another and gain the same. Gains fall from run to run. The total therefore ends within the runs of one gain, the
 * threshold: every block of a higher gain is in, and the blocks that gain just that share what is left. The threshold
 * is found by counting the blocks of each digit of the gains' keys, so that no sorting and no comparison of floats
 * decides anything.
 */
#include <string.h>

#include "bits.h"
#include "checks.h"

#define DIGIT_BITS 11u
#define DIGIT_VALUES (1u << DIGIT_BITS)

/* Scratch, in this order, so that each array is aligned for its elements. */
typedef struct scratch {
    uint64_t *keys;    /* of every run, unit after unit */
    double *losses;    /* of the hull's corners */
    double *gains;     /* per position, behind each corner */
    uint32_t *points;  /* the hull's corners */
    uint32_t *blocks;  /* of every run */
    uint32_t *runs;    /* of every unit */
    uint32_t *highs;   /* blocks that every unit may have, once the threshold is known */
} scratch;

/* A hull has at most num_points + 1 corners, the last where a maximum lies beyond the grid. Each of its segments is at
 * most one run of whole blocks and one block across its end. */
static bool layout(size_t num_units, size_t num_points, size_t *most_runs, size_t *corners, size_t *bytes)
{
    /* With at least two runs a corner and two a unit, all of it is at most 26 bytes a run. */
    const size_t most = (PTRDIFF_MAX - PB_KVCACHE_PRIV_ALIGNMENT) / 26;
    if (num_points >= most / 2 / num_units) {
        return false;
    }
    *corners = num_points + 1;
    *most_runs = 2 * *corners * num_units;
    *bytes = *most_runs * (sizeof(uint64_t) + sizeof(uint32_t)) + *corners * (2 * sizeof(double) + sizeof(uint32_t))
             + num_units * 2 * sizeof(uint32_t) + PB_KVCACHE_PRIV_ALIGNMENT;
    return true;
}

pb_kvcache_status pb_kvcache_divide_workspace_size(size_t num_units, size_t num_points, size_t *size)
{
    size_t most_runs;
    size_t corners;
    size_t bytes;
    if (size == NULL) {
        return PB_KVCACHE_ERROR_NULL;
    }
    if (num_units == 0) {
        return PB_KVCACHE_ERROR_DIVIDE_UNITS;
    }
    if (num_points == 0) {
        return PB_KVCACHE_ERROR_DIVIDE_GRID;
    }
#if SIZE_MAX > UINT32_MAX
    if (num_units > UINT32_MAX) {
        return PB_KVCACHE_ERROR_TOO_LARGE;
    }
#endif
    if (!layout(num_units, num_points, &most_runs, &corners, &bytes)) {
        return PB_KVCACHE_ERROR_TOO_LARGE;
    }
    *size = bytes;
    return PB_KVCACHE_OK;
}

static scratch scratch_at(void *workspace, size_t num_units, size_t num_points)
{
    scratch s;
    size_t most_runs = 0;
    size_t corners = 0;
    size_t bytes;
    (void)layout(num_units, num_points, &most_runs, &corners, &bytes);
    s.keys = pb_kvcache_priv_align(workspace);
    s.losses = (double *)(void *)(s.keys + most_runs);
    s.gains = s.losses + corners;
    s.points = (uint32_t *)(void *)(s.gains + corners);
    s.blocks = s.points + corners;
    s.runs = s.blocks + most_runs;
    s.highs = s.runs + num_units;
    return s;
}

static uint32_t minimum_of(const pb_kvcache_divide_params *p, size_t unit)
{
    if (p->minimums != NULL) {
        return p->minimums[unit];
    }
    return p->minimum == 0 ? p->grid[0] : p->minimum;
}

static uint32_t maximum_of(const pb_kvcache_divide_params *p, size_t unit)
{
    if (p->maximums != NULL) {
        return p->maximums[unit];
    }
    return p->maximum == 0 ? p->grid[p->num_points - 1] : p->maximum;
}

/* The least and the most blocks of a unit. */
static uint32_t low_of(const pb_kvcache_divide_params *p, size_t unit)
{
    const uint32_t least = minimum_of(p, unit);
    return least / p->multiple_of + (least % p->multiple_of != 0);
}

static uint32_t high_of(const pb_kvcache_divide_params *p, size_t unit)
{
    return maximum_of(p, unit) / p->multiple_of;
}

/* Everything but the workspace. The sums are of all units' bounds, in blocks. */
static pb_kvcache_status check(const pb_kvcache_divide_params *p, size_t num_units, uint64_t *sum_low,
                               uint64_t *sum_high)
{
    size_t bytes;
    if (num_units == 0) {
        return PB_KVCACHE_ERROR_DIVIDE_UNITS;
    }
    if (p->num_points == 0) {
        return PB_KVCACHE_ERROR_DIVIDE_GRID;
    }
    for (size_t i = 0; i < p->num_points; ++i) {
        if (p->grid[i] <= (i == 0 ? 0 : p->grid[i - 1])) {
            return PB_KVCACHE_ERROR_DIVIDE_GRID;
        }
    }
    if (pb_kvcache_divide_workspace_size(num_units, p->num_points, &bytes) != PB_KVCACHE_OK) {
        return PB_KVCACHE_ERROR_TOO_LARGE;
    }
    if (p->multiple_of == 0) {
        return PB_KVCACHE_ERROR_PLAN_MULTIPLE;
    }
    if (p->total % p->multiple_of != 0) {
        return PB_KVCACHE_ERROR_PLAN_TOTAL;
    }
    for (size_t i = 0; i < num_units * p->num_points; ++i) {
        if ((bits_of_double(p->losses[i]) & (UINT64_MAX >> 1)) >= INFINITY_BITS_64) {
            return PB_KVCACHE_ERROR_DIVIDE_LOSS;
        }
    }
    pb_kvcache_status status = PB_KVCACHE_OK; /* the first rule that any unit breaks */
    *sum_low = *sum_high = 0;
    for (size_t unit = 0; unit < num_units; ++unit) {
        const uint32_t low = low_of(p, unit);
        const uint32_t high = high_of(p, unit);
        if (minimum_of(p, unit) < p->grid[0]) {
            return PB_KVCACHE_ERROR_DIVIDE_BELOW;
        }
        if (minimum_of(p, unit) > maximum_of(p, unit)) {
            status = PB_KVCACHE_ERROR_PLAN_BOUNDS;
        } else if (low > high && status == PB_KVCACHE_OK) {
            status = PB_KVCACHE_ERROR_PLAN_BLOCK;
        }
        *sum_low += low;
        *sum_high += high;
    }
    if (status == PB_KVCACHE_OK && p->total / p->multiple_of < *sum_low) {
        return PB_KVCACHE_ERROR_PLAN_MINIMUM;
    }
    return status;
}

static bool overlaps(const pb_kvcache_divide_params *p, size_t num_units, const void *array, size_t bytes)
{
    const size_t per_unit = num_units * sizeof(uint32_t);
    return pb_kvcache_priv_overlap(array, bytes, p, sizeof *p)
           || pb_kvcache_priv_overlap(array, bytes, p->grid, p->num_points * sizeof *p->grid)
           || pb_kvcache_priv_overlap(array, bytes, p->losses, num_units * p->num_points * sizeof *p->losses)
           || (p->minimums != NULL && pb_kvcache_priv_overlap(array, bytes, p->minimums, per_unit))
           || (p->maximums != NULL && pb_kvcache_priv_overlap(array, bytes, p->maximums, per_unit));
}

/* Gains in ascending order, as unsigned numbers. */
static uint64_t key_of_gain(double gain)
{
    return (uint64_t)key_of_double(gain) ^ ((uint64_t)1 << 63);
}

/* Add a corner to the hull of those before it. Returns how many corners there are now. */
static size_t add_corner(scratch *s, size_t corners, uint32_t point, double loss)
{
    while (corners > 0) {
        const double gain = (s->losses[corners - 1] - loss) / (double)(point - s->points[corners - 1]);
        if (corners < 2 || key_of_gain(gain) < key_of_gain(s->gains[corners - 2])) {
            s->gains[corners - 1] = gain;
            break;
        }
        --corners; /* the last corner lies on or above the line from the one before it */
    }
    s->points[corners] = point;
    s->losses[corners] = loss;
    return corners + 1;
}

/* The key of the block that starts at position `start` in segment `k`: the mean of what it lies in. */
static uint64_t key_across(const scratch *s, size_t k, uint64_t start, uint32_t size)
{
    const uint64_t end = start + size;
    const uint64_t first = key_of_gain(s->gains[k]);
    uint64_t last = first;
    double sum = 0.0;
    for (uint64_t at = start; at < end; ++k) {
        const uint64_t stop = s->points[k + 1] < end ? s->points[k + 1] : end;
        sum += s->gains[k] * (double)(stop - at);
        last = key_of_gain(s->gains[k]);
        at = stop;
    }
    const double mean = sum / (double)size;
    if ((bits_of_double(mean) & (UINT64_MAX >> 1)) >= INFINITY_BITS_64) { /* of losses that differ by more than 2^1023 */
        return last;
    }
    const uint64_t key = key_of_gain(mean); /* rounding must not put it out of order */
    return key > first ? first : key < last ? last : key;
}

/* Write a unit's runs between its bounds to keys[0 ..] and blocks[0 ..]. Returns how many there are. */
static uint32_t runs_of(const pb_kvcache_divide_params *p, scratch *s, size_t unit, uint64_t *keys, uint32_t *blocks)
{
    const double *losses = p->losses + unit * p->num_points;
    const uint32_t size = p->multiple_of;
    const uint32_t high = high_of(p, unit);
    uint32_t block = low_of(p, unit);
    uint32_t runs = 0;
    size_t corners = 0;
    for (size_t i = 0; i < p->num_points; ++i) {
        corners = add_corner(s, corners, p->grid[i], losses[i]);
    }
    if (high * size > p->grid[p->num_points - 1]) { /* at most the maximum: fits */
        (void)add_corner(s, corners, high * size, losses[p->num_points - 1]);
    }
    size_t k = 0;
    while (block < high) {
        const uint64_t start = (uint64_t)block * size;
        while (s->points[k + 1] <= start) {
            ++k;
        }
        const uint64_t whole = (s->points[k + 1] - start) / size;
        uint32_t count = 1;
        if (whole == 0) {
            keys[runs] = key_across(s, k, start, size);
        } else {
            keys[runs] = key_of_gain(s->gains[k]);
            count = whole < high - block ? (uint32_t)whole : high - block;
        }
        blocks[runs++] = count;
        block += count;
    }
    return runs;
}

/* The greatest key such that the runs of this key and of greater ones have `count` blocks or more. count > 0. */
static uint64_t threshold(const uint64_t *keys, const uint32_t *blocks, size_t num_runs, uint64_t count)
{
    uint64_t key = 0;
    unsigned known = 0; /* leading bits of the key that are found */
    while (known < 64) {
        uint64_t at[DIGIT_VALUES] = {0};
        const unsigned bits = 64 - known < DIGIT_BITS ? 64 - known : DIGIT_BITS;
        const unsigned shift = 64 - known - bits;
        for (size_t i = 0; i < num_runs; ++i) {
            if (known == 0 || (keys[i] ^ key) >> (64 - known) == 0) {
                at[(keys[i] >> shift) & ((1u << bits) - 1)] += blocks[i];
            }
        }
        uint32_t digit = (1u << bits) - 1;
        while (digit > 0 && at[digit] < count) {
            count -= at[digit--];
        }
        key |= (uint64_t)digit << shift;
        known += bits;
    }
    return key;
}

/* Blocks of a unit at a level, between its two bounds. */
static uint32_t at_level(uint32_t level, uint32_t low, uint32_t high)
{
    return level < low ? low : level < high ? level : high;
}

/* Fill evenly: raise units from `lows` towards `highs` until they have `total` blocks, the lower unit first. */
static void fill(uint32_t *lows, const uint32_t *highs, size_t num_units, uint64_t total)
{
    uint32_t level = 0; /* the highest at which no more than the total is used */
    for (uint32_t bit = (uint32_t)1 << 31; bit != 0; bit >>= 1) {
        uint64_t used = 0;
        for (size_t unit = 0; unit < num_units; ++unit) {
            used += at_level(level | bit, lows[unit], highs[unit]);
        }
        level |= used <= total ? bit : 0;
    }
    uint64_t left = total;
    for (size_t unit = 0; unit < num_units; ++unit) {
        left -= at_level(level, lows[unit], highs[unit]);
    }
    for (size_t unit = 0; unit < num_units; ++unit) {
        const bool more = left > 0 && lows[unit] <= level && level < highs[unit];
        lows[unit] = at_level(level, lows[unit], highs[unit]) + more;
        left -= more;
    }
}

pb_kvcache_status pb_kvcache_divide(const pb_kvcache_divide_params *params, void *workspace, size_t workspace_size,
                                    uint32_t *budgets, size_t num_units)
{
    /* Checks */
    uint64_t sum_low;
    uint64_t sum_high;
    size_t bytes = 0;
    if (params == NULL || params->grid == NULL || params->losses == NULL || workspace == NULL || budgets == NULL) {
        return PB_KVCACHE_ERROR_NULL;
    }
    const pb_kvcache_status status = check(params, num_units, &sum_low, &sum_high);
    if (status != PB_KVCACHE_OK) {
        return status;
    }
    (void)pb_kvcache_divide_workspace_size(num_units, params->num_points, &bytes);
    if (workspace_size < bytes) {
        return PB_KVCACHE_ERROR_WORKSPACE;
    }
    if (overlaps(params, num_units, budgets, num_units * sizeof *budgets)
        || overlaps(params, num_units, workspace, bytes)
        || pb_kvcache_priv_overlap(workspace, bytes, budgets, num_units * sizeof *budgets)) {
        return PB_KVCACHE_ERROR_OVERLAP;
    }
    /* Every unit's runs, and the gain at which the total ends */
    const uint64_t total = params->total / params->multiple_of;
    scratch s = scratch_at(workspace, num_units, params->num_points);
    size_t num_runs = 0;
    uint64_t least = 0;
    if (total > sum_low && total < sum_high) {
        for (size_t unit = 0; unit < num_units; ++unit) {
            s.runs[unit] = runs_of(params, &s, unit, s.keys + num_runs, s.blocks + num_runs);
            num_runs += s.runs[unit];
        }
        least = threshold(s.keys, s.blocks, num_runs, total - sum_low);
    }
    /* What every unit has above it, and what it may have at it */
    size_t run = 0;
    for (size_t unit = 0; unit < num_units; ++unit) {
        uint32_t low = low_of(params, unit);
        uint32_t at = 0;
        if (total >= sum_high) {
            low = high_of(params, unit);
        }
        for (const size_t end = num_runs == 0 ? 0 : run + s.runs[unit]; run < end; ++run) {
            low += s.keys[run] > least ? s.blocks[run] : 0;
            at += s.keys[run] == least ? s.blocks[run] : 0;
        }
        budgets[unit] = low;
        s.highs[unit] = low + at;
    }
    if (num_runs > 0) {
        fill(budgets, s.highs, num_units, total);
    }
    for (size_t unit = 0; unit < num_units; ++unit) {
        budgets[unit] *= params->multiple_of;
    }
    return PB_KVCACHE_OK;
}
