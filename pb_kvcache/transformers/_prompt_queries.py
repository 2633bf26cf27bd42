"""A prompt's queries before rotation, as far as scores and merging need them: their moments, and a sample."""

from __future__ import annotations

from typing import Any

import torch

from .._query_moments import QueryMoments
from .._scores import expected_scores
from ._rotary import Course, Rotation, in_model_order, turned

#: Queries that a sample has for each KV head.
SAMPLE = 96
#: The next positions that a sample is turned to, and those that expected attention is the mean of.
SAMPLE_POSITIONS = 32
EXPECTED_POSITIONS = 256
#: Positions that are turned back together: 32 heads of 128 take 16 MiB.
_TILE = 1024
#: First positions whose queries are not of the moments: theirs are like no others.
LEFT_OUT = 4


class PromptQueries:
    """What is remembered of the queries of one sequence's prompt in one layer, in as many calls as it takes.

    Parameters
    ----------
    kv_heads
        KV heads of the layer.
    moments, sample
        Whether mean and covariance are wanted, and whether a sample is.
    """

    def __init__(self, kv_heads: int, *, moments: bool, sample: bool) -> None:
        self._kv_heads = kv_heads
        self._moments = QueryMoments() if moments else None
        self._sampled: torch.Tensor | None = None  # (kv_heads, sampled, head_dim) before rotation
        self._lots: torch.Tensor | None = None  # (kv_heads, sampled): the lowest are in the sample
        self._wants_sample = sample
        self._course = Course()
        self._layout = ""
        self._seen = 0

    def add(self, query: torch.Tensor, rotation: Rotation) -> None:
        """Take in the queries of the next positions after rotation, ``(q_heads, new, head_dim)``."""
        self._layout = rotation.layout
        self._course.add(rotation)
        for start in range(0, query.shape[1], _TILE):
            part = slice(start, start + _TILE)
            self._add(rotation.part(part).before(query[:, part]))

    def _add(self, before: torch.Tensor) -> None:
        new = before.shape[1]
        skipped = max(0, LEFT_OUT - self._seen)
        if self._moments is not None and new > skipped:
            self._moments.add(before[:, skipped:])
        if self._wants_sample:
            self._draw(before)
        self._seen += new

    def _draw(self, before: torch.Tensor) -> None:
        """Let the queries with the lowest lots be the sample: the same ones however the prompt is cut."""
        heads, new, _ = before.shape
        device = before.device
        at = torch.arange(self._seen, self._seen + new, device=device)
        # A multiplicative hash (Knuth) of position and head, in 32 bits.
        lots = (at * 2654435761 + torch.arange(heads, device=device)[:, None] * 2246822519) % 2**32
        lots = (lots ^ (lots >> 15)) * 2654435761 % 2**32
        lots = lots.unflatten(0, (self._kv_heads, -1)).flatten(1)
        queries = before.unflatten(0, (self._kv_heads, -1)).flatten(1, 2)
        if self._lots is not None and self._sampled is not None:
            lots = torch.cat([self._lots, lots], dim=1)
            queries = torch.cat([self._sampled, queries], dim=1)
        kept = lots.argsort(dim=1, stable=True)[:, :SAMPLE]
        self._lots = lots.gather(1, kept)
        self._sampled = queries.gather(1, kept[..., None].expand(-1, -1, queries.shape[-1]))

    def sample(self) -> torch.Tensor:
        """Return the sample turned to the next positions, in turn, ``(kv_heads, SAMPLE or fewer, head_dim)``."""
        assert self._sampled is not None
        cos, sin = self._course.next(SAMPLE_POSITIONS)
        places = torch.arange(self._sampled.shape[1], device=cos.device) % SAMPLE_POSITIONS
        return in_model_order(turned(self._sampled, cos[places], sin[places]), cos.shape[-1], self._layout)

    def expected(self, keys: torch.Tensor, scale: float) -> torch.Tensor:
        """Return the attention that each of the keys ``(kv_heads, n, head_dim)`` can expect, ``(kv_heads, n)``."""
        assert self._moments is not None
        if not self._moments.count:
            raise ValueError(
                f"selection: expected attention needs a prompt of more than {LEFT_OUT} tokens, and this one has "
                f"{self._seen}"
            )
        cos, sin = self._course.next(EXPECTED_POSITIONS)
        if not cos.shape[-1]:  # nothing is turned: by an angle of 0
            cos, sin = keys.new_ones(1, 2).float(), keys.new_zeros(1, 2).float()
        halves = Rotation(cos, sin, self._layout).halves(keys)
        mean = torch.as_tensor(self._moments.mean, device=keys.device)
        covariance = torch.as_tensor(self._moments.covariance, device=keys.device)
        return expected_scores(halves, mean, covariance, cos, sin, scale=scale)

    def rotary(self, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Turn keys ``(m, head_dim)`` by so many positions, back where they are negative, as merge() asks for it."""
        cos, sin = self._course.at(positions)
        halves = Rotation(cos, sin, self._layout).halves(keys)
        return in_model_order(turned(halves, cos, sin), cos.shape[-1], self._layout)

    @property
    def nbytes(self) -> int:
        """Bytes of the sample, the moments and the rotation's course."""
        tensors: list[Any] = [self._sampled, self._lots]
        held = self._course.nbytes + sum(int(tensor.nbytes) for tensor in tensors if tensor is not None)
        return held if self._moments is None or not self._moments.count else held + self._moments.nbytes
