"""Parts of another tool's file that could not be converted to calls: reported whenever the file is replayed or
shown.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from programs import SHIPPED_TRACES, run_command, succeed

from opgrip.replay.cases.selection import no_calls, unconverted
from opgrip.traces import load
from opgrip.traces.schema.records import Dropped

# A file of DLOP-Bench, the table of `abs`, with a valid and an invalid row.
GOOD_ROW_AND_BAD = '{"input": [[4], ["x"]]}'


def test_replay_reports_calls_of_a_file_that_it_leaves_out(tmp_path: Path) -> None:
    (tmp_path / "abs.json").write_text(GOOD_ROW_AND_BAD)
    done = succeed("opreplay", "abs.json", "--iterations", "1", cwd=tmp_path)
    (line,) = [line for line in done.stderr.splitlines() if "not converted" in line]
    assert "1 call of the file not converted: 1 abs: " in line


@pytest.mark.parametrize("words", [(), ("--sequence",), ("--unit", "module")])
def test_file_without_convertible_calls_reports_the_reason(words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "mhaf.json").write_text('{"query": [[4, 2, 8]]}')
    done = run_command("opreplay", "mhaf.json", *words, cwd=tmp_path)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2
    assert "1 mhaf: TypeError: multi_head" in line


def test_captured_trace_has_no_conversion_note() -> None:
    trace = load(SHIPPED_TRACES[0])
    assert unconverted(trace) is None
    assert "capture a program" in str(no_calls(trace))


def test_most_frequent_unconverted_operators_are_named_and_others_counted() -> None:
    trace = load(SHIPPED_TRACES[0])
    assert trace.end is not None
    dropped = [Dropped(f"op{number}", "of another version", number) for number in range(1, 6)]
    converted = replace(trace, header=trace.header | {"converted_from": "x"}, end=replace(trace.end, dropped=dropped))
    assert unconverted(converted) == (
        "15 calls of the file not converted: 5 op5: of another version; 4 op4: of another version; "
        "3 op3: of another version; and 2 others: see opgrip trace info"
    )


def test_shares_of_a_file_without_times_are_shares_of_calls(tmp_path: Path) -> None:
    (tmp_path / "abs.json").write_text(GOOD_ROW_AND_BAD)
    shown = run_command("opgrip", "trace", "info", "abs.json", cwd=tmp_path).stdout
    assert "operators by share of calls" in shown
    assert "median x calls us" not in shown
    assert "measured us" not in shown
    assert "median x calls us" in run_command("opgrip", "trace", "info", SHIPPED_TRACES[0]).stdout
