"""Compile the C core into ``pb_kvcache._native``: cffi, out of line, API mode.

setuptools calls :data:`ffibuilder` (see ``setup.py``); ``python build.py`` compiles in place for a quick try. The
declarations are the marked regions of the public headers themselves, in the order in which ``pb_kvcache.h`` includes
them.

The file's name is the project's own and shadows PyPA's ``build`` when ``python -m build`` is run in this folder; then
it says what to run instead.
"""

from __future__ import annotations

import os
import platform
import re
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent
INCLUDE = "csrc/include"

if __name__ == "__main__" and __spec__ is not None:  # python -m build
    sys.exit(
        "pb_kvcache: 'python -m build' found this project's build.py instead of the PyPA 'build' package.\n"
        "Run 'pip wheel --no-deps .' for a wheel, or 'cd .. && python -m build <this folder>' for both wheel and sdist."
    )

from cffi import FFI


def regions() -> list[tuple[str, str]]:
    """Return each public header's name and its text between ``cdef: begin`` and ``cdef: end``, comments included."""
    umbrella = (ROOT / INCLUDE / "pb_kvcache.h").read_text(encoding="utf-8")
    found = []
    for name in re.findall(r'#include "(pb_kvcache/\w+\.h)"', umbrella):
        text = (ROOT / INCLUDE / name).read_text(encoding="utf-8")
        marked = re.findall(r"/\* cdef: begin \*/(.*?)/\* cdef: end \*/", text, re.DOTALL)
        found.append((name, "\n".join(marked)))
    return found


def declarations() -> str:
    """Return what cffi has to know: the marked regions of every public header, without comments."""
    text = re.sub(r"/\*.*?\*/", "", "\n".join(region for _, region in regions()), flags=re.DOTALL)
    text = re.sub(r"^PB_KVCACHE_POLICY\((\w+)\)", lambda use: policy_declarations(use[1]), text, flags=re.MULTILINE)
    return text.replace("PB_KVCACHE_API ", "")


def policy_declarations(policy: str) -> str:
    """Return what the header's macro PB_KVCACHE_POLICY declares: cffi knows no macros with arguments."""
    text = (ROOT / INCLUDE / "pb_kvcache" / "policy.h").read_text(encoding="utf-8")
    body = re.search(r"#define PB_KVCACHE_POLICY\(name\)((?:.*\\\n)*.*\n)", text)
    assert body, "policy.h defines PB_KVCACHE_POLICY(name)"
    return re.sub(r"(?:##)?\bname\b(?:##)?", policy, body[1].replace("\\\n", "\n"))


def version() -> str:
    """Return the version that ``pb_kvcache/version.h`` states."""
    text = (ROOT / INCLUDE / "pb_kvcache" / "version.h").read_text(encoding="utf-8")
    return ".".join(re.findall(r"#define PB_KVCACHE_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", text))


def compile_flags() -> list[str]:
    """Return the flags under which the results are the same bits everywhere."""
    if sys.platform == "win32":
        return ["/std:c11", "/O2", "/fp:precise"]
    flags = ["-std=c11", "-O3", "-ffp-contract=off", "-fvisibility=hidden"]
    flags += ["-g0"]  # Python's own flags say -g, which makes the module 1.56 MB instead of 0.40
    if platform.machine().lower() in {"i386", "i486", "i586", "i686"} or (
        platform.machine().lower() in {"x86_64", "amd64"} and sys.maxsize < 2**32
    ):
        flags += ["-msse2", "-mfpmath=sse"]
    if platform.machine() == "s390x":
        flags += ["-fexcess-precision=fast"]  # under -std=c11 gcc computes floats as doubles there
    return flags


#: The stable ABI serves every CPython from 3.10 on; free-threaded builds do not have it.
LIMITED_API = not sysconfig.get_config_var("Py_GIL_DISABLED")

ffibuilder = FFI()
ffibuilder.cdef(declarations())
ffibuilder.set_source(
    "pb_kvcache._native",
    '#include "pb_kvcache.h"',
    sources=sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "csrc").glob("*.c")),
    include_dirs=[INCLUDE],
    extra_compile_args=compile_flags(),
    define_macros=[("Py_LIMITED_API", "0x030A0000")] if LIMITED_API else [],
    py_limited_api=LIMITED_API,
    depends=sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "csrc").rglob("*.h")),
)

if __name__ == "__main__":
    os.chdir(ROOT)
    ffibuilder.compile(verbose=True)
