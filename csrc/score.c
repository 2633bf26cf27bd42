#include <string.h>

#include "internal.h"

/* Columns summed together: eight two-lane registers of doubles on the narrowest target (SSE2). */
#define LANES 16u

void pb_kvcache_priv_column_sums(const float *rows, size_t stride, const uint32_t *lengths, size_t num_rows, size_t n,
                                 double *sums)
{
    for (size_t start = 0; start < n; start += LANES) {
        const size_t width = n - start < LANES ? n - start : LANES;
        double lanes[LANES] = {0.0};
        for (size_t row = 0; row < num_rows; ++row) {
            const float *weights = rows + row * stride + start;
            if (lengths[row] >= start + LANES) {
                for (size_t lane = 0; lane < LANES; ++lane) {
                    lanes[lane] += (double)weights[lane];
                }
            } else if (lengths[row] > start) {
                const size_t held = lengths[row] - start;
                for (size_t lane = 0; lane < held; ++lane) {
                    lanes[lane] += (double)weights[lane];
                }
            }
        }
        memcpy(sums + start, lanes, width * sizeof(double));
    }
}

bool pb_kvcache_priv_weights_ok(const float *weights, size_t n)
{
    /* By bit pattern, so that no compiler flag can argue a NaN away: above +infinity's predecessor nothing is good but
     * -0.0. */
    uint32_t bad = 0;
    for (size_t i = 0; i < n; ++i) {
        uint32_t bits;
        memcpy(&bits, weights + i, sizeof bits);
        bad |= (uint32_t)(bits > 0x7F7FFFFFu) & (uint32_t)(bits != 0x80000000u);
    }
    return bad == 0;
}
