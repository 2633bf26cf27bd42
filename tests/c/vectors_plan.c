/* Kind "plan": every layer's budget, or the status of a refused plan, which leaves the output as it was. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "vectors.h"

static pb_kvcache_plan_shape shape_of(const json *name)
{
    static const char *const names[] = {"uniform", "pyramid", "geometric", "weights"};
    for (size_t i = 0; name != NULL && i < sizeof names / sizeof names[0]; ++i) {
        if (strcmp(json_string(name), names[i]) == 0) {
            return (pb_kvcache_plan_shape)i;
        }
    }
    return PB_KVCACHE_PLAN_PYRAMID;
}

/* A bound is a number or an array with one per layer; the array is the caller's to free. */
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

static double *weights_of(const json *array)
{
    if (json_is_null(array)) {
        return NULL;
    }
    double *weights = vectors_alloc(array->length, sizeof *weights);
    size_t i = 0;
    for (const json *value = array->child; value != NULL; value = value->next) {
        weights[i++] = json_double(value);
    }
    return weights;
}

bool vectors_plan(const json *test)
{
    pb_kvcache_plan_params params = PB_KVCACHE_PLAN_PARAMS_DEFAULT;
    const uint32_t num_layers = json_u32(json_need(test, "num_layers"));
    params.total = json_u64(json_need(test, "total"));
    params.shape = shape_of(json_get(test, "shape"));
    if (json_get(test, "multiple_of") != NULL) {
        params.multiple_of = json_u32(json_get(test, "multiple_of"));
    }
    if (json_get(test, "ratio") != NULL) {
        params.ratio = json_double(json_get(test, "ratio"));
    }
    double *weights = weights_of(json_get(test, "weights"));
    uint32_t *minimums = bound_of(json_get(test, "minimum"), &params.minimum);
    uint32_t *maximums = bound_of(json_get(test, "maximum"), &params.maximum);
    params.weights = weights;
    params.minimums = minimums;
    params.maximums = maximums;

    const uint32_t untouched = 0xA5A5A5A5u;
    const json *want = json_get(test, "budgets");
    uint32_t *budgets = vectors_alloc(num_layers + (size_t)1, sizeof *budgets);
    for (uint32_t layer = 0; layer <= num_layers; ++layer) {
        budgets[layer] = untouched;
    }
    const pb_kvcache_status status = pb_kvcache_plan(&params, budgets, num_layers);
    const pb_kvcache_status expected = vectors_status(json_get(test, "status"));
    bool ok = true;
    if (status != expected) {
        ok = vectors_fail("status %d, expected %d", (int)status, (int)expected);
    } else if (status == PB_KVCACHE_OK && (want == NULL || want->length != num_layers)) {
        ok = vectors_fail("the case does not state %" PRIu32 " budgets", num_layers);
    }
    const json *value = status == PB_KVCACHE_OK && want != NULL ? want->child : NULL;
    for (uint32_t layer = 0; ok && layer <= num_layers; ++layer) {
        const uint32_t right = value != NULL ? json_u32(value) : untouched;
        if (budgets[layer] != right) {
            ok = vectors_fail("layer %" PRIu32 ": %" PRIu32 ", expected %" PRIu32, layer, budgets[layer], right);
        }
        value = value != NULL ? value->next : NULL;
    }
    free(budgets);
    free(weights);
    free(minimums);
    free(maximums);
    return ok;
}
