"""A whole model's caches: one per layer, each evicting at its own budget, driven by one call."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ._busy import TOKEN, in_turn, new_turn, refuse
from ._checks import UINT32_MAX, float32_array, natural, positive, uint32, uint32_array
from ._errors import CacheFullError, status_text
from ._head_plan import HeadPlan
from ._native import ffi, lib
from ._options import ROW_SETS, RowSet, choice
from ._plan_file import load_plan
from ._policy import (
    LayerCache,
    bad_weight,
    in_words,
    native_kept,
    seed_with,
    too_many_steps,
    with_attributes,
    with_deep_attributes,
)
from ._state import checked_bytes, refusal, saved

_Form = TypeVar("_Form")

_F32 = np.dtype(np.float32)
_FLOATS = ffi.typeof("float[]")
_UINT32S = ffi.typeof("uint32_t[]")
_NULL = ffi.NULL
_OK: int = lib.PB_KVCACHE_OK
_MAX_LAYERS: int = lib.PB_KVCACHE_STACK_MAX_LAYERS
_PARAMETERS = (
    "num_layers",
    "budget",
    "pyramid_ratio",
    "recent_window",
    "obs_window",
    "pool_kernel",
    "spare",
    "max_rollback",
)
#: The parameters that a plan replaces.
_UNPLANNED = ("budget", "pyramid_ratio")


class StackLayer(LayerCache):
    """One layer of a :class:`PyramidStack`, to be read. The stack alone changes it."""

    __slots__ = ()

    def __init__(self, stack: Any, layer: int, turn: list[None]) -> None:
        self._policy = lib.pb_kvcache_stack_layer(stack, layer)
        self._owner = stack
        self._turn = turn

    @property
    def memory_bytes(self) -> int:
        """Bytes that the layer takes in the stack's block."""
        return lib.pb_kvcache_snapkv.memory_bytes(self._policy)  # type: ignore[no-any-return]


class PyramidStack:
    """One cache per layer of a model, each evicting at its own budget (PyramidKV, arXiv 2406.02069).

    Every layer is what a :class:`PyramidKV` of its own would be, bit for bit (with `plan`: a :class:`SnapKV` of the
    layer's planned budget). A stack of one layer is :class:`SnapKV`. One native block holds all of them, one call
    takes in a step for all of them, and a step that a single layer refuses changes none. A new stack holds position 0
    in every layer. It serves one sequence, and one thread at a time: a call
    to the stack or one of its layers raises RuntimeError while another thread's is in progress.

    Parameters
    ----------
    num_layers
        Layers of the model, greater than 0 and at most 65536. None with a plan: as many as it has (with a head plan
        layers times heads).
    budget
        Positions kept per layer on average, greater than 0. Not used with `plan`.
    pyramid_ratio
        The first layer's share over the last one's, greater than 0. Not used with `plan`.
    recent_window, obs_window, pool_kernel, spare, max_rollback
        As for :class:`SnapKV`, the same for every layer.
    plan
        The layers' budgets: a ``LayerPlan``, or anything else with `budgets`, or a sequence of `num_layers` integers,
        or the path of a plan file. Each must be greater than `recent_window`: a layer that could drop nothing would
        keep more than was planned. A :class:`HeadPlan` makes a cache for every KV head: "layers" then are the caches,
        the heads of the model's first layer first, and :meth:`head` finds one. None: PyramidKV's shares of `budget`.

    Raises
    ------
    TypeError
        For a parameter that is not an integer, or not integers.
    ValueError
        For one that breaks a rule above, or does not fit. The message names the parameter (and layer), the value and
        the rule.
    MemoryError
        Where the native block cannot be allocated.

    Examples
    --------
    >>> stack = PyramidStack(num_layers=3, budget=4, pyramid_ratio=3, recent_window=1, obs_window=2, pool_kernel=1)
    >>> stack.budgets
    array([6, 4, 2], dtype=uint32)
    >>> for pos in (1, 2, 3, 4):
    ...     stack.on_decode_step(pos, [np.full(len(layer), 1 / len(layer), np.float32) for layer in stack.layers])
    ...     dropped = stack.evict()
    >>> dropped
    [array([], dtype=uint32), array([3], dtype=uint32), array([3], dtype=uint32)]
    >>> [len(layer) for layer in stack.layers], stack.resident, stack.peak_resident
    ([5, 4, 2], 11, 13)
    """

    __slots__ = (
        "__weakref__",
        "_evict",
        "_layers",
        "_lengths",
        "_num_heads",
        "_num_layers",
        "_offsets",
        "_one_each",
        "_params",
        "_plan",
        "_pointers",
        "_stack",
        "_step",
        "_turn",
    )

    def __init__(
        self,
        num_layers: int | None = None,
        budget: int = 512,
        pyramid_ratio: int = 4,
        recent_window: int = 32,
        obs_window: int = 16,
        pool_kernel: int = 7,
        plan: Any = None,
        spare: int = 0,
        max_rollback: int = 0,
    ) -> None:
        budgets = None if plan is None else _planned(plan)
        if num_layers is None:
            if budgets is None:
                raise TypeError("num_layers: is needed where there is no plan")
            num_layers = budgets.size
        #: In the order of the C struct.
        self._params = {
            "num_layers": uint32("num_layers", num_layers),
            "budget": uint32("budget", budget),
            "pyramid_ratio": uint32("pyramid_ratio", pyramid_ratio),
            "recent_window": uint32("recent_window", recent_window),
            "obs_window": uint32("obs_window", obs_window),
            "pool_kernel": uint32("pool_kernel", pool_kernel),
            "spare": uint32("spare", spare),
            "max_rollback": uint32("max_rollback", max_rollback),
        }
        self._plan = plan
        self._num_layers = self._params["num_layers"]
        if self._num_layers > _MAX_LAYERS:
            raise ValueError(f"num_layers = {self._num_layers}: must be at most {_MAX_LAYERS}")
        planned = _NULL
        self._num_heads = 1
        if budgets is not None:
            if budgets.size != self._num_layers:
                heads = "" if budgets.ndim == 1 else f" ({budgets.shape[0]} layers of {budgets.shape[1]} heads)"
                raise ValueError(
                    f"plan: has {budgets.size} budgets{heads}, must have one for each of the {self._num_layers} layers"
                )
            self._num_heads = 1 if budgets.ndim == 1 else budgets.shape[1]
            budgets = budgets.ravel()
            planned = ffi.from_buffer(_UINT32S, budgets)
        params = ffi.new("pb_kvcache_stack_params *", self._params)
        layer = ffi.new("uint32_t *")
        status = lib.pb_kvcache_stack_check(params, planned, layer)
        if status != _OK:
            raise ValueError(self._refusal(status, layer[0], budgets))
        stack = lib.pb_kvcache_stack_create(params, planned, _NULL)
        if stack == _NULL:
            raise MemoryError(f"{self!r}: out of memory")
        self._stack = ffi.gc(stack, lib.pb_kvcache_stack_destroy, lib.pb_kvcache_stack_memory_bytes(stack))
        self._turn = new_turn()  # one for the stack and its layers
        self._layers = tuple(StackLayer(self._stack, number, self._turn) for number in range(self._num_layers))
        # What every call needs, made once.
        self._step = lib.pb_kvcache_stack_on_decode_step
        self._evict = lib.pb_kvcache_stack_evict
        self._pointers = ffi.new("float *[]", self._num_layers)
        self._lengths = ffi.new("size_t[]", self._num_layers)
        self._offsets = ffi.new("size_t[]", self._num_layers + 1)
        self._one_each = np.arange(self._num_layers + 1, dtype=np.uintp)

    def _refusal(self, status: int, layer: int, budgets: npt.NDArray[np.uint32] | None) -> str:
        """Return the message for a refused creation: the parameter, its value and the rule."""
        p = self._params
        planned = {
            lib.PB_KVCACHE_ERROR_BUDGET: ", must be greater than 0",
            lib.PB_KVCACHE_ERROR_RECENT_WINDOW: f", must be greater than recent_window = {p['recent_window']}",
            lib.PB_KVCACHE_ERROR_TOO_LARGE: f": with {p} the capacity or the memory does not fit",
        }
        for culprit in ("max_rollback", "spare"):
            if status == lib.PB_KVCACHE_ERROR_TOO_LARGE and self._fits_without(culprit, budgets):
                return f"{culprit} = {p[culprit]}: with {p} the capacity or the memory does not fit"
        if budgets is not None and status in planned:
            return f"plan: layer {layer} has a budget of {budgets[layer]}{planned[status]}"
        name, rule = {
            lib.PB_KVCACHE_ERROR_NUM_LAYERS: ("num_layers", "must be greater than 0"),
            lib.PB_KVCACHE_ERROR_BUDGET: ("budget", "must be greater than 0"),
            lib.PB_KVCACHE_ERROR_OBS_WINDOW: ("obs_window", "must be greater than 0"),
            lib.PB_KVCACHE_ERROR_RECENT_WINDOW: ("recent_window", f"must be smaller than budget = {p['budget']}"),
            lib.PB_KVCACHE_ERROR_POOL_KERNEL: ("pool_kernel", "must be odd"),
            lib.PB_KVCACHE_ERROR_PYRAMID_RATIO: ("pyramid_ratio", "must be greater than 0"),
            lib.PB_KVCACHE_ERROR_TOO_LARGE: ("budget", f"with {p} the capacity or the memory does not fit"),
        }[status]
        return f"{name} = {p[name]}: {rule}"

    def _fits_without(self, name: str, budgets: npt.NDArray[np.uint32] | None) -> bool:
        params = ffi.new("pb_kvcache_stack_params *", self._params | {name: 0})
        planned = _NULL if budgets is None else ffi.from_buffer(_UINT32S, budgets)
        return bool(lib.pb_kvcache_stack_check(params, planned, _NULL) == _OK)

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return self._num_layers

    @property
    def layers(self) -> tuple[StackLayer, ...]:
        """Each layer's cache, to be read.

        ``kept``, ``len()``, ``pos in layer``, ``window_score(pos)``, ``effective_budget``, ``capacity``,
        ``memory_bytes``.
        """
        return self._layers

    def head(self, layer: int, head: int) -> StackLayer:
        """Return the cache of one KV head, to be read: of a stack that was made from a :class:`HeadPlan`.

        Parameters
        ----------
        layer, head
            The model's layer and its KV head, from 0.

        Raises
        ------
        ValueError
            There is no such layer or head.
        """
        number, heads = uint32("layer", layer), self._num_heads
        which = uint32("head", head)
        if number >= self._num_layers // heads:
            raise ValueError(f"layer = {number}: must be smaller than {self._num_layers // heads}")
        if which >= heads:
            raise ValueError(f"head = {which}: must be smaller than {heads}")
        return self._layers[number * heads + which]

    @property
    def plan(self) -> Any:
        """What the layers' budgets came from, or None."""
        return self._plan

    def __getattr__(self, name: str) -> Any:
        # Only for names that are not found otherwise: the parameters, as attributes.
        if name in _PARAMETERS:
            return None if name in _UNPLANNED and self._plan is not None else self._params[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *_PARAMETERS]

    def on_decode_step(self, pos: int, attn: Sequence[npt.ArrayLike | None] | npt.NDArray[np.float32] | None) -> None:
        """Take in one decoded token for every layer: `pos` joins each layer's kept set.

        Parameters
        ----------
        pos
            The token's absolute position, greater than every kept one of every layer.
        attn
            One vector per layer, in layer order: the weight that each position kept by that layer, ascending, received
            from the token, shape ``(len(layers[l]),)``, finite and >= 0, the model's own attention, not renormalised.
            None in place of a vector: that layer was not observed. None in place of all: none was. Where all layers
            keep equally many, a 2-D array does. Contiguous native float32 arrays are read in place. Anything else is
            converted once.

        Raises
        ------
        TypeError
            `pos` is no integer. `attn` does not hold real numbers.
        ValueError
            A position that does not ascend; not one vector per layer; weights of the wrong shape, negative, infinite
            or NaN.
        CacheFullError
            A layer has no room: evict first.

        Notes
        -----
        A call that raises has changed nothing, in no layer.
        """
        if type(pos) is not int or not 0 <= pos <= UINT32_MAX:
            pos = uint32("pos", pos)
        turn = self._turn
        if attn is None:
            try:
                del turn[0]
            except IndexError:
                refuse(self)
            try:
                if self._step(self._stack, pos, _NULL, _NULL):
                    raise self._step_error(pos, _NULL, [])
            finally:
                turn += TOKEN
            return
        if isinstance(attn, memoryview) or (isinstance(attn, np.ndarray) and attn.dtype != object):
            attn = float32_array("attn", attn, 2)
        try:
            count = len(attn)
        except TypeError:
            raise TypeError(f"attn = {attn!r}: must be a sequence of one vector per layer") from None
        if count != self._num_layers:
            raise ValueError(f"attn: has {count} vectors, must have one for each of {self._num_layers} layers")
        buffers: Any = []
        lengths = []
        from_buffer = ffi.from_buffer
        if isinstance(attn, np.ndarray) and attn.dtype is _F32:  # one address, and the others by the row's length
            buffers = attn
        else:
            for row in attn:
                if row is None:
                    buffers.append(_NULL)
                    lengths.append(0)
                    continue
                # An array that can be read as it is. `carray`: contiguous and aligned (and writable, which costs
                # others no more than the longer check).
                if not (type(row) is np.ndarray and row.dtype is _F32 and row.ndim == 1 and row.flags.carray):
                    row = float32_array(f"attn[{len(buffers)}]", row, 1)
                buffers.append(from_buffer(_FLOATS, row))
                lengths.append(len(row))
        if len(buffers) != count:
            raise ValueError(f"attn: gave {len(buffers)} vectors, must give one for each of {count} layers")
        try:
            del turn[0]
        except IndexError:
            refuse(self)
        try:
            if buffers is attn:
                length = attn.shape[1]
                start = int(ffi.cast("uintptr_t", from_buffer(_FLOATS, attn)))
                addresses = np.frombuffer(ffi.buffer(self._pointers), np.uintp)
                np.multiply(np.arange(count, dtype=np.uintp), 4 * length, out=addresses)
                addresses += start
                np.frombuffer(ffi.buffer(self._lengths), np.uintp)[:] = length
            else:
                self._pointers[0:count] = buffers
                self._lengths[0:count] = lengths
            if self._step(self._stack, pos, self._pointers, self._lengths):
                raise self._step_error(pos, self._pointers, buffers)
        finally:
            turn += TOKEN

    def _step_error(self, pos: int, pointers: Any, buffers: Any) -> Exception:
        """Return the error for a step that the library has refused, with the layer that refuses it."""
        first = ffi.new("uint32_t *")
        status = lib.pb_kvcache_stack_step_check(self._stack, pos, pointers, self._lengths, first)
        number = first[0]
        layer = self.layers[number]
        if status == lib.PB_KVCACHE_ERROR_POSITION:
            last = native_kept(layer._policy)[-1]
            return ValueError(
                f"pos = {pos}: must be greater than every kept position, the last of which is {last} in layer {number}"
            )
        if status == lib.PB_KVCACHE_ERROR_ATTN_LEN:
            return ValueError(
                f"attn[{number}]: has {self._lengths[number]} weights, must have one for each of the "
                f"{lib.pb_kvcache_kept_count(layer._policy)} positions that layer {number} keeps"
            )
        if status == lib.PB_KVCACHE_ERROR_ATTN_VALUE:
            row = buffers[number]
            weights = row if isinstance(row, np.ndarray) else np.frombuffer(ffi.buffer(row), np.float32)
            return ValueError(bad_weight(f"attn[{number}]", weights))
        if status == lib.PB_KVCACHE_ERROR_FULL:
            return CacheFullError(
                f"pos = {pos}: layer {number} holds its capacity of {layer.capacity} positions; evict first"
            )
        return RuntimeError(status_text(status))

    def evict(self) -> list[npt.NDArray[np.uint32]]:
        """Every layer drops positions until it keeps its own budget.

        Returns
        -------
        list of numpy.ndarray
            Each layer's dropped positions, uint32, ascending. Empty where it had nothing to drop.
        """
        return self._evicted(self._split)

    def evict_flat(self) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint64]]:
        """Do what :meth:`evict` does, without an array for each layer: for stacks of many small caches.

        Returns
        -------
        victims : numpy.ndarray
            The positions that the layers dropped, layer after layer, uint32, ascending within each.
        offsets : numpy.ndarray
            Where each layer's begin, and at the end how many there are, uint64, shape ``(num_layers + 1,)``.
        """
        return self._evicted(self._with_offsets)

    def _evicted(self, form: Callable[[npt.NDArray[np.uint32]], _Form]) -> _Form:
        """Evict, and return the victims in a form, which is made before another call can begin."""
        turn = self._turn
        try:
            del turn[0]
        except IndexError:
            refuse(self)
        try:
            victims = np.empty(lib.pb_kvcache_stack_evict_count(self._stack), np.uint32)
            self._evict(
                self._stack, ffi.from_buffer(_UINT32S, victims), len(victims), self._offsets, self._num_layers + 1
            )
            return form(victims)
        finally:
            turn += TOKEN

    def _with_offsets(self, positions: npt.NDArray[np.uint32]) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint64]]:
        return positions, np.frombuffer(ffi.buffer(self._offsets), np.uintp).astype(np.uint64)

    def evict_count(self, multiple_of: int = 1) -> int:
        """Return how many positions :meth:`evict_rows`, or :meth:`evict`, would drop now, over all layers."""
        rows = positive("multiple_of", multiple_of)
        return in_turn(  # type: ignore[no-any-return]
            self, self._turn, lib.pb_kvcache_stack_evict_rows_count, self._stack, rows
        )

    def evict_rows(
        self, multiple_of: int = 1, which: RowSet = "kept"
    ) -> tuple[list[npt.NDArray[np.uint32]], list[npt.NDArray[np.uint32]]]:
        """Every layer drops positions as in :meth:`evict`, and the rows are told too.

        Parameters
        ----------
        multiple_of, which
            As for :meth:`Policy.evict_rows`, the same for every layer.

        Returns
        -------
        victims : list of numpy.ndarray
            Each layer's dropped positions, uint32, ascending.
        rows : list of numpy.ndarray
            Each layer's rows, uint32, ascending: indices into what it kept before. Where every KV head has a cache,
            ``rows[l * heads : (l + 1) * heads]`` is what :func:`compact` takes for layer l. All are views of one array.

        Raises
        ------
        TypeError, ValueError
            As for :meth:`Policy.evict_rows`. Nothing has changed.
        """
        multiple = positive("multiple_of", multiple_of)
        row_set = choice("which", which, ROW_SETS)
        return in_turn(self, self._turn, self._evict_rows, multiple, row_set)

    def _evict_rows(
        self, multiple_of: int, which: int
    ) -> tuple[list[npt.NDArray[np.uint32]], list[npt.NDArray[np.uint32]]]:
        layers = self._num_layers
        victims = np.empty(lib.pb_kvcache_stack_evict_rows_count(self._stack, multiple_of), np.uint32)
        rows = np.empty((layers, max(lib.pb_kvcache_kept_count(layer._policy) for layer in self._layers)), np.uint32)
        counts = np.empty(layers, np.uint32)
        status = lib.pb_kvcache_stack_evict_rows(
            self._stack,
            multiple_of,
            which,
            ffi.from_buffer(_UINT32S, victims),
            len(victims),
            self._offsets,
            layers + 1,
            ffi.from_buffer(_UINT32S, rows),
            rows.shape[1],
            rows.size,
            ffi.from_buffer(_UINT32S, counts),
            layers,
        )
        if status != _OK:
            raise RuntimeError(status_text(status))
        told = [row[:count] for row, count in zip(rows, counts.tolist(), strict=True)]
        return self._split(victims), told

    def _split(self, positions: npt.NDArray[np.uint32]) -> list[npt.NDArray[np.uint32]]:
        """Cut the layers' positions apart at the offsets that a call has just written."""
        layers = self._num_layers
        if len(positions) == layers:  # mostly one each: its rows, which take half the time to make
            offsets = np.frombuffer(ffi.buffer(self._offsets), np.uintp)
            if np.array_equal(offsets, self._one_each):
                return list(positions.reshape(layers, 1))
        return [positions[start:end] for start, end in pairwise(ffi.unpack(self._offsets, self._num_layers + 1))]

    @property
    def kept(self) -> list[npt.NDArray[np.uint32]]:
        """Each layer's kept positions, ascending: copies, uint32, in one call."""
        return in_turn(self, self._turn, self._kept)

    def _kept(self) -> list[npt.NDArray[np.uint32]]:
        positions = np.empty(lib.pb_kvcache_stack_resident(self._stack), np.uint32)
        lib.pb_kvcache_stack_kept(
            self._stack, ffi.from_buffer(_UINT32S, positions), len(positions), self._offsets, self._num_layers + 1
        )
        return self._split(positions)

    @property
    def budgets(self) -> npt.NDArray[np.uint32]:
        """What each layer evicts down to, in positions: a copy, uint32, shape ``(num_layers,)``."""
        budgets = np.empty(self._num_layers, np.uint32)
        lib.pb_kvcache_stack_budgets(self._stack, ffi.from_buffer(_UINT32S, budgets), len(budgets))
        return budgets

    @property
    def resident(self) -> int:
        """Positions held now, over all layers."""
        return in_turn(self, self._turn, lib.pb_kvcache_stack_resident, self._stack)  # type: ignore[no-any-return]

    @property
    def peak_resident(self) -> int:
        """The most positions held at once, over all layers, counted after each append and before its eviction.

        What an arena for K and V must hold. Seeding counts. :meth:`reset` starts it anew.
        """
        return in_turn(self, self._turn, lib.pb_kvcache_stack_peak_resident, self._stack)  # type: ignore[no-any-return]

    @property
    def memory_bytes(self) -> int:
        """Bytes of the native block that holds all layers."""
        return lib.pb_kvcache_stack_memory_bytes(self._stack)  # type: ignore[no-any-return]

    def reset(self) -> None:
        """Go back to a new stack: every layer keeps position 0 and remembers nothing."""
        in_turn(self, self._turn, lib.pb_kvcache_stack_reset, self._stack)

    def seed(self, layer: int, positions: npt.ArrayLike, attn: npt.ArrayLike | None = None) -> None:
        """Start one layer from a prompt: replace its kept set, and what is remembered of it.

        Parameters
        ----------
        layer
            The layer's number, from 0.
        positions, attn
            As for :meth:`Policy.seed`.

        Raises
        ------
        TypeError, ValueError, CacheFullError
            As for :meth:`Policy.seed`, and for a layer that does not exist. Nothing has changed.
        """
        number = uint32("layer", layer)
        if number >= self._num_layers:
            raise ValueError(f"layer = {number}: must be smaller than num_layers = {self._num_layers}")
        seed_with(
            lambda *prompt: in_turn(self, self._turn, lib.pb_kvcache_stack_seed, self._stack, number, *prompt),
            positions,
            attn,
            self.layers[number].capacity,
        )

    def copy(self) -> PyramidStack:
        """Return an independent stack with the same parameters, kept sets, peak and memory of the past.

        Attributes that a subclass has added are the same objects. ``copy.deepcopy`` copies them, too.
        """
        twin = type(self).__new__(type(self))  # a subclass may be made from something else than the parameters
        PyramidStack.__init__(twin, **self._params, plan=None if self._plan is None else self.budgets)
        twin._num_heads = self._num_heads
        twin._plan = self._plan
        in_turn(self, self._turn, lib.pb_kvcache_stack_copy, twin._stack, self._stack)
        return with_attributes(twin, self)

    def __copy__(self) -> PyramidStack:
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> PyramidStack:
        return with_deep_attributes(self.copy(), self, memo)

    def rollback_count(self) -> int:
        """Return how many steps :meth:`rollback` can take back now, in every layer."""
        return in_turn(  # type: ignore[no-any-return]
            self, self._turn, lib.pb_kvcache_stack_rollback_count, self._stack
        )

    def rollback(self, count: int) -> None:
        """Every layer takes back its last steps, as :meth:`Policy.rollback`.

        The peak stays: those positions were held. A layer that has dropped something since, or was seeded, has nothing
        to take back, and then no layer does.
        """
        number = min(natural("count", count), UINT32_MAX)
        in_turn(self, self._turn, self._rollback, number)

    def _rollback(self, count: int) -> None:
        if lib.pb_kvcache_stack_rollback(self._stack, count) != _OK:
            raise too_many_steps(count, lib.pb_kvcache_stack_rollback_count(self._stack))

    def save(self) -> bytes:
        """Return what all layers hold and remember, and the peak, as bytes: as :meth:`Policy.save`."""
        return in_turn(
            self, self._turn, saved, lib.pb_kvcache_stack_state_bytes, lib.pb_kvcache_stack_save, self._stack
        )

    def load(self, data: Any) -> None:
        """Hold and remember exactly what the stack did that :meth:`save` was called on.

        Parameters
        ----------
        data
            The bytes, or any buffer that holds them, of a stack whose layers have the same policies and parameters.

        Raises
        ------
        TypeError, ValueError
            As for :meth:`Policy.load`. No layer has changed.
        """
        buffer = checked_bytes(data)
        status = in_turn(self, self._turn, lib.pb_kvcache_stack_load, self._stack, buffer, len(buffer))
        if status != _OK:
            raise refusal(status, len(buffer), self)

    def __reduce__(self) -> Any:
        budgets = None if self._plan is None else self.budgets
        state = type(self), self._params, budgets, self._plan, self._num_heads, self.save()
        return _restored, state, getattr(self, "__dict__", None)

    def __repr__(self) -> str:
        values = {name: getattr(self, name) for name in _PARAMETERS}
        if self._plan is not None:
            values["plan"] = f"<{type(self._plan).__name__}>"
        parameters = ", ".join(f"{name}={value}" for name, value in values.items() if value is not None)
        if not hasattr(self, "_stack"):
            return f"{type(self).__name__}({parameters})"
        count = in_words(lambda: self.resident)
        return f"<{type(self).__name__}({parameters}): {count} kept, evicts to {self.budgets.sum(dtype=int)}>"


def _planned(plan: Any) -> npt.NDArray[np.uint32]:
    """Return a plan's budgets, ``(layers,)`` or, of a head plan, ``(layers, heads)``."""
    if isinstance(plan, (str, os.PathLike)):
        plan = load_plan(plan)
    if isinstance(plan, HeadPlan):
        return plan.budgets
    return uint32_array("plan", getattr(plan, "budgets", plan), 1)


def _restored(
    kind: type[PyramidStack],
    params: dict[str, int],
    budgets: npt.NDArray[np.uint32] | None,
    plan: Any,
    num_heads: int,
    data: bytes,
) -> PyramidStack:
    """Return a new stack of a class, from a pickle."""
    stack = kind.__new__(kind)  # a subclass may be made from something else than the parameters
    PyramidStack.__init__(stack, **params, plan=budgets)
    stack._plan, stack._num_heads = plan, num_heads
    stack.load(data)
    return stack
