/* Caches in slots: each beside a SnapKV of its own, whose weights are looked up row by row in a model's buffer. */
#include "arena.h"
#include "check.h"
#include "checks.h"
#include "internal.h"

enum { CACHES = 4, MOST = 9, WIDTH = 2 };

static const uint32_t budgets[CACHES] = {5, 8, 2, 5};
static const pb_kvcache_hold_params small = {CACHES, 1, 3, 3};

static uint32_t state = 1;

static uint32_t drawn(uint32_t below)
{
    state = state * 1664525u + 1013904223u;
    return (state >> 16) % below;
}

static void test_null(void)
{
    uint32_t cache = 9;
    uint32_t slots[MOST] = {7};
    const uint32_t pos[CACHES] = {1, 1, 1, 1};
    pb_kvcache_slot_move moves[CACHES];
    size_t count = 9;
    CHECK(pb_kvcache_hold_check(NULL, budgets, &cache) == PB_KVCACHE_ERROR_NULL && cache == 0);
    CHECK(pb_kvcache_hold_check(&small, NULL, NULL) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_hold_check(&small, budgets, &cache) == PB_KVCACHE_OK && cache == CACHES);
    CHECK(pb_kvcache_hold_create(NULL, budgets, NULL) == NULL && pb_kvcache_hold_create(&small, NULL, NULL) == NULL);
    CHECK(pb_kvcache_hold_step(NULL, pos, NULL, NULL, 0, 0, moves, CACHES, &count) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_hold_step_check(NULL, pos, NULL, NULL, 0, 0, &cache) == PB_KVCACHE_ERROR_NULL && cache == 0);
    CHECK(pb_kvcache_hold_num_caches(NULL) == 0 && pb_kvcache_hold_memory_bytes(NULL) == 0);
    CHECK(pb_kvcache_hold_cache(NULL, 0) == NULL);
    CHECK(pb_kvcache_hold_seed(NULL, 0, NULL, 0, NULL, 0) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_hold_slots(NULL, 0, slots, MOST) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_hold_copy(NULL, 0, NULL, 0) == PB_KVCACHE_ERROR_NULL);
    pb_kvcache_hold_destroy(NULL);

    pb_kvcache_hold *hold = pb_kvcache_hold_create(&small, budgets, NULL);
    CHECK(pb_kvcache_hold_num_caches(hold) == CACHES && pb_kvcache_hold_cache(hold, CACHES) == NULL);
    CHECK(pb_kvcache_hold_copy(hold, 0, NULL, 0) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_hold_copy(hold, CACHES, hold, 0) == PB_KVCACHE_ERROR_CACHE);
    CHECK(pb_kvcache_hold_copy(hold, 0, hold, CACHES) == PB_KVCACHE_ERROR_CACHE);
    CHECK(pb_kvcache_hold_copy(hold, 0, hold, 1) == PB_KVCACHE_ERROR_MISMATCH);
    CHECK(pb_kvcache_hold_seed(hold, CACHES, NULL, 0, NULL, 0) == PB_KVCACHE_ERROR_CACHE);
    CHECK(pb_kvcache_hold_seed(hold, 0, NULL, 1, NULL, 0) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_hold_slots(hold, CACHES, slots, MOST) == PB_KVCACHE_ERROR_CACHE);
    CHECK(pb_kvcache_hold_slots(hold, 0, NULL, MOST) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_hold_slots(hold, 0, slots, 0) == PB_KVCACHE_ERROR_CAPACITY && slots[0] == 7);
    CHECK(pb_kvcache_hold_slots(hold, 0, slots, 1) == PB_KVCACHE_OK && slots[0] == 0);
    CHECK(pb_kvcache_hold_copy(hold, 0, hold, 0) == PB_KVCACHE_OK);
    CHECK(pb_kvcache_hold_seed(hold, 0, NULL, 0, NULL, 0) == PB_KVCACHE_OK);
    CHECK(pb_kvcache_hold_slots(hold, 0, NULL, 0) == PB_KVCACHE_OK);
    const uint32_t first = 0;
    CHECK(pb_kvcache_hold_seed(hold, 0, &first, 1, NULL, 0) == PB_KVCACHE_OK);
    CHECK(pb_kvcache_hold_step(hold, NULL, NULL, NULL, 0, 0, moves, CACHES, &count) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_hold_step(hold, pos, NULL, NULL, 0, 0, NULL, CACHES, &count) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_hold_step(hold, pos, NULL, NULL, 0, 0, moves, CACHES, NULL) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_hold_step(hold, pos, NULL, NULL, 0, 0, moves, CACHES - 1, &count) == PB_KVCACHE_ERROR_CAPACITY);
    CHECK(count == 9 && pb_kvcache_kept_count(pb_kvcache_hold_cache(hold, 0)) == 1);
    pb_kvcache_hold_destroy(hold);
}

static void test_parameters(void)
{
    const struct {
        pb_kvcache_hold_params params;
        uint32_t budgets[2];
        pb_kvcache_status status;
        uint32_t cache;
    } cases[] = {
        {{0, 1, 3, 3}, {5, 5}, PB_KVCACHE_ERROR_NUM_CACHES, 0},
        {{PB_KVCACHE_HOLD_MAX_CACHES + 1, 1, 3, 3}, {5, 5}, PB_KVCACHE_ERROR_TOO_LARGE, 0},
        {{2, 1, 3, 3}, {5, 0}, PB_KVCACHE_ERROR_BUDGET, 1},
        {{2, 1, 3, 3}, {5, 1}, PB_KVCACHE_ERROR_RECENT_WINDOW, 1},
        {{2, 1, 0, 3}, {5, 5}, PB_KVCACHE_ERROR_OBS_WINDOW, 0},
        {{2, 1, 3, 4}, {5, 5}, PB_KVCACHE_ERROR_POOL_KERNEL, 0},
        {{2, 1, 3, 3}, {5, UINT32_MAX}, PB_KVCACHE_ERROR_TOO_LARGE, 1},
        /* About 2^62 bytes each: one fits 64 bits, two do not. Neither fits 32. */
        {{2, 1, UINT32_MAX / 8, 3}, {UINT32_MAX / 2, UINT32_MAX / 2}, PB_KVCACHE_ERROR_TOO_LARGE, 0},
    };
    const pb_kvcache_hold_params alone = {1, 1, UINT32_MAX / 8, 3};
    CHECK(pb_kvcache_hold_check(&alone, cases[7].budgets, NULL)
          == (sizeof(size_t) == 4 ? PB_KVCACHE_ERROR_TOO_LARGE : PB_KVCACHE_OK));
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; ++i) {
        uint32_t cache = 9;
        CHECK(pb_kvcache_hold_check(&cases[i].params, cases[i].budgets, &cache) == cases[i].status);
        CHECK(cache == cases[i].cache);
        CHECK(pb_kvcache_hold_create(&cases[i].params, cases[i].budgets, NULL) == NULL);
    }
    CHECK(pb_kvcache_status_str(PB_KVCACHE_ERROR_NUM_CACHES) != pb_kvcache_status_str(PB_KVCACHE_ERROR_CACHE));
}

/* What the header says of memory, and that only creation takes any. */
static void test_allocation(void)
{
    arena a = {0};
    const pb_allocator allocator = {arena_alloc, arena_free, &a};
    pb_kvcache_hold *hold = pb_kvcache_hold_create(&small, budgets, &allocator);
    CHECK(a.calls == 1 && a.bytes == pb_kvcache_hold_memory_bytes(hold));
    size_t together = 0;
    for (uint32_t cache = 0; cache < CACHES; ++cache) {
        together += (pb_kvcache_snapkv.memory_bytes(pb_kvcache_hold_cache(hold, cache)) + 7) / 8 * 8;
        together += ((budgets[cache] + (size_t)1) * 4 + 7) / 8 * 8;
    }
    together += (MOST * 4 + 7) / 8 * 8;
    const size_t rest = a.bytes - together;
    CHECK(rest >= CACHES * 2 * sizeof(void *) && rest <= CACHES * 2 * sizeof(void *) + 80);
    pb_kvcache_slot_move moves[CACHES];
    size_t count;
    for (uint32_t token = 1; token < 50; ++token) {
        const uint32_t pos[CACHES] = {token, token, token, token};
        CHECK(pb_kvcache_hold_step(hold, pos, NULL, NULL, 0, 0, moves, CACHES, &count) == PB_KVCACHE_OK);
    }
    CHECK(a.calls == 1);
    pb_kvcache_hold_destroy(hold);
    CHECK(a.outstanding == 0 && a.bytes == 0);
    arena failing = {.fail_at = 1};
    const pb_allocator no_memory = {arena_alloc, arena_free, &failing};
    CHECK(pb_kvcache_hold_create(&small, budgets, &no_memory) == NULL && failing.outstanding == 0);
    const pb_allocator no_free = {arena_alloc, NULL, &a};
    CHECK(pb_kvcache_hold_create(&small, budgets, &no_free) == NULL);
}

/* A step that one cache refuses, or an array that is too small, changes none. */
static void test_refused_steps(void)
{
    pb_kvcache_hold *hold = pb_kvcache_hold_create(&small, budgets, NULL);
    const uint32_t seeded[3] = {2, 4, 6};
    CHECK(pb_kvcache_hold_seed(hold, 1, seeded, 3, NULL, 0) == PB_KVCACHE_OK);
    /* Its capacity, not its budget */
    CHECK(pb_kvcache_hold_seed(hold, 2, seeded, 3, NULL, 0) == PB_KVCACHE_ERROR_FULL);
    const uint32_t twice[2] = {4, 4};
    CHECK(pb_kvcache_hold_seed(hold, 2, twice, 2, NULL, 0) == PB_KVCACHE_ERROR_POSITION);
    float weights[CACHES * 3] = {0};
    pb_kvcache_slot_move moves[CACHES];
    size_t count = 9;
    uint32_t cache;
    const uint32_t good[CACHES] = {1, 7, 1, 1};
    const uint32_t low[CACHES] = {1, 6, 1, 1};
    const struct {
        const uint32_t *pos;
        const float *weights;
        size_t stride;
        size_t capacity;
        float last; /* of the weights that are read */
        pb_kvcache_status status;
        uint32_t cache;
    } cases[] = {
        {low, weights, 3, 12, 0.0f, PB_KVCACHE_ERROR_POSITION, 1},
        {good, weights, 3, 12, -1.0f, PB_KVCACHE_ERROR_ATTN_VALUE, 1},
        {good, weights, 3, 11, 0.0f, PB_KVCACHE_ERROR_CAPACITY, 0},
        {good, weights, 2, 12, 0.0f, PB_KVCACHE_ERROR_STRIDE, 0},
        {good, weights, SIZE_MAX / 2, 12, 0.0f, PB_KVCACHE_ERROR_TOO_LARGE, 0},
        {good, (const float *)(const void *)((const char *)weights + 1), 3, 12, 0.0f, PB_KVCACHE_ERROR_ALIGNMENT, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; ++i) {
        weights[5] = cases[i].last;
        CHECK(pb_kvcache_hold_step_check(hold, cases[i].pos, NULL, cases[i].weights, cases[i].stride,
                                         cases[i].capacity, &cache)
              == cases[i].status);
        CHECK(cache == cases[i].cache);
        CHECK(pb_kvcache_hold_step(hold, cases[i].pos, NULL, cases[i].weights, cases[i].stride, cases[i].capacity,
                                   moves, CACHES, &count)
              == cases[i].status);
        CHECK(count == 9 && pb_kvcache_kept_count(pb_kvcache_hold_cache(hold, 0)) == 1);
        CHECK(pb_kvcache_kept_count(pb_kvcache_hold_cache(hold, 1)) == 3);
    }
    CHECK(pb_kvcache_hold_step(hold, good, NULL, NULL, 0, 0, moves, CACHES, (size_t *)(void *)moves)
          == PB_KVCACHE_ERROR_OVERLAP);
    /* What a cache that the token does not join would refuse is not read. Nor are slots that hold nothing. */
    weights[5] = -1.0f;
    weights[1] = -1.0f;
    const uint8_t joins[CACHES] = {1, 0, 1, 0};
    CHECK(pb_kvcache_hold_step(hold, low, joins, weights, 3, 12, moves, CACHES, &count) == PB_KVCACHE_OK);
    CHECK(count == 0 && pb_kvcache_kept_count(pb_kvcache_hold_cache(hold, 0)) == 2);
    CHECK(pb_kvcache_kept_count(pb_kvcache_hold_cache(hold, 1)) == 3);
    pb_kvcache_hold_destroy(hold);
}

/* With no recent window the token itself can leave: nothing moves, and the slot behind the others is free again. */
static void test_the_token_itself_leaves(void)
{
    const pb_kvcache_hold_params params = {1, 0, 1, 1};
    const uint32_t budget = 2;
    pb_kvcache_hold *hold = pb_kvcache_hold_create(&params, &budget, NULL);
    const uint32_t seeded[2] = {0, 1};
    CHECK(pb_kvcache_hold_seed(hold, 0, seeded, 2, NULL, 0) == PB_KVCACHE_OK);
    const float weights[3] = {0.5f, 0.25f, 0.0f};
    pb_kvcache_slot_move moves[1];
    size_t count = 9;
    const uint32_t pos = 2;
    uint32_t kept[2];
    CHECK(pb_kvcache_hold_step(hold, &pos, NULL, weights, 3, 3, moves, 1, &count) == PB_KVCACHE_OK && count == 0);
    CHECK(pb_kvcache_kept(pb_kvcache_hold_cache(hold, 0), kept, 2) == PB_KVCACHE_OK && kept[0] == 0 && kept[1] == 1);
    CHECK(pb_kvcache_hold_slots(hold, 0, kept, 2) == PB_KVCACHE_OK && kept[0] == 0 && kept[1] == 1);
    pb_kvcache_hold_destroy(hold);
}

static void test_move(void)
{
    float rows[CACHES][3][WIDTH];
    for (uint32_t i = 0; i < CACHES * 3 * WIDTH; ++i) {
        ((float *)rows)[i] = (float)i;
    }
    const size_t row = sizeof rows[0][0];
    const uint64_t offsets[CACHES] = {0, 3, 6, 9};
    const uint64_t uneven[2] = {0, 7};
    const pb_kvcache_slot_move moves[3] = {{1, 2, 0}, {3, 2, 1}, {3, 1, 1}};
    CHECK(pb_kvcache_hold_move(rows, offsets, CACHES, row, row, sizeof rows, moves, 3) == PB_KVCACHE_OK);
    CHECK(rows[1][0][0] == 10.0f && rows[1][0][1] == 11.0f && rows[1][2][1] == 11.0f && rows[1][1][0] == 8.0f);
    CHECK(rows[3][1][0] == 22.0f && rows[3][1][1] == 23.0f && rows[0][0][0] == 0.0f && rows[2][2][1] == 17.0f);
    /* Caches of unlike room: row 7 + 1 goes to row 7 + 0. Half a row is moved where half a row is asked for. */
    const pb_kvcache_slot_move one = {1, 1, 0};
    CHECK(pb_kvcache_hold_move(rows, uneven, 2, row, row / 2, sizeof rows, &one, 1) == PB_KVCACHE_OK);
    CHECK(rows[2][1][0] == 16.0f && rows[2][1][1] == 15.0f);
    CHECK(pb_kvcache_hold_move(NULL, NULL, 0, row, row, 0, NULL, 0) == PB_KVCACHE_OK);
    CHECK(pb_kvcache_hold_move(NULL, offsets, CACHES, row, row, sizeof rows, moves, 1) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_hold_move(rows, NULL, CACHES, row, row, sizeof rows, moves, 1) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_hold_move(rows, offsets, CACHES, row, row, sizeof rows, NULL, 1) == PB_KVCACHE_ERROR_NULL);
    /* The second move is of no cache or outside: the first is not done. Nor where a product or a sum does not fit. */
    const pb_kvcache_slot_move nobody[2] = {{0, 2, 0}, {2, 2, 0}};
    const pb_kvcache_slot_move outside[2] = {{0, 2, 0}, {3, 3, 0}};
    const pb_kvcache_slot_move far[2] = {{0, 2, 0}, {3, 0, UINT32_MAX}};
    const uint64_t wide[CACHES] = {0, UINT64_MAX, 0, SIZE_MAX - 1};
    CHECK(pb_kvcache_hold_move(rows, offsets, 2, row, row, sizeof rows, nobody, 2) == PB_KVCACHE_ERROR_CACHE);
    CHECK(pb_kvcache_hold_move(rows, offsets, CACHES, row, row, sizeof rows, outside, 2) == PB_KVCACHE_ERROR_CAPACITY);
    CHECK(pb_kvcache_hold_move(rows, offsets, CACHES, row, row, sizeof rows, far, 2) == PB_KVCACHE_ERROR_CAPACITY);
    CHECK(pb_kvcache_hold_move(rows, wide, CACHES, row, row, sizeof rows, moves, 1) == PB_KVCACHE_ERROR_CAPACITY);
    CHECK(pb_kvcache_hold_move(rows, wide, CACHES, row, row, sizeof rows, moves + 1, 1) == PB_KVCACHE_ERROR_CAPACITY);
    CHECK(pb_kvcache_hold_move(rows, offsets, CACHES, SIZE_MAX, row, sizeof rows, moves, 1)
          == PB_KVCACHE_ERROR_CAPACITY);
    CHECK(pb_kvcache_hold_move(rows, offsets, CACHES, 1, SIZE_MAX, sizeof rows, moves, 1)
          == PB_KVCACHE_ERROR_CAPACITY);
    CHECK(rows[0][0][0] == 0.0f);
}

/*
 * A model's buffers hold (position, position + 0.5) in each row. Weights are drawn by position. A SnapKV beside each
 * cache sees them in order of position: after every step the buffers' first slots hold its kept positions, each once.
 */
static void test_against_policies(uint32_t recent_window)
{
    const pb_kvcache_hold_params params = {CACHES, recent_window, 3, 3};
    pb_kvcache_hold *hold = pb_kvcache_hold_create(&params, budgets, NULL);
    pb_kvcache_hold *twin = pb_kvcache_hold_create(&params, budgets, NULL);
    pb_kvcache *policies[CACHES];
    float rows[CACHES][MOST][WIDTH] = {{{0.0f}}};
    uint32_t next[CACHES];
    for (uint32_t cache = 0; cache < CACHES; ++cache) {
        const pb_kvcache_snapkv_params snapkv
            = {.budget = budgets[cache], .recent_window = recent_window, .obs_window = 3, .pool_kernel = 3};
        policies[cache] = pb_kvcache_snapkv.create(&snapkv, NULL, NULL);
        rows[cache][0][1] = 0.5f;
        next[cache] = 1;
    }
    for (uint32_t token = 0; token < 600; ++token) {
        float by_slot[CACHES][MOST];
        uint8_t joins[CACHES];
        pb_kvcache_slot_move moves[CACHES];
        size_t count = 0;
        const bool observed = drawn(8) != 0;
        for (uint32_t cache = 0; cache < CACHES; ++cache) {
            const size_t held = pb_kvcache_kept_count(policies[cache]);
            uint32_t kept[MOST];
            float by_position[MOST];
            uint32_t victim;
            joins[cache] = drawn(4) != 0;
            (void)pb_kvcache_kept(policies[cache], kept, MOST);
            for (size_t i = 0; i < MOST; ++i) {
                by_slot[cache][i] = -1.0f; /* where nothing is held nothing is read */
            }
            for (size_t i = 0; i < held; ++i) {
                by_position[i] = (float)drawn(5) * 0.25f;
                for (size_t slot = 0; slot < held; ++slot) {
                    by_slot[cache][slot] = rows[cache][slot][0] == (float)kept[i] ? by_position[i]
                                                                                  : by_slot[cache][slot];
                }
            }
            if (!joins[cache]) {
                continue;
            }
            next[cache] += drawn(3);
            CHECK(pb_kvcache_snapkv.on_decode_step(policies[cache], next[cache], observed ? by_position : NULL, held)
                  == PB_KVCACHE_OK);
            (void)pb_kvcache_snapkv.evict(policies[cache], UINT32_MAX, &victim, 1);
            rows[cache][held][0] = (float)next[cache];
            rows[cache][held][1] = (float)next[cache] + 0.5f;
        }
        CHECK(pb_kvcache_hold_step(hold, next, joins, observed ? &by_slot[0][0] : NULL, MOST, CACHES * MOST, moves,
                                   CACHES, &count)
              == PB_KVCACHE_OK);
        const uint64_t offsets[CACHES] = {0, MOST, 2 * MOST, 3 * MOST};
        CHECK(pb_kvcache_hold_move(rows, offsets, CACHES, sizeof rows[0][0], sizeof rows[0][0], sizeof rows, moves,
                                   count)
              == PB_KVCACHE_OK);
        for (uint32_t cache = 0; cache < CACHES; ++cache) {
            const size_t held = pb_kvcache_kept_count(policies[cache]);
            uint32_t kept[2][MOST];
            uint32_t slots[MOST];
            next[cache] += joins[cache];
            CHECK(held <= budgets[cache] && pb_kvcache_kept(policies[cache], kept[0], MOST) == PB_KVCACHE_OK);
            CHECK(pb_kvcache_kept(pb_kvcache_hold_cache(hold, cache), kept[1], MOST) == PB_KVCACHE_OK);
            CHECK(pb_kvcache_kept_count(pb_kvcache_hold_cache(hold, cache)) == held);
            CHECK(memcmp(kept[0], kept[1], held * sizeof kept[0][0]) == 0);
            CHECK(pb_kvcache_hold_slots(hold, cache, slots, MOST) == PB_KVCACHE_OK);
            for (size_t i = 0; i < held; ++i) { /* distinct positions in slots below `held`: each slot once */
                CHECK(slots[i] < held && rows[cache][slots[i]][0] == (float)kept[0][i]);
                CHECK(rows[cache][slots[i]][1] == (float)kept[0][i] + 0.5f);
            }
        }
        if (drawn(4) == 0) { /* copies go on in their places */
            for (uint32_t cache = 0; cache < CACHES; ++cache) {
                CHECK(pb_kvcache_hold_copy(twin, cache, hold, cache) == PB_KVCACHE_OK);
            }
            pb_kvcache_hold *other = hold;
            hold = twin;
            twin = other;
        }
        if (drawn(8) == 0) { /* cache 3 goes on as cache 0, which has its budget */
            CHECK(pb_kvcache_hold_copy(hold, 3, hold, 0) == PB_KVCACHE_OK);
            CHECK(pb_kvcache_copy(policies[3], policies[0]) == PB_KVCACHE_OK);
            memcpy(rows[3], rows[0], sizeof rows[0]);
            next[3] = next[0];
        }
    }
    for (uint32_t cache = 0; cache < CACHES; ++cache) {
        pb_kvcache_snapkv.destroy(policies[cache]);
    }
    pb_kvcache_hold_destroy(hold);
    pb_kvcache_hold_destroy(twin);
}

int main(void)
{
    test_null();
    test_parameters();
    test_allocation();
    test_refused_steps();
    test_the_token_itself_leaves();
    test_move();
    test_against_policies(0);
    test_against_policies(1);
    return END();
}
