"""Workers of a pool on a cluster, and the handling of tasks whose worker is lost."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from fake_ray import FakeRay, Future, Node, Worker, fake_ray

from opgrip.replay.workers.executors import EngineOptions, ExecutorLostError
from opgrip.replay.workers.ray_pool import LOSSES, START_S, Pool, RayTask

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
