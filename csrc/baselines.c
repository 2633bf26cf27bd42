#include "internal.h"
#include "kernels.h"

/* ---- What the policies do: the oldest go, or the lowest scores. ---- */

static void choose_oldest(pb_kvcache *policy, size_t first, size_t most, size_t count, uint32_t *chosen)
{
    (void)policy;
    (void)most;
    for (size_t i = 0; i < count; ++i) {
        chosen[i] = (uint32_t)(first + i);
    }
}

static void choose_lowest(pb_kvcache *policy, size_t first, size_t most, size_t count, uint32_t *chosen)
{
    (void)first; /* no policy with scores has sinks: the candidates start at index 0 */
    pb_kvcache_priv_choose_lowest(policy->scores, most, count, chosen);
}

static void forget_scores(pb_kvcache *policy, const uint32_t *chosen, size_t count)
{
    pb_kvcache_priv_close_gaps(policy->scores, policy->kept_count, sizeof(double), chosen, count);
}

static void join_with_zero(pb_kvcache *policy)
{
    policy->scores[policy->kept_count] = 0.0;
}

static double score(const pb_kvcache *policy, size_t index)
{
    return policy->scores[index];
}

static void h2o_observe(pb_kvcache *policy, const float *attn)
{
    double *sums = policy->scores;
    for (size_t i = 0; i < policy->kept_count; ++i) {
        sums[i] += (double)attn[i];
    }
}

static void tova_observe(pb_kvcache *policy, const float *attn)
{
    double *latest = policy->scores;
    for (size_t i = 0; i < policy->kept_count; ++i) {
        latest[i] = (double)attn[i];
    }
    policy->unobserved = 0;
}

/* Only what has been observed is a candidate, so an eviction leaves `unobserved` as it is. */
static void tova_join(pb_kvcache *policy)
{
    join_with_zero(policy);
    ++policy->unobserved;
}

static void tova_clear(pb_kvcache *policy)
{
    policy->unobserved = 0;
}

static void scissorhands_observe(pb_kvcache *policy, const float *attn)
{
    double *votes = policy->scores; /* exact up to 2^53 steps */
    const double even = 1.0 / (double)policy->kept_count;
    for (size_t i = 0; i < policy->kept_count; ++i) {
        votes[i] += (double)attn[i] > even ? 1.0 : 0.0;
    }
}

static const pb_kvcache_priv_rules oldest_rules = {.choose = choose_oldest};

static const pb_kvcache_priv_rules h2o_rules
    = {.observe = h2o_observe, .choose = choose_lowest, .forget = forget_scores, .join = join_with_zero, .score = score};

static const pb_kvcache_priv_rules tova_rules = {.observe = tova_observe,
                                                 .choose = choose_lowest,
                                                 .forget = forget_scores,
                                                 .join = tova_join,
                                                 .clear = tova_clear,
                                                 .score = score};

static const pb_kvcache_priv_rules scissorhands_rules = {.observe = scissorhands_observe,
                                                         .choose = choose_lowest,
                                                         .forget = forget_scores,
                                                         .join = join_with_zero,
                                                         .score = score};

/* ---- What they are made from. ---- */

static pb_kvcache_status shape_from(const pb_kvcache_priv_rules *rules, uint32_t budget, uint32_t recent_window,
                                    uint32_t sinks, pb_kvcache_priv_shape *shape)
{
    if (budget == 0) {
        return PB_KVCACHE_ERROR_BUDGET;
    }
    if (recent_window >= budget) {
        return PB_KVCACHE_ERROR_RECENT_WINDOW;
    }
    if (sinks >= budget) {
        return PB_KVCACHE_ERROR_SINKS;
    }
    if (budget == UINT32_MAX) {
        return PB_KVCACHE_ERROR_TOO_LARGE;
    }
    *shape = (pb_kvcache_priv_shape){.rules = rules,
                                     .effective = budget,
                                     .capacity = budget + 1,
                                     .recent_window = recent_window,
                                     .sinks = sinks,
                                     .doubles = rules->score == NULL ? 0 : 1};
    return pb_kvcache_priv_set_bytes(shape);
}

static pb_kvcache_status sliding_window_shape(const pb_kvcache_sliding_window_params *params,
                                              pb_kvcache_priv_shape *shape)
{
    static const pb_kvcache_sliding_window_params defaults = PB_KVCACHE_SLIDING_WINDOW_PARAMS_DEFAULT;
    const pb_kvcache_sliding_window_params *p = params == NULL ? &defaults : params;
    return shape_from(&oldest_rules, p->budget, 0, 0, shape);
}

static pb_kvcache_status streaming_llm_shape(const pb_kvcache_streaming_llm_params *params,
                                             pb_kvcache_priv_shape *shape)
{
    static const pb_kvcache_streaming_llm_params defaults = PB_KVCACHE_STREAMING_LLM_PARAMS_DEFAULT;
    const pb_kvcache_streaming_llm_params *p = params == NULL ? &defaults : params;
    return shape_from(&oldest_rules, p->budget, 0, p->sinks, shape);
}

static pb_kvcache_status h2o_shape(const pb_kvcache_h2o_params *params, pb_kvcache_priv_shape *shape)
{
    static const pb_kvcache_h2o_params defaults = PB_KVCACHE_H2O_PARAMS_DEFAULT;
    const pb_kvcache_h2o_params *p = params == NULL ? &defaults : params;
    return shape_from(&h2o_rules, p->budget, p->recent_window, 0, shape);
}

static pb_kvcache_status tova_shape(const pb_kvcache_tova_params *params, pb_kvcache_priv_shape *shape)
{
    static const pb_kvcache_tova_params defaults = PB_KVCACHE_TOVA_PARAMS_DEFAULT;
    const pb_kvcache_tova_params *p = params == NULL ? &defaults : params;
    return shape_from(&tova_rules, p->budget, 0, 0, shape);
}

static pb_kvcache_status scissorhands_shape(const pb_kvcache_scissorhands_params *params, pb_kvcache_priv_shape *shape)
{
    static const pb_kvcache_scissorhands_params defaults = PB_KVCACHE_SCISSORHANDS_PARAMS_DEFAULT;
    const pb_kvcache_scissorhands_params *p = params == NULL ? &defaults : params;
    return shape_from(&scissorhands_rules, p->budget, p->recent_window, 0, shape);
}

pb_kvcache_status pb_kvcache_sliding_window_check(const pb_kvcache_sliding_window_params *params)
{
    pb_kvcache_priv_shape shape;
    return sliding_window_shape(params, &shape);
}

pb_kvcache_status pb_kvcache_streaming_llm_check(const pb_kvcache_streaming_llm_params *params)
{
    pb_kvcache_priv_shape shape;
    return streaming_llm_shape(params, &shape);
}

pb_kvcache_status pb_kvcache_h2o_check(const pb_kvcache_h2o_params *params)
{
    pb_kvcache_priv_shape shape;
    return h2o_shape(params, &shape);
}

pb_kvcache_status pb_kvcache_tova_check(const pb_kvcache_tova_params *params)
{
    pb_kvcache_priv_shape shape;
    return tova_shape(params, &shape);
}

pb_kvcache_status pb_kvcache_scissorhands_check(const pb_kvcache_scissorhands_params *params)
{
    pb_kvcache_priv_shape shape;
    return scissorhands_shape(params, &shape);
}

static pb_kvcache *sliding_window_create(const void *params, const pb_allocator *allocator, pb_rng *rng)
{
    pb_kvcache_priv_shape shape;
    (void)rng;
    return sliding_window_shape(params, &shape) == PB_KVCACHE_OK ? pb_kvcache_priv_new(&shape, allocator) : NULL;
}

static pb_kvcache *streaming_llm_create(const void *params, const pb_allocator *allocator, pb_rng *rng)
{
    pb_kvcache_priv_shape shape;
    (void)rng;
    return streaming_llm_shape(params, &shape) == PB_KVCACHE_OK ? pb_kvcache_priv_new(&shape, allocator) : NULL;
}

static pb_kvcache *h2o_create(const void *params, const pb_allocator *allocator, pb_rng *rng)
{
    pb_kvcache_priv_shape shape;
    (void)rng;
    return h2o_shape(params, &shape) == PB_KVCACHE_OK ? pb_kvcache_priv_new(&shape, allocator) : NULL;
}

static pb_kvcache *tova_create(const void *params, const pb_allocator *allocator, pb_rng *rng)
{
    pb_kvcache_priv_shape shape;
    (void)rng;
    return tova_shape(params, &shape) == PB_KVCACHE_OK ? pb_kvcache_priv_new(&shape, allocator) : NULL;
}

static pb_kvcache *scissorhands_create(const void *params, const pb_allocator *allocator, pb_rng *rng)
{
    pb_kvcache_priv_shape shape;
    (void)rng;
    return scissorhands_shape(params, &shape) == PB_KVCACHE_OK ? pb_kvcache_priv_new(&shape, allocator) : NULL;
}

const pb_kvcache_vtable pb_kvcache_sliding_window
    = {sliding_window_create, pb_kvcache_priv_on_decode_step, pb_kvcache_priv_evict, pb_kvcache_priv_memory_bytes,
       pb_kvcache_priv_destroy};

const pb_kvcache_vtable pb_kvcache_streaming_llm
    = {streaming_llm_create, pb_kvcache_priv_on_decode_step, pb_kvcache_priv_evict, pb_kvcache_priv_memory_bytes,
       pb_kvcache_priv_destroy};

const pb_kvcache_vtable pb_kvcache_h2o = {h2o_create, pb_kvcache_priv_on_decode_step, pb_kvcache_priv_evict,
                                          pb_kvcache_priv_memory_bytes, pb_kvcache_priv_destroy};

const pb_kvcache_vtable pb_kvcache_tova = {tova_create, pb_kvcache_priv_on_decode_step, pb_kvcache_priv_evict,
                                           pb_kvcache_priv_memory_bytes, pb_kvcache_priv_destroy};

const pb_kvcache_vtable pb_kvcache_scissorhands
    = {scissorhands_create, pb_kvcache_priv_on_decode_step, pb_kvcache_priv_evict, pb_kvcache_priv_memory_bytes,
       pb_kvcache_priv_destroy};
