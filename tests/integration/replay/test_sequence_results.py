"""Tests of the rows and totals of a step replay, of calls that were disturbed, and of step replay in a mode."""

import itertools
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import succeed

from opgrip.capture import Capture
from opgrip.errors import UserError
from opgrip.replay import Results
from opgrip.replay.cases.cases import make_cases
from opgrip.replay.command.replay import replay
from opgrip.replay.command.run_requests import request_with
from opgrip.replay.inputs.inputs import device_map
from opgrip.replay.modes import Mode, ModeOptions, Program, Task, modes
from opgrip.replay.operators.lookup import Unsupported
from opgrip.replay.reports.step_report import print_sequence
from opgrip.replay.results.results import OK, SKIPPED, UNSUPPORTED, WRONG, Result
from opgrip.replay.run.request import RunRequest
from opgrip.replay.run.workload import Workload, workload_for
from opgrip.replay.sequences import step_passes
from opgrip.replay.sequences.call_timers import SequenceSettings, sequence_settings
from opgrip.replay.sequences.step_options import SequenceColumns, rows_of, totals_of
from opgrip.replay.sequences.step_passes import Pass, paired_saving, run_timed
from opgrip.replay.sequences.step_replay import MOST_DROPPED, SequenceResult, replay_sequence
from opgrip.replay.timing import disturbances
from opgrip.replay.timing.disturbances import PassWatch
from opgrip.traces import load

PASSES = 2


@contextmanager
def quiet() -> Iterator[None]:
    def replay_here(workload: Workload, *__: object) -> SequenceResult:
        return replay_sequence(workload.trace, sequence_settings(workload))

    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"is_slowed": False, "is_contended": False, "contended_calls": frozenset()}.items():
            patch.setattr(PassWatch, name, value)
        patch.setattr(import_module("opgrip.replay.sequences.step_replay"), "replay_apart", replay_here)
        yield


@pytest.fixture(scope="module")
def results(tiny_trace: Path) -> Results:
    with quiet():
        return replay(tiny_trace, sequence=True, iterations=PASSES)


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


def test_memory_of_a_step_without_dataflow_is_unknown(tmp_path: Path) -> None:
    with Capture(tmp_path / "t.jsonl"):
        torch.ones(30).sin().cos()
    trace = load(tmp_path / "t.jsonl")
    settings = replace(sequence_settings(workload_for(RunRequest(), trace)), repeats=1)
    assert totals_of(replay_sequence(trace, settings))["captured_peak_bytes"] == 2 * 30 * 4
    result = replay_sequence(replace(trace, calls=trace.calls.assign(tensors=0)), settings)
    unknown = [name for name, value in totals_of(result).items() if value is None]
    assert {"captured_peak_bytes", "replayed_peak_bytes", "outside_bytes", "critical_calls"} <= set(unknown)
    file = StringIO()
    print_sequence(result, [], 5, file)
    assert re.findall(r"(\w+) +unknown, because the file does not say", file.getvalue()) == ["critical", "memory"]


def test_warmup_adds_untimed_runs_of_the_step(tmp_path: Path) -> None:
    with Capture(tmp_path / "t.jsonl"):
        torch.ones(30).sin()
    trace = load(tmp_path / "t.jsonl")

    def runs(warmup: int) -> int:
        announced: list[int] = []
        workload = workload_for(request_with("t.jsonl", sequence=True, iterations=1, warmup=warmup), trace)
        with quiet():
            replay_sequence(trace, sequence_settings(workload), announce=lambda number, row: announced.append(number))
        return announced.count(announced[-1])

    assert runs(0) == runs(2) == runs(5) - 3


def test_rows_of_a_sequence_are_written_in_every_format(results: Results, tmp_path: Path) -> None:
    for suffix in (".json", ".csv", ".md"):
        results.save(tmp_path / f"r{suffix}")
    stored = json.loads((tmp_path / "r.json").read_text())
    assert stored["sequence"]["replayed_ms"] == results.header["sequence"]["replayed_ms"]
    for suffix in (".json", ".csv"):
        assert Results.load(tmp_path / f"r{suffix}").frame["case"].tolist() == [row.case for row in results]
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
    assert len(Results.load(output)) == 3


def test_rows_report_calls_that_were_substituted_or_skipped(tmp_path: Path) -> None:
    path, x = tmp_path / "t.jsonl", torch.ones(100)
    torch.manual_seed(1234)
    with Capture(path):
        x.to_mkldnn().to_dense()
        with pytest.raises(RuntimeError):
            torch.mm(x, x)
        # value models do not show which rows are equal
        torch.randint(0, 10, (500, 3)).unique(dim=0).float().sqrt()
    trace = load(path)
    with quiet():
        settings = replace(sequence_settings(workload_for(RunRequest(), trace)), repeats=1)
        result = replay_sequence(trace, settings)
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


SETTINGS = SequenceSettings(device_map("cpu", None), "cpu", repeats=3)


class Machine:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = self.looks = 0
        self.quiet_after: int | None = 0
        self.slowed = False
        self.contended: Callable[[int], bool] = lambda asked: False
        machine = self

        class Contention:
            is_shared = False

            def __init__(self, **_: object) -> None:
                pass

            @property
            def has_room(self) -> bool:
                machine.looks += 1
                return machine.quiet_after is not None and machine.looks > machine.quiet_after

            def is_contended(self, **_: object) -> bool:
                machine.asked += 1
                return machine.contended(machine.asked)

            def close(self) -> None:
                pass

        class Pace:
            def is_slowed(self) -> bool:
                return machine.slowed

        monkeypatch.setattr(disturbances, "Contention", Contention)
        monkeypatch.setattr(disturbances, "Pace", Pace)
        # check before and after a pass only
        monkeypatch.setattr(disturbances, "CHECK_NS", 1 << 62)
        monkeypatch.setattr(disturbances, "WATCHFUL_NS", 0)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def replayed(path: Path, **changes: object) -> tuple[SequenceResult, list[Result]]:
    trace = load(path)
    result = replay_sequence(trace, replace(SETTINGS, **changes))  # type: ignore[arg-type]
    return result, rows_of(result, make_cases(trace), workload_for(RunRequest(), trace))


def shown(result: SequenceResult, rows: list[Result]) -> str:
    text = StringIO()
    print_sequence(result, rows, len(rows), text)
    return text.getvalue()


def test_contended_passes_are_repeated(tiny_trace: Path, machine: Machine) -> None:
    machine.contended = lambda asked: asked in (2, 4)
    result, rows = replayed(tiny_trace)
    assert (result.repeats, result.dropped_passes, result.slowed_passes) == (3, 2, 0)
    assert {(row.samples, row.dropped, row.slowed) for row in rows} == {
        (3 * row.count, 2 * row.count, 0.0) for row in rows
    }
    assert totals_of(result)["dropped_passes"] == 2
    assert "contended" not in shown(result, rows)


def test_step_with_only_contended_passes_is_contended(tiny_trace: Path, machine: Machine) -> None:
    machine.contended = lambda asked: True
    result, rows = replayed(tiny_trace)
    assert (result.repeats, result.dropped_passes, result.is_contended) == (3, 0, True)
    assert {(row.status, row.stopped, row.slowed, row.samples) for row in rows} == {
        ("contended", "contended", 1.0, 3 * row.count) for row in rows
    }
    assert all(row.median_us for row in rows)
    totals = totals_of(result)
    assert totals["is_contended"]
    assert totals["replayed_ms"] is totals["replayed_wall_p90_ms"] is totals["replayed_critical_ms"] is None
    assert len(totals["passes"]["replayed_ms"]) == 3
    text = shown(result, rows)
    assert "in these calls, replayed contended (3 passes)" in text
    assert text.count("replayed contended") == 3
    assert "the step is contended: other processes used the cores in all passes, so its time is not used: " in text
    assert f"{len(rows)} rows are contended: " in text
    result, _ = replayed(tiny_trace, repeats=None, precision=1e9)
    assert (result.repeats, result.is_contended) == (MOST_DROPPED, True)


def test_permanently_slow_processor_is_measured_and_reported(tiny_trace: Path, machine: Machine) -> None:
    machine.slowed = True
    result, rows = replayed(tiny_trace)
    assert (result.repeats, result.dropped_passes, result.slowed_passes) == (3, 3, 3)
    assert {(row.status, row.slowed, row.is_slowed) for row in rows} == {("ok", 1.0, True)}
    text = shown(result, rows)
    assert "3 of 3 passes: timed while the processor was slowed down, so that times are doubtful" in text
    assert "ok, slowed" in text.replace("ok, noisy, slowed", "ok, slowed")


SCALE = 3.0


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the operators that a test mode ran; it refuses cosines, and its sines are wrong."""
    names: list[str] = []

    def make(task: Task) -> Program:
        name = getattr(task.function, "__name__", str(task.function))
        if "cos" in name:
            raise Unsupported("no cosines here")

        def run(*args: Any, **kwargs: Any) -> Any:
            names.append(name)
            result = task.function(*args, **kwargs)
            return result + 1 if "sin" in name else result

        return Program(run, note="watched")

    get = modes.get
    # never repeat a pass because of contention
    monkeypatch.setattr(PassWatch, "is_slowed", False)
    monkeypatch.setattr(modes, "get", lambda name: Mode(make) if name == "watched" else get(name))
    return names


def replay_under(path: Path, mode: str, in_pairs: bool = False) -> tuple[SequenceResult, dict[str, Result]]:
    x = torch.full((50,), 0.5)
    with Capture(path):
        y = x.mul(SCALE)
        y.view(5, 10)[0].add_(1)
        y.cos().sin().sqrt_()
    trace = load(path)
    settings = workload_for(RunRequest(modes=ModeOptions(("eager", mode))), trace)
    result = replay_sequence(trace, replace(sequence_settings(settings), repeats=2, in_pairs=in_pairs))
    return result, {row.op: row for row in rows_of(result, make_cases(trace), settings)}


def test_calls_run_in_the_mode_or_else_in_eager(tmp_path: Path, runs: list[str]) -> None:
    result, rows = replay_under(tmp_path / "t.jsonl", "watched")
    assert (result.mode, result.replayed, result.in_eager) == ("watched", result.calls, 2)
    product = rows["aten.mul.Tensor"]
    assert (product.mode, product.note, product.status, product.samples) == ("watched", "watched", OK, 2)
    assert product.first_ms is not None
    assert product.max_abs == 0
    cosine, sine = rows["aten.cos.default"], rows["aten.sin.default"]
    assert (cosine.status, cosine.error, cosine.median_us) == (UNSUPPORTED, "no cosines here", None)
    assert (sine.status, sine.median_us) == (WRONG, None)
    assert sine.error is not None
    assert sine.max_abs == pytest.approx(1)
    # one run to prepare, and one in each of two passes; calls with wrong results are not run again
    counts = {name: sum(name in run for run in runs) for name in ("mul", "add_", "sqrt_", "sin")}
    assert counts == {"mul": 3, "add_": 3, "sqrt_": 3, "sin": 1}


def test_passes_in_pairs_alternate_with_eager(tmp_path: Path, runs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    began: list[int] = []
    monkeypatch.setattr(step_passes, "run_timed", lambda *args: began.append(len(runs)) or run_timed(*args))
    result, _ = replay_under(tmp_path / "t.jsonl", "watched", in_pairs=True)
    counts = [after - before for before, after in itertools.pairwise([*began, len(runs)])]
    in_mode = result.calls - result.in_eager
    # in eager, in the mode, in the mode, in eager
    assert counts == [0, in_mode, in_mode, 0]
    assert result.repeats == 2
    assert result.saved is not None
    assert len(result.saved.shares) == in_mode
    assert 0 < sum(share for _, share in result.saved.shares) < 1


@pytest.mark.parametrize(
    ("mode", "problem"),
    [
        ("reduce-overhead", "reduce-overhead replays CUDA graphs, whose results the next run of a call overwrites"),
        (("eager", "jit"), "--sequence runs under one mode"),
        ("ijt", "unknown mode 'ijt'"),
    ],
)
def test_modes_that_cannot_run_a_sequence_are_refused(tiny_trace: Path, mode: Any, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        request_with(tiny_trace, sequence=True, mode=mode)


def test_saving_of_pairs_counts_disturbed_calls_little() -> None:
    usual = Pass([500, 300, 200], 1000, 0)
    disturbed = Pass([500, 90_000, 200], 90_700, 0)
    pairs = [replace(Pass([400, 300, 250], 950, 0), eager=disturbed if number == 3 else usual) for number in range(10)]
    saved = paired_saving(pairs, {0: 7})
    assert (saved.saving, saved.own_saving) == pytest.approx((0.05, 0.1))
    assert (saved.error, saved.own_error) == pytest.approx((0, 0))
    assert saved.shares == ((7, 0.5),)


def test_error_of_a_saving_grows_with_the_spread_of_pairs() -> None:
    eager = Pass([1000], 1000, 0)
    spreads = [
        [replace(Pass([900 + width * (number % 5)], 900, 0), eager=eager) for number in range(20)] for width in (1, 10)
    ]
    errors = [paired_saving(pairs, {}).error for pairs in spreads]
    assert 0 < errors[0] < errors[1] < 0.05
