"""Measurement of the times, energy and kernels of cases, several of them in the same rounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import chain

import torch

from opgrip.errors import UserError
from opgrip.platform.activity_records import records_work
from opgrip.platform.machine import find_gpu
from opgrip.replay.cases.cases import Case
from opgrip.replay.cases.preceding_calls import PrecedingCalls
from opgrip.replay.cases.selection import PROGRAM, PointOptions
from opgrip.replay.inputs.input_options import REPEATED
from opgrip.replay.modes import ModeOptions
from opgrip.replay.operators.contexts import restored
from opgrip.replay.operators.devices import check_use, synchronizer
from opgrip.replay.operators.memory import bytes_of
from opgrip.replay.results.ratios import base_index, ratio_over
from opgrip.replay.results.results import LAUNCH_BOUND, Result
from opgrip.replay.run.energy import Clocks, Energy, open_meter, warm_up
from opgrip.replay.run.kernels import fill_kernels
from opgrip.replay.run.preparation import Prepared, fill_pairs, fill_times, fill_timing_clusters, prepare
from opgrip.replay.run.untrusted import untrusted_processes
from opgrip.replay.run.workload import Workload, fail
from opgrip.replay.timing import pages
from opgrip.replay.timing.caches import Caches
from opgrip.replay.timing.concurrent import ConcurrentRun, measure_concurrently
from opgrip.replay.timing.ranges import watched
from opgrip.replay.timing.rounds import NO_ROW, Announce, FunctionGroup, Measurer
from opgrip.replay.timing.samples import LEAST
from opgrip.replay.timing.stopwatch import Stopwatch, empty_call_ns
from opgrip.replay.timing.timed_functions import MOST_KEPT, TimedFunction
from opgrip.replay.timing.timing_options import COLD, DISCRETE, WARM


def metered(number: int, groups: Sequence[FunctionGroup], workload: Workload, announce: Announce) -> dict[int, Energy]:
    wait = synchronizer(workload.device)
    energy_of_function: dict[int, Energy] = {}
    try:
        meter = open_meter(workload.device)
    except UserError:
        return energy_of_function
    with closing(meter):
        for group in groups:
            with restored(group.settings), torch.set_grad_enabled(group.grad):
                for function in group.functions:
                    if function.number != number or function.failure is not None:
                        continue
                    announce(function.number, function.row)
                    try:
                        energy_of_function[id(function)] = meter.measure(function.run, wait)
                    except Exception as error:
                        check_use(workload.device, error)
                        function.fail(error, workload.device)
    return energy_of_function


# limits of a window of cases that are measured side by side: number of cases, bytes of their arguments, and us that
# their calls took in the program; if a replay is killed, one window is lost
CASES, BYTES, LONG_US = 128, 1 << 30, 30e6
SHARE = 0.25  # maximum share of the memory limit for the arguments of one window
# share of a window's bytes that arguments of preceding calls may take in addition, and copies of arguments too
BEFORE_SHARE = 0.25
QUICK_US = 50_000  # maximum captured time in us of a preceding call; slower ones are not replayed

SHORT_US = 1000  # captured time in us below which it matters whether the code of an operator is in a cache

# rows of cases that were prepared before, by case number and row number
CachedRows = Mapping[int, Mapping[int, Result]]


def measure_cases(
    cases: Sequence[Case],
    workload: Workload,
    surroundings: PrecedingCalls | None = None,
    announce: Announce = lambda number, row: None,
    without: Collection[int] = (),
    cached_rows: CachedRows | None = None,
) -> Iterator[list[Result]]:
    """Yield the rows of each case as soon as all of its runs are done.

    announce : called before each run with case number and row index
    without : numbers of cases that do not run as preceding calls
    cached_rows : rows of the variants that were compiled before, by case number and row number
    """
    pages.keep_freed_memory()
    rows = sum(len(workload.variants(case)) for case in workload.cases or cases)
    workload = workload.with_request(effort=workload.request.effort.of_one(rows))
    with closing(Clocks(None if workload.request.profiled else find_gpu(workload.device))) as clocks:
        for window in windows(cases, workload):
            yield from _measure(
                window, workload, surroundings or PrecedingCalls({}, {}), announce, without, cached_rows or {}, clocks
            )


def windows(cases: Sequence[Case], workload: Workload, most: int = CASES) -> Iterator[list[Case]]:
    window: list[Case] = []
    size, time_us = 0, 0.0
    most_bytes = _most_bytes(cases, workload)
    runs = workload.request.effort.warmup + (workload.request.effort.iterations or LEAST)
    for case in cases:
        variants = workload.variants(case)
        sets = sum(variant.point.batch for variant in variants)
        needed = _argument_bytes(case) * (1 + len(case.input_sets)) * sets
        if workload.request.candidates.candidate:
            needed += MOST_KEPT * bytes_of(case.signature.outputs) * sets
        takes_us = case.captured_us * runs * len(variants)
        if window and (len(window) == most or size + needed > most_bytes or time_us + takes_us > LONG_US):
            yield window
            window, size, time_us = [], 0, 0.0
        window.append(case)
        size += needed
        time_us += takes_us
    if window:
        yield window


def _argument_bytes(case: Case) -> int:
    return bytes_of([case.signature.args, case.signature.kwargs])


def _most_bytes(cases: Iterable[Case], workload: Workload) -> int:
    limit = workload.request.limits.memory_limit
    largest = max((_argument_bytes(case) for case in cases), default=0)
    return min(max(BYTES // 2, largest), BYTES if limit is None else min(BYTES, round(SHARE * limit)))


def _measure(
    cases: Sequence[Case],
    workload: Workload,
    surroundings: PrecedingCalls,
    announce: Announce,
    without: Collection[int],
    cached_rows: CachedRows,
    clocks: Clocks,
) -> Iterator[list[Result]]:
    rows: dict[int, list[Prepared]] = {}
    for case in cases:
        rows[case.number] = prepare(case, workload, announce, cached_rows.get(case.number))
        if all(item.function is None for item in rows[case.number]):
            yield [item.row.freeze() for item in rows.pop(case.number)]
    prepared_cases = [(case, rows[case.number]) for case in cases if case.number in rows]
    caches = None if workload.timing.caches == (WARM,) else Caches(workload.device)
    groups = {
        cache: _groups_with(cache, prepared_cases, workload, surroundings, announce, without)
        for cache in workload.timing.caches
    }
    all_groups = list(chain.from_iterable(groups.values()))
    if not workload.request.profiled:
        warm_up(workload.device, workload.timing.clock_warmup)
    announce = clocks.reading(announce)
    concurrent_runs = _measure_concurrently(prepared_cases, workload, announce)
    running = Counter(function.number for group in all_groups for function in group.functions)

    def finished(case: Case, energies: Mapping[int, Energy]) -> list[Result]:
        own = rows.pop(case.number)
        for item in own:
            _fill(item, case, workload, concurrent_runs, energies, clocks)
        _compare(own, workload.request.modes.reference)
        return [item.row.freeze() for item in own]

    for case, _ in prepared_cases:
        if not running[case.number]:
            yield finished(case, {})
    case_of_number = {case.number: case for case, _ in prepared_cases}
    is_metered = workload.request.energy.energy and not workload.request.profiled
    wait = synchronizer(workload.device)
    with watched(workload.request.profiled, workload.device, workload.request.timelines):
        for cache, same_cache in groups.items():
            measurer = Measurer(
                Stopwatch(workload.timing.exec_mode or DISCRETE, wait, empty_call_ns(wait), workload.device),
                workload.request.effort,
                None if cache == WARM else caches,
                announce,
                workload.request.inputs.seed,
                is_throttled=lambda: clocks.is_throttled,
                records=not workload.request.profiled and records_work(workload.device),
                workers=untrusted_processes if workload.request.candidates.untrusted else None,
                cold=cache == COLD,
            )
            for functions in measurer.in_rounds(same_cache) if cache == PROGRAM else measurer.one_by_one(same_cache):
                number = functions[0].number
                running[number] -= len(functions)
                if not running[number]:
                    energies = metered(number, all_groups, workload, announce) if is_metered else {}
                    yield finished(case_of_number[number], energies)


def _groups_with(
    cache: str,
    all_rows: Sequence[tuple[Case, list[Prepared]]],
    workload: Workload,
    surroundings: PrecedingCalls,
    announce: Announce,
    without: Collection[int],
) -> list[FunctionGroup]:
    rows = [(case, [item for item in prepared if workload.cache_of(item[0]) == cache]) for case, prepared in all_rows]
    around = _with_preceding_functions(rows, workload, surroundings, announce, without) if cache == PROGRAM else {}
    return _groups(rows, workload, surroundings, around)


def _measure_concurrently(
    rows: Sequence[tuple[Case, list[Prepared]]], workload: Workload, announce: Announce
) -> dict[int, ConcurrentRun]:
    run_of_function: dict[int, ConcurrentRun] = {}
    for count in {point.streams for point in workload.request.points} - {1}:
        groups: dict[object, FunctionGroup] = {}
        for case, prepared in rows:
            context = workload.context_of
            for variant, _, function in prepared:
                if function is not None and variant.point.streams == count:
                    grad = workload.wants_grad(case, variant.direction)
                    kind = (f"{sorted(context(case, variant).items())} {grad}", replace(variant, number=0))
                    groups.setdefault(kind, FunctionGroup(context(case, variant), grad, [])).functions.append(function)
        for run in measure_concurrently(
            list(groups.values()), count, workload.request.effort, workload.device, announce
        ):
            run_of_function[id(run.timed_function)] = run
    return run_of_function


def _with_preceding_functions(
    rows: Sequence[tuple[Case, list[Prepared]]],
    workload: Workload,
    surroundings: PrecedingCalls,
    announce: Announce,
    without: Collection[int],
) -> dict[int, TimedFunction]:
    function_of_case = {
        function.number: function
        for _, prepared in reversed(rows)
        for _, _, function in reversed(prepared)
        if function is not None and function.number not in without
    }
    preceding = [case for case in surroundings.around([case for case, _ in rows]) if case.number not in without]
    preceding = [case for case in preceding if case.captured_us < QUICK_US]
    sizes = {case.number: _argument_bytes(case) for case in preceding}
    most_bytes = _most_bytes((case for case, _ in rows), workload)
    own_bytes = sum(_argument_bytes(case) for case, _ in rows)
    free_bytes = max(most_bytes - own_bytes, round(BEFORE_SHARE * most_bytes))
    inputs = replace(workload.request.inputs, values=(REPEATED,))
    plain = replace(
        workload.with_request(inputs=inputs, modes=ModeOptions(), points=PointOptions()),
        timing=replace(workload.timing, backward=False, cache=(PROGRAM,)),
        memory=False,
    )
    for case in sorted(preceding, key=lambda case: sizes[case.number]):
        free_bytes -= sizes[case.number]
        if free_bytes < 0:
            break
        prepared = prepare(replace(case, input_sets=()), plain, lambda number, _: announce(number, NO_ROW))
        function_of_case.update((case.number, function) for _, _, function in prepared if function is not None)
    return function_of_case


def _groups(
    rows: Sequence[tuple[Case, list[Prepared]]],
    workload: Workload,
    surroundings: PrecedingCalls,
    around: Mapping[int, TimedFunction],
) -> list[FunctionGroup]:
    groups: dict[str, FunctionGroup] = {}
    free_bytes = round(BEFORE_SHARE * _most_bytes((case for case, _ in rows), workload))
    for case, prepared in rows:
        places = surroundings.places.get(case.number, ())
        # other calls of the case, before a call, use other memory
        copies = max((place.before.count(case.number) for place in places), default=0)
        if places and case.captured_us < SHORT_US:
            copies = max(copies, 1)
        needed = copies * _argument_bytes(case) * (1 + len(case.input_sets)) * len(prepared)
        has_copies = needed <= free_bytes
        free_bytes -= needed if has_copies else 0
        for variant, _, function in prepared:
            if function is not None and variant.point.streams == 1:
                context, grad = workload.context_of(case, variant), workload.wants_grad(case, variant.direction)
                group = groups.setdefault(f"{sorted(context.items())} {grad}", FunctionGroup(context, grad, [], around))
                function.places = places or function.places
                function.copy_inputs(1 + copies if has_copies else 1)
                group.functions.append(function)
    return list(groups.values())


def _fill(
    prepared: Prepared,
    case: Case,
    workload: Workload,
    concurrent_runs: Mapping[int, ConcurrentRun],
    energies: Mapping[int, Energy],
    clocks: Clocks,
) -> None:
    variant, row, function = prepared
    row.clock_mhz, row.throttled = clocks.of_row(row.case, variant.number)
    energy, run = energies.get(id(function)), concurrent_runs.get(id(function))
    if energy is not None:
        row.clock_mhz = row.clock_mhz if energy.clock_mhz is None else energy.clock_mhz
        row.throttled = ", ".join(energy.throttled) or None
        row.add(energy.columns)
    if function is None:
        return
    if function.failure is not None:
        fail(row, function.failure, workload)
    elif run is not None:
        fill_times(row, run.loaded, workload, variant)
        row.overlap = run.overlap
    else:
        fill_times(row, function.samples, workload, variant)
        # a single operator that waits for the device takes as long in the program
        if function.is_launch_bound and case.operator is not None:
            row.doubts = LAUNCH_BOUND
        if function.recorded:
            fill_kernels(row, function.recorded, case.context)
        if case.timing_clusters:
            fill_timing_clusters(row, case, function.samples)


def _compare(prepared: Sequence[Prepared], reference: str) -> None:
    rows = [item.row for item in prepared]
    bases = [base_index(place, rows, reference) for place in range(len(rows))]
    for (_, row, function), base in zip(prepared, bases, strict=True):
        if base is not None:
            row.ratio, other = ratio_over(row, rows[base]), prepared[base].function
            if row.ratio is not None and function is not None and other is not None:
                fill_pairs(row, function, other, rows[base].median_us or 0.0)
