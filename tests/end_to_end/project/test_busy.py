"""Comparisons of times in tests, which are skipped on a busy machine and fail on an idle one."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from busy import usage_now
from forks import run_forked
from others import Usage, share_of_others
from programs import ROOT, SUPPORT_PATH, run_python

COMPARING = """
import pytest
import torch
from busy import compared_times

@pytest.mark.alone
def test_it():
    with compared_times():
        assert 2 < 1
"""
CONFTEST = """
import conftest_of_tests
from conftest_of_tests import pytest_runtest_call
from others import Usage

conftest_of_tests.usage_now = iter([Usage(0, 0, 0), Usage(10, {busy}, 1)]).__next__
"""


def test_share_of_other_processes_excludes_own_and_idle_time() -> None:
    assert share_of_others(Usage(100, 50, 10), Usage(120, 65, 22)) == pytest.approx(3 / 20)
    assert share_of_others(Usage(0, 0, 0), Usage(10, 1, 2)) == 0


def test_processor_usage_counts_increase() -> None:
    before = usage_now()
    while (after := usage_now()).own_s < before.own_s + 0.1:
        pass
    assert after.whole_s > before.whole_s
    assert after.busy_s >= before.busy_s + 0.05


BUSY = """
import sys, time

while (used_s := time.process_time()) < float(sys.argv[2]):
    with open(sys.argv[1], "a") as file:
        print(used_s, file=file)
    sum(range(100_000))
"""


@pytest.mark.parametrize(("most_s", "timeout"), [(1, 300), (1e9, 2)])
@pytest.mark.slow
def test_time_of_a_forked_process_counts_as_own_even_if_it_is_killed(
    tmp_path: Path, most_s: float, timeout: float
) -> None:
    run_forked(["-c", ""])
    before = usage_now()
    try:
        assert run_forked(["-c", BUSY, str(tmp_path / "used"), str(most_s)], timeout=timeout).returncode == 0
    except subprocess.TimeoutExpired:
        assert most_s == 1e9
    after = usage_now()
    used_s = float((tmp_path / "used").read_text().splitlines()[-1])
    # as if only the fork had run on this machine
    assert share_of_others(before, replace(after, busy_s=before.busy_s + used_s)) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "busy", "outcome"),
    [
        pytest.param(COMPARING, 6, "1 skipped", id="busy"),
        pytest.param(COMPARING, 1.5, "1 failed", id="quiet"),
        pytest.param(COMPARING.replace("with compared_times()", "if True"), 6, "1 failed", id="busy, not of times"),
        pytest.param(COMPARING.replace("@pytest.mark.alone", ""), 6, "1 failed", id="busy, not alone"),
    ],
)
def test_failed_time_comparison_is_skipped_only_on_a_busy_machine(
    tmp_path: Path, text: str, busy: float, outcome: str
) -> None:
    own = ROOT / "tests" / "conftest.py"
    folders = f"{SUPPORT_PATH.replace(os.pathsep, ' ')} {ROOT / 'benchmarks'}"
    (tmp_path / "conftest_of_tests.py").write_text(own.read_text())
    (tmp_path / "conftest.py").write_text(CONFTEST.replace("{busy}", str(busy)))
    (tmp_path / "test_it.py").write_text(text)
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {tmp_path} {folders}\nmarkers = alone\n")
    done = run_python("-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", tmp_path, cwd=tmp_path)
    assert outcome in done.stdout, done.stdout + done.stderr
    assert ("busy: other processes took 50% of the processors" in done.stdout) == (outcome == "1 skipped")


def test_test_processes_together_use_at_most_all_processors() -> None:
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    assert torch.get_num_threads() <= max(1, len(os.sched_getaffinity(0)) // workers)
