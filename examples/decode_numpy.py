"""A layer's decode loop with a real KV cache in NumPy, kept at a budget by SnapKV.

Attention over random keys and values, one head. After every token the policy names what to drop, and the rows of K
and V close the gap. Positions stay absolute, so rotary phases would still be right.
"""

from __future__ import annotations

import numpy as np

from pb_kvcache import SnapKV

HEAD_DIM = 32
BUDGET = 64
TOKENS = 400


def main() -> None:
    """Decode with the whole cache and with a kept one, and compare what the layer answers."""
    rng = np.random.default_rng(0)
    queries = rng.standard_normal((TOKENS, HEAD_DIM), np.float32)
    all_keys = rng.standard_normal((TOKENS, HEAD_DIM), np.float32)
    all_keys[:4] += 0.6 * queries.mean(0) + 3.0  # a few early tokens that many queries look for
    queries += 0.4
    all_values = rng.standard_normal((TOKENS, HEAD_DIM), np.float32)

    cache = SnapKV(budget=BUDGET, recent_window=16)  # holds position 0
    keys, values = all_keys[:1], all_values[:1]
    errors = []
    for pos in range(1, TOKENS):
        full = softmax(all_keys[:pos] @ queries[pos] / np.sqrt(HEAD_DIM))
        # The model's attention over what is kept; the policy wants it as the whole model would have it.
        cache.on_decode_step(pos, full[cache.kept])
        keys = np.concatenate([keys, all_keys[pos : pos + 1]])
        values = np.concatenate([values, all_values[pos : pos + 1]])

        before = cache.kept
        victims = cache.evict()
        stays = ~np.isin(before, victims)
        keys, values = keys[stays], values[stays]
        assert len(keys) == len(cache) <= BUDGET

        answer = softmax(keys @ queries[pos] / np.sqrt(HEAD_DIM)) @ values
        whole = softmax(all_keys[: pos + 1] @ queries[pos] / np.sqrt(HEAD_DIM)) @ all_values[: pos + 1]
        errors.append(float(np.linalg.norm(answer - whole) / np.linalg.norm(whole)))

    print(f"kept {len(cache)} of {TOKENS} positions; the early four: {cache.kept[:4].tolist()}")
    print(f"relative error of the layer's answer: median {np.median(errors):.2f}")
    print(f"K and V: {keys.nbytes + values.nbytes} bytes instead of {all_keys.nbytes + all_values.nbytes}")


def softmax(logits: np.ndarray) -> np.ndarray:
    """Return the softmax of a vector, in float32."""
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


if __name__ == "__main__":
    main()
