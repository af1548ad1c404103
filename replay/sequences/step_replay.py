"""Step replay: runs all calls of a trace in order, each on the results of earlier calls, and measures time and memory.

A dry run determines how each call runs. Then passes over all calls are timed until the times are precise enough; on an
accelerator, more passes are timed with its clock. If a call fails in a timed pass, the dry run is repeated.

`replay_apart` does this in a separate process, so that a call that crashes, hangs or makes the device unusable does not
end the replay. The process is a fork, or `python -m opgrip.replay.sequences.step_replay` with its request on stdin.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from time import perf_counter_ns, sleep

import msgspec
import numpy as np
import torch

from opgrip.cli.progress import ProgressCallback, ignore_progress
from opgrip.errors import UserError
from opgrip.platform.heartbeat import IDLE, Heartbeat
from opgrip.platform.sandbox import Ended, answer, receive_request
from opgrip.replay.cases.flow import NewMemory, make_flow, new_memory
from opgrip.replay.cases.selection import no_calls
from opgrip.replay.inputs.input_options import trace_with_defaults
from opgrip.replay.modes import EAGER
from opgrip.replay.operators.devices import (
    DeviceLostError,
    check_use,
    is_accelerator,
    module_of,
    synchronizer,
    use_device,
)
from opgrip.replay.operators.memory import limit_memory
from opgrip.replay.run.request import RunRequest
from opgrip.replay.run.workload import Workload, load_workload
from opgrip.replay.sequences.call_timers import (
    CallTimer,
    DeviceClockTimer,
    HostTimer,
    SequenceSettings,
    Slowdown,
    sequence_settings,
    typical_ns,
)
from opgrip.replay.sequences.dry_run import NOTHING_EXCLUDED, DryRun, Excluded
from opgrip.replay.sequences.step_graphs import StepGraphs
from opgrip.replay.sequences.step_memory import StepMemory, room_on
from opgrip.replay.sequences.step_passes import Pass, Passes, RunPass, in_pairs, paired_saving, run_call, run_timed
from opgrip.replay.sequences.step_results import SequenceResult, make_result, under_mode
from opgrip.replay.sequences.step_streams import plan_streams
from opgrip.replay.timing import pages
from opgrip.replay.timing.rounds import NO_ROW, QUIET_S, RETRY_NS, Announce, no_garbage_collection
from opgrip.replay.workers.worker import end_without_device, start_child
from opgrip.traces import Trace

FEWEST, MOST = 3, 100  # minimum and maximum number of timed passes if no number is requested
# numbers of timed pairs of passes at which more can turn out unnecessary, if a mode is compared with eager
PAIRS = (10, 16, 24, 36, 54, 81, 122, 183, 275, 413, 620, 930)
# half of the 95 % interval of a saving, as a share of the step, below which no more pairs are necessary
PRECISE = 0.003
# maximum number of passes that are repeated because others used the cores, within the time budget; if a number of
# passes is requested, that number is the maximum
MOST_DROPPED = 3 * FEWEST
MOST_FAILURES = 20  # maximum number of calls that fail after the dry run or end a process before a replay gives up
# maximum number of times that a step is captured in graphs if the captures fail: a dry run changes little about it
MOST_CAPTURES = 2


def replay_sequence(
    trace: Trace,
    settings: SequenceSettings,
    on_progress: ProgressCallback = ignore_progress,
    excluded: Excluded = NOTHING_EXCLUDED,
    announce: Announce = lambda number, row: None,
) -> SequenceResult:
    """Run all calls of a trace in start order in one thread, and return their times and memory. Report the progress
    outside timed regions.

    excluded : row status and reason of calls that must not run, by signature number
    announce : called with the signature number before each call
    Raises `UserError` if the trace contains no calls.
    """
    if trace.own_calls.empty:
        raise no_calls(trace)
    trace = trace_with_defaults(trace)
    flow = make_flow(trace, settings.device)
    room = room_on(settings.device) if settings.room_bytes is None else settings.room_bytes
    with own_randomness(settings.device):
        memory = StepMemory(flow.needs, flow.outside, trace.values, settings.place, settings.seed, room)
        dry_run = DryRun(flow, memory, trace.values, settings, excluded, announce)
        if settings.in_graphs:
            graphs = StepGraphs(_beginning(dry_run, settings), run_call)
            passes = measure_passes(dry_run, {}, settings, on_progress, graphs.run)
            result = make_result(trace, flow, dry_run.plans, passes, Passes(), settings.device)
            return graphs.described(dry_run, result)
        dry_run.streams = plan_streams(trace, flow, settings.device)
        on_cpu = pages.CONTROLLED and torch.device(settings.device).type == "cpu"
        run_pass = in_pairs(_beginning(dry_run, settings)) if settings.in_pairs else run_timed
        on_host = measure_passes(dry_run, new_memory(trace, flow) if on_cpu else {}, settings, on_progress, run_pass)
        on_device = _measure_on_device(dry_run, settings, on_host.kept, on_progress, run_pass)
    result = make_result(trace, flow, dry_run.plans, on_host, on_device, settings.device)
    if settings.in_pairs:
        in_mode = {number for number, own in dry_run.programs.items() if own.program is not None}
        own = {place: call.signature for place, call in enumerate(flow.calls) if call.signature in in_mode}
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
    """Complete the dry run, and time passes with the host's clock until the times are precise enough.

    memory : newly mapped memory that results of calls should get, by index of the call
    run_pass : function that runs and times one pass, such as `run_timed`
    """
    if memory:
        pages.keep_freed_memory()
    begin = _beginning(dry_run, settings)
    _settle(dry_run, begin, settings, on_progress)
    timed = Passes()
    most_failures = MOST_CAPTURES if settings.in_graphs else MOST_FAILURES
    with no_garbage_collection(), closing(Slowdown(dry_run.processes)) as slowdown:
        started = perf_counter_ns()
        while True:
            more = _wants_more(timed, perf_counter_ns() - started, settings) and timed.failures < most_failures
            if more and slowdown.is_contended:
                _wait_until_quiet(dry_run, slowdown, timed, started, settings)
            on_progress("timed runs", len(timed.kept), settings.repeats or max(FEWEST, len(timed.kept) + 1))
            if not dry_run.begins_pass(more, begin):
                break
            one, failure = run_pass(dry_run, settings.device, HostTimer(memory), slowdown)
            may_repeat = dry_run.is_first and _may_drop(timed, perf_counter_ns() - started, settings)
            failed, slowed, contended, drops = dry_run.most(bool(failure), one.slowed, one.is_contended, may_repeat)
            if failed:
                # values differ between passes: find out again which calls can run
                timed.fail(failure or "a call of another rank")
                _settle(dry_run, begin, settings, on_progress)
            else:
                timed.add(replace(one, slowed=bool(slowed), is_contended=bool(contended)), bool(drops))
    timed.settle()
    return timed


def _wait_until_quiet(
    dry_run: DryRun, slowdown: Slowdown, timed: Passes, started_ns: int, settings: SequenceSettings
) -> None:
    """Wait until other processes leave enough cores free, as long as the budget and `timed` (passes so far) allow."""
    while not slowdown.has_room:
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
    """Time passes with an accelerator's clock; on the CPU, time none. These are separate passes, because timing with
    this clock delays the accelerator.
    """
    timed = Passes()
    if not is_accelerator(settings.device) or not passes:
        return timed
    begin, device = _beginning(dry_run, settings), settings.device
    launch_ns = typical_ns([one.times_ns for one in passes])
    is_measured = False
    count = min(FEWEST, settings.repeats or FEWEST)
    with no_garbage_collection(), closing(Slowdown()) as slowdown:
        started = perf_counter_ns()
        while _lacks_passes(timed, count - timed.failures, perf_counter_ns() - started, settings):
            on_progress("runs timed by the device", len(timed.kept), count)
            begin()
            # in the other passes, a call that waits for the device waits for all calls before it
            watch: CallTimer = HostTimer({}, synchronizer(device))
            if is_measured:
                watch = DeviceClockTimer(device, launch_ns)
            one, failure = run_pass(dry_run, device, watch, slowdown)
            if failure:
                timed.fail(failure)
            elif not is_measured:
                launch_ns, is_measured = list(map(min, launch_ns, one.launch_ns)), True
            else:
                # other work on the host does not change times by the device's clock
                timed.kept.append(replace(one, is_contended=False, contended_calls=frozenset()))
    return timed


def _beginning(dry_run: DryRun, settings: SequenceSettings) -> Callable[[], None]:
    """Return a function that restores the step's memory and the random seed to their state before the first call."""

    def begin() -> None:
        dry_run.begin()
        _set_seed(settings.device, settings.seed)

    return begin


def _wants_more(timed: Passes, spent_ns: int, settings: SequenceSettings) -> bool:
    """Return True if another pass should be timed: there are too few in `timed`, or their times vary too much."""
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
    """Return True if `timed` has fewer than `count` passes; contended passes count too if none may be repeated."""
    missing = count - len(timed.kept)
    return missing > 0 and (_may_drop(timed, spent_ns, settings) or len(timed.contended) < missing)


def _may_drop(timed: Passes, spent_ns: int, settings: SequenceSettings) -> bool:
    """Return True if a slowed or contended pass may be repeated after the passes in `timed`, which took `spent_ns`."""
    usual = FEWEST if is_accelerator(settings.device) else MOST_DROPPED
    most = usual if settings.repeats is None else settings.repeats
    return timed.dropped + len(timed.contended) < most and spent_ns <= settings.budget_s * 1e9


@contextmanager
def own_randomness(device: str) -> Iterator[None]:
    """Restore the random state of the calling program after the block."""
    count = module_of(device).device_count() if is_accelerator(device) else 0
    with torch.random.fork_rng(range(count), device_type=torch.device(device).type):
        yield


def _set_seed(device: str, seed: int) -> None:
    """Seed all random generators, so that operators draw the same numbers in each pass."""
    # not torch.manual_seed, which also seeds accelerators that are not used here
    torch.default_generator.manual_seed(seed)
    if is_accelerator(device):
        module_of(device).manual_seed_all(seed)


MODULE = "opgrip.replay.sequences.step_replay"


def replay_apart(
    workload: Workload, on_progress: ProgressCallback = ignore_progress, may_fork: bool = True
) -> SequenceResult:
    """Replay a step in a separate process. If a call ends the process, replay again without this call.

    may_fork : True if this process has not used torch yet, so that it can be forked
    Raises `UserError` if the trace contains no calls, if a process ends between calls, or if too many processes end.
    """
    excluded: dict[int, tuple[str, str]] = {}

    def run(_: int, output: int, heartbeat: Heartbeat) -> None:
        _answer(workload, excluded, heartbeat, output)

    while True:
        with start_child(workload, may_fork, run, MODULE, {"excluded": list(excluded.items())}) as child:
            result = child.result(on_progress)
        if not isinstance(result, Ended):
            return msgspec.convert(result, SequenceResult)
        if result.item == IDLE or result.item in excluded or len(excluded) == MOST_FAILURES:
            raise UserError("the process that runs the calls cannot continue", result.reason)
        excluded[result.item] = result.status, result.reason


def _answer(workload: Workload, excluded: Excluded, heartbeat: Heartbeat, output: int) -> None:
    """Replay a step in this process, and send the result to the parent process by the descriptor `output`."""
    settings = sequence_settings(workload)
    if not is_accelerator(settings.device):
        limit_memory(settings.room_bytes, settings.device)
    answer(
        lambda on_progress: asdict(replay_sequence(workload.trace, settings, on_progress, excluded, heartbeat.enter)),
        output,
    )


def main() -> int:
    request, heartbeat, output = receive_request()
    # the parent reports the last line that a dying process writes as the reason
    warnings.simplefilter("ignore")
    workload = load_workload(RunRequest.from_plain(request["request"]))
    use_device(workload.device)
    try:
        try:
            _answer(workload, dict(request["excluded"]), heartbeat, output)
        except Exception as error:
            # if the device is lost, restoring its random state has raised this error instead
            check_use(workload.device, error)
            raise
    except DeviceLostError as error:
        end_without_device(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
