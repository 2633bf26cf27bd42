"""What a value can do to the output of its layer: ``||W_O V_i||``, from the layer's own output projection."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

#: What each output projection has computed, beside the weights that it was computed from.
_products: weakref.WeakKeyDictionary[torch.nn.Module, tuple[Any, torch.Tensor]] = weakref.WeakKeyDictionary()


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
    products = _of_heads(projection, q_heads, value_dim).to(values.device)
    grouped = products.unflatten(0, (kv_heads, -1))  # (kv_heads, group, value_dim, value_dim)
    total = torch.zeros(values.shape[:-1], dtype=torch.float32, device=values.device)
    for head, group in enumerate(grouped):
        given = values[..., head, :, :].float()
        for query_head in group:
            # v G v. Rounding may leave less than 0 where the norm is 0.
            total[..., head, :] += ((given @ query_head) * given).sum(dim=-1).clamp_(min=0).sqrt_()
    return total.div_(grouped.shape[1])


def _of_heads(projection: torch.nn.Module, q_heads: int, value_dim: int) -> torch.Tensor:
    """Return ``W_O,q^T W_O,q`` of each query head, ``(q_heads, value_dim, value_dim)`` float32, once a projection."""
    weight = _weight(projection)
    mark = None if weight is None else (weight.data_ptr(), weight._version, weight.dtype, q_heads)
    known = _products.get(projection)
    if known is not None and mark is not None and known[0] == mark:
        return known[1]
    with torch.inference_mode(False), torch.no_grad():
        read = (lambda first, end: weight[:, first:end].float()) if weight is not None else _asked(projection)
        heads = [read(head * value_dim, (head + 1) * value_dim) for head in range(q_heads)]
        products = torch.stack([columns.mT @ columns for columns in heads])
    if mark is not None:
        _products[projection] = mark, products
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
