"""Modules that an extra brings, imported where they are used."""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any


def extra(module: str, what: str = "recording") -> Any:
    """Import a module of the extra ``transformers``, or say that `what` needs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{what} needs {module}, which is not installed: pip install 'pb-kvcache[transformers]'"
        ) from error


def versions() -> dict[str, str]:
    """Return the versions of what runs a model."""
    found = {}
    for package in ("pb-kvcache", "torch", "transformers", "tokenizers", "gguf", "numpy"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
