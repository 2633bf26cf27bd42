"""What every decode-time policy's Python class has in common: one native instance, checked on the way in and out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt

from ._busy import TOKEN, in_turn, new_turn, refuse
from ._checks import UINT32_MAX, float32_array, integer, natural, positive, shown, uint32, uint32_array
from ._errors import CacheFullError, status_text
from ._native import ffi, lib
from ._options import ROW_SETS, RowSet, choice
from ._state import checked_bytes, refusal, saved

_F32 = np.dtype(np.float32)

_OK: int = lib.PB_KVCACHE_OK

_Any = TypeVar("_Any")
_Self = TypeVar("_Self", bound="Policy")


class LayerCache:
    """One layer's cache, to be read: what a policy's instance and a layer of a :class:`PyramidStack` have in common.

    Not made directly.
    """

    __slots__ = ("__weakref__", "_owner", "_policy", "_turn")

    #: The native instance, and what has to live as long as it.
    _policy: Any
    _owner: Any
    #: Taken by the call in progress: :func:`new_turn`.
    _turn: list[None]

    @property
    def kept(self) -> npt.NDArray[np.uint32]:
        """The kept positions, ascending: a copy, uint32."""
        return in_turn(self, self._turn, native_kept, self._policy)

    def __len__(self) -> int:
        return in_turn(self, self._turn, lib.pb_kvcache_kept_count, self._policy)  # type: ignore[no-any-return]

    def __contains__(self, pos: object) -> bool:
        try:
            number = integer("pos", pos)
        except TypeError:
            return False
        return 0 <= number <= UINT32_MAX and bool(
            in_turn(self, self._turn, lib.pb_kvcache_contains, self._policy, number)
        )

    def window_score(self, pos: int) -> float:
        """Return the policy's own score of a kept position, before pooling.

        Raises
        ------
        KeyError
            `pos` is not kept.
        """
        number = integer("pos", pos)
        score = ffi.new("double *")
        status = lib.PB_KVCACHE_ERROR_NOT_KEPT
        if 0 <= number <= UINT32_MAX:
            status = in_turn(self, self._turn, lib.pb_kvcache_window_score, self._policy, number, score)
        if status == lib.PB_KVCACHE_ERROR_NOT_KEPT:
            raise KeyError(f"pos = {shown(number)}: is not kept")
        if status != _OK:
            raise TypeError(f"{type(self).__name__} has no score: {status_text(status)}")
        return float(score[0])

    @property
    def effective_budget(self) -> int:
        """What the cache evicts down to when it is asked for no less, in positions."""
        return lib.pb_kvcache_effective_budget(self._policy)  # type: ignore[no-any-return]

    @property
    def capacity(self) -> int:
        """The most positions that the cache can hold."""
        return lib.pb_kvcache_capacity(self._policy)  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {in_words(lambda: len(self))} kept, evicts to {self.effective_budget}>"


class Policy(LayerCache):
    """One layer's cache and the rule that keeps it small. Base of all policies. Not made directly.

    An instance holds position 0 when it is new and serves one layer of one sequence. It serves one thread at a time:
    a call that comes while another thread's is in progress raises RuntimeError, so threads that share an instance need
    a lock. Nothing is allocated natively after it is made.
    """

    #: The names of the parameters, in the order of the C struct.
    _PARAMETERS: ClassVar[tuple[str, ...]] = ()
    #: The C names: ``pb_kvcache_<_NAME>``, ``..._params``, ``..._check``.
    _NAME: ClassVar[str] = ""

    __slots__ = ("_evict", "_params", "_step", "_vtable")

    _params: dict[str, int]

    def __init__(self, **params: Any) -> None:
        if not self._NAME:
            raise TypeError(f"{type(self).__name__} is the base of all policies; make one of them")
        self._params = {name: uint32(name, params[name]) for name in self._PARAMETERS}
        struct = ffi.new(f"pb_kvcache_{self._NAME}_params *", self._params)
        status = getattr(lib, f"pb_kvcache_{self._NAME}_check")(struct)
        if status != _OK:
            raise ValueError(self._refusal(status))
        self._turn = new_turn()
        self._vtable = getattr(lib, f"pb_kvcache_{self._NAME}")
        policy = self._vtable.create(struct, ffi.NULL, ffi.NULL)
        if policy == ffi.NULL:
            raise MemoryError(f"{self!r}: out of memory")
        self._policy = ffi.gc(policy, self._vtable.destroy, self._vtable.memory_bytes(policy))
        self._step = self._vtable.on_decode_step
        self._evict = self._vtable.evict

    def _refusal(self, status: int) -> str:
        """Return the message for a refused creation: the parameter, its value and the rule."""
        p = self._params
        messages = {
            lib.PB_KVCACHE_ERROR_BUDGET: ("budget", "must be greater than 0"),
            lib.PB_KVCACHE_ERROR_OBS_WINDOW: ("obs_window", "must be greater than 0"),
            lib.PB_KVCACHE_ERROR_RECENT_WINDOW: ("recent_window", f"must be smaller than budget = {p['budget']}"),
            lib.PB_KVCACHE_ERROR_POOL_KERNEL: ("pool_kernel", "must be odd"),
            lib.PB_KVCACHE_ERROR_SINKS: ("sinks", f"must be smaller than budget = {p['budget']}"),
            lib.PB_KVCACHE_ERROR_NUM_LAYERS: ("num_layers", "must be greater than 0"),
            lib.PB_KVCACHE_ERROR_LAYER: ("layer", f"must be smaller than num_layers = {p.get('num_layers')}"),
            lib.PB_KVCACHE_ERROR_PYRAMID_RATIO: ("pyramid_ratio", "must be greater than 0"),
            lib.PB_KVCACHE_ERROR_TOO_LARGE: (
                self._too_large(),
                f"with {p} the capacity or the memory does not fit",
            ),
        }
        if status not in messages:
            return f"{p}: {status_text(status)}"
        name, rule = messages[status]
        return f"{name} = {p[name]}: {rule}"

    def _too_large(self) -> str:
        """Return the parameter that makes the cache too large: the one without which it would fit."""
        check = getattr(lib, f"pb_kvcache_{self._NAME}_check")
        for name in ("max_rollback", "spare"):
            if check(ffi.new(f"pb_kvcache_{self._NAME}_params *", self._params | {name: 0})) == _OK:
                return name
        return "budget"

    def on_decode_step(self, pos: int, attn: npt.ArrayLike | None) -> None:
        """Take in one decoded token: `pos` joins the kept set.

        Parameters
        ----------
        pos
            The token's absolute position, greater than every kept one.
        attn
            The weight that each kept position, in ascending order, received from the token: shape ``(len(self),)``,
            finite and >= 0, the model's own attention, not renormalised. A contiguous native float32 array is read in
            place. Anything else is converted once. None: this step was not observed.

        Raises
        ------
        TypeError
            `pos` is no integer. `attn` does not hold real numbers.
        ValueError
            A position that does not ascend; weights of the wrong shape, negative, infinite or NaN.
        CacheFullError
            There is no room: evict first.
        RuntimeError
            Another thread's call is in progress. Every method raises it then.

        Notes
        -----
        A call that raises has changed nothing.
        """
        # The usual case costs no more than it has to: a plain int and a float32 vector.
        if type(pos) is not int or not 0 <= pos <= UINT32_MAX:
            pos = uint32("pos", pos)
        weights = ffi.NULL
        count = 0
        if attn is not None:
            if not (
                type(attn) is np.ndarray
                and attn.dtype is _F32
                and attn.ndim == 1
                and attn.flags.c_contiguous
                and attn.flags.aligned
            ):
                attn = float32_array("attn", attn, 1)
            weights = ffi.from_buffer("float[]", attn)
            count = len(attn)
        turn = self._turn
        try:
            del turn[0]
        except IndexError:
            refuse(self)
        try:
            if status := self._step(self._policy, pos, weights, count):
                raise self._step_error(status, pos, attn)
        finally:
            turn += TOKEN

    def _step_error(self, status: int, pos: int, attn: npt.NDArray[np.float32] | None) -> Exception:
        if status == lib.PB_KVCACHE_ERROR_POSITION:
            last = native_kept(self._policy)[-1]
            return ValueError(f"pos = {pos}: must be greater than every kept position, the last of which is {last}")
        if status == lib.PB_KVCACHE_ERROR_ATTN_LEN:
            assert attn is not None
            return ValueError(
                f"attn: has {len(attn)} weights, must have one for each of the "
                f"{lib.pb_kvcache_kept_count(self._policy)} kept positions"
            )
        if status == lib.PB_KVCACHE_ERROR_ATTN_VALUE:
            assert attn is not None
            return ValueError(bad_weight("attn", attn))
        if status == lib.PB_KVCACHE_ERROR_FULL:
            return CacheFullError(
                f"pos = {pos}: the cache holds its capacity of {self.capacity} positions; evict first"
            )
        return RuntimeError(status_text(status))

    def evict(self, budget: int | None = None) -> npt.NDArray[np.uint32]:
        """Drop positions until ``min(budget, effective_budget)`` are kept, and return them, ascending.

        Protected positions are never dropped, even where that leaves more.

        Parameters
        ----------
        budget
            How many positions to keep. None means the effective budget.

        Returns
        -------
        numpy.ndarray
            The dropped positions, uint32, ascending. Empty where there was nothing to drop.
        """
        budget = UINT32_MAX if budget is None else asked_budget(budget)
        turn = self._turn
        try:
            del turn[0]
        except IndexError:
            refuse(self)
        try:
            count = lib.pb_kvcache_evict_count(self._policy, budget)
            victims = np.empty(count, np.uint32)
            if count:
                self._evict(self._policy, budget, ffi.from_buffer("uint32_t[]", victims), count)
            return victims
        finally:
            turn += TOKEN

    def evict_count(self, budget: int | None = None, multiple_of: int = 1) -> int:
        """Return how many positions :meth:`evict_rows`, or :meth:`evict`, would drop now."""
        asked = UINT32_MAX if budget is None else asked_budget(budget)
        rows = positive("multiple_of", multiple_of)
        return in_turn(  # type: ignore[no-any-return]
            self, self._turn, lib.pb_kvcache_evict_rows_count, self._policy, asked, rows
        )

    def evict_rows(
        self, budget: int | None = None, multiple_of: int = 1, which: RowSet = "kept"
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
        """Drop positions as :meth:`evict` does, and tell the rows too: for callers that move tensors or free blocks.

        Parameters
        ----------
        budget
            How many positions to keep. None means the effective budget.
        multiple_of
            Rows of a block, greater than 0. What is to be kept is rounded down to a multiple. Where that is less than
            the protected positions, or nothing although something is to be kept, the smallest multiple that is not.
        which
            The rows that are told: ``"kept"``, those that stay, or ``"victims"``, those that leave.

        Returns
        -------
        victims : numpy.ndarray
            The dropped positions, uint32, ascending.
        rows : numpy.ndarray
            Indices into :attr:`kept` as it was before the call, uint32, ascending. Those that stay are what
            :func:`compact` takes for a head.

        Raises
        ------
        TypeError, ValueError
            For an argument that is not an integer, a negative budget, a multiple of 0, or another word. Nothing has
            changed.

        Examples
        --------
        >>> cache = SlidingWindow(budget=3, spare=1)
        >>> for pos in range(1, 5):
        ...     cache.on_decode_step(pos, None)
        >>> victims, rows = cache.evict_rows()
        >>> victims, rows
        (array([0, 1], dtype=uint32), array([2, 3, 4], dtype=uint32))
        >>> keys = np.arange(10.0, dtype=np.float32).reshape(1, 5, 2)  # one head, five rows
        >>> compact(keys, [rows])[0]
        array([[4., 5.],
               [6., 7.],
               [8., 9.]], dtype=float32)
        """
        asked = UINT32_MAX if budget is None else asked_budget(budget)
        multiple = positive("multiple_of", multiple_of)
        row_set = choice("which", which, ROW_SETS)
        return in_turn(self, self._turn, self._evict_rows, asked, multiple, row_set)

    def _evict_rows(
        self, budget: int, multiple_of: int, which: int
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
        count = lib.pb_kvcache_evict_rows_count(self._policy, budget, multiple_of)
        kept = lib.pb_kvcache_kept_count(self._policy) - count
        victims = np.empty(count, np.uint32)
        rows = np.empty(count if which == lib.PB_KVCACHE_ROWS_VICTIMS else kept, np.uint32)
        words = ffi.from_buffer("uint32_t[]", victims), count, ffi.from_buffer("uint32_t[]", rows), len(rows)
        status = lib.pb_kvcache_evict_rows(self._policy, budget, multiple_of, which, *words)
        if status != _OK:
            raise RuntimeError(status_text(status))
        return victims, rows

    def rollback_count(self) -> int:
        """Return how many steps :meth:`rollback` can take back now, at most ``max_rollback``."""
        return in_turn(self, self._turn, lib.pb_kvcache_rollback_count, self._policy)  # type: ignore[no-any-return]

    def rollback(self, count: int) -> None:
        """Take back the last steps, observed or not: everything is as before them, bit for bit.

        For speculative decoding. An eviction that drops something, :meth:`seed`, :meth:`reset` and :meth:`load` leave
        nothing to take back.

        Parameters
        ----------
        count
            How many steps, at most :meth:`rollback_count`.

        Raises
        ------
        TypeError, ValueError
            For what is no integer, or is more than can be taken back. Nothing has changed.

        Examples
        --------
        >>> cache = H2O(budget=8, recent_window=1, max_rollback=2)
        >>> cache.on_decode_step(1, [1.0])
        >>> cache.on_decode_step(2, [0.5, 0.5])
        >>> cache.rollback(1)
        >>> cache.kept, cache.window_score(0)
        (array([0, 1], dtype=uint32), 1.0)
        """
        number = min(natural("count", count), UINT32_MAX)
        in_turn(self, self._turn, self._rollback, number)

    def _rollback(self, count: int) -> None:
        if lib.pb_kvcache_rollback(self._policy, count) != _OK:
            raise too_many_steps(count, lib.pb_kvcache_rollback_count(self._policy))

    @property
    def memory_bytes(self) -> int:
        """Bytes that the native instance holds."""
        return self._vtable.memory_bytes(self._policy)  # type: ignore[no-any-return]

    def reset(self) -> None:
        """Go back to a new cache: position 0 kept, nothing remembered."""
        in_turn(self, self._turn, lib.pb_kvcache_reset, self._policy)

    def seed(self, positions: npt.ArrayLike, attn: npt.ArrayLike | None = None) -> None:
        """Start from a prompt: replace the kept set, and what is remembered of it.

        Parameters
        ----------
        positions
            The positions to hold, strictly ascending integers, at most :attr:`capacity` of them.
        attn
            The observed steps, oldest first, as if they had been decoded: shape ``(rows, len(positions))``, finite and
            >= 0. None: nothing observed.

        Raises
        ------
        TypeError, ValueError
            Positions that are not integers, do not ascend or do not fit. Weights of the wrong shape or value.
        CacheFullError
            More positions than the capacity.

        Notes
        -----
        A call that raises has changed nothing.
        """
        seed_with(
            lambda *prompt: in_turn(self, self._turn, lib.pb_kvcache_seed, self._policy, *prompt),
            positions,
            attn,
            self.capacity,
        )

    def copy(self: _Self) -> _Self:
        """Return an independent cache with the same parameters, kept set and memory of the past.

        Attributes that a subclass has added are the same objects. ``copy.deepcopy`` copies them, too.
        """
        twin = type(self).__new__(type(self))  # a subclass may be made from something else than the parameters
        Policy.__init__(twin, **self._params)
        in_turn(self, self._turn, lib.pb_kvcache_copy, twin._policy, self._policy)
        return with_attributes(twin, self)

    def __copy__(self: _Self) -> _Self:
        return self.copy()

    def __deepcopy__(self: _Self, memo: dict[int, Any]) -> _Self:
        return with_deep_attributes(self.copy(), self, memo)

    def save(self) -> bytes:
        """Return what the cache holds and remembers, as bytes, to use a prefix again or to move a sequence.

        Equal states give equal bytes, on every machine. ``csrc/include/pb_kvcache/state.h`` has the layout.

        Examples
        --------
        >>> cache = H2O(budget=4, recent_window=1)
        >>> cache.on_decode_step(1, [1.0])
        >>> data = cache.save()
        >>> other = H2O(budget=4, recent_window=1)
        >>> other.load(data)
        >>> other.kept, other.window_score(0)
        (array([0, 1], dtype=uint32), 1.0)
        """
        return in_turn(self, self._turn, saved, lib.pb_kvcache_state_bytes, lib.pb_kvcache_save, self._policy)

    def load(self, data: Any) -> None:
        """Hold and remember exactly what the cache did that :meth:`save` was called on.

        Parameters
        ----------
        data
            The bytes, or any buffer that holds them. They may come from anywhere: what is no state is refused.

        Raises
        ------
        TypeError
            `data` is no buffer.
        ValueError
            The bytes are no state, damaged, of another version, or of another policy or other parameters than these.
            Nothing has changed.
        """
        buffer = checked_bytes(data)
        status = in_turn(self, self._turn, lib.pb_kvcache_load, self._policy, buffer, len(buffer))
        if status != _OK:
            raise refusal(status, len(buffer), self)

    def __reduce__(self) -> Any:
        return _restored, (type(self), self._params, self.save()), getattr(self, "__dict__", None)

    def __getattr__(self, name: str) -> int:
        # Only for names that are not found otherwise: the parameters, as attributes.
        if name in type(self)._PARAMETERS:
            return self._params[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._PARAMETERS]

    def __repr__(self) -> str:
        parameters = ", ".join(f"{name}={value}" for name, value in self._params.items())
        if not hasattr(self, "_policy"):
            return f"{type(self).__name__}({parameters})"
        count = in_words(lambda: len(self))
        return f"<{type(self).__name__}({parameters}): {count} kept, evicts to {self.effective_budget}>"


def _restored(kind: type[_Self], params: dict[str, int], data: bytes) -> _Self:
    """Return a new cache of a class, from a pickle."""
    cache = kind.__new__(kind)  # a subclass may be made from something else than the parameters
    Policy.__init__(cache, **params)
    cache.load(data)
    return cache


def too_many_steps(count: int, most: int) -> ValueError:
    """Return the error for steps that cannot be taken back."""
    return ValueError(f"count = {count}: must be at most the steps that can be taken back now, {most}")


def asked_budget(budget: int) -> int:
    """Return the budget of an eviction, at most 2**32 - 1: more cannot be kept in any case."""
    return min(natural("budget", budget), UINT32_MAX)


def native_kept(policy: Any) -> npt.NDArray[np.uint32]:
    """Return the kept positions of a native instance that the caller has for itself."""
    positions = np.empty(lib.pb_kvcache_kept_count(policy), np.uint32)
    lib.pb_kvcache_kept(policy, ffi.from_buffer("uint32_t[]", positions), len(positions))
    return positions


def in_words(count: Callable[[], int]) -> str:
    """Return a count for a ``repr``, which never raises because another thread has the object."""
    try:
        return str(count())
    except RuntimeError:
        return "?"


def with_attributes(twin: _Any, original: object) -> _Any:
    """Give a copy the attributes that a subclass has added to the original, and return it."""
    if hasattr(original, "__dict__"):
        vars(twin).update(vars(original))
    return twin


def with_deep_attributes(twin: _Any, original: object, memo: dict[int, Any]) -> _Any:
    """Give a copy copies of the attributes that a subclass has added to the original, and return it."""
    memo[id(original)] = twin
    if hasattr(original, "__dict__"):
        vars(twin).update(copy.deepcopy(vars(original), memo))
    return twin


def seed_with(
    call: Callable[[Any, int, Any, int], int], positions: npt.ArrayLike, attn: npt.ArrayLike | None, capacity: int
) -> None:
    """Check a prompt, hand it to `call` as positions, count, weights and rows, and raise what its status means."""
    array = uint32_array("positions", positions, 1)
    rows = 0
    weights = None
    buffer = ffi.NULL
    if attn is not None:
        weights = float32_array("attn", attn, 2)
        rows = len(weights)
        if weights.shape[1] != len(array):
            raise ValueError(f"attn: has shape {weights.shape}, must be (rows, {len(array)}): one weight a position")
        buffer = ffi.from_buffer("float[]", weights)
    status = call(ffi.from_buffer("uint32_t[]", array), len(array), buffer, rows)
    if status == _OK:
        return
    if status == lib.PB_KVCACHE_ERROR_FULL:
        raise CacheFullError(f"positions: {len(array)} of them, must be at most the capacity of {capacity}")
    if status == lib.PB_KVCACHE_ERROR_POSITION:
        index = 1 + int(np.flatnonzero(array[1:] <= array[:-1])[0])
        raise ValueError(
            f"positions[{index}] = {array[index]}: must be greater than the one before it, {array[index - 1]}"
        )
    if status == lib.PB_KVCACHE_ERROR_ATTN_VALUE:
        assert weights is not None
        raise ValueError(bad_weight("attn", weights))
    raise RuntimeError(status_text(status))


def bad_weight(name: str, weights: npt.NDArray[np.float32]) -> str:
    """Return the message for the first weight that is negative, infinite or NaN."""
    index = np.argwhere(~(np.isfinite(weights) & (weights >= 0)))[0]
    where = ", ".join(str(i) for i in index)
    return f"{name}[{where}] = {weights[tuple(index)]}: every weight must be finite and >= 0"
