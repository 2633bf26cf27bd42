/*
 * libFuzzer target: bytes loaded as a state, as they are and with a right frame around them. What is taken is saved as
 * the same bytes and goes on like any other cache. What is refused changes nothing. Built with
 * -fsanitize=fuzzer,address,undefined.
 */
#include "input.h"

enum { FRAME = 40, CHECKSUM = 8 };

static void put(unsigned char *at, uint64_t number, size_t bytes)
{
    for (size_t i = 0; i < bytes; ++i) {
        at[i] = (unsigned char)(number >> 8 * i);
    }
}

/* The frame of one cache around `size` bytes, a multiple of 4. */
static unsigned char *framed(const uint8_t *body, size_t size)
{
    const size_t whole = FRAME + size + CHECKSUM;
    unsigned char *data = malloc(whole);
    uint64_t checksum = 0xCBF29CE484222325u;
    memset(data, 0, FRAME);
    memcpy(data, "pbkvstat", 8);
    put(data + 8, 1, 4);
    put(data + 12, 1, 4);
    put(data + 16, whole, 8);
    put(data + 32, 1, 4);
    if (size > 0) {
        memcpy(data + FRAME, body, size);
    }
    for (size_t at = 0; at < whole - CHECKSUM; at += 4) {
        const uint32_t word = data[at] | (uint32_t)data[at + 1] << 8 | (uint32_t)data[at + 2] << 16
                              | (uint32_t)data[at + 3] << 24;
        checksum = (checksum ^ word) * 0x100000001B3u;
    }
    put(data + whole - CHECKSUM, checksum, 8);
    return data;
}

static void load(const pb_kvcache_vtable *vtable, pb_kvcache *cache, const unsigned char *data, size_t size)
{
    const size_t bytes = pb_kvcache_state_bytes(cache);
    unsigned char *before = malloc(bytes);
    MUST(pb_kvcache_save(cache, before, bytes) == PB_KVCACHE_OK);
    const pb_kvcache_status status = pb_kvcache_load(cache, data, size);
    const size_t now = pb_kvcache_state_bytes(cache);
    unsigned char *after = malloc(now);
    MUST(pb_kvcache_save(cache, after, now) == PB_KVCACHE_OK);
    if (status != PB_KVCACHE_OK) {
        MUST(now == bytes && memcmp(before, after, now) == 0);
    } else {
        MUST(now == size && memcmp(data, after, now) == 0);
        /* Steps and evictions, as long as positions last */
        for (uint32_t i = 0; i < 20; ++i) {
            const size_t count = pb_kvcache_kept_count(cache);
            uint32_t *kept = malloc(count * sizeof *kept + 1);
            float *attn = malloc(count * sizeof *attn + 1);
            MUST(count <= pb_kvcache_capacity(cache) && pb_kvcache_kept(cache, kept, count) == PB_KVCACHE_OK);
            for (size_t k = 0; k < count; ++k) {
                double score;
                attn[k] = (float)((i + k) % 3);
                MUST(k == 0 || kept[k] > kept[k - 1]);
                MUST(pb_kvcache_window_score(cache, kept[k], &score) == PB_KVCACHE_ERROR_UNSUPPORTED || score >= 0.0);
            }
            const uint32_t pos = count == 0 ? 0 : kept[count - 1] + 1;
            if (count == 0 || pos != 0) {
                const pb_kvcache_status stepped = vtable->on_decode_step(cache, pos, attn, count);
                MUST(stepped == (count == pb_kvcache_capacity(cache) ? PB_KVCACHE_ERROR_FULL : PB_KVCACHE_OK));
            }
            const size_t need = pb_kvcache_evict_count(cache, i % 5);
            uint32_t *victims = malloc(need * sizeof *victims + 1);
            MUST(i % 4 != 3 || vtable->evict(cache, i % 5, victims, need) == need);
            free(victims);
            free(attn);
            free(kept);
        }
    }
    free(before);
    free(after);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const struct {
        const pb_kvcache_vtable *vtable;
        uint32_t params[9];
    } policies[] = {{&pb_kvcache_snapkv, {5, 1, 3, 3, 2}},      {&pb_kvcache_pyramidkv, {4, 1, 2, 3, 0, 2, 1}},
                    {&pb_kvcache_sliding_window, {5, 1}},       {&pb_kvcache_streaming_llm, {5, 2, 1}},
                    {&pb_kvcache_h2o, {5, 1, 1}},               {&pb_kvcache_tova, {5, 1}},
                    {&pb_kvcache_scissorhands, {5, 0, 1}}};
    enum { POLICIES = sizeof policies / sizeof policies[0], SHAPE = 28 };
    if (size == 0) {
        return 0;
    }
    const size_t which = data[0] % POLICIES;
    const pb_kvcache_vtable *vtable = policies[which].vtable;
    pb_kvcache *cache = vtable->create(policies[which].params, NULL, NULL);
    load(vtable, cache, data + 1, size - 1);
    /* With this policy's own shape before the bytes, and a frame */
    const size_t words = (size - 1) / 4 * 4;
    const size_t bytes = pb_kvcache_state_bytes(cache);
    unsigned char *saved = malloc(bytes);
    uint8_t *body = malloc(SHAPE + words);
    MUST(pb_kvcache_save(cache, saved, bytes) == PB_KVCACHE_OK);
    memcpy(body, saved + FRAME, SHAPE);
    if (words > 0) {
        memcpy(body + SHAPE, data + 1, words);
    }
    unsigned char *whole = framed(body, SHAPE + words);
    load(vtable, cache, whole, FRAME + SHAPE + words + CHECKSUM);
    free(whole);
    free(body);
    free(saved);
    vtable->destroy(cache);
    return 0;
}
