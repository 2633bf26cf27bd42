"""Ctrl-C while ``pb-kvcache bench`` has workers: one exit status, nothing said, no process left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux's /proc")

PROGRAM = """
import signal
import sys
from pb_kvcache.cli import main

signal.signal(signal.SIGINT, signal.default_int_handler)  # a program started in the background ignores it
sys.exit(main(["bench", "--trace", "decode-4096", "--jobs", "2", "--json"]))
"""


def living(group: int) -> list[str]:
    """Return the command lines of a process group's processes, without those that have ended."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, process_group = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(process_group) == group and state != "Z":
                found.append((folder / "cmdline").read_text())
        except OSError:  # it has ended in the meantime
            continue
    return found


def wait_for(group: int, workers: int, seconds: float) -> bool:
    """Wait until a group has so many workers, or, for 0, no process at all."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        processes = living(group)
        if len([line for line in processes if "popen_loky" in line]) >= workers if workers else not processes:
            return True
        time.sleep(0.05)
    return False


# A terminal sends the signal to all processes, `kill` to the one.
@pytest.mark.parametrize("send", [os.killpg, os.kill])
@pytest.mark.parametrize("delay", [0.5, 2])
def test_an_interrupt_ends_the_workers_too(send: object, delay: float, tmp_path: Path) -> None:
    pytest.importorskip("joblib", reason="needs the bench extra")
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        start_new_session=True,
    ) as program:
        try:
            assert wait_for(program.pid, 2, 120)
            time.sleep(delay)  # the workers are still importing, or at work, which takes ten seconds
            assert program.poll() is None
            assert callable(send)
            send(program.pid, signal.SIGINT)
            out, err = program.communicate(timeout=60)
            assert (program.returncode, out) == (130, "")
            assert "Traceback" not in err
            assert wait_for(program.pid, 0, 30), living(program.pid)
        finally:
            for line in living(program.pid)[:1]:
                print(f"left: {line!r}")
                os.killpg(program.pid, signal.SIGKILL)
