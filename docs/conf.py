"""How Sphinx makes the site of these pages. ``docs/build_site`` runs it. Needs the extra ``docs``."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS / "_ext"), str(DOCS.parent)]

import build

# The references are of the installed package. The source beside the documents has no native module.
sys.path.remove(str(DOCS.parent))

project = "pb_kvcache"
version = release = build.version()

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "c_headers",
    "pages",
    "python_names",
]
exclude_patterns = ["_ext"]

# Links such as plan.md#divided-by-measured-curves, with the anchors that code hosts make.
myst_heading_anchors = 4

autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # python_names shows them as they are written
autosummary_generate = False
maximum_signature_line_length = 80
napoleon_google_docstring = False
# The site is whole without the extras, too. lm_eval's own decorator needs more: see python_names.
autodoc_mock_imports = [
    name
    for name in ("mlx", "mlx_lm", "openvino", "torch", "tqdm", "transformers")
    if not importlib.util.find_spec(name)
]

nitpicky = True
# Names of others in docstrings. Those in signatures are shown without a link where there is no page: see python_names.
nitpick_ignore = [("c:identifier", name) for name in ("ptrdiff_t", "size_t", "uint8_t", "uint32_t", "uint64_t")]
nitpick_ignore_regex = [
    (r"py:.*", r"(abc|collections|lm_eval|mlx|numpy|openvino|os|torch|transformers)\..*"),
    (r"py:class", r"pb_kvcache(\.\w+)*\._\w+\.\w+"),  # a base class that is not public
]

html_theme = "furo"
html_title = f"pb_kvcache {release}"
html_copy_source = False
html_show_copyright = False
toc_object_entries_show_parents = "hide"
