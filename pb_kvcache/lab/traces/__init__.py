"""Attention traces to replay policies on: synthetic ones of a known effect, and recorded models.

A :class:`Trace` gives one decode step at a time: for every layer the weights that the new token gave to the positions
before it. No trace holds a square matrix per layer. A :class:`PackedTrace` keeps the lower triangle alone, in the
precision in which it was recorded.
"""

from __future__ import annotations

from ._decode_4096 import decode_4096
from ._file import load, save
from ._funnel import funnel
from ._named import named, names, recorded
from ._trace import TOP, PackedTrace, Trace, pack

__all__ = [
    "TOP",
    "PackedTrace",
    "Trace",
    "decode_4096",
    "funnel",
    "load",
    "named",
    "names",
    "pack",
    "recorded",
    "save",
]
