"""Fixtures that the tests share."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

# Machines are shared and noisy: no test fails for being slow.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")

ROOT = Path(__file__).parents[1]

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run a program: its output as text, and a failure that shows it.

    In a folder of its own where no `cwd` is given: from the clone Python would find the source tree before the package.
    """
    elsewhere = tmp_path_factory.mktemp("elsewhere")

    def run_program(*command: object, status: int = 0, **options: object) -> subprocess.CompletedProcess[str]:
        options.setdefault("cwd", elsewhere)
        done = subprocess.run(
            [str(part) for part in command], capture_output=True, text=True, check=False, timeout=600, **options
        )
        assert done.returncode == status, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    return run_program


@pytest.fixture(scope="session")
def c_build(tmp_path_factory: pytest.TempPathFactory, run: Run) -> Path:
    """Build the C library with its tests and examples once: the folder of the build."""
    assert shutil.which("cmake"), "the C tests need cmake: it is in the extra pb-kvcache[test]"
    build = tmp_path_factory.mktemp("c-build")
    run("cmake", "-S", ROOT / "csrc", "-B", build, "-DPB_KVCACHE_WERROR=ON", "-DPB_KVCACHE_BENCH=ON")
    run("cmake", "--build", build, "--parallel", "2")
    return build
