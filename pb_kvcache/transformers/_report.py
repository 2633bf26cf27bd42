"""What a cache holds, layer by layer: a table for people, a dict for programs."""

from __future__ import annotations

import io
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class CacheLayerReport:
    """What one layer of a cache holds. Positions are counted for the longest sequence of the batch."""

    layer: int
    #: What the layer is, and what was done to it.
    kind: str
    #: Positions that the plan gives it. None: no plan applies.
    budget: int | None
    #: Tokens seen.
    seen: int
    #: Positions held per KV head.
    kept: int
    evicted: int
    #: Bytes held, spare room and bookkeeping included.
    nbytes: int
    #: Bytes that a full cache would take.
    nbytes_full: int


@dataclass(frozen=True)
class CacheReport:
    """What all layers of a cache hold. ``str()`` is a table."""

    settings: str
    attention: str
    layers: tuple[CacheLayerReport, ...]

    @property
    def nbytes(self) -> int:
        """Bytes held by all layers."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def nbytes_full(self) -> int:
        """Bytes that full caches would take."""
        return sum(layer.nbytes_full for layer in self.layers)

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers and strings."""
        return {**asdict(self), "nbytes": self.nbytes, "nbytes_full": self.nbytes_full}

    def __str__(self) -> str:
        table = Table(box=None, pad_edge=False)
        for name in ("layer", "budget", "seen", "kept", "evicted", "MB held", "MB full"):
            table.add_column(name, justify="right")
        table.add_column("what ran")
        for layer in self.layers:
            table.add_row(
                str(layer.layer),
                "-" if layer.budget is None else str(layer.budget),
                str(layer.seen),
                str(layer.kept),
                str(layer.evicted),
                f"{layer.nbytes / 1e6:.3f}",
                f"{layer.nbytes_full / 1e6:.3f}",
                layer.kind,
            )
        share = self.nbytes / self.nbytes_full if self.nbytes_full else 1.0
        out = io.StringIO()
        console = Console(file=out, width=120, color_system=None)
        console.print(f"PyramidKVCache: {self.settings}")
        console.print(table)
        console.print(
            f"{self.nbytes / 1e6:.3f} MB held, {self.nbytes_full / 1e6:.3f} MB for a full cache ({share:.1%}); "
            f"attention: {self.attention}"
        )
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())
