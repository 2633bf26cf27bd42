"""What `use` puts before a model's own methods of generation, so that nothing goes past the cache without a word."""

from __future__ import annotations

import inspect
import warnings
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationMixin, PreTrainedModel

from ._attention import NAMES, implementation, not_compiled
from ._probe import CACHE_NAMES, switch

if TYPE_CHECKING:
    from ._cache import BudgetedCache

#: How this release of transformers calls the argument that takes a cache.
CACHE_NAME = next(
    (
        name
        for name in CACHE_NAMES
        if name in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    ),
    CACHE_NAMES[-1],
)


class _Method:
    """A method of one model, as an attribute of that model. Copies and pickles go with their model."""

    name = ""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(getattr(type(self.model), self.name).__get__(self.model))

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]
        return getattr(type(self.model), self.name).__doc__  # type: ignore[no-any-return]

    def stock(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(type(self.model), self.name)(self.model, *args, **kwargs)

    @property
    def redirected(self) -> bool:
        """Whether the model's attention still is what `use` made it."""
        return implementation(self.model.config) in NAMES.values()


class Generate(_Method):
    """``generate``: a fresh cache for each call where `use` was given a budget, and never one of another text."""

    name = "generate"

    def __init__(self, model: PreTrainedModel, options: dict[str, Any] | None) -> None:
        super().__init__(model)
        self.options = options
        self.running = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from ._cache import BudgetedCache

        if not self.redirected:
            return self.stock(*args, **kwargs)
        cache = next((kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None), None)
        if cache is None and self.options is not None and self._wanted(kwargs):
            cache = kwargs[CACHE_NAME] = BudgetedCache(self.model.config, **self._chunked(kwargs, self.options))
        elif isinstance(cache, BudgetedCache):
            ids = args[0] if args else kwargs.get("inputs", kwargs.get("input_ids"))
            _check_text(cache, ids)
        before, self.running = self.running, True
        try:
            result = self.stock(*args, **kwargs)
        finally:
            self.running = before
        if isinstance(cache, BudgetedCache):
            sequences = result if isinstance(result, torch.Tensor) else getattr(result, "sequences", None)
            embedded = kwargs.get("inputs_embeds") is not None
            cache.text = None if sequences is None or embedded else sequences[:, : cache.get_seq_length()].clone()
        return result

    def _setting(self, kwargs: dict[str, Any], name: str) -> Any:
        if kwargs.get(name) is not None:
            return kwargs[name]
        given = kwargs.get("generation_config")
        found = getattr(given, name, None)
        return found if given is not None and found is not None else getattr(self.model.generation_config, name, None)

    def _wanted(self, kwargs: dict[str, Any]) -> bool:
        """Return whether this call shall have a cache of ours. A kind that it asks for itself is left to it."""
        if self._setting(kwargs, "use_cache") is False:
            return False
        given = kwargs.get("generation_config")
        asked = kwargs.get("cache_implementation") or getattr(given, "cache_implementation", None)
        if asked is not None:
            warnings.warn(
                f"cache_implementation = {asked!r} was asked for, so that the budget of use(model, ...) does not apply "
                "to this call; leave it out to compress",
                UserWarning,
                stacklevel=4,
            )
            return False
        if getattr(self.model.generation_config, "cache_implementation", None) is not None:
            kwargs["cache_implementation"] = None  # the model's own preference gives way
        return True

    def _chunked(self, kwargs: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
        if self._setting(kwargs, "prefill_chunk_size") is None:
            return options
        return {"compress": "decode", **options}


def _check_text(cache: BudgetedCache, ids: Any) -> None:
    """Refuse to go on with the cache of another text."""
    seen = cache.get_seq_length()
    if not seen or cache.text is None or not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        return
    held = cache.text.to(ids.device)
    if len(held) != len(ids) or ids.shape[1] <= seen or not bool((ids[:, :seen] == held).all()):
        raise ValueError(
            f"this cache holds the {seen} tokens of another text than the one that generate() was given: cache.reset() "
            "for a new prompt; to go on with a conversation, give generate() all of it, from its first token"
        )


class PrepareInputs(_Method):
    """``prepare_inputs_for_generation``: a model that drops its cache half-way fills the same one anew.

    Phi-3 reads everything again when a text passes the length that it was first trained for, because its rotary phases
    change there. It forgets the cache for that, and transformers then goes on with one that is not compressed.
    """

    name = "prepare_inputs_for_generation"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from ._cache import BudgetedCache

        inputs = self.stock(*args, **kwargs)
        cache = next((value for value in (*kwargs.values(), *args) if isinstance(value, BudgetedCache)), None)
        if cache is None:
            return inputs
        name = next((name for name in CACHE_NAMES if name in inputs), CACHE_NAME)
        if inputs.get(name) is None:
            if cache.get_seq_length():
                ids, whole = inputs.get("input_ids"), args[0] if args else kwargs.get("input_ids")
                if ids is not None and whole is not None and ids.shape[1] < whole.shape[1]:
                    raise RuntimeError(
                        f"{type(self.model).__name__} dropped its cache of {cache.get_seq_length()} tokens to read "
                        "them again, and this release of transformers gives it the last token alone, with any "
                        "cache; a newer release gives it the whole text"
                    )
                cache.reset()
            inputs[name] = cache
        elif inputs[name] is not cache:
            raise RuntimeError(
                f"{type(self.model).__name__} replaces the cache that it is given while it generates, so that it "
                "cannot be compressed"
            )
        return inputs


class GenerateBatch(_Method):
    """``generate_batch``: paged attention has its own cache, so that the model gets its own attention back for it."""

    name = "generate_batch"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own = implementation(self.model.config)
        plain = next((plain for plain, name in NAMES.items() if name == own), None)
        if plain is None:
            return self.stock(*args, **kwargs)
        switch(self.model, plain)
        try:
            return self.stock(*args, **kwargs)
        finally:
            switch(self.model, own or plain)


class WarnOfPlainForwards:
    """A hook before ``forward``: says once that scoring without a cache measures the whole model."""

    def __init__(self) -> None:
        self.warned = False

    @not_compiled
    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        generate = module.__dict__.get(Generate.name)
        if self.warned or module.training or not isinstance(generate, Generate) or generate.options is None:
            return
        if generate.running or not generate.redirected or any(kwargs.get(name) is not None for name in CACHE_NAMES):
            return
        ids = kwargs.get("input_ids", args[0] if args else None)
        if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.shape[1] < 2:
            return
        self.warned = True
        warnings.warn(
            "this forward has no compressed cache: the budget of use(model, ...) holds for generate(). To score "
            "continuations after a compressed context use pb_kvcache.transformers.loglikelihood, or pass "
            f"{CACHE_NAME}=BudgetedCache(model.config, ...)",
            UserWarning,
            stacklevel=2,
        )


METHODS = (PrepareInputs, GenerateBatch)
