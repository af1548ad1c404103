"""Step replay: runs all calls of a trace in order, each on the results of earlier calls, and measures time and
memory.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from math import fsum
from time import perf_counter_ns, sleep
from typing import Any

import msgspec
import numpy as np
import torch

from opgrip.cli.command import counted
from opgrip.cli.progress import ProgressCallback, ignore_progress
from opgrip.errors import UserError, one_line
from opgrip.platform.sandbox import IDLE, Ended, Heartbeat, answer, receive_request
from opgrip.replay.cases.flow import FlowingCall, NewMemory, make_flow, new_memory
from opgrip.replay.cases.selection import no_calls
from opgrip.replay.inputs.filling import trace_with_defaults
from opgrip.replay.modes import EAGER
from opgrip.replay.operators.devices import (
    DeviceLostError,
    check_use,
    graph_class,
    is_accelerator,
    make_event,
    module_of,
    synchronizer,
    use_device,
    without_waiting,
)
from opgrip.replay.operators.memory import Function, limit_memory, tensors_in
from opgrip.replay.results.judgement import CandidateColumns, JudgedStep, saving_in_words
from opgrip.replay.run.request import RunRequest
from opgrip.replay.run.worker import WorkloadChild, end_without_device
from opgrip.replay.run.workload import Workload, load_workload
from opgrip.replay.sequences.call_timers import (
    CallTimer,
    DeviceClockTimer,
    HostTimer,
    SequenceSettings,
    sequence_settings,
    typical_ns,
)
from opgrip.replay.sequences.dry_run import (
    NOTHING_EXCLUDED,
    REPLAYED,
    CallPlan,
    DryRun,
    Excluded,
    switching,
    tensors_of,
)
from opgrip.replay.sequences.step_memory import StepMemory, plan_streams, reason_of, room_on
from opgrip.replay.sequences.step_passes import Pass, Passes, RunPass, in_pairs, paired_saving, run_call, run_timed
from opgrip.replay.sequences.step_results import SequenceResult, SignatureTimes, make_result, under_mode
from opgrip.replay.timing import pages
from opgrip.replay.timing.disturbances import PassWatch
from opgrip.replay.timing.rounds import NO_ROW, QUIET_S, RETRY_NS, Announce, no_garbage_collection
from opgrip.traces import Trace

RunCall = Callable[[DryRun, FlowingCall, CallPlan, HostTimer], None]
# torch's tags of operators whose results the host reads
WAITING_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


@dataclass(frozen=True, slots=True)
class Between:
    """A call that runs between two graphs.

    results : the tensors that it returned when the graphs were captured; its later results are copied to them
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
    """Replays a step as graphs of the device, such as CUDA graphs; the first replay captures them.

    breaks : indices of the calls that run between graphs
    """

    begin: Callable[[], None]
    run_call: RunCall
    breaks: set[int] = field(default_factory=set)
    parts: list[Any] = field(default_factory=list)
    _peak_bytes: int = 0
    _stream: Any = None

    def run(self, dry_run: DryRun, device: str, timer: HostTimer, watch: PassWatch) -> tuple[Pass, str]:
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
                watch.begin()
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
        watch.end()
        return Pass(
            # of all calls together
            times_ns=[elapsed_ns] + [0] * (len(dry_run.flow.calls) - 1),
            wall_ns=wall_ns,
            peak_bytes=self._peak_bytes,
            slowed=watch.is_slowed,
            is_contended=watch.is_contended,
        ), failure

    def described(self, dry_run: DryRun, result: SequenceResult) -> SequenceResult:
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
        between: dict[int, int] = {}
        for index in self.breaks:
            number = dry_run.flow.calls[index].signature
            between[number] = between.get(number, 0) + 1
        for row in rows:
            count = between.get(row.signature, 0)
            note = f"{count} of {row.count} calls between graphs" if count else "in a graph"
            yield SignatureTimes(
                *(row.signature, row.count, row.substituted, row.not_run, row.redrawn, row.status, row.reason),
                note=note if row.count > row.not_run else "",
            )

    def _capture(self, dry_run: DryRun, device: str) -> None:
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
        at_start, graph, timer = module.memory_allocated(device), None, HostTimer({})
        try:
            with switching() as use:
                for index, (call, plan) in enumerate(zip(dry_run.flow.calls, dry_run.plans, strict=True)):
                    use(call.settings)
                    is_between = index in self.breaks
                    if graph is None and (not is_between or plan.refilled):
                        graph = kind()
                        graph.capture_begin(*pool)
                    if not is_between:
                        self.run_call(dry_run, call, plan, timer)
                    else:
                        if plan.refilled:
                            # also part of the graph, so that each pass draws them again
                            dry_run.refill(call, plan)
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
        kind = torch.device(device).type
        self.breaks.clear()
        self.begin()
        timer = HostTimer({})
        with switching() as use:
            for index, (call, plan) in enumerate(zip(dry_run.flow.calls, dry_run.plans, strict=True)):
                use(call.settings)
                if plan.status != REPLAYED or plan.prepared is None or _uses_host(dry_run, call, plan, kind):
                    self.breaks.add(index)
                    self.run_call(dry_run, call, plan, timer)
                else:
                    try:
                        with without_waiting(device):
                            self.run_call(dry_run, call, plan, timer)
                    except RuntimeError as error:
                        check_use(device, error)
                        self.breaks.add(index)
                        self.run_call(dry_run, call, plan, timer)
                live = dry_run.memory.live
                if any(number in live and live[number].device.type != kind for number in call.outputs):
                    self.breaks.add(index)
                dry_run.memory.drop(call.over)


def _uses_host(dry_run: DryRun, call: FlowingCall, plan: CallPlan, kind: str) -> bool:
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


DRY_RUNS = 2  # minimum number of runs of a step that a dry run makes
FEWEST, MOST = 3, 100  # minimum and maximum number of timed passes if no number is requested
# numbers of timed pairs of passes at which more can turn out unnecessary, if a mode is compared with eager
PAIRS = (10, 16, 24, 36, 54, 81, 122, 183, 275, 413, 620, 930)
PRECISE = 0.003  # half of a saving's 95 % interval, as a share of the step, below which no more pairs are necessary
MOST_DROPPED = 3 * FEWEST  # passes that are repeated because others used the cores, if no number is requested
MOST_FAILURES = 20  # maximum number of calls that fail after the dry run or end a process before a replay gives up
MOST_CAPTURES = 2  # times that a step is captured in graphs if captures fail: a dry run changes little about it


@contextmanager
def opened_step(
    trace: Trace, settings: SequenceSettings, excluded: Excluded, announce: Announce
) -> Iterator[tuple[Trace, DryRun]]:
    """Yield the trace with values for all arguments, and a dry run of its calls; random numbers are restored after."""
    if trace.own_calls.empty:
        raise no_calls(trace)
    trace = trace_with_defaults(trace)
    flow = make_flow(trace, settings.device)
    room = room_on(settings.device) if settings.room_bytes is None else settings.room_bytes
    with own_randomness(settings.device):
        memory = StepMemory(flow.needs, flow.outside, trace.values, settings.place, settings.seed, room)
        yield trace, DryRun(flow, memory, trace.values, settings, excluded, announce)


def replay_sequence(
    trace: Trace,
    settings: SequenceSettings,
    on_progress: ProgressCallback = ignore_progress,
    excluded: Excluded = NOTHING_EXCLUDED,
    announce: Announce = lambda number, row: None,
) -> SequenceResult:
    """Run all calls of a trace in start order in one thread, and return their times and memory.

    excluded : row status and reason of calls that must not run, by signature number
    announce : called with the signature number before each call
    """
    with opened_step(trace, settings, excluded, announce) as (trace, dry_run):
        flow = dry_run.flow
        if settings.in_graphs:
            graphs = StepGraphs(beginning(dry_run, settings), run_call)
            passes = measure_passes(dry_run, {}, settings, on_progress, graphs.run)
            result = make_result(trace, flow, dry_run.plans, passes, Passes(), settings.device)
            return graphs.described(dry_run, result)
        dry_run.streams = plan_streams(trace, flow, settings.device)
        on_cpu = pages.CONTROLLED and torch.device(settings.device).type == "cpu"
        run_pass = in_pairs(beginning(dry_run, settings)) if settings.in_pairs else run_timed
        on_host = measure_passes(dry_run, new_memory(trace, flow) if on_cpu else {}, settings, on_progress, run_pass)
        on_device = _measure_on_device(dry_run, settings, on_host.kept, on_progress, run_pass)
    result = make_result(trace, flow, dry_run.plans, on_host, on_device, settings.device)
    if settings.in_pairs:
        in_mode = {number for number, own in dry_run.programs.items() if own.program is not None}
        own = {index: call.signature for index, call in enumerate(flow.calls) if call.signature in in_mode}
        saved = None if result.failure else paired_saving(on_device.kept or on_host.kept, own)
        result = replace(result, saved=saved)
    if dry_run.streams is not None:
        # the sum of the calls' times is not the time of the step, because calls on different streams overlap
        walls = result.replayed_wall_ms
        result = replace(result, streams=dry_run.streams.count, replayed_ms=walls)
    return result if settings.mode == EAGER else under_mode(result, settings.mode, dry_run.programs)


def measure_passes(
    dry_run: DryRun,
    memory: Mapping[int, NewMemory],
    settings: SequenceSettings,
    on_progress: ProgressCallback,
    run_pass: RunPass,
) -> Passes:
    """Complete the dry run, and time runs of the whole step until there are enough."""
    if memory:
        pages.keep_freed_memory()
    begin = beginning(dry_run, settings)
    _settle(dry_run, begin, settings, on_progress)
    timed, untimed = Passes(), settings.warmup - DRY_RUNS
    most_failures = MOST_CAPTURES if settings.in_graphs else MOST_FAILURES
    with no_garbage_collection(), closing(PassWatch(dry_run.processes)) as watch:
        started = perf_counter_ns()
        while True:
            more = _wants_more(timed, perf_counter_ns() - started, settings) and timed.failures < most_failures
            if more and watch.is_contended:
                _wait_until_quiet(dry_run, watch, timed, started, settings)
            on_progress("timed runs", len(timed.kept), settings.repeats or max(FEWEST, len(timed.kept) + 1))
            if not dry_run.begins_pass(more, begin):
                break
            one, failure = run_pass(dry_run, settings.device, HostTimer(memory), watch)
            may_repeat = dry_run.is_first and _may_drop(timed, perf_counter_ns() - started, settings)
            failed, slowed, contended, drops = dry_run.most(bool(failure), one.slowed, one.is_contended, may_repeat)
            if failed:
                # values differ between passes: find out again which calls can run
                timed.fail(failure or "a call of another rank")
                _settle(dry_run, begin, settings, on_progress)
            elif untimed > 0:
                untimed -= 1
            else:
                timed.add(replace(one, slowed=bool(slowed), is_contended=bool(contended)), bool(drops))
    timed.settle()
    return timed


def _wait_until_quiet(
    dry_run: DryRun, watch: PassWatch, timed: Passes, started_ns: int, settings: SequenceSettings
) -> None:
    while not watch.has_room:
        spent_ns = perf_counter_ns() - started_ns
        if not _may_drop(timed, spent_ns, settings) or timed.waited_ns >= max(RETRY_NS, spent_ns - timed.waited_ns):
            return
        # without this, the supervisor takes the wait for a hanging call
        dry_run.announce(dry_run.flow.calls[0].signature, NO_ROW)
        sleep(QUIET_S)
        timed.waited_ns += perf_counter_ns() - started_ns - spent_ns


def _settle(
    dry_run: DryRun, begin: Callable[[], None], settings: SequenceSettings, on_progress: ProgressCallback
) -> None:
    dry_run.settle(begin, on_progress)
    if settings.mode != EAGER:
        dry_run.make_programs(on_progress)


def _measure_on_device(
    dry_run: DryRun,
    settings: SequenceSettings,
    passes: Sequence[Pass],
    on_progress: ProgressCallback,
    run_pass: RunPass,
) -> Passes:
    # separate passes, because timing with this clock delays the accelerator
    timed = Passes()
    if not is_accelerator(settings.device) or not passes:
        return timed
    begin, device = beginning(dry_run, settings), settings.device
    launch_ns = typical_ns([one.times_ns for one in passes])
    is_measured = False
    count = min(FEWEST, settings.repeats or FEWEST)
    with no_garbage_collection(), closing(PassWatch()) as watch:
        started = perf_counter_ns()
        while _lacks_passes(timed, count - timed.failures, perf_counter_ns() - started, settings):
            on_progress("runs timed by the device", len(timed.kept), count)
            begin()
            # in the other passes, a call that waits for the device waits for all calls before it
            timer: CallTimer = HostTimer({}, synchronizer(device))
            if is_measured:
                timer = DeviceClockTimer(device, launch_ns)
            one, failure = run_pass(dry_run, device, timer, watch)
            if failure:
                timed.fail(failure)
            elif not is_measured:
                launch_ns, is_measured = list(map(min, launch_ns, one.launch_ns)), True
            else:
                # other work on the host does not change times by the device's clock
                timed.kept.append(replace(one, is_contended=False, contended_calls=frozenset()))
    return timed


def beginning(dry_run: DryRun, settings: SequenceSettings) -> Callable[[], None]:
    def begin() -> None:
        dry_run.begin()
        _set_seed(settings.device, settings.seed)

    return begin


def _wants_more(timed: Passes, spent_ns: int, settings: SequenceSettings) -> bool:
    passes = timed.kept
    if settings.repeats is not None or len(passes) < FEWEST:
        return _lacks_passes(timed, settings.repeats or FEWEST, spent_ns, settings)
    if spent_ns > settings.budget_s * 1e9 or len(passes) >= (PAIRS[-1] if settings.in_pairs else MOST):
        return False
    if settings.in_pairs:
        return len(passes) not in PAIRS or paired_saving(passes, {}).error > PRECISE
    by_calls = settings.in_graphs or torch.device(settings.device).type == "cpu"
    times_ns = [sum(one.times_ns) if by_calls else one.wall_ns for one in passes]
    low, middle, high = np.quantile(times_ns, (0.25, 0.5, 0.75))
    return bool(high - low > settings.precision * middle)


def _lacks_passes(timed: Passes, count: int, spent_ns: int, settings: SequenceSettings) -> bool:
    missing = count - len(timed.kept)
    return missing > 0 and (_may_drop(timed, spent_ns, settings) or len(timed.contended) < missing)


def _may_drop(timed: Passes, spent_ns: int, settings: SequenceSettings) -> bool:
    usual = FEWEST if is_accelerator(settings.device) else MOST_DROPPED
    most = usual if settings.repeats is None else settings.repeats
    return timed.dropped + len(timed.contended) < most and spent_ns <= settings.budget_s * 1e9


@contextmanager
def own_randomness(device: str) -> Iterator[None]:
    count = module_of(device).device_count() if is_accelerator(device) else 0
    with torch.random.fork_rng(range(count), device_type=torch.device(device).type):
        yield


def _set_seed(device: str, seed: int) -> None:
    # not torch.manual_seed, which also seeds accelerators that are not used here
    torch.default_generator.manual_seed(seed)
    if is_accelerator(device):
        module_of(device).manual_seed_all(seed)


MODULE = "opgrip.replay.sequences.step_replay"


Answer = Callable[[Workload, Excluded, Heartbeat, int], None]


def replay_apart(
    workload: Workload, on_progress: ProgressCallback = ignore_progress, may_fork: bool = True
) -> SequenceResult:
    return msgspec.convert(run_apart(workload, _answer, MODULE, on_progress, may_fork), SequenceResult)


def run_apart(
    workload: Workload, answer_with: Answer, module: str, on_progress: ProgressCallback, may_fork: bool
) -> Any:
    """Replay a step in a child process; if a call ends the process, replay again without the calls of its signature.

    answer_with : function that replays the step and writes its result; `module` calls it if the process is not a fork
    """
    excluded: dict[int, tuple[str, str]] = {}

    def run(_: int, output: int, heartbeat: Heartbeat) -> None:
        answer_with(workload, excluded, heartbeat, output)

    while True:
        with WorkloadChild(workload, may_fork, run, module, {"excluded": list(excluded.items())}) as child:
            result = child.result(on_progress)
        if not isinstance(result, Ended):
            return result
        if result.item == IDLE or result.item in excluded or len(excluded) == MOST_FAILURES:
            raise UserError("the process that runs the calls cannot continue", result.reason)
        excluded[result.item] = result.status, result.reason


def _answer(workload: Workload, excluded: Excluded, heartbeat: Heartbeat, output: int) -> None:
    settings = limited_settings(workload)
    answer(
        lambda on_progress: asdict(replay_sequence(workload.trace, settings, on_progress, excluded, heartbeat.enter)),
        output,
    )


def limited_settings(workload: Workload) -> SequenceSettings:
    settings = sequence_settings(workload)
    if not is_accelerator(settings.device):
        limit_memory(settings.room_bytes, settings.device)
    return settings


def serve_apart(answer_with: Answer) -> int:
    request, heartbeat, output = receive_request()
    # the parent reports the last line that a dying process writes as the reason
    warnings.simplefilter("ignore")
    workload = load_workload(RunRequest.from_plain(request["request"]))
    use_device(workload.device)
    try:
        try:
            answer_with(workload, dict(request["excluded"]), heartbeat, output)
        except Exception as error:
            # if the device is lost, restoring its random state has raised this error instead
            check_use(workload.device, error)
            raise
    except DeviceLostError as error:
        end_without_device(error)
    return 0


@dataclass(frozen=True, slots=True)
class Confirmation:
    """The share of a step's replayed time that candidates save.

    saving : saved share of the step's time
    error : half of the 95 % interval of `saving`
    own_saving, own_error : part of `saving` in the calls of candidates, and half of its 95 % interval
    share : share of the replayed step's time that the calls of candidates take in eager
    estimated : saving in the recorded step that is estimated from single calls
    estimated_here : the same estimate for the replayed step, in which calls take other shares of the time
    """

    saving: float
    error: float
    own_saving: float
    own_error: float
    share: float
    calls: int
    passes: int
    estimated: float | None = None
    estimated_here: float | None = None

    @property
    def line(self) -> str:
        estimated = ""
        if self.estimated is not None and self.estimated_here is not None:
            estimated = f"; estimated from single calls: {saving_in_words(self.estimated_here)}"
            estimated += f", {saving_in_words(self.estimated)} of the recorded step"
        return (
            f"confirmed by a replay of the whole step in {counted(self.passes, 'pass', 'passes')}: "
            f"{saving_in_words(self.saving, self.error)} of it, {saving_in_words(self.own_saving, self.own_error)} in "
            f"{counted(self.calls, 'call')} of candidates, which take {100 * self.share:.1f} % without them{estimated}"
        )


def confirm(workload: Workload, judged: JudgedStep | None, on_progress: ProgressCallback) -> Confirmation:
    """Replay the whole step with and without the candidates in turn; return what they save."""
    step = replay_apart(workload, on_progress, may_fork=False)
    if step.saved is None:
        raise UserError("the whole step cannot be replayed with the candidates", step.failure)
    saved = step.saved
    confirmation = Confirmation(
        saving=saved.saving,
        error=saved.error,
        own_saving=saved.own_saving,
        own_error=saved.own_error,
        share=fsum(share for _, share in saved.shares),
        calls=step.calls - step.unsupported - step.in_eager,
        passes=len(step.replayed_ms),
    )
    if judged is None:
        return confirmation
    return replace(confirmation, estimated=judged.saving, estimated_here=_scaled(judged, dict(saved.shares), workload))


def _scaled(judged: JudgedStep, shares: Mapping[int, float], workload: Workload) -> float:
    numbers = {case.number: case.trace_number for case in workload.cases}
    columns = [(shares.get(numbers[row.case], 0.0), CandidateColumns.of(row)) for row in judged.rows]
    return fsum(share * (item.step_saving or 0.0) / item.step_share for share, item in columns if item.step_share)


if __name__ == "__main__":
    sys.exit(serve_apart(_answer))
