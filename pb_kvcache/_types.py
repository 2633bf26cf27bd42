"""Types of the array functions: for type checkers, which read the overloads. Nothing here is used at run time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from typing import TypeAlias

    from torch import Tensor

    from ._selection import Selection

    #: Attention, scores, queries or keys. ml_dtypes' bfloat16 has no type of its own.
    Array: TypeAlias = npt.NDArray[Any]
    Scores: TypeAlias = npt.NDArray[np.float32]
    Positions: TypeAlias = npt.NDArray[np.uint32]
    Integers: TypeAlias = npt.NDArray[np.integer[Any]]
    #: One budget per KV head.
    PerHead: TypeAlias = Sequence[int] | Integers


class ChooseOptions(TypedDict, total=False):
    """What :func:`pb_kvcache.select_from_scores` takes by name."""

    selection: Selection | str | None
    kernel: int
    pooling: str
    edge: str
    sinks: int
    weights: Array | Tensor | None
    window_in_budget: bool
    nan: str


class SelectOptions(ChooseOptions, total=False):
    """What :func:`pb_kvcache.select` may take by name, but for `valid`."""

    window: int | None
    reduce: str
    protect: int | None
    from_logits: bool
    scale: float
    threads: int


class ScoreOptions(TypedDict, total=False):
    """What :func:`pb_kvcache.window_scores` may take by name."""

    selection: Selection | str | None
    reduce: str
    protect: int | None
    from_logits: bool
    scale: float
    nan: str
    threads: int


class ProductOptions(TypedDict, total=False):
    """What :func:`pb_kvcache.scores_from_qk` takes by name."""

    scale: float | None
    selection: Selection | str | None
    reduce: str
    protect: int | None
    nan: str
    threads: int
