"""``python -m pb_kvcache``: the command line ``pb-kvcache``."""

import sys

from .cli import main

sys.exit(main())
