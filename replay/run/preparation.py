"""Preparation of a case for timing: arguments are generated, and the case is compiled, run once and checked."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter_ns
from typing import Any

import torch

from opgrip.errors import cause_of
from opgrip.replay.cases.cases import Case, shares_of
from opgrip.replay.cases.preceding_calls import used_bytes
from opgrip.replay.cases.selection import BACKWARD, PROGRAM, Variant
from opgrip.replay.cases.unused_results import refused_argument, with_equivalents, with_gradients
from opgrip.replay.inputs.input_options import with_values
from opgrip.replay.inputs.inputs import ADDRESSES, Inputs
from opgrip.replay.modes import CANDIDATE, EAGER, Program, RunOutputs, find_mode
from opgrip.replay.operators.admission import Unsupported
from opgrip.replay.operators.agreement import check_agreement, check_graph, check_parts
from opgrip.replay.operators.agreement.indices import bound_indices
from opgrip.replay.operators.contexts import restored
from opgrip.replay.operators.devices import check_use, synchronizer
from opgrip.replay.operators.lookup import Operator, find_operator
from opgrip.replay.operators.memory import (
    Arguments,
    CallMemory,
    Function,
    bytes_of,
    is_out_of_memory,
    release_memory,
    with_memory,
)
from opgrip.replay.operators.torch_private import is_composite
from opgrip.replay.operators.work import Work, counted, work_of
from opgrip.replay.results.paired_ratio import PairedColumns, paired_ratio
from opgrip.replay.results.ratios import ClusterColumns
from opgrip.replay.results.results import (
    CONTENDED,
    NOISY,
    OK,
    SKIPPED,
    UNSUPPORTED,
    WRONG,
    Result,
    rate_of,
    same_outputs,
)
from opgrip.replay.run.checks.reference import CandidateReference, Reference, check_contract
from opgrip.replay.run.checks.verdicts import ResultVerdict, WrongResultError, joined
from opgrip.replay.run.energy import Energy
from opgrip.replay.run.programs import (
    as_call,
    differentiable_results,
    gradient_graph,
    gradients,
    graph_of,
    make_program,
    run_program,
    with_backward,
)
from opgrip.replay.run.untrusted import CHANGE, UNKNOWN, untrusted_call, untrusted_function
from opgrip.replay.run.workload import Workload, device_of, empty_row, failed, key_of
from opgrip.replay.timing.ranges import PREPARE, entered
from opgrip.replay.timing.rounds import Announce
from opgrip.replay.timing.samples import FEWEST, Samples
from opgrip.replay.timing.timed_functions import MOST, InputSet, TimedFunction, paired_runs
from opgrip.replay.timing.timing_options import GRAPH
from opgrip.traces.schema.records import Signature

# row, and the function to time, or None if the row says why it cannot be timed
RowToTime = tuple[Result, TimedFunction | None]
Prepared = tuple[Variant, Result, TimedFunction | None]  # variant, and the two parts of a `RowToTime`


def prepare(
    case: Case,
    workload: Workload,
    announce: Announce = lambda number, row: None,
    cached_rows: Mapping[int, Result] | None = None,
    only: int | None = None,
) -> list[Prepared]:
    """Return the row of each variant of a case, with the function to time if the variant can be timed.

    announce : called with case number and row number before each row is prepared
    cached_rows : rows of the variants that were compiled before, by row number
    only : number of the only row to prepare; None for all
    """
    preparation = _Preparation(case, workload)
    rows: list[Prepared] = []
    for variant in workload.variants(case):
        if only in (None, variant.number):
            announce(case.number, variant.number)
            result, timed_function = preparation.row(variant, (cached_rows or {}).get(variant.number))
            rows.append((variant, result, timed_function))
    preparation.references.clear()
    return rows


class _Preparation:
    def __init__(self, case: Case, workload: Workload) -> None:
        self._recorded, self._workload = case, workload
        self._make_program = partial(
            make_program,
            device=workload.device,
            store=workload.request.store,
            tuning=workload.request.tuning,
            candidates=workload.request.candidates,
            by_device=workload.timing.by_clock_of_device,
        )
        self.references: dict[object, Reference] = {}
        self._works: dict[object, Work] = {}
        self._refused: set[str] = set()
        self._overhead_ns: dict[object, list[int]] = {}

    def row(self, variant: Variant, cached_row: Result | None) -> RowToTime:
        workload = self._workload
        result = cached_row or empty_row(self._recorded, variant, workload)
        if result.status != OK:
            return result, None
        raised = self._recorded.signature.raised
        if raised is not None:
            return replace(result, status=SKIPPED, error=f"it raised when it was captured: {raised}"), None
        try:
            case = workload.scaled(self._recorded, variant.point)
            result = cached_row or empty_row(case, variant, workload)
            if case.load is not None:
                case = case.load(case.number)
            # calls are captured below autograd, so they are replayed without it unless gradients are requested
            with (
                entered(PREPARE, variant.label, case.number),
                restored(workload.context_of(case, variant)) as refused,
                torch.set_grad_enabled(workload.wants_grad(case, variant.direction)),
            ):
                case, note = with_equivalents(case, workload.device)
                operator = case.operator or find_operator(case.signature, workload.request.inputs.extensions)
                result, timed_function = self._made(case, operator, variant, result)
                refusals = [f"the captured setting {name} cannot be restored" for name in refused]
                result = replace(result, note=", ".join(filter(None, (note, *refusals, result.note))))
                if timed_function is not None:
                    for _ in range(workload.request.effort.warmup):
                        timed_function.run()
                # errors that the device reports only now belong to this row, not to the next
                synchronizer(workload.device)()
                return result, timed_function
        except (Exception, SystemExit) as error:
            check_use(workload.device, error)
            result, is_memory_short = failed(result, error, workload), is_out_of_memory(error)
            if variant.direction == BACKWARD and not workload.timing.backward and result.status == UNSUPPORTED:
                # nobody requested these gradients
                result = replace(result, status=SKIPPED)
        # only after the error is released: the frames of its traceback hold tensors
        if is_memory_short:
            release_memory(workload.device)
        return result, None

    def _made(self, case: Case, operator: Operator, variant: Variant, result: Result) -> RowToTime:
        workload = self._workload
        make = self._backward if variant.direction == BACKWARD else self._forward
        lacks_gradient_flags = (
            workload.adds_gradients and workload.wants_grad(case, variant.direction) and not operator.mutates
        )
        try:
            return make(with_gradients(case, lacks_gradient_flags, self._refused), operator, variant, result)
        except Exception as error:
            name = refused_argument(error)
            if name is None or name in self._refused:
                raise
            self._refused.add(name)
        return self._made(case, operator, variant, result)

    def _forward(self, case: Case, operator: Operator, variant: Variant, result: Result) -> RowToTime:
        workload = self._workload
        signatures = (case.signature, *case.input_sets)
        inputs = [self._inputs(case, operator, signature, variant.values) for signature in signatures]
        examples = [item.make() for item in inputs]
        began = perf_counter_ns()
        grad = workload.wants_grad(case, variant.direction)
        call = untrusted_call(case, variant, workload) if workload.request.candidates.untrusted else None
        if call is not None and variant.mode == CANDIDATE:
            program = Program(call, memory=UNKNOWN)
        else:
            key = key_of(case, variant, workload)
            program = self._make_program(operator, examples, variant, key, grad, case.op, case.weights)
        del examples
        if operator.mutates:
            # modes write into the examples
            for item in inputs:
                item.restore()
        faithful, verdicts = [], []
        # a candidate may write into arguments that the operator only reads
        tried = [item.copy() for item in inputs] if variant.mode == CANDIDATE else inputs
        for place, (signature, item) in enumerate(zip(signatures, tried, strict=True)):
            if variant.mode == CANDIDATE:
                # functions of samples may change lists
                mutates = operator.mutates or case.operator is not None
                verdicts.append(
                    check_contract(operator.function, program.function, inputs[place], case.unused, mutates)
                )
            if place == 0:
                result, actual = self._first_run(case, result, operator, program, item, began)
            else:
                _, actual = run_program(program, item.make(), operator.mutates)
            faithful.append(same_outputs(signature.outputs, actual.outputs, workload.dtype is None, case.unused))
            verdicts += self._verdicts(case, variant, place, operator, inputs[place], actual)
        if variant.mode == CANDIDATE and call is None:
            other = self._inputs(case, operator, case.signature, variant.values, seed=1)
            if other.has_values_of(inputs[0]):
                # the values are the same with each seed
                other.change(CHANGE)
            actual = _run_with_other_values(program, operator, tried[0], other)
            verdicts += self._verdicts(case, variant, len(inputs), operator, other, actual)
        result = with_verdict(result, verdicts)
        if result.status != OK:
            return result, None
        result = replace(result, faithful=None if None in faithful else all(faithful))
        if call is not None:
            overhead_ns = self._overhead_ns.setdefault(replace(variant, number=0, mode=EAGER), [])
            draw = partial(self._inputs, case, operator, kind=variant.values)
            return result, untrusted_function(case, operator, variant, inputs, call, draw, overhead_ns)
        in_torch = find_mode(variant.mode)[0].in_torch
        has_pages = in_torch and workload.device == "cpu" and workload.cache_of(variant) == PROGRAM
        return result, self._timed_function(
            case,
            operator,
            variant,
            program.function,
            inputs,
            program.enter,
            program.enters_each_run,
            mutates=operator.mutates and (program.enter is None or program.in_place),
            fresh=case.fresh if has_pages else None,
            result_bytes=result.bytes_out or 0,
        )

    def _first_run(
        self, case: Case, result: Result, operator: Operator, program: Program, inputs: Inputs, began: int
    ) -> tuple[Result, RunOutputs]:
        workload = self._workload
        device = device_of(case.signature, workload)
        args, kwargs = inputs.make()
        raw_result, results = run_program(program, (args, kwargs), operator.mutates)
        synchronizer(device)()
        result = with_program_note(result, program, (perf_counter_ns() - began) / 1e6)
        result = self._with_work(case, result, operator, inputs, program.leave is None, args, kwargs, raw_result)
        if program.memory is UNKNOWN:
            return result, results
        if workload.memory and program.memory is not None:
            result = with_memory_columns(result, program.memory)
        elif workload.memory and find_mode(result.mode)[0].in_torch:
            del raw_result, results
            if operator.mutates:
                inputs.restore()
            # the profiler that counts memory takes longer than most calls
            arguments = inputs.make()
            (_, results), memory = with_memory(lambda: run_program(program, arguments, operator.mutates), device)
            result = with_memory_columns(result, memory)
        return result, results

    def _with_work(
        self, case: Case, result: Result, operator: Operator, inputs: Inputs, in_torch: bool, *run: Any
    ) -> Result:
        key = (result.threads, result.batch_scale, result.streams, result.values)
        if key not in self._works:
            if case.operator is None and in_torch:
                self._works[key] = work_of(operator.function, case.op, *run)
            elif self._workload.request.count_work and case.operator is not None:
                if operator.mutates:
                    inputs.restore()
                self._works[key] = counted(operator.function, *inputs.make())
        return with_work(result, self._works.get(key))

    def _backward(self, case: Case, operator: Operator, variant: Variant, result: Result) -> RowToTime:
        workload = self._workload
        inputs = self._inputs(case, operator, case.signature, variant.values)
        arguments = inputs.make()
        places = differentiable_results(operator, arguments)
        began = perf_counter_ns()
        key = key_of(case, variant, workload)
        if find_mode(variant.mode)[0].differentiable:
            program = self._make_program(operator, [arguments], variant, key, True, case.op)
            function, enter, enters_each_run = gradients, graph_of(program, places), True
            try:
                entered_arguments, _ = enter(arguments)
            except Exception as error:
                if variant.mode != CANDIDATE or isinstance(error, Unsupported) or is_out_of_memory(error):
                    raise
                raise Unsupported(f"it does not run on tensors that require gradients: {cause_of(error)}") from error
            actual = RunOutputs(gradients(*entered_arguments))
        else:
            graph, saved = gradient_graph(operator, arguments)
            with torch.no_grad():
                program = self._make_program(Operator(graph, False), [(saved, {})], variant, key, grad=False)
                _, actual = run_program(program, (saved, {}), mutates=False)
            enter_program = program.enter or (lambda arguments: arguments)
            function, enters_each_run = program.function, program.enters_each_run
            enter = lambda _: enter_program((saved, {}))  # noqa: E731
        result = with_program_note(result, program, (perf_counter_ns() - began) / 1e6)
        if workload.request.count_work:
            (gradient_arguments, _) = graph_of(Program(operator.function), places)(inputs.make())
            result = with_work(result, counted(gradients, gradient_arguments, {}, whole=False))
        result = with_verdict(result, self._verdicts(case, variant, 0, operator, inputs, actual))
        if result.status != OK:
            return result, None
        if workload.memory and find_mode(variant.mode)[0].in_torch:
            args, kwargs = enter(inputs.make())
            _, memory = with_memory(lambda: function(*args, **kwargs), device_of(case.signature, workload))
            result = with_memory_columns(result, memory)
        return result, self._timed_function(case, operator, variant, function, [inputs], enter, enters_each_run)

    def _timed_function(
        self,
        case: Case,
        operator: Operator,
        variant: Variant,
        function: Function,
        inputs: Sequence[Inputs],
        enter: Callable[[Arguments], Arguments] | None,
        enters_each_run: bool,
        mutates: bool = False,
        fresh: float | None = None,
        result_bytes: int = 0,
    ) -> TimedFunction:
        exchanges = None
        # arguments that are converted once, or whose addresses are in a graph, are for one function only
        takes_arguments = variant.direction != BACKWARD or find_mode(variant.mode)[0].differentiable
        is_free = (enter is None or enters_each_run or mutates) and self._workload.timing.exec_mode != GRAPH
        if takes_arguments and is_free:
            exchanges = replace(variant, number=0, mode=""), mutates, frozenset(self._refused)
        return TimedFunction(
            number=case.number,
            label=case.op,
            category=variant.label,
            function=function,
            input_sets=[InputSet([item]) for item in inputs],
            mutates=mutates,
            fresh=fresh,
            result_bytes=result_bytes,
            used_bytes=used_bytes(case.signature),
            enter=enter,
            enters_each_run=enters_each_run,
            row=variant.number,
            shares=shares_of(case) if variant.direction != BACKWARD else (),
            profiled=self._workload.request.profiled,
            in_torch=find_mode(variant.mode)[0].in_torch,
            exchanges=exchanges,
            fewest=MOST if self._workload.request.candidates.candidate else FEWEST,
            check_kept=partial(self._check_timed, case, operator, variant) if variant.mode == CANDIDATE else None,
        )

    def _check_timed(
        self, case: Case, operator: Operator, variant: Variant, kept: Sequence[tuple[int, RunOutputs]]
    ) -> None:
        verdicts = []
        for place, actual in kept:
            # drawn again, so that no further inputs are kept during the timing
            inputs = self._inputs(case, operator, (case.signature, *case.input_sets)[place], variant.values)
            verdicts += self._verdicts(case, variant, place, operator, inputs, actual)
        self.references.clear()
        if (reason := joined(verdicts).reason) is not None:
            raise WrongResultError(f"in a timed run: {reason}")

    def _verdicts(
        self, case: Case, variant: Variant, place: int, operator: Operator, inputs: Inputs, actual: RunOutputs
    ) -> list[ResultVerdict]:
        if variant.mode == self._workload.request.modes.reference and case.reference is None:
            return []
        reference = self._reference(case, variant, place, operator, inputs)
        return [reference.check(actual, self._workload.request.tolerance)]

    def _reference(self, case: Case, variant: Variant, place: int, operator: Operator, inputs: Inputs) -> Reference:
        key = (variant.cache, variant.point, variant.values, variant.direction, place)
        if key not in self.references:
            right = case.reference or operator
            mutates = operator.mutates or right.mutates
            own = inputs.copy() if mutates else inputs

            def arguments() -> Arguments:
                if mutates:
                    own.restore()
                return own.make()

            function = self._reference_function(variant, right, arguments())
            op = case.op if function is right.function and case.operator is None else None
            kind = Reference if case.reference is None else CandidateReference
            self.references[key] = kind(
                function, arguments, mutates, op, case.unused if variant.direction != BACKWARD else ()
            )
        return self.references[key]

    def _reference_function(self, variant: Variant, operator: Operator, arguments: Arguments) -> Function:
        workload, backward = self._workload, variant.direction == BACKWARD
        program = Program(operator.function)
        # a reference mode without gradients is replaced by the gradients of eager
        if workload.request.modes.reference != EAGER and (
            not backward or find_mode(workload.request.modes.reference)[0].differentiable
        ):
            reference = replace(variant, mode=workload.request.modes.reference)
            program = self._make_program(operator, [arguments], reference, None, grad=backward)
        if backward:
            return with_backward(program, differentiable_results(operator, arguments))
        return operator.function if workload.request.modes.reference == EAGER else as_call(program, operator.mutates)

    def _inputs(self, case: Case, operator: Operator, signature: Signature, kind: str, seed: int = 0) -> Inputs:
        workload, seed = self._workload, self._workload.request.inputs.seed + seed
        drawn, models = with_values(signature, case.values, kind)
        needed = Inputs.bytes_needed(signature.args, signature.kwargs, workload.dtype) + bytes_of(signature.outputs)
        limit = workload.request.limits.memory_limit
        # sizes beyond the address space get a more specific error when they are allocated
        if limit is not None and limit < needed < ADDRESSES:
            raise MemoryError(f"its tensors are {needed / 1e9:,.1f} GB, the limit is {limit / 1e9:,.1f} GB")
        inputs = Inputs(drawn.args, drawn.kwargs, models, workload.place, seed, workload.dtype)
        if case.operator is None:
            arguments = inputs.make()
            bound_indices(operator.function, *arguments)
            check_agreement(operator.function, *arguments)
        if operator.mutates:
            inputs.keep()
        if case.operator is None and is_composite(operator.function):
            check_parts(operator.function, *inputs.make())
        elif isinstance(operator.function, torch.fx.GraphModule):
            check_graph(operator.function, inputs.make()[0])
        if operator.mutates:
            inputs.restore()
        return inputs


def _run_with_other_values(program: Program, operator: Operator, first: Inputs, other: Inputs) -> RunOutputs:
    if operator.mutates:
        first.restore()
    arguments = first.make()
    earlier = None if operator.mutates else run_program(program, arguments, mutates=False)
    _, results = run_program(program, first.overwrite(other, arguments), operator.mutates)
    del earlier
    return results


DECIMALS = 4  # number of decimals of single run times in us


def with_memory_columns(result: Result, memory: CallMemory) -> Result:
    return replace(result, allocated_bytes=memory.allocated, peak_bytes=memory.peak, reserved_bytes=memory.reserved)


def with_program_note(result: Result, program: Program, first_ms: float) -> Result:
    result = replace(result, enter_us=program.enter_us)
    return replace(result, note=program.note, first_ms=first_ms) if result.first_ms is None else result


def with_work(result: Result, work: Work | None) -> Result:
    if work is None:
        return result
    return replace(result, flops=work.flops, bytes_moved=work.bytes, math_dtype=work.dtype, operators=work.operators)


def with_verdict(result: Result, verdicts: Sequence[ResultVerdict]) -> Result:
    if not verdicts:
        return result
    verdict = joined(verdicts)
    notes = dict.fromkeys(note for note in (result.note, *verdict.notes) if note)
    result = replace(result, max_abs=verdict.max_abs, max_rel=verdict.max_rel, note=", ".join(notes))
    return result if verdict.right else replace(result, status=WRONG, error=verdict.reason)


def with_energy(row: Result, energy: Energy | None) -> Result:
    if energy is None:
        return row
    clock_mhz = row.clock_mhz if energy.clock_mhz is None else energy.clock_mhz
    return replace(row, clock_mhz=clock_mhz, throttled=", ".join(energy.throttled) or None).adding(energy.columns)


def with_times(result: Result, samples: Samples, workload: Workload, variant: Variant) -> Result:
    # the spread is infinite if no kind of run was repeated
    spread = measured_spread if math.isfinite(measured_spread := samples.spread) else None
    median_us = samples.quantile_us(0.5)
    return replace(
        result,
        status=CONTENDED if samples.is_contended else result.status,
        median_us=median_us,
        p10_us=samples.percentile_us(0.1),
        p90_us=samples.percentile_us(0.9),
        mean_us=samples.mean_us,
        gflop_per_s=None if samples.is_contended else rate_of(result.flops, median_us),
        gb_per_s=None if samples.is_contended else rate_of(result.bytes_moved, median_us),
        samples=len(samples),
        runs=samples.effective_runs,
        spread=spread,
        stopped="contended" if samples.is_contended else samples.done(workload.request.effort) or "most",
        dropped=samples.dropped,
        slowed=samples.slowed / len(samples) if len(samples) else None,
        noisy=None if spread is None else spread > NOISY,
        method=workload.timing.exec_mode,
        cache=workload.cache_of(variant),
        times_us=[round(time_ns / 1e3, DECIMALS) for time_ns in samples.in_order],
        weights=samples.weights,
        kinds=samples.kinds,
        memory_gb_per_s=samples.memory_gb_per_s,
    )


def with_pairs(row: Result, function: TimedFunction, other: TimedFunction, base_us: float) -> Result:
    are_exchanged = function.exchanges is not None and function.exchanges == other.exchanges
    pairs = paired_runs(function.runs, other.runs)
    times = ((run.arrangement, run.time_ns, other.time_ns) for run, other in pairs)
    ratio = paired_ratio(times, base_us, are_exchanged)
    if ratio is None:
        return row
    row = replace(row, ratio_p10=ratio.low, ratio_p50=ratio.middle, ratio_p90=ratio.high)
    return row.adding(PairedColumns(ratio.error, ratio.chance))


def with_timing_clusters(result: Result, case: Case, samples: Samples) -> Result:
    if len(case.timing_clusters) == 1:
        return result.adding(ClusterColumns(place=case.timing_clusters[0].place))
    shares = shares_of(case)
    medians = [samples.median_us_of(index) for index in range(len(shares))]
    cluster_medians_us = [median for median in medians if median is not None]
    if not shares or len(cluster_medians_us) < len(medians):
        return result
    captured = [item.captured_us for item in case.timing_clusters]
    return result.adding(
        ClusterColumns(behaviour_shares=shares, behaviours_captured_us=captured, behaviours_us=cluster_medians_us)
    )
