/*
 * Maximum over neighbours: one body for the decode policies (doubles) and for the prefill selection (floats).
 *
 * The including file defines, and this one undefines again:
 *   POOL_MAX    the name of a static function
 *   SCORE       what a score is
 *   USABLE(x)   the score itself, or a value that loses against every other where the score is to be passed over
 * `pooled` may be `scores`.
 */
static void POOL_MAX(const SCORE *scores, size_t n, size_t kernel, SCORE *pooled)
{
    const size_t half = (kernel - 1) / 2 < n ? (kernel - 1) / 2 : n - (n > 0);
    enum { BLOCK = 64 };
    for (size_t i = 0; i < n; ++i) {
        pooled[i] = USABLE(scores[i]);
    }
    if (half == 0) {
        return;
    }
    /* Maxima over i .. i+half, clamped at the end, by doubling the width in place: each pass reads only what lies
     * ahead. O(n log kernel), and every pass is a plain loop. */
    for (size_t width = 1; width < half + 1;) {
        const size_t step = width <= half + 1 - width ? width : half + 1 - width;
        for (size_t i = 0; i + step < n; ++i) {
            pooled[i] = pooled[i] > pooled[i + step] ? pooled[i] : pooled[i + step];
        }
        width += step;
    }
    /* Over i-half .. i+half: from i-half and from i, the last block first, since a block reads what lies before it */
    size_t end = n;
    while (end > half) {
        const size_t start = end - half > BLOCK ? end - BLOCK : half;
        SCORE block[BLOCK];
        for (size_t i = start; i < end; ++i) {
            const SCORE before = pooled[i - half];
            block[i - start] = pooled[i] > before ? pooled[i] : before;
        }
        memcpy(pooled + start, block, (end - start) * sizeof *block);
        end = start;
    }
    /* Windows that begin before the array */
    for (size_t i = 1; i < half; ++i) {
        pooled[i] = pooled[i] > pooled[i - 1] ? pooled[i] : pooled[i - 1];
    }
}

#undef POOL_MAX
#undef SCORE
#undef USABLE
