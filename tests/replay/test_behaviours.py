"""A signature whose calls take other times in some places is replayed with the values of each, in its share."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from settings import settings_of

from opgrip.replay.cases.cases import Case, make_cases
from opgrip.replay.cases.selection import Selection
from opgrip.replay.measuring.behaviours import BehaviourColumns
from opgrip.replay.measuring.measure import measure_cases
from opgrip.replay.reports.table import print_results
from opgrip.traces import load
from opgrip.traces.arguments import TensorSpec
from opgrip.traces.merge import merge
from opgrip.traces.records import Calls, Context, Header, Observed, Record, Scope, Signature, Thread, Values
from opgrip.traces.values.constant import Constant
from opgrip.traces.writer import TraceWriter

SPEC = TensorSpec((512, 128), (128, 1), torch.float32, "cpu", values=0)
OUTPUT = TensorSpec((512, 128), (128, 1), torch.float32, "cpu")
STEP_US = (40, 200, 44, 42, 41)
"""Calls of a step, each on memory of its own; the second one's values are others."""
DENORMAL = 1e-41


def write_trace(path: Path, steps: int = 3, looked_at: Sequence[int] = (0, 1), times: Sequence[int] = STEP_US) -> Path:
    """A trace of steps that take the same square roots, of which some are looked at in the first step."""
    count = steps * len(times)
    starts = [1_000_000 * (1 + place) for place in range(count)]
    memory = [number for place in range(count) for number in (place % len(times), 100 + place)]
    records: list[Record] = [
        *(Values(0, Constant(1.0)), Values(1, Constant(2.0)), Values(2, Constant(DENORMAL))),
        Signature(0, "operator", "aten.sqrt.default", (SPEC,), {}, OUTPUT),
        Context(0, {"threads": 1}),
        *(Scope(0, "layer", "L", "forward", None, "step", "nets.py", 7, context=0), Thread(0, "main")),
        *(Observed(0, [2 if place == 1 else 1], OUTPUT, starts[place] - 500_000) for place in looked_at),
        Calls(0, [0] * count, [0] * count, starts, [1000 * us for us in times] * steps, [2] * count, memory),
    ]
    with TraceWriter(path, Header({})) as writer:
        for record in records:
            writer.write(record)
    return path


def drawn(case: Case) -> list[float]:
    """The constant that each variant of a case is drawn from."""
    numbers = [signature.args[0].values for signature in (case.signature, *case.variants)]
    return [case.values[number].value for number in numbers]  # type: ignore[union-attr]


def test_a_case_has_the_values_of_each_place_and_their_shares(tmp_path: Path) -> None:
    (case,) = make_cases(load(write_trace(tmp_path / "t.jsonl"), partial=True))
    assert (case.number, case.count, case.captured_us) == (0, 15, 42)
    assert drawn(case) == [2.0, DENORMAL]
    assert [len(item.calls) for item in case.behaviours] == [12, 3]
    assert [item.captured_us for item in case.behaviours] == pytest.approx([41.5, 200])
    # each place for itself is not scattered
    assert case.captured_spread is not None
    assert case.captured_spread < 0.1


def test_split_gives_a_case_for_each_way(tmp_path: Path) -> None:
    cases = make_cases(load(write_trace(tmp_path / "t.jsonl"), partial=True), Selection(split=True))
    assert [(case.count, case.captured_us, drawn(case)) for case in cases] == [
        (3, 200, [DENORMAL]),
        (12, 41.5, [2.0]),
    ]
    assert len({case.number for case in cases} | {0}) == 3
    assert sum(case.share for case in cases) == pytest.approx(1)
    assert cases[0].behaviours[0].place == "layer step nets.py:7"


@pytest.mark.parametrize(
    ("looked_at", "times"), [((0,), STEP_US), ((), STEP_US), ((0, 2), STEP_US), ((0, 1), (40, 50, 44, 42, 41))]
)
def test_places_that_take_as_long_or_were_not_looked_at_are_one_way(
    looked_at: Sequence[int], times: Sequence[int], tmp_path: Path
) -> None:
    trace = load(write_trace(tmp_path / "t.jsonl", looked_at=looked_at, times=times), partial=True)
    for split in (False, True):
        (case,) = make_cases(trace, Selection(split=split))
        assert case.behaviours == ()
        assert case.number == 0


def test_a_row_tells_the_ways_apart_and_each_runs_in_its_share(tmp_path: Path) -> None:
    case, *_ = make_cases(load(write_trace(tmp_path / "t.jsonl"), partial=True))
    ((row,),) = list(measure_cases([case], settings_of(iterations=40)))
    told = BehaviourColumns.of(row)
    assert told.behaviour_shares == [0.8, 0.2]
    assert told.behaviours_captured_us == pytest.approx([41.5, 200])
    assert told.behaviours_us is not None
    assert told.behaviours_us[1] > 1.5 * told.behaviours_us[0]
    # most calls behave so
    assert row.median_us == pytest.approx(told.behaviours_us[0], rel=0.5)
    text = io.StringIO()
    print_results([row], text)
    assert "80% of calls captured 41.5, replayed" in " ".join(text.getvalue().split())
    assert "--split gives each a row" in " ".join(text.getvalue().split())


def test_merged_traces_know_the_places(tmp_path: Path) -> None:
    paths = [write_trace(tmp_path / f"{name}.jsonl") for name in ("a", "b")]
    merge(paths, tmp_path / "all.jsonl", partial=True)
    (case,) = make_cases(load(tmp_path / "all.jsonl", partial=True))
    assert [len(item.calls) for item in case.behaviours] == [24, 6]
