/*
 * The inner loops of the window scores, for one kind of element and one instruction set. lanes_set.h includes this file
 * once for each kind and defines what this one undefines again:
 *   ELEMENT         what a row is made of
 *   TO_FLOAT(x)     an element as a float
 *   NAME(function)  the function's name with the kind's and the set's
 * TARGET, the functions' attributes, stays.
 */

/*
 * The largest of n > 0 elements. Returns false where one of them is NaN or +inf, and then *top is of no use. By keys,
 * because compilers turn maxima of integers into vectors, and those of floats not. The keys of +inf and of a positive
 * NaN are above all others, those of a negative NaN below.
 */
TARGET static bool NAME(top)(const void *row, size_t n, float *top)
{
    const ELEMENT *x = row;
    int32_t most = INT32_MIN;
    int32_t least = INT32_MAX;
    for (size_t i = 0; i < n; ++i) {
        const int32_t key = key_of(TO_FLOAT(x[i]));
        most = key > most ? key : most;
        least = key < least ? key : least;
    }
    *top = float_of_key(most);
    return most < INFINITY_KEY && least >= -INFINITY_KEY;
}

/*
 * e[i] = exp(x[i] * scale - top * scale) for i < n, and the sum of them: within a tile in float, by lanes that are
 * folded in pairs, and over the tiles in double. No element is NaN or +inf and none exceeds `top`. `next` is the row
 * that will be wanted next, as long as this one, or NULL.
 */
TARGET static double NAME(exps)(const void *row, size_t n, float scale, float top, float *restrict e, const void *next)
{
    const ELEMENT *restrict x = row;
    const float shift = top * scale;
    double total = 0.0;
    for (size_t start = 0; start < n; start += EXP_TILE) {
        const size_t width = n - start < EXP_TILE ? n - start : EXP_TILE;
        float lanes[SUM_LANES] = {0.0f};
        if (next != NULL) { /* memory is idle meanwhile: 13.3 ms for 1,024 rows of 32,768 become 11 */
            for (size_t i = 0; i < width; i += CACHE_LINE / sizeof(ELEMENT)) {
                PREFETCH((const ELEMENT *)next + start + i);
            }
        }
        for (size_t i = 0; i < width; ++i) {
            e[start + i] = exp_to_one(TO_FLOAT(x[start + i]) * scale - shift);
        }
        /* Sum them by lanes, fold the lanes */
        size_t i = 0;
        for (; i + SUM_LANES <= width; i += SUM_LANES) {
            for (size_t lane = 0; lane < SUM_LANES; ++lane) {
                lanes[lane] += e[start + i + lane];
            }
        }
        for (size_t lane = 0; i < width; ++lane, ++i) {
            lanes[lane] += e[start + i];
        }
        for (size_t half = SUM_LANES / 2; half > 0; half /= 2) {
            for (size_t lane = 0; lane < half; ++lane) {
                lanes[lane] += lanes[lane + half];
            }
        }
        total += (double)lanes[0];
    }
    return total;
}

/* Sums in float of the columns of rows of probabilities. See column_sums_body.h. NaN and +inf count as -inf. */
#define COLUMN_SUMS NAME(sums_)
#define ROW ELEMENT
#define LOAD(x) probability(TO_FLOAT(x), &seen)
#define SUM float
#define TILE SUM_TILE
#include "column_sums_body.h"

TARGET static uint32_t NAME(sums)(const void *rows, ptrdiff_t stride, size_t num_rows, size_t n, float *sums)
{
    return NAME(sums_)(rows, stride, num_rows, n, sums);
}

TARGET static void NAME(convert)(const void *row, size_t n, float *restrict floats)
{
    const ELEMENT *restrict x = row;
    for (size_t i = 0; i < n; ++i) {
        floats[i] = TO_FLOAT(x[i]);
    }
}

/*
 * dots[g * n + i] is the product of row i, `dim` elements at row + i * stride, and of query g, `dim` floats at
 * queries + g * dim. `key` is scratch for one row.
 */
TARGET static void NAME(dots)(const void *rows, size_t stride, size_t n, const float *queries, size_t group, size_t dim,
                              float *restrict key, float *restrict dots)
{
    const ELEMENT *restrict x = rows;
    for (size_t i = 0; i < n; ++i) {
        for (size_t d = 0; d < dim; ++d) {
            key[d] = TO_FLOAT(x[i * stride + d]);
        }
        for (size_t g = 0; g < group; ++g) {
            dots[g * n + i] = DOT(key, queries + g * dim, dim);
        }
    }
}

#undef ELEMENT
#undef TO_FLOAT
#undef NAME
