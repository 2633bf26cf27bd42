#include <string.h>

#include "bits.h"
#include "internal.h"

/* The layout is in pb_kvcache/state.h. */
#define MAGIC "pbkvstat"
enum { VERSION = 1, ONE_CACHE = 1, A_STACK = 2, WORD = 4, SIZE_AT = 16, PEAK_AT = 24, FRAME = 40, CHECKSUM = 8 };

/* ---- Numbers as bytes ---- */

/* Where the next bytes go, and the checksum of those before. */
typedef struct writer {
    unsigned char *at;
    uint64_t checksum;
} writer;

/* Where the next bytes come from, and where they end. */
typedef struct reader {
    const unsigned char *at;
    const unsigned char *end;
} reader;

#define CHECKSUM_START 0xCBF29CE484222325u

/* A single changed bit changes every checksum after it: both operations can be undone. Numbers of 4 bytes instead of
 * bytes are four times as fast. */
static uint64_t checksum_of(uint64_t before, uint32_t word)
{
    return (before ^ word) * 0x100000001B3u;
}

static void put(writer *out, uint32_t word)
{
    out->at[0] = (unsigned char)word;
    out->at[1] = (unsigned char)(word >> 8);
    out->at[2] = (unsigned char)(word >> 16);
    out->at[3] = (unsigned char)(word >> 24);
    out->at += WORD;
    out->checksum = checksum_of(out->checksum, word);
}

static void put_wide(writer *out, uint64_t number)
{
    put(out, (uint32_t)number);
    put(out, (uint32_t)(number >> 32));
}

static uint32_t word_at(const unsigned char *bytes)
{
    return bytes[0] | (uint32_t)bytes[1] << 8 | (uint32_t)bytes[2] << 16 | (uint32_t)bytes[3] << 24;
}

static uint64_t wide_at(const unsigned char *bytes)
{
    return word_at(bytes) | (uint64_t)word_at(bytes + WORD) << 32;
}

/* `count` numbers of 4 bytes, or NULL where there are not as many. */
static const unsigned char *get(reader *in, size_t count)
{
    const unsigned char *bytes = in->at;
    if (count > (size_t)(in->end - in->at) / WORD) {
        return NULL;
    }
    in->at += count * WORD;
    return bytes;
}

/* ---- A cache ---- */

enum { SHAPE_WORDS = 7, HEAD_WORDS = 10 };

/* What has to be equal, in the order of the layout. */
static void shape_words(const pb_kvcache *policy, uint32_t *words)
{
    const pb_kvcache_priv_shape *shape = &policy->shape;
    words[0] = (uint32_t)shape->rules->kind;
    words[1] = shape->effective;
    words[2] = shape->capacity;
    words[3] = shape->recent_window;
    words[4] = shape->sinks;
    words[5] = shape->obs_window;
    words[6] = shape->pool_kernel;
}

static bool has_scores(const pb_kvcache *policy)
{
    return policy->shape.doubles == 1; /* two arrays are scratch */
}

static size_t cache_bytes(const pb_kvcache *policy)
{
    size_t words = HEAD_WORDS + policy->kept_count * (has_scores(policy) ? 3 : 1) + policy->shape.obs_window;
    for (uint32_t slot = 0; slot < policy->shape.obs_window; ++slot) {
        words += policy->lengths[slot];
    }
    return words * WORD; /* less than the cache itself takes, and its head */
}

static void put_cache(writer *out, const pb_kvcache *policy)
{
    uint32_t words[SHAPE_WORDS];
    shape_words(policy, words);
    for (size_t i = 0; i < SHAPE_WORDS; ++i) {
        put(out, words[i]);
    }
    put(out, policy->cursor);
    put(out, (uint32_t)policy->kept_count);
    put(out, (uint32_t)policy->unobserved);
    for (size_t i = 0; i < policy->kept_count; ++i) {
        put(out, policy->kept[i]);
    }
    for (size_t i = 0; has_scores(policy) && i < policy->kept_count; ++i) {
        put_wide(out, bits_of_double(policy->scores[i]));
    }
    for (uint32_t slot = 0; slot < policy->shape.obs_window; ++slot) {
        put(out, policy->lengths[slot]);
    }
    for (uint32_t slot = 0; slot < policy->shape.obs_window; ++slot) {
        size_t run;
        for (size_t i = 0; i < policy->lengths[slot]; i += run) {
            const float *weights = pb_kvcache_priv_ring_run(policy, slot, i, &run);
            for (size_t j = 0; j < run; ++j) {
                put(out, bits_of(weights[j]));
            }
        }
    }
}

static bool positions_ok(const unsigned char *kept, size_t count)
{
    for (size_t i = 1; i < count; ++i) {
        if (word_at(kept + i * WORD) <= word_at(kept + (i - 1) * WORD)) {
            return false;
        }
    }
    return true;
}

/* Finite and >= 0. What no step has weighed has a score of 0. */
static bool scores_ok(const unsigned char *scores, size_t count, size_t unobserved)
{
    for (size_t i = 0; i < count; ++i) {
        const uint64_t bits = wide_at(scores + i * 2 * WORD);
        if ((bits >= INFINITY_BITS_64 && bits != (uint64_t)1 << 63) || (i >= count - unobserved && bits != 0)) {
            return false;
        }
    }
    return true;
}

/* Columns of the ring's slots: the older a step, the fewer of the kept positions it has seen. */
static bool lengths_ok(const unsigned char *lengths, uint32_t slots, uint32_t cursor, uint32_t count)
{
    uint32_t older = 0;
    for (uint32_t i = 0, slot = cursor; i < slots; ++i, slot = slot + 1 < slots ? slot + 1 : 0) {
        const uint32_t length = word_at(lengths + (size_t)slot * WORD);
        if (length < older || length > count) {
            return false;
        }
        older = length;
    }
    return true;
}

static bool weights_ok(const unsigned char *weights, size_t count)
{
    for (size_t i = 0; i < count; ++i) {
        const uint32_t bits = word_at(weights + i * WORD);
        if (bits >= INFINITY_BITS && bits != SIGN) {
            return false;
        }
    }
    return true;
}

/* Read one cache and check all of it. With `take` it goes into the policy, which a call without has allowed. */
static pb_kvcache_status get_cache(reader *in, pb_kvcache *policy, bool take)
{
    /* Head: the shape, then the numbers that say how much follows */
    const uint32_t slots = policy->shape.obs_window;
    uint32_t words[SHAPE_WORDS];
    const unsigned char *head = get(in, HEAD_WORDS);
    if (head == NULL) {
        return PB_KVCACHE_ERROR_STATE;
    }
    shape_words(policy, words);
    for (size_t i = 0; i < SHAPE_WORDS; ++i) {
        if (word_at(head + i * WORD) != words[i]) {
            return PB_KVCACHE_ERROR_MISMATCH;
        }
    }
    const uint32_t cursor = word_at(head + SHAPE_WORDS * WORD);
    const uint32_t count = word_at(head + (SHAPE_WORDS + 1) * WORD);
    const uint32_t unobserved = word_at(head + (SHAPE_WORDS + 2) * WORD);
    if (cursor >= (slots > 0 ? slots : 1) || count > policy->shape.capacity
        || unobserved > (policy->shape.rules->kind == PB_KVCACHE_PRIV_TOVA ? count : 0)) {
        return PB_KVCACHE_ERROR_STATE;
    }
    /* Arrays */
    const unsigned char *kept = get(in, count);
    const unsigned char *scores = kept == NULL ? NULL : get(in, has_scores(policy) ? 2 * (size_t)count : 0);
    const unsigned char *lengths = scores == NULL ? NULL : get(in, slots);
    if (lengths == NULL || !positions_ok(kept, count) || !lengths_ok(lengths, slots, cursor, count)
        || (has_scores(policy) && !scores_ok(scores, count, unobserved))) {
        return PB_KVCACHE_ERROR_STATE;
    }
    if (take) {
        pb_kvcache_priv_forget_steps(policy);
        policy->cursor = cursor;
        policy->kept_count = count;
        policy->unobserved = unobserved;
        if (slots > 0) {
            pb_kvcache_priv_ring_clear(policy); /* no gaps: rows come as they are */
        }
    }
    for (size_t i = 0; take && i < count; ++i) {
        policy->kept[i] = word_at(kept + i * WORD);
        if (has_scores(policy)) {
            policy->scores[i] = double_of(wide_at(scores + i * 2 * WORD));
        }
    }
    for (uint32_t slot = 0; slot < slots; ++slot) {
        const uint32_t length = word_at(lengths + (size_t)slot * WORD);
        const unsigned char *weights = get(in, length);
        if (weights == NULL || !weights_ok(weights, length)) {
            return PB_KVCACHE_ERROR_STATE;
        }
        if (take) {
            float *row = pb_kvcache_priv_slot(policy, slot);
            policy->lengths[slot] = length;
            for (size_t i = 0; i < length; ++i) {
                row[i] = float_of(word_at(weights + i * WORD));
            }
        }
    }
    return PB_KVCACHE_OK;
}

/* ---- The frame around caches ---- */

size_t pb_kvcache_priv_state_bytes(pb_kvcache *const *caches, uint32_t num_caches)
{
    size_t bytes = FRAME + CHECKSUM;
    for (uint32_t i = 0; i < num_caches; ++i) {
        bytes += cache_bytes(caches[i]);
    }
    return bytes;
}

pb_kvcache_status pb_kvcache_priv_save(pb_kvcache *const *caches, uint32_t num_caches, const size_t *peak, void *data,
                                       size_t capacity)
{
    const size_t bytes = pb_kvcache_priv_state_bytes(caches, num_caches);
    if (data == NULL) {
        return PB_KVCACHE_ERROR_NULL;
    }
    if (capacity < bytes) {
        return PB_KVCACHE_ERROR_CAPACITY;
    }
    writer out = {data, CHECKSUM_START};
    for (size_t i = 0; i < sizeof MAGIC - 1; i += WORD) {
        put(&out, word_at((const unsigned char *)MAGIC + i));
    }
    put(&out, VERSION);
    put(&out, peak == NULL ? ONE_CACHE : A_STACK);
    put_wide(&out, bytes);
    put_wide(&out, peak == NULL ? 0 : *peak);
    put(&out, num_caches);
    put(&out, 0);
    for (uint32_t i = 0; i < num_caches; ++i) {
        put_cache(&out, caches[i]);
    }
    put_wide(&out, out.checksum);
    return PB_KVCACHE_OK;
}

/* Is this a whole state, undamaged, of so many caches? */
static pb_kvcache_status frame_ok(const unsigned char *bytes, size_t size, uint32_t num_caches, uint32_t kind)
{
    if (size < FRAME + CHECKSUM || memcmp(bytes, MAGIC, sizeof MAGIC - 1) != 0) {
        return PB_KVCACHE_ERROR_STATE;
    }
    if (word_at(bytes + 8) != VERSION) {
        return PB_KVCACHE_ERROR_STATE_VERSION;
    }
    if (wide_at(bytes + SIZE_AT) != size || size % WORD != 0) {
        return PB_KVCACHE_ERROR_STATE;
    }
    uint64_t checksum = CHECKSUM_START;
    for (size_t at = 0; at < size - CHECKSUM; at += WORD) {
        checksum = checksum_of(checksum, word_at(bytes + at));
    }
    if (wide_at(bytes + size - CHECKSUM) != checksum || word_at(bytes + 36) != 0) {
        return PB_KVCACHE_ERROR_STATE;
    }
    return word_at(bytes + 12) == kind && word_at(bytes + 32) == num_caches ? PB_KVCACHE_OK
                                                                           : PB_KVCACHE_ERROR_MISMATCH;
}

/* Check every cache, and then take all of them. */
pb_kvcache_status pb_kvcache_priv_load(pb_kvcache *const *caches, uint32_t num_caches, size_t *peak, const void *data,
                                       size_t size)
{
    const unsigned char *bytes = data;
    if (data == NULL) {
        return PB_KVCACHE_ERROR_NULL;
    }
    const pb_kvcache_status whole = frame_ok(bytes, size, num_caches, peak == NULL ? ONE_CACHE : A_STACK);
    if (whole != PB_KVCACHE_OK) {
        return whole;
    }
    reader in = {bytes + FRAME, bytes + size - CHECKSUM};
    uint64_t held = 0;
    uint64_t most = 0;
    for (uint32_t i = 0; i < num_caches; ++i) {
        const unsigned char *head = in.at;
        const pb_kvcache_status status = get_cache(&in, caches[i], false);
        if (status != PB_KVCACHE_OK) {
            return status;
        }
        held += word_at(head + (SHAPE_WORDS + 1) * WORD);
        most += caches[i]->shape.capacity;
    }
    /* A stack's peak is at least what it holds, and at most all that it can hold. A cache has none. */
    const uint64_t highest = wide_at(bytes + PEAK_AT);
    if (in.at != in.end || highest < (peak == NULL ? 0 : held) || highest > (peak == NULL ? 0 : most)) {
        return PB_KVCACHE_ERROR_STATE;
    }
    in.at = bytes + FRAME;
    for (uint32_t i = 0; i < num_caches; ++i) {
        (void)get_cache(&in, caches[i], true);
    }
    if (peak != NULL) {
        *peak = (size_t)highest; /* a sum of capacities fits: their positions have addresses */
    }
    return PB_KVCACHE_OK;
}

size_t pb_kvcache_state_bytes(const pb_kvcache *policy)
{
    pb_kvcache *const cache = (pb_kvcache *)(uintptr_t)policy; /* is only read */
    return policy == NULL ? 0 : pb_kvcache_priv_state_bytes(&cache, 1);
}

pb_kvcache_status pb_kvcache_save(const pb_kvcache *policy, void *data, size_t capacity)
{
    pb_kvcache *const cache = (pb_kvcache *)(uintptr_t)policy; /* is only read */
    return policy == NULL ? PB_KVCACHE_ERROR_NULL : pb_kvcache_priv_save(&cache, 1, NULL, data, capacity);
}

pb_kvcache_status pb_kvcache_load(pb_kvcache *policy, const void *data, size_t size)
{
    return policy == NULL ? PB_KVCACHE_ERROR_NULL : pb_kvcache_priv_load(&policy, 1, NULL, data, size);
}
