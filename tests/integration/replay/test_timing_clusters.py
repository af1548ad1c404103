"""Replayed and captured times: their comparison, and timing clusters, which run in proportion to their calls."""

import io
import json
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from made_runs import make_row
from programs import succeed
from settings import settings_of

from opgrip.capture import Capture
from opgrip.replay import replay
from opgrip.replay.cases.cases import Case, make_cases
from opgrip.replay.cases.selection import Selection
from opgrip.replay.reports.fidelity import with_doubts
from opgrip.replay.reports.outcome import Results
from opgrip.replay.reports.results_table import DOUBTFUL, MEANINGS, print_results
from opgrip.replay.results.ratios import ClusterColumns
from opgrip.replay.run.measure import measure_cases
from opgrip.replay.run.workload import empty_row
from opgrip.traces import Trace, load
from opgrip.traces.analysis.merge import merge
from opgrip.traces.io.writer import TraceWriter
from opgrip.traces.schema.arguments import TensorSpec
from opgrip.traces.schema.records import Calls, Context, Header, Observed, Record, Scope, Signature, Thread, Values
from opgrip.traces.values.exact import Constant

SPEC = TensorSpec((512, 128), (128, 1), torch.float32, "cpu", values=0)

OUTPUT = TensorSpec((512, 128), (128, 1), torch.float32, "cpu")

# times of the calls of a step, each on separate memory; the values of the second one differ
STEP_US = (40, 200, 44, 42, 41)

DENORMAL = 1e-41


def write_trace(
    path: Path,
    steps: int = 3,
    looked_at: Sequence[int] = (0, 1),
    times: Sequence[int] = STEP_US,
    *,
    modules: Sequence[str] = ("layer",),
    perturbed: Sequence[tuple[int, int]] = (),
    other_thread: bool = False,
    before_ns: int = 0,
) -> Path:
    """Write a trace of steps with the same square roots, some of which are looked at in the first step."""
    count = steps * len(times)
    starts = [1_000_000 * (1 + place) - before_ns for place in range(count)]
    memory = [number for place in range(count) for number in (place % len(times), 100 + place)]
    scopes = [place % len(times) % len(modules) for place in range(count)]
    looks = [(place, starts[place] - 500_000) for place in looked_at]
    durations = [1000 * us for us in times] * steps
    records: list[Record] = [
        *(Values(0, Constant(1.0)), Values(1, Constant(2.0)), Values(2, Constant(DENORMAL))),
        *(Signature(0, "operator", "aten.sqrt.default", (SPEC,), {}, OUTPUT), Context(0, {"threads": 1})),
        *(
            Scope(number, module, "L", "forward", None, "step", "nets.py", 7, context=0)
            for number, module in enumerate(modules)
        ),
        Thread(0, "main"),
        *(Observed(0, [2 if times[place] > 100 else 1], OUTPUT, since_ns, place) for place, since_ns in looks),
        Calls(0, [0] * count, scopes, starts, durations, [2] * count, memory, perturbed=list(perturbed)),
    ]
    if other_thread:
        others = [since_ns + 1000 for _, since_ns in looks]
        zeros, storages = [0] * len(others), [90, 91] * len(others)
        records += [
            Thread(1, "other"),
            Calls(1, zeros, zeros, others, [41_000] * len(others), [2] * len(others), storages),
        ]
    with TraceWriter(path, Header({})) as writer:
        for record in records:
            writer.write(record)
    return path


def drawn(case: Case) -> list[float]:
    numbers = [signature.args[0].values for signature in (case.signature, *case.input_sets)]
    return [case.values[number].value for number in numbers]  # type: ignore[union-attr]


def test_case_has_the_values_and_shares_of_each_place(tmp_path: Path) -> None:
    (case,) = make_cases(load(write_trace(tmp_path / "t.jsonl"), partial=True))
    assert (case.number, case.count, case.captured_us) == (0, 15, 42)
    assert drawn(case) == [2.0, DENORMAL]
    assert [len(item.calls) for item in case.timing_clusters] == [12, 3]
    assert [item.captured_us for item in case.timing_clusters] == pytest.approx([41.5, 200])
    # times within a single scope hardly vary
    assert case.captured_spread is not None
    assert case.captured_spread < 0.1


def test_split_makes_a_case_per_timing_cluster(tmp_path: Path) -> None:
    cases = make_cases(load(write_trace(tmp_path / "t.jsonl"), partial=True), Selection(split=True))
    assert [(case.count, case.captured_us, drawn(case)) for case in cases] == [
        (3, 200, [DENORMAL]),
        (12, 41.5, [2.0]),
    ]
    assert len({case.number for case in cases} | {0}) == 3
    assert sum(case.share for case in cases) == pytest.approx(1)
    assert cases[0].timing_clusters[0].place == "layer step nets.py:7"


@pytest.mark.parametrize(
    ("looked_at", "times"), [((0,), STEP_US), ((), STEP_US), ((0, 2), STEP_US), ((0, 1), (40, 50, 44, 42, 41))]
)
def test_similar_or_unobserved_places_are_one_cluster(
    looked_at: Sequence[int], times: Sequence[int], tmp_path: Path
) -> None:
    trace = load(write_trace(tmp_path / "t.jsonl", looked_at=looked_at, times=times), partial=True)
    for split in (False, True):
        (case,) = make_cases(trace, Selection(split=split))
        assert case.timing_clusters == ()
        assert case.number == 0


def test_row_lists_timing_clusters_and_runs_each_in_its_share(tmp_path: Path) -> None:
    case, *_ = make_cases(load(write_trace(tmp_path / "t.jsonl"), partial=True))
    ((row,),) = list(measure_cases([case], settings_of(iterations=40)))
    clusters = ClusterColumns.of(row)
    assert clusters.behaviour_shares == [0.8, 0.2]
    assert clusters.behaviours_captured_us == pytest.approx([41.5, 200])
    assert clusters.behaviours_us is not None
    assert clusters.behaviours_us[1] > 1.5 * clusters.behaviours_us[0]
    # most calls belong to this cluster
    assert row.median_us == pytest.approx(clusters.behaviours_us[0], rel=0.5)
    text = io.StringIO()
    print_results([row], text)
    assert "80% of calls captured 41.5, replayed" in " ".join(text.getvalue().split())
    assert "--split adds a row for each" in " ".join(text.getvalue().split())


def test_merged_traces_keep_timing_clusters(tmp_path: Path) -> None:
    paths = [
        write_trace(tmp_path / "a.jsonl"),
        # its calls begin between the other process's looks and the calls looked at
        write_trace(tmp_path / "b.jsonl", times=(200, 40, 44, 42, 41), before_ns=100_000),
    ]
    merge(paths, tmp_path / "all.jsonl", partial=True)
    (case,) = make_cases(load(tmp_path / "all.jsonl", partial=True))
    assert [len(item.calls) for item in case.timing_clusters] == [24, 6]
    assert drawn(case) == [2.0, DENORMAL]


def test_call_of_another_thread_is_not_confused_with_the_observed_one(tmp_path: Path) -> None:
    (case,) = make_cases(load(write_trace(tmp_path / "t.jsonl", other_thread=True), partial=True))
    assert drawn(case) == [2.0, DENORMAL]
    assert [len(item.calls) for item in case.timing_clusters] == [14, 3]


@pytest.mark.parametrize(
    ("modules", "values", "counts"),
    [
        ("a", [2.0], [3]),
        ("b", [DENORMAL], [3]),
        ("[cd]", [2.0], [6]),
        ("[bc]", [2.0, DENORMAL], [3, 3]),
    ],
)
def test_selected_calls_have_the_values_of_their_cluster(
    modules: str, values: list[float], counts: list[int], tmp_path: Path
) -> None:
    trace = load(write_trace(tmp_path / "t.jsonl", modules="abcde"), partial=True)
    (case,) = make_cases(trace, Selection(module=(modules,)))
    assert drawn(case) == values
    assert [len(item.calls) for item in case.timing_clusters] == counts
    # case numbers do not depend on the selection
    everywhere = {drawn(case)[0]: case.number for case in make_cases(trace, Selection(split=True))}
    parts = make_cases(trace, Selection(module=(modules,), split=True))
    assert {drawn(part)[0]: part.number for part in parts} == {value: everywhere[value] for value in values}


SINE = TensorSpec((2, 3), (3, 1), torch.float32, "cpu")


def case_of(path: Path, durations_us: Sequence[int], perturbed: Sequence[tuple[int, int]] = ()) -> Case:
    count = len(durations_us)
    starts, durations = [place * 10**9 for place in range(count)], [time * 1000 for time in durations_us]
    calls = Calls(0, [0] * count, [0] * count, starts, durations, [2] * count, [1, 2] * count)
    records: list[Record] = [
        *(Scope(0, "m", "M", "forward"), Thread(0, "main")),
        Signature(0, "operator", "aten.sin.default", (SINE,), {}, SINE),
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
    assert (f"{DOUBTFUL} doubtful: from a single call" in text.getvalue()) is is_marked


def test_replay_ends_with_its_error_if_the_trace_is_of_this_machine(tiny_trace: Path, tmp_path: Path) -> None:
    done = succeed("opreplay", tiny_trace, "--top", 3, "--mode", "eager,jit", "-o", tmp_path / "r.json")
    run = Results.load(tmp_path / "r.json")
    rows = [row for row in run if row.mode == "eager" and row.status == "ok"]
    if not rows:
        pytest.skip("other processes used the cores")
    captured, replayed = ([row.count * getattr(row, name) for row in rows] for name in ("captured_us", "median_us"))
    off = sum(abs(one - other) for one, other in zip(captured, replayed, strict=True))
    assert run.fidelity is not None
    assert run.fidelity.ratio == pytest.approx(sum(replayed) / sum(captured))
    assert run.fidelity.error == pytest.approx(off / sum(captured))
    assert run.fidelity.share < 1
    assert run.fidelity.share == pytest.approx(sum(row.share for row in rows))
    assert run.fidelity.doubtful_rows == sum("differs" in row.doubts for row in rows)
    assert done.stderr.splitlines()[-1] == f"opreplay: {run.fidelity.line}"
    assert json.loads((tmp_path / "r.json").read_bytes())["fidelity"]["error"] == run.fidelity.error


@pytest.mark.slow
def test_times_of_other_machines_and_other_ways_to_run_are_not_compared(tiny_trace: Path, tmp_path: Path) -> None:
    header, *records = tiny_trace.read_text(encoding="utf-8").splitlines()
    facts = json.loads(header)
    facts["devices"]["cpu"] += " of another machine"
    (tmp_path / "other.jsonl").write_text("\n".join([json.dumps(facts), *records]), encoding="utf-8")
    assert replay(tmp_path / "other.jsonl", top=1, iterations=1).fidelity is None
    assert replay(tiny_trace, top=1, iterations=1, values="zeros").fidelity is None
    assert replay(tiny_trace, unit="module", iterations=1).fidelity is None


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trace, dict[str, Case]]:
    path, is_over, has_begun = tmp_path_factory.mktemp("traces") / "t.jsonl", threading.Event(), threading.Event()

    def run_beside() -> None:
        while not is_over.is_set():
            torch.rand(1 << 20).sort()
            has_begun.set()

    with Capture(path):
        torch.rand(8, 8).mm(torch.rand(8, 8))
        torch.nn.functional.embedding(torch.randint(0, 50, (400,)), torch.rand(50, 4))
        thread = threading.Thread(target=run_beside)
        thread.start()
        assert has_begun.wait(60)
        torch.rand(1 << 24).cos()
        is_over.set()
        thread.join()
    trace = load(path)
    return trace, {case.op.split(".")[1]: case for case in make_cases(trace)}


@pytest.mark.parametrize(
    ("op", "cells", "doubts"),
    [
        ("mm", {}, "differs (unknown)"),
        ("mm", {"captured_us": 250.0}, "differs (unknown)"),
        ("mm", {"captured_us": 140.0}, ""),
        ("mm", {"share": 0.01}, ""),
        ("mm", {"dtype": "float64"}, ""),
        ("mm", {"noisy": True}, "noisy, differs"),
        ("mm", {"captured_spread": None}, "differs (captured time)"),
        ("mm", {"captured_us": 3.0}, "differs (short)"),
        ("mm", {"dropped": 9}, "differs (repeated runs)"),
        ("mm", {"bytes_out": 1 << 20}, "differs (new memory)"),
        ("embedding", {}, "differs (values)"),
        ("cos", {}, "differs (other threads)"),
    ],
)
def test_rows_far_from_their_captured_times_say_why(
    op: str, cells: dict[str, object], doubts: str, traced: tuple[Trace, dict[str, Case]]
) -> None:
    trace, case = traced[0], replace(traced[1][op], fresh=None)
    assert trace.end is not None
    calm = replace(trace, end=replace(trace.end, contended=0.0))
    about: dict[str, Any] = {"captured_us": 50.0, "captured_spread": 0.1, "share": 0.5, "method": "discrete"} | cells
    (row,) = with_doubts([replace(make_row(case.number, [100.0] * 3), **about)], [case], calm)
    assert row.doubts == doubts
    assert replace(row, detail="").doubts == doubts
    assert doubts.rpartition(", ")[2] in (*MEANINGS, "differs", "")
