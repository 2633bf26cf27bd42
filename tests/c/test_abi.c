/*
 * The layouts that programs were compiled against: the size of every public struct and where its members lie, on targets
 * of 64 and of 32 bits. A failure here breaks every program that is linked with a shared library: only a new version of
 * its name may change it. The exported symbols are in csrc/symbols.txt. Also what caches hold and take, as the headers say.
 */
#include <stddef.h>
#include <stdint.h>

#include "check.h"
#include "internal.h"

/* On a 32-bit target pointers take 4 bytes; 64-bit integers and doubles align to 4 (i686) or to 8 (arm). */
#define POINTER sizeof(void *)
#define WIDE _Alignof(struct { char c; uint64_t x; })

static size_t up(size_t offset, size_t alignment)
{
    return (offset + alignment - 1) / alignment * alignment;
}

#define SIZE(type, bytes) CHECK(sizeof(type) == (bytes))
#define AT(type, member, bytes) CHECK(offsetof(type, member) == (bytes))

static void structs(void)
{
    SIZE(pb_allocator, 3 * POINTER);
    AT(pb_allocator, free, POINTER);
    AT(pb_allocator, ctx, 2 * POINTER);
    SIZE(pb_kvcache_vtable, 5 * POINTER);
    AT(pb_kvcache_vtable, on_decode_step, POINTER);
    AT(pb_kvcache_vtable, evict, 2 * POINTER);
    AT(pb_kvcache_vtable, memory_bytes, 3 * POINTER);
    AT(pb_kvcache_vtable, destroy, 4 * POINTER);

    /* Parameters of policies: rows of uint32_t, in the order that their names have in the headers */
    SIZE(pb_kvcache_snapkv_params, 24);
    AT(pb_kvcache_snapkv_params, pool_kernel, 12);
    AT(pb_kvcache_snapkv_params, spare, 16);
    AT(pb_kvcache_snapkv_params, max_rollback, 20);
    SIZE(pb_kvcache_pyramidkv_params, 36);
    AT(pb_kvcache_pyramidkv_params, pyramid_ratio, 12);
    AT(pb_kvcache_pyramidkv_params, pool_kernel, 24);
    AT(pb_kvcache_pyramidkv_params, spare, 28);
    AT(pb_kvcache_pyramidkv_params, max_rollback, 32);
    SIZE(pb_kvcache_sliding_window_params, 12);
    AT(pb_kvcache_sliding_window_params, spare, 4);
    AT(pb_kvcache_sliding_window_params, max_rollback, 8);
    SIZE(pb_kvcache_streaming_llm_params, 16);
    AT(pb_kvcache_streaming_llm_params, sinks, 4);
    AT(pb_kvcache_streaming_llm_params, spare, 8);
    AT(pb_kvcache_streaming_llm_params, max_rollback, 12);
    SIZE(pb_kvcache_h2o_params, 16);
    AT(pb_kvcache_h2o_params, spare, 8);
    AT(pb_kvcache_h2o_params, max_rollback, 12);
    SIZE(pb_kvcache_tova_params, 12);
    AT(pb_kvcache_tova_params, spare, 4);
    AT(pb_kvcache_tova_params, max_rollback, 8);
    SIZE(pb_kvcache_scissorhands_params, 16);
    AT(pb_kvcache_scissorhands_params, spare, 8);
    AT(pb_kvcache_scissorhands_params, max_rollback, 12);
    SIZE(pb_kvcache_stack_params, 32);
    AT(pb_kvcache_stack_params, pool_kernel, 20);
    AT(pb_kvcache_stack_params, spare, 24);
    AT(pb_kvcache_stack_params, max_rollback, 28);
    SIZE(pb_kvcache_hold_params, 16);
    AT(pb_kvcache_hold_params, pool_kernel, 12);
    SIZE(pb_kvcache_slot_move, 12);
    AT(pb_kvcache_slot_move, to, 8);

    /* The plan's: an enumeration takes 4 bytes */
    const size_t ratio = up(16, WIDE);
    AT(pb_kvcache_plan_params, shape, 8);
    AT(pb_kvcache_plan_params, multiple_of, 12);
    AT(pb_kvcache_plan_params, ratio, ratio);
    AT(pb_kvcache_plan_params, weights, ratio + 8);
    AT(pb_kvcache_plan_params, minimum, ratio + 8 + POINTER);
    AT(pb_kvcache_plan_params, maximum, ratio + 12 + POINTER);
    AT(pb_kvcache_plan_params, minimums, up(ratio + 16 + POINTER, POINTER));
    SIZE(pb_kvcache_plan_params, up(up(ratio + 16 + POINTER, POINTER) + 2 * POINTER, WIDE));

    /* The selection's */
    AT(pb_kvcache_attention, dtype, POINTER);
    AT(pb_kvcache_attention, logits, POINTER + 4);
    AT(pb_kvcache_attention, scale, POINTER + 8);
    AT(pb_kvcache_attention, num_q_heads, up(POINTER + 12, POINTER));
    AT(pb_kvcache_attention, row_stride, up(POINTER + 12, POINTER) + 5 * POINTER);
    SIZE(pb_kvcache_attention, up(POINTER + 12, POINTER) + 6 * POINTER);
    AT(pb_kvcache_select_params, kernel, 8);
    AT(pb_kvcache_select_params, edge, 8 + POINTER);
    AT(pb_kvcache_select_params, nan, 12 + POINTER);
    AT(pb_kvcache_select_params, protect, 16 + POINTER);
    AT(pb_kvcache_select_params, weights, 16 + 3 * POINTER);
    SIZE(pb_kvcache_select_params, 16 + 5 * POINTER);
    SIZE(pb_kvcache_move, 8);
    AT(pb_kvcache_move, to, 4);
    SIZE(pb_kvcache_rows, 6 * POINTER);
    AT(pb_kvcache_rows, row_stride, 5 * POINTER);
}

/* Beside the positions: two numbers a slot, and what the ring of any size has. */
static size_t ring_bytes(size_t slots)
{
    return slots == 0 ? 0 : 4 * (2 * slots + PB_KVCACHE_PRIV_GAPS);
}

/* policy.h: max(effective, budget) + 1 + spare positions, and bytes for each of them beside a fixed part. */
static void capacities(void)
{
    const struct {
        const pb_kvcache_vtable *policy;
        uint32_t params[9];
        uint32_t capacity;
        size_t position; /* bytes */
        size_t ring;     /* slots */
        size_t rest;     /* bytes of steps that can be taken back, beside what positions cost */
    } cases[] = {
        {&pb_kvcache_snapkv, {100, 8, 16, 7}, 101, 16 * 4 + 20, 16, 0},
        {&pb_kvcache_snapkv, {5, 0, 1, 1}, 6, 1 * 4 + 20, 1, 0},
        {&pb_kvcache_pyramidkv, {100, 0, 4, 4, 8, 16, 7}, 161, 16 * 4 + 20, 16, 0}, /* keeps 160 */
        {&pb_kvcache_pyramidkv, {100, 3, 4, 4, 8, 16, 7}, 101, 16 * 4 + 20, 16, 0}, /* keeps 40 */
        {&pb_kvcache_snapkv, {100, 8, 16, 7, 16}, 117, 16 * 4 + 20, 16, 0}, /* and 16 spare */
        {&pb_kvcache_pyramidkv, {100, 3, 4, 4, 8, 16, 7, 1}, 102, 16 * 4 + 20, 16, 0},
        {&pb_kvcache_sliding_window, {100, 9}, 110, 4, 0, 0},
        {&pb_kvcache_snapkv, {100, 8, 16, 7, 0, 5}, 101, 16 * 4 + 20 + 5 * 4, 16, 5 * 20 + 16 * 4}, /* 5 to undo */
        {&pb_kvcache_sliding_window, {100, 0, 5}, 101, 4, 0, 5 * 20},
        {&pb_kvcache_tova, {100, 0, 5}, 101, 12 + 5 * 8, 0, 5 * 20},
        {&pb_kvcache_h2o, {100, 8, 9}, 110, 12, 0, 0},
        {&pb_kvcache_sliding_window, {100}, 101, 4, 0, 0},
        {&pb_kvcache_streaming_llm, {100, 4}, 101, 4, 0, 0},
        {&pb_kvcache_h2o, {100, 8}, 101, 12, 0, 0},
        {&pb_kvcache_tova, {100}, 101, 12, 0, 0},
        {&pb_kvcache_scissorhands, {100, 8}, 101, 12, 0, 0},
    };
    const size_t fixed = up(sizeof(struct pb_kvcache), sizeof(double));
    size_t together = 0;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; ++i) {
        pb_kvcache *cache = cases[i].policy->create(cases[i].params, NULL, NULL);
        CHECK(pb_kvcache_capacity(cache) == cases[i].capacity);
        CHECK(cases[i].policy->memory_bytes(cache)
              == fixed + ring_bytes(cases[i].ring) + cases[i].rest + cases[i].position * cases[i].capacity);
        cases[i].policy->destroy(cache);
    }
    /* stack.h: the caches, each rounded up to 8 bytes, a pointer for each, and a fixed part. */
    enum { CACHES = 6 }; /* 3 layers of 2 KV heads, layer-major */
    static const uint32_t budgets[CACHES] = {40, 50, 30, 20, 10, 9};
    const pb_kvcache_stack_params params = {CACHES, 0, 0, 8, 16, 7, 0, 0};
    pb_kvcache_stack *stack = pb_kvcache_stack_create(&params, budgets, NULL);
    for (uint32_t cache = 0; cache < CACHES; ++cache) {
        CHECK(pb_kvcache_capacity(pb_kvcache_stack_layer(stack, cache)) == budgets[cache] + 1);
        together += up(fixed + ring_bytes(16) + (16 * 4 + 20) * (budgets[cache] + (size_t)1), 8);
    }
    const size_t rest = pb_kvcache_stack_memory_bytes(stack) - together;
    CHECK(rest >= CACHES * POINTER && rest <= CACHES * POINTER + 64);
    pb_kvcache_stack_destroy(stack);
}

int main(void)
{
    structs();
    capacities();
    return END();
}
