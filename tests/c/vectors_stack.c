/* Kinds "stack" (calls on a stack of caches) and "stack_refusal" (parameters that creation refuses). */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "vectors.h"

static pb_kvcache_stack_params params_of(const json *test)
{
    const json *params = json_need(test, "params");
    return (pb_kvcache_stack_params){
        json_u32(json_need(params, "num_layers")),    json_u32(json_need(params, "budget")),
        json_u32(json_need(params, "pyramid_ratio")), json_u32(json_need(params, "recent_window")),
        json_u32(json_need(params, "obs_window")),    json_u32(json_need(params, "pool_kernel")),
        json_is_null(json_get(params, "spare")) ? 0 : json_u32(json_get(params, "spare")),
        json_is_null(json_get(params, "max_rollback")) ? 0 : json_u32(json_get(params, "max_rollback")),
    };
}

/* The plan's budgets, or NULL for null. false where it is not for this number of layers. */
static bool plan_of(const json *test, uint32_t num_layers, uint32_t **budgets)
{
    size_t count = num_layers;
    const json *plan = json_get(test, "plan");
    *budgets = json_is_null(plan) ? NULL : json_u32s(plan, &count);
    if (count != num_layers) {
        free(*budgets);
        return vectors_fail("a plan for %zu layers", count);
    }
    return true;
}

static bool step(pb_kvcache_stack *stack, const json *call)
{
    const json *rows = json_need(call, "attn");
    const uint32_t num_layers = pb_kvcache_stack_num_layers(stack);
    if (!json_is_null(rows) && rows->length != num_layers) {
        return vectors_fail("attention for %zu layers", rows->length);
    }
    float **attn = vectors_alloc(num_layers, sizeof *attn);
    size_t *lengths = vectors_alloc(num_layers, sizeof *lengths);
    const json *row = json_is_null(rows) ? NULL : rows->child;
    for (uint32_t at = 0; at < num_layers; ++at, row = row == NULL ? NULL : row->next) {
        lengths[at] = 0;
        attn[at] = json_is_null(row) ? NULL : json_floats(row, &lengths[at]);
    }
    const uint32_t pos = json_u32(json_need(call, "pos"));
    const pb_kvcache_status want = vectors_status(json_get(call, "status"));
    const uint32_t want_layer = want == PB_KVCACHE_OK ? num_layers : json_u32(json_need(call, "layer"));
    const float *const *const weights = json_is_null(rows) ? NULL : (const float *const *)attn;
    uint32_t layer = UINT32_MAX;
    const pb_kvcache_status foretold = pb_kvcache_stack_step_check(stack, pos, weights, lengths, &layer);
    const pb_kvcache_status status = pb_kvcache_stack_on_decode_step(stack, pos, weights, lengths);
    for (uint32_t i = 0; i < num_layers; ++i) {
        free(attn[i]);
    }
    free(attn);
    free(lengths);
    return (status == want && foretold == want && layer == want_layer)
           || vectors_fail("status %d, layer %" PRIu32 ", expected %d", (int)status, layer, (int)want);
}

/* Do the layers' positions, laid out by offsets, equal an array of arrays? */
static bool same(const uint32_t *positions, const size_t *offsets, size_t num_layers, const json *layers)
{
    size_t at = 0;
    if (layers->length != num_layers) {
        return vectors_fail("positions for %zu layers", layers->length);
    }
    for (const json *layer = layers->child; layer != NULL; layer = layer->next, ++at) {
        size_t count;
        uint32_t *want = json_u32s(layer, &count);
        const bool good = offsets[at + 1] - offsets[at] == count
                          && (count == 0 || memcmp(positions + offsets[at], want, count * sizeof *want) == 0);
        free(want);
        if (!good) {
            return vectors_fail("layer %zu has %zu positions", at, offsets[at + 1] - offsets[at]);
        }
    }
    return true;
}

static bool evict(pb_kvcache_stack *stack, const json *call)
{
    const size_t ends = (size_t)pb_kvcache_stack_num_layers(stack) + 1;
    const size_t count = pb_kvcache_stack_evict_count(stack);
    const size_t resident = pb_kvcache_stack_resident(stack);
    uint32_t *victims = vectors_alloc(count + 1, sizeof *victims);
    size_t *offsets = vectors_alloc(ends, sizeof *offsets);
    /* Too small: nothing happens. */
    bool good = count == 0
                || pb_kvcache_stack_evict(stack, victims, count - 1, offsets, ends) == PB_KVCACHE_ERROR_CAPACITY;
    good = good && pb_kvcache_stack_evict(stack, victims, count, offsets, ends - 1) == PB_KVCACHE_ERROR_CAPACITY;
    good = good && pb_kvcache_stack_resident(stack) == resident;
    good = good && pb_kvcache_stack_evict(stack, victims, count, offsets, ends) == PB_KVCACHE_OK;
    good = good && pb_kvcache_stack_resident(stack) == resident - count;
    good = good && same(victims, offsets, ends - 1, json_need(call, "victims"));
    free(victims);
    free(offsets);
    return good;
}

static bool evict_rows(pb_kvcache_stack *stack, const json *call)
{
    const uint32_t num_layers = pb_kvcache_stack_num_layers(stack);
    const uint32_t multiple_of = json_u32(json_need(call, "multiple_of"));
    const bool kept = strcmp(json_string(json_need(call, "which")), "kept") == 0;
    const pb_kvcache_row_set which = kept ? PB_KVCACHE_ROWS_KEPT : PB_KVCACHE_ROWS_VICTIMS;
    const size_t count = pb_kvcache_stack_evict_rows_count(stack, multiple_of);
    const size_t resident = pb_kvcache_stack_resident(stack);
    size_t stride = 1; /* more than any layer has */
    for (uint32_t layer = 0; layer < num_layers; ++layer) {
        const size_t held = pb_kvcache_kept_count(pb_kvcache_stack_layer(stack, layer));
        stride = held >= stride ? held + 1 : stride;
    }
    uint32_t *victims = vectors_alloc(count + 1, sizeof *victims);
    size_t *offsets = vectors_alloc((size_t)num_layers + 1, sizeof *offsets);
    uint32_t *rows = vectors_alloc(num_layers * stride, sizeof *rows);
    uint32_t *counts = vectors_alloc(num_layers, sizeof *counts);
    bool good = pb_kvcache_stack_evict_rows(stack, multiple_of, which, victims, count, offsets, num_layers + 1u, rows,
                                            stride, num_layers * stride, counts, num_layers - 1u)
                == PB_KVCACHE_ERROR_CAPACITY;
    good = good && pb_kvcache_stack_resident(stack) == resident;
    good = good
           && pb_kvcache_stack_evict_rows(stack, multiple_of, which, victims, count, offsets, num_layers + 1u, rows,
                                          stride, num_layers * stride, counts, num_layers)
                  == PB_KVCACHE_OK;
    good = good && pb_kvcache_stack_resident(stack) == resident - count;
    good = good && same(victims, offsets, num_layers, json_need(call, "victims"));
    const json *want = json_need(call, "rows");
    good = good && want->length == num_layers;
    uint32_t layer = 0;
    for (const json *row = want->child; good && row != NULL; row = row->next, ++layer) {
        size_t want_count;
        uint32_t *expected = json_u32s(row, &want_count);
        good = counts[layer] == want_count
               && (want_count == 0 || memcmp(rows + layer * stride, expected, want_count * sizeof *rows) == 0);
        free(expected);
    }
    free(counts);
    free(rows);
    free(offsets);
    free(victims);
    return good || vectors_fail("%zu victims of %zu", count, resident);
}

static bool kept(const pb_kvcache_stack *stack, const json *call)
{
    const size_t ends = (size_t)pb_kvcache_stack_num_layers(stack) + 1;
    const size_t count = pb_kvcache_stack_resident(stack);
    uint32_t *positions = vectors_alloc(count + 1, sizeof *positions);
    size_t *offsets = vectors_alloc(ends, sizeof *offsets);
    const bool good = pb_kvcache_stack_kept(stack, positions, count, offsets, ends) == PB_KVCACHE_OK
                      && offsets[ends - 1] == count && same(positions, offsets, ends - 1, json_need(call, "positions"));
    free(positions);
    free(offsets);
    return good;
}

static bool seed(pb_kvcache_stack *stack, const json *call)
{
    size_t count;
    uint32_t *positions = json_u32s(json_need(call, "positions"), &count);
    const json *rows = json_get(call, "attn");
    const size_t row_count = json_is_null(rows) ? 0 : rows->length;
    float *attn = json_is_null(rows) ? NULL : vectors_rows(rows, count);
    if (attn == NULL && row_count > 0) {
        free(positions);
        return false;
    }
    const uint32_t layer = json_u32(json_need(call, "layer"));
    const pb_kvcache_status want = vectors_status(json_get(call, "status"));
    const pb_kvcache_status status = pb_kvcache_stack_seed(stack, layer, positions, count, attn, row_count);
    free(attn);
    free(positions);
    return status == want || vectors_fail("status %d, expected %d", (int)status, (int)want);
}

static pb_kvcache_status save_stack(const void *stack, void *data, size_t capacity)
{
    return pb_kvcache_stack_save(stack, data, capacity);
}

static pb_kvcache_status load_stack(void *stack, const void *data, size_t size)
{
    return pb_kvcache_stack_load(stack, data, size);
}

static bool run_call(pb_kvcache_stack *stack, const json *call)
{
    const char *name = json_string(json_need(call, "call"));
    if (strcmp(name, "step") == 0) {
        return step(stack, call);
    }
    if (strcmp(name, "evict") == 0) {
        return evict(stack, call);
    }
    if (strcmp(name, "evict_rows") == 0) {
        return evict_rows(stack, call);
    }
    if (strcmp(name, "kept") == 0) {
        return kept(stack, call);
    }
    if (strcmp(name, "count") == 0) {
        const size_t resident = pb_kvcache_stack_resident(stack);
        const size_t peak = pb_kvcache_stack_peak_resident(stack);
        return (resident == json_u64(json_need(call, "resident")) && peak == json_u64(json_need(call, "peak_resident")))
               || vectors_fail("%zu resident, peak %zu", resident, peak);
    }
    if (strcmp(name, "score") == 0) {
        double got = -1.0;
        const double want = json_double(json_need(call, "score"));
        const pb_kvcache *layer = pb_kvcache_stack_layer(stack, json_u32(json_need(call, "layer")));
        return (pb_kvcache_window_score(layer, json_u32(json_need(call, "pos")), &got) == PB_KVCACHE_OK
                && memcmp(&got, &want, sizeof got) == 0)
               || vectors_fail("score %.17g, expected %.17g", got, want);
    }
    if (strcmp(name, "seed") == 0) {
        return seed(stack, call);
    }
    if (strcmp(name, "rollback") == 0) {
        const uint32_t most = pb_kvcache_stack_rollback_count(stack);
        const pb_kvcache_status want = vectors_status(json_get(call, "status"));
        const pb_kvcache_status status = pb_kvcache_stack_rollback(stack, json_u32(json_need(call, "count")));
        return (most == json_u32(json_need(call, "most")) && status == want)
               || vectors_fail("status %d, at most %" PRIu32, (int)status, most);
    }
    if (strcmp(name, "save") == 0) {
        return vectors_save(call, pb_kvcache_stack_state_bytes(stack), save_stack, stack);
    }
    if (strcmp(name, "load") == 0) {
        return vectors_load(call, load_stack, stack);
    }
    if (strcmp(name, "reset") == 0) {
        return pb_kvcache_stack_reset(stack) == PB_KVCACHE_OK;
    }
    return vectors_fail("unknown call %s", name);
}

bool vectors_stack(const json *test)
{
    const pb_kvcache_stack_params params = params_of(test);
    uint32_t *plan;
    if (!plan_of(test, params.num_layers, &plan)) {
        return false;
    }
    pb_kvcache_stack *stack = pb_kvcache_stack_create(&params, plan, NULL);
    free(plan);
    if (stack == NULL) {
        return vectors_fail("creation refused");
    }
    size_t count;
    size_t also;
    uint32_t *want = json_u32s(json_need(test, "budgets"), &count);
    uint32_t *capacities = json_u32s(json_need(test, "capacities"), &also);
    uint32_t *budgets = vectors_alloc(count, sizeof *budgets);
    bool good = count == params.num_layers && also == count
                && pb_kvcache_stack_budgets(stack, budgets, count) == PB_KVCACHE_OK
                && memcmp(want, budgets, count * sizeof *want) == 0;
    for (uint32_t layer = 0; good && layer < count; ++layer) {
        good = pb_kvcache_capacity(pb_kvcache_stack_layer(stack, layer)) == capacities[layer];
    }
    if (!good) {
        vectors_fail("budgets or capacities differ");
    }
    free(want);
    free(capacities);
    free(budgets);
    for (const json *call = json_need(test, "calls")->child; good && call != NULL; call = call->next) {
        good = run_call(stack, call);
    }
    pb_kvcache_stack_destroy(stack);
    return good;
}

bool vectors_stack_refusal(const json *test)
{
    const pb_kvcache_stack_params params = params_of(test);
    uint32_t *plan;
    if (!plan_of(test, params.num_layers, &plan)) {
        return false;
    }
    uint32_t layer = UINT32_MAX;
    const pb_kvcache_status want = vectors_status(json_need(test, "status"));
    const pb_kvcache_status status = pb_kvcache_stack_check(&params, plan, &layer);
    pb_kvcache_stack *stack = pb_kvcache_stack_create(&params, plan, NULL);
    pb_kvcache_stack_destroy(stack);
    free(plan);
    return (status == want && layer == json_u32(json_need(test, "layer")) && stack == NULL)
           || vectors_fail("status %d in layer %" PRIu32 ", expected %d", (int)status, layer, (int)want);
}
