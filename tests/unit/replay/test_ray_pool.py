"""Workers of a pool on a cluster, and the handling of tasks whose worker is lost."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_ray import LOST, FakeRay, Node, Worker, fake_ray
from several_traces import small_trace

from opgrip.errors import UserError
from opgrip.replay.replay_options import request_with
from opgrip.replay.results.origins import Machine
from opgrip.replay.results.results import OK
from opgrip.replay.run.workload import empty_rows, load_workload
from opgrip.replay.workers.executors import EngineOptions, ExecutorLostError
from opgrip.replay.workers.executors.ray import RayExecutor
from opgrip.replay.workers.ray_pool import START_S, Pool, RayTask

A100, T4 = "NVIDIA A100, a processor, 8 of them", "NVIDIA T4, a processor, 8 of them"


def started(ray: FakeRay, device: str = "cpu", **options: Any) -> Pool:
    pool = Pool(ray, EngineOptions(engine="ray", processors=1, **options), device)
    pool.start()
    return pool


def kinds_of(workers: Sequence[Worker]) -> list[str]:
    return ["" if worker.place is None else worker.node.kinds[worker.place] for worker in workers]


def dealt(pool: Pool, cases: int, loses: Callable[[Worker, int], bool]) -> list[tuple[str, str, int]]:
    """Return machine, kind and case of each message; a worker is lost during a case if `loses` returns True."""

    def submit(worker: Worker, task: RayTask) -> Iterator[Any]:
        for case in task.cases:
            if loses(worker, case):
                worker.is_killed = True
                yield LOST
            yield case

    tasks, finished, messages = [RayTask([case]) for case in range(cases)], set(), []
    for machine, _, _, message in pool.deal(tasks, submit, finished):
        assert message is not None
        finished.add(message)
        messages.append((machine.name, machine.kind, message))
    return messages


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

    with pytest.raises(ExecutorLostError, match="no machine of the cluster has processors enough any more"):
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


def test_next_replay_requests_missing_workers_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = fake_ray(monkeypatch, Node("one", ("big",)), Node("two", ("small",)))
    engine = RayExecutor(ray, EngineOptions(engine="ray"))
    for _ in range(2):
        with pytest.raises(ExecutorLostError, match=r"the cluster has machines of 2 kinds that fit \(big; small\)"):
            engine.pool("cpu")
        assert not ray.alive()
    # another trace may not need a GPU
    with pytest.raises(UserError, match="no machine of the cluster has a GPU") as raised:
        engine.pool("cuda:0")
    assert not isinstance(raised.value, ExecutorLostError)


@pytest.mark.parametrize("kinds", [(A100, T4), (T4, A100), (T4, A100, T4, A100)])
@pytest.mark.parametrize("workers", [None, 1])
@pytest.mark.parametrize("pattern", [None, "*A100*"])
def test_device_models_of_one_node_do_not_mix(
    monkeypatch: pytest.MonkeyPatch, kinds: Sequence[str], workers: int | None, pattern: str | None
) -> None:
    ray, kind = fake_ray(monkeypatch, Node("one", kinds, "GPU")), A100 if pattern else kinds[0]
    pool = started(ray, "cuda:0", machine_kind=pattern, workers=workers)
    expected, lost = [kind] * (workers or kinds.count(kind)), []
    assert (pool.kind, pool.machines) == (kind, {"one": kind})

    used: set[str] = set()

    def loses(worker: Worker, case: int) -> bool:
        used.update(kinds_of([worker]))
        is_first = case == 1 and not lost
        lost.extend([case] * is_first)
        return is_first

    messages = dealt(pool, 40, loses)
    assert Counter(messages) == Counter(("one", kind, case) for case in range(40))
    assert used == {kind}
    assert kinds_of(ray.alive()) == expected
    # a worker tries each device at the start, and again after the lost worker has released its device
    assert len(ray.workers) <= 2 * len(kinds)


@pytest.mark.parametrize("slow_s", [0.0, START_S * 1.5])
def test_surplus_waiting_workers_end(monkeypatch: pytest.MonkeyPatch, slow_s: float) -> None:
    ray = fake_ray(monkeypatch, Node("busy", free_s=1e9), Node("one"), Node("two", free_s=slow_s))
    pool = started(ray, workers=2)
    assert pool.size == len(ray.alive()) == (2 if slow_s == 0 else 3)

    def loses(worker: Worker, case: int) -> bool:
        ray.now_s = max(ray.now_s, slow_s)
        return False

    assert len(dealt(pool, 5, loses)) == 5
    assert {worker.node.name for worker in ray.alive()} == {"one", "two"}
    assert pool.size == 2


def test_case_that_is_sent_twice_has_its_rows_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = request_with(small_trace(tmp_path / "net.jsonl", (10, 20, 30)))
    workload = load_workload(request)
    cases = {case.number: case for case in workload.cases}

    def deal(tasks: Sequence[RayTask], *arguments: Any) -> Iterator[tuple[Machine, str, RayTask, bytes]]:
        # a worker that was considered lost has sent it, and its replacement sends it again
        for task in [*tasks, *tasks]:
            for number in task.cases:
                rows = empty_rows(cases[number], workload, OK, "")
                message = json.dumps([row.to_plain() for row in rows.values()]).encode()
                yield Machine("one", "big"), "node", task, message

    pool = SimpleNamespace(size=1, deal=deal)
    ray = SimpleNamespace(put=lambda bundle: bundle)
    executor = RayExecutor(ray, EngineOptions(engine="ray"))
    monkeypatch.setattr(executor, "pool", lambda device: pool)
    assert Counter(rows[0].case for rows in executor.run(workload, set(), {}, False)) == Counter(cases.keys())
