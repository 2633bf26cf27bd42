/*
 * Compaction: move the kept rows of keys or values to the front, in place.
 */
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
    void *data;
    size_t num_heads;
    size_t n; /* rows of a head */
    size_t row_bytes;
    ptrdiff_t head_stride; /* in bytes */
    ptrdiff_t row_stride;  /* in bytes */
} pb_kvcache_rows;

/*
 * For each head h in first_head .. end_head - 1 move its rows indices[h * indices_stride + j], j < counts[h], strictly
 * ascending, to rows 0 .. counts[h] - 1. The rows behind them are left as they are after the moves. `counts` has an
 * entry for each of the num_heads. Uses no memory but its arguments. Threads divide the heads.
 * PB_KVCACHE_ERROR_NULL, _HEAD_RANGE; _STRIDE where rows overlap; _TOO_LARGE; _OVERLAP where the indices or counts lie
 * within the rows; _INDEX for an index that is not below n or does not ascend: nothing has moved.
 */
PB_KVCACHE_API pb_kvcache_status pb_kvcache_compact(const pb_kvcache_rows *rows, size_t first_head, size_t end_head,
                                                    const uint32_t *indices, size_t indices_stride,
                                                    const uint32_t *counts);
/* cdef: end */

PB_KVCACHE_EXTERN_C_END

#endif
