/* Kinds "hold" (caches in slots) and "decode_weights" (the attention of one new token to them). */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "vectors.h"

static bool seed(pb_kvcache_hold *hold, const json *call)
{
    size_t count;
    uint32_t *positions = json_u32s(json_need(call, "positions"), &count);
    const json *rows = json_need(call, "attn");
    float *attn = json_is_null(rows) ? NULL : vectors_rows(rows, count);
    const pb_kvcache_status want = vectors_status(json_get(call, "status"));
    const pb_kvcache_status status = pb_kvcache_hold_seed(hold, json_u32(json_need(call, "cache")), positions, count,
                                                          attn, attn == NULL ? 0 : rows->length);
    free(positions);
    free(attn);
    return status == want || vectors_fail("seed answers %d, not %d", (int)status, (int)want);
}

static bool step(pb_kvcache_hold *hold, const json *call)
{
    const uint32_t num_caches = pb_kvcache_hold_num_caches(hold);
    const json *rows = json_need(call, "weights");
    const json *flags = json_need(call, "joins");
    size_t count;
    uint32_t *pos = json_u32s(json_need(call, "pos"), &count);
    const size_t width = json_is_null(rows) ? 0 : rows->child->length;
    float *weights = json_is_null(rows) ? NULL : vectors_rows(rows, width);
    uint8_t *joins = json_is_null(flags) ? NULL : vectors_alloc(num_caches, 1);
    const json *flag = joins == NULL ? NULL : flags->child;
    for (uint32_t cache = 0; flag != NULL; flag = flag->next, ++cache) {
        joins[cache] = flag->type == JSON_TRUE;
    }
    pb_kvcache_slot_move *moves = vectors_alloc(num_caches, sizeof *moves);
    size_t found = 99;
    uint32_t refusing = UINT32_MAX;
    const pb_kvcache_status want = vectors_status(json_get(call, "status"));
    bool good = count == num_caches || vectors_fail("%zu positions", count);
    good = good
           && pb_kvcache_hold_step_check(hold, pos, joins, weights, width, num_caches * width, &refusing) == want
           && refusing == (want == PB_KVCACHE_OK ? num_caches : json_u32(json_need(call, "cache")));
    good = good
           && pb_kvcache_hold_step(hold, pos, joins, weights, width, num_caches * width, moves, num_caches, &found)
                  == want;
    good = good || vectors_fail("another status, or cache %" PRIu32, refusing);
    if (good && want == PB_KVCACHE_OK) {
        const json *listed = json_need(call, "moves");
        size_t at = 0;
        good = listed->length == found || vectors_fail("%zu moves", found);
        for (const json *move = listed->child; good && move != NULL; move = move->next, ++at) {
            size_t three;
            uint32_t *numbers = json_u32s(move, &three);
            good = (three == 3 && numbers[0] == moves[at].cache && numbers[1] == moves[at].from
                    && numbers[2] == moves[at].to)
                   || vectors_fail("move %zu differs", at);
            free(numbers);
        }
    } else if (good) {
        good = found == 99 || vectors_fail("refused, but moves are written");
    }
    free(pos);
    free(weights);
    free(joins);
    free(moves);
    return good;
}

/* Do numbers equal a JSON array's? */
static bool same(const json *array, const uint32_t *numbers, size_t count)
{
    size_t want;
    uint32_t *listed = json_u32s(array, &want);
    const bool good = want == count && (count == 0 || memcmp(listed, numbers, count * sizeof *numbers) == 0);
    free(listed);
    return good;
}

static bool kept(const pb_kvcache_hold *hold, const json *call)
{
    const json *positions = json_need(call, "positions")->child;
    const json *slots = json_need(call, "slots")->child;
    bool good = true;
    for (uint32_t cache = 0; good && cache < pb_kvcache_hold_num_caches(hold); ++cache) {
        const pb_kvcache *policy = pb_kvcache_hold_cache(hold, cache);
        const size_t count = pb_kvcache_kept_count(policy);
        uint32_t *numbers = vectors_alloc(count + 1, sizeof *numbers);
        good = pb_kvcache_kept(policy, numbers, count) == PB_KVCACHE_OK && same(positions, numbers, count);
        good = good && pb_kvcache_hold_slots(hold, cache, numbers, count) == PB_KVCACHE_OK
               && same(slots, numbers, count);
        good = good || vectors_fail("cache %" PRIu32 " keeps something else", cache);
        free(numbers);
        positions = positions->next;
        slots = slots->next;
    }
    return good;
}

bool vectors_hold(const json *test)
{
    size_t count;
    uint32_t *budgets = json_u32s(json_need(test, "budgets"), &count);
    const json *params = json_need(test, "params");
    const pb_kvcache_hold_params given = {.num_caches = (uint32_t)count,
                                          .recent_window = json_u32(json_need(params, "recent_window")),
                                          .obs_window = json_u32(json_need(params, "obs_window")),
                                          .pool_kernel = json_u32(json_need(params, "pool_kernel"))};
    pb_kvcache_hold *hold = pb_kvcache_hold_create(&given, budgets, NULL);
    free(budgets);
    bool good = hold != NULL || vectors_fail("was not created");
    for (const json *call = json_need(test, "calls")->child; good && call != NULL; call = call->next) {
        const char *name = json_string(json_need(call, "call"));
        good = strcmp(name, "seed") == 0   ? seed(hold, call)
               : strcmp(name, "step") == 0 ? step(hold, call)
               : strcmp(name, "kept") == 0 ? kept(hold, call)
                                           : vectors_fail("%s is no call", name);
    }
    pb_kvcache_hold_destroy(hold);
    return good;
}

bool vectors_decode_weights(const json *test)
{
    const json *caches = json_need(test, "queries");
    const json *rows = json_need(test, "rows");
    const json *logits = json_need(test, "sinks");
    const char *reduce = json_string(json_need(test, "reduce"));
    const size_t num_caches = caches->length;
    const size_t group = caches->child->length;
    const size_t head_dim = caches->child->child->length;
    size_t count;
    size_t most = 0;
    size_t size = 0;
    float *queries = vectors_alloc(num_caches * group * head_dim, sizeof *queries);
    float *keys = vectors_rows(rows, head_dim);
    float *sinks = json_is_null(logits) ? NULL : json_floats(logits, &count);
    uint32_t *listed = json_u32s(json_need(test, "offsets"), &count);
    uint32_t *counts = json_u32s(json_need(test, "counts"), &count);
    uint64_t *offsets = vectors_alloc(num_caches, sizeof *offsets);
    const json *cache = caches->child;
    for (size_t c = 0; c < num_caches; ++c, cache = cache->next) {
        float *heads = vectors_rows(cache, head_dim);
        memcpy(queries + c * group * head_dim, heads, group * head_dim * sizeof *heads);
        free(heads);
        offsets[c] = listed[c];
        most = counts[c] > most ? counts[c] : most;
    }
    const pb_kvcache_decode_attention attn = {
        .queries = queries,
        .keys = keys,
        .reduce = strcmp(reduce, "max") == 0 ? PB_KVCACHE_REDUCE_MAX
                                             : (strcmp(reduce, "sum") == 0 ? PB_KVCACHE_REDUCE_SUM : PB_KVCACHE_REDUCE_MEAN),
        .num_caches = num_caches,
        .group = group,
        .head_dim = head_dim,
        .key_stride = head_dim,
        .key_capacity = rows->length * head_dim,
        .offsets = offsets,
        .counts = counts,
        .scale = (float)json_double(json_need(test, "scale")),
        .softcap = (float)json_double(json_need(test, "softcap")),
        .sinks = sinks};
    bool good = pb_kvcache_decode_weights_workspace_size(&attn, &size) == PB_KVCACHE_OK;
    void *workspace = vectors_alloc(size + 1, 1);
    float *weights = vectors_alloc(num_caches * most + 1, sizeof *weights);
    memset(weights, 0xAB, (num_caches * most + 1) * sizeof *weights);
    const pb_kvcache_status want = vectors_status(json_get(test, "status"));
    const pb_kvcache_status status
        = pb_kvcache_decode_weights(&attn, workspace, size, weights, most, num_caches * most, NULL);
    good = (good && status == want) || vectors_fail("status %d, expected %d", (int)status, (int)want);
    const json *row = want == PB_KVCACHE_OK ? json_need(test, "weights")->child : NULL;
    for (size_t c = 0; good && row != NULL; ++c, row = row->next) {
        float *numbers = json_floats(row, &count);
        good = (count == counts[c] && (count == 0 || memcmp(numbers, weights + c * most, count * sizeof *numbers) == 0))
               || vectors_fail("cache %zu has other weights", c);
        free(numbers);
    }
    free(queries);
    free(keys);
    free(sinks);
    free(listed);
    free(counts);
    free(offsets);
    free(workspace);
    free(weights);
    return good;
}
