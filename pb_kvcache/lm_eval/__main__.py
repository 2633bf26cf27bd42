"""lm-eval's command, with the model ``pb_kvcache``: for releases of lm-eval that do not look for entry points."""

from __future__ import annotations

from lm_eval.__main__ import cli_evaluate

import pb_kvcache.lm_eval  # noqa: F401  (registers the model)

if __name__ == "__main__":
    cli_evaluate()
