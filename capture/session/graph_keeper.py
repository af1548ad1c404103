"""The calls of CUDA graphs that a program captures before a recording begins."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from weakref import WeakKeyDictionary

import torch

from opgrip.capture.hooks.compiled import CompiledWatch, OpaqueMode
from opgrip.capture.hooks.extensions import TritonWatch
from opgrip.capture.hooks.scopes import ScopeWatch
from opgrip.capture.program.accelerators import graph_classes
from opgrip.capture.program.capture_choices import OPAQUE
from opgrip.capture.program.environment import describe_autocast
from opgrip.capture.program.patches import Patches
from opgrip.capture.recording.graph_templates import KeptGraph, kept_graphs
from opgrip.capture.recording.recorder import Recorder
from opgrip.capture.writing.blocks import Blocks
from opgrip.errors import raise_if_from_program
from opgrip.platform import perf_counter_ns
from opgrip.traces.schema.records import Context, Graph, Scope, Signature


class GraphKeeper:
    """A context that keeps the calls of CUDA and HIP graphs as long as the graphs exist."""

    def __init__(self) -> None:
        self._recorder = Recorder(OpaqueMode)
        self._patches = Patches()
        self._captures: WeakKeyDictionary[Any, ExitStack] = WeakKeyDictionary()
        self._free = threading.Lock()

    def __enter__(self) -> GraphKeeper:
        self._recorder.set_idle(True)
        for kind, graph in graph_classes():
            self._patches.replace(graph, "capture_begin", functools.partial(self._beginning, kind))
            self._patches.replace(graph, "capture_end", self._ending)
        return self

    def __exit__(self, *ignored: object) -> None:
        self._patches.undo()

    def _beginning(self, kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(graph, *args, **kwargs)
            try:
                kept_graphs.pop(graph, None)
                # of two graphs that are captured at the same time, one is kept
                if self._free.acquire(blocking=False):
                    try:
                        self._begin(graph, torch.device(kind))
                    except BaseException:
                        self._free.release()
                        raise
            except Exception as error:
                raise_if_from_program(error)
            return result

        return capture_begin

    def _begin(self, graph: Any, device: torch.device) -> None:
        recorder = self._recorder
        with ExitStack() as hooks:
            recorder.begin()
            hooks.enter_context(ScopeWatch(recorder, None))
            hooks.enter_context(TritonWatch(recorder))
            if "torch._inductor.output_code" in sys.modules:
                hooks.enter_context(CompiledWatch(recorder, OPAQUE))
            hooks.callback(recorder.set_idle, True)
            recorder.set_idle(False)
            mode = recorder.threads.here()
            mode.set_autocast(describe_autocast())
            mode.check_settings()
            hooks.enter_context(mode)
            capture = recorder.templates.begin(graph, device, mode)
            self._captures[graph] = hooks.pop_all()
            self._captures[graph].callback(lambda: setattr(capture, "ended_ns", perf_counter_ns()))

    def _ending(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def capture_end(graph: Any, *args: Any, **kwargs: Any) -> Any:
            hooks = self._captures.pop(graph, None)
            if hooks is None:
                return original(graph, *args, **kwargs)
            with ExitStack() as stages:
                stages.callback(self._keep, graph)
                stages.push(hooks)
            return original(graph, *args, **kwargs)

        return capture_end

    def _keep(self, graph: Any) -> None:
        try:
            # the other calls, on the host, ran once and belong to no graph
            blocks = Blocks(self._recorder, looks=False)
            for block in blocks.take():
                blocks.pass_over(block)
            records = {
                (type(record), getattr(record, "number", None)): record
                for record, _ in self._recorder.pending.take()
                if isinstance(record, Signature | Scope | Context | Graph)
            }
            record = records.get((Graph, None))
            if isinstance(record, Graph):
                kept_graphs[graph] = KeptGraph(record, records, self._recorder.signatures.keys())
            self._recorder.storages.close()
        except Exception as error:
            raise_if_from_program(error)
        finally:
            self._free.release()
