"""Calls of untrusted candidates in separate processes, timed and checked from outside.

A candidate may change everything in its process, so nothing that it reports is believed:

- The process is stopped except while it runs a call. New values are written into new memory while it is stopped.
- Its clock is bounded by this process's clock: time that passes outside of the reported time, beyond what the
  operator's own process needs, counts as the candidate's.
- Results are read from the memory of the stopped process, at the addresses that it reported with its time.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from time import monotonic, perf_counter_ns
from typing import Any

import torch
from torch import Tensor

from opgrip.errors import UserError
from opgrip.platform.sandbox import Child, Ended, check_bubblewrap
from opgrip.replay.checks.verdicts import WrongResultError
from opgrip.replay.inputs.filling import memory_of
from opgrip.replay.inputs.inputs import as_recorded
from opgrip.replay.modes.candidate import Candidate
from opgrip.replay.operators.lookup import Unsupported
from opgrip.replay.run.workload import Workload
from opgrip.traces.codec.record_forms import to_json
from opgrip.traces.rebuild import tensor_over
from opgrip.traces.schema.arguments import DTYPES, GeneratorSpec, TensorSpec, decode, encode, map_leaves
from opgrip.traces.schema.records import Signature

MODULE = "opgrip.replay.run.untrusted_process"
PAGE = mmap.PAGESIZE
MOST_PROCESSES = 32
"""processes of candidates that are kept; a further one ends the one that ran longest ago"""
LEAST_BYTES, MOST_BYTES = 16 << 20, 1 << 40
"""bytes of shared memory at first, and the largest size that a result may claim"""
OF_TIMEOUT = 0.9
"""share of `--timeout` after which a candidate is ended, before the process that times it would be"""
ERRORS = {
    kind.__name__: kind
    for kind in (UserError, Unsupported, ArithmeticError, AttributeError, IndexError, KeyError, MemoryError)
    + (NotImplementedError, RuntimeError, TypeError, ValueError, ZeroDivisionError)
}
"""errors that a process may report"""

_processes: dict[Candidate | None, UntrustedProcess] = {}


@cache
def unconfined() -> str | None:
    """Return why bubblewrap cannot confine processes here, and what still protects; None if it can."""
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
    """A process that runs the calls of one candidate, or the operators that candidates are compared with."""

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
        self._leaf, self._mem = -1, -1
        self._first: list[int] = []
        self._stopped: list[int] = []

    def ask(self, message: Mapping[str, Any]) -> Any:
        """Let the process continue, send a message, and return its answer; raise the error that it reports."""
        if self._mem < 0:
            self._begin()
        while self._stopped:
            _send_signal(self._stopped.pop(), signal.SIGCONT)
        self._child.send(message)
        return self._answer()

    def stop(self) -> None:
        """Pause the process and all processes that it started, until the next message is sent to it."""
        _send_signal(self._leaf, signal.SIGSTOP)
        others = [pid for pid in _descendants(self._child.pid) if pid not in self._first]
        for pid in others:
            _send_signal(pid, signal.SIGSTOP)
        self._stopped = [*others, self._leaf]

    def read(self, address: int, size: int) -> Tensor:
        """Return a copy of `size` bytes of the process's memory from `address` on, (size,) uint8."""
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
        """Return the offset of `size` free bytes in the shared memory. Each run gets other bytes than the one before,
        unless it needs most of the memory.
        """
        if len(self.memory) < 2 * size:
            self._grow(2 * size)
        if self._next + size >= len(self.memory):
            self._next = PAGE * secrets.randbelow((len(self.memory) - size) // PAGE + 1)
        offset, self._next = self._next, self._next + max(size, PAGE)
        return offset

    def mapped_at(self) -> list[tuple[int, int, int]]:
        """Return (first address, end, offset in the file) of each range of addresses at which the process sees shared
        memory.
        """
        own = f"{os.fstat(self._file).st_ino} "
        ranges = []
        for line in Path(f"/proc/{self._leaf}/maps").read_text(encoding="utf-8", errors="replace").splitlines():
            if own in line and "memfd:opgrip" in line:
                addresses, _, offset, *_ = line.split()
                first, last = (int(word, 16) for word in addresses.split("-"))
                ranges.append((first, last, int(offset, 16)))
        return ranges

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
        """Wait until the process runs, note its id, and let it import the candidate."""
        self._answer()
        # nothing of the candidate has run: the last process is the one that will
        self._first = [self._child.pid, *_descendants(self._child.pid)]
        self._leaf = self._first[-1]
        self._mem = os.open(f"/proc/{self._leaf}/mem", os.O_RDONLY)
        self._child.send({})
        self._answer()

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


def _send_signal(pid: int, number: int) -> None:
    with suppress(OSError):
        os.kill(pid, number)


def _descendants(pid: int) -> list[int]:
    """Return the ids of the processes that the process `pid` and its children started, children first."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, path.read_text(encoding="ascii").split())
    return found + [inner for child in found for inner in _descendants(child)]


def process_of(candidate: Candidate | None, workload: Workload) -> UntrustedProcess:
    """Return the process of a candidate, or of operators, and start it if it does not run."""
    if candidate in _processes:
        # the last one ran last
        _processes[candidate] = _processes.pop(candidate)
    else:
        while len(_processes) >= MOST_PROCESSES:
            _processes.pop(next(iter(_processes))).close()
        _processes[candidate] = UntrustedProcess(candidate, workload)
    return _processes[candidate]


@dataclass(frozen=True, slots=True)
class UntrustedRun:
    """One run of a call in another process.

    run_ns : time of the call as the process reported it
    besides_ns : time in ns that the request took in addition, by this process's clock
    addresses : where the results are, as the process reported with its time; 0 for other values than tensors
    """

    run_ns: int
    besides_ns: int
    addresses: Sequence[int]


@dataclass(slots=True)
class UntrustedCall:
    """A call of a candidate, or of its operator, in another process.

    signature : signature of the call, by which the operator is found
    settings : settings of torch under which it runs
    """

    candidate: Candidate | None
    workload: Workload
    signature: Signature
    settings: Mapping[str, Any]
    _places: list[tuple[int, torch.UntypedStorage]] = field(default_factory=list)
    _sizes: list[int] = field(default_factory=list)

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        return self.results(self.run(args, kwargs))

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> UntrustedRun:
        """Run the call on copies of the arguments in new memory.

        Raises the error of the call, and `WrongResultError` if its process was manipulated.
        """
        try:
            return self._run(args, kwargs)
        except (UserError, WrongResultError):
            # the process may have ended, or send further messages
            if (process := _processes.pop(self.candidate, None)) is not None:
                process.close()
            raise

    def results(self, run: UntrustedRun) -> list[Any]:
        """Return the results of the last run, which alias the run's arguments as in the process.

        The arguments get the values that the run left in them.
        """
        process = process_of(self.candidate, self.workload)
        for offset, storage in self._places:
            if storage.nbytes():
                memory_of(storage).copy_(_shared(process, offset, storage.nbytes()))
        # before the process continues: later work must not become a result
        early = dict(zip(run.addresses, map(process.read, run.addresses, self._sizes), strict=False))
        described = process.ask({"do": "describe"})
        process.stop()
        if faults := described.get("faults"):
            raise WrongResultError(", ".join(map(str, faults)))
        try:
            return self._outputs(process, described["outputs"], run.addresses, early)
        except WrongResultError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, IndexError, OverflowError) as error:
            raise WrongResultError(f"its results cannot be read: {error}") from error

    def _run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> UntrustedRun:
        process = process_of(self.candidate, self.workload)
        storages: dict[int, torch.UntypedStorage] = {}
        form_args, form_kwargs = ([_leaf(item, storages) for item in args], _leaf(dict(kwargs), storages))
        sizes = [-(-storage.nbytes() // PAGE) * PAGE for storage in storages.values()]
        first = process.place(sum(sizes))
        offsets = [first + sum(sizes[:number]) for number in range(len(sizes))]
        self._places = list(zip(offsets, storages.values(), strict=True))
        asked = {
            "do": "make",
            "args": encode(form_args),
            "kwargs": encode(form_kwargs),
            "places": [[offset, storage.nbytes(), str(storage.device)] for offset, storage in self._places],
            "size": len(process.memory),
            "signature": to_json(self.signature) if self.candidate is None else None,
            "settings": {**self.settings, "grad": torch.is_grad_enabled()},
            "seed": torch.initial_seed(),
        }
        if faults := process.ask(asked).get("faults"):
            raise WrongResultError(", ".join(map(str, faults)))
        process.stop()
        for offset, storage in self._places:
            if storage.nbytes():
                _shared(process, offset, storage.nbytes()).copy_(memory_of(storage))
        began = perf_counter_ns()
        answer = process.ask({"do": "run"})
        took_ns = perf_counter_ns() - began
        process.stop()
        if not isinstance(answer, list) or not all(type(number) is int and number >= 0 for number in answer):
            raise WrongResultError("its process did not send the time and the addresses of its results")
        run_ns, *addresses = answer
        if run_ns > took_ns:
            raise WrongResultError(f"its process reports a time of {run_ns} ns, but ran for {took_ns} ns")
        return UntrustedRun(run_ns, took_ns - run_ns, addresses)

    def _outputs(
        self,
        process: UntrustedProcess,
        forms: Sequence[Mapping[str, Any]],
        addresses: Sequence[int],
        early: Mapping[int, Tensor],
    ) -> list[Any]:
        """Return the results, given their metadata (`forms`) and addresses in the process; their values are in the
        arguments, in `early` (copied values by address) or in the process.
        """
        mapped, outputs, owned = process.mapped_at(), [], dict(early)
        self._sizes = [form.get("size", 0) if form.get("argument") is None else 0 for form in forms]
        for form, address in zip(forms, addresses, strict=True):
            if "value" in form:
                outputs.append(decode(form["value"]))
                continue
            if "dtype" not in form:
                raise WrongResultError(f"output is a {form['type']}, not a plain tensor")
            spec, number = _spec(form), form["argument"]
            offset = next((address - first + at for first, end, at in mapped if first <= address < end), None)
            if offset is not None:
                number = [own for own, _ in self._places].index(offset)
            if number is None:
                if address not in owned or len(owned[address]) < spec.extent:
                    owned[address] = process.read(address, form["size"])
                storage = owned[address].to(spec.device).untyped_storage()
            else:
                storage = self._places[number][1]
            outputs.append(as_recorded(tensor_over(storage, spec), spec))
        return outputs


def _spec(form: Mapping[str, Any]) -> TensorSpec:
    shape, stride, offset = tuple(form["shape"]), tuple(form["stride"]), form["offset"]
    numbers = (*shape, *stride, offset, form["size"])
    if any(type(number) is not int or not 0 <= number <= MOST_BYTES for number in numbers):
        raise WrongResultError(
            f"the sizes, strides or offset of a result are negative or too large: {str(numbers)[:60]}"
        )
    conj, neg = form["bits"]
    device = str(torch.device(form["device"]))
    spec = TensorSpec(shape, stride, DTYPES[form["dtype"]], device, offset=offset, conj=bool(conj), neg=bool(neg))
    if spec.extent > form["size"]:
        raise WrongResultError(
            f"a result of shape {shape} needs {spec.extent} bytes, but its memory has {form['size']}"
        )
    return spec


def _shared(process: UntrustedProcess, offset: int, size: int) -> Tensor:
    return torch.frombuffer(process.memory, dtype=torch.uint8, offset=offset, count=size)


def _leaf(tree: Any, storages: dict[int, torch.UntypedStorage]) -> Any:
    """Return arguments, a tree of lists, tuples and dicts, with specs in place of tensors, whose memory is added to
    `storages`.

    Raises `Unsupported` for arguments that cannot be passed to another process.
    """

    def described(leaf: Any) -> Any:
        if isinstance(leaf, torch.Generator):
            return GeneratorSpec(str(leaf.device), leaf.initial_seed())
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.layout is not torch.strided or leaf.is_nested or leaf.is_quantized:
            raise Unsupported("--untrusted passes strided tensors only")
        storage = leaf.untyped_storage()
        storages.setdefault(storage._cdata, storage)
        return TensorSpec(
            tuple(leaf.shape),
            tuple(leaf.stride()),
            leaf.dtype,
            str(leaf.device),
            offset=int(leaf.storage_offset()),
            requires_grad=leaf.requires_grad,
            storage=list(storages).index(storage._cdata),
            conj=leaf.is_conj(),
            neg=leaf.is_neg(),
        )

    return map_leaves(described, tree)
