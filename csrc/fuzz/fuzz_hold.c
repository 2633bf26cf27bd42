/*
 * libFuzzer target: caches in slots with arbitrary budgets, short arrays, bad positions and bad weights, beside
 * policies that are driven by hand with weights in order of position. Kept positions must agree after every call, and
 * the rows of a buffer that is moved as asked must be theirs. Built with -fsanitize=fuzzer,address,undefined.
 */
#include "input.h"

enum { MOST_CACHES = 4, MOST = 34 };

/* No object of the fuzzer takes more. */
static size_t most_bytes = (size_t)1 << 20;

static const pb_allocator allocator = {small_alloc, small_free, &most_bytes};

/* The caches, the policies that they must equal, and a row of one number for each slot: its position. */
typedef struct pair {
    pb_kvcache_hold *hold;
    pb_kvcache *policies[MOST_CACHES];
    uint32_t rows[MOST_CACHES][MOST];
    uint32_t num_caches;
} pair;

static void must_agree(const pair *p)
{
    for (uint32_t cache = 0; cache < p->num_caches; ++cache) {
        const size_t count = pb_kvcache_kept_count(p->policies[cache]);
        uint32_t kept[2][MOST];
        uint32_t slots[MOST];
        MUST(pb_kvcache_kept_count(pb_kvcache_hold_cache(p->hold, cache)) == count);
        MUST(pb_kvcache_kept(p->policies[cache], kept[0], MOST) == PB_KVCACHE_OK);
        MUST(pb_kvcache_kept(pb_kvcache_hold_cache(p->hold, cache), kept[1], count) == PB_KVCACHE_OK);
        MUST(pb_kvcache_hold_slots(p->hold, cache, slots, count) == PB_KVCACHE_OK);
        for (size_t i = 0; i < count; ++i) {
            MUST(kept[0][i] == kept[1][i] && slots[i] < count && p->rows[cache][slots[i]] == kept[0][i]);
        }
    }
}

static void step(pair *p, input *in)
{
    uint32_t pos[MOST_CACHES] = {0};
    uint8_t joins[MOST_CACHES] = {0};
    size_t most = 0;
    for (uint32_t cache = 0; cache < p->num_caches; ++cache) {
        const size_t count = pb_kvcache_kept_count(p->policies[cache]);
        uint32_t kept[MOST];
        MUST(pb_kvcache_kept(p->policies[cache], kept, MOST) == PB_KVCACHE_OK);
        const uint32_t kind = take(in, 1);
        pos[cache] = kind % 16 == 0 ? number(in, 17) : (count > 0 ? kept[count - 1] + 1 + kind % 3 : kind % 3);
        joins[cache] = kind < 0xE0;
        most = count > most ? count : most;
    }
    const size_t stride = most + take(in, 1) % 3;
    const size_t need = most == 0 ? 0 : (p->num_caches - 1) * stride + most;
    const size_t size = take(in, 1) % 16 == 0 ? take(in, 1) % (need + 1) : need;
    float *weights = malloc(size * sizeof *weights + 1);
    for (size_t i = 0; i < size; ++i) {
        const uint32_t weight = take(in, 1);
        const uint32_t bits = weight == 255 ? take(in, 4) : 0;
        weights[i] = (float)(weight % 5) * 0.25f;
        if (weight == 255) {
            memcpy(&weights[i], &bits, sizeof bits);
        }
    }
    const float *observed = take(in, 1) % 8 == 0 ? NULL : weights;
    const uint8_t *flags = take(in, 1) % 4 == 0 ? NULL : joins;
    pb_kvcache_slot_move moves[MOST_CACHES];
    size_t count = 99;
    uint32_t refuses = 99;
    const pb_kvcache_status foretold
        = pb_kvcache_hold_step_check(p->hold, pos, flags, observed, stride, size, &refuses);
    const pb_kvcache_status status
        = pb_kvcache_hold_step(p->hold, pos, flags, observed, stride, size, moves, p->num_caches, &count);
    MUST(status == foretold && (refuses == p->num_caches) == (status == PB_KVCACHE_OK));
    MUST((count == 99) == (status != PB_KVCACHE_OK) && (size == need || observed == NULL || status != PB_KVCACHE_OK));
    for (uint32_t cache = 0; cache < p->num_caches; ++cache) {
        if (status != PB_KVCACHE_OK && (size < need || cache != refuses)) {
            continue;
        }
        if (flags != NULL && !flags[cache]) {
            MUST(status == PB_KVCACHE_OK);
            continue;
        }
        const size_t held = pb_kvcache_kept_count(p->policies[cache]);
        float row[MOST];
        uint32_t slots[MOST];
        uint32_t victim;
        if (status == PB_KVCACHE_OK) { /* the slots of before: the policy's kept positions, found in the rows */
            uint32_t kept[MOST];
            MUST(pb_kvcache_kept(p->policies[cache], kept, MOST) == PB_KVCACHE_OK);
            for (size_t i = 0; i < held; ++i) {
                slots[i] = 0;
                while (p->rows[cache][slots[i]] != kept[i]) {
                    ++slots[i];
                }
            }
        } else {
            MUST(pb_kvcache_hold_slots(p->hold, cache, slots, held) == PB_KVCACHE_OK);
        }
        for (size_t i = 0; observed != NULL && i < held; ++i) {
            row[i] = weights[cache * stride + slots[i]];
        }
        MUST(pb_kvcache_snapkv.on_decode_step(p->policies[cache], pos[cache], observed == NULL ? NULL : row, held)
             == status);
        if (status == PB_KVCACHE_OK) {
            (void)pb_kvcache_snapkv.evict(p->policies[cache], UINT32_MAX, &victim, 1);
            p->rows[cache][held] = pos[cache];
        }
    }
    if (status == PB_KVCACHE_OK) {
        uint64_t offsets[sizeof p->rows / sizeof p->rows[0]];
        for (size_t i = 0; i < sizeof offsets / sizeof *offsets; ++i) {
            offsets[i] = i * (sizeof p->rows[0] / sizeof p->rows[0][0]);
        }
        MUST(pb_kvcache_hold_move(p->rows, offsets, p->num_caches, sizeof p->rows[0][0], sizeof p->rows[0][0],
                                  sizeof p->rows, moves, count)
             == PB_KVCACHE_OK);
    }
    free(weights);
}

static void seed(pair *p, input *in)
{
    const uint32_t cache = take(in, 1) % (p->num_caches + 1);
    const size_t count = take(in, 1) % MOST;
    const size_t rows = take(in, 1) % 3;
    uint32_t positions[MOST];
    float *attn = malloc(count * rows * sizeof *attn + 1);
    uint32_t pos = 0;
    for (size_t i = 0; i < count; ++i) {
        pos += take(in, 1) % 4;
        positions[i] = pos++;
    }
    for (size_t i = 0; i < count * rows; ++i) {
        attn[i] = (float)(int8_t)take(in, 1) + 100.0f;
    }
    const pb_kvcache_status status = pb_kvcache_hold_seed(p->hold, cache, positions, count, attn, rows);
    if (cache == p->num_caches) {
        MUST(status == PB_KVCACHE_ERROR_CACHE);
    } else if (count > pb_kvcache_effective_budget(p->policies[cache])) {
        MUST(status == PB_KVCACHE_ERROR_FULL);
    } else {
        MUST(status == pb_kvcache_seed(p->policies[cache], positions, count, attn, rows));
        if (status == PB_KVCACHE_OK && count > 0) {
            memcpy(p->rows[cache], positions, count * sizeof *positions);
        }
    }
    free(attn);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    input in = {data, size};
    /* Parameters and budgets, mostly allowed ones */
    const uint32_t caches = take(&in, 1);
    const pb_kvcache_hold_params params
        = {caches < 0xFC ? caches % (MOST_CACHES + 1) : PB_KVCACHE_HOLD_MAX_CACHES + 1, number(&in, 9),
           number(&in, 9), number(&in, 9)};
    uint32_t budgets[MOST_CACHES];
    for (size_t i = 0; i < MOST_CACHES; ++i) {
        budgets[i] = number(&in, MOST - 1);
    }
    uint32_t refuses = 0;
    const pb_kvcache_status status = pb_kvcache_hold_check(&params, budgets, &refuses);
    MUST(refuses <= params.num_caches && (status != PB_KVCACHE_OK || refuses == params.num_caches));
    pair p = {.hold = pb_kvcache_hold_create(&params, budgets, &allocator), .num_caches = params.num_caches};
    MUST(status == PB_KVCACHE_OK || p.hold == NULL);
    bool made = p.hold != NULL;
    for (uint32_t cache = 0; made && cache < params.num_caches; ++cache) {
        const pb_kvcache_snapkv_params snapkv = {.budget = budgets[cache],
                                                 .recent_window = params.recent_window,
                                                 .obs_window = params.obs_window,
                                                 .pool_kernel = params.pool_kernel};
        p.policies[cache] = pb_kvcache_snapkv.create(&snapkv, NULL, NULL);
        made = p.policies[cache] != NULL && budgets[cache] < MOST;
    }
    /* Calls, until the bytes are used up */
    while (made && in.left > 0) {
        const uint32_t kind = take(&in, 1) % 12;
        if (kind == 0) {
            seed(&p, &in);
        } else if (kind == 1) { /* one cache goes on as another */
            const uint32_t to = take(&in, 1) % p.num_caches;
            const uint32_t from = take(&in, 1) % p.num_caches;
            const pb_kvcache_status copied = pb_kvcache_hold_copy(p.hold, to, p.hold, from);
            MUST(copied == pb_kvcache_copy(p.policies[to], p.policies[from]));
            if (copied == PB_KVCACHE_OK && to != from) {
                memcpy(p.rows[to], p.rows[from], sizeof p.rows[to]);
            }
        } else {
            step(&p, &in);
        }
        must_agree(&p);
    }
    for (uint32_t cache = 0; cache < MOST_CACHES; ++cache) {
        pb_kvcache_snapkv.destroy(p.policies[cache]);
    }
    pb_kvcache_hold_destroy(p.hold);
    return 0;
}
