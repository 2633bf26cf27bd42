/*
 * The planner, in exact arithmetic from the weights to the budgets.
 *
 * Everything is counted in multiples of `multiple_of` ("blocks"). A finite double is an integer times a power of two,
 * so on a common power all weights are integers W, and with R blocks for layers whose weights sum to S the target of
 * one of them is the fraction R*W / S: its floor and remainder come from one division of integers, and remainders of
 * different layers compare as integers. Weights may be 2^2000 apart, so the integers are as wide as they have to be;
 * for a pyramid of whole ratio over 128 layers they fit 64 bits and cost one division each.
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

/* mantissa / 2^127 * 2^exponent; the mantissa's highest bit is set. mantissa[0] is the lowest limb. */
typedef struct real {
    uint32_t mantissa[4];
    int32_t exponent;
} real;

/* The 256 bits of x * y. */
static inline void product_256(const uint32_t *x, const uint32_t *y, uint32_t *out)
{
    memset(out, 0, 8 * sizeof *out);
    for (int i = 0; i < 4; ++i) {
        uint64_t carry = 0;
        for (int j = 0; j < 4; ++j) {
            carry += (uint64_t)x[i] * y[j] + out[i + j];
            out[i + j] = (uint32_t)carry;
            carry >>= 32;
        }
        out[i + 4] = (uint32_t)carry;
    }
}

/* x *= y, cut to 128 bits: at most 2^-127 too small, relatively. */
static inline void real_multiply(real *x, const real *y)
{
    uint32_t product[8];
    product_256(x->mantissa, y->mantissa, product);
    x->exponent += y->exponent;
    if (product[7] >> 31) {
        ++x->exponent;
        memcpy(x->mantissa, product + 4, sizeof x->mantissa);
    } else {
        for (int i = 0; i < 4; ++i) {
            x->mantissa[i] = (product[i + 4] << 1) | (product[i + 3] >> 31);
        }
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
    out->mantissa[0] = 0;
    out->mantissa[1] = 0;
    out->mantissa[2] = (uint32_t)m;
    out->mantissa[3] = (uint32_t)(m >> 32);
    out->exponent = e;
}

/* ln 2, its first 128 fractional bits */
static const uint32_t LN2[4] = {0x03f2f6afu, 0xc9e3b398u, 0xd1cf79abu, 0xb17217f7u};

/*
 * out = value^(-1/n), to about 2^-120: the binary logarithm by repeated squaring, divided by -n, and the exponential by
 * its series.
 */
static void real_root(real *out, double value, uint32_t n)
{
    real power;
    real_set(&power, value);
    int64_t whole = power.exponent;
    uint32_t fraction[4] = {0, 0, 0, 0};
    power.exponent = 0;
    for (int bit = 127; bit >= 0; --bit) {
        const real same = power;
        real_multiply(&power, &same);
        if (power.exponent != 0) { /* the square is 2 or more */
            power.exponent = 0;
            fraction[bit / 32] |= (uint32_t)1 << (bit % 32);
        }
    }
    /* log2(value) = whole + fraction; change the sign */
    uint64_t carry = 1;
    for (int i = 0; i < 4; ++i) {
        carry += (uint32_t)~fraction[i];
        fraction[i] = (uint32_t)carry;
        carry >>= 32;
    }
    whole = -whole - 1 + (int64_t)carry;
    /* divide by n, rounding down */
    int64_t quotient = whole / n;
    int64_t rest = whole % n;
    if (rest < 0) {
        --quotient;
        rest += n;
    }
    uint64_t remainder = (uint64_t)rest;
    for (int i = 3; i >= 0; --i) {
        remainder = (remainder << 32) | fraction[i];
        fraction[i] = (uint32_t)(remainder / n);
        remainder %= n;
    }
    /* 2^fraction = 1 + x + x^2/2! + ..., x = fraction * ln 2 */
    uint32_t product[8];
    uint32_t term[4];
    uint32_t sum[4];
    uint32_t x[4];
    product_256(fraction, LN2, product);
    memcpy(x, product + 4, sizeof x);
    memcpy(term, x, sizeof term);
    memcpy(sum, x, sizeof sum);
    for (uint32_t k = 2; (term[0] | term[1] | term[2] | term[3]) != 0; ++k) {
        product_256(term, x, product);
        remainder = 0;
        for (int i = 3; i >= 0; --i) {
            remainder = (remainder << 32) | product[i + 4];
            term[i] = (uint32_t)(remainder / k);
            remainder %= k;
        }
        carry = 0;
        for (int i = 0; i < 4; ++i) {
            carry += (uint64_t)sum[i] + term[i];
            sum[i] = (uint32_t)carry;
            carry >>= 32;
        }
    }
    for (int i = 0; i < 4; ++i) {
        out->mantissa[i] = (sum[i] >> 1) | ((i < 3 ? sum[i + 1] : 1u) << 31);
    }
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
        const uint64_t top = ((uint64_t)w->running.mantissa[3] << 32) | w->running.mantissa[2];
        const uint64_t rounded = (top >> 11) + ((top >> 10) & 1u); /* 53 bits, or 2^53 */
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
 * this is the current digit of its fraction, in base 2^31.
 */
#define DIGIT_BITS 31
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
    divisor sum; /* S: of the weights of the layers that are not at a bound */
    weights_start(&w, params, num_layers);
    sum.value.n = 0;
    for (size_t layer = 0; layer < num_layers; ++layer) {
        weights_next(&w, layer);
        add(&sum.value, &w.value);
        budgets[layer] = 0;
    }
    prepare(&sum);

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
    uint64_t available = total; /* R */
    uint64_t floors;
    for (;;) {
        uint64_t minimums = 0;
        uint64_t maximums = 0;
        big below;
        big above;
        big rest;
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
            multiply(&rest, &w.value, available);
            const uint64_t quotient = divide(&rest, &sum);
            if (quotient < low) {
                budgets[layer] = BELOW_MINIMUM;
                minimums += low;
                add(&below, &w.value);
                settled = false;
            } else if (quotient > high || (quotient == high && rest.n != 0)) {
                budgets[layer] = ABOVE_MAXIMUM;
                maximums += high;
                add(&above, &w.value);
                settled = false;
            } else if (settled) {
                floors += quotient;
                budgets[layer] = next_digit(&rest, &sum);
            } else {
                budgets[layer] = 0;
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
        multiply(&held, &have, available);
        multiply(&have, &sum.value, minimums + maximums);
        const int sign = compare(&have, &held);
        for (size_t layer = 0; layer < num_layers; ++layer) {
            if (budgets[layer] == BELOW_MINIMUM) {
                budgets[layer] = sign >= 0 ? AT_MINIMUM : 0;
            } else if (budgets[layer] == ABOVE_MAXIMUM) {
                budgets[layer] = sign <= 0 ? AT_MAXIMUM : 0;
            }
        }
        if (sign > 0) {
            available -= minimums;
            subtract(&sum.value, &below);
            prepare(&sum);
        } else if (sign < 0) {
            available -= maximums;
            subtract(&sum.value, &above);
            prepare(&sum);
        } /* else: the same lambda once more, now without layers beyond a bound */
    }

    /*
     * Largest remainders. `count` layers are rounded up, fewer than have a remainder. Compare one digit of the
     * fractions at a time; only where several layers share the digit that decides are their next ones worked out.
     */
    size_t count = (size_t)(total - floors);
    size_t digits = 1;
    while (count > 0) {
        size_t reached;
        const uint32_t digit = threshold(budgets, num_layers, count, &reached);
        const bool exact = reached == count;
        size_t tied = 0;
        big first;
        big rest;
        bool equal = true;
        first.n = 0;
        for (size_t layer = 0; layer < num_layers; ++layer) {
            if (!exact) {
                weights_next(&w, layer);
            }
            if (budgets[layer] >= MARK) {
                continue;
            }
            if (budgets[layer] > digit || (exact && budgets[layer] == digit)) {
                budgets[layer] = ROUND_UP;
                --count;
            } else if (budgets[layer] < digit) {
                budgets[layer] = ROUND_DOWN;
            } else {
                multiply(&rest, &w.value, available);
                (void)divide(&rest, &sum);
                for (size_t i = 0; i < digits; ++i) {
                    (void)next_digit(&rest, &sum);
                }
                if (tied++ == 0) {
                    copy(&first, &rest);
                } else {
                    equal = equal && compare(&first, &rest) == 0;
                }
                budgets[layer] = next_digit(&rest, &sum);
            }
        }
        ++digits;
        if (equal) { /* what is left of the fractions is the same: the lower layers first */
            for (size_t layer = 0; layer < num_layers && count > 0; ++layer) {
                if (budgets[layer] < MARK) {
                    budgets[layer] = ROUND_UP;
                    --count;
                }
            }
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
            big rest;
            multiply(&rest, &w.value, available);
            blocks = (uint32_t)divide(&rest, &sum) + (budgets[layer] == ROUND_UP);
        }
        budgets[layer] = blocks * params->multiple_of;
    }
    return PB_KVCACHE_OK;
}
