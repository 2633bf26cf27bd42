"""SnapKV at decode time (arXiv 2404.14469)."""

from __future__ import annotations

from ._policy import Policy


class SnapKV(Policy):
    """Keep the positions that the last few tokens attended to, and their neighbours (arXiv 2404.14469).

    A position's score is the attention that it received over the last `obs_window` observed steps, summed in double.
    Each score becomes the maximum over `pool_kernel` kept neighbours. The lowest scores go, the lower position first on
    a tie. The newest `recent_window` positions are never dropped.

    Parameters
    ----------
    budget
        Positions kept, greater than 0.
    recent_window
        Newest positions that are never dropped, fewer than `budget`.
    obs_window
        Observed decode steps that make the score, greater than 0. Each costs 4 bytes a position.
    pool_kernel
        Neighbours pooled, an odd number.
    spare
        Steps that may pass without an eviction, beyond the first. There is room for ``budget + 1 + spare`` positions.
    max_rollback
        The last steps that :meth:`rollback` can take back. Each costs 4 bytes a position.

    Raises
    ------
    TypeError
        A parameter is not an integer.
    ValueError
        A parameter breaks a rule above, or does not fit 32 bits.
    MemoryError
        The native instance cannot be allocated.

    Examples
    --------
    >>> cache = SnapKV(budget=3, recent_window=1, obs_window=4, pool_kernel=1)
    >>> for pos, attn in enumerate([[1.0], [0.75, 0.25], [0.5, 0.125, 0.375]], start=1):
    ...     cache.on_decode_step(pos, attn)
    >>> cache.evict()
    array([1], dtype=uint32)
    >>> cache.kept
    array([0, 2, 3], dtype=uint32)
    """

    __slots__ = ()
    _NAME = "snapkv"
    _PARAMETERS = ("budget", "recent_window", "obs_window", "pool_kernel", "spare", "max_rollback")

    def __init__(
        self,
        budget: int = 512,
        recent_window: int = 32,
        obs_window: int = 16,
        pool_kernel: int = 7,
        spare: int = 0,
        max_rollback: int = 0,
    ) -> None:
        super().__init__(
            budget=budget,
            recent_window=recent_window,
            obs_window=obs_window,
            pool_kernel=pool_kernel,
            spare=spare,
            max_rollback=max_rollback,
        )
