/* Score, pool, choose: stateless kernels over arrays, for the policies and for the prefill selection. */
#ifndef PB_KVCACHE_KERNELS_H
#define PB_KVCACHE_KERNELS_H

#include "internal.h"

/* ---- Of the policies: doubles ---- */

/*
 * Maximum over the neighbours i-(kernel-1)/2 .. i+(kernel-1)/2, clamped at both ends: pooled[i] for i < n. `kernel` is
 * odd and may exceed n. No NaN. `pooled` may be `scores`.
 */
void pb_kvcache_priv_pool_max(const double *scores, size_t n, size_t kernel, double *pooled);

/* The index of the lowest of the first `most` of n such maxima, of equal ones the first. 0 < most <= n. A wide kernel
 * leaves the maxima in `scores`. */
size_t pb_kvcache_priv_pool_lowest(double *scores, size_t n, size_t kernel, size_t most);

/* Indices of the `count` lowest of n scores (count <= n), ties to the lower index, ascending, to `chosen`. O(n), no
 * allocation. -0.0 equals 0.0. */
void pb_kvcache_priv_choose_lowest(const double *scores, size_t n, size_t count, uint32_t *chosen);

/* ---- Of the prefill selection: floats ---- */

/* Indices of the `count` highest of n < 2^32 scores, as above. What is not finite ranks below everything else. */
void pb_kvcache_priv_choose_highest(const float *scores, size_t n, size_t count, uint32_t *chosen);

/* The same, for scores of which none is NaN or +inf. */
void pb_kvcache_priv_choose_highest_of_numbers(const float *scores, size_t n, size_t count, uint32_t *chosen);

/* One row of pb_kvcache_pool_scores: NaN and infinities count as -inf. `workspace` has as many doubles as
 * pb_kvcache_priv_pool_doubles says. */
void pb_kvcache_priv_pool(const float *scores, size_t n, pb_kvcache_pooling pooling, size_t kernel,
                          pb_kvcache_edge edge, double *workspace, float *pooled);
pb_kvcache_status pb_kvcache_priv_pool_doubles(size_t n, pb_kvcache_pooling pooling, size_t kernel, size_t *doubles);

/* Scratch of one KV head: rows of n floats. */
#define PB_KVCACHE_PRIV_SCRATCH_ROWS 3u
typedef struct pb_kvcache_priv_scratch {
    float *sums; /* of the window's rows */
    float *exps;
    float *copy; /* of a row that needs repair */
} pb_kvcache_priv_scratch;
pb_kvcache_priv_scratch pb_kvcache_priv_scratch_at(float *floats, size_t n);

/* Scores of one KV head's first `scored` < n positions. Arguments are checked, values are not. */
pb_kvcache_status pb_kvcache_priv_head_scores(const pb_kvcache_attention *attn, pb_kvcache_reduce reduce,
                                              pb_kvcache_nan nan, size_t scored, size_t kv_head,
                                              const pb_kvcache_priv_scratch *scratch, float *scores);

/* Everything about an attention but its values, and does an array overlap what is read of it? */
pb_kvcache_status pb_kvcache_priv_attention_ok(const pb_kvcache_attention *attn, size_t first_head, size_t end_head);
bool pb_kvcache_priv_overlaps_attention(const pb_kvcache_attention *attn, size_t first_head, size_t end_head,
                                        const void *array, size_t bytes);

#endif
