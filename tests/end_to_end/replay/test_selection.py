"""Selection of the cases of a replay."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from programs import refusal, run_command, succeed

from opgrip.errors import UserError
from opgrip.replay import replay
from opgrip.traces import load


def test_list_shows_the_cases_and_runs_none(tiny_trace: Path, tmp_path: Path) -> None:
    done = succeed("opreplay", tiny_trace, "--list", "--top", "3", cwd=tmp_path)
    assert "replaying" not in done.stderr
    assert list(tmp_path.iterdir()) == []
    assert done.stdout.endswith("3 cases\n")
    signatures = {signature.number: signature.op for signature in load(tiny_trace).signatures}
    rows = [line.split() for line in done.stdout.splitlines() if "%" in line]
    assert len(rows) == 3
    assert all(signatures[int(row[0])] == row[3] for row in rows)


@pytest.mark.parametrize(
    "words", [["--exclude-op", "aten.a*"], ["--unit", "module", "--exclude-op", "features*"]], ids=["calls", "units"]
)
def test_exclude_op_removes_operators_and_units(tiny_trace: Path, words: list[str]) -> None:
    names = lambda *more: {  # noqa: E731
        line.split()[3]
        for line in run_command("opreplay", tiny_trace, "--list", *more).stdout.splitlines()
        if "%" in line
    }
    excluded = names(*words[:-2]) - names(*words)
    prefix = words[-1].rstrip("*")
    assert excluded
    assert all(name.startswith(prefix) for name in excluded)
    assert not any(name.startswith(prefix) for name in names(*words))


def test_excluding_all_cases_is_an_error(tiny_trace: Path) -> None:
    with pytest.raises(UserError, match="exclude_op= excludes all cases"):
        replay(tiny_trace, exclude_op="*")


def test_trace_info_writes_tables_with_all_rows(tiny_trace: Path, tmp_path: Path) -> None:
    table = load(tiny_trace).summary()
    words = ("opgrip", "trace", "info", tiny_trace, "--top", "1")
    assert run_command(*map(str, words), "--by", "op", "-o", tmp_path / "t.csv").returncode == 0
    assert pd.read_csv(tmp_path / "t.csv")["op"].tolist() == table["op"].tolist()
    assert run_command(*map(str, words), "-o", tmp_path / "t.json").returncode == 0
    tables = json.loads((tmp_path / "t.json").read_text(encoding="utf-8"))
    assert [row["calls"] for row in tables["op"]] == table["calls"].tolist()
    assert set(tables) == {"op", "module"}
    error = refusal(*map(str, words), "-o", tmp_path / "u.csv")
    assert "u.csv can contain only one table, got op and module: choose one with --by" in error
