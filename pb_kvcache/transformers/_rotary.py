"""The rotation that a layer's queries and keys have got, undone and carried on to the next positions.

An attention function sees queries after their rotary embedding. Scores of the queries to come need them before it. The
model hands every attention module the cosines and sines of the step, which :func:`note` keeps for as long as the step
lasts.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from ._attention import not_compiled

#: Of each attention module, weak references to the step's cosines and sines. Beside the modules, which are pickled.
_told: weakref.WeakKeyDictionary[torch.nn.Module, tuple[Any, Any]] = weakref.WeakKeyDictionary()

#: No dimension is turned: positions are told otherwise, or not at all.
UNTURNED = "unturned"
#: How a rotary embedding pairs up the dimensions that it turns: i with i + half of them, or neighbours.
LAYOUTS = (UNTURNED, "half", "interleaved")


class Rotation:
    """Cosines and sines of consecutive positions of one sequence.

    Parameters
    ----------
    cos, sin
        ``(n, dims)``, as a model has them: each angle twice, one half behind the other or side by side, or once.
    layout
        One of LAYOUTS.
    """

    def __init__(self, cos: torch.Tensor, sin: torch.Tensor, layout: str) -> None:
        self.layout = layout
        half = cos.shape[-1] // 2
        if torch.equal(cos[..., :half], cos[..., half:]):
            cos, sin = cos[..., :half], sin[..., :half]
        elif torch.equal(cos[..., 0::2], cos[..., 1::2]):
            cos, sin = cos[..., 0::2], sin[..., 0::2]
        #: One angle for each pair of dimensions, ``(n, dims / 2)``.
        self.cos, self.sin = cos.float(), sin.float()

    @property
    def dims(self) -> int:
        """Dimensions that are turned. The others come after them."""
        return int(2 * self.cos.shape[-1])

    def halves(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return vectors with their dimensions in the order of the layout "half"."""
        if self.layout != "interleaved":
            return vectors
        turned, others = vectors[..., : self.dims], vectors[..., self.dims :]
        return torch.cat([turned[..., 0::2], turned[..., 1::2], others], dim=-1)

    def part(self, positions: slice | torch.Tensor) -> Rotation:
        """Return that of some of the positions."""
        twin = object.__new__(Rotation)
        twin.layout, twin.cos, twin.sin = self.layout, self.cos[positions], self.sin[positions]
        return twin

    def before(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return what vectors ``(..., n, head_dim)`` were before the rotation, float32, in the layout "half"."""
        halves = self.halves(vectors.float())
        if not self.dims:
            return halves
        first, second = halves[..., : self.dims // 2], halves[..., self.dims // 2 : self.dims]
        square = self.cos * self.cos + self.sin * self.sin  # 1, or that of what scales attention with length
        return torch.cat(
            [
                (first * self.cos + second * self.sin) / square,
                (second * self.cos - first * self.sin) / square,
                halves[..., self.dims :],
            ],
            dim=-1,
        )


def turned(vectors: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return vectors ``(..., n, head_dim)`` of the layout "half" turned by ``(n, dims)``, each angle twice."""
    dims = cos.shape[-1]
    first, second = vectors[..., : dims // 2], vectors[..., dims // 2 : dims]
    crossed = torch.cat([-second, first], dim=-1)
    return torch.cat([vectors[..., :dims] * cos + crossed * sin, vectors[..., dims:]], dim=-1)


def in_model_order(vectors: torch.Tensor, dims: int, layout: str) -> torch.Tensor:
    """Return vectors of the layout "half" with the `dims` that are turned in the order of another."""
    if layout != "interleaved":
        return vectors
    first, second = vectors[..., : dims // 2], vectors[..., dims // 2 : dims]
    return torch.cat([torch.stack([first, second], dim=-1).flatten(-2), vectors[..., dims:]], dim=-1)


class Course:
    """Where the rotation of a prompt goes: its angles at the next positions, from those that were seen.

    Positions follow one another, so that a pair of dimensions turns by the same angle at every step. The last two
    positions tell it to a few units of float32, the first and the last more exactly.
    """

    def __init__(self) -> None:
        self._first: torch.Tensor | None = None  # cos + i sin, complex128, (dims / 2,)
        self._last: torch.Tensor | None = None
        self._step: torch.Tensor | None = None
        self._seen = 0

    def add(self, rotation: Rotation) -> None:
        """Take in the next positions."""
        angles = torch.complex(rotation.cos.double(), rotation.sin.double())
        if not len(angles):
            return
        if self._first is None:
            self._first = angles[0].clone()
        joined = angles if self._last is None else torch.cat([self._last[None], angles])
        if len(joined) > 1:
            self._step = joined[-1] * joined[-2].conj()
        self._last = angles[-1].clone()
        self._seen += len(angles)

    @property
    def nbytes(self) -> int:
        """Bytes of the angles."""
        angles = (self._first, self._last, self._step)
        return sum(int(one.nbytes) for one in angles if one is not None)

    def next(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines of the next positions, ``(count, dims)`` float32, each angle twice.

        Raises
        ------
        ValueError
            Fewer than two positions were seen.
        """
        if self._last is None:
            raise ValueError("prompt: has no position")
        at = torch.arange(1, count + 1, device=self._last.device, dtype=torch.float64)[:, None]
        angles = self._last.angle() + at * self._each()
        size = self._last.abs()
        cos, sin = (torch.cat([wave * size] * 2, dim=-1).float() for wave in (angles.cos(), angles.sin()))
        return cos, sin

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines of turning by so many positions, ``(m, dims)`` float32, each angle twice."""
        angles = positions.double()[:, None] * self._each()
        cos, sin = (torch.cat([wave] * 2, dim=-1).float() for wave in (angles.cos(), angles.sin()))
        return cos, sin

    def _each(self) -> torch.Tensor:
        """Return the angle that each pair of dimensions turns by from one position to the next."""
        if self._first is None or self._last is None or self._step is None:
            raise ValueError("prompt: has one position, must have two or more to tell how the next ones are rotated")
        step, whole = self._step.angle(), (self._last * self._first.conj()).angle()
        steps = self._seen - 1
        turns = torch.round((step * steps - whole) / (2 * torch.pi))
        return (whole + 2 * torch.pi * turns) / steps


@not_compiled
def note(module: torch.nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Keep what an attention module is told of the step's positions: a forward pre-hook."""
    told = options.get("position_embeddings")
    if told is None and len(inputs) > 1:
        told = inputs[1]
    if isinstance(told, tuple) and len(told) == 2 and all(isinstance(part, torch.Tensor) for part in told):
        _told[module] = weakref.ref(told[0]), weakref.ref(told[1])
    else:
        _told.pop(module, None)


def watch(model: torch.nn.Module, classes: tuple[type[torch.nn.Module], ...]) -> list[Any]:
    """Put :func:`note` before every module of some classes, once. Return the handles of those that are new."""
    return [
        module.register_forward_pre_hook(note, with_kwargs=True)
        for module in model.modules()
        if type(module) in classes and note not in module._forward_pre_hooks.values()
    ]


def noting_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules that :func:`note` is put before."""
    return [module for module in model.modules() if note in module._forward_pre_hooks.values()]


def stop_noting(modules: Iterable[torch.nn.Module]) -> None:
    """Take :func:`note` away from modules."""
    for module in modules:
        _told.pop(module, None)
        for key, hook in list(module._forward_pre_hooks.items()):
            if hook is note:
                del module._forward_pre_hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)


def rotation_of(module: torch.nn.Module, row: int, layout: str, new: int) -> Rotation | None:
    """Return the rotation of the `new` positions of one sequence in the step in hand. None where none was told."""
    if layout == UNTURNED:
        still = torch.empty(new, 0)
        return Rotation(still, still, layout)
    told = _told.get(module)
    cos, sin = (None, None) if told is None else (told[0](), told[1]())
    if cos is None or sin is None or cos.dim() != 3 or cos.shape != sin.shape or cos.is_complex():
        return None
    if cos.shape[1] != new:
        return None
    row = row if cos.shape[0] > 1 else 0
    return Rotation(cos[row], sin[row], layout)
