"""Simpler policies to compare with. They have the interface and the checks of SnapKV, and no history ring."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ._busy import in_turn, new_turn
from ._checks import UINT32_MAX, float32_array, integer, natural, positive, uint32, uint32_array
from ._options import ROW_SETS, RowSet, choice
from ._policy import Policy, asked_budget, bad_weight, too_many_steps, with_attributes


class SlidingWindow(Policy):
    """Keep the newest positions and drop the oldest.

    Attention is checked but not used, so there is no :meth:`window_score`.

    Parameters
    ----------
    budget
        Positions kept, greater than 0.
    spare, max_rollback
        As for :class:`SnapKV`.

    Raises
    ------
    TypeError, ValueError, MemoryError
        As for :class:`SnapKV`.

    Examples
    --------
    >>> cache = SlidingWindow(budget=2)
    >>> cache.on_decode_step(1, None)
    >>> cache.on_decode_step(2, None)
    >>> cache.evict()
    array([0], dtype=uint32)
    """

    __slots__ = ()
    _NAME = "sliding_window"
    _PARAMETERS = ("budget", "spare", "max_rollback")

    def __init__(self, budget: int = 512, spare: int = 0, max_rollback: int = 0) -> None:
        super().__init__(budget=budget, spare=spare, max_rollback=max_rollback)


class StreamingLLM(Policy):
    """Keep the first positions, the attention sinks, and the newest ones (arXiv 2309.17453).

    Attention is checked but not used, so there is no :meth:`window_score`.

    Parameters
    ----------
    budget
        Positions kept, sinks included, greater than 0.
    sinks
        Positions 0 to ``sinks - 1`` are never dropped. Smaller than `budget`. 0 makes this a sliding window.
    spare, max_rollback
        As for :class:`SnapKV`.

    Raises
    ------
    TypeError, ValueError, MemoryError
        As for :class:`SnapKV`.

    Examples
    --------
    >>> cache = StreamingLLM(budget=2, sinks=1)
    >>> cache.on_decode_step(1, None)
    >>> cache.on_decode_step(2, None)
    >>> cache.evict()
    array([1], dtype=uint32)
    """

    __slots__ = ()
    _NAME = "streaming_llm"
    _PARAMETERS = ("budget", "sinks", "spare", "max_rollback")

    def __init__(self, budget: int = 512, sinks: int = 4, spare: int = 0, max_rollback: int = 0) -> None:
        super().__init__(budget=budget, sinks=sinks, spare=spare, max_rollback=max_rollback)


class H2O(Policy):
    """Keep the heavy hitters: drop the lowest attention summed since the position joined (arXiv 2306.14048).

    The score is that sum, in double. On a tie the lower position goes.

    Parameters
    ----------
    budget
        Positions kept, greater than 0.
    recent_window
        Newest positions that are never dropped, fewer than `budget`.
    spare, max_rollback
        As for :class:`SnapKV`.

    Raises
    ------
    TypeError, ValueError, MemoryError
        As for :class:`SnapKV`.

    Examples
    --------
    >>> cache = H2O(budget=2, recent_window=1)
    >>> cache.on_decode_step(1, [1.0])
    >>> cache.on_decode_step(2, [0.25, 0.75])
    >>> cache.window_score(0), cache.window_score(1)
    (1.25, 0.75)
    >>> cache.evict()
    array([1], dtype=uint32)
    """

    __slots__ = ()
    _NAME = "h2o"
    _PARAMETERS = ("budget", "recent_window", "spare", "max_rollback")

    def __init__(self, budget: int = 512, recent_window: int = 32, spare: int = 0, max_rollback: int = 0) -> None:
        super().__init__(budget=budget, recent_window=recent_window, spare=spare, max_rollback=max_rollback)


class TOVA(Policy):
    """Drop the lowest attention of the latest observed step (arXiv 2401.06104).

    The score is that attention. On a tie the lower position goes. A position that joined after the latest observed
    step, or was seeded without attention, has no such attention: it scores 0, and it stays until a step has weighed it.
    So :meth:`evict` never drops a position that was not observed. A cache full of such positions stays full until it is
    seeded with attention or reset.

    Parameters
    ----------
    budget
        Positions kept, greater than 0.
    spare, max_rollback
        As for :class:`SnapKV`.

    Raises
    ------
    TypeError, ValueError, MemoryError
        As for :class:`SnapKV`.

    Examples
    --------
    >>> cache = TOVA(budget=2)
    >>> cache.on_decode_step(1, [1.0])
    >>> cache.on_decode_step(2, [0.75, 0.25])
    >>> cache.evict()
    array([1], dtype=uint32)
    """

    __slots__ = ()
    _NAME = "tova"
    _PARAMETERS = ("budget", "spare", "max_rollback")

    def __init__(self, budget: int = 512, spare: int = 0, max_rollback: int = 0) -> None:
        super().__init__(budget=budget, spare=spare, max_rollback=max_rollback)


class Scissorhands(Policy):
    """Drop the fewest votes, one for each step that gave more than an even share (arXiv 2305.17118).

    In one observed step each position whose weight is greater than ``1 / len(attn)``, compared in double, gets a
    vote. The score is the number of votes. On a tie the lower position goes.

    Parameters
    ----------
    budget
        Positions kept, greater than 0.
    recent_window
        Newest positions that are never dropped, fewer than `budget`.
    spare, max_rollback
        As for :class:`SnapKV`.

    Raises
    ------
    TypeError, ValueError, MemoryError
        As for :class:`SnapKV`.

    Examples
    --------
    >>> cache = Scissorhands(budget=2, recent_window=1)
    >>> cache.on_decode_step(1, [1.0])  # 1.0 is not more than an even share of one
    >>> cache.on_decode_step(2, [0.25, 0.75])
    >>> cache.window_score(0), cache.window_score(1)
    (0.0, 1.0)
    >>> cache.evict()
    array([0], dtype=uint32)
    """

    __slots__ = ()
    _NAME = "scissorhands"
    _PARAMETERS = ("budget", "recent_window", "spare", "max_rollback")

    def __init__(self, budget: int = 512, recent_window: int = 32, spare: int = 0, max_rollback: int = 0) -> None:
        super().__init__(budget=budget, recent_window=recent_window, spare=spare, max_rollback=max_rollback)


class FullCache(Policy):
    """Keep everything: the upper end of every comparison.

    It holds what an uncompressed cache holds. So its memory grows by doubling, it has no budget, and :meth:`evict`
    drops nothing, whatever it is asked for. Attention is checked but not used, so there is no
    :meth:`window_score`.

    Examples
    --------
    >>> cache = FullCache()
    >>> cache.on_decode_step(1, [1.0])
    >>> cache.evict(1)
    array([], dtype=uint32)
    >>> len(cache)
    2
    """

    __slots__ = ("_count", "_room", "_seeded")

    def __init__(self) -> None:
        self._params = {}
        self._turn = new_turn()
        self._room = np.zeros(1, np.uint32)  # kept positions, then room for more
        self._count = 1
        self._seeded = 1  # positions that no step has brought

    def on_decode_step(self, pos: int, attn: npt.ArrayLike | None) -> None:
        """Take in one decoded token: `pos` joins the kept set. As :meth:`Policy.on_decode_step`, but never full."""
        pos = uint32("pos", pos)
        weights = None if attn is None else float32_array("attn", attn, 1)
        in_turn(self, self._turn, self._append, pos, weights)

    def _append(self, pos: int, weights: npt.NDArray[np.float32] | None) -> None:
        if self._count and pos <= self._last():
            raise ValueError(
                f"pos = {pos}: must be greater than every kept position, the last of which is {self._last()}"
            )
        if weights is not None:
            if len(weights) != self._count:
                raise ValueError(
                    f"attn: has {len(weights)} weights, must have one for each of the {self._count} kept positions"
                )
            _check_weights(weights)
        if self._count == len(self._room):
            room = np.empty(max(2 * len(self._room), 1), np.uint32)
            room[: self._count] = self._room
            self._room = room
        self._room[self._count] = pos
        self._count += 1

    def _last(self) -> int:
        return int(self._room[self._count - 1])

    def evict(self, budget: int | None = None) -> npt.NDArray[np.uint32]:
        """Drop nothing: an empty array, whatever the budget."""
        if budget is not None:
            asked_budget(budget)
        return np.empty(0, np.uint32)

    def evict_count(self, budget: int | None = None, multiple_of: int = 1) -> int:
        """Return 0: nothing is ever dropped."""
        if budget is not None:
            asked_budget(budget)
        positive("multiple_of", multiple_of)
        return 0

    def evict_rows(
        self, budget: int | None = None, multiple_of: int = 1, which: RowSet = "kept"
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
        """Drop nothing, and tell the rows: all of them stay."""
        victims = self.evict(budget)
        positive("multiple_of", multiple_of)
        kept = choice("which", which, ROW_SETS) == ROW_SETS["kept"]
        return victims, np.arange(len(self) if kept else 0, dtype=np.uint32)

    @property
    def kept(self) -> npt.NDArray[np.uint32]:
        """The kept positions, ascending: a copy, uint32."""
        return in_turn(self, self._turn, self._copied)

    def _copied(self) -> npt.NDArray[np.uint32]:
        kept: npt.NDArray[np.uint32] = self._room[: self._count].copy()
        return kept

    def __len__(self) -> int:
        return in_turn(self, self._turn, lambda: self._count)

    def __contains__(self, pos: object) -> bool:
        try:
            number = integer("pos", pos)
        except TypeError:
            return False
        return in_turn(self, self._turn, self._holds, number)

    def _holds(self, number: int) -> bool:
        index = int(np.searchsorted(self._room[: self._count], number))
        return index < self._count and int(self._room[index]) == number

    def window_score(self, pos: int) -> float:
        """Raise TypeError: a full cache scores nothing."""
        integer("pos", pos)
        raise TypeError("FullCache has no score: the policy does not have this")

    @property
    def effective_budget(self) -> int:
        """The largest budget that a policy can have, since this one has none."""
        return UINT32_MAX

    @property
    def capacity(self) -> int:
        """As :attr:`effective_budget`. Memory is the limit."""
        return UINT32_MAX

    @property
    def memory_bytes(self) -> int:
        """Bytes of the growing array of positions."""
        return self._room.nbytes

    def reset(self) -> None:
        """Go back to a new cache: position 0 kept. The memory is given back."""
        in_turn(self, self._turn, self._replace, np.zeros(1, np.uint32))

    def _replace(self, positions: npt.NDArray[np.uint32]) -> None:
        self._room = positions
        self._count = self._seeded = len(positions)

    def seed(self, positions: npt.ArrayLike, attn: npt.ArrayLike | None = None) -> None:
        """Start from a prompt: replace the kept set. As :meth:`Policy.seed`, but never full."""
        array = uint32_array("positions", positions, 1)
        if attn is not None:
            weights = float32_array("attn", attn, 2)
            if weights.shape[1] != len(array):
                raise ValueError(
                    f"attn: has shape {weights.shape}, must be (rows, {len(array)}): one weight a position"
                )
        descents = np.flatnonzero(array[1:] <= array[:-1])
        if len(descents):
            index = 1 + int(descents[0])
            raise ValueError(
                f"positions[{index}] = {array[index]}: must be greater than the one before it, {array[index - 1]}"
            )
        if attn is not None:
            _check_weights(weights)
        in_turn(self, self._turn, self._replace, array.copy())

    def copy(self) -> FullCache:
        """Return an independent cache with the same kept set."""
        twin = type(self).__new__(type(self))
        FullCache.__init__(twin)
        twin._replace(self.kept)
        twin._seeded = self._seeded
        return with_attributes(twin, self)

    def rollback_count(self) -> int:
        """Return how many steps :meth:`rollback` can take back now: all since the cache was made, seeded or reset."""
        return in_turn(self, self._turn, lambda: self._count - self._seeded)

    def rollback(self, count: int) -> None:
        """Take back the last steps. As :meth:`Policy.rollback`, and all steps can be."""
        in_turn(self, self._turn, self._take_back, natural("count", count))

    def _take_back(self, count: int) -> None:
        if count > self._count - self._seeded:
            raise too_many_steps(count, self._count - self._seeded)
        self._count -= count

    def save(self) -> bytes:
        """Raise TypeError: a full cache remembers nothing but :attr:`kept`, and pickles."""
        raise TypeError("FullCache has no saved state: keep its positions, or pickle it")

    def load(self, data: Any) -> None:
        """Raise TypeError, as :meth:`save`."""
        raise TypeError("FullCache has no saved state: seed it with its positions")

    def __reduce__(self) -> Any:
        return _restore_full, (type(self), self.kept), getattr(self, "__dict__", None)

    def __repr__(self) -> str:
        return f"<FullCache(): {self._count} kept, never evicts>"


def _restore_full(kind: type[FullCache], positions: npt.NDArray[np.uint32]) -> FullCache:
    cache = kind.__new__(kind)
    FullCache.__init__(cache)
    cache.seed(positions)
    return cache


def _check_weights(weights: npt.NDArray[np.float32]) -> None:
    # A NaN makes both comparisons false.
    if weights.size and not (weights.min() >= 0 and weights.max() < np.inf):
        raise ValueError(bad_weight("attn", weights))
