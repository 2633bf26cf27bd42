/* Checks that several public functions share: sizes, arrays in memory, values and options. */
#ifndef PB_KVCACHE_CHECKS_H
#define PB_KVCACHE_CHECKS_H

#include "internal.h"

/* ---- Sizes: false where the result does not fit, and then *out is untouched. ---- */

bool pb_kvcache_priv_mul(size_t a, size_t b, size_t *out);
bool pb_kvcache_priv_add(size_t a, size_t b, size_t *out);

/* Bytes from the first element of the first row to the end of the last: `rows` rows of `width` elements of `size`
 * bytes, `stride` elements apart. At most PTRDIFF_MAX. */
bool pb_kvcache_priv_span_bytes(size_t rows, size_t stride, size_t width, size_t size, size_t *bytes);

/* ---- Arrays in memory ---- */

bool pb_kvcache_priv_overlap(const void *a, size_t a_bytes, const void *b, size_t b_bytes);
bool pb_kvcache_priv_aligned(const void *pointer, size_t size);

/* The first address in a workspace that is a whole cache line. Workspace sizes include the slack. */
#define PB_KVCACHE_PRIV_ALIGNMENT 64u
void *pb_kvcache_priv_align(void *workspace);

/* Rows first .. end-1 of `width` elements, `stride` elements apart, within an array of `capacity`, not overlapping. */
pb_kvcache_status pb_kvcache_priv_rows_ok(const void *rows, size_t size, size_t stride, size_t first, size_t end,
                                          size_t width, size_t capacity);

/* Rows of scores that are read: aligned, of a size that fits, and finite where `nan` refuses others. */
pb_kvcache_status pb_kvcache_priv_scores_ok(const float *scores, size_t stride, size_t num_heads, size_t n,
                                            pb_kvcache_nan nan);

/* ---- Values and options ---- */

/* true where every weight is finite and >= 0 (-0.0 is). */
bool pb_kvcache_priv_weights_ok(const float *weights, size_t n);

bool pb_kvcache_priv_nan_ok(pb_kvcache_nan nan);
bool pb_kvcache_priv_edge_ok(pb_kvcache_edge edge);
bool pb_kvcache_priv_reduce_ok(pb_kvcache_reduce reduce);

#endif
