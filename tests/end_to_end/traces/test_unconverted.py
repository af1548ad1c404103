"""Parts of another tool's file that could not be converted to calls: reported whenever the file is replayed or
shown.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import SHIPPED_TRACES, run_command, succeed

from opgrip.replay.cases.cases import make_cases
from opgrip.traces import load

# A file of DLOP-Bench, the table of `abs`, with a valid and an invalid row.
GOOD_ROW_AND_BAD = '{"input": [[4], ["x"]]}'


def test_replay_reports_calls_of_a_file_that_it_leaves_out(tmp_path: Path) -> None:
    (tmp_path / "abs.json").write_text(GOOD_ROW_AND_BAD)
    done = succeed("opreplay", "abs.json", "--iterations", "1", cwd=tmp_path)
    (line,) = [line for line in done.stderr.splitlines() if "be converted" in line]
    assert "1 call of the file could not be converted: 1 abs: " in line


@pytest.mark.parametrize("words", [(), ("--sequence",), ("--unit", "module")])
def test_file_without_convertible_calls_reports_the_reason(words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "mhaf.json").write_text('{"query": [[4, 2, 8]]}')
    done = run_command("opreplay", "mhaf.json", *words, cwd=tmp_path)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2
    assert "1 mhaf: TypeError: multi_head" in line


def test_shares_of_a_file_without_times_are_shares_of_calls(tmp_path: Path) -> None:
    (tmp_path / "abs.json").write_text(GOOD_ROW_AND_BAD)
    shown = run_command("opgrip", "trace", "info", "abs.json", cwd=tmp_path).stdout
    assert "operators by share of calls" in shown
    assert "median x calls us" not in shown
    assert "measured us" not in shown
    assert "median x calls us" in run_command("opgrip", "trace", "info", SHIPPED_TRACES[0]).stdout


def test_cases_of_a_file_without_times_are_sorted_by_work(tmp_path: Path) -> None:
    calls = {"view": "T([9, 9], f32), [81]", "relu": "T([9, 9], f32)", "mm": "T([256, 256], f32), T([256, 256], f32)"}
    text = "".join(f"Operator: aten.{op}.default\ncnt: 3, (({args},), {{}})\n" for op, args in calls.items())
    (tmp_path / "calls.txt").write_text(text)
    cases = make_cases(load(tmp_path / "calls.txt"))
    assert [case.op.split(".")[1] for case in cases] == ["mm", "relu", "view"]
    assert sum(case.share for case in cases) == pytest.approx(1)
