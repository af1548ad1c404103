"""Streams of step replay: each call runs on the stream on which it was recorded, with the recorded waits between
streams.

If a call takes what another stream wrote, and no recorded wait orders the two streams, the call's stream waits for the
other stream as well: the program may have waited on the host, or in a way that captures do not see.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from opgrip.replay.cases.flow import FlowingCall, ProgramFlow
from opgrip.replay.operators.devices import current_stream, is_accelerator, module_of
from opgrip.replay.sequences.step_memory import StepMemory
from opgrip.traces.table.accelerators import HOST, device_of
from opgrip.traces.table.trace import Trace

# True if a stream waits for a mark (a point in a stream), False if it sets one; numbers of stream and mark
Action: TypeAlias = tuple[bool, int, int]


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """On which stream each call of a step runs. Stream 0 is the default stream of the first device that calls use.

    count : number of streams
    of_call : stream of each call; for a call on the host, that of the call before it
    before : by index of a call, what streams do before it: wait for marks, or set marks (points for which others wait)
    crossing : for each storage that several streams use, the numbers of these streams
    """

    count: int
    of_call: list[int]
    before: Mapping[int, list[Action]]
    crossing: Mapping[int, frozenset[int]]


def plan_streams(trace: Trace, flow: ProgramFlow, device: str) -> StreamPlan | None:
    """Return the streams of a trace's calls; None if all calls used one stream, or if the device of the replay has no
    streams.

    flow : the calls, with the storages that they take and return
    """
    recorded = trace.own_calls["stream"].fillna(0).to_numpy()
    if not is_accelerator(device) or not recorded.any():
        return None
    devices = {signature.number: device_of(signature) for signature in trace.signatures}
    numbers: dict[tuple[str, int], int] = {}
    of_call: list[int] = []
    for call, stream in zip(flow.calls, recorded.tolist(), strict=True):
        place = devices.get(call.signature, HOST[0])
        if place not in HOST:
            numbers.setdefault((place, 0), len(numbers))
            of_call.append(numbers.setdefault((place, stream), len(numbers)))
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
    """Return, by index of a call, the actions before the call: the recorded waits between streams, and waits that the
    dataflow needs in addition.
    """
    before: dict[int, list[Action]] = {}
    order = _Order()
    recorded = _recorded(trace, numbers)
    marks = sum(is_wait for _, (is_wait, _, _) in recorded)
    starts = trace.own_calls["start_ns"].tolist()
    upcoming = 0
    for place, (call, stream, start) in enumerate(zip(flow.calls, of_call, starts, strict=True)):
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
        order.run(place, call, stream)
        if actions:
            before[place] = actions
    return before


def _recorded(trace: Trace, numbers: Mapping[tuple[str, int], int]) -> list[tuple[int, Action]]:
    """Return (time in ns, action), in order of time, for each recorded wait of one stream for another, and for each
    mark: the point in the other stream for which the wait waits.
    """
    actions: list[tuple[int, Action]] = []
    for mark, wait in enumerate(trace.waits):
        own, other = numbers.get((wait.device, wait.stream)), numbers.get((wait.on_device, wait.on_stream))
        if own is not None and other is not None:
            actions += [(wait.until_ns, (False, other, mark)), (wait.at_ns, (True, own, mark))]
    return sorted(actions, key=lambda item: item[0])


class _Order:
    """Keeps track of which calls on other streams have ended when a stream starts its next call."""

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
        for other, place in self._marks.get(mark, {}).items():
            over[other] = max(over.get(other, -1), place)

    def missing(self, call: FlowingCall, stream: int) -> Iterator[int]:
        """Yield the other streams whose earlier calls used memory of `call`, and for which the call's `stream` has not
        waited yet.
        """
        over = self._over.setdefault(stream, {})
        changed = _changed(call)
        for number in {*call.inputs, *changed}:
            for users in (self._writers, self._readers) if number in changed else (self._writers,):
                for other, place in users.get(number, {}).items():
                    if other != stream and over.get(other, -1) < place:
                        yield other

    def run(self, place: int, call: FlowingCall, stream: int) -> None:
        self._over.setdefault(stream, {})[stream] = place
        changed = _changed(call)
        for number in {*call.inputs, *call.outputs}:
            users = self._writers if number in changed or number not in call.inputs else self._readers
            users.setdefault(number, {})[stream] = place


def _changed(call: FlowingCall) -> set[int]:
    """Return the storages of the arguments that a call writes into, as far as the operator's name shows this."""
    _, name, overload = (*call.op.split("."), "", "")[:3]
    if not (name.endswith("_") or "out" in overload):
        return set()
    return {*call.inputs} & {*call.outputs} or {*call.inputs}


class Lanes:
    """The streams of a device during one pass over a step."""

    def __init__(self, plan: StreamPlan, device: str) -> None:
        self._plan, self._module = plan, module_of(device)
        self._device = torch.device(device)
        self._streams = [current_stream(device), *(self._module.Stream(device) for _ in range(plan.count - 1))]
        self._marks: dict[int, Any] = {}
        self._current = 0
        self._kept: list[torch.UntypedStorage] = []

    def before(self, place: int) -> None:
        """Execute the waits before the call with the index `place`, and make the call's stream the current one."""
        for is_wait, stream, mark in self._plan.before.get(place, ()):
            if is_wait:
                if mark in self._marks:
                    self._marks.pop(mark).wait(self._streams[stream])
            else:
                event = self._marks[mark] = torch.Event(device=self._device)
                event.record(self._streams[stream])
        self._use(self._plan.of_call[place])

    def drop(self, numbers: tuple[int, ...], memory: StepMemory) -> None:
        """Prevent memory that is freed now from being reused before all streams that used it have finished with it.

        numbers : numbers of the storages
        """
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
