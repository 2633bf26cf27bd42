/* Kind "blocks": positions as blocks, whole blocks kept, and holes closed after an eviction. */
#include <stdlib.h>
#include <string.h>

#include "vectors.h"

#define UNTOUCHED 0xABABABABu

/* `count` numbers, untouched, and one more behind them. */
static uint32_t *untouched(size_t count)
{
    uint32_t *numbers = vectors_alloc(count + 1, sizeof *numbers);
    memset(numbers, 0xAB, (count + 1) * sizeof *numbers);
    return numbers;
}

/* Are the first numbers of an array of `room` those of the case, and the rest untouched? */
static bool same(const json *test, const char *key, const uint32_t *numbers, size_t room)
{
    size_t count;
    uint32_t *want = json_u32s(json_need(test, key), &count);
    bool good = count <= room && (count == 0 || memcmp(want, numbers, count * sizeof *want) == 0);
    for (size_t i = count; good && i <= room; ++i) {
        good = numbers[i] == UNTOUCHED;
    }
    free(want);
    return good || vectors_fail("%s differ", key);
}

static bool all_untouched(const uint32_t *numbers, size_t room)
{
    bool good = true;
    for (size_t i = 0; i <= room; ++i) {
        good = good && numbers[i] == UNTOUCHED;
    }
    return good || vectors_fail("refused, but written");
}

static bool answers(pb_kvcache_status status, pb_kvcache_status want)
{
    return status == want || vectors_fail("status %d, expected %d", (int)status, (int)want);
}

static bool to_blocks(const json *test, pb_kvcache_status want)
{
    size_t count;
    size_t found = 99;
    uint32_t *positions = json_u32s(json_need(test, "positions"), &count);
    uint32_t *blocks = untouched(count);
    uint32_t *fill = untouched(count);
    bool good = answers(pb_kvcache_to_blocks(positions, count, json_u32(json_need(test, "block_size")), blocks, fill,
                                             count, &found),
                        want);
    if (good && want == PB_KVCACHE_OK) {
        good = found == json_need(test, "blocks")->length || vectors_fail("%zu blocks", found);
        good = good && same(test, "blocks", blocks, count) && same(test, "fill", fill, count);
    } else if (good) {
        good = all_untouched(blocks, count) && all_untouched(fill, count) && found == 99;
    }
    free(positions);
    free(blocks);
    free(fill);
    return good;
}

static bool block_select(const json *test, pb_kvcache_status want)
{
    const char *reduce = json_string(json_need(test, "reduce"));
    const json *rows = json_need(test, "scores");
    const size_t heads = rows->length;
    const size_t scored = heads > 0 ? rows->child->length : 0;
    const size_t window = json_u32(json_need(test, "window"));
    const size_t n = scored + window;
    const size_t block_size = json_u32(json_need(test, "block_size"));
    float *scores = vectors_rows(rows, scored);
    if (scores == NULL) {
        return false;
    }
    uint32_t *budgets = vectors_alloc(heads, sizeof *budgets);
    for (size_t head = 0; head < heads; ++head) {
        budgets[head] = json_u32(json_need(test, "budget"));
    }
    size_t size = 0;
    uint32_t *blocks = untouched(heads * n);
    pb_kvcache_status status = pb_kvcache_block_select_workspace_size(n, window, block_size, &size);
    void *workspace = vectors_alloc(size, 1);
    if (status == PB_KVCACHE_OK) {
        status = pb_kvcache_block_select(
            scores, scored, heads, n, window, block_size,
            strcmp(reduce, "max") == 0 ? PB_KVCACHE_REDUCE_MAX
                                       : (strcmp(reduce, "sum") == 0 ? PB_KVCACHE_REDUCE_SUM : PB_KVCACHE_REDUCE_MEAN),
            strcmp(json_string(json_need(test, "nan")), "raise") == 0 ? PB_KVCACHE_NAN_REFUSE : PB_KVCACHE_NAN_LOWEST,
            budgets, workspace, size, blocks, n, heads * n);
    }
    bool good = answers(status, want);
    if (good && want == PB_KVCACHE_OK) {
        const uint32_t *row = blocks;
        for (const json *kept = json_need(test, "blocks")->child; kept != NULL; kept = kept->next, row += n) {
            size_t count;
            uint32_t *listed = json_u32s(kept, &count);
            good = good && count <= n && memcmp(listed, row, count * sizeof *listed) == 0 && row[count] == UNTOUCHED;
            free(listed);
        }
        good = good || vectors_fail("blocks differ");
    } else if (good) {
        good = all_untouched(blocks, heads * n);
    }
    free(scores);
    free(budgets);
    free(blocks);
    free(workspace);
    return good;
}

static bool block_moves(const json *test, pb_kvcache_status want)
{
    size_t count;
    size_t num_blocks;
    size_t size = 0;
    size_t found = 99;
    uint32_t *rows = json_u32s(json_need(test, "rows"), &count);
    uint32_t *table = json_u32s(json_need(test, "table"), &num_blocks);
    uint32_t *before = vectors_alloc(num_blocks, sizeof *before);
    memcpy(before, table, num_blocks * sizeof *table);
    uint32_t *order = untouched(count);
    uint32_t *moves = untouched(2 * count);
    pb_kvcache_status status = pb_kvcache_block_moves_workspace_size(num_blocks, &size);
    void *workspace = vectors_alloc(size, 1);
    if (status == PB_KVCACHE_OK) {
        status = pb_kvcache_block_moves(table, num_blocks, rows, count, json_u32(json_need(test, "block_size")),
                                        workspace, size, order, (pb_kvcache_move *)(void *)moves, count, &found);
    }
    bool good = answers(status, want);
    if (good && want == PB_KVCACHE_OK) {
        const json *wanted = json_need(test, "moves");
        good = same(test, "order", order, count) && (found == wanted->length || vectors_fail("%zu moves", found));
        size_t at = 0;
        for (const json *move = wanted->child; good && move != NULL; move = move->next, at += 2) {
            good = (json_u32(move->child) == moves[at] && json_u32(move->child->next) == moves[at + 1])
                   || vectors_fail("move %zu differs", at / 2);
        }
        at = 0;
        for (int part = 0; part < 2; ++part) {
            const json *block = json_need(test, part == 0 ? "table_after" : "freed")->child;
            for (; good && block != NULL; block = block->next, ++at) {
                good = (at < num_blocks && table[at] == json_u32(block)) || vectors_fail("block %zu differs", at);
            }
        }
        good = good && (at == num_blocks || vectors_fail("%zu blocks of %zu", at, num_blocks));
    } else if (good) {
        good = all_untouched(order, count) && all_untouched(moves, 2 * count) && found == 99
               && memcmp(table, before, num_blocks * sizeof *table) == 0;
    }
    free(rows);
    free(table);
    free(before);
    free(order);
    free(moves);
    free(workspace);
    return good;
}

bool vectors_blocks(const json *test)
{
    const char *call = json_string(json_need(test, "call"));
    const pb_kvcache_status want = vectors_status(json_get(test, "status"));
    if (strcmp(call, "to_blocks") == 0) {
        return to_blocks(test, want);
    }
    if (strcmp(call, "block_select") == 0) {
        return block_select(test, want);
    }
    return strcmp(call, "block_moves") == 0 ? block_moves(test, want) : vectors_fail("unknown call %s", call);
}
