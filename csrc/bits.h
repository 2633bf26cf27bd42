/*
 * Floats and doubles by their bits. What the kernels decide, they decide by keys: integers in the order of the numbers,
 * with one key for 0.0 and -0.0. No rounding mode and no flushing of subnormal numbers reaches integers, so that what
 * decides a count and what decides a place are always the same comparison.
 */
#ifndef PB_KVCACHE_BITS_H
#define PB_KVCACHE_BITS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define SIGN 0x80000000u
#define INFINITY_BITS 0x7F800000u
/* Keys of the infinities. Beyond them lie those of NaNs. */
#define INFINITY_KEY ((int32_t)INFINITY_BITS)
/* The bits of a double's infinity */
#define INFINITY_BITS_64 ((uint64_t)0x7FF << 52)

static inline uint32_t bits_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float float_of(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline uint64_t bits_of_double(double x)
{
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline double double_of(uint64_t bits)
{
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline float minus_infinity(void)
{
    return float_of(SIGN | INFINITY_BITS);
}

static inline bool is_finite(float x)
{
    return (bits_of(x) & ~SIGN) < INFINITY_BITS;
}

/* The magnitude, negated where the sign is set. */
static inline int32_t key_of(float x)
{
    const uint32_t bits = bits_of(x);
    const uint32_t negative = 0u - (bits >> 31);
    return (int32_t)(((bits & ~SIGN) ^ negative) - negative);
}

/* The float that has a key; 0.0 for the key 0. */
static inline float float_of_key(int32_t key)
{
    const uint32_t negative = 0u - ((uint32_t)key >> 31);
    return float_of((((uint32_t)key ^ negative) - negative) | (negative & SIGN));
}

static inline int64_t key_of_double(double x)
{
    const uint64_t bits = bits_of_double(x);
    const uint64_t negative = 0u - (bits >> 63);
    return (int64_t)(((bits & (UINT64_MAX >> 1)) ^ negative) - negative);
}

/* How far a step of a stride leads, whichever way. */
static inline size_t magnitude(ptrdiff_t stride)
{
    return stride < 0 ? (size_t)0 - (size_t)stride : (size_t)stride;
}

#endif
