/*
 * A whole model's caches: one PyramidKV cache per layer, each evicting at its own budget, driven together.
 *
 * Every layer is what an independent instance would be, bit for bit. A stack of one layer is SnapKV. One block of
 * memory holds them all. One call takes in a decode step for all of them, and where a single layer refuses it, none
 * changes.
 *
 * One cache per KV head: make a stack of layers * heads caches in layer-major order, so that cache l * heads + h is
 * head h of layer l, with a budget for each in `budgets`.
 *
 *     const pb_kvcache_stack_params params = PB_KVCACHE_STACK_PARAMS_DEFAULT(32);
 *     pb_kvcache_stack *stack = pb_kvcache_stack_create(&params, NULL, NULL);
 *     ...
 *     pb_kvcache_stack_on_decode_step(stack, pos, attn, attn_lens);     // a row of weights per layer, as in policy.h
 *     if (pb_kvcache_stack_evict_count(stack) > 0)
 *         pb_kvcache_stack_evict(stack, victims, capacity, offsets, 33);
 *     // layer l drops victims[offsets[l]] .. victims[offsets[l + 1] - 1]
 *     pb_kvcache_stack_destroy(stack);
 *
 * Capacity of layer l: max(its budget, params.budget) + 1 + params.spare positions, or budgets[l] + 1 + params.spare
 * where budgets are given. Memory: what the caches take (policy.h), each rounded up to 8 bytes, a pointer a layer, and
 * about 50 bytes.
 */
#ifndef PB_KVCACHE_STACK_H
#define PB_KVCACHE_STACK_H

#include <stddef.h>
#include <stdint.h>

#include "pb_kvcache/policy.h"

PB_KVCACHE_EXTERN_C_BEGIN

/* cdef: begin */
/* The most layers of a stack. No model comes near. It bounds the time that a check takes. */
#define PB_KVCACHE_STACK_MAX_LAYERS 65536

/* What all layers of a stack have in common. */
typedef struct pb_kvcache_stack_params {
    uint32_t num_layers;    /* > 0, at most PB_KVCACHE_STACK_MAX_LAYERS */
    uint32_t budget;        /* positions kept per layer on average, > 0; not read where budgets are given */
    uint32_t pyramid_ratio; /* the first layer's share over the last one's, > 0; not read where budgets are given */
    uint32_t recent_window; /* newest positions of each layer, never dropped on score, < budget */
    uint32_t obs_window;    /* observed decode steps that make the score, > 0 */
    uint32_t pool_kernel;   /* kept neighbours pooled, odd */
    uint32_t spare;         /* steps that may pass without an eviction, beyond the first, in every layer */
    uint32_t max_rollback;  /* the last steps that can be taken back */
} pb_kvcache_stack_params;

/* One cache per layer. One stack serves one sequence and must not be used by two threads at once. */
typedef struct pb_kvcache_stack pb_kvcache_stack;

/*
 * Why would creation refuse? PB_KVCACHE_OK where only memory can stop it.
 *
 *   params   the parameters
 *   budgets  NULL: layer l is a PyramidKV cache at its share of params->budget. Else num_layers numbers, from a plan
 *            for example, and layer l is a SnapKV cache that keeps exactly budgets[l]. Each must be greater than
 *            recent_window: a layer that could drop nothing would keep more than was planned
 *   layer    NULL, or becomes the first layer that breaks the rule: 0 for a rule about the whole stack, num_layers
 *            where none is broken
 *
 * _NULL (params), _NUM_LAYERS, then for the first layer that has one, in this order: _BUDGET, _OBS_WINDOW,
 * _RECENT_WINDOW, _POOL_KERNEL, _PYRAMID_RATIO, _TOO_LARGE. Last _TOO_LARGE for all together.
 */
PB_KVCACHE_API pb_kvcache_status pb_kvcache_stack_check(const pb_kvcache_stack_params *params, const uint32_t *budgets,
                                                        uint32_t *layer);

/*
 * A new stack in one allocation, every layer holding position 0.
 *
 *   params, budgets  as above, read during the call only
 *   allocator        where memory comes from; NULL means malloc and free
 *
 * Returns NULL where the parameters are refused or memory is short. Then nothing is leaked.
 */
PB_KVCACHE_API pb_kvcache_stack *pb_kvcache_stack_create(const pb_kvcache_stack_params *params,
                                                         const uint32_t *budgets, const pb_allocator *allocator);

/* Give everything back. NULL is fine. */
PB_KVCACHE_API void pb_kvcache_stack_destroy(pb_kvcache_stack *stack);

/*
 * The token at `pos` was decoded: every layer takes in its attention, then `pos` joins every layer's kept set. All
 * layers are checked before anything changes.
 *
 *   pos        the token's position, above every kept one of every layer
 *   attn       attn[l] points to the weights that the kept positions of layer l, in ascending order, received from the
 *              token. A NULL attn[l]: this layer was not observed. A NULL `attn`: none was
 *   attn_lens  how many weights each layer has, its kept count; NULL where `attn` is
 *
 * The rules, statuses and what changes are those of pb_kvcache_vtable.on_decode_step for each layer.
 */
PB_KVCACHE_API pb_kvcache_status pb_kvcache_stack_on_decode_step(pb_kvcache_stack *stack, uint32_t pos,
                                                                 const float *const *attn, const size_t *attn_lens);

/*
 * What would on_decode_step answer, and which layer refuses? Nothing changes.
 *
 *   pos, attn, attn_lens  as above
 *   layer                 NULL, or becomes the first layer that refuses, num_layers where none does
 *
 * The statuses of on_decode_step.
 */
PB_KVCACHE_API pb_kvcache_status pb_kvcache_stack_step_check(const pb_kvcache_stack *stack, uint32_t pos,
                                                             const float *const *attn, const size_t *attn_lens,
                                                             uint32_t *layer);

/* How many positions `evict` would drop now, over all layers: the capacity that it needs. 0 for NULL. */
PB_KVCACHE_API size_t pb_kvcache_stack_evict_count(const pb_kvcache_stack *stack);

/*
 * Every layer drops positions until it keeps its own budget, as pb_kvcache_vtable.evict does.
 *
 *   victims           gets all layers' victims, layer after layer: those of layer l, ascending, are
 *                     victims[offsets[l]] .. victims[offsets[l + 1] - 1]; NULL where evict_count is 0
 *   capacity          how many `victims` has room for, at least evict_count
 *   offsets           gets num_layers + 1 offsets
 *   offsets_capacity  how many `offsets` has room for
 *
 * PB_KVCACHE_ERROR_NULL, _CAPACITY, _OVERLAP (of victims and offsets): nothing has changed.
 */
PB_KVCACHE_API pb_kvcache_status pb_kvcache_stack_evict(pb_kvcache_stack *stack, uint32_t *victims, size_t capacity,
                                                        size_t *offsets, size_t offsets_capacity);

/*
 * How many positions pb_kvcache_stack_evict_rows would drop now, over all layers. 0 for NULL, and for a multiple_of of
 * 0.
 *
 *   multiple_of  as below
 */
PB_KVCACHE_API size_t pb_kvcache_stack_evict_rows_count(const pb_kvcache_stack *stack, uint32_t multiple_of);

/*
 * Every layer evicts as pb_kvcache_evict_rows does, at its own budget.
 *
 *   multiple_of, which  as there, the same for all layers
 *   victims, capacity, offsets, offsets_capacity
 *                       as for `evict`, with room for pb_kvcache_stack_evict_rows_count victims
 *   rows                NULL, or gets the rows of layer l, ascending, from rows + l * rows_stride
 *   rows_stride         elements from layer to layer, at least the largest count; not read where rows is NULL
 *   rows_capacity       how many `rows` has room for, at least (num_layers - 1) * rows_stride + the last layer's count
 *   counts              gets how many rows each layer has: num_layers numbers; NULL where rows is
 *   counts_capacity     how many `counts` has room for
 *
 * So rows + l * rows_stride, rows_stride and counts + l are what pb_kvcache_compact takes, for the KV heads of a layer
 * as well, where every head has a cache. No layer has more rows than its capacity.
 *
 * PB_KVCACHE_ERROR_NULL, _PLAN_MULTIPLE, _OPTION, _CAPACITY, _OVERLAP (of two outputs): nothing has changed.
 */
PB_KVCACHE_API pb_kvcache_status pb_kvcache_stack_evict_rows(pb_kvcache_stack *stack, uint32_t multiple_of,
                                                             pb_kvcache_row_set which, uint32_t *victims,
                                                             size_t capacity, size_t *offsets, size_t offsets_capacity,
                                                             uint32_t *rows, size_t rows_stride, size_t rows_capacity,
                                                             uint32_t *counts, size_t counts_capacity);

/*
 * Copy the kept positions of all layers out.
 *
 *   positions         gets them, laid out as the victims of `evict`
 *   capacity          how many it has room for, at least the resident positions
 *   offsets           gets num_layers + 1 offsets
 *   offsets_capacity  how many `offsets` has room for
 *
 * PB_KVCACHE_ERROR_NULL, _CAPACITY, _OVERLAP.
 */
PB_KVCACHE_API pb_kvcache_status pb_kvcache_stack_kept(const pb_kvcache_stack *stack, uint32_t *positions,
                                                       size_t capacity, size_t *offsets, size_t offsets_capacity);

/* How many layers there are; 0 for NULL. */
PB_KVCACHE_API uint32_t pb_kvcache_stack_num_layers(const pb_kvcache_stack *stack);

/*
 * One layer's cache, to be read with the functions of policy.h while the stack lives. It belongs to the stack.
 *
 *   layer  which one
 *
 * Returns NULL where there is no such layer.
 */
PB_KVCACHE_API const pb_kvcache *pb_kvcache_stack_layer(const pb_kvcache_stack *stack, uint32_t layer);

/*
 * What each layer evicts down to.
 *
 *   budgets   gets num_layers numbers
 *   capacity  how many it has room for
 *
 * PB_KVCACHE_ERROR_NULL, _CAPACITY.
 */
PB_KVCACHE_API pb_kvcache_status pb_kvcache_stack_budgets(const pb_kvcache_stack *stack, uint32_t *budgets,
                                                          size_t capacity);

/* Positions held now, over all layers; 0 for NULL. */
PB_KVCACHE_API size_t pb_kvcache_stack_resident(const pb_kvcache_stack *stack);

/*
 * The most positions held at once since creation or reset, over all layers, counted after each append (or seed) and
 * before the eviction that follows it: what an arena for K and V must hold. 0 for NULL.
 */
PB_KVCACHE_API size_t pb_kvcache_stack_peak_resident(const pb_kvcache_stack *stack);

/* Bytes that the stack took from its allocator; 0 for NULL. */
PB_KVCACHE_API size_t pb_kvcache_stack_memory_bytes(const pb_kvcache_stack *stack);

/* Back to a new stack: every layer keeps position 0 and remembers nothing, and the peak too. PB_KVCACHE_ERROR_NULL. */
PB_KVCACHE_API pb_kvcache_status pb_kvcache_stack_reset(pb_kvcache_stack *stack);

/*
 * Start one layer from a prompt, as pb_kvcache_seed does. The other layers stay as they are.
 *
 *   layer                         which one
 *   positions, count, attn, rows  as for pb_kvcache_seed
 *
 * PB_KVCACHE_ERROR_LAYER where there is no such layer, and the statuses of pb_kvcache_seed: nothing has changed.
 */
PB_KVCACHE_API pb_kvcache_status pb_kvcache_stack_seed(pb_kvcache_stack *stack, uint32_t layer,
                                                       const uint32_t *positions, size_t count, const float *attn,
                                                       size_t rows);

/* How many steps pb_kvcache_stack_rollback can take back now: in every layer. 0 for NULL. */
PB_KVCACHE_API uint32_t pb_kvcache_stack_rollback_count(const pb_kvcache_stack *stack);

/*
 * Every layer takes back its last steps, as pb_kvcache_rollback does. The peak stays: those positions were held.
 *
 *   count  how many, at most pb_kvcache_stack_rollback_count
 *
 * PB_KVCACHE_ERROR_NULL, _ROLLBACK: nothing has changed.
 */
PB_KVCACHE_API pb_kvcache_status pb_kvcache_stack_rollback(pb_kvcache_stack *stack, uint32_t count);

/*
 * Make `stack` hold and remember exactly what `source` does, the peak included, without allocating.
 *
 *   source  a stack whose layers have the same policies and parameters
 *
 * PB_KVCACHE_ERROR_NULL. _MISMATCH where the layers differ: nothing has changed.
 */
PB_KVCACHE_API pb_kvcache_status pb_kvcache_stack_copy(pb_kvcache_stack *stack, const pb_kvcache_stack *source);
/* cdef: end */

#define PB_KVCACHE_STACK_PARAMS_DEFAULT(num_layers) { (num_layers), 512u, 4u, 32u, 16u, 7u, 0u, 0u }

PB_KVCACHE_EXTERN_C_END

#endif
