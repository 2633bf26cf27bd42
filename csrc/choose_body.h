/*
 * The choice of `count` among n scores: one body for the decode policies (lowest doubles) and for the prefill selection
 * (highest floats).
 *
 * The including file defines, and this one undefines again:
 *   CHOOSE            the name of a static function
 *   SCORE             what a score is
 *   KEY, KEY_BITS     an unsigned type and its width
 *   KEY_OF(x)         a key: the lowest keys are chosen
 *   FIRST(s, n)       the index of the first of the lowest keys: the choice of one
 */
static void CHOOSE(const SCORE *scores, size_t n, size_t count, uint32_t *chosen)
{
    /* None, one, all */
    if (count == 0 || n == 0) {
        return;
    }
    if (count == 1) {
        chosen[0] = FIRST(scores, n);
        return;
    }
    if (count >= n) {
        for (size_t i = 0; i < n; ++i) {
            chosen[i] = (uint32_t)i;
        }
        return;
    }
    /* The count-th lowest key, eight bits at a time from the top. `rest` counts those still to be found among the keys
     * that begin with `prefix`. */
    KEY prefix = 0;
    KEY mask = 0;
    size_t rest = count;
    for (int shift = KEY_BITS - 8; shift >= 0; shift -= 8) {
        size_t histogram[256] = {0};
        for (size_t i = 0; i < n; ++i) {
            const KEY key = KEY_OF(scores[i]);
            if ((key & mask) == prefix) {
                ++histogram[(key >> shift) & 255u];
            }
        }
        size_t digit = 0;
        while (digit < 255 && histogram[digit] < rest) {
            rest -= histogram[digit];
            ++digit;
        }
        prefix |= (KEY)digit << shift;
        mask |= (KEY)255 << shift;
        if (histogram[digit] == rest) { /* all of them are chosen: the digits below do not matter */
            break;
        }
    }
    /* Every lower key, and the first `rest` of those that are equal */
    size_t written = 0;
    for (size_t i = 0; i < n && written < count; ++i) {
        const KEY key = KEY_OF(scores[i]) & mask;
        if (key < prefix) {
            chosen[written++] = (uint32_t)i;
        } else if (key == prefix && rest > 0) {
            chosen[written++] = (uint32_t)i;
            --rest;
        }
    }
}

#undef CHOOSE
#undef SCORE
#undef KEY
#undef KEY_BITS
#undef KEY_OF
#undef FIRST
