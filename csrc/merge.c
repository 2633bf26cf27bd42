/* Evicted rows of keys and values join the kept rows whose keys are nearest. */
#include "pb_kvcache/merge.h"

#include <float.h>
#include <string.h>

#include "bits.h"
#include "checks.h"
#include "lanes.h"

#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#endif

#define COLUMNS PB_KVCACHE_PRIV_COLUMNS
/* A row that takes in less of the attention stays as it is: sums of less lose their digits. */
#define LEAST_SHARE 1e-30
#define LN2 0x1.62e42fefa39efp-1

/* Directions whose products with a block are made together. They stay in the first cache with it. */
#define ROWS 48u

enum { PARTS = 16 };

/* The workspace. `free` is how many kept rows may take others in. */
typedef struct scratch {
    float *columns;    /* head_dim rows of COLUMNS: a block of keys, transposed */
    float *dots;       /* rows of COLUMNS, one for each query, or for ROWS directions */
    float *exps;       /* COLUMNS */
    float *directions; /* free rows of head_dim: the rows' keys at length 1 */
    float *keys;       /* free rows of head_dim: sums, then the merged keys */
    float *values;     /* the same of values */
    float *mean;       /* n: the mean of the shares of each position */
    uint32_t *evicted; /* n - num_kept positions */
    uint32_t *nearest; /* the row that each of them is nearest to */
    uint8_t *stays;    /* n: 1 for kept positions */
    float *top;        /* num_queries: the largest product of each query */
    float *seen_top;   /* num_queries: of those with positions that it sees */
    float *lse;        /* num_queries */
    float *bias;       /* free */
    double *sums;      /* num_queries: of exp(scale * (product - seen_top)), then what exponentials are multiplied by */
    double *more;      /* free: the shares of what each row takes in */
} scratch;

static size_t free_rows(const pb_kvcache_merge *merge)
{
    return merge->num_kept > merge->protect ? merge->num_kept - merge->protect : 0;
}

/* Where each part begins, in bytes, and the bytes of all with the slack to align them. Parts take whole cache lines. */
static pb_kvcache_status lay_out(const pb_kvcache_merge *merge, size_t offsets[PARTS], size_t *bytes)
{
    const size_t line = PB_KVCACHE_PRIV_ALIGNMENT;
    const size_t free = free_rows(merge);
    const size_t queries = merge->num_queries;
    if (merge->n == 0 || merge->head_dim == 0 || queries == 0) {
        return PB_KVCACHE_ERROR_HEADS;
    }
    if (merge->n > UINT32_MAX || merge->num_kept > UINT32_MAX) {
        return PB_KVCACHE_ERROR_TOO_LARGE;
    }
    const size_t n = merge->n;
    const size_t rows[PARTS] = {merge->head_dim, queries > ROWS ? queries : ROWS, COLUMNS, free, free, free, n, n, n, n,
                                queries, queries, queries, free, queries, free};
    const size_t sizes[PARTS] = {COLUMNS * sizeof(float), COLUMNS * sizeof(float), sizeof(float), sizeof(float),
                                 sizeof(float), sizeof(float), sizeof(float), sizeof(uint32_t), sizeof(uint32_t), 1,
                                 sizeof(float), sizeof(float), sizeof(float), sizeof(float), sizeof(double),
                                 sizeof(double)};
    size_t total = line; /* the slack */
    for (size_t part = 0; part < PARTS; ++part) {
        size_t size;
        offsets[part] = total - line;
        if (!pb_kvcache_priv_mul(rows[part], sizes[part], &size)
            || (part >= 3 && part <= 5 && !pb_kvcache_priv_mul(size, merge->head_dim, &size))
            || !pb_kvcache_priv_add(size, line - 1, &size) || !pb_kvcache_priv_add(total, size / line * line, &total)) {
            return PB_KVCACHE_ERROR_TOO_LARGE;
        }
    }
    *bytes = total;
    return total > PTRDIFF_MAX ? PB_KVCACHE_ERROR_TOO_LARGE : PB_KVCACHE_OK;
}

pb_kvcache_status pb_kvcache_merge_workspace_size(const pb_kvcache_merge *merge, size_t *size)
{
    size_t offsets[PARTS];
    size_t bytes;
    if (merge == NULL || size == NULL) {
        return PB_KVCACHE_ERROR_NULL;
    }
    const pb_kvcache_status status = lay_out(merge, offsets, &bytes);
    if (status == PB_KVCACHE_OK) {
        *size = bytes;
    }
    return status;
}

static bool kept_ok(const pb_kvcache_merge *merge)
{
    for (size_t i = 0; i < merge->num_kept; ++i) {
        if (merge->kept[i] >= merge->n || (i > 0 && merge->kept[i] <= merge->kept[i - 1])) {
            return false;
        }
    }
    return true;
}

typedef struct region {
    const void *array;
    size_t size;  /* of an element */
    size_t bytes; /* of all */
} region;

/* Everything but the values of the elements. `needed` is the size of the workspace. */
static pb_kvcache_status arguments_ok(const pb_kvcache_merge *merge, const void *workspace, size_t workspace_size,
                                      size_t needed, const float *keys, const float *values, size_t stride,
                                      size_t capacity, const float *bias, size_t bias_capacity)
{
    size_t row_bytes;
    size_t query_bytes;
    size_t out_bytes;
    if (merge->keys == NULL || merge->values == NULL || merge->queries == NULL || workspace == NULL
        || (merge->num_kept > 0 && (merge->kept == NULL || keys == NULL || values == NULL || bias == NULL))) {
        return PB_KVCACHE_ERROR_NULL;
    }
    if (!(merge->scale > 0.0f && merge->scale <= FLT_MAX)) {
        return PB_KVCACHE_ERROR_SCALE;
    }
    if (merge->window > merge->n || (merge->window > 0 && merge->num_queries % merge->window != 0)) {
        return PB_KVCACHE_ERROR_WINDOW;
    }
    if (merge->row_stride < merge->head_dim || stride < merge->head_dim) {
        return PB_KVCACHE_ERROR_STRIDE;
    }
    if (!pb_kvcache_priv_span_bytes(merge->n, merge->row_stride, merge->head_dim, sizeof(float), &row_bytes)
        || !pb_kvcache_priv_span_bytes(merge->num_queries, merge->head_dim, merge->head_dim, sizeof(float), &query_bytes)
        || !pb_kvcache_priv_span_bytes(merge->num_kept, stride, merge->head_dim, sizeof(float), &out_bytes)) {
        return PB_KVCACHE_ERROR_TOO_LARGE;
    }
    const size_t bias_bytes = merge->num_kept * sizeof(float);
    const size_t lse_bytes = merge->lse == NULL ? 0 : merge->num_queries * sizeof(float);
    const region read[] = {{merge->keys, sizeof(float), row_bytes},
                           {merge->values, sizeof(float), row_bytes},
                           {merge->queries, sizeof(float), query_bytes},
                           {merge->lse, sizeof(float), lse_bytes},
                           {merge->kept, sizeof(uint32_t), merge->num_kept * sizeof(uint32_t)}};
    const region written[] = {{keys, sizeof(float), out_bytes},
                              {values, sizeof(float), out_bytes},
                              {bias, sizeof(float), bias_bytes},
                              {workspace, 1, needed}};
    enum { READ = sizeof read / sizeof *read, WRITTEN = sizeof written / sizeof *written };
    bool aligned = true;
    bool overlap = false;
    for (size_t i = 0; i < WRITTEN; ++i) {
        aligned = aligned && pb_kvcache_priv_aligned(written[i].array, written[i].size);
        for (size_t j = 0; j < READ; ++j) {
            aligned = aligned && pb_kvcache_priv_aligned(read[j].array, read[j].size);
            overlap = overlap
                      || pb_kvcache_priv_overlap(written[i].array, written[i].bytes, read[j].array, read[j].bytes);
        }
        for (size_t j = 0; j < i; ++j) {
            overlap = overlap
                      || pb_kvcache_priv_overlap(written[i].array, written[i].bytes, written[j].array, written[j].bytes);
        }
    }
    if (!aligned) {
        return PB_KVCACHE_ERROR_ALIGNMENT;
    }
    if (out_bytes / sizeof(float) > capacity || merge->num_kept > bias_capacity) {
        return PB_KVCACHE_ERROR_CAPACITY;
    }
    if (workspace_size < needed) {
        return PB_KVCACHE_ERROR_WORKSPACE;
    }
    if (overlap) {
        return PB_KVCACHE_ERROR_OVERLAP;
    }
    return kept_ok(merge) ? PB_KVCACHE_OK : PB_KVCACHE_ERROR_INDEX;
}

static bool values_ok(const pb_kvcache_priv_lanes *lanes, const pb_kvcache_merge *merge)
{
    bool ok = lanes->finite(merge->queries, merge->num_queries * merge->head_dim)
              && (merge->lse == NULL || lanes->finite(merge->lse, merge->num_queries));
    for (size_t i = 0; ok && i < merge->n; ++i) {
        ok = lanes->finite(merge->keys + i * merge->row_stride, merge->head_dim)
             && lanes->finite(merge->values + i * merge->row_stride, merge->head_dim);
    }
    return ok;
}

/* The square root of a normal x > 0, within 1 ulp: Newton's steps from half the exponent, without a libm. */
static double square_root(double x)
{
    double root = double_of((bits_of_double(x) >> 1) + ((uint64_t)0x3FF << 51));
    for (int step = 0; step < 6; ++step) {
        root = 0.5 * (root + x / root);
    }
    return root;
}

/* The natural logarithm of a normal x > 0, within 2 ulp: x = 2^k m, m from sqrt(1/2) to sqrt(2), and the series of
 * log m = 2 artanh((m - 1) / (m + 1)), whose terms fall by 34 or more. */
static double logarithm(double x)
{
    const uint64_t half = (uint64_t)0x3FE6A09E667F3BCD; /* the bits of sqrt(1/2) */
    const uint64_t bits = bits_of_double(x);
    const int64_t k = ((int64_t)bits - (int64_t)half) >= 0 ? (int64_t)((bits - half) >> 52)
                                                            : -(int64_t)((half - bits + ((uint64_t)1 << 52) - 1) >> 52);
    const double m = double_of(bits - ((uint64_t)k << 52));
    const double s = (m - 1.0) / (m + 1.0);
    const double square = s * s;
    double sum = 0.0;
    for (int term = 23; term > 1; term -= 2) {
        sum = (sum + 1.0 / (double)term) * square;
    }
    return (double)k * LN2 + 2.0 * (s + s * sum);
}

/* The keys of the rows that may take others in, at length 1. Those of zeros stay: every cosine with them is 0. */
static void set_directions(const pb_kvcache_merge *merge, const scratch *parts)
{
    for (size_t i = 0; i < free_rows(merge); ++i) {
        const float *key = merge->keys + merge->kept[i] * merge->row_stride;
        float *direction = parts->directions + i * merge->head_dim;
        uint32_t largest = 0;
        double squares = 0.0;
        for (size_t d = 0; d < merge->head_dim; ++d) {
            const uint32_t magnitude = bits_of(key[d]) & ~SIGN;
            largest = magnitude > largest ? magnitude : largest;
            squares += (double)key[d] * (double)key[d];
        }
        const double length = largest == 0 ? 1.0 : square_root(squares); /* a square of a float is a normal double */
        for (size_t d = 0; d < merge->head_dim; ++d) {
            direction[d] = (float)((double)key[d] / length);
        }
    }
}

/* `width` rows as columns, zeros beyond them: the rows at some positions, or the first ones where `at` is NULL. */
static void transpose(const float *restrict rows, size_t stride, const uint32_t *at, size_t width, size_t dim,
                      float *restrict columns)
{
    if (width < COLUMNS) {
        memset(columns, 0, dim * COLUMNS * sizeof *columns);
    }
    for (size_t i = 0; i < width; ++i) {
        const float *row = rows + (at == NULL ? i : at[i]) * stride;
        for (size_t d = 0; d < dim; ++d) {
            columns[d * COLUMNS + i] = row[d];
        }
    }
}

/* The positions that leave, and for each the direction of the largest product, the lower of two. */
static void set_nearest(const pb_kvcache_priv_lanes *lanes, const pb_kvcache_merge *merge, const scratch *parts)
{
    const size_t dim = merge->head_dim;
    const size_t free = free_rows(merge);
    size_t evicted = 0;
    memset(parts->stays, 0, merge->n);
    for (size_t i = 0; i < merge->num_kept; ++i) {
        parts->stays[merge->kept[i]] = 1;
    }
    for (size_t i = 0; i < merge->n; ++i) {
        if (parts->stays[i] == 0) {
            parts->evicted[evicted++] = (uint32_t)i;
        }
    }
    for (size_t start = 0; start < evicted; start += COLUMNS) {
        const size_t width = evicted - start < COLUMNS ? evicted - start : COLUMNS;
        float best[COLUMNS];
        uint32_t at[COLUMNS] = {0};
        transpose(merge->keys, merge->row_stride, parts->evicted + start, width, dim, parts->columns);
        for (size_t i = 0; i < COLUMNS; ++i) {
            best[i] = minus_infinity();
        }
        for (size_t row = 0; row < free; row += ROWS) {
            const size_t rows = free - row < ROWS ? free - row : ROWS;
            lanes->columns(parts->columns, parts->directions + row * dim, rows, dim, parts->dots);
            lanes->keep_larger(parts->dots, rows, (uint32_t)row, best, at);
        }
        memcpy(parts->nearest + start, at, width * sizeof *at);
    }
}

/* How many of the positions from `start` on a query sees, at most `width`. */
static size_t seen_from(const pb_kvcache_merge *merge, size_t query, size_t start, size_t width)
{
    const size_t later = merge->window == 0 ? 0 : merge->window - 1 - query % merge->window;
    const size_t seen = merge->n - later;
    const size_t left = seen > start ? seen - start : 0;
    return left < width ? left : width;
}

/* One query's products with a block of positions join its largest ones and its sum. false where one is too large when
 * scaled. */
static bool join_block(const pb_kvcache_priv_lanes *lanes, const pb_kvcache_merge *merge, const scratch *parts,
                       size_t q, size_t start, size_t width)
{
    const float *dots = parts->dots + q * COLUMNS;
    const size_t seen = seen_from(merge, q, start, width);
    float top;
    (void)lanes->top[PB_KVCACHE_FLOAT32](dots, width, &top);
    if (start == 0 || top > parts->top[q]) {
        parts->top[q] = top;
    }
    if (!is_finite(parts->top[q] * merge->scale)) {
        return false;
    }
    if (merge->lse != NULL || seen == 0) {
        return true;
    }
    if (seen < width) {
        (void)lanes->top[PB_KVCACHE_FLOAT32](dots, seen, &top);
    }
    if (start == 0) {
        parts->seen_top[q] = top;
        parts->sums[q] = 0.0;
    } else if (top > parts->seen_top[q]) { /* the sum so far shrinks */
        parts->sums[q] *= (double)pb_kvcache_priv_exp(parts->seen_top[q] * merge->scale - top * merge->scale);
        parts->seen_top[q] = top;
    }
    if (!is_finite(parts->seen_top[q] * merge->scale)) {
        return false;
    }
    parts->sums[q] += lanes->exps[PB_KVCACHE_FLOAT32](dots, seen, merge->scale, parts->seen_top[q], parts->exps, NULL);
    return true;
}

/* Each query's largest product, and the log of its softmax denominator. false where a product is too large. */
static bool set_lse(const pb_kvcache_priv_lanes *lanes, const pb_kvcache_merge *merge, const scratch *parts)
{
    for (size_t start = 0; start < merge->n; start += COLUMNS) {
        const size_t width = merge->n - start < COLUMNS ? merge->n - start : COLUMNS;
        transpose(merge->keys + start * merge->row_stride, merge->row_stride, NULL, width, merge->head_dim,
                  parts->columns);
        lanes->columns(parts->columns, merge->queries, merge->num_queries, merge->head_dim, parts->dots);
        if (!lanes->finite(parts->dots, merge->num_queries * COLUMNS)) { /* those beyond the width are 0 */
            return false;
        }
        for (size_t q = 0; q < merge->num_queries; ++q) {
            if (!join_block(lanes, merge, parts, q, start, width)) {
                return false;
            }
        }
    }
    for (size_t q = 0; q < merge->num_queries; ++q) {
        const float top = parts->top[q] * merge->scale;
        const float from = merge->lse == NULL ? parts->seen_top[q] * merge->scale : merge->lse[q];
        const float above = top - from; /* what a query does not see, or a given lse leaves out, may be above it */
        const float factor = above > 0.0f ? 1.0f / pb_kvcache_priv_exp(-above) : pb_kvcache_priv_exp(above);
        if (merge->lse == NULL) {
            parts->lse[q] = (float)((double)from + logarithm(parts->sums[q]));
            parts->sums[q] = (double)factor / parts->sums[q];
        } else {
            parts->lse[q] = from;
            parts->sums[q] = (double)factor;
        }
    }
    return true;
}

/* The mean of the shares of each position. false where one is too large. */
static bool set_shares(const pb_kvcache_priv_lanes *lanes, const pb_kvcache_merge *merge, const scratch *parts)
{
    const float count = (float)merge->num_queries;
    for (size_t start = 0; start < merge->n; start += COLUMNS) {
        const size_t width = merge->n - start < COLUMNS ? merge->n - start : COLUMNS;
        float sums[COLUMNS] = {0.0f};
        transpose(merge->keys + start * merge->row_stride, merge->row_stride, NULL, width, merge->head_dim,
                  parts->columns);
        lanes->columns(parts->columns, merge->queries, merge->num_queries, merge->head_dim, parts->dots);
        for (size_t q = 0; q < merge->num_queries; ++q) {
            (void)lanes->exps[PB_KVCACHE_FLOAT32](parts->dots + q * COLUMNS, width, merge->scale, parts->top[q],
                                                  parts->exps, NULL);
            lanes->add_scaled(parts->exps, width, (float)parts->sums[q], sums);
        }
        for (size_t i = 0; i < width; ++i) {
            parts->mean[start + i] = sums[i] / count;
        }
    }
    return lanes->finite(parts->mean, merge->n);
}

/* Sums of what each row takes in, weighted, then the merged rows. */
static void merge_rows(const pb_kvcache_priv_lanes *lanes, const pb_kvcache_merge *merge, const scratch *parts)
{
    const size_t dim = merge->head_dim;
    const size_t free = free_rows(merge);
    memset(parts->keys, 0, free * dim * sizeof *parts->keys);
    memset(parts->values, 0, free * dim * sizeof *parts->values);
    for (size_t i = 0; i < free; ++i) {
        parts->more[i] = 0.0;
    }
    for (size_t i = 0; i < merge->n - merge->num_kept; ++i) {
        const size_t from = parts->evicted[i] * merge->row_stride;
        const float share = parts->mean[parts->evicted[i]];
        const size_t row = parts->nearest[i];
        parts->more[row] += (double)share;
        lanes->add_scaled(merge->keys + from, dim, share, parts->keys + row * dim);
        lanes->add_scaled(merge->values + from, dim, share, parts->values + row * dim);
    }
    for (size_t i = 0; i < free; ++i) {
        const float *old_key = merge->keys + merge->kept[i] * merge->row_stride;
        const float *old_value = merge->values + merge->kept[i] * merge->row_stride;
        const float own = parts->mean[merge->kept[i]];
        const float total = (float)((double)own + parts->more[i]);
        const bool takes = parts->more[i] >= LEAST_SHARE;
        for (size_t d = 0; d < dim; ++d) {
            float *key = parts->keys + i * dim + d;
            float *value = parts->values + i * dim + d;
            *key = takes ? (own * old_key[d] + *key) / total : old_key[d];
            *value = takes ? (own * old_value[d] + *value) / total : old_value[d];
        }
        parts->bias[i] = takes ? total : 0.0f;
    }
}

/* The biases of the merged rows, whose shares are in their place so far. false where a product is too large. */
static bool set_biases(const pb_kvcache_priv_lanes *lanes, const pb_kvcache_merge *merge, const scratch *parts)
{
    const size_t dim = merge->head_dim;
    const size_t free = free_rows(merge);
    for (size_t start = 0; start < free; start += COLUMNS) {
        const size_t width = free - start < COLUMNS ? free - start : COLUMNS;
        float top[COLUMNS];
        double sums[COLUMNS] = {0.0};
        transpose(parts->keys + start * dim, dim, NULL, width, dim, parts->columns);
        lanes->columns(parts->columns, merge->queries, merge->num_queries, dim, parts->dots);
        /* The log of the mean of exponentials, each less the largest: it is a number where all of them are 0. */
        for (size_t q = 0; q < merge->num_queries; ++q) {
            float *dots = parts->dots + q * COLUMNS;
            for (size_t i = 0; i < COLUMNS; ++i) {
                dots[i] = dots[i] * merge->scale - parts->lse[q];
                top[i] = q == 0 || dots[i] > top[i] ? dots[i] : top[i];
            }
            if (!lanes->finite(dots, width)) {
                return false;
            }
        }
        for (size_t q = 0; q < merge->num_queries; ++q) {
            float *dots = parts->dots + q * COLUMNS;
            for (size_t i = 0; i < COLUMNS; ++i) {
                dots[i] -= top[i];
            }
            (void)lanes->exps[PB_KVCACHE_FLOAT32](dots, width, 1.0f, 0.0f, parts->exps, NULL);
            for (size_t i = 0; i < width; ++i) {
                sums[i] += (double)parts->exps[i];
            }
        }
        for (size_t i = 0; i < width; ++i) {
            float *bias = parts->bias + start + i;
            const double mean = sums[i] / (double)merge->num_queries;
            *bias = *bias > 0.0f ? (float)(logarithm((double)*bias) - ((double)top[i] + logarithm(mean))) : 0.0f;
        }
    }
    return lanes->finite(parts->bias, free);
}

pb_kvcache_status pb_kvcache_merge_nearest(const pb_kvcache_merge *merge, void *workspace, size_t workspace_size,
                                           float *keys, float *values, size_t stride, size_t capacity, float *bias,
                                           size_t bias_capacity)
{
    size_t offsets[PARTS];
    size_t needed;
    if (merge == NULL) {
        return PB_KVCACHE_ERROR_NULL;
    }
    pb_kvcache_status status = lay_out(merge, offsets, &needed);
    if (status == PB_KVCACHE_OK) {
        status = arguments_ok(merge, workspace, workspace_size, needed, keys, values, stride, capacity, bias,
                              bias_capacity);
    }
    if (status != PB_KVCACHE_OK) {
        return status;
    }
    const pb_kvcache_priv_lanes *lanes = pb_kvcache_priv_lanes_best();
    if (!values_ok(lanes, merge)) {
        return PB_KVCACHE_ERROR_ROW_VALUE;
    }

    unsigned char *const bytes = pb_kvcache_priv_align(workspace);
    const scratch parts = {.columns = (float *)(void *)(bytes + offsets[0]),
                           .dots = (float *)(void *)(bytes + offsets[1]),
                           .exps = (float *)(void *)(bytes + offsets[2]),
                           .directions = (float *)(void *)(bytes + offsets[3]),
                           .keys = (float *)(void *)(bytes + offsets[4]),
                           .values = (float *)(void *)(bytes + offsets[5]),
                           .mean = (float *)(void *)(bytes + offsets[6]),
                           .evicted = (uint32_t *)(void *)(bytes + offsets[7]),
                           .nearest = (uint32_t *)(void *)(bytes + offsets[8]),
                           .stays = bytes + offsets[9],
                           .top = (float *)(void *)(bytes + offsets[10]),
                           .seen_top = (float *)(void *)(bytes + offsets[11]),
                           .lse = (float *)(void *)(bytes + offsets[12]),
                           .bias = (float *)(void *)(bytes + offsets[13]),
                           .sums = (double *)(void *)(bytes + offsets[14]),
                           .more = (double *)(void *)(bytes + offsets[15])};
    size_t merged = 0; /* rows that are in the workspace. The others are as they were */
    if (free_rows(merge) > 0 && merge->num_kept < merge->n) {
        merged = free_rows(merge);
        set_directions(merge, &parts);
        set_nearest(lanes, merge, &parts);
        if (!set_lse(lanes, merge, &parts) || !set_shares(lanes, merge, &parts)) {
            return PB_KVCACHE_ERROR_LOGIT;
        }
        merge_rows(lanes, merge, &parts);
        if (!set_biases(lanes, merge, &parts)) {
            return PB_KVCACHE_ERROR_LOGIT;
        }
    }
    for (size_t i = 0; i < merge->num_kept; ++i) {
        const size_t at = merge->kept[i] * merge->row_stride;
        const size_t width = merge->head_dim * sizeof(float);
        memcpy(keys + i * stride, i < merged ? parts.keys + i * merge->head_dim : merge->keys + at, width);
        memcpy(values + i * stride, i < merged ? parts.values + i * merge->head_dim : merge->values + at, width);
        bias[i] = i < merged ? parts.bias[i] : 0.0f;
    }
    return PB_KVCACHE_OK;
}
