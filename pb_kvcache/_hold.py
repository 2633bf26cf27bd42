"""Caches whose rows lie in slots in any order, held at their budgets: one native call a decode step for all of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ._busy import TOKEN, in_turn, new_turn, refuse
from ._checks import UINT32_MAX, float32_array, integer, shown, uint32, uint32_array
from ._errors import CacheFullError, status_text
from ._native import ffi, lib
from ._policy import bad_weight, in_words, native_kept, seed_with

_F32 = np.dtype(np.float32)
_FLOATS = ffi.typeof("float[]")
_FLAGS = ffi.typeof("uint8_t[]")
_UINT32S = ffi.typeof("uint32_t[]")
_UINT64S = ffi.typeof("uint64_t[]")
_MOVES = ffi.typeof("pb_kvcache_slot_move[]")
_NULL = ffi.NULL
_OK: int = lib.PB_KVCACHE_OK
_MAX_CACHES: int = lib.PB_KVCACHE_HOLD_MAX_CACHES


class Hold:
    """Caches that are :class:`SnapKV` each, and know which slot of a buffer has which position.

    Keys carry their rotation with them, so attention does not need rows in order of position, and nobody has to close
    a gap. A cache that keeps ``c`` positions has their rows in its slots ``0 .. c-1``. The next token's row goes to
    slot ``c``. Once the budget is full a victim leaves with every step, and the newest row moves to the slot that the
    victim leaves. New caches hold position 0 in slot 0. One thread at a time, as for :class:`SnapKV`.

    Parameters
    ----------
    budgets
        What each cache keeps: integers greater than `recent_window`, shape ``(num_caches,)``. A layer's sequences and
        KV heads, for example.
    recent_window, obs_window, pool_kernel
        As for :class:`SnapKV`, the same for every cache.

    Raises
    ------
    TypeError
        For a parameter that is not an integer, or not integers.
    ValueError
        For one that breaks a rule. The message names the parameter (and cache), the value and the rule.
    MemoryError
        Where the native block cannot be allocated.

    Examples
    --------
    >>> hold = Hold([3, 2], recent_window=1, obs_window=2, pool_kernel=1)
    >>> hold.seed(0, [0, 1, 2])
    >>> hold.seed(1, [0, 1])
    >>> # Cache 0 drops position 1 and cache 1 position 0. The rows of token 3 were written to their slots 3 and 2.
    >>> hold.step(3, [[0.5, 0.1, 0.2], [0.3, 0.6, 0.0]])
    array([[0, 3, 1],
           [1, 2, 0]], dtype=uint32)
    >>> hold.kept(0), hold.slots(0)
    (array([0, 2, 3], dtype=uint32), array([0, 2, 1], dtype=uint32))
    """

    __slots__ = ("__weakref__", "_budgets", "_caches", "_count", "_hold", "_moves", "_pos", "_turn", "_windows")

    def __init__(
        self, budgets: npt.ArrayLike, recent_window: int = 32, obs_window: int = 16, pool_kernel: int = 7
    ) -> None:
        windows = {
            "recent_window": uint32("recent_window", recent_window),
            "obs_window": uint32("obs_window", obs_window),
            "pool_kernel": uint32("pool_kernel", pool_kernel),
        }
        numbers = uint32_array("budgets", budgets, 1).copy()
        count = len(numbers)
        if not 0 < count <= _MAX_CACHES:
            raise ValueError(f"budgets: has {count}, must have one for each cache, 1 to {_MAX_CACHES} of them")
        self._windows, self._budgets = windows, numbers
        params = ffi.new("pb_kvcache_hold_params *", {"num_caches": count, **windows})
        first = ffi.new("uint32_t *")
        status = lib.pb_kvcache_hold_check(params, ffi.from_buffer(_UINT32S, numbers), first)
        if status != _OK:
            raise ValueError(self._refusal(status, first[0]))
        hold = lib.pb_kvcache_hold_create(params, ffi.from_buffer(_UINT32S, numbers), _NULL)
        if hold == _NULL:
            raise MemoryError(f"{count} caches with {windows}: out of memory")
        self._hold = ffi.gc(hold, lib.pb_kvcache_hold_destroy, lib.pb_kvcache_hold_memory_bytes(hold))
        self._turn = new_turn()
        self._caches = [lib.pb_kvcache_hold_cache(hold, cache) for cache in range(count)]
        # What every step needs, made once.
        self._pos = np.empty(count, np.uint32)
        self._moves = ffi.new(_MOVES, count)
        self._count = ffi.new("size_t *")

    def _refusal(self, status: int, cache: int) -> str:
        """Return the message for a refused creation: the parameter, its value and the rule."""
        w = self._windows
        if status == lib.PB_KVCACHE_ERROR_OBS_WINDOW:
            return f"obs_window = {w['obs_window']}: must be greater than 0"
        if status == lib.PB_KVCACHE_ERROR_POOL_KERNEL:
            return f"pool_kernel = {w['pool_kernel']}: must be odd"
        rule = {
            lib.PB_KVCACHE_ERROR_BUDGET: "must be greater than 0",
            lib.PB_KVCACHE_ERROR_RECENT_WINDOW: f"must be greater than recent_window = {w['recent_window']}",
            lib.PB_KVCACHE_ERROR_TOO_LARGE: f"with {w} the capacity or the memory does not fit",
        }[status]
        return f"budgets[{cache}] = {self._budgets[cache]}: {rule}"

    def _cache(self, cache: int) -> int:
        """Return a cache's number, checked."""
        number = uint32("cache", cache)
        if number >= len(self._budgets):
            raise ValueError(f"cache = {number}: must be smaller than num_caches = {len(self._budgets)}")
        return number

    @property
    def num_caches(self) -> int:
        """How many caches there are."""
        return len(self._budgets)

    @property
    def budgets(self) -> npt.NDArray[np.uint32]:
        """What each cache keeps: a copy, uint32, shape ``(num_caches,)``."""
        budgets: npt.NDArray[np.uint32] = self._budgets.copy()
        return budgets

    @property
    def memory_bytes(self) -> int:
        """Bytes of the native block that holds all caches and their slots."""
        return lib.pb_kvcache_hold_memory_bytes(self._hold)  # type: ignore[no-any-return]

    def seed(self, cache: int, positions: npt.ArrayLike, attn: npt.ArrayLike | None = None) -> None:
        """Start one cache from a prompt. The row of ``positions[i]`` is in slot i.

        Parameters
        ----------
        cache
            Its number, from 0.
        positions, attn
            As for :meth:`SnapKV.seed`. At most as many positions as the cache's budget.

        Raises
        ------
        TypeError, ValueError, CacheFullError
            As for :meth:`SnapKV.seed`, and for a cache that does not exist. Nothing has changed.
        """
        number = self._cache(cache)
        array = uint32_array("positions", positions, 1)
        budget = int(self._budgets[number])
        if len(array) > budget:
            raise CacheFullError(
                f"positions: {len(array)} of them, must be at most cache {number}'s budget of {budget}"
            )
        seed_with(
            lambda *prompt: in_turn(self, self._turn, lib.pb_kvcache_hold_seed, self._hold, number, *prompt),
            array,
            attn,
            budget,
        )

    def step(
        self, pos: int | npt.ArrayLike, weights: npt.ArrayLike | None, joins: npt.ArrayLike | None = None
    ) -> npt.NDArray[np.uint32]:
        """Take in one decoded token in every cache, and let a victim leave each that is above its budget.

        Parameters
        ----------
        pos
            The token's absolute position, greater than every kept one: one number, or one for each cache.
        weights
            What the row in each slot received from the token, shape ``(num_caches, slots)``, finite and >= 0, the
            model's own attention, not renormalised. The slots of kept positions are read and no others, so that
            `slots` is at least the most that a cache keeps. A contiguous native float32 array is read in place. None:
            the step was not observed.
        joins
            Booleans, shape ``(num_caches,)``. Where one is false the token is none of this cache's (padding, a
            sequence that has ended): the cache stays as it is. None: all true.

        Returns
        -------
        numpy.ndarray
            The rows to copy, uint32, shape ``(moves, 3)``: cache, slot to copy from (the newest row's), slot to copy to
            (the victim's). At most one a cache.

        Raises
        ------
        TypeError
            `pos` is no integer, `weights` no real numbers, `joins` no booleans.
        ValueError
            A position that does not ascend. Arrays of the wrong shape. Weights that are negative, infinite or NaN.

        Notes
        -----
        A call that raises has changed nothing, in no cache.
        """
        count = len(self._budgets)
        if type(pos) is int and 0 <= pos <= UINT32_MAX:
            positions = None
        elif np.ndim(pos) == 0:
            positions, pos = None, uint32("pos", pos)
        else:
            positions = uint32_array("pos", pos, 1)
            if len(positions) != count:
                raise ValueError(f"pos: has {len(positions)} positions, must have one for each of {count} caches")
        buffer, slots, capacity = _NULL, 0, 0
        if weights is not None:
            # `carray`: contiguous and aligned (and writable, which costs others no more than the longer check).
            if not (
                type(weights) is np.ndarray and weights.dtype is _F32 and weights.ndim == 2 and weights.flags.carray
            ):
                weights = float32_array("weights", weights, 2)
            if len(weights) != count:
                raise ValueError(f"weights: has shape {weights.shape}, must have a row for each of {count} caches")
            slots, capacity = weights.shape[1], weights.size
            buffer = ffi.from_buffer(_FLOATS, weights)
        flags = _NULL if joins is None else ffi.from_buffer(_FLAGS, self._flags(joins))
        turn = self._turn
        try:
            del turn[0]
        except IndexError:
            refuse(self)
        try:
            if positions is None:
                positions = self._pos
                positions.fill(pos)
            numbers = ffi.from_buffer(_UINT32S, positions)
            status = lib.pb_kvcache_hold_step(
                self._hold, numbers, flags, buffer, slots, capacity, self._moves, count, self._count
            )
            if status != _OK:
                raise self._step_error(positions, numbers, flags, buffer, weights)
            moved = self._count[0]
            moves = np.empty((moved, 3), np.uint32)
            ffi.memmove(moves, self._moves, 12 * moved)
            return moves
        finally:
            turn += TOKEN

    @staticmethod
    def move(
        address: int, size: int, row_bytes: int, offsets: npt.NDArray[np.uint64], moves: npt.NDArray[np.uint32]
    ) -> None:
        """Do what :meth:`step` asked for, in keys or values on the processor.

        Parameters
        ----------
        address, size
            Where a contiguous buffer ``(rows, width)`` lies, and its bytes.
        row_bytes
            Bytes of one row.
        offsets
            The row of each cache's slot 0, uint64, shape ``(num_caches,)``.
        moves
            What :meth:`step` returned.

        Raises
        ------
        ValueError
            A move that is not within the buffer. Nothing has moved.
        """
        status = lib.pb_kvcache_hold_move(
            ffi.cast("void *", address),
            ffi.from_buffer(_UINT64S, offsets),
            len(offsets),
            row_bytes,
            row_bytes,
            size,
            ffi.from_buffer(_MOVES, moves),
            len(moves),
        )
        if status != _OK:
            raise ValueError(
                f"moves: must be of one of {len(offsets)} caches and lie within {size} bytes in rows of {row_bytes}"
            )

    def _flags(self, joins: npt.ArrayLike) -> npt.NDArray[np.uint8]:
        """Return booleans, one for each cache, as bytes."""
        flags = np.asarray(joins)
        if flags.dtype != np.bool_:
            raise TypeError(f"joins: must be booleans, not of dtype {flags.dtype}")
        if flags.shape != self._budgets.shape:
            raise ValueError(f"joins: has shape {flags.shape}, must be {self._budgets.shape}: one for each cache")
        return np.ascontiguousarray(flags).view(np.uint8)

    def _step_error(
        self, positions: npt.NDArray[np.uint32], numbers: Any, flags: Any, buffer: Any, weights: Any
    ) -> Exception:
        """Return the error for a step that the library has refused, with the cache that refuses it."""
        slots, size = (0, 0) if weights is None else (weights.shape[1], weights.size)
        most = max(lib.pb_kvcache_kept_count(cache) for cache in self._caches)
        if weights is not None and slots < most:
            return ValueError(
                f"weights: has shape {weights.shape}, must have a weight for each of the {most} slots that are in use"
            )
        first = ffi.new("uint32_t *")
        status = lib.pb_kvcache_hold_step_check(self._hold, numbers, flags, buffer, slots, size, first)
        cache = first[0]
        if status == lib.PB_KVCACHE_ERROR_POSITION:
            last = native_kept(self._caches[cache])[-1]
            return ValueError(
                f"pos = {positions[cache]}: must be greater than every kept position, the last of which is {last} in "
                f"cache {cache}"
            )
        if status == lib.PB_KVCACHE_ERROR_ATTN_VALUE:
            row = weights[cache, : lib.pb_kvcache_kept_count(self._caches[cache])]
            return ValueError(bad_weight(f"weights[{cache}]", row))
        return RuntimeError(status_text(status))

    def kept(self, cache: int) -> npt.NDArray[np.uint32]:
        """Return the positions that a cache keeps, ascending: a copy, uint32."""
        return in_turn(self, self._turn, native_kept, self._caches[self._cache(cache)])

    def slots(self, cache: int) -> npt.NDArray[np.uint32]:
        """Return the slot of each position that a cache keeps, beside :meth:`kept`: a copy, uint32."""
        return in_turn(self, self._turn, self._slots, self._cache(cache))

    def _slots(self, cache: int) -> npt.NDArray[np.uint32]:
        slots = np.empty(lib.pb_kvcache_kept_count(self._caches[cache]), np.uint32)
        lib.pb_kvcache_hold_slots(self._hold, cache, ffi.from_buffer(_UINT32S, slots), len(slots))
        return slots

    def select(self, caches: npt.ArrayLike) -> Hold:
        """Return new caches that hold and remember what those at `caches` do, in that order.

        Parameters
        ----------
        caches
            Numbers of caches, shape ``(new num_caches,)``: of the beams that go on, for example. One may come more than
            once.

        Raises
        ------
        TypeError, ValueError
            Not integers, none, or a cache that does not exist.
        """
        numbers = uint32_array("caches", caches, 1)
        if len(numbers) == 0:
            raise ValueError("caches: must have at least one")
        for index, number in enumerate(numbers):
            if number >= len(self._budgets):
                raise ValueError(
                    f"caches[{index}] = {shown(integer('caches', number))}: must be smaller than num_caches = "
                    f"{len(self._budgets)}"
                )
        twin = Hold(self._budgets[numbers], **self._windows)
        in_turn(self, self._turn, self._copy_to, twin, numbers)
        return twin

    def _copy_to(self, twin: Hold, numbers: npt.NDArray[np.uint32]) -> None:
        for cache, number in enumerate(numbers.tolist()):
            lib.pb_kvcache_hold_copy(twin._hold, cache, self._hold, number)

    def copy(self) -> Hold:
        """Return independent caches with the same parameters, positions, slots and memory of the past."""
        return self.select(np.arange(len(self._budgets)))

    def __copy__(self) -> Hold:
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> Hold:
        twin = self.copy()
        memo[id(self)] = twin
        return twin

    def __reduce__(self) -> Any:
        raise TypeError(f"a {type(self).__name__} holds native memory and cannot be pickled; pickle kept and slots")

    def __repr__(self) -> str:
        count = in_words(lambda: in_turn(self, self._turn, lambda: sum(map(lib.pb_kvcache_kept_count, self._caches))))
        total = self._budgets.sum(dtype=int)
        return f"<{type(self).__name__}: {len(self._budgets)} caches, {count} kept, budgets of {total} together>"
