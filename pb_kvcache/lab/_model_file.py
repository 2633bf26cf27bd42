"""What is known of a model from its file, for the record."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from ._extra import extra


def sha256(path: Path) -> str:
    """Return the digest of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def gguf_fields(path: Path) -> dict[str, Any]:
    """Return what a GGUF file says of its model: name, licence, ..."""
    reader = extra("gguf").GGUFReader(path)
    wanted = {
        "general.name": "name_in_file",
        "general.license": "licence",
        "general.architecture": "architecture",
        "tokenizer.ggml.add_bos_token": "add_bos_token",
    }
    return {ours: reader.fields[theirs].contents() for theirs, ours in wanted.items() if theirs in reader.fields}
