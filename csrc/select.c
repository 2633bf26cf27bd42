#include <string.h>

#include "internal.h"

/* ---- Checks that the selection's functions share ---- */

bool pb_kvcache_priv_nan_ok(pb_kvcache_nan nan)
{
    return nan == PB_KVCACHE_NAN_REFUSE || nan == PB_KVCACHE_NAN_LOWEST;
}

bool pb_kvcache_priv_reduce_ok(pb_kvcache_reduce reduce)
{
    return reduce == PB_KVCACHE_REDUCE_MEAN || reduce == PB_KVCACHE_REDUCE_MAX || reduce == PB_KVCACHE_REDUCE_SUM;
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

bool pb_kvcache_priv_overlap(const void *a, size_t a_bytes, const void *b, size_t b_bytes)
{
    const uintptr_t first = (uintptr_t)a;
    const uintptr_t second = (uintptr_t)b;
    if (a_bytes == 0 || b_bytes == 0) {
        return false;
    }
    return first <= second ? second - first < a_bytes : first - second < b_bytes;
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

pb_kvcache_priv_scratch pb_kvcache_priv_scratch_at(float *floats, size_t n)
{
    return (pb_kvcache_priv_scratch){.sums = floats, .exps = floats + n, .copy = floats + 2 * n};
}

/* ---- The chain ---- */

/*
 * The workspace: the scores of the range's heads; then the scratch of one head, which the pooled scores and the
 * average's doubles share once the scores are there.
 */
static pb_kvcache_status workspace_of(const pb_kvcache_attention *attn, const pb_kvcache_select_params *params,
                                      size_t first_head, size_t end_head, size_t *size)
{
    size_t doubles;
    size_t scores;
    if (params == NULL) {
        return PB_KVCACHE_ERROR_NULL;
    }
    pb_kvcache_status status = pb_kvcache_window_scores_workspace_size(attn, first_head, end_head, &scores);
    if (status != PB_KVCACHE_OK) {
        return status;
    }
    if (!pb_kvcache_priv_reduce_ok(params->reduce) || !pb_kvcache_priv_nan_ok(params->nan)) {
        return PB_KVCACHE_ERROR_OPTION;
    }
    status = pb_kvcache_priv_pool_doubles(attn->n - attn->window, params->pooling, params->kernel, &doubles);
    if (status != PB_KVCACHE_OK) {
        return status;
    }
    /* In the place of the scratch: n pooled scores, up to the next double, the doubles. With n < 2^32 that is below
     * 2^38 bytes, and the scores fit PTRDIFF_MAX, so that 64 bits hold the sum. */
    const uint64_t row = (uint64_t)attn->n * sizeof(float);
    const uint64_t held = PB_KVCACHE_PRIV_SCRATCH_ROWS * row;
    const uint64_t wanted = row + PB_KVCACHE_PRIV_ALIGNMENT + (uint64_t)doubles * sizeof(double);
    const uint64_t total = scores + (wanted > held ? wanted - held : 0);
    if (total > PTRDIFF_MAX) {
        return PB_KVCACHE_ERROR_TOO_LARGE;
    }
    *size = (size_t)total;
    return PB_KVCACHE_OK;
}

pb_kvcache_status pb_kvcache_select_workspace_size(const pb_kvcache_attention *attn,
                                                   const pb_kvcache_select_params *params, size_t first_head,
                                                   size_t end_head, size_t *size)
{
    return size == NULL ? PB_KVCACHE_ERROR_NULL : workspace_of(attn, params, first_head, end_head, size);
}

pb_kvcache_status pb_kvcache_select(const pb_kvcache_attention *attn, const pb_kvcache_select_params *params,
                                    const uint32_t *budgets, size_t first_head, size_t end_head, void *workspace,
                                    size_t workspace_size, uint32_t *indices, size_t indices_stride, size_t capacity)
{
    size_t needed;
    size_t bytes;
    size_t most = 0;
    pb_kvcache_status status = workspace_of(attn, params, first_head, end_head, &needed);
    if (status != PB_KVCACHE_OK) {
        return status;
    }
    if (budgets == NULL || workspace == NULL || indices == NULL) {
        return PB_KVCACHE_ERROR_NULL;
    }
    if (workspace_size < needed) {
        return PB_KVCACHE_ERROR_WORKSPACE;
    }
    for (size_t head = first_head; head < end_head; ++head) {
        if (budgets[head] < attn->window) {
            return PB_KVCACHE_ERROR_BUDGET_WINDOW;
        }
        most = budgets[head] > most ? budgets[head] : most;
    }
    most = most < attn->n ? most : attn->n;
    status = pb_kvcache_priv_rows_ok(indices, sizeof *indices, indices_stride, first_head, end_head, most, capacity);
    if (status != PB_KVCACHE_OK) {
        return status;
    }
    (void)pb_kvcache_priv_span_bytes(end_head - first_head, indices_stride, most, sizeof *indices, &bytes);
    if (first_head == end_head) {
        return PB_KVCACHE_OK;
    }
    const uint32_t *first_row = indices + first_head * indices_stride;
    const size_t budget_bytes = attn->num_kv_heads * sizeof *budgets;
    if (pb_kvcache_priv_overlap(first_row, bytes, workspace, needed)
        || pb_kvcache_priv_overlap(first_row, bytes, budgets, budget_bytes)
        || pb_kvcache_priv_overlap(workspace, needed, budgets, budget_bytes)
        || pb_kvcache_priv_overlaps_attention(attn, first_head, end_head, first_row, bytes)
        || pb_kvcache_priv_overlaps_attention(attn, first_head, end_head, workspace, needed)) {
        return PB_KVCACHE_ERROR_OVERLAP;
    }
    const size_t n = attn->n;
    const size_t scored = n - attn->window;
    float *scores = (float *)pb_kvcache_priv_align(workspace);
    float *floats = scores + (end_head - first_head) * n;
    const pb_kvcache_priv_scratch scratch = pb_kvcache_priv_scratch_at(floats, n);
    /* All scores before the first index is written: a head may yet be refused. */
    for (size_t head = first_head; head < end_head; ++head) {
        if (budgets[head] < n) {
            status = pb_kvcache_priv_head_scores(attn, params->reduce, params->nan, head, &scratch,
                                                 scores + (head - first_head) * n);
            if (status != PB_KVCACHE_OK) {
                return status;
            }
        }
    }
    float *pooled = floats;
    double *doubles = (double *)pb_kvcache_priv_align(floats + n);
    for (size_t head = first_head; head < end_head; ++head) {
        uint32_t *kept = indices + head * indices_stride;
        size_t count = scored;
        if (budgets[head] < n) {
            count = budgets[head] - attn->window;
            pb_kvcache_priv_pool(scores + (head - first_head) * n, scored, params->pooling, params->kernel, doubles,
                                 pooled);
            pb_kvcache_priv_choose_highest_of_numbers(pooled, scored, count, kept);
        } else {
            for (size_t i = 0; i < scored; ++i) {
                kept[i] = (uint32_t)i;
            }
        }
        for (size_t i = 0; i < attn->window; ++i) {
            kept[count + i] = (uint32_t)(scored + i);
        }
    }
    return PB_KVCACHE_OK;
}
