/* Blocks: what is refused and leaves every output alone, what may be NULL, and sizes at their limits. */
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "pb_kvcache.h"

#define UNTOUCHED 0xABABABABu

static void test_to_blocks(void)
{
    const uint32_t positions[4] = {0, 3, 4, UINT32_MAX};
    uint32_t out[9];
    size_t found;
#define REFUSED(status, ...)                                                                                          \
    do {                                                                                                              \
        memset(out, 0xAB, sizeof out);                                                                                \
        found = 77;                                                                                                   \
        CHECK(pb_kvcache_to_blocks(__VA_ARGS__) == (status) && found == 77);                                          \
        for (size_t i = 0; i < 9; ++i) {                                                                              \
            CHECK(out[i] == UNTOUCHED);                                                                               \
        }                                                                                                             \
    } while (0)
    REFUSED(PB_KVCACHE_ERROR_NULL, NULL, 4, 2, out, out + 4, 4, &found);
    REFUSED(PB_KVCACHE_ERROR_NULL, positions, 4, 2, NULL, out + 4, 4, &found);
    REFUSED(PB_KVCACHE_ERROR_NULL, positions, 4, 2, out, NULL, 4, &found);
    REFUSED(PB_KVCACHE_ERROR_NULL, positions, 4, 2, out, out + 4, 4, NULL);
    REFUSED(PB_KVCACHE_ERROR_BLOCK_SIZE, positions, 4, 0, out, out + 4, 4, &found);
    REFUSED(PB_KVCACHE_ERROR_TOO_LARGE, positions, SIZE_MAX, 2, out, out + 4, 4, &found);
    REFUSED(PB_KVCACHE_ERROR_ALIGNMENT, positions, 4, 2, (uint32_t *)(void *)((char *)out + 1), out + 4, 4, &found);
    REFUSED(PB_KVCACHE_ERROR_ALIGNMENT, positions, 4, 2, out, (uint32_t *)(void *)((char *)out + 17), 4, &found);
    REFUSED(PB_KVCACHE_ERROR_POSITION, out, 4, 2, out + 4, out + 8, 4, &found);
    REFUSED(PB_KVCACHE_ERROR_CAPACITY, positions, 4, 2, out, out + 4, 3, &found);
    REFUSED(PB_KVCACHE_ERROR_OVERLAP, positions, 4, 2, out, out + 2, 4, &found);
#undef REFUSED
    uint32_t shared[6] = {1, 2, 3, 9, 9, 9};
    CHECK(pb_kvcache_to_blocks(shared, 3, 1, shared + 2, shared + 3, 3, &found) == PB_KVCACHE_ERROR_OVERLAP);
    CHECK(pb_kvcache_to_blocks(shared, 3, 1, shared + 3, shared + 2, 3, &found) == PB_KVCACHE_ERROR_OVERLAP);
    CHECK(shared[2] == 3 && shared[3] == 9);
    /* Exactly the room that is needed, and nothing beyond it */
    memset(out, 0xAB, sizeof out);
    CHECK(pb_kvcache_to_blocks(positions, 4, 4, out, out + 4, 3, &found) == PB_KVCACHE_OK && found == 3);
    CHECK(out[0] == 0 && out[1] == 1 && out[2] == UINT32_MAX / 4 && out[3] == UNTOUCHED);
    CHECK(out[4] == 2 && out[5] == 1 && out[6] == 1 && out[7] == UNTOUCHED);
    CHECK(pb_kvcache_to_blocks(positions, 3, SIZE_MAX, out, out + 4, 1, &found) == PB_KVCACHE_OK && found == 1);
    CHECK(out[0] == 0 && out[4] == 3);
    CHECK(pb_kvcache_to_blocks(NULL, 0, 4, NULL, NULL, 0, &found) == PB_KVCACHE_OK && found == 0);
}

static void test_block_select(void)
{
    enum { HEADS = 2, SCORED = 6, WINDOW = 3, N = SCORED + WINDOW, SIZE = 2, WIDTH = 4, ROOM = HEADS * WIDTH };
    float scores[HEADS * SCORED] = {1, 2, 3, 4, 5, 6, 6, 5, 4, 3, 2, 1};
    const float *given;
    uint32_t budgets[HEADS];
    uint32_t out[ROOM + 1];
    size_t size;
    CHECK(pb_kvcache_block_select_workspace_size(N, WINDOW, SIZE, &size) == PB_KVCACHE_OK && size > 0);
    const size_t needed = size;
    unsigned char *workspace = malloc(needed);
    struct {
        size_t stride, heads, n, window, block_size;
        pb_kvcache_reduce reduce;
        pb_kvcache_nan nan;
        const uint32_t *budgets;
        void *workspace;
        size_t size;
        uint32_t *out;
        size_t out_stride, capacity;
    } c;
#define CALL(change, status)                                                                                          \
    do {                                                                                                              \
        given = scores;                                                                                               \
        budgets[0] = 6;                                                                                               \
        budgets[1] = 9;                                                                                               \
        c.stride = SCORED, c.heads = HEADS, c.n = N, c.window = WINDOW, c.block_size = SIZE;                          \
        c.reduce = PB_KVCACHE_REDUCE_MAX, c.nan = PB_KVCACHE_NAN_REFUSE, c.budgets = budgets;                         \
        c.workspace = workspace, c.size = needed, c.out = out, c.out_stride = WIDTH, c.capacity = ROOM;               \
        memset(out, 0xAB, sizeof out);                                                                                \
        change;                                                                                                       \
        CHECK(pb_kvcache_block_select(given, c.stride, c.heads, c.n, c.window, c.block_size, c.reduce, c.nan,         \
                                      c.budgets, c.workspace, c.size, c.out, c.out_stride, c.capacity)                \
              == (status));                                                                                           \
        for (size_t i = 0; (status) != PB_KVCACHE_OK && i <= ROOM; ++i) {                                             \
            CHECK(out[i] == UNTOUCHED);                                                                               \
        }                                                                                                             \
    } while (0)
    CALL(given = NULL, PB_KVCACHE_ERROR_NULL);
    CALL(c.budgets = NULL, PB_KVCACHE_ERROR_NULL);
    CALL(c.workspace = NULL, PB_KVCACHE_ERROR_NULL);
    CALL(c.out = NULL, PB_KVCACHE_ERROR_NULL);
    CALL(c.block_size = 0, PB_KVCACHE_ERROR_BLOCK_SIZE);
    CALL(c.window = 0, PB_KVCACHE_ERROR_WINDOW);
    CALL(c.window = N, PB_KVCACHE_ERROR_WINDOW);
    CALL(c.n = SIZE_MAX, PB_KVCACHE_ERROR_TOO_LARGE);
    CALL(c.stride = SIZE_MAX / 2, PB_KVCACHE_ERROR_TOO_LARGE);
    CALL(c.reduce = (pb_kvcache_reduce)3, PB_KVCACHE_ERROR_OPTION);
    CALL(c.nan = (pb_kvcache_nan)2, PB_KVCACHE_ERROR_OPTION);
    CALL(c.size = needed - 1, PB_KVCACHE_ERROR_WORKSPACE);
    CALL(budgets[1] = 3, PB_KVCACHE_ERROR_BUDGET_WINDOW);
    CALL(c.out_stride = WIDTH - 1, PB_KVCACHE_ERROR_STRIDE);
    CALL(c.capacity = ROOM - 1, PB_KVCACHE_ERROR_CAPACITY);
    CALL(given = (const float *)(const void *)((const char *)scores + 1), PB_KVCACHE_ERROR_ALIGNMENT);
    CALL(c.out = (uint32_t *)(void *)((char *)out + 1), PB_KVCACHE_ERROR_ALIGNMENT);
    CALL((c.budgets = out + 3, c.heads = 1), PB_KVCACHE_ERROR_OVERLAP);
    CALL(c.workspace = out, PB_KVCACHE_ERROR_OVERLAP);
    CALL(c.workspace = scores, PB_KVCACHE_ERROR_OVERLAP);
    CALL(c.workspace = budgets, PB_KVCACHE_ERROR_OVERLAP);
    CALL((given = (const float *)(const void *)out, c.nan = PB_KVCACHE_NAN_LOWEST), PB_KVCACHE_ERROR_OVERLAP);
    /* The 2 blocks of the window, and beside them the best of 3, and of the other head the 2 best */
    static const uint32_t expected[ROOM + 1] = {2, 3, 4, UNTOUCHED, 0, 1, 3, 4, UNTOUCHED};
    CALL((void)0, PB_KVCACHE_OK);
    CHECK(memcmp(out, expected, sizeof expected) == 0);
    CALL((c.heads = 0, given = NULL, c.budgets = NULL, c.workspace = NULL, c.out = NULL), PB_KVCACHE_OK);
    size = 77;
    CHECK(pb_kvcache_block_select_workspace_size(N, WINDOW, SIZE, NULL) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_block_select_workspace_size(SIZE_MAX, 1, 1, &size) == PB_KVCACHE_ERROR_TOO_LARGE && size == 77);
#undef CALL
    free(workspace);
}

static void test_block_moves(void)
{
    enum { BLOCKS = 3, ROWS = 5 };
    const uint32_t rows[ROWS] = {0, 2, 5, 7, 8};
    const uint32_t given[BLOCKS] = {5, 9, 2};
    uint32_t table[BLOCKS];
    uint32_t order[ROWS + 1];
    pb_kvcache_move moves[ROWS + 1];
    size_t size;
    size_t found;
    CHECK(pb_kvcache_block_moves_workspace_size(BLOCKS, &size) == PB_KVCACHE_OK && size > 0);
    const size_t needed = size;
    unsigned char *workspace = malloc(needed);
    struct {
        uint32_t *table;
        size_t num_blocks;
        const uint32_t *rows;
        size_t count, block_size;
        void *workspace;
        size_t size;
        uint32_t *order;
        pb_kvcache_move *moves;
        size_t capacity, *found;
    } c;
    uint32_t rows_of_mine[ROWS];
#define CALL(change, status)                                                                                          \
    do {                                                                                                              \
        memcpy(table, given, sizeof table);                                                                           \
        memcpy(rows_of_mine, rows, sizeof rows);                                                                      \
        memset(order, 0xAB, sizeof order);                                                                            \
        memset(moves, 0xAB, sizeof moves);                                                                            \
        found = 77;                                                                                                   \
        c.table = table, c.num_blocks = BLOCKS, c.rows = rows_of_mine, c.count = ROWS, c.block_size = 4;              \
        c.workspace = workspace, c.size = needed, c.order = order, c.moves = moves, c.capacity = ROWS;                \
        c.found = &found;                                                                                             \
        change;                                                                                                       \
        CHECK(pb_kvcache_block_moves(c.table, c.num_blocks, c.rows, c.count, c.block_size, c.workspace, c.size,       \
                                     c.order, c.moves, c.capacity, c.found)                                           \
              == (status));                                                                                           \
        if ((status) != PB_KVCACHE_OK) {                                                                              \
            CHECK(found == 77 && order[0] == UNTOUCHED && moves[0].from == UNTOUCHED && moves[0].to == UNTOUCHED);    \
        }                                                                                                             \
    } while (0)
    CALL(c.table = NULL, PB_KVCACHE_ERROR_NULL);
    CALL(c.rows = NULL, PB_KVCACHE_ERROR_NULL);
    CALL(c.workspace = NULL, PB_KVCACHE_ERROR_NULL);
    CALL(c.order = NULL, PB_KVCACHE_ERROR_NULL);
    CALL(c.moves = NULL, PB_KVCACHE_ERROR_NULL);
    CALL(c.found = NULL, PB_KVCACHE_ERROR_NULL);
    CALL(c.block_size = 0, PB_KVCACHE_ERROR_BLOCK_SIZE);
    CALL(c.num_blocks = SIZE_MAX, PB_KVCACHE_ERROR_TOO_LARGE);
    CALL(c.count = SIZE_MAX, PB_KVCACHE_ERROR_TOO_LARGE);
    CALL(c.block_size = SIZE_MAX, PB_KVCACHE_ERROR_TOO_LARGE);
    CALL(table[1] = UINT32_MAX / 4 + 1, PB_KVCACHE_ERROR_TOO_LARGE);
    CALL(c.size = needed - 1, PB_KVCACHE_ERROR_WORKSPACE);
    CALL(c.capacity = ROWS - 1, PB_KVCACHE_ERROR_CAPACITY);
    CALL(c.order = (uint32_t *)(void *)((char *)order + 1), PB_KVCACHE_ERROR_ALIGNMENT);
    CALL(c.moves = (pb_kvcache_move *)(void *)((char *)moves + 2), PB_KVCACHE_ERROR_ALIGNMENT);
    CALL(c.rows = (const uint32_t *)(const void *)((const char *)rows + 1), PB_KVCACHE_ERROR_ALIGNMENT);
    CALL(c.table = (uint32_t *)(void *)((char *)table + 1), PB_KVCACHE_ERROR_ALIGNMENT);
    CALL(rows_of_mine[4] = 12, PB_KVCACHE_ERROR_INDEX);
    CALL(rows_of_mine[1] = 0, PB_KVCACHE_ERROR_INDEX);
    CALL((c.num_blocks = 0, c.table = NULL), PB_KVCACHE_ERROR_INDEX);
    CALL(c.order = rows_of_mine, PB_KVCACHE_ERROR_OVERLAP);
    CALL(c.order = table, PB_KVCACHE_ERROR_OVERLAP);
    CALL(c.rows = table, PB_KVCACHE_ERROR_OVERLAP);
    CALL(c.moves = (pb_kvcache_move *)(void *)order, PB_KVCACHE_ERROR_OVERLAP);
    CALL(c.workspace = table, PB_KVCACHE_ERROR_OVERLAP);
    CALL((c.workspace = rows_of_mine, c.size = needed), PB_KVCACHE_ERROR_OVERLAP);
    CHECK(memcmp(table, given, sizeof table) == 0);
    /* 2, 2 and 1 rows in 3 blocks: the first stays full, and row 8 is the last, where it is. */
    CALL((void)0, PB_KVCACHE_OK);
    CHECK(found == 2 && table[0] == 5 && table[1] == 2 && table[2] == 9);
    CHECK(moves[0].from == 9 * 4 + 1 && moves[0].to == 5 * 4 + 1);
    CHECK(moves[1].from == 9 * 4 + 3 && moves[1].to == 5 * 4 + 3);
    CHECK(order[0] == 0 && order[1] == 5 && order[2] == 2 && order[3] == 7 && order[4] == 8 && order[5] == UNTOUCHED);
    CHECK(moves[ROWS].from == UNTOUCHED);
    /* Nothing left: every block is free. Nothing held: nothing is needed. */
    CALL((c.count = 0, c.rows = NULL, c.order = NULL, c.moves = NULL, c.capacity = 0), PB_KVCACHE_OK);
    CHECK(found == 0 && memcmp(table, given, sizeof table) == 0);
    CALL((c.count = 0, c.num_blocks = 0, c.table = NULL, c.rows = NULL, c.workspace = NULL, c.size = 0, c.order = NULL,
          c.moves = NULL, c.capacity = 0),
         PB_KVCACHE_OK);
    CHECK(found == 0);
    CHECK(pb_kvcache_block_moves_workspace_size(1, NULL) == PB_KVCACHE_ERROR_NULL);
    size = 77;
    CHECK(pb_kvcache_block_moves_workspace_size(SIZE_MAX / 8, &size) == PB_KVCACHE_ERROR_TOO_LARGE && size == 77);
#undef CALL
    free(workspace);
}

int main(void)
{
    test_to_blocks();
    test_block_select();
    test_block_moves();
    return END();
}
