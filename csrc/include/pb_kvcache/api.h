/*
 * How the public symbols are declared: C linkage, and exported from a shared library.
 *
 * A program that links the shared library on Windows defines PB_KVCACHE_SHARED. The CMake target and the pkg-config
 * file do so. PB_KVCACHE_BUILD is defined while the library itself is compiled.
 */
#ifndef PB_KVCACHE_API_H
#define PB_KVCACHE_API_H

#ifdef __cplusplus
#define PB_KVCACHE_EXTERN_C_BEGIN extern "C" {
#define PB_KVCACHE_EXTERN_C_END }
#else
#define PB_KVCACHE_EXTERN_C_BEGIN
#define PB_KVCACHE_EXTERN_C_END
#endif

#if defined(_WIN32) && defined(PB_KVCACHE_SHARED) && defined(PB_KVCACHE_BUILD)
#define PB_KVCACHE_API __declspec(dllexport)
#elif defined(_WIN32) && defined(PB_KVCACHE_SHARED)
#define PB_KVCACHE_API __declspec(dllimport)
#elif defined(__GNUC__)
#define PB_KVCACHE_API __attribute__((visibility("default")))
#else
#define PB_KVCACHE_API
#endif

#endif
