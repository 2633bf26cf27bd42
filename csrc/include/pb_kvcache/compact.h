/* Compaction: move the kept rows of keys or values to the front, in place. */
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
/* cdef: end */

PB_KVCACHE_EXTERN_C_END

#endif
