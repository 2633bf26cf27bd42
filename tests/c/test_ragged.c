/* A layer whose heads have budgets of their own: chosen in one call, copied side by side, in memory of exactly their size. */
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "internal.h"

static uint32_t state = 1;

static uint32_t draw(void)
{
    state ^= state << 13;
    state ^= state >> 17;
    state ^= state << 5;
    return state;
}

/* ---- Selection ---- */

enum { GROUP = 2, KV_HEADS = 3, WINDOW = 4, COLUMNS = 60, QUERY_HEADS = GROUP * KV_HEADS };

static float weights[QUERY_HEADS][WINDOW][COLUMNS];
static unsigned char scratch[8192];

static const pb_kvcache_attention attention = {.data = weights,
                                               .num_q_heads = QUERY_HEADS,
                                               .num_kv_heads = KV_HEADS,
                                               .window = WINDOW,
                                               .n = COLUMNS,
                                               .head_stride = WINDOW * COLUMNS,
                                               .row_stride = COLUMNS};
static const pb_kvcache_select_params params = {PB_KVCACHE_REDUCE_MEAN, PB_KVCACHE_POOL_MAX, 3, PB_KVCACHE_EDGE_COUNT,
                                                PB_KVCACHE_NAN_REFUSE, WINDOW, 0, NULL, 0};

static void test_select(void)
{
    for (size_t round = 0; round < 40; ++round) {
        uint32_t budgets[KV_HEADS];
        uint32_t rows[KV_HEADS][COLUMNS];
        size_t total = 0;
        float *flat = &weights[0][0][0];
        for (size_t i = 0; i < sizeof weights / sizeof *flat; ++i) {
            flat[i] = (float)(draw() >> 8) * 0x1p-24f;
        }
        for (size_t head = 0; head < KV_HEADS; ++head) {
            /* the window alone, everything, more than there is, and between */
            const uint32_t some[] = {WINDOW, COLUMNS, UINT32_MAX, WINDOW + draw() % (COLUMNS - WINDOW)};
            budgets[head] = some[draw() % 4];
            total += budgets[head] < COLUMNS ? budgets[head] : COLUMNS;
        }
        uint32_t *indices = malloc(total * sizeof *indices);
        size_t *offsets = malloc((KV_HEADS + 1) * sizeof *offsets);
        CHECK(pb_kvcache_select(&attention, &params, budgets, 0, KV_HEADS, scratch, sizeof scratch, rows[0], COLUMNS,
                                KV_HEADS * COLUMNS)
              == PB_KVCACHE_OK);
        CHECK(pb_kvcache_select_ragged(&attention, &params, budgets, scratch, sizeof scratch, indices, total, offsets)
              == PB_KVCACHE_OK);
        CHECK(offsets[0] == 0 && offsets[KV_HEADS] == total);
        for (size_t head = 0; head < KV_HEADS; ++head) {
            const size_t kept = offsets[head + 1] - offsets[head];
            CHECK(kept == (budgets[head] < COLUMNS ? budgets[head] : COLUMNS));
            CHECK(memcmp(indices + offsets[head], rows[head], kept * sizeof *indices) == 0);
        }
        free(indices);
        free(offsets);
    }
}

static void test_select_refusals(void)
{
    const uint32_t budgets[KV_HEADS] = {10, 5, 20};
    uint32_t indices[35];
    size_t offsets[KV_HEADS + 2];
    memset(indices, 0xFF, sizeof indices);
    memset(offsets, 0xFF, sizeof offsets);
#define SELECT(attn, heads_budgets, size, out, room, where)                                                           \
    pb_kvcache_select_ragged(attn, &params, heads_budgets, scratch, size, out, room, where)
    CHECK(SELECT(NULL, budgets, sizeof scratch, indices, 35, offsets) == PB_KVCACHE_ERROR_NULL);
    CHECK(SELECT(&attention, NULL, sizeof scratch, indices, 35, offsets) == PB_KVCACHE_ERROR_NULL);
    CHECK(SELECT(&attention, budgets, sizeof scratch, NULL, 35, offsets) == PB_KVCACHE_ERROR_NULL);
    CHECK(SELECT(&attention, budgets, sizeof scratch, indices, 35, NULL) == PB_KVCACHE_ERROR_NULL);
    CHECK(SELECT(&attention, budgets, 16, indices, 35, offsets) == PB_KVCACHE_ERROR_WORKSPACE);
    CHECK(SELECT(&attention, budgets, sizeof scratch, indices, 34, offsets) == PB_KVCACHE_ERROR_CAPACITY);
    CHECK(SELECT(&attention, budgets, sizeof scratch, (uint32_t *)(void *)((char *)indices + 1), 35, offsets)
          == PB_KVCACHE_ERROR_ALIGNMENT);
    CHECK(SELECT(&attention, budgets, sizeof scratch, indices, 35, (size_t *)(void *)((char *)offsets + 1))
          == PB_KVCACHE_ERROR_ALIGNMENT);
    const uint32_t few[KV_HEADS] = {10, WINDOW - 1, 20};
    CHECK(SELECT(&attention, few, sizeof scratch, indices, 35, offsets) == PB_KVCACHE_ERROR_BUDGET_WINDOW);
    CHECK(pb_kvcache_select_ragged(&attention, NULL, budgets, scratch, sizeof scratch, indices, 35, offsets)
          == PB_KVCACHE_ERROR_NULL);
    /* What lies upon what */
    CHECK(SELECT(&attention, budgets, sizeof scratch, (uint32_t *)(void *)weights, 35, offsets)
          == PB_KVCACHE_ERROR_OVERLAP);
    CHECK(SELECT(&attention, budgets, sizeof scratch, indices, 35, (size_t *)(void *)weights)
          == PB_KVCACHE_ERROR_OVERLAP);
    size_t both[64]; /* offsets in front, indices and budgets behind, one word too near */
    memset(both, 0, sizeof both);
    uint32_t *behind = (uint32_t *)(void *)(both + KV_HEADS);
    static float weighing[KV_HEADS * (COLUMNS - WINDOW) + 8];
    pb_kvcache_select_params weighed = params;
    weighed.weights = weighing;
    weighed.weights_stride = COLUMNS - WINDOW;
    CHECK(pb_kvcache_select_ragged(&attention, &weighed, budgets, scratch, sizeof scratch, indices, 35,
                                   (size_t *)(void *)(weighing + 2))
          == PB_KVCACHE_ERROR_OVERLAP);
    CHECK(pb_kvcache_select_ragged(&attention, &weighed, budgets, scratch, sizeof scratch,
                                   (uint32_t *)(void *)weighing, 35, offsets)
          == PB_KVCACHE_ERROR_OVERLAP);
    CHECK(SELECT(&attention, budgets, sizeof scratch, behind, 35, both) == PB_KVCACHE_ERROR_OVERLAP);
    memcpy(behind, budgets, sizeof budgets);
    CHECK(SELECT(&attention, behind, sizeof scratch, indices, 35, both) == PB_KVCACHE_ERROR_OVERLAP);
    CHECK(pb_kvcache_select_ragged(&attention, &params, budgets, both, sizeof both, indices, 35, both)
          == PB_KVCACHE_ERROR_WORKSPACE);
    CHECK(SELECT(&attention, budgets, sizeof scratch, indices, 35, (size_t *)(void *)scratch)
          == PB_KVCACHE_ERROR_OVERLAP);
    /* A weight of the last head that is none: nothing was written */
    const float kept = weights[QUERY_HEADS - 1][0][0];
    weights[QUERY_HEADS - 1][0][0] = -1.0f;
    CHECK(SELECT(&attention, budgets, sizeof scratch, indices, 35, offsets) == PB_KVCACHE_ERROR_ATTN_VALUE);
    weights[QUERY_HEADS - 1][0][0] = kept;
    for (size_t i = 0; i < 35; ++i) {
        CHECK(indices[i] == UINT32_MAX);
    }
    for (size_t i = 0; i < KV_HEADS + 2; ++i) {
        CHECK(offsets[i] == SIZE_MAX);
    }
    CHECK(SELECT(&attention, budgets, sizeof scratch, indices, 35, offsets) == PB_KVCACHE_OK);
}

/* ---- Compaction ---- */

enum { HEADS = 3, ROWS = 50, BYTES = 6 };

/* Ascending rows of each head, the first keeping all of them and the second none. */
static void choose_rows(uint32_t *indices, size_t *offsets)
{
    size_t at = 0;
    for (size_t head = 0; head < HEADS; ++head) {
        offsets[head] = at;
        for (uint32_t i = 0; i < ROWS; ++i) {
            if (head == 0 || (head == 2 && draw() % 3u != 0)) {
                indices[at++] = i;
            }
        }
    }
    offsets[HEADS] = at;
}

static void test_compact(void)
{
    static unsigned char data[HEADS * ROWS * BYTES];
    static unsigned char before[sizeof data];
    uint32_t indices[HEADS * ROWS];
    size_t offsets[HEADS + 1];
    for (int layout = 0; layout < 8; ++layout) {
        const bool transposed = (layout & 1) != 0;
        const bool backwards = (layout & 2) != 0;
        const bool last_first = (layout & 4) != 0;
        const size_t row = (transposed ? HEADS : 1) * BYTES;
        const size_t head_bytes = (transposed ? 1 : ROWS) * BYTES;
        const size_t base = (backwards ? row * (ROWS - 1) : 0) + (last_first ? head_bytes * (HEADS - 1) : 0);
        const pb_kvcache_rows rows = {data + base, HEADS, ROWS, BYTES,
                                      last_first ? -(ptrdiff_t)head_bytes : (ptrdiff_t)head_bytes,
                                      backwards ? -(ptrdiff_t)row : (ptrdiff_t)row};
        for (size_t i = 0; i < sizeof data; ++i) {
            data[i] = before[i] = (unsigned char)draw();
        }
        choose_rows(indices, offsets);
        const size_t bytes = offsets[HEADS] * BYTES;
        unsigned char *packed = malloc(bytes);
        CHECK(pb_kvcache_compact_ragged(&rows, indices, offsets, packed, bytes) == PB_KVCACHE_OK);
        CHECK(memcmp(data, before, sizeof data) == 0);
        bool good = true;
        for (size_t head = 0; head < HEADS; ++head) {
            for (size_t j = offsets[head]; j < offsets[head + 1]; ++j) {
                const ptrdiff_t from = (ptrdiff_t)head * rows.head_stride + (ptrdiff_t)indices[j] * rows.row_stride;
                good = good && memcmp(packed + j * BYTES, before + base + from, BYTES) == 0;
            }
        }
        CHECK(good);
        /* In place only where every row moves towards the front */
        const pb_kvcache_status status
            = pb_kvcache_compact_ragged(&rows, indices, offsets, rows.data, sizeof data - base);
        if (layout == 0) {
            CHECK(status == PB_KVCACHE_OK && memcmp(data, packed, bytes) == 0);
        } else {
            CHECK(status == PB_KVCACHE_ERROR_STRIDE || status == PB_KVCACHE_ERROR_CAPACITY);
            CHECK(memcmp(data, before, sizeof data) == 0);
        }
        free(packed);
    }
}

/* In place with slack between rows and between heads, and a last head that ends where its last row does. */
static void test_in_place(void)
{
    enum { ROW = BYTES + 2, HEAD = (ROWS - 1) * ROW + BYTES, ALL = HEADS * HEAD };
    uint32_t indices[HEADS * ROWS];
    size_t offsets[HEADS + 1];
    unsigned char *data = malloc(ALL);
    unsigned char *packed = malloc(ALL);
    for (int round = 0; round < 20; ++round) {
        for (size_t i = 0; i < ALL; ++i) {
            data[i] = (unsigned char)draw();
        }
        choose_rows(indices, offsets);
        const pb_kvcache_rows rows = {data, HEADS, ROWS, BYTES, HEAD, ROW};
        const size_t bytes = offsets[HEADS] * BYTES;
        CHECK(pb_kvcache_compact_ragged(&rows, indices, offsets, packed, bytes) == PB_KVCACHE_OK);
        CHECK(pb_kvcache_compact_ragged(&rows, indices, offsets, data, bytes) == PB_KVCACHE_OK);
        CHECK(memcmp(data, packed, bytes) == 0);
    }
    free(packed);
    free(data);
    /* One head of one row, whatever its strides are */
    unsigned char one[BYTES] = {1, 2, 3, 4, 5, 6};
    const size_t single[2] = {0, 1};
    const uint32_t first = 0;
    const pb_kvcache_rows row = {one, 1, 1, BYTES, -7, -9};
    CHECK(pb_kvcache_compact_ragged(&row, &first, single, one, BYTES) == PB_KVCACHE_OK && one[5] == 6);
}

static void test_compact_refusals(void)
{
    static unsigned char data[2 * 4 * 8]; /* 2 heads of 4 rows of 8 bytes */
    static unsigned char before[sizeof data];
    unsigned char packed[24];
    uint32_t indices[3] = {1, 3, 2};
    size_t offsets[3] = {0, 2, 3};
    const pb_kvcache_rows rows = {data, 2, 4, 8, 32, 8};
    for (size_t i = 0; i < sizeof data; ++i) {
        before[i] = data[i] = (unsigned char)i;
    }
    memset(packed, 0xAB, sizeof packed);
#define PACK(from) pb_kvcache_compact_ragged(from, indices, offsets, packed, sizeof packed)
#define REFUSED(change, status)                                                                                       \
    do {                                                                                                              \
        pb_kvcache_rows bad = rows;                                                                                   \
        change;                                                                                                       \
        CHECK(PACK(&bad) == (status));                                                                                \
    } while (0)
    CHECK(PACK(NULL) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_compact_ragged(&rows, NULL, offsets, packed, sizeof packed) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_compact_ragged(&rows, indices, NULL, packed, sizeof packed) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_compact_ragged(&rows, indices, offsets, NULL, sizeof packed) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_compact_ragged(&rows, indices, offsets, packed, 23) == PB_KVCACHE_ERROR_CAPACITY);
    CHECK(pb_kvcache_compact_ragged(&rows, (uint32_t *)(void *)((char *)indices + 1), offsets, packed, 24)
          == PB_KVCACHE_ERROR_ALIGNMENT);
    CHECK(pb_kvcache_compact_ragged(&rows, indices, (size_t *)(void *)((char *)offsets + 1), packed, 24)
          == PB_KVCACHE_ERROR_ALIGNMENT);
    REFUSED(bad.data = NULL, PB_KVCACHE_ERROR_NULL);
    REFUSED(bad.row_stride = 7, PB_KVCACHE_ERROR_STRIDE);
    REFUSED(bad.head_stride = PTRDIFF_MAX, PB_KVCACHE_ERROR_TOO_LARGE);
    REFUSED((bad.row_bytes = PTRDIFF_MAX / 2, bad.n = 1, bad.head_stride = PTRDIFF_MAX / 2 + 1),
            PB_KVCACHE_ERROR_CAPACITY);
    REFUSED(bad.num_heads = SIZE_MAX, PB_KVCACHE_ERROR_TOO_LARGE);
    REFUSED(bad.n = 3, PB_KVCACHE_ERROR_INDEX);
    REFUSED(bad.n = 0, PB_KVCACHE_ERROR_INDEX);
    if (SIZE_MAX > UINT32_MAX) {
        REFUSED(bad.n = (size_t)UINT32_MAX + 1, PB_KVCACHE_ERROR_TOO_LARGE);
    }
    offsets[0] = 1;
    CHECK(PACK(&rows) == PB_KVCACHE_ERROR_INDEX);
    offsets[0] = 0;
    offsets[1] = 4;
    CHECK(PACK(&rows) == PB_KVCACHE_ERROR_INDEX);
    offsets[1] = 2;
    offsets[2] = SIZE_MAX / 2;
    CHECK(PACK(&rows) == PB_KVCACHE_ERROR_TOO_LARGE);
    offsets[2] = SIZE_MAX / 5;
    CHECK(PACK(&rows) == PB_KVCACHE_ERROR_TOO_LARGE);
    offsets[2] = 3;
    indices[1] = 1; /* twice the same */
    CHECK(PACK(&rows) == PB_KVCACHE_ERROR_INDEX);
    indices[1] = 4;
    CHECK(PACK(&rows) == PB_KVCACHE_ERROR_INDEX);
    indices[1] = 3;
    /* What lies upon what */
    CHECK(pb_kvcache_compact_ragged(&rows, indices, offsets, data + 8, 24) == PB_KVCACHE_ERROR_OVERLAP);
    CHECK(pb_kvcache_compact_ragged(&rows, indices, offsets, indices, 24) == PB_KVCACHE_ERROR_OVERLAP);
    CHECK(pb_kvcache_compact_ragged(&rows, indices, offsets, offsets, 24) == PB_KVCACHE_ERROR_OVERLAP);
    pb_kvcache_rows over = {indices, 1, 3, sizeof *indices, 0, sizeof *indices};
    size_t one[2] = {0, 1};
    CHECK(pb_kvcache_compact_ragged(&over, indices, one, packed, 24) == PB_KVCACHE_ERROR_OVERLAP);
    over = (pb_kvcache_rows){one, 1, 2, sizeof *one, 0, sizeof *one};
    CHECK(pb_kvcache_compact_ragged(&over, indices, one, packed, 24) == PB_KVCACHE_ERROR_OVERLAP);
    /* Nothing was written. With nothing to copy nothing is asked for. */
    CHECK(memcmp(data, before, sizeof data) == 0);
    for (size_t i = 0; i < sizeof packed; ++i) {
        CHECK(packed[i] == 0xAB);
    }
    const size_t none[3] = {0, 0, 0};
    const pb_kvcache_rows empty = {NULL, 2, 0, 8, 0, 0};
    const pb_kvcache_rows no_heads = {NULL, 0, 0, 0, 0, 0};
    CHECK(pb_kvcache_compact_ragged(&rows, NULL, none, NULL, 0) == PB_KVCACHE_OK);
    CHECK(pb_kvcache_compact_ragged(&empty, NULL, none, NULL, 0) == PB_KVCACHE_OK);
    CHECK(pb_kvcache_compact_ragged(&no_heads, NULL, NULL, NULL, 0) == PB_KVCACHE_OK);
    CHECK(PACK(&rows) == PB_KVCACHE_OK && packed[0] == 8 && packed[8] == 24 && packed[16] == 48);
}

int main(void)
{
    test_select();
    test_select_refusals();
    test_compact();
    test_in_place();
    test_compact_refusals();
    return END();
}
