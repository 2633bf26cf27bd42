/* Kinds "policy" (calls on one cache, with what each must answer) and "refusal" (parameters that creation refuses). */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "vectors.h"

/* Every parameter struct is a row of uint32_t. */
#define MOST_PARAMS 9

typedef struct policy {
    const char *name;
    const pb_kvcache_vtable *vtable;
    const char *params[MOST_PARAMS + 1];
    pb_kvcache_status (*check)(const uint32_t *params);
} policy;

/* Every policy, and its parameters in the order of its struct. */
#define OF_RING "recent_window", "obs_window", "pool_kernel"
#define POLICIES(POLICY)                                                                                               \
    POLICY(snapkv, "budget", OF_RING)                                                                                  \
    POLICY(pyramidkv, "budget", "layer", "num_layers", "pyramid_ratio", OF_RING)                                       \
    POLICY(sliding_window, "budget")                                                                                   \
    POLICY(streaming_llm, "budget", "sinks")                                                                           \
    POLICY(h2o, "budget", "recent_window")                                                                             \
    POLICY(tova, "budget")                                                                                             \
    POLICY(scissorhands, "budget", "recent_window")

/* The last parameters of every struct. A file names them where they are not 0. */
#define OF_ALL "spare", "max_rollback"

/* A check function that takes the row, and an entry of the table. */
#define CHECK_OF(name, ...)                                                                                            \
    static pb_kvcache_status check_##name(const uint32_t *values)                                                      \
    {                                                                                                                  \
        pb_kvcache_##name##_params params;                                                                             \
        memcpy(&params, values, sizeof params);                                                                        \
        return pb_kvcache_##name##_check(&params);                                                                     \
    }
#define ENTRY_OF(name, ...) {#name, &pb_kvcache_##name, {__VA_ARGS__, OF_ALL}, check_##name},

POLICIES(CHECK_OF)

static const policy policies[] = {POLICIES(ENTRY_OF)};

static const policy *find(const json *test, uint32_t *params)
{
    const char *name = json_string(json_need(test, "policy"));
    for (size_t i = 0; i < sizeof policies / sizeof policies[0]; ++i) {
        if (strcmp(name, policies[i].name) == 0) {
            for (size_t p = 0; policies[i].params[p] != NULL; ++p) {
                const json *value = json_get(json_need(test, "params"), policies[i].params[p]);
                params[p] = json_is_null(value) ? 0 : json_u32(value);
            }
            return &policies[i];
        }
    }
    return NULL;
}

static bool same(const uint32_t *a, size_t a_count, const uint32_t *b, size_t b_count)
{
    return a_count == b_count && (a_count == 0 || memcmp(a, b, a_count * sizeof *a) == 0);
}

static bool step(const pb_kvcache_vtable *vtable, pb_kvcache *cache, const json *call)
{
    const json *weights = json_get(call, "attn");
    size_t count = 0;
    float *attn = json_is_null(weights) ? NULL : json_floats(weights, &count);
    const pb_kvcache_status want = vectors_status(json_get(call, "status"));
    const pb_kvcache_status status = vtable->on_decode_step(cache, json_u32(json_need(call, "pos")), attn, count);
    free(attn);
    return status == want || vectors_fail("status %d, expected %d", (int)status, (int)want);
}

static bool evict(const pb_kvcache_vtable *vtable, pb_kvcache *cache, const json *call)
{
    const json *asked = json_get(call, "budget");
    const uint32_t budget = json_is_null(asked) ? UINT32_MAX : json_u32(asked);
    size_t want_count;
    uint32_t *want = json_u32s(json_need(call, "victims"), &want_count);
    const size_t count = pb_kvcache_evict_count(cache, budget);
    uint32_t *victims = vectors_alloc(count + 1, sizeof *victims);
    bool good = count == 0 || vtable->evict(cache, budget, victims, count - 1) == 0; /* too small: nothing happens */
    const size_t got = vtable->evict(cache, budget, victims, count);
    good = good && got == count && same(victims, got, want, want_count);
    if (!good) {
        vectors_fail("%zu victims, the first %" PRIu32, got, got > 0 ? victims[0] : 0);
    }
    free(victims);
    free(want);
    return good;
}

static bool evict_rows(pb_kvcache *cache, const json *call)
{
    const json *asked = json_get(call, "budget");
    const uint32_t budget = json_is_null(asked) ? UINT32_MAX : json_u32(asked);
    const uint32_t multiple_of = json_u32(json_need(call, "multiple_of"));
    const bool kept = strcmp(json_string(json_need(call, "which")), "kept") == 0;
    const pb_kvcache_row_set which = kept ? PB_KVCACHE_ROWS_KEPT : PB_KVCACHE_ROWS_VICTIMS;
    const pb_kvcache_status want = vectors_status(json_get(call, "status"));
    const size_t before = pb_kvcache_kept_count(cache);
    const size_t count = pb_kvcache_evict_rows_count(cache, budget, multiple_of);
    const size_t told = kept ? before - count : count;
    uint32_t *victims = vectors_alloc(count + 1, sizeof *victims);
    uint32_t *rows = vectors_alloc(told + 1, sizeof *rows);
    victims[count] = 77;
    rows[told] = 78;
    /* Too small: nothing happens. */
    bool good = want != PB_KVCACHE_OK || told == 0
                || pb_kvcache_evict_rows(cache, budget, multiple_of, which, victims, count, rows, told - 1)
                       == PB_KVCACHE_ERROR_CAPACITY;
    good = good && (want != PB_KVCACHE_OK || count == 0
                    || pb_kvcache_evict_rows(cache, budget, multiple_of, which, victims, count - 1, rows, told)
                           == PB_KVCACHE_ERROR_CAPACITY);
    good = good && pb_kvcache_kept_count(cache) == before;
    good = good && pb_kvcache_evict_rows(cache, budget, multiple_of, which, victims, count, rows, told) == want;
    good = good && victims[count] == 77 && rows[told] == 78;
    if (good && want == PB_KVCACHE_OK) {
        size_t want_count;
        uint32_t *positions = json_u32s(json_need(call, "victims"), &want_count);
        good = same(victims, count, positions, want_count) && pb_kvcache_kept_count(cache) == before - count;
        free(positions);
        positions = json_u32s(json_need(call, "rows"), &want_count);
        good = good && same(rows, told, positions, want_count);
        free(positions);
    }
    free(rows);
    free(victims);
    return good || vectors_fail("%zu victims of %zu", count, before);
}

static bool kept(const pb_kvcache *cache, const json *call)
{
    size_t want_count;
    uint32_t *want = json_u32s(json_need(call, "positions"), &want_count);
    const size_t count = pb_kvcache_kept_count(cache);
    uint32_t *positions = vectors_alloc(count + 1, sizeof *positions);
    bool good = pb_kvcache_kept(cache, positions, count) == PB_KVCACHE_OK && same(positions, count, want, want_count);
    for (size_t i = 0; i < count; ++i) {
        good = good && pb_kvcache_contains(cache, positions[i]) == 1;
    }
    free(positions);
    free(want);
    return good || vectors_fail("%zu kept", count);
}

static bool score(const pb_kvcache *cache, const json *call)
{
    double got = -1.0;
    const pb_kvcache_status want_status = vectors_status(json_get(call, "status"));
    const pb_kvcache_status status = pb_kvcache_window_score(cache, json_u32(json_need(call, "pos")), &got);
    const double want = want_status == PB_KVCACHE_OK ? json_double(json_need(call, "score")) : -1.0;
    return (status == want_status && memcmp(&got, &want, sizeof got) == 0)
           || vectors_fail("status %d, score %.17g, expected %.17g", (int)status, got, want);
}

static bool seed(pb_kvcache *cache, const json *call)
{
    size_t count;
    uint32_t *positions = json_u32s(json_need(call, "positions"), &count);
    const json *rows = json_get(call, "attn");
    const size_t row_count = json_is_null(rows) ? 0 : rows->length;
    float *attn = json_is_null(rows) ? NULL : vectors_rows(rows, count);
    if (attn == NULL && row_count > 0) {
        free(positions);
        return false;
    }
    const pb_kvcache_status want = vectors_status(json_get(call, "status"));
    const pb_kvcache_status status = pb_kvcache_seed(cache, positions, count, attn, row_count);
    free(attn);
    free(positions);
    return status == want || vectors_fail("status %d, expected %d", (int)status, (int)want);
}

/* The bytes of a string of hexadecimal digits. */
static unsigned char *bytes_of(const json *call, size_t *count)
{
    const char *digits = json_string(json_need(call, "state"));
    *count = strlen(digits) / 2;
    unsigned char *bytes = vectors_alloc(*count + 1, 1);
    for (size_t i = 0; i < *count; ++i) {
        const char pair[3] = {digits[2 * i], digits[2 * i + 1], '\0'};
        bytes[i] = (unsigned char)strtoul(pair, NULL, 16);
    }
    return bytes;
}

bool vectors_save(const json *call, size_t bytes,
                  pb_kvcache_status save(const void *object, void *data, size_t capacity), const void *object)
{
    size_t count;
    unsigned char *want = bytes_of(call, &count);
    unsigned char *got = vectors_alloc(bytes + 1, 1);
    memset(got, 77, bytes + 1);
    bool good = bytes == count && save(object, got, bytes - 1) == PB_KVCACHE_ERROR_CAPACITY && got[0] == 77;
    good = good && save(object, got, bytes) == PB_KVCACHE_OK && got[bytes] == 77 && memcmp(got, want, count) == 0;
    free(got);
    free(want);
    return good || vectors_fail("%zu bytes, expected %zu", bytes, count);
}

bool vectors_load(const json *call, pb_kvcache_status load(void *object, const void *data, size_t size), void *object)
{
    size_t count;
    unsigned char *bytes = bytes_of(call, &count);
    const pb_kvcache_status want = vectors_status(json_get(call, "status"));
    const pb_kvcache_status status = load(object, bytes, count);
    free(bytes);
    return status == want || vectors_fail("status %d, expected %d", (int)status, (int)want);
}

static pb_kvcache_status save_cache(const void *cache, void *data, size_t capacity)
{
    return pb_kvcache_save(cache, data, capacity);
}

static pb_kvcache_status load_cache(void *cache, const void *data, size_t size)
{
    return pb_kvcache_load(cache, data, size);
}

static bool rollback(pb_kvcache *cache, const json *call)
{
    const uint32_t count = json_u32(json_need(call, "count"));
    const uint32_t most = json_u32(json_need(call, "most"));
    const pb_kvcache_status want = vectors_status(json_get(call, "status"));
    const uint32_t foretold = pb_kvcache_rollback_count(cache);
    const pb_kvcache_status status = pb_kvcache_rollback(cache, count);
    return (foretold == most && status == want)
           || vectors_fail("status %d, at most %" PRIu32, (int)status, foretold);
}

static bool run_call(const pb_kvcache_vtable *vtable, pb_kvcache *cache, const json *call)
{
    const char *name = json_string(json_need(call, "call"));
    if (strcmp(name, "step") == 0) {
        return step(vtable, cache, call);
    }
    if (strcmp(name, "evict") == 0) {
        return evict(vtable, cache, call);
    }
    if (strcmp(name, "evict_rows") == 0) {
        return evict_rows(cache, call);
    }
    if (strcmp(name, "kept") == 0) {
        return kept(cache, call);
    }
    if (strcmp(name, "score") == 0) {
        return score(cache, call);
    }
    if (strcmp(name, "seed") == 0) {
        return seed(cache, call);
    }
    if (strcmp(name, "rollback") == 0) {
        return rollback(cache, call);
    }
    if (strcmp(name, "save") == 0) {
        return vectors_save(call, pb_kvcache_state_bytes(cache), save_cache, cache);
    }
    if (strcmp(name, "load") == 0) {
        return vectors_load(call, load_cache, cache);
    }
    if (strcmp(name, "reset") == 0) {
        return pb_kvcache_reset(cache) == PB_KVCACHE_OK;
    }
    return vectors_fail("unknown call %s", name);
}

bool vectors_policy(const json *test)
{
    uint32_t params[MOST_PARAMS];
    const policy *found = find(test, params);
    if (found == NULL) {
        return vectors_fail("unknown policy");
    }
    pb_kvcache *cache = found->vtable->create(params, NULL, NULL);
    if (cache == NULL) {
        return vectors_fail("creation refused, status %d", (int)found->check(params));
    }
    bool good = pb_kvcache_effective_budget(cache) == json_u32(json_need(test, "effective_budget"))
                && pb_kvcache_capacity(cache) == json_u32(json_need(test, "capacity"));
    if (!good) {
        vectors_fail("effective budget %" PRIu32 ", capacity %" PRIu32, pb_kvcache_effective_budget(cache),
                     pb_kvcache_capacity(cache));
    }
    for (const json *call = json_need(test, "calls")->child; good && call != NULL; call = call->next) {
        good = run_call(found->vtable, cache, call);
    }
    found->vtable->destroy(cache);
    return good;
}

bool vectors_refusal(const json *test)
{
    uint32_t params[MOST_PARAMS];
    const policy *found = find(test, params);
    if (found == NULL) {
        return vectors_fail("unknown policy");
    }
    const pb_kvcache_status want = vectors_status(json_need(test, "status"));
    const pb_kvcache_status status = found->check(params);
    pb_kvcache *cache = found->vtable->create(params, NULL, NULL);
    found->vtable->destroy(cache);
    return (status == want && cache == NULL) || vectors_fail("status %d, expected %d", (int)status, (int)want);
}
