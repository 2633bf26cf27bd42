"""What a value can do to the output of its layer: ``||W_O V_i||``, from the layer's own output projection."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

#: What each output projection has computed for how many parts, beside the weights that it was computed from.
_products: weakref.WeakKeyDictionary[torch.nn.Module, dict[int, tuple[Any, torch.Tensor]]] = weakref.WeakKeyDictionary()


def value_weights(projection: torch.nn.Module, values: torch.Tensor, q_heads: int) -> torch.Tensor:
    """Return the norm of each value behind the output projection, the mean over the query heads of its KV head.

    Parameters
    ----------
    projection
        What turns the outputs of all query heads, ``q_heads * value_dim`` numbers, into the layer's output.
    values
        ``(..., kv_heads, n, value_dim)``.
    q_heads
        Query heads, a multiple of the KV heads.

    Returns
    -------
    torch.Tensor
        ``(..., kv_heads, n)`` float32.
    """
    kv_heads, value_dim = values.shape[-3], values.shape[-1]
    products = projection_products(projection, q_heads, value_dim).to(values.device)
    grouped = products.unflatten(0, (kv_heads, -1))  # (kv_heads, group, value_dim, value_dim)
    total = torch.zeros(values.shape[:-1], dtype=torch.float32, device=values.device)
    for head, group in enumerate(grouped):
        given = values[..., head, :, :].float()
        for query_head in group:
            # v G v. Rounding may leave less than 0 where the norm is 0.
            total[..., head, :] += ((given @ query_head) * given).sum(dim=-1).clamp_(min=0).sqrt_()
    return total.div_(grouped.shape[1])


def projection_products(projection: torch.nn.Module, parts: int, width: int, *, remember: bool = True) -> torch.Tensor:
    """Return ``W^T W`` of each part of the projection's inputs: what a difference there does to the layer's output.

    Parameters
    ----------
    projection
        As for :func:`value_weights`.
    parts, width
        How many parts, of how many inputs each: query heads, the groups of KV heads, or all heads as one.
    remember
        Whether the next call for so many parts finds it computed, unless the weights changed.

    Returns
    -------
    torch.Tensor
        ``(parts, width, width)`` float32.
    """
    weight = _weight(projection)
    mark = None if weight is None else (weight.data_ptr(), weight._version, weight.dtype, width)
    known = _products.get(projection, {}).get(parts)
    if known is not None and mark is not None and known[0] == mark:
        return known[1]
    with torch.inference_mode(False), torch.no_grad():
        read = (lambda first, end: weight[:, first:end].float()) if weight is not None else _asked(projection)
        columns = [read(part * width, (part + 1) * width) for part in range(parts)]
        products = torch.stack([one.mT @ one for one in columns])
    if mark is not None and remember:
        _products.setdefault(projection, {})[parts] = mark, products
    return products


def _weight(projection: torch.nn.Module) -> torch.Tensor | None:
    """Return the weights ``(out, in)``. None: only the module itself knows how they are stored, or adds others."""
    weight = getattr(projection, "weight", None)
    if type(projection) not in (torch.nn.Linear, Conv1D) or not isinstance(weight, torch.Tensor):
        return None
    weight = weight.detach()
    if hasattr(weight, "to_local"):  # this rank's part, whose columns are its heads
        weight = weight.to_local()
    if not weight.is_floating_point() or weight.is_meta:
        return None
    return weight.mT if type(projection) is Conv1D else weight


def _asked(projection: torch.nn.Module) -> Callable[[int, int], torch.Tensor]:
    """Return a function that gives some columns of the weights, by what the projection makes of unit vectors.

    Quantised weights and adapters are read like this, whatever they are.
    """
    reference = next((tensor for tensor in (*projection.parameters(), *projection.buffers())), None)
    device = torch.device("cpu") if reference is None else reference.device
    dtypes = [tensor.dtype for tensor in projection.parameters() if tensor.is_floating_point()]
    dtype = dtypes[0] if dtypes and dtypes[0].itemsize > 1 else torch.get_default_dtype()
    width = int(getattr(projection, "in_features", getattr(projection, "nx", 0)))
    none = projection(torch.zeros(1, width, dtype=dtype, device=device)).float()

    def read(first: int, end: int) -> torch.Tensor:
        units = torch.zeros(end - first, width, dtype=dtype, device=device)
        units[range(end - first), range(first, end)] = 1
        return (projection(units).float() - none).mT

    return read
