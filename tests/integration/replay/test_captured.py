"""Tests of captured times: calls that count for a case, the spread of its calls, and marks of doubtful times."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from programs import ROOT
from settings import settings_of

from opgrip.replay.cases.cases import Case, make_cases
from opgrip.replay.reports.results_table import DOUBTFUL, print_results
from opgrip.replay.run.workload import empty_row
from opgrip.traces import load
from opgrip.traces.io.writer import TraceWriter
from opgrip.traces.schema.arguments import TensorSpec
from opgrip.traces.schema.records import Calls, Header, Record, Scope, Signature, Thread

SPEC = TensorSpec((2, 3), (3, 1), torch.float32, "cpu")


def case_of(path: Path, durations_us: Sequence[int], perturbed: Sequence[tuple[int, int]] = ()) -> Case:
    """Return the case of calls with these durations."""
    count = len(durations_us)
    starts, durations = [place * 10**9 for place in range(count)], [time * 1000 for time in durations_us]
    calls = Calls(0, [0] * count, [0] * count, starts, durations, [2] * count, [1, 2] * count)
    records: list[Record] = [
        *(Scope(0, "m", "M", "forward"), Thread(0, "main")),
        Signature(0, "operator", "aten.sin.default", (SPEC,), {}, SPEC),
        replace(calls, perturbed=list(perturbed)),
    ]
    with TraceWriter(path, Header({})) as writer:
        for record in records:
            writer.write(record)
    (case,) = make_cases(load(path))
    return case


def test_perturbed_call_counts_fully_but_not_in_the_median(tmp_path: Path) -> None:
    case = case_of(tmp_path / "t.jsonl", [900, 10, 12, 14], [(0, 1)])
    assert (case.count, case.captured_us, case.captured_total_us, case.perturbed) == (4, 12, 936, 1)
    assert case.captured_spread == pytest.approx(2 / 12)


@pytest.mark.parametrize(
    ("durations", "perturbed", "is_marked"),
    [
        ([10, 11, 12], [], False),
        ([10, 10, 20, 30], [], True),
        ([10], [], True),
        ([10, 11, 90], [(2, 1)], False),
        ([10, 10, 10], [(0, 3)], True),
    ],
)
def test_doubtful_captured_time_is_marked_and_the_mark_explained(
    durations: list[int], perturbed: list[tuple[int, int]], is_marked: bool, tmp_path: Path
) -> None:
    case = case_of(tmp_path / "t.jsonl", durations, perturbed)
    settings = settings_of()
    (way,) = settings.variants(case)
    text = io.StringIO()
    print_results([empty_row(case, way, settings)], text)
    assert (DOUBTFUL in text.getvalue()) is is_marked
    assert (f"{DOUBTFUL} doubtful: a single call" in text.getvalue()) is is_marked


def test_manual_and_table_explain_the_mark_identically(tmp_path: Path) -> None:
    case, settings = case_of(tmp_path / "t.jsonl", [10]), settings_of()
    text = io.StringIO()
    print_results([empty_row(case, settings.variants(case)[0], settings)], text)
    (legend,) = (line for line in text.getvalue().splitlines() if line.startswith(DOUBTFUL))
    manual = (ROOT / "docs" / "replay.md").read_text(encoding="utf-8").splitlines()
    assert {line.strip() for line in manual if line.strip().startswith(DOUBTFUL)} == {legend}
