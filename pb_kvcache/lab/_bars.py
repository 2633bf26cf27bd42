"""Progress bars of transformers' own, which fill a file with lines where standard error is none of a terminal's."""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Iterator

from ._extra import extra

#: Has a bar that transformers' switch does not reach: of tensors that are dequantised.
_GGUF = "transformers.modeling_gguf_pytorch_utils"


@contextlib.contextmanager
def quiet_bars() -> Iterator[None]:
    """Switch transformers' bars off in the block where standard error is no terminal. Afterwards they are as before."""
    extra("transformers")
    if _is_terminal():
        yield
        return
    with contextlib.ExitStack() as stack:
        logging = importlib.import_module("transformers.utils.logging")
        if logging.is_progress_bar_enabled():
            logging.disable_progress_bar()
            stack.callback(logging.enable_progress_bar)
        with contextlib.suppress(ImportError, AttributeError):  # releases of transformers differ
            module = importlib.import_module(_GGUF)
            stack.callback(setattr, module, "tqdm", module.tqdm)
            module.tqdm = functools.partial(module.tqdm, disable=True)  # type: ignore[attr-defined]
        yield


def _is_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # none, or closed
        return False
