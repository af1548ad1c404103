"""Workers on a Ray cluster, and the distribution of tasks to them; tasks of workers that end unexpectedly
are repeated.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from importlib import metadata
from time import monotonic
from typing import Any

from opgrip.errors import UserError
from opgrip.replay.results.origins import Machine
from opgrip.replay.workers.executors import EngineOptions, ExecutorLostError
from opgrip.replay.workers.ray_worker import LOSSES, THREADS, RayTask, RayWorker

# times in seconds: for which messages are awaited, between checks for new nodes, without a usable worker before giving
# up, and for workers to end
POLL_S, REFRESH_S, START_S, CLOSE_S = 1.0, 5.0, 180.0, 5.0
KIND = "kind:"  # prefix of a node resource that names the kind of the machine, instead of its hardware


@dataclass(slots=True)
class RaySlot:
    """A worker process on a node of the cluster.

    node : identifier of the node
    actor : Ray's handle of the worker
    kind : kind of machine that a resource of the node names; empty if none does
    machine : the worker's machine; None until the worker has reported it
    about : facts about the machine for the header of results
    """

    node: str
    actor: Any
    kind: str = ""
    machine: Machine | None = None
    about: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Pool:
    """The workers of a Ray cluster, all on machines of one kind.

    device : device of the cases, as each worker sees it
    about : facts about the machine of one worker, for the header of results
    machines : kind of each machine that has or had workers, by machine name
    """

    ray: Any
    options: EngineOptions
    device: str
    about: Mapping[str, Any] = field(default_factory=dict)
    machines: dict[str, str] = field(default_factory=dict)
    _kind: str | None = None
    _idle: list[RaySlot] = field(default_factory=list)
    _starting: dict[Any, RaySlot] = field(default_factory=dict)
    _slots: list[RaySlot] = field(default_factory=list)
    _problems: dict[str, UserError] = field(default_factory=dict)
    _failed_starts: Counter[str] = field(default_factory=Counter)
    _rejected_by_node: Counter[str] = field(default_factory=Counter)
    _refreshed: float = float("-inf")

    @property
    def is_accelerator(self) -> bool:
        return self.device not in ("cpu", "meta")

    @property
    def kind(self) -> str:
        """Kind of machine that all workers run on; known after `start`."""
        assert self._kind is not None, "chosen at the start"
        return self._kind

    @property
    def size(self) -> int:
        return len(self._slots)

    @property
    def _reporting_count(self) -> int:
        """Number of workers that have reported which machine they run on."""
        return sum(slot.machine is not None for slot in self._slots)

    def start(self) -> None:
        """Start workers on every node, wait for their machines' kinds, and keep the workers on one kind."""
        for node in self._nodes():
            self._start_worker(node)
        self._wait_for_starting()
        if self.is_accelerator and self._idle and not any(map(self._is_fitting, self._kinds())):
            # other devices of these nodes may match
            for node in self._nodes():
                for _ in range(self._missing(node)):
                    self._start_worker(node)
            self._wait_for_starting()
        self._choose_kind()
        self._refresh()

    def close(self) -> None:
        closing = [slot.actor.close.remote() for slot in self._idle]
        if closing:
            self.ray.wait(closing, num_returns=len(closing), timeout=CLOSE_S)
        for slot in self._slots:
            self.ray.kill(slot.actor)
        self._slots.clear()

    def deal(
        self, tasks: Collection[RayTask], submit: Callable[[Any, RayTask], Any], finished: Collection[int]
    ) -> Iterator[tuple[Machine, str, RayTask, bytes | None]]:
        """Distribute tasks to the workers; yield (machine, node, task, message) for each message of a worker.

        The message is None for a task that ended too many workers.

        submit : function that sends a task to a worker and returns the generator of its messages
        finished : numbers of finished cases, which the caller updates
        """
        busy: dict[Any, tuple[RaySlot, RayTask]] = {}
        try:
            yield from self._deal(deque(tasks), busy, submit, finished)
        finally:
            # the caller has all it needs, and unfinished work is useless to the next replay
            for slot, _ in busy.values():
                self.ray.kill(slot.actor)
                self._remove_worker(slot)

    def _deal(
        self,
        queue: deque[RayTask],
        busy: dict[Any, tuple[RaySlot, RayTask]],
        submit: Callable[[Any, RayTask], Any],
        finished: Collection[int],
    ) -> Iterator[tuple[Machine, str, RayTask, bytes | None]]:
        idle_since = monotonic()
        while queue or busy:
            self._refresh()
            for slot in list(self._idle):
                if queue:
                    task = _take(queue, slot.node)
                    busy[submit(slot.actor, task)] = slot, task
                    self._idle.remove(slot)
            if busy:
                idle_since = monotonic()
            elif monotonic() - idle_since > START_S or (not self._starting and self._is_every_node_bad()):
                raise self._no_worker_error()
            ready = self._wait([*busy, *self._starting])
            self._register_started([item for item in ready if item in self._starting])
            for stream in (item for item in ready if item in busy):
                slot, task = busy[stream]
                try:
                    message = self.ray.get(next(stream))
                except StopIteration:
                    del busy[stream]
                    self._idle.append(slot)
                except self.ray.exceptions.RayError as error:
                    del busy[stream]
                    remaining = replace(task, cases=[case for case in task.cases if case not in finished])
                    yield from self._after(error, slot, remaining, queue)
                else:
                    assert slot.machine is not None, "it has reported its properties"
                    yield slot.machine, slot.node, task, message

    def _after(
        self, error: Exception, slot: RaySlot, task: RayTask, queue: deque[RayTask]
    ) -> Iterator[tuple[Machine, str, RayTask, None]]:
        """Handle the error of a worker (`slot`): put its unfinished task back into the queue, and yield tasks that
        ended too many workers.
        """
        assert slot.machine is not None, "it has reported its properties"
        tasks = [task] if task.cases else []
        if not isinstance(error, self.ray.exceptions.RayTaskError):
            self._remove_worker(slot)
            tasks = [again for lost in tasks for again in lost.after_loss()]
        elif isinstance(error, OSError | MemoryError):
            # a problem of the machine, such as a full disk, not of the cases
            problem = f"{slot.machine.name} cannot run cases: {_first_line(error)}"
            self._problems[slot.node] = UserError(problem, "free memory and disk space there")
            self._drop(slot)
        else:
            # a bug in the worker's code
            raise error
        for again in tasks:
            if again.losses >= LOSSES:
                yield slot.machine, slot.node, again, None
            else:
                queue.appendleft(again)

    def _wait(self, waiting: Sequence[Any]) -> list[Any]:
        if not waiting:
            from time import sleep

            sleep(POLL_S)
            return []
        ready: list[Any] = self.ray.wait(waiting, num_returns=1, timeout=POLL_S)[0]
        if ready:
            # also return other messages that have arrived meanwhile
            ready = self.ray.wait(waiting, num_returns=len(waiting), timeout=0)[0] or ready
        return ready

    def _register_started(self, ready: Collection[Any]) -> None:
        """Receive the machine descriptions of workers that have started, and end workers that cannot be used."""
        for item in ready:
            slot = self._starting.pop(item)
            try:
                description = self.ray.get(item)
            except self.ray.exceptions.RayError as error:
                self._failed_starts[slot.node] += 1
                if self._failed_starts[slot.node] >= LOSSES:
                    problem = f"a worker ended when it started: {_first_line(error)}"
                    self._problems[slot.node] = UserError(problem, "read its output with: ray logs")
                self._remove_worker(slot)
                continue
            if "problem" in description:
                self._problems[slot.node] = UserError(*description["problem"])
                self._drop(slot)
                continue
            # kind of the worker, not of its node, which may have devices of several kinds
            kind = slot.kind or description["machine"]["kind"]
            slot.machine = Machine(description["machine"]["name"], kind)
            # slow workers may report after the kind is chosen
            if self._kind is not None and kind != self._kind:
                self._reject(slot)
                continue
            if self._kind is not None and self._reporting_count > (self.options.workers or self._reporting_count):
                self._drop(slot)
                continue
            slot.about = description["about"]
            self._idle.append(slot)
            if self._kind is not None:
                self.machines[slot.machine.name] = kind
        self._end_surplus_workers()

    def _wait_for_starting(self) -> None:
        until = monotonic() + START_S
        while self._starting and monotonic() < until:
            self._register_started(self.ray.wait([*self._starting], timeout=POLL_S)[0])
            if not self._starting and not self._idle:
                self._refresh()

    def _kinds(self) -> list[str]:
        return sorted({slot.machine.kind for slot in self._idle if slot.machine is not None})

    def _is_fitting(self, kind: str) -> bool:
        return self.options.machine_kind is None or fnmatchcase(kind, self.options.machine_kind)

    def _choose_kind(self) -> None:
        """Choose the kind of machine to use, and end workers on machines of other kinds."""
        kinds = self._kinds()
        chosen = list(filter(self._is_fitting, kinds))
        if not kinds:
            raise self._no_worker_error()
        there = "; ".join(kinds)
        if not chosen:
            pattern = self.options.machine_kind
            raise ExecutorLostError(f"no machine of the cluster is of a kind like {pattern}", f"there are {there}")
        if len(chosen) != 1:
            problem = f"the cluster has machines of {len(chosen)} kinds that fit ({there})"
            raise ExecutorLostError(
                problem, "select one with --machine-kind, because times of several kinds cannot be compared"
            )
        self._kind = chosen[0]
        for slot in list(self._slots):
            if slot.machine is not None and slot.machine.kind != self._kind:
                self._reject(slot)
        for slot in self._idle[self.options.workers or len(self._idle) :]:
            self._drop(slot)
        self._end_surplus_workers()
        self.about = self._idle[0].about
        self.machines = {slot.machine.name: self._kind for slot in self._idle if slot.machine is not None}

    def _refresh(self) -> None:
        """Start workers on new nodes and for workers that have ended; at most every `REFRESH_S` seconds."""
        if monotonic() - self._refreshed < REFRESH_S:
            return
        self._refreshed = monotonic()
        for node in self._nodes():
            for _ in range(self._missing(node)):
                # if a node has different devices, a worker gets a random one, so start a worker for each device
                there = self._reporting_count if node["NodeID"] in self._rejected_by_node else self.size
                if self.options.workers is not None and there >= self.options.workers:
                    return
                self._start_worker(node)

    def _start_worker(self, node: Mapping[str, Any]) -> None:
        # imported here because it loads torch, and this file is imported to show the help
        from torch import __version__ as torch_version

        name, resources = node["NodeID"], node["Resources"]
        strategy = self.ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(name, soft=False)
        processors = self.options.processors
        cpus = processors if processors is not None else 0 if self.is_accelerator else resources.get("CPU", 0)
        worker = self.ray.remote(RayWorker).options(
            num_cpus=cpus,
            num_gpus=1 if self.is_accelerator else 0,
            scheduling_strategy=strategy,
            max_restarts=0,
        )
        device_kind = next((item[len(KIND) :] for item in resources if item.startswith(KIND)), "")
        actor = worker.remote(processors or 0, os.environ.get(THREADS), self._room(resources))
        slot = RaySlot(name, actor, device_kind)
        self._slots.append(slot)
        versions = {"torch": str(torch_version), "opgrip": metadata.version("opgrip")}
        self._starting[slot.actor.describe.remote(self.device, versions)] = slot

    def _missing(self, node: Mapping[str, Any]) -> int:
        """Return how many more workers can be started on a node, minus the workers that were ended there because of the
        kind of their machine.
        """
        name = node["NodeID"]
        if name in self._problems:
            return 0
        of_node = sum(slot.node == name for slot in self._slots)
        missing: int = self._room(node["Resources"]) - of_node - self._rejected_by_node[name]
        return missing

    def _room(self, resources: Mapping[str, float]) -> int:
        if self.is_accelerator:
            return int(resources.get("GPU", 0))
        cpus = int(resources.get("CPU", 0))
        processors = self.options.processors
        return min(cpus, 1) if processors is None else cpus // max(processors, 1)

    def _nodes(self) -> list[Mapping[str, Any]]:
        return [node for node in self.ray.nodes() if node["Alive"] and self._room(node["Resources"])]

    def _is_every_node_bad(self) -> bool:
        """Return True if the cluster has nodes, but all of them have failed to run cases."""
        nodes = self._nodes()
        return bool(nodes) and all(node["NodeID"] in self._problems for node in nodes)

    def _remove_worker(self, slot: RaySlot) -> None:
        """Forget a worker (`slot`) that has ended."""
        if slot in self._slots:
            self._slots.remove(slot)
        if slot in self._idle:
            self._idle.remove(slot)
        if slot.machine is not None and slot.machine.kind == self._kind and slot.node in self._rejected_by_node:
            # the replacement may get a device of another kind, because those are free too
            self._rejected_by_node[slot.node] = 0
        # start a replacement at once
        self._refreshed = float("-inf")

    def _drop(self, slot: RaySlot) -> None:
        self._remove_worker(slot)
        self.ray.kill(slot.actor)

    def _reject(self, slot: RaySlot) -> None:
        """End a worker (`slot`) on a machine of another kind. Its node gets one worker less, until a worker of the
        chosen kind ends there.
        """
        self._rejected_by_node[slot.node] += 1
        self._drop(slot)

    def _end_surplus_workers(self) -> None:
        """End workers that are still starting, if as many as requested already run on machines of the chosen kind."""
        if self._kind is None or self.options.workers is None or self._reporting_count < self.options.workers:
            return
        for item in list(self._starting):
            self._drop(self._starting.pop(item))

    def _no_worker_error(self) -> UserError:
        for problem in self._problems.values():
            return ExecutorLostError(problem.problem, problem.hint)
        what = "a GPU" if self.is_accelerator else "processors enough"
        if self._kind is not None:
            return ExecutorLostError(
                f"no machine of the cluster has {what} any more", "check the cluster with: ray status"
            )
        others = (node for node in self.ray.nodes() if node["Alive"] and node["Resources"].get("CPU"))
        # if the cluster never had one, traces of other devices can still run
        is_absent = self.is_accelerator and not self._nodes() and any(others)
        error_class = UserError if is_absent else ExecutorLostError
        return error_class(f"no machine of the cluster has {what}", "check the cluster with: ray status")


def _take(queue: deque[RayTask], node: str) -> RayTask:
    """Remove the next task for a node from the queue and return it: a task for this node, else one for any node, else
    one for another node.
    """
    for homes in ((node,), ("",)):
        for place, task in enumerate(queue):
            if task.home in homes:
                del queue[place]
                return task
    return queue.popleft()


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:200] if lines else type(error).__name__
