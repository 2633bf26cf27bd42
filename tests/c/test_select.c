/* What the vectors cannot say of the selection: the exponential, every copy of the inner loops, refusals, layouts. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "bits.h"
#include "checks.h"
#include "internal.h"
#include "kernels.h"
#include "lanes.h"

static uint32_t state = 1;

static uint32_t draw(void)
{
    state ^= state << 13;
    state ^= state >> 17;
    state ^= state << 5;
    return state;
}

/* In -8 .. 8, exactly the same on every machine. */
static float draw_float(void)
{
    return (float)(int32_t)(draw() >> 8) * 0x1p-20f - 8.0f;
}

static uint32_t hash(uint32_t start, const void *words, size_t count)
{
    uint32_t word;
    for (size_t i = 0; i < count; ++i) { /* by value, so that the byte order does not matter */
        memcpy(&word, (const unsigned char *)words + 4 * i, sizeof word);
        for (int shift = 0; shift < 32; shift += 8) {
            start = (start ^ ((word >> shift) & 255u)) * 16777619u;
        }
    }
    return start;
}

/* Every STEPth float of the whole range. The worst of all, with STEP 1, is 0.699 * 2^-23. */
#ifndef STEP
#define STEP 499u
#endif

static void test_exponential(void)
{
    double worst = 0.0;
    CHECK(bits_of(pb_kvcache_priv_exp(0.0f)) == bits_of(1.0f));
    CHECK(bits_of(pb_kvcache_priv_exp(-0.0f)) == bits_of(1.0f));
    CHECK(bits_of(pb_kvcache_priv_exp(-HUGE_VALF)) == 0);
    CHECK(pb_kvcache_priv_exp(-87.25f) > 0.0f && bits_of(pb_kvcache_priv_exp(nextafterf(-87.25f, -88.0f))) == 0);
    float before = 1.0f;
    bool ordered = true;
    for (uint32_t bits = 0x80000000u; float_of(bits) >= -87.25f; bits += STEP) {
        const float power = pb_kvcache_priv_exp(float_of(bits));
        const double exact = exp((double)float_of(bits));
        const double error = fabs((double)power - exact) / exact;
        worst = error > worst ? error : worst;
        ordered = ordered && power <= before * (1.0f + 0x1p-22f);
        before = power;
    }
    printf("exp: worst relative error %.4g * 2^-23\n", worst * 0x1p23);
    CHECK(worst < 0x1p-23);
    CHECK(ordered);
}

static void test_halves(void)
{
    uint16_t halves[65536];
    float *floats = malloc(65536 * sizeof *floats);
    for (uint32_t i = 0; i < 65536; ++i) {
        halves[i] = (uint16_t)i;
    }
    float given[256]; /* of every exponent. None is NaN, whose bits a machine may change on the way */
    for (uint32_t i = 0; i < 256; ++i) {
        given[i] = float_of(i < 255 ? i << 23 : 0x80000001u);
    }
    for (unsigned level = 0; level < PB_KVCACHE_PRIV_LEVELS; ++level) {
        const pb_kvcache_priv_lanes *lanes = pb_kvcache_priv_lanes_at(level);
        if (lanes == NULL) {
            continue;
        }
        bool good = true;
        lanes->convert[PB_KVCACHE_FLOAT16](halves, 65536, floats);
        for (uint32_t i = 0; i < 65536; ++i) {
            const int exponent = (int)((i >> 10) & 31u);
            const float mantissa = (float)(i & 1023u);
            const float sign = (i & 0x8000u) != 0 ? -1.0f : 1.0f;
            if (exponent == 31) {
                good = good && (mantissa > 0.0f ? floats[i] != floats[i] : floats[i] == sign * HUGE_VALF);
            } else {
                const float value = exponent == 0 ? ldexpf(mantissa, -24) : ldexpf(1024.0f + mantissa, exponent - 25);
                good = good && bits_of(floats[i]) == bits_of(copysignf(value, sign));
            }
        }
        CHECK(good);
        lanes->convert[PB_KVCACHE_BFLOAT16](halves, 65536, floats);
        good = true;
        for (uint32_t i = 0; i < 65536; ++i) {
            /* A NaN stays one, but the x87 registers of 32-bit x86 make a signalling one quiet. */
            const bool nan = (i & 0x7FFFu) > 0x7F80u;
            good = good && (nan ? floats[i] != floats[i] : bits_of(floats[i]) == i << 16);
        }
        CHECK(good);
        lanes->convert[PB_KVCACHE_FLOAT32](given, 256, floats);
        CHECK(memcmp(floats, given, sizeof given) == 0);
    }
    free(floats);
}

enum { ROW_LENGTH = 2100 };

/* Do the passes of a choice say of n scores what their keys say? */
static bool same_passes(const pb_kvcache_priv_lanes *lanes, const float *x, size_t n, float low, float high)
{
    static int32_t inside[ROW_LENGTH];
    static int32_t keys[ROW_LENGTH + 32];
    static uint32_t above[ROW_LENGTH];
    static uint32_t chosen[ROW_LENGTH];
    const int32_t from = key_of(low);
    const int32_t to = key_of(high);
    size_t reaching[2] = {0, 0};
    size_t found = 0;
    size_t below = 0;
    for (size_t i = 0; i < n; ++i) {
        const int32_t key = key_of(x[i]);
        reaching[0] += key >= from;
        reaching[1] += key >= to;
        if (key > from && key < to) {
            inside[found++] = key;
            below += key < key_of(1.5f);
        }
    }
    bool good = lanes->reaching(x, n, from) == reaching[0] && lanes->reaching(x, n, to) == reaching[1];
    size_t from_high = 0;
    good = good && lanes->between(x, n, from, to, &from_high, keys, ROW_LENGTH + 32) == found;
    good = good && from_high == reaching[1] && memcmp(keys, inside, found * sizeof keys[0]) == 0;
    /* Room for fewer: as many of the first as there is room for, and nothing behind it. */
    int32_t few[49] = {0};
    few[48] = 77;
    good = good && lanes->between(x, n, from, to, &from_high, few, 48) == found && few[48] == 77
           && memcmp(few, inside, (found < 32 ? found : 32) * sizeof few[0]) == 0;
    good = good && lanes->below(keys, found, key_of(1.5f)) == below;
    /* What exceeds the lower bound, and the first that equals it. */
    size_t count = 0;
    for (size_t i = 0, ties = 1; i < n; ++i) {
        const bool tie = key_of(x[i]) == from && ties > 0;
        if (key_of(x[i]) > from || tie) {
            above[count++] = (uint32_t)i;
            ties -= tie;
        }
    }
    lanes->above(x, n, from, 1, count, chosen);
    return good && memcmp(chosen, above, count * sizeof chosen[0]) == 0;
}

/* Every copy of the loops that this processor can run gives the portable one's bits, on every length of tail. */
static void test_copies(void)
{
    enum { ROWS = 3 };
    static float x[ROWS * ROW_LENGTH], floats[2][ROW_LENGTH + 16];
    static uint16_t halves[ROWS * ROW_LENGTH];
    for (size_t i = 0; i < ROWS * ROW_LENGTH; ++i) {
        x[i] = i % 19 == 3 ? (i % 2 == 0 ? 0.0f : -0.0f) : draw_float();
        halves[i] = (uint16_t)(draw() & 0xBFFFu); /* no infinities as halves, below 2 as bfloat16 */
    }
    const pb_kvcache_priv_lanes *plain = pb_kvcache_priv_lanes_at(0);
    unsigned copies = 0;
    for (unsigned level = 0; level < PB_KVCACHE_PRIV_LEVELS; ++level) {
        const pb_kvcache_priv_lanes *lanes = pb_kvcache_priv_lanes_at(level);
        if (lanes == NULL) {
            continue;
        }
        copies += level > 0;
        for (size_t n = 1; n < ROW_LENGTH; n += n < 70 ? 1 : 29) {
            bool good = true;
            for (int kind = 0; kind < 3; ++kind) {
                const void *row = kind == 0 ? (const void *)x : (const void *)halves;
                float tops[2] = {0.0f, 0.0f};
                good = good && plain->top[kind](row, n, &tops[0]) == lanes->top[kind](row, n, &tops[1]);
                good = good && bits_of(tops[0]) == bits_of(tops[1]);
                for (int fetched = 0; fetched < 2; ++fetched) { /* what is fetched ahead changes no bit */
                    const void *next = fetched ? row : NULL;
                    const double sums[2] = {plain->exps[kind](row, n, 0.3f, tops[0], floats[0], NULL),
                                            lanes->exps[kind](row, n, 0.3f, tops[0], floats[1], next)};
                    good = good && memcmp(&sums[0], &sums[1], sizeof sums[0]) == 0
                           && memcmp(floats[0], floats[1], n * sizeof(float)) == 0;
                }
                const uint32_t seen[2] = {plain->sums[kind](row, ROW_LENGTH, ROWS, n, floats[0]),
                                          lanes->sums[kind](row, ROW_LENGTH, ROWS, n, floats[1])};
                good = good && seen[0] == seen[1] && memcmp(floats[0], floats[1], n * sizeof(float)) == 0;
            }
            plain->add_scaled(x, n, 0.7f, floats[0]);
            lanes->add_scaled(x, n, 0.7f, floats[1]);
            good = good && memcmp(floats[0], floats[1], n * sizeof(float)) == 0;
            good = good && lanes->finite(x, n);
            good = good && same_passes(lanes, x, n, -2.0f, 3.0f) && same_passes(lanes, x, n, 1.0f, 3.0f)
                   && same_passes(lanes, x, n, -5.0f, 0.0f) && same_passes(lanes, x, n, 0.0f, 5.0f)
                   && same_passes(lanes, x, n, 0.0f, 0.0f) && same_passes(lanes, x, n, x[n / 2], 9.0f);
            CHECK(good);
        }
        /* Numbers that are none, in every place of a vector. */
        for (size_t at = 0; at < 40; ++at) {
            float top;
            float odd[40];
            memcpy(odd, x, sizeof odd);
            const float bad[] = {NAN, -NAN, HUGE_VALF, float_of(0xFF800001u)};
            for (size_t i = 0; i < 4; ++i) {
                odd[at] = bad[i];
                CHECK(!lanes->top[0](odd, 40, &top) && !plain->top[0](odd, 40, &top));
                CHECK(!lanes->finite(odd, 40) && !plain->finite(odd, 40));
                CHECK((lanes->sums[0](odd, 0, 1, 40, floats[0]) & PB_KVCACHE_PRIV_SEEN_BAD) != 0);
                CHECK(floats[0][at] == -HUGE_VALF);
            }
            /* The same as 16-bit numbers: NaN, -NaN, inf, and -inf, which is a number to the top. */
            static const uint16_t bad_halves[2][4]
                = {{0x7E00, 0xFE00, 0x7C00, 0xFC00}, {0x7FC0, 0xFFC0, 0x7F80, 0xFF80}};
            for (int kind = 1; kind < 3; ++kind) {
                uint16_t odd_halves[40];
                memcpy(odd_halves, halves, sizeof odd_halves);
                for (size_t i = 0; i < 4; ++i) {
                    odd_halves[at] = bad_halves[kind - 1][i];
                    CHECK(lanes->top[kind](odd_halves, 40, &top) == (i == 3));
                    CHECK((lanes->sums[kind](odd_halves, 0, 1, 40, floats[0]) & PB_KVCACHE_PRIV_SEEN_BAD) != 0);
                    CHECK(floats[0][at] == -HUGE_VALF);
                }
            }
            odd[at] = -HUGE_VALF;
            CHECK(lanes->top[0](odd, 40, &top) && plain->top[0](odd, 40, &top) && !lanes->finite(odd, 40));
            memset(odd, 0, sizeof odd);
            CHECK(lanes->sums[0](odd, 0, 1, 40, floats[0]) == 0);
            odd[at] = -0.0f;
            CHECK(lanes->sums[0](odd, 0, 1, 40, floats[0]) == 0);
            odd[at] = -0x1p-149f;
            CHECK(lanes->sums[0](odd, 0, 1, 40, floats[0]) == PB_KVCACHE_PRIV_SEEN_NEGATIVE);
        }
    }
    printf("%u further copies of the loops ran\n", copies);
    CHECK(pb_kvcache_priv_lanes_at(PB_KVCACHE_PRIV_LEVELS) == NULL && pb_kvcache_priv_lanes_best() != NULL);
}

static void test_negative_copies_on_portable(void)
{
    float top;
    float sums[3];
    const float row[3] = {1.0f, -HUGE_VALF, 0.5f};
    const pb_kvcache_priv_lanes *plain = pb_kvcache_priv_lanes_at(0);
    CHECK(plain->top[0](row, 3, &top) && top == 1.0f);
    CHECK(plain->sums[0](row, 0, 1, 3, sums)
          == (PB_KVCACHE_PRIV_SEEN_BAD | PB_KVCACHE_PRIV_SEEN_NEGATIVE));
}

/* The fast choice, the histograms and the definition agree whatever the scores look like. */
static float shaped(int shape, size_t i, size_t n)
{
    switch (shape) {
    case 0: return draw_float();
    case 1: return (float)(draw() % 5u);                       /* ties everywhere */
    case 2: return 0.25f;                                      /* nothing but ties */
    case 3: return (float)i;                                   /* in order */
    case 4: return -(float)i;                                  /* in reverse */
    case 5: return i % 64 == 0 ? 100.0f : (float)(draw() & 7); /* what the sample sees is not what there is */
    case 6: return (draw() & 1u) != 0 ? 0.0f : -0.0f;
    case 7: return draw() % 3u == 0 ? -HUGE_VALF : draw_float();
    case 8: return float_of(draw() & 0x7FFFFFu); /* subnormal */
    case 9: return float_of((draw() & 0xFF7FFFFFu)); /* any exponent */
    case 10: return i < n / 2 ? 1.0f + (float)(draw() & 1023u) * 0x1p-23f : 0.5f;
    default: return expf(draw_float() * 4.0f);
    }
}

/* The lowest chosen score is no lower than any other. Equal ones were taken from the left. */
static bool is_choice(const float *scores, size_t n, const uint32_t *chosen, size_t count)
{
    bool good = true;
    float least = HUGE_VALF;
    size_t last = 0;
    for (size_t i = 0; i < count; ++i) {
        good = good && chosen[i] < n && (i == 0 || chosen[i] > chosen[i - 1]);
        if (scores[chosen[i]] <= least) {
            least = scores[chosen[i]];
            last = chosen[i];
        }
    }
    for (size_t i = 0, next = 0; i < n && count > 0; ++i) {
        if (next < count && chosen[next] == i) {
            ++next;
        } else {
            good = good && (scores[i] < least || (scores[i] == least && i > last));
        }
    }
    return good;
}

static void test_choice(void)
{
    const size_t lengths[] = {1, 2, 255, 4095, 4096, 4097, 5000, 9001, 40000};
    float *scores = malloc(40000 * sizeof *scores);
    uint32_t *fast = malloc(40000 * sizeof *fast);
    uint32_t *slow = malloc(40000 * sizeof *slow);
    for (int shape = 0; shape < 12; ++shape) {
        for (size_t l = 0; l < sizeof lengths / sizeof lengths[0]; ++l) {
            const size_t n = lengths[l];
            for (size_t i = 0; i < n; ++i) {
                scores[i] = shaped(shape, i, n);
            }
            const size_t counts[] = {0, 1, 2, n / 100, n / 16, n / 3, n - n / 50, n - 1, n};
            for (size_t c = 0; c < sizeof counts / sizeof counts[0]; ++c) {
                const size_t count = counts[c] < n ? counts[c] : n;
                memset(fast, 0xFF, n * sizeof *fast);
                pb_kvcache_priv_choose_highest_of_numbers(scores, n, count, fast);
                pb_kvcache_priv_choose_highest(scores, n, count, slow);
                bool good = memcmp(fast, slow, count * sizeof *fast) == 0;
                for (size_t i = count; i < n; ++i) {
                    good = good && fast[i] == UINT32_MAX; /* nothing behind the chosen is touched */
                }
                CHECK(good && is_choice(scores, n, fast, count));
                /* Where all scores are finite, what is done about others makes no difference. */
                const uint32_t wanted = (uint32_t)count;
                CHECK(pb_kvcache_select_top(scores, n, 1, n, &wanted, PB_KVCACHE_NAN_LOWEST, slow, n, n)
                      == PB_KVCACHE_OK);
                CHECK(shape == 7 || memcmp(fast, slow, count * sizeof *fast) == 0);
            }
        }
    }
    free(scores);
    free(fast);
    free(slow);
}

/*
 * Scores against the guesses: what each sample sees, the evenly spaced one and then the first 4,096 of those between
 * its bounds, are two values far apart, and everything still in question lies between them. No round narrows it down
 * enough, and the histograms decide.
 */
static void test_choice_that_misleads(void)
{
    enum { EVERY = 40, MISLED = 512 * EVERY, LEVEL = 4096 };
    static float scores[MISLED];
    static uint32_t fast[MISLED];
    static uint32_t slow[MISLED];
    size_t others = 0;
    for (size_t i = 0; i < MISLED; ++i) {
        const float sign = i / EVERY % 2 == 0 ? 1.0f : -1.0f;
        if (i % EVERY == 0) {
            scores[i] = sign * 1000.0f;
        } else {
            const size_t level = others++ / LEVEL;
            scores[i] = level < 4 ? (others % 2 == 0 ? 1.0f : -1.0f) * (float)(900 - 100 * (int)level) : draw_float();
        }
    }
    const size_t counts[] = {MISLED / 2 - 300, MISLED / 2 - 1, MISLED / 2, MISLED / 2 + 1, MISLED / 2 + 300};
    for (size_t c = 0; c < sizeof counts / sizeof counts[0]; ++c) {
        memset(fast, 0xFF, sizeof fast);
        pb_kvcache_priv_choose_highest_of_numbers(scores, MISLED, counts[c], fast);
        pb_kvcache_priv_choose_highest(scores, MISLED, counts[c], slow);
        CHECK(memcmp(fast, slow, counts[c] * sizeof *fast) == 0 && fast[counts[c]] == UINT32_MAX);
        CHECK(is_choice(scores, MISLED, fast, counts[c]));
    }
}

/* Spans and sums of sizes at the edge of what fits: refused, never wrapped. */
static void test_sizes(void)
{
    size_t bytes = 7;
    const size_t most = PTRDIFF_MAX;
    CHECK(pb_kvcache_priv_span_bytes(0, SIZE_MAX, SIZE_MAX, 4, &bytes) && bytes == 0);
    CHECK(pb_kvcache_priv_span_bytes(SIZE_MAX, SIZE_MAX, 0, 4, &bytes) && bytes == 0);
    CHECK(pb_kvcache_priv_span_bytes(1, SIZE_MAX, 3, 4, &bytes) && bytes == 12);
    CHECK(pb_kvcache_priv_span_bytes(2, 5, 3, 4, &bytes) && bytes == 32);
    CHECK(pb_kvcache_priv_span_bytes(2, most - 3, 3, 1, &bytes) && bytes == most);
    CHECK(!pb_kvcache_priv_span_bytes(2, most - 2, 3, 1, &bytes));     /* above PTRDIFF_MAX */
    CHECK(!pb_kvcache_priv_span_bytes(3, most + 1, 1, 1, &bytes));     /* rows times stride wraps */
    CHECK(!pb_kvcache_priv_span_bytes(2, SIZE_MAX, 1, 1, &bytes));     /* the width on top wraps */
    CHECK(!pb_kvcache_priv_span_bytes(2, SIZE_MAX / 4, 1, 4, &bytes)); /* in bytes it wraps */

    /* Arrays overlap where they share a byte. One without bytes shares none, wherever it begins. */
    char array[8];
    CHECK(!pb_kvcache_priv_overlap(array, 8, array + 4, 0) && !pb_kvcache_priv_overlap(array + 4, 0, array, 8));
    CHECK(!pb_kvcache_priv_overlap(array, 4, array + 4, 4) && !pb_kvcache_priv_overlap(array + 4, 4, array, 4));
    CHECK(pb_kvcache_priv_overlap(array, 5, array + 4, 4) && pb_kvcache_priv_overlap(array + 4, 4, array, 5));

    /* Workspaces: 4 bytes * n * (KV heads + 3 rows of scratch) + 64. Each step of that at its own edge. */
    const float element = 1.0f;
    pb_kvcache_attention attn
        = {.data = &element, .num_q_heads = SIZE_MAX, .num_kv_heads = SIZE_MAX, .window = 1, .n = 3};
    const size_t edge = (SIZE_MAX / 4) / 3; /* 12 * edge is SIZE_MAX - 3 */
    CHECK(edge * 12 == SIZE_MAX - 3);
    const size_t refused[] = {SIZE_MAX, SIZE_MAX - 3, SIZE_MAX / 3 - 2, edge - 2, edge - 3, most / 12 - 3};
    for (size_t i = 0; i < sizeof refused / sizeof refused[0]; ++i) {
        CHECK(pb_kvcache_window_scores_workspace_size(&attn, 0, refused[i], &bytes) == PB_KVCACHE_ERROR_TOO_LARGE);
    }
    const size_t fits = (most - PB_KVCACHE_PRIV_ALIGNMENT) / 12 - 3;
    CHECK(pb_kvcache_window_scores_workspace_size(&attn, 0, fits, &bytes) == PB_KVCACHE_OK
          && bytes == (fits + 3) * 12 + PB_KVCACHE_PRIV_ALIGNMENT);

    /* An average needs more: scores that just fit do not with it. */
    pb_kvcache_select_params params = {.kernel = 1999, .protect = 1};
    attn.n = 1000;
    const size_t heads = (most - PB_KVCACHE_PRIV_ALIGNMENT) / 4000 - 3;
    bytes = 7;
    CHECK(pb_kvcache_select_workspace_size(&attn, &params, 0, heads, &bytes) == PB_KVCACHE_OK
          && bytes == (heads + 3) * 4000 + PB_KVCACHE_PRIV_ALIGNMENT);
    params.pooling = PB_KVCACHE_POOL_AVERAGE;
    bytes = 7;
    CHECK(pb_kvcache_select_workspace_size(&attn, &params, 0, heads, &bytes) == PB_KVCACHE_ERROR_TOO_LARGE);
    CHECK(bytes == 7);
    CHECK(pb_kvcache_select_workspace_size(&attn, &params, 0, heads - 6, &bytes) == PB_KVCACHE_OK);
    /* 999 scores and a reach of 998 to either side: 2 * 999 + 2 * 998 doubles, after 1000 pooled scores. */
    CHECK(bytes == (heads - 6) * 4000 + PB_KVCACHE_PRIV_ALIGNMENT + 4000 + PB_KVCACHE_PRIV_ALIGNMENT + 3994 * 8);

    /* The same sizes, refused before a tiny input is read. */
    float score = 2.0f;
    uint32_t index = 9;
    const uint32_t count = 1;
    CHECK(pb_kvcache_window_scores(&attn, PB_KVCACHE_REDUCE_MEAN, PB_KVCACHE_NAN_REFUSE, 1, 0, SIZE_MAX, &score, 4,
                                   &score, 1, 1)
          == PB_KVCACHE_ERROR_TOO_LARGE);
    CHECK(pb_kvcache_select_top(&score, most, 3, 1, (const uint32_t[]){1, 1, 1}, PB_KVCACHE_NAN_REFUSE, &index, 1, 1)
          == PB_KVCACHE_ERROR_TOO_LARGE);
    CHECK(pb_kvcache_select_top(&score, 1, 1, SIZE_MAX, &count, PB_KVCACHE_NAN_REFUSE, &index, 1, 1)
          == PB_KVCACHE_ERROR_TOO_LARGE);
    CHECK(pb_kvcache_pool_scores(&score, SIZE_MAX, 3, 1, PB_KVCACHE_POOL_MAX, 1, PB_KVCACHE_EDGE_COUNT,
                                 PB_KVCACHE_NAN_REFUSE, NULL, 0, &score, 1, 1)
          == PB_KVCACHE_ERROR_TOO_LARGE);
    CHECK(score == 2.0f && index == 9);
}

/* ---- The public functions ---- */

static float *workspace_floats(unsigned char *workspace)
{
    return (float *)pb_kvcache_priv_align(workspace);
}

enum { Q_HEADS = 6, KV_HEADS = 3, WINDOW = 4, N = 1100, SCORED = N - WINDOW };

typedef struct prompt {
    float *logits;
    pb_kvcache_attention attn;
    pb_kvcache_select_params params;
} prompt;

static prompt new_prompt(void)
{
    prompt p = {.logits = malloc(sizeof(float) * Q_HEADS * WINDOW * N)};
    state = 7;
    for (size_t i = 0; i < (size_t)Q_HEADS * WINDOW * N; ++i) {
        p.logits[i] = draw_float();
    }
    p.attn = (pb_kvcache_attention){.data = p.logits,
                                    .dtype = PB_KVCACHE_FLOAT32,
                                    .logits = 1,
                                    .scale = 0.5f,
                                    .num_q_heads = Q_HEADS,
                                    .num_kv_heads = KV_HEADS,
                                    .window = WINDOW,
                                    .n = N,
                                    .head_stride = (ptrdiff_t)WINDOW * N,
                                    .row_stride = N};
    p.params = (pb_kvcache_select_params){.kernel = 7, .protect = WINDOW};
    return p;
}

/* Bits that are the same on every compiler, flag set, instruction set and byte order. */
static void test_bits(void)
{
    prompt p = new_prompt();
    size_t size;
    float *scores = malloc(sizeof(float) * KV_HEADS * SCORED);
    float *pooled = malloc(sizeof(float) * KV_HEADS * SCORED);
    uint32_t found = 2166136261u;
    for (int reduce = 0; reduce < 3; ++reduce) {
        CHECK(pb_kvcache_window_scores_workspace_size(&p.attn, 0, KV_HEADS, &size) == PB_KVCACHE_OK);
        void *workspace = malloc(size);
        CHECK(pb_kvcache_window_scores(&p.attn, (pb_kvcache_reduce)reduce, PB_KVCACHE_NAN_REFUSE, WINDOW, 0, KV_HEADS,
                                       workspace, size, scores, SCORED, (size_t)KV_HEADS * SCORED)
              == PB_KVCACHE_OK);
        free(workspace);
        found = hash(found, scores, (size_t)KV_HEADS * SCORED);
        CHECK(pb_kvcache_pool_scores_workspace_size(SCORED, PB_KVCACHE_POOL_AVERAGE, 11, &size) == PB_KVCACHE_OK);
        workspace = malloc(size);
        CHECK(pb_kvcache_pool_scores(scores, SCORED, KV_HEADS, SCORED, PB_KVCACHE_POOL_AVERAGE, 11,
                                     PB_KVCACHE_EDGE_COUNT, PB_KVCACHE_NAN_REFUSE, workspace, size, pooled, SCORED,
                                     (size_t)KV_HEADS * SCORED)
              == PB_KVCACHE_OK);
        free(workspace);
        found = hash(found, pooled, (size_t)KV_HEADS * SCORED);
    }
    printf("bits of scores: 0x%08X\n", (unsigned)found);
    CHECK(found == 0xD7123085u);
    free(scores);
    free(pooled);
    free(p.logits);
}

/* Shards write what the whole does, from a workspace of any alignment, into their own rows only. */
static void test_shards(void)
{
    prompt p = new_prompt();
    enum { KEPT = 100, STRIDE = KEPT + 3 };
    const uint32_t budgets[KV_HEADS] = {KEPT, 40, KEPT};
    uint32_t whole[KV_HEADS * STRIDE], shard[KV_HEADS * STRIDE];
    float *scores[2] = {malloc(sizeof(float) * KV_HEADS * N), malloc(sizeof(float) * KV_HEADS * N)};
    size_t size;
    memset(whole, 0xAB, sizeof whole);
    memset(shard, 0xAB, sizeof shard);
    memset(scores[0], 0xAB, sizeof(float) * KV_HEADS * N);
    memset(scores[1], 0xAB, sizeof(float) * KV_HEADS * N);
    CHECK(pb_kvcache_select_workspace_size(&p.attn, &p.params, 0, KV_HEADS, &size) == PB_KVCACHE_OK);
    char *workspace = malloc(size);
    CHECK(pb_kvcache_select(&p.attn, &p.params, budgets, 0, KV_HEADS, workspace, size, whole, STRIDE,
                            KV_HEADS * STRIDE)
          == PB_KVCACHE_OK);
    free(workspace);
    for (size_t head = 0; head < KV_HEADS; ++head) {
        for (size_t shift = 0; shift < 3; ++shift) {
            CHECK(pb_kvcache_select_workspace_size(&p.attn, &p.params, head, head + 1, &size) == PB_KVCACHE_OK);
            workspace = malloc(size + shift);
            CHECK(pb_kvcache_select(&p.attn, &p.params, budgets, head, head + 1, workspace + shift, size, shard,
                                    STRIDE, KV_HEADS * STRIDE)
                  == PB_KVCACHE_OK);
            free(workspace);
        }
    }
    CHECK(memcmp(whole, shard, sizeof whole) == 0);
    CHECK(whole[KEPT] == 0xABABABABu && whole[STRIDE + 40] == 0xABABABABu);
    CHECK(whole[KEPT - 1] == N - 1 && whole[STRIDE + 39] == N - 1 && whole[KEPT - WINDOW] == N - WINDOW);
    for (size_t head = 0; head <= KV_HEADS; ++head) { /* the last range is all of them */
        const size_t first = head < KV_HEADS ? head : 0;
        const size_t end = head < KV_HEADS ? head + 1 : KV_HEADS;
        float *out = scores[head < KV_HEADS];
        CHECK(pb_kvcache_window_scores_workspace_size(&p.attn, first, end, &size) == PB_KVCACHE_OK);
        workspace = malloc(size);
        CHECK(pb_kvcache_window_scores(&p.attn, PB_KVCACHE_REDUCE_MAX, PB_KVCACHE_NAN_LOWEST, WINDOW, first, end,
                                       workspace, size, out, N, KV_HEADS * N)
              == PB_KVCACHE_OK);
        free(workspace);
    }
    CHECK(memcmp(scores[0], scores[1], sizeof(float) * KV_HEADS * N) == 0);
    CHECK(pb_kvcache_window_scores_workspace_size(&p.attn, 2, 2, &size) == PB_KVCACHE_OK);
    workspace = malloc(size);
    CHECK(pb_kvcache_window_scores(&p.attn, PB_KVCACHE_REDUCE_MAX, PB_KVCACHE_NAN_LOWEST, WINDOW, 2, 2, workspace, size,
                                   scores[0], N, 0)
          == PB_KVCACHE_OK);
    free(workspace);
    CHECK(pb_kvcache_select_workspace_size(&p.attn, &p.params, 2, 2, &size) == PB_KVCACHE_OK);
    workspace = malloc(size);
    CHECK(pb_kvcache_select(&p.attn, &p.params, budgets, 2, 2, workspace, size, whole, STRIDE, 0) == PB_KVCACHE_OK);
    free(workspace);
    free(scores[0]);
    free(scores[1]);
    free(p.logits);
}

/* Every refusal of select and of its parts, with nothing written. */
static void test_refusals(void)
{
    prompt p = new_prompt();
    uint32_t budgets[KV_HEADS] = {50, 50, 50};
    uint32_t indices[KV_HEADS * 50];
    float *scores = malloc(sizeof(float) * KV_HEADS * SCORED);
    float *before = malloc(sizeof(float) * KV_HEADS * SCORED);
    size_t size;
    size_t most;
    CHECK(pb_kvcache_select_workspace_size(&p.attn, &p.params, 0, KV_HEADS, &most) == PB_KVCACHE_OK);
    char *workspace = malloc(most);
    memset(indices, 0xAB, sizeof indices);
    memset(scores, 0xAB, sizeof(float) * KV_HEADS * SCORED);
    memset(before, 0xAB, sizeof(float) * KV_HEADS * SCORED);
    pb_kvcache_attention attn;
    pb_kvcache_select_params params;
#define WITH(change, status)                                                                                          \
    do {                                                                                                              \
        attn = p.attn;                                                                                                \
        params = p.params;                                                                                            \
        change;                                                                                                       \
        size = 77;                                                                                                    \
        CHECK(pb_kvcache_select_workspace_size(&attn, &params, 0, KV_HEADS, &size) == (status) && size == 77);        \
        CHECK(pb_kvcache_select(&attn, &params, budgets, 0, KV_HEADS, workspace, most, indices, 50, KV_HEADS * 50)    \
              == (status));                                                                                           \
    } while (0)
    WITH(attn.data = NULL, PB_KVCACHE_ERROR_NULL);
    WITH(attn.dtype = (pb_kvcache_dtype)3, PB_KVCACHE_ERROR_OPTION);
    WITH(attn.scale = 0.0f, PB_KVCACHE_ERROR_SCALE);
    WITH(attn.scale = -1.0f, PB_KVCACHE_ERROR_SCALE);
    WITH(attn.scale = NAN, PB_KVCACHE_ERROR_SCALE);
    WITH(attn.scale = HUGE_VALF, PB_KVCACHE_ERROR_SCALE);
    WITH(attn.window = 0, PB_KVCACHE_ERROR_WINDOW);
    WITH(attn.window = N + 1, PB_KVCACHE_ERROR_WINDOW);
    WITH(attn.n = WINDOW - 1, PB_KVCACHE_ERROR_WINDOW);
    WITH(attn.n = WINDOW, PB_KVCACHE_ERROR_PROTECT);
    WITH(attn.n = SIZE_MAX, PB_KVCACHE_ERROR_TOO_LARGE);
    WITH(attn.n = SIZE_MAX / 4 - 1, PB_KVCACHE_ERROR_TOO_LARGE);
    WITH(attn.num_kv_heads = 0, PB_KVCACHE_ERROR_HEADS);
    WITH(attn.num_q_heads = 0, PB_KVCACHE_ERROR_HEADS);
    WITH(attn.num_q_heads = 7, PB_KVCACHE_ERROR_HEADS);
    WITH(attn.num_kv_heads = 2, PB_KVCACHE_ERROR_HEAD_RANGE);
    WITH(attn.data = (const char *)attn.data + 1, PB_KVCACHE_ERROR_ALIGNMENT);
    WITH((attn.dtype = PB_KVCACHE_FLOAT16, attn.data = (const char *)attn.data + 1), PB_KVCACHE_ERROR_ALIGNMENT);
    WITH(params.reduce = (pb_kvcache_reduce)3, PB_KVCACHE_ERROR_OPTION);
    WITH(params.edge = (pb_kvcache_edge)2, PB_KVCACHE_ERROR_OPTION);
    WITH(params.pooling = (pb_kvcache_pooling)2, PB_KVCACHE_ERROR_OPTION);
    WITH(params.nan = (pb_kvcache_nan)2, PB_KVCACHE_ERROR_OPTION);
    WITH(params.kernel = 0, PB_KVCACHE_ERROR_POOL_KERNEL);
    WITH(params.protect = 0, PB_KVCACHE_ERROR_PROTECT);
    WITH(params.protect = N, PB_KVCACHE_ERROR_PROTECT);
    WITH(params.weights = (const float *)(const void *)((const char *)p.logits + 1), PB_KVCACHE_ERROR_ALIGNMENT);
    WITH((params.weights = p.logits, params.weights_stride = SIZE_MAX / 2), PB_KVCACHE_ERROR_TOO_LARGE);
    WITH(params.kernel = 8, PB_KVCACHE_ERROR_POOL_KERNEL);
#undef WITH
#define SELECT(budgets, first, end, workspace, size, indices, stride, capacity)                                       \
    pb_kvcache_select(&p.attn, &p.params, budgets, first, end, workspace, size, indices, stride, capacity)
    CHECK(pb_kvcache_select(NULL, &p.params, budgets, 0, 1, workspace, most, indices, 50, 50) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_select(&p.attn, NULL, budgets, 0, 1, workspace, most, indices, 50, 50) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_select_workspace_size(&p.attn, &p.params, 0, 1, NULL) == PB_KVCACHE_ERROR_NULL);
    CHECK(SELECT(NULL, 0, 3, workspace, most, indices, 50, 150) == PB_KVCACHE_ERROR_NULL);
    CHECK(SELECT(budgets, 0, 3, NULL, most, indices, 50, 150) == PB_KVCACHE_ERROR_NULL);
    CHECK(SELECT(budgets, 0, 3, workspace, most, NULL, 50, 150) == PB_KVCACHE_ERROR_NULL);
    CHECK(SELECT(budgets, 2, 1, workspace, most, indices, 50, 150) == PB_KVCACHE_ERROR_HEAD_RANGE);
    CHECK(SELECT(budgets, 0, 4, workspace, most, indices, 50, 150) == PB_KVCACHE_ERROR_HEAD_RANGE);
    CHECK(SELECT(budgets, 0, 3, workspace, most - 1, indices, 50, 150) == PB_KVCACHE_ERROR_WORKSPACE);
    CHECK(SELECT(budgets, 0, 3, workspace, most, indices, 49, 150) == PB_KVCACHE_ERROR_STRIDE);
    CHECK(SELECT(budgets, 0, 3, workspace, most, indices, 50, 149) == PB_KVCACHE_ERROR_CAPACITY);
    CHECK(SELECT(budgets, 0, 3, workspace, most, indices, SIZE_MAX, 150) == PB_KVCACHE_ERROR_TOO_LARGE);
    CHECK(SELECT(budgets, 0, 3, workspace, most, (uint32_t *)(void *)((char *)indices + 1), 50, 150)
          == PB_KVCACHE_ERROR_ALIGNMENT);
    CHECK(SELECT(budgets, 0, 3, workspace, most, (uint32_t *)(void *)p.logits, 50, 150) == PB_KVCACHE_ERROR_OVERLAP);
    CHECK(SELECT(budgets, 0, 3, workspace, most, (uint32_t *)(void *)workspace, 50, 150) == PB_KVCACHE_ERROR_OVERLAP);
    CHECK(SELECT(budgets, 0, 3, p.logits, most, indices, 50, 150) == PB_KVCACHE_ERROR_OVERLAP);
    memcpy(indices, budgets, sizeof budgets);
    CHECK(SELECT(indices, 0, 3, workspace, most, indices, 50, 150) == PB_KVCACHE_ERROR_OVERLAP);
    CHECK(memcmp(indices, budgets, sizeof budgets) == 0);
    memset(indices, 0xAB, sizeof budgets);
    memcpy(workspace, budgets, sizeof budgets);
    CHECK(SELECT((uint32_t *)(void *)workspace, 0, 3, workspace, most, indices, 50, 150) == PB_KVCACHE_ERROR_OVERLAP);
    budgets[1] = WINDOW - 1;
    CHECK(SELECT(budgets, 0, 3, workspace, most, indices, 50, 150) == PB_KVCACHE_ERROR_BUDGET_WINDOW);
    budgets[1] = 50;
    /* Weights that share memory with what is written, or are none in the last head */
    float weights[KV_HEADS] = {1.0f, 1.0f, -1.0f};
    p.params.weights = (const float *)(const void *)indices;
    CHECK(SELECT(budgets, 0, 3, workspace, most, indices, 50, 150) == PB_KVCACHE_ERROR_OVERLAP);
    p.params.weights = (const float *)(const void *)workspace;
    CHECK(SELECT(budgets, 0, 3, workspace, most, indices, 50, 150) == PB_KVCACHE_ERROR_OVERLAP);
    p.params.weights = weights;
    p.params.weights_stride = 1;
    p.params.protect = N - 1; /* one score a head */
    for (size_t head = 0; head < KV_HEADS; ++head) {
        budgets[head] = N - 1;
    }
    uint32_t *many = malloc(sizeof *many * KV_HEADS * N);
    memset(many, 0xAB, sizeof *many * KV_HEADS * N);
    CHECK(SELECT(budgets, 0, 3, workspace, most, many, N, KV_HEADS * N) == PB_KVCACHE_ERROR_SELECT_WEIGHT);
    CHECK(many[0] == 0xABABABABu);
    weights[2] = HUGE_VALF;
    CHECK(SELECT(budgets, 0, 3, workspace, most, many, N, KV_HEADS * N) == PB_KVCACHE_ERROR_SELECT_WEIGHT);
    weights[2] = 0.0f;
    CHECK(SELECT(budgets, 0, 3, workspace, most, many, N, KV_HEADS * N) == PB_KVCACHE_OK && many[0] == 1);
    free(many);
    p.params.weights = NULL;
    p.params.protect = WINDOW;
    for (size_t head = 0; head < KV_HEADS; ++head) {
        budgets[head] = 50;
    }
    /* A value that is refused in the last head: the heads before it are not written either. */
    const struct {
        int logits;
        float value;
        pb_kvcache_status status;
    } values[] = {
        {1, NAN, PB_KVCACHE_ERROR_LOGIT},          {1, HUGE_VALF, PB_KVCACHE_ERROR_LOGIT},
        {1, -NAN, PB_KVCACHE_ERROR_LOGIT},         {0, NAN, PB_KVCACHE_ERROR_ATTN_VALUE},
        {0, HUGE_VALF, PB_KVCACHE_ERROR_ATTN_VALUE}, {0, -HUGE_VALF, PB_KVCACHE_ERROR_ATTN_VALUE},
        {0, -0x1p-149f, PB_KVCACHE_ERROR_ATTN_VALUE}, {0, 3.4e38f, PB_KVCACHE_ERROR_SCORE},
    };
    for (size_t i = 0; i < sizeof values / sizeof values[0]; ++i) {
        float *last = p.logits + (Q_HEADS * WINDOW - 2) * (size_t)N;
        p.attn.logits = values[i].logits;
        for (size_t j = 0; !p.attn.logits && j < (size_t)Q_HEADS * WINDOW * N; ++j) {
            p.logits[j] = fabsf(p.logits[j]);
        }
        const float kept[2] = {last[SCORED - 1], last[SCORED - 1 + N]};
        last[SCORED - 1] = values[i].value;
        if (values[i].status == PB_KVCACHE_ERROR_SCORE) {
            last[SCORED - 1 + N] = values[i].value;
        }
        CHECK(SELECT(budgets, 0, 3, workspace, most, indices, 50, 150) == values[i].status);
        CHECK(pb_kvcache_window_scores(&p.attn, PB_KVCACHE_REDUCE_SUM, PB_KVCACHE_NAN_REFUSE, WINDOW, 0, 3, workspace,
                                       most, scores, SCORED, (size_t)KV_HEADS * SCORED)
              == values[i].status);
        last[SCORED - 1] = kept[0];
        last[SCORED - 1 + N] = kept[1];
    }
    p.attn.logits = 1;
    for (size_t i = 0; i < N; ++i) {
        p.logits[i] = -HUGE_VALF;
    }
    CHECK(SELECT(budgets, 0, 3, workspace, most, indices, 50, 150) == PB_KVCACHE_ERROR_MASKED);
#define SCORES(reduce, nan, first, end, workspace, size, scores, stride, capacity)                                    \
    pb_kvcache_window_scores(&p.attn, reduce, nan, WINDOW, first, end, workspace, size, scores, stride, capacity)
    const size_t all = (size_t)KV_HEADS * SCORED;
    CHECK(SCORES((pb_kvcache_reduce)9, PB_KVCACHE_NAN_REFUSE, 0, 3, workspace, most, scores, SCORED, all)
          == PB_KVCACHE_ERROR_OPTION);
    CHECK(SCORES(PB_KVCACHE_REDUCE_MEAN, (pb_kvcache_nan)-1, 0, 3, workspace, most, scores, SCORED, all)
          == PB_KVCACHE_ERROR_OPTION);
    CHECK(SCORES(PB_KVCACHE_REDUCE_MEAN, PB_KVCACHE_NAN_REFUSE, 0, 3, workspace, 9, scores, SCORED, all)
          == PB_KVCACHE_ERROR_WORKSPACE);
    CHECK(SCORES(PB_KVCACHE_REDUCE_MEAN, PB_KVCACHE_NAN_REFUSE, 0, 3, NULL, most, scores, SCORED, all)
          == PB_KVCACHE_ERROR_NULL);
    CHECK(SCORES(PB_KVCACHE_REDUCE_MEAN, PB_KVCACHE_NAN_REFUSE, 0, 3, workspace, most, NULL, SCORED, all)
          == PB_KVCACHE_ERROR_NULL);
    CHECK(SCORES(PB_KVCACHE_REDUCE_MEAN, PB_KVCACHE_NAN_REFUSE, 0, 3, workspace, most, scores, SCORED, all - 1)
          == PB_KVCACHE_ERROR_CAPACITY);
    CHECK(SCORES(PB_KVCACHE_REDUCE_MEAN, PB_KVCACHE_NAN_REFUSE, 0, 3, workspace, most, scores, SCORED - 1, all)
          == PB_KVCACHE_ERROR_STRIDE);
    CHECK(SCORES(PB_KVCACHE_REDUCE_MEAN, PB_KVCACHE_NAN_REFUSE, 0, 3, workspace, most, p.logits, SCORED, all)
          == PB_KVCACHE_ERROR_OVERLAP);
    CHECK(SCORES(PB_KVCACHE_REDUCE_MEAN, PB_KVCACHE_NAN_REFUSE, 0, 3, p.logits, most, scores, SCORED, all)
          == PB_KVCACHE_ERROR_OVERLAP);
    CHECK(SCORES(PB_KVCACHE_REDUCE_MEAN, PB_KVCACHE_NAN_REFUSE, 0, 3, workspace, most,
                 (float *)pb_kvcache_priv_align(workspace), SCORED, all)
          == PB_KVCACHE_ERROR_OVERLAP);
    CHECK(SCORES(PB_KVCACHE_REDUCE_MEAN, PB_KVCACHE_NAN_REFUSE, 3, 4, workspace, most, scores, SCORED, all)
          == PB_KVCACHE_ERROR_HEAD_RANGE);
    for (size_t protect = 0; protect <= N; protect += N) {
        CHECK(pb_kvcache_window_scores(&p.attn, PB_KVCACHE_REDUCE_MEAN, PB_KVCACHE_NAN_REFUSE, protect, 0, 3, workspace,
                                       most, scores, SCORED, all)
              == PB_KVCACHE_ERROR_PROTECT);
    }
    CHECK(pb_kvcache_window_scores_workspace_size(&p.attn, 0, 1, NULL) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_window_scores_workspace_size(NULL, 0, 1, &size) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_window_scores_workspace_size(&p.attn, 3, 4, &size) == PB_KVCACHE_ERROR_HEAD_RANGE);

    CHECK(memcmp(scores, before, all * sizeof *scores) == 0);
    for (size_t i = 0; i < KV_HEADS * 50; ++i) {
        CHECK(indices[i] == 0xABABABABu);
    }

    /* Pooling and the choice. */
    const float row[6] = {1, 2, 3, NAN, 5, 6};
    float pooled[6] = {9, 9, 9, 9, 9, 9};
    uint32_t chosen[6] = {9, 9, 9, 9, 9, 9};
    uint32_t counts[2] = {2, 2};
#define POOL(scores, heads, n, pooling, kernel, nan, workspace, size, pooled, stride, capacity)                       \
    pb_kvcache_pool_scores(scores, 3, heads, n, pooling, kernel, PB_KVCACHE_EDGE_COUNT, nan, workspace, size, pooled, \
                           stride, capacity)
    const pb_kvcache_pooling max = PB_KVCACHE_POOL_MAX;
    const pb_kvcache_nan refuse = PB_KVCACHE_NAN_REFUSE;
    CHECK(POOL(row, 2, 3, max, 3, refuse, NULL, 0, pooled, 3, 6) == PB_KVCACHE_ERROR_SCORE);
    CHECK(POOL(NULL, 2, 3, max, 3, refuse, NULL, 0, pooled, 3, 6) == PB_KVCACHE_ERROR_NULL);
    CHECK(POOL(row, 2, 3, max, 3, refuse, NULL, 0, NULL, 3, 6) == PB_KVCACHE_ERROR_NULL);
    CHECK(POOL(row, 1, 3, max, 2, refuse, NULL, 0, pooled, 3, 6) == PB_KVCACHE_ERROR_POOL_KERNEL);
    CHECK(POOL(row, 1, 3, (pb_kvcache_pooling)2, 3, refuse, NULL, 0, pooled, 3, 6) == PB_KVCACHE_ERROR_OPTION);
    CHECK(POOL(row, 1, 3, max, 3, (pb_kvcache_nan)2, NULL, 0, pooled, 3, 6) == PB_KVCACHE_ERROR_OPTION);
    CHECK(pb_kvcache_pool_scores(row, 3, 1, 3, max, 3, (pb_kvcache_edge)2, refuse, NULL, 0, pooled, 3, 6)
          == PB_KVCACHE_ERROR_OPTION);
    CHECK(POOL(row, 1, 3, PB_KVCACHE_POOL_AVERAGE, 3, refuse, NULL, 0, pooled, 3, 6) == PB_KVCACHE_ERROR_WORKSPACE);
    CHECK(POOL(row, 1, 3, PB_KVCACHE_POOL_AVERAGE, 3, refuse, workspace, 8, pooled, 3, 6)
          == PB_KVCACHE_ERROR_WORKSPACE);
    CHECK(POOL(row, 1, 3, PB_KVCACHE_POOL_AVERAGE, 3, refuse, NULL, most, pooled, 3, 6) == PB_KVCACHE_ERROR_WORKSPACE);
    CHECK(POOL(row, 1, 3, max, 3, refuse, NULL, 0, pooled, 3, 2) == PB_KVCACHE_ERROR_CAPACITY);
    CHECK(POOL(row, 2, 3, max, 3, PB_KVCACHE_NAN_LOWEST, NULL, 0, pooled, 2, 6) == PB_KVCACHE_ERROR_STRIDE);
    CHECK(POOL(pooled, 2, 3, max, 3, refuse, NULL, 0, pooled + 3, 3, 3) == PB_KVCACHE_ERROR_CAPACITY);
    CHECK(POOL(pooled, 1, 3, max, 3, refuse, NULL, 0, pooled + 2, 3, 3) == PB_KVCACHE_ERROR_OVERLAP);
    CHECK(POOL(row, 1, SIZE_MAX, max, 3, refuse, NULL, 0, pooled, 3, 6) == PB_KVCACHE_ERROR_TOO_LARGE);
    CHECK(pb_kvcache_pool_scores_workspace_size(SIZE_MAX, PB_KVCACHE_POOL_AVERAGE, 3, &size)
          == PB_KVCACHE_ERROR_TOO_LARGE);
    CHECK(pb_kvcache_pool_scores_workspace_size(9, PB_KVCACHE_POOL_AVERAGE, 3, NULL) == PB_KVCACHE_ERROR_NULL);
    CHECK(pooled[0] == 9 && pooled[5] == 9);
    /* Rows without scores: nothing is needed and nothing is written, whatever the pooling. */
    CHECK(POOL(row, 2, 0, max, 3, refuse, NULL, 0, pooled, 0, 0) == PB_KVCACHE_OK);
    CHECK(pb_kvcache_pool_scores_workspace_size(0, PB_KVCACHE_POOL_AVERAGE, 3, &size) == PB_KVCACHE_OK && size == 0);
    CHECK(POOL(row, 2, 0, PB_KVCACHE_POOL_AVERAGE, 3, refuse, NULL, 0, pooled, 0, 0) == PB_KVCACHE_OK);
    CHECK(pooled[0] == 9 && pooled[5] == 9);

#define TOP(scores, heads, n, counts, nan, indices, stride, capacity)                                                 \
    pb_kvcache_select_top(scores, 3, heads, n, counts, nan, indices, stride, capacity)
    CHECK(TOP(row, 2, 3, counts, refuse, chosen, 2, 4) == PB_KVCACHE_ERROR_SCORE);
    CHECK(TOP(NULL, 1, 3, counts, refuse, chosen, 2, 4) == PB_KVCACHE_ERROR_NULL);
    CHECK(TOP(row, 1, 3, NULL, refuse, chosen, 2, 4) == PB_KVCACHE_ERROR_NULL);
    CHECK(TOP(row, 1, 3, counts, refuse, NULL, 2, 4) == PB_KVCACHE_ERROR_NULL);
    CHECK(TOP(row, 1, 3, counts, (pb_kvcache_nan)5, chosen, 2, 4) == PB_KVCACHE_ERROR_OPTION);
    CHECK(TOP(row, 1, 1, counts, refuse, chosen, 2, 4) == PB_KVCACHE_ERROR_COUNT);
    CHECK(TOP(row, 1, 3, counts, refuse, chosen, 2, 1) == PB_KVCACHE_ERROR_CAPACITY);
    CHECK(TOP(row, 2, 3, counts, PB_KVCACHE_NAN_LOWEST, chosen, 1, 4) == PB_KVCACHE_ERROR_STRIDE);
    CHECK(TOP(row, 1, 3, counts, refuse, counts, 2, 2) == PB_KVCACHE_ERROR_OVERLAP);
    CHECK(TOP(pooled, 1, 3, counts, refuse, (uint32_t *)(void *)(pooled + 2), 2, 2) == PB_KVCACHE_ERROR_OVERLAP);
    CHECK(TOP((const float *)(const void *)((const char *)row + 1), 1, 3, counts, refuse, chosen, 2, 2)
          == PB_KVCACHE_ERROR_ALIGNMENT);
    CHECK(chosen[0] == 9 && counts[0] == 2);
    CHECK(TOP(row, 2, 3, counts, PB_KVCACHE_NAN_LOWEST, chosen, 2, 4) == PB_KVCACHE_OK);
    CHECK(chosen[0] == 1 && chosen[1] == 2 && chosen[2] == 1 && chosen[3] == 2 && chosen[4] == 9);
    counts[0] = 0; /* and none is chosen from no scores */
    CHECK(TOP(row, 1, 0, counts, refuse, chosen + 4, 0, 0) == PB_KVCACHE_OK && chosen[4] == 9);

    free(workspace);
    free(scores);
    free(before);
    free(p.logits);
}

/* One row pooled to `pooled`. */
static pb_kvcache_status pool_row(const float *row, size_t n, pb_kvcache_pooling pooling, size_t kernel,
                                  pb_kvcache_edge edge, float *pooled)
{
    unsigned char workspace[512];
    return pb_kvcache_pool_scores(row, n, 1, n, pooling, kernel, edge, PB_KVCACHE_NAN_LOWEST, workspace,
                                  sizeof workspace, pooled, n, n);
}

/* Is the row pooled to what is wanted, to the bit? */
static bool pools_to(const float *row, size_t n, pb_kvcache_pooling pooling, size_t kernel, pb_kvcache_edge edge,
                     const float *want)
{
    float pooled[8];
    return pool_row(row, n, pooling, kernel, edge, pooled) == PB_KVCACHE_OK
           && memcmp(pooled, want, n * sizeof *want) == 0;
}

/* Scores that are none are no neighbours. Under _LOWEST they are left out of averages and maxima alike. */
static void test_absent_scores(void)
{
    const pb_kvcache_edge count = PB_KVCACHE_EDGE_COUNT;
    const float row[8] = {NAN, 4.0f, HUGE_VALF, 2.0f, -HUGE_VALF, 6.0f, -NAN, 8.0f};
    const float average[8] = {-HUGE_VALF, 4.0f, -HUGE_VALF, 2.0f, -HUGE_VALF, 6.0f, -HUGE_VALF, 8.0f};
    const float wide_average[8] = {-HUGE_VALF, 3.0f, -HUGE_VALF, 4.0f, -HUGE_VALF, 16.0f / 3.0f, -HUGE_VALF, 7.0f};
    const float wide_maximum[8] = {-HUGE_VALF, 4.0f, -HUGE_VALF, 6.0f, -HUGE_VALF, 8.0f, -HUGE_VALF, 8.0f};
    CHECK(pools_to(row, 8, PB_KVCACHE_POOL_AVERAGE, 3, count, average));
    CHECK(pools_to(row, 8, PB_KVCACHE_POOL_AVERAGE, 5, count, wide_average));
    CHECK(pools_to(row, 8, PB_KVCACHE_POOL_MAX, 5, count, wide_maximum));
    /* A single score has no neighbours, however wide the kernel. */
    CHECK(pools_to(row + 1, 1, PB_KVCACHE_POOL_MAX, SIZE_MAX, count, row + 1));
    CHECK(pools_to(row + 1, 1, PB_KVCACHE_POOL_AVERAGE, SIZE_MAX, count, row + 1));
    unsigned char workspace[512];
    float pooled[8];
    CHECK(pb_kvcache_pool_scores(row, 0, 0, 8, PB_KVCACHE_POOL_MAX, 5, count, PB_KVCACHE_NAN_REFUSE, NULL, 0, pooled, 8,
                                 8)
          == PB_KVCACHE_OK);
    CHECK(pb_kvcache_pool_scores(row + 1, 8, 1, 1, PB_KVCACHE_POOL_AVERAGE, 5, count, PB_KVCACHE_NAN_REFUSE, workspace,
                                 512, workspace_floats(workspace), 8, 8)
          == PB_KVCACHE_ERROR_OVERLAP);
    CHECK(pb_kvcache_pool_scores(workspace_floats(workspace), 8, 1, 1, PB_KVCACHE_POOL_AVERAGE, 5, count,
                                 PB_KVCACHE_NAN_LOWEST, workspace, 512, pooled, 8, 8)
          == PB_KVCACHE_ERROR_OVERLAP);
}

/* Zeros beyond the ends: an average divides by the kernel, less what _LOWEST leaves out. A maximum does not change. */
static void test_edge(void)
{
    const pb_kvcache_edge kernel = PB_KVCACHE_EDGE_KERNEL;
    const float row[5] = {6.0f, 3.0f, 0.0f, 9.0f, 12.0f};
    const float average[5] = {3.0f, 3.0f, 4.0f, 7.0f, 7.0f};
    const float wide_average[5] = {9.0f / 5.0f, 18.0f / 5.0f, 6.0f, 24.0f / 5.0f, 21.0f / 5.0f};
    const float wider_than_all[5] = {2.0f, 2.0f, 2.0f, 2.0f, 2.0f}; /* 30 / 15 */
    const float maximum[5] = {6.0f, 6.0f, 9.0f, 12.0f, 12.0f};
    CHECK(pools_to(row, 5, PB_KVCACHE_POOL_AVERAGE, 1, kernel, row));
    CHECK(pools_to(row, 5, PB_KVCACHE_POOL_AVERAGE, 3, kernel, average));
    CHECK(pools_to(row, 5, PB_KVCACHE_POOL_AVERAGE, 5, kernel, wide_average));
    CHECK(pools_to(row, 5, PB_KVCACHE_POOL_AVERAGE, 15, kernel, wider_than_all));
    CHECK(pools_to(row, 5, PB_KVCACHE_POOL_MAX, 3, kernel, maximum));
    const float absent[5] = {NAN, 6.0f, 3.0f, NAN, 4.0f};
    const float present[5] = {-HUGE_VALF, 4.5f, 4.5f, -HUGE_VALF, 2.0f};
    CHECK(pools_to(absent, 5, PB_KVCACHE_POOL_AVERAGE, 3, kernel, present));
    /* A kernel that no row fills */
    const float one = 1.0f;
    const float share = (float)(1.0 / (double)(SIZE_MAX / 2));
    CHECK(pools_to(&one, 1, PB_KVCACHE_POOL_AVERAGE, SIZE_MAX / 2, kernel, &share));
}

/* The window's own positions compete: what is refused and converted before the window is so inside of it. */
static void test_inside(void)
{
    enum { COLUMNS = 6 };
    const uint16_t halves[2][COLUMNS] = {{0x3400, 0x3400, 0x3400, 0, 0x3400, 0}, {0x3400, 0, 0, 0, 0x3800, 0x3400}};
    pb_kvcache_attention attn = {.data = halves, .dtype = PB_KVCACHE_FLOAT16, .num_q_heads = 1, .num_kv_heads = 1,
                                 .window = 2, .n = COLUMNS, .head_stride = 2 * COLUMNS, .row_stride = COLUMNS};
    const float means[5] = {0.25f, 0.125f, 0.125f, 0.0f, 0.375f};
    float scores[5];
    unsigned char workspace[512];
    CHECK(pb_kvcache_window_scores(&attn, PB_KVCACHE_REDUCE_MEAN, PB_KVCACHE_NAN_REFUSE, 1, 0, 1, workspace,
                                   sizeof workspace, scores, 5, 5)
          == PB_KVCACHE_OK);
    CHECK(memcmp(scores, means, sizeof means) == 0);
    float floats[2][COLUMNS] = {{.25f, .25f, .25f, 0, .25f, 0}, {.25f, 0, 0, 0, -.5f, .25f}};
    attn.data = floats;
    attn.dtype = PB_KVCACHE_FLOAT32;
    CHECK(pb_kvcache_window_scores(&attn, PB_KVCACHE_REDUCE_MEAN, PB_KVCACHE_NAN_LOWEST, 1, 0, 1, workspace,
                                   sizeof workspace, scores, 5, 5)
          == PB_KVCACHE_ERROR_ATTN_VALUE);
    floats[1][4] = NAN;
    CHECK(pb_kvcache_window_scores(&attn, PB_KVCACHE_REDUCE_MEAN, PB_KVCACHE_NAN_REFUSE, 1, 0, 1, workspace,
                                   sizeof workspace, scores, 5, 5)
          == PB_KVCACHE_ERROR_ATTN_VALUE);
    CHECK(memcmp(scores, means, sizeof means) == 0);
    CHECK(pb_kvcache_window_scores(&attn, PB_KVCACHE_REDUCE_MEAN, PB_KVCACHE_NAN_LOWEST, 1, 0, 1, workspace,
                                   sizeof workspace, scores, 5, 5)
          == PB_KVCACHE_OK);
    CHECK(scores[4] == -HUGE_VALF && scores[0] == means[0]);
}

/* A row in which every logit is too large, and one in which none is left beside NaN: nothing but lowest scores. */
static void test_lowest(void)
{
    prompt p = new_prompt();
    uint32_t indices[KV_HEADS * 50];
    const uint32_t budgets[KV_HEADS] = {50, 50, N};
    uint32_t all[KV_HEADS * N];
    size_t size;
    p.params.nan = PB_KVCACHE_NAN_LOWEST;
    p.params.pooling = PB_KVCACHE_POOL_AVERAGE;
    for (size_t i = 0; i < N; ++i) {
        p.logits[i] = i % 2 == 0 ? NAN : 3e38f; /* times the scale, 2, both are none */
        p.logits[N + i] = i % 3 == 0 ? -HUGE_VALF : NAN;
        p.logits[2 * N + i] = -HUGE_VALF;
    }
    p.attn.scale = 2.0f;
    CHECK(pb_kvcache_select_workspace_size(&p.attn, &p.params, 0, KV_HEADS, &size) == PB_KVCACHE_OK);
    void *workspace = malloc(size);
    CHECK(pb_kvcache_select(&p.attn, &p.params, budgets, 0, 2, workspace, size, indices, 50, KV_HEADS * 50)
          == PB_KVCACHE_OK);
    for (uint32_t i = 0; i < 50 - WINDOW; ++i) { /* the first head has no score at all: the lower positions */
        CHECK(indices[i] == i);
    }
    CHECK(pb_kvcache_select(&p.attn, &p.params, budgets, 2, 3, workspace, size, all, N, (size_t)KV_HEADS * N)
          == PB_KVCACHE_OK);
    CHECK(all[2 * N] == 0 && all[3 * N - 1] == N - 1);
    free(workspace);
    free(p.logits);
}

/* Under the maximum over a group, too, one query head's NaN makes a position the lowest, whatever the others say. */
static void test_lowest_of_a_group(void)
{
    enum { HEADS = 3, COLUMNS = 5, BEFORE = COLUMNS - 1 };
    const float best[BEFORE] = {0.3f, -HUGE_VALF, 0.4f, 0.1f};
    float scores[BEFORE];
    unsigned char workspace[256];
    for (size_t bad = 0; bad < HEADS; ++bad) { /* the first of the group, one between, the last */
        float rows[HEADS][COLUMNS]
            = {{0.1f, 0.2f, 0.4f, 0.0f, 0.3f}, {0.3f, 0.2f, 0.1f, 0.1f, 0.3f}, {0.2f, 0.2f, 0.0f, 0.0f, 0.6f}};
        rows[bad][1] = NAN;
        const pb_kvcache_attention attn = {.data = rows, .num_q_heads = HEADS, .num_kv_heads = 1, .window = 1,
                                           .n = COLUMNS, .head_stride = COLUMNS, .row_stride = COLUMNS};
        CHECK(pb_kvcache_window_scores(&attn, PB_KVCACHE_REDUCE_MAX, PB_KVCACHE_NAN_LOWEST, 1, 0, 1, workspace,
                                       sizeof workspace, scores, BEFORE, BEFORE)
              == PB_KVCACHE_OK);
        CHECK(memcmp(scores, best, sizeof best) == 0);
    }
}

static void test_compact(void)
{
    enum { HEADS = 3, ROWS = 50, BYTES = 6 };
    unsigned char data[HEADS * ROWS * BYTES], before[sizeof data];
    uint32_t indices[HEADS * ROWS];
    uint32_t counts[HEADS];
    for (int transposed = 0; transposed < 2; ++transposed) {
        for (int backwards = 0; backwards < 2; ++backwards) {
            const ptrdiff_t row_stride = (transposed ? HEADS : 1) * BYTES * (backwards ? -1 : 1);
            const ptrdiff_t head_stride = (transposed ? 1 : ROWS) * BYTES;
            pb_kvcache_rows rows = {data + (backwards ? (transposed ? HEADS : 1) * BYTES * (ROWS - 1) : 0), HEADS,
                                    ROWS, BYTES, head_stride, row_stride};
            for (size_t i = 0; i < sizeof data; ++i) {
                data[i] = (unsigned char)draw();
            }
            memcpy(before, data, sizeof data);
            for (size_t head = 0; head < HEADS; ++head) {
                counts[head] = 0;
                for (uint32_t i = 0; i < ROWS; ++i) {
                    if (draw() % 3u != 0 || head == 0) { /* the first head keeps everything */
                        indices[head * ROWS + counts[head]++] = i;
                    }
                }
            }
            for (size_t head = 0; head < HEADS; ++head) { /* one head at a time, the others untouched */
                CHECK(pb_kvcache_compact(&rows, head, head + 1, indices, ROWS, counts) == PB_KVCACHE_OK);
            }
            bool good = true;
            for (size_t head = 0; head < HEADS; ++head) {
                for (size_t i = 0; i < counts[head]; ++i) {
                    const ptrdiff_t base = (unsigned char *)rows.data - data + (ptrdiff_t)head * head_stride;
                    const ptrdiff_t to = base + (ptrdiff_t)i * row_stride;
                    const ptrdiff_t from = base + (ptrdiff_t)indices[head * ROWS + i] * row_stride;
                    good = good && memcmp(data + to, before + from, BYTES) == 0;
                }
            }
            CHECK(good);
        }
    }
    pb_kvcache_rows rows = {data, HEADS, ROWS, BYTES, ROWS * BYTES, BYTES};
    memcpy(before, data, sizeof data);
    pb_kvcache_rows bad = rows;
#define REFUSED(change, status)                                                                                       \
    do {                                                                                                              \
        bad = rows;                                                                                                   \
        change;                                                                                                       \
        CHECK(pb_kvcache_compact(&bad, 0, HEADS, indices, ROWS, counts) == (status));                                 \
    } while (0)
    counts[0] = counts[1] = counts[2] = 2;
    indices[0] = indices[ROWS] = indices[2 * ROWS] = 1;
    indices[1] = indices[ROWS + 1] = indices[2 * ROWS + 1] = 2;
    REFUSED(bad.data = NULL, PB_KVCACHE_ERROR_NULL);
    REFUSED(bad.num_heads = 2, PB_KVCACHE_ERROR_HEAD_RANGE);
    REFUSED(bad.row_stride = BYTES - 1, PB_KVCACHE_ERROR_STRIDE);
    REFUSED(bad.row_stride = 0, PB_KVCACHE_ERROR_STRIDE);
    REFUSED(bad.head_stride = 0, PB_KVCACHE_ERROR_STRIDE);
    REFUSED(bad.head_stride = ROWS * BYTES - 1, PB_KVCACHE_ERROR_STRIDE);
    REFUSED(bad.head_stride = PTRDIFF_MAX, PB_KVCACHE_ERROR_TOO_LARGE);
    REFUSED(bad.row_bytes = SIZE_MAX, PB_KVCACHE_ERROR_TOO_LARGE);
    REFUSED(bad.row_bytes = PTRDIFF_MAX, PB_KVCACHE_ERROR_TOO_LARGE);
    REFUSED((bad.num_heads = 4, bad.head_stride = PTRDIFF_MAX), PB_KVCACHE_ERROR_TOO_LARGE);
    REFUSED((bad.num_heads = SIZE_MAX, bad.head_stride = -1), PB_KVCACHE_ERROR_TOO_LARGE);
    REFUSED((bad.n = UINT32_MAX, bad.row_stride = PTRDIFF_MAX), PB_KVCACHE_ERROR_TOO_LARGE);
    REFUSED((bad.n = UINT32_MAX, bad.row_stride = -PTRDIFF_MAX), PB_KVCACHE_ERROR_TOO_LARGE);
    REFUSED((bad.num_heads = 5, bad.head_stride = PTRDIFF_MAX / 2 + 1), PB_KVCACHE_ERROR_TOO_LARGE); /* wraps to 0 */
    REFUSED((bad.n = 5, bad.row_stride = PTRDIFF_MAX / 2 + 1), PB_KVCACHE_ERROR_TOO_LARGE);
    REFUSED((bad.n = 1, bad.row_bytes = SIZE_MAX), PB_KVCACHE_ERROR_TOO_LARGE);
    REFUSED((bad.n = 3, bad.row_stride = PTRDIFF_MAX), PB_KVCACHE_ERROR_TOO_LARGE);
    REFUSED((bad.n = 2, bad.row_stride = PTRDIFF_MAX, bad.head_stride = PTRDIFF_MAX / 2), PB_KVCACHE_ERROR_TOO_LARGE);
    REFUSED(bad.n = 2, PB_KVCACHE_ERROR_INDEX);
    REFUSED(bad.n = 1, PB_KVCACHE_ERROR_INDEX);
    REFUSED(indices[2 * ROWS + 1] = 1, PB_KVCACHE_ERROR_INDEX);
    REFUSED(indices[2 * ROWS + 1] = 0, PB_KVCACHE_ERROR_INDEX);
    REFUSED(indices[2 * ROWS + 1] = ROWS, PB_KVCACHE_ERROR_INDEX);
    indices[2 * ROWS + 1] = 2;
    CHECK(pb_kvcache_compact(NULL, 0, 1, indices, ROWS, counts) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_compact(&rows, 0, 1, NULL, ROWS, counts) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_compact(&rows, 0, 1, indices, ROWS, NULL) == PB_KVCACHE_ERROR_NULL);
    CHECK(pb_kvcache_compact(&rows, 2, 1, indices, ROWS, counts) == PB_KVCACHE_ERROR_HEAD_RANGE);
    CHECK(pb_kvcache_compact(&rows, 0, 3, indices, SIZE_MAX, counts) == PB_KVCACHE_ERROR_TOO_LARGE);
    CHECK(pb_kvcache_compact(&rows, 0, 3, (uint32_t *)(void *)((char *)indices + 1), ROWS, counts)
          == PB_KVCACHE_ERROR_ALIGNMENT);
    CHECK(pb_kvcache_compact(&rows, 0, 3, indices, ROWS, (uint32_t *)(void *)((char *)counts + 1))
          == PB_KVCACHE_ERROR_ALIGNMENT);
    bad = rows; /* heads backwards */
    bad.head_stride = -ROWS * BYTES;
    bad.data = data + 2 * ROWS * BYTES;
    indices[0] = 0;
    indices[1] = 1;
    CHECK(pb_kvcache_compact(&bad, 0, 1, indices, ROWS, counts) == PB_KVCACHE_OK);
    bad.n = (size_t)UINT32_MAX + 1;
    CHECK(bad.n == 0 || pb_kvcache_compact(&bad, 0, 1, indices, ROWS, counts) == PB_KVCACHE_ERROR_TOO_LARGE);
    indices[0] = 1;
    indices[1] = 2;
    pb_kvcache_rows over = {indices, 1, 4, 4, 16, 4};
    CHECK(pb_kvcache_compact(&over, 0, 1, indices + 2, 1, counts) == PB_KVCACHE_ERROR_OVERLAP);
    over = (pb_kvcache_rows){counts, 1, HEADS, sizeof *counts, 0, sizeof *counts}; /* all of counts and no more */
    CHECK(pb_kvcache_compact(&over, 0, 1, indices, 1, counts) == PB_KVCACHE_ERROR_OVERLAP);
    CHECK(counts[0] == 2 && indices[0] == 1);
    CHECK(memcmp(before, data, sizeof data) == 0);
    counts[0] = 0;
    CHECK(pb_kvcache_compact(&rows, 0, 1, indices, ROWS, counts) == PB_KVCACHE_OK);
    CHECK(pb_kvcache_compact(&rows, 1, 1, indices, ROWS, counts) == PB_KVCACHE_OK);
    /* Nothing there is nothing to move: no heads, and no rows. */
    bad = rows;
    bad.num_heads = 0;
    CHECK(pb_kvcache_compact(&bad, 0, 0, indices, ROWS, counts) == PB_KVCACHE_OK);
    bad = rows;
    bad.n = 0;
    counts[0] = counts[1] = counts[2] = 0;
    CHECK(pb_kvcache_compact(&bad, 0, HEADS, indices, ROWS, counts) == PB_KVCACHE_OK);
    counts[1] = 1;
    CHECK(pb_kvcache_compact(&bad, 0, HEADS, indices, ROWS, counts) == PB_KVCACHE_ERROR_INDEX);
    CHECK(memcmp(before, data, sizeof data) == 0);
}

/* Rows of any length move as a gather would put them, from one byte to more than is fetched ahead. */
static void test_compact_lengths(void)
{
    enum { ROWS = 40, MOST = 1100 };
    static unsigned char data[ROWS * MOST], before[ROWS * MOST];
    uint32_t indices[ROWS];
    for (size_t bytes = 1; bytes <= MOST; bytes += bytes < 3 || bytes >= 1020 ? 1 : 113) {
        const pb_kvcache_rows rows = {data, 1, ROWS, bytes, 0, (ptrdiff_t)bytes};
        uint32_t count = 0;
        for (size_t i = 0; i < ROWS * bytes; ++i) {
            before[i] = data[i] = (unsigned char)draw();
        }
        for (uint32_t i = 0; i < ROWS; ++i) {
            if (draw() % 3u != 0) {
                indices[count++] = i;
            }
        }
        CHECK(pb_kvcache_compact(&rows, 0, 1, indices, 0, &count) == PB_KVCACHE_OK);
        bool good = true;
        for (size_t i = 0; i < count; ++i) {
            good = good && memcmp(data + i * bytes, before + indices[i] * bytes, bytes) == 0;
        }
        CHECK(good);
    }
}

static void test_statuses(void)
{
    CHECK(PB_KVCACHE_ERROR_WINDOW == -50 && PB_KVCACHE_ERROR_HEADS == -51 && PB_KVCACHE_ERROR_HEAD_RANGE == -52);
    CHECK(PB_KVCACHE_ERROR_OPTION == -53 && PB_KVCACHE_ERROR_SCALE == -54 && PB_KVCACHE_ERROR_ALIGNMENT == -55);
    CHECK(PB_KVCACHE_ERROR_STRIDE == -56 && PB_KVCACHE_ERROR_OVERLAP == -57 && PB_KVCACHE_ERROR_WORKSPACE == -58);
    CHECK(PB_KVCACHE_ERROR_LOGIT == -59 && PB_KVCACHE_ERROR_MASKED == -60 && PB_KVCACHE_ERROR_SCORE == -61);
    CHECK(PB_KVCACHE_ERROR_COUNT == -62 && PB_KVCACHE_ERROR_BUDGET_WINDOW == -63 && PB_KVCACHE_ERROR_INDEX == -64);
    CHECK(PB_KVCACHE_ERROR_PROTECT == -65 && PB_KVCACHE_ERROR_SELECT_WEIGHT == -66);
}

int main(void)
{
    test_statuses();
    test_exponential();
    test_halves();
    test_copies();
    test_negative_copies_on_portable();
    test_choice();
    test_choice_that_misleads();
    test_sizes();
    test_bits();
    test_shards();
    test_refusals();
    test_absent_scores();
    test_edge();
    test_inside();
    test_lowest();
    test_lowest_of_a_group();
    test_compact();
    test_compact_lengths();
    return END();
}
