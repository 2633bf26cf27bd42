"""Wheel, sdist and the file name ``build.py``."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import pb_kvcache

from .conftest import ROOT, Run


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory, run: Run) -> Path:
    """Build the sdist from a copy of the tracked files, so that nothing lands in the source tree."""
    folder = tmp_path_factory.mktemp("sdist")
    script = "import sys; from setuptools import build_meta; print(build_meta.build_sdist(sys.argv[1]))"
    done = run(sys.executable, "-c", script, folder, cwd=_copy(folder / "source"))
    return folder / done.stdout.splitlines()[-1]


def _copy(target: Path) -> Path:
    ignore = shutil.ignore_patterns(".*", "*.egg-info", "__pycache__", "build", "build-*", "dist", "*.so", "_native.c")
    shutil.copytree(ROOT, target, ignore=ignore)
    return target


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory, run: Run) -> Path:
    """Build a wheel from the sdist alone, with what is installed and without a network."""
    folder = tmp_path_factory.mktemp("wheel")
    offline = ("--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check")
    run(sys.executable, "-m", "pip", "wheel", *offline, "-w", folder, sdist)
    (built,) = folder.glob("*.whl")
    return built


def test_sdist_has_all_that_a_build_and_its_tests_need(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for folder, pattern in (("csrc", "**/*.[ch]"), ("vectors", "*.json"), ("tests", "**/*.py"), ("tests", "c/*.[ch]")):
        wanted = {path.relative_to(ROOT).as_posix() for path in (ROOT / folder).glob(pattern)}
        assert wanted - names == set()
    assert {"build.py", "setup.py", "pyproject.toml", "LICENSE", "README.md", "csrc/CMakeLists.txt"} <= names
    assert {"CITATION.cff", "conda/recipe.yaml", "docs/conf.py", "docs/build_site", "examples/tour.ipynb"} <= names


def test_wheel_built_from_the_sdist_is_complete_and_tagged_for_the_stable_abi(wheel: Path) -> None:
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        assert re.search(r"-cp3\d+-cp3\d+t-", wheel.name)
    else:
        assert re.search(r"-cp310-abi3-", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for path in (ROOT / "pb_kvcache").rglob("*.py"):
        assert path.relative_to(ROOT).as_posix() in names
    for path in (ROOT / "vectors").glob("*.json"):
        assert f"pb_kvcache/vectors_data/{path.name}" in names
    assert {
        "pb_kvcache/py.typed",
        "pb_kvcache/_native.pyi",
        "pb_kvcache/data/filler.txt",
        "pb_kvcache/data/curves-smollm2-135m.npz",
        "pb_kvcache/data/curves-smollm2-135m-snapkv.npz",
    } <= names
    assert [name for name in names if name.startswith(("tests", "csrc", "build"))] == []
    assert pb_kvcache.__version__ in wheel.name


def test_wheel_is_below_nine_megabytes(wheel: Path) -> None:
    assert wheel.stat().st_size < 9_000_000


def test_python_m_build_in_the_root_says_what_to_run(run: Run) -> None:
    done = run(sys.executable, "-m", "build", status=1, cwd=ROOT)
    assert "pip wheel" in done.stderr


def test_wheel_works_where_the_source_is_not(wheel: Path, tmp_path: Path, run: Run) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    script = (
        "import sys; sys.path.insert(0, 'site'); import pb_kvcache, pb_kvcache.cli; "
        "assert pb_kvcache.__file__.startswith(sys.argv[1]); sys.exit(pb_kvcache.cli.main(['vectors']))"
    )
    done = run(sys.executable, "-c", script, tmp_path / "site", cwd=tmp_path)
    assert re.fullmatch(r"\d+ passed, 0 failed", done.stdout.splitlines()[-1])


@functools.cache
def interpreters() -> dict[str, Path]:
    """Return the other CPythons of this machine that take the stable-ABI wheel, one for each minor version."""
    tell = (
        "import sys, sysconfig; "
        "print(sys.implementation.name, *sys.version_info[:2], sysconfig.get_config_var('Py_GIL_DISABLED') or 0)"
    )
    names = [f"python3.{minor}" for minor in range(10, 20)]
    places = [Path(found) for name in names if (found := shutil.which(name))]
    for pattern in (".pyenv/versions/*/bin/python3", ".local/share/uv/python/*/bin/python3"):
        places += sorted(Path.home().glob(pattern))
    for pattern in ("usr/bin/python3.*", "usr/local/bin/python3.*", "opt/python/*/bin/python3"):
        places += [place for place in sorted(Path("/").glob(pattern)) if re.fullmatch(r"python3(\.\d+)?", place.name)]
    found = {f"{sys.version_info.major}.{sys.version_info.minor}": Path(sys.executable)}
    for place in places:
        done = subprocess.run([place, "-c", tell], capture_output=True, text=True, timeout=60, check=False)
        kind, *numbers = done.stdout.split() or [""]  # a shim of pyenv without a version says nothing
        if kind == "cpython" and (version := tuple(map(int, numbers[:2]))) >= (3, 10) and numbers[2] == "0":
            found.setdefault(".".join(map(str, version)), place)
    return dict(list(found.items())[1:])


@pytest.mark.parametrize("version", [f"3.{minor}" for minor in range(10, 16)])
def test_wheel_runs_on_every_other_cpython_here(version: str, wheel: Path, tmp_path: Path, run: Run) -> None:
    if "abi3" not in wheel.name:
        pytest.skip("a free-threaded build has no stable ABI")
    if version not in interpreters():
        pytest.skip(f"this machine has no other CPython {version}")
    home = tmp_path / "environment"
    run(interpreters()[version], "-m", "venv", "--without-pip", home)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", home / "bin" / "python")
    # What the wheel needs comes from the registry. A machine that does not reach it says nothing of the wheel.
    needed = [name for name in metadata.requires("pb-kvcache") or [] if "extra ==" not in name]
    command = [str(part) for part in (*pip, "install", "--no-compile", "--only-binary=:all:", *needed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, cwd=tmp_path)
    if done.returncode:
        pytest.skip(f"{', '.join(needed)} could not be had for CPython {version}: {done.stderr.splitlines()[-1]}")
    run(*pip, "install", "--no-compile", "--no-index", wheel)
    run(*pip, "check")
    done = run(home / "bin" / "pb-kvcache", "vectors")
    assert re.fullmatch(r"\d+ passed, 0 failed", done.stdout.splitlines()[-1])


def test_a_source_tree_that_is_not_compiled_says_what_to_do(tmp_path: Path, run: Run) -> None:
    _copy(tmp_path / "source")
    done = run(sys.executable, "-S", "-c", "import pb_kvcache", status=1, cwd=tmp_path / "source")
    assert "has no compiled module" in done.stderr
    assert "pip install -e ." in done.stderr


def test_an_old_setuptools_is_told_which_one_is_needed(tmp_path: Path, run: Run) -> None:
    (tmp_path / "setuptools.py").write_text('__version__ = "65.5.0"\n')
    script = "import runpy, sys; sys.path.insert(0, sys.argv[1]); runpy.run_path(sys.argv[2])"
    done = run(sys.executable, "-c", script, tmp_path, ROOT / "setup.py", status=1)
    assert "needs setuptools 77 or newer, here is 65.5.0" in done.stderr
    assert "--no-build-isolation" in done.stderr


def test_what_a_build_and_the_tests_leave_is_ignored_by_git(tmp_path: Path, run: Run) -> None:
    if not (ROOT / ".gitignore").exists():
        pytest.skip("the sdist has no .gitignore")
    run("git", "init", "-q", tmp_path)
    (tmp_path / ".gitignore").write_text((ROOT / ".gitignore").read_text())
    left = [
        "pb_kvcache/_native.abi3.so",
        "pb_kvcache/_native.cpython-313t-x86_64-linux-gnu.so",
        "pb_kvcache/_native.pypy311-pp73-darwin.so",
        "pb_kvcache/_native.cp310-win_amd64.pyd",
        "pb_kvcache/_native.c",
        "pb_kvcache/_native.o",
        "pb_kvcache/_native.obj",
        "pb_kvcache/__pycache__/_policy.cpython-311.pyc",
        "pb_kvcache.egg-info/PKG-INFO",
        "csrc/status.o",
        "build/temp.linux-x86_64-cpython-311/csrc/status.o",
        "dist/pb_kvcache-0.1.0.tar.gz",
        ".coverage",
        "Release/_native.lib",
    ]
    for name in left:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert run("git", "status", "--short", cwd=tmp_path).stdout.split() == ["??", ".gitignore"]
