"""One layer's share of a pyramid, and all layers' shares: the allocation of PyramidKV (arXiv 2406.02069)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ._checks import UINT32_MAX, positive, uint32
from ._native import ffi, lib


def _arguments(budget: Any, num_layers: Any, pyramid_ratio: Any) -> tuple[int, int, int]:
    return uint32("budget", budget), positive("num_layers", num_layers), positive("pyramid_ratio", pyramid_ratio)


def _too_large(budget: int, num_layers: int, pyramid_ratio: int) -> ValueError:
    return ValueError(
        f"budget = {budget}: with num_layers = {num_layers} and pyramid_ratio = {pyramid_ratio} a share exceeds "
        f"{UINT32_MAX}"
    )


def pyramid_budget(budget: int, layer: int, num_layers: int, pyramid_ratio: int = 4) -> int:
    """Return one layer's share of the cache, in positions.

    ``floor(2*budget*(r*(L-1) - layer*(r-1)) / ((r+1)*(L-1)))`` for ``L > 1`` layers and ratio ``r``. For one layer it
    is ``budget``. Exact for every argument. The recent window is not considered.

    Parameters
    ----------
    budget
        Positions kept per layer on average.
    layer
        The layer, from 0.
    num_layers
        How many layers share the budget.
    pyramid_ratio
        The first layer's share over the last one's.

    Raises
    ------
    TypeError
        For an argument that is not an integer.
    ValueError
        For an argument outside 0 .. 2**32 - 1, ``num_layers`` or ``pyramid_ratio`` 0, ``layer >= num_layers``, or a
        share that does not fit 32 bits.
    """
    budget, num_layers, pyramid_ratio = _arguments(budget, num_layers, pyramid_ratio)
    layer = uint32("layer", layer)
    if layer >= num_layers:
        raise ValueError(f"layer = {layer}: must be smaller than num_layers = {num_layers}")
    share = int(lib.pb_kvcache_pyramid_budget(budget, layer, num_layers, pyramid_ratio))
    if share == UINT32_MAX and _exact(budget, layer, num_layers, pyramid_ratio) > UINT32_MAX:
        raise _too_large(budget, num_layers, pyramid_ratio)
    return share


def _exact(budget: int, layer: int, num_layers: int, ratio: int) -> int:
    """Return the share in unlimited integers. It tells a share of 2**32 - 1 from one that was cut to it."""
    if num_layers == 1:
        return budget
    steps = num_layers - 1
    return 2 * budget * (ratio * steps - layer * (ratio - 1)) // ((ratio + 1) * steps)


def pyramid_budgets(budget: int, num_layers: int, pyramid_ratio: int = 4) -> npt.NDArray[np.uint32]:
    """Return every layer's share, shape ``(num_layers,)``, in one call.

    Flooring loses up to ``num_layers - 1`` positions of ``budget * num_layers``. :func:`pb_kvcache.plan` loses none.

    Parameters and errors as for :func:`pyramid_budget`.
    """
    budget, num_layers, pyramid_ratio = _arguments(budget, num_layers, pyramid_ratio)
    shares = np.empty(num_layers, np.uint32)
    status = lib.pb_kvcache_pyramid_budgets(
        budget, num_layers, pyramid_ratio, ffi.from_buffer("uint32_t[]", shares), num_layers
    )
    if status != lib.PB_KVCACHE_OK:
        raise _too_large(budget, num_layers, pyramid_ratio)
    return shares
