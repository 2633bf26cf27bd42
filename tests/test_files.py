"""A file is written as a whole or not at all, whatever it is and whatever happens, and the error names it."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pb_kvcache import cli
from pb_kvcache._files import replacing
from pb_kvcache.lab import bench, page, traces
from pb_kvcache.lab.traces import Trace

posix = pytest.mark.skipif(os.name != "posix", reason="modes, links and special files of POSIX")
full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")


def write(path: Path | str, content: bytes) -> None:
    with replacing(path) as file:
        file.write(content)


def test_a_new_file_and_one_that_was_there_hold_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "f"
    for content in (b"long, and gone", b"short"):
        write(path, content)
        assert path.read_bytes() == content
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError("in words"),
        ValueError("no such format"),
        "\ud800".encode,
        KeyboardInterrupt(),
        MemoryError(),
    ],
)
@pytest.mark.parametrize("there", [True, False])
def test_a_write_that_fails_leaves_what_was_there_and_names_the_file(
    error: BaseException | Callable[[], bytes], there: bool, tmp_path: Path
) -> None:
    path = tmp_path / "f"
    if there:
        path.write_bytes(b"precious")

    def fail() -> None:
        with replacing(path) as file:
            file.write(b"half")
            raise error if isinstance(error, BaseException) else AssertionError(error())

    with pytest.raises((OSError, ValueError, KeyboardInterrupt, MemoryError)) as raised:
        fail()
    if isinstance(raised.value, (OSError, ValueError)):
        assert str(path) in str(raised.value)
    assert [p.name for p in tmp_path.iterdir()] == (["f"] if there else [])
    assert not there or path.read_bytes() == b"precious"


def test_a_file_that_the_block_could_not_read_is_named_instead(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as raised, replacing(tmp_path / "f"):
        (tmp_path / "source").read_bytes()
    assert raised.value.filename == str(tmp_path / "source")


@posix
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664, 0o755])
def test_the_mode_of_a_file_is_kept_and_a_new_one_has_the_umasks(mode: int, tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_bytes(b"")
    old.chmod(mode)
    mask = os.umask(0o027)
    try:
        write(old, b"x")
        write(new, b"x")
    finally:
        os.umask(mask)
    assert stat.S_IMODE(old.stat().st_mode) == mode
    assert stat.S_IMODE(new.stat().st_mode) == 0o640


@posix
@pytest.mark.skipif(getattr(os, "geteuid", lambda: 1)() != 0, reason="only root gives files away")
def test_the_owner_of_a_file_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"")
    os.chown(path, 12, 34)
    write(path, b"x")
    assert (path.stat().st_uid, path.stat().st_gid) == (12, 34)


@posix
@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_a_link_to_the_new_content(there: bool, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    target, link = tmp_path / "folder" / "target", tmp_path / "link"
    if there:
        target.write_bytes(b"old")
    link.symlink_to(Path("folder") / "target")
    write(link, b"new")
    assert link.is_symlink()
    assert target.read_bytes() == b"new"
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["folder", "link", "target"]


@posix
def test_what_cannot_be_a_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").write_bytes(b"")
    for path, number in (
        (str(tmp_path), errno.EISDIR),
        (f"{tmp_path / 'new'}/", errno.EISDIR),
        (str(tmp_path / "loop"), errno.ELOOP),
        (str(tmp_path / "no" / "f"), errno.ENOENT),
        (str(tmp_path / "file" / "f"), errno.ENOTDIR),
        (str(tmp_path / ("n" * 300)), errno.ENAMETOOLONG),
        ("", errno.ENOENT),
    ):
        with pytest.raises(OSError, match=r"\[Errno") as raised:
            write(path, b"x")
        assert (raised.value.filename, raised.value.errno) == (path, number)
    with pytest.raises(ValueError, match="null"):
        write("a\0b", b"x")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "loop"]


def test_a_name_may_be_as_long_as_the_system_allows(tmp_path: Path) -> None:
    write(tmp_path / ("n" * 255), b"x")
    assert len(list(tmp_path.iterdir())) == 1


def test_a_read_only_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"precious")
    path.chmod(0o444)
    monkeypatch.setattr(os, "access", lambda name, mode: Path(name).stat().st_mode & 0o222 != 0)  # not root
    with pytest.raises(PermissionError) as raised:
        write(path, b"x")
    assert raised.value.filename == str(path)
    assert path.read_bytes() == b"precious"


@full
def test_a_full_device_is_named() -> None:
    with pytest.raises(OSError, match="/dev/full") as raised:
        write("/dev/full", b"x")
    assert raised.value.errno == errno.ENOSPC
    assert stat.S_ISCHR(Path("/dev/full").stat().st_mode)


@posix
def test_a_fifo_is_written_to_and_stays_one(tmp_path: Path) -> None:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(path.read_bytes()))
    reader.start()
    traces.save(path, traces.funnel(1, 9))
    reader.join()
    traces.save(tmp_path / "t.npz", traces.funnel(1, 9))
    assert read == [(tmp_path / "t.npz").read_bytes()]
    assert stat.S_ISFIFO(path.stat().st_mode)


STDOUT = """
import sys
from pb_kvcache._files import replacing
print("before")
with replacing("/dev/stdout") as file:
    file.write(b"content\\n")
print("after")
"""


@pytest.mark.skipif(not Path("/dev/stdout").exists(), reason="needs /dev/stdout")
@pytest.mark.parametrize("to", ["file", "pipe"])
def test_standard_output_gets_everything_in_order(to: str, tmp_path: Path) -> None:
    path = tmp_path / "out"
    with path.open("wb") as file:
        done = subprocess.run(
            [sys.executable, "-c", STDOUT],
            stdout=file if to == "file" else subprocess.PIPE,
            cwd=Path(__file__).parent,
            check=True,
            timeout=120,
        )
    assert (path.read_bytes() if to == "file" else done.stdout) == b"before\ncontent\nafter\n"


# --- everything that the package writes


class Evil(Trace):
    """A trace whose rows cannot be had, once it is asked to fail."""

    def rows(self, step: int) -> np.ndarray:
        if step == 3:
            raise KeyboardInterrupt
        return np.zeros((1, step), np.float32)


def test_an_interrupted_recording_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "t.npz"
    path.write_bytes(b"precious")
    with pytest.raises(KeyboardInterrupt):
        traces.save(path, Evil("evil", 1, 5))
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("t.npz", b"precious")]


def test_a_report_that_fails_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="needs the bench extra")
    results = bench.run(traces.funnel(1, 50), [10], ["tova"])
    (tmp_path / "index.html").write_text("precious")
    monkeypatch.setattr(page, "page", lambda *arguments: "\ud800")
    with pytest.raises(ValueError, match=r"index\.html: .*surrogates not allowed"):
        page.write(results, tmp_path, "x")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("index.html", "precious")]


@full
def test_a_command_that_runs_out_of_room_names_the_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the plot extra")
    (tmp_path / "index.html").symlink_to("/dev/full")
    report = ["bench", "--trace", "funnel", "--budgets", "20%", "--policies", "tova", "--report", str(tmp_path)]
    for arguments, path in (
        (["plan", "--layers", "4", "--budget", "64", "--plot", "/dev/full"], "/dev/full"),
        (report, str(tmp_path / "index.html")),
    ):
        assert cli.main(arguments) == 2
        assert capsys.readouterr().err == f"pb-kvcache: {path}: No space left on device\n"


def test_a_plot_of_no_known_format_leaves_the_old_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the plot extra")
    path = tmp_path / "plan.xyz"
    path.write_text("precious")
    assert cli.main(["plan", "--layers", "4", "--budget", "64", "--plot", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"pb-kvcache: {path}: ")
    assert error.count("\n") == 1
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("plan.xyz", "precious")]


@pytest.mark.parametrize(("name", "start"), [("p.svg", b"<?xml"), ("p.PDF", b"%PDF"), ("p", b"\x89PNG")])
def test_a_plot_has_the_format_of_its_name(name: str, start: bytes, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the plot extra")
    assert cli.main(["plan", "--layers", "4", "--budget", "64", "--plot", str(tmp_path / name)]) == 0
    assert (tmp_path / name).read_bytes().startswith(start)
    assert len(list(tmp_path.iterdir())) == 1
