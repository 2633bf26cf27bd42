"""Trace files: a model's attention, every layer, in float16.

An ``.npz`` file (a zip archive of ``.npy`` members) with one member ``metadata`` and one member ``layer_000``,
``layer_001``, ... per layer. ``metadata`` is JSON in UTF-8, as bytes. ``num_layers`` and ``length`` in it give the
shape of the other members. A layer is ``uint8`` of shape ``(2, length * (length - 1) // 2)``: the high bytes and then
the low bytes of the float16 weights, so that deflate finds the exponents side by side. The weights are ordered by
position and then by step: the attention that position 0 got at steps 1, 2, ..., then position 1 at steps 2, 3, ... One
position's weights resemble each other more than one step's do. 512 tokens of the shipped recording deflate to 89 % as
they are, to 81 % as planes, and to 80 % in this order.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..._checks import uint32
from ..._files import replacing
from ..._text import read_json
from ._trace import SUM_LIMIT, PackedTrace, Trace, triangle_size

_FORMAT = "pb_kvcache trace"
_FORMAT_VERSION = 1
#: The most that deflate can shrink anything: 258 bytes in 2 bits. A member that claims more is a lie or a bomb.
_DEFLATE_LIMIT = 1032
_METADATA_LIMIT = 1 << 20


def save(path: str | os.PathLike[str], trace: Trace) -> None:
    """Write a trace file: float16, with the trace's name and metadata inside. The same trace gives the same bytes.

    Weights in another precision are rounded. One layer at a time is held beside the trace itself.

    Raises
    ------
    OSError
        The file cannot be written.
    TypeError, ValueError
        The metadata are not JSON (NaN and infinities are not), or more than 1 MiB of it. A weight is not between 0
        and 1.

    Notes
    -----
    A call that raises leaves a file of that name as it was.
    """
    metadata = {
        **trace.metadata,
        "format": _FORMAT,
        "format_version": _FORMAT_VERSION,
        "name": trace.name,
        "num_layers": trace.num_layers,
        "length": trace.length,
    }
    text = _metadata_text(metadata)
    if len(text) > _METADATA_LIMIT:
        raise ValueError(f"metadata: {len(text)} bytes of JSON, must be at most {_METADATA_LIMIT}")
    with replacing(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        _write_member(archive, "metadata", np.frombuffer(text, np.uint8))
        for layer in range(trace.num_layers):
            weights = trace.layer(layer)
            if not (weights.min() >= 0 and weights.max() <= SUM_LIMIT):  # a NaN makes both false
                raise ValueError(f"{trace.name}: layer {layer} has weights that are not between 0 and 1")
            with np.errstate(under="ignore"):
                weights = weights.astype(np.float16)
            bits = np.concatenate([weights[index] for index in _columns(trace.length)]).view(np.uint16)
            planes = np.stack([(bits >> 8).astype(np.uint8), (bits & 0xFF).astype(np.uint8)])
            _write_member(archive, _member(layer), planes)


def _metadata_text(metadata: dict[str, Any]) -> bytes:
    """Return metadata as the JSON of a trace file."""
    form: dict[str, Any] = {"indent": 1, "sort_keys": True, "allow_nan": False}
    try:
        return json.dumps(metadata, ensure_ascii=False, **form).encode("utf-8")
    except UnicodeEncodeError:  # UTF-8 has no lone surrogates. The name of a file may have one.
        return json.dumps(metadata, **form).encode("ascii")


def _member(layer: int) -> str:
    return f"layer_{layer:03d}"


def _columns(length: int, num_layers: int = 1, layer: int = 0) -> Iterator[npt.NDArray[np.int64]]:
    """Yield for each position where its weights of one layer, step after step, stand among packed triangles."""
    steps = np.arange(length, dtype=np.int64)
    starts = num_layers * (steps * (steps - 1) // 2) + layer * steps
    for pos in range(length - 1):
        yield starts[pos + 1 :] + pos


def _write_member(archive: zipfile.ZipFile, name: str, array: npt.NDArray[np.uint8]) -> None:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array, version=(1, 0), allow_pickle=False)
    # A fixed date and system, so that the bytes depend on the trace alone.
    info = zipfile.ZipInfo(name + ".npy", date_time=(1980, 1, 1, 0, 0, 0))
    info.compress_type = zipfile.ZIP_DEFLATED
    info.create_system = 3
    info.external_attr = 0o644 << 16
    archive.writestr(info, buffer.getvalue())


def load(path: str | os.PathLike[str]) -> PackedTrace:
    """Read a trace file: a user's own recording, or one that ships with the package.

    Sizes are checked against the file's before anything is allocated, no pickles are read, and every weight is checked.

    Raises
    ------
    OSError
        The file cannot be read.
    ValueError
        The file is not a trace, is damaged or cut short, lacks a layer, has one of another shape, or holds weights that
        are not probabilities. The message names the file and what is wrong with it.
    """
    path = Path(path)
    with path.open("rb") as file:
        try:
            with zipfile.ZipFile(file) as archive:
                return _read(archive, path)
        except MemoryError:
            raise
        except _NotATraceError as error:
            raise ValueError(f"{path}: {error}") from None
        except Exception as error:
            # At wrong bytes zipfile, its decompressors and NumPy's header reader raise nearly anything. An OSError is a
            # seek to where no file can be, or what bz2 makes of damaged data.
            raise ValueError(f"{path}: not a trace file, or a damaged one: {error}") from None


class _NotATraceError(Exception):
    """What is wrong with a trace file."""


def _read(archive: zipfile.ZipFile, path: Path) -> PackedTrace:
    raw = _read_member(archive, "metadata", None)
    try:
        metadata = read_json(raw.tobytes())
    except ValueError as error:
        raise _NotATraceError(f"metadata: {error}") from None
    if not isinstance(metadata, dict) or metadata.pop("format", None) != _FORMAT:
        raise _NotATraceError("not a pb_kvcache trace")
    version = metadata.pop("format_version", None)
    if version != _FORMAT_VERSION:
        raise _NotATraceError(f"format_version = {version!r}: this version reads {_FORMAT_VERSION}")
    name = metadata.pop("name", path.stem)
    try:
        num_layers = uint32("num_layers", metadata.pop("num_layers", None))
        length = uint32("length", metadata.pop("length", None))
    except (TypeError, ValueError) as error:
        raise _NotATraceError(str(error)) from None
    # The members are those that the metadata announce, each once.
    expected = {_member(layer) + ".npy" for layer in range(min(num_layers, len(archive.namelist()) + 1))}
    present = {entry for entry in archive.namelist() if entry != "metadata.npy"}
    if len(present) + 1 < len(archive.namelist()):
        raise _NotATraceError("holds a member twice")
    if num_layers == 0 or length < 2:
        raise _NotATraceError(f"{num_layers} layers and {length} positions: must be at least 1 and 2")
    if present != expected:
        missing, extra = sorted(expected - present), sorted(present - expected)
        what = f"{missing[0]} is missing" if missing else f"{extra[0]} does not belong there"
        raise _NotATraceError(f"{num_layers} layers are announced, and {what}")
    # Nothing is allocated before the file's size has made the shape possible.
    pairs = triangle_size(length)
    size = path.stat().st_size
    if 2 * pairs * num_layers > size * _DEFLATE_LIMIT:
        raise _NotATraceError(f"{num_layers} layers of {length} positions cannot come out of a file of {size} bytes")
    weights = np.empty(num_layers * pairs, np.float16)
    for layer in range(num_layers):
        planes = _read_member(archive, _member(layer), pairs)
        values = ((planes[0].astype(np.uint16) << 8) | planes[1]).view(np.float16)
        done = 0
        for index in _columns(length, num_layers, layer):
            weights[index] = values[done : done + len(index)]
            done += len(index)
    try:
        return PackedTrace(str(name), num_layers, length, weights, metadata)
    except (TypeError, ValueError) as error:
        raise _NotATraceError(str(error)) from None


def _read_member(archive: zipfile.ZipFile, name: str, pairs: int | None) -> npt.NDArray[np.uint8]:
    """Return one member, whose shape must be ``(2, pairs)``, or ``(n,)`` with a modest n where `pairs` is None."""
    try:
        info = archive.getinfo(name + ".npy")
    except KeyError:
        raise _NotATraceError(f"not a pb_kvcache trace: it has no member {name}.npy") from None
    with archive.open(info) as member:
        try:
            if np.lib.format.read_magic(member) != (1, 0):
                raise ValueError("not a version 1.0 array")
            shape, fortran, dtype = np.lib.format.read_array_header_1_0(member)
        except ValueError as error:
            raise _NotATraceError(f"{name}.npy: {error}") from None
        wanted = f"(2, {pairs})" if pairs is not None else f"(n,) with n up to {_METADATA_LIMIT}"
        fits = shape == (2, pairs) if pairs is not None else len(shape) == 1 and 0 <= shape[0] <= _METADATA_LIMIT
        if not fits or dtype != np.uint8 or fortran:
            raise _NotATraceError(f"{name}.npy: has shape {shape} and dtype {dtype}, must be {wanted} and uint8")
        count = int(np.prod(shape, dtype=np.int64))
        data = member.read(count + 1)
    if len(data) != count:
        raise _NotATraceError(f"{name}.npy: holds {len(data)} bytes or more, must be {count}")
    return np.frombuffer(data, np.uint8).reshape(shape)
