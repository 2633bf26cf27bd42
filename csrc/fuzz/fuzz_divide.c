/*
 * libFuzzer target: divisions of arbitrary curves, any double as a loss, checked against what every division promises. A
 * refused division has to leave the output alone. Built with -fsanitize=fuzzer,address,undefined.
 */
#include "input.h"

enum { MOST_UNITS = 24, MOST_POINTS = 9 };

/* Mostly small, sometimes anything. */
static uint32_t size_of(input *in)
{
    const uint32_t kind = take(in, 1);
    return kind < 0xC0 ? kind % 33 : kind < 0xF8 ? take(in, 2) : take(in, 4);
}

/* Mostly a moderate number, sometimes the double of any eight bytes. */
static double real(input *in)
{
    const uint32_t kind = take(in, 1);
    if (kind < 0xE0) {
        return (double)kind / (kind < 0x60 ? 1.0 : 7.0);
    }
    const uint64_t bits = take_wide(in, 8);
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    input in = {data, size};
    const size_t units = take(&in, 1) % (MOST_UNITS + 1);
    const size_t points = take(&in, 1) % (MOST_POINTS + 1);
    /* In memory of exactly their size, so that the sanitizer sees a step too far. */
    uint32_t *grid = malloc(points * sizeof *grid + 1);
    double *losses = malloc(units * points * sizeof *losses + 1);
    uint32_t *minimums = malloc(units * sizeof *minimums + 1);
    uint32_t *maximums = malloc(units * sizeof *maximums + 1);
    uint32_t *budgets = malloc(units * sizeof *budgets + 1);
    for (size_t i = 0; i < points; ++i) {
        grid[i] = (i == 0 ? 0 : grid[i - 1]) + size_of(&in);
    }
    for (size_t i = 0; i < units * points; ++i) {
        losses[i] = real(&in);
    }
    pb_kvcache_divide_params p = PB_KVCACHE_DIVIDE_PARAMS_DEFAULT;
    const uint32_t options = take(&in, 1);
    p.grid = grid;
    p.num_points = points;
    p.losses = losses;
    p.multiple_of = options & 1 ? size_of(&in) : 1;
    p.minimum = options & 2 ? size_of(&in) : 0;
    p.maximum = options & 4 ? size_of(&in) : 0;
    p.minimums = options & 8 ? minimums : NULL;
    p.maximums = options & 16 ? maximums : NULL;
    uint64_t least = 0;
    for (size_t unit = 0; unit < units; ++unit) {
        const uint32_t first = points > 0 ? grid[0] : 0;
        const uint32_t last = points > 0 ? grid[points - 1] : 0;
        minimums[unit] = p.minimums != NULL ? first + size_of(&in) : p.minimum == 0 ? first : p.minimum;
        maximums[unit] = p.maximums != NULL ? minimums[unit] + size_of(&in) : p.maximum == 0 ? last : p.maximum;
        least += p.multiple_of == 0 ? 0 : minimums[unit] / p.multiple_of + (minimums[unit] % p.multiple_of != 0);
        budgets[unit] = 0xA5A5A5A5u;
    }
    p.total = options & 32 ? take_wide(&in, 8) : (least + size_of(&in)) * p.multiple_of;
    size_t bytes = 1;
    (void)pb_kvcache_divide_workspace_size(units, points, &bytes);
    void *workspace = malloc(bytes);
    const pb_kvcache_status status = pb_kvcache_divide(&p, workspace, bytes, budgets, units);
    MUST(status <= 0);
    if (status != PB_KVCACHE_OK) {
        MUST(strcmp(pb_kvcache_status_str(status), "unknown status") != 0);
        for (size_t unit = 0; unit < units; ++unit) {
            MUST(budgets[unit] == 0xA5A5A5A5u);
        }
    } else {
        uint64_t sum = 0;
        uint64_t most = 0;
        for (size_t unit = 0; unit < units; ++unit) {
            MUST(budgets[unit] % p.multiple_of == 0);
            MUST(minimums[unit] <= budgets[unit] && budgets[unit] <= maximums[unit]);
            sum += budgets[unit];
            most += maximums[unit] / p.multiple_of * (uint64_t)p.multiple_of;
        }
        MUST(sum == (p.total < most ? p.total : most));
    }
    free(workspace);
    free(grid);
    free(losses);
    free(minimums);
    free(maximums);
    free(budgets);
    return 0;
}
