#include "internal.h"

/* floor(m * x / d) for 0 < x <= d and m < 2^33: the answer is at most m. */
static uint64_t scaled(uint64_t m, uint64_t x, uint64_t d)
{
    if (m <= UINT64_MAX / x) {
        return m * x / d;
    }
    /* The product needs up to 97 bits: long division, one bit of m at a time, with the carry out of 64 bits kept. */
    uint64_t quotient = 0;
    uint64_t rest = 0;
    for (int bit = 32; bit >= 0; --bit) {
        bool carry = (rest >> 63) != 0;
        quotient <<= 1;
        rest <<= 1;
        if (carry || rest >= d) {
            rest -= d;
            ++quotient;
        }
        if ((m >> bit) & 1u) {
            rest += x;
            if (rest < x || rest >= d) {
                rest -= d;
                ++quotient;
            }
        }
    }
    return quotient;
}

/* The share before it is made to fit 32 bits. layer < num_layers, ratio > 0. */
static uint64_t share(uint64_t budget, uint64_t layer, uint64_t num_layers, uint64_t ratio)
{
    if (num_layers <= 1) {
        return budget;
    }
    const uint64_t steps = num_layers - 1; /* >= layer: below, ratio * steps - layer * (ratio - 1) >= steps > 0 */
    return scaled(2 * budget, ratio * steps - layer * (ratio - 1), (ratio + 1) * steps);
}

uint32_t pb_kvcache_pyramid_budget(uint32_t budget, uint32_t layer, uint32_t num_layers, uint32_t pyramid_ratio)
{
    if (layer >= num_layers || pyramid_ratio == 0) {
        return 0;
    }
    const uint64_t exact = share(budget, layer, num_layers, pyramid_ratio);
    return exact > UINT32_MAX ? UINT32_MAX : (uint32_t)exact;
}

pb_kvcache_status pb_kvcache_pyramid_budgets(uint32_t budget, uint32_t num_layers, uint32_t pyramid_ratio,
                                             uint32_t *shares, size_t capacity)
{
    if (num_layers == 0) {
        return PB_KVCACHE_ERROR_NUM_LAYERS;
    }
    if (pyramid_ratio == 0) {
        return PB_KVCACHE_ERROR_PYRAMID_RATIO;
    }
    if (shares == NULL) {
        return PB_KVCACHE_ERROR_NULL;
    }
    if (capacity < num_layers) {
        return PB_KVCACHE_ERROR_CAPACITY;
    }
    if (share(budget, 0, num_layers, pyramid_ratio) > UINT32_MAX) { /* the first share is the largest */
        return PB_KVCACHE_ERROR_TOO_LARGE;
    }
    for (uint32_t layer = 0; layer < num_layers; ++layer) {
        shares[layer] = (uint32_t)share(budget, layer, num_layers, pyramid_ratio);
    }
    return PB_KVCACHE_OK;
}
