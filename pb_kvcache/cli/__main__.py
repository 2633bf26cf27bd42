"""``python -m pb_kvcache.cli`` is ``pb-kvcache``."""

import sys

from . import main

sys.exit(main())
