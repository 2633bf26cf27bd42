#include <string.h>

#include "bits.h"
#include "checks.h"
#include "kernels.h"
#include "lanes.h"

#define POOL_MAX pool_max
#define SCORE double
#define USABLE(x) (x)
#include "pool_body.h"

#define POOL_MAX pool_max_present
#define SCORE float
#define USABLE(x) (is_finite(x) ? (x) : minus_infinity())
#include "pool_body.h"

void pb_kvcache_priv_pool_max(const double *scores, size_t n, size_t kernel, double *pooled)
{
    pool_max(scores, n, kernel, pooled);
}

/* Kernels up to here take one pass without pooled scores. In a wider one doubling needs fewer steps. */
#define NARROW 31u

/* The maximum over the neighbours of one score. */
static double most_around(const double *scores, size_t n, size_t half, size_t at)
{
    size_t i = at > half ? at - half : 0;
    double most = scores[i];
    for (++i; i < n && i <= at + half; ++i) {
        most = scores[i] > most ? scores[i] : most;
    }
    return most;
}

size_t pb_kvcache_priv_pool_lowest(double *scores, size_t n, size_t kernel, size_t most)
{
    const pb_kvcache_priv_lanes *lanes = pb_kvcache_priv_lanes_best();
    const size_t half = (kernel - 1) / 2;
    double lowest;
    if (kernel > NARROW) {
        pool_max(scores, n, kernel, scores);
        return lanes->lowest(scores, most, 1, &lowest);
    }
    /* The first `half` scores have fewer neighbours before them, the last ones after them */
    const size_t inner = n > 2 * half ? half : most; /* the first with all neighbours */
    const size_t outer = n - half < most ? n - half : most;
    size_t best = 0;
    double best_score = most_around(scores, n, half, 0);
    for (size_t i = 1; i < inner && i < most; ++i) {
        const double score = most_around(scores, n, half, i);
        if (score < best_score) {
            best_score = score;
            best = i;
        }
    }
    if (inner < outer) {
        const size_t at = lanes->lowest(scores + inner - half, outer - inner, kernel, &lowest);
        if (lowest < best_score) {
            best_score = lowest;
            best = inner + at;
        }
    }
    for (size_t i = inner < outer ? outer : inner; i < most; ++i) {
        const double score = most_around(scores, n, half, i);
        if (score < best_score) {
            best_score = score;
            best = i;
        }
    }
    return best;
}

/* Neighbours on either side that a kernel reaches: a kernel beyond 2n - 1 reaches no further. */
static size_t reach_of(size_t n, size_t kernel)
{
    const size_t half = (kernel - 1) / 2;
    return half < n ? half : n - 1;
}

/*
 * The sum over the kernel, in double, is made of blocks of 1, 2, 4, ... neighbours, from the left: one for each bit set
 * in the kernel's width, from the lowest. A block of 2w is the sum of two blocks of w. What lies outside or is not
 * finite counts as 0. That is O(n log kernel), vectors all the way, and every position adds in the same order.
 */
static void pool_average(const float *scores, size_t n, size_t kernel, pb_kvcache_edge edge, double *workspace,
                         float *pooled)
{
    const size_t reach = reach_of(n, kernel);
    const size_t width = 2 * reach + 1;
    const size_t padded = n + 2 * reach;
    double *sums = workspace;
    double *blocks = workspace + n; /* blocks[i] begins `reach` before score i */
    memset(blocks, 0, padded * sizeof *blocks);
    memset(sums, 0, n * sizeof *sums);
    for (size_t i = 0; i < n; ++i) {
        blocks[reach + i] = is_finite(scores[i]) ? (double)scores[i] : 0.0;
    }
    size_t offset = 0;
    for (size_t block = 1; block <= width; block *= 2) {
        if ((width & block) != 0) {
            for (size_t i = 0; i < n; ++i) {
                sums[i] += blocks[i + offset];
            }
            offset += block;
        }
        for (size_t i = 0; i + block < padded; ++i) {
            blocks[i] += blocks[i + block];
        }
    }
    /* Divide by how many of the neighbours are finite, with those beyond the ends where they count as zeros */
    size_t present = 0;
    for (size_t i = 0; i < reach; ++i) {
        present += is_finite(scores[i]);
    }
    for (size_t i = 0; i < n; ++i) {
        present += i + reach < n && is_finite(scores[i + reach]);
        present -= i > reach && is_finite(scores[i - reach - 1]);
        const size_t first = i > reach ? i - reach : 0;
        const size_t end = i + reach < n ? i + reach + 1 : n;
        const size_t number = edge == PB_KVCACHE_EDGE_KERNEL ? present + (kernel - (end - first)) : present;
        pooled[i] = number > 0 ? (float)(sums[i] / (double)number) : 0.0f;
    }
}

void pb_kvcache_priv_pool(const float *scores, size_t n, pb_kvcache_pooling pooling, size_t kernel,
                          pb_kvcache_edge edge, double *workspace, float *pooled)
{
    if (pooling == PB_KVCACHE_POOL_AVERAGE) {
        pool_average(scores, n, kernel, edge, workspace, pooled);
    } else {
        pool_max_present(scores, n, kernel, pooled);
    }
    for (size_t i = 0; i < n; ++i) {
        pooled[i] = is_finite(scores[i]) ? pooled[i] : minus_infinity();
    }
}

pb_kvcache_status pb_kvcache_priv_pool_doubles(size_t n, pb_kvcache_pooling pooling, size_t kernel, size_t *doubles)
{
    if (kernel % 2 == 0) {
        return PB_KVCACHE_ERROR_POOL_KERNEL;
    }
    if (pooling == PB_KVCACHE_POOL_MAX) {
        *doubles = 0;
        return PB_KVCACHE_OK;
    }
    if (pooling != PB_KVCACHE_POOL_AVERAGE) {
        return PB_KVCACHE_ERROR_OPTION;
    }
    if (n > SIZE_MAX / 4 / sizeof(double)) {
        return PB_KVCACHE_ERROR_TOO_LARGE;
    }
    *doubles = n == 0 ? 0 : 2 * n + 2 * reach_of(n, kernel);
    return PB_KVCACHE_OK;
}

pb_kvcache_status pb_kvcache_pool_scores_workspace_size(size_t n, pb_kvcache_pooling pooling, size_t kernel,
                                                        size_t *size)
{
    size_t doubles;
    if (size == NULL) {
        return PB_KVCACHE_ERROR_NULL;
    }
    const pb_kvcache_status status = pb_kvcache_priv_pool_doubles(n, pooling, kernel, &doubles);
    if (status == PB_KVCACHE_OK) {
        *size = doubles == 0 ? 0 : doubles * sizeof(double) + PB_KVCACHE_PRIV_ALIGNMENT;
    }
    return status;
}

pb_kvcache_status pb_kvcache_pool_scores(const float *scores, size_t stride, size_t num_heads, size_t n,
                                         pb_kvcache_pooling pooling, size_t kernel, pb_kvcache_edge edge,
                                         pb_kvcache_nan nan, void *workspace, size_t workspace_size, float *pooled,
                                         size_t pooled_stride, size_t capacity)
{
    size_t needed;
    /* Checks: options, the workspace, the arrays, what overlaps */
    const bool empty = num_heads == 0 || n == 0;
    if ((scores == NULL || pooled == NULL) && !empty) {
        return PB_KVCACHE_ERROR_NULL;
    }
    pb_kvcache_status status = pb_kvcache_pool_scores_workspace_size(n, pooling, kernel, &needed);
    if (status != PB_KVCACHE_OK) {
        return status;
    }
    if (!pb_kvcache_priv_edge_ok(edge) || !pb_kvcache_priv_nan_ok(nan)) {
        return PB_KVCACHE_ERROR_OPTION;
    }
    if (workspace_size < needed || (needed > 0 && workspace == NULL)) {
        return PB_KVCACHE_ERROR_WORKSPACE;
    }
    if (empty) {
        return PB_KVCACHE_OK;
    }
    status = pb_kvcache_priv_scores_ok(scores, stride, num_heads, n, nan);
    if (status == PB_KVCACHE_OK) {
        status = pb_kvcache_priv_rows_ok(pooled, sizeof *pooled, pooled_stride, 0, num_heads, n, capacity);
    }
    if (status != PB_KVCACHE_OK) {
        return status;
    }
    size_t input_bytes;
    size_t output_bytes;
    (void)pb_kvcache_priv_span_bytes(num_heads, stride, n, sizeof *scores, &input_bytes);
    (void)pb_kvcache_priv_span_bytes(num_heads, pooled_stride, n, sizeof *pooled, &output_bytes);
    if (pb_kvcache_priv_overlap(scores, input_bytes, pooled, output_bytes)
        || pb_kvcache_priv_overlap(workspace, needed, pooled, output_bytes)
        || pb_kvcache_priv_overlap(workspace, needed, scores, input_bytes)) {
        return PB_KVCACHE_ERROR_OVERLAP;
    }
    double *doubles = needed == 0 ? NULL : (double *)pb_kvcache_priv_align(workspace);
    for (size_t head = 0; head < num_heads; ++head) {
        pb_kvcache_priv_pool(scores + head * stride, n, pooling, kernel, edge, doubles, pooled + head * pooled_stride);
    }
    return PB_KVCACHE_OK;
}
