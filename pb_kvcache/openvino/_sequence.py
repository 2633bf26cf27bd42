"""One sequence in the caches of all layers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ._blocks import Blocks


class Sequence:
    """Where the rows of one sequence are, and of which positions they are.

    Attributes
    ----------
    position
        Tokens read so far, which is the next token's position. It never falls, so rotary phases stay right.
    lengths
        Rows held in each layer, ``(num_layers,)`` int64.
    tables
        For each layer the blocks that hold them, in the order of the rows.
    logits
        The last token's, ``(vocab,)`` float32.
    """

    def __init__(self, num_layers: int) -> None:
        self.position = 0
        self.lengths: npt.NDArray[np.int64] = np.zeros(num_layers, np.int64)
        self.tables: list[Blocks] = [np.zeros(0, np.uint32) for _ in range(num_layers)]
        self.logits: npt.NDArray[np.float32] = np.zeros(0, np.float32)
        # Positions of the rows that an eviction left. All later rows follow in their order.
        self._kept: list[npt.NDArray[np.uint32]] | None = None
        self._prompt = 0

    def keep(self, rows: list[npt.NDArray[np.uint32]]) -> None:
        """Note which position each layer's rows are of, after the prompt's eviction."""
        self._kept = rows
        self._prompt = self.position
        self.lengths = np.array([len(row) for row in rows], np.int64)

    def positions(self, layer: int) -> npt.NDArray[np.uint32]:
        """Return the positions that a layer holds, ascending."""
        if self._kept is None:
            return np.arange(self.position, dtype=np.uint32)
        later = np.arange(self._prompt, self.position, dtype=np.uint32)
        return np.concatenate([np.sort(self._kept[layer]), later])
