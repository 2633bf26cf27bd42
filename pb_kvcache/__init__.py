"""KV-cache budgeting and eviction: how many positions each layer of a decoder keeps, and which ones."""

from __future__ import annotations

from . import _start as _start  # first: all others take time in which the program may be interrupted

try:
    from ._native import ffi as _ffi
    from ._native import lib as _lib
except ModuleNotFoundError as error:  # usually Python found a source tree before the installed package
    raise ImportError(
        f"{__file__}: the package beside this file has no compiled module. If this is a source tree, run from another "
        "folder to use the installed package, or compile it in place: pip install -e ."
    ) from error

from ._adakv import adakv_budgets
from ._baselines import H2O, TOVA, FullCache, Scissorhands, SlidingWindow, StreamingLLM
from ._blocks import BlockMoves, block_moves, block_select, to_blocks, to_mask, to_ranges
from ._budget import pyramid_budget, pyramid_budgets
from ._choose import select_top
from ._compact import compact
from ._curves import CurveSet
from ._divide import divide
from ._engine_export import engine_export, save_engine_export
from ._errors import CacheFullError
from ._groups import LayerGroup, LayerGroups
from ._head_plan import HeadPlan
from ._merge import merge
from ._plan import LayerPlan, plan
from ._plan_file import load_plan, save_plan
from ._policy import LayerCache, Policy
from ._pool import pool_scores
from ._predicted_loss import predicted_loss
from ._pyramidkv import PyramidKV
from ._qk import scores_from_qk
from ._query_moments import QueryMoments, query_moments
from ._score import window_scores
from ._scores import expected_scores, keydiff_scores, mixed_scores, repeat_scores
from ._select import select, select_from_scores
from ._selection import Selection
from ._snapkv import SnapKV
from ._stack import PyramidStack, StackLayer

__version__ = str(_ffi.string(_lib.pb_kvcache_version()), "ascii")

__all__ = [
    "H2O",
    "TOVA",
    "BlockMoves",
    "CacheFullError",
    "CurveSet",
    "FullCache",
    "HeadPlan",
    "LayerCache",
    "LayerGroup",
    "LayerGroups",
    "LayerPlan",
    "Policy",
    "PyramidKV",
    "PyramidStack",
    "QueryMoments",
    "Scissorhands",
    "Selection",
    "SlidingWindow",
    "SnapKV",
    "StackLayer",
    "StreamingLLM",
    "__version__",
    "adakv_budgets",
    "block_moves",
    "block_select",
    "compact",
    "divide",
    "engine_export",
    "expected_scores",
    "keydiff_scores",
    "load_plan",
    "merge",
    "mixed_scores",
    "plan",
    "pool_scores",
    "predicted_loss",
    "pyramid_budget",
    "pyramid_budgets",
    "query_moments",
    "repeat_scores",
    "save_engine_export",
    "save_plan",
    "scores_from_qk",
    "select",
    "select_from_scores",
    "select_top",
    "to_blocks",
    "to_mask",
    "to_ranges",
    "window_scores",
]
