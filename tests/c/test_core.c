/* What the vectors cannot say of the core: NULLs, buffers, allocators, and the kernels behind the policies. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "arena.h"
#include "check.h"
#include "checks.h"
#include "internal.h"
#include "kernels.h"

static void test_status(void)
{
    for (int code = -100; code <= 1; ++code) {
        const char *text = pb_kvcache_status_str((pb_kvcache_status)code);
        CHECK(text != NULL && strlen(text) > 0);
    }
    CHECK(strcmp(pb_kvcache_status_str(PB_KVCACHE_OK), "success") == 0);
    CHECK(strcmp(pb_kvcache_status_str((pb_kvcache_status)-12345), "unknown status") == 0);
    /* Pinned: programs store these numbers. */
    CHECK(PB_KVCACHE_ERROR_NULL == -1 && PB_KVCACHE_ERROR_BUDGET == -2 && PB_KVCACHE_ERROR_OBS_WINDOW == -3);
    CHECK(PB_KVCACHE_ERROR_RECENT_WINDOW == -4 && PB_KVCACHE_ERROR_POOL_KERNEL == -5);
    CHECK(PB_KVCACHE_ERROR_NUM_LAYERS == -6 && PB_KVCACHE_ERROR_LAYER == -7 && PB_KVCACHE_ERROR_PYRAMID_RATIO == -8);
    CHECK(PB_KVCACHE_ERROR_TOO_LARGE == -9 && PB_KVCACHE_ERROR_NO_MEMORY == -10 && PB_KVCACHE_ERROR_POSITION == -11);
    CHECK(PB_KVCACHE_ERROR_ATTN_LEN == -12 && PB_KVCACHE_ERROR_ATTN_VALUE == -13 && PB_KVCACHE_ERROR_FULL == -14);
    CHECK(PB_KVCACHE_ERROR_NOT_KEPT == -15 && PB_KVCACHE_ERROR_CAPACITY == -16 && PB_KVCACHE_ERROR_MISMATCH == -17);
    CHECK(PB_KVCACHE_ERROR_UNSUPPORTED == -18 && PB_KVCACHE_ERROR_STATE == -19);
    CHECK(PB_KVCACHE_ERROR_STATE_VERSION == -20 && PB_KVCACHE_ERROR_ROLLBACK == -21);
}

static void test_version(void)
{
    char text[32];
    snprintf(text, sizeof text, "%d.%d.%d", PB_KVCACHE_VERSION_MAJOR, PB_KVCACHE_VERSION_MINOR,
             PB_KVCACHE_VERSION_PATCH);
    CHECK(strcmp(pb_kvcache_version(), text) == 0);
}

static void test_budgets(void)
{
    uint32_t shares[5] = {7, 7, 7, 7, 7};
    CHECK(pb_kvcache_pyramid_budgets(10, 0, 4, shares, 5) == PB_KVCACHE_ERROR_NUM_LAYERS);
    CHECK(pb_kvcache_pyramid_budgets(10, 4, 0, shares, 5) == PB_KVCACHE_ERROR_PYRAMID_RATIO);
    CHECK(pb_kvcache_pyramid_budgets(10, 4, 4, NULL, 5) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_pyramid_budgets(10, 4, 4, shares, 3) == PB_KVCACHE_ERROR_CAPACITY);
    CHECK(pb_kvcache_pyramid_budgets(3000000000u, 2, 4, shares, 5) == PB_KVCACHE_ERROR_TOO_LARGE);
    for (size_t i = 0; i < 5; ++i) {
        CHECK(shares[i] == 7);
    }
    CHECK(pb_kvcache_pyramid_budgets(10, 4, 4, shares, 4) == PB_KVCACHE_OK);
    CHECK(shares[0] == 16 && shares[1] == 12 && shares[2] == 8 && shares[3] == 4 && shares[4] == 7);
    CHECK(pb_kvcache_pyramid_budgets(UINT32_MAX, 1, 9, shares, 1) == PB_KVCACHE_OK && shares[0] == UINT32_MAX);
}

static void test_null(void)
{
    uint32_t buffer[4] = {0};
    double score = 3.0;
    const float attn[1] = {1.0f};
    CHECK(pb_kvcache_snapkv.on_decode_step(NULL, 1, attn, 1) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_snapkv.evict(NULL, 1, buffer, 4) == 0);
    CHECK(pb_kvcache_snapkv.memory_bytes(NULL) == 0);
    pb_kvcache_snapkv.destroy(NULL);
    pb_kvcache_pyramidkv.destroy(NULL);
    CHECK(pb_kvcache_kept_count(NULL) == 0);
    CHECK(pb_kvcache_kept(NULL, buffer, 4) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_contains(NULL, 0) == 0);
    CHECK(pb_kvcache_effective_budget(NULL) == 0);
    CHECK(pb_kvcache_capacity(NULL) == 0);
    CHECK(pb_kvcache_window_score(NULL, 0, &score) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_evict_count(NULL, 0) == 0);
    CHECK(pb_kvcache_reset(NULL) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_seed(NULL, buffer, 1, NULL, 0) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_copy(NULL, NULL) == PB_KVCACHE_ERROR_NULL);
    CHECK(score == 3.0);

    pb_kvcache *cache = pb_kvcache_snapkv.create(NULL, NULL, NULL);
    CHECK(cache != NULL);
    CHECK(pb_kvcache_effective_budget(cache) == 512 && pb_kvcache_capacity(cache) == 513);
    CHECK(pb_kvcache_kept(cache, NULL, 4) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_kept(cache, buffer, 0) == PB_KVCACHE_ERROR_CAPACITY);
    CHECK(pb_kvcache_window_score(cache, 0, NULL) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_seed(cache, NULL, 1, NULL, 0) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_seed(cache, buffer, 1, NULL, 1) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_seed(cache, buffer, 2, attn, SIZE_MAX) == PB_KVCACHE_ERROR_POSITION);
    buffer[1] = 5;
    CHECK(pb_kvcache_seed(cache, buffer, 2, attn, SIZE_MAX / 2) == PB_KVCACHE_ERROR_TOO_LARGE);
    CHECK(pb_kvcache_seed(cache, buffer, 2, attn, SIZE_MAX) == PB_KVCACHE_ERROR_TOO_LARGE);
    CHECK(pb_kvcache_copy(cache, NULL) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_kept_count(cache) == 1 && pb_kvcache_contains(cache, 0) && !pb_kvcache_contains(cache, 5));
    /* An empty kept set needs no arrays. */
    CHECK(pb_kvcache_seed(cache, NULL, 0, NULL, 0) == PB_KVCACHE_OK);
    CHECK(pb_kvcache_kept_count(cache) == 0 && pb_kvcache_kept(cache, NULL, 0) == PB_KVCACHE_OK);
    CHECK(pb_kvcache_seed(cache, NULL, 0, NULL, 3) == PB_KVCACHE_OK);
    CHECK(pb_kvcache_snapkv.on_decode_step(cache, 0, attn, 0) == PB_KVCACHE_OK);
    CHECK(pb_kvcache_kept_count(cache) == 1);
    pb_kvcache_snapkv.destroy(cache);

    cache = pb_kvcache_pyramidkv.create(NULL, NULL, NULL);
    CHECK(cache != NULL && pb_kvcache_effective_budget(cache) == 512);
    pb_kvcache_pyramidkv.destroy(cache);
    CHECK(pb_kvcache_snapkv_check(NULL) == PB_KVCACHE_OK && pb_kvcache_pyramidkv_check(NULL) == PB_KVCACHE_OK);
}

static void test_evict_buffer(void)
{
    const pb_kvcache_snapkv_params params = {8, 1, 2, 1, 0, 0};
    pb_kvcache *cache = pb_kvcache_snapkv.create(&params, NULL, NULL);
    uint32_t victims[8];
    for (uint32_t pos = 1; pos <= 8; ++pos) {
        CHECK(pb_kvcache_snapkv.on_decode_step(cache, pos, NULL, 99) == PB_KVCACHE_OK);
    }
    for (size_t i = 0; i < 8; ++i) {
        victims[i] = 77;
    }
    CHECK(pb_kvcache_evict_count(cache, 4) == 5);
    CHECK(pb_kvcache_evict_count(cache, 0) == 8); /* the recent one stays */
    CHECK(pb_kvcache_snapkv.evict(cache, 4, victims, 4) == 0);
    CHECK(pb_kvcache_snapkv.evict(cache, 4, victims, 0) == 0);
    CHECK(pb_kvcache_snapkv.evict(cache, 4, NULL, 8) == 0);
    CHECK(victims[0] == 77 && pb_kvcache_kept_count(cache) == 9);
    CHECK(pb_kvcache_snapkv.evict(cache, 4, victims, 8) == 5);
    CHECK(victims[0] == 0 && victims[4] == 4 && victims[5] == 77);
    CHECK(pb_kvcache_evict_count(cache, 4) == 0 && pb_kvcache_snapkv.evict(cache, 4, victims, 8) == 0);
    pb_kvcache_snapkv.destroy(cache);
}

/* An eviction that tells rows: what it refuses changes neither the cache nor an output. */
static void test_evict_rows(void)
{
    const pb_kvcache_snapkv_params params = {4, 1, 2, 1, 4, 0};
    const pb_kvcache_row_set kept = PB_KVCACHE_ROWS_KEPT;
    pb_kvcache *cache = pb_kvcache_snapkv.create(&params, NULL, NULL);
    uint32_t victims[16];
    uint32_t rows[16];
    for (size_t i = 0; i < 16; ++i) {
        victims[i] = 77;
        rows[i] = 78;
    }
    for (uint32_t pos = 1; pos <= 8; ++pos) {
        CHECK(pb_kvcache_snapkv.on_decode_step(cache, pos, NULL, 0) == PB_KVCACHE_OK);
    }
    CHECK(pb_kvcache_snapkv.on_decode_step(cache, 9, NULL, 0) == PB_KVCACHE_ERROR_FULL);
    CHECK(pb_kvcache_evict_rows_count(NULL, 4, 1) == 0 && pb_kvcache_evict_rows_count(cache, 4, 0) == 0);
    CHECK(pb_kvcache_evict_rows_count(cache, 4, 1) == 5 && pb_kvcache_evict_rows_count(cache, UINT32_MAX, 3) == 6);
    CHECK(pb_kvcache_evict_rows_count(cache, 0, UINT32_MAX) == 0);
    CHECK(pb_kvcache_evict_rows(NULL, 4, 1, kept, victims, 16, rows, 16) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_evict_rows(cache, 4, 1, kept, NULL, 16, rows, 16) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_evict_rows(cache, 4, 0, kept, victims, 16, rows, 16) == PB_KVCACHE_ERROR_PLAN_MULTIPLE);
    CHECK(pb_kvcache_evict_rows(cache, 4, 1, (pb_kvcache_row_set)2, victims, 16, rows, 16) == PB_KVCACHE_ERROR_OPTION);
    CHECK(pb_kvcache_evict_rows(cache, 4, 1, kept, victims, 4, rows, 16) == PB_KVCACHE_ERROR_CAPACITY);
    CHECK(pb_kvcache_evict_rows(cache, 4, 1, kept, victims, 5, rows, 3) == PB_KVCACHE_ERROR_CAPACITY);
    CHECK(pb_kvcache_evict_rows(cache, 4, 1, kept, victims, 5, victims + 4, 4) == PB_KVCACHE_ERROR_OVERLAP);
    CHECK(pb_kvcache_kept_count(cache) == 9 && victims[0] == 77 && rows[0] == 78 && victims[4] == 77);
    /* Victims beside their rows in one array. Then rows that nobody asks for, and nothing to drop. */
    CHECK(pb_kvcache_evict_rows(cache, 4, 4, kept, victims, 5, victims + 5, 4) == PB_KVCACHE_OK);
    CHECK(victims[0] == 0 && victims[4] == 4 && victims[5] == 5 && victims[8] == 8 && victims[9] == 77);
    CHECK(pb_kvcache_evict_rows(cache, 3, 1, kept, victims, 1, NULL, 0) == PB_KVCACHE_OK && victims[0] == 5);
    CHECK(pb_kvcache_evict_rows(cache, 3, 1, kept, NULL, 0, rows, 3) == PB_KVCACHE_OK && rows[2] == 2 && rows[3] == 78);
    CHECK(pb_kvcache_evict_rows(cache, 3, 1, PB_KVCACHE_ROWS_VICTIMS, NULL, 0, NULL, 0) == PB_KVCACHE_OK);
    CHECK(pb_kvcache_kept_count(cache) == 3);
    pb_kvcache_snapkv.destroy(cache);
}

static void test_allocation(const pb_kvcache_vtable *vtable)
{
    arena a = {0};
    pb_allocator allocator = {arena_alloc, arena_free, &a};
    pb_kvcache *cache = vtable->create(NULL, &allocator, NULL);
    CHECK(cache != NULL && a.outstanding == 1 && a.bytes == vtable->memory_bytes(cache));
    const size_t at_creation = a.calls;
    uint32_t victims[600];
    float attn[600] = {0};
    for (uint32_t pos = 1; pos < 1500; ++pos) {
        CHECK(vtable->on_decode_step(cache, pos, attn, pb_kvcache_kept_count(cache)) == PB_KVCACHE_OK);
        vtable->evict(cache, 512, victims, 600);
    }
    pb_kvcache_reset(cache);
    CHECK(a.calls == at_creation); /* nothing after creation */
    vtable->destroy(cache);
    CHECK(a.outstanding == 0 && a.bytes == 0);
    /* Failure at every allocation: NULL, and nothing leaks. */
    for (size_t fail_at = 1; fail_at <= at_creation; ++fail_at) {
        arena failing = {0};
        failing.fail_at = fail_at;
        const pb_allocator short_of_memory = {arena_alloc, arena_free, &failing};
        CHECK(vtable->create(NULL, &short_of_memory, NULL) == NULL && failing.outstanding == 0);
    }
    const pb_allocator no_alloc = {NULL, arena_free, &a};
    const pb_allocator no_free = {arena_alloc, NULL, &a};
    a.calls = 0;
    CHECK(vtable->create(NULL, &no_alloc, NULL) == NULL && vtable->create(NULL, &no_free, NULL) == NULL);
    CHECK(a.calls == 0);
}

static void test_copy(void)
{
    const pb_kvcache_snapkv_params params = {6, 1, 3, 3, 0, 0};
    const pb_kvcache_snapkv_params others[]
        = {{7, 1, 3, 3, 0, 0}, {6, 2, 3, 3, 0, 0}, {6, 1, 2, 3, 0, 0}, {6, 1, 3, 5, 0, 0}, {6, 1, 3, 3, 1, 0}};
    const pb_kvcache_pyramidkv_params deep = {6, 2, 3, 4, 1, 3, 3, 0, 0};
    const pb_kvcache_pyramidkv_params single = {6, 0, 1, 4, 1, 3, 3, 0, 0};
    pb_kvcache *a = pb_kvcache_snapkv.create(&params, NULL, NULL);
    pb_kvcache *b = pb_kvcache_snapkv.create(&params, NULL, NULL);
    uint32_t victims[2][8];
    uint32_t state = 1;
    for (uint32_t pos = 1; pos < 200; ++pos) {
        float attn[8];
        for (size_t i = 0; i < pb_kvcache_kept_count(a); ++i) {
            state = state * 1664525u + 1013904223u;
            attn[i] = (float)(state >> 29);
        }
        CHECK(pb_kvcache_snapkv.on_decode_step(a, pos, attn, pb_kvcache_kept_count(a)) == PB_KVCACHE_OK);
        if (pos % 7 == 0) {
            CHECK(pb_kvcache_copy(b, a) == PB_KVCACHE_OK);
        } else {
            CHECK(pb_kvcache_snapkv.on_decode_step(b, pos, attn, pb_kvcache_kept_count(b)) == PB_KVCACHE_OK);
        }
        const size_t count = pb_kvcache_snapkv.evict(a, 6 - pos % 3, victims[0], 8);
        CHECK(pb_kvcache_snapkv.evict(b, 6 - pos % 3, victims[1], 8) == count);
        CHECK(memcmp(victims[0], victims[1], count * sizeof(uint32_t)) == 0);
    }
    CHECK(pb_kvcache_copy(a, a) == PB_KVCACHE_OK);
    for (size_t i = 0; i < sizeof others / sizeof others[0]; ++i) {
        pb_kvcache *other = pb_kvcache_snapkv.create(&others[i], NULL, NULL);
        CHECK(pb_kvcache_copy(other, a) == PB_KVCACHE_ERROR_MISMATCH && pb_kvcache_kept_count(other) == 1);
        pb_kvcache_snapkv.destroy(other);
    }
    pb_kvcache *other = pb_kvcache_pyramidkv.create(&deep, NULL, NULL);
    CHECK(pb_kvcache_copy(other, a) == PB_KVCACHE_ERROR_MISMATCH);
    pb_kvcache_pyramidkv.destroy(other);
    other = pb_kvcache_pyramidkv.create(&single, NULL, NULL); /* the same rules and sizes: SnapKV, bit for bit */
    CHECK(pb_kvcache_copy(other, a) == PB_KVCACHE_OK && pb_kvcache_kept_count(other) == pb_kvcache_kept_count(a));
    pb_kvcache_pyramidkv.destroy(other);
    /* Layers that evict to the same budget, 2, and have room for 7 and for 8. */
    const pb_kvcache_pyramidkv_params narrow = {6, 1, 2, 4, 1, 3, 3, 0, 0};
    const pb_kvcache_pyramidkv_params roomy = {7, 1, 2, 4, 1, 3, 3, 0, 0};
    other = pb_kvcache_pyramidkv.create(&narrow, NULL, NULL);
    pb_kvcache *wider = pb_kvcache_pyramidkv.create(&roomy, NULL, NULL);
    CHECK(pb_kvcache_effective_budget(other) == 2 && pb_kvcache_effective_budget(wider) == 2);
    CHECK(pb_kvcache_pyramidkv.on_decode_step(wider, 1, NULL, 0) == PB_KVCACHE_OK);
    CHECK(pb_kvcache_copy(other, wider) == PB_KVCACHE_ERROR_MISMATCH && pb_kvcache_kept_count(other) == 1);
    pb_kvcache_pyramidkv.destroy(other);
    pb_kvcache_pyramidkv.destroy(wider);
    pb_kvcache_snapkv.destroy(a);
    pb_kvcache_snapkv.destroy(b);
}

static void test_sizes(void)
{
    size_t out = 5;
    CHECK(pb_kvcache_priv_mul(0, SIZE_MAX, &out) && out == 0);
    CHECK(pb_kvcache_priv_mul(SIZE_MAX, 0, &out) && out == 0);
    CHECK(pb_kvcache_priv_mul(SIZE_MAX / 2, 2, &out) && out == SIZE_MAX - 1);
    CHECK(!pb_kvcache_priv_mul(SIZE_MAX / 2 + 1, 2, &out) && out == SIZE_MAX - 1);
    CHECK(pb_kvcache_priv_add(SIZE_MAX - 1, 1, &out) && out == SIZE_MAX);
    CHECK(!pb_kvcache_priv_add(SIZE_MAX, 1, &out) && out == SIZE_MAX);
    /* Where 32 bits of address space do not hold a cache, creation says so. Where 64 do, only memory can say no. */
    const pb_kvcache_snapkv_params large = {1u << 30, 32, 64, 7, 0, 0};
    const pb_kvcache_status want = sizeof(size_t) == 4 ? PB_KVCACHE_ERROR_TOO_LARGE : PB_KVCACHE_OK;
    CHECK(pb_kvcache_snapkv_check(&large) == want);
    arena a = {0};
    a.fail_at = 1;
    const pb_allocator allocator = {arena_alloc, arena_free, &a};
    CHECK(pb_kvcache_snapkv.create(&large, &allocator, NULL) == NULL);
    /* Each sum and product of the size at its own edge. */
    pb_kvcache_priv_shape shape = {0};
    shape.capacity = UINT32_MAX;
    shape.obs_window = UINT32_MAX;
    shape.doubles = 2;
    CHECK(pb_kvcache_priv_set_bytes(&shape) == PB_KVCACHE_ERROR_TOO_LARGE && shape.bytes == 0);
    shape.obs_window = 1u << 29; /* 2^63 bytes of history */
    CHECK(pb_kvcache_priv_set_bytes(&shape) == PB_KVCACHE_ERROR_TOO_LARGE && shape.bytes == 0);
}

/* The kernels against the plainest loops, over lengths around every block size. */
static void test_kernels(void)
{
    enum { ROWS = 5, MOST = 70 };
    float rows[ROWS * MOST];
    double sums[MOST + 1];
    double pooled[MOST + 1];
    uint32_t chosen[MOST + 1];
    uint32_t state = 7;
    for (size_t i = 0; i < ROWS * MOST; ++i) {
        state = state * 1664525u + 1013904223u;
        rows[i] = (float)(state >> 28) * 0.1f;
    }
    for (size_t n = 1; n <= MOST; ++n) {
        uint32_t lengths[ROWS];
        for (size_t row = 0; row < ROWS; ++row) {
            state = state * 1664525u + 1013904223u;
            lengths[row] = state % 4 == 0 ? (uint32_t)n : (state >> 8) % (uint32_t)(n + 1);
        }
        sums[n] = -1.0;
        for (size_t i = 0; i < n; ++i) {
            sums[i] = 0.0;
            for (size_t row = 0; row < ROWS; ++row) {
                sums[i] += i < lengths[row] ? (double)rows[row * MOST + i] : 0.0;
            }
        }
        for (size_t kernel = 1; kernel <= 2 * n + 3; kernel += 2) {
            const size_t half = kernel / 2;
            pooled[n] = -1.0;
            pb_kvcache_priv_pool_max(sums, n, kernel, pooled);
            CHECK(pooled[n] == -1.0);
            bool good = true;
            for (size_t i = 0; i < n; ++i) {
                double most = sums[i];
                for (size_t j = i > half ? i - half : 0; j < n && j <= i + half; ++j) {
                    most = sums[j] > most ? sums[j] : most;
                }
                good = good && most == pooled[i];
            }
            CHECK(good);
        }
        for (size_t count = 0; count <= n; ++count) {
            chosen[count] = 99;
            pb_kvcache_priv_choose_lowest(sums, n, count, chosen);
            CHECK(chosen[count] == 99);
            bool good = true;
            size_t at = 0;
            for (size_t i = 0; i < n; ++i) { /* chosen where fewer than `count` go before it */
                size_t before = 0;
                for (size_t j = 0; j < n; ++j) {
                    before += sums[j] < sums[i] || (sums[j] == sums[i] && j < i);
                }
                if (before < count) {
                    good = good && at < count && chosen[at++] == i;
                }
            }
            CHECK(good && at == count);
        }
    }
    const double signs[] = {0.0, -0.0, 1.0, -1.0, -INFINITY, INFINITY, -1e-310, 1e-310};
    pb_kvcache_priv_choose_lowest(signs, 8, 4, chosen); /* -inf -1 -tiny, then the first of the two zeros */
    CHECK(chosen[0] == 0 && chosen[1] == 3 && chosen[2] == 4 && chosen[3] == 6);
    pb_kvcache_priv_choose_lowest(signs + 1, 1, 1, chosen);
    CHECK(chosen[0] == 0);
}

static void test_weights(void)
{
    float weights[40] = {0};
    CHECK(pb_kvcache_priv_weights_ok(weights, 40) && pb_kvcache_priv_weights_ok(weights, 0));
    const float bad[] = {NAN, -NAN, INFINITY, -INFINITY, -1.0f, -1e-45f};
    const float good[] = {0.0f, -0.0f, 1e-45f, 3.4028234e38f, 1.0f};
    for (size_t at = 0; at < 40; ++at) {
        for (size_t i = 0; i < sizeof bad / sizeof bad[0]; ++i) {
            weights[at] = bad[i];
            CHECK(!pb_kvcache_priv_weights_ok(weights, 40));
        }
        for (size_t i = 0; i < sizeof good / sizeof good[0]; ++i) {
            weights[at] = good[i];
            CHECK(pb_kvcache_priv_weights_ok(weights, 40));
        }
    }
}

int main(void)
{
    test_status();
    test_version();
    test_budgets();
    test_null();
    test_evict_buffer();
    test_evict_rows();
    test_allocation(&pb_kvcache_snapkv);
    test_allocation(&pb_kvcache_pyramidkv);
    test_copy();
    test_sizes();
    test_kernels();
    test_weights();
    return END();
}
