"""Arrays and tensors are read by their values, or refused by name: everything that takes one, whatever lies behind."""

from __future__ import annotations

import numpy as np
import pytest

import pb_kvcache as pb

torch = pytest.importorskip("torch")

VALUES = torch.rand(4, 5, 60, generator=torch.Generator().manual_seed(3)) + 0.25
KEYS = torch.rand(2, 70, 60, generator=torch.Generator().manual_seed(4))


def step(value):
    cache = pb.SnapKV(100)
    cache.seed(range(60))
    cache.on_decode_step(60, value[0, 0])
    return [cache.window_score(position) for position in range(60)]


def step_of_a_stack(value):
    layers = pb.PyramidStack(1, 100)
    layers.seed(0, range(60))
    layers.on_decode_step(60, [value[0, 0]])
    return [layers.layers[0].window_score(position) for position in range(60)]


def seeded(value):
    cache = pb.SnapKV(100)
    cache.seed(range(60), value[0])
    return [cache.window_score(position) for position in range(60)]


READERS = {
    "window_scores": (lambda x: pb.window_scores(x, num_kv_heads=2), "attn"),
    "select": (lambda x: pb.select(x, 9, num_kv_heads=2, window=5), "attn"),
    "pool_scores": (pb.pool_scores, "scores"),
    "select_top": (lambda x: pb.select_top(x, 3), "scores"),
    "select_from_scores": (lambda x: pb.select_from_scores(x, 10, 5), "scores"),
    "weights of scores": (lambda x: pb.select_from_scores(torch.ones(4, 5, 60), 10, 5, weights=x), "weights"),
    "weights of attn": (lambda x: pb.select(torch.ones(4, 10, 3, 60), 9, num_kv_heads=5, weights=x), "weights"),
    "block_select": (lambda x: pb.block_select(x, 16, block_size=8, window=4), "scores"),
    "q": (lambda x: pb.scores_from_qk(x, KEYS), "q"),
    "k": (lambda x: pb.scores_from_qk(KEYS.repeat(2, 1, 1)[:, :3], x), "k"),
}
STEPS = {"on_decode_step": (step, "attn"), "stack": (step_of_a_stack, r"attn\[0\]"), "seed": (seeded, "attn")}
MOVERS = {"compact": (lambda x: pb.compact(x, [[1, 3]] * 4), "kv")}


class Named(torch.Tensor):
    """Memory of its own, and functions that go through the class."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.Tensor.data_ptr:
            return 0
        return super().__torch_function__(function, types, args, kwargs or {})


class Wrapper(torch.Tensor):
    """A tensor whose values are those of another one, times -1."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        plain = [-part.inner if isinstance(part, Wrapper) else part for part in args]
        return cls(-function(*plain, **(kwargs or {})))


SAME = {
    "negative bit": lambda x: torch._neg_view(-x),
    "imaginary part of a conjugate": lambda x: torch.complex(x, -x).conj().imag,
    "in a graph": lambda x: x.clone().requires_grad_(),
    "parameter": torch.nn.Parameter,
    "__torch_function__": lambda x: x.clone().as_subclass(Named),
    "transposed": lambda x: x.transpose(0, 2).contiguous().transpose(0, 2),
    "flipped": lambda x: x.flip(-1).flip(-1),
    "expanded": lambda x: x[..., :1].expand(*x.shape),
}


@pytest.mark.parametrize("kind", SAME)
@pytest.mark.parametrize("name", READERS | STEPS)
def test_a_tensor_is_read_by_its_values(kind, name):
    read, _ = (READERS | STEPS)[name]
    given = SAME[kind](VALUES)
    plain = torch.empty(VALUES.shape).copy_(given.detach())
    got, want = read(given), read(plain)
    if name in ("q", "k"):  # the matrix multiplication may add in another order for other strides
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-7)
    else:
        np.testing.assert_array_equal(got, want)


def fake(x):
    with pytest.importorskip("torch._subclasses.fake_tensor").FakeTensorMode():
        return torch.rand(x.shape)


ELSEWHERE = {
    "a meta tensor": lambda x: x.to("meta"),
    "a zero tensor": lambda x: torch._efficientzerotensor(x.shape),
    "a FakeTensor": fake,
    "a Wrapper": Wrapper,
    "a sparse_coo tensor": lambda x: x.to_sparse(),
    "a quantised tensor, qint8": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
    "a nested tensor": lambda x: torch.nested.nested_tensor([*x]),
    "a NestedTensor": lambda x: torch.nested.nested_tensor([*x], layout=torch.jagged),
}


@pytest.mark.filterwarnings("ignore")  # torch deprecates half of these
@pytest.mark.parametrize("kind", ELSEWHERE)
@pytest.mark.parametrize("name", READERS | MOVERS)
def test_a_tensor_without_memory_of_its_own_is_refused_by_name(kind, name):
    read, argument = (READERS | MOVERS)[name]
    with pytest.raises(TypeError, match=rf"^{argument}: must be a torch tensor with memory of its own, not {kind}"):
        read(ELSEWHERE[kind](VALUES))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [kind for kind in ELSEWHERE if "ested" not in kind])
def test_weights_without_memory_of_their_own_are_refused_by_name(kind):
    row = ELSEWHERE[kind](VALUES[0, 0])
    rule = rf"must be a torch tensor with memory of its own, not {kind}"
    cache, layers = pb.SnapKV(8, 2), pb.PyramidStack(1, 8, 1, 2)
    with pytest.raises(TypeError, match=f"^attn: {rule}"):
        cache.on_decode_step(1, row)
    with pytest.raises(TypeError, match=rf"^attn\[0\]: {rule}"):
        layers.on_decode_step(1, [row])
    with pytest.raises(TypeError, match=f"^attn: {rule}"):
        pb.FullCache().on_decode_step(1, row)


@pytest.mark.parametrize("name", READERS | MOVERS)
def test_a_tensor_inside_a_transform_is_refused_by_name(name):
    read, argument = (READERS | MOVERS)[name]
    with pytest.raises(TypeError, match=rf"^{argument}: .* not one inside a transform such as torch.vmap"):
        torch.vmap(read)(torch.stack([VALUES, VALUES]))


def test_positions_in_a_tensor_are_read_by_their_values_or_refused():
    positions = torch._neg_view(-torch.tensor([1, 5, 9]))
    assert pb.to_ranges(positions).tolist() == [[1, 2], [5, 6], [9, 10]]
    cache = pb.SnapKV(8, 2)
    cache.seed(positions)
    assert cache.kept.tolist() == [1, 5, 9]
    kv = torch.arange(20).reshape(1, 10, 2)
    assert pb.compact(kv.clone(), positions[None]).tolist() == kv[:, [1, 5, 9]].tolist()
    nowhere = torch.zeros(3, dtype=torch.int64, device="meta")
    with pytest.raises(TypeError, match=r"^positions: .* not a meta tensor"):
        cache.seed(nowhere)
    with pytest.raises(TypeError, match=r"^indices: .* not a meta tensor"):
        pb.compact(kv, nowhere[None])
    with pytest.raises(TypeError, match=r"^indices: .* not a meta tensor"):
        pb.to_mask(nowhere, 10)
    with pytest.raises(TypeError, match=r"^valid: .* not a meta tensor"):
        pb.select(VALUES[None], 9, num_kv_heads=2, window=5, valid=nowhere[:1])
    with pytest.raises(TypeError, match=r"^budget = .*: must be an integer"):
        pb.SnapKV(nowhere[0])


def test_compaction_moves_the_values_of_a_tensor_whose_bit_is_set():
    values = torch.arange(-30, 30).reshape(2, 10, 3).float()
    kept = [[1, 4, 9], [0, 7, 8]]
    want = torch.stack([values[head, rows] for head, rows in enumerate(kept)])
    for kv in (torch._neg_view(-values), values.clone().as_subclass(Named)):
        assert torch.equal(torch.Tensor.clone(pb.compact(kv, kept)), want)
    both = torch.complex(values, 2 * values)
    front = pb.compact(both.conj(), kept)
    assert torch.equal(front.resolve_conj(), torch.complex(want, -2 * want))
    with pytest.raises(ValueError, match="last axis must be contiguous"):
        pb.compact(torch.complex(values, -values).conj().imag, kept)


def numpy_case(kind, tmp_path):
    array = VALUES.numpy().copy()
    if kind == "read-only":
        array.flags.writeable = False
    elif kind == "memmap":
        array = np.memmap(tmp_path / "a", np.float32, "w+", shape=array.shape)
        array[:] = VALUES.numpy()
    elif kind == "unaligned":
        array = np.frombuffer(b"\0" + array.tobytes(), np.uint8)[1:].view(np.float32).reshape(array.shape)
    elif kind == "subclass":
        array = array.view(type("Odd", (np.ndarray,), {"__len__": lambda self: 10**9, "__getitem__": lambda *a: 0}))
    elif kind == "reversed":
        array = array[..., ::-1][..., ::-1]
    return array


@pytest.mark.parametrize("kind", ["read-only", "memmap", "unaligned", "subclass", "reversed"])
@pytest.mark.parametrize("name", [name for name in READERS if len(name) > 1])
def test_an_array_is_read_by_its_values(kind, name, tmp_path):
    read, _ = READERS[name]
    np.testing.assert_array_equal(read(numpy_case(kind, tmp_path)), read(VALUES.numpy()))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda a: a.astype(object), "not object"),
        (lambda a: a.astype(">f4"), "not float32 in foreign byte order"),
        (lambda a: np.ma.masked_less(a, 0.5), "not a masked one; fill it first"),
        (lambda a: a.view([("x", np.float32)]), r"not \[\('x', '<f4'\)\]"),
        (lambda a: a.astype(np.complex64), "not complex64"),
        (lambda a: a.tolist(), "not list"),
    ],
)
@pytest.mark.parametrize("name", [name for name in READERS if len(name) > 1])
def test_an_array_of_another_kind_is_refused_by_name(change, what, name):
    read, argument = READERS[name]
    with pytest.raises(TypeError, match=rf"^{argument}: must be .*{what}"):
        read(change(VALUES.numpy()))
