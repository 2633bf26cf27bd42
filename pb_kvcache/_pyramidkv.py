"""PyramidKV at decode time (arXiv 2406.02069)."""

from __future__ import annotations

from ._policy import Policy


class PyramidKV(Policy):
    """SnapKV that evicts down to this layer's share of the budget (arXiv 2406.02069).

    The effective budget is ``max(pyramid_budget(budget, layer, num_layers, pyramid_ratio), recent_window + 1)``. With
    one layer, or a ratio of 1, this is :class:`SnapKV`, bit for bit.

    Parameters
    ----------
    budget
        Positions kept per layer on average, greater than 0.
    layer
        The layer that this instance serves, from 0 to ``num_layers - 1``.
    num_layers
        Layers that share the budget, greater than 0.
    pyramid_ratio
        The first layer's share over the last one's, greater than 0.
    recent_window, obs_window, pool_kernel, spare, max_rollback
        As for :class:`SnapKV`. There is room for ``max(effective_budget, budget) + 1 + spare`` positions.

    Raises
    ------
    TypeError, ValueError, MemoryError
        As for :class:`SnapKV`. Also where the layer's share does not fit 32 bits.

    Examples
    --------
    >>> [PyramidKV(budget=512, layer=layer, num_layers=32).effective_budget for layer in (0, 15, 31)]
    [819, 521, 204]
    """

    __slots__ = ()
    _NAME = "pyramidkv"
    _PARAMETERS = (
        "budget",
        "layer",
        "num_layers",
        "pyramid_ratio",
        "recent_window",
        "obs_window",
        "pool_kernel",
        "spare",
        "max_rollback",
    )

    def __init__(
        self,
        budget: int = 512,
        layer: int = 0,
        num_layers: int = 1,
        pyramid_ratio: int = 4,
        recent_window: int = 32,
        obs_window: int = 16,
        pool_kernel: int = 7,
        spare: int = 0,
        max_rollback: int = 0,
    ) -> None:
        super().__init__(
            budget=budget,
            layer=layer,
            num_layers=num_layers,
            pyramid_ratio=pyramid_ratio,
            recent_window=recent_window,
            obs_window=obs_window,
            pool_kernel=pool_kernel,
            spare=spare,
            max_rollback=max_rollback,
        )
