#include <string.h>

#include "bits.h"
#include "checks.h"
#include "kernels.h"

/* ---- Positions as blocks ---- */

/* Write the blocks of ascending positions and how many each holds, at most `capacity`. Returns how many there are. */
static size_t list_blocks(const uint32_t *positions, size_t count, size_t block_size, uint32_t *blocks, uint32_t *fill,
                          size_t capacity)
{
    size_t found = 0;
    for (size_t i = 0; i < count; ++found) {
        const size_t block = positions[i] / block_size;
        const size_t first = i;
        const size_t last = block_size - 1 - positions[i] % block_size; /* as far as the block reaches from here */
        while (i < count && positions[i] - positions[first] <= last) {
            ++i;
        }
        if (found < capacity) {
            blocks[found] = (uint32_t)block;
            fill[found] = (uint32_t)(i - first);
        }
    }
    return found;
}

pb_kvcache_status pb_kvcache_to_blocks(const uint32_t *positions, size_t count, size_t block_size, uint32_t *blocks,
                                       uint32_t *fill, size_t capacity, size_t *num_blocks)
{
    if (num_blocks == NULL || (count > 0 && (positions == NULL || blocks == NULL || fill == NULL))) {
        return PB_KVCACHE_ERROR_NULL;
    }
    if (block_size == 0) {
        return PB_KVCACHE_ERROR_BLOCK_SIZE;
    }
    if (count > UINT32_MAX || count > PTRDIFF_MAX / sizeof *positions) {
        return PB_KVCACHE_ERROR_TOO_LARGE;
    }
    if (!pb_kvcache_priv_aligned(positions, sizeof *positions) || !pb_kvcache_priv_aligned(blocks, sizeof *blocks)
        || !pb_kvcache_priv_aligned(fill, sizeof *fill)) {
        return PB_KVCACHE_ERROR_ALIGNMENT;
    }
    for (size_t i = 1; i < count; ++i) {
        if (positions[i] <= positions[i - 1]) {
            return PB_KVCACHE_ERROR_POSITION;
        }
    }
    const size_t found = list_blocks(positions, count, block_size, NULL, NULL, 0);
    if (found > capacity) {
        return PB_KVCACHE_ERROR_CAPACITY;
    }
    const size_t read = count * sizeof *positions;
    const size_t written = found * sizeof *blocks;
    if (pb_kvcache_priv_overlap(positions, read, blocks, written)
        || pb_kvcache_priv_overlap(positions, read, fill, written)
        || pb_kvcache_priv_overlap(blocks, written, fill, written)) {
        return PB_KVCACHE_ERROR_OVERLAP;
    }
    *num_blocks = list_blocks(positions, count, block_size, blocks, fill, capacity);
    return PB_KVCACHE_OK;
}

/* ---- Whole blocks of a prompt ---- */

/* The score of a block. What is not finite is no maximum, and makes a sum or a mean -inf. */
static float fold(const float *scores, size_t block_size, pb_kvcache_reduce reduce)
{
    if (reduce == PB_KVCACHE_REDUCE_MAX) {
        float top = minus_infinity();
        for (size_t i = 0; i < block_size; ++i) {
            top = is_finite(scores[i]) && scores[i] > top ? scores[i] : top;
        }
        return top;
    }
    double sum = 0.0;
    bool numbers = true;
    for (size_t i = 0; i < block_size; ++i) {
        numbers = numbers && is_finite(scores[i]);
        sum += (double)scores[i];
    }
    if (!numbers) {
        return minus_infinity();
    }
    sum = reduce == PB_KVCACHE_REDUCE_MEAN ? sum / (double)block_size : sum;
    sum = sum < (double)FLT_MAX ? sum : (double)FLT_MAX;
    return (float)(sum > -(double)FLT_MAX ? sum : -(double)FLT_MAX);
}

pb_kvcache_status pb_kvcache_block_select_workspace_size(size_t n, size_t window, size_t block_size, size_t *size)
{
    if (size == NULL) {
        return PB_KVCACHE_ERROR_NULL;
    }
    if (block_size == 0) {
        return PB_KVCACHE_ERROR_BLOCK_SIZE;
    }
    if (window == 0 || window >= n) {
        return PB_KVCACHE_ERROR_WINDOW;
    }
    const size_t scored = (n - window) / block_size;
    if (n > UINT32_MAX || scored > (PTRDIFF_MAX - PB_KVCACHE_PRIV_ALIGNMENT) / sizeof(float)) {
        return PB_KVCACHE_ERROR_TOO_LARGE;
    }
    *size = scored * sizeof(float) + PB_KVCACHE_PRIV_ALIGNMENT;
    return PB_KVCACHE_OK;
}

pb_kvcache_status pb_kvcache_block_select(const float *scores, size_t stride, size_t num_heads, size_t n, size_t window,
                                          size_t block_size, pb_kvcache_reduce reduce, pb_kvcache_nan nan,
                                          const uint32_t *budgets, void *workspace, size_t workspace_size,
                                          uint32_t *blocks, size_t blocks_stride, size_t capacity)
{
    size_t needed;
    size_t input_bytes;
    size_t output_bytes;
    /* Checks: options, workspace, budgets, the arrays, what overlaps */
    if ((scores == NULL || budgets == NULL || workspace == NULL || blocks == NULL) && num_heads > 0) {
        return PB_KVCACHE_ERROR_NULL;
    }
    pb_kvcache_status status = pb_kvcache_block_select_workspace_size(n, window, block_size, &needed);
    if (status != PB_KVCACHE_OK) {
        return status;
    }
    if (!pb_kvcache_priv_reduce_ok(reduce) || !pb_kvcache_priv_nan_ok(nan)) {
        return PB_KVCACHE_ERROR_OPTION;
    }
    if (workspace_size < needed) {
        return PB_KVCACHE_ERROR_WORKSPACE;
    }
    const size_t all = (n - 1) / block_size + 1;
    const size_t scored = (n - window) / block_size; /* blocks without a position of the window */
    size_t most = 0;
    for (size_t head = 0; head < num_heads; ++head) {
        const size_t wanted = budgets[head] / block_size;
        if (wanted < all - scored) {
            return PB_KVCACHE_ERROR_BUDGET_WINDOW;
        }
        most = wanted > most ? wanted : most;
    }
    most = most < all ? most : all;
    status = pb_kvcache_priv_scores_ok(scores, stride, num_heads, n - window, PB_KVCACHE_NAN_LOWEST);
    if (status == PB_KVCACHE_OK) {
        status = pb_kvcache_priv_rows_ok(blocks, sizeof *blocks, blocks_stride, 0, num_heads, most, capacity);
    }
    if (status == PB_KVCACHE_OK) {
        status = pb_kvcache_priv_scores_ok(scores, stride, num_heads, n - window, nan);
    }
    if (status != PB_KVCACHE_OK) {
        return status;
    }
    (void)pb_kvcache_priv_span_bytes(num_heads, stride, n - window, sizeof *scores, &input_bytes);
    (void)pb_kvcache_priv_span_bytes(num_heads, blocks_stride, most, sizeof *blocks, &output_bytes);
    const size_t budget_bytes = num_heads * sizeof *budgets;
    const size_t scratch_bytes = num_heads > 0 ? needed : 0;
    if (pb_kvcache_priv_overlap(scores, input_bytes, blocks, output_bytes)
        || pb_kvcache_priv_overlap(budgets, budget_bytes, blocks, output_bytes)
        || pb_kvcache_priv_overlap(workspace, scratch_bytes, blocks, output_bytes)
        || pb_kvcache_priv_overlap(workspace, scratch_bytes, scores, input_bytes)
        || pb_kvcache_priv_overlap(workspace, scratch_bytes, budgets, budget_bytes)) {
        return PB_KVCACHE_ERROR_OVERLAP;
    }
    /* Fold and choose */
    float *folded = num_heads > 0 ? (float *)pb_kvcache_priv_align(workspace) : NULL;
    for (size_t head = 0; head < num_heads; ++head) {
        const size_t wanted = budgets[head] / block_size < all ? budgets[head] / block_size : all;
        const size_t best = wanted - (all - scored);
        uint32_t *row = blocks + head * blocks_stride;
        for (size_t block = 0; block < scored; ++block) {
            folded[block] = fold(scores + head * stride + block * block_size, block_size, reduce);
        }
        pb_kvcache_priv_choose_highest_of_numbers(folded, scored, best, row);
        for (size_t block = scored; block < all; ++block) {
            row[best + block - scored] = (uint32_t)block;
        }
    }
    return PB_KVCACHE_OK;
}

/* ---- Holes after an eviction ---- */

/* What is known of a cache's blocks, in the order of its table. */
typedef struct blocks_of {
    size_t num_blocks;
    size_t block_size;
    size_t kept_blocks; /* blocks that will be left */
    size_t last_rows;   /* rows in the last of them */
    uint32_t *fill;     /* rows of each block that are left */
    uint32_t *front;    /* how many of them are among its first last_rows */
    uint32_t *table;    /* the table as it was */
} blocks_of;

/* Count the rows of each block. */
static void count_rows(const blocks_of *c, const uint32_t *rows, size_t count)
{
    size_t at = 0;
    for (size_t block = 0; block < c->num_blocks; ++block) {
        const uint64_t base = (uint64_t)block * c->block_size;
        uint32_t fill = 0;
        uint32_t front = 0;
        for (; at < count && rows[at] - base < c->block_size; ++at) { /* no row is below the base */
            ++fill;
            front += rows[at] - base < c->last_rows;
        }
        c->fill[block] = fill;
        c->front[block] = front;
    }
}

/* How many blocks hold at least so many rows? */
static size_t blocks_with(const blocks_of *c, size_t rows)
{
    size_t found = 0;
    for (size_t block = 0; block < c->num_blocks; ++block) {
        found += c->fill[block] >= rows;
    }
    return found;
}

/*
 * Choose the blocks that stay. Returns the one that becomes the last. Beside it stay those with more than `*least`
 * rows, and the first `*ties` with exactly so many.
 *
 * With `last` given, the others stay with all of their rows, so they are the kept_blocks - 1 fullest. Against the
 * fullest kept_blocks of all, whose least full one holds *least, `last` costs the rows that it held there, or *least
 * where it was not among them, and brings back those at its front.
 */
static size_t choose_blocks(const blocks_of *c, size_t *least, size_t *ties)
{
    /* The fill of the least full of the fullest blocks, by bisection */
    size_t low = 0;
    size_t high = c->block_size;
    while (low < high) {
        const size_t middle = high - (high - low) / 2;
        if (blocks_with(c, middle) >= c->kept_blocks) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    *least = low;
    *ties = c->kept_blocks - blocks_with(c, low + 1);
    /* The last block: the one that costs least, the furthest back of equals */
    size_t last = 0;
    uint64_t lowest = UINT64_MAX;
    size_t equals = 0;
    for (size_t block = 0; block < c->num_blocks; ++block) {
        equals += c->fill[block] == *least;
        const bool one_of_them = c->fill[block] > *least || (c->fill[block] == *least && equals <= *ties);
        const uint64_t cost = (uint64_t)(one_of_them ? c->fill[block] : *least) - c->front[block];
        if (cost <= lowest) {
            lowest = cost;
            last = block;
        }
    }
    *ties -= c->fill[last] <= *least; /* it takes the place of one of them, or of itself */
    return last;
}

/* The `length` rows of a block of the new cache: of its `count` old ones those that stay, and moves in the holes. */
static void fill_block(const blocks_of *c, size_t block, const uint32_t *rows, size_t count, size_t length,
                       uint32_t *order, pb_kvcache_move *moves, size_t *num_moves)
{
    const uint64_t base = (uint64_t)block * c->block_size;
    size_t at = 0;
    for (size_t i = 0; i < length; ++i) {
        if (at < count && rows[at] - base == i) {
            order[i] = rows[at++];
            continue;
        }
        pb_kvcache_move *move = &moves[(*num_moves)++];
        order[i] = move->from;
        move->from = c->table[move->from / c->block_size] * (uint32_t)c->block_size
                     + (uint32_t)(move->from % c->block_size);
        move->to = c->table[block] * (uint32_t)c->block_size + (uint32_t)i;
    }
}

pb_kvcache_status pb_kvcache_block_moves_workspace_size(size_t num_blocks, size_t *size)
{
    if (size == NULL) {
        return PB_KVCACHE_ERROR_NULL;
    }
    if (num_blocks > UINT32_MAX || num_blocks > (PTRDIFF_MAX - PB_KVCACHE_PRIV_ALIGNMENT) / (3 * sizeof(uint32_t))) {
        return PB_KVCACHE_ERROR_TOO_LARGE;
    }
    *size = 3 * num_blocks * sizeof(uint32_t) + PB_KVCACHE_PRIV_ALIGNMENT;
    return PB_KVCACHE_OK;
}

/* Everything that pb_kvcache_block_moves refuses. */
static pb_kvcache_status block_moves_ok(const uint32_t *table, size_t num_blocks, const uint32_t *rows, size_t count,
                                        size_t block_size, const void *workspace, size_t workspace_size,
                                        const uint32_t *order, const pb_kvcache_move *moves, size_t capacity,
                                        const size_t *num_moves)
{
    size_t needed;
    if (num_moves == NULL || (num_blocks > 0 && (table == NULL || workspace == NULL))
        || (count > 0 && (rows == NULL || order == NULL || moves == NULL))) {
        return PB_KVCACHE_ERROR_NULL;
    }
    if (block_size == 0) {
        return PB_KVCACHE_ERROR_BLOCK_SIZE;
    }
    const pb_kvcache_status status = pb_kvcache_block_moves_workspace_size(num_blocks, &needed);
    if (status != PB_KVCACHE_OK || block_size > UINT32_MAX || count > PTRDIFF_MAX / sizeof *moves) {
        return PB_KVCACHE_ERROR_TOO_LARGE;
    }
    if (num_blocks > 0 && workspace_size < needed) {
        return PB_KVCACHE_ERROR_WORKSPACE;
    }
    if (!pb_kvcache_priv_aligned(table, sizeof *table) || !pb_kvcache_priv_aligned(rows, sizeof *rows)
        || !pb_kvcache_priv_aligned(order, sizeof *order) || !pb_kvcache_priv_aligned(moves, sizeof moves->to)) {
        return PB_KVCACHE_ERROR_ALIGNMENT;
    }
    if (capacity < count) {
        return PB_KVCACHE_ERROR_CAPACITY;
    }
    /* What overlaps */
    const struct {
        const void *array;
        size_t bytes;
    } arrays[] = {{table, num_blocks * sizeof *table},
                  {order, count * sizeof *order},
                  {moves, count * sizeof *moves},
                  {workspace, num_blocks > 0 ? needed : 0},
                  {rows, count * sizeof *rows}};
    for (size_t i = 0; i < sizeof arrays / sizeof arrays[0]; ++i) {
        for (size_t j = 0; j < i; ++j) {
            if (pb_kvcache_priv_overlap(arrays[i].array, arrays[i].bytes, arrays[j].array, arrays[j].bytes)) {
                return PB_KVCACHE_ERROR_OVERLAP;
            }
        }
    }
    /* Values */
    for (size_t i = 0; i < num_blocks; ++i) {
        if (table[i] >= ((uint64_t)UINT32_MAX + 1) / block_size) {
            return PB_KVCACHE_ERROR_TOO_LARGE;
        }
    }
    for (size_t i = 1; i < count; ++i) {
        if (rows[i] <= rows[i - 1]) {
            return PB_KVCACHE_ERROR_INDEX;
        }
    }
    return count > 0 && rows[count - 1] / block_size >= num_blocks ? PB_KVCACHE_ERROR_INDEX : PB_KVCACHE_OK;
}

pb_kvcache_status pb_kvcache_block_moves(uint32_t *table, size_t num_blocks, const uint32_t *rows, size_t count,
                                         size_t block_size, void *workspace, size_t workspace_size, uint32_t *order,
                                         pb_kvcache_move *moves, size_t capacity, size_t *num_moves)
{
    const pb_kvcache_status status = block_moves_ok(table, num_blocks, rows, count, block_size, workspace,
                                                    workspace_size, order, moves, capacity, num_moves);
    if (status != PB_KVCACHE_OK) {
        return status;
    }
    if (count == 0) { /* every block is free, in the order of the table */
        *num_moves = 0;
        return PB_KVCACHE_OK;
    }
    uint32_t *scratch = (uint32_t *)pb_kvcache_priv_align(workspace);
    const size_t kept_blocks = (count - 1) / block_size + 1;
    const blocks_of c = {.num_blocks = num_blocks,
                         .block_size = block_size,
                         .kept_blocks = kept_blocks,
                         .last_rows = count - (kept_blocks - 1) * block_size,
                         .fill = scratch,
                         .front = scratch + num_blocks,
                         .table = scratch + 2 * num_blocks};
    size_t least;
    size_t ties;
    count_rows(&c, rows, count);
    memcpy(c.table, table, num_blocks * sizeof *table);
    const size_t last = choose_blocks(&c, &least, &ties);
    /* The new table, and the rows that move: all of a free block, of the last block those that are not at its front */
    size_t stay = 0;
    size_t freed = kept_blocks;
    size_t at = 0;
    size_t moving = 0;
    size_t last_at = 0;
    for (size_t block = 0; block < num_blocks; at += c.fill[block], ++block) {
        const bool tie = c.fill[block] == least && block != last && ties > 0;
        const bool stays = block == last || c.fill[block] > least || tie;
        ties -= tie;
        last_at = block == last ? at : last_at;
        if (block != last) {
            table[stays ? stay++ : freed++] = c.table[block];
        }
        for (size_t i = block == last ? c.front[block] : 0; i < c.fill[block] && (!stays || block == last); ++i) {
            moves[moving++].from = rows[at + i];
        }
        c.front[block] = stays; /* from here on: does it stay? */
    }
    table[kept_blocks - 1] = c.table[last];
    /* The new rows: block by block, the last one last */
    size_t moved = 0;
    size_t made = 0;
    at = 0;
    for (size_t block = 0; block < num_blocks; at += c.fill[block], ++block) {
        if (c.front[block] != 0 && block != last) {
            fill_block(&c, block, rows + at, c.fill[block], block_size, order + made, moves, &moved);
            made += block_size;
        }
    }
    fill_block(&c, last, rows + last_at, c.fill[last], c.last_rows, order + made, moves, &moved);
    *num_moves = moved;
    return PB_KVCACHE_OK;
}
