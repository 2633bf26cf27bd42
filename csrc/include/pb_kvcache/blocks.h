/*
 * Blocks, for engines that hold a cache in blocks of `block_size` rows and can only give back whole ones: position or
 * row p is in block p / block_size.
 *
 * At prefill, pb_kvcache_to_blocks says which blocks kept positions lie in, and pb_kvcache_block_select keeps whole
 * blocks. At decode, evictions leave holes all over a cache. pb_kvcache_block_moves closes them by the fewest copies of
 * rows: full blocks and at most one partly filled one stay, and the others are free.
 *
 * Stateless functions over the caller's arrays. Nothing is allocated: scratch memory is the `workspace`, of any
 * alignment, whose size a function tells. An array may be NULL where nothing of it is read or written.
 */
#ifndef PB_KVCACHE_BLOCKS_H
#define PB_KVCACHE_BLOCKS_H

#include <stddef.h>
#include <stdint.h>

#include "pb_kvcache/api.h"
#include "pb_kvcache/select.h"
#include "pb_kvcache/status.h"

PB_KVCACHE_EXTERN_C_BEGIN

/* cdef: begin */
/*
 * The blocks that hold kept positions, ascending, and how many each holds.
 *
 *   positions   `count` positions, strictly ascending
 *   count       at most 2^32 - 1
 *   block_size  positions in a block, > 0
 *   blocks      becomes the blocks' numbers
 *   fill        becomes how many positions are in each, 1 to block_size
 *   capacity    elements of `blocks` and of `fill`; `count` always suffices
 *   num_blocks  becomes how many blocks were written
 *
 * PB_KVCACHE_ERROR_NULL, _BLOCK_SIZE, _TOO_LARGE, _ALIGNMENT, _POSITION, _CAPACITY, _OVERLAP.
 */
PB_KVCACHE_API pb_kvcache_status pb_kvcache_to_blocks(const uint32_t *positions, size_t count, size_t block_size,
                                                      uint32_t *blocks, uint32_t *fill, size_t capacity,
                                                      size_t *num_blocks);

/*
 * Bytes of scratch that pb_kvcache_block_select needs.
 *
 *   n           positions of the prompt, at most 2^32 - 1
 *   window      the last ones: 0 < window < n
 *   block_size  positions in a block, > 0
 *   size        becomes the number of bytes
 *
 * PB_KVCACHE_ERROR_NULL, _BLOCK_SIZE, _WINDOW, _TOO_LARGE.
 */
PB_KVCACHE_API pb_kvcache_status pb_kvcache_block_select_workspace_size(size_t n, size_t window, size_t block_size,
                                                                        size_t *size);

/*
 * Which whole blocks each head keeps: those that hold a position of the window, and the best of the others by the
 * scores in them, the lower block on a tie. A sum is made in double from left to right, a mean divides it by
 * block_size, and both are rounded to float, to the largest finite one where they are beyond it.
 *
 *   scores         row h starts at scores + h * stride, n - window floats, read only
 *   stride         floats from row to row
 *   num_heads      rows
 *   n              positions of the prompt, at most 2^32 - 1
 *   window         the last ones, whose blocks are always kept: 0 < window < n
 *   block_size     positions in a block, > 0. The last block may hold fewer
 *   reduce         how the scores of a block become one
 *   nan            what is done about scores that are none. _LOWEST: they are no maximum, and make a sum or mean -inf
 *   budgets        positions kept of each row, num_heads numbers: budgets[h] / block_size blocks, at least the window's
 *   workspace      scratch of workspace_size bytes, at least what the function above says
 *   blocks         row h starts at blocks + h * blocks_stride and gets budgets[h] / block_size ascending blocks, at
 *                  most all
 *   blocks_stride  elements from row to row, at least the most that a row gets
 *   capacity       elements in the whole array
 *
 * The errors of the function above, _OPTION, _WORKSPACE, _ALIGNMENT, _STRIDE, _CAPACITY, _OVERLAP. _BUDGET_WINDOW for a
 * budget below the blocks of the window. _SCORE for a NaN or infinity under _NAN_REFUSE.
 */
PB_KVCACHE_API pb_kvcache_status pb_kvcache_block_select(const float *scores, size_t stride, size_t num_heads, size_t n,
                                                         size_t window, size_t block_size, pb_kvcache_reduce reduce,
                                                         pb_kvcache_nan nan, const uint32_t *budgets, void *workspace,
                                                         size_t workspace_size, uint32_t *blocks, size_t blocks_stride,
                                                         size_t capacity);

/* A row that is copied: from one slot of the engine's memory to another, block * block_size + row in the block. */
typedef struct pb_kvcache_move {
    uint32_t from;
    uint32_t to;
} pb_kvcache_move;

/*
 * Bytes of scratch that pb_kvcache_block_moves needs.
 *
 *   num_blocks  blocks of the cache, at most 2^32 - 1
 *   size        becomes the number of bytes
 *
 * PB_KVCACHE_ERROR_NULL, _TOO_LARGE.
 */
PB_KVCACHE_API pb_kvcache_status pb_kvcache_block_moves_workspace_size(size_t num_blocks, size_t *size);

/*
 * After an eviction: which rows move to fill the holes, and which blocks become free. What is left is
 * B = ceil(count / block_size) blocks, of which all but the last are full. The last one's rows are at its front. Rows
 * of a full block stay where they are, and no choice of blocks copies fewer rows than this one.
 *
 * The cache's row r is in block table[r / block_size], at r % block_size. The moves read no slot that another one
 * writes, so that their order does not matter. Rows change places with respect to each other: attention does not
 * depend on that as long as what belongs to a row (its position, its weight) goes along, which is what `order` is for.
 *
 * Where several choices copy as few rows, the last block is the one that was furthest back in the table. Of the other
 * blocks the fuller ones stay, and of equals the first in the table.
 *
 *   table       the cache's blocks, each once. Becomes the B blocks of what is left, in the order of the table but for
 *               the last one, then the free ones in the order of the table
 *   num_blocks  how many, at most 2^32 - 1. (table[i] + 1) * block_size is at most 2^32
 *   rows        the `count` rows that the eviction left, strictly ascending, below num_blocks * block_size
 *   count       0 or more
 *   block_size  rows in a block, > 0
 *   workspace   scratch of workspace_size bytes, at least what the function above says
 *   order       becomes, for each of the `count` rows of the new cache, the row that it was
 *   moves       becomes the copies, in the order of the rows that they make
 *   capacity    elements of `order` and of `moves`, at least `count`
 *   num_moves   becomes how many moves were written
 *
 * PB_KVCACHE_ERROR_NULL, _BLOCK_SIZE, _TOO_LARGE, _WORKSPACE, _ALIGNMENT, _CAPACITY, _OVERLAP. _INDEX for a row that is
 * not in a block or does not ascend.
 */
PB_KVCACHE_API pb_kvcache_status pb_kvcache_block_moves(uint32_t *table, size_t num_blocks, const uint32_t *rows,
                                                        size_t count, size_t block_size, void *workspace,
                                                        size_t workspace_size, uint32_t *order, pb_kvcache_move *moves,
                                                        size_t capacity, size_t *num_moves);
/* cdef: end */

PB_KVCACHE_EXTERN_C_END

#endif
