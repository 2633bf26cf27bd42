/*
 * Column sums of rows of weights for the prefill selection: three kinds of rows, sums in float, a tile in the first
 * cache.
 *
 * The including file defines, and this one undefines again:
 *   COLUMN_SUMS   the name
 *   TARGET        the function's attributes, or nothing
 *   ROW           what a row is made of
 *   LOAD(x)       one element as a float. May note what it sees in the uint32_t `seen`
 *   SUM           what is summed in
 *   TILE          columns that are summed together
 *
 * sums[i] = 0 + rows[0][i] + rows[1][i] + ..., in this order, whatever TILE is, for i < n. Row r starts at
 * rows + r * stride. `sums` does not overlap the rows. Returns what LOAD has seen.
 */
TARGET static uint32_t COLUMN_SUMS(const ROW *rows, ptrdiff_t stride, size_t num_rows, size_t n, SUM *sums)
{
    uint32_t seen = 0;
    for (size_t start = 0; start < n; start += TILE) {
        const size_t width = n - start < TILE ? n - start : TILE;
        SUM lanes[TILE] = {0};
        for (size_t row = 0; row < num_rows; ++row) {
            const ROW *weights = rows + (ptrdiff_t)row * stride + start;
            if (width == TILE) {
                for (size_t lane = 0; lane < TILE; ++lane) {
                    lanes[lane] += (SUM)LOAD(weights[lane]);
                }
            } else {
                for (size_t lane = 0; lane < width; ++lane) {
                    lanes[lane] += (SUM)LOAD(weights[lane]);
                }
            }
        }
        memcpy(sums + start, lanes, width * sizeof(SUM));
    }
    return seen;
}

#undef COLUMN_SUMS
#undef ROW
#undef LOAD
#undef SUM
#undef TILE
