/*
 * The inner loops of the decode policies in x86 vectors of doubles. lanes.c includes this file once for each set. The
 * loops of lanes_decode_portable.h give the same bits.
 *
 * The including file defines, and this one undefines again:
 *   NAME(function)       the function's name with the set's
 *   VECTOR, WIDTH        a vector of WIDTH doubles
 *   UNROLLED             vectors side by side: the registers' worth, so that no addition waits for the one before it
 *   LOAD, STORE, SPLAT, ADD, MAX
 *   STORE_FIRST(x, n, vector)  the first n < WIDTH
 *   LOAD_FLOATS(x)       WIDTH floats as doubles
 *   SHIFTED_BY_1(a, b), SHIFTED_BY_2(a, b), SHIFTED_BY_3(a, b, c)  what begins so many places later in a, then b, then c
 *   AHEAD                vectors beyond the one in hand that maxima of seven are made from
 *   KEEP_LOWER(x, at, low, low_at)  where x < low, low and low_at become x and at
 * TARGET, the functions' attributes, stays.
 */

/* `vectors` vectors of sums, of which the first `width` doubles are stored. */
TARGET static inline void NAME(add_block)(const float *const *rows, size_t num_rows, const double *from, size_t start,
                                          size_t width, size_t vectors, double *sums)
{
    VECTOR lanes[UNROLLED];
    for (size_t v = 0; v < vectors; ++v) {
        lanes[v] = from == NULL ? SPLAT(0.0) : LOAD(from + start + v * WIDTH);
    }
    for (size_t row = 0; row < num_rows; ++row) {
        const float *weights = rows[row] + start;
        for (size_t v = 0; v < vectors; ++v) {
            lanes[v] = ADD(lanes[v], LOAD_FLOATS(weights + v * WIDTH));
        }
    }
    for (size_t v = 0; v < vectors; ++v) {
        if (width < (v + 1) * WIDTH) {
            if (width > v * WIDTH) {
                STORE_FIRST(sums + start + v * WIDTH, width - v * WIDTH, lanes[v]);
            }
        } else {
            STORE(sums + start + v * WIDTH, lanes[v]);
        }
    }
}

/* See lanes.h. The last block is no wider than it has to be. */
TARGET static void NAME(add_rows)(const float *const *rows, size_t num_rows, const double *from, size_t n, size_t room,
                                  double *sums)
{
    size_t i = 0;
    for (; i + UNROLLED * WIDTH <= n; i += UNROLLED * WIDTH) {
        NAME(add_block)(rows, num_rows, from, i, UNROLLED * WIDTH, UNROLLED, sums);
    }
    while (i < n && room - i >= WIDTH) {
        size_t width = n - i;
        if (width > UNROLLED / 2 * WIDTH && room - i >= UNROLLED * WIDTH) {
            NAME(add_block)(rows, num_rows, from, i, width, UNROLLED, sums);
        } else if (width > UNROLLED / 4 * WIDTH && room - i >= UNROLLED / 2 * WIDTH) {
            width = width < UNROLLED / 2 * WIDTH ? width : UNROLLED / 2 * WIDTH;
            NAME(add_block)(rows, num_rows, from, i, width, UNROLLED / 2, sums);
        } else if (width > WIDTH && room - i >= UNROLLED / 4 * WIDTH) {
            width = width < UNROLLED / 4 * WIDTH ? width : UNROLLED / 4 * WIDTH;
            NAME(add_block)(rows, num_rows, from, i, width, UNROLLED / 4, sums);
        } else {
            width = width < WIDTH ? width : WIDTH;
            NAME(add_block)(rows, num_rows, from, i, width, 1, sums);
        }
        i += width;
    }
    for (; i < n; ++i) {
        double sum = from == NULL ? 0.0 : from[i];
        for (size_t row = 0; row < num_rows; ++row) {
            sum += (double)rows[row][i];
        }
        sums[i] = sum;
    }
}

/* See lanes.h. Each lane keeps its own lowest maximum and where that was. */
TARGET static size_t NAME(lowest)(const double *scores, size_t n, size_t kernel, double *lowest)
{
    enum { CHAINS = 4 };
    VECTOR low[CHAINS];
    INDICES low_at[CHAINS];
    double lows[CHAINS * WIDTH];
    int64_t places[CHAINS * WIDTH];
    size_t i = 0;
    for (size_t chain = 0; chain < CHAINS; ++chain) {
        low[chain] = SPLAT(HUGE_VAL);
        low_at[chain] = SPLAT_INDEX(0);
    }
    if (kernel == 7 && n + 6 >= (CHAINS + AHEAD) * WIDTH) {
        /* The default: maxima of 2, of 4 and of 7 neighbours, each of two of the one before, in registers. An eviction
         * of one of 4,096: 6.9 us became 6.0 with AVX-512, 11.9 became 10.6 with two lanes (clang). */
        VECTOR last = LOAD(scores + (AHEAD - 1) * WIDTH);
        VECTOR two = LOAD(scores + (AHEAD - 2) * WIDTH);
        VECTOR four[AHEAD - 2];
        two = MAX(two, SHIFTED_BY_1(two, last));
        for (size_t v = 0; v < AHEAD - 2; ++v) {
            const VECTOR a = LOAD(scores + v * WIDTH);
            const VECTOR b = LOAD(scores + (v + 1) * WIDTH);
            const VECTOR c = LOAD(scores + (v + 2) * WIDTH);
            const VECTOR first = MAX(a, SHIFTED_BY_1(a, b));
            four[v] = MAX(first, SHIFTED_BY_2(first, MAX(b, SHIFTED_BY_1(b, c))));
        }
        for (; i + (CHAINS + AHEAD) * WIDTH <= n + 6; i += CHAINS * WIDTH) {
            VECTOR most[CHAINS];
            for (size_t chain = 0; chain < CHAINS; ++chain) {
                const VECTOR next = LOAD(scores + i + (chain + AHEAD) * WIDTH);
                const VECTOR next_two = MAX(last, SHIFTED_BY_1(last, next));
                const VECTOR next_four = MAX(two, SHIFTED_BY_2(two, next_two));
                most[chain] = MAX(four[0], SHIFTED_BY_3(four[0], AHEAD == 3 ? next_four : four[AHEAD - 3], next_four));
                four[0] = AHEAD == 3 ? next_four : four[AHEAD - 3];
                four[AHEAD - 3] = next_four;
                last = next;
                two = next_two;
            }
            for (size_t chain = 0; chain < CHAINS; ++chain) {
                KEEP_LOWER(most[chain], SPLAT_INDEX((int64_t)i), low[chain], low_at[chain]);
            }
        }
    }
    for (; i + CHAINS * WIDTH <= n; i += CHAINS * WIDTH) {
        VECTOR most[CHAINS];
        for (size_t chain = 0; chain < CHAINS; ++chain) {
            most[chain] = LOAD(scores + i + chain * WIDTH);
        }
        for (size_t next = 1; next < kernel; ++next) {
            for (size_t chain = 0; chain < CHAINS; ++chain) {
                most[chain] = MAX(LOAD(scores + i + next + chain * WIDTH), most[chain]);
            }
        }
        for (size_t chain = 0; chain < CHAINS; ++chain) {
            KEEP_LOWER(most[chain], SPLAT_INDEX((int64_t)i), low[chain], low_at[chain]);
        }
    }
    /* The lanes' lowest, of equal ones the first; then what is left */
    double best = HUGE_VAL;
    size_t best_at = 0;
    if (i > 0) {
        for (size_t chain = 0; chain < CHAINS; ++chain) {
            STORE(lows + chain * WIDTH, low[chain]);
            STORE_INDICES(places + chain * WIDTH, low_at[chain]);
        }
        for (size_t lane = 0; lane < CHAINS * WIDTH; ++lane) {
            const size_t at = (size_t)places[lane] + lane;
            if (lows[lane] < best || (lows[lane] == best && at < best_at)) {
                best = lows[lane];
                best_at = at;
            }
        }
    }
    for (; i < n; ++i) {
        double most = scores[i];
        for (size_t next = 1; next < kernel; ++next) {
            most = scores[i + next] > most ? scores[i + next] : most;
        }
        if (most < best) {
            best = most;
            best_at = i;
        }
    }
    *lowest = best;
    return best_at;
}

#undef NAME
#undef VECTOR
#undef INDICES
#undef WIDTH
#undef UNROLLED
#undef LOAD
#undef STORE
#undef STORE_FIRST
#undef SPLAT
#undef SPLAT_INDEX
#undef STORE_INDICES
#undef ADD
#undef MAX
#undef LOAD_FLOATS
#undef SHIFTED_BY_1
#undef SHIFTED_BY_2
#undef SHIFTED_BY_3
#undef AHEAD
#undef KEEP_LOWER
