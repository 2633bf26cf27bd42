/*
 * libFuzzer target: plans of arbitrary parameters, any double as ratio or weight, checked against what every plan
 * promises. A refused plan has to leave the output alone. Built with -fsanitize=fuzzer,address,undefined.
 */
#include <float.h>
#include <math.h>

#include "input.h"

enum { MOST_LAYERS = 40 };

/* Mostly small, sometimes anything. */
static uint32_t size_of(input *in)
{
    const uint32_t kind = take(in, 1);
    return kind < 0x80 ? kind % 33 : kind < 0xF0 ? take(in, 2) : take(in, 4);
}

/* Mostly a moderate number, sometimes the double of any eight bytes. */
static double real(input *in)
{
    const uint32_t kind = take(in, 1);
    if (kind < 0xC0) {
        return (double)(1 + take(in, 1)) / (kind < 0x60 ? 1.0 : 7.0);
    }
    const uint64_t bits = take_wide(in, 8);
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* A weight as the planner takes it: a whole number, the largest between 2^60 and 2^61, none below 1. */
static double whole(double weight, double largest)
{
    return fmax(1.0, floor(ldexp(weight, 60 - ilogb(largest))));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    input in = {data, size};
    const size_t layers = take(&in, 1) % (MOST_LAYERS + 1);
    /* In memory of exactly their size, so that the sanitizer sees a step too far. */
    double *weights = malloc(layers * sizeof *weights + 1);
    uint32_t *minimums = malloc(layers * sizeof *minimums + 1);
    uint32_t *maximums = malloc(layers * sizeof *maximums + 1);
    uint32_t *budgets = malloc(layers * sizeof *budgets + 1);
    uint32_t *again = malloc(layers * sizeof *again + 1);

    pb_kvcache_plan_params p = PB_KVCACHE_PLAN_PARAMS_DEFAULT;
    const uint32_t options = take(&in, 1);
    p.shape = (pb_kvcache_plan_shape)(options % 4 + (options == 0xFF));
    p.multiple_of = options & 4 ? size_of(&in) : 1;
    p.ratio = real(&in);
    p.minimum = size_of(&in);
    p.maximum = options & 8 ? size_of(&in) : UINT32_MAX;
    p.weights = p.shape == PB_KVCACHE_PLAN_WEIGHTS && options != 0xF7 ? weights : NULL;
    p.minimums = options & 16 ? minimums : NULL;
    p.maximums = options & 32 ? maximums : NULL;
    uint64_t least = 0;
    for (size_t layer = 0; layer < layers; ++layer) {
        weights[layer] = p.weights != NULL ? real(&in) : 1.0;
        minimums[layer] = p.minimums != NULL ? size_of(&in) : p.minimum;
        maximums[layer] = p.maximums != NULL ? minimums[layer] + size_of(&in) : p.maximum;
        least += p.multiple_of == 0 ? 0 : minimums[layer] / p.multiple_of + (minimums[layer] % p.multiple_of != 0);
        budgets[layer] = again[layer] = 0xA5A5A5A5u;
    }
    /* The least that is feasible and a bit more, or anything. */
    p.total = options & 64 ? take_wide(&in, 8) : (least + size_of(&in)) * p.multiple_of;

    const pb_kvcache_status status = pb_kvcache_plan(&p, budgets, layers);
    MUST(status <= 0);
    if (status != PB_KVCACHE_OK) {
        MUST(strcmp(pb_kvcache_status_str(status), "unknown status") != 0);
        for (size_t layer = 0; layer < layers; ++layer) {
            MUST(budgets[layer] == 0xA5A5A5A5u);
        }
    } else {
        uint64_t sum = 0;
        uint64_t most = 0;
        for (size_t layer = 0; layer < layers; ++layer) {
            MUST(budgets[layer] % p.multiple_of == 0);
            MUST(minimums[layer] <= budgets[layer] && budgets[layer] <= maximums[layer]);
            sum += budgets[layer];
            most += maximums[layer] / p.multiple_of * (uint64_t)p.multiple_of;
        }
        MUST(sum == (p.total < most ? p.total : most));
        /* Within the same bounds more weight is never less budget; of equals the lower layer may have a block more. */
        double largest = 0.0;
        for (size_t i = 0; p.weights != NULL && i < layers; ++i) {
            largest = fmax(largest, weights[i]);
        }
        for (size_t i = 0; p.weights != NULL && i < layers; ++i) {
            for (size_t j = i + 1; j < layers; ++j) {
                if (minimums[i] == minimums[j] && maximums[i] == maximums[j]) {
                    const double a = whole(weights[i], largest);
                    const double b = whole(weights[j], largest);
                    MUST(!(a > b) || budgets[i] >= budgets[j]);
                    MUST(!(a < b) || budgets[i] <= budgets[j]);
                    MUST(a < b || a > b || budgets[i] - budgets[j] == 0 || budgets[i] - budgets[j] == p.multiple_of);
                }
            }
        }
        /* Weights times a power of two, where that is exact, are the same weights. */
        bool exact = p.weights != NULL;
        for (size_t layer = 0; exact && layer < layers; ++layer) {
            exact = weights[layer] < DBL_MAX / 8.0 && weights[layer] > DBL_MIN;
            weights[layer] *= 8.0;
        }
        if (exact) {
            MUST(pb_kvcache_plan(&p, again, layers) == PB_KVCACHE_OK);
            MUST(memcmp(budgets, again, layers * sizeof *budgets) == 0);
        }
    }
    free(weights);
    free(minimums);
    free(maximums);
    free(budgets);
    free(again);
    return 0;
}
