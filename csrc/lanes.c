/*
 * The inner loops that the prefill selection spends its time in: plain loops that a compiler turns into vectors, each
 * element of a vector computed as the scalar would be, so that every instruction set gives the same bits. On x86 the
 * same loops are compiled a second time for AVX2; which copy runs is asked of the processor at each call.
 */
#include <string.h>

#include "internal.h"

/* A fused multiply-add rounds once where the definition rounds twice. GCC has it off under -std=c11. */
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#endif

/* Partial results side by side: one 512-bit, two 256-bit or four 128-bit registers. Part of the definition of a sum. */
#define LANES 16u
/* Exponentials between two folds of the lanes. A tile stays in the first cache; part of the definition of a sum. */
#define EXP_TILE 1024u
/* Columns summed together. Any value gives the same sums; 4 KB a row is what the prefetcher likes. */
#define SUM_TILE 1024u

#define SEEN_BAD PB_KVCACHE_PRIV_SEEN_BAD
#define SEEN_NEGATIVE PB_KVCACHE_PRIV_SEEN_NEGATIVE

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

#define INFINITE float_of(0x7F800000u)

/*
 * exp(t) for t <= 0: exp(0) is 1, the relative error is below 2^-23 (1.0 ulp), and below -87.25, where the result
 * would come near the subnormals, it is 0. t may be -inf.
 *
 * t = k ln 2 + r with k the nearest integer (adding 1.5 * 2^23 leaves it in the low bits) and |r| <= ln(2) / 2. ln 2 is
 * split in two so that k * LN2_HIGH is exact. The polynomial is the minimax one for the relative error of
 * 1 + r + r^2 q(r), q of degree 4; its own error is 2^-28.
 */
static inline float exp_to_one(float t)
{
    const float shifted = t * 0x1.715476p+0f + 12582912.0f;
    const float k = shifted - 12582912.0f;
    const float r = (t - k * 0x1.63p-1f) - k * -0x1.bd0106p-13f;
    float q = 0x1.6a2434p-10f;
    q = q * r + 0x1.1239e2p-7f;
    q = q * r + 0x1.5558f2p-5f;
    q = q * r + 0x1.555492p-3f;
    q = q * r + 0x1.fffffcp-2f;
    const float power = (q * (r * r) + r) + 1.0f;
    return float_of(t >= -87.25f ? bits_of(power) + (bits_of(shifted) << 23) : 0u);
}

float pb_kvcache_priv_exp(float t)
{
    return exp_to_one(t);
}

static inline float from_float(float x)
{
    return x;
}

/* Without subnormal arithmetic, which a program may have switched off. */
static inline float from_half(uint16_t half)
{
    const uint32_t magnitude = (uint32_t)(half & 0x7FFFu) << 13;
    const float subnormal = float_of(magnitude | 0x38800000u) - 0x1p-14f;
    const uint32_t normal = magnitude + (magnitude >= 0x0F800000u ? 0x70000000u : 0x38000000u);
    const uint32_t sign = (uint32_t)(half & 0x8000u) << 16;
    return float_of((magnitude < 0x00800000u ? bits_of(subnormal) : normal) | sign);
}

static inline float from_bfloat(uint16_t bfloat)
{
    return float_of((uint32_t)bfloat << 16);
}

static inline float probability(float x, uint32_t *seen)
{
    *seen |= (x <= FLT_MAX ? 0u : (uint32_t)SEEN_BAD) | (x < 0.0f ? (uint32_t)SEEN_NEGATIVE : 0u);
    return x <= FLT_MAX ? x : -INFINITE;
}

/*
 * lanes_body.h, per ELEMENT, its conversion TO_FLOAT, function names NAME() and function attributes TARGET. The lists
 * below make a table of one instruction set's copies.
 */
#define TABLE(set)                                                                                                     \
    {                                                                                                                  \
        .top = {top_float_##set, top_half_##set, top_bfloat_##set},                                                    \
        .exps = {exps_float_##set, exps_half_##set, exps_bfloat_##set},                                                \
        .sums = {sums_float_##set, sums_half_##set, sums_bfloat_##set},                                                \
        .convert = {convert_float_##set, convert_half_##set, convert_bfloat_##set}, .add_scaled = add_scaled_##set,    \
    }
#define ADD_SCALED(set)                                                                                                \
    TARGET static void add_scaled_##set(const float *restrict e, size_t n, float factor, float *restrict sums)         \
    {                                                                                                                  \
        for (size_t i = 0; i < n; ++i) {                                                                               \
            sums[i] += e[i] * factor;                                                                                  \
        }                                                                                                              \
    }

#define TARGET
#define ELEMENT float
#define TO_FLOAT from_float
#define NAME(function) function##_float_portable
#include "lanes_body.h"
#define ELEMENT uint16_t
#define TO_FLOAT from_half
#define NAME(function) function##_half_portable
#include "lanes_body.h"
#define ELEMENT uint16_t
#define TO_FLOAT from_bfloat
#define NAME(function) function##_bfloat_portable
#include "lanes_body.h"
ADD_SCALED(portable)
#undef TARGET

static const pb_kvcache_priv_lanes portable = TABLE(portable);

#if (defined(__x86_64__) || defined(__i386__)) && defined(__GNUC__) && !defined(PB_KVCACHE_PORTABLE)
#define HAVE_AVX2 1
#define TARGET __attribute__((target("avx2")))
#define ELEMENT float
#define TO_FLOAT from_float
#define NAME(function) function##_float_avx2
#include "lanes_body.h"
#define ELEMENT uint16_t
#define TO_FLOAT from_half
#define NAME(function) function##_half_avx2
#include "lanes_body.h"
#define ELEMENT uint16_t
#define TO_FLOAT from_bfloat
#define NAME(function) function##_bfloat_avx2
#include "lanes_body.h"
ADD_SCALED(avx2)
#undef TARGET

static const pb_kvcache_priv_lanes avx2 = TABLE(avx2);
#endif

const pb_kvcache_priv_lanes *pb_kvcache_priv_lanes_at(unsigned level)
{
#ifdef HAVE_AVX2
    if (level == 1) {
        return __builtin_cpu_supports("avx2") ? &avx2 : NULL;
    }
#endif
    return level == 0 ? &portable : NULL;
}

const pb_kvcache_priv_lanes *pb_kvcache_priv_lanes_best(void)
{
    const pb_kvcache_priv_lanes *best = pb_kvcache_priv_lanes_at(1);
    return best != NULL ? best : &portable;
}
