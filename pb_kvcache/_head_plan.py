"""A budget for every layer and KV head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ._checks import UINT32_MAX
from ._dtypes import cache_nbytes
from ._plan import LayerPlan, plan
from ._tensor import plain_array

#: From the smallest budget to the largest, in :meth:`HeadPlan.picture`.
SHADES = "▁▂▃▄▅▆▇█"


class HeadPlan:
    """What every KV head of every layer keeps.

    Parameters
    ----------
    budgets
        Positions, integers above 0 of shape ``(num_layers, num_kv_heads)``. Copied.

    Attributes
    ----------
    budgets
        The same, uint32, read-only.

    Raises
    ------
    TypeError, ValueError
        `budgets` is not such an array. The message names the place.

    Examples
    --------
    >>> HeadPlan([[40, 8], [24, 24]]).layer_plan().budgets
    array([24, 24], dtype=uint32)
    """

    budgets: npt.NDArray[np.uint32]

    def __init__(self, budgets: npt.ArrayLike) -> None:
        array = plain_array("budgets", budgets, "integers")
        if array.ndim != 2 or array.size == 0:
            raise ValueError(f"budgets: has shape {array.shape}, must be (num_layers, num_kv_heads) with one or more")
        if array.dtype.kind not in "iu":
            raise TypeError(f"budgets: must be integers, not of dtype {array.dtype}")
        outside = (array < 1) | (array > UINT32_MAX)
        if outside.any():
            layer, head = (int(index) for index in np.argwhere(outside)[0])
            raise ValueError(f"budgets[{layer}, {head}] = {array[layer, head]}: must be between 1 and {UINT32_MAX}")
        self.budgets = array.astype(np.uint32)
        self.budgets.flags.writeable = False

    @property
    def num_layers(self) -> int:
        """Layers."""
        return int(self.budgets.shape[0])

    @property
    def num_kv_heads(self) -> int:
        """KV heads of a layer."""
        return int(self.budgets.shape[1])

    @property
    def total(self) -> int:
        """Positions in all heads of all layers: the sum of the budgets."""
        return int(self.budgets.sum(dtype=np.uint64))

    @property
    def offsets(self) -> npt.NDArray[np.uint64]:
        """Where each head begins in one arena, layer by layer, and at the end the total: ``(layers * heads + 1,)``."""
        offsets = np.zeros(self.budgets.size + 1, np.uint64)
        np.cumsum(self.budgets, dtype=np.uint64, out=offsets[1:])
        return offsets

    def layer_plan(self) -> LayerPlan:
        """Return a plan that gives all heads of a layer the same, for engines that need that.

        Each layer's budget is the mean of its heads'. Where :attr:`total` is not a whole number of positions for every
        head, what is over is left out: fewer than ``num_kv_heads`` positions of one head.
        """
        per_layer = self.budgets.sum(axis=1, dtype=np.uint64)
        return plan(self.num_layers, total=self.total // self.num_kv_heads, weights=per_layer.astype(np.float64))

    def nbytes(self, head_dim: int, dtype: Any = "float16") -> int:
        """Return the bytes of all keys and values, as :meth:`LayerPlan.nbytes` counts them."""
        return cache_nbytes(self.total, 1, head_dim, dtype)

    def picture(self, shades: str = SHADES, width: int = 80) -> str:
        """Return a picture of the budgets: a line for each KV head, a character for each layer, and a legend.

        Parameters
        ----------
        shades
            Characters from the smallest budget to the largest. They are steps of the logarithm.
        width
            Most characters of a line. Where there are more layers, the others follow below.
        """
        if len(shades) < 2 or width < 20:
            raise ValueError("shades, width: must be two characters or more, and 20 or more")
        logs = np.log2(self.budgets.astype(np.float64))
        low, high = float(logs.min()), float(logs.max())
        steps = np.zeros(logs.shape, int)
        if high > low:
            steps = np.rint((logs - low) / (high - low) * (len(shades) - 1)).astype(int)
        names = [f"head {head}" for head in range(self.num_kv_heads)]
        margin = max(len(names[-1]), len("layer")) + 1
        lines = []
        for start in range(0, self.num_layers, width - margin):
            end = min(self.num_layers, start + width - margin)
            lines.append("layer".ljust(margin) + _scale(start, end))
            for head, name in enumerate(names):
                lines.append(name.ljust(margin) + "".join(shades[step] for step in steps[start:end, head]).rstrip())
        lines.append(f"{shades[0]} {self.budgets.min()} .. {shades[-1]} {self.budgets.max()} positions")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain numbers and lists, ready for JSON."""
        return {
            "num_layers": self.num_layers,
            "num_kv_heads": self.num_kv_heads,
            "total": self.total,
            "budgets": self.budgets.tolist(),
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> HeadPlan:
        """Return the plan whose members :meth:`to_dict` returned, also after a way through JSON.

        Raises
        ------
        TypeError, ValueError
            A member is missing or of the wrong kind, or the numbers do not follow from the budgets.
        """
        if not isinstance(fields, Mapping):
            raise TypeError(f"fields: must be a mapping, as HeadPlan.to_dict returns it, not {type(fields).__name__}")
        needed = ("num_layers", "num_kv_heads", "total", "budgets")
        for name in needed:
            if name not in fields:
                raise ValueError(f"{name}: is missing; a head plan has {', '.join(needed)}")
        rows = fields["budgets"]
        if not isinstance(rows, list) or not all(isinstance(row, list) and len(row) == len(rows[0]) for row in rows):
            raise ValueError("budgets: must be a list of num_layers lists of num_kv_heads integers")
        if any(type(budget) is not int for row in rows for budget in row):
            raise ValueError("budgets: must be integers")
        made = cls(rows)
        for name in needed[:3]:
            if isinstance(fields[name], bool) or fields[name] != getattr(made, name):
                raise ValueError(f"{name} = {fields[name]!r}: must be {getattr(made, name)}, as the budgets have it")
        return made

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, HeadPlan):
            return NotImplemented
        return np.array_equal(self.budgets, other.budgets)

    def __hash__(self) -> int:
        return hash((self.budgets.shape, self.budgets.tobytes()))

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.budgets.flags.writeable = False  # NumPy's pickles and copies forget it

    def __repr__(self) -> str:
        return (
            f"<HeadPlan: {self.num_layers} layers of {self.num_kv_heads} KV heads, {self.budgets.min()} .. "
            f"{self.budgets.max()}, total {self.total}>"
        )

    def __str__(self) -> str:
        """Return a table: a line per layer, a column per head."""
        heads = [f"head {head}" for head in range(self.num_kv_heads)]
        rows = [["layer", *heads, "mean"]]
        for layer, budgets in enumerate(self.budgets.tolist()):
            rows.append([str(layer), *map(str, budgets), f"{sum(budgets) / len(budgets):.1f}"])
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        mean = self.total / self.budgets.size
        lines.append(
            f"total {self.total} positions in {self.num_layers} layers of {self.num_kv_heads} KV heads, {mean:.1f} each"
        )
        return "\n".join(lines)


def _scale(start: int, end: int) -> str:
    """Return the numbers of the layers `start` to `end` above their columns: every tenth, and the first."""
    text = ""
    for layer in range(start, end):
        if (layer == start or layer % 10 == 0) and len(text) <= layer - start:
            text = text.ljust(layer - start) + str(layer) + " "
    return text.rstrip()
