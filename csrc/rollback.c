/*
 * Rollback: the last steps taken back, bit for bit. A step puts what it overwrites on a list of the last max_rollback
 * steps, which evictions, seeds and loads empty. Evictions would have to be remembered whole.
 *
 * The ring has a row more for each entry of the list. A step writes into its entry's row, and the two change places:
 * the entry keeps the row that the slot had, and nothing is copied. Scores are copied, 8 bytes a position.
 */
#include <string.h>

#include "internal.h"

/* Entry `i` of the list, 0 the oldest. An entry that falls off at the end lends its place to the next. */
static uint32_t place_of(const pb_kvcache *policy, uint32_t i)
{
    return (uint32_t)(((uint64_t)policy->undo_first + i) % policy->shape.max_rollback);
}

/* The ring's slot and the entry change rows. */
static void change_rows(pb_kvcache *policy, pb_kvcache_priv_undo *entry, uint32_t slot)
{
    const uint32_t row = policy->row_of_slot[slot];
    policy->row_of_slot[slot] = entry->row;
    entry->row = row;
}

void pb_kvcache_priv_remember(pb_kvcache *policy, bool observed)
{
    const uint32_t place = place_of(policy, policy->num_undo);
    pb_kvcache_priv_undo *entry = policy->undo + place;
    if (policy->num_undo < policy->shape.max_rollback) {
        ++policy->num_undo;
    } else {
        policy->undo_first = place_of(policy, 1);
    }
    entry->observed = observed;
    entry->unobserved = (uint32_t)policy->unobserved;
    if (observed && policy->shape.obs_window > 0) {
        entry->length = policy->lengths[policy->cursor];
        entry->seen = policy->seen[policy->cursor];
        change_rows(policy, entry, policy->cursor);
    }
    if (observed && policy->saved != NULL) {
        memcpy(policy->saved + (size_t)place * policy->shape.capacity, policy->scores,
               policy->kept_count * sizeof(double));
    }
}

void pb_kvcache_priv_forget_steps(pb_kvcache *policy)
{
    policy->num_undo = 0;
}

static void take_back(pb_kvcache *policy)
{
    const uint32_t place = place_of(policy, --policy->num_undo);
    pb_kvcache_priv_undo *entry = policy->undo + place;
    --policy->kept_count;
    policy->unobserved = entry->unobserved;
    if (entry->observed && policy->shape.obs_window > 0) {
        policy->cursor = policy->cursor > 0 ? policy->cursor - 1 : policy->shape.obs_window - 1;
        policy->lengths[policy->cursor] = entry->length;
        policy->seen[policy->cursor] = entry->seen;
        change_rows(policy, entry, policy->cursor);
    }
    if (entry->observed && policy->saved != NULL) {
        memcpy(policy->scores, policy->saved + (size_t)place * policy->shape.capacity,
               policy->kept_count * sizeof(double));
    }
}

void pb_kvcache_priv_copy_steps(pb_kvcache *policy, const pb_kvcache *source)
{
    const size_t capacity = policy->shape.capacity;
    policy->undo_first = source->undo_first;
    policy->num_undo = source->num_undo;
    if (policy->shape.max_rollback > 0) {
        memcpy(policy->undo, source->undo, policy->shape.max_rollback * sizeof *policy->undo);
    }
    for (uint32_t i = 0; i < source->num_undo; ++i) {
        const uint32_t place = place_of(source, i);
        const pb_kvcache_priv_undo *entry = source->undo + place;
        const size_t held = source->kept_count - (source->num_undo - i); /* positions before the step */
        if (entry->observed && policy->shape.obs_window > 0) {
            memcpy(policy->history + entry->row * capacity, source->history + entry->row * capacity,
                   pb_kvcache_priv_ring_elements(source, entry->length, entry->seen) * sizeof(float));
        }
        if (entry->observed && policy->saved != NULL) {
            memcpy(policy->saved + place * capacity, source->saved + place * capacity, held * sizeof(double));
        }
    }
}

uint32_t pb_kvcache_rollback_count(const pb_kvcache *policy)
{
    return policy == NULL ? 0 : policy->num_undo;
}

pb_kvcache_status pb_kvcache_rollback(pb_kvcache *policy, uint32_t count)
{
    if (policy == NULL) {
        return PB_KVCACHE_ERROR_NULL;
    }
    if (count > policy->num_undo) {
        return PB_KVCACHE_ERROR_ROLLBACK;
    }
    for (; count > 0; --count) {
        take_back(policy);
    }
    return PB_KVCACHE_OK;
}
