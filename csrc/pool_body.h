/*
 * Maximum over neighbours: one body for the decode policies (doubles) and for the prefill selection (floats).
 *
 * The including file defines, and this one undefines again:
 *   POOL_MAX    the name of a static function
 *   SCORE       what a score is
 *   USABLE(x)   the score itself, or a value that loses against every other where the score is to be passed over
 */
static void POOL_MAX(const SCORE *scores, size_t n, size_t kernel, SCORE *pooled)
{
    const size_t half = (kernel - 1) / 2;
    for (size_t i = 0; i < n; ++i) {
        pooled[i] = USABLE(scores[i]);
    }
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
            pooled[i] = pooled[i] > pooled[i + step] ? pooled[i] : pooled[i + step];
        }
        width += step;
    }
    /* Centre the windows. Those that begin before the array are maxima of its first elements. */
    if (half < n) {
        memmove(pooled + half, pooled, (n - half) * sizeof(SCORE));
    }
    SCORE first = USABLE(scores[0]);
    for (size_t i = 0, next = 1; i < n && i < half; ++i) {
        for (; next < n && next <= i + half; ++next) {
            const SCORE score = USABLE(scores[next]);
            first = score > first ? score : first;
        }
        pooled[i] = first;
    }
}

#undef POOL_MAX
#undef SCORE
#undef USABLE
