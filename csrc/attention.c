/* The attention of one new token, reduced over the query heads of each group. */
#include "pb_kvcache/attention.h"

#include <float.h>
#include <string.h>

#include "bits.h"
#include "checks.h"
#include "lanes.h"

#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#endif

/* The workspace, all of it floats */
typedef struct scratch {
    float *staged;  /* num_caches rows of `most`: the weights, until no cache is refused any more */
    float *queries; /* of one cache: group * head_dim */
    float *key;     /* head_dim */
    float *logits;  /* group * most */
    float *exps;    /* most */
    size_t most;    /* the largest count */
    size_t bytes;   /* of all, with the slack to align them */
} scratch;

/* Where each part begins, in floats, and how large all are. Every part takes whole cache lines. */
static pb_kvcache_status lay_out(const pb_kvcache_decode_attention *attn, scratch *out, size_t offsets[5])
{
    const size_t line = PB_KVCACHE_PRIV_ALIGNMENT / sizeof(float);
    size_t most = 0;
    if (attn->num_caches == 0 || attn->group == 0 || attn->head_dim == 0) {
        return PB_KVCACHE_ERROR_HEADS;
    }
    if (attn->counts == NULL) {
        return PB_KVCACHE_ERROR_NULL;
    }
    if (!pb_kvcache_priv_aligned(attn->counts, sizeof *attn->counts)) {
        return PB_KVCACHE_ERROR_ALIGNMENT;
    }
    for (size_t cache = 0; cache < attn->num_caches; ++cache) {
        most = attn->counts[cache] > most ? attn->counts[cache] : most;
    }
    const size_t rows[5] = {attn->num_caches, attn->group, 1, attn->group, 1};
    const size_t widths[5] = {most, attn->head_dim, attn->head_dim, most, most};
    size_t floats = 0;
    for (size_t part = 0; part < 5; ++part) {
        size_t size;
        offsets[part] = floats;
        if (!pb_kvcache_priv_mul(rows[part], widths[part], &size) || !pb_kvcache_priv_add(size, line - 1, &size)
            || !pb_kvcache_priv_add(floats, size / line * line, &floats)) {
            return PB_KVCACHE_ERROR_TOO_LARGE;
        }
    }
    if (floats > (PTRDIFF_MAX - PB_KVCACHE_PRIV_ALIGNMENT) / sizeof(float)) {
        return PB_KVCACHE_ERROR_TOO_LARGE;
    }
    out->most = most;
    out->bytes = floats * sizeof(float) + PB_KVCACHE_PRIV_ALIGNMENT;
    return PB_KVCACHE_OK;
}

pb_kvcache_status pb_kvcache_decode_weights_workspace_size(const pb_kvcache_decode_attention *attn, size_t *size)
{
    scratch parts;
    size_t offsets[5];
    if (attn == NULL || size == NULL) {
        return PB_KVCACHE_ERROR_NULL;
    }
    const pb_kvcache_status status = lay_out(attn, &parts, offsets);
    if (status == PB_KVCACHE_OK) {
        *size = parts.bytes;
    }
    return status;
}

/* All rows of all caches lie within the keys. */
static bool keys_within(const pb_kvcache_decode_attention *attn)
{
    if (attn->key_capacity < attn->head_dim) {
        return false;
    }
    const uint64_t last = (attn->key_capacity - attn->head_dim) / attn->key_stride; /* the last row that fits */
    for (size_t cache = 0; cache < attn->num_caches; ++cache) {
        if (attn->counts[cache] > 0
            && (attn->offsets[cache] > last || attn->counts[cache] - 1u > last - attn->offsets[cache])) {
            return false;
        }
    }
    return true;
}

/* Everything but the values, and whether what is written overlaps what is read. `parts` has been laid out. */
static pb_kvcache_status arguments_ok(const pb_kvcache_decode_attention *attn, const scratch *parts,
                                      const void *workspace, size_t workspace_size, const float *weights, size_t stride,
                                      size_t capacity)
{
    const size_t size = attn->dtype == PB_KVCACHE_FLOAT32 ? 4 : 2;
    size_t query_bytes;
    size_t key_bytes;
    if (attn->queries == NULL || attn->keys == NULL || attn->offsets == NULL || workspace == NULL || weights == NULL) {
        return PB_KVCACHE_ERROR_NULL;
    }
    if ((attn->dtype != PB_KVCACHE_FLOAT32 && attn->dtype != PB_KVCACHE_FLOAT16 && attn->dtype != PB_KVCACHE_BFLOAT16)
        || !pb_kvcache_priv_reduce_ok(attn->reduce)) {
        return PB_KVCACHE_ERROR_OPTION;
    }
    if (!(attn->scale > 0.0f && attn->scale <= FLT_MAX) || !(attn->softcap >= 0.0f && attn->softcap <= FLT_MAX)) {
        return PB_KVCACHE_ERROR_SCALE;
    }
    if (!pb_kvcache_priv_aligned(attn->queries, size) || !pb_kvcache_priv_aligned(attn->keys, size)
        || !pb_kvcache_priv_aligned(attn->offsets, sizeof *attn->offsets)
        || !pb_kvcache_priv_aligned(attn->sinks, sizeof *attn->sinks)) {
        return PB_KVCACHE_ERROR_ALIGNMENT;
    }
    if (attn->key_stride < attn->head_dim) {
        return PB_KVCACHE_ERROR_STRIDE;
    }
    const size_t elements = attn->group * attn->head_dim; /* of a cache: the workspace holds as many floats */
    if (!pb_kvcache_priv_span_bytes(attn->num_caches, elements, elements, size, &query_bytes)
        || !pb_kvcache_priv_span_bytes(1, 0, attn->key_capacity, size, &key_bytes)) {
        return PB_KVCACHE_ERROR_TOO_LARGE;
    }
    if (!keys_within(attn)) {
        return PB_KVCACHE_ERROR_CAPACITY;
    }
    const pb_kvcache_status status =
        pb_kvcache_priv_rows_ok(weights, sizeof *weights, stride, 0, attn->num_caches, parts->most, capacity);
    if (status != PB_KVCACHE_OK) {
        return status;
    }
    if (workspace_size < parts->bytes) {
        return PB_KVCACHE_ERROR_WORKSPACE;
    }
    /* The capacity holds all rows, so that these bytes fit. */
    const size_t written = ((attn->num_caches - 1) * stride + parts->most) * sizeof *weights;
    const struct {
        const void *array;
        size_t bytes;
    } read[] = {{attn->queries, query_bytes},
                {attn->keys, key_bytes},
                {attn->offsets, attn->num_caches * sizeof *attn->offsets},
                {attn->counts, attn->num_caches * sizeof *attn->counts},
                {attn->sinks, attn->sinks == NULL ? 0 : attn->num_caches * attn->group * sizeof *attn->sinks},
                {attn, sizeof *attn}};
    bool overlap = pb_kvcache_priv_overlap(weights, written, workspace, parts->bytes);
    for (size_t i = 0; i < sizeof read / sizeof *read; ++i) {
        overlap = overlap || pb_kvcache_priv_overlap(weights, written, read[i].array, read[i].bytes)
                  || pb_kvcache_priv_overlap(workspace, parts->bytes, read[i].array, read[i].bytes);
    }
    return overlap ? PB_KVCACHE_ERROR_OVERLAP : PB_KVCACHE_OK;
}

/* softcap * tanh(logit / softcap) */
static float capped(float logit, float softcap)
{
    const float x = logit / softcap;
    const float e = pb_kvcache_priv_exp(-2.0f * float_of(bits_of(x) & ~SIGN));
    const float tanh = (1.0f - e) / (1.0f + e);
    return softcap * float_of(bits_of(tanh) | (bits_of(x) & SIGN));
}

/* One query head's logits to its attention, which joins `weights`. false where a logit is no number. */
static bool join_query(const pb_kvcache_priv_lanes *lanes, const pb_kvcache_decode_attention *attn, float *logits,
                       const float *sink, size_t n, bool first, float *exps, float *weights)
{
    float top;
    for (size_t i = 0; i < n; ++i) {
        logits[i] *= attn->scale;
    }
    if (!lanes->finite(logits, n) || (sink != NULL && !is_finite(*sink))) {
        return false;
    }
    if (attn->softcap > 0.0f) {
        for (size_t i = 0; i < n; ++i) {
            logits[i] = capped(logits[i], attn->softcap);
        }
    }
    (void)lanes->top[PB_KVCACHE_FLOAT32](logits, n, &top);
    if (sink != NULL && key_of(*sink) > key_of(top)) {
        top = *sink;
    }
    double sum = lanes->exps[PB_KVCACHE_FLOAT32](logits, n, 1.0f, top, exps, NULL);
    if (sink != NULL) {
        sum += (double)pb_kvcache_priv_exp(*sink - top);
    }
    const float factor = (float)(1.0 / sum);
    if (attn->reduce != PB_KVCACHE_REDUCE_MAX) {
        if (first) {
            memset(weights, 0, n * sizeof *weights);
        }
        lanes->add_scaled(exps, n, factor, weights);
        return true;
    }
    for (size_t i = 0; i < n; ++i) {
        const float p = exps[i] * factor;
        weights[i] = first || p > weights[i] ? p : weights[i];
    }
    return true;
}

/* The weights of one cache, to `weights`. false where a logit is no number. */
static bool cache_weights(const pb_kvcache_priv_lanes *lanes, const pb_kvcache_decode_attention *attn, size_t cache,
                          const scratch *parts, float *weights)
{
    const size_t size = attn->dtype == PB_KVCACHE_FLOAT32 ? 4 : 2;
    const size_t n = attn->counts[cache];
    if (n == 0) {
        return true;
    }
    const size_t elements = attn->group * attn->head_dim;
    const unsigned char *queries = (const unsigned char *)attn->queries + cache * elements * size;
    const unsigned char *keys
        = (const unsigned char *)attn->keys + (size_t)attn->offsets[cache] * attn->key_stride * size;
    lanes->convert[attn->dtype](queries, elements, parts->queries);
    lanes->dots[attn->dtype](keys, attn->key_stride, n, parts->queries, attn->group, attn->head_dim, parts->key,
                             parts->logits);
    for (size_t g = 0; g < attn->group; ++g) {
        const float *sink = attn->sinks == NULL ? NULL : attn->sinks + cache * attn->group + g;
        if (!join_query(lanes, attn, parts->logits + g * n, sink, n, g == 0, parts->exps, weights)) {
            return false;
        }
    }
    if (attn->reduce == PB_KVCACHE_REDUCE_MEAN) {
        const float divisor = (float)attn->group;
        for (size_t i = 0; i < n; ++i) {
            weights[i] /= divisor;
        }
    }
    return true;
}

pb_kvcache_status pb_kvcache_decode_weights(const pb_kvcache_decode_attention *attn, void *workspace,
                                            size_t workspace_size, float *weights, size_t stride, size_t capacity,
                                            uint32_t *cache)
{
    scratch parts;
    size_t offsets[5];
    if (attn == NULL) {
        return PB_KVCACHE_ERROR_NULL;
    }
    pb_kvcache_status status = lay_out(attn, &parts, offsets);
    if (status == PB_KVCACHE_OK) {
        status = arguments_ok(attn, &parts, workspace, workspace_size, weights, stride, capacity);
    }
    if (status != PB_KVCACHE_OK) {
        return status;
    }
    float *const floats = pb_kvcache_priv_align(workspace);
    parts.staged = floats + offsets[0];
    parts.queries = floats + offsets[1];
    parts.key = floats + offsets[2];
    parts.logits = floats + offsets[3];
    parts.exps = floats + offsets[4];
    const pb_kvcache_priv_lanes *lanes = pb_kvcache_priv_lanes_best();
    size_t done = 0;
    while (done < attn->num_caches && cache_weights(lanes, attn, done, &parts, parts.staged + done * parts.most)) {
        ++done;
    }
    if (cache != NULL) {
        *cache = (uint32_t)done;
    }
    if (done < attn->num_caches) {
        return PB_KVCACHE_ERROR_LOGIT;
    }
    for (size_t i = 0; i < attn->num_caches; ++i) {
        memcpy(weights + i * stride, parts.staged + i * parts.most, attn->counts[i] * sizeof *weights);
    }
    return PB_KVCACHE_OK;
}
