"""Rows as an evaluation writes them, made up: consistent, seeded, and of any size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Row = dict[str, Any]

HEADER: Row = {
    "format": "pb_kvcache evaluation",
    "version": 1,
    "model": {"name": "tiny", "type": "llama", "sha256": "0" * 64},
    "settings": {"question": "seen", "length": 100, "seed": 0, "tasks": ["text", "retrieval"]},
    "machine": {"python": "3.11", "cores": 2},
}


def row(prompt: str, variant: str = "uniform", budget: str | None = "64", **values: Any) -> Row:
    """Return one row. A value that is not given is one that a text prompt could have."""
    tokens = values.get("tokens", 100)
    positions = tokens if budget is None else round(tokens * int(budget[:-1]) / 100) if "%" in budget else int(budget)
    made = {
        "prompt": prompt,
        "task": "text",
        "kind": "prose",
        "tokens": tokens,
        "budget": None if budget is None else positions,
        "variant": variant,
        "plan": variant,
        "selection": "" if variant == "full" else "snapkv",
        "merge": "" if variant == "full" else "none",
        "kl": None if variant == "full" else [0.5, 0.5],
        "same": None if variant == "full" else 0.75,
        "nll": 2.0,
        "score": None,
        "chance": 0.0,
        "prediction": None,
        "answers": [],
        "bytes": 1000 * positions,
        "rows": float(positions),
        "decode_ms": 1.0,
        "kept": None,
    }
    return made | ({} if budget is None else {"budget_asked": budget}) | values


def kl_rows(
    uniform: Sequence[float], others: Mapping[str, Sequence[float]], budget: str = "64", **values: Any
) -> list[Row]:
    """Return rows whose mean KL is as given: of uniform and of others, a figure a prompt."""
    rows = []
    for variant, figures in {"uniform": uniform, **others}.items():
        rows += [row(f"text-{n}", variant, budget, kl=[0.0, 2 * float(kl)], **values) for n, kl in enumerate(figures)]
    return rows + [row(f"text-{n}", "full", None, **values) for n in range(len(uniform))]


def run(
    factors: Mapping[str, float],
    budgets: Sequence[str] = ("16", "50%"),
    *,
    prompts: int = 10,
    kinds: Sequence[str] = ("prose", "code"),
    right: float = 0.9,
    tokens: int = 32,
    seed: int = 0,
) -> list[Row]:
    """Return a whole run over two tasks: text of some kinds, and retrieval.

    A variant's KL is about its factor times uniform's, its score the better the smaller the factor.

    Parameters
    ----------
    factors
        By variant. Uniform has 1.
    prompts
        Of each kind, and of retrieval.
    right
        How often the full cache answers.
    """
    rng = np.random.default_rng(seed)
    asked = [("text", kind, f"text-{kind}-{n}") for kind in kinds for n in range(prompts)]
    asked += [("retrieval", "8 keys", f"retrieval-{n}") for n in range(prompts)]
    rows = []
    for index, (task, kind, prompt) in enumerate(asked):
        scored = task != "text"
        same = {"task": task, "kind": kind, "chance": 0.1 if scored else 0.0, "answers": ["7"] if scored else []}

        def score(part: float, scored: bool = scored) -> Row:
            found = float(rng.random() < part) if scored else None
            return {"score": found, "prediction": ("7" if found else "8, I think") if scored else None}

        rows.append(row(prompt, "full", None, **same, **score(right)))
        for number, budget in enumerate(budgets):
            base = rng.gamma(4, 0.2 / (number + 1), tokens)
            for variant, factor in {"uniform": 1.0, **factors}.items():
                made = row(prompt, variant, budget, **same, **score(right * min(1, 0.5 / factor)))
                made["kl"] = (base * factor * rng.gamma(60, 1 / 60)).tolist()
                if index == 0:
                    made["kept"] = [
                        [sorted(rng.choice(100, made["budget"], replace=False).tolist()) for _ in range(3)]
                        for _ in range(4)
                    ]
                rows.append(made)
    return rows
