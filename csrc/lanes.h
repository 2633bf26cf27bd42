/* The inner loops of the prefill selection and of the decode policies, one table of functions for each instruction set.
 * See lanes.c. */
#ifndef PB_KVCACHE_LANES_H
#define PB_KVCACHE_LANES_H

#include "internal.h"

#define PB_KVCACHE_PRIV_SEEN_BAD 1u      /* NaN or +inf */
#define PB_KVCACHE_PRIV_SEEN_NEGATIVE 2u /* below 0 */

/* Scores that one instruction of the widest set chooses among: what `between` may write beyond its count. */
#define PB_KVCACHE_PRIV_LANES 16u

/* Columns that products are made of together. */
#define PB_KVCACHE_PRIV_COLUMNS 64u

/* By pb_kvcache_dtype where there are three. Every table gives the same bits. */
typedef struct pb_kvcache_priv_lanes {
    /* lanes_body.h says what these do. */
    bool (*top[3])(const void *row, size_t n, float *top);
    double (*exps[3])(const void *row, size_t n, float scale, float top, float *e, const void *next);
    uint32_t (*sums[3])(const void *rows, ptrdiff_t stride, size_t num_rows, size_t n, float *sums);
    void (*dots[3])(const void *rows, size_t stride, size_t n, const float *queries, size_t group, size_t dim, float *key,
                    float *dots);
    void (*convert[3])(const void *row, size_t n, float *floats);
    /* dots[g * COLUMNS + i] is the product of query g, `dim` floats at queries + g * dim, and of column i of `columns`,
     * `dim` > 0 rows of COLUMNS floats: the sum of its terms in their order. */
    void (*columns)(const float *columns, const float *queries, size_t group, size_t dim, float *dots);
    /* Where one of `rows` rows of COLUMNS dots exceeds best[i], its dot and first + its index become best[i] and at[i]:
     * of equal ones the first. */
    void (*keep_larger)(const float *dots, size_t rows, uint32_t first, float *best, uint32_t *at);
    /* sums[i] += e[i] * factor */
    void (*add_scaled)(const float *e, size_t n, float factor, float *sums);
    /* true where no element is NaN or an infinity */
    bool (*finite)(const float *x, size_t n);
    /* How many of fewer than 2^32 keys are below the pivot? */
    size_t (*below)(const int32_t *keys, size_t n, int32_t pivot);
    /* The rest is over n < 2^32 scores, by their keys (bits.h). How many are >= threshold? */
    size_t (*reaching)(const float *x, size_t n, int32_t threshold);
    /* How many are strictly between low <= high, and their keys: all, or at least the first capacity - LANES of them.
     * `keys` has room for `capacity`, at least LANES. Also how many are >= high. */
    size_t (*between)(const float *x, size_t n, int32_t low, int32_t high, size_t *from_high, int32_t *keys,
                      size_t capacity);
    /* Indices of what exceeds the threshold and of the first `ties` that equal it, ascending: at most `count`. */
    void (*above)(const float *x, size_t n, int32_t threshold, size_t ties, size_t count, uint32_t *chosen);
    /* Of the decode policies. true where all are finite with a clear sign bit: where false, all may still be good: -0.0. */
    bool (*plain_weights)(const float *x, size_t n);
    /* sums[i] = from[i] + rows[0][i] + rows[1][i] + ... for i < n, in this order, in double. NULL `from` is zeros. The
     * rows and `from` can be read up to `room` >= n, which may be faster. `sums` does not overlap the rows. It may be
     * `from`, or begin before it. */
    void (*add_rows)(const float *const *rows, size_t num_rows, const double *from, size_t n, size_t room,
                     double *sums);
    /* The first i < n of those with the lowest maximum of scores[i .. i+kernel-1], and that maximum: 0 and +inf where
     * n is 0 or nothing is below +inf. No NaN. */
    size_t (*lowest)(const double *scores, size_t n, size_t kernel, double *lowest);
} pb_kvcache_priv_lanes;

#define PB_KVCACHE_PRIV_LEVELS 3u

/* Level 0 is portable C, higher ones need more. NULL where the level does not exist or this processor lacks it. */
const pb_kvcache_priv_lanes *pb_kvcache_priv_lanes_at(unsigned level);
const pb_kvcache_priv_lanes *pb_kvcache_priv_lanes_best(void);

/* exp(t) for t <= 0, as the softmax uses it. */
float pb_kvcache_priv_exp(float t);

#endif
