"""A small random Llama, twice: as an OpenVINO model, which the tests save as IR, and in NumPy, with rows masked."""

from __future__ import annotations

from typing import Any

import numpy as np


class SmallLlama:
    """Weights of a random decoder with rotary embeddings and grouped query heads.

    The layers are scaled so that attention is uneven: rows that are evicted matter for the logits.
    """

    def __init__(
        self,
        *,
        vocab: int = 48,
        width: int = 32,
        heads: int = 4,
        kv_heads: int = 2,
        head_dim: int = 16,
        layers: int = 3,
    ) -> None:
        self.vocab, self.width, self.heads, self.kv_heads = vocab, width, heads, kv_heads
        self.head_dim, self.layers = head_dim, layers
        rng = np.random.default_rng(7)

        def matrix(rows: int, columns: int, scale: float = 1.0) -> np.ndarray:
            return (rng.normal(size=(rows, columns)) * scale / np.sqrt(columns)).astype(np.float32)

        self.embedding = matrix(vocab, width, np.sqrt(width))
        self.blocks = [
            {
                "q": matrix(heads * head_dim, width, 2.0),
                "k": matrix(kv_heads * head_dim, width, 2.0),
                "v": matrix(kv_heads * head_dim, width),
                "o": matrix(width, heads * head_dim),
                "up": matrix(2 * width, width),
                "down": matrix(width, 2 * width),
            }
            for _ in range(layers)
        ]
        self.head = matrix(vocab, width)
        self.phases = (100.0 ** -(np.arange(head_dim // 2) * 2 / head_dim)).astype(np.float32)

    # --- in NumPy ---

    def run(self, tokens: np.ndarray, seen: list[np.ndarray] | None = None) -> tuple[np.ndarray, list[np.ndarray]]:
        """Return logits ``(n, vocab)`` and each layer's attention ``(heads, n, n)`` of a whole sequence, in float64.

        `seen` says for each layer which key (column) a query (row) may see besides causality: ``(n, n)`` bool.
        """
        n = len(tokens)
        causal = np.tril(np.ones((n, n), bool))
        x = self.embedding.astype(np.float64)[tokens]
        angles = np.arange(n)[:, None] * np.concatenate([self.phases, self.phases]).astype(np.float64)
        cos, sin = np.cos(angles), np.sin(angles)
        attention = []
        for layer, block in enumerate(self.blocks):
            h = _normed(x)
            q, k, v = (
                (h @ block[name].T.astype(np.float64)).reshape(n, -1, self.head_dim).transpose(1, 0, 2)
                for name in ("q", "k", "v")
            )
            q, k = (t * cos + _half_turned(t) * sin for t in (q, k))
            group = self.heads // self.kv_heads
            logits = q @ np.repeat(k, group, axis=0).transpose(0, 2, 1) / np.sqrt(self.head_dim)
            mask = causal if seen is None else causal & seen[layer]
            logits = np.where(mask, logits, -np.inf)
            weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            attention.append(weights)
            mixed = (weights @ np.repeat(v, group, axis=0)).transpose(1, 0, 2).reshape(n, -1)
            x = x + mixed @ block["o"].T.astype(np.float64)
            h = _normed(x) @ block["up"].T.astype(np.float64)
            x = x + np.maximum(h, 0) @ block["down"].T.astype(np.float64)
        return _normed(x) @ self.head.T.astype(np.float64), attention

    # --- as an OpenVINO model ---

    def openvino_model(self) -> Any:
        """Return the same decoder as a stateful OpenVINO model, shaped as optimum-intel writes them."""
        import openvino as ov
        import openvino.opset13 as op
        from openvino.op.util import Variable, VariableInfo

        def constant(value: Any, kind: Any = np.int64) -> Any:
            return op.constant(np.array(value, kind))

        def parameter(name: str, shape: list[int], kind: Any) -> Any:
            made = op.parameter(shape, kind, name=name)
            made.output(0).set_names({name})
            return made

        ids = parameter("input_ids", [-1, -1], ov.Type.i64)
        mask = parameter("attention_mask", [-1, -1], ov.Type.i64)
        positions = parameter("position_ids", [-1, -1], ov.Type.i64)
        beams = parameter("beam_idx", [-1], ov.Type.i32)
        batch = op.gather(op.shape_of(ids), constant([0]), constant(0))
        assigns = []

        def linear(x: Any, weight: np.ndarray) -> Any:
            return op.matmul(x, op.constant(weight), False, True)

        def normed(x: Any) -> Any:
            mean = op.reduce_mean(op.power(x, constant(2.0, np.float32)), constant([-1]), True)
            return op.multiply(
                x, op.divide(constant(1.0, np.float32), op.sqrt(op.add(mean, constant(1e-5, np.float32))))
            )

        angle = op.multiply(
            op.unsqueeze(op.convert(positions, "f32"), constant(-1)), constant([[self.phases]], np.float32)
        )
        angle = op.unsqueeze(op.concat([angle, angle], -1), constant(1))
        cos, sin = op.cos(angle), op.sin(angle)
        half = self.head_dim // 2

        def turned(x: Any) -> Any:
            first = op.slice(x, constant([0]), constant([half]), constant([1]), constant([3]))
            second = op.slice(x, constant([half]), constant([2 * half]), constant([1]), constant([3]))
            swapped = op.concat([op.multiply(second, constant(-1.0, np.float32)), first], -1)
            return op.add(op.multiply(x, cos), op.multiply(swapped, sin))

        def split(x: Any, heads: int) -> Any:
            return op.transpose(op.reshape(x, constant([0, 0, heads, self.head_dim]), True), constant([0, 2, 1, 3]))

        def held(x: Any, name: str) -> Any:
            info = VariableInfo()
            info.data_shape = ov.PartialShape([-1, self.kv_heads, -1, self.head_dim])
            info.data_type, info.variable_id = ov.Type.f32, name
            variable = Variable(info)
            shape = op.concat([batch, constant([self.kv_heads]), constant([0]), constant([self.head_dim])], 0)
            past = op.read_value(op.broadcast(constant(0.0, np.float32), shape), variable)
            whole = op.concat([op.gather(past, beams, constant(0)), x], 2)
            assigns.append(op.assign(whole, variable))
            return whole

        def repeated(x: Any) -> Any:
            group = self.heads // self.kv_heads
            shape = op.concat([batch, constant([self.kv_heads, group, 1, self.head_dim])], 0)
            wide = op.broadcast(op.unsqueeze(x, constant(2)), shape, broadcast_spec="BIDIRECTIONAL")
            return op.reshape(wide, constant([0, self.heads, -1, self.head_dim]), True)

        x = op.gather(op.constant(self.embedding), op.convert(ids, "i32"), constant(0))
        visible = op.unsqueeze(op.unsqueeze(op.convert(mask, "f32"), constant(1)), constant(1))
        bias = op.multiply(op.subtract(visible, constant(1.0, np.float32)), constant(65504.0, np.float32))
        for layer, block in enumerate(self.blocks):
            h = normed(x)
            q = turned(split(linear(h, block["q"]), self.heads))
            k = held(
                turned(split(linear(h, block["k"]), self.kv_heads)), f"past_key_values.{layer}.keypresent.{layer}.key"
            )
            v = held(split(linear(h, block["v"]), self.kv_heads), f"past_key_values.{layer}.valuepresent.{layer}.value")
            mixed = op.scaled_dot_product_attention(q, repeated(k), repeated(v), bias, causal=False)
            mixed = op.reshape(
                op.transpose(mixed, constant([0, 2, 1, 3])), constant([0, 0, self.heads * self.head_dim]), True
            )
            x = op.add(x, linear(mixed, block["o"]))
            x = op.add(x, linear(op.relu(linear(normed(x), block["up"])), block["down"]))
        logits = linear(normed(x), self.head)
        logits.output(0).set_names({"logits"})
        return ov.Model([op.result(logits)], assigns, [ids, mask, positions, beams], "small")


def _normed(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-5)


def _half_turned(x: np.ndarray) -> np.ndarray:
    half = x.shape[-1] // 2
    return np.concatenate([-x[..., half:], x[..., :half]], axis=-1)
