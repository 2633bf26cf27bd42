/*
 * libFuzzer target: sequences of calls on a stack with arbitrary parameters and plans, short buffers, bad lengths and
 * bad weights, beside independent caches that are driven by hand: both must agree after every call. Built with
 * -fsanitize=fuzzer,address,undefined.
 */
#include "input.h"

enum { MOST_LAYERS = 5 };

/* No stack of the fuzzer takes more. */
static size_t most_bytes = (size_t)1 << 20;

static const pb_allocator allocator = {small_alloc, small_free, &most_bytes};

/* The stack, and the caches that it must equal. */
typedef struct pair {
    pb_kvcache_stack *stack;
    pb_kvcache *caches[MOST_LAYERS];
    uint32_t num_layers;
    size_t peak;
} pair;

static size_t resident(const pair *p)
{
    size_t count = 0;
    for (uint32_t layer = 0; layer < p->num_layers; ++layer) {
        count += pb_kvcache_kept_count(p->caches[layer]);
    }
    return count;
}

static void must_agree(pair *p)
{
    const size_t held = resident(p);
    p->peak = p->peak < held ? held : p->peak;
    MUST(pb_kvcache_stack_resident(p->stack) == held && pb_kvcache_stack_peak_resident(p->stack) == p->peak);
    uint32_t *all = malloc(held * sizeof *all + 1);
    size_t offsets[MOST_LAYERS + 1];
    MUST(pb_kvcache_stack_kept(p->stack, all, held, offsets, p->num_layers + 1) == PB_KVCACHE_OK);
    for (uint32_t layer = 0; layer < p->num_layers; ++layer) {
        const size_t count = pb_kvcache_kept_count(p->caches[layer]);
        uint32_t *kept = malloc(count * sizeof *kept + 1);
        MUST(pb_kvcache_kept(p->caches[layer], kept, count) == PB_KVCACHE_OK);
        MUST(offsets[layer + 1] - offsets[layer] == count);
        MUST(count == 0 || memcmp(all + offsets[layer], kept, count * sizeof *kept) == 0);
        free(kept);
    }
    free(all);
}

static void step(pair *p, input *in)
{
    float *rows[MOST_LAYERS] = {NULL};
    size_t lengths[MOST_LAYERS] = {0};
    uint32_t pos = 0;
    for (uint32_t layer = 0; layer < p->num_layers; ++layer) {
        const size_t count = pb_kvcache_kept_count(p->caches[layer]);
        uint32_t *kept = malloc(count * sizeof *kept + 1);
        MUST(pb_kvcache_kept(p->caches[layer], kept, count) == PB_KVCACHE_OK);
        pos = count > 0 && kept[count - 1] >= pos ? kept[count - 1] + 1 : pos;
        free(kept);
        const uint32_t kind = take(in, 1);
        lengths[layer] = kind % 32 == 0 ? number(in, 17) % 64 : count;
        if (kind % 32 == 1) {
            continue;
        }
        rows[layer] = malloc(lengths[layer] * sizeof(float) + 1);
        for (size_t i = 0; i < lengths[layer]; ++i) {
            const uint32_t weight = take(in, 1);
            const uint32_t bits = weight == 255 ? take(in, 4) : 0;
            rows[layer][i] = (float)(weight % 5) * 0.25f;
            if (weight == 255) {
                memcpy(&rows[layer][i], &bits, sizeof bits);
            }
        }
    }
    if (take(in, 1) % 16 == 0) {
        pos = number(in, 17);
    }
    const float *const *attn = take(in, 1) % 16 == 0 ? NULL : (const float *const *)rows;
    uint32_t refuses = UINT32_MAX;
    const pb_kvcache_status foretold = pb_kvcache_stack_step_check(p->stack, pos, attn, lengths, &refuses);
    const pb_kvcache_status status = pb_kvcache_stack_on_decode_step(p->stack, pos, attn, lengths);
    MUST(status == foretold && (refuses == p->num_layers) == (status == PB_KVCACHE_OK));
    if (status != PB_KVCACHE_OK) { /* the layer that is named refuses alone, with the same status */
        const float *row = attn == NULL ? NULL : attn[refuses];
        MUST(pb_kvcache_snapkv.on_decode_step(p->caches[refuses], pos, row, lengths[refuses]) == status);
    }
    for (uint32_t layer = 0; layer < p->num_layers; ++layer) {
        if (status == PB_KVCACHE_OK) {
            const float *row = attn == NULL ? NULL : attn[layer];
            MUST(pb_kvcache_snapkv.on_decode_step(p->caches[layer], pos, row, lengths[layer]) == PB_KVCACHE_OK);
        }
        free(rows[layer]);
    }
}

static void evict(pair *p, input *in)
{
    const size_t need = pb_kvcache_stack_evict_count(p->stack);
    const size_t capacity = take(in, 1) % 8 == 0 ? take(in, 1) % (need + 1) : need;
    uint32_t *victims = malloc(capacity * sizeof *victims + 1);
    size_t *offsets = malloc((p->num_layers + 1) * sizeof *offsets);
    const pb_kvcache_status status = pb_kvcache_stack_evict(p->stack, victims, capacity, offsets, p->num_layers + 1);
    MUST(status == (capacity < need ? PB_KVCACHE_ERROR_CAPACITY : PB_KVCACHE_OK));
    for (uint32_t layer = 0; status == PB_KVCACHE_OK && layer < p->num_layers; ++layer) {
        uint32_t *expected = malloc(need * sizeof *expected + 1);
        const size_t count = pb_kvcache_snapkv.evict(p->caches[layer], UINT32_MAX, expected, need);
        MUST(offsets[layer + 1] - offsets[layer] == count);
        MUST(count == 0 || memcmp(victims + offsets[layer], expected, count * sizeof *expected) == 0);
        free(expected);
    }
    free(offsets);
    free(victims);
}

static void evict_rows(pair *p, input *in)
{
    const uint32_t multiple_of = 1 + take(in, 1) % 9;
    const pb_kvcache_row_set which = (pb_kvcache_row_set)(take(in, 1) % 2);
    const size_t need = pb_kvcache_stack_evict_rows_count(p->stack, multiple_of);
    size_t stride = 0;
    for (uint32_t layer = 0; layer < p->num_layers; ++layer) {
        const size_t count = pb_kvcache_kept_count(p->caches[layer]);
        stride = count > stride ? count : stride;
    }
    uint32_t *victims = malloc(need * sizeof *victims + 1);
    uint32_t *rows = malloc(p->num_layers * stride * sizeof *rows + 1);
    uint32_t *counts = malloc(p->num_layers * sizeof *counts);
    size_t *offsets = malloc((p->num_layers + 1) * sizeof *offsets);
    MUST(pb_kvcache_stack_evict_rows(p->stack, multiple_of, which, victims, need, offsets, p->num_layers + 1, rows,
                                     stride, p->num_layers * stride, counts, p->num_layers)
         == PB_KVCACHE_OK);
    for (uint32_t layer = 0; layer < p->num_layers; ++layer) {
        pb_kvcache *cache = p->caches[layer];
        const size_t count = pb_kvcache_evict_rows_count(cache, UINT32_MAX, multiple_of);
        const size_t told = which == PB_KVCACHE_ROWS_VICTIMS ? count : pb_kvcache_kept_count(cache) - count;
        uint32_t *expected = malloc((count + told) * sizeof *expected + 1);
        MUST(pb_kvcache_evict_rows(cache, UINT32_MAX, multiple_of, which, expected, count, expected + count, told)
             == PB_KVCACHE_OK);
        MUST(offsets[layer + 1] - offsets[layer] == count && counts[layer] == told);
        MUST(count == 0 || memcmp(victims + offsets[layer], expected, count * sizeof *expected) == 0);
        MUST(told == 0 || memcmp(rows + layer * stride, expected + count, told * sizeof *expected) == 0);
        free(expected);
    }
    free(offsets);
    free(counts);
    free(rows);
    free(victims);
}

static void seed(pair *p, input *in)
{
    const uint32_t layer = take(in, 1) % (p->num_layers + 1);
    const size_t count = take(in, 1) % 24;
    const size_t rows = take(in, 1) % 3;
    uint32_t *positions = malloc(count * sizeof *positions + 1);
    float *attn = malloc(count * rows * sizeof *attn + 1);
    uint32_t pos = 0;
    for (size_t i = 0; i < count; ++i) {
        pos += take(in, 1) % 4;
        positions[i] = pos++;
    }
    for (size_t i = 0; i < count * rows; ++i) {
        attn[i] = (float)(int8_t)take(in, 1) + 100.0f;
    }
    const float *weights = rows == 0 ? NULL : attn;
    const pb_kvcache_status status = pb_kvcache_stack_seed(p->stack, layer, positions, count, weights, rows);
    MUST(status == (layer == p->num_layers ? PB_KVCACHE_ERROR_LAYER
                                           : pb_kvcache_seed(p->caches[layer], positions, count, weights, rows)));
    free(attn);
    free(positions);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    input in = {data, size};
    /* Parameters and a plan, mostly allowed ones */
    const uint32_t layers = take(&in, 1);
    const pb_kvcache_stack_params params
        = {layers < 0xFC ? layers % (MOST_LAYERS + 1) : take(&in, 4), number(&in, 17), number(&in, 17), number(&in, 17),
           number(&in, 17), number(&in, 17), number(&in, 17), number(&in, 17)};
    uint32_t plan[MOST_LAYERS];
    for (size_t i = 0; i < MOST_LAYERS; ++i) {
        plan[i] = number(&in, 17);
    }
    const uint32_t *budgets = params.num_layers <= MOST_LAYERS && take(&in, 1) % 2 == 0 ? plan : NULL;
    uint32_t refuses = 0;
    const pb_kvcache_status status = pb_kvcache_stack_check(&params, budgets, &refuses);
    MUST(refuses <= params.num_layers && (status != PB_KVCACHE_OK || refuses == params.num_layers));
    /* The stack, a second one to copy to, and the caches */
    pair p = {pb_kvcache_stack_create(&params, budgets, &allocator), {NULL}, params.num_layers, params.num_layers};
    pb_kvcache_stack *twin = pb_kvcache_stack_create(&params, budgets, &allocator);
    MUST(status == PB_KVCACHE_OK || p.stack == NULL);
    bool made = p.stack != NULL && twin != NULL && params.num_layers <= MOST_LAYERS;
    for (uint32_t layer = 0; made && layer < params.num_layers; ++layer) {
        const pb_kvcache_snapkv_params snapkv
            = {budgets == NULL ? 1 : budgets[layer], params.recent_window, params.obs_window, params.pool_kernel,
               params.spare, params.max_rollback};
        const pb_kvcache_pyramidkv_params pyramidkv
            = {params.budget,        layer,           params.num_layers, params.pyramid_ratio, params.recent_window,
               params.obs_window,    params.pool_kernel, params.spare, params.max_rollback};
        p.caches[layer] = budgets == NULL ? pb_kvcache_pyramidkv.create(&pyramidkv, NULL, NULL)
                                          : pb_kvcache_snapkv.create(&snapkv, NULL, NULL);
        made = p.caches[layer] != NULL;
    }
    /* Calls, until the bytes are used up */
    while (made && in.left > 0) {
        pb_kvcache_stack *other;
        switch (take(&in, 1) % 13) {
        case 12: {
            const uint32_t most = pb_kvcache_stack_rollback_count(p.stack);
            const uint32_t count = take(&in, 1) % 8;
            const pb_kvcache_status back = pb_kvcache_stack_rollback(p.stack, count);
            MUST(back == (count > most ? PB_KVCACHE_ERROR_ROLLBACK : PB_KVCACHE_OK));
            for (uint32_t layer = 0; back == PB_KVCACHE_OK && layer < params.num_layers; ++layer) {
                MUST(pb_kvcache_rollback(p.caches[layer], count) == PB_KVCACHE_OK);
            }
            break;
        }
        case 0:
            seed(&p, &in);
            break;
        case 1:
            MUST(pb_kvcache_stack_reset(p.stack) == PB_KVCACHE_OK);
            p.peak = p.num_layers;
            for (uint32_t layer = 0; layer < p.num_layers; ++layer) {
                MUST(pb_kvcache_reset(p.caches[layer]) == PB_KVCACHE_OK);
            }
            break;
        case 2: /* a copy goes on in the stack's place */
            MUST(pb_kvcache_stack_copy(twin, p.stack) == PB_KVCACHE_OK);
            other = twin;
            twin = p.stack;
            p.stack = other;
            break;
        case 3:
            evict_rows(&p, &in);
            break;
        case 4:
        case 5:
            evict(&p, &in);
            break;
        default:
            step(&p, &in);
        }
        must_agree(&p);
    }
    for (uint32_t layer = 0; layer < MOST_LAYERS; ++layer) {
        pb_kvcache_snapkv.destroy(p.caches[layer]);
    }
    pb_kvcache_stack_destroy(twin);
    pb_kvcache_stack_destroy(p.stack);
    return 0;
}
