/* What the vectors cannot say of the baselines: defaults, NULLs, allocators, copies. */
#include "arena.h"
#include "check.h"
#include "checks.h"
#include "internal.h"
#include "kernels.h"

static const struct {
    const char *name;
    const pb_kvcache_vtable *vtable;
    uint32_t small[4]; /* parameters that evict to 4 */
    size_t bytes_per_position;
} baselines[] = {
    {"sliding_window", &pb_kvcache_sliding_window, {4, 0, 0, 0}, 4},
    {"streaming_llm", &pb_kvcache_streaming_llm, {4, 1, 0, 0}, 4},
    {"h2o", &pb_kvcache_h2o, {4, 1, 0, 0}, 12},
    {"tova", &pb_kvcache_tova, {4, 0, 0, 0}, 12},
    {"scissorhands", &pb_kvcache_scissorhands, {4, 1, 0, 0}, 12},
};

enum { COUNT = sizeof baselines / sizeof baselines[0] };

static void test_defaults(void)
{
    const pb_kvcache_sliding_window_params sliding_window = PB_KVCACHE_SLIDING_WINDOW_PARAMS_DEFAULT;
    const pb_kvcache_streaming_llm_params streaming_llm = PB_KVCACHE_STREAMING_LLM_PARAMS_DEFAULT;
    const pb_kvcache_h2o_params h2o = PB_KVCACHE_H2O_PARAMS_DEFAULT;
    const pb_kvcache_tova_params tova = PB_KVCACHE_TOVA_PARAMS_DEFAULT;
    const pb_kvcache_scissorhands_params scissorhands = PB_KVCACHE_SCISSORHANDS_PARAMS_DEFAULT;
    const void *const params[COUNT] = {&sliding_window, &streaming_llm, &h2o, &tova, &scissorhands};
    CHECK(streaming_llm.sinks == 4 && h2o.recent_window == 32 && scissorhands.recent_window == 32);
    CHECK(pb_kvcache_sliding_window_check(NULL) == PB_KVCACHE_OK);
    CHECK(pb_kvcache_streaming_llm_check(NULL) == PB_KVCACHE_OK);
    CHECK(pb_kvcache_h2o_check(NULL) == PB_KVCACHE_OK);
    CHECK(pb_kvcache_tova_check(NULL) == PB_KVCACHE_OK);
    CHECK(pb_kvcache_scissorhands_check(NULL) == PB_KVCACHE_OK);
    for (size_t i = 0; i < COUNT; ++i) {
        pb_kvcache *null = baselines[i].vtable->create(NULL, NULL, NULL);
        pb_kvcache *macro = baselines[i].vtable->create(params[i], NULL, NULL);
        CHECK(pb_kvcache_effective_budget(null) == 512 && pb_kvcache_capacity(null) == 513);
        CHECK(pb_kvcache_copy(macro, null) == PB_KVCACHE_OK); /* the same parameters, all of them */
        const size_t bytes = 513 * baselines[i].bytes_per_position;
        CHECK(baselines[i].vtable->memory_bytes(null) - bytes <= sizeof(struct pb_kvcache) + sizeof(double));
        baselines[i].vtable->destroy(null);
        baselines[i].vtable->destroy(macro);
        baselines[i].vtable->destroy(NULL);
        CHECK(baselines[i].vtable->memory_bytes(NULL) == 0);
    }
}

static void test_null(void)
{
    float attn[1] = {1.0f};
    uint32_t victims[8];
    for (size_t i = 0; i < COUNT; ++i) {
        const pb_kvcache_vtable *vtable = baselines[i].vtable;
        CHECK(vtable->on_decode_step(NULL, 1, attn, 1) == PB_KVCACHE_ERROR_NULL);
        CHECK(vtable->evict(NULL, 0, victims, 8) == 0);
        pb_kvcache *cache = vtable->create(baselines[i].small, NULL, NULL);
        CHECK(vtable->on_decode_step(cache, 1, attn, 1) == PB_KVCACHE_OK);
        CHECK(vtable->on_decode_step(cache, 2, NULL, 99) == PB_KVCACHE_OK); /* attn_len is ignored without attn */
        CHECK(pb_kvcache_evict_count(cache, 0) > 0);
        CHECK(vtable->evict(cache, 0, NULL, 8) == 0 && vtable->evict(cache, 0, victims, 0) == 0);
        CHECK(pb_kvcache_kept_count(cache) == 3);
        vtable->destroy(cache);
    }
}

static void test_allocation(void)
{
    for (size_t i = 0; i < COUNT; ++i) {
        const pb_kvcache_vtable *vtable = baselines[i].vtable;
        arena a = {0};
        const pb_allocator allocator = {arena_alloc, arena_free, &a};
        pb_kvcache *cache = vtable->create(NULL, &allocator, NULL);
        CHECK(cache != NULL && a.outstanding == 1 && a.bytes == vtable->memory_bytes(cache));
        uint32_t victims[600];
        float attn[600] = {0};
        for (uint32_t pos = 1; pos < 1500; ++pos) {
            CHECK(vtable->on_decode_step(cache, pos, attn, pb_kvcache_kept_count(cache)) == PB_KVCACHE_OK);
            CHECK(vtable->evict(cache, 512, victims, 600) == (pos >= 512 ? 1 : 0));
        }
        CHECK(a.calls == 1); /* nothing after creation */
        vtable->destroy(cache);
        CHECK(a.outstanding == 0 && a.bytes == 0);
        arena failing = {0};
        failing.fail_at = 1;
        const pb_allocator short_of_memory = {arena_alloc, arena_free, &failing};
        CHECK(vtable->create(NULL, &short_of_memory, NULL) == NULL && failing.outstanding == 0);
        /* Refused parameters are refused before memory is asked for. */
        const uint32_t refused[2][4] = {{0, 0, 0, 0}, {UINT32_MAX, 0, 0, 0}};
        a.calls = 0;
        CHECK(vtable->create(refused[0], &allocator, NULL) == NULL);
        CHECK(vtable->create(refused[1], &allocator, NULL) == NULL);
        CHECK(a.calls == 0);
    }
}

static void test_copy(void)
{
    uint32_t victims[2][8];
    for (size_t i = 0; i < COUNT; ++i) {
        const pb_kvcache_vtable *vtable = baselines[i].vtable;
        pb_kvcache *a = vtable->create(baselines[i].small, NULL, NULL);
        pb_kvcache *b = vtable->create(baselines[i].small, NULL, NULL);
        const uint32_t larger[4] = {5, baselines[i].small[1], 0, 0};
        pb_kvcache *other = vtable->create(larger, NULL, NULL);
        CHECK(pb_kvcache_copy(other, a) == PB_KVCACHE_ERROR_MISMATCH);
        for (size_t j = 0; j < COUNT; ++j) {
            pb_kvcache *foreign = baselines[j].vtable->create(baselines[j].small, NULL, NULL);
            /* The oldest go by one rule. With no sinks these would be the same policy. */
            CHECK((pb_kvcache_copy(foreign, a) == PB_KVCACHE_OK) == (i == j));
            baselines[j].vtable->destroy(foreign);
        }
        uint32_t state = 1;
        for (uint32_t pos = 1; pos < 100; ++pos) {
            float attn[8];
            const size_t kept = pb_kvcache_kept_count(a);
            for (size_t k = 0; k < kept; ++k) {
                state = state * 1664525u + 1013904223u;
                attn[k] = (float)(state >> 29) * 0.125f;
            }
            const float *row = pos % 5 == 0 ? NULL : attn; /* TOVA has to copy what it has not observed as well */
            CHECK(vtable->on_decode_step(a, pos, row, kept) == PB_KVCACHE_OK);
            if (pos % 7 == 0 || pos % 5 == 0) {
                CHECK(pb_kvcache_copy(b, a) == PB_KVCACHE_OK);
            } else {
                CHECK(vtable->on_decode_step(b, pos, row, kept) == PB_KVCACHE_OK);
            }
            const size_t count = vtable->evict(a, 4 - pos % 3, victims[0], 8);
            CHECK(vtable->evict(b, 4 - pos % 3, victims[1], 8) == count);
            CHECK(memcmp(victims[0], victims[1], count * sizeof(uint32_t)) == 0);
        }
        vtable->destroy(other);
        vtable->destroy(a);
        vtable->destroy(b);
    }
}

/* Sizes at the edge of what 32 bits of address space hold. */
static void test_sizes(void)
{
    const pb_kvcache_status want = sizeof(size_t) == 4 ? PB_KVCACHE_ERROR_TOO_LARGE : PB_KVCACHE_OK;
    const pb_kvcache_sliding_window_params sliding_window = {UINT32_MAX - 1, 0, 0};
    const pb_kvcache_h2o_params h2o = {1u << 29, 0, 0, 0};
    CHECK(pb_kvcache_sliding_window_check(&sliding_window) == want);
    CHECK(pb_kvcache_h2o_check(&h2o) == want);
}

int main(void)
{
    test_defaults();
    test_null();
    test_allocation();
    test_copy();
    test_sizes();
    return END();
}
