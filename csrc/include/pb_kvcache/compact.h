/* Compaction: move the kept rows of keys or values to the front, in place, or the rows of all heads side by side. */
#ifndef PB_KVCACHE_COMPACT_H
#define PB_KVCACHE_COMPACT_H

#include <stddef.h>
#include <stdint.h>

#include "pb_kvcache/api.h"
#include "pb_kvcache/status.h"

PB_KVCACHE_EXTERN_C_BEGIN

/* cdef: begin */
/*
 * Keys or values of one layer and sequence: row i of head h is row_bytes bytes at
 * data + h * head_stride + i * row_stride. Both orders are fine: heads outermost, or positions.
 */
typedef struct pb_kvcache_rows {
    void *data;            /* of any alignment */
    size_t num_heads;      /* heads, 0 or more */
    size_t n;              /* rows of a head, at most 2^32 - 1 */
    size_t row_bytes;      /* bytes of a row */
    ptrdiff_t head_stride; /* in bytes; any under which no two rows share a byte */
    ptrdiff_t row_stride;  /* in bytes; the same */
} pb_kvcache_rows;

/*
 * For each head of a range move the kept rows to the front: row indices[h * indices_stride + j] of head h becomes its
 * row j, for j < counts[h]. The rows behind are left as they are after the moves. Uses no memory but its arguments.
 * Threads divide the heads.
 *
 *   rows                  what moves
 *   first_head, end_head  the range of heads, end_head excluded
 *   indices               head h's start at indices + h * indices_stride: counts[h] rows, strictly ascending
 *   indices_stride        elements from head to head
 *   counts                how many each head keeps: num_heads numbers of at most n
 *
 * Without heads or rows there is nothing to move: the data, indices and counts may then be NULL. The indices may be NULL
 * where every count is 0.
 *
 * PB_KVCACHE_ERROR_NULL, _ALIGNMENT, _HEAD_RANGE, _TOO_LARGE. _STRIDE where rows overlap. _OVERLAP where the indices or
 * counts lie within the rows. _INDEX for a count above n, and for an index that is not below n or does not ascend.
 * Nothing has then moved.
 */
PB_KVCACHE_API pb_kvcache_status pb_kvcache_compact(const pb_kvcache_rows *rows, size_t first_head, size_t end_head,
                                                    const uint32_t *indices, size_t indices_stride,
                                                    const uint32_t *counts);

/*
 * Copy the kept rows of all heads side by side, without gaps: row indices[j] of head h becomes row j of `packed`, for
 * offsets[h] <= j < offsets[h + 1], as pb_kvcache_select_ragged (select.h) writes them. What is held is then exactly the
 * sum of the heads' budgets. Uses no memory but its arguments. Threads divide the layers.
 *
 *   rows      what is copied. Left as it is, except where `packed` is rows->data
 *   indices   head h's are indices[offsets[h]] .. indices[offsets[h + 1] - 1]: rows of the head, strictly ascending
 *   offsets   num_heads + 1 numbers. The first is 0 and none is below the one before
 *   packed    gets offsets[num_heads] rows of row_bytes bytes. It may overlap nothing else, but it may be rows->data where
 *             both strides are positive and the heads lie outermost: every row then moves towards the front, and the memory
 *             behind the last can be given back
 *   capacity  bytes of `packed`
 *
 * Without heads, and where no row is kept, every pointer but `rows` and `offsets` may be NULL, and for no heads that too.
 *
 * PB_KVCACHE_ERROR_NULL, _ALIGNMENT, _TOO_LARGE, _CAPACITY. _STRIDE where rows overlap, and where `packed` is rows->data
 * and a stride is not as it has to be. _OVERLAP where `packed` lies within the rows, or the indices or offsets within either.
 * _INDEX for offsets that do not start at 0 or descend, and for an index that is not below n or does not ascend. Nothing has
 * then been written.
 */
PB_KVCACHE_API pb_kvcache_status pb_kvcache_compact_ragged(const pb_kvcache_rows *rows, const uint32_t *indices,
                                                           const size_t *offsets, void *packed, size_t capacity);
/* cdef: end */

PB_KVCACHE_EXTERN_C_END

#endif
