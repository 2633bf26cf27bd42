/* Kind "divide": every unit's budget, or the status of a refused division, which leaves the output as it was. */
#include <inttypes.h>
#include <stdlib.h>

#include "vectors.h"

/* A bound is a number or an array with one per unit; the array is the caller's to free. */
static uint32_t *bound_of(const json *value, uint32_t *scalar)
{
    size_t count;
    if (json_is_null(value)) {
        return NULL;
    }
    if (value->type == JSON_ARRAY) {
        return json_u32s(value, &count);
    }
    *scalar = json_u32(value);
    return NULL;
}

static double *losses_of(const json *rows, size_t width)
{
    double *losses = vectors_alloc(rows->length * width + 1, sizeof *losses);
    size_t i = 0;
    for (const json *row = rows->child; row != NULL; row = row->next) {
        for (const json *value = row->child; value != NULL; value = value->next) {
            losses[i++] = json_double(value);
        }
    }
    return losses;
}

bool vectors_divide(const json *test)
{
    pb_kvcache_divide_params params = PB_KVCACHE_DIVIDE_PARAMS_DEFAULT;
    const json *rows = json_need(test, "losses");
    const size_t units = rows->length;
    uint32_t *grid = json_u32s(json_need(test, "grid"), &params.num_points);
    double *losses = losses_of(rows, params.num_points);
    params.grid = grid;
    params.losses = losses;
    params.total = json_u64(json_need(test, "total"));
    if (json_get(test, "multiple_of") != NULL) {
        params.multiple_of = json_u32(json_get(test, "multiple_of"));
    }
    uint32_t *minimums = bound_of(json_get(test, "minimum"), &params.minimum);
    uint32_t *maximums = bound_of(json_get(test, "maximum"), &params.maximum);
    params.minimums = minimums;
    params.maximums = maximums;

    const uint32_t untouched = 0xA5A5A5A5u;
    const json *want = json_get(test, "budgets");
    uint32_t *budgets = vectors_alloc(units + 1, sizeof *budgets);
    for (size_t unit = 0; unit <= units; ++unit) {
        budgets[unit] = untouched;
    }
    size_t bytes = 1;
    (void)pb_kvcache_divide_workspace_size(units, params.num_points, &bytes);
    unsigned char *workspace = vectors_alloc(bytes, 1);
    const pb_kvcache_status status = pb_kvcache_divide(&params, workspace, bytes, budgets, units);
    const pb_kvcache_status expected = vectors_status(json_get(test, "status"));
    bool ok = true;
    if (status != expected) {
        ok = vectors_fail("status %d, expected %d", (int)status, (int)expected);
    } else if (status == PB_KVCACHE_OK && (want == NULL || want->length != units)) {
        ok = vectors_fail("the case does not state %zu budgets", units);
    }
    const json *value = status == PB_KVCACHE_OK && want != NULL ? want->child : NULL;
    for (size_t unit = 0; ok && unit <= units; ++unit) {
        const uint32_t right = value == NULL ? untouched : json_u32(value);
        if (budgets[unit] != right) {
            ok = vectors_fail("budgets[%zu] is %" PRIu32 ", expected %" PRIu32, unit, budgets[unit], right);
        }
        value = value == NULL ? NULL : value->next;
    }
    free(grid);
    free(losses);
    free(minimums);
    free(maximums);
    free(budgets);
    free(workspace);
    return ok;
}
