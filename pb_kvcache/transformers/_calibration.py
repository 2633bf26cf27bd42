"""What a model loses on one prompt by what its heads evict: output errors of every head, outcomes of every layer."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache, PreTrainedModel

from .._selection import Selection
from ._attention import as_added
from ._context_layer import ContextLayer
from ._forward import checked_ids, forward
from ._held_prompt import HeldPrompt
from ._output_error import output_differences, output_errors
from ._probe import facts_of
from ._selection import Scoring
from ._use import unwrapped
from ._value_weights import projection_products


@dataclass(frozen=True)
class PromptCurves:
    """What was measured after one prompt.

    Attributes
    ----------
    head_errors
        What each KV head changes of its layer's output, a part of the squared norm of the residual stream before the
        layer, ``(layers, kv_heads, points)``.
    layer_errors
        The same of all heads of a layer together, ``(layers, points)``.
    outcomes
        KL from the full cache, in nats a token, where one layer alone keeps so many positions,
        ``(layers, outcome points)``. None: not measured.
    """

    head_errors: npt.NDArray[np.float64]
    layer_errors: npt.NDArray[np.float64]
    outcomes: npt.NDArray[np.float64] | None


class _JudgedLayer(ContextLayer):
    """A layer's prompt, in the order in which a rule keeps its positions."""

    def __init__(
        self, keys: torch.Tensor, values: torch.Tensor, order: torch.Tensor, grid: Sequence[int], projection: str
    ) -> None:
        rows = order[None, :, :, None]
        super().__init__(
            keys.gather(2, rows.expand(-1, -1, -1, keys.shape[-1])),
            values.gather(2, rows.expand(-1, -1, -1, values.shape[-1])),
        )
        self._grid = grid
        self._projection = projection
        self.judging = False
        self.residual: torch.Tensor | None = None  # squared norms of what enters the block, (judged,)
        self.kept: torch.Tensor | None = None  # how many rows each sequence of the batch sees. None: all
        self.head_errors: torch.Tensor | None = None
        self.layer_errors: torch.Tensor | None = None

    def watch(
        self,
        module: torch.nn.Module,
        stock: Callable[..., Any],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        additive: bool,
        options: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Do the attention over as many rows as are kept, and measure its errors while that is asked for."""
        new, rows = query.shape[2], key.shape[2]
        n = rows - new
        options = {name: one for name, one in options.items() if name != "is_causal"}
        allowed = torch.ones(new, rows, dtype=torch.bool, device=key.device).tril_(n)[None, None]
        if self.kept is not None:
            column = torch.arange(rows, device=key.device)
            hidden = (column >= self.kept.to(key.device)[:, None]) & (column < n)
            allowed = allowed & ~hidden[:, None, None]
        if self.judging:
            with torch.autocast(query.device.type, enabled=False):
                self._judge(module, query[0], key[0, :, n:], value[0, :, n:], options)
        return stock(module, query, key, value, as_added(allowed, query.dtype) if additive else allowed, **options)  # type: ignore[no-any-return]

    def _judge(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        options: dict[str, Any],
    ) -> None:
        assert self.keys is not None
        assert self.values is not None
        kv_heads = self.keys.shape[1]
        differences = output_differences(
            query,
            (keys, values),
            (self.keys[0], self.values[0]),
            None,
            self._grid,
            Scoring.from_options(options, query.shape[-1]),
        )
        projection = module.get_submodule(self._projection)
        width = differences.shape[1] * differences.shape[3]
        assert self.residual is not None
        for name, parts, keep in (("head_errors", kv_heads, True), ("layer_errors", 1, False)):
            products = projection_products(projection, parts, width // parts, remember=keep)
            errors = output_errors(differences, products) / self.residual.to(differences.device)
            # A token whose embedding is 0, such as padding, has no residual stream to compare with in the first layer.
            setattr(self, name, errors[..., self.residual.to(errors.device) > 0].mean(dim=-1))


def prompt_curves(
    model: Any,
    prompt: HeldPrompt,
    tokens: Any,
    *,
    selection: Selection,
    grid: Sequence[int],
    outcome_grid: Sequence[int] = (),
    progress: Callable[[int, int], object] | None = None,
) -> PromptCurves:
    """Measure what the tokens after a prompt lose where positions of it are evicted.

    Parameters
    ----------
    model
        The transformers model that read the prompt.
    prompt
        The prompt.
    tokens
        Tokens after it, which are read with the full cache and judged, ``(judged,)``.
    selection
        The rule that ranks positions.
    grid
        Budgets, ascending. The last one is the prompt's length, the first one above what the rule always keeps.
    outcome_grid
        Those of them at which each layer is compressed alone. Empty: outcomes are not measured.
    progress
        Called with how many layers are done and how many there are. Once where outcomes are not measured.

    Raises
    ------
    TypeError, ValueError
        An argument that breaks a rule, or a model whose layers are not modules in a list or have no output projection.
    """
    inner = unwrapped(model)
    ids = checked_ids("tokens", tokens, int(inner.get_input_embeddings().weight.shape[0]))
    if not ids:
        raise ValueError("tokens: is empty, must have at least one token")
    if not set(outcome_grid) <= set(grid):
        raise ValueError(f"outcome_grid: has {sorted(set(outcome_grid) - set(grid))}, must be points of grid")
    facts = facts_of(inner.config)
    read, layers = prompt.taken(budget=selection.always_kept + 1, selection=selection)
    if facts is None or any(facts.layers[layer.model_layer].projection is None for layer in layers):
        raise ValueError("model: the output projections of its layers are not known, which output errors need")
    blocks = _blocks(inner, len(read.layers))
    judged: dict[int, _JudgedLayer] = {}
    with torch.inference_mode():
        for layer in layers:
            projection = facts.layers[layer.model_layer].projection
            assert projection is not None
            judged[layer.model_layer] = _JudgedLayer(*layer.held(), layer.ranked(list(grid)), grid, projection)
        fed = torch.tensor([ids], device=inner.device)
        with _watched(blocks, judged) as outputs:
            reference = _logprobs(model, inner, fed, _cache(read, judged))
        shares = {name: [getattr(judged[index], name) for index in sorted(judged)] for name in _ERRORS}
        found = [torch.stack(shares[name]).double().cpu().numpy() for name in _ERRORS]
        outcomes = None
        if outcome_grid:
            outcomes = _outcomes(model, inner, fed, read, judged, blocks, outputs, reference, outcome_grid, progress)
        elif progress is not None:
            progress(len(judged), len(judged))
    return PromptCurves(found[0], found[1][:, 0], outcomes)


_ERRORS = ("head_errors", "layer_errors")


def _outcomes(
    model: Any,
    inner: PreTrainedModel,
    fed: torch.Tensor,
    read: Any,
    judged: dict[int, _JudgedLayer],
    blocks: list[torch.nn.Module],
    outputs: list[Any],
    reference: torch.Tensor,
    grid: Sequence[int],
    progress: Callable[[int, int], object] | None,
) -> npt.NDArray[np.float64]:
    """Return what the answer loses where each layer alone keeps each number of positions, one batch a layer."""
    kept = torch.tensor(list(grid))
    batch = fed.expand(len(grid), -1)
    entropy = (reference.exp() * reference).sum(dim=-1)
    rows = []
    for index in sorted(judged):
        judged[index].kept = kept
        # What comes before the layer is the same as with the full cache.
        with _given(blocks[:index], outputs, len(grid)):
            logprobs = _logprobs(model, inner, batch, _cache(read, judged, first=index, batch=len(grid)))
        judged[index].kept = None
        cross = torch.einsum("tv,btv->bt", reference.exp(), logprobs)
        rows.append((entropy - cross).mean(dim=-1))
        if progress is not None:
            progress(len(rows), len(judged))
    measured: npt.NDArray[np.float64] = torch.stack(rows).double().cpu().numpy()
    return measured


def _logprobs(model: Any, inner: PreTrainedModel, fed: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
    """Return the log-probabilities after each token, ``(tokens, vocabulary)``, or of every sequence of a batch."""
    logprobs = forward(model, inner, fed, cache).float().log_softmax(dim=-1)
    return logprobs[0] if len(fed) == 1 else logprobs


def _cache(read: Any, judged: dict[int, _JudgedLayer], first: int = 0, batch: int = 1) -> DynamicCache:
    """Return a cache of the judged layers, with copies of the others from the first one on that runs."""
    cache = DynamicCache()
    cache.layers = []
    for index, layer in enumerate(read.layers):
        other = judged.get(index)
        if other is None:
            other = copy.deepcopy(layer) if index >= first else layer
            if index >= first and batch > 1:
                other.batch_repeat_interleave(batch)
        cache.layers.append(other)
    return cache


def _blocks(inner: PreTrainedModel, num_layers: int) -> list[torch.nn.Module]:
    """Return the modules of a model's layers."""
    lists = [module for module in inner.base_model.modules() if isinstance(module, torch.nn.ModuleList)]
    stacks = [blocks for blocks in lists if len(blocks) == num_layers]
    if len(stacks) != 1:
        raise ValueError(
            f"model: {type(inner).__name__} has {len(stacks)} lists of {num_layers} modules, must have one, its layers"
        )
    return list(stacks[0])


@contextlib.contextmanager
def _watched(blocks: list[torch.nn.Module], judged: dict[int, _JudgedLayer]) -> Iterator[list[Any]]:
    """Let judged layers measure during a forward, and give what each block returned."""
    outputs: list[Any] = [None] * len(blocks)
    handles = []

    def before(index: int) -> Callable[..., None]:
        def hook(_: torch.nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
            hidden = options.get("hidden_states", inputs[0] if inputs else None)
            assert isinstance(hidden, torch.Tensor)
            judged[index].residual = hidden[0].float().square().sum(dim=-1)

        return hook

    def after(index: int) -> Callable[..., None]:
        def hook(_: torch.nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            outputs[index] = output

        return hook

    for index, block in enumerate(blocks):
        handles.append(block.register_forward_hook(after(index)))
        if index in judged:
            judged[index].judging = True
            handles.append(block.register_forward_pre_hook(before(index), with_kwargs=True))
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()
        for layer in judged.values():
            layer.judging = False


@contextlib.contextmanager
def _given(blocks: list[torch.nn.Module], outputs: list[Any], batch: int) -> Iterator[None]:
    """Let blocks return what they returned before, for each sequence of a batch, without computing it."""
    own = [vars(block).get("forward") for block in blocks]
    for block, output in zip(blocks, outputs, strict=False):
        repeated = _repeated(output, batch)
        block.__dict__["forward"] = lambda *_, repeated=repeated, **__: repeated
    try:
        yield
    finally:
        for block, before in zip(blocks, own, strict=True):
            del block.__dict__["forward"]
            if before is not None:
                block.__dict__["forward"] = before


def _repeated(output: Any, batch: int) -> Any:
    if isinstance(output, torch.Tensor):
        return output.expand(batch, *output.shape[1:]) if output.shape[:1] == (1,) else output
    if isinstance(output, (tuple, list)):
        return type(output)(_repeated(one, batch) for one in output)
    return output
