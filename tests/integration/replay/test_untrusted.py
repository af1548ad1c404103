"""Untrusted candidates: cheats get no better verdict than their honest twins."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from time import sleep

import cheats
import pytest
import torch
from judge_candidates import FOLDER
from programs import refusal, run_command

from opgrip import Capture, UserError, judge
from opgrip.platform.peaks import Level, Peaks
from opgrip.replay.analyses.candidates import held_to_limits
from opgrip.replay.replay_options import request_with
from opgrip.replay.results.judgement import CandidateColumns, judge_rows
from opgrip.replay.results.results import Result
from opgrip.replay.run import untrusted
from opgrip.replay.run.measure import measure_cases
from opgrip.replay.run.untrusted import UntrustedCall
from opgrip.replay.run.workload import load_workload

SOFTMAX = "aten._softmax.default"
DROPOUT = "aten.native_dropout.default"
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
        torch.native_dropout(torch.randn(32, 64), 0.25, True)
        torch.randn(256, generator=torch.Generator())
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


def row_of(
    trace: Path, name: str, op: str = SOFTMAX, ceilings: Peaks | None = None, file: str = cheats.__file__
) -> Result:
    """Return the judged row of a candidate of a file, judged in processes of this one."""
    text = f"{op}={file}:{name}"
    options = {"candidate": [text], "untrusted": True, "iterations": RUNS, "cache": "warm", "threads": 1}
    workload = load_workload(request_with(str(trace), **options))
    (rows,) = measure_cases(workload.cases, workload)
    # the next judgement must not find what this one left
    untrusted.end_process(workload.request.candidates.candidate[0])
    if ceilings is not None:
        rows = held_to_limits(rows, ceilings, workload)
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
    "left_on_a_daemon": "differ",
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
    "continued_by_timer": "after its process had been stopped",
    "forged_answer": "its ",
}
QUICK = {"only_first_values"}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in CHEATS]
)
def test_cheat_gets_no_better_verdict_than_its_honest_twin(trace: Path, name: str) -> None:
    verdict, reason = verdict_on(trace, name)
    allowed = {"wrong", "slower"} if CHEATS[name] is None else {"wrong" if CHEATS[name] else "slower"}
    assert verdict in allowed, reason
    assert (CHEATS[name] or "") in reason


# cheats of the benchmark that once gained something, with the reason why they are wrong
HELD_OUT = {
    "softmax_in_one_memory": (SOFTMAX, "it returns the memory of an earlier result"),
    "dropout_with_one_mask": (DROPOUT, "output 1 has the random numbers of an earlier run"),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", HELD_OUT)
def test_cheat_of_the_benchmark_is_wrong(trace: Path, name: str) -> None:
    op, reason = HELD_OUT[name]
    row = row_of(trace, name, op, file=str(FOLDER / "cheats.py"))
    assert CandidateColumns.of(row).verdict == "wrong"
    assert reason in str(row.error)


@pytest.mark.timeout(300)
def test_random_numbers_of_an_honest_candidate_do_not_depend_on_the_values(trace: Path) -> None:
    row = row_of(trace, "dropout_with_own_mask", DROPOUT, file=str(FOLDER / "cheats.py"))
    assert row.error is None


@pytest.mark.timeout(300)
def test_random_numbers_of_the_same_generator_are_not_those_of_an_earlier_run(trace: Path, tmp_path: Path) -> None:
    (tmp_path / "drawing.py").write_text("from torch import randn", encoding="utf-8")
    assert row_of(trace, "randn", "aten.randn.generator", file=str(tmp_path / "drawing.py")).error is None


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


@pytest.mark.timeout(300)
@pytest.mark.slow
@pytest.mark.parametrize(("ceilings", "verdict"), [(CEILINGS, "wrong"), (None, "faster")])
def test_time_below_the_limit_of_the_machine_is_wrong(
    trace: Path, monkeypatch: pytest.MonkeyPatch, ceilings: Peaks | None, verdict: str
) -> None:
    # this process's clock does not bound calls that take less time than requests vary
    monkeypatch.setattr(untrusted, "MARGIN", 1e9)
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


@pytest.mark.timeout(300)
@pytest.mark.slow
@pytest.mark.parametrize("is_honest", [True, False])
def test_candidates_of_samples_are_judged(tmp_path: Path, is_honest: bool) -> None:
    returned = "found" if is_honest else "found.roll(1)"
    lines = ["from opgrip.samples.coders.delta2bbox import delta2bbox", "", "", "def mine(*args, **kwargs):"]
    lines += ["    found = delta2bbox(*args, **kwargs)", f"    return {returned}", ""]
    (tmp_path / "mine.py").write_text("\n".join(lines), encoding="utf-8")
    candidate = {"sample:delta2bbox": f"{tmp_path / 'mine.py'}:mine"}
    results = judge(candidate, "sample:delta2bbox", untrusted=True, iterations=3)
    assert results.is_right == is_honest, str(results)


def test_functions_of_this_process_cannot_be_untrusted(trace: Path) -> None:
    with pytest.raises(UserError, match="name them by file and function"):
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
    assert message in refusal("opreplay", trace, *words)


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_command_judges_an_untrusted_candidate(trace: Path) -> None:
    words = ["--candidate", f"{SOFTMAX}={cheats.__file__}:less_precise", "--untrusted", "--iterations", "2"]
    done = run_command("opreplay", trace, *words)
    assert done.returncode == 1, done.stderr
    assert "wrong on 1 of 1 signature" in done.stdout
    assert ("bubblewrap" in done.stderr) == (untrusted.unconfined() is not None)
