#include <string.h>

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

static const pb_kvcache_priv_rules oldest_rules = {.kind = PB_KVCACHE_PRIV_OLDEST, .choose = choose_oldest};

static const pb_kvcache_priv_rules h2o_rules = {.kind = PB_KVCACHE_PRIV_H2O,
                                                .observe = h2o_observe,
                                                .choose = choose_lowest,
                                                .forget = forget_scores,
                                                .join = join_with_zero,
                                                .score = score};

static const pb_kvcache_priv_rules tova_rules = {.kind = PB_KVCACHE_PRIV_TOVA,
                                                 .observe = tova_observe,
                                                 .choose = choose_lowest,
                                                 .forget = forget_scores,
                                                 .join = tova_join,
                                                 .clear = tova_clear,
                                                 .score = score};

static const pb_kvcache_priv_rules scissorhands_rules = {.kind = PB_KVCACHE_PRIV_SCISSORHANDS,
                                                         .observe = scissorhands_observe,
                                                         .choose = choose_lowest,
                                                         .forget = forget_scores,
                                                         .join = join_with_zero,
                                                         .score = score};

/* ---- What they are made from. ---- */

/* A params struct is a row of uint32_t: the budget, a second parameter or none, `spare` and `max_rollback`. */
#define MOST_PARAMS 4

typedef struct baseline {
    const pb_kvcache_priv_rules *rules;
    enum { BUDGET_ALONE, RECENT_WINDOW, SINKS } second; /* what follows the budget in the params */
    uint32_t defaults[MOST_PARAMS];
} baseline;

static pb_kvcache_status shape_of(const baseline *policy, const void *params, pb_kvcache_priv_shape *shape)
{
    uint32_t values[MOST_PARAMS] = {0};
    const size_t count = policy->second == BUDGET_ALONE ? MOST_PARAMS - 1 : MOST_PARAMS;
    memcpy(values, params == NULL ? policy->defaults : params, count * sizeof values[0]);
    const uint32_t budget = values[0];
    const uint32_t spare = values[count - 2];
    const uint32_t recent_window = policy->second == RECENT_WINDOW ? values[1] : 0;
    const uint32_t sinks = policy->second == SINKS ? values[1] : 0;
    if (budget == 0) {
        return PB_KVCACHE_ERROR_BUDGET;
    }
    if (recent_window >= budget) {
        return PB_KVCACHE_ERROR_RECENT_WINDOW;
    }
    if (sinks >= budget) {
        return PB_KVCACHE_ERROR_SINKS;
    }
    const uint64_t capacity = (uint64_t)budget + 1 + spare;
    if (capacity > UINT32_MAX) {
        return PB_KVCACHE_ERROR_TOO_LARGE;
    }
    *shape = (pb_kvcache_priv_shape){.rules = policy->rules,
                                     .effective = budget,
                                     .capacity = (uint32_t)capacity,
                                     .recent_window = recent_window,
                                     .sinks = sinks,
                                     .max_rollback = values[count - 1],
                                     .doubles = policy->rules->score == NULL ? 0 : 1};
    return pb_kvcache_priv_set_bytes(shape);
}

static pb_kvcache *create(const baseline *policy, const void *params, const pb_allocator *allocator)
{
    pb_kvcache_priv_shape shape;
    return shape_of(policy, params, &shape) == PB_KVCACHE_OK ? pb_kvcache_priv_new(&shape, allocator) : NULL;
}

/* The public names of one baseline, its check and its vtable. A new one needs its params, its rules and a line. */
#define BASELINE(name, rules, second, ...)                                                                             \
    static const baseline name = {rules, second, __VA_ARGS__};                                                         \
    static pb_kvcache *name##_create(const void *params, const pb_allocator *allocator, pb_rng *rng)                   \
    {                                                                                                                  \
        (void)rng;                                                                                                     \
        return create(&name, params, allocator);                                                                       \
    }                                                                                                                  \
    pb_kvcache_status pb_kvcache_##name##_check(const pb_kvcache_##name##_params *params)                              \
    {                                                                                                                  \
        pb_kvcache_priv_shape shape;                                                                                   \
        return shape_of(&name, params, &shape);                                                                        \
    }                                                                                                                  \
    const pb_kvcache_vtable pb_kvcache_##name = {name##_create, pb_kvcache_priv_on_decode_step, pb_kvcache_priv_evict, \
                                                 pb_kvcache_priv_memory_bytes, pb_kvcache_priv_destroy}

BASELINE(sliding_window, &oldest_rules, BUDGET_ALONE, PB_KVCACHE_SLIDING_WINDOW_PARAMS_DEFAULT);
BASELINE(streaming_llm, &oldest_rules, SINKS, PB_KVCACHE_STREAMING_LLM_PARAMS_DEFAULT);
BASELINE(h2o, &h2o_rules, RECENT_WINDOW, PB_KVCACHE_H2O_PARAMS_DEFAULT);
BASELINE(tova, &tova_rules, BUDGET_ALONE, PB_KVCACHE_TOVA_PARAMS_DEFAULT);
BASELINE(scissorhands, &scissorhands_rules, RECENT_WINDOW, PB_KVCACHE_SCISSORHANDS_PARAMS_DEFAULT);
