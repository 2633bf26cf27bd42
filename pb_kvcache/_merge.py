"""Merging: rows that stay take in the rows that leave, with a bias to their logits that keeps what both weigh."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np
import numpy.typing as npt

from ._checks import float32_array
from ._options import at_least, choice, logit_scale
from ._positions import ascending_rows
from ._qk import as_float32
from ._tensor import NATIVE_DEVICES, View, is_torch, on_other_device, plain_array, resolved, torch_module

if TYPE_CHECKING:
    from torch import Tensor

    from ._types import Array, Integers, PerHead, Scores

_Element = TypeVar("_Element", bound=np.generic)

#: A row that takes in less than this share of the attention stays as it is. float32 means of it lose their digits.
LEAST_SHARE = 1e-30

#: Steps of the weights of ``"fitted"``, and between what they are held.
FIT_STEPS = 60
FIT_WEIGHTS = (1e-6, 1e6)

#: The ridge of the values of ``"fitted"``, as a part of the mean of the diagonal.
FIT_RIDGE = 0.01

#: Rounds of the clusters of ``"macro"``.
CLUSTER_ROUNDS = 8

#: Columns of a block, and its elements in this computer's memory: 1 MB of float32 stays in the second cache.
_COLUMNS = 2048
_ELEMENTS = 1 << 18

_METHODS = {name: name for name in ("nearest", "fitted", "macro")}


@overload
def merge(
    keys: npt.NDArray[_Element],
    values: npt.NDArray[_Element],
    kept: Integers,
    queries: Array,
    *,
    protect: int | PerHead,
    method: str = "nearest",
    lse: Array | None = None,
    scale: float | None = None,
    rows: int = 4,
    rotary: Callable[[Any, Any], Any] | None = None,
) -> tuple[npt.NDArray[_Element], npt.NDArray[_Element], Scores]: ...


@overload
def merge(
    keys: Tensor,
    values: Tensor,
    kept: Tensor | Integers,
    queries: Tensor,
    *,
    protect: int | PerHead,
    method: str = "nearest",
    lse: Tensor | None = None,
    scale: float | None = None,
    rows: int = 4,
    rotary: Callable[[Any, Any], Any] | None = None,
) -> tuple[Tensor, Tensor, Tensor]: ...


@overload
def merge(
    keys: Array | Tensor,
    values: Array | Tensor,
    kept: Sequence[Any],
    queries: Array | Tensor,
    *,
    protect: int | PerHead,
    method: str = "nearest",
    lse: Array | Tensor | None = None,
    scale: float | None = None,
    rows: int = 4,
    rotary: Callable[[Any, Any], Any] | None = None,
) -> tuple[Any, Any, Any]: ...


def merge(
    keys: Any,
    values: Any,
    kept: Any,
    queries: Any,
    *,
    protect: Any,
    method: str = "nearest",
    lse: Any = None,
    scale: float | None = None,
    rows: int = 4,
    rotary: Callable[[Any, Any], Any] | None = None,
) -> tuple[Any, Any, Any]:
    """Merge the rows of one layer that an eviction leaves out into those that it keeps.

    Every row gets a bias, which attention adds to the row's scaled logits. All arithmetic is float32, in blocks of at
    most 2,048 positions. The positions that take no part in it are the protected ones: the last rows of `kept`. The
    rest of the prompt is the prefix. With ``P = exp(scale * q . k - lse)``, a position's share of a query's attention,
    and ``a`` its mean over the queries:

    ``"nearest"``
        Every evicted row goes to the kept row of the prefix whose key is nearest by cosine, the lower of two. A kept
        row and what it takes in become their means weighted by `a`, keys and values alike. The bias is
        ``log(sum of a) - log(mean over queries of exp(scale * q . key - lse))`` of the new key. A row that takes in
        less than 1e-30 of the attention stays as it is, bias 0.
    ``"fitted"``
        "nearest", and then the rows of the prefix are fitted to the queries. 60 multiplicative steps of non-negative
        least squares fit the weights ``exp(bias)`` to the prefix's true share, held between 1e-6 and 1e6. One ridge
        regression (0.01 of the mean diagonal) fits the values to the prefix's true output. The values need the biases.
    ``"macro"``
        For comparison, SPICY-KV's proposal: the `rows` kept rows of the prefix of the least `a` (the higher of two)
        are freed and join the evicted ones. All of these become `rows` clusters of keys before rotation, by k-means
        from keys at even steps, 8 rounds. Each takes a free row, in the order of their first positions. Its key is the
        mean, turned to the mean position. Its value is the mean. Its bias is
        ``log(size) + scale**2 * |q|**2 * var / 2``, where ``var`` is the mean over the dimensions of the variance of
        its keys. The proposal has each query's own ``|q|**2``. A bias is one number a row, so it is the mean over the
        queries here. The evicted keys and values of one head are held in float32.

    Parameters
    ----------
    keys, values
        ``(kv_heads, n, head_dim)``: all rows of the prompt, keys with their rotary embedding applied. NumPy arrays or
        torch tensors of one kind, float32, float16 or bfloat16, on any device. They are not changed.
    kept
        ``(kv_heads, k)`` ascending positions, as :func:`select` returns them, or one vector per head.
    queries
        ``(kv_heads, N, head_dim)``: queries after rotation, those of a group's query heads behind one another. The
        window's do, and 96 of the prompt's, turned to the next positions, are better.
    protect
        How many rows at the end of each head's `kept` take nothing in: the window's. One number, or one per head. A
        head with as many or more keeps its rows as they are.
    method
        ``"nearest"``, ``"fitted"`` or ``"macro"``.
    lse
        ``(kv_heads, N)``: the log of each query's softmax denominator over the positions that it sees. None works it
        out over all `n` keys, as for queries that follow the prompt. The window's own do not see what follows them.
    scale
        What products are multiplied by. None means ``head_dim ** -0.5``.
    rows
        Of ``"macro"``: the rows of a head's budget that become clusters, at most those that are not protected.
    rotary
        Of ``"macro"``: ``rotary(keys, positions)`` turns ``(m, head_dim)`` float32 keys by ``(m,)`` float32 positions
        and is given negative ones to turn back. None makes clusters of the keys as they are given.

    Returns
    -------
    keys, values
        ``(kv_heads, k, head_dim)``, of the kind given. Where heads keep different numbers, lists with one per head.
    bias
        ``(kv_heads, k)`` float32, or a list. 0 for protected rows. Where nothing is evicted, rows stay bit for bit.

    Raises
    ------
    TypeError, ValueError
        An argument that breaks a rule, an element that is NaN or infinite, a product too large for float32.

    Notes
    -----
    The same library build gives the same bits again. NumPy and torch agree up to rounding.

    Examples
    --------
    >>> keys = np.array([[[1, 0], [2, 0], [0, 1], [0, 1]]], np.float32)
    >>> values = np.array([[[1, 1], [3, 3], [5, 5], [7, 7]]], np.float32)
    >>> queries = np.zeros((1, 1, 2), np.float32)
    >>> merged, outputs, bias = merge(keys, values, np.array([[0, 3]]), queries, protect=1)
    >>> merged.tolist(), bias.round(3).tolist()
    ([[[1.0, 0.3333333432674408], [0.0, 1.0]]], [[1.0989999771118164, 0.0]])
    """
    choice("method", method, _METHODS)
    macros = at_least("rows", rows, 1)
    keys, values, queries = _checked(keys, values, queries)
    heads, n, head_dim = keys.shape
    factor = logit_scale(head_dim**-0.5 if scale is None else scale)
    normaliser = None if lse is None else _normaliser(lse, queries)
    positions, counts = _kept(kept, heads, n)
    free = [max(0, count - last) for count, last in zip(counts, _protected(protect, heads), strict=True)]

    results = []
    with np.errstate(all="ignore"), _exact(keys):
        for head in range(heads):
            at = positions[head, : counts[head]].astype(np.int64)
            known = None if normaliser is None else normaliser[head]
            one = _Head(keys[head], values[head], queries[head], known, at, free[head], factor)
            try:
                if free[head] == 0 or counts[head] == n:
                    result = one.kept_rows()
                elif method == "macro":
                    result = _macro(one, min(macros, free[head]), rotary)
                else:
                    result = _nearest(one, method == "fitted")
            except _TooLargeError:
                what = "keys and queries" if lse is None else "keys, queries and lse"
                raise ValueError(f"{what}: a product or share of KV head {head} is too large for float32") from None
            results.append(result)
        parts = list(zip(*results, strict=True))
        if len(set(counts)) > 1:
            return list(parts[0]), list(parts[1]), list(parts[2])
        stack = torch_module().stack if is_torch(keys) else np.stack
        return stack(parts[0]), stack(parts[1]), stack(parts[2])


class _TooLargeError(Exception):
    """A number beyond float32, before anything was made of it."""


class _Head:
    """One KV head: its rows and queries, and what the methods do with them. The same code for NumPy and torch.

    Attributes
    ----------
    xp
        The library.
    kept, free
        Positions of the kept rows, and how many of the first ones may take others in.
    """

    def __init__(self, keys: Any, values: Any, queries: Any, lse: Any, kept: Any, free: int, scale: float) -> None:
        self.xp: Any = torch_module() if is_torch(keys) else np
        self.keys, self.values = keys, values
        self.scaled = as_float32(queries) * scale
        self.kept, self.free, self.scale = kept, free, scale
        self.n, self.head_dim = keys.shape
        elements = _COLUMNS**3 if is_torch(keys) and keys.device.type not in NATIVE_DEVICES else _ELEMENTS
        self.step = max(64, min(_COLUMNS, elements // max(free, len(queries))))
        self.given = lse
        # Fresh memory for every block costs as much again as the products: the system clears it.
        self.scratch = self.vector(0.0, self.step * max(free, len(queries)))

    def vector(self, values: Any, length: int | None = None) -> Any:
        """Return a NumPy vector where the rows are, or `values` in a float32 vector of a length."""
        if length is not None:
            values = np.full(length, values, np.float32)
        return torch_module().from_numpy(values).to(self.keys.device) if self.xp is not np else values

    def blocks(self) -> list[slice]:
        return [slice(start, min(start + self.step, self.n)) for start in range(0, self.n, self.step)]

    def kept_rows(self) -> tuple[Any, Any, Any]:
        """Return the kept rows as they are, and no bias."""
        at = self.vector(self.kept)
        return _rows(self.keys, at), _rows(self.values, at), self.vector(0.0, len(self.kept))

    def lse(self) -> Any:
        """Return the log of every query's softmax denominator, over all keys where none was given."""
        if self.given is None:
            top = self.vector(-np.inf, len(self.scaled))
            total = self.vector(0.0, len(self.scaled))
            for block in self.blocks():
                logits = self.product(self.scaled, as_float32(self.keys[block]).T)
                highest = self.xp.maximum(top, self.xp.amax(logits, axis=1))
                total = total * self.xp.exp(top - highest)
                logits -= highest[:, None]
                total = total + self.xp.exp(logits, out=logits).sum(axis=1)
                top = highest
            self.given = top + self.xp.log(total)
            self.check(self.given)
        return self.given

    def product(self, left: Any, right: Any) -> Any:
        """Return a matrix product of a block, valid until the next one."""
        shape = (left.shape[0], right.shape[1])
        return self.xp.matmul(left, right, out=self.scratch[: shape[0] * shape[1]].reshape(shape))

    def shares(self, keys: Any) -> Any:
        """Return the share of every query's attention, ``(N, m)``, that a block of float32 keys has, as `product`."""
        lse = self.lse()  # which makes products of its own
        shares = self.product(self.scaled, keys.T)
        shares -= lse[:, None]
        return self.xp.exp(shares, out=shares)

    def check(self, values: Any) -> None:
        if not bool(self.xp.isfinite(values).all()):
            raise _TooLargeError

    def rounded(self, rows: Any, like: Any) -> Any:
        """Return float32 rows in the kind of `like`, within its range."""
        if self.xp is not np:
            limit = self.xp.finfo(like.dtype).max
            return rows.clamp(-limit, limit).to(like.dtype)
        limit = 65504.0 if like.dtype.name == "float16" else 3.3895314e38  # bfloat16's largest is below float32's
        return rows if like.dtype == np.float32 else np.clip(rows, -limit, limit).astype(like.dtype)

    def with_rows(self, at: Any, keys: Any, values: Any, bias: Any) -> tuple[Any, Any, Any]:
        """Return the kept rows with new ones at the indices `at`, in the kind given."""
        all_keys, all_values, all_bias = self.kept_rows()
        all_keys[at], all_values[at], all_bias[at] = keys, values, bias
        return all_keys, all_values, all_bias


def _nearest(head: _Head, fitted: bool) -> tuple[Any, Any, Any]:
    """Merge one head by "nearest", or by "fitted"."""
    xp, free, width = head.xp, head.free, head.head_dim
    prefix = np.ones(head.n, np.float32)
    prefix[head.kept[free:]] = 0
    outside = head.vector(prefix)
    evicted = np.ones(head.n, bool)
    evicted[head.kept] = False
    leaving = head.vector(np.flatnonzero(evicted))

    # Every row's nearest one, and the mean of its shares.
    at = head.vector(head.kept[:free])
    old_keys, old_values = as_float32(_rows(head.keys, at)), as_float32(_rows(head.values, at))
    directions = _directions(xp, old_keys).T
    nearest = head.vector(np.empty(head.n, np.int64))
    mean = head.vector(0.0, head.n)
    share = head.vector(0.0, len(head.scaled))
    output = xp.zeros((len(head.scaled), width), **_like(old_keys))
    for block in head.blocks():
        keys = as_float32(head.keys[block])
        nearest[block] = _nearest_columns(head.product(keys, directions))
        shares = head.shares(keys)
        mean[block] = shares.mean(axis=0)
        if fitted:
            shares *= outside[block]
            share += shares.sum(axis=1)
            output += shares @ as_float32(head.values[block])
    head.check(mean)

    # What the kept rows take in: sums of keys, values and weights.
    more_keys, more_values = xp.zeros_like(old_keys), xp.zeros_like(old_values)
    more = head.vector(0.0, free)
    order = nearest[leaving].argsort(kind="stable") if xp is np else nearest[leaving].argsort(stable=True)
    leaving = leaving[order]
    for start in range(0, len(leaving), _COLUMNS):
        rows = leaving[start : start + _COLUMNS]
        labels, weight = _rows(nearest, rows), _rows(mean, rows)
        _add_rows(head, more, labels, weight)
        for source, sums in ((head.keys, more_keys), (head.values, more_values)):
            addends = as_float32(_rows(source, rows))  # a copy
            addends *= weight[:, None]
            _add_rows(head, sums, labels, addends)

    # The kept rows become means with what they took in.
    own = mean[at]
    takes = (more >= LEAST_SHARE)[:, None]
    total = xp.where(takes, (own + more)[:, None], 1.0)
    new_keys = xp.where(takes, (own[:, None] * old_keys + more_keys) / total, old_keys)
    new_values = xp.where(takes, (own[:, None] * old_values + more_values) / total, old_values)
    new_keys = head.rounded(new_keys, head.keys)

    # The bias gives the new key the shares of all that it stands for.
    logits = head.scaled @ as_float32(new_keys).T - head.lse()[:, None]
    highest = xp.amax(logits, axis=0)
    got = highest + xp.log(xp.exp(logits - highest).mean(axis=0))
    bias = xp.where(takes[:, 0], xp.log(total[:, 0]) - got, 0.0)
    head.check(bias)
    if fitted:
        new_values, bias = _fitted(head, xp.exp(logits), new_values, bias, share, output)
    return head.with_rows(slice(0, free), new_keys, head.rounded(new_values, head.values), bias)


def _fitted(head: _Head, shares: Any, values: Any, bias: Any, target: Any, output: Any) -> tuple[Any, Any]:
    """Fit weights and values of a head's merged rows to the prefix's share ``(N,)`` and output ``(N, head_dim)``.

    `shares` are those of the merged keys without a bias, ``(N, rows)``.
    """
    xp = head.xp
    low, high = FIT_WEIGHTS
    weight = xp.clip(xp.exp(bias), low, high)
    wanted = target @ shares
    for _ in range(FIT_STEPS):
        weight = weight * (wanted / xp.clip((shares @ weight) @ shares, 1e-20, None))
    weight = xp.clip(weight, low, high)
    head.check(weight)

    # (X^T X + c I)^-1 X^T = X^T (X X^T + c I)^-1: the smaller of both is solved, in float64 for its condition.
    double = _precise(shares * weight)
    missing = _precise(output - (shares * weight) @ values)
    queries, rows = double.shape
    ridge = FIT_RIDGE * (double * double).sum() / rows
    if float(ridge) > 0:
        gram = double @ double.T if queries < rows else double.T @ double
        gram = gram + ridge * xp.eye(len(gram), **_like(gram))
        if queries < rows:
            change = double.T @ xp.linalg.solve(gram, missing)
        else:
            change = xp.linalg.solve(gram, double.T @ missing)
        values = values + (change.float() if xp is not np else change.astype(np.float32))
        head.check(values)
    return values, xp.log(weight)


def _macro(head: _Head, macros: int, rotary: Callable[[Any, Any], Any] | None) -> tuple[Any, Any, Any]:
    """Merge one head by "macro"."""
    xp, free = head.xp, head.free
    mean = head.vector(0.0, head.n)
    for block in head.blocks():
        mean[block] = head.shares(as_float32(head.keys[block])).mean(axis=0)
    head.check(mean)

    # The rows of the least share are freed. They and the evicted ones make the clusters.
    own = _as_array(mean)[head.kept[:free]]
    freed = np.sort(np.argsort(-own, kind="stable")[free - macros :])
    loose = np.ones(head.n, bool)
    loose[np.delete(head.kept, freed)] = False
    positions = np.flatnonzero(loose)
    at = head.vector(positions)
    values = as_float32(head.values[at])
    keys, where = as_float32(head.keys[at]), head.vector(positions.astype(np.float32))
    if rotary is not None:
        keys = _turned(head, rotary, keys, -where)
    labels = _clusters(xp, keys, macros)

    # Means of every cluster, turned to its mean position, and the second-order estimate of what it weighs.
    members = (labels[:, None] == head.vector(np.arange(macros))).T
    members = members.float() if xp is not np else members.astype(np.float32)
    sizes = members.sum(axis=1)
    centres = members @ keys / sizes[:, None]
    apart = keys - centres[labels]
    variance = members @ (apart * apart).mean(axis=1) / sizes
    squares = (head.scaled * head.scaled).sum(axis=1).mean()  # scale^2 |q|^2
    bias = xp.log(sizes) + squares * variance / 2
    if rotary is not None:
        centres = _turned(head, rotary, centres, members @ where / sizes)
    values = members @ values / sizes[:, None]
    for result in (centres, values, bias):
        head.check(result)
    return head.with_rows(head.vector(freed), head.rounded(centres, head.keys), head.rounded(values, head.values), bias)


def _clusters(xp: Any, points: Any, number: int) -> Any:
    """Return the cluster of every point ``(p, d)``, in the order of their first points. None is empty, p > number."""
    last = len(points) - 1
    centres = points[[i * last // max(1, number - 1) for i in range(number)]]
    for _ in range(CLUSTER_ROUNDS):
        distances = (centres * centres).sum(axis=1) - 2 * (points @ centres.T)
        labels = distances.argmin(axis=1)
        members = xp.stack([labels == one for one in range(number)])
        members = members.float() if xp is not np else members.astype(np.float32)
        sizes = members.sum(axis=1)[:, None]
        centres = xp.where(sizes > 0, members @ points / xp.clip(sizes, 1, None), centres)

    # A cluster without points takes the one that is farthest from its own centre, of those that do not lie alone.
    apart = points - centres[labels]
    found = _as_array(labels).copy()
    far = _as_array((apart * apart).sum(axis=1)).copy()
    for one in range(number):
        sizes = np.bincount(found, minlength=number)
        if sizes[one] == 0:
            point = int(np.where(sizes[found] > 1, far, -1).argmax())
            found[point], far[point] = one, 0
    firsts = [int(np.flatnonzero(found == one)[0]) for one in range(number)]
    ordered = np.argsort(np.argsort(firsts))[found]
    return ordered if xp is np else torch_module().from_numpy(ordered).to(points.device)


def _turned(head: _Head, rotary: Callable[[Any, Any], Any], keys: Any, positions: Any) -> Any:
    """Return what `rotary` made of float32 keys, checked."""
    turned = rotary(keys, positions)
    if type(turned) is not type(keys) or tuple(turned.shape) != tuple(keys.shape):
        what = f"{type(turned).__name__} of shape {tuple(getattr(turned, 'shape', ()))}"
        raise ValueError(f"rotary: returned {what}, must return keys of shape {tuple(keys.shape)}")
    turned = as_float32(turned)
    head.check(turned)
    return turned


def _rows(rows: Any, at: Any) -> Any:
    """Return the rows at some indices, in half the time of ``rows[at]`` or less."""
    return rows.index_select(0, at) if is_torch(rows) else rows.take(at, axis=0)


def _nearest_columns(cosines: Any) -> Any:
    """Return the column of the highest number of every row, the lower of two."""
    if is_torch(cosines) and cosines.device.type in NATIVE_DEVICES:
        return torch_module().from_numpy(cosines.numpy().argmax(axis=1))  # torch's own takes eleven times as long
    return cosines.argmax(axis=1)


def _directions(xp: Any, keys: Any) -> Any:
    """Return keys of length 1. One of zeros stays, whose cosines are 0."""
    largest = xp.amax(xp.abs(keys), axis=1)[:, None]
    keys = keys / xp.where(largest > 0, largest, xp.ones_like(largest))  # whose squares neither overflow nor vanish
    length = xp.sqrt((keys * keys).sum(axis=1))[:, None]
    return keys / xp.where(length > 0, length, xp.ones_like(length))


def _add_rows(head: _Head, sums: Any, labels: Any, rows: Any) -> None:
    """Add ``rows[j]`` to ``sums[labels[j]]``, for ascending labels, in an order that is always the same."""
    if head.xp is np:
        starts = np.flatnonzero(np.diff(labels, prepend=-1))
        sums[labels[starts]] += np.add.reduceat(rows, starts, axis=0)
    elif sums.device.type in NATIVE_DEVICES:
        sums.index_add_(0, labels, rows)
    else:  # a device adds in any order
        members = labels[:, None] == torch_module().arange(len(sums), device=sums.device)
        sums += members.float().T @ rows


def _as_array(values: Any) -> npt.NDArray[Any]:
    """Return an array, or a tensor of any device as one."""
    return np.asarray(values.cpu() if is_torch(values) else values)


def _precise(values: Any) -> Any:
    """Return values as float64, as float32 on Apple's devices, which have no float64."""
    if not is_torch(values):
        return values.astype(np.float64)
    return values if values.device.type == "mps" else values.double()


def _like(values: Any) -> dict[str, Any]:
    """Return how a new array of the same kind is made."""
    return {"dtype": values.dtype, "device": values.device} if is_torch(values) else {"dtype": values.dtype}


def _exact(keys: Any) -> AbstractContextManager[Any]:
    """Return what keeps torch from multiplying in 16 bits."""
    return torch_module().autocast(keys.device.type, enabled=False) if is_torch(keys) else nullcontext()


def _checked(keys: Any, values: Any, queries: Any) -> tuple[Any, Any, Any]:
    """Return keys, values and queries that agree, without a graph, every element finite."""
    found = []
    for name, value in (("keys", keys), ("values", values), ("queries", queries)):
        if not on_other_device(name, value):
            View(name, value, contiguous=False)
        elif str(value.dtype).removeprefix("torch.") not in ("float32", "float16", "bfloat16"):
            raise TypeError(f"{name}: must be a torch tensor of float32, float16 or bfloat16, not {value.dtype}")
        found.append(resolved(name, value) if is_torch(value) else plain_array(name, value, "numbers"))
    keys, values, queries = found
    if is_torch(keys) != is_torch(values) or keys.dtype != values.dtype or _device(keys) != _device(values):
        raise TypeError(f"values: must be of the same kind as keys, on one device; {_kinds(values, keys)}")
    if is_torch(keys) != is_torch(queries) or _device(keys) != _device(queries):
        raise TypeError(f"queries: must be in the same library as keys, on one device; {_kinds(queries, keys)}")
    if keys.ndim != 3 or 0 in keys.shape:
        shape = tuple(keys.shape)
        raise ValueError(f"keys: has shape {shape}, must be (kv_heads, n, head_dim) with one or more of each")
    if values.shape != keys.shape:
        raise ValueError(f"values: has shape {tuple(values.shape)}, must be that of keys, {tuple(keys.shape)}")
    heads, _, head_dim = keys.shape
    if queries.ndim != 3 or queries.shape[0] != heads or queries.shape[2] != head_dim or queries.shape[1] == 0:
        raise ValueError(
            f"queries: has shape {tuple(queries.shape)}, must be ({heads}, N, {head_dim}) with one query or more"
        )
    for name, value in (("keys", keys), ("values", values), ("queries", queries)):
        _finite(name, value)
    return keys, values, queries


def _device(value: Any) -> Any:
    return value.device if is_torch(value) else None


def _kinds(value: Any, keys: Any) -> str:
    shown = [
        f"{type(one).__name__} of {one.dtype}" + (f" on {one.device}" if is_torch(one) else "") for one in (value, keys)
    ]
    return f"they are {shown[0]} and {shown[1]}"


def _finite(name: str, value: Any) -> None:
    """Refuse elements that are NaN or infinite."""
    if is_torch(value):
        if math.isfinite(float(value.sum(dtype=torch_module().float32))):  # so are all: isfinite takes 60 times as long
            return
        wrong = ~torch_module().isfinite(value)
    else:
        wrong = ~np.isfinite(value)
    if bool(wrong.any()):
        first = tuple(np.argwhere(_as_array(wrong))[0].tolist())
        raise ValueError(f"{name}[{', '.join(map(str, first))}] = {float(value[first])}: every element must be finite")


def _normaliser(lse: Any, queries: Any) -> Any:
    """Return `lse` in float32 where the queries are."""
    if not is_torch(queries):
        array: Any = float32_array("lse", lse, 2)
    elif is_torch(lse) and lse.device == queries.device:
        array = resolved("lse", lse).float()
    else:
        array = torch_module().from_numpy(float32_array("lse", lse, 2)).to(queries.device)
    if tuple(array.shape) != tuple(queries.shape[:2]):
        raise ValueError(f"lse: has shape {tuple(array.shape)}, must be one number a query, {tuple(queries.shape[:2])}")
    _finite("lse", array)
    return array


def _kept(kept: Any, heads: int, n: int) -> tuple[npt.NDArray[np.uint32], list[int]]:
    """Return the kept positions as rows of one width, and how many each head has."""
    if is_torch(kept):
        kept = plain_array("kept", kept, "integers")
    try:
        len(kept)
    except TypeError:
        raise TypeError(f"kept: must be rows of positions, not {type(kept).__name__}") from None
    positions, counts = ascending_rows("kept", kept, heads, n)
    return positions, counts.tolist()


def _protected(protect: Any, heads: int) -> list[int]:
    """Return how many rows each head protects."""
    if isinstance(protect, (list, tuple)) or getattr(protect, "ndim", 0) == 1:
        if len(protect) != heads:
            raise ValueError(f"protect: has {len(protect)} numbers, must have one per KV head, {heads}")
        return [at_least(f"protect[{head}]", one, 0) for head, one in enumerate(protect)]
    return [at_least("protect", protect, 0)] * heads
