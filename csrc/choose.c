#include <string.h>

#include "internal.h"

/* Unsigned keys in the order of the scores, with -0.0 equal to 0.0. */
static uint64_t key_of(double score)
{
    uint64_t bits;
    score += 0.0;
    memcpy(&bits, &score, sizeof bits);
    return (bits >> 63) != 0 ? ~bits : bits | ((uint64_t)1 << 63);
}

static uint32_t lowest(const double *scores, size_t n)
{
    size_t best = 0;
    for (size_t i = 1; i < n; ++i) {
        if (scores[i] < scores[best]) {
            best = i;
        }
    }
    return (uint32_t)best;
}

void pb_kvcache_priv_choose_lowest(const double *scores, size_t n, size_t count, uint32_t *chosen)
{
    if (count == 0) {
        return;
    }
    if (count == 1) { /* a step's usual eviction */
        chosen[0] = lowest(scores, n);
        return;
    }
    /* The key of the count-th lowest score, eight bits at a time from the top. `rest` counts those still to be found
     * among the keys that begin with `prefix`. */
    uint64_t prefix = 0;
    uint64_t mask = 0;
    size_t rest = count;
    for (int shift = 56; shift >= 0; shift -= 8) {
        size_t histogram[256] = {0};
        for (size_t i = 0; i < n; ++i) {
            const uint64_t key = key_of(scores[i]);
            if ((key & mask) == prefix) {
                ++histogram[(key >> shift) & 255u];
            }
        }
        size_t digit = 0;
        while (histogram[digit] < rest) {
            rest -= histogram[digit];
            ++digit;
        }
        prefix |= (uint64_t)digit << shift;
        mask |= (uint64_t)255 << shift;
        if (histogram[digit] == rest) { /* all of them go: the digits below do not matter */
            break;
        }
    }
    size_t written = 0;
    for (size_t i = 0; i < n && written < count; ++i) {
        const uint64_t key = key_of(scores[i]) & mask;
        if (key < prefix) {
            chosen[written++] = (uint32_t)i;
        } else if (key == prefix && rest > 0) {
            chosen[written++] = (uint32_t)i;
            --rest;
        }
    }
}
