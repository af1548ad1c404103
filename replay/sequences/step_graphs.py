"""Step replay in graphs of the device, such as CUDA graphs: the time of a step without launches from Python.

Consecutive calls become one graph if a graph can contain them. Calls that wait for the device or use memory of the
host, and calls that do not run on the results of earlier calls, run between two graphs. A graph reads and writes the
memory addresses of its capture. Therefore the results of a call between graphs are copied to the addresses of the
results that the call returned during the capture.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from time import perf_counter_ns
from typing import Any

import torch

from opgrip.errors import UserError, one_line
from opgrip.replay.cases.flow import FlowingCall
from opgrip.replay.operators.devices import (
    DeviceLostError,
    check_use,
    graph_class,
    make_event,
    module_of,
    synchronizer,
    without_waiting,
)
from opgrip.replay.operators.memory import Function, tensors_in
from opgrip.replay.sequences.call_timers import HostTimer, Slowdown
from opgrip.replay.sequences.dry_run import REPLAYED, CallPlan, DryRun, switching, tensors_of
from opgrip.replay.sequences.step_memory import reason_of
from opgrip.replay.sequences.step_passes import Pass
from opgrip.replay.sequences.step_results import SequenceResult, SignatureTimes

RunCall = Callable[[DryRun, FlowingCall, CallPlan, HostTimer], None]
# torch's tags of operators whose results the host reads
WAITING_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


@dataclass(frozen=True, slots=True)
class Between:
    """A call that runs between two graphs.

    results : its results during the capture, to which later results are copied
    """

    function: Function
    args: Any
    kwargs: dict[str, Any]
    results: list[torch.Tensor]

    def replay(self) -> None:
        new_results = tensors_of(self.function(*self.args, **self.kwargs))
        for result, tensor in zip(self.results, new_results, strict=False):
            if result.shape == tensor.shape and result.data_ptr() != tensor.data_ptr():
                result.copy_(tensor)


@dataclass(slots=True)
class StepGraphs:
    """Passes over a step in graphs; the first pass captures the graphs.

    begin : restores the state before the first call
    run_call : runs a call and stores its results for later calls
    breaks : indices of the calls that run between graphs
    parts : the graphs, and the calls between them, in order
    """

    begin: Callable[[], None]
    run_call: RunCall
    breaks: set[int] = field(default_factory=set)
    parts: list[Any] = field(default_factory=list)
    _peak_bytes: int = 0
    _stream: Any = None

    def run(self, dry_run: DryRun, device: str, watch: HostTimer, slowdown: Slowdown) -> tuple[Pass, str]:
        """Run and time the step once. Return the pass, and why it failed (empty if it did not).

        dry_run : the step, whose calls are ready to run
        watch : not used, because graphs do not show the times of calls
        slowdown : detects whether the pass was disturbed
        """
        module, synchronize = module_of(device), synchronizer(device)
        self._stream = self._stream or module.Stream(device)
        failure, wall_ns, elapsed_ns = "", 0, 0
        before, after = make_event(device), make_event(device)
        # the caller has restored the step's memory on another stream
        synchronize()
        with module.stream(self._stream):
            try:
                if not self.parts:
                    self._capture(dry_run, device)
                    self.begin()
                synchronize()
                slowdown.begin()
                start = perf_counter_ns()
                before.record(self._stream)
                for part in self.parts:
                    part.replay()
                after.record(self._stream)
                synchronize()
                wall_ns = perf_counter_ns() - start
                elapsed_ns = round(before.elapsed_time(after) * 1e6)
            except Exception as error:
                check_use(device, error)
                failure = reason_of(error)
                self.parts.clear()
        slowdown.end()
        return Pass(
            # of all calls together
            times_ns=[elapsed_ns] + [0] * (len(dry_run.flow.calls) - 1),
            wall_ns=wall_ns,
            peak_bytes=self._peak_bytes,
            slowed=slowdown.is_slowed,
            is_contended=slowdown.is_contended,
        ), failure

    def described(self, dry_run: DryRun, result: SequenceResult) -> SequenceResult:
        """Return the result of these passes without times of single calls, which graphs do not show, and with the
        number of graphs.

        dry_run : the step that was run
        """
        if result.failure:
            return result
        return replace(
            result,
            graphs=sum(not isinstance(part, Between) for part in self.parts),
            between_graphs=len(self.breaks),
            replayed_host_ms=result.replayed_wall_ms,
            replayed_critical_ms=math.nan,
            signatures=tuple(self._rows(dry_run, result.signatures)),
        )

    def _rows(self, dry_run: DryRun, rows: tuple[SignatureTimes, ...]) -> Iterator[SignatureTimes]:
        """Yield the rows without times, each with a note that says whether its calls ran in a graph or between
        graphs.
        """
        between: dict[int, int] = {}
        for place in self.breaks:
            number = dry_run.flow.calls[place].signature
            between[number] = between.get(number, 0) + 1
        for row in rows:
            count = between.get(row.signature, 0)
            note = f"{count} of {row.count} calls between graphs" if count else "in a graph"
            yield SignatureTimes(
                *(row.signature, row.count, row.substituted, row.not_run, row.redrawn, row.status, row.reason),
                note=note if row.count > row.not_run else "",
            )

    def _capture(self, dry_run: DryRun, device: str) -> None:
        """Run all calls of the step (`dry_run`) once, and capture them in graphs."""
        module, synchronize = module_of(device), synchronizer(device)
        kind = graph_class(device)
        if kind is None:
            raise UserError(f"{device} does not support graphs", "leave out --exec-mode graph")
        self._find_breaks(dry_run, device)
        handle = getattr(module, "graph_pool_handle", None)
        pool = () if handle is None else (handle(),)
        self.begin()
        synchronize()
        module.reset_peak_memory_stats(device)
        at_start, graph, watch = module.memory_allocated(device), None, HostTimer({})
        try:
            with switching() as use:
                for place, (call, plan) in enumerate(zip(dry_run.flow.calls, dry_run.plans, strict=True)):
                    use(call.settings)
                    is_between = place in self.breaks
                    if graph is None and (not is_between or plan.redrawn):
                        graph = kind()
                        graph.capture_begin(*pool)
                    if not is_between:
                        self.run_call(dry_run, call, plan, watch)
                    else:
                        if plan.redrawn:
                            # also part of the graph, so that each pass draws them again
                            dry_run.redraw(call, plan)
                        self._end(graph, synchronize)
                        graph = None
                        self._run_between(dry_run, call, plan)
                    dry_run.memory.drop(call.over)
            self._end(graph, synchronize)
        except Exception as error:
            if graph is not None:
                with suppress(Exception):
                    graph.capture_end()
            raise DeviceLostError(f"the call cannot be captured in a graph: {one_line(error)}") from error
        self._peak_bytes = module.max_memory_allocated(device) - at_start

    def _end(self, graph: Any, synchronize: Callable[[], None]) -> None:
        """End the capture of a graph, run the graph once, and add it to `parts`; do nothing if `graph` is None."""
        if graph is not None:
            graph.capture_end()
            graph.replay()
            synchronize()
            self.parts.append(graph)

    def _run_between(self, dry_run: DryRun, call: FlowingCall, plan: CallPlan) -> None:
        if plan.prepared is None:
            dry_run.pass_on_results(call, plan, None)
            return
        function = plan.prepared.function
        args, kwargs = plan.prepared.arguments(dry_run.memory, call.inputs)
        result = function(*args, **kwargs)
        dry_run.pass_on_results(call, plan, result)
        self.parts.append(Between(function, args, kwargs, tensors_of(result) if plan.status == REPLAYED else []))

    def _find_breaks(self, dry_run: DryRun, device: str) -> None:
        """Find the calls of the step (`dry_run`) that a graph cannot contain, by a pass on the stream on which graphs
        are captured.
        """
        kind = torch.device(device).type
        self.breaks.clear()
        self.begin()
        watch = HostTimer({})
        with switching() as use:
            for place, (call, plan) in enumerate(zip(dry_run.flow.calls, dry_run.plans, strict=True)):
                use(call.settings)
                if plan.status != REPLAYED or plan.prepared is None or _uses_host(dry_run, call, plan, kind):
                    self.breaks.add(place)
                    self.run_call(dry_run, call, plan, watch)
                else:
                    try:
                        with without_waiting(device):
                            self.run_call(dry_run, call, plan, watch)
                    except RuntimeError as error:
                        check_use(device, error)
                        self.breaks.add(place)
                        self.run_call(dry_run, call, plan, watch)
                live = dry_run.memory.live
                if any(number in live and live[number].device.type != kind for number in call.outputs):
                    self.breaks.add(place)
                dry_run.memory.drop(call.over)


def _uses_host(dry_run: DryRun, call: FlowingCall, plan: CallPlan, kind: str) -> bool:
    """Return True if the operator of a call always waits for the device, or if the call takes a tensor on another
    device.
    """
    assert plan.prepared is not None
    function = plan.prepared.function
    args, kwargs = plan.prepared.arguments(dry_run.memory, call.inputs)
    tensors = tensors_in([list(args), kwargs])
    if isinstance(function, torch._ops.OpOverload) and not WAITING_TAGS.isdisjoint(function.tags):
        # an index has the tag, but its results vary only with masks
        has_mask = any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors)
        if has_mask or not call.op.startswith("aten.index."):
            return True
    return any(tensor.device.type != kind and tensor.dim() > 0 for tensor in tensors)
