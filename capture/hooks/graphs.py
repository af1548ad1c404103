"""Hooks into CUDA and HIP graphs and accelerator streams."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch

from opgrip.capture.program.accelerators import (
    accelerators,
    current_stream,
    graph_classes,
    is_own_stream,
    is_started,
    with_index,
)
from opgrip.capture.program.patches import Patches
from opgrip.capture.program.places import Location
from opgrip.capture.recording.graph_templates import GraphCapture, kept_graphs
from opgrip.capture.recording.recorder import Recorder
from opgrip.capture.recording.scope_table import Generations
from opgrip.capture.recording.thread_mode import UNPAIRED, ThreadMode
from opgrip.capture.recording.wrapped_operators import timed_on
from opgrip.errors import raise_if_from_program
from opgrip.platform import perf_counter_ns
from opgrip.traces.schema.records import Graph, Wait

# what a launch of a graph needs: the counter of times that the recording's tables were cleared and its value, the
# numbers of the launch's signature and of its (signature, scope) pair, and the function that runs the launch
Launch = tuple[Generations, int, int, int, Callable[..., Any]]


class GraphWatch:
    """A context in which CUDA and HIP graphs and their launches are recorded."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._patches = Patches()
        self._captures: WeakKeyDictionary[Any, GraphCapture] = WeakKeyDictionary()
        self._launches: dict[tuple[int, ThreadMode, Location, bool], Launch] = {}

    def __enter__(self) -> GraphWatch:
        self.recorder.graphs.__enter__()
        for kind, graph in graph_classes():
            self._patches.replace(graph, "capture_begin", functools.partial(self._beginning, kind))
            self._patches.replace(graph, "capture_end", self._ending)
            if hasattr(graph, "replay"):
                self._patches.replace(graph, "replay", functools.partial(self._launching, kind))
        return self

    def __exit__(self, *ignored: object) -> None:
        self._patches.undo()
        self.recorder.graphs.__exit__()

    def _beginning(self, kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(graph, *args, **kwargs)
            try:
                mode = self.recorder.threads.in_step()
                if mode is not None and not mode.idle:
                    device = with_index(torch.device(kind))
                    self._forget(id(graph))
                    self._captures[graph] = self.recorder.templates.begin(graph, device, mode)
                    weakref.finalize(graph, self._forget, id(graph)).atexit = False
            except Exception as error:
                self.recorder.lost.drop("capture of a graph", error)
            return result

        return capture_begin

    def _ending(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def capture_end(graph: Any, *args: Any, **kwargs: Any) -> Any:
            capture = self._captures.pop(graph, None)
            if capture is not None:
                capture.ended_ns = perf_counter_ns()
            return original(graph, *args, **kwargs)

        return capture_end

    def _launching(self, kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
        threads = self.recorder.threads

        @functools.wraps(original)
        def replay(graph: Any, *args: Any, **kwargs: Any) -> Any:
            mode = threads.in_step()
            if mode is None or mode.idle:
                return original(graph, *args, **kwargs)
            try:
                generations, generation, number, pair, run = self._launches[
                    id(graph), mode, mode.place, self.recorder.uses_streams
                ]
                if generations is not self.recorder.generations or generation != generations.current:
                    raise KeyError
            except KeyError:
                launch = self._prepare(kind, original, graph, mode)
                if launch is None:
                    return original(graph, *args, **kwargs)
                *_, number, pair, run = launch
            if self.recorder.write_ahead is not None:
                self.recorder.write_ahead_of(number)
            mode.launched = start = perf_counter_ns()
            # the launch includes its work on the host, such as the update of random seeds
            mode.idle = True
            try:
                result = run(graph, *args, **kwargs)
            finally:
                mode.idle = threads.idle
            mode.rows += (pair, start, perf_counter_ns(), UNPAIRED)
            return result

        return replay

    def _forget(self, graph: int) -> None:
        # another graph may get the id
        for key in [key for key in self._launches if key[0] == graph]:
            del self._launches[key]

    def _prepare(self, kind: str, original: Callable[..., Any], graph: Any, mode: ThreadMode) -> Launch | None:
        recorder = self.recorder
        try:
            device = with_index(torch.device(kind))
            number = recorder.templates.signatures.get(graph)
            if number is None:
                number = recorder.templates.add(graph, device)
                weakref.finalize(graph, self._forget, id(graph)).atexit = False
                kept_graph = kept_graphs.get(graph)
                recorder.pending.add(
                    Graph(number, captured=False) if kept_graph is None else recorder.adopt(kept_graph, number)
                )
            generations, generation = recorder.generations, recorder.generations.current
            _, pair = recorder.scopes.point(number, mode.place, 0)
            run = timed_on(mode, number, original, device, lambda: mode.launched)
            launch = generations, generation, number, pair, run
            self._launches[id(graph), mode, mode.place, recorder.uses_streams] = launch
            return launch
        except Exception as error:
            raise_if_from_program(error)
            recorder.lost.drop("launch of a graph", error)
            return None


# function that records the effect of a function of torch, such as a wait, from that function's result and arguments
Note = Callable[..., None]


class StreamWatch:
    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._patches = Patches()
        self._inside = threading.local()
        self._marks: WeakKeyDictionary[Any, tuple[str, int, int]] = WeakKeyDictionary()

    def __enter__(self) -> StreamWatch:
        self._patches.replace(torch.accelerator, "set_stream", functools.partial(self._noting, self._changed))
        for kind in accelerators():
            module = getattr(torch, kind, None)
            if module is None or not hasattr(module, "set_stream"):
                continue
            self._patches.replace(module, "set_stream", functools.partial(self._noting, self._changed))
            methods_by_class: tuple[tuple[str, dict[str, Note]], ...] = (
                ("Stream", {"record_event": self._marked, "wait_event": self._waited, "wait_stream": self._joined}),
                ("Event", {"record": self._recorded, "wait": self._waited_in}),
            )
            for name, methods in methods_by_class:
                owner = getattr(module, name, None)
                for method, note in methods.items() if isinstance(owner, type) else ():
                    self._patches.replace(owner, method, functools.partial(self._noting, note))
            if is_started(kind):
                self._changed(None, current_stream(with_index(torch.device(kind))))
        return self

    def __exit__(self, *ignored: object) -> None:
        self._patches.undo()

    def _noting(self, note: Note, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            # calls that one wrapped function makes of another are not noted
            if getattr(self._inside, "active", False):
                return original(*args, **kwargs)
            self._inside.active = True
            try:
                result = original(*args, **kwargs)
            finally:
                self._inside.active = False
            try:
                if not is_own_stream():
                    note(result, *args, **kwargs)
            except Exception as error:
                raise_if_from_program(error)
            return result

        return call

    def _changed(self, result: Any, stream: Any) -> None:
        if stream is not None and stream.stream_id != 0 and not self._recorder.uses_streams:
            self._recorder.use_streams()

    def _marked(self, event: Any, stream: Any, *ignored: Any, **others: Any) -> None:
        self._marks[event] = (*_name(stream), perf_counter_ns())

    def _recorded(self, result: Any, event: Any, stream: Any = None) -> None:
        self._marked(event, _here(event) if stream is None else stream)

    def _waited(self, result: Any, stream: Any, event: Any) -> None:
        mark = self._marks.get(event)
        if mark is not None:
            self._add(stream, *mark)

    def _waited_in(self, result: Any, event: Any, stream: Any = None) -> None:
        self._waited(None, _here(event) if stream is None else stream, event)

    def _joined(self, result: Any, stream: Any, other: Any) -> None:
        self._add(stream, *_name(other), perf_counter_ns())

    def _add(self, stream: Any, on_device: str, on_stream: int, until_ns: int) -> None:
        device, number = _name(stream)
        recorder = self._recorder
        if (device, number) != (on_device, on_stream) and not recorder.threads.idle:
            at_ns = perf_counter_ns() - recorder.started_ns
            recorder.pending.add(Wait(at_ns, device, number, on_device, on_stream, until_ns - recorder.started_ns))


def _name(stream: Any) -> tuple[str, int]:
    return str(stream.device), int(stream.stream_id)


def _here(event: Any) -> Any:
    return current_stream(with_index(torch.device(event.device.type)))
