/* Where memory comes from. */
#ifndef PB_KVCACHE_ALLOCATOR_H
#define PB_KVCACHE_ALLOCATOR_H

#include <stddef.h>

#include "pb_kvcache/api.h"

PB_KVCACHE_EXTERN_C_BEGIN

/* cdef: begin */
/*
 * An allocator. The struct is copied at creation. Wherever one is taken, NULL means malloc and free, and one whose
 * `alloc` or `free` is NULL is refused.
 */
typedef struct pb_allocator {
    void *(*alloc)(void *ctx, size_t size);          /* `size` bytes aligned for any standard type, or NULL */
    void (*free)(void *ctx, void *ptr, size_t size); /* gets back the pointer and the very size that was asked for */
    void *ctx;                                       /* handed to both; must outlive the object */
} pb_allocator;

/* A random generator, as the registry's `create` takes one. Accepted everywhere and never read. */
typedef struct pb_rng pb_rng;
/* cdef: end */

PB_KVCACHE_EXTERN_C_END

#endif
