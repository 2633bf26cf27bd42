/*
 * Run vector files against the C library, without Python: vectors FILE... Prints every case that fails, then how many
 * passed and failed. The files are explained in vectors/README.md.
 */
#include "vectors.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct {
    const char *kind;
    vectors_run *run;
} kinds[] = {
    {"pyramid_budget", vectors_pyramid_budget},
    {"plan", vectors_plan},
    {"divide", vectors_divide},
    {"policy", vectors_policy},
    {"refusal", vectors_refusal},
    {"select", vectors_select},
    {"compact", vectors_compact},
    {"blocks", vectors_blocks},
    {"hold", vectors_hold},
    {"decode_weights", vectors_decode_weights},
    {"stack", vectors_stack},
    {"stack_refusal", vectors_stack_refusal},
};

static char why[512];

bool vectors_fail(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(why, sizeof why, format, arguments);
    va_end(arguments);
    return false;
}

void *vectors_alloc(size_t count, size_t size)
{
    void *memory = count <= SIZE_MAX / size ? malloc(count > 0 ? count * size : 1) : NULL;
    if (memory == NULL) {
        fprintf(stderr, "vectors: no memory for %zu elements of %zu bytes\n", count, size);
        exit(2);
    }
    return memory;
}

float *vectors_rows(const json *rows, size_t width)
{
    float *all = vectors_alloc(rows->length * width, sizeof *all);
    size_t at = 0;
    for (const json *row = rows->child; row != NULL; row = row->next, at += width) {
        size_t count;
        float *one = json_floats(row, &count);
        if (count == width) {
            memcpy(all + at, one, width * sizeof *all);
        }
        free(one);
        if (count != width) {
            free(all);
            vectors_fail("a row of %zu, not of %zu", count, width);
            return NULL;
        }
    }
    return all;
}

pb_kvcache_status vectors_status(const json *name)
{
    static const struct {
        const char *name;
        pb_kvcache_status status;
    } statuses[] = {
        {"null", PB_KVCACHE_ERROR_NULL},
        {"budget", PB_KVCACHE_ERROR_BUDGET},
        {"obs_window", PB_KVCACHE_ERROR_OBS_WINDOW},
        {"recent_window", PB_KVCACHE_ERROR_RECENT_WINDOW},
        {"pool_kernel", PB_KVCACHE_ERROR_POOL_KERNEL},
        {"num_layers", PB_KVCACHE_ERROR_NUM_LAYERS},
        {"layer", PB_KVCACHE_ERROR_LAYER},
        {"pyramid_ratio", PB_KVCACHE_ERROR_PYRAMID_RATIO},
        {"too_large", PB_KVCACHE_ERROR_TOO_LARGE},
        {"no_memory", PB_KVCACHE_ERROR_NO_MEMORY},
        {"position", PB_KVCACHE_ERROR_POSITION},
        {"attn_len", PB_KVCACHE_ERROR_ATTN_LEN},
        {"attn_value", PB_KVCACHE_ERROR_ATTN_VALUE},
        {"full", PB_KVCACHE_ERROR_FULL},
        {"not_kept", PB_KVCACHE_ERROR_NOT_KEPT},
        {"capacity", PB_KVCACHE_ERROR_CAPACITY},
        {"mismatch", PB_KVCACHE_ERROR_MISMATCH},
        {"unsupported", PB_KVCACHE_ERROR_UNSUPPORTED},
        {"state", PB_KVCACHE_ERROR_STATE},
        {"state_version", PB_KVCACHE_ERROR_STATE_VERSION},
        {"rollback", PB_KVCACHE_ERROR_ROLLBACK},
        {"option", PB_KVCACHE_ERROR_OPTION},
        {"plan_shape", PB_KVCACHE_ERROR_PLAN_SHAPE},
        {"plan_multiple", PB_KVCACHE_ERROR_PLAN_MULTIPLE},
        {"plan_total", PB_KVCACHE_ERROR_PLAN_TOTAL},
        {"plan_overflow", PB_KVCACHE_ERROR_PLAN_OVERFLOW},
        {"plan_ratio", PB_KVCACHE_ERROR_PLAN_RATIO},
        {"plan_weights", PB_KVCACHE_ERROR_PLAN_WEIGHTS},
        {"plan_weight", PB_KVCACHE_ERROR_PLAN_WEIGHT},
        {"plan_bounds", PB_KVCACHE_ERROR_PLAN_BOUNDS},
        {"plan_block", PB_KVCACHE_ERROR_PLAN_BLOCK},
        {"plan_minimum", PB_KVCACHE_ERROR_PLAN_MINIMUM},
        {"divide_units", PB_KVCACHE_ERROR_DIVIDE_UNITS},
        {"divide_grid", PB_KVCACHE_ERROR_DIVIDE_GRID},
        {"divide_loss", PB_KVCACHE_ERROR_DIVIDE_LOSS},
        {"divide_below", PB_KVCACHE_ERROR_DIVIDE_BELOW},
        {"window", PB_KVCACHE_ERROR_WINDOW},
        {"heads", PB_KVCACHE_ERROR_HEADS},
        {"scale", PB_KVCACHE_ERROR_SCALE},
        {"logit", PB_KVCACHE_ERROR_LOGIT},
        {"masked", PB_KVCACHE_ERROR_MASKED},
        {"score", PB_KVCACHE_ERROR_SCORE},
        {"budget_window", PB_KVCACHE_ERROR_BUDGET_WINDOW},
        {"protect", PB_KVCACHE_ERROR_PROTECT},
        {"select_weight", PB_KVCACHE_ERROR_SELECT_WEIGHT},
        {"index", PB_KVCACHE_ERROR_INDEX},
        {"sinks", PB_KVCACHE_ERROR_SINKS},
        {"block_size", PB_KVCACHE_ERROR_BLOCK_SIZE},
        {"cache", PB_KVCACHE_ERROR_CACHE},
    };
    if (json_is_null(name) || strcmp(json_string(name), "ok") == 0) {
        return PB_KVCACHE_OK;
    }
    for (size_t i = 0; i < sizeof statuses / sizeof statuses[0]; ++i) {
        if (strcmp(json_string(name), statuses[i].name) == 0) {
            return statuses[i].status;
        }
    }
    printf("unknown status %s\n", json_string(name));
    return (pb_kvcache_status)1; /* what no call answers */
}

int main(int argc, char **argv)
{
    unsigned long passed = 0;
    unsigned long failed = 0;
    for (int i = 1; i < argc; ++i) {
        json *file = json_read(argv[i]);
        const char *kind = json_string(json_need(file, "kind"));
        vectors_run *run = NULL;
        for (size_t k = 0; k < sizeof kinds / sizeof kinds[0]; ++k) {
            run = strcmp(kind, kinds[k].kind) == 0 ? kinds[k].run : run;
        }
        for (const json *test = json_need(file, "cases")->child; test != NULL; test = test->next) {
            why[0] = '\0';
            if (run != NULL ? run(test) : vectors_fail("unknown kind %s", kind)) {
                ++passed;
            } else {
                ++failed;
                printf("%s: %s: %s\n", argv[i], json_string(json_need(test, "name")), why);
            }
        }
        json_free(file);
    }
    printf("%lu passed, %lu failed\n", passed, failed);
    return failed != 0 || passed == 0;
}
