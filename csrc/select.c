#include "checks.h"
#include "kernels.h"

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
