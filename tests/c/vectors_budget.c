/* Kind "pyramid_budget": one layer's share, and the same among all layers' shares. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "vectors.h"

bool vectors_pyramid_budget(const json *test)
{
    const uint32_t budget = json_u32(json_need(test, "budget"));
    const uint32_t layer = json_u32(json_need(test, "layer"));
    const uint32_t num_layers = json_u32(json_need(test, "num_layers"));
    const uint32_t ratio = json_u32(json_need(test, "pyramid_ratio"));
    const char *expect = json_string(json_need(test, "expect"));
    const bool ok = strcmp(expect, "ok") == 0;
    uint32_t want = 0; /* for arguments that have no answer */
    if (ok) {
        want = json_u32(json_need(test, "share"));
    } else if (strcmp(expect, "saturates") == 0) {
        want = UINT32_MAX;
    }
    const uint32_t share = pb_kvcache_pyramid_budget(budget, layer, num_layers, ratio);
    if (share != want) {
        return vectors_fail("share %" PRIu32 ", expected %" PRIu32, share, want);
    }
    if (ok && num_layers <= 4096) { /* the call for all layers answers the same, or that an earlier one is too large */
        uint32_t *shares = vectors_alloc(num_layers, sizeof *shares);
        const pb_kvcache_status status = pb_kvcache_pyramid_budgets(budget, num_layers, ratio, shares, num_layers);
        const bool same = status == PB_KVCACHE_OK ? shares[layer] == want
                                                  : status == PB_KVCACHE_ERROR_TOO_LARGE && layer > 0;
        free(shares);
        return same || vectors_fail("all shares: status %d", (int)status);
    }
    return true;
}
