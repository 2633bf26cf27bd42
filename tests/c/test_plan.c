/* Unit tests of the planner that the vectors cannot hold: pointers, totals at the ends, the rules of random plans. */
#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "check.h"
#include "pb_kvcache.h"

enum { MOST = 300 };

static uint64_t state = 1;

static uint32_t draw(uint32_t bound)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(((state >> 32) * bound) >> 32);
}

static uint64_t sum(const uint32_t *values, size_t n)
{
    uint64_t total = 0;
    for (size_t i = 0; i < n; ++i) {
        total += values[i];
    }
    return total;
}

static void refusals(void)
{
    static const uint32_t low[3] = {1, 1, 1};
    static const uint32_t high[3] = {9, 0, 9};
    static const double weights[3] = {1.0, DBL_MAX, 4.9e-324};
    uint32_t budgets[3] = {7, 7, 7};
    pb_kvcache_plan_params p = PB_KVCACHE_PLAN_PARAMS_DEFAULT;
    p.total = 12;
    CHECK(pb_kvcache_plan(NULL, budgets, 3) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_plan(&p, NULL, 3) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_plan(&p, budgets, 0) == PB_KVCACHE_ERROR_NUM_LAYERS);
#if SIZE_MAX > UINT32_MAX
    CHECK(pb_kvcache_plan(&p, budgets, (size_t)UINT32_MAX + 1) == PB_KVCACHE_ERROR_TOO_LARGE);
#endif
    p.shape = (pb_kvcache_plan_shape)4;
    CHECK(pb_kvcache_plan(&p, budgets, 3) == PB_KVCACHE_ERROR_PLAN_SHAPE);
    p.shape = PB_KVCACHE_PLAN_WEIGHTS;
    CHECK(pb_kvcache_plan(&p, budgets, 3) == PB_KVCACHE_ERROR_PLAN_WEIGHTS);
    p.shape = PB_KVCACHE_PLAN_PYRAMID;
    p.weights = weights;
    CHECK(pb_kvcache_plan(&p, budgets, 3) == PB_KVCACHE_ERROR_PLAN_WEIGHTS);
    p.weights = NULL;
    p.ratio = (double)NAN;
    CHECK(pb_kvcache_plan(&p, budgets, 3) == PB_KVCACHE_ERROR_PLAN_RATIO);
    p.ratio = (double)INFINITY;
    CHECK(pb_kvcache_plan(&p, budgets, 3) == PB_KVCACHE_ERROR_PLAN_RATIO);
    p.ratio = -0.0;
    CHECK(pb_kvcache_plan(&p, budgets, 3) == PB_KVCACHE_ERROR_PLAN_RATIO);
    p.ratio = 4.0;
    p.minimums = low;
    p.maximums = high;
    CHECK(pb_kvcache_plan(&p, budgets, 3) == PB_KVCACHE_ERROR_PLAN_BOUNDS);
    p.maximums = NULL;
    p.total = UINT64_MAX;
    CHECK(pb_kvcache_plan(&p, budgets, 3) == PB_KVCACHE_ERROR_PLAN_OVERFLOW);
    CHECK(budgets[0] == 7 && budgets[1] == 7 && budgets[2] == 7);
    /* A ratio that no shape reads is not looked at. */
    p.shape = PB_KVCACHE_PLAN_UNIFORM;
    p.ratio = (double)NAN;
    p.total = 12;
    CHECK(pb_kvcache_plan(&p, budgets, 3) == PB_KVCACHE_OK && budgets[0] == 4 && budgets[1] == 4 && budgets[2] == 4);
    /* An explicit maximum takes any total. */
    p.maximum = UINT32_MAX - 1;
    p.total = UINT64_MAX;
    CHECK(pb_kvcache_plan(&p, budgets, 3) == PB_KVCACHE_OK && budgets[2] == UINT32_MAX - 1);
}

/* A layer whose weight asks for more than any budget can be gets the most there is; the others share the rest. */
static void beyond_any_budget(void)
{
    static const double weights[4] = {1000.0, 1.0, 1.0, 1.0};
    uint32_t budgets[4];
    pb_kvcache_plan_params p = PB_KVCACHE_PLAN_PARAMS_DEFAULT;
    p.shape = PB_KVCACHE_PLAN_WEIGHTS;
    p.weights = weights;
    p.total = 3 * (uint64_t)UINT32_MAX;
    CHECK(pb_kvcache_plan(&p, budgets, 4) == PB_KVCACHE_OK && budgets[0] == UINT32_MAX);
    CHECK(budgets[1] == 2863311530u && budgets[2] == 2863311530u && budgets[3] == 2863311530u);
}

static void examples(void)
{
    uint32_t budgets[32];
    pb_kvcache_plan_params p = PB_KVCACHE_PLAN_PARAMS_DEFAULT;
    p.total = 512 * 32;
    p.maximum = 8192;
    p.multiple_of = 16;
    CHECK(pb_kvcache_plan(&p, budgets, 32) == PB_KVCACHE_OK);
    CHECK(budgets[0] == 816 && budgets[1] == 800 && budgets[31] == 208 && sum(budgets, 32) == p.total);
    p.total = 2048 * 32;
    p.ratio = PB_KVCACHE_PLAN_RATIO_OF_BETA(20.0);
    p.maximum = 7950;
    p.multiple_of = 1;
    CHECK(pb_kvcache_plan(&p, budgets, 32) == PB_KVCACHE_OK);
    CHECK(budgets[0] == 3994 && budgets[31] == 102 && sum(budgets, 32) == 65536);
}

/* Without active bounds a pyramid of whole ratio is the floor rule's share, or one more. */
static void near_the_floor_rule(void)
{
    uint32_t budgets[MOST];
    uint32_t shares[MOST];
    for (int round = 0; round < 400; ++round) {
        const uint32_t layers = 1 + draw(MOST);
        const uint32_t ratio = 1 + draw(100);
        const uint32_t budget = draw(1u << draw(25));
        pb_kvcache_plan_params p = PB_KVCACHE_PLAN_PARAMS_DEFAULT;
        p.total = (uint64_t)budget * layers;
        p.ratio = ratio;
        p.minimum = 0;
        CHECK(pb_kvcache_plan(&p, budgets, layers) == PB_KVCACHE_OK);
        CHECK(pb_kvcache_pyramid_budgets(budget, layers, ratio, shares, MOST) == PB_KVCACHE_OK);
        bool near = true;
        for (uint32_t layer = 0; layer < layers; ++layer) {
            near = near && budgets[layer] - shares[layer] <= 1;
        }
        CHECK(near);
        CHECK(sum(budgets, layers) == p.total);
    }
}

/* Any shape and bounds: sum, bounds, blocks, and the budgets in the order of targets where weights and bounds fall. */
static void rules(void)
{
    static const double extremes[4] = {DBL_MAX, 4.9e-324, 1.0, DBL_MIN};
    uint32_t low[MOST];
    uint32_t high[MOST];
    double weights[MOST];
    uint32_t budgets[MOST + 1];
    for (int round = 0; round < 1500; ++round) {
        const uint32_t layers = 1 + draw(round % 10 == 0 ? MOST : 20);
        const uint32_t block = draw(2) ? 1 : 1 + draw(40);
        const uint32_t most = 1 + draw(draw(2) ? 100 : 1000000);
        uint64_t least_blocks = 0;
        uint64_t most_blocks = 0;
        for (uint32_t layer = 0; layer < layers; ++layer) {
            low[layer] = block * draw(most);
            high[layer] = low[layer] + block * draw(most);
            least_blocks += low[layer] / block;
            most_blocks += high[layer] / block;
            weights[layer] = draw(8) ? 0.01 + draw(1000) : extremes[draw(4)];
        }
        pb_kvcache_plan_params p = PB_KVCACHE_PLAN_PARAMS_DEFAULT;
        p.shape = (pb_kvcache_plan_shape)draw(4);
        p.ratio = draw(8) ? (0.01 + draw(3000)) / (1.0 + draw(100)) : extremes[draw(4)];
        p.weights = p.shape == PB_KVCACHE_PLAN_WEIGHTS ? weights : NULL;
        p.multiple_of = block;
        p.minimums = low;
        p.maximums = high;
        p.total = (least_blocks + draw((uint32_t)(most_blocks - least_blocks + 1))) * block;
        budgets[layers] = 12345;
        CHECK(pb_kvcache_plan(&p, budgets, layers) == PB_KVCACHE_OK);
        CHECK(budgets[layers] == 12345);
        CHECK(sum(budgets, layers) == p.total);
        bool inside = true;
        for (uint32_t layer = 0; layer < layers; ++layer) {
            inside = inside && low[layer] <= budgets[layer] && budgets[layer] <= high[layer];
            inside = inside && budgets[layer] % block == 0;
        }
        CHECK(inside);

        /* The same shape within one pair of bounds: a ratio of 1 or more falls. */
        p.minimums = NULL;
        p.maximums = NULL;
        p.minimum = block * draw(most);
        p.maximum = p.minimum + block * draw(most);
        const uint32_t room = (p.maximum - p.minimum) / block * layers / 2;
        p.total = (uint64_t)p.minimum * layers + (uint64_t)draw(room + 1) * block;
        CHECK(pb_kvcache_plan(&p, budgets, layers) == PB_KVCACHE_OK);
        CHECK(sum(budgets, layers) == p.total);
        /* Weights below the 2^-60th part of the largest count alike, and of those the lower layer goes first. */
        const uint32_t tie = p.ratio < 0x1p-50 ? block : 0;
        bool falling = true;
        bool rising = true;
        for (uint32_t layer = 1; layer < layers; ++layer) {
            falling = falling && budgets[layer - 1] >= budgets[layer];
            rising = rising && budgets[layer - 1] <= budgets[layer] + tie;
        }
        if (p.shape == PB_KVCACHE_PLAN_PYRAMID || p.shape == PB_KVCACHE_PLAN_GEOMETRIC) {
            CHECK(p.ratio >= 1.0 ? falling : rising);
        }
    }
}

/* Remainders that agree in many digits and still differ: the larger ones go up, wherever they lie. */
static void nearly_ties(void)
{
    enum { LAYERS = 37 };
    double weights[LAYERS];
    uint32_t budgets[LAYERS];
    pb_kvcache_plan_params p = PB_KVCACHE_PLAN_PARAMS_DEFAULT;
    p.shape = PB_KVCACHE_PLAN_WEIGHTS;
    p.weights = weights;
    for (uint32_t layer = 0; layer < LAYERS; ++layer) {
        weights[layer] = 1.0 + (layer * 7 % LAYERS) * DBL_EPSILON;
    }
    for (uint32_t extra = 0; extra < LAYERS; ++extra) {
        p.total = 100 * LAYERS + extra;
        CHECK(pb_kvcache_plan(&p, budgets, LAYERS) == PB_KVCACHE_OK);
        bool largest = true;
        for (uint32_t layer = 0; layer < LAYERS; ++layer) {
            largest = largest && budgets[layer] == (extra == 0 || layer * 7 % LAYERS < LAYERS - extra ? 100u : 101u);
        }
        /* A whole share exactly differs: the weights above the mean reach it, those below do not. */
        CHECK(extra == 0 ? sum(budgets, LAYERS) == p.total : largest);
    }
}

/* A share of more than 33 bits meets the end of 32 bits, and the rest goes on. */
static void far_above(void)
{
    static const double weights[5] = {1e300, 1.0, 1.0, 1.0, 1.0};
    uint32_t budgets[5];
    pb_kvcache_plan_params p = PB_KVCACHE_PLAN_PARAMS_DEFAULT;
    p.shape = PB_KVCACHE_PLAN_WEIGHTS;
    p.weights = weights;
    p.total = ((uint64_t)1 << 34) + 6;
    CHECK(pb_kvcache_plan(&p, budgets, 5) == PB_KVCACHE_OK);
    CHECK(budgets[0] == UINT32_MAX && budgets[1] == 3221225474u && budgets[4] == 3221225473u);
    CHECK(sum(budgets, 5) == p.total);
}

int main(void)
{
    refusals();
    nearly_ties();
    far_above();
    beyond_any_budget();
    examples();
    near_the_floor_rule();
    rules();
    return END();
}
