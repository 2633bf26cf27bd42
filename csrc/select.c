#include "bits.h"
#include "checks.h"
#include "kernels.h"

/* The first `sinks` positions, the count - sinks best of those behind them, pooled, and the rest. */
static void keep_best(const float *scores, size_t n, uint32_t budget, const pb_kvcache_select_params *params,
                      double *doubles, float *pooled, uint32_t *kept)
{
    const size_t scored = n - params->protect;
    const size_t sinks = params->sinks; /* budget >= protect + sinks, so that sinks <= scored */
    const size_t count = budget - params->protect;
    pb_kvcache_priv_pool(scores, scored, params->pooling, params->kernel, params->edge, doubles, pooled);
    pb_kvcache_priv_choose_highest_of_numbers(pooled + sinks, scored - sinks, count - sinks, kept + sinks);
    for (size_t i = 0; i < sinks; ++i) {
        kept[i] = (uint32_t)i;
    }
    for (size_t i = sinks; sinks > 0 && i < count; ++i) {
        kept[i] += (uint32_t)sinks;
    }
    for (size_t i = 0; i < params->protect; ++i) {
        kept[count + i] = (uint32_t)(scored + i);
    }
}

/*
 * What one head keeps, by the scores of its n - protect first positions. A budget of n or more keeps everything, and
 * then the scores are not read. `pooled` has room for n floats.
 */
static void keep(const float *scores, size_t n, uint32_t budget, const pb_kvcache_select_params *params,
                 double *doubles, float *pooled, uint32_t *kept)
{
    if (budget < n) {
        keep_best(scores, n, budget, params, doubles, pooled, kept);
        return;
    }
    for (size_t i = 0; i < n; ++i) {
        kept[i] = (uint32_t)i;
    }
}

/* The largest of the heads' budgets, at most n, to *most. PB_KVCACHE_ERROR_BUDGET_WINDOW for one below what is always
 * kept. */
static pb_kvcache_status most_kept(const uint32_t *budgets, size_t first_head, size_t end_head, size_t n,
                                   const pb_kvcache_select_params *params, size_t *most)
{
    *most = 0;
    for (size_t head = first_head; head < end_head; ++head) {
        if (budgets[head] < params->protect || budgets[head] - params->protect < params->sinks) {
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

/* ---- Weights of positions ---- */

/* Rows of weights: aligned and of a size that fits. No weights are fine. */
static pb_kvcache_status weight_rows_ok(const pb_kvcache_select_params *params, size_t num_heads, size_t scored)
{
    size_t bytes;
    if (params->weights == NULL) {
        return PB_KVCACHE_OK;
    }
    if (!pb_kvcache_priv_aligned(params->weights, sizeof(float))) {
        return PB_KVCACHE_ERROR_ALIGNMENT;
    }
    return pb_kvcache_priv_span_bytes(num_heads, params->weights_stride, scored, sizeof(float), &bytes)
               ? PB_KVCACHE_OK
               : PB_KVCACHE_ERROR_TOO_LARGE;
}

/* Does an array overlap the weights of a range of heads? */
static bool overlaps_weights(const pb_kvcache_select_params *params, size_t first_head, size_t end_head, size_t scored,
                             const void *array, size_t bytes)
{
    size_t size;
    if (params->weights == NULL) {
        return false;
    }
    (void)pb_kvcache_priv_span_bytes(end_head - first_head, params->weights_stride, scored, sizeof(float), &size);
    return pb_kvcache_priv_overlap(params->weights + first_head * params->weights_stride, size, array, bytes);
}

/* The scores of one head times its weights, to `weighted`, which may be `scores`. What is not finite becomes -inf.
 * PB_KVCACHE_ERROR_SELECT_WEIGHT, and PB_KVCACHE_ERROR_SCORE for a product that overflows. */
static pb_kvcache_status weigh(const pb_kvcache_select_params *params, size_t head, size_t scored, const float *scores,
                               float *weighted)
{
    const float *weights = params->weights + head * params->weights_stride;
    uint32_t overflown = 0;
    if (!pb_kvcache_priv_weights_ok(weights, scored)) {
        return PB_KVCACHE_ERROR_SELECT_WEIGHT;
    }
    for (size_t i = 0; i < scored; ++i) {
        const bool number = is_finite(scores[i]);
        const float product = number ? scores[i] * weights[i] : minus_infinity();
        overflown |= (uint32_t)(number && !is_finite(product));
        weighted[i] = product;
    }
    return overflown != 0 ? PB_KVCACHE_ERROR_SCORE : PB_KVCACHE_OK;
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
    if (params->protect == 0 || params->protect >= attn->n) {
        return PB_KVCACHE_ERROR_PROTECT;
    }
    status = pb_kvcache_priv_pool_doubles(attn->n - params->protect, params->pooling, params->kernel, &doubles);
    if (status == PB_KVCACHE_OK) {
        status = weight_rows_ok(params, end_head, attn->n - params->protect);
    }
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
    /* One row of all of them: no more than the heads' scores, whose bytes fit */
    size_t total = 0;
    for (size_t head = first_head; head < end_head; ++head) {
        total += budgets[head] < n ? budgets[head] : n;
    }
    *bytes = total * sizeof *out->indices;
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
    const uint32_t *first_row = NULL;
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
    status = most_kept(budgets, first_head, end_head, attn->n, params, &most);
    if (status == PB_KVCACHE_OK) {
        status = output_of(out, budgets, first_head, end_head, attn->n, most, &first_row, &bytes);
    }
    if (status != PB_KVCACHE_OK || first_head == end_head) {
        return status;
    }
    const size_t scored = attn->n - params->protect;
    const size_t budget_bytes = attn->num_kv_heads * sizeof *budgets;
    if (pb_kvcache_priv_overlap(first_row, bytes, workspace, needed)
        || pb_kvcache_priv_overlap(first_row, bytes, budgets, budget_bytes)
        || pb_kvcache_priv_overlap(workspace, needed, budgets, budget_bytes)
        || pb_kvcache_priv_overlaps_attention(attn, first_head, end_head, first_row, bytes)
        || pb_kvcache_priv_overlaps_attention(attn, first_head, end_head, workspace, needed)
        || overlaps_weights(params, first_head, end_head, scored, first_row, bytes)
        || overlaps_weights(params, first_head, end_head, scored, workspace, needed)) {
        return PB_KVCACHE_ERROR_OVERLAP;
    }
    const size_t offset_bytes = out->offsets == NULL ? 0 : (attn->num_kv_heads + 1) * sizeof *out->offsets;
    if (pb_kvcache_priv_overlap(out->offsets, offset_bytes, first_row, bytes)
        || pb_kvcache_priv_overlap(out->offsets, offset_bytes, workspace, needed)
        || pb_kvcache_priv_overlap(out->offsets, offset_bytes, budgets, budget_bytes)
        || pb_kvcache_priv_overlaps_attention(attn, first_head, end_head, out->offsets, offset_bytes)
        || overlaps_weights(params, first_head, end_head, scored, out->offsets, offset_bytes)) {
        return PB_KVCACHE_ERROR_OVERLAP;
    }
    /* All scores before the first index is written: a head may yet be refused */
    const size_t n = attn->n;
    float *scores = (float *)pb_kvcache_priv_align(workspace);
    float *floats = scores + (end_head - first_head) * n;
    const pb_kvcache_priv_scratch scratch = pb_kvcache_priv_scratch_at(floats, n);
    for (size_t head = first_head; head < end_head; ++head) {
        if (budgets[head] < n) {
            float *row = scores + (head - first_head) * n;
            status = pb_kvcache_priv_head_scores(attn, params->reduce, params->nan, scored, head, &scratch, row);
            if (status == PB_KVCACHE_OK && params->weights != NULL) {
                status = weigh(params, head, scored, row, row);
            }
            if (status != PB_KVCACHE_OK) {
                return status;
            }
        }
    }
    /* Then pool and choose */
    double *doubles = (double *)pb_kvcache_priv_align(floats + n);
    size_t at = 0;
    for (size_t head = first_head; head < end_head; ++head) {
        keep(scores + (head - first_head) * n, n, budgets[head], params, doubles, floats,
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

/* The workspace: with weights the weighted scores of one head, then its pooled scores and the average's doubles. */
pb_kvcache_status pb_kvcache_select_from_scores_workspace_size(const pb_kvcache_select_params *params, size_t n,
                                                               size_t *size)
{
    size_t doubles;
    if (params == NULL || size == NULL) {
        return PB_KVCACHE_ERROR_NULL;
    }
    if (params->protect == 0 || params->protect >= n) {
        return PB_KVCACHE_ERROR_PROTECT;
    }
    if (!pb_kvcache_priv_edge_ok(params->edge) || !pb_kvcache_priv_nan_ok(params->nan)) {
        return PB_KVCACHE_ERROR_OPTION;
    }
    const pb_kvcache_status status
        = pb_kvcache_priv_pool_doubles(n - params->protect, params->pooling, params->kernel, &doubles);
    if (status != PB_KVCACHE_OK) {
        return status;
    }
    const uint64_t weighted = params->weights == NULL ? 0 : (uint64_t)n * sizeof(float);
    if (n > UINT32_MAX || weighted + pooling_bytes(n, doubles) + PB_KVCACHE_PRIV_ALIGNMENT > PTRDIFF_MAX) {
        return PB_KVCACHE_ERROR_TOO_LARGE;
    }
    *size = (size_t)(weighted + pooling_bytes(n, doubles)) + PB_KVCACHE_PRIV_ALIGNMENT;
    return PB_KVCACHE_OK;
}

pb_kvcache_status pb_kvcache_select_from_scores(const float *scores, size_t stride, size_t num_heads, size_t n,
                                                const pb_kvcache_select_params *params, const uint32_t *budgets,
                                                void *workspace, size_t workspace_size, uint32_t *indices,
                                                size_t indices_stride, size_t capacity)
{
    size_t needed;
    size_t input_bytes;
    size_t output_bytes;
    size_t most;
    /* Checks: options, workspace, budgets, the arrays, what overlaps */
    if ((scores == NULL || budgets == NULL || workspace == NULL || indices == NULL) && num_heads > 0) {
        return PB_KVCACHE_ERROR_NULL;
    }
    pb_kvcache_status status = pb_kvcache_select_from_scores_workspace_size(params, n, &needed);
    if (status != PB_KVCACHE_OK) {
        return status;
    }
    if (workspace_size < needed) {
        return PB_KVCACHE_ERROR_WORKSPACE;
    }
    const size_t scored = n - params->protect;
    status = most_kept(budgets, 0, num_heads, n, params, &most);
    if (status == PB_KVCACHE_OK) {
        status = pb_kvcache_priv_scores_ok(scores, stride, num_heads, scored, PB_KVCACHE_NAN_LOWEST);
    }
    if (status == PB_KVCACHE_OK) {
        status = weight_rows_ok(params, num_heads, scored);
    }
    if (status == PB_KVCACHE_OK) {
        status = pb_kvcache_priv_rows_ok(indices, sizeof *indices, indices_stride, 0, num_heads, most, capacity);
    }
    if (status == PB_KVCACHE_OK && num_heads == 0) {
        return PB_KVCACHE_OK;
    }
    /* Scores last, of the heads that are read. The weights' values wait until the workspace is known to be its own. */
    for (size_t head = 0; status == PB_KVCACHE_OK && head < num_heads; ++head) {
        if (budgets[head] < n) {
            status = pb_kvcache_priv_scores_ok(scores + head * stride, 0, 1, scored, params->nan);
        }
    }
    if (status != PB_KVCACHE_OK) {
        return status;
    }
    (void)pb_kvcache_priv_span_bytes(num_heads, stride, scored, sizeof *scores, &input_bytes);
    (void)pb_kvcache_priv_span_bytes(num_heads, indices_stride, most, sizeof *indices, &output_bytes);
    if (pb_kvcache_priv_overlap(scores, input_bytes, indices, output_bytes)
        || pb_kvcache_priv_overlap(budgets, num_heads * sizeof *budgets, indices, output_bytes)
        || pb_kvcache_priv_overlap(workspace, needed, indices, output_bytes)
        || pb_kvcache_priv_overlap(workspace, needed, scores, input_bytes)
        || pb_kvcache_priv_overlap(workspace, needed, budgets, num_heads * sizeof *budgets)
        || overlaps_weights(params, 0, num_heads, scored, indices, output_bytes)
        || overlaps_weights(params, 0, num_heads, scored, workspace, needed)) {
        return PB_KVCACHE_ERROR_OVERLAP;
    }
    float *weighted = (float *)pb_kvcache_priv_align(workspace);
    float *pooled = weighted + (params->weights == NULL ? 0 : n);
    double *doubles = (double *)pb_kvcache_priv_align(pooled + n);
    /* Products of every head before the first index is written: one may yet be refused */
    for (size_t head = 0; params->weights != NULL && head < num_heads; ++head) {
        if (budgets[head] < n) {
            status = weigh(params, head, scored, scores + head * stride, weighted);
            if (status != PB_KVCACHE_OK) {
                return status;
            }
        }
    }
    /* Then weigh once more, pool and choose */
    for (size_t head = 0; head < num_heads; ++head) {
        const float *row = scores + head * stride;
        if (params->weights != NULL && budgets[head] < n) {
            (void)weigh(params, head, scored, row, weighted);
            row = weighted;
        }
        keep(row, n, budgets[head], params, doubles, pooled, indices + head * indices_stride);
    }
    return PB_KVCACHE_OK;
}
