/*
 * Divide a total over units by measured curves: each next multiple goes where it lowers the sum of losses most.
 *
 * A unit is whatever has a budget of its own: a layer, or one KV head of one layer. losses[u][i] is what unit u loses
 * when it holds grid[i] positions. Each curve is replaced by its lower convex hull: the greatest convex curve that is
 * nowhere above the points. On convex curves no division of the total has a smaller sum.
 *
 *     const uint32_t grid[3] = {64, 128, 256};
 *     const double losses[2 * 3] = {.9, .4, .1,   .3, .2, .1};
 *     pb_kvcache_divide_params params = PB_KVCACHE_DIVIDE_PARAMS_DEFAULT;
 *     params.grid = grid, params.num_points = 3, params.losses = losses, params.total = 256;
 *     uint32_t budgets[2];
 *     size_t bytes;
 *     pb_kvcache_divide_workspace_size(2, 3, &bytes);
 *     status = pb_kvcache_divide(&params, workspace, bytes, budgets, 2);    // 192 and 64
 *
 * What a hull gains per position between two corners is one subtraction and one division of doubles. A multiple that
 * lies across corners gains the mean of them, weighted by positions. Gains compare exactly, as the doubles that they are.
 * Of units that gain the same, the one that holds fewest gets the next multiple, and of those the lower unit.
 *
 * The budgets add up to `total`, or to the sum of the maximums where that is less. Each is a multiple of `multiple_of`
 * within its bounds.
 */
#ifndef PB_KVCACHE_DIVIDE_H
#define PB_KVCACHE_DIVIDE_H

#include <stddef.h>
#include <stdint.h>

#include "pb_kvcache/api.h"
#include "pb_kvcache/status.h"

PB_KVCACHE_EXTERN_C_BEGIN

/* cdef: begin */
typedef struct pb_kvcache_divide_params {
    const uint32_t *grid;     /* budgets at which losses are known, ascending, > 0 */
    size_t num_points;        /* of the grid, > 0 */
    const double *losses;     /* row u: unit u at each point of the grid, finite; rows are num_points apart */
    uint64_t total;           /* positions to divide, a multiple of multiple_of */
    uint32_t multiple_of;     /* budgets are multiples of this; > 0 */
    uint32_t minimum;         /* the fewest positions of a unit, not below grid[0]. 0: grid[0] */
    uint32_t maximum;         /* the most. 0: the grid's last point. Beyond that point a curve is flat */
    const uint32_t *minimums; /* one per unit instead, or NULL */
    const uint32_t *maximums; /* one per unit instead, or NULL */
} pb_kvcache_divide_params;

/*
 * Bytes of scratch for so many units and grid points. Returns PB_KVCACHE_ERROR_NULL (size), _DIVIDE_UNITS,
 * _DIVIDE_GRID (no points) or _TOO_LARGE, and then *size is untouched.
 */
PB_KVCACHE_API pb_kvcache_status pb_kvcache_divide_workspace_size(size_t num_units, size_t num_points, size_t *size);

/*
 * Divide params->total positions over num_units units.
 *
 *   params          read during the call only, with its arrays
 *   workspace       scratch of workspace_size bytes, at least what the function above says, of any alignment
 *   budgets         becomes num_units budgets, in positions
 *   num_units       > 0
 *
 * A minimum is rounded up to a multiple, a maximum down. Allocates nothing.
 *
 * Returns the first broken rule in this order, and then `budgets` is untouched:
 *   PB_KVCACHE_ERROR_NULL           params, its grid or losses, workspace or budgets is NULL
 *   PB_KVCACHE_ERROR_DIVIDE_UNITS   num_units is 0
 *   PB_KVCACHE_ERROR_DIVIDE_GRID    the grid is empty, or a point is 0 or not above the one before it
 *   PB_KVCACHE_ERROR_TOO_LARGE      num_units does not fit 32 bits, or a size in bytes does not fit
 *   PB_KVCACHE_ERROR_PLAN_MULTIPLE  multiple_of is 0
 *   PB_KVCACHE_ERROR_PLAN_TOTAL     total is not a multiple of multiple_of
 *   PB_KVCACHE_ERROR_DIVIDE_LOSS    a loss is not finite
 *   PB_KVCACHE_ERROR_DIVIDE_BELOW   a minimum is below grid[0], where no loss is known
 *   PB_KVCACHE_ERROR_PLAN_BOUNDS    a unit's minimum is above its maximum
 *   PB_KVCACHE_ERROR_PLAN_BLOCK     no multiple of multiple_of lies between a unit's minimum and its maximum
 *   PB_KVCACHE_ERROR_PLAN_MINIMUM   total is below the sum of the minimums, each rounded up to a multiple
 *   PB_KVCACHE_ERROR_WORKSPACE      the workspace is too small
 *   PB_KVCACHE_ERROR_OVERLAP        budgets or the workspace overlaps what is read, or one another
 */
PB_KVCACHE_API pb_kvcache_status pb_kvcache_divide(const pb_kvcache_divide_params *params, void *workspace,
                                                   size_t workspace_size, uint32_t *budgets, size_t num_units);
/* cdef: end */

/* Everything but the grid, the losses and the total, which have no defaults. */
#define PB_KVCACHE_DIVIDE_PARAMS_DEFAULT \
    { NULL, 0, NULL, 0u, 1u, 0u, 0u, NULL, NULL }

PB_KVCACHE_EXTERN_C_END

#endif
