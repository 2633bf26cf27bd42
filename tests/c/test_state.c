/* What the vectors cannot say of saved states: NULLs, buffers, and bytes with a right checksum that are none. */
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "internal.h"

enum { LAYERS = 3, MOST = 4096 };

static const pb_kvcache_stack_params small = {LAYERS, 4, 3, 1, 2, 3, 1, 0};

static uint32_t state = 1;

static uint32_t drawn(uint32_t below)
{
    state = state * 1664525u + 1013904223u;
    return (state >> 16) % below;
}

static void decode(const pb_kvcache_vtable *vtable, pb_kvcache *cache, uint32_t pos)
{
    float attn[64];
    uint32_t victims[64];
    const size_t count = pb_kvcache_kept_count(cache);
    for (size_t i = 0; i < count; ++i) {
        attn[i] = (float)drawn(5) * 0.25f;
    }
    if (count == pb_kvcache_capacity(cache)) {
        vtable->evict(cache, UINT32_MAX, victims, 64);
    } else {
        CHECK(vtable->on_decode_step(cache, pos, drawn(5) == 0 ? NULL : attn, count) == PB_KVCACHE_OK);
    }
}

static void test_null(void)
{
    unsigned char data[MOST];
    pb_kvcache *cache = pb_kvcache_snapkv.create(NULL, NULL, NULL);
    pb_kvcache_stack *stack = pb_kvcache_stack_create(&small, NULL, NULL);
    memset(data, 77, sizeof data);
    CHECK(pb_kvcache_state_bytes(NULL) == 0 && pb_kvcache_stack_state_bytes(NULL) == 0);
    CHECK(pb_kvcache_save(NULL, data, MOST) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_save(cache, NULL, MOST) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_load(NULL, data, MOST) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_load(cache, NULL, MOST) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_stack_save(NULL, data, MOST) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_stack_save(stack, NULL, MOST) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_stack_load(NULL, data, MOST) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_stack_load(stack, NULL, MOST) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_save(cache, data, pb_kvcache_state_bytes(cache) - 1) == PB_KVCACHE_ERROR_CAPACITY);
    CHECK(pb_kvcache_stack_save(stack, data, pb_kvcache_stack_state_bytes(stack) - 1) == PB_KVCACHE_ERROR_CAPACITY);
    CHECK(data[0] == 77);
    CHECK(pb_kvcache_load(cache, data, MOST) == PB_KVCACHE_ERROR_STATE);
    CHECK(pb_kvcache_stack_load(stack, data, 0) == PB_KVCACHE_ERROR_STATE);
    /* At any address */
    const size_t bytes = pb_kvcache_state_bytes(cache);
    CHECK(pb_kvcache_save(cache, data + 1, bytes) == PB_KVCACHE_OK);
    CHECK(pb_kvcache_load(cache, data + 1, bytes) == PB_KVCACHE_OK && data[0] == 77 && data[bytes + 1] == 77);
    CHECK(pb_kvcache_load(cache, data + 1, bytes + 1) == PB_KVCACHE_ERROR_STATE);
    CHECK(pb_kvcache_stack_load(stack, data + 1, bytes) == PB_KVCACHE_ERROR_MISMATCH);
    pb_kvcache_snapkv.destroy(cache);
    pb_kvcache_stack_destroy(stack);
}

/* A stack whose last layer is refused changes in none. */
static void test_all_layers_or_none(void)
{
    static const uint32_t plans[2][LAYERS] = {{6, 4, 2}, {6, 4, 3}};
    unsigned char data[2][MOST];
    pb_kvcache_stack *a = pb_kvcache_stack_create(&small, plans[0], NULL);
    pb_kvcache_stack *b = pb_kvcache_stack_create(&small, plans[1], NULL);
    CHECK(pb_kvcache_stack_on_decode_step(a, 1, NULL, NULL) == PB_KVCACHE_OK);
    const size_t bytes = pb_kvcache_stack_state_bytes(a);
    const size_t before = pb_kvcache_stack_state_bytes(b);
    CHECK(pb_kvcache_stack_save(a, data[0], MOST) == PB_KVCACHE_OK);
    CHECK(pb_kvcache_stack_load(b, data[0], bytes) == PB_KVCACHE_ERROR_MISMATCH);
    CHECK(pb_kvcache_stack_resident(b) == LAYERS && pb_kvcache_stack_peak_resident(b) == LAYERS);
    CHECK(pb_kvcache_stack_save(b, data[1], MOST) == PB_KVCACHE_OK && pb_kvcache_stack_state_bytes(b) == before);
    CHECK(pb_kvcache_stack_reset(a) == PB_KVCACHE_OK && pb_kvcache_stack_peak_resident(a) == LAYERS);
    CHECK(pb_kvcache_stack_load(a, data[0], bytes) == PB_KVCACHE_OK);
    CHECK(pb_kvcache_stack_resident(a) == 2 * LAYERS && pb_kvcache_stack_peak_resident(a) == 2 * LAYERS);
    pb_kvcache_stack_destroy(a);
    pb_kvcache_stack_destroy(b);
}

static void put_checksum(unsigned char *data, size_t size)
{
    uint64_t checksum = 0xCBF29CE484222325u;
    for (size_t at = 0; at + 8 < size; at += 4) {
        uint32_t word = 0;
        for (size_t byte = 4; byte-- > 0;) {
            word = word << 8 | data[at + byte];
        }
        checksum = (checksum ^ word) * 0x100000001B3u;
    }
    for (size_t byte = 0; byte < 8; ++byte) {
        data[size - 8 + byte] = (unsigned char)(checksum >> 8 * byte);
    }
}

/* States with changed numbers are refused and change nothing, or lead to a cache that goes on like any other. */
static void test_hostile(const pb_kvcache_vtable *vtable, const void *params)
{
    unsigned char data[MOST];
    unsigned char before[MOST];
    unsigned long taken = 0;
    pb_kvcache *cache = vtable->create(params, NULL, NULL);
    for (uint32_t round = 0; round < 3000; ++round) {
        pb_kvcache_reset(cache);
        for (uint32_t pos = 1; pos < 1 + drawn(24); ++pos) {
            decode(vtable, cache, pos);
        }
        const size_t size = pb_kvcache_state_bytes(cache);
        CHECK(pb_kvcache_save(cache, data, MOST) == PB_KVCACHE_OK);
        memcpy(before, data, size);
        const uint32_t number = drawn(2) == 0 ? drawn(12) : drawn(65536) << 16 | drawn(65536);
        const size_t at = 4 * (size_t)(8 + drawn((uint32_t)(size / 4 - 10)));
        for (size_t byte = 0; byte < 4; ++byte) {
            data[at + byte] = (unsigned char)(number >> 8 * byte);
        }
        put_checksum(data, size);
        unsigned char *exact = malloc(size); /* a sanitizer sees what is read beyond it */
        memcpy(exact, data, size);
        if (pb_kvcache_load(cache, exact, size) == PB_KVCACHE_OK) {
            ++taken;
            CHECK(pb_kvcache_save(cache, before, MOST) == PB_KVCACHE_OK && memcmp(before, data, size) == 0);
            uint32_t kept[64];
            const size_t count = pb_kvcache_kept_count(cache);
            CHECK(count <= pb_kvcache_capacity(cache) && pb_kvcache_kept(cache, kept, 64) == PB_KVCACHE_OK);
            for (uint32_t i = 0; count > 0 && kept[count - 1] < UINT32_MAX - 40 && i < 30; ++i) {
                decode(vtable, cache, kept[count - 1] + 1 + i);
            }
        } else {
            CHECK(pb_kvcache_state_bytes(cache) == size && pb_kvcache_save(cache, data, MOST) == PB_KVCACHE_OK);
            CHECK(memcmp(before, data, size) == 0);
        }
        free(exact);
    }
    CHECK(taken > 0 && taken < 3000);
    vtable->destroy(cache);
}

int main(void)
{
    static const uint32_t snapkv[] = {5, 1, 3, 3, 4, 3};
    static const uint32_t two[] = {5, 4, 3};
    static const uint32_t three[] = {5, 1, 4, 3};
    test_null();
    test_all_layers_or_none();
    test_hostile(&pb_kvcache_snapkv, snapkv);
    test_hostile(&pb_kvcache_sliding_window, two);
    test_hostile(&pb_kvcache_streaming_llm, three);
    test_hostile(&pb_kvcache_h2o, three);
    test_hostile(&pb_kvcache_tova, two);
    test_hostile(&pb_kvcache_scissorhands, three);
    return END();
}
