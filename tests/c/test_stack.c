/* What the vectors cannot say of stacks: NULLs, buffers, allocators, sizes, copies, independent caches beside them. */
#include "arena.h"
#include "check.h"
#include "checks.h"
#include "internal.h"
#include "kernels.h"

enum { LAYERS = 3 };

static const pb_kvcache_stack_params small = {LAYERS, 4, 3, 1, 2, 3, 0, 0}; /* layers of 6, 4 and 2 */

static void test_null(void)
{
    uint32_t buffer[8] = {0};
    size_t offsets[8] = {9, 9, 9, 9, 9, 9, 9, 9};
    uint32_t layer = 5;
    pb_kvcache_stack_destroy(NULL);
    CHECK(pb_kvcache_stack_check(NULL, NULL, &layer) == PB_KVCACHE_ERROR_NULL && layer == 0);
    CHECK(pb_kvcache_stack_check(NULL, NULL, NULL) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_stack_check(&small, NULL, &layer) == PB_KVCACHE_OK && layer == LAYERS);
    CHECK(pb_kvcache_stack_create(NULL, NULL, NULL) == NULL);
    CHECK(pb_kvcache_stack_on_decode_step(NULL, 1, NULL, NULL) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_stack_step_check(NULL, 1, NULL, NULL, &layer) == PB_KVCACHE_ERROR_NULL && layer == 0);
    CHECK(pb_kvcache_stack_evict_count(NULL) == 0 && pb_kvcache_stack_num_layers(NULL) == 0);
    CHECK(pb_kvcache_stack_evict(NULL, buffer, 8, offsets, 8) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_stack_kept(NULL, buffer, 8, offsets, 8) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_stack_layer(NULL, 0) == NULL);
    CHECK(pb_kvcache_stack_budgets(NULL, buffer, 8) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_stack_resident(NULL) == 0 && pb_kvcache_stack_peak_resident(NULL) == 0);
    CHECK(pb_kvcache_stack_memory_bytes(NULL) == 0 && pb_kvcache_stack_reset(NULL) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_stack_seed(NULL, 0, buffer, 1, NULL, 0) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_stack_copy(NULL, NULL) == PB_KVCACHE_ERROR_NULL);

    const pb_kvcache_stack_params defaults = PB_KVCACHE_STACK_PARAMS_DEFAULT(1);
    pb_kvcache_stack *stack = pb_kvcache_stack_create(&defaults, NULL, NULL);
    CHECK(pb_kvcache_effective_budget(pb_kvcache_stack_layer(stack, 0)) == 512);
    pb_kvcache_stack_destroy(stack);

    stack = pb_kvcache_stack_create(&small, NULL, NULL);
    CHECK(pb_kvcache_stack_num_layers(stack) == LAYERS);
    CHECK(pb_kvcache_stack_layer(stack, LAYERS - 1) != NULL && pb_kvcache_stack_layer(stack, LAYERS) == NULL);
    CHECK(pb_kvcache_stack_layer(stack, UINT32_MAX) == NULL);
    CHECK(pb_kvcache_stack_budgets(stack, NULL, 8) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_stack_budgets(stack, buffer, LAYERS - 1) == PB_KVCACHE_ERROR_CAPACITY && buffer[0] == 0);
    CHECK(pb_kvcache_stack_budgets(stack, buffer, LAYERS) == PB_KVCACHE_OK && buffer[0] == 6 && buffer[2] == 2);
    CHECK(pb_kvcache_stack_seed(stack, LAYERS, buffer, 1, NULL, 0) == PB_KVCACHE_ERROR_LAYER);
    CHECK(pb_kvcache_stack_seed(stack, 0, NULL, 1, NULL, 0) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_stack_copy(stack, NULL) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_stack_kept(stack, buffer, 8, NULL, 8) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_stack_kept(stack, NULL, 8, offsets, 8) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_stack_kept(stack, buffer, LAYERS - 1, offsets, 8) == PB_KVCACHE_ERROR_CAPACITY);
    CHECK(pb_kvcache_stack_kept(stack, buffer, 8, offsets, LAYERS) == PB_KVCACHE_ERROR_CAPACITY && offsets[0] == 9);

    /* A row without lengths. An attention of all NULLs needs none. */
    const float row[1] = {1.0f};
    const float *const rows[LAYERS] = {NULL, row, NULL};
    const float *const none[LAYERS] = {NULL, NULL, NULL};
    CHECK(pb_kvcache_stack_step_check(stack, 1, rows, NULL, &layer) == PB_KVCACHE_ERROR_NULL && layer == 1);
    CHECK(pb_kvcache_stack_on_decode_step(stack, 1, rows, NULL) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_stack_resident(stack) == LAYERS);
    CHECK(pb_kvcache_stack_on_decode_step(stack, 1, none, NULL) == PB_KVCACHE_OK);
    CHECK(pb_kvcache_stack_on_decode_step(stack, 2, NULL, NULL) == PB_KVCACHE_OK);

    /* One victim: too little room changes nothing, and nothing is written beyond the room. */
    CHECK(pb_kvcache_stack_evict_count(stack) == 1);
    CHECK(pb_kvcache_stack_evict(stack, NULL, 1, offsets, 4) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_stack_evict(stack, buffer, 1, NULL, 4) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_stack_evict(stack, buffer, 0, offsets, 4) == PB_KVCACHE_ERROR_CAPACITY);
    CHECK(pb_kvcache_stack_evict(stack, buffer, 1, offsets, 3) == PB_KVCACHE_ERROR_CAPACITY);
    CHECK(pb_kvcache_stack_resident(stack) == 3 * LAYERS && offsets[0] == 9);
    buffer[1] = 77;
    CHECK(pb_kvcache_stack_evict(stack, buffer, 1, offsets, 4) == PB_KVCACHE_OK);
    CHECK(offsets[0] == 0 && offsets[1] == 0 && offsets[2] == 0 && offsets[3] == 1 && offsets[4] == 9);
    CHECK(buffer[0] == 0 && buffer[1] == 77);
    /* Nothing to drop needs no victims. */
    CHECK(pb_kvcache_stack_evict(stack, NULL, 0, offsets, 4) == PB_KVCACHE_OK && offsets[3] == 0);
    /* A layer that keeps nothing has no part in what is kept. Where none does, no positions are needed. */
    CHECK(pb_kvcache_stack_seed(stack, 1, NULL, 0, NULL, 0) == PB_KVCACHE_OK);
    CHECK(pb_kvcache_stack_kept(stack, buffer, 8, offsets, 4) == PB_KVCACHE_OK);
    CHECK(offsets[1] == 3 && offsets[2] == 3 && offsets[3] == 5 && buffer[3] == 1 && buffer[4] == 2);
    CHECK(pb_kvcache_stack_seed(stack, 0, NULL, 0, NULL, 0) == PB_KVCACHE_OK);
    CHECK(pb_kvcache_stack_seed(stack, 2, NULL, 0, NULL, 0) == PB_KVCACHE_OK);
    CHECK(pb_kvcache_stack_resident(stack) == 0);
    CHECK(pb_kvcache_stack_kept(stack, NULL, 0, offsets, 4) == PB_KVCACHE_OK && offsets[0] == 0 && offsets[3] == 0);
    pb_kvcache_stack_destroy(stack);
}

/* An eviction that tells rows: what it refuses changes neither the stack nor an output. */
static void test_evict_rows(void)
{
    pb_kvcache_stack_params params = small;
    params.spare = 2;
    pb_kvcache_stack *stack = pb_kvcache_stack_create(&params, NULL, NULL);
    const pb_kvcache_row_set kept = PB_KVCACHE_ROWS_KEPT;
    uint32_t victims[8] = {77};
    uint32_t rows[24] = {78};
    uint32_t counts[LAYERS] = {79};
    size_t offsets[LAYERS + 1] = {80};
    for (uint32_t pos = 1; pos < 6; ++pos) {
        CHECK(pb_kvcache_stack_on_decode_step(stack, pos, NULL, NULL) == PB_KVCACHE_OK);
    }
    /* 6, 4 and 2 of six: 0, 2 and 4 go. 6, 4 and 2 rows stay. */
    CHECK(pb_kvcache_stack_evict_rows_count(NULL, 1) == 0 && pb_kvcache_stack_evict_rows_count(stack, 0) == 0);
    CHECK(pb_kvcache_stack_evict_rows_count(stack, 1) == 6 && pb_kvcache_stack_evict_rows_count(stack, 5) == 1 + 1 + 1);
#define EVICT pb_kvcache_stack_evict_rows
    CHECK(EVICT(NULL, 1, kept, victims, 8, offsets, 4, rows, 8, 24, counts, 3) == PB_KVCACHE_ERROR_NULL);
    CHECK(EVICT(stack, 1, kept, NULL, 8, offsets, 4, rows, 8, 24, counts, 3) == PB_KVCACHE_ERROR_NULL);
    CHECK(EVICT(stack, 1, kept, victims, 8, NULL, 4, rows, 8, 24, counts, 3) == PB_KVCACHE_ERROR_NULL);
    CHECK(EVICT(stack, 1, kept, victims, 8, offsets, 4, rows, 8, 24, NULL, 3) == PB_KVCACHE_ERROR_NULL);
    CHECK(EVICT(stack, 0, kept, victims, 8, offsets, 4, rows, 8, 24, counts, 3) == PB_KVCACHE_ERROR_PLAN_MULTIPLE);
    CHECK(EVICT(stack, 1, (pb_kvcache_row_set)-1, victims, 8, offsets, 4, rows, 8, 24, counts, 3)
          == PB_KVCACHE_ERROR_OPTION);
    CHECK(EVICT(stack, 1, kept, victims, 5, offsets, 4, rows, 8, 24, counts, 3) == PB_KVCACHE_ERROR_CAPACITY);
    CHECK(EVICT(stack, 1, kept, victims, 8, offsets, 3, rows, 8, 24, counts, 3) == PB_KVCACHE_ERROR_CAPACITY);
    CHECK(EVICT(stack, 1, kept, victims, 8, offsets, 4, rows, 8, 24, counts, 2) == PB_KVCACHE_ERROR_CAPACITY);
    CHECK(EVICT(stack, 1, kept, victims, 8, offsets, 4, rows, 5, 24, counts, 3) == PB_KVCACHE_ERROR_CAPACITY);
    CHECK(EVICT(stack, 1, kept, victims, 8, offsets, 4, rows, 8, 17, counts, 3) == PB_KVCACHE_ERROR_CAPACITY);
    for (size_t divisor = 1; divisor <= 4; divisor *= 2) { /* the product, the sum or the bytes do not fit */
        CHECK(EVICT(stack, 1, kept, victims, 8, offsets, 4, rows, SIZE_MAX / divisor, SIZE_MAX, counts, 3)
              == PB_KVCACHE_ERROR_CAPACITY);
    }
    CHECK(EVICT(stack, 1, kept, victims, 8, offsets, 4, victims, 6, 24, counts, 3) == PB_KVCACHE_ERROR_OVERLAP);
    CHECK(EVICT(stack, 1, kept, victims, 8, offsets, 4, rows, 8, 24, rows + 17, 3) == PB_KVCACHE_ERROR_OVERLAP);
    CHECK(EVICT(stack, 1, kept, victims, 8, offsets, 4, rows, 8, 24, victims + 5, 3) == PB_KVCACHE_ERROR_OVERLAP);
    CHECK(victims[0] == 77 && rows[0] == 78 && counts[0] == 79 && offsets[0] == 80);
    CHECK(pb_kvcache_stack_resident(stack) == 18);
    /* As much room as there has to be, and not one row more */
    rows[14] = 81;
    CHECK(EVICT(stack, 1, kept, victims, 6, offsets, 4, rows, 6, 14, counts, 3) == PB_KVCACHE_OK);
    CHECK(counts[0] == 6 && counts[1] == 4 && counts[2] == 2 && offsets[1] == 0 && offsets[2] == 2 && offsets[3] == 6);
    CHECK(rows[0] == 0 && rows[5] == 5 && rows[6] == 2 && rows[9] == 5 && rows[12] == 4 && rows[13] == 5);
    CHECK(rows[14] == 81 && victims[0] == 0 && victims[1] == 1 && victims[5] == 3);
    CHECK(pb_kvcache_stack_resident(stack) == 12);
    /* Nothing to drop, and rows that nobody asks for */
    CHECK(EVICT(stack, 1, kept, NULL, 0, offsets, 4, NULL, 0, 0, NULL, 0) == PB_KVCACHE_OK && offsets[3] == 0);
#undef EVICT
    pb_kvcache_stack_destroy(stack);
}

static void test_allocation(void)
{
    arena a = {0};
    const pb_allocator allocator = {arena_alloc, arena_free, &a};
    pb_kvcache_stack *stack = pb_kvcache_stack_create(&small, NULL, &allocator);
    CHECK(stack != NULL && a.outstanding == 1 && a.bytes == pb_kvcache_stack_memory_bytes(stack));
    uint32_t victims[64];
    size_t offsets[LAYERS + 1];
    const float row[16] = {0};
    const float *const rows[LAYERS] = {row, row, row};
    for (uint32_t pos = 1; pos < 200; ++pos) {
        size_t lengths[LAYERS];
        for (uint32_t layer = 0; layer < LAYERS; ++layer) {
            lengths[layer] = pb_kvcache_kept_count(pb_kvcache_stack_layer(stack, layer));
        }
        CHECK(pb_kvcache_stack_on_decode_step(stack, pos, rows, lengths) == PB_KVCACHE_OK);
        CHECK(pb_kvcache_stack_evict(stack, victims, 64, offsets, LAYERS + 1) == PB_KVCACHE_OK);
    }
    CHECK(pb_kvcache_stack_resident(stack) == 12 && pb_kvcache_stack_peak_resident(stack) == 15);
    CHECK(pb_kvcache_stack_reset(stack) == PB_KVCACHE_OK && pb_kvcache_stack_peak_resident(stack) == LAYERS);
    CHECK(a.calls == 1); /* one block, and nothing after creation */
    /* A layer belongs to the stack: destroying it, should someone cast the const away, gives nothing back. */
    pb_kvcache_snapkv.destroy((pb_kvcache *)(uintptr_t)pb_kvcache_stack_layer(stack, 1));
    CHECK(a.outstanding == 1);
    pb_kvcache_stack_destroy(stack);
    CHECK(a.outstanding == 0 && a.bytes == 0);

    arena failing = {0};
    failing.fail_at = 1;
    const pb_allocator short_of_memory = {arena_alloc, arena_free, &failing};
    const pb_allocator no_alloc = {NULL, arena_free, &a};
    const pb_allocator no_free = {arena_alloc, NULL, &a};
    CHECK(pb_kvcache_stack_create(&small, NULL, &short_of_memory) == NULL && failing.outstanding == 0);
    a.calls = 0;
    CHECK(pb_kvcache_stack_create(&small, NULL, &no_alloc) == NULL);
    CHECK(pb_kvcache_stack_create(&small, NULL, &no_free) == NULL);
    const uint32_t bad_plan[LAYERS] = {4, 4, 1};
    CHECK(pb_kvcache_stack_create(&small, bad_plan, &allocator) == NULL);
    CHECK(a.calls == 0);
}

/* Totals at the edge: layers that fit alone and not together. */
static void test_sizes(void)
{
    uint32_t layer = 9;
    /* About 2^30 * 84 bytes a layer. With 65536 layers 2^52, and with rings of 2^20 slots 2^68. */
    const pb_kvcache_stack_params large = {65536, 1u << 30, 1, 0, 16, 1, 0, 0};
    const pb_kvcache_stack_params too_large = {65536, 1u << 30, 1, 0, 1u << 20, 1, 0, 0};
    const pb_kvcache_stack_params most = {PB_KVCACHE_STACK_MAX_LAYERS, 2, 1, 0, 1, 1, 0, 0};
    const pb_kvcache_stack_params beyond = {PB_KVCACHE_STACK_MAX_LAYERS + 1, 2, 1, 0, 1, 1, 0, 0};
    const pb_kvcache_status want = sizeof(size_t) == 4 ? PB_KVCACHE_ERROR_TOO_LARGE : PB_KVCACHE_OK;
    CHECK(pb_kvcache_stack_check(&large, NULL, NULL) == want);
    CHECK(pb_kvcache_stack_check(&too_large, NULL, &layer) == PB_KVCACHE_ERROR_TOO_LARGE && layer == 0);
    CHECK(pb_kvcache_stack_check(&most, NULL, &layer) == PB_KVCACHE_OK && layer == 65536);
    CHECK(pb_kvcache_stack_check(&beyond, NULL, &layer) == PB_KVCACHE_ERROR_TOO_LARGE && layer == 0);
    /* A layer of a gigabyte fits 32 bits alone. Four do not. */
    const pb_kvcache_stack_params four = {4, 1u << 25, 1, 0, 3, 1, 0, 0};
    const pb_kvcache_stack_params one = {1, 1u << 25, 1, 0, 3, 1, 0, 0};
    CHECK(pb_kvcache_stack_check(&one, NULL, NULL) == PB_KVCACHE_OK);
    CHECK(pb_kvcache_stack_check(&four, NULL, NULL) == want);

    /* Layers of 2^61 bytes fit 64 bits alone. Three do together, four do not. Where one does not, it is the first. */
    pb_kvcache_stack_params huge = {3, 1u << 30, 1, 0, 1u << 29, 1, 0, 0};
    CHECK(pb_kvcache_stack_check(&huge, NULL, NULL) == want);
    huge.num_layers = 4;
    CHECK(pb_kvcache_stack_check(&huge, NULL, &layer) == PB_KVCACHE_ERROR_TOO_LARGE && layer == 0);

    pb_kvcache_stack *stack = pb_kvcache_stack_create(&most, NULL, NULL);
    CHECK(stack != NULL && pb_kvcache_stack_resident(stack) == 65536);
    CHECK(pb_kvcache_stack_on_decode_step(stack, 1, NULL, NULL) == PB_KVCACHE_OK);
    CHECK(pb_kvcache_stack_peak_resident(stack) == 2 * 65536);
    pb_kvcache_stack_destroy(stack);
}

static uint32_t state = 1;

static uint32_t drawn(uint32_t below)
{
    state = state * 1664525u + 1013904223u;
    return (state >> 16) % below;
}

/* Layer for layer what independent caches are, through steps, late evictions and copies. */
static void test_against_independent_caches(const uint32_t *plan)
{
    pb_kvcache *caches[LAYERS];
    pb_kvcache_stack *stack = pb_kvcache_stack_create(&small, plan, NULL);
    pb_kvcache_stack *twin = pb_kvcache_stack_create(&small, plan, NULL);
    const pb_kvcache_vtable *vtable = plan == NULL ? &pb_kvcache_pyramidkv : &pb_kvcache_snapkv;
    for (uint32_t layer = 0; layer < LAYERS; ++layer) {
        const pb_kvcache_pyramidkv_params pyramidkv = {4, layer, LAYERS, 3, 1, 2, 3, 0, 0};
        const pb_kvcache_snapkv_params snapkv = {plan == NULL ? 1 : plan[layer], 1, 2, 3, 0, 0};
        caches[layer] = plan == NULL ? vtable->create(&pyramidkv, NULL, NULL) : vtable->create(&snapkv, NULL, NULL);
    }
    for (uint32_t pos = 1; pos < 500; ++pos) {
        float weights[LAYERS][16];
        const float *rows[LAYERS];
        size_t lengths[LAYERS];
        bool full = false;
        for (uint32_t layer = 0; layer < LAYERS; ++layer) {
            lengths[layer] = pb_kvcache_kept_count(caches[layer]);
            full = full || lengths[layer] == pb_kvcache_capacity(caches[layer]);
            for (size_t i = 0; i < lengths[layer]; ++i) {
                weights[layer][i] = (float)drawn(5) * 0.25f;
            }
            rows[layer] = drawn(8) == 0 ? NULL : weights[layer];
        }
        CHECK(pb_kvcache_stack_on_decode_step(stack, pos, rows, lengths)
              == (full ? PB_KVCACHE_ERROR_FULL : PB_KVCACHE_OK));
        for (uint32_t layer = 0; !full && layer < LAYERS; ++layer) {
            CHECK(vtable->on_decode_step(caches[layer], pos, rows[layer], lengths[layer]) == PB_KVCACHE_OK);
        }
        if (drawn(4) == 0) { /* the twin goes on in its place */
            CHECK(pb_kvcache_stack_copy(twin, stack) == PB_KVCACHE_OK);
            pb_kvcache_stack *other = stack;
            stack = twin;
            twin = other;
        }
        if (full || drawn(2) == 0) {
            uint32_t victims[64];
            uint32_t expected[16];
            size_t offsets[LAYERS + 1];
            CHECK(pb_kvcache_stack_evict(stack, victims, 64, offsets, LAYERS + 1) == PB_KVCACHE_OK);
            for (uint32_t layer = 0; layer < LAYERS; ++layer) {
                const size_t count = vtable->evict(caches[layer], UINT32_MAX, expected, 16);
                CHECK(offsets[layer + 1] - offsets[layer] == count);
                CHECK(memcmp(victims + offsets[layer], expected, count * sizeof(uint32_t)) == 0);
            }
        }
        for (uint32_t layer = 0; layer < LAYERS; ++layer) {
            uint32_t kept[2][16];
            const pb_kvcache *read = pb_kvcache_stack_layer(stack, layer);
            const size_t count = pb_kvcache_kept_count(caches[layer]);
            CHECK(pb_kvcache_kept_count(read) == count);
            CHECK(pb_kvcache_kept(read, kept[0], 16) == PB_KVCACHE_OK);
            CHECK(pb_kvcache_kept(caches[layer], kept[1], 16) == PB_KVCACHE_OK);
            CHECK(memcmp(kept[0], kept[1], count * sizeof(uint32_t)) == 0);
        }
    }
    for (uint32_t layer = 0; layer < LAYERS; ++layer) {
        vtable->destroy(caches[layer]);
    }
    pb_kvcache_stack_destroy(stack);
    pb_kvcache_stack_destroy(twin);
}

static void test_copy_mismatch(void)
{
    const uint32_t plans[3][LAYERS] = {{6, 4, 2}, {6, 4, 3}, {7, 4, 2}};
    const pb_kvcache_stack_params one = {1, 4, 3, 1, 2, 3, 0, 0};
    pb_kvcache_stack *a = pb_kvcache_stack_create(&small, plans[0], NULL);
    pb_kvcache_stack *last = pb_kvcache_stack_create(&small, plans[1], NULL);
    pb_kvcache_stack *first = pb_kvcache_stack_create(&small, plans[2], NULL);
    pb_kvcache_stack *fewer = pb_kvcache_stack_create(&one, NULL, NULL);
    CHECK(pb_kvcache_stack_on_decode_step(a, 1, NULL, NULL) == PB_KVCACHE_OK);
    CHECK(pb_kvcache_stack_copy(last, a) == PB_KVCACHE_ERROR_MISMATCH);
    CHECK(pb_kvcache_stack_copy(first, a) == PB_KVCACHE_ERROR_MISMATCH);
    CHECK(pb_kvcache_stack_copy(fewer, a) == PB_KVCACHE_ERROR_MISMATCH);
    CHECK(pb_kvcache_stack_copy(a, fewer) == PB_KVCACHE_ERROR_MISMATCH);
    CHECK(pb_kvcache_stack_resident(last) == LAYERS && pb_kvcache_stack_resident(first) == LAYERS);
    CHECK(pb_kvcache_stack_copy(a, a) == PB_KVCACHE_OK && pb_kvcache_stack_resident(a) == 2 * LAYERS);
    pb_kvcache_stack_destroy(a);
    pb_kvcache_stack_destroy(last);
    pb_kvcache_stack_destroy(first);
    pb_kvcache_stack_destroy(fewer);
}

int main(void)
{
    const uint32_t plan[LAYERS] = {2, 7, 4};
    test_null();
    test_evict_rows();
    test_allocation();
    test_sizes();
    test_against_independent_caches(NULL);
    test_against_independent_caches(plan);
    test_copy_mismatch();
    return END();
}
