"""The traces that have a name, and the recording that ships with the package."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from ..._suggest import did_you_mean
from ._decode_4096 import decode_4096
from ._file import load
from ._funnel import funnel
from ._trace import PackedTrace, Trace

#: Recordings that ship with the package: name -> file in ``pb_kvcache/data``.
_RECORDED = {"smollm2-135m": "smollm2-135m.npz"}


def recorded(name: str = "smollm2-135m") -> PackedTrace:
    """Return a recording that ships with the package: real attention of a real decoder.

    Parameters
    ----------
    name
        ``"smollm2-135m"``: SmolLM2-135M-Instruct, 30 layers, on the opening of the Jargon File. Its ``metadata`` name
        licences and sources.

    Raises
    ------
    ValueError
        Another name. The message lists the known ones.
    """
    if name not in _RECORDED:
        raise ValueError(f"name = {name!r}: no such recording; known: {', '.join(_RECORDED)}")
    return load(Path(__file__).parents[2] / "data" / _RECORDED[name])


_NAMED: dict[str, Callable[[], Trace]] = {
    "smollm2-135m": recorded,
    "decode-4096": decode_4096,
    "funnel": funnel,
    "funnel-flat": lambda: funnel(widths=(7, 7)),
    "funnel-inverted": lambda: funnel(widths=(3, 12)),
}


def names() -> list[str]:
    """Return the names that :func:`named` knows."""
    return list(_NAMED)


def named(name: str | os.PathLike[str]) -> Trace:
    """Return a trace by its name (see :func:`names`), or from a file by its path, which ends in ``.npz``.

    Raises
    ------
    ValueError
        An unknown name. The message lists the known ones.
    OSError, ValueError
        As :func:`load`.
    """
    text = os.fspath(name)
    if text in _NAMED:
        return _NAMED[text]()
    if text.endswith(".npz") or os.sep in text:
        return load(text)
    raise ValueError(
        f"trace = {text!r}: no such trace; known: {', '.join(_NAMED)}, or the path of a .npz recording"
        f"{did_you_mean(text, _NAMED)}"
    )
