"""What the command line writes to: terminals with and without colours, ASCII, full and closed outputs, interrupts."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.table import Table

from pb_kvcache import cli
from pb_kvcache.cli import _output, _stream
from pb_kvcache.cli._stream import fit

MODULE = (sys.executable, "-m", "pb_kvcache")
BENCH = ("bench", "--trace", "funnel-flat", "--policies", "snapkv,tova", "--budget", "2%")
BUDGET = ("budget", "--layers", "3")
ESCAPE = "\x1b"


def start(
    *arguments: str, variables: dict[str, str] | None = None, **options: object
) -> subprocess.CompletedProcess[str]:
    """Run the program from a folder that has no source tree of the package."""
    hidden = ("PYTHONIOENCODING", "PYTHONUTF8", "LC_ALL", "LC_CTYPE", "LANG", "NO_COLOR", "FORCE_COLOR")
    environment = {key: value for key, value in os.environ.items() if key not in hidden} | (variables or {})
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "cwd": Path(__file__).parent, **options}
    return subprocess.run((*MODULE, *arguments), env=environment, timeout=120, check=False, encoding="utf-8", **options)  # type: ignore[call-overload,no-any-return]


def in_terminal(*arguments: str, **variables: str) -> str:
    """Return what the program writes to a terminal of 80 columns, progress included."""
    pty = pytest.importorskip("pty", reason="needs pseudo-terminals")
    fcntl, struct, termios = (pytest.importorskip(name) for name in ("fcntl", "struct", "termios"))
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environment = {"PATH": os.environ["PATH"], "TERM": "xterm-256color", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}
    program = subprocess.Popen(
        (*MODULE, *arguments),
        env=environment | variables,
        cwd=Path(__file__).parent,
        stdin=slave,
        stdout=slave,
        stderr=slave,
    )
    os.close(slave)
    written = b""
    while True:
        try:
            part = os.read(master, 65536)
        except OSError:  # EIO: the program has ended
            break
        if not part:
            break
        written += part
    os.close(master)
    assert program.wait(60) == 0, written
    return written.decode()


# --- terminals


def test_a_terminal_gets_a_bar_with_a_total_and_the_best_row_in_bold() -> None:
    written = in_terminal(*BENCH)
    assert f"{ESCAPE}[1m" in written
    assert "replaying" in written
    assert "0/2" in written  # the first that is drawn
    assert "/?" not in written


def test_no_color_means_no_escape_at_all() -> None:
    written = in_terminal(*BENCH, NO_COLOR="1")
    assert ESCAPE not in written
    assert "\rreplaying 0/2\rreplaying 1/2\rreplaying 2/2\r" in written
    assert "TOVA" in written


def test_a_terminal_in_ascii_gets_ascii() -> None:
    written = in_terminal(*BENCH, LANG="C", LC_ALL="C")
    assert written.isascii()
    assert " us" in written


# --- encodings


@pytest.mark.parametrize(
    "variables", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C"}, {"LC_ALL": "POSIX", "LANG": "C.UTF-8"}]
)
def test_ascii_is_written_where_the_locale_has_no_more(variables: dict[str, str]) -> None:
    done = start(*BUDGET, variables=variables)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()
    assert "?" not in done.stdout
    assert [line.split() for line in done.stdout.splitlines()[1:4]] == [
        ["0", "819", "#" * 40],
        ["1", "512", "#" * 25],
        ["2", "204", "#" * 10],
    ]


def test_a_refusal_in_ascii_is_ascii() -> None:
    done = start("bench", "--trace", "東京", variables={"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 2
    assert done.stderr.isascii()
    assert r"\u6771\u4eac" in done.stderr


@pytest.mark.parametrize("variables", [{"LC_ALL": "C.UTF-8"}, {"LC_ALL": "C", "PYTHONIOENCODING": "utf-8"}])
def test_a_locale_or_a_user_that_says_utf8_gets_it(variables: dict[str, str]) -> None:
    assert "█" * 40 in start(*BUDGET, variables=variables).stdout


@pytest.mark.parametrize(
    ("text", "encoding", "shown"),
    [
        ("█▏ 3 µs \N{MINUS SIGN}0.5 …", "ascii", "#  3 us -0.5 ~"),
        ("█ 3 µs", "cp1252", "# 3 µs"),
        ("█ 3 µs", "utf-8", "█ 3 µs"),
        ("東", "latin-1", r"\u6771"),
        ("plain", "no such encoding", "plain"),
    ],
)
def test_what_an_encoding_has_not_becomes_the_nearest_ascii(text: str, encoding: str, shown: str) -> None:
    assert fit(text, encoding) == shown


# --- outputs that fail


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize(
    ("arguments", "unbuffered"),
    [(BUDGET, ""), (("budget", "--help"), ""), (("budget", "--help"), "1"), (("--version",), "1")],
)
def test_an_output_without_room_is_said_in_words(arguments: tuple[str, ...], unbuffered: str) -> None:
    with Path("/dev/full").open("wb") as full:
        done = start(*arguments, stdout=full, variables={"PYTHONUNBUFFERED": unbuffered})
    said = "pb-kvcache: cannot write to standard output: no space left on device\n"
    assert (done.returncode, done.stderr) == (2, said)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_errors_that_nobody_can_read_keep_the_status() -> None:
    with Path("/dev/full").open("wb") as full:
        assert start("budget", "--layers", "0", stderr=full).returncode == 2
        assert start("nonsense", stderr=full).returncode == 2
        assert start(*BUDGET, stderr=full).returncode == 0


def test_a_reader_of_the_help_who_has_gone_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = start("plan", "--help", stdout=write)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_file_that_cannot_be_written_is_not_taken_for_the_output(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["plan", "--layers", "2", "--budget", "9", "-o", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"pb-kvcache: {tmp_path}: Is a directory\n"


def test_an_error_of_the_system_is_said_without_its_number(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pb_kvcache.cli.budget.pyramid_budgets", fail)
    assert cli.main(BUDGET) == 2
    assert capsys.readouterr().err == "pb-kvcache: No space left on device\n"


# --- interrupts


INTERRUPTED = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(20)\n"


@pytest.mark.skipif(sys.platform == "win32", reason="sends a signal")
@pytest.mark.parametrize(("module", "how"), [("numpy", "-m"), ("numpy", "script"), ("rich", "script")])
def test_an_interrupt_while_modules_are_imported_is_quiet(module: str, how: str, tmp_path: Path) -> None:
    (tmp_path / "shadow" / module).mkdir(parents=True)
    (tmp_path / "shadow" / module / "__init__.py").write_text(INTERRUPTED)
    script = tmp_path / "pb-kvcache"
    script.write_text("import sys\nfrom pb_kvcache.cli import main\nsys.exit(main())\n")
    done = subprocess.run(
        (*(MODULE if how == "-m" else (sys.executable, str(script))), *BUDGET),
        env={**os.environ, "PYTHONPATH": str(tmp_path / "shadow")},
        cwd=Path(__file__).parent,
        capture_output=True,
        timeout=60,
        check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # a shell's job may ignore it
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


@pytest.mark.skipif(sys.platform == "win32", reason="sends a signal")
def test_an_import_by_another_program_leaves_its_interrupts_alone(tmp_path: Path) -> None:
    program = (
        "import signal, sys\n"
        "import pb_kvcache.cli\n"
        "assert signal.getsignal(signal.SIGINT) is signal.default_int_handler\n"
        "sys.argv[0] = 'pb-kvcache'\n"  # as a worker of the program is told
        "from pb_kvcache import _start\n"
        "assert not _start.is_program()\n"
    )
    subprocess.run(
        (sys.executable, "-c", program),
        cwd=Path(__file__).parent,
        timeout=60,
        check=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


# --- tables and progress


def wide(name: str, columns: int) -> Table:
    table = Table(box=None, pad_edge=False, title="title")
    table.add_column("policy", no_wrap=True)
    for number in range(columns):
        table.add_column(f"column {number}", justify="right", no_wrap=True)
    table.add_row(name, *(f"{number}.123456" for number in range(columns)))
    return table


@pytest.mark.parametrize("columns", [1, 6, 7, 8, 20])
def test_columns_without_room_follow_below_with_the_names(columns: int, capsys: pytest.CaptureFixture[str]) -> None:
    name = "a name of words that stays whole"
    _output.print_table(wide(name, columns))
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert out.count("title") == 1
    assert out.count(name) == -(-columns // 4)  # 32, and 4 of 2 + 8 each
    for number in range(columns):
        assert out.count(f" {number}.123456") == 1
        assert f"column {number}" in out


def test_a_name_that_is_wider_than_the_terminal_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    _output.print_table(wide("n" * 100, 3))
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.split() == ["n" * 100, "0.123456", "1.123456", "2.123456"]


def test_progress_is_not_drawn_where_nobody_looks(capsys: pytest.CaptureFixture[str]) -> None:
    with _output.progress("working", 3) as show:
        show(1, 3)
    assert capsys.readouterr() == ("", "")


def test_a_line_of_progress_starts_with_its_total(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    for total, begun in ((3, "\rworking 0/3\rworking 2/3"), (None, "\rworking 2/3")):
        monkeypatch.setattr(sys, "stderr", Terminal())
        with _output.progress("working", total) as show:
            show(2, 3)
        assert sys.stderr.getvalue() == f"{begun}\r           \r"  # type: ignore[attr-defined]


def test_an_error_that_has_nowhere_to_go_is_not_printed_among_the_results(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    assert cli.main(["budget", "--layers", "0"]) == 2
    with pytest.raises(SystemExit):
        cli.main(["nonsense"])
    assert capsys.readouterr().out == ""


def test_a_stream_that_is_closed_takes_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    stream = _stream.Stream("stdout")
    assert stream.write("lost") == 4
    stream.flush()
    assert not stream.isatty()
    with pytest.raises(ValueError, match="standard output is closed"):
        stream.fileno()
