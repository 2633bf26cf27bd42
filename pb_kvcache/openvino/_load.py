"""A model and its tokenizer from an IR folder or a GGUF file."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from ._core import core
from ._genai import genai

_MODEL = "openvino_model.xml"


def load(path: str | os.PathLike[str], ir: str | os.PathLike[str] | None) -> tuple[Any, Any]:
    """Return an OpenVINO model, and its tokenizer or the folder that may hold one.

    Parameters
    ----------
    path
        A folder with ``openvino_model.xml``, or a ``.gguf`` file, which openvino-genai reads.
    ir
        For a GGUF file: a folder in which the IR made of it stays, and is looked for the next time.

    Raises
    ------
    FileNotFoundError
        There is nothing at `path`, or the folder holds no model.
    ValueError
        `path` is something else, or openvino-genai cannot read it.
    """
    given = Path(path)
    if not given.exists():
        raise FileNotFoundError(f"path = {os.fspath(path)!r}: there is no such folder or file")
    if given.is_dir():
        if ir is not None:
            raise ValueError("ir: is for a GGUF file, and path is a folder")
        return _read(given), given
    if given.suffix.lower() != ".gguf":
        raise ValueError(f"path = {os.fspath(path)!r}: must be a folder with {_MODEL}, or a .gguf file")
    if ir is None:
        with tempfile.TemporaryDirectory() as folder:
            return _convert(given, Path(folder))
    if (Path(ir) / _MODEL).exists():
        return _read(Path(ir)), Path(ir)
    Path(ir).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ir) as folder:
        found = _convert(given, Path(folder))
        for file in Path(folder).glob("openvino_*"):
            if file.name != _MODEL:
                file.replace(Path(ir) / file.name)
        (Path(folder) / _MODEL).replace(Path(ir) / _MODEL)  # the last one: it says that the others are there
    return found


def _read(folder: Path) -> Any:
    if not (folder / _MODEL).exists():
        raise FileNotFoundError(f"path = {str(folder)!r}: has no {_MODEL}")
    return core().read_model(folder / _MODEL)


def _convert(file: Path, folder: Path) -> tuple[Any, Any]:
    """Let openvino-genai read a GGUF file: it writes the IR beside the file, so the file is put into `folder`."""
    module = genai("path: a .gguf file")
    beside = folder / "model.gguf"
    try:
        beside.symlink_to(file.resolve())
    except OSError:  # a system without links
        shutil.copyfile(file, beside)
    try:
        tokenizer = module.LLMPipeline(str(beside), "CPU", enable_save_ov_model=True).get_tokenizer()
    except RuntimeError as error:
        raise ValueError(f"path = {str(file)!r}: openvino-genai cannot read it: {error}") from None
    finally:
        beside.unlink()
    return _read(folder), tokenizer
