"""Tests of the rows of a step replay: the same as other replays' in all file formats, next to the step's totals."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import refusal, succeed

from opgrip.capture import Capture
from opgrip.replay import load_results
from opgrip.replay.cases.cases import make_cases
from opgrip.replay.command.replay import replay
from opgrip.replay.operators.memory import Function
from opgrip.replay.outcome import Results
from opgrip.replay.reports.step_report import print_sequence
from opgrip.replay.results.results import OK, SKIPPED, UNSUPPORTED
from opgrip.replay.run.request import RunRequest
from opgrip.replay.run.workload import Workload, workload_for
from opgrip.replay.sequences.call_timers import HostTimer, Slowdown, sequence_settings
from opgrip.replay.sequences.step_options import SequenceColumns, rows_of, totals_of
from opgrip.replay.sequences.step_replay import SequenceResult, replay_sequence
from opgrip.traces import Trace, load

PASSES = 2


@pytest.fixture(scope="module")
def _quiet() -> Iterator[None]:
    """Simulate a machine without contention for this module's replays, which run in this process for that purpose."""

    def replay_here(workload: Workload, *__: object) -> SequenceResult:
        return replay_sequence(workload.trace, sequence_settings(workload))

    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"is_slowed": False, "is_contended": False, "contended_calls": frozenset()}.items():
            patch.setattr(Slowdown, name, value)
        patch.setattr(import_module("opgrip.replay.sequences.step_replay"), "replay_apart", replay_here)
        yield


@pytest.fixture(scope="module")
def results(tiny_trace: Path, _quiet: None) -> Results:
    return replay(tiny_trace, sequence=True, iterations=PASSES)


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory, _quiet: None) -> tuple[Trace, SequenceResult]:
    """Return the trace and replay of a program with substituted calls and calls that do not run."""
    path, x = tmp_path_factory.mktemp("odd") / "t.jsonl", torch.ones(100)
    torch.manual_seed(1234)
    with Capture(path):
        x.to_mkldnn().to_dense()
        with pytest.raises(RuntimeError):
            torch.mm(x, x)
        # value models do not show which rows are equal
        torch.randint(0, 10, (500, 3)).unique(dim=0).float().sqrt()
    trace = load(path)
    settings = workload_for(RunRequest(), trace)
    return trace, replay_sequence(trace, replace(sequence_settings(settings), repeats=1))


def test_row_contains_the_times_of_all_calls_of_a_signature(results: Results, tiny_trace: Path) -> None:
    cases = make_cases(load(tiny_trace))
    assert [(row.case, row.op, row.count, row.share, row.captured_us) for row in results] == [
        (case.number, case.op, case.count, case.share, case.captured_us) for case in cases
    ]
    for row in results:
        assert (row.status, row.mode, row.method, row.cache) == (OK, "eager", "sequence", "program")
        assert row.faithful
        assert row.samples == PASSES * row.count
        assert row.p10_us is not None
        assert row.median_us is not None
        assert row.p90_us is not None
        assert 0 < row.p10_us <= row.median_us <= row.p90_us
        assert row.noisy is not None
    total_ms = sum(row.samples * (row.mean_us or 0) for row in results) / 1e3
    assert total_ms == pytest.approx(sum(results.header["sequence"]["passes"]["replayed_ms"]))


def test_step_totals_are_in_the_header(results: Results) -> None:
    step = results.header["sequence"]
    assert step["calls"] == step["replayed"] == sum(row.count for row in results)
    assert 0 < step["replayed_p10_ms"] <= step["replayed_ms"] <= step["replayed_p90_ms"]
    passes = step["passes"]
    assert all(own < wall for own, wall in zip(passes["replayed_ms"], passes["replayed_wall_ms"], strict=True))
    assert 0 < step["captured_critical_ms"] < step["captured_ms"] < step["captured_wall_ms"]
    assert 0 < step["replayed_critical_ms"] < step["replayed_p90_ms"]
    assert 0 < step["critical_calls"] < step["calls"]
    assert step["replayed_peak_bytes"] == pytest.approx(step["captured_peak_bytes"], rel=0.05)


def test_critical_path_is_the_longest_dependent_chain(tmp_path: Path) -> None:
    x = torch.randn(300, 300)
    with Capture(tmp_path / "t.jsonl"):
        x.mm(x).mm(x).mm(x)
        x.sin()
    trace = load(tmp_path / "t.jsonl")
    times_ns = dict.fromkeys(trace.calls.index, 1000) | {trace.calls.index[-1]: 2000}
    columns = {name: trace.calls.index.map(times_ns) for name in ("duration_ns", "host_ns", "raw_ns", "time_ns")}
    trace = replace(trace, calls=trace.calls.assign(**columns))
    result = replay_sequence(trace, replace(sequence_settings(workload_for(RunRequest(), trace)), repeats=1))
    assert result.critical_calls == 3
    assert result.captured_critical_ms == 3e-3
    products = {signature.number for signature in trace.signatures if signature.op == "aten.mm.default"}
    mean_us = sum(item.samples * (item.mean_us or 0) for item in result.signatures if item.signature in products)
    assert result.replayed_critical_ms == pytest.approx(mean_us / 1e3)


def test_rows_of_a_sequence_are_written_in_every_format(results: Results, tmp_path: Path) -> None:
    for suffix in (".json", ".csv", ".md"):
        results.save(tmp_path / f"r{suffix}")
    stored = json.loads((tmp_path / "r.json").read_text())
    assert stored["sequence"]["replayed_ms"] == results.header["sequence"]["replayed_ms"]
    for suffix in (".json", ".csv"):
        assert load_results(tmp_path / f"r{suffix}")["case"].tolist() == [row.case for row in results]
    lines = (tmp_path / "r.md").read_text().splitlines()
    assert sum(line.startswith("| ") for line in lines) == 2 + len(results)
    (totals,) = (line for line in lines if line.startswith("the whole step: "))
    assert "captured_peak_bytes" in totals


def test_opreplay_shows_and_writes_the_most_expensive_rows(tiny_trace: Path, tmp_path: Path) -> None:
    output = tmp_path / "r.csv"
    options = ("--sequence", "--iterations", "1", "--top", "3", "--strict")
    done = succeed("opreplay", tiny_trace, *options, "-o", output)
    notice = rf"opreplay: wrote 3 rows to {re.escape(str(output))}\nopreplay: 3 cases: [\w ,]*(ok|contended)\n$"
    assert re.search(notice, done.stderr)
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[:5]] == ["calls", "time", "wall", "critical", "memory"]
    assert sum("%" in line.split(maxsplit=1)[0] for line in lines if line) == 3
    calls = len(load(tiny_trace).own_calls)
    assert lines[0].startswith(f"calls    {calls}: {calls} replayed")
    assert len(load_results(output)) == 3


def test_roofline_of_a_sequence_is_refused_in_one_line(tiny_trace: Path, tmp_path: Path) -> None:
    error = refusal("opreplay", tiny_trace, "--sequence", "-o", tmp_path / "r.svg", in_one_line=True)
    assert error.endswith("r.svg shows the results of --roofline, which is not given: end its name in .json\n")


def test_rows_report_calls_that_were_substituted_or_skipped(odd: tuple[Trace, SequenceResult]) -> None:
    trace, result = odd
    rows = {row.op: row for row in rows_of(result, make_cases(trace), workload_for(RunRequest(), trace))}
    names = ("aten.unique_dim.default", "aten.mm.default", "aten._to_dense.default")
    unique, product, memory = (rows[name] for name in names)
    assert (unique.status, unique.error, unique.faithful) == (OK, None, None)
    assert SequenceColumns.of(unique).substituted == 1
    assert unique.median_us is not None
    assert (product.status, product.median_us, product.method) == (SKIPPED, None, "sequence")
    assert product.error is not None
    assert "it raised when it was captured" in product.error
    assert memory.status == UNSUPPORTED
    assert SequenceColumns.of(memory) == SequenceColumns(not_run=1)


def test_each_reason_is_printed_once(odd: tuple[Trace, SequenceResult]) -> None:
    trace, result = odd
    rows = rows_of(result, make_cases(trace), workload_for(RunRequest(), trace))
    for most in (0, len(rows)):
        shown = StringIO()
        print_sequence(result, rows, most, shown)
        text = shown.getvalue()
        assert text.count("its results have other shapes than the recorded ones") == 1
        assert text.count("it raised when it was captured") == 1
        assert text.count("an argument has the layout _mkldnn") == 1
        assert (f"{len(rows)} more rows" in text) == (most == 0)


def test_missing_times_are_empty_in_files(odd: tuple[Trace, SequenceResult], tmp_path: Path) -> None:
    trace, result = odd
    nothing = replace(result, replayed_ms=(), replayed_host_ms=(), replayed_wall_ms=())
    totals = totals_of(replace(nothing, replayed_critical_ms=float("nan")))
    assert totals["replayed_ms"] is totals["replayed_p90_ms"] is totals["replayed_critical_ms"] is None
    rows = rows_of(result, make_cases(trace), workload_for(RunRequest(), trace))
    Results(rows, {"sequence": totals}).save(tmp_path / "r.json")
    assert json.loads((tmp_path / "r.json").read_text())["sequence"]["replayed_wall_ms"] is None


def test_operator_itself_is_timed(tiny_trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[object] = []

    class Watch(HostTimer):
        def run(self, function: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
            timed.append(function)
            return super().run(function, args, kwargs)

    monkeypatch.setattr("opgrip.replay.sequences.step_replay.HostTimer", Watch)
    trace = load(tiny_trace)
    replay_sequence(trace, replace(sequence_settings(workload_for(RunRequest(), trace)), repeats=1))
    # its indices are first brought into bounds
    assert torch.ops.aten.nll_loss_backward.default in timed
    assert {type(function) for function in timed} == {torch._ops.OpOverload}


def test_times_that_a_file_lacks_are_left_out(tmp_path: Path) -> None:
    observer = torch.profiler.ExecutionTraceObserver().register_callback(str(tmp_path / "et.json"))
    observer.start()
    torch.ones(50, 50).sin().matmul(torch.ones(50, 50))
    observer.stop()
    observer.unregister_callback()
    done = succeed("opreplay", "et.json", "--sequence", "--iterations", "2", "-o", "rows.json", cwd=tmp_path)
    assert "0.00 ms" not in done.stdout
    assert "critical" not in done.stdout
    names = [line.split()[0] for line in done.stdout.splitlines() if line.strip()]
    assert {"calls", "time", "wall", "memory"} <= set(names)
    assert "captured" not in next(line for line in done.stdout.splitlines() if line.startswith("time"))
    totals = json.loads((tmp_path / "rows.json").read_text())["sequence"]
    assert totals["captured_ms"] is totals["critical_calls"] is totals["captured_critical_ms"] is None
    assert totals["is_contended"] or totals["replayed_ms"] > 0
