#include <string.h>

#include "checks.h"
#include "internal.h"

/* Bytes of the struct, rounded up so that doubles can follow it. */
#define HEADER ((sizeof(struct pb_kvcache) + sizeof(double) - 1) / sizeof(double) * sizeof(double))

static size_t gaps_bytes(const pb_kvcache_priv_shape *shape)
{
    return shape->obs_window > 0 ? PB_KVCACHE_PRIV_GAPS * sizeof(uint32_t) : 0;
}

pb_kvcache_status pb_kvcache_priv_set_bytes(pb_kvcache_priv_shape *shape)
{
    /* A position costs 4 bytes in `kept` and in each ring row, and 8 in each array of doubles. A step that can be taken
     * back costs its entry, and a ring row or an array of doubles. Both sums stay below 2^38. Only their product can be
     * too large, and on 32-bit targets what does not depend on the capacity alone. */
    const uint64_t steps = shape->max_rollback;
    const uint64_t ring_rows = shape->obs_window + (shape->obs_window > 0 ? steps : 0);
    const uint64_t doubles = shape->doubles + (shape->doubles == 1 ? steps : 0);
    const uint64_t position = (ring_rows + 1 + 2 * doubles) * sizeof(uint32_t);
    const uint64_t tables = (steps > 0 ? 3 : 2) * (uint64_t)shape->obs_window;
    const uint64_t fixed = HEADER + tables * sizeof(uint32_t) + gaps_bytes(shape)
                           + steps * sizeof(pb_kvcache_priv_undo);
    const uint64_t most = PTRDIFF_MAX;
    if (fixed > most || position > (most - fixed) / shape->capacity) {
        return PB_KVCACHE_ERROR_TOO_LARGE;
    }
    shape->bytes = (size_t)(fixed + position * shape->capacity);
    return PB_KVCACHE_OK;
}

pb_kvcache *pb_kvcache_priv_place(void *memory, const pb_kvcache_priv_shape *shape)
{
    pb_kvcache *policy = memory;
    const size_t capacity = shape->capacity;
    double *doubles = (double *)(void *)((unsigned char *)memory + HEADER);
    const uint32_t steps = shape->max_rollback;
    double *after = doubles + shape->doubles * capacity;
    *policy = (pb_kvcache){.shape = *shape};
    policy->scores = doubles;
    policy->prefix = shape->doubles < 2 ? doubles : doubles + capacity;
    if (shape->doubles == 1 && steps > 0) {
        policy->saved = after;
        after += steps * capacity;
    }
    policy->kept = (uint32_t *)(void *)after;
    policy->lengths = policy->kept + capacity;
    policy->seen = policy->lengths + shape->obs_window;
    policy->gaps = policy->seen + shape->obs_window;
    policy->undo = (pb_kvcache_priv_undo *)(void *)(policy->gaps + gaps_bytes(shape) / sizeof(uint32_t));
    uint32_t *rest = (uint32_t *)(void *)(policy->undo + steps);
    if (steps > 0 && shape->obs_window > 0) {
        policy->row_of_slot = rest;
        rest += shape->obs_window;
    }
    policy->history = (float *)(void *)rest;
    /* Slots have the first rows, steps that will be remembered the rest */
    for (uint32_t slot = 0; policy->row_of_slot != NULL && slot < shape->obs_window; ++slot) {
        policy->row_of_slot[slot] = slot;
    }
    for (uint32_t step = 0; step < steps; ++step) {
        policy->undo[step] = (pb_kvcache_priv_undo){.row = shape->obs_window + step};
    }
    (void)pb_kvcache_reset(policy);
    return policy;
}

pb_kvcache *pb_kvcache_priv_new(const pb_kvcache_priv_shape *shape, const pb_allocator *allocator)
{
    pb_allocator chosen;
    if (!pb_kvcache_priv_allocator(allocator, &chosen)) {
        return NULL;
    }
    void *memory = chosen.alloc(chosen.ctx, shape->bytes);
    if (memory == NULL) {
        return NULL;
    }
    pb_kvcache *policy = pb_kvcache_priv_place(memory, shape);
    policy->allocator = chosen;
    return policy;
}

pb_kvcache_status pb_kvcache_priv_step_check(const pb_kvcache *policy, uint32_t pos, const float *attn,
                                             size_t attn_len)
{
    const size_t kept_count = policy->kept_count;
    if (kept_count > 0 && pos <= policy->kept[kept_count - 1]) {
        return PB_KVCACHE_ERROR_POSITION;
    }
    if (attn != NULL && attn_len != kept_count) {
        return PB_KVCACHE_ERROR_ATTN_LEN;
    }
    if (attn != NULL && !pb_kvcache_priv_weights_ok(attn, kept_count)) {
        return PB_KVCACHE_ERROR_ATTN_VALUE;
    }
    if (kept_count >= policy->shape.capacity) {
        return PB_KVCACHE_ERROR_FULL;
    }
    return PB_KVCACHE_OK;
}

void pb_kvcache_priv_step(pb_kvcache *policy, uint32_t pos, const float *attn)
{
    const bool observed = attn != NULL && policy->shape.rules->observe != NULL;
    if (policy->shape.max_rollback > 0) {
        pb_kvcache_priv_remember(policy, observed);
    }
    if (observed) {
        policy->shape.rules->observe(policy, attn);
    }
    policy->kept[policy->kept_count] = pos;
    if (policy->shape.rules->join != NULL) {
        policy->shape.rules->join(policy);
    }
    ++policy->kept_count;
}

pb_kvcache_status pb_kvcache_priv_on_decode_step(pb_kvcache *policy, uint32_t pos, const float *attn, size_t attn_len)
{
    if (policy == NULL) {
        return PB_KVCACHE_ERROR_NULL;
    }
    const pb_kvcache_status status = pb_kvcache_priv_step_check(policy, pos, attn, attn_len);
    if (status == PB_KVCACHE_OK) {
        pb_kvcache_priv_step(policy, pos, attn);
    }
    return status;
}

/* The kept positions that may be dropped: indices *first .. *first + (returned count) - 1. */
static size_t candidates(const pb_kvcache *policy, size_t *first)
{
    const size_t kept_count = policy->kept_count;
    size_t recent = policy->shape.recent_window < kept_count ? policy->shape.recent_window : kept_count;
    size_t pinned = 0;
    if (recent < policy->unobserved) {
        recent = policy->unobserved;
    }
    while (pinned < kept_count && policy->kept[pinned] < policy->shape.sinks) {
        ++pinned;
    }
    *first = pinned;
    return kept_count - recent > pinned ? kept_count - recent - pinned : 0;
}

size_t pb_kvcache_evict_count(const pb_kvcache *policy, uint32_t budget)
{
    return pb_kvcache_evict_rows_count(policy, budget, 1);
}

size_t pb_kvcache_evict_rows_count(const pb_kvcache *policy, uint32_t budget, uint32_t multiple_of)
{
    if (policy == NULL || multiple_of == 0) {
        return 0;
    }
    uint64_t target = budget < policy->shape.effective ? budget : policy->shape.effective;
    if (policy->kept_count <= target / multiple_of * multiple_of) {
        return 0;
    }
    size_t first;
    const size_t safe = policy->kept_count - candidates(policy, &first); /* what no eviction drops */
    const uint64_t least = safe > 0 ? safe : target > 0;
    target = target / multiple_of * multiple_of;
    if (target < least) {
        target = (least + multiple_of - 1) / multiple_of * multiple_of;
    }
    return policy->kept_count > target ? policy->kept_count - (size_t)target : 0;
}

void pb_kvcache_priv_close_gaps(void *array, size_t n, size_t size, const uint32_t *chosen, size_t count)
{
    unsigned char *bytes = array;
    for (size_t i = 0; i < count; ++i) {
        const size_t from = (size_t)chosen[i] + 1;
        const size_t to = i + 1 < count ? chosen[i + 1] : n;
        memmove(bytes + (chosen[i] - i) * size, bytes + from * size, (to - from) * size);
    }
}

/* The rows that leave, or those that stay where n positions are kept and `chosen` of them leave. */
static void tell_rows(const uint32_t *chosen, size_t count, size_t n, pb_kvcache_row_set which, uint32_t *rows)
{
    if (which == PB_KVCACHE_ROWS_VICTIMS) {
        memcpy(rows, chosen, count * sizeof *rows);
        return;
    }
    uint32_t row = 0;
    for (size_t i = 0; i <= count; ++i, ++row) {
        for (const size_t end = i < count ? chosen[i] : n; row < end; ++row) {
            *rows++ = row;
        }
    }
}

pb_kvcache_status pb_kvcache_evict_rows(pb_kvcache *policy, uint32_t budget, uint32_t multiple_of,
                                        pb_kvcache_row_set which, uint32_t *victims, size_t victims_capacity,
                                        uint32_t *rows, size_t rows_capacity)
{
    const size_t count = pb_kvcache_evict_rows_count(policy, budget, multiple_of);
    if (policy == NULL || (victims == NULL && count > 0)) {
        return PB_KVCACHE_ERROR_NULL;
    }
    const pb_kvcache_status status = pb_kvcache_priv_rows_asked_ok(multiple_of, which);
    if (status != PB_KVCACHE_OK) {
        return status;
    }
    const size_t told = which == PB_KVCACHE_ROWS_VICTIMS ? count : policy->kept_count - count;
    if (victims_capacity < count || (rows != NULL && rows_capacity < told)) {
        return PB_KVCACHE_ERROR_CAPACITY;
    }
    if (rows != NULL && pb_kvcache_priv_overlap(victims, count * sizeof *victims, rows, told * sizeof *rows)) {
        return PB_KVCACHE_ERROR_OVERLAP;
    }
    pb_kvcache_priv_drop(policy, count, victims, which, rows);
    return PB_KVCACHE_OK;
}

pb_kvcache_status pb_kvcache_priv_rows_asked_ok(uint32_t multiple_of, pb_kvcache_row_set which)
{
    if (multiple_of == 0) {
        return PB_KVCACHE_ERROR_PLAN_MULTIPLE;
    }
    return which == PB_KVCACHE_ROWS_KEPT || which == PB_KVCACHE_ROWS_VICTIMS ? PB_KVCACHE_OK
                                                                            : PB_KVCACHE_ERROR_OPTION;
}

size_t pb_kvcache_priv_evict(pb_kvcache *policy, uint32_t budget, uint32_t *victims, size_t capacity)
{
    const size_t count = pb_kvcache_evict_count(policy, budget);
    if (count == 0 || victims == NULL || capacity < count) {
        return 0;
    }
    pb_kvcache_priv_drop(policy, count, victims, PB_KVCACHE_ROWS_KEPT, NULL);
    return count;
}

void pb_kvcache_priv_drop(pb_kvcache *policy, size_t count, uint32_t *victims, pb_kvcache_row_set which,
                          uint32_t *rows)
{
    if (count == 0) { /* all rows stay */
        for (uint32_t row = 0; rows != NULL && which == PB_KVCACHE_ROWS_KEPT && row < policy->kept_count; ++row) {
            rows[row] = row;
        }
        return;
    }
    size_t first;
    const size_t most = candidates(policy, &first);
    pb_kvcache_priv_forget_steps(policy);
    policy->shape.rules->choose(policy, first, most, count, victims); /* indices, not yet positions */
    if (rows != NULL) {
        tell_rows(victims, count, policy->kept_count, which, rows);
    }
    if (policy->shape.rules->forget != NULL) {
        policy->shape.rules->forget(policy, victims, count);
    }
    /* The victims' positions leave `kept` for `victims` while the gaps close behind them. */
    uint32_t *kept = policy->kept;
    size_t write = victims[0];
    for (size_t i = 0; i < count; ++i) {
        const size_t index = victims[i];
        const size_t end = i + 1 < count ? victims[i + 1] : policy->kept_count;
        victims[i] = kept[index];
        memmove(kept + write, kept + index + 1, (end - index - 1) * sizeof(uint32_t));
        write += end - index - 1;
    }
    policy->kept_count -= count;
}

size_t pb_kvcache_priv_memory_bytes(const pb_kvcache *policy)
{
    return policy == NULL ? 0 : policy->shape.bytes;
}

void pb_kvcache_priv_destroy(pb_kvcache *policy)
{
    if (policy != NULL && policy->allocator.free != NULL) {
        const pb_allocator allocator = policy->allocator;
        allocator.free(allocator.ctx, policy, policy->shape.bytes);
    }
}

size_t pb_kvcache_kept_count(const pb_kvcache *policy)
{
    return policy == NULL ? 0 : policy->kept_count;
}

pb_kvcache_status pb_kvcache_kept(const pb_kvcache *policy, uint32_t *positions, size_t capacity)
{
    if (policy == NULL || (positions == NULL && policy->kept_count > 0)) {
        return PB_KVCACHE_ERROR_NULL;
    }
    if (capacity < policy->kept_count) {
        return PB_KVCACHE_ERROR_CAPACITY;
    }
    if (policy->kept_count > 0) {
        memcpy(positions, policy->kept, policy->kept_count * sizeof(uint32_t));
    }
    return PB_KVCACHE_OK;
}

/* The index of a kept position, or kept_count. */
static size_t index_of(const pb_kvcache *policy, uint32_t pos)
{
    size_t low = 0;
    size_t high = policy->kept_count;
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        if (policy->kept[middle] < pos) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low < policy->kept_count && policy->kept[low] == pos ? low : policy->kept_count;
}

int pb_kvcache_contains(const pb_kvcache *policy, uint32_t pos)
{
    return policy != NULL && index_of(policy, pos) < policy->kept_count;
}

uint32_t pb_kvcache_effective_budget(const pb_kvcache *policy)
{
    return policy == NULL ? 0 : policy->shape.effective;
}

uint32_t pb_kvcache_capacity(const pb_kvcache *policy)
{
    return policy == NULL ? 0 : policy->shape.capacity;
}

pb_kvcache_status pb_kvcache_window_score(const pb_kvcache *policy, uint32_t pos, double *score)
{
    if (policy == NULL || score == NULL) {
        return PB_KVCACHE_ERROR_NULL;
    }
    if (policy->shape.rules->score == NULL) {
        return PB_KVCACHE_ERROR_UNSUPPORTED;
    }
    const size_t index = index_of(policy, pos);
    if (index == policy->kept_count) {
        return PB_KVCACHE_ERROR_NOT_KEPT;
    }
    *score = policy->shape.rules->score(policy, index);
    return PB_KVCACHE_OK;
}

pb_kvcache_status pb_kvcache_reset(pb_kvcache *policy)
{
    const uint32_t zero = 0;
    return pb_kvcache_seed(policy, &zero, 1, NULL, 0);
}

pb_kvcache_status pb_kvcache_seed(pb_kvcache *policy, const uint32_t *positions, size_t count, const float *attn,
                                  size_t rows)
{
    /* Checks: pointers, room, positions, weights */
    if (policy == NULL || (positions == NULL && count > 0) || (attn == NULL && rows > 0 && count > 0)) {
        return PB_KVCACHE_ERROR_NULL;
    }
    if (count > policy->shape.capacity) {
        return PB_KVCACHE_ERROR_FULL;
    }
    for (size_t i = 1; i < count; ++i) {
        if (positions[i] <= positions[i - 1]) {
            return PB_KVCACHE_ERROR_POSITION;
        }
    }
    size_t weights;
    size_t bytes;
    if (!pb_kvcache_priv_mul(rows, count, &weights) || !pb_kvcache_priv_mul(weights, sizeof(float), &bytes)) {
        return PB_KVCACHE_ERROR_TOO_LARGE;
    }
    if (weights > 0 && !pb_kvcache_priv_weights_ok(attn, weights)) {
        return PB_KVCACHE_ERROR_ATTN_VALUE;
    }
    /* Forget, let the positions join, take the steps in */
    const pb_kvcache_priv_rules *rules = policy->shape.rules;
    pb_kvcache_priv_forget_steps(policy);
    policy->kept_count = 0;
    policy->cursor = 0;
    if (rules->clear != NULL) {
        rules->clear(policy);
    }
    for (size_t i = 0; i < count; ++i) {
        policy->kept[i] = positions[i];
        if (rules->join != NULL) {
            policy->kept_count = i;
            rules->join(policy);
        }
    }
    policy->kept_count = count;
    for (size_t row = 0; rules->observe != NULL && count > 0 && row < rows; ++row) {
        rules->observe(policy, attn + row * count);
    }
    return PB_KVCACHE_OK;
}

bool pb_kvcache_priv_same_shape(const pb_kvcache *policy, const pb_kvcache *source)
{
    const pb_kvcache_priv_shape *a = &policy->shape;
    const pb_kvcache_priv_shape *b = &source->shape;
    return a->rules == b->rules && a->effective == b->effective && a->capacity == b->capacity
           && a->recent_window == b->recent_window && a->sinks == b->sinks && a->obs_window == b->obs_window
           && a->pool_kernel == b->pool_kernel && a->max_rollback == b->max_rollback;
}

pb_kvcache_status pb_kvcache_copy(pb_kvcache *policy, const pb_kvcache *source)
{
    if (policy == NULL || source == NULL) {
        return PB_KVCACHE_ERROR_NULL;
    }
    const pb_kvcache_priv_shape *a = &policy->shape;
    if (!pb_kvcache_priv_same_shape(policy, source)) {
        return PB_KVCACHE_ERROR_MISMATCH;
    }
    if (policy == source) {
        return PB_KVCACHE_OK;
    }
    policy->kept_count = source->kept_count;
    policy->cursor = source->cursor;
    policy->unobserved = source->unobserved;
    memcpy(policy->kept, source->kept, source->kept_count * sizeof(uint32_t));
    if (a->doubles == 1) { /* two arrays are scratch */
        memcpy(policy->scores, source->scores, source->kept_count * sizeof(double));
    }
    if (policy->row_of_slot != NULL) {
        memcpy(policy->row_of_slot, source->row_of_slot, a->obs_window * sizeof(uint32_t));
    }
    if (a->obs_window > 0) {
        pb_kvcache_priv_ring_copy(policy, source);
    }
    pb_kvcache_priv_copy_steps(policy, source);
    return PB_KVCACHE_OK;
}
