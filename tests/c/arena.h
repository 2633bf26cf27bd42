/* An allocator for tests that counts, fails at its `fail_at`-th call, and checks what it gets back. */
#ifndef ARENA_H
#define ARENA_H

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

typedef struct arena {
    size_t calls;
    size_t fail_at; /* 0: never */
    size_t outstanding;
    size_t bytes;
} arena;

static void *arena_alloc(void *ctx, size_t size)
{
    arena *a = ctx;
    if (++a->calls == a->fail_at) {
        return NULL;
    }
    void *ptr = malloc(size);
    memset(ptr, 0xA5, size); /* creation must not rely on zeros */
    ++a->outstanding;
    a->bytes += size;
    return ptr;
}

static void arena_free(void *ctx, void *ptr, size_t size)
{
    arena *a = ctx;
    memset(ptr, 0x5A, size); /* size must be what was asked for */
    --a->outstanding;
    a->bytes -= size;
    free(ptr);
}

#endif
