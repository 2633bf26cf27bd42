"""Budgets inside transformers models: every layer holds its own share of the cache (arXiv 2406.02069).

>>> from pb_kvcache.transformers import use                          # doctest: +SKIP
>>> use(model, budget=512)                                           # doctest: +SKIP
>>> model.generate(**inputs)                                         # doctest: +SKIP

The prompt is read with full attention. After its attention, each layer keeps the positions that the last queries looked
at most, as many as its budget says, and frees the rest. Positions stay absolute, so rotary phases stay right. Needs
torch, and transformers from 4.57 to before 6: the extra ``transformers``
(``pip install 'pb-kvcache[transformers]'``).
"""

from __future__ import annotations

try:
    import torch as _torch
    import transformers as _transformers
except ImportError as _error:
    raise ImportError(
        f"pb_kvcache.transformers needs torch and transformers: pip install 'pb-kvcache[transformers]' ({_error})"
    ) from _error

from ._cache import BudgetedCache, PyramidKVCache
from ._held_prompt import HeldPrompt
from ._loglikelihood import ContinuationScore, loglikelihood
from ._repeat import repetition_scores
from ._report import CacheLayerReport, CacheReport, CacheSequenceReport
from ._use import compressed, use

__all__ = [
    "BudgetedCache",
    "CacheLayerReport",
    "CacheReport",
    "CacheSequenceReport",
    "ContinuationScore",
    "HeldPrompt",
    "PyramidKVCache",
    "compressed",
    "loglikelihood",
    "repetition_scores",
    "use",
]

del _torch, _transformers
