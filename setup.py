"""What pyproject.toml cannot say: the cffi module, the version in the C header, and the wheel's stable-ABI tag."""

import sys
from pathlib import Path

import setuptools

# pyproject.toml asks for it, too, but pip does not look where it is told to use what is installed
# (--no-build-isolation). An older setuptools takes `license = "MIT"` for an error of the file and says "must be valid
# exactly by one definition".
if int(setuptools.__version__.split(".")[0]) < 77:
    sys.exit(
        f"pb_kvcache: building needs setuptools 77 or newer, here is {setuptools.__version__}.\n"
        "Run 'pip install -U \"setuptools>=77\"' first, or leave out --no-build-isolation."
    )

sys.path.insert(0, str(Path(__file__).resolve().parent))

import build

setuptools.setup(
    version=build.version(),
    cffi_modules=["build.py:ffibuilder"],
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if build.LIMITED_API else {},
)
