/*
 * All inner loops of one instruction set, and the table of them. lanes.c includes this file once for each set.
 *
 * The including file defines, and this one undefines again:
 *   SET             the set's name: the table's, and the end of the functions' names
 *   TARGET          the attributes of its functions, or nothing
 *   BETWEEN, ABOVE  the functions of these two passes, which are written there
 *   DOT_OF_VECTORS  a product of two rows of n floats, n a multiple of DOT_LANES, where it is written there
 */
#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)

/* The sum of a[i] * b[i]: in DOT_LANES interleaved sums, folded in halves. Part of the definition of a logit. */
TARGET static inline float JOIN(dot, SET)(const float *restrict a, const float *restrict b, size_t n)
{
    float lanes[DOT_LANES] = {0.0f};
    size_t i = 0;
#ifdef DOT_OF_VECTORS
    if (n % DOT_LANES == 0) {
        return DOT_OF_VECTORS(a, b, n);
    }
#endif
    for (; i + DOT_LANES <= n; i += DOT_LANES) {
        for (size_t lane = 0; lane < DOT_LANES; ++lane) {
            lanes[lane] += a[i + lane] * b[i + lane];
        }
    }
    for (size_t lane = 0; i < n; ++lane, ++i) {
        lanes[lane] += a[i] * b[i];
    }
    for (size_t half = DOT_LANES / 2; half > 0; half /= 2) {
        for (size_t lane = 0; lane < half; ++lane) {
            lanes[lane] += lanes[lane + half];
        }
    }
    return lanes[0];
}
#define DOT JOIN(dot, SET)

/* The loops over attention, for each kind of element */
#define ELEMENT float
#define TO_FLOAT from_float
#define NAME(function) JOIN(function##_float, SET)
#include "lanes_body.h"
#define ELEMENT uint16_t
#define TO_FLOAT from_half
#define NAME(function) JOIN(function##_half, SET)
#include "lanes_body.h"
#define ELEMENT uint16_t
#define TO_FLOAT from_bfloat
#define NAME(function) JOIN(function##_bfloat, SET)
#include "lanes_body.h"

/* The loops over floats and keys */
#define NAME(function) JOIN(function, SET)

/* best[i] and at[i] become dots[row][i] and first + row where that exceeds best[i], row after row of COLUMNS dots. */
TARGET static void NAME(keep_larger)(const float *restrict dots, size_t rows, uint32_t first, float *restrict best,
                                     uint32_t *restrict at)
{
    for (size_t row = 0; row < rows; ++row) {
        const float *dot = dots + row * COLUMNS;
        const uint32_t index = first + (uint32_t)row;
        for (size_t i = 0; i < COLUMNS; ++i) {
            const bool larger = dot[i] > best[i];
            at[i] = choose(larger, index, at[i]);
            best[i] = larger ? dot[i] : best[i];
        }
    }
}

TARGET static void NAME(add_scaled)(const float *restrict e, size_t n, float factor, float *restrict sums)
{
    for (size_t i = 0; i < n; ++i) {
        sums[i] += e[i] * factor;
    }
}

TARGET static bool NAME(finite)(const float *x, size_t n)
{
    uint32_t most = 0;
    for (size_t i = 0; i < n; ++i) {
        const uint32_t magnitude = bits_of(x[i]) & ~SIGN;
        most = magnitude > most ? magnitude : most;
    }
    return most < INFINITY_BITS;
}

TARGET static bool NAME(plain_weights)(const float *x, size_t n)
{
    uint32_t signs = 0; /* two of them, so that neither waits for the other */
    uint32_t carried = 0;
    for (size_t i = 0; i < n; ++i) {
        const uint32_t bits = bits_of(x[i]);
        signs |= bits;
        carried |= bits + (SIGN - INFINITY_BITS); /* sets the sign of infinities and NaNs */
    }
    return (signs | carried) < SIGN;
}

TARGET static size_t NAME(below)(const int32_t *keys, size_t n, int32_t pivot)
{
    uint32_t below = 0;
    for (size_t i = 0; i < n; ++i) {
        below += (uint32_t)(keys[i] < pivot);
    }
    return below;
}

TARGET static inline size_t NAME(reaching_by)(bool raw, const float *x, size_t n, int32_t threshold)
{
    uint32_t reaching = 0;
    for (size_t i = 0; i < n; ++i) {
        reaching += (uint32_t)(key_or_bits(x[i], raw) >= threshold);
    }
    return reaching;
}

TARGET static size_t NAME(reaching)(const float *x, size_t n, int32_t threshold)
{
    return threshold > 0 ? NAME(reaching_by)(true, x, n, threshold) : NAME(reaching_by)(false, x, n, threshold);
}

static const pb_kvcache_priv_lanes SET = {
    .top = {JOIN(top_float, SET), JOIN(top_half, SET), JOIN(top_bfloat, SET)},
    .exps = {JOIN(exps_float, SET), JOIN(exps_half, SET), JOIN(exps_bfloat, SET)},
    .sums = {JOIN(sums_float, SET), JOIN(sums_half, SET), JOIN(sums_bfloat, SET)},
    .dots = {JOIN(dots_float, SET), JOIN(dots_half, SET), JOIN(dots_bfloat, SET)},
    .convert = {JOIN(convert_float, SET), JOIN(convert_half, SET), JOIN(convert_bfloat, SET)},
    .columns = NAME(columns),
    .keep_larger = NAME(keep_larger),
    .add_scaled = NAME(add_scaled),
    .finite = NAME(finite),
    .below = NAME(below),
    .reaching = NAME(reaching),
    .between = BETWEEN,
    .above = ABOVE,
    .plain_weights = NAME(plain_weights),
    .add_rows = NAME(add_rows),
    .lowest = NAME(lowest),
};

#undef NAME
#undef DOT
#undef DOT_OF_VECTORS
#undef JOIN
#undef JOIN_
#undef SET
#undef TARGET
#undef BETWEEN
#undef ABOVE
