"""Workers on a Ray cluster, all on machines of one kind, and the distribution of cases to them."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from importlib import metadata
from math import ceil
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import torch

from opgrip.cli.command import counted
from opgrip.cli.progress import Reporter
from opgrip.errors import UserError
from opgrip.platform.machine import available_memory, cache_folder
from opgrip.replay.operators.devices import check_present, facts_of, is_accelerator, name_of
from opgrip.replay.results.origins import Machine, describe_environment, names_of, this_machine
from opgrip.replay.results.results import FAILED, Result
from opgrip.replay.run.measure import CASES, CachedRows, windows
from opgrip.replay.run.request import RunRequest
from opgrip.replay.run.worker import PARTS, Worker, by_case, in_parts, interleaved, make_ahead, rows_ahead
from opgrip.replay.run.workload import Workload, empty_rows, load_workload
from opgrip.replay.workers.executors import EngineOptions, ExecutorLostError
from opgrip.traces.io.shipped_traces import trace_file

# times in seconds: between two attempts to start workers if none is left, after which the attempts end, and for workers
# to end
RETRY_S, START_S, CLOSE_S = 5.0, 180.0, 5.0
LOSSES = 3  # number of lost workers after which a case is reported as failed, and a node is not used any more
MOST_COMPILED = 16  # maximum number of cases in one compile task
KIND = "kind:"  # prefix of a node resource that names the kind of the machine, instead of its hardware


@dataclass(frozen=True, slots=True)
class RayTask:
    """Cases that one worker compiles together, or measures in the same rounds.

    losses : number of workers that ended while they ran these cases
    """

    cases: list[int]
    losses: int = 0

    def after_loss(self) -> list[RayTask]:
        lost = replace(self, losses=self.losses + 1)
        if lost.losses < LOSSES - 1 or len(self.cases) == 1:
            return [lost]
        return [replace(lost, cases=[case], losses=LOSSES - 2) for case in self.cases]


@dataclass(slots=True, eq=False)
class RaySlot:
    node: str
    actor: Any
    kind: str
    machine: Machine = field(default_factory=lambda: Machine("", ""))
    about: Mapping[str, Any] = field(default_factory=dict)


class Pool:
    """The workers of a Ray cluster for one device, all on machines of one kind.

    machines : kind of each machine that has or had workers, by machine name
    """

    def __init__(self, ray: Any, options: EngineOptions, device: str) -> None:
        self.device, self.kind = device, ""
        self.about: Mapping[str, Any] = {}
        self.machines: dict[str, str] = {}
        self._ray, self._options = ray, options
        self._idle: list[RaySlot] = []
        self._busy: dict[Any, tuple[RaySlot, RayTask]] = {}
        self._starting: dict[Any, RaySlot] = {}
        self._failures: Counter[str] = Counter()
        self._problem: UserError | None = None

    def start(self) -> None:
        self._start_workers()
        if self._starting:
            self._register(self._ray.wait([*self._starting], num_returns=len(self._starting), timeout=START_S)[0])
        self._wait_for_worker()
        self._choose_kind()

    @property
    def size(self) -> int:
        return len(self._idle) + len(self._busy)

    def close(self) -> None:
        closing = [slot.actor.close.remote() for slot in self._idle]
        if closing:
            self._ray.wait(closing, num_returns=len(closing), timeout=CLOSE_S)
        for slot in self._slots():
            self._ray.kill(slot.actor)

    def run(
        self, tasks: Collection[RayTask], submit: Callable[[Any, RayTask], Any]
    ) -> Iterator[tuple[RaySlot, RayTask, Any]]:
        """Distribute tasks to the workers; yield (worker, task, rows) for each task, with None for rows if its workers
        died.

        submit : function that sends a task to a worker, and returns Ray's reference to the worker's answer
        """
        queue = deque(tasks)
        while queue or self._busy:
            self._wait_for_worker()
            while queue and self._idle:
                slot, task = self._idle.pop(), queue.popleft()
                self._busy[submit(slot.actor, task)] = slot, task
            for item in self._ray.wait([*self._starting, *self._busy], num_returns=1)[0]:
                if item in self._starting:
                    self._register([item])
                    continue
                slot, task = self._busy.pop(item)
                try:
                    message = self._ray.get(item)
                except self._ray.exceptions.RayTaskError:
                    # a bug in the worker's code
                    raise
                except self._ray.exceptions.RayError:
                    for again in task.after_loss():
                        if again.losses >= LOSSES:
                            yield slot, again, None
                        else:
                            queue.appendleft(again)
                    self._start_workers()
                    continue
                reported = json.loads(message)
                if "unusable" in reported:
                    # a problem of the machine, such as a full disk, not of the cases
                    problem = f"{slot.machine.name} cannot run cases: {reported['unusable']}"
                    self._give_up(slot, UserError(problem, "free memory and disk space there"))
                    queue.appendleft(task)
                elif "problem" in reported:
                    raise UserError(*reported["problem"])
                else:
                    self._idle.append(slot)
                    yield slot, task, reported["rows"]

    def _slots(self) -> list[RaySlot]:
        return [*self._idle, *(slot for slot, _ in self._busy.values()), *self._starting.values()]

    def _wait_for_worker(self) -> None:
        until = monotonic() + START_S
        while not self._idle and not self._busy:
            nodes = self._nodes()
            is_every_node_bad = bool(nodes) and all(self._failures[node["NodeID"]] >= LOSSES for node in nodes)
            if monotonic() > until or (is_every_node_bad and not self._starting):
                raise self._no_worker_error()
            self._start_workers()
            if self._starting:
                self._register(self._ray.wait([*self._starting], num_returns=1, timeout=RETRY_S)[0])
            else:
                sleep(RETRY_S)

    def _start_workers(self) -> None:
        most = self._options.workers
        if most is not None and self.kind and self.size >= most:
            return
        for node in self._nodes():
            name, room = node["NodeID"], self._room(node["Resources"])
            if self._failures[name] < LOSSES:
                # the devices of a node may differ, so start a worker on each
                wanted = room if most is None or is_accelerator(self.device) else min(room, most)
                for _ in range(wanted - sum(slot.node == name for slot in self._slots())):
                    self._start_worker(node)

    def _start_worker(self, node: Mapping[str, Any]) -> None:
        name, resources, processors = node["NodeID"], node["Resources"], self._options.processors
        on_accelerator = is_accelerator(self.device)
        cpus = processors if processors is not None else 0 if on_accelerator else resources.get("CPU", 0)
        worker = self._ray.remote(RayWorker).options(
            num_cpus=cpus,
            num_gpus=1 if on_accelerator else 0,
            scheduling_strategy=self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(name, soft=False),
            max_restarts=0,
        )
        kind = next((item[len(KIND) :] for item in resources if item.startswith(KIND)), "")
        actor = worker.remote(processors or 0, os.environ.get(THREADS), self._room(resources))
        versions = {"torch": str(torch.__version__), "opgrip": metadata.version("opgrip")}
        self._starting[actor.describe.remote(self.device, versions)] = RaySlot(name, actor, kind)

    def _register(self, ready: Collection[Any]) -> None:
        for item in ready:
            slot = self._starting.pop(item)
            try:
                description = self._ray.get(item)
            except self._ray.exceptions.RayError as error:
                self._failures[slot.node] += 1
                problem = f"a worker ended when it started: {_last_line(error)}"
                self._problem = UserError(problem, "read its output with: ray logs")
                self._ray.kill(slot.actor)
                continue
            if "problem" in description:
                self._give_up(slot, UserError(*description["problem"]))
                continue
            # kind of the worker, not of its node, which may have devices of several kinds
            slot.machine = Machine(description["machine"]["name"], slot.kind or description["machine"]["kind"])
            slot.about = description["about"]
            self._idle.append(slot)
        if self.kind:
            self._end_surplus_workers()

    def _give_up(self, slot: RaySlot, problem: UserError) -> None:
        self._failures[slot.node], self._problem = LOSSES, problem
        self._ray.kill(slot.actor)

    def _choose_kind(self) -> None:
        kinds, pattern = sorted({slot.machine.kind for slot in self._idle}), self._options.machine_kind
        chosen = [kind for kind in kinds if pattern is None or fnmatchcase(kind, pattern)]
        there = "; ".join(kinds)
        if not chosen:
            raise ExecutorLostError(
                f"no machine of the cluster matches --machine-kind {pattern}", f"choose from {there}"
            )
        if len(chosen) != 1:
            problem = f"the cluster has machines of {len(chosen)} kinds ({there})"
            raise ExecutorLostError(
                problem, "select one with --machine-kind, because times of several kinds cannot be compared"
            )
        self.kind = chosen[0]
        self._end_surplus_workers()
        self.about = self._idle[0].about

    def _end_surplus_workers(self) -> None:
        fitting = [slot for slot in self._idle if slot.machine.kind == self.kind]
        most = self._options.workers
        kept = fitting if most is None else fitting[: max(0, most - len(self._busy))]
        ended = [slot for slot in self._idle if slot not in kept]
        self._idle = kept
        if most is not None and self.size >= most:
            ended += self._starting.values()
            self._starting.clear()
        for slot in ended:
            self._ray.kill(slot.actor)
        self.machines |= {slot.machine.name: self.kind for slot in kept}

    def _room(self, resources: Mapping[str, float]) -> int:
        if is_accelerator(self.device):
            return int(resources.get("GPU", 0))
        cpus, processors = int(resources.get("CPU", 0)), self._options.processors
        return min(cpus, 1) if processors is None else cpus // max(processors, 1)

    def _nodes(self) -> list[Mapping[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"] and self._room(node["Resources"])]

    def _no_worker_error(self) -> UserError:
        if self._problem is not None:
            return ExecutorLostError(self._problem.problem, self._problem.hint)
        hint = "check the cluster with: ray status"
        what = "a GPU" if is_accelerator(self.device) else "enough processors"
        if self.kind:
            return ExecutorLostError(f"no machine of the cluster has {what} any more", hint)
        others = (node for node in self._ray.nodes() if node["Alive"] and node["Resources"].get("CPU"))
        # if the cluster never had one, traces of other devices can still run
        is_absent = is_accelerator(self.device) and not self._nodes() and any(others)
        return (UserError if is_absent else ExecutorLostError)(f"no machine of the cluster has {what}", hint)


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:200] if lines else type(error).__name__


class RayExecutor:
    runs_here = False

    def __init__(self, ray: Any, options: EngineOptions) -> None:
        self._ray, self._options = ray, options
        self._pool: Pool | None = None
        self._workload: Workload | None = None
        self._number = self._repeat = 0
        self._bundle: list[Any] = []

    def pool(self, device: str) -> Pool:
        if self._pool is None or self._pool.device != device:
            self.close()
            self._pool = Pool(self._ray, self._options, device)
            try:
                self._pool.start()
            except BaseException:
                # else the next replay would use a pool that has not started
                self.close()
                raise
        return self._pool

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def check(self, workload: Workload) -> None:
        self._options.check((workload.device,))

    def machine_kind(self, workload: Workload) -> str:
        return self.pool(workload.device).kind

    def about(self, workload: Workload) -> dict[str, Any]:
        pool = self.pool(workload.device)
        environment = {**pool.about["environment"], "machine": names_of(pool.machines)}
        return {**pool.about, "environment": environment, "machines": dict(pool.machines)}

    def compile(self, workload: Workload, done: Collection[int], reporter: Reporter, may_fork: bool) -> CachedRows:
        self._begin(workload)
        pool = self.pool(workload.device)
        self._report_threads(workload, reporter)
        numbers = list(dict.fromkeys(case.number for case, _ in rows_ahead(workload, done)))
        if not numbers:
            return {}
        size = _window_size(pool, len(numbers), MOST_COMPILED)
        tasks = [RayTask(numbers[start : start + size]) for start in range(0, len(numbers), size)]

        def submit(actor: Any, task: RayTask) -> Any:
            return actor.compile.remote(self._number, self._bundle, task.cases, workload.request.limits.jobs)

        rows: dict[int, dict[int, Result]] = {}
        where = f"{counted(pool.size, 'worker')} of {counted(len(pool.machines), 'machine')}"
        with reporter.doing(f"compiling {counted(len(numbers), 'case')} on {where}", len(numbers)) as advance:
            for _, task, compiled in self._run(tasks, submit, workload):
                # the cases of a lost worker are compiled again when they are measured
                for number, plain in compiled or [(number, []) for number in task.cases]:
                    rows[number] = {row_number: Result.from_plain(row) for row_number, row in plain}
                    advance()
        return rows

    def run(
        self, workload: Workload, done: Collection[int], cached_rows: CachedRows, may_fork: bool
    ) -> Iterator[list[Result]]:
        self._begin(workload)
        self._repeat += 1
        repeat, cases = self._repeat, {case.number: case for case in workload.cases}

        def submit(actor: Any, task: RayTask) -> Any:
            of_task = ((number, cached_rows.get(number, {})) for number in task.cases)
            cached = [[number, key, row.to_plain()] for number, rows in of_task for key, row in rows.items()]
            return actor.measure.remote(self._number, repeat, self._bundle, task.cases, cached)

        for slot, task, measured in self._run(self._windows(workload, done), submit, workload):
            if measured is None:
                reason = f"{LOSSES} workers died while they ran it"
                lost = [empty_rows(cases[number], workload, FAILED, reason) for number in task.cases]
                yield from ([*rows.values()] for rows in lost)
            else:
                yield from ([slot.machine.marked(Result.from_plain(row)) for row in rows] for rows in measured)

    def _run(
        self, tasks: Collection[RayTask], submit: Callable[[Any, RayTask], Any], workload: Workload
    ) -> Iterator[tuple[RaySlot, RayTask, Any]]:
        is_done = False
        try:
            yield from self.pool(workload.device).run(tasks, submit)
            is_done = True
        finally:
            if not is_done:
                # unfinished work is useless to the next replay
                self.close()

    def _begin(self, workload: Workload) -> None:
        if self._workload is not workload:
            # workers load the trace again if the number has changed
            self._workload, self._number = workload, self._number + 1
            request, device = workload.request, workload.device
            if is_accelerator(device):
                request = replace(request, inputs=replace(request.inputs, device=device.partition(":")[0]))
            bundle = {"request": json.dumps(asdict(request)), "files": _files_of(workload)}
            # in a list, because Ray would fetch a plain reference for each task
            self._bundle = [self._ray.put(bundle)]

    def _windows(self, workload: Workload, done: Collection[int]) -> list[RayTask]:
        cases = sorted((case for case in workload.cases if case.number not in done), key=workload.surroundings.first)
        most = _window_size(self.pool(workload.device), len(cases), CASES)
        return [RayTask([case.number for case in window]) for window in windows(cases, workload, most)]

    def _report_threads(self, workload: Workload, reporter: Reporter) -> None:
        processors = self._options.processors
        threads = max((case.context.get("threads") or 1 for case in workload.cases), default=1)
        if processors and not workload.request.points.threads and threads > processors:
            of_worker = f"{counted(processors, 'processor')} of a worker"
            reporter.say(
                f"the traced program ran {threads} threads, which here share the {of_worker}: "
                "set their number with --threads"
            )


def _window_size(pool: Pool, cases: int, most: int) -> int:
    return max(1, min(most, ceil(cases / (PARTS * max(pool.size, 1)))))


def _files_of(workload: Workload) -> Mapping[str, bytes]:
    try:
        path = trace_file(workload.request.trace)
    except UserError:
        return {}
    files = [path, *workload.trace.tensor_files] if path.is_file() else []
    return {file.name: file.read_bytes() for file in files}


# environment variable that Ray sets to the number of an actor's processors; a replay restores the user's value
THREADS = "OMP_NUM_THREADS"
WAIT_S, POLL_S = 60.0, 0.2  # times in seconds: to wait for processors of other workers, and between two attempts


class Processors:
    """Pins this process and its children to processors that no other worker of this user uses.

    count : number of processors; 0 to pin none
    """

    def __init__(self, count: int, wait_s: float = WAIT_S) -> None:
        self._files: list[int] = []
        self.numbers: Sequence[int] = ()
        if not count:
            return
        usable = sorted(os.sched_getaffinity(0))
        if count > len(usable):
            raise UserError(
                f"this machine has {len(usable)} processors, not {count}", f"set --processors to at most {len(usable)}"
            )
        folder = Path(tempfile.gettempdir()) / f"opgrip-processors-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        end = monotonic() + wait_s
        while not self._take(folder, usable, count):
            if monotonic() > end:
                raise UserError(
                    f"fewer than {count} processors are free, because other workers use the rest",
                    "set --processors to a smaller number",
                )
            sleep(POLL_S)
        os.sched_setaffinity(0, self.numbers)

    def close(self) -> None:
        for file in self._files:
            os.close(file)
        self._files.clear()

    def _take(self, folder: Path, usable: Sequence[int], count: int) -> bool:
        numbers = []
        for number in usable:
            file = os.open(folder / str(number), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            with suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._files.append(file)
                numbers.append(number)
                if len(numbers) == count:
                    self.numbers = numbers
                    return True
                continue
            os.close(file)
        self.close()
        return False


class RayWorker:
    """A worker process with one accelerator, or with processors that no other worker uses.

    threads : the user's value of `OMP_NUM_THREADS`
    slots : number of workers on this machine, which share its memory
    """

    def __init__(self, processors: int, threads: str | None, slots: int) -> None:
        self._slots = slots
        os.environ.pop(THREADS, None)
        if threads is not None:
            os.environ[THREADS] = threads
        self._problem: list[str] | None = None
        try:
            self._processors = Processors(processors)
        except UserError as error:
            self._problem = [error.problem, error.hint]
        self._folder = tempfile.TemporaryDirectory(prefix="opgrip-")
        self._replay: tuple[int, Workload] | None = None
        self._worker: tuple[int, Worker] | None = None  # number of the repeat, and the process that measures its cases
        self._without: list[int] = []
        # path of the trace's copy, and the user's name of the trace
        self._copied = "-", "-"

    def describe(self, device: str, versions: Mapping[str, str]) -> dict[str, Any]:
        try:
            check_present(device)
        except UserError as error:
            self._problem = self._problem or [error.problem, error.hint]
        own = {"torch": str(torch.__version__), "opgrip": metadata.version("opgrip")}
        for name, version in versions.items():
            if own[name] != version:
                problem = f"a machine of the cluster has {name} {own[name]}, and this one {version}"
                self._problem = self._problem or [problem, "install the same versions"]
        if self._problem is not None:
            return {"problem": self._problem}
        about = {"device": name_of(device), "environment": describe_environment(device), **facts_of(device)}
        return {"machine": asdict(this_machine(device)), "about": about, "pid": os.getpid()}

    def close(self) -> None:
        self._end_process()
        self._folder.cleanup()

    def compile(self, number: int, bundle: Sequence[Any], cases: Sequence[int], jobs: int | None) -> bytes:
        """Compile the programs of the given cases, and return a message with the rows of each case."""

        def compiled() -> list[Any]:
            workload = self._load(number, bundle)
            ahead = rows_ahead(workload, {case.number for case in workload.cases} - {*cases})
            rows: dict[int, list[Any]] = {case: [] for case in cases}
            for part, most in in_parts(ahead, workload, jobs or len(os.sched_getaffinity(0))):
                for case, results in make_ahead(workload, part, most).items():
                    rows[case] += ([key, self._naming_own_trace(result).to_plain()] for key, result in results.items())
            return list(rows.items())

        return _message(compiled)

    def measure(
        self, number: int, repeat: int, bundle: Sequence[Any], cases: Sequence[int], cached: Sequence[Any]
    ) -> bytes:
        """Measure cases in the same rounds, and return a message with the rows of each case.

        repeat : number of the repeat; each repeat has a new process
        cached : (case number, row number, row) of each compiled program
        """

        def measured() -> list[Any]:
            workload = self._load(number, bundle)
            if self._worker is None or self._worker[0] != repeat:
                self._end_process()
                self._worker = repeat, Worker(workload, may_fork=False)
            worker, by_number = self._worker[1], {case.number: case for case in workload.cases}
            lane = worker.measure([by_number[case] for case in cases], self._without, by_case(cached))
            return [[self._naming_own_trace(row).to_plain() for row in rows] for rows in interleaved({worker: lane})]

        return _message(measured)

    def _naming_own_trace(self, row: Result) -> Result:
        # the message names the user's trace instead of this machine's copy of it
        return row if row.error is None else replace(row, error=row.error.replace(*self._copied))

    def _end_process(self) -> None:
        if self._worker is not None:
            self._worker[1].close()
            self._worker = None

    def _load(self, number: int, bundle: Sequence[Any]) -> Workload:
        if self._replay is not None and self._replay[0] == number:
            return self._replay[1]
        import ray

        self._end_process()
        self._replay, self._without = None, []
        shipped: Mapping[str, Any] = ray.get(bundle[0])
        self._folder.cleanup()
        self._folder = tempfile.TemporaryDirectory(prefix="opgrip-")
        for name, content in shipped["files"].items():
            (Path(self._folder.name) / name).write_bytes(content)
        request = RunRequest.from_plain(json.loads(shipped["request"]))
        if shipped["files"]:
            copy = str(Path(self._folder.name) / next(iter(shipped["files"])))
            self._copied = copy, request.trace
            request = replace(request, trace=copy)
        workload = load_workload(replace(request, store=None if request.store is None else str(cache_folder())))
        limit = request.limits.memory_limit
        if limit is None and not is_accelerator(workload.device):
            free = available_memory(workload.device)
            limit = None if free is None else free // self._slots
        workload = workload.with_request(limits=replace(request.limits, memory_limit=limit))
        self._replay = number, workload
        return workload


def _message(rows: Callable[[], list[Any]]) -> bytes:
    try:
        message: dict[str, Any] = {"rows": rows()}
    except UserError as error:
        message = {"problem": [error.problem, error.hint]}
    except (OSError, MemoryError) as error:
        # a problem of this machine, such as a full disk
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        message = {"unusable": lines[-1][:200] if lines else type(error).__name__}
    return json.dumps(message).encode()
