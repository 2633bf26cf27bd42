/* Steps taken back, in C: NULLs, and caches beside twins that never made the steps, byte for byte of their states. */
#include <stdbool.h>
#include <string.h>

#include "check.h"
#include "pb_kvcache.h"

enum { LAYERS = 3, MOST = 8192 };

static const struct {
    const pb_kvcache_vtable *vtable;
    uint32_t params[9]; /* evicts to 9, 5 spare, 4 steps to take back */
} policies[] = {
    {&pb_kvcache_snapkv, {9, 2, 3, 3, 5, 4}},      {&pb_kvcache_pyramidkv, {9, 1, 2, 1, 0, 5, 1, 5, 4}},
    {&pb_kvcache_sliding_window, {9, 5, 4}},       {&pb_kvcache_streaming_llm, {9, 3, 5, 4}},
    {&pb_kvcache_h2o, {9, 1, 5, 4}},               {&pb_kvcache_tova, {9, 5, 4}},
    {&pb_kvcache_scissorhands, {9, 1, 5, 4}},
};

static uint32_t state = 1;

static uint32_t drawn(uint32_t below)
{
    state = state * 1664525u + 1013904223u;
    return (state >> 16) % below;
}

/* Draw a row for `count` positions. NULL now and then. */
static const float *row_of(float *weights, size_t count)
{
    for (size_t i = 0; i < count; ++i) {
        weights[i] = (float)drawn(7) * 0.3f;
    }
    return drawn(5) == 0 ? NULL : weights;
}

static bool same_state(const pb_kvcache *a, const pb_kvcache *b)
{
    static unsigned char bytes[2][MOST];
    const size_t size = pb_kvcache_state_bytes(a);
    return pb_kvcache_save(a, bytes[0], MOST) == PB_KVCACHE_OK && pb_kvcache_state_bytes(b) == size
           && pb_kvcache_save(b, bytes[1], MOST) == PB_KVCACHE_OK && memcmp(bytes[0], bytes[1], size) == 0;
}

static void test_null(void)
{
    CHECK(pb_kvcache_rollback_count(NULL) == 0 && pb_kvcache_stack_rollback_count(NULL) == 0);
    CHECK(pb_kvcache_rollback(NULL, 0) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_stack_rollback(NULL, 0) == PB_KVCACHE_ERROR_NULL);
    pb_kvcache *cache = pb_kvcache_snapkv.create(NULL, NULL, NULL);
    CHECK(pb_kvcache_snapkv.on_decode_step(cache, 1, NULL, 0) == PB_KVCACHE_OK);
    CHECK(pb_kvcache_rollback_count(cache) == 0 && pb_kvcache_rollback(cache, 0) == PB_KVCACHE_OK);
    CHECK(pb_kvcache_rollback(cache, 1) == PB_KVCACHE_ERROR_ROLLBACK);
    CHECK(pb_kvcache_rollback(cache, UINT32_MAX) == PB_KVCACHE_ERROR_ROLLBACK && pb_kvcache_kept_count(cache) == 2);
    pb_kvcache_snapkv.destroy(cache);
}

/* Drafts and their end, again and again: the cache stays what its twin is. Copies take the list with them. */
static void test_drafts(const pb_kvcache_vtable *vtable, const uint32_t *params)
{
    float weights[32];
    uint32_t victims[2][32];
    pb_kvcache *drafting = vtable->create(params, NULL, NULL);
    pb_kvcache *spare = vtable->create(params, NULL, NULL);
    pb_kvcache *twin = vtable->create(params, NULL, NULL);
    for (uint32_t pos = 1; pos < 600; ++pos) {
        size_t count = pb_kvcache_kept_count(twin);
        if (count == pb_kvcache_capacity(twin) || drawn(6) == 0) {
            const size_t dropped = vtable->evict(twin, 9 - drawn(3), victims[0], 32);
            const uint32_t left = (uint32_t)(count - dropped);
            CHECK(vtable->evict(drafting, left, victims[1], 32) == dropped);
            CHECK(memcmp(victims[0], victims[1], dropped * sizeof victims[0][0]) == 0);
            CHECK(dropped == 0 || pb_kvcache_rollback_count(drafting) == 0);
            count -= dropped;
        }
        if (count == pb_kvcache_capacity(twin)) { /* tova, when all that is kept has never been weighed */
            CHECK(pb_kvcache_reset(twin) == PB_KVCACHE_OK && pb_kvcache_reset(drafting) == PB_KVCACHE_OK);
            count = 1;
        }
        const float *row = row_of(weights, count);
        CHECK(vtable->on_decode_step(twin, pos, row, count) == PB_KVCACHE_OK);
        CHECK(vtable->on_decode_step(drafting, pos, row, count) == PB_KVCACHE_OK);
        uint32_t drafts = 0;
        for (const uint32_t wanted = drawn(5); drafts < wanted; ++drafts) {
            count = pb_kvcache_kept_count(drafting);
            if (count == pb_kvcache_capacity(drafting)) {
                break;
            }
            row = row_of(weights, count);
            CHECK(vtable->on_decode_step(drafting, pos + 1 + drafts, row, count) == PB_KVCACHE_OK);
        }
        CHECK(pb_kvcache_rollback_count(drafting) >= drafts && pb_kvcache_rollback_count(drafting) <= 4);
        if (drawn(3) == 0) {
            CHECK(pb_kvcache_copy(spare, drafting) == PB_KVCACHE_OK && same_state(spare, drafting));
            pb_kvcache *other = drafting;
            drafting = spare;
            spare = other;
        }
        CHECK(pb_kvcache_rollback(drafting, drafts) == PB_KVCACHE_OK && same_state(drafting, twin));
    }
    vtable->destroy(drafting);
    vtable->destroy(spare);
    vtable->destroy(twin);
}

/* A list of another length is another layout. */
static void test_mismatch(void)
{
    const pb_kvcache_snapkv_params params[2] = {{9, 2, 3, 3, 5, 4}, {9, 2, 3, 3, 5, 3}};
    unsigned char data[MOST];
    pb_kvcache *a = pb_kvcache_snapkv.create(&params[0], NULL, NULL);
    pb_kvcache *b = pb_kvcache_snapkv.create(&params[1], NULL, NULL);
    CHECK(pb_kvcache_snapkv.on_decode_step(a, 1, NULL, 0) == PB_KVCACHE_OK);
    CHECK(pb_kvcache_copy(b, a) == PB_KVCACHE_ERROR_MISMATCH && pb_kvcache_kept_count(b) == 1);
    /* A state has nothing of the list, so it goes from one to the other, and ends the list. */
    CHECK(pb_kvcache_save(a, data, MOST) == PB_KVCACHE_OK);
    CHECK(pb_kvcache_snapkv.on_decode_step(b, 5, NULL, 0) == PB_KVCACHE_OK && pb_kvcache_rollback_count(b) == 1);
    CHECK(pb_kvcache_load(b, data, pb_kvcache_state_bytes(a)) == PB_KVCACHE_OK && pb_kvcache_rollback_count(b) == 0);
    CHECK(pb_kvcache_contains(b, 1) && !pb_kvcache_contains(b, 5));
    pb_kvcache_snapkv.destroy(a);
    pb_kvcache_snapkv.destroy(b);
}

static void test_stack(void)
{
    const pb_kvcache_stack_params params = {LAYERS, 9, 3, 2, 3, 3, 5, 4};
    float weights[LAYERS][32];
    pb_kvcache_stack *stack = pb_kvcache_stack_create(&params, NULL, NULL);
    pb_kvcache_stack *twin = pb_kvcache_stack_create(&params, NULL, NULL);
    for (uint32_t pos = 1; pos < 12; ++pos) {
        const float *rows[LAYERS];
        size_t lengths[LAYERS];
        for (uint32_t layer = 0; layer < LAYERS; ++layer) {
            lengths[layer] = pb_kvcache_kept_count(pb_kvcache_stack_layer(stack, layer));
            rows[layer] = row_of(weights[layer], lengths[layer]);
        }
        CHECK(pb_kvcache_stack_on_decode_step(stack, pos, rows, lengths) == PB_KVCACHE_OK);
        if (pos < 9) {
            CHECK(pb_kvcache_stack_on_decode_step(twin, pos, rows, lengths) == PB_KVCACHE_OK);
        }
    }
    CHECK(pb_kvcache_stack_rollback_count(stack) == 4);
    CHECK(pb_kvcache_stack_rollback(stack, 5) == PB_KVCACHE_ERROR_ROLLBACK);
    CHECK(pb_kvcache_stack_resident(stack) == 36);
    CHECK(pb_kvcache_stack_rollback(stack, 3) == PB_KVCACHE_OK && pb_kvcache_stack_rollback_count(stack) == 1);
    for (uint32_t layer = 0; layer < LAYERS; ++layer) {
        CHECK(same_state(pb_kvcache_stack_layer(stack, layer), pb_kvcache_stack_layer(twin, layer)));
    }
    CHECK(pb_kvcache_stack_resident(stack) == 27 && pb_kvcache_stack_peak_resident(stack) == 36);
    pb_kvcache_stack_destroy(stack);
    pb_kvcache_stack_destroy(twin);
}

int main(void)
{
    test_null();
    for (size_t i = 0; i < sizeof policies / sizeof policies[0]; ++i) {
        test_drafts(policies[i].vtable, policies[i].params);
    }
    test_mismatch();
    test_stack();
    return END();
}
