"""Replays of several traces on remote machines that are lost, or that differ when the replay resumes."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from several_traces import small_trace

from opgrip.errors import UserError
from opgrip.replay.command.opreplay import main
from opgrip.replay.outcome import Results
from opgrip.replay.results.origins import Machine
from opgrip.replay.results.results import Result
from opgrip.replay.run.measure import CachedRows
from opgrip.replay.run.workload import Workload
from opgrip.replay.workers.executors import ExecutorLostError, LocalExecutor

FAST = ["--iterations", "3", "--warmup", "0", "--cache", "warm"]
ALL = 1_000


class Elsewhere(LocalExecutor):
    """Executor in this machine's processes that acts as a remote one.

    cases : number of cases after which it is lost
    kind : kind of the machine
    absent : trace whose device no machine has
    """

    runs_here = False

    def __init__(self, cases: int = ALL, kind: str = "big", absent: str = "") -> None:
        self.cases, self.kind, self.absent = cases, kind, absent

    def machine_kind(self, workload: Workload) -> str:
        if Path(workload.request.trace).stem == self.absent:
            raise UserError("no machine of the cluster has a GPU", "see ray status")
        return self.kind

    def about(self, workload: Workload) -> dict[str, Any]:
        return {**super().about(workload), "machines": {"one": self.machine_kind(workload)}}

    def run(
        self, workload: Workload, done: Collection[int], cached_rows: CachedRows, may_fork: bool
    ) -> Iterator[list[Result]]:
        for rows in super().run(workload, done, cached_rows, may_fork):
            if not self.cases:
                raise ExecutorLostError("no machine of the cluster is left", "see ray status")
            self.cases -= 1
            yield [Machine("one", self.kind).marked(row) for row in rows]


@pytest.fixture
def output(tmp_path: Path) -> Path:
    (tmp_path / "traces").mkdir()
    small_trace(tmp_path / "traces" / "a.jsonl")
    small_trace(tmp_path / "traces" / "b.jsonl", (10, 500, 900))
    small_trace(tmp_path / "traces" / "c.jsonl", (7,))
    return tmp_path / "r.json"


@pytest.fixture
def run(output: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def run(engine: Elsewhere, *words: str) -> int:
        @contextmanager
        def start(args: object) -> Iterator[Elsewhere]:
            yield engine

        monkeypatch.setattr("opgrip.replay.command.replay.start_executor", start)
        return main([str(output.parent / "traces"), *FAST, "-o", str(output), *words])

    return run


def kept(output: Path) -> dict[str, bytes]:
    """Return the content of each file in the folder next to an output."""
    folder = output.with_name(f"{output.name}.parts")
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())} if folder.exists() else {}


def test_lost_engine_ends_the_run_and_resume_continues_it(
    run: Any, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(Elsewhere(cases=3)) == 2
    errors = capsys.readouterr().err
    assert "the rows are kept; continue with: opreplay " in errors
    assert errors.endswith("opreplay: error: no machine of the cluster is left: see ray status\n")
    assert "3 of 3, c" not in errors
    assert not output.exists()
    assert [*kept(output)] == ["000-a.json", "001-b.json.journal", "about.json"]
    part = output.parent / "r.json.parts" / "000-a.json"
    times = [row.times_us for row in Results.load(part)]
    engine = Elsewhere()
    assert run(engine, "--resume") == 0
    assert ALL - engine.cases == 3
    rows = Results.load(output)
    assert [row.trace for row in rows] == ["a", "a", "b", "b", "b", "c"]
    assert [row.times_us for row in rows if row.trace == "a"] == times
    assert all("problem" not in about for about in rows.header["traces"].values())
    assert not kept(output)
    assert run(Elsewhere(), "--resume") == 0
    assert f"{output} is complete" in capsys.readouterr().err


def test_engine_lost_before_the_first_row_leaves_no_files(
    run: Any, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(Elsewhere(cases=0)) == 2
    assert "continue with" not in capsys.readouterr().err
    assert sorted(path.name for path in output.parent.iterdir()) == ["traces"]


@pytest.mark.slow
@pytest.mark.parametrize("cases", [1, 2, 5], ids=["journal", "finished", "finished after one that is not"])
def test_resume_refuses_rows_of_another_machine_kind(
    run: Any, output: Path, cases: int, capsys: pytest.CaptureFixture[str]
) -> None:
    run(Elsewhere(cases))
    if cases == 5:
        # like a run that could not read the first trace before
        (output.parent / "r.json.parts" / "000-a.json").unlink()
    before = kept(output)
    capsys.readouterr()
    assert run(Elsewhere(kind="small"), "--resume") == 2
    problem = f"{output}.parts contains rows measured on another kind of machine (big) than the present one (small)"
    hint = "continue with --machine-kind on such machines, or start again with --force"
    assert capsys.readouterr().err.endswith(f"opreplay: error: {problem}: {hint}\n")
    assert (kept(output), output.exists()) == (before, False)
    assert run(Elsewhere(), "--resume") == 0
    assert {row.added["machine_kind"] for row in Results.load(output)} == {"big"}


@pytest.mark.slow
@pytest.mark.parametrize("absent", ["a", "b"])
def test_earlier_rows_are_kept_if_the_device_is_unavailable(run: Any, output: Path, absent: str) -> None:
    run(Elsewhere(cases=3))
    before = kept(output)
    assert run(Elsewhere(absent=absent), "--resume") == 2
    assert (kept(output), output.exists()) == (before, False)
