#include <stdlib.h>

#include "internal.h"

static void *malloc_alloc(void *ctx, size_t size)
{
    (void)ctx;
    return malloc(size);
}

static void malloc_free(void *ctx, void *ptr, size_t size)
{
    (void)ctx;
    (void)size;
    free(ptr);
}

bool pb_kvcache_priv_allocator(const pb_allocator *allocator, pb_allocator *out)
{
    if (allocator == NULL) {
        *out = (pb_allocator){malloc_alloc, malloc_free, NULL};
        return true;
    }
    if (allocator->alloc == NULL || allocator->free == NULL) {
        return false;
    }
    *out = *allocator;
    return true;
}
