"""PyramidKV inside transformers models: every layer holds its own share of the cache (arXiv 2406.02069).

>>> from pb_kvcache.transformers import PyramidKVCache, use          # doctest: +SKIP
>>> use(model)                                                       # doctest: +SKIP
>>> cache = PyramidKVCache(model.config, budget=512)                 # doctest: +SKIP
>>> model.generate(**inputs, past_key_values=cache)                  # doctest: +SKIP

The prompt is read with full attention. After each layer's attention the positions that the last queries looked at
are kept, as many as the layer's budget says, and the rest is freed. Positions stay absolute, so rotary phases stay
right. Needs the extra ``transformers`` (``pip install 'pb-kvcache[transformers]'``): torch, and transformers from 4.57
to before 6.
"""

from __future__ import annotations

try:
    import torch as _torch
    import transformers as _transformers
except ImportError as _error:
    raise ImportError(
        f"pb_kvcache.transformers needs torch and transformers: pip install 'pb-kvcache[transformers]' ({_error})"
    ) from _error

from ._cache import PyramidKVCache
from ._report import LayerReport, Report
from ._use import use

__all__ = ["LayerReport", "PyramidKVCache", "Report", "use"]

del _torch, _transformers
