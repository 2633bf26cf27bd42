#include <string.h>

#include "bits.h"
#include "checks.h"

/* Bytes from the start of the first of `count` items, `stride` apart, to the start of the last. false: too many. */
static bool span(size_t count, ptrdiff_t stride, size_t *bytes)
{
    return pb_kvcache_priv_mul(count > 0 ? count - 1 : 0, magnitude(stride), bytes);
}

/* No two rows share a byte: the rows of a head lie within one step from head to head, or the heads' rows at a position
 * within one step from position to position. Sets the lowest address and the length of the whole. */
static pb_kvcache_status layout(const pb_kvcache_rows *rows, const unsigned char **lowest, size_t *length)
{
    size_t heads;
    size_t positions;
    size_t by_head;
    if (!span(rows->num_heads, rows->head_stride, &heads) || !span(rows->n, rows->row_stride, &positions)
        || !pb_kvcache_priv_add(positions, rows->row_bytes, &by_head)
        || !pb_kvcache_priv_add(heads, by_head, length) || *length > PTRDIFF_MAX) {
        return PB_KVCACHE_ERROR_TOO_LARGE;
    }
    const size_t by_position = heads + rows->row_bytes; /* at most the length */
    const bool single_head = rows->num_heads <= 1;
    const bool single_row = rows->n <= 1;
    const bool heads_outside = (single_head || magnitude(rows->head_stride) >= by_head)
                               && (single_row || magnitude(rows->row_stride) >= rows->row_bytes);
    const bool positions_outside = (single_row || magnitude(rows->row_stride) >= by_position)
                                   && (single_head || magnitude(rows->head_stride) >= rows->row_bytes);
    if (!heads_outside && !positions_outside) {
        return PB_KVCACHE_ERROR_STRIDE;
    }
    *lowest = (const unsigned char *)rows->data - (rows->head_stride < 0 ? heads : 0)
              - (rows->row_stride < 0 ? positions : 0);
    return PB_KVCACHE_OK;
}

/* Rows fetched ahead of the one that moves: half of 32,768 rows of 512 bytes then move at 0.9 of the time. */
#define AHEAD 16u
#define CACHE_LINE 64u
#define MOST_FETCHED 1024u /* bytes of a row. The processor follows longer ones by itself */

static void fetch(const unsigned char *row, size_t bytes)
{
#ifdef __GNUC__
    for (size_t i = 0; i < bytes && i < MOST_FETCHED; i += CACHE_LINE) {
        __builtin_prefetch(row + i, 0, 2);
    }
#else
    (void)row;
    (void)bytes;
#endif
}

/* Ascending indices: a row moves to a place that is its own or was left before, never to one that is still wanted. */
static void move_rows(unsigned char *head, ptrdiff_t stride, size_t bytes, const uint32_t *indices, size_t count)
{
    const bool dense = stride == (ptrdiff_t)bytes; /* neighbours can move together */
    size_t to = 0;
    while (to < count && indices[to] == to) {
        ++to;
    }
    size_t fetched = to;
    while (to < count) {
        size_t run = 1;
        while (dense && to + run < count && indices[to + run] == indices[to] + run) {
            ++run;
        }
        for (; fetched < count && fetched < to + run + AHEAD; ++fetched) {
            fetch(head + (ptrdiff_t)indices[fetched] * stride, bytes);
        }
        memmove(head + (ptrdiff_t)to * stride, head + (ptrdiff_t)indices[to] * stride, run * bytes);
        to += run;
    }
}

pb_kvcache_status pb_kvcache_compact(const pb_kvcache_rows *rows, size_t first_head, size_t end_head,
                                     const uint32_t *indices, size_t indices_stride, const uint32_t *counts)
{
    const unsigned char *lowest = NULL;
    size_t length = 0;
    size_t most = 0;
    size_t index_bytes = 0;
    /* Checks: the rows and the range, their layout, the counts */
    if (rows == NULL) {
        return PB_KVCACHE_ERROR_NULL;
    }
    const bool empty = rows->num_heads == 0 || rows->n == 0; /* such an array may have no address and no strides */
    if (!empty && (rows->data == NULL || counts == NULL)) {
        return PB_KVCACHE_ERROR_NULL;
    }
    if (!pb_kvcache_priv_aligned(indices, sizeof *indices) || !pb_kvcache_priv_aligned(counts, sizeof *counts)) {
        return PB_KVCACHE_ERROR_ALIGNMENT;
    }
    if (first_head > end_head || end_head > rows->num_heads) {
        return PB_KVCACHE_ERROR_HEAD_RANGE;
    }
    if (rows->n > UINT32_MAX) {
        return PB_KVCACHE_ERROR_TOO_LARGE;
    }
    const pb_kvcache_status status = empty ? PB_KVCACHE_OK : layout(rows, &lowest, &length);
    if (status != PB_KVCACHE_OK) {
        return status;
    }
    for (size_t head = first_head; counts != NULL && head < end_head; ++head) {
        if (counts[head] > rows->n) {
            return PB_KVCACHE_ERROR_INDEX;
        }
        most = counts[head] > most ? counts[head] : most;
    }
    if (end_head == first_head || most == 0) {
        return PB_KVCACHE_OK;
    }
    if (indices == NULL) {
        return PB_KVCACHE_ERROR_NULL;
    }
    /* The indices: where they lie, then each of them */
    if (!pb_kvcache_priv_span_bytes(end_head, indices_stride, most, sizeof *indices, &index_bytes)) {
        return PB_KVCACHE_ERROR_TOO_LARGE;
    }
    if (pb_kvcache_priv_overlap(lowest, length, indices, index_bytes)
        || pb_kvcache_priv_overlap(lowest, length, counts, end_head * sizeof *counts)) {
        return PB_KVCACHE_ERROR_OVERLAP;
    }
    for (size_t head = first_head; head < end_head; ++head) {
        const uint32_t *index = indices + head * indices_stride;
        for (size_t i = 0; i < counts[head]; ++i) {
            if (index[i] >= rows->n || (i > 0 && index[i] <= index[i - 1])) {
                return PB_KVCACHE_ERROR_INDEX;
            }
        }
    }
    for (size_t head = first_head; head < end_head; ++head) {
        move_rows((unsigned char *)rows->data + (ptrdiff_t)head * rows->head_stride, rows->row_stride, rows->row_bytes,
                  indices + head * indices_stride, counts[head]);
    }
    return PB_KVCACHE_OK;
}
