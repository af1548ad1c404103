"""Tests of the pytest plug-in, run by pytest in a separate project."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_runs import make_run
from programs import run_python

import opgrip.replay
from opgrip.replay.reports.outcome import Results, write_results

pytest_plugins = ["pytester"]

FAST = "--opgrip-options=--top 3 --iterations 1 --warmup 0 --cache warm"

MADE_RUNS = """
import opgrip.replay
from opgrip.replay import Results

# a file of results stands for the replay that gave it
opgrip.replay.replay = lambda trace, **options: Results.load(trace)
"""
TESTS = """
import pytest

@pytest.mark.parametrize("name", ["a", "b"])
def test_net(opgrip_replay, name):
    assert len(opgrip_replay(f"{name}.json", repeats=3)) > 3
"""
STEADY_TIMES = """
import importlib
from dataclasses import replace

module = importlib.import_module("opgrip.replay.command.replay")
real = module.run_job

def steady(job):
    results = real(job)
    times = [100.0, 101.0, 99.0] * 3
    # these replays are not told that the machine is quiet
    steady = dict(status="ok", times_us=times, median_us=100.0, repeats=[3, 3, 3], weights=None, slowed=None, dropped=0)
    steady["memory_gb_per_s"] = 10.0
    return replace(results, rows=[replace(row, **steady) for row in results])

module.run_job = steady
"""

NOISY_TIMES = """
import itertools
import opgrip.replay
from made_runs import make_run

seeds = itertools.count(1)
opgrip.replay.replay = lambda trace, repeats=1: make_run(next(seeds), cases=1, repeats=repeats, between=0.005)
"""

LOADED = """
import sys
import pytest

status = pytest.main(["-q", "-p", "no:cacheprovider"])
names = {"opgrip.tools.pytest_plugin", "torch", "numpy", "pandas"}
print(int(status), *sorted(names & sys.modules.keys()))
"""


@pytest.fixture(autouse=True)
def _imports_stay(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Let pytester forget only modules of its projects: others would come twice, with other classes, in later tests."""
    folder = str(tmp_path_factory.getbasetemp())

    def restore(_: object) -> None:
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", "")).startswith(folder):
                del sys.modules[name]

    monkeypatch.setattr("_pytest.pytester.SysModulesSnapshot.restore", restore)


@pytest.fixture
def run(pytester: pytest.Pytester) -> Callable[..., pytest.RunResult]:
    def run_pytest(*words: str) -> pytest.RunResult:
        done = run_python("-m", "pytest", "-p", "no:cacheprovider", *words, cwd=pytester.path, timeout=500)
        return pytest.RunResult(done.returncode, done.stdout.splitlines(), done.stderr.splitlines(), 0.0)

    return run_pytest


@pytest.fixture
def run_here(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Callable[..., pytest.RunResult]:
    """Return a function that runs pytest in this process, where torch is loaded, and restores what `MADE_RUNS`
    replaces.
    """
    monkeypatch.setattr(opgrip.replay, "replay", opgrip.replay.replay)

    def run_pytest(*words: str) -> pytest.RunResult:
        return pytester.runpytest_inprocess("-p", "no:cacheprovider", *words)

    return run_pytest


@pytest.fixture
def project(pytester: pytest.Pytester) -> Path:
    pytester.makeconftest(MADE_RUNS)
    pytester.makepyfile(test_net=TESTS)
    for name, seed in (("a", 1), ("b", 2)):
        results = make_run(seed, cases=6, longer_than_us=0.0)
        write_results(results.rows, results.header, pytester.path / f"{name}.json", force=False)
    return pytester.path


def change_times(path: Path, factor: float, rows: slice = slice(None)) -> None:
    stored = json.loads(path.read_text())
    for row in stored["results"][rows]:
        row["median_us"] *= factor
        row["times_us"] = [time * factor for time in row["times_us"]]
    path.write_text(json.dumps(stored))


def test_measuring_tests_are_skipped_or_run_alone(run_here: Any, project: Path) -> None:
    (project / "test_other.py").write_text("def test_quick():\n    pass\n")
    run_here("--opgrip-skip").assert_outcomes(passed=1, skipped=2)
    run_here("--opgrip-only").assert_outcomes(passed=2, skipped=1)
    both = run_here("--opgrip-only", "--opgrip-skip")
    assert both.ret == pytest.ExitCode.USAGE_ERROR
    both.stderr.fnmatch_lines(["*use one of them"])


def test_tests_fail_if_cases_are_slower_than_the_baseline(run_here: Any, project: Path) -> None:
    kept = run_here("--opgrip-save", "main")
    kept.assert_outcomes(passed=2)
    kept.stdout.fnmatch_lines(["*= opgrip =*", "operator*shapes*median us", "aten.op0.default*", "12 rows kept in *"])
    baseline = project / ".opgrip" / "main.json"
    assert len(Results.load(baseline)) == 12
    words = ("--opgrip-compare", "main", "--opgrip-compare-fail", "slower<=5%", "--opgrip-compare-fail", "missing<=0")
    same = run_here(*words)
    same.assert_outcomes(passed=2)
    same.stdout.fnmatch_lines(["*= opgrip, against main =*", "operator*baseline us*ratio*95% interval*verdict"])
    change_times(baseline, 0.25, slice(6, None))
    slower = run_here(*words)
    slower.assert_outcomes(passed=1, failed=1)
    slower.stdout.fnmatch_lines(
        [
            "*test_net[[]b[]]*",
            "gate slower<=5%: failed: 6 of 6 rows, worst aten.op?.default float32[[]?[]] (eager): [34].* times (*",
            "*= opgrip, against main =*",
            "gate slower<=5%: passed*",
            "gate missing<=0: passed",
            "gate slower<=5%: failed: *",
        ]
    )
    assert slower.ret == pytest.ExitCode.TESTS_FAILED
    slower.stdout.no_fnmatch_line("*Traceback*")


def test_undecided_conditions_fail_on_request_and_cause_more_repeats(run_here: Any, pytester: pytest.Pytester) -> None:
    pytester.makeconftest(NOISY_TIMES)
    pytester.makepyfile(test_net="def test_net(opgrip_replay):\n    opgrip_replay('t.jsonl')\n")
    run_here("--opgrip-repeats", "12", "--opgrip-save", "main").assert_outcomes(passed=1)
    words = ("--opgrip-compare", "main", "--opgrip-compare-fail", "slower<=5%")
    undecided = run_here(*words)
    undecided.assert_outcomes(passed=1)
    undecided.stdout.fnmatch_lines(["gate slower<=5%: not decided: * --opgrip-repeats *"])
    run_here(*words, "--opgrip-fail-undecided").assert_outcomes(failed=1)
    run_here(*words, "--opgrip-repeats", "2", "--opgrip-save", "again").assert_outcomes(passed=1)
    (row,) = Results.load(pytester.path / ".opgrip" / "again.json")
    assert 2 < len(row.repeats or ()) <= 20


@pytest.mark.slow
def test_xdist_workers_send_their_measurements(run: Any, project: Path) -> None:
    run("-n", "2", "--opgrip-save", "main").stdout.fnmatch_lines(["12 rows kept in *"])
    change_times(project / ".opgrip" / "main.json", 0.25)
    done = run("-n", "1", "--opgrip-compare", "main", "--opgrip-compare-fail", "slower<=5%")
    done.assert_outcomes(failed=2)
    done.stdout.fnmatch_lines(["operator*baseline us*verdict", "aten.op?.default*SLOWER"])


def test_opreplay_results_are_accepted_as_a_baseline(run_here: Any, project: Path) -> None:
    words = ("--opgrip-compare", "a.json", "--opgrip-compare-fail", "slower<=5%", "-k", "net[a]")
    run_here(*words).assert_outcomes(passed=1, deselected=1)
    change_times(project / "a.json", 4.0)
    # restore the base
    results = make_run(1, cases=6, longer_than_us=0.0)
    write_results(results.rows, results.header, project / "base.json", force=False)
    done = run_here(*words[:1], "base.json", *words[2:])
    done.assert_outcomes(failed=1, deselected=1)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (
            ("--opgrip-compare", "none"),
            "none is neither a file nor a baseline in *.opgrip: save one with --opgrip-save none",
        ),
        (("--opgrip-compare-fail", "slower<=5%"), "*requires a baseline: add --opgrip-compare NAME"),
        (
            ("--opgrip-compare", "a.json", "--opgrip-compare-fail", "slower"),
            "'slower' is not a gate: *",
        ),
        (("--opgrip-compare", "test_net.py"), "*test_net.py is not a file of results: *"),
        (("--opgrip-save", "../main"), "'../main' is not the name of a baseline: *"),
    ],
)
def test_invalid_comparison_is_reported_before_any_test_runs(
    words: tuple[str, ...], problem: str, run_here: Any, project: Path
) -> None:
    done = run_here(*words)
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines([f"ERROR: {problem}"])
    assert len(done.errlines) <= 2


@pytest.mark.slow
def test_functions_and_traces_are_measured(run: Any, pytester: pytest.Pytester, tiny_trace: Path) -> None:
    pytester.makepyfile(
        test_real=f"""
import torch

def test_trace(opgrip_replay):
    results = opgrip_replay({str(tiny_trace)!r}, op=["aten.convolution.*"], iterations=1, cache="warm")
    assert [row.status in ("ok", "contended") for row in results] == [True]

def test_function(opgrip_benchmark):
    assert len(opgrip_benchmark(torch.add, [[(4, 4), (4, 4)]], iterations=2)) == 1
"""
    )
    done = run("--opgrip-save", "first", "--opgrip-store", "kept")
    done.assert_outcomes(passed=2)
    assert [row.op for row in Results.load(pytester.path / "kept" / "first.json")] == [
        "aten.convolution.default",
        "torch.add",
    ]


@pytest.mark.slow
def test_trace_is_collected_as_tests(run: Any, pytester: pytest.Pytester, tiny_trace: Path) -> None:
    pytester.makeconftest(STEADY_TIMES)
    (pytester.path / "net.jsonl").write_bytes(tiny_trace.read_bytes())
    kept = run("net.jsonl", "--opgrip-traces", FAST, "--opgrip-save", "main", "-v")
    kept.assert_outcomes(passed=3)
    kept.stdout.fnmatch_lines(["net.jsonl::aten.*[[]float32*[]] PASSED*"])
    baseline = pytester.path / ".opgrip" / "main.json"
    change_times(baseline, 0.5, slice(0, 1))
    words = ("--opgrip-traces", FAST, "--opgrip-compare", "main", "--opgrip-compare-fail", "slower<=5%")
    done = run("net.jsonl", *words)
    done.assert_outcomes(passed=2, failed=1)
    op = Results.load(baseline).rows[0].op
    done.stdout.fnmatch_lines([f"gate slower<=5%: failed: 1 of 3 rows, worst {op} *: 2.000 times (*)"])
    by_operator = run(f"net.jsonl::{op}", "--opgrip-by", "operator", "-n", "1", *words)
    by_operator.assert_outcomes(failed=1)


@pytest.mark.slow
def test_broken_trace_is_one_collection_error(run: Any, pytester: pytest.Pytester) -> None:
    (pytester.path / "net.jsonl").write_text("{\n")
    done = run("net.jsonl", "--opgrip-traces")
    done.assert_outcomes(errors=1)
    done.stdout.fnmatch_lines(["*ERROR collecting net.jsonl*", "*net.jsonl*:*"])
    done.stdout.no_fnmatch_line("*Error:*")
    (pytester.path / "net.jsonl").unlink()
    pytester.path.joinpath("other.jsonl").write_text("{\n")
    done = run("other.jsonl", "--opgrip-traces", "--opgrip-options=--nosuch")
    done.stdout.fnmatch_lines(["--opgrip-options='--nosuch': unknown option --nosuch*"])


@pytest.mark.slow
def test_projects_without_the_plugin_options_are_unaffected(run: Any, pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_nothing(): pass")
    (pytester.path / "data.jsonl").write_text("{\n")
    done = run()
    done.assert_outcomes(passed=1)
    done.stdout.no_fnmatch_line("*opgrip*=*")
    assert not (pytester.path / ".opgrip").exists()
    loaded = run_python("-c", LOADED, cwd=pytester.path, fresh=True)
    assert loaded.stdout.splitlines()[-1] == "0 opgrip.tools.pytest_plugin"
