"""Tables on terminals of any width."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opgrip.cli.plural import counted
from opgrip.cli.terminal import fold, shorten
from opgrip.display.tables import TableColumn, print_table

NUMBER = re.compile(r"\d[\d.,]*\d|\d")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def printed(columns: list[TableColumn], width: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    terminal = Terminal()
    print_table(columns, terminal)
    return terminal.getvalue().splitlines()


def columns(rows: int = 3) -> list[TableColumn]:
    return [
        TableColumn("share", [f"{9.9 / (row + 1):.1f}%" for row in range(rows)], rank=1),
        TableColumn("operator", ["aten.native_batch_norm_backward.default"] * rows, is_number=False, least=20),
        TableColumn("shapes", ["float32[2,64,64,64] " * 6] * rows, is_number=False, least=40, below=True),
        TableColumn("replayed us", [f"{1234567 + row:,}" for row in range(rows)]),
        TableColumn("p10", [f"{1034567 + row:,}" for row in range(rows)], rank=2),
        TableColumn("p90", [f"{1934567 + row:,}" for row in range(rows)], rank=3),
        TableColumn("mean", [f"{1334567 + row:,}" for row in range(rows)], rank=4),
    ]


@given(st.text(alphabet="a1.,_ []x-", max_size=80), st.integers(8, 40))
def test_a_folded_text_is_the_same_text_and_no_number_is_cut(text: str, width: int) -> None:
    lines = fold(text, width)
    assert "".join("".join(lines).split()) == "".join(text.split())
    assert all(len(line) <= width for line in lines) or not text.strip()
    digits = [match for match in re.findall(r"[\d.]*\d[\d.]*", text) if len(match) <= width]
    assert all(any(match in line for line in lines) for match in digits)


@given(st.text(alphabet="a1., x\x1b", max_size=60), st.integers(4, 30))
def test_a_shortened_text_ends_with_a_whole_number(text: str, most: int) -> None:
    short = shorten(text, most)
    assert len(short) <= most
    head = short.removesuffix("…")
    numbers = re.findall(r"\d+", head)
    assert all(number in re.findall(r"\d+", text) for number in numbers) or "\x1b" in text


def test_a_text_of_megabytes_is_cut_before_anything_is_made_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pasted = [TableColumn("name", ["x" * 4_000_000, *["y"] * 1000], is_number=False), TableColumn("n", ["1"] * 1001)]
    pipe = io.StringIO()
    print_table(pasted, pipe)
    assert max(map(len, pipe.getvalue().splitlines())) < 200
    assert all(len(line) <= 80 for line in printed(pasted, 80, monkeypatch))


@pytest.mark.parametrize("width", [30, 59, 60, 80, 100, 120, 200])
def test_a_table_fits_its_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = printed(columns(), width, monkeypatch)
    assert all(len(line) <= width for line in lines)
    assert "1,234,567" in NUMBER.findall("\n".join(lines))
    is_list = not any("───" in line for line in lines)
    assert is_list == (width < 60)
    # whatever leaves, what was asked for stays
    assert any("replayed" in line for line in lines)


def test_columns_leave_by_their_rank_and_text_goes_below_first(monkeypatch: pytest.MonkeyPatch) -> None:
    wide, middle, narrow = (printed(columns(), width, monkeypatch) for width in (200, 100, 60))
    assert "shapes" in "".join(wide[:2])
    assert "shapes" not in "".join(middle[:2])
    assert "mean" in "".join(middle[:2])
    assert "mean" not in "".join(narrow[:2])
    assert "p10" in "".join(narrow[:2])


def test_numbers_and_nouns_agree() -> None:
    assert [counted(0, "case"), counted(1, "case"), counted(1200, "case")] == ["0 cases", "1 case", "1,200 cases"]
    assert [counted(1, "pass", "passes"), counted(2, "pass", "passes")] == ["1 pass", "2 passes"]


def test_a_word_without_separators_is_broken_beside_its_numbers() -> None:
    assert fold("abcdefgh1234xyz", 10) == ["abcdefgh", "1234xyz"]
    assert fold("float32[2,64,64] [1,1] False", 12) == ["float32[2,", "64,64] [1,1]", "False"]
