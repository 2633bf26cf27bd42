"""Tensor parallelism: the heads of a layer divided over ranks, each of which has a contiguous part of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import numpy.typing as npt
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Ranks:
    """The ranks that the heads of a model's layers are divided over, and which of them this process is."""

    size: int = 1
    rank: int = 0
    group: Any = None  # of torch.distributed. None: its default

    @classmethod
    def of(cls, model: PreTrainedModel) -> Ranks:
        """Return what a model says of itself. Releases of transformers from 5.2 on divide heads in order of rank."""
        size = getattr(model, "tp_size", None) or getattr(model, "_tp_size", None) or 1
        if size == 1 or not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return cls(int(size))
        mesh = getattr(model, "_device_mesh", None)
        if mesh is not None and mesh.ndim > 1:
            mesh = mesh["tp"]
        if mesh is None:
            return cls(int(size), torch.distributed.get_rank() % int(size))
        return cls(int(size), int(mesh.get_local_rank()), mesh.get_group())

    def own(self, budgets: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return this rank's part of the last axis, which has all KV heads of a layer."""
        heads = budgets.shape[-1] // self.size
        return budgets[..., self.rank * heads : (self.rank + 1) * heads]

    def part(self, rows: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of :meth:`gathered` ones."""
        return rows.chunk(self.size)[self.rank]

    def gathered(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows of all ranks, in order, from this rank's, of which every rank has as many."""
        if self.size == 1:
            return rows
        parts = [torch.empty_like(rows) for _ in range(self.size)]
        torch.distributed.all_gather(parts, rows.contiguous(), group=self.group)
        return torch.cat(parts)
