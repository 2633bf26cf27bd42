"""What every subcommand shares: one line for what is refused, and an output that nobody may want to the end."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pb_kvcache import cli
from pb_kvcache.cli import _output
from pb_kvcache.lab import traces

PROGRAM = (sys.executable, "-c", "import sys; from pb_kvcache.cli import main; sys.exit(main())")
TABLE = ("budget", "--layers", "4")
JSON = ("budget", "--layers", "3000", "--json")


def start(*arguments: str, **options: object) -> subprocess.CompletedProcess[bytes]:
    # From a folder that has no source tree of the package, which Python would find before an installed one.
    options = {"stdout": subprocess.PIPE, "cwd": Path(__file__).parent, **options}
    environment = {**os.environ, **options.pop("variables", {})}
    return subprocess.run(
        (*PROGRAM, *arguments), stderr=subprocess.PIPE, env=environment, timeout=120, check=False, **options
    )


@pytest.mark.parametrize(
    "arguments", [[], ["nonsense"], ["budget"], ["budget", "--nonsense"], ["plan", "--layers", "3"]]
)
def test_a_command_line_that_is_wrong_is_refused_in_one_line(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert captured.err.startswith("pb-kvcache")


@pytest.mark.parametrize("arguments", [TABLE, JSON, ("plan", "--layers", "4", "--budget", "64")])
def test_a_reader_who_has_gone_is_no_error(arguments: tuple[str, ...]) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = start(*arguments, stdout=write)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [TABLE, JSON])
def test_an_output_without_room_is_an_error_in_one_line(arguments: tuple[str, ...]) -> None:
    with Path("/dev/full").open("wb") as full:
        done = start(*arguments, stdout=full)
    assert done.returncode == 2
    assert (done.stderr.startswith(b"pb-kvcache: "), done.stderr.count(b"\n")) == (True, 1)


@pytest.mark.skipif(sys.platform == "win32", reason="closes inherited files")
def test_standard_files_that_are_closed_are_not_written_to() -> None:
    def close() -> None:
        for number in (0, 1, 2):
            os.close(number)

    assert start(*TABLE, stdout=subprocess.DEVNULL, preexec_fn=close).returncode == 0
    assert start("budget", "--layers", "0", stdout=subprocess.DEVNULL, preexec_fn=close).returncode == 2


def test_an_output_that_cannot_show_bars_still_shows_numbers() -> None:
    for encoding in ("ascii", "cp1252"):
        done = start(*TABLE, variables={"PYTHONIOENCODING": encoding})
        assert (done.returncode, done.stderr) == (0, b"")
        assert [line.split()[:2] for line in done.stdout.splitlines()[1:5]] == [
            [b"0", b"819"],
            [b"1", b"614"],
            [b"2", b"409"],
            [b"3", b"204"],
        ]


@pytest.mark.parametrize("columns", ["0", "1", "10", "many"])
@pytest.mark.parametrize("terminal", ["", "1"])
def test_no_width_cuts_a_number(columns: str, terminal: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", columns)
        patch.setenv("FORCE_COLOR", terminal)  # and with it a terminal, for Rich
        patch.setenv("NO_COLOR", "1")
        assert cli.main(["plan", "--layers", "2", "--budget", "1000000", "--kv-heads", "8", "--head-dim", "128"]) == 0
    out = capsys.readouterr().out
    assert "…" not in out
    assert "1600000" in out
    assert "400000" in out


def test_an_interrupt_and_a_lack_of_memory_leave_no_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for error, status, said in (
        (KeyboardInterrupt(), 130, ""),
        (MemoryError(), 2, "pb-kvcache: MemoryError\n"),
        (ValueError("two\nlines"), 2, "pb-kvcache: two lines\n"),
    ):

        def fail(*arguments: object, error: BaseException = error) -> None:
            raise error

        monkeypatch.setattr("pb_kvcache.cli.budget.pyramid_budgets", fail)
        assert cli.main(TABLE) == status
        assert capsys.readouterr().err == said


def test_more_layers_than_any_model_has_are_refused_before_the_work(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = {"model_type": "llama", "num_attention_heads": 1, "hidden_size": 8, "num_hidden_layers": 4_000_000_000}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for arguments in (
        ["budget", "--layers", "4000000000"],
        ["plan", "--layers", "4000000000", "--budget", "8"],
        ["plan", "--model", str(tmp_path), "--budget", "8"],
    ):
        assert cli.main(arguments) == 2
        assert "4000000000: must be at most 65536" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content",
    ["[" * 100_000, '{"kind": [], "cases": []}', "[]", '{"kind": "policy", "cases": [[]]}', "\xff", "1" * 5000],
)
def test_a_file_that_holds_no_vectors_is_named(
    content: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "hostile.json").write_text(content, encoding="latin-1")
    assert cli.main(["vectors", str(tmp_path)]) == 2
    assert "hostile.json: is not a vector file" in capsys.readouterr().err


@pytest.mark.parametrize("content", ['{"model_type": ' + "1" * 5000 + "}", "[" * 100_000, "\xff"])
def test_a_file_that_is_no_configuration_is_named(
    content: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(content, encoding="latin-1")
    assert cli.main(["plan", "--model", str(tmp_path), "--budget", "8"]) == 2
    assert "config.json: not JSON: " in capsys.readouterr().err


def test_empty_weights_are_no_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--layers", "2", "--budget", "8", "--weights", ""]) == 2
    assert "--weights : must be numbers with commas between them" in capsys.readouterr().err


def test_a_trace_may_be_called_anything(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "t.npz"
    traces.save(path, traces.pack("[/bold] [red]", np.full((1, 20, 20), 1 / 20)))
    assert cli.main(["bench", "--trace", str(path), "--policies", "tova", "--budgets", "8"]) == 0
    assert "[/bold] [red]: 1 layer" in capsys.readouterr().out


def test_the_package_runs_as_the_command(tmp_path: Path) -> None:
    # From another folder: -m looks in the current one first, and in a clone that is the source without its module.
    done = subprocess.run(
        (sys.executable, "-m", "pb_kvcache", *TABLE, "--json"),
        cwd=tmp_path,
        capture_output=True,
        timeout=120,
        check=True,
    )
    assert json.loads(done.stdout)["shares"] == [819, 614, 409, 204]


def test_what_is_written_in_vain_is_raised_where_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.StringIO):
        def flush(self) -> None:
            raise OSError("full")

    monkeypatch.setattr(sys, "stdout", Full())
    with pytest.raises(OSError, match="full"), _output.complete():
        print("lost")


def test_a_file_that_is_not_there_is_named_without_a_number(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    missing = str(tmp_path / "none.npz")
    assert cli.main(["bench", "--trace", missing]) == 2
    assert capsys.readouterr().err == f"pb-kvcache: {missing}: No such file or directory\n"
