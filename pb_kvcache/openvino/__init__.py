"""Budgets inside OpenVINO: a paged cache for each layer, at its own length, on a CPU.

>>> from pb_kvcache.openvino import PagedModel                       # doctest: +SKIP
>>> model = PagedModel("smollm2.gguf", budget=512)                   # doctest: +SKIP
>>> model.generate(["The capital of France is"], 20)                 # doctest: +SKIP

Needs openvino, and openvino-genai for GGUF files and text: the extra ``openvino``
(``pip install 'pb-kvcache[openvino]'``).
"""

from __future__ import annotations

try:
    import openvino as _openvino
except ImportError as _error:
    raise ImportError(f"pb_kvcache.openvino needs openvino: pip install 'pb-kvcache[openvino]' ({_error})") from _error

from ._blocks import BlockPool
from ._model import PagedModel

__all__ = ["BlockPool", "PagedModel"]

del _openvino
