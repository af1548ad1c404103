"""Remote workers and machines that are lost, or that differ when a replay resumes."""

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from example_trace import small_trace

from opgrip.errors import UserError
from opgrip.replay.command.opreplay import main
from opgrip.replay.reports.outcome import Results
from opgrip.replay.results.origins import Machine
from opgrip.replay.results.results import Result
from opgrip.replay.run.measure import CachedRows
from opgrip.replay.run.worker import LocalExecutor
from opgrip.replay.run.workload import Workload
from opgrip.replay.workers import ray_pool
from opgrip.replay.workers.executors import EngineOptions, ExecutorLostError
from opgrip.replay.workers.journal import journal_path
from opgrip.replay.workers.ray_pool import LOSSES, START_S, Pool, RayTask


class RayError(Exception):
    """Error for a worker that has ended."""


class RayTaskError(RayError):
    """Error for a task that failed in a worker."""


@dataclass(frozen=True, eq=False)
class Future:
    """Reference to the message of a task; None if the worker was lost."""

    message: bytes | None


@dataclass(frozen=True)
class Node:
    """Simulated machine.

    kinds : kind of each of its devices; a worker gets the first free device
    resource : Ray's resource name of the devices
    joins_s, leaves_s : times in s when it joins and leaves the cluster
    free_s : time in s when another user releases its devices
    problem : reason why its workers cannot run cases, and what to do
    """

    name: str
    kinds: Sequence[str] = ("big",)
    resource: str = "CPU"
    joins_s: float = 0.0
    leaves_s: float = float("inf")
    free_s: float = 0.0
    problem: Sequence[str] = ()


@dataclass(eq=False)
class Worker:
    """Simulated actor of Ray, whose method `describe` has a result as soon as the worker has a device.

    place : index of its device in its node; None until it has one
    """

    node: Node
    place: int | None = None
    is_killed: bool = False

    @property
    def describe(self) -> SimpleNamespace:
        return SimpleNamespace(remote=lambda device, versions: self)

    @property
    def close(self) -> SimpleNamespace:
        return SimpleNamespace(remote=lambda: self)


@dataclass(eq=False)
class FakeRay:
    """Simulated cluster with the functions of the module `ray`: its nodes, and a head node without free resources.

    now_s : simulated time in s, which advances only in waits
    """

    all_nodes: Sequence[Node]
    now_s: float = 0.0
    workers: list[Worker] = field(default_factory=list)

    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)
    util = SimpleNamespace(
        scheduling_strategies=SimpleNamespace(NodeAffinitySchedulingStrategy=lambda name, soft: name)
    )

    def alive(self) -> list[Worker]:
        return [worker for worker in self.workers if not worker.is_killed and self._is_there(worker.node)]

    def nodes(self) -> list[dict[str, Any]]:
        described = [(node.name, self._is_there(node), {node.resource: len(node.kinds)}) for node in self.all_nodes]
        return [
            {"NodeID": name, "Alive": is_there, "Resources": resources}
            for name, is_there, resources in [("head", True, {"CPU": 0}), *described]
        ]

    def remote(self, worker: type) -> SimpleNamespace:
        def options(scheduling_strategy: str, **resources: Any) -> SimpleNamespace:
            (node,) = (node for node in self.all_nodes if node.name == scheduling_strategy)
            return SimpleNamespace(remote=lambda *parameters: self._start(node))

        return SimpleNamespace(options=options)

    def wait(self, items: Sequence[Any], timeout: float = 5.0, num_returns: int = 1) -> tuple[list[Any], list[Any]]:
        ready = [item for item in items if self._is_ready(item)][:num_returns]
        if len(ready) < num_returns:
            self.sleep(timeout)
        return ready, [item for item in items if item not in ready]

    def get(self, item: Any) -> Any:
        if isinstance(item, Future) and item.message is not None:
            return item.message
        if isinstance(item, Future) or not self._is_there(item.node):
            raise RayError("The actor died unexpectedly before finishing this task.")
        if item.node.problem:
            return {"problem": item.node.problem}
        assert item.place is not None, "it has started"
        return {"machine": {"name": item.node.name, "kind": item.node.kinds[item.place]}, "about": {}}

    def kill(self, worker: Worker) -> None:
        worker.is_killed = True

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def _start(self, node: Node) -> Worker:
        self.workers.append(Worker(node))
        return self.workers[-1]

    def _is_there(self, node: Node) -> bool:
        return node.joins_s <= self.now_s < node.leaves_s

    def _is_ready(self, item: Any) -> bool:
        if not isinstance(item, Worker) or not self._is_there(item.node):
            return True
        if item.place is None and self.now_s >= item.node.free_s:
            taken = {other.place for other in self.alive() if other.node is item.node}
            item.place = next((place for place in range(len(item.node.kinds)) if place not in taken), None)
        return item.place is not None


def fake_ray(monkeypatch: pytest.MonkeyPatch, *nodes: Node) -> FakeRay:
    ray = FakeRay(nodes)
    monkeypatch.setattr(ray_pool, "monotonic", lambda: ray.now_s)
    monkeypatch.setattr(ray_pool, "sleep", ray.sleep)
    return ray


A100, T4 = "NVIDIA A100, a processor, 8 of them", "NVIDIA T4, a processor, 8 of them"


def started(ray: FakeRay, device: str = "cpu", **options: Any) -> Pool:
    pool = Pool(ray, EngineOptions(engine="ray", processors=1, **options), device)
    pool.start()
    return pool


def kinds_of(workers: Sequence[Worker]) -> list[str]:
    return ["" if worker.place is None else worker.node.kinds[worker.place] for worker in workers]


def dealt(pool: Pool, cases: int, loses: Callable[[Worker, int], bool]) -> list[tuple[str, str, Any]]:
    """Return machine, kind and case of each task, or None for a lost task; a worker is lost if `loses` returns True."""

    def submit(worker: Worker, task: RayTask) -> Any:
        worker.is_killed = any(loses(worker, case) for case in task.cases)
        return Future(None if worker.is_killed else json.dumps({"rows": task.cases[0]}).encode())

    tasks = [RayTask([case]) for case in range(cases)]
    return [(slot.machine.name, slot.machine.kind, rows) for slot, _, rows in pool.run(tasks, submit)]


def test_temporarily_empty_cluster_costs_a_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = fake_ray(monkeypatch, Node("one", leaves_s=50), Node("two", joins_s=50 + START_S / 2))

    def loses(worker: Worker, case: int) -> bool:
        ray.now_s = max(ray.now_s, 50.0 * case)
        return worker.node.name == "one" and case == 1

    messages = dealt(started(ray), 3, loses)
    assert messages == [("one", "big", 0), ("two", "big", 1), ("two", "big", 2)]


def test_cluster_that_remains_empty_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = fake_ray(monkeypatch, Node("one", leaves_s=50))

    def loses(worker: Worker, case: int) -> bool:
        ray.now_s = 50.0
        return True

    with pytest.raises(ExecutorLostError, match="no machine of the cluster has enough processors any more"):
        dealt(started(ray), 1, loses)
    assert START_S < ray.now_s < START_S + 60


def test_cluster_without_usable_nodes_is_lost_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = Node("two", joins_s=50, problem=("a machine of the cluster has torch 1.0, and this one 2.0", "install it"))
    ray = fake_ray(monkeypatch, Node("one", leaves_s=50), bad)

    def loses(worker: Worker, case: int) -> bool:
        ray.now_s = 50.0
        return True

    with pytest.raises(ExecutorLostError, match=r"has torch 1\.0, and this one 2\.0: install it"):
        dealt(started(ray), 1, loses)
    assert ray.now_s - 50 < START_S / 10


@pytest.mark.parametrize("kinds", [(A100, T4), (T4, A100), (T4, A100, T4, A100)])
@pytest.mark.parametrize("workers", [None, 1])
def test_device_models_of_one_node_do_not_mix(
    monkeypatch: pytest.MonkeyPatch, kinds: Sequence[str], workers: int | None
) -> None:
    ray = fake_ray(monkeypatch, Node("one", kinds, "GPU"))
    with pytest.raises(ExecutorLostError, match="the cluster has machines of 2 kinds"):
        started(ray, "cuda:0", workers=workers)
    ray = fake_ray(monkeypatch, Node("one", kinds, "GPU"))
    pool = started(ray, "cuda:0", machine_kind="*A100*", workers=workers)
    expected, lost = [A100] * (workers or kinds.count(A100)), []
    assert (pool.kind, pool.machines) == (A100, {"one": A100})

    used: set[str] = set()

    def loses(worker: Worker, case: int) -> bool:
        used.update(kinds_of([worker]))
        is_first = case == 1 and not lost
        lost.extend([case] * is_first)
        return is_first

    messages = dealt(pool, 40, loses)
    assert Counter(messages) == Counter(("one", A100, case) for case in range(40))
    assert used == {A100}
    assert kinds_of(ray.alive()) == expected
    # a worker tries each device at the start, and again after a lost worker has released its device
    assert len(ray.workers) <= 3 * len(kinds)


def test_case_that_ends_each_worker_fails_and_the_others_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []

    def loses(worker: Worker, case: int) -> bool:
        used.append(case)
        return case == 2

    results = dealt(started(fake_ray(monkeypatch, Node("one"), Node("two"))), 5, loses)
    assert sorted(rows for _, _, rows in results if rows is not None) == [0, 1, 3, 4]
    assert (len(results), Counter(used)[2]) == (5, LOSSES)


def test_machine_that_is_full_is_left_out_and_its_cases_run_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = started(fake_ray(monkeypatch, Node("full"), Node("free")))

    def submit(worker: Worker, task: RayTask) -> Any:
        is_full = worker.node.name == "full"
        return Future(json.dumps({"unusable": "no space left"} if is_full else {"rows": task.cases[0]}).encode())

    results = list(pool.run([RayTask([case]) for case in range(4)], submit))
    assert {(slot.machine.name, rows) for slot, _, rows in results} == {("free", case) for case in range(4)}


def test_lost_cases_are_retried_together_and_then_one_by_one() -> None:
    (again,) = RayTask([1, 2, 3]).after_loss()
    assert again.cases == [1, 2, 3]
    single = again.after_loss()
    assert [task.cases for task in single] == [[1], [2], [3]]
    task, losses = single[0], 0
    while task.losses < LOSSES:
        (task,), losses = task.after_loss(), losses + 1
    assert (task.cases, losses) == ([1], 2)


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
        def start(*args: object) -> Iterator[Elsewhere]:
            yield engine

        monkeypatch.setattr("opgrip.replay.command.replay_kind.start_executor", start)
        return main([str(output.parent / "traces"), *FAST, "-o", str(output), *words])

    return run


def kept(output: Path) -> list[str]:
    return journal_path(output).read_text().splitlines() if journal_path(output).exists() else []


@pytest.mark.slow
def test_lost_engine_ends_the_run_and_resume_continues_it(
    run: Any, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(Elsewhere(cases=3)) == 2
    errors = capsys.readouterr().err
    assert "the rows are kept; continue with: opreplay " in errors
    assert errors.endswith("opreplay: error: no machine of the cluster is left: see ray status\n")
    assert "3 of 3, c" not in errors
    assert not output.exists()
    records = [json.loads(line) for line in kept(output)[1:]]
    measured = [row for record in records if isinstance(record, list) for row in record]
    assert [row["trace"] for row in measured] == ["a", "a", "b"]
    assert [record["trace"] for record in records if isinstance(record, dict) and record["header"]] == ["a"]
    times = [row["times_us"] for row in measured if row["trace"] == "a"]
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
        others = [line for line in kept(output) if '"trace": "a"' not in line]
        journal_path(output).write_text("\n".join(others) + "\n")
    before = kept(output)
    capsys.readouterr()
    assert run(Elsewhere(kind="small"), "--resume") == 2
    problem = f"{output}.journal contains rows measured on another kind of machine (big) than the present one (small)"
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
