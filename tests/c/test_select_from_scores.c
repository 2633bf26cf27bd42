/* pb_kvcache_select_from_scores: what is refused and leaves the output alone, what is not read, and what is kept. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "pb_kvcache.h"

enum { HEADS = 2, N = 9, WINDOW = 3, SCORED = N - WINDOW, ALL = HEADS * N };
#define UNTOUCHED 0xABABABABu

static const float scores[HEADS * SCORED] = {1, 2, 3, 4, 5, 6, 6, NAN, 1, 1, 1, 6};
static const pb_kvcache_select_params defaults = {.reduce = (pb_kvcache_reduce)77, /* is not read */
                                                  .kernel = 1,
                                                  .protect = WINDOW};

/* Arguments that are accepted. Each test changes some of them. */
typedef struct call {
    const float *scores;
    size_t stride, num_heads, n;
    pb_kvcache_select_params params;
    uint32_t budgets[HEADS];
    const uint32_t *budgets_at;
    void *workspace;
    size_t workspace_size;
    uint32_t kept[ALL + 1];
    uint32_t *kept_at;
    size_t kept_stride, capacity;
} call;

static void start(call *c, void *workspace, size_t workspace_size)
{
    *c = (call){.scores = scores, .stride = SCORED, .num_heads = HEADS, .n = N, .params = defaults};
    c->budgets[0] = 5;
    c->budgets[1] = N; /* keeps everything, so that its NaN is nobody's concern */
    c->budgets_at = c->budgets;
    c->workspace = workspace;
    c->workspace_size = workspace_size;
    c->kept_at = c->kept;
    c->kept_stride = N;
    c->capacity = ALL;
    memset(c->kept, 0xAB, sizeof c->kept);
}

static pb_kvcache_status run(const call *c)
{
    return pb_kvcache_select_from_scores(c->scores, c->stride, c->num_heads, c->n, &c->params, c->budgets_at,
                                         c->workspace, c->workspace_size, c->kept_at, c->kept_stride, c->capacity);
}

static size_t needed(const pb_kvcache_select_params *params)
{
    size_t size = 0;
    CHECK(pb_kvcache_select_from_scores_workspace_size(params, N, &size) == PB_KVCACHE_OK && size > 0);
    return size;
}

static void test_refusals(void)
{
    const size_t size = needed(&defaults);
    unsigned char *workspace = malloc(size);
    call c;
#define REFUSED(change, status)                                                                                       \
    do {                                                                                                              \
        start(&c, workspace, size);                                                                                   \
        change;                                                                                                       \
        CHECK(run(&c) == (status));                                                                                   \
        for (size_t i = 0; i <= ALL; ++i) {                                                                           \
            CHECK(c.kept[i] == UNTOUCHED);                                                                            \
        }                                                                                                             \
    } while (0)
    REFUSED(c.scores = NULL, PB_KVCACHE_ERROR_NULL);
    REFUSED(c.budgets_at = NULL, PB_KVCACHE_ERROR_NULL);
    REFUSED(c.workspace = NULL, PB_KVCACHE_ERROR_NULL);
    REFUSED(c.kept_at = NULL, PB_KVCACHE_ERROR_NULL);
    REFUSED(c.params.protect = 0, PB_KVCACHE_ERROR_PROTECT);
    REFUSED(c.params.protect = N, PB_KVCACHE_ERROR_PROTECT);
    REFUSED(c.n = WINDOW, PB_KVCACHE_ERROR_PROTECT);
    REFUSED(c.n = SIZE_MAX, PB_KVCACHE_ERROR_TOO_LARGE);
    REFUSED(c.stride = SIZE_MAX / 2, PB_KVCACHE_ERROR_TOO_LARGE);
    REFUSED(c.kept_stride = SIZE_MAX / 2, PB_KVCACHE_ERROR_TOO_LARGE);
    REFUSED(c.params.kernel = 2, PB_KVCACHE_ERROR_POOL_KERNEL);
    REFUSED(c.params.pooling = (pb_kvcache_pooling)2, PB_KVCACHE_ERROR_OPTION);
    REFUSED(c.params.edge = (pb_kvcache_edge)2, PB_KVCACHE_ERROR_OPTION);
    REFUSED(c.params.nan = (pb_kvcache_nan)2, PB_KVCACHE_ERROR_OPTION);
    REFUSED(c.workspace_size = size - 1, PB_KVCACHE_ERROR_WORKSPACE);
    REFUSED(c.budgets[1] = WINDOW - 1, PB_KVCACHE_ERROR_BUDGET_WINDOW);
    REFUSED(c.params.sinks = 3, PB_KVCACHE_ERROR_BUDGET_WINDOW);
    REFUSED(c.params.sinks = SIZE_MAX, PB_KVCACHE_ERROR_BUDGET_WINDOW);
    REFUSED(c.capacity = ALL - 1, PB_KVCACHE_ERROR_CAPACITY);
    REFUSED(c.kept_stride = N - 1, PB_KVCACHE_ERROR_STRIDE);
    REFUSED(c.scores = (const float *)(const void *)((const char *)scores + 1), PB_KVCACHE_ERROR_ALIGNMENT);
    REFUSED(c.kept_at = (uint32_t *)(void *)((char *)c.kept + 1), PB_KVCACHE_ERROR_ALIGNMENT);
    REFUSED(c.budgets[1] = N - 1, PB_KVCACHE_ERROR_SCORE); /* in the last head: the first is not written either */
    REFUSED(c.workspace = (void *)(uintptr_t)scores, PB_KVCACHE_ERROR_OVERLAP);
    REFUSED(c.workspace = c.budgets, PB_KVCACHE_ERROR_OVERLAP);
    REFUSED(c.workspace = c.kept, PB_KVCACHE_ERROR_OVERLAP);
    REFUSED(c.budgets_at = c.kept, PB_KVCACHE_ERROR_OVERLAP);
    REFUSED((c.budgets_at = memcpy(workspace, c.budgets, sizeof c.budgets)), PB_KVCACHE_ERROR_OVERLAP);
    REFUSED((c.scores = (const float *)(const void *)c.kept, c.params.nan = PB_KVCACHE_NAN_LOWEST),
            PB_KVCACHE_ERROR_OVERLAP);
#undef REFUSED
    size_t untouched = 77;
    CHECK(pb_kvcache_select_from_scores_workspace_size(NULL, N, &untouched) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_select_from_scores_workspace_size(&defaults, N, NULL) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_select_from_scores_workspace_size(&defaults, SIZE_MAX, &untouched)
          == PB_KVCACHE_ERROR_TOO_LARGE);
    CHECK(untouched == 77);
    free(workspace);
}

static void test_what_is_kept(void)
{
    const size_t size = needed(&defaults);
    void *workspace = malloc(size);
    call c;
    /* The two best of the first head and the window, everything of the second, nothing beside the rows. */
    start(&c, workspace, size);
    CHECK(run(&c) == PB_KVCACHE_OK);
    static const uint32_t first[N] = {4, 5, 6, 7, 8, UNTOUCHED, UNTOUCHED, UNTOUCHED, UNTOUCHED};
    static const uint32_t second[N] = {0, 1, 2, 3, 4, 5, 6, 7, 8};
    CHECK(memcmp(c.kept, first, sizeof first) == 0 && memcmp(c.kept + N, second, sizeof second) == 0);
    CHECK(c.kept[ALL] == UNTOUCHED);
    /* The window alone, in rows that are no wider */
    start(&c, workspace, size);
    c.budgets[0] = WINDOW;
    c.num_heads = 1;
    c.capacity = WINDOW;
    CHECK(run(&c) == PB_KVCACHE_OK);
    CHECK(c.kept[0] == 6 && c.kept[1] == 7 && c.kept[2] == 8 && c.kept[3] == UNTOUCHED);
    /* No heads */
    start(&c, workspace, size);
    c.num_heads = 0;
    c.capacity = 0;
    CHECK(run(&c) == PB_KVCACHE_OK && c.kept[0] == UNTOUCHED);
    free(workspace);
}

/* A NaN ranks below everything else, also where neighbours are averaged. */
static void test_lowest(void)
{
    pb_kvcache_select_params params = defaults;
    params.pooling = PB_KVCACHE_POOL_AVERAGE;
    params.kernel = 3;
    params.nan = PB_KVCACHE_NAN_LOWEST;
    const size_t size = needed(&params);
    void *workspace = malloc(size);
    call c;
    start(&c, workspace, size);
    c.params = params;
    c.scores = scores + SCORED;
    c.num_heads = 1;
    c.budgets[0] = N - 1;
    CHECK(run(&c) == PB_KVCACHE_OK);
    static const uint32_t want[N] = {0, 2, 3, 4, 5, 6, 7, 8, UNTOUCHED};
    CHECK(memcmp(c.kept, want, sizeof want) == 0);
    free(workspace);
}

/* Sinks and protected positions stay whatever their scores are. */
static void test_sinks(void)
{
    pb_kvcache_select_params params = defaults;
    params.sinks = 2;
    params.protect = 3;
    const size_t size = needed(&params);
    void *workspace = malloc(size);
    call c;
    start(&c, workspace, size);
    c.params = params;
    c.budgets[0] = 7;
    CHECK(run(&c) == PB_KVCACHE_OK);
    static const uint32_t want[N] = {0, 1, 4, 5, 6, 7, 8, UNTOUCHED, UNTOUCHED};
    CHECK(memcmp(c.kept, want, sizeof want) == 0);
    /* Nothing but what is always kept */
    start(&c, workspace, size);
    c.params = params;
    c.budgets[0] = 5;
    CHECK(run(&c) == PB_KVCACHE_OK);
    static const uint32_t least[N] = {0, 1, 6, 7, 8, UNTOUCHED, UNTOUCHED, UNTOUCHED, UNTOUCHED};
    CHECK(memcmp(c.kept, least, sizeof least) == 0);
    free(workspace);
}

/* Weights turn the order round. What is wrong with them is refused where they are read, before anything is written. */
static void test_weights(void)
{
    float weights[HEADS * N];
    for (size_t i = 0; i < HEADS * N; ++i) {
        weights[i] = i < 4 ? 10.0f : i < SCORED ? 1.0f : NAN; /* the last ones, and the second head's, are not read */
    }
    pb_kvcache_select_params params = defaults;
    params.weights = weights;
    params.weights_stride = N;
    const size_t size = needed(&params);
    CHECK(size == needed(&defaults) + N * sizeof(float));
    unsigned char *workspace = malloc(size);
    call c;
#define WEIGHED(change, status)                                                                                       \
    do {                                                                                                              \
        start(&c, workspace, size);                                                                                   \
        c.params = params;                                                                                            \
        change;                                                                                                       \
        CHECK(run(&c) == (status));                                                                                   \
    } while (0)
    WEIGHED((void)0, PB_KVCACHE_OK);
    static const uint32_t want[N] = {2, 3, 6, 7, 8, UNTOUCHED, UNTOUCHED, UNTOUCHED, UNTOUCHED};
    CHECK(memcmp(c.kept, want, sizeof want) == 0);
    /* Of a head that keeps everything they are read no more than its scores are */
    WEIGHED((c.num_heads = 1, c.budgets[0] = N, weights[0] = -1.0f), PB_KVCACHE_OK);
    WEIGHED((c.num_heads = 1, c.budgets[0] = 5), PB_KVCACHE_ERROR_SELECT_WEIGHT);
    CHECK(c.kept[0] == UNTOUCHED);
    WEIGHED(weights[0] = HUGE_VALF, PB_KVCACHE_ERROR_SELECT_WEIGHT);
    WEIGHED(weights[0] = NAN, PB_KVCACHE_ERROR_SELECT_WEIGHT);
    WEIGHED((weights[0] = 0.0f, weights[5] = 3e38f), PB_KVCACHE_ERROR_SCORE); /* 6 times as much */
    weights[5] = 1.0f;
    WEIGHED(c.workspace_size = size - 1, PB_KVCACHE_ERROR_WORKSPACE);
    WEIGHED(c.params.weights = (const float *)(const void *)((const char *)weights + 1), PB_KVCACHE_ERROR_ALIGNMENT);
    WEIGHED(c.params.weights_stride = SIZE_MAX / 2, PB_KVCACHE_ERROR_TOO_LARGE);
    WEIGHED(c.params.weights = (const float *)(const void *)c.kept, PB_KVCACHE_ERROR_OVERLAP);
    WEIGHED(c.params.weights = (const float *)(const void *)(workspace + size % 4), PB_KVCACHE_ERROR_OVERLAP);
    /* What is left out stays so, also where its weight is 0 */
    const float left_out[SCORED] = {1, -HUGE_VALF, NAN, 0, 0, 0};
    const float nothing[SCORED] = {0};
    WEIGHED((c.scores = left_out, c.num_heads = 1, c.budgets[0] = 7, c.params.nan = PB_KVCACHE_NAN_LOWEST,
             c.params.weights = nothing),
            PB_KVCACHE_OK);
    static const uint32_t rest[N] = {0, 3, 4, 5, 6, 7, 8, UNTOUCHED, UNTOUCHED};
    CHECK(memcmp(c.kept, rest, sizeof rest) == 0);
#undef WEIGHED
    free(workspace);
}

int main(void)
{
    test_sinks();
    test_weights();
    test_refusals();
    test_what_is_kept();
    test_lowest();
    return END();
}
