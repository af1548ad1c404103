"""A request applied to one trace on one device: the loaded trace, its cases, and their rows before they run."""

from __future__ import annotations

import hashlib
import json
import re
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from importlib.metadata import packages_distributions, version
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from opgrip.errors import UserError, cause_of
from opgrip.platform.machine import processor
from opgrip.replay.cases.call_sites import module_of, phase_of, to_text
from opgrip.replay.cases.cases import Case
from opgrip.replay.cases.preceding_calls import PrecedingCalls, make_places_of_subgraphs, make_preceding_calls
from opgrip.replay.cases.selection import BACKWARD, FORWARD, PROGRAM, Point, Variant, unconverted
from opgrip.replay.cases.sources import NO_TRACE, CaseSet, source_of
from opgrip.replay.cases.unused_results import with_unused_results, with_weights
from opgrip.replay.inputs.filling import cast_signature
from opgrip.replay.inputs.inputs import DeviceMap, device_map
from opgrip.replay.modes import EAGER, find_mode
from opgrip.replay.operators.admission import Unsupported, Untrusted
from opgrip.replay.operators.contexts import one_thread
from opgrip.replay.operators.devices import with_index
from opgrip.replay.operators.lookup import mutates
from opgrip.replay.operators.memory import bytes_of, is_out_of_memory
from opgrip.replay.results.results import FAILED, OK, UNSUPPORTED, WRONG, Result, Row, describe_shapes
from opgrip.replay.run.checks.verdicts import WrongResultError
from opgrip.replay.run.request import MOST_SHARDS, RunRequest, Shard
from opgrip.replay.timing.timing_options import DISCRETE, EVENTS, GRAPH, TimingOptions
from opgrip.traces import Trace
from opgrip.traces.codec.record_forms import to_json
from opgrip.traces.formats.building import says_gradients
from opgrip.traces.schema.arguments import DTYPES, numbers_of, tensors, with_numbers
from opgrip.traces.schema.records import Signature
from opgrip.traces.table.accelerators import environment_doubts

if TYPE_CHECKING:
    from opgrip.replay.cases.batch_scale import BatchScale


@dataclass(frozen=True)
class Workload:
    """A request together with the loaded trace, its cases and the device.

    source_cases : selected cases of the trace, before a shard takes its part
    adds_gradients : True if all floating-point arguments require gradients, because the trace does not record which do
    judges_backward : True to judge candidates also on gradients, because the trace has a backward pass
    """

    request: RunRequest
    place: DeviceMap
    device: str
    timing: TimingOptions
    source_cases: CaseSet = field(default_factory=lambda: CaseSet([]))
    cases: list[Case] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    batches: BatchScale | None = None
    memory: bool = False
    adds_gradients: bool = False
    judges_backward: bool = False

    @property
    def trace(self) -> Trace:
        return self.source_cases.trace

    @property
    def devices(self) -> tuple[str, ...]:
        inputs = self.request.inputs
        return tuple(map(with_index, inputs.devices)) if inputs.is_spread else (self.device,)

    @property
    def dtype(self) -> torch.dtype | None:
        return None if self.request.inputs.dtype is None else DTYPES[self.request.inputs.dtype]

    @cached_property
    def surroundings(self) -> PrecedingCalls:
        if PROGRAM in self.timing.caches and self.source_cases.are_calls:
            return make_preceding_calls(self.trace, self.source_cases.all_cases, self.source_cases.cases)
        subgraphs = [case for case in self.source_cases.cases if case.storages and PROGRAM in self.timing.caches]
        return make_places_of_subgraphs(self.trace, subgraphs) if subgraphs else PrecedingCalls({}, {})

    def on(self, device: str) -> Workload:
        inputs = self.request.inputs
        if not inputs.is_spread:
            return self
        place = device_map(recorded_device(self.trace), device)
        return replace(self.with_request(inputs=replace(inputs, device=device)), device=device, place=place)

    def with_request(self, **changes: Any) -> Workload:
        return replace(self, request=replace(self.request, **changes))

    def wants_grad(self, case: Case, direction: str) -> bool:
        """Return True if the runs of a case record an autograd graph, as in training."""
        asks = self.timing.backward if direction == FORWARD else self._runs_backward(case)
        writes = case.operator is None and mutates(case.signature)
        return asks and case.phase == "forward" and not writes

    def _runs_backward(self, case: Case) -> bool:
        if self.judges_backward and not self.timing.backward:
            specs = tensors([case.signature.args, case.signature.kwargs])
            wants = any(spec.requires_grad for spec in specs) and not mutates(case.signature)
        else:
            wants = self.timing.backward
        return wants and case.phase == "forward"

    def variants(self, case: Case) -> list[Variant]:
        """Return the variants of a case, one per row: modes vary fastest, the reference mode first."""
        request = self.request
        directions = (FORWARD, BACKWARD) if self._runs_backward(case) else (FORWARD,)
        caches = self.timing.caches if len(self.timing.caches) > 1 else (None,)
        combinations = product(caches, request.points, request.inputs.values, directions, request.modes.all_names)
        return [
            Variant(number, values, direction, mode, point, cache)
            for number, (cache, point, values, direction, mode) in enumerate(combinations)
        ]

    def cache_of(self, variant: Variant) -> str:
        return variant.cache or self.timing.caches[0]

    def scaled(self, case: Case, point: Point) -> Case:
        if point.batch == 1:
            return case
        if self.batches is None or case.operator is not None or case.load is not None:
            raise Unsupported("the batch size can only be scaled for single calls of a trace")
        from opgrip.replay.cases.batch_scale import scaled

        larger = scaled(case, point.batch, self.batches)
        if larger is case:
            raise Unsupported("none of its sizes is known to grow with the batch")
        return larger

    def context_of(self, case: Case, variant: Variant) -> Mapping[str, Any]:
        threads = variant.point.threads
        return case.context if threads is None else {**case.context, "threads": threads}


def load_workload(request: RunRequest) -> Workload:
    selection = request.selection
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # old versions of packages warn about each other, and the user cannot change that
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        with one_thread():
            source_cases = source_of(request.trace).open(request.trace, selection, request.inputs.extensions)
    trace, cases = source_cases.trace, source_cases.cases
    if not source_cases.is_cut:
        cases = [cases[place] for place in selection.places(len(cases))]
    if request.modes.all_names != (EAGER,):
        cases = with_unused_results(cases, trace)
    if source_cases.are_calls and not all(find_mode(name)[0].in_torch for name in request.modes.all_names):
        cases = with_weights(cases, trace)
    notes = [*trace.doubts, *filter(None, (trace.missing, unconverted(trace), trace.device_time_doubt))]
    notes += environment_doubts(trace.header.get("environment"))
    notes += dict.fromkeys(str(warning.message) for warning in caught)
    workload = workload_for(request, trace)
    if request.shard is not None:
        cases = take_shard(cases, workload, request.shard)
    return replace(workload, source_cases=source_cases, cases=cases, notes=notes)


def has_backward(trace: Trace) -> bool:
    return not trace.calls.empty and bool((trace.own_distinct_calls["phase"] == BACKWARD).any())


def workload_for(request: RunRequest, trace: Trace = NO_TRACE) -> Workload:
    recorded = recorded_device(trace)
    requested = next(map(with_index, request.inputs.devices), None)
    device = requested or with_index(recorded)
    # torch's events miss work on streams of other runtimes, and modes are compared by one clock only
    by_events = device not in ("cpu", "meta") and all(find_mode(name)[0].in_torch for name in request.modes.all_names)
    timing, batches = request.timing.with_method(EVENTS if by_events else DISCRETE), None
    if any(scale != 1 for scale in request.points.batch_scale):
        from opgrip.replay.cases.batch_scale import BatchScale

        batches = BatchScale(trace)
    # arguments that are no tensors may name a device, as `device='cuda'` in a TritonBench file
    default = "cpu" if recorded == "cpu" and "converted_from" in trace.header else None
    return Workload(
        request,
        place=device_map(recorded, requested or default),
        device=device,
        timing=timing,
        adds_gradients=timing.backward and not says_gradients(trace.header),
        judges_backward=bool(request.candidates.candidate)
        and not request.candidates.untrusted
        and request.timing.exec_mode != GRAPH
        and has_backward(trace),
        batches=batches,
    )


def recorded_device(trace: Trace) -> str:
    """Return the accelerator with the most tensors of a trace, or `cpu` if all are on the CPU."""
    devices = Counter(
        spec.device for signature in trace.signatures for spec in tensors([signature.args, signature.kwargs])
    )
    del devices["cpu"]
    return devices.most_common(1)[0][0] if devices else "cpu"


def device_of(signature: Signature, workload: Workload) -> str:
    devices = {workload.place(spec.device) for spec in tensors([signature.args, signature.kwargs])}
    return next((device for device in sorted(devices) if device != "cpu"), workload.device)


def key_of(case: Case, variant: Variant, workload: Workload) -> str | None:
    if workload.request.store is None or variant.mode == EAGER:
        return None
    mode, _ = find_mode(variant.mode)
    code = ""
    if case.operator is not None:
        code = getattr(case.operator.function, "code", "")
        if not code:
            return None
    # value models do not affect the program; settings do: inductor writes the number of threads into its code
    arguments = (case.signature.args, case.signature.kwargs)
    args, kwargs = with_numbers(arguments, [None] * len(numbers_of(arguments)))
    identity = {
        "call": to_json(replace(case.signature, number=0, args=args, kwargs=kwargs, outputs=None, registered_by=None)),
        "code": code,
        "mode": variant.mode,
        "grad": workload.wants_grad(case, variant.direction),
        "direction": variant.direction,
        "device": workload.device,
        "context": dict(workload.context_of(case, variant)),
        "threads": torch.get_num_threads(),
        "processor": processor(workload.device),
        "dtype": str(workload.dtype),
        "versions": _versions(("torch", "opgrip", *mode.needs)),
    }
    return hashlib.blake2b(json.dumps(identity, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()


@cache
def _versions(packages: tuple[str, ...]) -> dict[str, list[str]]:
    distributions = packages_distributions()
    return {package: [version(name) for name in distributions.get(package, ())] for package in packages}


OUT_OF_MEMORY = "out of memory"  # start of the reason of a row that ran out of memory

# pattern of messages for a missing kernel or device: from mmcv's registry, builds without CUDA, and torch's pinned
# memory
_NO_KERNEL = re.compile(
    r"implementation for device \S+ not found|not compiled with (?:gpu|cuda)|accelerator device when none is available",
    re.IGNORECASE,
)

# message of autograd for an operator or argument without a derivative
_NO_DERIVATIVE = re.compile(r"(?:the )?derivative for .+? is not implemented")


def expected_rows(cases: Iterable[Case], workload: Workload) -> list[Result]:
    return [empty_row(case, variant, workload) for case in cases for variant in workload.variants(case)]


def empty_rows(case: Case, workload: Workload, status: str, error: str) -> dict[int, Result]:
    return {variant.number: empty_row(case, variant, workload, status, error) for variant in workload.variants(case)}


def empty_row(case: Case, variant: Variant, workload: Workload, status: str = OK, error: str | None = None) -> Result:
    signature, forward = cast_signature(case.signature, workload.dtype), variant.direction != BACKWARD
    return Result(
        case=case.number,
        op=case.op,
        shapes=describe_shapes(signature),
        count=case.count,
        share=case.share or None,
        mode=variant.mode,
        device=workload.device,
        status=status,
        key=case.key,
        module=module_of(case.call_sites),
        phase=phase_of(case.call_sites) or case.phase,
        call_sites=to_text(case.call_sites),
        captured_us=case.captured_us or None,
        captured_total_us=case.captured_total_us or None,
        captured_host_us=case.captured_host_us,
        captured_spread=case.captured_spread,
        perturbed=case.perturbed,
        values=variant.values,
        direction=variant.direction,
        dtype="" if signature == case.signature else str(workload.request.inputs.dtype),
        tune=workload.request.tuning.words_of(variant.mode),
        cache=workload.cache_of(variant),
        method=workload.timing.exec_mode,
        threads=variant.point.threads,
        batch_scale=variant.point.batch,
        streams=variant.point.streams,
        bytes_in=bytes_of([signature.args, signature.kwargs]) if forward else None,
        bytes_out=bytes_of(signature.outputs) if forward else None,
        error=error,
    )


def describe_failure(error: BaseException) -> tuple[str, str]:
    if isinstance(error, UserError) and isinstance(error.__cause__, ModuleNotFoundError):
        error = error.__cause__
    # check first: a compiler that runs out of memory raises its own error
    if is_out_of_memory(error):
        cause = cause_of(error)
        return FAILED, cause if cause.startswith(OUT_OF_MEMORY) else f"{OUT_OF_MEMORY}: {cause}"
    if isinstance(error, WrongResultError):
        return WRONG, str(error)
    if isinstance(error, Unsupported):
        return UNSUPPORTED, str(error)
    if missing := _NO_DERIVATIVE.search(str(error)):
        return UNSUPPORTED, f"not differentiable: {missing[0]}"
    if isinstance(error, UserError):
        return FAILED, str(error)
    if isinstance(error, ModuleNotFoundError):
        return UNSUPPORTED, f"it needs {error.name}, which is not installed"
    if isinstance(error, NotImplementedError) or _NO_KERNEL.search(str(error)):
        return UNSUPPORTED, cause_of(error)
    return FAILED, cause_of(error)


def fail(row: Row, error: BaseException, workload: Workload) -> None:
    row.status, row.error = describe_failure(error)
    if isinstance(error, Untrusted):
        row.error = error.with_command(workload.request.trace, workload.request.inputs.extension)
    row.detail = "".join(traceback.format_exception(error)) if workload.request.detail else None


# assumed number of runs of a row if the time budget is sufficient, and if one run takes longer than the budget
RUNS, FEWEST_RUNS = 100, 10
# time in us that a row costs in addition to its runs, and that compiling costs; medians of the zoo on CPUs
PREPARE_US, COMPILE_US = 10_000, 3_000_000


def take_shard(cases: Sequence[Case], workload: Workload, part: Shard) -> list[Case]:
    # sort by number, which is the order of first calls: neighbours share their preceding calls
    in_program = sorted(range(len(cases)), key=lambda place: cases[place].number)
    selected = part.select([cost_us(cases[place], workload) for place in in_program])
    return [cases[place] for place in sorted(in_program[order] for order in selected)]


def cost_us(case: Case, workload: Workload, rows: int = MOST_SHARDS) -> int:
    effort, variants = workload.request.effort.of_one(rows), workload.variants(case)
    budget_us, runs = effort.budget_s * 1e6, effort.iterations or RUNS
    fewest = min(runs, FEWEST_RUNS) * case.captured_us
    row_us = max(fewest, min(runs * case.captured_us, budget_us)) + effort.warmup * case.captured_us
    compiled = sum(find_mode(variant.mode)[0].ahead for variant in variants)
    return max(1, round(len(variants) * (row_us + PREPARE_US) * effort.repeats + compiled * COMPILE_US))
