"""What a cache holds, layer by layer: a table for people, a dict for programs."""

from __future__ import annotations

import io
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

#: What stands below the table where it costs time. The figures are those of docs/transformers.md.
_EAGER = (
    "eager attention makes every weight of the prompt: SmolLM2-135M reads 1,024 tokens in 1.8 times sdpa's time. Where "
    "the model has it: use(model, attention='sdpa')"
)


@dataclass(frozen=True)
class CacheSequenceReport:
    """What one layer holds of one sequence of the batch."""

    #: Positions that the plan gives it, the most of any KV head. None: the prompt has not ended.
    budget: int | None
    #: Positions that the plan gives every KV head. Empty: the prompt has not ended.
    head_budgets: tuple[int, ...]
    #: Tokens seen, padding not counted.
    seen: int
    #: Positions held, and positions gone, for every KV head.
    kept: tuple[int, ...]
    evicted: tuple[int, ...]
    #: What chose the positions.
    what: str


@dataclass(frozen=True)
class CacheLayerReport:
    """What one layer of a cache holds. Counts of positions are the most of any sequence and KV head."""

    layer: int
    #: What the layer is, and what was done to it.
    kind: str
    #: Positions that the plan gives it. None: no plan applies.
    budget: int | None
    #: Tokens seen.
    seen: int
    #: Positions held in a KV head.
    kept: int
    evicted: int
    #: Bytes held, spare room and bookkeeping included.
    nbytes: int
    #: Bytes that a full cache would take.
    nbytes_full: int
    #: Every sequence of the batch. Empty for a layer that is not compressed, or before the first token.
    sequences: tuple[CacheSequenceReport, ...]


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
                "-"
                if layer.budget is None
                else _range([count for sequence in layer.sequences for count in sequence.head_budgets], layer.budget),
                _range([sequence.seen for sequence in layer.sequences], layer.seen),
                _range([count for sequence in layer.sequences for count in sequence.kept], layer.kept),
                _range([count for sequence in layer.sequences for count in sequence.evicted], layer.evicted),
                f"{layer.nbytes / 1e6:.3f}",
                f"{layer.nbytes_full / 1e6:.3f}",
                layer.kind,
            )
        share = self.nbytes / self.nbytes_full if self.nbytes_full else 1.0
        out = io.StringIO()
        console = Console(file=out, width=120, color_system=None)
        console.print(self.settings)
        console.print(table)
        console.print(
            f"{self.nbytes / 1e6:.3f} MB held, {self.nbytes_full / 1e6:.3f} MB for a full cache ({share:.1%}); "
            f"attention: {self.attention}"
        )
        if self.attention == "eager":
            console.print(_EAGER)
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def _range(counts: list[int], most: int) -> str:
    """Return the counts of all sequences and heads: one number where they agree."""
    if not counts or min(counts) == max(counts):
        return str(most)
    return f"{min(counts)} to {max(counts)}"
