/* Kinds "select" (attention of a window, what each KV head keeps) and "compact" (rows moved to the front). */
#include <stdlib.h>
#include <string.h>

#include "vectors.h"

static int choice(const json *test, const char *key, const char *const *names)
{
    const char *name = json_string(json_need(test, key));
    int i = 0;
    while (names[i] != NULL && strcmp(names[i], name) != 0) {
        ++i;
    }
    return i;
}

/* Has attn `window` rows of `n` for each head? */
static bool is_box(const json *attn, size_t window, size_t n)
{
    bool good = true;
    for (const json *head = attn->child; head != NULL; head = head->next) {
        good = good && head->length == window;
        for (const json *row = head->child; row != NULL; row = row->next) {
            good = good && row->length == n;
        }
    }
    return good;
}

/* The elements of attn, one after the other: floats, or the bits of 16-bit ones. NULL, and why, where it is no box. */
static void *elements(const json *attn, bool wide, size_t *window, size_t *n)
{
    const json *first = attn->child;
    *window = first != NULL ? first->length : 0;
    *n = *window > 0 ? first->child->length : 0;
    if (!is_box(attn, *window, *n)) {
        vectors_fail("attn is ragged");
        return NULL;
    }
    char *data = vectors_alloc(attn->length * *window * *n, sizeof(float));
    size_t at = 0;
    for (const json *head = first; head != NULL; head = head->next) {
        for (const json *row = head->child; row != NULL; row = row->next) {
            size_t count;
            if (wide) {
                float *floats = json_floats(row, &count);
                memcpy(data + at, floats, count * sizeof *floats);
                at += count * sizeof *floats;
                free(floats);
            } else {
                uint32_t *bits = json_u32s(row, &count);
                for (size_t i = 0; i < count; ++i, at += sizeof(uint16_t)) {
                    const uint16_t half = (uint16_t)bits[i];
                    memcpy(data + at, &half, sizeof half);
                }
                free(bits);
            }
        }
    }
    return data;
}

/* Are the scores, to the bit, those of the case? */
static bool same_scores(const json *rows, const float *scores, size_t heads, size_t scored)
{
    bool good = rows->length == heads;
    for (const json *row = good ? rows->child : NULL; row != NULL; row = row->next, scores += scored) {
        size_t count;
        float *want = json_floats(row, &count);
        good = good && count == scored && memcmp(want, scores, scored * sizeof *want) == 0;
        free(want);
    }
    return good;
}

static bool same_indices(const json *rows, const uint32_t *indices, size_t heads, size_t stride)
{
    bool good = rows->length == heads;
    for (const json *row = good ? rows->child : NULL; row != NULL; row = row->next, indices += stride) {
        size_t count;
        uint32_t *want = json_u32s(row, &count);
        good = good && count <= stride && (count == 0 || memcmp(want, indices, count * sizeof *want) == 0);
        good = good && (count == stride || indices[count] == UINT32_MAX); /* and no more than that was written */
        free(want);
    }
    return good;
}

/* The same positions one head behind the other, in an array that has room for no more. */
static bool same_ragged(const json *test, const pb_kvcache_attention *attn, const pb_kvcache_select_params *params,
                        const uint32_t *budgets, size_t heads, void *workspace, size_t size)
{
    size_t *offsets = vectors_alloc(heads + 1, sizeof *offsets);
    size_t total = 0;
    for (size_t head = 0; head < heads; ++head) {
        total += budgets[head] < attn->n ? budgets[head] : attn->n;
    }
    uint32_t *indices = vectors_alloc(total, sizeof *indices);
    const pb_kvcache_status status
        = pb_kvcache_select_ragged(attn, params, budgets, workspace, size, indices, total, offsets);
    bool good = status == PB_KVCACHE_OK && offsets[0] == 0 && offsets[heads] == total;
    const json *row = json_need(test, "kept")->child;
    for (size_t head = 0; good && head < heads; ++head, row = row->next) {
        size_t count;
        uint32_t *want = json_u32s(row, &count);
        good = count == offsets[head + 1] - offsets[head]
               && memcmp(want, indices + offsets[head], count * sizeof *want) == 0;
        free(want);
    }
    free(indices);
    free(offsets);
    return good || vectors_fail("ragged: kept differs, status %d", (int)status);
}

/* Rows of n weights, one for each KV head. NULL where there are none, or where they are no such rows, and then why. */
static float *weights_of(const json *rows, size_t heads, size_t n)
{
    if (rows == NULL) {
        return NULL;
    }
    float *weights = vectors_alloc(heads * n, sizeof *weights);
    size_t head = 0;
    for (const json *row = rows->child; row != NULL; row = row->next, ++head) {
        size_t count;
        float *floats = json_floats(row, &count);
        if (head >= heads || count != n) {
            vectors_fail("weights are not a row of n for each KV head");
        } else {
            memcpy(weights + head * n, floats, n * sizeof *weights);
        }
        free(floats);
    }
    return weights;
}

/* From the scores the same positions are kept. */
static bool same_from_scores(const json *test, const float *scores, const pb_kvcache_select_params *params,
                             const uint32_t *budgets, size_t heads, size_t n)
{
    size_t size = 0;
    uint32_t *indices = vectors_alloc(heads * n, sizeof *indices);
    memset(indices, 0xFF, heads * n * sizeof *indices);
    pb_kvcache_status status = pb_kvcache_select_from_scores_workspace_size(params, n, &size);
    void *workspace = vectors_alloc(size, 1);
    if (status == PB_KVCACHE_OK) {
        status = pb_kvcache_select_from_scores(scores, n - params->protect, heads, n, params, budgets, workspace, size,
                                               indices, n, heads * n);
    }
    const bool good = (status == PB_KVCACHE_OK && same_indices(json_need(test, "kept"), indices, heads, n))
                      || vectors_fail("from scores: kept differs, status %d", (int)status);
    free(workspace);
    free(indices);
    return good;
}

bool vectors_select(const json *test)
{
    static const char *const dtypes[] = {"float32", "float16", "bfloat16", NULL};
    static const char *const reduces[] = {"mean", "max", "sum", NULL};
    static const char *const poolings[] = {"max", "avg", NULL};
    static const char *const edges[] = {"count", "kernel", NULL};
    static const char *const nans[] = {"raise", "lowest", NULL};
    size_t window;
    size_t n;
    size_t heads;
    const json *attn_json = json_need(test, "attn");
    const int dtype = choice(test, "dtype", dtypes);
    void *data = elements(attn_json, dtype == 0, &window, &n);
    if (data == NULL) {
        return false;
    }
    uint32_t *budgets = json_u32s(json_need(test, "budgets"), &heads);
    const pb_kvcache_attention attn = {.data = data,
                                       .dtype = (pb_kvcache_dtype)dtype,
                                       .logits = json_need(test, "logits")->type == JSON_TRUE,
                                       .scale = (float)json_double(json_need(test, "scale")),
                                       .num_q_heads = attn_json->length,
                                       .num_kv_heads = json_u32(json_need(test, "kv_heads")),
                                       .window = window,
                                       .n = n,
                                       .head_stride = (ptrdiff_t)(window * n),
                                       .row_stride = (ptrdiff_t)n};
    const json *protect = json_get(test, "protect");
    const json *sinks = json_get(test, "sinks");
    float *weights = weights_of(json_get(test, "weights"), heads, n);
    const pb_kvcache_select_params params = {.reduce = (pb_kvcache_reduce)choice(test, "reduce", reduces),
                                             .pooling = (pb_kvcache_pooling)choice(test, "pooling", poolings),
                                             .kernel = json_u32(json_need(test, "kernel")),
                                             .edge = (pb_kvcache_edge)choice(test, "edge", edges),
                                             .nan = (pb_kvcache_nan)choice(test, "nan", nans),
                                             .protect = protect == NULL ? window : json_u32(protect),
                                             .sinks = sinks == NULL ? 0 : json_u32(sinks),
                                             .weights = weights,
                                             .weights_stride = n};
    const pb_kvcache_status want = vectors_status(json_get(test, "status"));
    const size_t scored = n > params.protect ? n - params.protect : 0;
    size_t size = 0;
    uint32_t *indices = vectors_alloc(heads * n, sizeof *indices);
    float *scores = vectors_alloc(heads * scored, sizeof *scores);
    memset(indices, 0xFF, heads * n * sizeof *indices);
    pb_kvcache_status status = pb_kvcache_select_workspace_size(&attn, &params, 0, heads, &size);
    void *workspace = vectors_alloc(size, 1);
    if (status == PB_KVCACHE_OK) {
        status = pb_kvcache_select(&attn, &params, budgets, 0, heads, workspace, size, indices, n, heads * n);
    }
    bool good = status == want || vectors_fail("status %d, expected %d", (int)status, (int)want);
    if (good && want == PB_KVCACHE_OK) {
        good = same_indices(json_need(test, "kept"), indices, heads, n) || vectors_fail("kept differs");
        good = good && same_ragged(test, &attn, &params, budgets, heads, workspace, size);
        status = pb_kvcache_window_scores(&attn, params.reduce, params.nan, params.protect, 0, heads, workspace, size,
                                          scores, scored, heads * scored);
        good = good
               && ((status == PB_KVCACHE_OK && same_scores(json_need(test, "scores"), scores, heads, scored))
                   || vectors_fail("scores differ, status %d", (int)status));
        good = good && same_from_scores(test, scores, &params, budgets, heads, n);
    }
    free(workspace);
    free(scores);
    free(indices);
    free(budgets);
    free(weights);
    free(data);
    return good;
}

/* The rows of all heads, one behind the other, into an array that has room for no more: the fronts of the case. */
static bool ragged_compact(const json *test, const pb_kvcache_rows *rows, const uint32_t *indices,
                           const uint32_t *counts, pb_kvcache_status want)
{
    size_t *offsets = vectors_alloc(rows->num_heads + 1, sizeof *offsets);
    uint32_t *ragged = vectors_alloc(rows->num_heads * rows->n, sizeof *ragged);
    offsets[0] = 0;
    for (size_t head = 0; head < rows->num_heads; ++head) {
        memcpy(ragged + offsets[head], indices + head * rows->n, counts[head] * sizeof *ragged);
        offsets[head + 1] = offsets[head] + counts[head];
    }
    const size_t bytes = offsets[rows->num_heads] * rows->row_bytes;
    unsigned char *packed = vectors_alloc(bytes, 1);
    const pb_kvcache_status status = pb_kvcache_compact_ragged(rows, ragged, offsets, packed, bytes);
    bool good = status == want;
    size_t at = 0;
    const json *fronts = want == PB_KVCACHE_OK ? json_need(test, "front")->child : NULL;
    for (const json *front = fronts; front != NULL; front = front->next) {
        for (const json *one = front->child; one != NULL; one = one->next) {
            for (const json *byte = one->child; byte != NULL; byte = byte->next, ++at) {
                good = good && at < bytes && packed[at] == json_u32(byte);
            }
        }
    }
    free(packed);
    free(ragged);
    free(offsets);
    return good || vectors_fail("ragged: packed rows differ, status %d", (int)status);
}

bool vectors_compact(const json *test)
{
    const size_t heads = json_u32(json_need(test, "heads"));
    const size_t n = json_u32(json_need(test, "n"));
    const size_t row = json_u32(json_need(test, "row_bytes"));
    const pb_kvcache_status want = vectors_status(json_get(test, "status"));
    unsigned char *data = vectors_alloc(heads * n * row, 1);
    unsigned char *before = vectors_alloc(heads * n * row, 1);
    uint32_t *indices = vectors_alloc(heads * n, sizeof *indices);
    uint32_t *counts = vectors_alloc(heads, sizeof *counts);
    for (size_t i = 0; i < heads * n * row; ++i) {
        before[i] = data[i] = (unsigned char)(31 * (i / (n * row)) + 7 * (i / row % n) + i % row);
    }
    size_t head = 0;
    bool good = json_need(test, "indices")->length == heads || vectors_fail("not a list of indices for each head");
    for (const json *kept = json_need(test, "indices")->child; good && kept != NULL; kept = kept->next, ++head) {
        size_t count;
        uint32_t *listed = json_u32s(kept, &count);
        good = count <= n || vectors_fail("%zu indices of %zu rows", count, n);
        memcpy(indices + head * n, listed, (good ? count : 0) * sizeof *listed);
        counts[head] = (uint32_t)count;
        free(listed);
    }
    const pb_kvcache_rows rows = {data, heads, n, row, (ptrdiff_t)(n * row), (ptrdiff_t)row};
    good = good && ragged_compact(test, &rows, indices, counts, want);
    const pb_kvcache_status status = good ? pb_kvcache_compact(&rows, 0, heads, indices, n, counts) : want;
    good = good && (status == want || vectors_fail("status %d, expected %d", (int)status, (int)want));
    if (good && want != PB_KVCACHE_OK) {
        good = memcmp(data, before, heads * n * row) == 0 || vectors_fail("refused, but moved");
    } else if (good) {
        size_t at = 0;
        for (const json *front = json_need(test, "front")->child; front != NULL; front = front->next, at += n * row) {
            size_t to = at;
            for (const json *one = front->child; one != NULL; one = one->next) {
                for (const json *byte = one->child; byte != NULL; byte = byte->next, ++to) {
                    good = good && to < at + n * row && at < heads * n * row && data[to] == json_u32(byte);
                }
            }
        }
        good = good || vectors_fail("front differs");
    }
    free(data);
    free(before);
    free(indices);
    free(counts);
    return good;
}
