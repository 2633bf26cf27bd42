#include <string.h>

#include "bits.h"
#include "checks.h"
#include "kernels.h"
#include "lanes.h"

/* ---- Prefill: scores of the positions before the protected ones ---- */

static float smaller(float a, float b)
{
    return a < b ? a : b;
}

static float larger(float a, float b)
{
    return a > b ? a : b;
}

static const unsigned char *row_of(const pb_kvcache_attention *attn, size_t head, size_t row)
{
    const ptrdiff_t size = attn->dtype == PB_KVCACHE_FLOAT32 ? 4 : 2;
    return (const unsigned char *)attn->data
           + ((ptrdiff_t)head * attn->head_stride + (ptrdiff_t)row * attn->row_stride) * size;
}

/* A row that holds NaN, +inf or a logit that overflows when scaled: those are set to -inf in a copy before the softmax,
 * and in the exponentials after it. */
static void copy_usable(const pb_kvcache_priv_lanes *lanes, const pb_kvcache_attention *attn, const void *row,
                        size_t n, float *copy)
{
    lanes->convert[attn->dtype](row, n, copy);
    for (size_t i = 0; i < n; ++i) {
        copy[i] = copy[i] * attn->scale <= FLT_MAX ? copy[i] : minus_infinity();
    }
}

static void mark_unusable(const pb_kvcache_priv_lanes *lanes, const pb_kvcache_attention *attn, const void *row,
                          size_t n, float *e, float *copy)
{
    lanes->convert[attn->dtype](row, n, copy);
    for (size_t i = 0; i < n; ++i) {
        e[i] = copy[i] * attn->scale <= FLT_MAX ? e[i] : minus_infinity();
    }
}

/* Add the softmax of one row of logits to the sums of the first `scored` <= `seen` columns. */
static pb_kvcache_status add_softmax(const pb_kvcache_priv_lanes *lanes, const pb_kvcache_attention *attn,
                                     pb_kvcache_nan nan, const void *row, const void *next, size_t seen, size_t scored,
                                     const pb_kvcache_priv_scratch *scratch)
{
    float top;
    /* A row of numbers */
    if (lanes->top[attn->dtype](row, seen, &top) && top * attn->scale <= FLT_MAX) {
        if (!(top * attn->scale >= -FLT_MAX)) { /* nothing but -inf */
            return nan == PB_KVCACHE_NAN_LOWEST ? PB_KVCACHE_OK : PB_KVCACHE_ERROR_MASKED;
        }
        const double sum = lanes->exps[attn->dtype](row, seen, attn->scale, top, scratch->exps, next);
        lanes->add_scaled(scratch->exps, scored, (float)(1.0 / sum), scratch->sums);
        return PB_KVCACHE_OK;
    }
    if (nan == PB_KVCACHE_NAN_REFUSE) {
        return PB_KVCACHE_ERROR_LOGIT;
    }
    /* A row with others, which count as -inf */
    float factor = 1.0f;
    copy_usable(lanes, attn, row, seen, scratch->copy);
    (void)lanes->top[PB_KVCACHE_FLOAT32](scratch->copy, seen, &top);
    if (top * attn->scale >= -FLT_MAX) {
        const double sum = lanes->exps[PB_KVCACHE_FLOAT32](scratch->copy, seen, attn->scale, top, scratch->exps, NULL);
        factor = (float)(1.0 / sum);
    } else {
        memset(scratch->exps, 0, seen * sizeof(float));
    }
    mark_unusable(lanes, attn, row, scored, scratch->exps, scratch->copy);
    lanes->add_scaled(scratch->exps, scored, factor, scratch->sums);
    return PB_KVCACHE_OK;
}

pb_kvcache_priv_scratch pb_kvcache_priv_scratch_at(float *floats, size_t n)
{
    return (pb_kvcache_priv_scratch){.sums = floats, .exps = floats + n, .copy = floats + 2 * n};
}

/* Sums of the window's own positions past .. scored - 1, each over the queries that see it: query w of the window sees
 * the first w + 1. As lanes->sums, which does it for positions that every query sees. */
static uint32_t sums_inside(const pb_kvcache_priv_lanes *lanes, const pb_kvcache_attention *attn, size_t q_head,
                            size_t past, size_t scored, const pb_kvcache_priv_scratch *scratch)
{
    const size_t size = attn->dtype == PB_KVCACHE_FLOAT32 ? 4 : 2;
    const size_t inside = scored - past;
    uint32_t seen = 0;
    memset(scratch->sums + past, 0, inside * sizeof(float));
    for (size_t row = 0; row < attn->window; ++row) {
        const size_t visible = row + 1 < inside ? row + 1 : inside;
        lanes->convert[attn->dtype](row_of(attn, q_head, row) + past * size, visible, scratch->copy);
        for (size_t i = 0; i < visible; ++i) {
            const float weight = scratch->copy[i];
            const bool number = weight <= FLT_MAX;
            seen |= number ? 0 : PB_KVCACHE_PRIV_SEEN_BAD;
            seen |= weight < 0.0f ? PB_KVCACHE_PRIV_SEEN_NEGATIVE : 0;
            scratch->sums[past + i] += number ? weight : minus_infinity();
        }
    }
    return seen;
}

/* Window sums of one query head's first `scored` positions, to scratch->sums. */
static pb_kvcache_status window_sums(const pb_kvcache_priv_lanes *lanes, const pb_kvcache_attention *attn,
                                     pb_kvcache_nan nan, size_t scored, size_t q_head,
                                     const pb_kvcache_priv_scratch *scratch)
{
    const size_t past = attn->n - attn->window; /* the positions that every query sees */
    if (!attn->logits) {
        uint32_t seen = lanes->sums[attn->dtype](row_of(attn, q_head, 0), attn->row_stride, attn->window,
                                                 past < scored ? past : scored, scratch->sums);
        if (scored > past) {
            seen |= sums_inside(lanes, attn, q_head, past, scored, scratch);
        }
        const bool bad = (seen & PB_KVCACHE_PRIV_SEEN_BAD) != 0 && nan == PB_KVCACHE_NAN_REFUSE;
        return bad || (seen & PB_KVCACHE_PRIV_SEEN_NEGATIVE) != 0 ? PB_KVCACHE_ERROR_ATTN_VALUE : PB_KVCACHE_OK;
    }
    memset(scratch->sums, 0, scored * sizeof(float));
    for (size_t row = 0; row < attn->window; ++row) {
        /* The next row, of this head or of the next one. The very last has none. */
        const bool last = row + 1 == attn->window;
        const unsigned char *next = last ? q_head + 1 < attn->num_q_heads ? row_of(attn, q_head + 1, 0) : NULL
                                         : row_of(attn, q_head, row + 1);
        const size_t seen = past + row + 1;
        const pb_kvcache_status status = add_softmax(lanes, attn, nan, row_of(attn, q_head, row), next, seen,
                                                     seen < scored ? seen : scored, scratch);
        if (status != PB_KVCACHE_OK) {
            return status;
        }
    }
    return PB_KVCACHE_OK;
}

/* Bring the next query head of the group into the scores. -inf stays whatever it meets. */
static void join_group(pb_kvcache_reduce reduce, bool first, float window, size_t n, const float *restrict sums,
                       float *restrict scores)
{
    if (first) {
        for (size_t i = 0; i < n; ++i) {
            scores[i] = sums[i] / window;
        }
    } else if (reduce == PB_KVCACHE_REDUCE_MAX) {
        for (size_t i = 0; i < n; ++i) {
            const float mean = sums[i] / window;
            scores[i] = smaller(mean, scores[i]) < 0.0f ? minus_infinity() : larger(mean, scores[i]);
        }
    } else {
        for (size_t i = 0; i < n; ++i) {
            scores[i] += sums[i] / window;
        }
    }
}

pb_kvcache_status pb_kvcache_priv_head_scores(const pb_kvcache_attention *attn, pb_kvcache_reduce reduce,
                                              pb_kvcache_nan nan, size_t scored, size_t kv_head,
                                              const pb_kvcache_priv_scratch *scratch, float *scores)
{
    const pb_kvcache_priv_lanes *lanes = pb_kvcache_priv_lanes_best();
    const size_t group = attn->num_q_heads / attn->num_kv_heads;
    for (size_t j = 0; j < group; ++j) {
        const pb_kvcache_status status = window_sums(lanes, attn, nan, scored, kv_head * group + j, scratch);
        if (status != PB_KVCACHE_OK) {
            return status;
        }
        join_group(reduce, j == 0, (float)attn->window, scored, scratch->sums, scores);
    }
    uint32_t overflown = 0;
    const float divisor = reduce == PB_KVCACHE_REDUCE_MEAN ? (float)group : 1.0f;
    for (size_t i = 0; i < scored; ++i) {
        scores[i] /= divisor;
        overflown |= (uint32_t)(scores[i] > FLT_MAX);
    }
    return overflown != 0 ? PB_KVCACHE_ERROR_SCORE : PB_KVCACHE_OK;
}

/* ---- Public ---- */

pb_kvcache_status pb_kvcache_priv_attention_ok(const pb_kvcache_attention *attn, size_t first_head, size_t end_head)
{
    if (attn == NULL || attn->data == NULL) {
        return PB_KVCACHE_ERROR_NULL;
    }
    if (attn->dtype != PB_KVCACHE_FLOAT32 && attn->dtype != PB_KVCACHE_FLOAT16 && attn->dtype != PB_KVCACHE_BFLOAT16) {
        return PB_KVCACHE_ERROR_OPTION;
    }
    if (attn->logits && !(attn->scale > 0.0f && attn->scale <= FLT_MAX)) {
        return PB_KVCACHE_ERROR_SCALE;
    }
    if (attn->window == 0 || attn->window > attn->n) {
        return PB_KVCACHE_ERROR_WINDOW;
    }
    if (attn->n > UINT32_MAX || attn->n > PTRDIFF_MAX / sizeof(float)) {
        return PB_KVCACHE_ERROR_TOO_LARGE;
    }
    if (attn->num_kv_heads == 0 || attn->num_q_heads == 0 || attn->num_q_heads % attn->num_kv_heads != 0) {
        return PB_KVCACHE_ERROR_HEADS;
    }
    if (first_head > end_head || end_head > attn->num_kv_heads) {
        return PB_KVCACHE_ERROR_HEAD_RANGE;
    }
    return pb_kvcache_priv_aligned(attn->data, attn->dtype == PB_KVCACHE_FLOAT32 ? 4 : 2) ? PB_KVCACHE_OK
                                                                                      : PB_KVCACHE_ERROR_ALIGNMENT;
}

/* The workspace: the scores of the range's heads, then the scratch of one head. */
pb_kvcache_status pb_kvcache_window_scores_workspace_size(const pb_kvcache_attention *attn, size_t first_head,
                                                          size_t end_head, size_t *size)
{
    size_t floats;
    if (size == NULL) {
        return PB_KVCACHE_ERROR_NULL;
    }
    const pb_kvcache_status status = pb_kvcache_priv_attention_ok(attn, first_head, end_head);
    if (status != PB_KVCACHE_OK) {
        return status;
    }
    if (!pb_kvcache_priv_add(end_head - first_head, PB_KVCACHE_PRIV_SCRATCH_ROWS, &floats)
        || !pb_kvcache_priv_mul(floats, attn->n, &floats) || !pb_kvcache_priv_mul(floats, sizeof(float), &floats)
        || !pb_kvcache_priv_add(floats, PB_KVCACHE_PRIV_ALIGNMENT, &floats) || floats > PTRDIFF_MAX) {
        return PB_KVCACHE_ERROR_TOO_LARGE;
    }
    *size = floats;
    return PB_KVCACHE_OK;
}

bool pb_kvcache_priv_overlaps_attention(const pb_kvcache_attention *attn, size_t first_head, size_t end_head,
                                        const void *array, size_t bytes)
{
    const size_t group = attn->num_q_heads / attn->num_kv_heads;
    const size_t size = attn->dtype == PB_KVCACHE_FLOAT32 ? 4 : 2;
    for (size_t head = first_head * group; head < end_head * group; ++head) {
        for (size_t row = 0; row < attn->window; ++row) {
            if (pb_kvcache_priv_overlap(row_of(attn, head, row), attn->n * size, array, bytes)) {
                return true;
            }
        }
    }
    return false;
}

pb_kvcache_status pb_kvcache_window_scores(const pb_kvcache_attention *attn, pb_kvcache_reduce reduce,
                                           pb_kvcache_nan nan, size_t protect, size_t first_head, size_t end_head,
                                           void *workspace, size_t workspace_size, float *scores, size_t scores_stride,
                                           size_t capacity)
{
    size_t needed;
    size_t bytes;
    /* Checks: the attention, options, the workspace, the output, what overlaps */
    pb_kvcache_status status = pb_kvcache_window_scores_workspace_size(attn, first_head, end_head, &needed);
    if (status != PB_KVCACHE_OK) {
        return status;
    }
    if ((scores == NULL || workspace == NULL) && first_head < end_head) {
        return PB_KVCACHE_ERROR_NULL;
    }
    if (!pb_kvcache_priv_reduce_ok(reduce) || !pb_kvcache_priv_nan_ok(nan)) {
        return PB_KVCACHE_ERROR_OPTION;
    }
    if (protect == 0 || protect >= attn->n) {
        return PB_KVCACHE_ERROR_PROTECT;
    }
    if (workspace_size < needed) {
        return PB_KVCACHE_ERROR_WORKSPACE;
    }
    const size_t scored = attn->n - protect;
    status = pb_kvcache_priv_rows_ok(scores, sizeof *scores, scores_stride, first_head, end_head, scored, capacity);
    if (status != PB_KVCACHE_OK) {
        return status;
    }
    (void)pb_kvcache_priv_span_bytes(end_head - first_head, scores_stride, scored, sizeof *scores, &bytes);
    if (first_head == end_head) {
        return PB_KVCACHE_OK;
    }
    float *first_row = scores + first_head * scores_stride;
    if (pb_kvcache_priv_overlap(first_row, bytes, workspace, needed)
        || pb_kvcache_priv_overlaps_attention(attn, first_head, end_head, first_row, bytes)
        || pb_kvcache_priv_overlaps_attention(attn, first_head, end_head, workspace, needed)) {
        return PB_KVCACHE_ERROR_OVERLAP;
    }
    /* Score into the workspace, so that nothing is written where a later head is refused. Then copy. */
    float *staged = (float *)pb_kvcache_priv_align(workspace);
    const pb_kvcache_priv_scratch scratch =
        pb_kvcache_priv_scratch_at(staged + (end_head - first_head) * attn->n, attn->n);
    for (size_t head = first_head; head < end_head; ++head) {
        status = pb_kvcache_priv_head_scores(attn, reduce, nan, scored, head, &scratch,
                                             staged + (head - first_head) * scored);
        if (status != PB_KVCACHE_OK) {
            return status;
        }
    }
    for (size_t head = first_head; head < end_head; ++head) {
        memcpy(scores + head * scores_stride, staged + (head - first_head) * scored, scored * sizeof *scores);
    }
    return PB_KVCACHE_OK;
}
