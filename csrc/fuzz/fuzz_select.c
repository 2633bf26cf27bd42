/*
 * libFuzzer target: the prefill selection over arbitrary numbers, shapes, strides, budgets and buffers of exactly the
 * size that was promised, checked against what the header says. Built with -fsanitize=fuzzer,address,undefined.
 */
#include <math.h>

#include "input.h"

/* Mostly what is allowed, sometimes anything. */
static size_t count_of(input *in, size_t most)
{
    const uint32_t kind = take(in, 1);
    return kind < 0xF8 ? kind % (most + 1) : (kind == 0xF8 ? SIZE_MAX / (take(in, 1) + 1u) : take(in, 4));
}

static void ascending(const uint32_t *row, size_t count, size_t n)
{
    for (size_t i = 0; i < count; ++i) {
        MUST(row[i] < n && (i == 0 || row[i] > row[i - 1]));
    }
}

/* The same without gaps, into arrays of exactly that size. */
static void must_be_ragged(const pb_kvcache_attention *attn, const pb_kvcache_select_params *params,
                           const uint32_t *budgets, unsigned char *workspace, size_t size, const uint32_t *rows,
                           size_t stride)
{
    size_t total = 0;
    for (size_t head = 0; head < attn->num_kv_heads; ++head) {
        total += budgets[head] < attn->n ? budgets[head] : attn->n;
    }
    uint32_t *indices = malloc(total * sizeof *indices);
    size_t *offsets = malloc((attn->num_kv_heads + 1) * sizeof *offsets);
    MUST(pb_kvcache_select_ragged(attn, params, budgets, workspace, size, indices, total, offsets) == PB_KVCACHE_OK);
    MUST(offsets[0] == 0 && offsets[attn->num_kv_heads] == total);
    for (size_t head = 0; head < attn->num_kv_heads; ++head) {
        MUST(memcmp(indices + offsets[head], rows + head * stride, (offsets[head + 1] - offsets[head]) * sizeof *rows) == 0);
    }
    free(offsets);
    free(indices);
}

/* A row of weights for each head, which params then point to, or NULL. With `any` sometimes one that is refused. */
static float *new_weights(input *in, size_t heads, size_t scored, pb_kvcache_select_params *params, bool any)
{
    const uint32_t kind = take(in, 1);
    if ((kind & 1) == 0) {
        return NULL;
    }
    const size_t stride = scored + kind / 2 % 3;
    float *weights = malloc(((heads - 1) * stride + scored) * sizeof *weights);
    for (size_t i = 0; i < (heads - 1) * stride + scored; ++i) {
        weights[i] = (float)((i * kind) & 7u) * 0.25f;
    }
    if (any && kind > 250) {
        const uint32_t bits = take(in, 4);
        memcpy(weights + bits % scored, &bits, sizeof bits);
    }
    params->weights = weights;
    params->weights_stride = stride;
    return weights;
}

static void fuzz_select(input *in)
{
    /* A buffer that holds what the strides reach, and shapes that sometimes claim more than is allowed. */
    const size_t window = 1 + take(in, 1) % 4;
    const size_t beyond = take(in, 2) % 600;
    const size_t n = window + beyond > 1 ? window + beyond : 2; /* a window of every position, too */
    const size_t kv_heads = 1 + take(in, 1) % 3;
    const size_t q_heads = kv_heads * (1 + take(in, 1) % 3);
    const size_t row_stride = n + take(in, 1) % 3;
    const size_t head_stride = window * row_stride + take(in, 1) % 3;
    const int dtype = (int)(take(in, 1) % 3);
    const size_t size = dtype == PB_KVCACHE_FLOAT32 ? 4 : 2;
    const size_t bytes = ((q_heads - 1) * head_stride + (window - 1) * row_stride + n) * size;
    unsigned char *data = malloc(bytes);
    const uint32_t kind = take(in, 1);
    for (size_t i = 0; i < bytes; ++i) {
        data[i] = (unsigned char)(in->left > 64 ? take(in, 1) : i * kind);
        if ((kind & 1) == 0 && i % size == size - 1) {
            data[i] &= 0x3F; /* mostly decent numbers */
        }
    }
    pb_kvcache_attention attn = {.data = data,
                                 .dtype = (pb_kvcache_dtype)dtype,
                                 .logits = (int)(take(in, 1) & 1),
                                 .scale = 0.25f,
                                 .num_q_heads = q_heads,
                                 .num_kv_heads = kv_heads,
                                 .window = window,
                                 .n = n,
                                 .head_stride = (ptrdiff_t)head_stride,
                                 .row_stride = (ptrdiff_t)row_stride};
    pb_kvcache_select_params params = {.reduce = (pb_kvcache_reduce)(take(in, 1) % 3),
                                       .pooling = (pb_kvcache_pooling)(take(in, 1) % 2),
                                       .kernel = 2 * count_of(in, 8) + 1,
                                       .edge = (pb_kvcache_edge)(take(in, 1) % 2),
                                       .nan = (pb_kvcache_nan)(take(in, 1) % 2),
                                       .protect = 1 + take(in, 1) % (window + 2)};
    params.protect = params.protect < n ? params.protect : n - 1;
    params.sinks = take(in, 1) % 8 == 0 ? count_of(in, n) : 0;
    float *weights = new_weights(in, kv_heads, n - params.protect, &params, true);
    /* Sometimes what is refused before the data is looked at */
    if ((take(in, 1) & 15) == 0) {
        uint32_t scale = take(in, 4);
        memcpy(&attn.scale, &scale, sizeof attn.scale);
        attn.window = count_of(in, window);
        attn.num_kv_heads = count_of(in, kv_heads);
        attn.n = attn.window < n ? n : count_of(in, n);
        attn.n = attn.n < n ? attn.n : n;
        params.kernel = count_of(in, 9);
        params.protect = params.weights == NULL ? count_of(in, n) : params.protect;
    }
    /* A range of heads, budgets, and an output of exactly the size that they need */
    const size_t heads = attn.num_kv_heads < 9 ? attn.num_kv_heads : 9;
    const size_t first = heads > 0 ? take(in, 1) % heads : 0;
    const size_t end = heads > 0 ? first + take(in, 1) % (heads - first + 1) : 0;
    uint32_t budgets[9];
    size_t most = 0;
    for (size_t head = 0; head < 9; ++head) {
        budgets[head] = (uint32_t)count_of(in, n + 1);
        if (head >= first && head < end) {
            const size_t kept = budgets[head] < attn.n ? budgets[head] : attn.n;
            most = kept > most ? kept : most;
        }
    }
    const size_t stride = most + take(in, 1) % 2;
    const size_t capacity = end > first ? (end - 1) * stride + most : 0;
    /* Select, and look at what came of it */
    size_t needed = 0;
    pb_kvcache_status status = pb_kvcache_select_workspace_size(&attn, &params, first, end, &needed);
    if (status != PB_KVCACHE_OK) {
        MUST(needed == 0);
    } else if (needed < ((size_t)1 << 24) && stride < ((size_t)1 << 20)) {
        const size_t lacking = take(in, 1) == 7 ? 1 : 0;
        unsigned char *workspace = malloc(needed - lacking + 1);
        uint32_t *indices = malloc((capacity + 1) * sizeof *indices);
        memset(indices, 0xFF, (capacity + 1) * sizeof *indices);
        unsigned char *before = malloc(bytes);
        memcpy(before, data, bytes);
        status = pb_kvcache_select(&attn, &params, budgets, first, end, workspace, needed - lacking, indices, stride,
                                   capacity);
        MUST(memcmp(before, data, bytes) == 0);
        MUST(lacking == 0 || status != PB_KVCACHE_OK);
        for (size_t head = first; head < end && status == PB_KVCACHE_OK; ++head) {
            const size_t kept = budgets[head] < attn.n ? budgets[head] : attn.n;
            const uint32_t *row = indices + head * stride;
            ascending(row, kept, attn.n);
            MUST(row[kept - params.protect] == attn.n - params.protect); /* what is protected is there */
            MUST(params.sinks == 0 || row[params.sinks - 1] == params.sinks - 1);
        }
        for (size_t i = 0; status != PB_KVCACHE_OK && i <= capacity; ++i) {
            MUST(indices[i] == UINT32_MAX);
        }
        if (status == PB_KVCACHE_OK && first == 0 && end == attn.num_kv_heads) {
            must_be_ragged(&attn, &params, budgets, workspace, needed, indices, stride);
        }
        free(before);
        free(indices);
        free(workspace);
    }
    free(weights);
    free(data);
}

/* What stays of scores, by hand: weighed, pooled, the best chosen behind the sinks, what is protected behind them.
 * `pooled` and `counts` are scratch. */
static void must_be_from_scores(const float *scores, size_t heads, size_t n, const pb_kvcache_select_params *params,
                                const uint32_t *budgets, float *pooled, uint32_t *counts)
{
    const size_t scored = n - params->protect;
    const size_t sinks = params->sinks;
    const size_t behind = scored - sinks;
    size_t size;
    size_t pool_size;
    MUST(pb_kvcache_select_from_scores_workspace_size(params, n, &size) == PB_KVCACHE_OK);
    MUST(pb_kvcache_pool_scores_workspace_size(scored, params->pooling, params->kernel, &pool_size) == PB_KVCACHE_OK);
    unsigned char *workspace = malloc(size > pool_size ? size : pool_size);
    uint32_t *kept = malloc(heads * n * sizeof *kept);
    uint32_t *best = malloc(heads * scored * sizeof *best);
    const pb_kvcache_status status = pb_kvcache_select_from_scores(scores, scored, heads, n, params, budgets, workspace,
                                                                   size, kept, n, heads * n);
    float *weighted = malloc(heads * scored * sizeof *weighted);
    bool fits = true;
    for (size_t i = 0; i < heads * scored; ++i) {
        const float weight
            = params->weights == NULL ? 1.0f : params->weights[i / scored * params->weights_stride + i % scored];
        weighted[i] = isfinite(scores[i]) ? scores[i] * weight : -INFINITY;
        fits = fits && (!isfinite(scores[i]) || isfinite(weighted[i]) || budgets[i / scored] >= n);
    }
    MUST(status == (fits ? PB_KVCACHE_OK : PB_KVCACHE_ERROR_SCORE));
    if (!fits) {
        free(weighted);
        free(best);
        free(kept);
        free(workspace);
        return;
    }
    MUST(pb_kvcache_pool_scores(weighted, scored, heads, scored, params->pooling, params->kernel, params->edge,
                                PB_KVCACHE_NAN_LOWEST, workspace, pool_size, pooled, scored, heads * scored)
         == PB_KVCACHE_OK);
    for (size_t head = 0; head < heads; ++head) {
        counts[head] = (uint32_t)(budgets[head] < n ? budgets[head] - params->protect - sinks : behind);
    }
    MUST(pb_kvcache_select_top(pooled + sinks, scored, heads, behind, counts, PB_KVCACHE_NAN_LOWEST, best, scored,
                               heads * scored)
         == PB_KVCACHE_OK);
    for (size_t head = 0; head < heads; ++head) {
        const uint32_t *row = kept + head * n;
        for (size_t i = 0; i < sinks; ++i) {
            MUST(row[i] == i);
        }
        for (size_t i = 0; i < counts[head]; ++i) {
            MUST(row[sinks + i] == sinks + best[head * scored + i]);
        }
        for (size_t i = 0; i < params->protect; ++i) {
            MUST(row[sinks + counts[head] + i] == scored + i);
        }
    }
    free(weighted);
    free(best);
    free(kept);
    free(workspace);
}

static void fuzz_scores(input *in)
{
    /* Scores of any bits, hardly ever refused ones */
    const size_t heads = 1 + take(in, 1) % 3;
    const size_t n = take(in, 1) < 240 ? take(in, 1) : 4000 + take(in, 2) % 9000;
    const pb_kvcache_nan nan = (pb_kvcache_nan)(take(in, 1) % 2);
    const pb_kvcache_pooling pooling = (pb_kvcache_pooling)(take(in, 1) % 2);
    const size_t kernel = count_of(in, 40);
    const pb_kvcache_edge edge = (pb_kvcache_edge)(take(in, 1) % 2);
    float *scores = malloc((heads * n + 1) * sizeof *scores);
    float *pooled = malloc((heads * n + 1) * sizeof *pooled);
    uint32_t *indices = malloc((heads * n + 1) * sizeof *indices);
    uint32_t *counts = malloc(heads * sizeof *counts);
    uint32_t seed = take(in, 4) | 1u;
    bool finite = true;
    for (size_t i = 0; i < heads * n; ++i) {
        if (in->left > 16) {
            seed = take(in, 4);
        } else {
            seed ^= seed << 13;
            seed ^= seed >> 17;
            seed ^= seed << 5;
        }
        memcpy(scores + i, &seed, sizeof seed);
        if (nan == PB_KVCACHE_NAN_REFUSE && (seed & 0x7F800000u) == 0x7F800000u && in->left % 7 != 0) {
            scores[i] = 1.0f;
        }
        finite = finite && isfinite(scores[i]);
    }
    for (size_t head = 0; head < heads; ++head) {
        counts[head] = (uint32_t)(take(in, 2) % (n + 1));
    }
    /* Pool */
    size_t needed = 0;
    pb_kvcache_status status = pb_kvcache_pool_scores_workspace_size(n, pooling, kernel, &needed);
    if (status == PB_KVCACHE_OK) {
        unsigned char *workspace = malloc(needed + 1);
        status = pb_kvcache_pool_scores(scores, n, heads, n, pooling, kernel, edge, nan, workspace, needed, pooled,
                                        n, heads * n);
        MUST((status == PB_KVCACHE_OK) == (finite || nan == PB_KVCACHE_NAN_LOWEST));
        for (size_t i = 0; status == PB_KVCACHE_OK && i < heads * n; ++i) {
            MUST(isfinite(scores[i]) ? isfinite(pooled[i]) && (pooling != PB_KVCACHE_POOL_MAX || pooled[i] >= scores[i])
                                     : pooled[i] == -INFINITY);
        }
        free(workspace);
    } else {
        MUST(kernel % 2 == 0);
    }
    /* Choose */
    status = pb_kvcache_select_top(scores, n, heads, n, counts, nan, indices, n, heads * n);
    MUST((status == PB_KVCACHE_OK) == (finite || nan == PB_KVCACHE_NAN_LOWEST));
    for (size_t head = 0; head < heads && status == PB_KVCACHE_OK; ++head) {
        const uint32_t *row = indices + head * n;
        const float *mine = scores + head * n;
        ascending(row, counts[head], n);
        /* Nothing that was left is better than the worst that was taken, or equal and to the left of it. */
        float worst = INFINITY;
        for (size_t i = 0; i < counts[head]; ++i) {
            const float score = isfinite(mine[row[i]]) ? mine[row[i]] : -INFINITY;
            worst = score < worst ? score : worst;
        }
        bool passed = false; /* one equal to the worst was left */
        for (size_t i = 0, next = 0; i < n && counts[head] > 0; ++i) {
            const float score = isfinite(mine[i]) ? mine[i] : -INFINITY;
            if (next < counts[head] && row[next] == i) {
                MUST(!(passed && score == worst));
                ++next;
            } else {
                MUST(score <= worst);
                passed = passed || score == worst;
            }
        }
    }
    /* Both at once */
    if (status == PB_KVCACHE_OK && n > 0 && kernel % 2 == 1) {
        const size_t protect = 1 + take(in, 1) % 40;
        pb_kvcache_select_params params
            = {.pooling = pooling, .kernel = kernel, .edge = edge, .nan = nan, .protect = protect};
        params.sinks = take(in, 1) % (n < 9 ? n : 9);
        float *weights = new_weights(in, heads, n, &params, false);
        uint32_t budgets[3];
        for (size_t head = 0; head < heads; ++head) {
            budgets[head] = (uint32_t)(protect + params.sinks + take(in, 2) % (n + 2));
        }
        must_be_from_scores(scores, heads, n + protect, &params, budgets, pooled, counts);
        free(weights);
    }
    free(scores);
    free(pooled);
    free(indices);
    free(counts);
}

static void fuzz_compact(input *in)
{
    const size_t heads = 1 + take(in, 1) % 3;
    const size_t n = 1 + take(in, 1) % 40;
    const size_t row = take(in, 1) % 9;
    const bool outermost = (take(in, 1) & 1) != 0;
    const size_t bytes = heads * n * row;
    unsigned char *data = malloc(bytes + 1);
    unsigned char *before = malloc(bytes + 1);
    uint32_t *indices = malloc(heads * n * sizeof *indices);
    uint32_t *counts = malloc(heads * sizeof *counts);
    for (size_t i = 0; i < bytes; ++i) {
        before[i] = data[i] = (unsigned char)(i * 131);
    }
    for (size_t head = 0; head < heads; ++head) {
        counts[head] = take(in, 1) % (uint32_t)(n + 1);
        uint32_t next = 0;
        for (size_t i = 0; i < counts[head]; ++i) {
            const uint32_t step = take(in, 1);
            next = step == 255 ? take(in, 4) : next + step % 3;
            indices[head * n + i] = next;
        }
    }
    const pb_kvcache_rows rows = {data, heads, n, row, (ptrdiff_t)(outermost ? row : n * row),
                                  (ptrdiff_t)(outermost ? heads * row : row)};
    size_t offsets[4] = {0};
    uint32_t *ragged = malloc(heads * n * sizeof *ragged);
    for (size_t head = 0; head < heads; ++head) {
        memcpy(ragged + offsets[head], indices + head * n, counts[head] * sizeof *ragged);
        offsets[head + 1] = offsets[head] + counts[head];
    }
    unsigned char *packed = malloc(offsets[heads] * row + 1);
    const pb_kvcache_status side_by_side
        = pb_kvcache_compact_ragged(&rows, ragged, offsets, packed, offsets[heads] * row);
    MUST(memcmp(data, before, bytes) == 0);
    const pb_kvcache_status status = pb_kvcache_compact(&rows, 0, heads, indices, n, counts);
    MUST(status == PB_KVCACHE_OK || memcmp(data, before, bytes) == 0);
    MUST(status == side_by_side);
    for (size_t head = 0; head < heads && status == PB_KVCACHE_OK; ++head) {
        for (size_t i = 0; i < counts[head]; ++i) {
            MUST(memcmp(packed + (offsets[head] + i) * row,
                        data + head * (size_t)rows.head_stride + i * (size_t)rows.row_stride, row)
                 == 0);
        }
    }
    free(packed);
    free(ragged);
    for (size_t head = 0; head < heads && status == PB_KVCACHE_OK; ++head) {
        ascending(indices + head * n, counts[head], n);
        for (size_t i = 0; i < counts[head]; ++i) {
            const size_t base = head * (size_t)rows.head_stride;
            MUST(memcmp(data + base + i * (size_t)rows.row_stride,
                        before + base + indices[head * n + i] * (size_t)rows.row_stride, row)
                 == 0);
        }
    }
    free(data);
    free(before);
    free(indices);
    free(counts);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    input in = {data, size};
    switch (take(&in, 1) % 3) {
    case 0: fuzz_select(&in); break;
    case 1: fuzz_scores(&in); break;
    default: fuzz_compact(&in); break;
    }
    return 0;
}
