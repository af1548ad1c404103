"""Recording of CUDA and HIP graphs: the calls of each graph's capture, once, and each launch as one call."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any
from weakref import WeakKeyDictionary

import torch

from opgrip.capture.hooks.wrapped_operators import timed_on
from opgrip.capture.program.accelerators import graph_classes, with_index
from opgrip.capture.program.patches import Patches
from opgrip.capture.program.places import Location
from opgrip.capture.recording.graph_templates import GraphCapture, kept_graphs
from opgrip.capture.recording.recorder import Recorder
from opgrip.capture.recording.scope_table import Generations
from opgrip.capture.recording.thread_mode import UNPAIRED, ThreadMode
from opgrip.errors import raise_if_from_program
from opgrip.traces.schema.accelerator_records import Graph

# what a launch of a graph needs: the counter of times that the recording's tables were cleared and its value, the
# numbers of the launch's signature and of its (signature, scope) pair, and the function that runs the launch
Launch = tuple[Generations, int, int, int, Callable[..., Any]]


class GraphWatch:
    """A context in which the calls in each capture of a CUDA graph are recorded once, and each launch as one call.

    If the capture of a graph was seen neither by this recording nor by a `GraphKeeper`, the trace has the graph's
    launches, but not the calls in the graph.
    """

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
            run = timed_on(recorder, mode, number, original, device, lambda: mode.launched)
            launch = generations, generation, number, pair, run
            self._launches[id(graph), mode, mode.place, recorder.uses_streams] = launch
            return launch
        except Exception as error:
            raise_if_from_program(error)
            recorder.lost.drop("launch of a graph", error)
            return None
