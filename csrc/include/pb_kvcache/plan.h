/*
 * The planner: divide a cache's positions over a model's layers, to the last position.
 *
 * Layer l has a weight w[l] > 0. Its target is clamp(lambda * w[l], minimum, maximum), with lambda such that the
 * targets add up to `total`: what one layer may not hold goes to the others in proportion to their weights. Budgets
 * are the targets rounded to multiples of `multiple_of`, the largest remainders up, the lower layer first on a tie.
 *
 *     pb_kvcache_plan_params params = PB_KVCACHE_PLAN_PARAMS_DEFAULT;       // a pyramid of ratio 4, minimum 1
 *     uint32_t budgets[32];
 *     params.total = 512 * 32;
 *     params.maximum = 8192;                                                // the prompt's length
 *     params.multiple_of = 16;                                              // a paged cache's block
 *     status = pb_kvcache_plan(&params, budgets, 32);                       // 816, 800, ..., 208: 16384 in all
 *
 * What holds for every plan, whatever the numbers:
 *
 *   - The budgets add up to `total`, or to the sum of the maximums where that is less.
 *   - Each is a multiple of `multiple_of`, and lies between its minimum and its maximum.
 *   - Each is less than one multiple away from its target.
 *   - Of two layers, the one with the greater target has at least the other's budget. Of two with equal targets the
 *     lower one has, by at most one multiple.
 *   - Multiplying all weights by the same power of two changes nothing.
 *
 * A minimum is rounded up to a multiple, a maximum down. The rule above clamps to these.
 *
 * Weights are taken as whole numbers: the largest lies in 2^60 .. 2^61 - 1, the others on the same power of two, rounded
 * down and at least 1. So a weight below the 2^-60th part of the largest counts as that part. Of a weight above the
 * 256th part of the largest no bit is lost. A pyramid's weights are exact before they are taken so, a geometric one's
 * are rounded to 53 significant bits. Nothing else is rounded before the budgets: all else is arithmetic on integers,
 * the same on every machine and in every floating-point environment.
 */
#ifndef PB_KVCACHE_PLAN_H
#define PB_KVCACHE_PLAN_H

#include <stddef.h>
#include <stdint.h>

#include "pb_kvcache/api.h"
#include "pb_kvcache/status.h"

PB_KVCACHE_EXTERN_C_BEGIN

/* cdef: begin */
/* How the weights of L layers fall from layer 0 to the last. A single layer has weight 1 under the first three. */
typedef enum pb_kvcache_plan_shape {
    PB_KVCACHE_PLAN_UNIFORM = 0,   /* all equal */
    PB_KVCACHE_PLAN_PYRAMID = 1,   /* arithmetic, first over last = ratio: w[l] = ratio*(L-1-l) + l */
    PB_KVCACHE_PLAN_GEOMETRIC = 2, /* geometric, first over last = ratio: w[l] = ratio^((L-1-l)/(L-1)), 53 bits */
    PB_KVCACHE_PLAN_WEIGHTS = 3    /* the caller's: a measured curve */
} pb_kvcache_plan_shape;

typedef struct pb_kvcache_plan_params {
    uint64_t total;              /* positions to divide, a multiple of multiple_of */
    pb_kvcache_plan_shape shape; /* how the weights fall */
    uint32_t multiple_of;        /* budgets are multiples of this: a paged cache's block; > 0 */
    double ratio;                /* PYRAMID and GEOMETRIC: first over last, finite, > 0; below 1 deep layers get more */
    const double *weights;       /* WEIGHTS: one per layer, finite, > 0; NULL for every other shape */
    uint32_t minimum;            /* the fewest positions of a layer; used where `minimums` is NULL */
    uint32_t maximum;            /* the most, such as the prompt's length; used where `maximums` is NULL */
    const uint32_t *minimums;    /* one per layer, or NULL */
    const uint32_t *maximums;    /* one per layer, or NULL */
} pb_kvcache_plan_params;

/*
 * Divide params->total positions over num_layers layers.
 *
 *   params      read during the call only, with its arrays of num_layers elements
 *   budgets     num_layers budgets, in positions; also the only working memory; must not overlap the inputs
 *   num_layers  layers that share the total, > 0
 *
 * A `total` above the sum of the maximums gives every layer its maximum. A `maximum` of UINT32_MAX without `maximums`
 * means that there is none. Then a total that num_layers numbers of 32 bits cannot hold is refused.
 *
 * Returns the first broken rule in this order, and then `budgets` is untouched:
 *   PB_KVCACHE_ERROR_NULL           params or budgets is NULL
 *   PB_KVCACHE_ERROR_NUM_LAYERS     num_layers is 0
 *   PB_KVCACHE_ERROR_TOO_LARGE      num_layers does not fit 32 bits
 *   PB_KVCACHE_ERROR_PLAN_SHAPE     the shape is none of the list
 *   PB_KVCACHE_ERROR_PLAN_MULTIPLE  multiple_of is 0
 *   PB_KVCACHE_ERROR_PLAN_TOTAL     total is not a multiple of multiple_of
 *   PB_KVCACHE_ERROR_PLAN_OVERFLOW  total is more than num_layers budgets hold, without a maximum
 *   PB_KVCACHE_ERROR_PLAN_RATIO     ratio is not finite or not > 0, for a shape that reads it
 *   PB_KVCACHE_ERROR_PLAN_WEIGHTS   weights is NULL for WEIGHTS, or not NULL for another shape
 *   PB_KVCACHE_ERROR_PLAN_WEIGHT    a weight is not finite or not > 0
 *   PB_KVCACHE_ERROR_PLAN_BOUNDS    a layer's minimum is above its maximum
 *   PB_KVCACHE_ERROR_PLAN_BLOCK     no multiple of multiple_of lies between a layer's minimum and its maximum
 *   PB_KVCACHE_ERROR_PLAN_MINIMUM   total is below the sum of the minimums, each rounded up to a multiple
 *   PB_KVCACHE_ERROR_OVERLAP        budgets overlaps params or one of its arrays
 *
 * Time: a few passes over the layers, at most 4 * 130 of them whatever the bounds.
 */
PB_KVCACHE_API pb_kvcache_status pb_kvcache_plan(const pb_kvcache_plan_params *params, uint32_t *budgets,
                                                 size_t num_layers);
/* cdef: end */

/* Everything but `total`, which has no default. */
#define PB_KVCACHE_PLAN_PARAMS_DEFAULT \
    { 0u, PB_KVCACHE_PLAN_PYRAMID, 1u, 4.0, NULL, 1u, UINT32_MAX, NULL, NULL }

/* The pyramid of the paper's beta > 0.5: the last layer keeps budget / beta and the first 2 * budget less that. */
#define PB_KVCACHE_PLAN_RATIO_OF_BETA(beta) (2.0 * (beta) - 1.0)

PB_KVCACHE_EXTERN_C_END

#endif
