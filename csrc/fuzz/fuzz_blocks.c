/*
 * libFuzzer target: blocks over arbitrary positions, rows, tables, scores and sizes, checked against what the header
 * says. Built with -fsanitize=fuzzer,address,undefined.
 */
#include <math.h>

#include "input.h"

/* Mostly a small block, sometimes anything. */
static size_t block_size_of(input *in)
{
    const uint32_t kind = take(in, 1);
    return kind < 0xF8 ? kind % 20 : (kind < 0xFC ? take(in, 4) : SIZE_MAX / (take(in, 1) + 1u));
}

/* `count` numbers that mostly ascend. Returns whether they do. */
static bool ascending_numbers(input *in, uint32_t *numbers, size_t count)
{
    bool ascends = true;
    uint32_t next = take(in, 1) % 5;
    for (size_t i = 0; i < count; ++i) {
        const uint32_t step = take(in, 1);
        next = step == 255 ? take(in, 4) : (i == 0 ? next : next + 1) + (step < 128 ? 0 : step % 9);
        next -= step == 254;
        numbers[i] = next;
        ascends = ascends && (i == 0 || numbers[i] > numbers[i - 1]);
    }
    return ascends;
}

static void fuzz_to_blocks(input *in)
{
    const size_t count = take(in, 1);
    const size_t block_size = block_size_of(in);
    uint32_t *positions = malloc((count + 1) * sizeof *positions);
    const bool ascends = ascending_numbers(in, positions, count);
    const size_t capacity = take(in, 1) < 200 ? count : take(in, 1) % (count + 1);
    uint32_t *blocks = malloc((capacity + 1) * sizeof *blocks);
    uint32_t *fill = malloc((capacity + 1) * sizeof *fill);
    size_t found = SIZE_MAX;
    const pb_kvcache_status status = pb_kvcache_to_blocks(positions, count, block_size, blocks, fill, capacity, &found);
    MUST(status != PB_KVCACHE_OK || (ascends && block_size > 0 && found <= capacity));
    MUST(status == PB_KVCACHE_OK || found == SIZE_MAX);
    MUST(status == PB_KVCACHE_OK || !ascends || block_size == 0 || capacity < count);
    size_t at = 0;
    for (size_t i = 0; status == PB_KVCACHE_OK && i < found; ++i) {
        MUST(fill[i] > 0 && (i == 0 || blocks[i] > blocks[i - 1]));
        for (size_t j = 0; j < fill[i]; ++j, ++at) {
            MUST(at < count && positions[at] / block_size == blocks[i]);
        }
    }
    MUST(status != PB_KVCACHE_OK || at == count);
    free(positions);
    free(blocks);
    free(fill);
}

static void fuzz_block_select(input *in)
{
    const size_t heads = 1 + take(in, 1) % 3;
    const size_t scored = 1 + take(in, 2) % 300;
    const size_t window = take(in, 1) % 40;
    const size_t n = scored + window;
    const size_t block_size = block_size_of(in);
    const pb_kvcache_reduce reduce = (pb_kvcache_reduce)(take(in, 1) % 4);
    const pb_kvcache_nan nan = (pb_kvcache_nan)(take(in, 1) % 2);
    float *scores = malloc(heads * scored * sizeof *scores);
    uint32_t seed = take(in, 4) | 1u;
    const bool any = (take(in, 1) & 1) != 0;
    for (size_t i = 0; i < heads * scored; ++i) {
        seed = seed * 1664525u + 1013904223u;
        const uint32_t bits = in->left > 16 ? take(in, 4) : seed;
        memcpy(scores + i, &bits, sizeof bits);
        scores[i] = any ? scores[i] : (float)(bits >> 29);
    }
    uint32_t budgets[3];
    size_t most = 0;
    const size_t all = block_size > 0 ? (n - 1) / block_size + 1 : 0;
    for (size_t head = 0; head < heads; ++head) {
        budgets[head] = (uint32_t)(n + 8 - take(in, 2) % (n + 9));
        const size_t wanted = block_size > 0 ? budgets[head] / block_size : 0;
        most = wanted > most ? wanted : most;
    }
    most = most < all ? most : all;
    size_t needed = 0;
    pb_kvcache_status status = pb_kvcache_block_select_workspace_size(n, window, block_size, &needed);
    MUST((status == PB_KVCACHE_OK) == (block_size > 0 && window > 0));
    unsigned char *workspace = malloc(needed + 1);
    uint32_t *blocks = malloc((heads * most + 1) * sizeof *blocks);
    memset(blocks, 0xFF, (heads * most + 1) * sizeof *blocks);
    status = pb_kvcache_block_select(scores, scored, heads, n, window, block_size, reduce, nan, budgets, workspace,
                                     needed, blocks, most, heads * most);
    for (size_t head = 0; head < heads && status == PB_KVCACHE_OK; ++head) {
        const size_t wanted = budgets[head] / block_size < all ? budgets[head] / block_size : all;
        const uint32_t *row = blocks + head * most;
        for (size_t i = 0; i < wanted; ++i) {
            MUST(row[i] < all && (i == 0 || row[i] > row[i - 1]));
        }
        for (size_t block = scored / block_size; block < all; ++block) {
            MUST(row[wanted - (all - block)] == block); /* the window's blocks are there */
        }
    }
    for (size_t i = 0; status != PB_KVCACHE_OK && i < heads * most; ++i) {
        MUST(blocks[i] == UINT32_MAX);
    }
    free(scores);
    free(workspace);
    free(blocks);
}

/* Copies that the best choice of blocks needs where `last` is the last one. SIZE_MAX: it cannot be. */
static size_t copies(const uint32_t *rows, size_t count, size_t num_blocks, size_t block_size, size_t last)
{
    const size_t left = (count - 1) / block_size + 1;
    const size_t last_rows = count - (left - 1) * block_size;
    size_t fill[32] = {0};
    size_t stay = 0;
    for (size_t i = 0; i < count; ++i) {
        fill[rows[i] / block_size] += rows[i] / block_size != last;
        stay += rows[i] / block_size == last && rows[i] % block_size < last_rows;
    }
    for (size_t chosen = 0; chosen + 1 < left; ++chosen) {
        size_t fullest = last == 0 ? 1 : 0;
        for (size_t block = 0; block < num_blocks; ++block) {
            fullest = block != last && fill[block] > fill[fullest] ? block : fullest;
        }
        stay += fill[fullest];
        fill[fullest] = 0;
    }
    return count - stay;
}

static void fuzz_block_moves(input *in)
{
    enum { MOST = 32, SLOTS = 64 * 20 };
    const size_t num_blocks = take(in, 1) % (MOST + 1);
    const size_t block_size = block_size_of(in);
    uint32_t table[MOST];
    const uint32_t step = 2 * (take(in, 1) % 32) + 1; /* odd: each block of 64 once */
    for (size_t i = 0; i < num_blocks; ++i) {
        table[i] = (uint32_t)i * step % 64;
    }
    const bool odd = num_blocks > 0 && take(in, 1) == 7; /* a block of any number, perhaps twice */
    if (odd) {
        table[take(in, 1) % num_blocks] = take(in, 4);
    }
    const size_t count = take(in, 2) % 600;
    uint32_t *rows = malloc((count + 1) * sizeof *rows);
    ascending_numbers(in, rows, count);
    uint32_t after[MOST];
    memcpy(after, table, sizeof table);
    size_t needed = 0;
    size_t num_moves = SIZE_MAX;
    MUST(pb_kvcache_block_moves_workspace_size(num_blocks, &needed) == PB_KVCACHE_OK);
    unsigned char *workspace = malloc(needed);
    uint32_t *order = malloc((count + 1) * sizeof *order);
    pb_kvcache_move *moves = malloc((count + 1) * sizeof *moves);
    const pb_kvcache_status status = pb_kvcache_block_moves(after, num_blocks, rows, count, block_size, workspace,
                                                            needed, order, moves, count, &num_moves);
    MUST(status == PB_KVCACHE_OK || (num_moves == SIZE_MAX && memcmp(table, after, sizeof *table * num_blocks) == 0));
    if (status == PB_KVCACHE_OK && block_size < 20 && !odd) {
        /* Every row, by its old number, copied as said, then read by the new table in the new order */
        uint32_t memory[SLOTS];
        memset(memory, 0xFF, sizeof memory);
        for (size_t i = 0; i < count; ++i) {
            memory[table[rows[i] / block_size] * block_size + rows[i] % block_size] = rows[i];
        }
        for (size_t i = 0; i < num_moves; ++i) {
            MUST(memory[moves[i].to] == UINT32_MAX && memory[moves[i].from] != UINT32_MAX);
            memory[moves[i].to] = memory[moves[i].from];
            memory[moves[i].from] = UINT32_MAX - 1; /* read once, and written by none */
        }
        uint64_t sum = 0;
        for (size_t i = 0; i < count; ++i) {
            MUST(memory[after[i / block_size] * block_size + i % block_size] == order[i]);
            sum += (uint64_t)rows[i] - order[i];
        }
        MUST(sum == 0);
        size_t fewest = count > 0 ? SIZE_MAX : 0;
        for (size_t last = 0; last < num_blocks && count > 0; ++last) {
            const size_t wanted = copies(rows, count, num_blocks, block_size, last);
            fewest = wanted < fewest ? wanted : fewest;
        }
        MUST(num_moves == fewest);
    }
    free(rows);
    free(workspace);
    free(order);
    free(moves);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    input in = {data, size};
    switch (take(&in, 1) % 3) {
    case 0: fuzz_to_blocks(&in); break;
    case 1: fuzz_block_select(&in); break;
    default: fuzz_block_moves(&in); break;
    }
    return 0;
}
