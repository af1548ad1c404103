"""Untrusted candidates: cheats get no better verdict than their honest twins, and each defence is needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from time import sleep
from typing import Any

import cheats
import pytest
import torch
from programs import run_command

from opgrip import Capture, UserError, judge
from opgrip.platform.peaks import Level, Peaks
from opgrip.replay.analyses.candidates import without_impossible
from opgrip.replay.inputs.inputs import Inputs
from opgrip.replay.replay_options import request_with
from opgrip.replay.results.judgement import CandidateColumns, judge_rows
from opgrip.replay.results.results import OK, Result
from opgrip.replay.run import untrusted
from opgrip.replay.run.measure import measure_cases
from opgrip.replay.run.untrusted import CHANGE, UntrustedCall, UntrustedFunction, UntrustedProcess, UntrustedRun
from opgrip.replay.run.workload import load_workload

SOFTMAX = "aten._softmax.default"
NORM = "aten.native_layer_norm.default"
RUNS = 16
CEILINGS = Peaks(
    ("a processor",), "cpu", 1, (Level("memory", None, 1, {1: 10.0}),), {"float32": {1: 100.0}}, 1.0, 0.5, "2.0", ""
)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("untrusted") / "step.jsonl"
    with Capture(path):
        torch.softmax(torch.randn(32, 64), -1)
    yield path
    end_processes()


@pytest.fixture(scope="module")
def constant_trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("untrusted") / "constant.jsonl"
    with Capture(path):
        torch.softmax(torch.full((32, 64), 0.5), -1)
    return path


def end_processes() -> None:
    for candidate in list(untrusted._processes):
        untrusted.end_process(candidate)


@pytest.fixture(scope="module")
def norm_trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("untrusted") / "norm.jsonl"
    with Capture(path):
        torch.layer_norm(torch.randn(128, 256), (256,))
    return path


def row_of(trace: Path, name: str, op: str = SOFTMAX, ceilings: Peaks | None = None) -> Result:
    """Return the judged row of a candidate of `cheats`, judged in processes of this one."""
    text = f"{op}={cheats.__file__}:{name}"
    options = {"candidate": [text], "untrusted": True, "iterations": RUNS, "cache": "warm", "threads": 1}
    workload = load_workload(request_with(str(trace), **options))
    (rows,) = measure_cases(workload.cases, workload)
    # the next judgement must not find what this one left
    untrusted.end_process(workload.request.candidates.candidate[0])
    if ceilings is not None:
        rows = without_impossible(rows, ceilings, workload)
    return judge_rows(rows, "eager", None, "", {})[-1]


def verdict_on(trace: Path, name: str, op: str = SOFTMAX) -> tuple[str | None, str]:
    row = row_of(trace, name, op)
    return CandidateColumns.of(row).verdict, str(row.error)


# cheats, with a part of the reason why they are wrong; empty if they are right and as slow as their twin, None if
# chance decides which of the two
CHEATS = {
    "cached_by_identity": "elements differ",
    "cached_by_address": None,
    "cached_by_version": "elements differ",
    "cached_by_value": "",
    "lazy": "output is a Lazy, not a plain tensor",
    "lazy_without_check": "",
    "left_on_a_thread": None,
    "left_on_a_python_thread": None,
    "left_on_a_daemon": "elements differ",
    "with_patched_clock": "it replaced time.perf_counter_ns",
    "with_clock_of_the_process": "",
    "with_patched_elapsed_time": "it replaced torch.cuda.Event.elapsed_time",
    "with_patched_synchronize": "it replaced torch.cuda.synchronize",
    "many_calls_at_once": "differ",
    "from_the_reference": "differ",
    "only_first_calls": "in a timed run: output 0",
    "only_first_values": "in a timed run: output 0",
    "less_precise": "elements differ",
    "same_memory": "it returns the memory of an earlier result",
    "continued_by_timer": "runs while its process is stopped",
    "forged_answer": "its ",
}
QUICK = {"lazy", "with_clock_of_the_process", "only_first_values"}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in CHEATS]
)
def test_cheat_gets_no_better_verdict_than_its_honest_twin(trace: Path, name: str) -> None:
    verdict, reason = verdict_on(trace, name)
    allowed = {"wrong", "slower"} if CHEATS[name] is None else {"wrong" if CHEATS[name] else "slower"}
    assert verdict in allowed, reason
    assert (CHEATS[name] or "") in reason


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name",
    ["honest", *(pytest.param(f"honest_with_{word}", marks=pytest.mark.slow) for word in ("a_thread", "workers"))],
)
def test_honest_twin_is_right(trace: Path, name: str) -> None:
    assert verdict_on(trace, name) == ("slower", "None")


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_shortcut_on_constant_inputs_does_not_help(constant_trace: Path) -> None:
    assert verdict_on(constant_trace, "constant") == ("slower", "None")


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_results_of_scaled_values_do_not_help(norm_trace: Path) -> None:
    assert verdict_on(norm_trace, "normalized_up_to_a_factor", NORM) == ("slower", "None")


def same_values(function: UntrustedFunction, index: int) -> Inputs:
    return function.draw(index, 0)


def scaled_values(function: UntrustedFunction, index: int) -> Inputs:
    inputs = function.draw(index, 0)
    inputs.change(CHANGE)
    return inputs


def unnamed(process: UntrustedProcess, message: Mapping[str, Any], ask: Any = UntrustedProcess.ask) -> Any:
    """Return the answer of a process without the names of functions that were replaced."""
    answer = ask(process, message)
    return {**answer, "replaced": []} if "replaced" in answer else answer


def late_results(call: UntrustedCall, run: UntrustedRun, results: Any = UntrustedCall.results) -> list[Any]:
    """Return the results of a run, which are read a while after it."""
    sleep(5 * cheats.SLOW_S)
    return results(call, run)  # type: ignore[no-any-return]


NO_CLOCK = (untrusted, "MARGIN", 1e9)
NO_STOP = (UntrustedProcess, "_stop", lambda process: None)


@pytest.mark.timeout(300)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("cheat", "without"),
    [
        ("only_first_values", [(UntrustedFunction, "_next_inputs", same_values)]),
        ("cached_by_version", [(UntrustedFunction, "_next_inputs", same_values)]),
        ("only_first_calls", [(UntrustedFunction, "_compare", lambda function, inputs, run: None)]),
        ("with_clock_of_the_process", [NO_CLOCK]),
        # what the process checks only names the reason: this process's clock also bounds these cheats
        ("with_patched_clock", [NO_CLOCK, (UntrustedProcess, "ask", unnamed)]),
        ("lazy_without_check", [NO_CLOCK]),
        # results are read at once, and while the process is stopped
        ("left_on_a_thread", [NO_STOP, (UntrustedCall, "results", late_results)]),
        ("left_on_a_daemon", [NO_STOP, (UntrustedCall, "results", late_results)]),
    ],
)
def test_cheat_works_without_the_defence_against_it(
    trace: Path, monkeypatch: pytest.MonkeyPatch, cheat: str, without: list[tuple[Any, str, Any]]
) -> None:
    for patch in without:
        monkeypatch.setattr(*patch)
    check_that_it_seems_fast(row_of(trace, cheat))


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_results_of_scaled_values_help_if_values_are_drawn_once(
    norm_trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(UntrustedFunction, "_next_inputs", scaled_values)
    check_that_it_seems_fast(row_of(norm_trace, "normalized_up_to_a_factor", NORM))


def check_that_it_seems_fast(row: Result) -> None:
    assert row.status == OK, row.error
    assert row.median_us is not None
    assert row.median_us < cheats.SLOW_S * 1e6 / 2


@pytest.mark.timeout(300)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("cheat", "without"),
    [
        ("same_memory", [(UntrustedProcess, "earlier", property(lambda process: [], lambda process, earlier: None))]),
        ("continued_by_timer", [NO_STOP]),
    ],
)
def test_cheat_is_not_noticed_without_the_defence_against_it(
    trace: Path, monkeypatch: pytest.MonkeyPatch, cheat: str, without: list[tuple[Any, str, Any]]
) -> None:
    for patch in without:
        monkeypatch.setattr(*patch, raising=False)
    assert row_of(trace, cheat).status == OK


@pytest.mark.timeout(300)
@pytest.mark.slow
@pytest.mark.parametrize(("ceilings", "verdict"), [(CEILINGS, "wrong"), (None, "faster")])
def test_time_below_the_limit_of_the_machine_is_wrong(
    trace: Path, monkeypatch: pytest.MonkeyPatch, ceilings: Peaks | None, verdict: str
) -> None:
    # this process's clock does not bound calls that take less time than requests vary
    monkeypatch.setattr(*NO_CLOCK)
    row = row_of(trace, "with_stopped_clock", ceilings=ceilings)
    assert CandidateColumns.of(row).verdict == verdict, row.error


def test_detached_process_is_stopped(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # in bubblewrap, processes have other ids
    monkeypatch.setattr(untrusted, "unconfined", lambda: "not installed")
    options = {"candidate": [f"{SOFTMAX}={cheats.__file__}:detached"], "untrusted": True}
    workload = load_workload(request_with(str(trace), **options))
    (candidate,) = workload.request.candidates.candidate
    call = UntrustedCall(candidate, workload, workload.cases[0].signature, {})
    (result,) = call(torch.zeros(2, 2), -1, False)
    path = Path(f"/proc/{int(result[0, 0])}/stat")
    assert ") T " in path.read_text()
    untrusted.end_process(candidate)
    for _ in range(1000):
        # the kernel ends a killed process a moment later
        try:
            is_over = ") Z " in path.read_text()
        except OSError:
            is_over = True
        if is_over:
            break
        sleep(0.01)
    assert is_over


def test_functions_of_this_process_cannot_be_untrusted(trace: Path) -> None:
    with pytest.raises(UserError, match="name them as text"):
        judge({SOFTMAX: torch.softmax}, trace, untrusted=True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--untrusted"], "--untrusted is for candidates: add --candidate"),
        (["--untrusted", "--confirm", "--candidate", f"{SOFTMAX}={cheats.__file__}:honest"], "without protection"),
        (["--untrusted", "--backward", "--candidate", f"{SOFTMAX}={cheats.__file__}:honest"], "does not support"),
    ],
)
def test_options_that_contradict_untrusted_are_refused(trace: Path, words: list[str], message: str) -> None:
    done = run_command("opreplay", trace, *words)
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.timeout(300)
def test_command_judges_an_untrusted_candidate(trace: Path) -> None:
    words = ["--candidate", f"{SOFTMAX}={cheats.__file__}:less_precise", "--untrusted", "--iterations", "2"]
    done = run_command("opreplay", trace, *words)
    assert done.returncode == 1, done.stderr
    assert "wrong on 1 of 1 signature" in done.stdout
    assert ("bubblewrap" in done.stderr) == (untrusted.unconfined() is not None)
