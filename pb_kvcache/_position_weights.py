"""Weights of positions: what a selection multiplies their scores by, before they are pooled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ._errors import status_text
from ._native import lib
from ._tensor import View, give


def check_weights_shape(shape: Sequence[int], heads: Sequence[int], scored: int, n: int) -> None:
    """Check that weights have a row for each of the heads, ``(..., kv_heads)``, with a number for each position.

    Raises
    ------
    ValueError
        For another shape than ``(*heads, scored)`` or ``(*heads, n)``.
    """
    if tuple(shape[:-1]) != tuple(heads) or not shape or shape[-1] not in (scored, n):
        wanted = ", ".join(map(str, heads))
        raise ValueError(f"weights: has shape {tuple(shape)}, must be ({wanted}, {scored}) or ({wanted}, {n})")


def require_weights(value_weight: bool, weights: Any) -> None:
    """Refuse a call whose selection rule weighs values and that brings no weights.

    Raises
    ------
    ValueError
        For such a call.
    """
    if value_weight and weights is None:
        raise ValueError("weights: must be given, as the selection has value_weight=True: a norm for each value")


def bad_weight(values: Any, index: Any, where: Any = None) -> ValueError:
    """Return the error for the weight at this index, of an array or a tensor. `where` names another place of it."""
    first = tuple(int(i) for i in index)
    place = first if where is None else where
    return ValueError(
        f"weights[{', '.join(map(str, place))}] = {float(values[first])}: every weight must be finite and >= 0"
    )


def product_too_large(place: Any, score: Any, weight: Any) -> ValueError:
    """Return the error for a score that is finite and not so times its weight."""
    return ValueError(
        f"scores[{', '.join(str(int(i)) for i in place)}] = {float(score):g}: "
        f"is too large for float32 times its weight, {float(weight):g}"
    )


def weights_of(weights: Any, heads: tuple[int, ...], scored: int, n: int) -> npt.NDArray[np.float32] | None:
    """Return checked weights, ``(*heads, scored)`` or ``(*heads, n)`` float32, contiguous. None are None.

    Raises
    ------
    TypeError, ValueError
        For another kind of array or shape. The values are not looked at.
    """
    if weights is None:
        return None
    view = View("weights", weights, ("float32",))
    check_weights_shape(view.shape, heads, scored, n)
    return np.ascontiguousarray(view.owner.numpy() if view.torch else view.owner)


def weights_refusal(
    status: int, weights: npt.NDArray[np.float32], scores: npt.NDArray[np.float32], read: Any = True
) -> Exception:
    """Return the error for a status that weights gave: the first of them that is none, or whose product overflows.

    `weights` has the shape of the scores. `read` broadcasts to it and says which of them were read.
    """
    if status == lib.PB_KVCACHE_ERROR_SELECT_WEIGHT:
        return bad_weight(weights, np.argwhere(~(np.isfinite(weights) & (weights >= 0)) & read)[0])
    if status == lib.PB_KVCACHE_ERROR_SCORE:
        with np.errstate(over="ignore", invalid="ignore"):
            products = scores * weights
        first = tuple(np.argwhere(np.isfinite(scores) & ~np.isfinite(products) & read)[0])
        return product_too_large(first, scores[first], weights[first])
    return RuntimeError(status_text(status))


def weighted_scores(scores: Any, weights: Any, n: int) -> Any:
    """Return scores times the weights of their positions, as the kernels multiply them.

    Parameters
    ----------
    scores
        ``(..., kv_heads, scored)`` float32, an array or a CPU tensor.
    weights
        ``(..., kv_heads, scored)`` or ``(..., kv_heads, n)`` float32.
    n
        How many positions the prompt has.

    Returns
    -------
    numpy.ndarray or torch.Tensor
        Of the scores' kind and shape. A score that is not finite is left as it is.

    Raises
    ------
    TypeError, ValueError
        For a weight that is negative or not finite, a product that is too large, or another kind of array or shape.
    """
    view = View("scores", scores, ("float32",))
    values = view.owner.numpy() if view.torch else view.owner
    rows = weights_of(weights, view.shape[:-1], view.shape[-1], n)
    assert rows is not None
    rows = rows[..., : view.shape[-1]]
    if not (np.isfinite(rows) & (rows >= 0)).all():
        raise weights_refusal(lib.PB_KVCACHE_ERROR_SELECT_WEIGHT, rows, values)
    finite = np.isfinite(values)
    with np.errstate(over="ignore", invalid="ignore"):
        products = np.where(finite, values * rows, values)
    if not np.isfinite(products[finite]).all():
        raise weights_refusal(lib.PB_KVCACHE_ERROR_SCORE, rows, values)
    return give(products, view.torch)
