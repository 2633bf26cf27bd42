#include <string.h>

#include "checks.h"

/* One cache and where its rows are. */
typedef struct held {
    pb_kvcache *policy;
    uint32_t *slots; /* policy->shape.capacity of them: the slot of each kept position, positions ascending */
} held;

/* One block of memory: this struct with its caches, then what they point to, each aligned for a double, then `row`. */
struct pb_kvcache_hold {
    pb_allocator allocator;
    size_t bytes;
    float *row; /* scratch: one cache's weights, positions ascending */
    uint32_t num_caches;
    held caches[];
};

/* Bytes rounded up, so that a double can follow. `bytes` is at most PTRDIFF_MAX, the answer at most PTRDIFF_MAX + 1. */
static size_t aligned(size_t bytes)
{
    return (bytes + sizeof(double) - 1) / sizeof(double) * sizeof(double);
}

static pb_kvcache_status cache_shape(const pb_kvcache_hold_params *params, uint32_t budget,
                                     pb_kvcache_priv_shape *shape)
{
    const pb_kvcache_snapkv_params snapkv = {.budget = budget,
                                             .recent_window = params->recent_window,
                                             .obs_window = params->obs_window,
                                             .pool_kernel = params->pool_kernel};
    return pb_kvcache_priv_snapkv_shape(&snapkv, budget, shape);
}

/* Bytes before the first cache. num_caches is at most 2^20: the product fits 32 bits. */
static size_t header_bytes(uint32_t num_caches)
{
    return aligned(offsetof(struct pb_kvcache_hold, caches) + num_caches * sizeof(held));
}

/* Add an array's bytes to a total that stays at most PTRDIFF_MAX. */
static bool add_bytes(size_t *total, size_t bytes)
{
    const size_t room = (size_t)PTRDIFF_MAX - *total;
    if (bytes > room || aligned(bytes) > room) {
        return false;
    }
    *total += aligned(bytes);
    return true;
}

/* Bytes of all caches together, and the largest capacity; *cache becomes the first that refuses. */
static pb_kvcache_status total_bytes(const pb_kvcache_hold_params *params, const uint32_t *budgets, uint32_t *cache,
                                     size_t *bytes, size_t *widest)
{
    *cache = 0;
    if (params == NULL || budgets == NULL) {
        return PB_KVCACHE_ERROR_NULL;
    }
    if (params->num_caches == 0) {
        return PB_KVCACHE_ERROR_NUM_CACHES;
    }
    if (params->num_caches > PB_KVCACHE_HOLD_MAX_CACHES) {
        return PB_KVCACHE_ERROR_TOO_LARGE;
    }
    size_t total = header_bytes(params->num_caches);
    size_t most = 0;
    bool fits = true;
    for (; *cache < params->num_caches; ++*cache) {
        pb_kvcache_priv_shape shape;
        const pb_kvcache_status status = cache_shape(params, budgets[*cache], &shape);
        if (status != PB_KVCACHE_OK) {
            return status;
        }
        /* A cache takes more than 4 bytes a position, so that the bytes of its slots fit, too. */
        fits = fits && add_bytes(&total, shape.bytes) && add_bytes(&total, shape.capacity * sizeof(uint32_t));
        most = shape.capacity > most ? shape.capacity : most;
    }
    if (!fits || !add_bytes(&total, most * sizeof(float))) {
        *cache = 0;
        return PB_KVCACHE_ERROR_TOO_LARGE;
    }
    *bytes = total;
    *widest = most;
    return PB_KVCACHE_OK;
}

pb_kvcache_status pb_kvcache_hold_check(const pb_kvcache_hold_params *params, const uint32_t *budgets, uint32_t *cache)
{
    uint32_t first;
    size_t bytes;
    size_t widest;
    const pb_kvcache_status status = total_bytes(params, budgets, &first, &bytes, &widest);
    if (cache != NULL) {
        *cache = first;
    }
    return status;
}

pb_kvcache_hold *pb_kvcache_hold_create(const pb_kvcache_hold_params *params, const uint32_t *budgets,
                                        const pb_allocator *allocator)
{
    uint32_t cache;
    size_t bytes;
    size_t widest;
    pb_allocator chosen;
    if (total_bytes(params, budgets, &cache, &bytes, &widest) != PB_KVCACHE_OK
        || !pb_kvcache_priv_allocator(allocator, &chosen)) {
        return NULL;
    }
    pb_kvcache_hold *hold = chosen.alloc(chosen.ctx, bytes);
    if (hold == NULL) {
        return NULL;
    }
    hold->allocator = chosen;
    hold->bytes = bytes;
    hold->num_caches = params->num_caches;
    unsigned char *next = (unsigned char *)hold + header_bytes(hold->num_caches);
    for (cache = 0; cache < hold->num_caches; ++cache) {
        pb_kvcache_priv_shape shape;
        (void)cache_shape(params, budgets[cache], &shape);
        held *one = hold->caches + cache;
        one->policy = pb_kvcache_priv_place(next, &shape);
        next += aligned(shape.bytes);
        one->slots = (uint32_t *)(void *)next;
        one->slots[0] = 0;
        next += aligned(shape.capacity * sizeof(uint32_t));
    }
    hold->row = (float *)(void *)next;
    return hold;
}

void pb_kvcache_hold_destroy(pb_kvcache_hold *hold)
{
    if (hold != NULL) {
        const pb_allocator allocator = hold->allocator;
        allocator.free(allocator.ctx, hold, hold->bytes);
    }
}

pb_kvcache_status pb_kvcache_hold_seed(pb_kvcache_hold *hold, uint32_t cache, const uint32_t *positions, size_t count,
                                       const float *attn, size_t rows)
{
    if (hold == NULL) {
        return PB_KVCACHE_ERROR_NULL;
    }
    if (cache >= hold->num_caches) {
        return PB_KVCACHE_ERROR_CACHE;
    }
    held *one = hold->caches + cache;
    if (count > one->policy->shape.effective) { /* with one more no step would have room */
        return PB_KVCACHE_ERROR_FULL;
    }
    const pb_kvcache_status status = pb_kvcache_seed(one->policy, positions, count, attn, rows);
    if (status == PB_KVCACHE_OK) {
        for (size_t i = 0; i < count; ++i) {
            one->slots[i] = (uint32_t)i;
        }
    }
    return status;
}

/* The most positions that a cache keeps. */
static size_t most_kept(const pb_kvcache_hold *hold)
{
    size_t most = 0;
    for (uint32_t cache = 0; cache < hold->num_caches; ++cache) {
        const size_t count = hold->caches[cache].policy->kept_count;
        most = count > most ? count : most;
    }
    return most;
}

pb_kvcache_status pb_kvcache_hold_step_check(const pb_kvcache_hold *hold, const uint32_t *pos, const uint8_t *joins,
                                             const float *weights, size_t weights_stride, size_t weights_capacity,
                                             uint32_t *cache)
{
    uint32_t first = 0;
    pb_kvcache_status status = hold == NULL || pos == NULL ? PB_KVCACHE_ERROR_NULL : PB_KVCACHE_OK;
    if (status == PB_KVCACHE_OK && weights != NULL) {
        status = pb_kvcache_priv_rows_ok(weights, sizeof *weights, weights_stride, 0, hold->num_caches,
                                         most_kept(hold), weights_capacity);
    }
    while (status == PB_KVCACHE_OK && first < hold->num_caches) {
        if (joins == NULL || joins[first] != 0) {
            /* The first kept_count slots are those of the kept positions, in some order, which these checks leave
             * open. A cache between two steps keeps at most its budget, so that there is room for one more. */
            const pb_kvcache *policy = hold->caches[first].policy;
            status = pb_kvcache_priv_step_check(policy, pos[first],
                                                weights == NULL ? NULL : weights + first * weights_stride,
                                                policy->kept_count);
        }
        first += status == PB_KVCACHE_OK;
    }
    if (cache != NULL) {
        *cache = first;
    }
    return status;
}

/* The index in `kept` before which a position would stand. */
static size_t index_before(const pb_kvcache *policy, uint32_t pos)
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
    return low;
}

/* One cache takes a token in, whose row is in the slot behind the others. true where that row has to move to *to. */
static bool step(held *one, uint32_t pos, const float *weights, float *row, uint32_t *to)
{
    pb_kvcache *policy = one->policy;
    const size_t count = policy->kept_count;
    for (size_t i = 0; weights != NULL && i < count; ++i) {
        row[i] = weights[one->slots[i]];
    }
    pb_kvcache_priv_step(policy, pos, weights == NULL ? NULL : row);
    one->slots[count] = (uint32_t)count;
    uint32_t victim;
    if (pb_kvcache_priv_evict(policy, UINT32_MAX, &victim, 1) == 0) {
        return false;
    }
    const size_t index = index_before(policy, victim);
    const uint32_t freed = one->slots[index];
    memmove(one->slots + index, one->slots + index + 1, (count - index) * sizeof *one->slots);
    if (freed == count) { /* the token itself */
        return false;
    }
    one->slots[count - 1] = freed;
    *to = freed;
    return true;
}

pb_kvcache_status pb_kvcache_hold_step(pb_kvcache_hold *hold, const uint32_t *pos, const uint8_t *joins,
                                       const float *weights, size_t weights_stride, size_t weights_capacity,
                                       pb_kvcache_slot_move *moves, size_t moves_capacity, size_t *num_moves)
{
    /* Checks: pointers, room, memory, then positions and weights of every cache */
    if (hold == NULL || moves == NULL || num_moves == NULL) {
        return PB_KVCACHE_ERROR_NULL;
    }
    if (moves_capacity < hold->num_caches) {
        return PB_KVCACHE_ERROR_CAPACITY;
    }
    if (pb_kvcache_priv_overlap(moves, hold->num_caches * sizeof *moves, num_moves, sizeof *num_moves)) {
        return PB_KVCACHE_ERROR_OVERLAP;
    }
    const pb_kvcache_status status
        = pb_kvcache_hold_step_check(hold, pos, joins, weights, weights_stride, weights_capacity, NULL);
    if (status != PB_KVCACHE_OK) {
        return status;
    }
    /* Cache after cache */
    size_t count = 0;
    for (uint32_t cache = 0; cache < hold->num_caches; ++cache) {
        held *one = hold->caches + cache;
        const uint32_t from = (uint32_t)one->policy->kept_count;
        uint32_t to;
        if ((joins == NULL || joins[cache] != 0)
            && step(one, pos[cache], weights == NULL ? NULL : weights + cache * weights_stride, hold->row, &to)) {
            moves[count++] = (pb_kvcache_slot_move){.cache = cache, .from = from, .to = to};
        }
    }
    *num_moves = count;
    return PB_KVCACHE_OK;
}

/* true where a row is within an array of `capacity` bytes; *start becomes its first byte. */
static bool row_within(uint64_t offset, uint32_t slot, size_t row_stride, size_t row_bytes, size_t capacity,
                       size_t *start)
{
    size_t row;
    size_t end;
    return offset <= SIZE_MAX && pb_kvcache_priv_add((size_t)offset, slot, &row)
           && pb_kvcache_priv_mul(row, row_stride, start) && pb_kvcache_priv_add(*start, row_bytes, &end)
           && end <= capacity;
}

pb_kvcache_status pb_kvcache_hold_move(void *rows, const uint64_t *offsets, uint32_t num_caches, size_t row_stride,
                                       size_t row_bytes, size_t capacity, const pb_kvcache_slot_move *moves,
                                       size_t num_moves)
{
    size_t start;
    if (num_moves > 0 && (rows == NULL || offsets == NULL || moves == NULL)) {
        return PB_KVCACHE_ERROR_NULL;
    }
    for (size_t i = 0; i < num_moves; ++i) {
        if (moves[i].cache >= num_caches) {
            return PB_KVCACHE_ERROR_CACHE;
        }
        const uint64_t offset = offsets[moves[i].cache];
        if (!row_within(offset, moves[i].from, row_stride, row_bytes, capacity, &start)
            || !row_within(offset, moves[i].to, row_stride, row_bytes, capacity, &start)) {
            return PB_KVCACHE_ERROR_CAPACITY;
        }
    }
    unsigned char *bytes = rows;
    for (size_t i = 0; i < num_moves; ++i) {
        const size_t offset = (size_t)offsets[moves[i].cache];
        memmove(bytes + (offset + moves[i].to) * row_stride, bytes + (offset + moves[i].from) * row_stride, row_bytes);
    }
    return PB_KVCACHE_OK;
}

uint32_t pb_kvcache_hold_num_caches(const pb_kvcache_hold *hold)
{
    return hold == NULL ? 0 : hold->num_caches;
}

const pb_kvcache *pb_kvcache_hold_cache(const pb_kvcache_hold *hold, uint32_t cache)
{
    return hold == NULL || cache >= hold->num_caches ? NULL : hold->caches[cache].policy;
}

pb_kvcache_status pb_kvcache_hold_slots(const pb_kvcache_hold *hold, uint32_t cache, uint32_t *slots, size_t capacity)
{
    if (hold == NULL) {
        return PB_KVCACHE_ERROR_NULL;
    }
    if (cache >= hold->num_caches) {
        return PB_KVCACHE_ERROR_CACHE;
    }
    const held *one = hold->caches + cache;
    const size_t count = one->policy->kept_count;
    if (slots == NULL && count > 0) {
        return PB_KVCACHE_ERROR_NULL;
    }
    if (capacity < count) {
        return PB_KVCACHE_ERROR_CAPACITY;
    }
    if (count > 0) {
        memcpy(slots, one->slots, count * sizeof *slots);
    }
    return PB_KVCACHE_OK;
}

size_t pb_kvcache_hold_memory_bytes(const pb_kvcache_hold *hold)
{
    return hold == NULL ? 0 : hold->bytes;
}

pb_kvcache_status pb_kvcache_hold_copy(pb_kvcache_hold *hold, uint32_t cache, const pb_kvcache_hold *source,
                                       uint32_t source_cache)
{
    if (hold == NULL || source == NULL) {
        return PB_KVCACHE_ERROR_NULL;
    }
    if (cache >= hold->num_caches || source_cache >= source->num_caches) {
        return PB_KVCACHE_ERROR_CACHE;
    }
    held *one = hold->caches + cache;
    const held *other = source->caches + source_cache;
    const pb_kvcache_status status = pb_kvcache_copy(one->policy, other->policy);
    if (status == PB_KVCACHE_OK && one != other) {
        memcpy(one->slots, other->slots, other->policy->kept_count * sizeof *one->slots);
    }
    return status;
}
