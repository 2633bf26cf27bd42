/*
 * libFuzzer target: sequences of calls with arbitrary parameters, short buffers, bad lengths and bad weights, checked
 * against what every policy promises. Built with -fsanitize=fuzzer,address,undefined.
 */
#include "input.h"

/* Every parameter struct is a row of uint32_t. */
#define MOST_PARAMS 9

/* No cache of the fuzzer takes more. */
static size_t most_bytes = (size_t)1 << 22;

/* The kept positions, in memory of exactly their size. */
static uint32_t *kept_of(const pb_kvcache *cache, size_t *count)
{
    *count = pb_kvcache_kept_count(cache);
    uint32_t *kept = malloc(*count * sizeof *kept + 1);
    MUST(pb_kvcache_kept(cache, kept, *count) == PB_KVCACHE_OK);
    for (size_t i = 1; i < *count; ++i) {
        MUST(kept[i] > kept[i - 1]);
    }
    MUST(*count <= pb_kvcache_capacity(cache));
    return kept;
}

static void step(const pb_kvcache_vtable *vtable, pb_kvcache *cache, input *in)
{
    size_t count;
    uint32_t *before = kept_of(cache, &count);
    const uint32_t pos = count > 0 && take(in, 1) % 8 != 0 ? before[count - 1] + 1 + take(in, 1) % 3 : number(in, 33);
    const uint32_t kind = take(in, 1);
    const size_t length = kind % 16 == 0 ? number(in, 33) % 1024 : count;
    float *attn = malloc(length * sizeof *attn + 1);
    bool good = true;
    for (size_t i = 0; i < length; ++i) {
        const uint32_t weight = take(in, 1);
        const uint32_t bits = weight == 255 ? take(in, 4) : 0;
        attn[i] = (float)(weight % 5) * 0.25f;
        if (weight == 255) {
            memcpy(&attn[i], &bits, sizeof bits);
        }
        good = good && attn[i] >= 0.0f && attn[i] <= 3.4028235e38f;
    }
    const bool null = kind % 16 == 1;
    const pb_kvcache_status status = vtable->on_decode_step(cache, pos, null ? NULL : attn, length);
    const bool ascends = count == 0 || pos > before[count - 1];
    const bool fits = count < pb_kvcache_capacity(cache);
    MUST((status == PB_KVCACHE_OK) == (ascends && fits && (null || (length == count && good))));
    MUST(pb_kvcache_kept_count(cache) == count + (status == PB_KVCACHE_OK));
    free(attn);
    free(before);
}

static void evict(const pb_kvcache_vtable *vtable, pb_kvcache *cache, input *in)
{
    const uint32_t budget = number(in, 33);
    const size_t need = pb_kvcache_evict_count(cache, budget);
    const size_t capacity = take(in, 1) % 8 == 0 ? take(in, 1) % (need + 1) : need;
    uint32_t *victims = malloc(capacity * sizeof *victims + 1);
    const size_t before = pb_kvcache_kept_count(cache);
    const size_t count = vtable->evict(cache, budget, victims, capacity);
    MUST(count == (capacity < need ? 0 : need));
    MUST(pb_kvcache_kept_count(cache) == before - count);
    for (size_t i = 0; i < count; ++i) {
        MUST(!pb_kvcache_contains(cache, victims[i]) && (i == 0 || victims[i] > victims[i - 1]));
    }
    free(victims);
}

static void evict_rows(pb_kvcache *cache, input *in)
{
    const uint32_t budget = number(in, 33);
    const uint32_t multiple_of = number(in, 9);
    const pb_kvcache_row_set which = (pb_kvcache_row_set)(take(in, 1) % 2);
    const size_t need = pb_kvcache_evict_rows_count(cache, budget, multiple_of);
    size_t before;
    uint32_t *kept = kept_of(cache, &before);
    const size_t told = which == PB_KVCACHE_ROWS_VICTIMS ? need : before - need;
    const size_t capacity = take(in, 1) % 8 == 0 ? take(in, 1) % (told + 1) : told;
    uint32_t *victims = malloc(need * sizeof *victims + 1);
    uint32_t *rows = malloc(capacity * sizeof *rows + 1);
    const pb_kvcache_status status
        = pb_kvcache_evict_rows(cache, budget, multiple_of, which, victims, need, rows, capacity);
    MUST(status
         == (multiple_of == 0  ? PB_KVCACHE_ERROR_PLAN_MULTIPLE
             : capacity < told ? PB_KVCACHE_ERROR_CAPACITY
                               : PB_KVCACHE_OK));
    if (status == PB_KVCACHE_OK) {
        MUST(pb_kvcache_kept_count(cache) == before - need);
        MUST(need == 0 || (before - need) % multiple_of == 0);
        for (size_t i = 0; i < told; ++i) {
            MUST(rows[i] < before && (i == 0 || rows[i] > rows[i - 1]));
            MUST(pb_kvcache_contains(cache, kept[rows[i]]) == (which == PB_KVCACHE_ROWS_KEPT));
        }
        for (size_t i = 0; which == PB_KVCACHE_ROWS_VICTIMS && i < need; ++i) {
            MUST(victims[i] == kept[rows[i]]);
        }
    } else {
        MUST(pb_kvcache_kept_count(cache) == before);
    }
    free(rows);
    free(victims);
    free(kept);
}

static void rollback(pb_kvcache *cache, input *in)
{
    const uint32_t count = number(in, 9);
    const uint32_t most = pb_kvcache_rollback_count(cache);
    const size_t before = pb_kvcache_kept_count(cache);
    MUST(most <= before);
    MUST(pb_kvcache_rollback(cache, count) == (count > most ? PB_KVCACHE_ERROR_ROLLBACK : PB_KVCACHE_OK));
    MUST(pb_kvcache_kept_count(cache) == (count > most ? before : before - count));
    MUST(pb_kvcache_rollback_count(cache) == (count > most ? most : most - count));
}

static void seed(pb_kvcache *cache, input *in)
{
    const size_t count = number(in, 33) % 64;
    const size_t rows = take(in, 1) % 4;
    uint32_t *positions = malloc(count * sizeof *positions + 1);
    float *attn = malloc(count * rows * sizeof *attn + 1);
    uint32_t pos = 0;
    for (size_t i = 0; i < count; ++i) {
        pos += take(in, 1) % 4;
        positions[i] = pos++;
    }
    for (size_t i = 0; i < count * rows; ++i) {
        attn[i] = (float)(int8_t)take(in, 1) + 100.0f;
    }
    (void)pb_kvcache_seed(cache, positions, count, rows == 0 ? NULL : attn, rows);
    free(attn);
    free(positions);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const pb_kvcache_vtable *const vtables[] = {
        &pb_kvcache_snapkv, &pb_kvcache_pyramidkv, &pb_kvcache_sliding_window, &pb_kvcache_streaming_llm,
        &pb_kvcache_h2o, &pb_kvcache_tova, &pb_kvcache_scissorhands};
    input in = {data, size};
    const pb_kvcache_vtable *vtable = vtables[take(&in, 1) % (sizeof vtables / sizeof vtables[0])];
    uint32_t params[MOST_PARAMS];
    for (size_t i = 0; i < MOST_PARAMS; ++i) {
        params[i] = number(&in, 33);
    }
    const pb_allocator allocator = {small_alloc, small_free, &most_bytes};
    pb_kvcache *cache = vtable->create(params, &allocator, NULL);
    pb_kvcache *twin = cache == NULL ? NULL : vtable->create(params, &allocator, NULL);
    while (twin != NULL && in.left > 0) {
        size_t count;
        uint32_t *kept;
        double score;
        switch (take(&in, 1) % 13) {
        case 12:
            rollback(cache, &in);
            break;
        case 0:
            seed(cache, &in);
            break;
        case 1:
            MUST(pb_kvcache_reset(cache) == PB_KVCACHE_OK);
            break;
        case 2:
            MUST(pb_kvcache_copy(twin, cache) == PB_KVCACHE_OK);
            MUST(pb_kvcache_kept_count(twin) == pb_kvcache_kept_count(cache));
            MUST(pb_kvcache_rollback_count(twin) == pb_kvcache_rollback_count(cache));
            break;
        case 3:
            kept = kept_of(cache, &count);
            for (size_t i = 0; i < count; ++i) {
                const pb_kvcache_status status = pb_kvcache_window_score(cache, kept[i], &score);
                MUST(status == PB_KVCACHE_ERROR_UNSUPPORTED || (status == PB_KVCACHE_OK && score >= 0.0));
            }
            free(kept);
            break;
        case 4:
        case 5:
            evict(vtable, cache, &in);
            break;
        case 6:
            evict_rows(cache, &in);
            break;
        default:
            step(vtable, cache, &in);
        }
    }
    vtable->destroy(twin);
    vtable->destroy(cache);
    return 0;
}
