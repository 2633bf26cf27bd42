/* What vectors cannot say of pb_kvcache_divide: sizes, overlaps, extreme losses, and many units. */
#include <float.h>
#include <math.h>
#include <string.h>

#include "check.h"
#include "pb_kvcache.h"

enum { UNITS = 64, POINTS = 5 };

static const uint32_t grid[POINTS] = {8, 16, 33, 100, 1000};
static double losses[UNITS * POINTS];
static unsigned char workspace[1 << 16];

static uint32_t state = 7;
static uint32_t draw(void)
{
    state = state * 1664525u + 1013904223u;
    return state >> 8;
}

static pb_kvcache_divide_params params_of(uint64_t total)
{
    pb_kvcache_divide_params params = PB_KVCACHE_DIVIDE_PARAMS_DEFAULT;
    params.grid = grid;
    params.num_points = POINTS;
    params.losses = losses;
    params.total = total;
    return params;
}

static void sizes(void)
{
    size_t bytes = 77;
    CHECK(pb_kvcache_divide_workspace_size(1, 1, NULL) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_divide_workspace_size(0, 1, &bytes) == PB_KVCACHE_ERROR_DIVIDE_UNITS);
    CHECK(pb_kvcache_divide_workspace_size(1, 0, &bytes) == PB_KVCACHE_ERROR_DIVIDE_GRID);
    CHECK(pb_kvcache_divide_workspace_size(1, SIZE_MAX, &bytes) == PB_KVCACHE_ERROR_TOO_LARGE);
    CHECK(pb_kvcache_divide_workspace_size(UINT32_MAX, SIZE_MAX / 64, &bytes) == PB_KVCACHE_ERROR_TOO_LARGE);
    CHECK(pb_kvcache_divide_workspace_size(1, PTRDIFF_MAX / 8, &bytes) == PB_KVCACHE_ERROR_TOO_LARGE);
#if SIZE_MAX > UINT32_MAX
    CHECK(pb_kvcache_divide_workspace_size((size_t)UINT32_MAX + 1, 1, &bytes) == PB_KVCACHE_ERROR_TOO_LARGE);
#endif
    CHECK(bytes == 77);
    CHECK(pb_kvcache_divide_workspace_size(UNITS, POINTS, &bytes) == PB_KVCACHE_OK);
    CHECK(bytes <= sizeof workspace);
}

static void refusals(void)
{
    uint32_t budgets[UNITS] = {5};
    size_t bytes;
    pb_kvcache_divide_params params = params_of(8 * UNITS);
    CHECK(pb_kvcache_divide_workspace_size(UNITS, POINTS, &bytes) == PB_KVCACHE_OK);
    CHECK(pb_kvcache_divide(NULL, workspace, bytes, budgets, UNITS) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_divide(&params, NULL, bytes, budgets, UNITS) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_divide(&params, workspace, bytes, NULL, UNITS) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_divide(&params, workspace, bytes - 1, budgets, UNITS) == PB_KVCACHE_ERROR_WORKSPACE);
    CHECK(pb_kvcache_divide(&params, budgets, bytes, budgets, UNITS) == PB_KVCACHE_ERROR_OVERLAP);
    CHECK(pb_kvcache_divide(&params, losses, bytes, budgets, UNITS) == PB_KVCACHE_ERROR_OVERLAP);
    params.grid = NULL;
    CHECK(pb_kvcache_divide(&params, workspace, bytes, budgets, UNITS) == PB_KVCACHE_ERROR_NULL);
    params = params_of(8 * UNITS);
    params.losses = NULL;
    CHECK(pb_kvcache_divide(&params, workspace, bytes, budgets, UNITS) == PB_KVCACHE_ERROR_NULL);
    params = params_of(8 * UNITS);
    for (int bad = 0; bad < 3; ++bad) {
        const double values[3] = {(double)INFINITY, -(double)INFINITY, (double)NAN};
        const double before = losses[UNITS * POINTS - 1];
        losses[UNITS * POINTS - 1] = values[bad];
        CHECK(pb_kvcache_divide(&params, workspace, bytes, budgets, UNITS) == PB_KVCACHE_ERROR_DIVIDE_LOSS);
        losses[UNITS * POINTS - 1] = before;
    }
    /* Sizes that do not fit, before anything is read by them */
    CHECK(pb_kvcache_divide(&params, workspace, bytes, budgets, 0) == PB_KVCACHE_ERROR_DIVIDE_UNITS);
    CHECK(pb_kvcache_divide(&params, workspace, bytes, budgets, SIZE_MAX) == PB_KVCACHE_ERROR_TOO_LARGE);
    params.num_points = 0;
    CHECK(pb_kvcache_divide(&params, workspace, bytes, budgets, UNITS) == PB_KVCACHE_ERROR_DIVIDE_GRID);
    /* A unit without a block does not hide the one before it whose bounds cross */
    uint32_t minimums[UNITS] = {20, 9};
    uint32_t maximums[UNITS] = {10, 15};
    params = params_of(64);
    params.minimums = minimums;
    params.maximums = maximums;
    params.multiple_of = 8;
    CHECK(pb_kvcache_divide(&params, workspace, bytes, budgets, 2) == PB_KVCACHE_ERROR_PLAN_BOUNDS);
    CHECK(budgets[0] == 5);
    /* Every array that is read, under what is written */
    for (size_t unit = 0; unit < UNITS; ++unit) {
        minimums[unit] = 8;
        maximums[unit] = 100;
    }
    params.total = 8 * UNITS;
    CHECK(pb_kvcache_divide(&params, workspace, bytes, minimums, UNITS) == PB_KVCACHE_ERROR_OVERLAP);
    CHECK(pb_kvcache_divide(&params, workspace, bytes, maximums, UNITS) == PB_KVCACHE_ERROR_OVERLAP);
    CHECK(pb_kvcache_divide(&params, workspace, bytes, (uint32_t *)(void *)&params, 1) == PB_KVCACHE_ERROR_OVERLAP);
    uint32_t points[POINTS];
    memcpy(points, grid, sizeof points);
    params.grid = points;
    CHECK(pb_kvcache_divide(&params, workspace, bytes, points, 1) == PB_KVCACHE_ERROR_OVERLAP);
    CHECK(minimums[0] == 8 && maximums[0] == 100 && points[0] == grid[0]);
    params.grid = grid;
    CHECK(pb_kvcache_divide(&params, workspace, bytes, (uint32_t *)(void *)workspace, UNITS)
          == PB_KVCACHE_ERROR_OVERLAP);
}

/* Whatever the losses: the total, the bounds, the multiples; at every alignment of the workspace. */
static void promises(void)
{
    for (int round = 0; round < 2000; ++round) {
        uint32_t budgets[UNITS + 1];
        uint32_t minimums[UNITS];
        uint32_t maximums[UNITS];
        const size_t units = 1 + draw() % UNITS;
        const uint32_t block = 1 + draw() % 9;
        uint64_t low = 0;
        uint64_t high = 0;
        for (size_t i = 0; i < units * POINTS; ++i) {
            const uint32_t kind = draw() % 8;
            losses[i] = kind == 0   ? 0.0
                        : kind == 1 ? -0.0
                        : kind == 2 ? DBL_MAX
                        : kind == 3 ? -DBL_MAX
                        : kind == 4 ? DBL_MIN / 4.0
                                    : (double)(draw() % 1000) / 7.0;
        }
        for (size_t unit = 0; unit < units; ++unit) {
            minimums[unit] = 8 + draw() % 100;
            maximums[unit] = minimums[unit] + 9 + draw() % 2000;
            low += (minimums[unit] + block - 1) / block;
            high += maximums[unit] / block;
        }
        pb_kvcache_divide_params params = params_of(block * (low + draw() % (high - low + 2)));
        params.multiple_of = block;
        params.minimums = minimums;
        params.maximums = maximums;
        size_t bytes;
        budgets[units] = 0xA5A5A5A5u;
        CHECK(pb_kvcache_divide_workspace_size(units, POINTS, &bytes) == PB_KVCACHE_OK);
        CHECK(pb_kvcache_divide(&params, workspace + draw() % 64, bytes, budgets, units) == PB_KVCACHE_OK);
        uint64_t sum = 0;
        for (size_t unit = 0; unit < units; ++unit) {
            CHECK(budgets[unit] % block == 0 && minimums[unit] <= budgets[unit] && budgets[unit] <= maximums[unit]);
            sum += budgets[unit];
        }
        CHECK(sum == (params.total < high * block ? params.total : high * block));
        CHECK(budgets[units] == 0xA5A5A5A5u);
    }
}

int main(void)
{
    for (size_t i = 0; i < UNITS * POINTS; ++i) {
        losses[i] = 1.0;
    }
    sizes();
    refusals();
    promises();
    return END();
}
