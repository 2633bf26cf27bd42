"""Bytes that tensors really take."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the memory behind tensors, spare room included. What several of them share counts once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({(storage.device, storage.data_ptr()): storage.nbytes() for storage in storages}.values())
