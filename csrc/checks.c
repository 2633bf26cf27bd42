#include "checks.h"

#include "bits.h"
#include "lanes.h"

bool pb_kvcache_priv_mul(size_t a, size_t b, size_t *out)
{
    if (b != 0 && a > SIZE_MAX / b) {
        return false;
    }
    *out = a * b;
    return true;
}

bool pb_kvcache_priv_add(size_t a, size_t b, size_t *out)
{
    if (a > SIZE_MAX - b) {
        return false;
    }
    *out = a + b;
    return true;
}

bool pb_kvcache_priv_span_bytes(size_t rows, size_t stride, size_t width, size_t size, size_t *bytes)
{
    size_t elements;
    if (rows == 0 || width == 0) {
        *bytes = 0;
        return true;
    }
    return pb_kvcache_priv_mul(rows - 1, stride, &elements) && pb_kvcache_priv_add(elements, width, &elements)
           && pb_kvcache_priv_mul(elements, size, bytes) && *bytes <= PTRDIFF_MAX;
}

bool pb_kvcache_priv_overlap(const void *a, size_t a_bytes, const void *b, size_t b_bytes)
{
    const uintptr_t first = (uintptr_t)a;
    const uintptr_t second = (uintptr_t)b;
    if (a_bytes == 0 || b_bytes == 0) {
        return false;
    }
    return first <= second ? second - first < a_bytes : first - second < b_bytes;
}

bool pb_kvcache_priv_aligned(const void *pointer, size_t size)
{
    return (uintptr_t)pointer % size == 0;
}

void *pb_kvcache_priv_align(void *workspace)
{
    const size_t past = (uintptr_t)workspace % PB_KVCACHE_PRIV_ALIGNMENT;
    return (unsigned char *)workspace + (past == 0 ? 0 : PB_KVCACHE_PRIV_ALIGNMENT - past);
}

pb_kvcache_status pb_kvcache_priv_rows_ok(const void *rows, size_t size, size_t stride, size_t first, size_t end,
                                          size_t width, size_t capacity)
{
    size_t bytes;
    if (!pb_kvcache_priv_aligned(rows, size)) {
        return PB_KVCACHE_ERROR_ALIGNMENT;
    }
    if (end > first && end - first > 1 && stride < width) {
        return PB_KVCACHE_ERROR_STRIDE;
    }
    if (!pb_kvcache_priv_span_bytes(end, stride, width, size, &bytes)) {
        return PB_KVCACHE_ERROR_TOO_LARGE;
    }
    return end > first && bytes / size > capacity ? PB_KVCACHE_ERROR_CAPACITY : PB_KVCACHE_OK;
}

pb_kvcache_status pb_kvcache_priv_scores_ok(const float *scores, size_t stride, size_t num_heads, size_t n,
                                            pb_kvcache_nan nan)
{
    size_t bytes;
    if (!pb_kvcache_priv_aligned(scores, sizeof *scores)) {
        return PB_KVCACHE_ERROR_ALIGNMENT;
    }
    if (n > UINT32_MAX || !pb_kvcache_priv_span_bytes(num_heads, stride, n, sizeof *scores, &bytes)) {
        return PB_KVCACHE_ERROR_TOO_LARGE;
    }
    if (nan == PB_KVCACHE_NAN_LOWEST) {
        return PB_KVCACHE_OK;
    }
    const pb_kvcache_priv_lanes *lanes = pb_kvcache_priv_lanes_best();
    for (size_t head = 0; head < num_heads; ++head) {
        if (!lanes->finite(scores + head * stride, n)) {
            return PB_KVCACHE_ERROR_SCORE;
        }
    }
    return PB_KVCACHE_OK;
}

bool pb_kvcache_priv_weights_ok(const float *weights, size_t n)
{
    /* By bit pattern, so that no compiler flag can argue a NaN away: above +infinity's predecessor nothing is good but
     * -0.0. */
    uint32_t bad = 0;
    for (size_t i = 0; i < n; ++i) {
        const uint32_t bits = bits_of(weights[i]);
        bad |= (uint32_t)(bits >= INFINITY_BITS) & (uint32_t)(bits != SIGN);
    }
    return bad == 0;
}

bool pb_kvcache_priv_nan_ok(pb_kvcache_nan nan)
{
    return nan == PB_KVCACHE_NAN_REFUSE || nan == PB_KVCACHE_NAN_LOWEST;
}

bool pb_kvcache_priv_edge_ok(pb_kvcache_edge edge)
{
    return edge == PB_KVCACHE_EDGE_COUNT || edge == PB_KVCACHE_EDGE_KERNEL;
}

bool pb_kvcache_priv_reduce_ok(pb_kvcache_reduce reduce)
{
    return reduce == PB_KVCACHE_REDUCE_MEAN || reduce == PB_KVCACHE_REDUCE_MAX || reduce == PB_KVCACHE_REDUCE_SUM;
}
