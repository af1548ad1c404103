"""The process of an untrusted candidate: it runs calls that its parent describes, on memory that both share."""

from __future__ import annotations

import ctypes
import gc
import json
import mmap
import os
import signal
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import starmap
from pathlib import Path
from typing import Any

import torch

from opgrip.errors import UserError
from opgrip.platform.sandbox import end_with_parent, receive_request, write_message
from opgrip.replay.inputs.inputs import as_recorded
from opgrip.replay.modes.candidate import Candidate
from opgrip.replay.operators.contexts import restored
from opgrip.replay.operators.devices import is_accelerator, module_of, synchronizer, use_device
from opgrip.replay.operators.lookup import find_operator
from opgrip.replay.operators.memory import Arguments, Function, limit_memory
from opgrip.replay.timing import pages
from opgrip.traces.codec.record_forms import from_json
from opgrip.traces.rebuild import tensor_over
from opgrip.traces.schema.arguments import GeneratorSpec, TensorSpec, decode, encode, leaves, map_leaves
from opgrip.traces.schema.records import Signature
from opgrip.traces.schema.tensor_specs import plain_name

# names of functions on which times and results depend, by module or class; `DEVICE` is a kind of device
CRITICAL = {
    "time": "perf_counter perf_counter_ns monotonic monotonic_ns process_time time time_ns sleep",
    "torch": "empty empty_like equal allclose frombuffer set_num_threads",
    "torch.Tensor": "copy_ clone cpu detach to data_ptr untyped_storage stride size storage_offset",
    "torch.Event": "record elapsed_time synchronize query",
    "torch.accelerator": "synchronize",
    "torch.DEVICE": "synchronize Event Stream current_stream stream",
    "torch.DEVICE.Event": "record elapsed_time synchronize query wait",
}
LONGEST = 200
# largest number, and of several the largest number of bytes, of earlier runs whose results are kept
HELD, HELD_BYTES = 4, 1 << 28
PR_SET_CHILD_SUBREAPER = 36


def critical_functions(device: str) -> dict[str, Any]:
    functions: dict[str, Any] = {}
    for place, names in CRITICAL.items():
        for kind in ("cuda", torch.device(device).type):
            path = place.replace("DEVICE", kind)
            root, *words = path.split(".")
            owner: Any = sys.modules[root]
            for word in words:
                owner = getattr(owner, word, None)
            functions |= {f"{path}.{name}": getattr(owner, name, None) for name in names.split()}
    return functions


class HeldResults(deque[tuple[Sequence[Any], int]]):
    """The results of the latest runs before the last one, with their bytes."""

    def add(self, results: Sequence[Any], size: int) -> None:
        self.append((results, size))
        while len(self) > HELD or (len(self) > 1 and sum(size for _, size in self) > HELD_BYTES):
            self.popleft()


class CallProcess:
    def __init__(
        self, candidate: Function | None, shared: int, device: str, before: dict[str, Any], extensions: Sequence[str]
    ) -> None:
        self._candidate, self._extensions, self._shared = candidate, extensions, shared
        self._function: Function | None = candidate
        self._memory = mmap.mmap(shared, os.fstat(shared).st_size)
        self._device, self._before, self._wait = device, before, synchronizer(device)
        self._storages: list[torch.UntypedStorage] = []
        self._arguments: Arguments = ((), {})
        self._results: list[tuple[Any, torch.UntypedStorage | None]] = []
        self._held = HeldResults()
        self._places: list[Any] = []
        self._stack = ExitStack()

    def make(self, **request: Any) -> dict[str, Any]:
        # a new result must not get the memory of those before, which a program may still use
        self._held.add(self._results, sum(memory.nbytes() for _, memory in self._results if memory is not None))
        self._results = []
        self._arguments, self._storages = ((), {}), []
        self._stack.close()
        gc.collect(0)
        if len(self._memory) < request["size"]:
            self._memory = mmap.mmap(self._shared, request["size"], flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        if self._candidate is None:
            signature = from_json(request["signature"])
            assert isinstance(signature, Signature)
            self._function = find_operator(signature, self._extensions).function
        self._places = request["places"]
        self._storages = [self._storage(offset, size) for offset, size, _ in self._places]
        args, kwargs = (
            map_leaves(self._leaf, decode(request["args"])),
            map_leaves(self._leaf, decode(request["kwargs"])),
        )
        self._arguments = tuple(args), kwargs
        self._stack.enter_context(restored(request["settings"]))
        self._stack.enter_context(torch.set_grad_enabled(request["settings"]["grad"]))
        return {}

    def run(self, seed: int) -> list[Any]:
        self._copy(to_device=True)
        torch.manual_seed(seed)
        args, kwargs = self._arguments
        assert self._function is not None, "set when the arguments were made"
        result, run_ns = timed(self._function, args, kwargs, self._wait)
        self._results = [(leaf, _memory(leaf)) for leaf in leaves(result)]
        self._copy(to_device=False)
        return [run_ns, *starmap(_result_form, self._results)]

    def describe(self) -> dict[str, Any]:
        now = critical_functions(self._device)
        replaced = [name for name, function in self._before.items() if now[name] is not function]
        return {"outputs": list(starmap(self._described, self._results)), "replaced": replaced}

    def _copy(self, to_device: bool) -> None:
        for (offset, size, device), storage in zip(self._places, self._storages, strict=True):
            if device != "cpu" and size:
                pair = storage, self._storage(offset, size)
                pair[not to_device].copy_(pair[to_device])

    def _storage(self, offset: int, size: int) -> torch.UntypedStorage:
        if not size:
            return torch.UntypedStorage(0)
        return torch.frombuffer(self._memory, dtype=torch.uint8, offset=offset, count=size).untyped_storage()

    def _leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, GeneratorSpec):
            return torch.Generator(leaf.device).manual_seed(leaf.seed)
        if not isinstance(leaf, TensorSpec):
            return leaf
        assert leaf.storage is not None, "the parent numbers them"
        storage = self._storages[leaf.storage]
        if leaf.device != "cpu" and storage.device.type == "cpu":
            storage = self._storages[leaf.storage] = torch.UntypedStorage(storage.nbytes(), device=leaf.device)
        return as_recorded(tensor_over(storage, leaf), leaf)

    def _described(self, leaf: Any, memory: torch.UntypedStorage | None) -> dict[str, Any]:
        if memory is None:
            return {}
        own = leaf.untyped_storage().data_ptr()
        return {
            "dtype": plain_name(leaf.dtype),
            "shape": list(leaf.shape),
            "stride": list(leaf.stride()),
            "offset": leaf.storage_offset(),
            "device": str(leaf.device),
            "bits": [leaf.is_conj(), leaf.is_neg()],
            "argument": next((place for place, item in enumerate(self._storages) if item.data_ptr() == own), None),
        }


def _memory(leaf: Any) -> torch.UntypedStorage | None:
    if type(leaf) not in (torch.Tensor, torch.nn.Parameter) or leaf.layout is not torch.strided or leaf.is_nested:
        return None
    storage: torch.UntypedStorage = leaf.untyped_storage()
    return storage if leaf.device.type == "cpu" else storage.cpu()


def _result_form(leaf: Any, memory: torch.UntypedStorage | None) -> Any:
    if memory is not None:
        return [memory.data_ptr(), memory.nbytes()]
    try:
        return {"value": encode(leaf)}
    except TypeError:
        return {"type": type(leaf).__name__}


def timed(
    function: Function, args: Sequence[Any], kwargs: Mapping[str, Any], wait: Callable[[], None]
) -> tuple[Any, int]:
    wait()
    began = time.perf_counter_ns()
    result = function(*args, **kwargs)
    wait()
    return result, time.perf_counter_ns() - began


def adopt_orphans() -> None:
    """Fork and continue in the child; this process waits for the child and ends with its status."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if not (own := os.fork()):
        end_with_parent()
        return
    pid = 0
    while pid != own:
        pid, status = os.wait()
    for orphan in Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii").split():
        os.kill(int(orphan), signal.SIGKILL)
    if (code := os.waitstatus_to_exitcode(status)) < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)


def main() -> int:
    request, _, output = receive_request()
    adopt_orphans()
    warnings.simplefilter("ignore")
    pages.keep_freed_memory()
    gc.disable()
    # the parent notes the process's id before the candidate's code runs
    write_message(output, {"started": True})
    source, device = os.fdopen(0, "rb"), request["device"]
    use_device(device)
    limit_memory(request["memory_limit"], device)
    if is_accelerator(device):
        module_of(device).synchronize()
    before = critical_functions(device)
    source.readline()
    try:
        candidate = None if request["candidate"] is None else Candidate(**request["candidate"]).load()
        process = CallProcess(candidate, request["shared"], device, before, request["extensions"])
    except UserError as error:
        write_message(output, {"error": [type(error).__name__, str(error)]})
        return 0
    write_message(output, {"ready": True})
    for line in source:
        try:
            request = json.loads(line)
            answer = getattr(process, request.pop("do"))(**request)
        except Exception as error:
            answer = {"error": [type(error).__name__, " ".join(str(error).split())[:LONGEST]]}
        write_message(output, answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
