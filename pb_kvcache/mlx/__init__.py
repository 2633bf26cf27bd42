"""Budgets inside mlx-lm: a list of caches, one a layer, each of which keeps its own share of the prompt.

>>> from pb_kvcache.mlx import make_prompt_cache, use                # doctest: +SKIP
>>> cache = make_prompt_cache(use(model), budget=512)                # doctest: +SKIP
>>> mlx_lm.generate(model, tokenizer, prompt, prompt_cache=cache)    # doctest: +SKIP

The prompt is read with full attention. After its last token each layer keeps the positions that the last queries looked
at most, as many as its budget says. Positions stay absolute, so rotary phases stay right. Needs mlx and mlx-lm from
0.32: the extra ``mlx`` (``pip install 'pb-kvcache[mlx]'``).
"""

from __future__ import annotations

try:
    import mlx.core as _mlx
    import mlx_lm.models.cache as _cache_module
except ImportError as _error:
    raise ImportError(f"pb_kvcache.mlx needs mlx and mlx-lm: pip install 'pb-kvcache[mlx]' ({_error})") from _error

from ._cache import BudgetedKVCache
from ._make import end_prompt, make_prompt_cache
from ._use import unuse, use

# mlx_lm.models.cache.load_prompt_cache looks the classes of a file up by name among its own.
_cache_module.BudgetedKVCache = BudgetedKVCache

__all__ = ["BudgetedKVCache", "end_prompt", "make_prompt_cache", "unuse", "use"]

del _mlx, _cache_module
