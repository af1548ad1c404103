"""Fake of the part of Ray that a pool of workers uses, without processes; time advances only during waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from opgrip.replay.workers import ray_pool


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
        """Return the worker itself, as the result of a remote call."""
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
        """Return workers that have not ended."""
        return [worker for worker in self.workers if not worker.is_killed and self._is_there(worker.node)]

    def nodes(self) -> list[dict[str, Any]]:
        """Return the nodes like `ray.nodes`, the head first."""
        described = [(node.name, self._is_there(node), {node.resource: len(node.kinds)}) for node in self.all_nodes]
        return [
            {"NodeID": name, "Alive": is_there, "Resources": resources}
            for name, is_there, resources in [("head", True, {"CPU": 0}), *described]
        ]

    def remote(self, worker: type) -> SimpleNamespace:
        """Replace `ray.remote` for the class of a worker: its instances are simulated workers on the chosen node."""

        def options(scheduling_strategy: str, **resources: Any) -> SimpleNamespace:
            (node,) = (node for node in self.all_nodes if node.name == scheduling_strategy)
            return SimpleNamespace(remote=lambda *parameters: self._start(node))

        return SimpleNamespace(options=options)

    def wait(self, items: Sequence[Any], timeout: float = 5.0, num_returns: int = 1) -> tuple[list[Any], list[Any]]:
        """Replace `ray.wait`: return the items that are ready and the others; if too few are, let time pass."""
        ready = [item for item in items if self._is_ready(item)][:num_returns]
        if len(ready) < num_returns:
            self.sleep(timeout)
        return ready, [item for item in items if item not in ready]

    def get(self, item: Any) -> Any:
        """Replace `ray.get`: return a worker's description for the worker, and the message of a task."""
        if isinstance(item, Future) and item.message is not None:
            return item.message
        if isinstance(item, Future) or not self._is_there(item.node):
            raise RayError("The actor died unexpectedly before finishing this task.")
        if item.node.problem:
            return {"problem": item.node.problem}
        assert item.place is not None, "it has started"
        return {"machine": {"name": item.node.name, "kind": item.node.kinds[item.place]}, "about": {}}

    def kill(self, worker: Worker) -> None:
        """Replace `ray.kill`: mark the worker as ended."""
        worker.is_killed = True

    def sleep(self, seconds: float) -> None:
        """Replace `time.sleep`: only advance the simulated time."""
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
    """Return a cluster whose clock replaces that of pools."""
    ray = FakeRay(nodes)
    monkeypatch.setattr(ray_pool, "monotonic", lambda: ray.now_s)
    monkeypatch.setattr(ray_pool, "sleep", ray.sleep)
    return ray
