/*
 * The inner loops of the decode policies in portable C. lanes.c includes this file on
 * targets without SSE2. What each does is in lanes.h.
 */

/* Eight two-lane vectors of doubles on the narrowest target (SSE2). */
#define TILE 16u

static void add_rows_portable(const float *const *rows, size_t num_rows, const double *from, size_t n, size_t room,
                              double *sums)
{
    size_t i = 0;
    for (; i < n && room - i >= TILE; i += TILE) {
        const size_t width = n - i < TILE ? n - i : TILE;
        double lanes[TILE] = {0.0};
        if (from != NULL) {
            memcpy(lanes, from + i, sizeof lanes);
        }
        for (size_t row = 0; row < num_rows; ++row) {
            const float *weights = rows[row] + i;
            for (size_t lane = 0; lane < TILE; ++lane) {
                lanes[lane] += (double)weights[lane];
            }
        }
        if (width == TILE) {
            memcpy(sums + i, lanes, sizeof lanes);
        } else {
            memcpy(sums + i, lanes, width * sizeof *lanes);
        }
    }
    for (; i < n; ++i) {
        double sum = from == NULL ? 0.0 : from[i];
        for (size_t row = 0; row < num_rows; ++row) {
            sum += (double)rows[row][i];
        }
        sums[i] = sum;
    }
}

static double larger(double a, double b)
{
    return a > b ? a : b;
}

/* A tile's maxima, and the lowest of them. Where that is lower than all before it, its place is looked up. */
static size_t lowest_portable(const double *scores, size_t n, size_t kernel, double *lowest)
{
    double best = HUGE_VAL;
    size_t best_at = 0;
    for (size_t start = 0; start < n; start += TILE) {
        const size_t width = n - start < TILE ? n - start : TILE;
        double most[TILE];
        double low[TILE / 4];
        if (width == TILE) {
            memcpy(most, scores + start, sizeof most);
            for (size_t next = 1; next < kernel; ++next) {
                for (size_t lane = 0; lane < TILE; ++lane) {
                    most[lane] = larger(scores[start + next + lane], most[lane]);
                }
            }
        } else {
            for (size_t lane = 0; lane < TILE; ++lane) {
                most[lane] = HUGE_VAL;
            }
            for (size_t lane = 0; lane < width; ++lane) {
                most[lane] = scores[start + lane];
                for (size_t next = 1; next < kernel; ++next) {
                    most[lane] = larger(scores[start + next + lane], most[lane]);
                }
            }
        }
        for (size_t lane = 0; lane < TILE / 4; ++lane) {
            const double a = most[lane] < most[lane + TILE / 4] ? most[lane] : most[lane + TILE / 4];
            const double b = most[lane + TILE / 2] < most[lane + TILE / 4 * 3] ? most[lane + TILE / 2]
                                                                              : most[lane + TILE / 4 * 3];
            low[lane] = a < b ? a : b;
        }
        const double c = low[0] < low[1] ? low[0] : low[1];
        const double d = low[2] < low[3] ? low[2] : low[3];
        if (c < best || d < best) {
            for (size_t lane = 0; lane < width; ++lane) {
                if (most[lane] < best) {
                    best = most[lane];
                    best_at = start + lane;
                }
            }
        }
    }
    *lowest = best;
    return best_at;
}

#undef TILE
