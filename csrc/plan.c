/*
 * The planner. Weights become 61-bit integers on the largest one's power of two. With R blocks over weights that sum to
 * S, a layer's target is then the fraction R*w / S: 128 bits hold every product, and remainders compare exactly.
 *
 * Everything is counted in multiples of `multiple_of` ("blocks"). Doubles do nothing but guess quotients, and integers
 * put the guesses right, so neither a rounding mode nor a compiler can change a plan.
 */
#include <string.h>

#include "checks.h"

/* ---- Integers of 128 bits ---- */

typedef struct wide {
    uint64_t high;
    uint64_t low;
} wide;

static inline wide add(wide x, wide y)
{
    const uint64_t low = x.low + y.low;
    return (wide){x.high + y.high + (low < x.low), low};
}

/* x - y, for y <= x */
static inline wide subtract(wide x, wide y)
{
    return (wide){x.high - y.high - (x.low < y.low), x.low - y.low};
}

static inline bool less(wide x, wide y)
{
    return x.high != y.high ? x.high < y.high : x.low < y.low;
}

static inline bool is_zero(wide x)
{
    return (x.high | x.low) == 0;
}

static inline wide product(uint64_t x, uint64_t y)
{
    const uint64_t a = (x & UINT32_MAX) * (y & UINT32_MAX);
    const uint64_t b = (x >> 32) * (y & UINT32_MAX) + (a >> 32);
    const uint64_t c = (x & UINT32_MAX) * (y >> 32) + (b & UINT32_MAX);
    return (wide){(x >> 32) * (y >> 32) + (b >> 32) + (c >> 32), (c << 32) | (a & UINT32_MAX)};
}

/* x * y, which fits. */
static inline wide multiply(wide x, uint64_t y)
{
    wide result = product(x.low, y);
    result.high += x.high * y;
    return result;
}

/* floor(x / 2^times) for times > 0 */
static inline wide halved(wide x, int64_t times)
{
    if (times >= 64) {
        return (wide){0, times < 128 ? x.high >> (times - 64) : 0};
    }
    return (wide){x.high >> times, (x.low >> times) | (x.high << (64 - times))};
}

static inline double approximate(wide x)
{
    return (double)x.high * 0x1p64 + (double)x.low;
}

/*
 * Return floor(*x / d), which fits 64 bits, and leave the remainder in *x.
 *
 * A guess is within 2^-49 of the quotient in every rounding mode. Less its 2^-40th part it is not above the quotient
 * from 2^40 on, and below that it is at most 1 above. Two turns find any quotient.
 */
static inline uint64_t divide(wide *x, wide d)
{
    const double divisor = approximate(d);
    uint64_t quotient = 0;
    while (!less(*x, d)) {
        const double guess = approximate(*x) / divisor;
        uint64_t part = guess < 0x1p63 ? (uint64_t)guess : (uint64_t)1 << 63;
        part -= part >> 40;
        part += part == 0;
        if (less(*x, multiply(d, part))) {
            --part;
        }
        *x = subtract(*x, multiply(d, part));
        quotient += part;
    }
    return quotient;
}

/* ---- Numbers of 128 significant bits ---- */

/* mantissa / 2^127 * 2^exponent; the highest bit of the mantissa is set, but for 0. */
typedef struct real {
    wide mantissa;
    int64_t exponent;
} real;

#define TOP_BIT ((uint64_t)1 << 63)

/* A finite double >= 0, by its bits: the same in every rounding mode, and with subnormals switched off. */
static inline real real_of(double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    const int64_t field = (int64_t)(bits >> 52);
    real x = {{bits << 11, 0}, field - 1023};
    if (field != 0) {
        x.mantissa.high |= TOP_BIT;
    } else if (bits != 0) { /* subnormal */
        for (x.exponent = -1022; x.mantissa.high < TOP_BIT; --x.exponent) {
            x.mantissa.high <<= 1;
        }
    }
    return x;
}

/* The same of an integer. By way of a double, clang turns 0 into -0.0 where rounding is downward. */
static inline real real_of_integer(uint32_t value)
{
    real x = {{(uint64_t)value << 32, 0}, value == 0 ? -1023 : 31};
    for (int shift = 16; value != 0 && shift > 0; shift /= 2) {
        if (x.mantissa.high >> (64 - shift) == 0) {
            x.mantissa.high <<= shift;
            x.exponent -= shift;
        }
    }
    return x;
}

static bool is_positive(double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits != 0 && bits < (uint64_t)0x7FF << 52;
}

/* x * y, cut to 127 or 128 bits: exact where it has no more, else at most 2^-124 too small, relatively. */
static inline real real_multiply(real x, real y)
{
    const wide middle = add((wide){0, product(x.mantissa.high, y.mantissa.low).high},
                            (wide){0, product(x.mantissa.low, y.mantissa.high).high});
    wide mantissa = add(product(x.mantissa.high, y.mantissa.high), middle);
    const bool carry = mantissa.high >= TOP_BIT; /* the product of the mantissas is 2 or more */
    return (real){carry ? mantissa : add(mantissa, mantissa), x.exponent + y.exponent + carry};
}

/* ratio * x^n <= 1? */
static bool is_below_one(real ratio, real x, uint32_t n)
{
    for (; n > 0; n >>= 1, x = real_multiply(x, x)) {
        ratio = n & 1u ? real_multiply(ratio, x) : ratio;
    }
    return ratio.exponent < 0 || (ratio.exponent == 0 && ratio.mantissa.high == TOP_BIT && ratio.mantissa.low == 0);
}

/* ratio^(-1/n) for a double, to 2^-95, bit by bit. */
static real inverse_root(real ratio, uint32_t n)
{
    /* -log2(ratio) lies in -exponent - 1 .. -exponent, and is the upper end for a power of two alone. */
    const int64_t log = -ratio.exponent - (ratio.mantissa.high != TOP_BIT);
    real root = {{TOP_BIT, 0}, log / n - (log % n < 0)};
    for (int bit = 126; bit >= 32; --bit) {
        real larger = root;
        *(bit < 64 ? &larger.mantissa.low : &larger.mantissa.high) |= (uint64_t)1 << (bit % 64);
        root = is_below_one(ratio, larger, n) ? larger : root;
    }
    return root;
}

/* ---- The weights, as integers, from layer 0 on ---- */

typedef struct weights {
    const pb_kvcache_plan_params *params;
    pb_kvcache_plan_shape shape; /* UNIFORM also for a pyramid of one layer */
    uint32_t last;               /* the last layer */
    int64_t exponent;            /* of the largest weight, which becomes 2^60 .. 2^61 - 1 */
    real ratio;
    real factor;  /* GEOMETRIC: each over the one before */
    real running; /* GEOMETRIC: the current one, before rounding */
} weights;

static void weights_start(weights *w, const pb_kvcache_plan_params *params, size_t num_layers)
{
    *w = (weights){.params = params, .shape = params->shape, .last = (uint32_t)(num_layers - 1)};
    if (num_layers == 1 && w->shape != PB_KVCACHE_PLAN_WEIGHTS) {
        w->shape = PB_KVCACHE_PLAN_UNIFORM;
    }
    if (w->shape == PB_KVCACHE_PLAN_PYRAMID) { /* the largest is ratio * last or last */
        const real largest = real_of_integer(w->last);
        w->ratio = real_of(params->ratio);
        w->exponent = w->ratio.exponent < 0 ? largest.exponent : real_multiply(w->ratio, largest).exponent;
    } else if (w->shape == PB_KVCACHE_PLAN_GEOMETRIC) { /* the largest is ratio or 1 */
        w->ratio = real_of(params->ratio);
        w->exponent = w->ratio.exponent < 0 ? 0 : w->ratio.exponent;
        w->factor = inverse_root(w->ratio, w->last);
    } else if (w->shape == PB_KVCACHE_PLAN_WEIGHTS) {
        w->exponent = INT64_MIN;
        for (size_t layer = 0; layer < num_layers; ++layer) {
            const int64_t exponent = real_of(params->weights[layer]).exponent;
            w->exponent = exponent > w->exponent ? exponent : w->exponent;
        }
    }
}

/*
 * ratio * (last - layer) + layer, rounded down once. With 32 bits below the integer's own one of the two terms is a
 * whole number, the first where the ratio is 1 or more, else the second: rounding each down rounds their sum down.
 */
static uint64_t pyramid_weight(const weights *w, size_t layer)
{
    const real first = real_multiply(w->ratio, real_of_integer(w->last - (uint32_t)layer)); /* 85 bits: exact */
    const real second = real_of_integer((uint32_t)layer);
    const wide sum = add(halved(first.mantissa, 127 - 92 + w->exponent - first.exponent),
                         halved(second.mantissa, 127 - 92 + w->exponent - second.exponent));
    return halved(sum, 32).low;
}

/* The weight of `layer`, at least 1: to be asked for layers 0, 1, 2, ... in turn, and then from 0 again. */
static inline uint64_t weights_next(weights *w, size_t layer)
{
    uint64_t weight = 1;
    if (w->shape == PB_KVCACHE_PLAN_PYRAMID) {
        weight = pyramid_weight(w, layer);
    } else if (w->shape == PB_KVCACHE_PLAN_GEOMETRIC) {
        w->running = layer == 0 ? w->ratio : real_multiply(w->running, w->factor);
        const uint64_t top = w->running.mantissa.high;
        const uint64_t rounded = (top >> 11) + ((top >> 10) & 1u); /* 53 bits, or 2^53 */
        weight = halved((wide){0, rounded << 9}, 1 + w->exponent - w->running.exponent).low;
    } else if (w->shape == PB_KVCACHE_PLAN_WEIGHTS) {
        const real x = real_of(w->params->weights[layer]);
        weight = halved((wide){0, x.mantissa.high}, 3 + w->exponent - x.exponent).low;
    }
    return weight + (weight == 0);
}

/* ---- The plan ---- */

/* A layer's bounds in blocks: the minimum rounded up, the maximum rounded down. */
static inline void bounds(const pb_kvcache_plan_params *p, size_t layer, uint32_t *low, uint32_t *high)
{
    const uint32_t minimum = p->minimums != NULL ? p->minimums[layer] : p->minimum;
    const uint32_t maximum = p->maximums != NULL ? p->maximums[layer] : p->maximum;
    *low = minimum / p->multiple_of + (minimum % p->multiple_of != 0);
    *high = maximum / p->multiple_of;
}

static pb_kvcache_status check(const pb_kvcache_plan_params *p, const uint32_t *budgets, size_t num_layers,
                               uint64_t *sum_high)
{
    /* The parameters, one by one */
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
    /* What the shape is made from */
    if ((p->shape == PB_KVCACHE_PLAN_PYRAMID || p->shape == PB_KVCACHE_PLAN_GEOMETRIC) && !is_positive(p->ratio)) {
        return PB_KVCACHE_ERROR_PLAN_RATIO;
    }
    if ((p->weights != NULL) != (p->shape == PB_KVCACHE_PLAN_WEIGHTS)) {
        return PB_KVCACHE_ERROR_PLAN_WEIGHTS;
    }
    for (size_t layer = 0; p->weights != NULL && layer < num_layers; ++layer) {
        if (!is_positive(p->weights[layer])) {
            return PB_KVCACHE_ERROR_PLAN_WEIGHT;
        }
    }
    /* The bounds, as they were given and in blocks */
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
    if (p->total / p->multiple_of < sum_low) {
        return PB_KVCACHE_ERROR_PLAN_MINIMUM;
    }
    /* The inputs are read again while `budgets` is the working memory. An input that changes with it has no plan:
     * `maximums == budgets` never ended. */
    const size_t bytes = num_layers * sizeof *budgets;
    if (pb_kvcache_priv_overlap(p, sizeof *p, budgets, bytes)
        || (p->minimums != NULL && pb_kvcache_priv_overlap(p->minimums, bytes, budgets, bytes))
        || (p->maximums != NULL && pb_kvcache_priv_overlap(p->maximums, bytes, budgets, bytes))
        || (p->weights != NULL
            && pb_kvcache_priv_overlap(p->weights, num_layers * sizeof *p->weights, budgets, bytes))) {
        return PB_KVCACHE_ERROR_OVERLAP;
    }
    return PB_KVCACHE_OK;
}

/*
 * What `budgets` holds for a layer while the plan is made. Below MARK: the layer's target lies between its bounds, and
 * this is a digit of its fraction in base MARK. S is below 2^93, so fractions that three digits leave equal are equal.
 */
#define DIGIT_BITS 31
#define DIGITS 3
#define MARK ((uint32_t)1 << DIGIT_BITS)
#define AT_MINIMUM (MARK + 0u)    /* decided: the target is the minimum */
#define AT_MAXIMUM (MARK + 1u)    /* decided: the target is the maximum */
#define BELOW_MINIMUM (MARK + 2u) /* in this round */
#define ABOVE_MAXIMUM (MARK + 3u) /* in this round */
#define ROUND_DOWN (MARK + 4u)    /* decided: the target is rounded down */
#define ROUND_UP (MARK + 5u)      /* decided: the target is rounded up */

/* R blocks over weights that sum to S: the level at which the layers not at a bound are filled. */
typedef struct level {
    uint64_t available; /* R */
    wide sum;           /* S */
} level;

/* The floor of the target R*w / S of a weight, and the remainder in *rest. */
static inline uint64_t target(const level *at, uint64_t weight, wide *rest)
{
    *rest = product(weight, at->available);
    return divide(rest, at->sum);
}

/* The next digit of the fraction rest / S. What is left of it stays in `rest`. */
static inline uint32_t next_digit(wide *rest, wide sum)
{
    *rest = multiply(*rest, MARK);
    return (uint32_t)divide(rest, sum);
}

/*
 * Water-filling: find the level at which every layer is within its bounds, and return the sum of the floors of all
 * targets. `budgets` then holds AT_MINIMUM, AT_MAXIMUM or the first digit of the target's fraction.
 *
 * With lambda = R/S for the layers not yet at a bound, let D be what those below their minimum lack and E what those
 * above their maximum have too much. Where D > E the right lambda is smaller, so those below are at their minimum for
 * good; where D < E those above are at their maximum; where D = E lambda is right.
 *
 * Rounds: when layers of weight W go to their minimum, lambda falls by D/(S-W). The next ones to go are within that fall
 * of it (lambda may have risen in between), so with weight V they lack at most D*V/(S-W): the product of what is lacking
 * and the weight that stays, first D*(S-W), is then at most D*(S-W-V)*V/(S-W), a quarter or less. It starts below
 * 2^64 * S, and is never below 1/S, so there are at most 33 + log2 S such rounds, and as many at the other side. In
 * practice there are two to five in all.
 */
static uint64_t fill(weights *w, level *at, uint32_t *budgets, size_t num_layers)
{
    enum { BELOW, ABOVE };
    for (;;) {
        uint64_t inside = 0;                  /* floors of the targets within their bounds */
        uint64_t outside = 0;                 /* floors of the others */
        wide rests = {0, 0};                  /* what those floors leave, over S */
        uint64_t bound[2] = {0, 0};           /* the bounds that they break, added up on each side */
        wide weight_of[2] = {{0, 0}, {0, 0}}; /* their weights, likewise */
        for (size_t layer = 0; layer < num_layers; ++layer) {
            uint32_t low;
            uint32_t high;
            wide rest;
            const uint64_t weight = weights_next(w, layer);
            bounds(w->params, layer, &low, &high);
            if (budgets[layer] == AT_MINIMUM || budgets[layer] == AT_MAXIMUM) {
                inside += budgets[layer] == AT_MINIMUM ? low : high;
                continue;
            }
            const uint64_t floor = target(at, weight, &rest);
            if (floor >= low && (floor < high || (floor == high && is_zero(rest)))) {
                inside += floor;
                budgets[layer] = next_digit(&rest, at->sum);
                continue;
            }
            const int side = floor < low ? BELOW : ABOVE;
            budgets[layer] = side == BELOW ? BELOW_MINIMUM : ABOVE_MAXIMUM;
            bound[side] += side == BELOW ? low : high;
            weight_of[side] = add(weight_of[side], (wide){0, weight});
            outside += floor;
            rests = add(rests, rest);
        }
        if (is_zero(weight_of[BELOW]) && is_zero(weight_of[ABOVE])) {
            return inside;
        }
        /* D - E is the sum of the broken bounds less the sum of these targets. */
        outside += divide(&rests, at->sum);
        const bool lacking = outside < bound[BELOW] + bound[ABOVE];
        const bool right = outside == bound[BELOW] + bound[ABOVE] && is_zero(rests);
        for (size_t layer = 0; layer < num_layers; ++layer) {
            if (budgets[layer] == BELOW_MINIMUM) {
                budgets[layer] = lacking || right ? AT_MINIMUM : 0;
            } else if (budgets[layer] == ABOVE_MAXIMUM) {
                budgets[layer] = lacking ? 0 : AT_MAXIMUM;
            }
        }
        if (!right) { /* else the same level once more, now without layers beyond a bound */
            at->available -= bound[lacking ? BELOW : ABOVE];
            at->sum = subtract(at->sum, weight_of[lacking ? BELOW : ABOVE]);
        }
    }
}

/* The greatest digit that at least `count` of the undecided layers reach; *above says how many exceed it. */
static uint32_t threshold(const uint32_t *digits, size_t num_layers, size_t count, size_t *above)
{
    uint32_t digit = 0;
    *above = 0;
    for (uint32_t bit = MARK >> 1; bit != 0; bit >>= 1) {
        const uint32_t candidate = digit | bit;
        uint32_t reach = 0; /* num_layers fits 32 bits */
        for (size_t layer = 0; layer < num_layers; ++layer) {
            reach += (digits[layer] >= candidate) & (digits[layer] < MARK);
        }
        if (reach >= count) {
            digit = candidate;
        } else {
            *above = reach;
        }
    }
    return digit;
}

/* Round the `count` largest fractions up, the lower layer first on a tie: one digit after the other decides. */
static void round_up(weights *w, const level *at, uint32_t *budgets, size_t num_layers, size_t count)
{
    for (int known = 1; count > 0; ++known) {
        size_t above;
        const uint32_t digit = threshold(budgets, num_layers, count, &above);
        count -= above;
        for (size_t layer = 0; layer < num_layers; ++layer) {
            wide rest;
            const uint64_t weight = weights_next(w, layer);
            if (budgets[layer] >= MARK) {
                continue;
            }
            if (budgets[layer] != digit) {
                budgets[layer] = budgets[layer] > digit ? ROUND_UP : ROUND_DOWN;
            } else if (known == DIGITS) {
                budgets[layer] = count > 0 ? ROUND_UP : ROUND_DOWN;
                count -= count > 0;
            } else {
                (void)target(at, weight, &rest);
                for (int i = 0; i < known; ++i) {
                    (void)next_digit(&rest, at->sum);
                }
                budgets[layer] = next_digit(&rest, at->sum);
            }
        }
    }
}

pb_kvcache_status pb_kvcache_plan(const pb_kvcache_plan_params *params, uint32_t *budgets, size_t num_layers)
{
    uint64_t sum_high;
    const pb_kvcache_status status = check(params, budgets, num_layers, &sum_high);
    if (status != PB_KVCACHE_OK) {
        return status;
    }
    weights w;
    level at = {params->total / params->multiple_of, {0, 0}};
    weights_start(&w, params, num_layers);
    for (size_t layer = 0; layer < num_layers; ++layer) {
        at.sum = add(at.sum, (wide){0, weights_next(&w, layer)});
        budgets[layer] = at.available < sum_high ? 0 : AT_MAXIMUM;
    }
    if (at.available < sum_high) {
        const uint64_t total = at.available;
        const uint64_t floors = fill(&w, &at, budgets, num_layers);
        round_up(&w, &at, budgets, num_layers, (size_t)(total - floors));
    }
    for (size_t layer = 0; layer < num_layers; ++layer) {
        uint32_t low;
        uint32_t high;
        wide rest;
        const uint64_t weight = weights_next(&w, layer);
        bounds(params, layer, &low, &high);
        uint32_t blocks = budgets[layer] == AT_MINIMUM ? low : high;
        if (budgets[layer] != AT_MINIMUM && budgets[layer] != AT_MAXIMUM) {
            blocks = (uint32_t)target(&at, weight, &rest) + (budgets[layer] == ROUND_UP);
        }
        budgets[layer] = blocks * params->multiple_of;
    }
    return PB_KVCACHE_OK;
}
