/* What the fuzz targets share: numbers from the fuzzer's bytes, promises that end the run, and an allocator that is
 * soon short of memory. */
#ifndef FUZZ_INPUT_H
#define FUZZ_INPUT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "pb_kvcache.h"

typedef struct input {
    const uint8_t *data;
    size_t left;
} input;

/* The next `bytes` bytes, at most 8, as a number. Bytes that are no longer there are 0. */
static inline uint64_t take_wide(input *in, size_t bytes)
{
    uint64_t value = 0;
    for (; bytes > 0 && in->left > 0; --bytes, --in->left) {
        value = value << 8 | *in->data++;
    }
    return value;
}

static inline uint32_t take(input *in, size_t bytes)
{
    return (uint32_t)take_wide(in, bytes);
}

/* Mostly below `small`, sometimes anything. */
static inline uint32_t number(input *in, uint32_t small)
{
    const uint32_t kind = take(in, 1);
    return kind < 0xF0 ? kind % small : take(in, 4);
}

#define MUST(condition)                                                                                               \
    do {                                                                                                              \
        if (!(condition)) {                                                                                           \
            abort();                                                                                                  \
        }                                                                                                             \
    } while (0)

/* `ctx` points to the most bytes that an allocation gets. */
static inline void *small_alloc(void *ctx, size_t size)
{
    return size > *(const size_t *)ctx ? NULL : malloc(size);
}

static inline void small_free(void *ctx, void *ptr, size_t size)
{
    (void)ctx;
    (void)size;
    free(ptr);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#endif
