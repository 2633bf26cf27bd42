"""Write keys.jsonl: texts of filler with eight codes in them, and a question for one of the codes.

python tests/lm_eval_tasks/generate.py
"""

from __future__ import annotations

import json
import random
from pathlib import Path

THINGS = ["violin", "ladder", "teapot", "lantern", "anchor", "saddle", "mirror", "barrel"]
WHO = ["The baker", "A sailor", "My neighbour", "The old teacher", "A young farmer", "The doctor"]
DID = ["walked to the market", "repaired a wooden fence", "wrote a long letter", "watched the rain", "fed the horses"]
WHEN = ["before noon", "on Monday", "after the storm", "in early spring", "while the bells rang", "without a word"]


def document(rng: random.Random) -> dict:
    codes = [f"{number}" for number in rng.sample(range(1000, 10000), len(THINGS))]
    sentences = [f"{rng.choice(WHO)} {rng.choice(DID)} {rng.choice(WHEN)}." for _ in range(24)]
    for index, (thing, code) in enumerate(zip(THINGS, codes, strict=True)):
        sentences.insert(4 * index + rng.randrange(4), f"The code of the {thing} is {code}.")
    asked = rng.randrange(len(THINGS))
    return {
        "text": " ".join(sentences),
        "question": f"Remember: the code of the {THINGS[asked]} is",
        "choices": codes,
        "answer": asked,
    }


if __name__ == "__main__":
    rng = random.Random(7)
    lines = [json.dumps(document(rng)) for _ in range(16)]
    Path(__file__).with_name("keys.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
