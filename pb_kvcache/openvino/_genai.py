"""openvino-genai, where it is needed."""

from __future__ import annotations

import importlib
from typing import Any


def genai(what: str) -> Any:
    """Return the module openvino_genai, or say that `what` needs it."""
    try:
        return importlib.import_module("openvino_genai")
    except ImportError as error:
        raise ImportError(f"{what} needs openvino_genai: pip install 'pb-kvcache[openvino]' ({error})") from None
