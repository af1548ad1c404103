"""Preparation of a case for timing: arguments are generated, and the case is compiled, run once and checked."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter_ns
from typing import Any, NamedTuple

import torch

from opgrip.errors import cause_of
from opgrip.replay.cases.cases import Case, shares_of
from opgrip.replay.cases.preceding_calls import used_bytes
from opgrip.replay.cases.selection import BACKWARD, PROGRAM, Variant
from opgrip.replay.cases.unused_results import refused_argument, with_equivalents, with_gradients
from opgrip.replay.inputs.filling import with_values
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
    Row,
    rate_of,
    same_outputs,
)
from opgrip.replay.run.checks.reference import CandidateReference, Reference, check_contract
from opgrip.replay.run.checks.verdicts import ResultVerdict, WrongResultError, joined
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
from opgrip.replay.run.untrusted import CHANGE, UNKNOWN, needs_reordering, untrusted_call, untrusted_function
from opgrip.replay.run.workload import Workload, device_of, empty_row, fail, key_of
from opgrip.replay.timing.ranges import PREPARE, entered
from opgrip.replay.timing.rounds import Announce
from opgrip.replay.timing.samples import FEWEST, Samples
from opgrip.replay.timing.timed_functions import MOST, InputSet, TimedFunction, paired_runs
from opgrip.replay.timing.timing_options import GRAPH
from opgrip.traces.schema.records import Signature


class Prepared(NamedTuple):
    """The row of a variant, and the function to time, or None if the row says why it cannot be timed."""

    variant: Variant
    row: Row
    function: TimedFunction | None


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
            rows.append(Prepared(variant, *preparation.row(variant, (cached_rows or {}).get(variant.number))))
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

    def row(self, variant: Variant, cached_row: Result | None) -> tuple[Row, TimedFunction | None]:
        workload, raised = self._workload, self._recorded.signature.raised
        row = Row.of(cached_row or empty_row(self._recorded, variant, workload))
        if row.status != OK:
            return row, None
        if raised is not None:
            row.status, row.error = SKIPPED, f"it raised when it was captured: {raised}"
            return row, None
        try:
            case = workload.scaled(self._recorded, variant.point)
            result = cached_row or empty_row(case, variant, workload)
            row = Row.of(result)
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
                row, timed_function = self._made(case, operator, variant, result)
                refusals = [f"the captured setting {name} cannot be restored" for name in refused]
                row.note = ", ".join(filter(None, (note, *refusals, row.note)))
                if timed_function is not None:
                    for _ in range(workload.request.effort.warmup):
                        timed_function.run()
                # errors that the device reports only now belong to this row, not to the next
                synchronizer(workload.device)()
                return row, timed_function
        except (Exception, SystemExit) as error:
            check_use(workload.device, error)
            fail(row, error, workload)
            is_memory_short = is_out_of_memory(error)
            if variant.direction == BACKWARD and not workload.timing.backward and row.status == UNSUPPORTED:
                # nobody requested these gradients
                row.status = SKIPPED
        # only after the error is released: the frames of its traceback hold tensors
        if is_memory_short:
            release_memory(workload.device)
        return row, None

    def _made(
        self, case: Case, operator: Operator, variant: Variant, result: Result
    ) -> tuple[Row, TimedFunction | None]:
        workload, row = self._workload, Row.of(result)
        make = self._backward if variant.direction == BACKWARD else self._forward
        lacks_gradient_flags = (
            workload.adds_gradients and workload.wants_grad(case, variant.direction) and not operator.mutates
        )
        try:
            return row, make(with_gradients(case, lacks_gradient_flags, self._refused), operator, variant, row)
        except Exception as error:
            name = refused_argument(error)
            if name is None or name in self._refused:
                raise
            self._refused.add(name)
        return self._made(case, operator, variant, result)

    def _forward(self, case: Case, operator: Operator, variant: Variant, row: Row) -> TimedFunction | None:
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
                actual = self._first_run(case, row, operator, program, item, began)
            else:
                _, actual = run_program(program, item.make(), operator.mutates)
            faithful.append(same_outputs(signature.outputs, actual.outputs, workload.dtype is None, case.unused))
            verdicts += self._verdicts(case, variant, place, operator, inputs[place], actual)
        if variant.mode == CANDIDATE and call is None:
            other = self._inputs(case, operator, case.signature, variant.values, seed=1)
            if other.has_values_of(inputs[0]):
                # the values are the same with each seed
                other.change(CHANGE)
                if needs_reordering(operator.function, inputs[0]):
                    other.reorder()
            actual = _run_with_other_values(program, operator, tried[0], other)
            verdicts += self._verdicts(case, variant, len(inputs), operator, other, actual)
        fill_verdict(row, verdicts)
        if row.status != OK:
            return None
        row.faithful = None if None in faithful else all(faithful)
        if call is not None:
            overhead_ns = self._overhead_ns.setdefault(replace(variant, number=0, mode=EAGER), [])
            draw = partial(self._inputs, case, operator, kind=variant.values)
            return untrusted_function(case, operator, variant, inputs, call, draw, overhead_ns)
        in_torch = find_mode(variant.mode)[0].in_torch
        has_pages = in_torch and workload.device == "cpu" and workload.cache_of(variant) == PROGRAM
        return self._timed_function(
            case,
            operator,
            variant,
            program.function,
            inputs,
            program.enter,
            program.enters_each_run,
            mutates=operator.mutates and (program.enter is None or program.in_place),
            fresh=case.fresh if has_pages else None,
            result_bytes=row.bytes_out or 0,
        )

    def _first_run(
        self, case: Case, row: Row, operator: Operator, program: Program, inputs: Inputs, began: int
    ) -> RunOutputs:
        workload = self._workload
        device = device_of(case.signature, workload)
        args, kwargs = inputs.make()
        raw_result, results = run_program(program, (args, kwargs), operator.mutates)
        synchronizer(device)()
        fill_program(row, program, (perf_counter_ns() - began) / 1e6)
        self._fill_work(case, row, operator, inputs, program.leave is None, args, kwargs, raw_result)
        if program.memory is UNKNOWN:
            return results
        if workload.memory and program.memory is not None:
            fill_memory(row, program.memory)
        elif workload.memory and find_mode(row.mode)[0].in_torch:
            del raw_result, results
            if operator.mutates:
                inputs.restore()
            # the profiler that counts memory takes longer than most calls
            arguments = inputs.make()
            (_, results), memory = with_memory(lambda: run_program(program, arguments, operator.mutates), device)
            fill_memory(row, memory)
        return results

    def _fill_work(self, case: Case, row: Row, operator: Operator, inputs: Inputs, in_torch: bool, *run: Any) -> None:
        key = (row.threads, row.batch_scale, row.streams, row.values)
        if key not in self._works:
            if case.operator is None and in_torch:
                self._works[key] = work_of(operator.function, case.op, *run)
            elif self._workload.request.count_work and case.operator is not None:
                if operator.mutates:
                    inputs.restore()
                self._works[key] = counted(operator.function, *inputs.make())
        if key in self._works:
            fill_work(row, self._works[key])

    def _backward(self, case: Case, operator: Operator, variant: Variant, row: Row) -> TimedFunction | None:
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
        fill_program(row, program, (perf_counter_ns() - began) / 1e6)
        if workload.request.count_work:
            (gradient_arguments, _) = graph_of(Program(operator.function), places)(inputs.make())
            fill_work(row, counted(gradients, gradient_arguments, {}, whole=False))
        fill_verdict(row, self._verdicts(case, variant, 0, operator, inputs, actual))
        if row.status != OK:
            return None
        if workload.memory and find_mode(variant.mode)[0].in_torch:
            args, kwargs = enter(inputs.make())
            _, memory = with_memory(lambda: function(*args, **kwargs), device_of(case.signature, workload))
            fill_memory(row, memory)
        return self._timed_function(case, operator, variant, function, [inputs], enter, enters_each_run)

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


def fill_memory(row: Row, memory: CallMemory) -> None:
    row.allocated_bytes, row.peak_bytes, row.reserved_bytes = memory.allocated, memory.peak, memory.reserved


def fill_program(row: Row, program: Program, first_ms: float) -> None:
    row.enter_us = program.enter_us
    if row.first_ms is None:
        row.note, row.first_ms = program.note, first_ms


def fill_work(row: Row, work: Work) -> None:
    row.flops, row.bytes_moved, row.math_dtype, row.operators = work.flops, work.bytes, work.dtype, work.operators


def fill_verdict(row: Row, verdicts: Sequence[ResultVerdict]) -> None:
    if not verdicts:
        return
    verdict = joined(verdicts)
    row.max_abs, row.max_rel = verdict.max_abs, verdict.max_rel
    row.note = ", ".join(dict.fromkeys(note for note in (row.note, *verdict.notes) if note))
    if not verdict.right:
        row.status, row.error = WRONG, verdict.reason


def fill_times(row: Row, samples: Samples, workload: Workload, variant: Variant) -> None:
    row.median_us, row.mean_us = samples.quantile_us(0.5), samples.mean_us
    row.p10_us, row.p90_us = samples.percentile_us(0.1), samples.percentile_us(0.9)
    row.stopped = samples.done(workload.request.effort) or "most"
    row.gflop_per_s, row.gb_per_s = rate_of(row.flops, row.median_us), rate_of(row.bytes_moved, row.median_us)
    if samples.is_contended:
        row.status, row.stopped, row.gflop_per_s, row.gb_per_s = CONTENDED, "contended", None, None
    row.samples, row.runs, row.dropped = len(samples), samples.effective_runs, samples.dropped
    # the spread is infinite if no kind of run was repeated
    row.spread = spread if math.isfinite(spread := samples.spread) else None
    row.noisy = None if row.spread is None else row.spread > NOISY
    row.slowed = samples.slowed / len(samples) if len(samples) else None
    row.method, row.cache = workload.timing.exec_mode, workload.cache_of(variant)
    row.times_us = [round(time_ns / 1e3, DECIMALS) for time_ns in samples.in_order]
    row.weights, row.kinds, row.memory_gb_per_s = samples.weights, samples.kinds, samples.memory_gb_per_s


def fill_pairs(row: Row, function: TimedFunction, other: TimedFunction, base_us: float) -> None:
    are_exchanged = function.exchanges is not None and function.exchanges == other.exchanges
    pairs = paired_runs(function.runs, other.runs)
    times = ((run.arrangement, run.time_ns, other.time_ns) for run, other in pairs)
    ratio = paired_ratio(times, base_us, are_exchanged)
    if ratio is not None:
        row.ratio_p10, row.ratio_p50, row.ratio_p90 = ratio.low, ratio.middle, ratio.high
        row.add(PairedColumns(ratio.error, ratio.chance))


def fill_timing_clusters(row: Row, case: Case, samples: Samples) -> None:
    clusters, shares = case.timing_clusters, shares_of(case)
    if len(clusters) == 1:
        row.add(ClusterColumns(place=clusters[0].place))
        return
    medians = [samples.median_us_of(index) for index in range(len(shares))]
    cluster_medians_us = [median for median in medians if median is not None]
    if shares and len(cluster_medians_us) == len(medians):
        captured_us = [item.captured_us for item in clusters]
        row.add(ClusterColumns(None, shares, captured_us, cluster_medians_us))
