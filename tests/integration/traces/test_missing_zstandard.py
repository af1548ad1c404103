"""Tests of file names that end in `.zst` when zstandard is not installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from opgrip.cli.output_files import check_writable
from opgrip.tools.opgrip import main
from opgrip.traces import UserError, load
from opgrip.traces.io.writer import TraceWriter
from opgrip.traces.schema.records import Header


@pytest.fixture(autouse=True)
def _without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)


@pytest.mark.parametrize("verb", ["convert", "trim"])
def test_writing_is_refused_in_one_line_and_leaves_no_file(
    verb: str, tiny_trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "t.jsonl.zst")
    words = [str(tiny_trace), out] if verb == "convert" else [str(tiny_trace), "-o", out]
    assert main(["trace", verb, *words]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"opgrip trace {verb}: error: a .zst file needs the package zstandard: pip install 'opgrip[zstd]'"]
    assert list(tmp_path.iterdir()) == []


def test_a_writer_whose_sink_cannot_be_made_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opgrip.cli.output_files.check_compression", lambda name: None)
    with pytest.raises(UserError, match="needs the package zstandard"):
        TraceWriter(tmp_path / "t.jsonl.zst", Header({}))
    assert list(tmp_path.iterdir()) == []


def test_a_command_that_writes_in_the_end_says_so_in_the_beginning(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="needs the package zstandard"):
        check_writable(tmp_path / "t.jsonl.zst", force=False)
    check_writable(tmp_path / "t.jsonl.gz", force=False)


def test_reading_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.zst"
    path.write_bytes(b"\x28\xb5\x2f\xfd")
    with pytest.raises(UserError, match=r"pip install 'opgrip\[zstd\]'"):
        load(path)
