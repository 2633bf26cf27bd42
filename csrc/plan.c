/*
 * The planner, in exact arithmetic from the weights to the budgets.
 *
 * Everything is counted in multiples of `multiple_of` ("blocks"). A finite double is an integer times a power of two,
 * so on a common power all weights are integers W, and with R blocks for layers whose weights sum to S the target of
 * one of them is the fraction R*W / S: its floor and remainder come from one division of integers, and remainders of
 * different layers compare as integers. Weights may be 2^2000 apart, so the integers are as wide as they have to be.
 * Doubles are only used where their error is bounded and too small to change the answer.
 */
#include <string.h>

#include "internal.h"

/* ---- Integers of any size that can occur ---- */

/*
 * Doubles span 2^-1074 .. 2^1024: 2098 bits. A sum over 2^32 layers takes 32 more, a product with a count of blocks 64:
 * 2194 bits are 69 limbs.
 */
enum { LIMBS = 70 };

/* limb[0] is the lowest; limb[n-1] is not 0, and zero has n = 0. */
typedef struct big {
    uint32_t n;
    uint32_t limb[LIMBS];
} big;

static inline void trim(big *x)
{
    while (x->n > 0 && x->limb[x->n - 1] == 0) {
        --x->n;
    }
}

static inline void copy(big *out, const big *x)
{
    out->n = x->n;
    for (uint32_t i = 0; i < x->n; ++i) {
        out->limb[i] = x->limb[i];
    }
}

/* out = value * 2^shift */
static inline void set(big *out, uint64_t value, uint32_t shift)
{
    if (shift == 0) {
        out->limb[0] = (uint32_t)value;
        out->limb[1] = (uint32_t)(value >> 32);
        out->n = 2;
    } else {
        const uint32_t whole = shift / 32;
        const uint32_t bits = shift % 32;
        const uint64_t low = (value & UINT32_MAX) << bits;
        const uint64_t high = ((value >> 32) << bits) + (low >> 32);
        for (uint32_t i = 0; i < whole; ++i) {
            out->limb[i] = 0;
        }
        out->limb[whole] = (uint32_t)low;
        out->limb[whole + 1] = (uint32_t)high;
        out->limb[whole + 2] = (uint32_t)(high >> 32);
        out->n = whole + 3;
    }
    trim(out);
}

/* x of at most two limbs */
static inline uint64_t get(const big *x)
{
    return x->n == 0 ? 0 : x->n == 1 ? x->limb[0] : ((uint64_t)x->limb[1] << 32) | x->limb[0];
}

static inline int compare(const big *x, const big *y)
{
    if (x->n != y->n) {
        return x->n < y->n ? -1 : 1;
    }
    for (uint32_t i = x->n; i-- > 0;) {
        if (x->limb[i] != y->limb[i]) {
            return x->limb[i] < y->limb[i] ? -1 : 1;
        }
    }
    return 0;
}

/* x += y */
static inline void add(big *x, const big *y)
{
    uint64_t carry = 0;
    for (; x->n < y->n; ++x->n) {
        x->limb[x->n] = 0;
    }
    for (uint32_t i = 0; i < x->n; ++i) {
        carry += (uint64_t)x->limb[i] + (i < y->n ? y->limb[i] : 0u);
        x->limb[i] = (uint32_t)carry;
        carry >>= 32;
    }
    if (carry != 0) {
        x->limb[x->n++] = (uint32_t)carry;
    }
}

/* x -= y, for y <= x */
static inline void subtract(big *x, const big *y)
{
    uint64_t borrow = 0;
    for (uint32_t i = 0; i < x->n; ++i) {
        const uint64_t difference = (uint64_t)x->limb[i] - (i < y->n ? y->limb[i] : 0u) - borrow;
        x->limb[i] = (uint32_t)difference;
        borrow = difference >> 63;
    }
    trim(x);
}

/* out = x * factor */
static inline void multiply(big *out, const big *x, uint64_t factor)
{
    const uint64_t low = factor & UINT32_MAX;
    const uint64_t high = factor >> 32;
    uint64_t carry = 0;
    for (uint32_t i = 0; i < x->n; ++i) {
        carry += x->limb[i] * low;
        out->limb[i] = (uint32_t)carry;
        carry >>= 32;
    }
    out->limb[x->n] = (uint32_t)carry;
    out->n = x->n + 1;
    if (high != 0) {
        carry = 0;
        for (uint32_t i = 0; i < x->n; ++i) {
            carry += x->limb[i] * high + out->limb[i + 1];
            out->limb[i + 1] = (uint32_t)carry;
            carry >>= 32;
        }
        out->limb[x->n + 1] = (uint32_t)carry;
        out->n = x->n + 2;
    }
    trim(out);
}

/* What many numbers are divided by. */
typedef struct divisor {
    big value;
    uint32_t from;  /* limbs below this one are left out of estimates */
    double inverse; /* of the limbs from there on */
} divisor;

static inline double estimate(const big *x, uint32_t from)
{
    double sum = 0.0;
    for (uint32_t i = x->n; i-- > from;) {
        sum = sum * 4294967296.0 + x->limb[i];
    }
    return sum;
}

static void prepare(divisor *d)
{
    d->from = d->value.n > 3 ? d->value.n - 3 : 0;
    d->inverse = 1.0 / estimate(&d->value, d->from);
}

/* No bound reaches quotients of this size. */
#define FAR ((uint64_t)1 << 33)

/*
 * Return floor(x / d) and leave the remainder in x, for x < 2^64 * d. A quotient above FAR is answered as FAR, and x is
 * then of no use.
 */
static inline uint64_t divide(big *x, const divisor *d)
{
    if (x->n <= 2 && d->value.n <= 2) {
        const uint64_t numerator = get(x);
        const uint64_t denominator = get(&d->value);
        const uint64_t quotient = numerator / denominator;
        set(x, numerator - quotient * denominator, 0);
        return quotient < FAR ? quotient : FAR;
    }
    /*
     * Both estimates are within 2^-50 of their numbers, so below FAR the quotient is wrong by less than 2^-15 and its
     * floor by at most 1. Comparing with the exact product puts that right, so the estimate decides nothing.
     */
    const double guess = estimate(x, d->from) * d->inverse;
    if (guess >= (double)FAR) {
        return FAR;
    }
    uint64_t quotient = (uint64_t)guess;
    if (quotient != 0) {
        big product;
        multiply(&product, &d->value, quotient);
        while (compare(&product, x) > 0) {
            subtract(&product, &d->value);
            --quotient;
        }
        subtract(x, &product);
    }
    while (compare(x, &d->value) >= 0) {
        subtract(x, &d->value);
        ++quotient;
    }
    return quotient;
}

/* ---- Numbers of 128 significant bits, for geometric weights ---- */

/* (high + low / 2^64) / 2^63 * 2^exponent; the highest bit of `high` is set. */
typedef struct real {
    uint64_t high;
    uint64_t low;
    int32_t exponent;
} real;

/* The 128 bits of x * y. With the compiler's 128-bit integers 128 geometric layers take 4.0 us, without them 5.6 us. */
static inline uint64_t product_128(uint64_t x, uint64_t y, uint64_t *high)
{
#ifdef __SIZEOF_INT128__
    __extension__ typedef unsigned __int128 uint128;
    const uint128 product = (uint128)x * y;
    *high = (uint64_t)(product >> 64);
    return (uint64_t)product;
#else
    const uint64_t x0 = x & UINT32_MAX;
    const uint64_t x1 = x >> 32;
    const uint64_t y0 = y & UINT32_MAX;
    const uint64_t y1 = y >> 32;
    const uint64_t low = x0 * y0;
    const uint64_t middle = x1 * y0 + (low >> 32);
    const uint64_t other = x0 * y1 + (middle & UINT32_MAX);
    *high = x1 * y1 + (middle >> 32) + (other >> 32);
    return (other << 32) | (low & UINT32_MAX);
#endif
}

/* The upper 192 of the 256 bits of x * y: top[0] is the highest. */
static inline void product_192(uint64_t x_high, uint64_t x_low, uint64_t y_high, uint64_t y_low, uint64_t *top)
{
    uint64_t a;
    uint64_t b;
    uint64_t c;
    uint64_t d;
    (void)product_128(x_low, y_low, &a);
    const uint64_t one = product_128(x_high, y_low, &b);
    const uint64_t other = product_128(x_low, y_high, &c);
    const uint64_t upper = product_128(x_high, y_high, &d);
    top[2] = a + one;
    uint64_t carry = top[2] < one;
    top[2] += other;
    carry += top[2] < other;
    top[1] = upper + carry;
    top[0] = d + (top[1] < carry);
    top[1] += b;
    top[0] += top[1] < b;
    top[1] += c;
    top[0] += top[1] < c;
}

/* x *= y, cut to 128 bits: at most 2^-127 too small, relatively. */
static inline void real_multiply(real *x, const real *y)
{
    uint64_t top[3];
    product_192(x->high, x->low, y->high, y->low, top);
    x->exponent += y->exponent;
    if (top[0] >> 63) {
        ++x->exponent;
        x->high = top[0];
        x->low = top[1];
    } else {
        x->high = (top[0] << 1) | (top[1] >> 63);
        x->low = (top[1] << 1) | (top[2] >> 63);
    }
}

/* A finite double > 0 as mantissa * 2^exponent, the mantissa odd. */
static inline void split(double value, uint64_t *mantissa, int32_t *exponent)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    const int32_t field = (int32_t)(bits >> 52); /* the sign bit is 0 */
    uint64_t m = bits & (((uint64_t)1 << 52) - 1);
    int32_t e = field == 0 ? -1074 : field - 1075;
    if (field != 0) {
        m |= (uint64_t)1 << 52;
    }
    for (int step = 32; step > 0; step /= 2) {
        if ((m & (((uint64_t)1 << step) - 1)) == 0) {
            m >>= step;
            e += step;
        }
    }
    *mantissa = m;
    *exponent = e;
}

static void real_set(real *out, double value)
{
    uint64_t m;
    int32_t e;
    split(value, &m, &e);
    e += 63;
    while (!(m >> 63)) {
        m <<= 1;
        --e;
    }
    out->high = m;
    out->low = 0;
    out->exponent = e;
}

/* (carry + high / 2^64 + low / 2^128) / n in place, without its whole part; carry < n. */
static void fraction_divide(uint64_t carry, uint64_t *high, uint64_t *low, uint32_t n)
{
    uint64_t *const words[2] = {high, low};
    for (int i = 0; i < 2; ++i) {
        const uint64_t upper = (carry << 32) | (*words[i] >> 32);
        const uint64_t lower = ((upper % n) << 32) | (*words[i] & UINT32_MAX);
        *words[i] = ((upper / n) << 32) | (lower / n);
        carry = lower % n;
    }
}

/* ln 2, its first 128 fractional bits */
#define LN2_HIGH 0xb17217f7d1cf79abu
#define LN2_LOW 0xc9e3b39803f2f6afu

/*
 * out = value^(-1/n), to about 2^-120: the binary logarithm by repeated squaring, divided by -n, and the exponential by
 * its series.
 */
static void real_root(real *out, double value, uint32_t n)
{
    real power;
    uint64_t fraction[2] = {0, 0}; /* the higher bits first */
    real_set(&power, value);
    int64_t whole = power.exponent;
    power.exponent = 0;
    for (int bit = 0; bit < 128; ++bit) {
        const real same = power;
        real_multiply(&power, &same);
        if (power.exponent != 0) { /* the square is 2 or more */
            power.exponent = 0;
            fraction[bit / 64] |= (uint64_t)1 << (63 - bit % 64);
        }
    }
    /* log2(value) = whole + fraction; change the sign */
    fraction[1] = ~fraction[1] + 1;
    fraction[0] = ~fraction[0] + (fraction[1] == 0);
    whole = -whole - ((fraction[0] | fraction[1]) != 0);
    /* divide by n, rounding down */
    int64_t quotient = whole / n;
    int64_t rest = whole % n;
    if (rest < 0) {
        --quotient;
        rest += n;
    }
    fraction_divide((uint64_t)rest, &fraction[0], &fraction[1], n);
    /* 2^fraction = 1 + x + x^2/2! + ..., x = fraction * ln 2 */
    uint64_t x[3];
    uint64_t term[3];
    product_192(fraction[0], fraction[1], LN2_HIGH, LN2_LOW, x);
    uint64_t high = x[0];
    uint64_t low = x[1];
    term[0] = x[0];
    term[1] = x[1];
    for (uint32_t k = 2; (term[0] | term[1]) != 0; ++k) {
        product_192(term[0], term[1], x[0], x[1], term);
        fraction_divide(0, &term[0], &term[1], k);
        low += term[1];
        high += term[0] + (low < term[1]);
    }
    out->high = ((uint64_t)1 << 63) | (high >> 1);
    out->low = (high << 63) | (low >> 1);
    out->exponent = (int32_t)quotient;
}

/* ---- The weights, as integers, from layer 0 on ---- */

typedef struct weights {
    const pb_kvcache_plan_params *params;
    pb_kvcache_plan_shape shape; /* UNIFORM also for a pyramid of one layer */
    int32_t grid;                /* WEIGHTS and GEOMETRIC: integers times 2^grid */
    bool falling;                /* PYRAMID: each weight is the one before, less or plus `step` */
    big first;
    big step;
    real factor;  /* GEOMETRIC: each over the one before */
    real running; /* GEOMETRIC: the current one, before rounding */
    big value;    /* the current one */
} weights;

static void weights_start(weights *w, const pb_kvcache_plan_params *params, size_t num_layers)
{
    w->params = params;
    w->shape = params->shape;
    w->grid = 0;
    w->falling = false;
    if (num_layers == 1 && w->shape != PB_KVCACHE_PLAN_WEIGHTS) {
        w->shape = PB_KVCACHE_PLAN_UNIFORM;
    }
    const uint32_t steps = (uint32_t)(num_layers - 1);
    if (w->shape == PB_KVCACHE_PLAN_PYRAMID) {
        /* ratio = m * 2^e: w[l] = ratio*(L-1-l) + l, times 2^-e where e < 0, falls by ratio - 1 a layer. */
        uint64_t m;
        int32_t e;
        big one;
        split(params->ratio, &m, &e);
        set(&w->step, m, e > 0 ? (uint32_t)e : 0);
        set(&one, 1, e < 0 ? (uint32_t)-e : 0);
        multiply(&w->first, &w->step, steps);
        w->falling = compare(&w->step, &one) >= 0;
        if (w->falling) {
            subtract(&w->step, &one);
        } else {
            subtract(&one, &w->step);
            copy(&w->step, &one);
        }
    } else if (w->shape == PB_KVCACHE_PLAN_GEOMETRIC) {
        real_set(&w->running, params->ratio);
        real_root(&w->factor, params->ratio, steps);
        /* 53 bits of the smallest weight, and one more: the last one, 1, may come out just below. */
        w->grid = (w->running.exponent < 0 ? w->running.exponent : 0) - 53;
    } else if (w->shape == PB_KVCACHE_PLAN_WEIGHTS) {
        w->grid = INT32_MAX;
        for (size_t layer = 0; layer < num_layers; ++layer) {
            uint64_t m;
            int32_t e;
            split(params->weights[layer], &m, &e);
            w->grid = e < w->grid ? e : w->grid;
        }
    }
}

/* Make w->value the weight of `layer`; to be called for layers 0, 1, 2, ... in turn, and then from 0 again. */
static inline void weights_next(weights *w, size_t layer)
{
    switch (w->shape) {
    case PB_KVCACHE_PLAN_UNIFORM: set(&w->value, 1, 0); break;
    case PB_KVCACHE_PLAN_PYRAMID:
        if (layer == 0) {
            copy(&w->value, &w->first);
        } else if (w->falling) {
            subtract(&w->value, &w->step);
        } else {
            add(&w->value, &w->step);
        }
        break;
    case PB_KVCACHE_PLAN_GEOMETRIC: {
        if (layer == 0) {
            real_set(&w->running, w->params->ratio);
        } else {
            real_multiply(&w->running, &w->factor);
        }
        const uint64_t rounded = (w->running.high >> 11) + ((w->running.high >> 10) & 1u); /* 53 bits, or 2^53 */
        set(&w->value, rounded, (uint32_t)(w->running.exponent - 52 - w->grid));
        break;
    }
    case PB_KVCACHE_PLAN_WEIGHTS: {
        uint64_t m;
        int32_t e;
        split(w->params->weights[layer], &m, &e);
        set(&w->value, m, (uint32_t)(e - w->grid));
        break;
    }
    }
}

/* ---- The plan ---- */

/* A layer's bounds in blocks: the minimum rounded up, the maximum rounded down. */
static inline void bounds(const pb_kvcache_plan_params *p, size_t layer, uint32_t *low, uint32_t *high)
{
    const uint32_t minimum = p->minimums != NULL ? p->minimums[layer] : p->minimum;
    const uint32_t maximum = p->maximums != NULL ? p->maximums[layer] : p->maximum;
    if (p->multiple_of == 1) {
        *low = minimum;
        *high = maximum;
    } else {
        *low = minimum / p->multiple_of + (minimum % p->multiple_of != 0);
        *high = maximum / p->multiple_of;
    }
}

static pb_kvcache_status check(const pb_kvcache_plan_params *p, const uint32_t *budgets, size_t num_layers,
                               uint64_t *sum_high)
{
    if (p == NULL || budgets == NULL) {
        return PB_KVCACHE_ERROR_NULL;
    }
    if (num_layers == 0) {
        return PB_KVCACHE_ERROR_NUM_LAYERS;
    }
#if SIZE_MAX > UINT32_MAX
    if (num_layers > UINT32_MAX) {
        return PB_KVCACHE_ERROR_TOO_LARGE;
    }
#endif
    if (p->shape != PB_KVCACHE_PLAN_UNIFORM && p->shape != PB_KVCACHE_PLAN_PYRAMID
        && p->shape != PB_KVCACHE_PLAN_GEOMETRIC && p->shape != PB_KVCACHE_PLAN_WEIGHTS) {
        return PB_KVCACHE_ERROR_PLAN_SHAPE;
    }
    if (p->multiple_of == 0) {
        return PB_KVCACHE_ERROR_PLAN_MULTIPLE;
    }
    if (p->total % p->multiple_of != 0) {
        return PB_KVCACHE_ERROR_PLAN_TOTAL;
    }
    if (p->maximums == NULL && p->maximum == UINT32_MAX && p->total > (uint64_t)num_layers * UINT32_MAX) {
        return PB_KVCACHE_ERROR_PLAN_OVERFLOW;
    }
    if ((p->shape == PB_KVCACHE_PLAN_PYRAMID || p->shape == PB_KVCACHE_PLAN_GEOMETRIC)
        && !(p->ratio > 0.0 && p->ratio <= DBL_MAX)) {
        return PB_KVCACHE_ERROR_PLAN_RATIO;
    }
    if ((p->weights != NULL) != (p->shape == PB_KVCACHE_PLAN_WEIGHTS)) {
        return PB_KVCACHE_ERROR_PLAN_WEIGHTS;
    }
    for (size_t layer = 0; p->weights != NULL && layer < num_layers; ++layer) {
        if (!(p->weights[layer] > 0.0 && p->weights[layer] <= DBL_MAX)) {
            return PB_KVCACHE_ERROR_PLAN_WEIGHT;
        }
    }
    uint64_t sum_low = 0;
    bool empty = false;
    *sum_high = 0;
    for (size_t layer = 0; layer < num_layers; ++layer) {
        uint32_t low;
        uint32_t high;
        if ((p->minimums != NULL ? p->minimums[layer] : p->minimum)
            > (p->maximums != NULL ? p->maximums[layer] : p->maximum)) {
            return PB_KVCACHE_ERROR_PLAN_BOUNDS;
        }
        bounds(p, layer, &low, &high);
        empty = empty || low > high;
        sum_low += low;
        *sum_high += high;
    }
    if (empty) {
        return PB_KVCACHE_ERROR_PLAN_BLOCK;
    }
    return p->total / p->multiple_of < sum_low ? PB_KVCACHE_ERROR_PLAN_MINIMUM : PB_KVCACHE_OK;
}

/*
 * What `budgets` holds for a layer while the plan is made. Below MARK: the layer's target lies between its bounds, and
 * this is the current digit of its fraction, in base MARK = 2^20: two layers rarely share one, and quotient and digit
 * together fit a double.
 */
#define DIGIT_BITS 20
#define MARK ((uint32_t)1 << DIGIT_BITS)
#define AT_MINIMUM (MARK + 0u)    /* decided: the target is the minimum */
#define AT_MAXIMUM (MARK + 1u)    /* decided: the target is the maximum */
#define BELOW_MINIMUM (MARK + 2u) /* in this round */
#define ABOVE_MAXIMUM (MARK + 3u) /* in this round */
#define ROUND_DOWN (MARK + 4u)    /* decided: the target is rounded down */
#define ROUND_UP (MARK + 5u)      /* decided: the target is rounded up */

/* The next digit of the fraction rest / d; what is left of it stays in `rest`. */
static inline uint32_t next_digit(big *rest, const divisor *d)
{
    if (rest->n == 0) {
        return 0;
    }
    big shifted;
    multiply(&shifted, rest, MARK);
    const uint32_t digit = (uint32_t)divide(&shifted, d);
    copy(rest, &shifted);
    return digit;
}

/* R blocks over weights that sum to S. */
typedef struct level {
    uint64_t available; /* R */
    divisor sum;        /* S */
    double ratio;       /* R / S, in the units of `estimate`; 0 where doubles are not enough */
} level;

static void level_prepare(level *at)
{
    prepare(&at->sum);
    at->ratio = at->available < (uint64_t)1 << 30 ? (double)at->available * at->sum.inverse : 0.0;
}

/* The exact target R*w/S of a weight: the floor, and the remainder in *rest. */
static uint64_t target(const level *at, const big *weight, big *rest)
{
    multiply(rest, weight, at->available);
    return divide(rest, &at->sum);
}

/*
 * The target's floor and the first digit of its fraction; true where they are the whole target.
 *
 * Doubles give both in most cases, and know when they do. On the way to `scaled` fewer than ten operations round, which
 * makes 2^-49 together, and `estimate` leaves out limbs worth R * 2^-64. With scaled < 2^38 and R < 2^30 it is wrong by
 * less than 2^-10. Further than that from a whole number its floor is right; else the integers decide. So 128 layers of
 * measured weights take 3.1 us instead of 6.4.
 */
static inline bool first_digit(const level *at, const big *weight, uint64_t *quotient, uint32_t *digit)
{
    const double scaled = estimate(weight, at->sum.from) * at->ratio * (double)MARK;
    if (scaled < 274877906944.0) {
        const uint64_t whole = (uint64_t)scaled;
        const double fraction = scaled - (double)whole;
        if (fraction > 0x1p-10 && fraction < 1.0 - 0x1p-10) {
            *quotient = whole >> DIGIT_BITS;
            *digit = (uint32_t)whole & (MARK - 1);
            return false;
        }
    }
    big rest;
    *quotient = target(at, weight, &rest);
    const bool whole = rest.n == 0;
    *digit = *quotient < FAR ? next_digit(&rest, &at->sum) : 0;
    return whole;
}

/*
 * The greatest digit that at least `count` of the undecided layers reach, 0 < count; *reached says how many do. Not the
 * greatest but one that exactly `count` reach, where there is such a digit.
 */
static uint32_t threshold(const uint32_t *digits, size_t num_layers, size_t count, size_t *reached)
{
    uint32_t digit = 0;
    *reached = SIZE_MAX;
    for (uint32_t bit = MARK >> 1; bit != 0 && *reached != count; bit >>= 1) {
        const uint32_t candidate = digit | bit;
        uint32_t reach = 0; /* num_layers fits 32 bits */
        for (size_t layer = 0; layer < num_layers; ++layer) {
            reach += (digits[layer] >= candidate) & (digits[layer] < MARK);
        }
        if (reach >= count) {
            digit = candidate;
            *reached = reach;
        }
    }
    return digit;
}

/*
 * The undecided layers have `digits` digits in common, and `count` of them, not all, are to be rounded up. Where their
 * fractions are equal the lower ones are; else give each its next digit. Returns how many are still to be rounded up.
 */
static size_t decide_ties(weights *w, const level *at, size_t digits, uint32_t *budgets, size_t num_layers,
                          size_t count)
{
    big first;
    big rest;
    bool any = false;
    bool equal = true;
    first.n = 0;
    for (size_t layer = 0; layer < num_layers && equal; ++layer) {
        weights_next(w, layer);
        if (budgets[layer] < MARK) {
            (void)target(at, &w->value, &rest);
            equal = !any || compare(&first, &rest) == 0;
            copy(&first, &rest);
            any = true;
        }
    }
    for (size_t layer = 0; layer < num_layers; ++layer) {
        if (equal) {
            if (budgets[layer] < MARK && count > 0) {
                budgets[layer] = ROUND_UP;
                --count;
            }
            continue;
        }
        weights_next(w, layer);
        if (budgets[layer] < MARK) {
            (void)target(at, &w->value, &rest);
            for (size_t i = 0; i < digits; ++i) {
                (void)next_digit(&rest, &at->sum);
            }
            budgets[layer] = next_digit(&rest, &at->sum);
        }
    }
    return count;
}

pb_kvcache_status pb_kvcache_plan(const pb_kvcache_plan_params *params, uint32_t *budgets, size_t num_layers)
{
    uint64_t sum_high;
    const pb_kvcache_status status = check(params, budgets, num_layers, &sum_high);
    if (status != PB_KVCACHE_OK) {
        return status;
    }
    const uint64_t total = params->total / params->multiple_of;
    uint32_t low;
    uint32_t high;
    if (total >= sum_high) {
        for (size_t layer = 0; layer < num_layers; ++layer) {
            bounds(params, layer, &low, &high);
            budgets[layer] = high * params->multiple_of;
        }
        return PB_KVCACHE_OK;
    }

    weights w;
    level at; /* of the layers that are not at a bound */
    weights_start(&w, params, num_layers);
    at.available = total;
    at.sum.value.n = 0;
    for (size_t layer = 0; layer < num_layers; ++layer) {
        weights_next(&w, layer);
        add(&at.sum.value, &w.value);
        budgets[layer] = 0;
    }
    level_prepare(&at);

    /*
     * Water-filling. With lambda = R/S for the layers not yet at a bound, let D be what those below their minimum lack
     * and E what those above their maximum have too much. Where D > E the right lambda is smaller, so those below are
     * at their minimum for good; where D < E those above are at their maximum; where D = E lambda is right.
     *
     * Rounds: when layers of weight W go to their minimum, lambda falls by D/(S-W). The next ones to go are within that
     * fall of it (lambda may have risen in between), so with weight V they lack at most D*V/(S-W): the product of what
     * is lacking and the weight that stays, first D*(S-W), is then at most D*(S-W-V)*V/(S-W), a quarter or less. It
     * starts below 2^64 * S, and is never below 1/S, so there are at most 33 + log2 S such rounds, and as many at the
     * other side. In practice there are two to five in all.
     */
    uint64_t floors;
    for (;;) {
        uint64_t minimums = 0;
        uint64_t maximums = 0;
        big below;
        big above;
        bool settled = true;
        below.n = 0;
        above.n = 0;
        floors = 0;
        for (size_t layer = 0; layer < num_layers; ++layer) {
            weights_next(&w, layer);
            bounds(params, layer, &low, &high);
            if (budgets[layer] == AT_MINIMUM || budgets[layer] == AT_MAXIMUM) {
                floors += budgets[layer] == AT_MINIMUM ? low : high;
                continue;
            }
            uint64_t quotient;
            uint32_t digit;
            const bool whole = first_digit(&at, &w.value, &quotient, &digit);
            if (quotient < low) {
                budgets[layer] = BELOW_MINIMUM;
                minimums += low;
                add(&below, &w.value);
                settled = false;
            } else if (quotient > high || (quotient == high && !whole)) {
                budgets[layer] = ABOVE_MAXIMUM;
                maximums += high;
                add(&above, &w.value);
                settled = false;
            } else {
                floors += quotient;
                budgets[layer] = digit;
            }
        }
        if (settled) {
            break;
        }
        /* D - E = minimums + maximums - lambda * (below + above) */
        big have;
        big held;
        copy(&have, &below);
        add(&have, &above);
        multiply(&held, &have, at.available);
        multiply(&have, &at.sum.value, minimums + maximums);
        const int sign = compare(&have, &held);
        for (size_t layer = 0; layer < num_layers; ++layer) {
            if (budgets[layer] == BELOW_MINIMUM) {
                budgets[layer] = sign >= 0 ? AT_MINIMUM : 0;
            } else if (budgets[layer] == ABOVE_MAXIMUM) {
                budgets[layer] = sign <= 0 ? AT_MAXIMUM : 0;
            }
        }
        if (sign > 0) {
            at.available -= minimums;
            subtract(&at.sum.value, &below);
            level_prepare(&at);
        } else if (sign < 0) {
            at.available -= maximums;
            subtract(&at.sum.value, &above);
            level_prepare(&at);
        } /* else: the same lambda once more, now without layers beyond a bound */
    }

    /*
     * Largest remainders. `count` layers are rounded up, fewer than have a remainder. Compare one digit of the
     * fractions at a time; only where several layers share the digit that decides are their next ones worked out.
     */
    size_t count = (size_t)(total - floors);
    for (size_t digits = 1; count > 0; ++digits) {
        size_t reached;
        const uint32_t digit = threshold(budgets, num_layers, count, &reached);
        const bool exact = reached == count;
        for (size_t layer = 0; layer < num_layers; ++layer) {
            if (budgets[layer] < MARK && (budgets[layer] > digit || (exact && budgets[layer] == digit))) {
                budgets[layer] = ROUND_UP;
                --count;
            } else if (budgets[layer] < digit) {
                budgets[layer] = ROUND_DOWN;
            }
        }
        if (count > 0) {
            count = decide_ties(&w, &at, digits, budgets, num_layers, count);
        }
    }

    for (size_t layer = 0; layer < num_layers; ++layer) {
        weights_next(&w, layer);
        bounds(params, layer, &low, &high);
        uint32_t blocks;
        if (budgets[layer] == AT_MINIMUM) {
            blocks = low;
        } else if (budgets[layer] == AT_MAXIMUM) {
            blocks = high;
        } else {
            uint64_t quotient;
            uint32_t digit;
            (void)first_digit(&at, &w.value, &quotient, &digit);
            blocks = (uint32_t)quotient + (budgets[layer] == ROUND_UP);
        }
        budgets[layer] = blocks * params->multiple_of;
    }
    return PB_KVCACHE_OK;
}
