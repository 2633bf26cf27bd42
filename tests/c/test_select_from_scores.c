/* pb_kvcache_select_from_scores: what is refused and leaves the output alone, and what is not read. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "pb_kvcache.h"

int main(void)
{
    enum { HEADS = 2, N = 9, WINDOW = 3 };
    const float row[2 * 6] = {1, 2, 3, 4, 5, 6, 6, NAN, 1, 1, 1, 6};
    const pb_kvcache_nan refuse = PB_KVCACHE_NAN_REFUSE;
    pb_kvcache_select_params p = {(pb_kvcache_reduce)77, PB_KVCACHE_POOL_MAX, 1, refuse}; /* reduce is not read */
    uint32_t budgets[HEADS] = {5, 9};
    uint32_t kept[HEADS * N + 1];
    size_t size;
    CHECK(pb_kvcache_select_from_scores_workspace_size(&p, N, WINDOW, &size) == PB_KVCACHE_OK && size > 0);
    unsigned char *workspace = malloc(size);
    memset(kept, 0xAB, sizeof kept);
#define FROM(scores, heads, n, window, budgets, workspace, size, kept, stride, capacity)                              \
    pb_kvcache_select_from_scores(scores, 6, heads, n, window, &p, budgets, workspace, size, kept, stride, capacity)
    CHECK(FROM(NULL, 2, N, WINDOW, budgets, workspace, size, kept, N, 18) == PB_KVCACHE_ERROR_NULL);
    CHECK(FROM(row, 2, N, WINDOW, NULL, workspace, size, kept, N, 18) == PB_KVCACHE_ERROR_NULL);
    CHECK(FROM(row, 2, N, WINDOW, budgets, NULL, size, kept, N, 18) == PB_KVCACHE_ERROR_NULL);
    CHECK(FROM(row, 2, N, WINDOW, budgets, workspace, size, NULL, N, 18) == PB_KVCACHE_ERROR_NULL);
    CHECK(FROM(row, 2, N, 0, budgets, workspace, size, kept, N, 18) == PB_KVCACHE_ERROR_WINDOW);
    CHECK(FROM(row, 2, N, N, budgets, workspace, size, kept, N, 18) == PB_KVCACHE_ERROR_WINDOW);
    CHECK(FROM(row, 2, N, WINDOW, budgets, workspace, size - 1, kept, N, 18) == PB_KVCACHE_ERROR_WORKSPACE);
    CHECK(FROM(row, 2, N, WINDOW, budgets, workspace, size, kept, N, 17) == PB_KVCACHE_ERROR_CAPACITY);
    CHECK(FROM(row, 2, N, WINDOW, budgets, workspace, size, kept, N - 1, 18) == PB_KVCACHE_ERROR_STRIDE);
    CHECK(FROM((const float *)(const void *)((const char *)row + 1), 1, N, WINDOW, budgets, workspace, size, kept, N, 18)
          == PB_KVCACHE_ERROR_ALIGNMENT);
    CHECK(FROM(row, 2, N, WINDOW, budgets, (void *)(uintptr_t)row, size, kept, N, 18) == PB_KVCACHE_ERROR_OVERLAP);
    CHECK(FROM(row, 2, N, WINDOW, budgets, budgets, size, kept, N, 18) == PB_KVCACHE_ERROR_OVERLAP);
    CHECK(FROM(row, 2, N, WINDOW, budgets, kept, size, kept, N, 18) == PB_KVCACHE_ERROR_OVERLAP);
    CHECK(FROM(row, 1, N, WINDOW, kept, workspace, size, kept, N, 18) == PB_KVCACHE_ERROR_OVERLAP);
    CHECK(FROM((const float *)(const void *)kept, 1, N, WINDOW, budgets, workspace, size, kept, N, 18)
          == PB_KVCACHE_ERROR_OVERLAP);
    budgets[1] = 8;
    CHECK(FROM(row, 2, N, WINDOW, budgets, workspace, size, kept, N, 18) == PB_KVCACHE_ERROR_SCORE);
    budgets[1] = 2;
    CHECK(FROM(row, 2, N, WINDOW, budgets, workspace, size, kept, N, 18) == PB_KVCACHE_ERROR_BUDGET_WINDOW);
    p.kernel = 2;
    CHECK(FROM(row, 1, N, WINDOW, budgets, workspace, size, kept, N, 18) == PB_KVCACHE_ERROR_POOL_KERNEL);
    p.kernel = 1;
    p.nan = (pb_kvcache_nan)2;
    CHECK(FROM(row, 1, N, WINDOW, budgets, workspace, size, kept, N, 18) == PB_KVCACHE_ERROR_OPTION);
    p.nan = refuse;
    CHECK(pb_kvcache_select_from_scores_workspace_size(NULL, N, WINDOW, &size) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_select_from_scores_workspace_size(&p, N, WINDOW, NULL) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_select_from_scores_workspace_size(&p, SIZE_MAX, WINDOW, &size) == PB_KVCACHE_ERROR_TOO_LARGE);
    for (size_t i = 0; i <= HEADS * N; ++i) {
        CHECK(kept[i] == 0xABABABABu);
    }
    /* A head that keeps everything is not read: its NaN is nobody's concern. */
    budgets[1] = 9;
    CHECK(FROM(row, 2, N, WINDOW, budgets, workspace, size, kept, N, 18) == PB_KVCACHE_OK);
    static const uint32_t want[2 * N] = {4, 5, 6, 7, 8, 0xABABABABu, 0xABABABABu, 0xABABABABu, 0xABABABABu,
                                         0, 1, 2, 3, 4, 5,           6,           7,           8};
    CHECK(memcmp(kept, want, sizeof want) == 0 && kept[HEADS * N] == 0xABABABABu);
    budgets[0] = WINDOW; /* the window alone */
    CHECK(FROM(row, 1, N, WINDOW, budgets, workspace, size, kept, N, 18) == PB_KVCACHE_OK);
    CHECK(kept[0] == 6 && kept[1] == 7 && kept[2] == 8 && kept[3] == 7);
    p.nan = PB_KVCACHE_NAN_LOWEST; /* it ranks below everything, also in an average */
    p.pooling = PB_KVCACHE_POOL_AVERAGE;
    budgets[0] = 8;
    CHECK(pb_kvcache_select_from_scores_workspace_size(&p, N, WINDOW, &size) == PB_KVCACHE_OK);
    workspace = realloc(workspace, size);
    CHECK(FROM(row + 6, 1, N, WINDOW, budgets, workspace, size, kept, N, 18) == PB_KVCACHE_OK);
    CHECK(kept[0] == 0 && kept[1] == 2 && kept[4] == 5 && kept[7] == 8);
    CHECK(FROM(row, 0, N, WINDOW, budgets, workspace, size, kept, N, 0) == PB_KVCACHE_OK);
    free(workspace);    return END();
}
