"""Tables and progress on terminals of any width."""

from __future__ import annotations

import io
import re
import threading
import warnings
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from opgrip.cli.command import counted
from opgrip.cli.progress import QuietReporter, Reporter
from opgrip.cli.terminal import fold
from opgrip.display.tables import TableColumn, markdown_table, print_table

NUMBER = re.compile(r"\d[\d.,]*\d|\d")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def printed(
    columns: Sequence[TableColumn], rows: Sequence[object], width: int, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    terminal = Terminal()
    print_table(columns, rows, terminal)
    return terminal.getvalue().splitlines()


COLUMNS = (
    TableColumn("share", lambda row: 0.099 / (row + 1), ".1%", rank=1),
    TableColumn("operator", lambda row: "aten.native_batch_norm_backward.default", least=20),
    TableColumn("shapes", lambda row: "float32[2,64,64,64] " * 6, below=True),
    TableColumn("replayed us", lambda row: 1234567 + row, ",d"),
    TableColumn("p10", lambda row: 1034567 + row, ",d", rank=2),
    TableColumn("p90", lambda row: 1934567 + row, ",d", rank=3),
    TableColumn("mean", lambda row: 1334567 + row, ",d", rank=4),
    TableColumn("speed-up", lambda row: None, ".2f", when=lambda row: False),
)


@given(st.text(alphabet="a1.,_ []x-", max_size=80), st.integers(8, 40))
def test_folded_text_is_complete_and_numbers_are_not_split(text: str, width: int) -> None:
    lines = fold(text, width)
    assert "".join("".join(lines).split()) == "".join(text.split())
    assert all(len(line) <= width for line in lines) or not text.strip()
    digits = [match for match in re.findall(r"[\d.]*\d[\d.]*", text) if len(match) <= width]
    assert all(any(match in line for line in lines) for match in digits)


def test_text_of_megabytes_is_cut_early(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = [TableColumn("name", str), TableColumn("n", len, "d")]
    rows = ["x" * 4_000_000, *["y"] * 1000]
    pipe = io.StringIO()
    print_table(columns, rows, pipe)
    assert max(map(len, pipe.getvalue().splitlines())) < 200
    assert all(len(line) <= 80 for line in printed(columns, rows, 80, monkeypatch))


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
def test_table_fits_its_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = printed(COLUMNS, range(3), width, monkeypatch)
    assert all(len(line) <= width for line in lines)
    assert "1,234,567" in NUMBER.findall("\n".join(lines))
    # columns that were requested stay, whatever else is removed
    assert any("replayed" in line for line in lines)


def test_table_in_a_pipe_has_no_colours_and_no_trailing_spaces() -> None:
    pipe = io.StringIO()
    columns = [TableColumn("op", "real"), TableColumn("us", "imag", ",.1f"), TableColumn("note", lambda row: None)]
    print_table(columns, [1 + 2000j, 10 + 3j], pipe, "times", style=lambda row: "red")
    assert (
        pipe.getvalue()
        == """\
times
op          us   note
─────────────────────
1.0    2,000.0   -
10.0       3.0   -

"""
    )


def test_markdown_table_escapes_text() -> None:
    columns = [TableColumn("op", str), TableColumn("us", len, "d")]
    rows = ["a|b*", "x_y"]
    assert markdown_table(columns, rows) == ["| op | us |", "| --- | --- |", r"| a\|b\* | 4 |", "| x_y | 3 |"]


def test_numbers_and_nouns_agree() -> None:
    assert [counted(0, "case"), counted(1, "case"), counted(1200, "case")] == ["0 cases", "1 case", "1,200 cases"]
    assert [counted(1, "pass", "passes"), counted(2, "pass", "passes")] == ["1 pass", "2 passes"]


def on_terminal(width: int = 80) -> tuple[Reporter, io.StringIO]:
    written = io.StringIO()
    reporter = Reporter("opcapture")
    reporter.console = Console(file=written, force_terminal=True, width=width)
    return reporter, written


def test_progress_uses_no_thread_while_something_is_measured() -> None:
    reporter, _ = on_terminal()
    # threads of other tests may end meanwhile
    before = set(threading.enumerate())
    with reporter.doing("timing", 3):
        assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("width", [20, 40, 60, 80, 160])
def test_narrow_terminal_shows_no_bar_and_whole_numbers(width: int) -> None:
    reporter, written = on_terminal(width)
    with reporter.doing("replaying 1234 cases on cuda:0", 1234) as advance:
        for _ in range(1234):
            advance()
    with reporter.following("replaying 5678 calls in their order") as on_progress:
        on_progress("timed runs", 123, 456)
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.getvalue()).replace("\r", "\n").splitlines()
    assert max(map(len, lines)) <= width
    assert any("1234/1234" in line for line in lines)
    assert any("123/456" in line and re.search(r"\d:\d\d:\d\d", line) for line in lines)
    assert not any("…" in line for line in lines)
    assert ("━" in written.getvalue()) == (width >= 80)
    assert any(line.startswith("replaying") for line in lines) == (width >= 40)


def test_jupyter_without_widgets_shows_nothing_and_does_not_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opgrip.cli.progress.has_widgets", lambda: False)
    reporter = QuietReporter("opgrip")
    written = io.StringIO()
    reporter.console = Console(file=written, force_jupyter=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with reporter.doing("replaying", 3) as advance:
            advance()
        with reporter.following("replaying") as on_progress:
            on_progress("timed runs", 1, 2)
    assert written.getvalue() == ""
