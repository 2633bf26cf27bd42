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

/*
 * The rows of one head that `indices` names go to `target`, target_stride apart. Ascending indices: where the target is
 * the head itself, or lies before it, a row moves to a place that is its own or was left before, never to one that is
 * still wanted.
 */
static void move_rows(unsigned char *target, ptrdiff_t target_stride, unsigned char *head, ptrdiff_t stride,
                      size_t bytes, const uint32_t *indices, size_t count)
{
    const bool dense = stride == (ptrdiff_t)bytes; /* and so is the target: neighbours can move together */
    size_t to = 0;
    while (target == head && target_stride == stride && to < count && indices[to] == to) {
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
        memmove(target + (ptrdiff_t)to * target_stride, head + (ptrdiff_t)indices[to] * stride, run * bytes);
        to += run;
    }
}

static bool ascending(const uint32_t *indices, size_t count, size_t n)
{
    for (size_t i = 0; i < count; ++i) {
        if (indices[i] >= n || (i > 0 && indices[i] <= indices[i - 1])) {
            return false;
        }
    }
    return true;
}

/* ---- Each head in its own place ---- */

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
        if (!ascending(indices + head * indices_stride, counts[head], rows->n)) {
            return PB_KVCACHE_ERROR_INDEX;
        }
    }
    for (size_t head = first_head; head < end_head; ++head) {
        unsigned char *first = (unsigned char *)rows->data + (ptrdiff_t)head * rows->head_stride;
        move_rows(first, rows->row_stride, first, rows->row_stride, rows->row_bytes, indices + head * indices_stride,
                  counts[head]);
    }
    return PB_KVCACHE_OK;
}

/* ---- All heads side by side ---- */

/* The offsets start at 0 and none is below the one before. No head has more rows than n: the indices ascend below it. */
static bool offsets_ok(const size_t *offsets, size_t num_heads)
{
    bool ok = offsets[0] == 0;
    for (size_t head = 0; head < num_heads; ++head) {
        ok = ok && offsets[head] <= offsets[head + 1];
    }
    return ok;
}

/* Do the heads lie one behind the other and their rows in order? Side by side no row then lies behind its own place. */
static bool towards_front(const pb_kvcache_rows *rows)
{
    const bool in_order = rows->n <= 1 || rows->row_stride > 0;
    const bool outermost
        = rows->num_heads <= 1
          || (rows->head_stride > 0
              && (size_t)rows->head_stride >= (rows->n - 1) * magnitude(rows->row_stride) + rows->row_bytes);
    return in_order && outermost;
}

pb_kvcache_status pb_kvcache_compact_ragged(const pb_kvcache_rows *rows, const uint32_t *indices, const size_t *offsets,
                                            void *packed, size_t capacity)
{
    const unsigned char *lowest = NULL;
    size_t length = 0;
    size_t packed_bytes;
    size_t index_bytes;
    /* Checks: the offsets, the rows and their layout, the output, what overlaps, each index */
    if (rows == NULL || (offsets == NULL && rows->num_heads > 0)) {
        return PB_KVCACHE_ERROR_NULL;
    }
    if (rows->num_heads == 0) {
        return PB_KVCACHE_OK;
    }
    if (!pb_kvcache_priv_aligned(indices, sizeof *indices) || !pb_kvcache_priv_aligned(offsets, sizeof *offsets)) {
        return PB_KVCACHE_ERROR_ALIGNMENT;
    }
    if (rows->n > UINT32_MAX || rows->num_heads > PTRDIFF_MAX / sizeof *offsets - 1) {
        return PB_KVCACHE_ERROR_TOO_LARGE;
    }
    if (!offsets_ok(offsets, rows->num_heads)) {
        return PB_KVCACHE_ERROR_INDEX;
    }
    const size_t total = offsets[rows->num_heads];
    if (total == 0) {
        return PB_KVCACHE_OK;
    }
    if (rows->n == 0) {
        return PB_KVCACHE_ERROR_INDEX;
    }
    if (rows->data == NULL || indices == NULL || packed == NULL) {
        return PB_KVCACHE_ERROR_NULL;
    }
    const pb_kvcache_status status = layout(rows, &lowest, &length);
    if (status != PB_KVCACHE_OK) {
        return status;
    }
    if (!pb_kvcache_priv_mul(total, sizeof *indices, &index_bytes)
        || !pb_kvcache_priv_mul(total, rows->row_bytes, &packed_bytes)) {
        return PB_KVCACHE_ERROR_TOO_LARGE;
    }
    if (packed_bytes > capacity) {
        return PB_KVCACHE_ERROR_CAPACITY;
    }
    const size_t offset_bytes = (rows->num_heads + 1) * sizeof *offsets;
    const bool in_place = packed == rows->data;
    if ((!in_place && pb_kvcache_priv_overlap(packed, packed_bytes, lowest, length))
        || pb_kvcache_priv_overlap(packed, packed_bytes, indices, index_bytes)
        || pb_kvcache_priv_overlap(packed, packed_bytes, offsets, offset_bytes)
        || pb_kvcache_priv_overlap(lowest, length, indices, index_bytes)
        || pb_kvcache_priv_overlap(lowest, length, offsets, offset_bytes)) {
        return PB_KVCACHE_ERROR_OVERLAP;
    }
    if (in_place && !towards_front(rows)) {
        return PB_KVCACHE_ERROR_STRIDE;
    }
    for (size_t head = 0; head < rows->num_heads; ++head) {
        if (!ascending(indices + offsets[head], offsets[head + 1] - offsets[head], rows->n)) {
            return PB_KVCACHE_ERROR_INDEX;
        }
    }
    for (size_t head = 0; head < rows->num_heads; ++head) {
        move_rows((unsigned char *)packed + offsets[head] * rows->row_bytes, (ptrdiff_t)rows->row_bytes,
                  (unsigned char *)rows->data + (ptrdiff_t)head * rows->head_stride, rows->row_stride, rows->row_bytes,
                  indices + offsets[head], offsets[head + 1] - offsets[head]);
    }
    return PB_KVCACHE_OK;
}
