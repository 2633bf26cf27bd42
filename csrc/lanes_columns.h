/*
 * Products of rows with a block of columns. lanes.c includes this file once for each instruction set.
 *
 * The including file defines NAME(function), the function's name with the set's, and where the set has vectors by name
 * what follows. This one undefines all of it again:
 *   VECTOR, WIDTH   a vector of WIDTH floats
 *   TILE_VECTORS    vectors of columns, times
 *   TILE_ROWS       rows, whose sums fill the registers together
 *   LOAD, STORE, SPLAT, ADD, MUL
 * TARGET, the functions' attributes, stays.
 *
 * Every sum has its terms in their order, whatever the tile. 4,096 columns by 480 rows of 64 floats, Zen 4, milliseconds
 * of the plain loop and of the tiles (SSE2, AVX2, AVX-512):
 *   GCC 12    6.5 2.9 2.9    6.4 2.2 2.2
 *   clang 14   11 2.7 2.9    6.6 2.4 2.2
 */
#ifdef VECTOR
/* `rows` rows with the columns of `vectors` vectors. A macro, because GCC 12 keeps the sums in registers only where the
 * loops' ends are constants before it inlines: 2.2 ms instead of 3.0 with AVX-512. It clears and reads memory for them
 * where the loop over elements may have no round: 2.4 ms. */
#define TILE(function, vectors, rows)                                                                                 \
    TARGET static inline void NAME(function)(const float *columns, const float *queries, size_t dim, float *dots)     \
    {                                                                                                                 \
        VECTOR sums[rows][vectors];                                                                                   \
        for (size_t row = 0; row < (rows); ++row) {                                                                   \
            for (size_t v = 0; v < (vectors); ++v) {                                                                  \
                sums[row][v] = SPLAT(0.0f);                                                                           \
            }                                                                                                         \
        }                                                                                                             \
        size_t d = 0;                                                                                                 \
        do {                                                                                                          \
            VECTOR x[vectors];                                                                                        \
            for (size_t v = 0; v < (vectors); ++v) {                                                                  \
                x[v] = LOAD(columns + d * COLUMNS + v * WIDTH);                                                       \
            }                                                                                                         \
            for (size_t row = 0; row < (rows); ++row) {                                                               \
                const VECTOR element = SPLAT(queries[row * dim + d]);                                                 \
                for (size_t v = 0; v < (vectors); ++v) {                                                              \
                    sums[row][v] = ADD(sums[row][v], MUL(x[v], element));                                             \
                }                                                                                                     \
            }                                                                                                         \
        } while (++d < dim);                                                                                          \
        for (size_t row = 0; row < (rows); ++row) {                                                                   \
            for (size_t v = 0; v < (vectors); ++v) {                                                                  \
                STORE(dots + row * COLUMNS + v * WIDTH, sums[row][v]);                                                \
            }                                                                                                         \
        }                                                                                                             \
    }
TILE(columns_tile, TILE_VECTORS, TILE_ROWS)
TILE(columns_row, 4, 1)

/* See lanes.h. Rows that fill no tile go one by one, with four vectors of columns. */
TARGET static void NAME(columns)(const float *columns, const float *queries, size_t group, size_t dim, float *dots)
{
    size_t row = 0;
    for (; row + TILE_ROWS <= group; row += TILE_ROWS) {
        for (size_t i = 0; i < COLUMNS; i += TILE_VECTORS * WIDTH) {
            NAME(columns_tile)(columns + i, queries + row * dim, dim, dots + row * COLUMNS + i);
        }
    }
    for (; row < group; ++row) {
        for (size_t i = 0; i < COLUMNS; i += 4 * WIDTH) {
            NAME(columns_row)(columns + i, queries + row * dim, dim, dots + row * COLUMNS + i);
        }
    }
}

#undef TILE
#undef VECTOR
#undef WIDTH
#undef TILE_VECTORS
#undef TILE_ROWS
#undef LOAD
#undef STORE
#undef SPLAT
#undef ADD
#undef MUL
#else
TARGET static void NAME(columns)(const float *restrict columns, const float *restrict queries, size_t group, size_t dim,
                                 float *restrict dots)
{
    for (size_t g = 0; g < group; ++g) {
        float sums[COLUMNS] = {0.0f};
        for (size_t d = 0; d < dim; ++d) {
            const float element = queries[g * dim + d];
            for (size_t i = 0; i < COLUMNS; ++i) {
                sums[i] += columns[d * COLUMNS + i] * element;
            }
        }
        memcpy(dots + g * COLUMNS, sums, sizeof sums);
    }
}
#endif
#undef NAME
