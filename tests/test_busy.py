"""Two calls to one object: RuntimeError for the second, and never a crash."""

from __future__ import annotations

import copy
import itertools
import sys

import numpy as np
import pytest

import pb_kvcache as pb

#: Threads make every pair of a native object's calls. Each may be refused or find wrong arguments.
HAMMER = """
import sys, threading, time
import numpy as np
import pb_kvcache as pb

sys.setswitchinterval(1e-6)
kind, seconds = sys.argv[1], float(sys.argv[2])
row = np.full(80, 0.125, np.float32)
if kind == "PyramidStack":
    cache = pb.PyramidStack(4, 64, 1, 8, 16, 7)
    calls = {
        "step": lambda: cache.on_decode_step(next(position), [row[: len(layer)] for layer in cache.layers]),
        "unseen": lambda: cache.on_decode_step(next(position), None),
        "evict": cache.evict,
        "kept": lambda: cache.kept,
        "layer": lambda: cache.layers[1].kept,
        "score": lambda: cache.layers[2].window_score(0),
        "resident": lambda: (cache.resident, cache.peak_resident, cache.evict_count()),
        "seed": lambda: cache.seed(1, range(60), np.ones((3, 60))),
        "reset": cache.reset,
        "copy": cache.copy,
    }
else:
    cache = pb.FullCache() if kind == "FullCache" else pb.SnapKV(64, 8, 16, 7)
    calls = {
        "step": lambda: cache.on_decode_step(next(position), row[: len(cache)]),
        "unseen": lambda: cache.on_decode_step(next(position), None),
        "evict": lambda: cache.evict(9),
        "kept": lambda: cache.kept,
        "in": lambda: 5 in cache,
        "score": lambda: cache.window_score(0),
        "seed": lambda: cache.seed(range(60), np.ones((3, 60))),
        "reset": cache.reset,
        "copy": cache.copy,
        "repr": lambda: repr(cache),
    }
import itertools
position = itertools.count(1)
refused = 0
rule = "is in use by another thread; one instance serves one thread at a time, guard it with a lock"
refusals = (f"{kind} {rule}", f"StackLayer {rule}")

def hammer(call, end):
    global refused
    while time.perf_counter() < end:
        try:
            call()
        except RuntimeError as error:
            if not isinstance(error, pb.CacheFullError):
                assert str(error) in refusals, error
                refused += 1
            else:
                try:
                    cache.evict()
                except RuntimeError:
                    pass
        except (ValueError, KeyError, TypeError):
            pass

threading.excepthook = lambda args: (sys.__excepthook__(*args[:3]), __import__("os")._exit(3))
for first, second in itertools.combinations_with_replacement(calls, 2):
    # Without the mark, steps beside evictions corrupt the count within a second, mostly with two threads for each.
    end = time.perf_counter() + (2 if {first, second} == {"step", "evict"} else seconds)
    pair = [threading.Thread(target=hammer, args=(calls[name], end)) for name in (first, second, first, second)]
    for thread in pair:
        thread.start()
    for thread in pair:
        thread.join()
kept = cache.kept
rows = kept if isinstance(kept, list) else [kept]
assert all((np.diff(row.astype(np.int64)) > 0).all() for row in rows)
print(refused)
"""


@pytest.mark.parametrize("kind", ["SnapKV", "FullCache", "PyramidStack"])
def test_threads_on_one_object_are_refused_and_crash_nothing(kind, run):
    run(sys.executable, "-c", HAMMER, kind, 0.05)


def stack():
    return pb.PyramidStack(2, 8, 1, 2, 4, 3)


CALLS = {
    "step": lambda c: c.on_decode_step(9, None),
    "evict": lambda c: c.evict(),
    "kept": lambda c: c.kept,
    "reset": lambda c: c.reset(),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}
OF_ONE = {
    **CALLS,
    "weights": lambda c: c.on_decode_step(9, [1.0]),
    "len": len,
    "in": lambda c: 0 in c,
    "seed": lambda c: c.seed([0, 4]),
}
OF_A_STACK = {
    **CALLS,
    "weights": lambda c: c.on_decode_step(9, [[1.0], [1.0]]),
    "resident": lambda c: c.resident,
    "peak": lambda c: c.peak_resident,
    "count": lambda c: c.evict_count(),
    "seed": lambda c: c.seed(0, [0, 4]),
    "layer": lambda c: c.layers[0].kept,
    "layer's len": lambda c: len(c.layers[1]),
    "layer's in": lambda c: 0 in c.layers[1],
    "layer's score": lambda c: c.layers[1].window_score(0),
}


@pytest.mark.parametrize(
    ("make", "call"),
    [
        *itertools.product([lambda: pb.SnapKV(8, 2)], [*OF_ONE.values(), lambda c: c.window_score(0)]),
        *itertools.product([pb.FullCache], [call for name, call in OF_ONE.items() if name != "evict"]),
        *itertools.product([stack], OF_A_STACK.values()),
    ],
)
def test_every_call_is_refused_while_one_is_in_progress_and_works_after_it(make, call):
    cache = make()
    del cache._turn[0]  # as a call in another thread does
    with pytest.raises(RuntimeError, match=r"^\w+ is in use by another thread; one instance serves one thread"):
        call(cache)
    assert "evict" in repr(cache)
    cache._turn.append(None)
    call(cache)
    assert cache._turn == [None]


def test_a_call_that_raises_leaves_the_object_free():
    cache = pb.SnapKV(8, 2)
    for _ in range(2):
        with pytest.raises(ValueError, match="must have one for each of the 1 kept positions"):
            cache.on_decode_step(1, [0.5, 0.5])
        with pytest.raises(ValueError, match="the last of which is 0"):
            cache.on_decode_step(0, None)
    layers = stack()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"attn\[1\]: has 2 weights"):
            layers.on_decode_step(1, [[1.0], [0.5, 0.5]])
        with pytest.raises(ValueError, match="the last of which is 0 in layer 0"):
            layers.on_decode_step(0, None)


class Calling:
    """Weights that use the cache while they are read."""

    def __init__(self, cache, call):
        self.cache, self.call = cache, call

    def __array__(self, dtype=None, copy=None):
        self.call(self.cache)
        return np.array([1.0], np.float32)


@pytest.mark.parametrize("make", [lambda: pb.SnapKV(8, 2), pb.FullCache])
def test_weights_that_use_the_cache_while_they_are_read_come_before_the_step(make):
    cache = make()
    cache.on_decode_step(1, Calling(cache, len))
    assert cache.kept.tolist() == [0, 1]
    with pytest.raises(ValueError, match=r"pos = 3: must be greater .* the last of which is 4"):
        cache.on_decode_step(3, Calling(cache, lambda c: c.on_decode_step(4, None)))


def test_rows_that_use_the_stack_while_they_are_read_come_before_the_step():
    layers = stack()
    layers.on_decode_step(1, [Calling(layers, lambda c: c.resident), None])
    assert layers.resident == 4
    with pytest.raises(ValueError, match=r"pos = 3: must be greater .* is 4 in layer 0"):
        layers.on_decode_step(3, [Calling(layers, lambda c: c.on_decode_step(4, None)), None])
