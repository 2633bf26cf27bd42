#include <string.h>

#include "internal.h"

static double larger(double a, double b)
{
    return a > b ? a : b;
}

void pb_kvcache_priv_pool_max(const double *scores, size_t n, size_t kernel, double *pooled)
{
    const size_t half = (kernel - 1) / 2;
    memcpy(pooled, scores, n * sizeof(double));
    if (half == 0 || n <= 1) {
        return;
    }
    /*
     * Maxima over windows i .. i+width-1 by doubling the width in place (each pass reads only what lies ahead), then
     * the window of exactly `kernel` from two that overlap: O(n log kernel), and every pass is a plain loop.
     */
    const size_t window = kernel < n ? kernel : n;
    size_t width = 1;
    while (width < window) {
        const size_t step = width <= window - width ? width : window - width;
        for (size_t i = 0; i + step < n; ++i) {
            pooled[i] = larger(pooled[i], pooled[i + step]);
        }
        width += step;
    }
    /* Centre the windows; those that begin before the array are maxima of its first elements. */
    if (half < n) {
        memmove(pooled + half, pooled, (n - half) * sizeof(double));
    }
    double first = scores[0];
    for (size_t i = 0, next = 1; i < n && i < half; ++i) {
        for (; next < n && next <= i + half; ++next) {
            first = larger(first, scores[next]);
        }
        pooled[i] = first;
    }
}
