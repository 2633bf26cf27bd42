/* Arrays that overlap where one is written, and arrays of nothing, which may have no address. */
#include <stdint.h>
#include <string.h>

#include "check.h"
#include "pb_kvcache.h"

static void a_plan_is_not_written_over_its_inputs(void)
{
    enum { LAYERS = 4 };
    union {
        uint32_t numbers[2 * LAYERS];
        double weights[LAYERS];
        pb_kvcache_plan_params params;
    } shared;
    uint32_t apart[LAYERS];
    pb_kvcache_plan_params p = PB_KVCACHE_PLAN_PARAMS_DEFAULT;
    p.total = 40;
    for (size_t i = 0; i < 2 * LAYERS; ++i) {
        shared.numbers[i] = 20;
    }
    p.maximums = shared.numbers;
    CHECK(pb_kvcache_plan(&p, shared.numbers, LAYERS) == PB_KVCACHE_ERROR_OVERLAP);
    CHECK(pb_kvcache_plan(&p, shared.numbers + LAYERS - 1, LAYERS) == PB_KVCACHE_ERROR_OVERLAP);
    CHECK(pb_kvcache_plan(&p, shared.numbers + LAYERS, LAYERS) == PB_KVCACHE_OK); /* neighbours */
    CHECK(pb_kvcache_plan(&p, apart, LAYERS) == PB_KVCACHE_OK);
    CHECK(memcmp(shared.numbers + LAYERS, apart, sizeof apart) == 0);
    p.maximums = NULL;
    p.minimums = shared.numbers;
    for (size_t i = 0; i < LAYERS; ++i) {
        shared.numbers[i] = 2;
    }
    CHECK(pb_kvcache_plan(&p, shared.numbers, LAYERS) == PB_KVCACHE_ERROR_OVERLAP);
    CHECK(shared.numbers[0] == 2 && shared.numbers[LAYERS - 1] == 2);
    p.minimums = NULL;
    p.shape = PB_KVCACHE_PLAN_WEIGHTS;
    p.weights = shared.weights;
    for (size_t i = 0; i < LAYERS; ++i) {
        shared.weights[i] = 1.0;
    }
    CHECK(pb_kvcache_plan(&p, shared.numbers, LAYERS) == PB_KVCACHE_ERROR_OVERLAP);
    CHECK(pb_kvcache_plan(&p, shared.numbers + LAYERS, LAYERS) == PB_KVCACHE_ERROR_OVERLAP); /* their second half */
    p.weights = NULL;
    p.shape = PB_KVCACHE_PLAN_UNIFORM;
    shared.params = p;
    CHECK(pb_kvcache_plan(&shared.params, shared.numbers, LAYERS) == PB_KVCACHE_ERROR_OVERLAP);
    CHECK(shared.params.total == 40);
}

static void a_stack_does_not_write_offsets_over_positions(void)
{
    union {
        size_t offsets[8];
        uint32_t positions[8];
    } shared;
    const pb_kvcache_stack_params params = {2, 3, 1, 1, 1, 1, 0, 0};
    pb_kvcache_stack *stack = pb_kvcache_stack_create(&params, NULL, NULL);
    for (uint32_t pos = 1; pos < 4; ++pos) {
        CHECK(pb_kvcache_stack_on_decode_step(stack, pos, NULL, NULL) == PB_KVCACHE_OK);
    }
    CHECK(pb_kvcache_stack_kept(stack, shared.positions, 8, shared.offsets, 3) == PB_KVCACHE_ERROR_OVERLAP);
    CHECK(pb_kvcache_stack_evict(stack, shared.positions, 8, shared.offsets, 3) == PB_KVCACHE_ERROR_OVERLAP);
    CHECK(pb_kvcache_stack_resident(stack) == 8 && pb_kvcache_stack_evict_count(stack) == 2);
    CHECK(pb_kvcache_stack_evict(stack, shared.positions, 2, shared.offsets + 3, 3) == PB_KVCACHE_OK);
    CHECK(pb_kvcache_stack_evict(stack, NULL, 0, shared.offsets, 3) == PB_KVCACHE_OK);
    pb_kvcache_stack_destroy(stack);
}

static void nothing_needs_no_address(void)
{
    const pb_kvcache_nan refuse = PB_KVCACHE_NAN_REFUSE;
    const pb_kvcache_pooling max = PB_KVCACHE_POOL_MAX;
    const pb_kvcache_edge count = PB_KVCACHE_EDGE_COUNT;
    const pb_kvcache_select_params params = {.kernel = 1, .protect = 1};
    uint32_t none[2] = {0, 0};
    const uint32_t one[2] = {0, 1};
    float scores[6] = {0};
    unsigned char data[16] = {0};
    size_t size;
    /* compact */
    const pb_kvcache_rows no_heads = {NULL, 0, 5, 8, 0, 0};
    const pb_kvcache_rows no_rows = {NULL, 2, 0, 8, 0, 0};
    const pb_kvcache_rows some = {data, 2, 2, 4, 8, 4};
    CHECK(pb_kvcache_compact(&no_heads, 0, 0, NULL, 0, NULL) == PB_KVCACHE_OK);
    CHECK(pb_kvcache_compact(&no_rows, 0, 2, NULL, 0, NULL) == PB_KVCACHE_OK);
    CHECK(pb_kvcache_compact(&no_rows, 0, 2, NULL, 0, none) == PB_KVCACHE_OK);
    CHECK(pb_kvcache_compact(&no_rows, 0, 2, NULL, 0, one) == PB_KVCACHE_ERROR_INDEX);
    CHECK(pb_kvcache_compact(&no_heads, 0, 1, NULL, 0, NULL) == PB_KVCACHE_ERROR_HEAD_RANGE);
    CHECK(pb_kvcache_compact(&some, 0, 2, NULL, 0, none) == PB_KVCACHE_OK);
    CHECK(pb_kvcache_compact(&some, 0, 2, NULL, 0, one) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_compact(&some, 0, 2, none, 0, NULL) == PB_KVCACHE_ERROR_NULL);
    /* choose and pool */
    CHECK(pb_kvcache_select_top(NULL, 0, 0, 4, NULL, refuse, NULL, 0, 0) == PB_KVCACHE_OK);
    CHECK(pb_kvcache_select_top(NULL, 4, 2, 0, none, refuse, NULL, 4, 0) == PB_KVCACHE_OK);
    CHECK(pb_kvcache_select_top(NULL, 0, 2, 0, one, refuse, NULL, 0, 0) == PB_KVCACHE_ERROR_COUNT);
    CHECK(pb_kvcache_select_top(scores, 3, 2, 3, none, refuse, NULL, 3, 0) == PB_KVCACHE_OK);
    CHECK(pb_kvcache_select_top(scores, 3, 2, 3, one, refuse, NULL, 3, 6) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_select_top(NULL, 3, 2, 3, none, refuse, NULL, 3, 6) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_pool_scores(NULL, 4, 0, 4, max, 3, count, refuse, NULL, 0, NULL, 4, 0) == PB_KVCACHE_OK);
    CHECK(pb_kvcache_pool_scores(NULL, 4, 2, 0, max, 3, count, refuse, NULL, 0, NULL, 4, 0) == PB_KVCACHE_OK);
    CHECK(pb_kvcache_pool_scores(NULL, 4, 2, 4, max, 3, count, refuse, NULL, 0, NULL, 4, 8) == PB_KVCACHE_ERROR_NULL);
    /* the selection, of no heads */
    CHECK(pb_kvcache_select_from_scores_workspace_size(&params, 4, &size) == PB_KVCACHE_OK);
    CHECK(pb_kvcache_select_from_scores(NULL, 3, 0, 4, &params, NULL, NULL, size, NULL, 4, 0) == PB_KVCACHE_OK);
    CHECK(pb_kvcache_select_from_scores(NULL, 3, 1, 4, &params, NULL, NULL, size, NULL, 4, 4)
          == PB_KVCACHE_ERROR_NULL);
    pb_kvcache_attention attn = {.data = scores, .num_q_heads = 1, .num_kv_heads = 1, .window = 1, .n = 4,
                                 .head_stride = 4, .row_stride = 4};
    CHECK(pb_kvcache_select_workspace_size(&attn, &params, 1, 1, &size) == PB_KVCACHE_OK);
    CHECK(pb_kvcache_select(&attn, &params, NULL, 1, 1, NULL, size, NULL, 4, 0) == PB_KVCACHE_OK);
    CHECK(pb_kvcache_window_scores(&attn, params.reduce, refuse, 1, 1, 1, NULL, size, NULL, 4, 0) == PB_KVCACHE_OK);
    CHECK(pb_kvcache_window_scores(&attn, params.reduce, refuse, 1, 0, 1, NULL, size, NULL, 4, 4)
          == PB_KVCACHE_ERROR_NULL);
}

int main(void)
{
    a_plan_is_not_written_over_its_inputs();
    a_stack_does_not_write_offsets_over_positions();
    nothing_needs_no_address();
    return END();
}
