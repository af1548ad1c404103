"""Memory of step replay, and the streams on which its calls run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

import torch

from opgrip.errors import cause_of
from opgrip.platform.machine import free_memory
from opgrip.replay.cases.flow import FlowingCall, ProgramFlow, StorageNeed
from opgrip.replay.inputs.filling import memory_of
from opgrip.replay.inputs.inputs import DeviceMap, Inputs, as_recorded
from opgrip.replay.operators.devices import current_stream, is_accelerator, module_of
from opgrip.replay.operators.lookup import Unsupported
from opgrip.traces.rebuild import tensor_over
from opgrip.traces.schema.arguments import TensorSpec
from opgrip.traces.table.accelerators import HOST, device_of
from opgrip.traces.table.trace import Trace
from opgrip.traces.values import ValueModel

SHARE, SHARE_OF_DEVICE = 0.8, 0.9  # shares of the available memory that a replay may take: CPU, and accelerator
COMPARED_BYTES = 1 << 26  # number of bytes that are copied at a time to compare storages on two devices
SEEDS = 1 << 62


class Viewed(Protocol):
    """Memory of which calls take views, by number of the storage."""

    def view(self, number: int, spec: TensorSpec) -> torch.Tensor: ...


class StepMemory:
    """The storages of a step, by number.

    limit : largest number of bytes of live storages and kept values together
    live : existing storages by number; a storage that a call creates exists until the last call that uses it
    unmade : reason why a storage could not be created, by number
    """

    def __init__(
        self,
        needs: Mapping[int, StorageNeed],
        outside: list[int],
        values: Mapping[int, ValueModel],
        place: DeviceMap,
        seed: int,
        limit: int,
    ) -> None:
        self.live: dict[int, torch.UntypedStorage] = {}
        self.unmade: dict[int, str] = {}
        self.kept_bytes = self.live_bytes = self.peak_bytes = 0
        self._needs, self._values, self._place, self._seed, self._limit = needs, values, place, seed, limit
        self._sizes: dict[int, int] = {}
        self._first: dict[int, torch.UntypedStorage] = {}
        self._outside: dict[int, torch.UntypedStorage] = {}
        self._stand_ins: dict[int, torch.UntypedStorage] = {}
        self._host_bytes: int | None = None
        for number in outside:
            self._make(number)

    def begin(self) -> None:
        for number, storage in self._outside.items():
            first = self._first.get(number)
            if first is not None:
                if storage.nbytes() != first.nbytes():
                    storage.resize_(first.nbytes())
                memory_of(storage).copy_(memory_of(first))
        self.live = dict(self._outside)
        self.live_bytes = self.peak_bytes = 0
        self._sizes = dict.fromkeys(self._outside, 0)

    def forget_constants(self) -> None:
        for number, storage in self._outside.items():
            first = self._first.get(number)
            if first is None:
                continue
            size = first.nbytes()
            if _are_equal(memory_of(storage), memory_of(first)):
                del self._first[number]
                if first.device == storage.device:
                    self.kept_bytes -= size
            elif first.device != storage.device and self.kept_bytes + self.peak_bytes + size <= self._limit // 2:
                self._first[number] = _copied(first, str(storage.device))
                self.kept_bytes += size

    def give(self, number: int, storage: torch.UntypedStorage) -> None:
        self.live[number] = storage
        if number not in self._outside:
            size = storage.nbytes()
            self.live_bytes += size - self._sizes.get(number, 0)
            self._sizes[number] = size
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def drop(self, numbers: tuple[int, ...]) -> None:
        """Free storages, except those that existed before the first call."""
        for number in numbers:
            if number not in self._outside and self.live.pop(number, None) is not None:
                self.live_bytes -= self._sizes.pop(number)

    def renew(self, number: int) -> None:
        size = self._needs[number].bytes
        first = self._first.get(number, self._stand_ins.get(number))
        self.check_room(size)
        if first is None:
            first = self._draw(number)
            # kept for the next pass until other requests need the memory
            if self._has_room(2 * size):
                self._stand_ins[number] = first
                self.kept_bytes += size
        device = self._place(self._needs[number].device)
        is_kept = number in self._stand_ins or number in self._first
        self.give(number, _copied(first, device) if is_kept else first)

    def charge(self, size: int) -> None:
        """Count `size` bytes as used until `refund`."""
        self.check_room(size)
        self.kept_bytes += size

    def refund(self, size: int) -> None:
        self.kept_bytes -= size

    def check_room(self, size: int) -> None:
        if not self._has_room(size):
            self.kept_bytes -= sum(storage.nbytes() for storage in self._stand_ins.values())
            self._stand_ins.clear()
            if not self._has_room(size):
                raise Unsupported(f"it needs {size} bytes, more memory than is available")

    def view(self, number: int, spec: TensorSpec) -> torch.Tensor:
        storage = self.live.get(number)
        if storage is None:
            raise Unsupported(self.unmade.get(number, "no recorded call returned the memory that it reads"))
        return as_recorded(tensor_over(storage, spec), spec)

    def holds(self, number: int, spec: TensorSpec) -> bool:
        storage = self.live.get(number)
        return storage is not None and storage.nbytes() >= spec.extent

    def _make(self, number: int) -> None:
        size = charged = self._needs[number].bytes
        try:
            self.charge(size)
            try:
                storage = self._draw(number)
                if storage.device.type != "cpu" and self._reserve_on_host(size):
                    first = _copied(storage, "cpu")
                else:
                    self.charge(size)
                    charged += size
                    first = storage.clone()
            except BaseException:
                self.refund(charged)
                raise
            self._outside[number], self._first[number] = storage, first
        except Exception as error:
            self.unmade[number] = reason_of(error)

    def _reserve_on_host(self, size: int) -> bool:
        if self._host_bytes is None:
            # processes on its other accelerators may want as much
            self._host_bytes = room_on("cpu") // torch.accelerator.device_count()
        if size > self._host_bytes:
            return False
        self._host_bytes -= size
        return True

    def _draw(self, number: int) -> torch.UntypedStorage:
        need = self._needs[number]
        # one storage, in which the first view is filled last
        whole = TensorSpec((need.bytes,), (1,), torch.uint8, need.device, storage=0)
        views = [
            replace(view, device=need.device, storage=0, requires_grad=False, conj=False, neg=False)
            for view in reversed(need.views)
        ]
        inputs = Inputs((whole, *views), {}, self._values, self._place, (self._seed + number) % SEEDS)
        drawn: torch.UntypedStorage = inputs.make()[0][0].untyped_storage()
        return drawn

    def _has_room(self, size: int) -> bool:
        return self.kept_bytes + self.live_bytes + size <= self._limit


def reason_of(error: Exception) -> str:
    return str(error) if isinstance(error, Unsupported) else cause_of(error, 120)


def room_on(device: str) -> int:
    free = free_memory(device)
    share = SHARE_OF_DEVICE if is_accelerator(device) else SHARE
    return int((os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if free is None else free) * share)


def _copied(storage: torch.UntypedStorage, device: str) -> torch.UntypedStorage:
    return torch.empty(storage.nbytes(), dtype=torch.uint8, device=device).copy_(memory_of(storage)).untyped_storage()


def _are_equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.device == right.device or left.numel() != right.numel():
        return left.numel() == right.numel() and torch.equal(left, right)
    pieces = zip(left.split(COMPARED_BYTES), right.split(COMPARED_BYTES), strict=True)
    return all(torch.equal(piece, other.to(piece.device)) for piece, other in pieces)


# True if a stream waits for a mark (a point in a stream), False if it sets one; numbers of stream and mark
Action: TypeAlias = tuple[bool, int, int]


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """The stream on which each call of a step runs.

    before : by index of a call, actions of streams before it: to wait for marks, or to set marks for which others wait
    crossing : for each storage that several streams use, the numbers of these streams
    """

    count: int
    of_call: list[int]
    before: Mapping[int, list[Action]]
    crossing: Mapping[int, frozenset[int]]


def plan_streams(trace: Trace, flow: ProgramFlow, device: str) -> StreamPlan | None:
    recorded = trace.own_calls["stream"].fillna(0).to_numpy()
    if not is_accelerator(device) or not recorded.any():
        return None
    devices = {signature.number: device_of(signature) for signature in trace.signatures}
    numbers: dict[tuple[str, int], int] = {}
    of_call: list[int] = []
    for call, stream in zip(flow.calls, recorded.tolist(), strict=True):
        index = devices.get(call.signature, HOST[0])
        if index not in HOST:
            numbers.setdefault((index, 0), len(numbers))
            of_call.append(numbers.setdefault((index, stream), len(numbers)))
        else:
            of_call.append(of_call[-1] if of_call else 0)
    before = _actions(trace, flow, of_call, numbers)
    users: dict[int, set[int]] = {}
    for call, stream in zip(flow.calls, of_call, strict=True):
        for number in (*call.inputs, *call.outputs):
            users.setdefault(number, set()).add(stream)
    crossing = {number: frozenset(streams) for number, streams in users.items() if len(streams) > 1}
    return StreamPlan(len(numbers), of_call, before, crossing)


def _actions(
    trace: Trace, flow: ProgramFlow, of_call: list[int], numbers: Mapping[tuple[str, int], int]
) -> dict[int, list[Action]]:
    before: dict[int, list[Action]] = {}
    order = _Order()
    recorded = _recorded(trace, numbers)
    marks = sum(is_wait for _, (is_wait, _, _) in recorded)
    starts = trace.own_calls["start_ns"].tolist()
    upcoming = 0
    for index, (call, stream, start) in enumerate(zip(flow.calls, of_call, starts, strict=True)):
        actions: list[Action] = []
        while upcoming < len(recorded) and recorded[upcoming][0] <= start:
            actions.append(recorded[upcoming][1])
            upcoming += 1
            order.act(actions[-1])
        for other in sorted({*order.missing(call, stream)}):
            added: list[Action] = [(False, other, marks), (True, stream, marks)]
            marks += 1
            actions += added
            for action in added:
                order.act(action)
        order.run(index, call, stream)
        if actions:
            before[index] = actions
    return before


def _recorded(trace: Trace, numbers: Mapping[tuple[str, int], int]) -> list[tuple[int, Action]]:
    actions: list[tuple[int, Action]] = []
    for mark, wait in enumerate(trace.waits):
        own, other = numbers.get((wait.device, wait.stream)), numbers.get((wait.on_device, wait.on_stream))
        if own is not None and other is not None:
            actions += [(wait.until_ns, (False, other, mark)), (wait.at_ns, (True, own, mark))]
    return sorted(actions, key=lambda item: item[0])


class _Order:
    def __init__(self) -> None:
        self._over: dict[int, dict[int, int]] = {}
        self._marks: dict[int, dict[int, int]] = {}
        self._writers: dict[int, dict[int, int]] = {}
        self._readers: dict[int, dict[int, int]] = {}

    def act(self, action: Action) -> None:
        is_wait, stream, mark = action
        over = self._over.setdefault(stream, {})
        if not is_wait:
            self._marks[mark] = dict(over)
            return
        for other, index in self._marks.get(mark, {}).items():
            over[other] = max(over.get(other, -1), index)

    def missing(self, call: FlowingCall, stream: int) -> Iterator[int]:
        over = self._over.setdefault(stream, {})
        changed = _changed(call)
        for number in {*call.inputs, *changed}:
            for users in (self._writers, self._readers) if number in changed else (self._writers,):
                for other, index in users.get(number, {}).items():
                    if other != stream and over.get(other, -1) < index:
                        yield other

    def run(self, place: int, call: FlowingCall, stream: int) -> None:
        self._over.setdefault(stream, {})[stream] = place
        changed = _changed(call)
        for number in {*call.inputs, *call.outputs}:
            users = self._writers if number in changed or number not in call.inputs else self._readers
            users.setdefault(number, {})[stream] = place


def _changed(call: FlowingCall) -> set[int]:
    _, name, overload = (*call.op.split("."), "", "")[:3]
    if not (name.endswith("_") or "out" in overload):
        return set()
    return {*call.inputs} & {*call.outputs} or {*call.inputs}


class Lanes:
    def __init__(self, plan: StreamPlan, device: str) -> None:
        self._plan, self._module = plan, module_of(device)
        self._device = torch.device(device)
        self._streams = [current_stream(device), *(self._module.Stream(device) for _ in range(plan.count - 1))]
        self._marks: dict[int, Any] = {}
        self._current = 0
        self._kept: list[torch.UntypedStorage] = []

    def before(self, place: int) -> None:
        for is_wait, stream, mark in self._plan.before.get(place, ()):
            if is_wait:
                if mark in self._marks:
                    self._marks.pop(mark).wait(self._streams[stream])
            else:
                event = self._marks[mark] = torch.Event(device=self._device)
                event.record(self._streams[stream])
        self._use(self._plan.of_call[place])

    def drop(self, numbers: tuple[int, ...], memory: StepMemory) -> None:
        """Prevent memory that is freed now from being reused before all streams that used it have finished with it."""
        for number in numbers:
            storage = memory.live.get(number)
            if number in self._plan.crossing and storage is not None and storage.device.type == self._device.type:
                tensor = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
                try:
                    for stream in self._plan.crossing[number]:
                        tensor.record_stream(self._streams[stream])
                except NotImplementedError:
                    # a device whose allocator does not know streams: the memory stays until the pass ends
                    self._kept.append(storage)

    def end(self) -> None:
        self._use(0)

    def _use(self, stream: int) -> None:
        if stream != self._current:
            self._module.set_stream(self._streams[stream])
            self._current = stream
