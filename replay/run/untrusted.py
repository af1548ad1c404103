"""Processes that run untrusted candidates. Each process is stopped except while it answers a request."""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from inspect import isfunction
from time import monotonic, perf_counter_ns
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from opgrip.errors import UserError
from opgrip.platform.contention import let_threads_sleep
from opgrip.platform.sandbox import Child, Ended, check_bubblewrap
from opgrip.replay.cases.cases import Case, shares_of
from opgrip.replay.cases.functions import strided_spec
from opgrip.replay.cases.preceding_calls import CallPosition
from opgrip.replay.cases.selection import Variant
from opgrip.replay.inputs.filling import memory_of
from opgrip.replay.inputs.inputs import Inputs, as_recorded
from opgrip.replay.modes import CANDIDATE, RunOutputs
from opgrip.replay.modes.candidate import Candidate
from opgrip.replay.operators.lookup import Operator, Unsupported
from opgrip.replay.operators.memory import CallMemory, Function, tensors_in
from opgrip.replay.run.checks.reference import DRAWN_ONCE, Reference
from opgrip.replay.run.checks.verdicts import ResultVerdict, WrongResultError, wrong
from opgrip.replay.run.untrusted_process import HeldResults
from opgrip.replay.run.workload import Workload
from opgrip.replay.timing.caches import MemoryUse
from opgrip.replay.timing.stopwatch import Stopwatch
from opgrip.replay.timing.timed_functions import InputSet, Stratum, TimedFunction
from opgrip.traces.codec.record_forms import to_json
from opgrip.traces.io.sample_folder import OPENED
from opgrip.traces.rebuild import tensor_over
from opgrip.traces.schema.arguments import DTYPES, GeneratorSpec, TensorSpec, decode, encode, leaves, map_leaves
from opgrip.traces.schema.records import Signature

MODULE = "opgrip.replay.run.untrusted_process"
PAGE = mmap.PAGESIZE
MOST_PROCESSES = 32  # processes of candidates that are kept; a further one ends the one that ran longest ago
LEAST_BYTES = 16 << 20  # bytes of shared memory at first
STOPPED = "Tt"  # states of threads that a signal or a debugger stopped
STOPS_WITHIN_S = 10
OF_TIMEOUT = 0.9  # share of `--timeout` after which a candidate is ended, before the process that times it would be
# errors that a process may report
ERRORS = {
    kind.__name__: kind
    for kind in (UserError, Unsupported, ArithmeticError, AttributeError, IndexError, KeyError, MemoryError)
    + (NotImplementedError, RuntimeError, TypeError, ValueError, ZeroDivisionError)
}

_processes: dict[Candidate | None, UntrustedProcess] = {}


@cache
def unconfined() -> str | None:
    """Return a warning if bubblewrap cannot confine candidates on this machine, else None."""
    try:
        check_bubblewrap()
    except UserError as error:
        return (
            f"{error.problem.replace('--sandbox', 'the sandbox of --untrusted')}: candidates can read files, write "
            "files and use the network; they still run in separate processes, whose times and results are checked "
            "from outside"
        )
    return None


class UntrustedProcess:
    def __init__(self, candidate: Candidate | None, workload: Workload) -> None:
        limits, self._owner = workload.request.limits, os.getpid()
        self._timeout_s = OF_TIMEOUT * limits.timeout
        self._file = os.memfd_create("opgrip", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        # memory that shrinks would end this process
        fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        self._grow(LEAST_BYTES)
        self._next = 0
        request = {
            "candidate": None if candidate is None else asdict(candidate),
            "extensions": workload.request.inputs.extensions,
            "device": workload.device,
            "shared": self._file,
            "memory_limit": limits.memory_limit,
        }
        self._child = Child(MODULE, request, confined=None if unconfined() else [], shared=[self._file])
        self._child.start()
        self._leaf, self._above, self._mem = -1, -1, -1
        self._stopped: list[_Thread] = []
        self.took_ns = 0
        # addresses and sizes of results of the runs before the latest one, and of that one
        self.earlier = HeldResults()
        self.latest: Sequence[Any] = ()

    def ask(self, message: Mapping[str, Any]) -> Any:
        """Send the stopped process a message; stop it, with all that it started, after its answer."""
        if self._mem < 0:
            self._begin()
        # a timer of the system, or another process, can let it continue
        if self._stopped and list(_threads_below(self._above)) != self._stopped:
            raise WrongResultError("it kept running, or was woken, after its process had been stopped")
        began = perf_counter_ns()
        for pid in {thread.pid for thread in self._stopped}:
            _send_signal(pid, signal.SIGCONT)
        self._child.send(message)
        try:
            return self._answer()
        finally:
            self.took_ns = perf_counter_ns() - began
            self._stop()

    def _stop(self) -> None:
        until = monotonic() + STOPS_WITHIN_S
        while True:
            self._stopped = list(_threads_below(self._above))
            running = {thread.pid for thread in self._stopped if thread.state not in STOPPED}
            if not running:
                return
            for pid in running:
                _send_signal(pid, signal.SIGSTOP)
            if monotonic() > until:
                raise WrongResultError("its process cannot be stopped")

    def read(self, address: int, size: int) -> Tensor:
        data = bytearray(size)
        view, done = memoryview(data), 0
        try:
            while done < size and (count := os.preadv(self._mem, [view[done : done + (1 << 30)]], address + done)):
                done += count
        except (OSError, OverflowError):
            done = -1
        if done < size:
            raise WrongResultError("its process sent addresses of results that are not in its memory")
        return torch.frombuffer(data, dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8)

    def place(self, size: int) -> int:
        if len(self.memory) < 2 * size:
            self._grow(2 * size)
        if self._next + size >= len(self.memory):
            self._next = PAGE * secrets.randbelow((len(self.memory) - size) // PAGE + 1)
        offset, self._next = self._next, self._next + max(size, PAGE)
        return offset

    def shared(self, offset: int, size: int) -> Tensor:
        if not size:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self.memory, dtype=torch.uint8, offset=offset, count=size)

    def mapped_at(self) -> list[tuple[int, int, int]]:
        own = f"{os.fstat(self._file).st_ino} "
        ranges = []
        for line in _read(f"/proc/{self._leaf}/maps").splitlines():
            if own in line and "memfd:opgrip" in line:
                addresses, _, offset, *_ = line.split()
                first, last = (int(word, 16) for word in addresses.split("-"))
                ranges.append((first, last, int(offset, 16)))
        return ranges

    def ids(self) -> list[int]:
        return _descendants(self._above)

    def close(self) -> None:
        # a fork of this process does not own the child
        if self._owner == os.getpid():
            for pid in reversed(_descendants(self._child.pid)):
                _send_signal(pid, signal.SIGKILL)
            self._child.close()
        if self._mem >= 0:
            os.close(self._mem)
        os.close(self._file)

    def _grow(self, size: int) -> None:
        os.ftruncate(self._file, size)
        self.memory = mmap.mmap(self._file, size)

    def _begin(self) -> None:
        self._answer()
        # nothing of the candidate has run: the last process is the one that will, and the one above adopts orphans
        self._above, self._leaf = [self._child.pid, *_descendants(self._child.pid)][-2:]
        self._mem = os.open(f"/proc/{self._leaf}/mem", os.O_RDONLY)
        self._child.send({})
        self._answer()
        self._stop()

    def _answer(self) -> Any:
        until = monotonic() + self._timeout_s
        messages: list[Any] = []
        while not messages:
            received = self._child.receive()
            if isinstance(received, Ended):
                raise UserError(received.reason)
            messages = received
            if monotonic() > until:
                raise UserError(f"it took longer than {self._timeout_s:g} s", "allow more with --timeout")
        if len(messages) > 1 or not isinstance(messages[0], dict | list):
            raise WrongResultError(f"its process did not send one JSON object or list but {str(messages)[:60]}")
        if isinstance(messages[0], dict) and "error" in messages[0]:
            kind, words = map(str, messages[0]["error"])
            raise ERRORS[kind](words) if kind in ERRORS else RuntimeError(f"{kind}: {words}")
        return messages[0]


class _Thread(NamedTuple):
    pid: int
    state: str
    turns: str


def _threads_below(pid: int) -> Iterator[_Thread]:
    for thread in _threads_of(pid):
        for child in map(int, _read(f"/proc/{pid}/task/{thread}/children").split()):
            for own in _threads_of(child):
                state = _read(f"/proc/{child}/task/{own}/stat").rpartition(")")[2][1:2]
                # zombies disappear at any time
                if state and state not in "ZX":
                    yield _Thread(child, state, _read(f"/proc/{child}/task/{own}/schedstat").rpartition(" ")[2])
            yield from _threads_below(child)


def _threads_of(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []


def _descendants(pid: int) -> list[int]:
    return list(dict.fromkeys(thread.pid for thread in _threads_below(pid)))


def _read(path: str) -> str:
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _send_signal(pid: int, number: int) -> None:
    with suppress(OSError):
        os.kill(pid, number)


def process_of(candidate: Candidate | None, workload: Workload) -> UntrustedProcess:
    if candidate in _processes:
        # the last one ran last
        _processes[candidate] = _processes.pop(candidate)
    else:
        while len(_processes) >= MOST_PROCESSES:
            _processes.pop(next(iter(_processes))).close()
        _processes[candidate] = UntrustedProcess(candidate, workload)
    return _processes[candidate]


def untrusted_processes() -> list[int]:
    """Return the ids of all untrusted processes, and of the processes that they started."""
    return [pid for process in _processes.values() for pid in process.ids()]


def end_process(candidate: Candidate | None) -> None:
    if (process := _processes.pop(candidate, None)) is not None:
        process.close()


MOST_SIZE = 1 << 40  # largest size or stride of a result


@dataclass(frozen=True, slots=True)
class UntrustedRun:
    run_ns: int
    overhead_ns: int
    results: Sequence[Any]


@dataclass(slots=True)
class UntrustedCall:
    candidate: Candidate | None
    workload: Workload
    signature: Signature
    settings: Mapping[str, Any]
    _places: list[tuple[int, torch.UntypedStorage]] = field(default_factory=list)

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        return self.results(self.run(args, kwargs))

    def run(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], prepare: Callable[[], None] = lambda: None
    ) -> UntrustedRun:
        try:
            return self._run(args, kwargs, prepare)
        except (UserError, WrongResultError):
            # the process may have ended, or send further messages
            end_process(self.candidate)
            raise

    def results(self, run: UntrustedRun) -> list[Any]:
        process = process_of(self.candidate, self.workload)
        for offset, storage in self._places:
            memory_of(storage).copy_(process.shared(offset, storage.nbytes()))
        try:
            # before the process continues: later work must not become a result
            memory = self._memory(process, run.results)
            described = process.ask({"do": "describe"})
            if replaced := described["replaced"]:
                names = ", ".join(map(str, replaced))
                raise WrongResultError(f"it replaced {names} while it ran, so its time and results cannot be trusted")
            return self._outputs(run.results, described["outputs"], memory)
        except WrongResultError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, IndexError, OverflowError) as error:
            raise WrongResultError(f"its results cannot be read: {error}") from error

    def copies(self, memory: Sequence[Tensor]) -> list[Tensor]:
        process = process_of(self.candidate, self.workload)
        return [
            process.shared(offset, storage.nbytes())
            for offset, storage in self._places
            if any(part.untyped_storage()._cdata == storage._cdata for part in memory)
        ]

    def _run(self, args: Sequence[Any], kwargs: Mapping[str, Any], prepare: Callable[[], None]) -> UntrustedRun:
        process = process_of(self.candidate, self.workload)
        storages: dict[int, torch.UntypedStorage] = {}
        form_args, form_kwargs = _form(list(args), storages), _form(dict(kwargs), storages)
        sizes = [-(-storage.nbytes() // PAGE) * PAGE for storage in storages.values()]
        first = process.place(sum(sizes))
        offsets = [first + sum(sizes[:number]) for number in range(len(sizes))]
        self._places = list(zip(offsets, storages.values(), strict=True))
        request = {
            "do": "make",
            "args": form_args,
            "kwargs": form_kwargs,
            "places": [[offset, storage.nbytes(), str(storage.device)] for offset, storage in self._places],
            "size": len(process.memory),
            "signature": to_json(self.signature) if self.candidate is None else None,
            "settings": {**self.settings, "grad": torch.is_grad_enabled()},
        }
        process.earlier.add(process.latest, sum(item[1] for item in process.latest if isinstance(item, list)))
        process.latest = []
        process.ask(request)
        for offset, storage in self._places:
            process.shared(offset, storage.nbytes()).copy_(memory_of(storage))
        let_threads_sleep()
        prepare()
        answer = process.ask({"do": "run", "seed": torch.initial_seed()})
        if not isinstance(answer, list) or not answer or type(answer[0]) is not int:
            raise WrongResultError("its process did not send how long the run took and where its results are in memory")
        run_ns, *results = answer
        if not 0 <= run_ns <= process.took_ns:
            raise WrongResultError(f"its process reports a time of {run_ns} ns, but ran for {process.took_ns} ns")
        process.latest = results
        return UntrustedRun(run_ns, process.took_ns - run_ns, results)

    def _memory(self, process: UntrustedProcess, results: Sequence[Any]) -> list[torch.UntypedStorage | None]:
        mapped, own = process.mapped_at(), dict[int, torch.UntypedStorage]()
        storages: list[torch.UntypedStorage | None] = []
        for item in results:
            if isinstance(item, dict):
                storages.append(None)
                continue
            address, size = item
            offset = next((address - first + at for first, end, at in mapped if first <= address < end), None)
            if offset is not None:
                storages.append(self._places[[place for place, _ in self._places].index(offset)][1])
                continue
            if size and any(item in earlier for earlier, _ in process.earlier):
                raise WrongResultError("it returns the memory of an earlier result")
            if address not in own:
                own[address] = process.read(address, size).untyped_storage()
            storages.append(own[address])
        return storages

    def _outputs(
        self, results: Sequence[Any], forms: Sequence[Mapping[str, Any]], memory: Sequence[torch.UntypedStorage | None]
    ) -> list[Any]:
        outputs = []
        for item, form, storage in zip(results, forms, memory, strict=True):
            if storage is None:
                if "value" not in item:
                    raise WrongResultError(f"output is a {item['type']}, not a plain tensor")
                outputs.append(decode(item["value"]))
                continue
            spec, number = _spec(form, storage.nbytes()), form["argument"]
            moved = memory_of(storage).to(spec.device).untyped_storage() if number is None else self._places[number][1]
            outputs.append(as_recorded(tensor_over(moved, spec), spec))
        return outputs


def _spec(form: Mapping[str, Any], size: int) -> TensorSpec:
    shape, stride, offset = tuple(form["shape"]), tuple(form["stride"]), form["offset"]
    numbers = (*shape, *stride, offset)
    if any(type(number) is not int or not 0 <= number <= MOST_SIZE for number in numbers):
        raise WrongResultError(
            f"the sizes, strides or offset of a result are negative or too large: {str(numbers)[:60]}"
        )
    conj, neg = form["bits"]
    device = str(torch.device(form["device"]))
    spec = TensorSpec(shape, stride, DTYPES[form["dtype"]], device, offset=offset, conj=bool(conj), neg=bool(neg))
    if spec.extent > size:
        raise WrongResultError(f"a result of shape {shape} needs {spec.extent} bytes, but its memory has {size}")
    return spec


def _form(tree: Any, storages: dict[int, torch.UntypedStorage]) -> Any:
    def described(leaf: Any) -> Any:
        if isinstance(leaf, torch.Generator):
            return GeneratorSpec(str(leaf.device), leaf.initial_seed())
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.layout is not torch.strided or leaf.is_nested or leaf.is_quantized:
            raise Unsupported("--untrusted supports only strided tensors")
        storage = leaf.untyped_storage()
        storages.setdefault(storage._cdata, storage)
        number = list(storages).index(storage._cdata)
        return strided_spec(leaf, storage=number, conj=leaf.is_conj(), neg=leaf.is_neg())

    try:
        return encode(map_leaves(described, tree))
    except TypeError as error:
        raise Unsupported(f"--untrusted supports only tensors and plain values: {error}") from error


UNKNOWN = CallMemory(0, 0)  # memory of a call that another process runs
CERTAIN, CHECKED = 8, 2  # number of timed runs that are checked; of the later ones, one of this number is, at random
# largest relative change of floating-point values, without which values that the trace keeps were always the same
CHANGE = 1e-3
MARGIN = 0.1  # share by which the time of a candidate's request outside its call may exceed the operator's, by chance
KEPT = 51  # number of latest requests over which these times are compared


# function that compares results with the operator's on the same inputs, and random ones with those of an earlier run
Check = Callable[[Inputs, RunOutputs, Sequence[Any]], ResultVerdict]


@dataclass(slots=True, kw_only=True)
class UntrustedFunction(TimedFunction):
    call: UntrustedCall
    draw: Callable[[int, int], Inputs]
    check: Check | None
    overhead_ns: list[int]
    reorders: bool
    _took_ns: list[int] = field(default_factory=list)
    _checks: int = 0
    _compared: Sequence[Any] = ()

    def run(self) -> None:
        self._run(0)

    def run_untimed(self, stopwatch: Stopwatch) -> None:
        self._run(0)

    def time(self, stopwatch: Stopwatch, prepare: Callable[[], None]) -> tuple[Stratum, float]:
        stratum: Stratum = self.samples.next_stratum  # type: ignore[assignment]
        began = perf_counter_ns()
        try:
            return (stratum[0], False), self._run(stratum[0], prepare)
        finally:
            self.samples.spent_ns += perf_counter_ns() - began

    def copy_inputs(self, count: int) -> None:
        pass  # each run has new memory

    def memory_uses(self, place: CallPosition, used: int, device: str) -> list[MemoryUse]:
        assert self.inputs is not None, "they are drawn before"
        # the copies have just been written
        return [
            MemoryUse.of(self.call.copies(self.inputs.memory_of(number)), distance, 0)
            for number, distance in enumerate(place.distances)
            if distance is not None
        ]

    def _run(self, index: int, prepare: Callable[[], None] = lambda: None) -> float:
        self.inputs = inputs = self._next_inputs(index)
        args, kwargs = inputs.make()
        self._ready.begin()
        try:
            run = self.call.run(args, kwargs, prepare)
        finally:
            self._ready.end()
        if self.check is None:
            self.overhead_ns.append(run.overhead_ns)
        elif self._checks < CERTAIN or not secrets.randbelow(CHECKED):
            self._checks += 1
            self._compare(inputs, run)
        self._took_ns.append(run.run_ns + run.overhead_ns)
        took_ns, usual_ns = (np.quantile(own[-KEPT:] or [0], 0.25) for own in (self._took_ns, self.overhead_ns))
        # work outside the reported time is the candidate's, except what the operator's process does too; a time of zero
        # would not be compared with the machine's limit
        return float(max(run.run_ns, took_ns - (1 + MARGIN) * usual_ns, 1))

    def _compare(self, inputs: Inputs, run: UntrustedRun) -> None:
        assert self.check is not None, "only candidates are compared"
        before = [storage.clone() for storage in inputs.storages]
        outputs = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in self.call.results(run)]
        after = [tensor.clone() for tensor in tensors_in([*inputs.make()])] if self.mutates else []
        changed = False
        for storage, values in zip(inputs.storages, before, strict=True):
            changed = changed or not torch.equal(memory_of(storage), memory_of(values))
            storage.copy_(values)
        verdict, self._compared = self.check(inputs, RunOutputs(outputs, after), self._compared), outputs
        if not verdict.right or (changed and not self.mutates):
            raise WrongResultError(f"in a timed run: {verdict.reason or 'writes into an argument'}")

    def _next_inputs(self, index: int) -> Inputs:
        # results, random numbers and changes of values must not be predictable
        torch.default_generator.manual_seed(secrets.randbits(62))
        inputs = self.draw(index, secrets.randbits(62))
        inputs.change(CHANGE)
        if self.reorders:
            inputs.reorder()
        return inputs


def untrusted_call(case: Case, variant: Variant, workload: Workload) -> UntrustedCall:
    candidate = workload.request.candidates.find(case.op)
    original = None if case.operator is None else _original(case.op, case.operator.function)
    for started in (original, candidate):
        # both start at the same time
        process_of(started, workload)
    own = candidate if variant.mode == CANDIDATE else original
    return UntrustedCall(own, workload, case.signature, workload.context_of(case, variant))


def _original(name: str, function: Function) -> Candidate:
    # the function of a sample, as another process can load it
    if not isfunction(function):
        raise Unsupported("--untrusted judges candidates for operators and samples, not for modules")
    module = function.__module__
    source = str(sys.modules[module].__file__) if module.startswith(OPENED) else module
    return Candidate(name, source, function.__qualname__)


def needs_reordering(function: Function, inputs: Inputs) -> bool:
    """Return True if changed values have the same integer results, as of `argmax`, and reordered ones have others."""
    changed, reordered = inputs.copy(), inputs.copy()
    changed.change(CHANGE)
    reordered.reorder()
    try:
        first, second, third = (_results(function, item) for item in (inputs, changed, reordered))
    except Exception:
        # the order of the values matters, as of a positive definite matrix
        return False
    return all(map(_are_same, first, second)) and not all(map(_are_same, first, third))


def _results(function: Function, inputs: Inputs) -> list[Any]:
    args, kwargs = inputs.copy_arguments()
    return [*leaves(function(*args, **kwargs)), *tensors_in([args, kwargs])]


def _are_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.is_floating_point() or one.is_complex() or torch.equal(one, other)
    return isinstance(one, float) or bool(one == other)


def untrusted_function(
    case: Case,
    operator: Operator,
    variant: Variant,
    inputs: Sequence[Inputs],
    call: UntrustedCall,
    draw: Callable[..., Inputs],
    overhead_ns: list[int],
) -> TimedFunction:
    signatures: Sequence[Signature] = (case.signature, *case.input_sets)
    tolerance = call.workload.request.tolerance

    def check(own: Inputs, actual: RunOutputs, earlier: Sequence[Any]) -> ResultVerdict:
        op = case.op if case.operator is None else None
        reference = Reference(operator.function, own.copy_arguments, operator.mutates, op, case.unused)
        if (place := reference.drawn_again(actual.outputs, earlier)) is not None:
            return wrong(f"output {place} {DRAWN_ONCE}")
        return reference.check(actual, tolerance)

    return UntrustedFunction(
        number=case.number,
        label=case.op,
        category=variant.label,
        function=call,
        input_sets=[InputSet([item]) for item in inputs],
        mutates=operator.mutates,
        fresh=None,
        result_bytes=0,
        row=variant.number,
        shares=shares_of(case),
        call=call,
        draw=lambda place, seed: draw(signatures[place], seed=seed),
        check=check if variant.mode == CANDIDATE else None,
        overhead_ns=overhead_ns,
        reorders=draw(signatures[0], seed=1).has_values_of(inputs[0])
        and needs_reordering(operator.function, inputs[0]),
    )
