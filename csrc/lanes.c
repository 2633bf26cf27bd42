/*
 * The inner loops that the prefill selection and the decode policies spend their time in: plain loops that a compiler
 * turns into vectors, each element of a vector computed as the scalar would be, so that every instruction set gives the
 * same bits. On x86 the same loops are compiled again for AVX2 and AVX-512. Each call asks the processor which copy it
 * can run.
 *
 * Microseconds for a row of 32,768 float logits, Zen 5, GCC 12 (SSE2, AVX2, AVX-512):
 *   top 12 1.9 1.0   exps 22 11 5.4   add_scaled 2.2 1.2 1.0   sums 8 3.2 1.5   between 26 26 2.9   above 15 15 1.5
 */
#include "lanes.h"

#include <math.h>
#include <string.h>

#include "bits.h"

#if (defined(__x86_64__) || defined(__i386__)) && defined(__GNUC__) && !defined(PB_KVCACHE_PORTABLE)
#define CLONES 1
#include <immintrin.h>
#endif
#if defined(__SSE2__) || defined(_M_X64)
#include <emmintrin.h>
#endif

/* A fused multiply-add rounds once where the definition rounds twice. GCC has it off under -std=c11. */
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#endif

#define LANES PB_KVCACHE_PRIV_LANES
#define COLUMNS PB_KVCACHE_PRIV_COLUMNS
/* Partial sums side by side: enough that no addition waits for the one before it with 512-bit registers (with 16 a row
 * took 8 % longer from GCC, 28 % from clang). Part of the definition of a sum. */
#define SUM_LANES 64u
/* Partial sums of a product of two rows. Part of its definition. */
#define DOT_LANES 16u
/* Exponentials between two folds of the lanes. A tile stays in the first cache. Part of the definition of a sum. */
#define EXP_TILE 1024u
/* Columns summed together. Any value gives the same sums. 4 KB a row is what the prefetcher likes. */
#define SUM_TILE 1024u

#define CACHE_LINE 64u
#ifdef __GNUC__
#define PREFETCH(address) __builtin_prefetch((address), 0, 2)
#else
#define PREFETCH(address) ((void)(address))
#endif

#define SEEN_BAD PB_KVCACHE_PRIV_SEEN_BAD
#define SEEN_NEGATIVE PB_KVCACHE_PRIV_SEEN_NEGATIVE

/* a where the condition holds, else b, without a branch that a compiler would have to prove away. */
static inline uint32_t choose(bool condition, uint32_t a, uint32_t b)
{
    const uint32_t mask = 0u - (uint32_t)condition;
    return (a & mask) | (b & ~mask);
}

/*
 * exp(t) for t <= 0: exp(0) is 1, the relative error is below 2^-23 (1.0 ulp), and below -87.25, where the result
 * would come near the subnormals, it is 0. t may be -inf.
 *
 * t = k ln 2 + r with k the nearest integer (adding 1.5 * 2^23 leaves it in the low bits) and |r| <= ln(2) / 2. ln 2 is
 * split in two so that k * LN2_HIGH is exact. The polynomial is the minimax one for the relative error of
 * 1 + r + r^2 q(r), q of degree 4. Its own error is 2^-28. Its terms are paired rather than nested, so that fewer
 * operations wait for each other: 24 us a row of 32,768 became 22.5 with SSE2.
 */
static inline float exp_to_one(float t)
{
    const float shifted = t * 0x1.715476p+0f + 12582912.0f;
    const float k = shifted - 12582912.0f;
    const float r = (t - k * 0x1.63p-1f) - k * -0x1.bd0106p-13f;
    const float s = r * r;
    const float low = 0x1.fffffcp-2f + 0x1.555492p-3f * r;
    const float high = (0x1.5558f2p-5f + 0x1.1239e2p-7f * r) + 0x1.6a2434p-10f * s;
    const float power = ((low + high * s) * s + r) + 1.0f;
    return float_of((bits_of(power) + (bits_of(shifted) << 23)) & (0u - (uint32_t)(t >= -87.25f)));
}

float pb_kvcache_priv_exp(float t)
{
    return exp_to_one(t);
}

/* ---- Elements as floats, by the names of their kinds ---- */

static inline float from_float(float x)
{
    return x;
}

/* Without subnormal arithmetic, which a program may have switched off. */
static inline float from_half(uint16_t half)
{
    const uint32_t magnitude = (uint32_t)(half & 0x7FFFu) << 13;
    const float subnormal = float_of(magnitude | 0x38800000u) - 0x1p-14f;
    const uint32_t normal = magnitude + choose(magnitude >= 0x0F800000u, 0x70000000u, 0x38000000u);
    const uint32_t sign = (uint32_t)(half & 0x8000u) << 16;
    return float_of(choose(magnitude < 0x00800000u, bits_of(subnormal), normal) | sign);
}

static inline float from_bfloat(uint16_t bfloat)
{
    return float_of((uint32_t)bfloat << 16);
}

/* NaN and +inf become -inf. */
static inline float probability(float x, uint32_t *seen)
{
    const uint32_t bits = bits_of(x);
    const bool bad = (bits & ~SIGN) >= INFINITY_BITS; /* -inf too, which is also negative */
    *seen |= ((uint32_t)bad & SEEN_BAD) | ((uint32_t)(bits > SIGN && bits <= (SIGN | INFINITY_BITS)) * SEEN_NEGATIVE);
    return float_of(choose(bad, SIGN | INFINITY_BITS, bits));
}

/*
 * ---- The passes of a choice over all scores, by their keys ----
 *
 * Two comparisons come out the same for the bits of a score, taken as a signed integer, as for its key: "> bound" for a
 * bound >= 0, and ">= bound" for a bound > 0. The bits of negative scores and of -0.0 are negative. Scores are hardly
 * ever negative, and a pass over 32,768 of them takes a sixth less time by their bits. Each pass is written once, with
 * `raw` a constant that the compiler folds.
 */
static inline int32_t key_or_bits(float x, bool raw)
{
    return raw ? (int32_t)bits_of(x) : key_of(x);
}

static inline size_t between_by(bool raw, const float *x, size_t n, int32_t low, int32_t high, size_t *from_high,
                                int32_t *keys, size_t capacity)
{
    const uint32_t first = (uint32_t)low + 1u;
    const uint32_t width = low < high ? (uint32_t)high - first : 0u;
    uint32_t at_high = 0;
    uint32_t inside = 0;
    for (size_t i = 0; i < n; ++i) {
        const int32_t key = key_or_bits(x[i], raw);
        at_high += (uint32_t)(key >= high);
        inside += (uint32_t)((uint32_t)key - first < width);
    }
    *from_high = at_high;
    const size_t most = inside < capacity ? inside : capacity;
    size_t found = 0;
    for (size_t i = 0; found < most && i < n; ++i) {
        const int32_t key = key_or_bits(x[i], raw);
        keys[found] = key;
        found += (size_t)((uint32_t)key - first < width);
    }
    return inside;
}

static size_t between_portable(const float *x, size_t n, int32_t low, int32_t high, size_t *from_high, int32_t *keys,
                               size_t capacity)
{
    return low >= 0 && high > 0 ? between_by(true, x, n, low, high, from_high, keys, capacity)
                                : between_by(false, x, n, low, high, from_high, keys, capacity);
}

static inline void above_by(bool raw, const float *x, size_t n, int32_t threshold, size_t ties, size_t count,
                            uint32_t *chosen)
{
    size_t written = 0;
    size_t i = 0;
    for (; ties > 0 && written < count && i < n; ++i) {
        const int32_t key = key_or_bits(x[i], raw);
        chosen[written] = (uint32_t)i;
        written += (size_t)(key >= threshold);
        ties -= (size_t)(key == threshold);
    }
    for (; written < count && i < n; ++i) {
        chosen[written] = (uint32_t)i;
        written += (size_t)(key_or_bits(x[i], raw) > threshold);
    }
}

static void above_portable(const float *x, size_t n, int32_t threshold, size_t ties, size_t count, uint32_t *chosen)
{
    if (threshold > 0) {
        above_by(true, x, n, threshold, ties, count, chosen);
    } else {
        above_by(false, x, n, threshold, ties, count, chosen);
    }
}

/* Two-lane vectors by name where the target has them: with what GCC 12 makes of the loops an eviction of
 * one of 4,096 took 25 us instead of 16. */
#if defined(__SSE2__) || defined(_M_X64)
#define TARGET
#define NAME(function) function##_portable
#define VECTOR __m128d
#define INDICES __m128i
#define WIDTH 2u
#define UNROLLED 8u
#define LOAD(x) _mm_loadu_pd(x)
#define STORE(x, vector) _mm_storeu_pd(x, vector)
#define STORE_FIRST(x, n, vector) _mm_storel_pd(x, vector) /* n is 1 */
#define SPLAT(x) _mm_set1_pd(x)
#define SPLAT_INDEX(i) _mm_set1_epi64x(i)
#define STORE_INDICES(x, vector) _mm_storeu_si128((__m128i *)(void *)(x), vector)
#define ADD(a, b) _mm_add_pd(a, b)
#define MAX(a, b) _mm_max_pd(a, b)
#define AHEAD 4u
#define SHIFTED_BY_1(a, b) _mm_shuffle_pd(a, b, 1)
#define SHIFTED_BY_2(a, b) (b)
#define SHIFTED_BY_3(a, b, c) _mm_shuffle_pd(b, c, 1)
#define LOAD_FLOATS(x) _mm_cvtps_pd(_mm_castsi128_ps(_mm_loadl_epi64((const __m128i *)(const void *)(x))))
#define KEEP_LOWER(x, at, low, low_at)                                                                                \
    do {                                                                                                              \
        const __m128i lower_ = _mm_castpd_si128(_mm_cmplt_pd(x, low));                                                \
        low = _mm_min_pd(x, low);                                                                                     \
        low_at = _mm_or_si128(_mm_and_si128(lower_, at), _mm_andnot_si128(lower_, low_at));                           \
    } while (0)
#include "lanes_decode.h"
#undef TARGET
#else
#include "lanes_decode_portable.h"
#endif

/* ---- Products of two rows by name: what GCC 12 makes of the loop takes three times as long ---- */

#if defined(__SSE2__) || defined(_M_X64)
/* Four sums side by side, folded in halves. */
static inline float folded(__m128 lanes)
{
    const __m128 two = _mm_add_ps(lanes, _mm_movehl_ps(lanes, lanes));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

static inline float dot_vectors_sse2(const float *a, const float *b, size_t n)
{
    __m128 lanes[4] = {_mm_setzero_ps(), _mm_setzero_ps(), _mm_setzero_ps(), _mm_setzero_ps()};
    for (size_t i = 0; i < n; i += DOT_LANES) {
        for (size_t v = 0; v < 4; ++v) {
            lanes[v] = _mm_add_ps(lanes[v], _mm_mul_ps(_mm_loadu_ps(a + i + 4 * v), _mm_loadu_ps(b + i + 4 * v)));
        }
    }
    return folded(_mm_add_ps(_mm_add_ps(lanes[0], lanes[2]), _mm_add_ps(lanes[1], lanes[3])));
}
#define DOT_OF_VECTORS dot_vectors_sse2
#endif

/* ---- Products with a block of columns ---- */

#define TARGET
#define NAME(function) function##_portable
#if defined(__SSE2__) || defined(_M_X64)
#define VECTOR __m128
#define WIDTH 4u
#define TILE_VECTORS 2u
#define TILE_ROWS 6u
#define LOAD(x) _mm_loadu_ps(x)
#define STORE(x, vector) _mm_storeu_ps(x, vector)
#define SPLAT(x) _mm_set1_ps(x)
#define ADD(a, b) _mm_add_ps(a, b)
#define MUL(a, b) _mm_mul_ps(a, b)
#endif
#include "lanes_columns.h"
#undef TARGET

#define SET portable
#define TARGET
#define BETWEEN between_portable
#define ABOVE above_portable
#include "lanes_set.h"

#ifdef CLONES
#define TARGET __attribute__((target("avx2")))
#define NAME(function) function##_avx2
#define VECTOR __m256d
#define INDICES __m256i
#define WIDTH 4u
#define UNROLLED 8u
#define LOAD(x) _mm256_loadu_pd(x)
#define STORE(x, vector) _mm256_storeu_pd(x, vector)
#define STORE_FIRST(x, n, vector)                                                                                     \
    _mm256_maskstore_pd(x, _mm256_cmpgt_epi64(_mm256_set1_epi64x((int64_t)(n)), _mm256_setr_epi64x(0, 1, 2, 3)), vector)
#define SPLAT(x) _mm256_set1_pd(x)
#define SPLAT_INDEX(i) _mm256_set1_epi64x(i)
#define STORE_INDICES(x, vector) _mm256_storeu_si256((__m256i *)(void *)(x), vector)
#define ADD(a, b) _mm256_add_pd(a, b)
#define MAX(a, b) _mm256_max_pd(a, b)
#define AHEAD 3u
#define SHIFTED_BY_1(a, b) _mm256_shuffle_pd(a, SHIFTED_BY_2(a, b), 5)
#define SHIFTED_BY_2(a, b) _mm256_permute2f128_pd(a, b, 0x21)
#define SHIFTED_BY_3(a, b, c) _mm256_shuffle_pd(SHIFTED_BY_2(a, b), b, 5)
#define LOAD_FLOATS(x) _mm256_cvtps_pd(_mm_loadu_ps(x))
#define KEEP_LOWER(x, at, low, low_at)                                                                                \
    do {                                                                                                              \
        const __m256d lower_ = _mm256_cmp_pd(x, low, _CMP_LT_OQ);                                                     \
        low = _mm256_blendv_pd(low, x, lower_);                                                                       \
        low_at = _mm256_blendv_epi8(low_at, at, _mm256_castpd_si256(lower_));                                         \
    } while (0)
#include "lanes_decode.h"

TARGET static inline float dot_vectors_avx2(const float *a, const float *b, size_t n)
{
    __m256 low = _mm256_setzero_ps();
    __m256 high = _mm256_setzero_ps();
    for (size_t i = 0; i < n; i += DOT_LANES) {
        low = _mm256_add_ps(low, _mm256_mul_ps(_mm256_loadu_ps(a + i), _mm256_loadu_ps(b + i)));
        high = _mm256_add_ps(high, _mm256_mul_ps(_mm256_loadu_ps(a + i + 8), _mm256_loadu_ps(b + i + 8)));
    }
    const __m256 eight = _mm256_add_ps(low, high);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
#define DOT_OF_VECTORS dot_vectors_avx2

#define NAME(function) function##_avx2
#define VECTOR __m256
#define WIDTH 8u
#define TILE_VECTORS 2u
#define TILE_ROWS 6u
#define LOAD(x) _mm256_loadu_ps(x)
#define STORE(x, vector) _mm256_storeu_ps(x, vector)
#define SPLAT(x) _mm256_set1_ps(x)
#define ADD(a, b) _mm256_add_ps(a, b)
#define MUL(a, b) _mm256_mul_ps(a, b)
#include "lanes_columns.h"

#define SET avx2
#define BETWEEN between_portable /* what a compiler makes of these for AVX2 is no faster */
#define ABOVE above_portable
#include "lanes_set.h"

#define AVX512 "avx512f,avx512bw,avx512dq,avx512vl,popcnt"
#ifdef __clang__
#define TARGET __attribute__((target(AVX512)))
#else
#define TARGET __attribute__((target(AVX512 ",prefer-vector-width=512")))
#endif

#define NAME(function) function##_avx512
#define VECTOR __m512d
#define INDICES __m512i
#define WIDTH 8u
#define UNROLLED 8u
#define LOAD(x) _mm512_loadu_pd(x)
#define STORE(x, vector) _mm512_storeu_pd(x, vector)
#define STORE_FIRST(x, n, vector) _mm512_mask_storeu_pd(x, (__mmask8)((1u << (n)) - 1u), vector)
#define SPLAT(x) _mm512_set1_pd(x)
#define SPLAT_INDEX(i) _mm512_set1_epi64(i)
#define STORE_INDICES(x, vector) _mm512_storeu_si512(x, vector)
#define ADD(a, b) _mm512_add_pd(a, b)
#define MAX(a, b) _mm512_max_pd(a, b)
#define AHEAD 3u
#define SHIFTED(a, b, places)                                                                                         \
    _mm512_castsi512_pd(_mm512_alignr_epi64(_mm512_castpd_si512(b), _mm512_castpd_si512(a), places))
#define SHIFTED_BY_1(a, b) SHIFTED(a, b, 1)
#define SHIFTED_BY_2(a, b) SHIFTED(a, b, 2)
#define SHIFTED_BY_3(a, b, c) SHIFTED(a, b, 3)
#define LOAD_FLOATS(x) _mm512_cvtps_pd(_mm256_loadu_ps(x))
#define KEEP_LOWER(x, at, low, low_at)                                                                                \
    do {                                                                                                              \
        const __mmask8 lower_ = _mm512_cmp_pd_mask(x, low, _CMP_LT_OQ);                                               \
        low = _mm512_mask_mov_pd(low, lower_, x);                                                                     \
        low_at = _mm512_mask_mov_epi64(low_at, lower_, at);                                                           \
    } while (0)
#include "lanes_decode.h"

/* 16 scores as above, and which of them are there: the last vector of a row may be partly beyond it. */
TARGET static inline __m512i keys_avx512(const float *x, size_t left, bool raw, __mmask16 *there)
{
    *there = (__mmask16)(left >= LANES ? 0xFFFFu : (1u << left) - 1u);
    const __m512i bits = _mm512_maskz_loadu_epi32(*there, x);
    const __m512i magnitudes = _mm512_and_si512(bits, _mm512_set1_epi32(INT32_MAX));
    return raw ? bits
               : _mm512_mask_sub_epi32(magnitudes, _mm512_movepi32_mask(bits), _mm512_setzero_si512(), magnitudes);
}

/* Only these have an instruction that packs the marked elements of a vector, which no compiler finds in a loop. */
TARGET static inline size_t between_avx512_by(bool raw, const float *x, size_t n, int32_t low, int32_t high,
                                              size_t *from_high, int32_t *keys, size_t capacity)
{
    const __m512i lows = _mm512_set1_epi32(low);
    const __m512i highs = _mm512_set1_epi32(high);
    const __m512i one = _mm512_set1_epi32(1);
    __m512i reached = _mm512_setzero_si512();
    size_t found = 0;
    size_t stored = 0;
    for (size_t i = 0; i < n; i += LANES) {
        __mmask16 there;
        const __m512i scores = keys_avx512(x + i, n - i, raw, &there);
        const __mmask16 at_high = _mm512_mask_cmpge_epi32_mask(there, scores, highs);
        const __mmask16 inside = _kandn_mask16(at_high, _mm512_mask_cmpgt_epi32_mask(there, scores, lows));
        reached = _mm512_mask_add_epi32(reached, at_high, reached, one);
        _mm512_storeu_si512(keys + stored, _mm512_maskz_compress_epi32(inside, scores));
        found += (size_t)_mm_popcnt_u32(inside);
        stored = found + LANES <= capacity ? found : capacity - LANES; /* the last vector is then overwritten */
    }
    *from_high = (size_t)(uint32_t)_mm512_reduce_add_epi32(reached);
    return found;
}

TARGET static size_t between_avx512(const float *x, size_t n, int32_t low, int32_t high, size_t *from_high,
                                    int32_t *keys, size_t capacity)
{
    return low >= 0 && high > 0 ? between_avx512_by(true, x, n, low, high, from_high, keys, capacity)
                                : between_avx512_by(false, x, n, low, high, from_high, keys, capacity);
}

TARGET static inline void above_avx512_by(bool raw, const float *x, size_t n, int32_t threshold, size_t ties,
                                          size_t count, uint32_t *chosen)
{
    const __m512i thresholds = _mm512_set1_epi32(threshold);
    const __m512i step = _mm512_set1_epi32((int)LANES);
    __m512i indices = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    size_t written = 0;
    size_t i = 0;
    __mmask16 there;
    /* While ties are still taken, one vector after the other with care. Then without. */
    for (; written < count && i < n; i += LANES) {
        if (ties == 0 && written + LANES <= count && n - i >= LANES) {
            for (; written + LANES <= count && n - i >= LANES; i += LANES) {
                const __mmask16 take = _mm512_cmpgt_epi32_mask(keys_avx512(x + i, LANES, raw, &there), thresholds);
                _mm512_storeu_si512(chosen + written, _mm512_maskz_compress_epi32(take, indices));
                written += (size_t)_mm_popcnt_u32(take);
                indices = _mm512_add_epi32(indices, step);
            }
            if (i >= n) {
                break;
            }
        }
        const __m512i scores = keys_avx512(x + i, n - i, raw, &there);
        unsigned take = _mm512_mask_cmpgt_epi32_mask(there, scores, thresholds);
        for (unsigned tied = _mm512_mask_cmpeq_epi32_mask(there, scores, thresholds); tied != 0 && ties > 0;
             tied &= tied - 1u) {
            take |= tied & (0u - tied);
            --ties;
        }
        size_t taken = (size_t)_mm_popcnt_u32(take);
        taken = taken < count - written ? taken : count - written;
        _mm512_mask_storeu_epi32(chosen + written, (__mmask16)((1u << taken) - 1u),
                                 _mm512_maskz_compress_epi32((__mmask16)take, indices));
        written += taken;
        indices = _mm512_add_epi32(indices, step);
    }
}

TARGET static void above_avx512(const float *x, size_t n, int32_t threshold, size_t ties, size_t count,
                                uint32_t *chosen)
{
    if (threshold > 0) {
        above_avx512_by(true, x, n, threshold, ties, count, chosen);
    } else {
        above_avx512_by(false, x, n, threshold, ties, count, chosen);
    }
}

TARGET static inline float dot_vectors_avx512(const float *a, const float *b, size_t n)
{
    __m512 lanes = _mm512_setzero_ps();
    for (size_t i = 0; i < n; i += DOT_LANES) {
        lanes = _mm512_add_ps(lanes, _mm512_mul_ps(_mm512_loadu_ps(a + i), _mm512_loadu_ps(b + i)));
    }
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(lanes), _mm512_extractf32x8_ps(lanes, 1));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
#define DOT_OF_VECTORS dot_vectors_avx512

#define NAME(function) function##_avx512
#define VECTOR __m512
#define WIDTH 16u
#define TILE_VECTORS 1u
#define TILE_ROWS 12u
#define LOAD(x) _mm512_loadu_ps(x)
#define STORE(x, vector) _mm512_storeu_ps(x, vector)
#define SPLAT(x) _mm512_set1_ps(x)
#define ADD(a, b) _mm512_add_ps(a, b)
#define MUL(a, b) _mm512_mul_ps(a, b)
#include "lanes_columns.h"

#define SET avx512
#define BETWEEN between_avx512
#define ABOVE above_avx512
#include "lanes_set.h"
#endif

const pb_kvcache_priv_lanes *pb_kvcache_priv_lanes_at(unsigned level)
{
    switch (level) {
    case 0: return &portable;
#ifdef CLONES
    case 1: return __builtin_cpu_supports("avx2") ? &avx2 : NULL;
    case 2:
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")
                       && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")
                   ? &avx512
                   : NULL;
#endif
    default: return NULL;
    }
}

const pb_kvcache_priv_lanes *pb_kvcache_priv_lanes_best(void)
{
    for (unsigned level = PB_KVCACHE_PRIV_LEVELS - 1; level > 0; --level) {
        const pb_kvcache_priv_lanes *lanes = pb_kvcache_priv_lanes_at(level);
        if (lanes != NULL) {
            return lanes;
        }
    }
    return &portable;
}
