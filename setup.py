"""What pyproject.toml cannot say: the cffi module, the version in the C header, and the wheel's stable-ABI tag."""

import sys
from pathlib import Path

from setuptools import setup

sys.path.insert(0, str(Path(__file__).resolve().parent))

import build

setup(
    version=build.version(),
    cffi_modules=["build.py:ffibuilder"],
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if build.LIMITED_API else {},
)
