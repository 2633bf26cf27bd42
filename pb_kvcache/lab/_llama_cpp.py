"""A GGUF model that llama.cpp runs, and the attention weights of each of its layers.

llama.cpp calls back after any tensor of its graph that a caller asks for. Without flash attention the softmax of every
layer is one of them, ``kq_soft_max-LAYER``. llama-cpp-python passes the callback on, and brings the library that reads
tensors.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

#: What the graph calls a layer's softmax.
_SOFTMAX = b"kq_soft_max-"
#: Of llama_flash_attn_type: never.
_NO_FLASH = 0
#: Of ggml_log_level: what llama.cpp says on errors.
_ERROR = 4


def _module() -> Any:
    try:
        return importlib.import_module("llama_cpp")
    except (ImportError, RuntimeError, OSError) as error:  # the last two: its library cannot be loaded
        raise ImportError(
            "recording with llama.cpp needs llama_cpp, which is not installed: pip install 'pb-kvcache[llama-cpp]'"
        ) from error


class _Ggml:
    """The functions of ggml that read a tensor, so that nothing depends on the layout of its struct."""

    def __init__(self) -> None:
        paths = importlib.import_module("llama_cpp._ggml")
        library = importlib.import_module("llama_cpp._ctypes_extensions").load_shared_library(
            "ggml-base", paths.libggml_base_path
        )
        for name, result, *arguments in (
            ("ggml_get_name", ctypes.c_char_p, ctypes.c_void_p),
            ("ggml_nelements", ctypes.c_int64, ctypes.c_void_p),
            ("ggml_nrows", ctypes.c_int64, ctypes.c_void_p),
            ("ggml_nbytes", ctypes.c_size_t, ctypes.c_void_p),
            (
                "ggml_backend_tensor_get",
                None,
                ctypes.c_void_p,
                ctypes.c_void_p,
                ctypes.c_size_t,
                ctypes.c_size_t,
            ),
        ):
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
            setattr(self, name.removeprefix("ggml_"), function)

    get_name: Callable[[int], bytes]
    nelements: Callable[[int], int]
    nrows: Callable[[int], int]
    nbytes: Callable[[int], int]
    backend_tensor_get: Callable[[int, Any, int, int], None]

    def softmax(self, tensor: int, tokens: int) -> npt.NDArray[np.float32]:
        """Return a layer's softmax, float32 of shape ``(query heads, tokens, cells)``."""
        rows = self.nrows(tensor)
        cells = self.nelements(tensor) // rows
        if self.nbytes(tensor) != 4 * rows * cells or rows % tokens:
            raise ValueError(f"model: a softmax of {rows} rows of {cells} is not one of {tokens} tokens in float32")
        values = np.empty((rows // tokens, tokens, cells), np.float32)
        self.backend_tensor_get(tensor, values.ctypes.data, 0, values.nbytes)
        return values


class Model:
    """A GGUF model in memory, on the CPU.

    Parameters
    ----------
    path
        The file.

    Raises
    ------
    ImportError
        llama-cpp-python is not installed.
    ValueError
        llama.cpp cannot load the file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.api = _module()
        self._ggml = _Ggml()
        self._said: list[str] = []
        self._log = self.api.llama_log_callback(self._listen)
        self.api.llama_backend_init()
        self.api.llama_log_set(self._log, None)
        params = self.api.llama_model_default_params()
        params.n_gpu_layers = 0
        self._model = self.api.llama_model_load_from_file(os.fsencode(path), params)
        if not self._model:
            self.close()
            raise ValueError(f"model: llama.cpp cannot load {os.fspath(path)}: {self._reason()}")
        self._vocabulary = self.api.llama_model_get_vocab(self._model)

    def close(self) -> None:
        """Free the model. What llama.cpp has to say goes to llama-cpp-python's logger again."""
        if self._model:
            self.api.llama_model_free(self._model)
            self._model = None
        self.api.llama_log_set(importlib.import_module("llama_cpp._logger").llama_log_callback, None)

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _listen(self, level: int, text: bytes, _: object) -> None:
        if level == _ERROR and len(self._said) < 8:
            self._said.append(text.decode("utf-8", "replace").strip())

    def _reason(self) -> str:
        return self._said[0] if self._said else "no reason given"

    def field(self, key: str) -> str | None:
        """Return an entry of the file's metadata as text. `key` may leave out the architecture's name before it."""
        found = self._text(key)
        return self._text(f"{self._text('general.architecture')}.{key}") if found is None else found

    def number(self, key: str, default: int) -> int:
        """Return an entry of the file's metadata as a number, or what it is where the file does not have it."""
        found = self.field(key)
        return default if found is None else int(found)

    def _text(self, key: str) -> str | None:
        buffer = ctypes.create_string_buffer(1 << 14)
        size = self.api.llama_model_meta_val_str(self._model, key.encode(), buffer, len(buffer))
        return buffer.value.decode("utf-8", "replace") if size >= 0 else None

    def description(self) -> str:
        """Return what llama.cpp calls the model, with its quantisation."""
        buffer = ctypes.create_string_buffer(256)
        self.api.llama_model_desc(self._model, buffer, len(buffer))
        return buffer.value.decode("utf-8", "replace")

    @property
    def positions(self) -> int:
        """Positions that the model was trained for."""
        return int(self.api.llama_model_n_ctx_train(self._model))

    @property
    def num_layers(self) -> int:
        """Layers, with or without attention."""
        return int(self.api.llama_model_n_layer(self._model))

    @property
    def num_query_heads(self) -> int:
        """Query heads of a layer."""
        return int(self.api.llama_model_n_head(self._model))

    @property
    def is_decoder(self) -> bool:
        """Whether every token attends to those before it alone, and to nothing else."""
        return self.field("attention.causal") != "false" and not self.api.llama_model_has_encoder(self._model)

    def kv_sizes(self, layers: Sequence[int]) -> dict[str, Any]:
        """Return what a position of some layers takes, in a trace's words. Nothing where the file does not say it."""
        if any(self.field(f"attention.{name}") for name in ("key_length_swa", "value_length_swa", "kv_lora_rank")):
            return {}
        head_dim = int(self.api.llama_model_n_embd(self._model)) // self.num_query_heads
        key, value = (self.number(f"attention.{name}_length", head_dim) for name in ("key", "value"))
        stated = json.loads(self.field("attention.head_count_kv") or str(self.num_query_heads))
        heads = [int(stated[layer]) if isinstance(stated, list) else int(stated) for layer in layers]
        if key == value and len(set(heads)) == 1:
            return {"num_kv_heads": heads[0], "head_dim": key}
        elements = [count * (key + value) for count in heads]
        return {"kv_elements": elements[0] if len(set(elements)) == 1 else elements}

    def tokens(self, text: str) -> list[int]:
        """Return the tokens of a text, with those that the file wants before it."""
        data = text.encode("utf-8")
        made = (self.api.llama_token * (len(data) + 16))()
        count = self.api.llama_tokenize(self._vocabulary, data, len(data), made, len(made), True, False)
        if count < 0:
            raise ValueError(f"model: llama.cpp makes no tokens of the text: {self._reason()}")
        return list(made[:count])

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of tokens."""
        given = (self.api.llama_token * len(ids))(*ids)
        buffer = ctypes.create_string_buffer(64 * len(ids) + 64)
        size = self.api.llama_detokenize(self._vocabulary, given, len(ids), buffer, len(buffer), False, True)
        return buffer.raw[: max(0, size)].decode("utf-8", "replace")

    def attention(
        self, ids: Sequence[int], piece: int, take: Callable[[int, int, npt.NDArray[np.float32]], None]
    ) -> Iterator[int]:
        """Run tokens through the model in pieces, and hand each layer's softmax to a function.

        Parameters
        ----------
        ids
            The tokens.
        piece
            Tokens at a time.
        take
            Called with the layer, the first token of the piece and the weights, ``(query heads, tokens, cells)``. Cell
            i is position i. There may be more cells than positions. The array may be kept.

        Yields
        ------
        int
            How many tokens the model has read.

        Raises
        ------
        ValueError
            llama.cpp cannot run the model. What `take` raises is raised here.
        """
        start = count = 0
        raised: list[BaseException] = []

        def after(tensor: int, ask: bool, _: object) -> bool:
            name = self._ggml.get_name(tensor)
            if not name.startswith(_SOFTMAX):
                return not ask
            if ask:
                return True
            try:  # an exception would be printed and forgotten
                take(int(name.removeprefix(_SOFTMAX)), start, self._ggml.softmax(tensor, count))
            except BaseException as error:
                raised.append(error)
            return not raised

        callback = self.api.llama_cpp.ggml_backend_sched_eval_callback(after)
        with self._context(len(ids), piece, callback) as context:
            for start in range(0, len(ids), piece):
                part = ids[start : start + piece]
                count = len(part)
                given = (self.api.llama_token * count)(*part)  # the batch points into it
                status = self.api.llama_decode(context, self.api.llama_batch_get_one(given, count))
                if raised:
                    raise raised[0]
                if status:
                    raise ValueError(f"model: llama.cpp cannot run it (status {status}): {self._reason()}")
                yield start + count

    @contextlib.contextmanager
    def _context(self, length: int, piece: int, callback: Any) -> Iterator[Any]:
        params = self.api.llama_context_default_params()
        params.n_ctx = length
        params.n_batch = params.n_ubatch = piece
        params.n_threads = params.n_threads_batch = os.cpu_count() or 1
        params.flash_attn_type = _NO_FLASH
        params.swa_full = True  # so that a cell is a position in the layers of a sliding window too
        params.cb_eval = callback
        context = self.api.llama_init_from_model(self._model, params)
        if not context:
            raise ValueError(f"model: llama.cpp makes no context for {length} tokens: {self._reason()}")
        try:
            yield context
        finally:
            self.api.llama_free(context)
