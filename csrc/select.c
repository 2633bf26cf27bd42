#include "checks.h"
#include "kernels.h"

/*
 * What one head keeps, by the scores of its n - window first positions: the budget - window best of them, pooled, and
 * the window. A budget of n or more keeps everything, and then the scores are not read. `pooled` has room for n floats.
 */
static void keep_best(const float *scores, size_t n, size_t window, uint32_t budget,
                      const pb_kvcache_select_params *params, double *doubles, float *pooled, uint32_t *kept)
{
    const size_t scored = n - window;
    size_t count = scored;
    if (budget < n) {
        count = budget - window;
        pb_kvcache_priv_pool(scores, scored, params->pooling, params->kernel, params->edge, doubles, pooled);
        pb_kvcache_priv_choose_highest_of_numbers(pooled, scored, count, kept);
    } else {
        for (size_t i = 0; i < scored; ++i) {
            kept[i] = (uint32_t)i;
        }
    }
    for (size_t i = 0; i < window; ++i) {
        kept[count + i] = (uint32_t)(scored + i);
    }
}

/* The largest of the heads' budgets, at most n, to *most. PB_KVCACHE_ERROR_BUDGET_WINDOW for one below the window. */
static pb_kvcache_status most_kept(const uint32_t *budgets, size_t first_head, size_t end_head, size_t n, size_t window,
                                   size_t *most)
{
    *most = 0;
    for (size_t head = first_head; head < end_head; ++head) {
        if (budgets[head] < window) {
            return PB_KVCACHE_ERROR_BUDGET_WINDOW;
        }
        *most = budgets[head] > *most ? budgets[head] : *most;
    }
    *most = *most < n ? *most : n;
    return PB_KVCACHE_OK;
}

/* Pooled scores of one head, up to the next double, and the average's doubles. With n < 2^32 that is below 2^38. */
static uint64_t pooling_bytes(size_t n, size_t doubles)
{
    return (uint64_t)n * sizeof(float) + PB_KVCACHE_PRIV_ALIGNMENT + (uint64_t)doubles * sizeof(double);
}

/* ---- From attention ---- */

/*
 * The workspace: the scores of the range's heads, then the scratch of one head. Once the scores are there, the pooled
 * scores and the average's doubles take the place of the scratch.
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
    if (!pb_kvcache_priv_reduce_ok(params->reduce) || !pb_kvcache_priv_edge_ok(params->edge)
        || !pb_kvcache_priv_nan_ok(params->nan)) {
        return PB_KVCACHE_ERROR_OPTION;
    }
    status = pb_kvcache_priv_pool_doubles(attn->n - attn->window, params->pooling, params->kernel, &doubles);
    if (status != PB_KVCACHE_OK) {
        return status;
    }
    /* The scores fit PTRDIFF_MAX, so that 64 bits hold the sum. */
    const uint64_t held = PB_KVCACHE_PRIV_SCRATCH_ROWS * (uint64_t)attn->n * sizeof(float);
    const uint64_t wanted = pooling_bytes(attn->n, doubles);
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

/* Where the positions go: rows, indices_stride apart, or where `offsets` is given, one head behind the other. */
typedef struct output {
    uint32_t *indices;
    size_t indices_stride;
    size_t capacity;
    size_t *offsets; /* becomes where the heads begin, and the end of the last. NULL: rows */
} output;

/* The first index that is written, and the bytes up to the last. `most` is the most that a head keeps. */
static pb_kvcache_status output_of(const output *out, const uint32_t *budgets, size_t first_head, size_t end_head,
                                   size_t n, size_t most, const uint32_t **first, size_t *bytes)
{
    if (out->offsets == NULL) {
        const pb_kvcache_status status = pb_kvcache_priv_rows_ok(out->indices, sizeof *out->indices,
                                                                 out->indices_stride, first_head, end_head, most,
                                                                 out->capacity);
        (void)pb_kvcache_priv_span_bytes(end_head - first_head, out->indices_stride, most, sizeof *out->indices, bytes);
        const bool any = status == PB_KVCACHE_OK && first_head < end_head;
        *first = any ? out->indices + first_head * out->indices_stride : NULL;
        return status;
    }
    /* One row of all of them */
    size_t total = 0;
    for (size_t head = first_head; head < end_head; ++head) {
        if (!pb_kvcache_priv_add(total, budgets[head] < n ? budgets[head] : n, &total)) {
            return PB_KVCACHE_ERROR_TOO_LARGE;
        }
    }
    if (!pb_kvcache_priv_mul(total, sizeof *out->indices, bytes)) {
        return PB_KVCACHE_ERROR_TOO_LARGE;
    }
    if (!pb_kvcache_priv_aligned(out->offsets, sizeof *out->offsets)) {
        return PB_KVCACHE_ERROR_ALIGNMENT;
    }
    *first = out->indices;
    return pb_kvcache_priv_rows_ok(out->indices, sizeof *out->indices, total, 0, 1, total, out->capacity);
}

static pb_kvcache_status select_to(const output *out, const pb_kvcache_attention *attn,
                                   const pb_kvcache_select_params *params, const uint32_t *budgets, size_t first_head,
                                   size_t end_head, void *workspace, size_t workspace_size)
{
    size_t needed;
    size_t bytes;
    size_t most;
    const uint32_t *first_row;
    /* Checks: the attention and options, the workspace, the budgets, the output, what overlaps */
    pb_kvcache_status status = workspace_of(attn, params, first_head, end_head, &needed);
    if (status != PB_KVCACHE_OK) {
        return status;
    }
    if ((budgets == NULL || workspace == NULL || out->indices == NULL) && first_head < end_head) {
        return PB_KVCACHE_ERROR_NULL;
    }
    if (workspace_size < needed) {
        return PB_KVCACHE_ERROR_WORKSPACE;
    }
    status = most_kept(budgets, first_head, end_head, attn->n, attn->window, &most);
    if (status == PB_KVCACHE_OK) {
        status = output_of(out, budgets, first_head, end_head, attn->n, most, &first_row, &bytes);
    }
    if (status != PB_KVCACHE_OK || first_head == end_head) {
        return status;
    }
    const size_t budget_bytes = attn->num_kv_heads * sizeof *budgets;
    if (pb_kvcache_priv_overlap(first_row, bytes, workspace, needed)
        || pb_kvcache_priv_overlap(first_row, bytes, budgets, budget_bytes)
        || pb_kvcache_priv_overlap(workspace, needed, budgets, budget_bytes)
        || pb_kvcache_priv_overlaps_attention(attn, first_head, end_head, first_row, bytes)
        || pb_kvcache_priv_overlaps_attention(attn, first_head, end_head, workspace, needed)) {
        return PB_KVCACHE_ERROR_OVERLAP;
    }
    const size_t offset_bytes = out->offsets == NULL ? 0 : (attn->num_kv_heads + 1) * sizeof *out->offsets;
    if (pb_kvcache_priv_overlap(out->offsets, offset_bytes, first_row, bytes)
        || pb_kvcache_priv_overlap(out->offsets, offset_bytes, workspace, needed)
        || pb_kvcache_priv_overlap(out->offsets, offset_bytes, budgets, budget_bytes)
        || pb_kvcache_priv_overlaps_attention(attn, first_head, end_head, out->offsets, offset_bytes)) {
        return PB_KVCACHE_ERROR_OVERLAP;
    }
    /* All scores before the first index is written: a head may yet be refused */
    const size_t n = attn->n;
    float *scores = (float *)pb_kvcache_priv_align(workspace);
    float *floats = scores + (end_head - first_head) * n;
    const pb_kvcache_priv_scratch scratch = pb_kvcache_priv_scratch_at(floats, n);
    for (size_t head = first_head; head < end_head; ++head) {
        if (budgets[head] < n) {
            status = pb_kvcache_priv_head_scores(attn, params->reduce, params->nan, head, &scratch,
                                                 scores + (head - first_head) * n);
            if (status != PB_KVCACHE_OK) {
                return status;
            }
        }
    }
    /* Then pool and choose */
    double *doubles = (double *)pb_kvcache_priv_align(floats + n);
    size_t at = 0;
    for (size_t head = first_head; head < end_head; ++head) {
        keep_best(scores + (head - first_head) * n, n, attn->window, budgets[head], params, doubles, floats,
                  out->indices + (out->offsets == NULL ? head * out->indices_stride : at));
        if (out->offsets != NULL) {
            out->offsets[head] = at;
            at += budgets[head] < n ? budgets[head] : n;
            out->offsets[head + 1] = at;
        }
    }
    return PB_KVCACHE_OK;
}

pb_kvcache_status pb_kvcache_select(const pb_kvcache_attention *attn, const pb_kvcache_select_params *params,
                                    const uint32_t *budgets, size_t first_head, size_t end_head, void *workspace,
                                    size_t workspace_size, uint32_t *indices, size_t indices_stride, size_t capacity)
{
    const output rows = {indices, indices_stride, capacity, NULL};
    return select_to(&rows, attn, params, budgets, first_head, end_head, workspace, workspace_size);
}

pb_kvcache_status pb_kvcache_select_ragged(const pb_kvcache_attention *attn, const pb_kvcache_select_params *params,
                                           const uint32_t *budgets, void *workspace, size_t workspace_size,
                                           uint32_t *indices, size_t capacity, size_t *offsets)
{
    if (attn == NULL || offsets == NULL) {
        return PB_KVCACHE_ERROR_NULL;
    }
    const output ragged = {indices, 0, capacity, offsets};
    return select_to(&ragged, attn, params, budgets, 0, attn->num_kv_heads, workspace, workspace_size);
}

/* ---- From scores ---- */

pb_kvcache_status pb_kvcache_select_from_scores_workspace_size(const pb_kvcache_select_params *params, size_t n,
                                                               size_t window, size_t *size)
{
    size_t doubles;
    if (params == NULL || size == NULL) {
        return PB_KVCACHE_ERROR_NULL;
    }
    if (window == 0 || window >= n) {
        return PB_KVCACHE_ERROR_WINDOW;
    }
    if (!pb_kvcache_priv_edge_ok(params->edge) || !pb_kvcache_priv_nan_ok(params->nan)) {
        return PB_KVCACHE_ERROR_OPTION;
    }
    const pb_kvcache_status status
        = pb_kvcache_priv_pool_doubles(n - window, params->pooling, params->kernel, &doubles);
    if (status != PB_KVCACHE_OK) {
        return status;
    }
    if (n > UINT32_MAX || pooling_bytes(n, doubles) + PB_KVCACHE_PRIV_ALIGNMENT > PTRDIFF_MAX) {
        return PB_KVCACHE_ERROR_TOO_LARGE;
    }
    *size = (size_t)pooling_bytes(n, doubles) + PB_KVCACHE_PRIV_ALIGNMENT;
    return PB_KVCACHE_OK;
}

pb_kvcache_status pb_kvcache_select_from_scores(const float *scores, size_t stride, size_t num_heads, size_t n,
                                                size_t window, const pb_kvcache_select_params *params,
                                                const uint32_t *budgets, void *workspace, size_t workspace_size,
                                                uint32_t *indices, size_t indices_stride, size_t capacity)
{
    size_t needed;
    size_t input_bytes;
    size_t output_bytes;
    size_t most;
    /* Checks: options, workspace, budgets, the arrays, what overlaps */
    if ((scores == NULL || budgets == NULL || workspace == NULL || indices == NULL) && num_heads > 0) {
        return PB_KVCACHE_ERROR_NULL;
    }
    pb_kvcache_status status = pb_kvcache_select_from_scores_workspace_size(params, n, window, &needed);
    if (status != PB_KVCACHE_OK) {
        return status;
    }
    if (workspace_size < needed) {
        return PB_KVCACHE_ERROR_WORKSPACE;
    }
    status = most_kept(budgets, 0, num_heads, n, window, &most);
    if (status == PB_KVCACHE_OK) {
        status = pb_kvcache_priv_scores_ok(scores, stride, num_heads, n - window, PB_KVCACHE_NAN_LOWEST);
    }
    if (status == PB_KVCACHE_OK) {
        status = pb_kvcache_priv_rows_ok(indices, sizeof *indices, indices_stride, 0, num_heads, most, capacity);
    }
    if (status == PB_KVCACHE_OK && num_heads == 0) {
        return PB_KVCACHE_OK;
    }
    /* Values last, of the heads that are read */
    for (size_t head = 0; status == PB_KVCACHE_OK && head < num_heads; ++head) {
        if (budgets[head] < n) {
            status = pb_kvcache_priv_scores_ok(scores + head * stride, 0, 1, n - window, params->nan);
        }
    }
    if (status != PB_KVCACHE_OK) {
        return status;
    }
    (void)pb_kvcache_priv_span_bytes(num_heads, stride, n - window, sizeof *scores, &input_bytes);
    (void)pb_kvcache_priv_span_bytes(num_heads, indices_stride, most, sizeof *indices, &output_bytes);
    if (pb_kvcache_priv_overlap(scores, input_bytes, indices, output_bytes)
        || pb_kvcache_priv_overlap(budgets, num_heads * sizeof *budgets, indices, output_bytes)
        || pb_kvcache_priv_overlap(workspace, needed, indices, output_bytes)
        || pb_kvcache_priv_overlap(workspace, needed, scores, input_bytes)
        || pb_kvcache_priv_overlap(workspace, needed, budgets, num_heads * sizeof *budgets)) {
        return PB_KVCACHE_ERROR_OVERLAP;
    }
    float *pooled = (float *)pb_kvcache_priv_align(workspace);
    double *doubles = (double *)pb_kvcache_priv_align(pooled + n);
    for (size_t head = 0; head < num_heads; ++head) {
        keep_best(scores + head * stride, n, window, budgets[head], params, doubles, pooled,
                  indices + head * indices_stride);
    }
    return PB_KVCACHE_OK;
}
