/* The library's version: the one place where it is written. */
#ifndef PB_KVCACHE_VERSION_H
#define PB_KVCACHE_VERSION_H

#include "pb_kvcache/api.h"

PB_KVCACHE_EXTERN_C_BEGIN

/* cdef: begin */
#define PB_KVCACHE_VERSION_MAJOR 0
#define PB_KVCACHE_VERSION_MINOR 1
#define PB_KVCACHE_VERSION_PATCH 0

/* The version of the library that is linked, "MAJOR.MINOR.PATCH": a static string. */
PB_KVCACHE_API const char *pb_kvcache_version(void);
/* cdef: end */

PB_KVCACHE_EXTERN_C_END

#endif
