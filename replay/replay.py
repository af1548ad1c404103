"""Replays cases, some at a time, side by side; a bad one costs its row and nothing else."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from opgrip.replay.arguments.values import RECORDED
from opgrip.replay.cases import Case
from opgrip.replay.preparation import Prepared, describe_failure, prepare
from opgrip.replay.results import Result
from opgrip.replay.settings import Settings
from opgrip.replay.timing import pages
from opgrip.replay.timing.caches import COLD, PROGRAM, flusher
from opgrip.replay.timing.clock import empty_call_ns
from opgrip.replay.timing.methods import Stopwatch, synchronizer
from opgrip.replay.timing.rounds import Announce, Group, Measurer
from opgrip.replay.timing.samples import NOISY, ratio_quantiles
from opgrip.replay.timing.subjects import Subject
from opgrip.replay.timing.surroundings import Surroundings
from opgrip.replay.work import bytes_of

CASES, BYTES = 128, 1 << 30
"""Cases that are measured side by side, and bytes of their arguments."""
QUICK_US = 50_000
"""Calls that took longer are not run before others, which they would keep waiting."""


def replay(
    cases: Sequence[Case],
    settings: Settings,
    surroundings: Surroundings | None = None,
    announce: Announce = lambda number: None,
    without: Collection[int] = (),
) -> Iterator[Result]:
    """The rows of each case, in order.

    Parameters
    ----------
    surroundings : of the cases in their program; they run after the calls that they came after there
    announce : is told the number of each case before anything of it runs
    without : numbers of cases that are not run before others
    """
    pages.keep_freed_memory()
    for window in windows(cases):
        yield from _measure(window, settings, surroundings or Surroundings({}, {}), announce, without)


def windows(cases: Sequence[Case]) -> Iterator[list[Case]]:
    """Cases in the parts in which they are measured side by side."""
    window: list[Case] = []
    size = 0
    for case in cases:
        needed = bytes_of([case.signature.args, case.signature.kwargs]) * (1 + len(case.variants))
        if window and (len(window) == CASES or size + needed > BYTES):
            yield window
            window, size = [], 0
        window.append(case)
        size += needed
    if window:
        yield window


def _measure(
    cases: Sequence[Case], settings: Settings, surroundings: Surroundings, announce: Announce, without: Collection[int]
) -> list[Result]:
    rows: list[tuple[Case, list[Prepared]]] = []
    for case in cases:
        announce(case.number)
        rows.append((case, prepare(case, settings)))
    measurer = Measurer(
        Stopwatch(settings.method, synchronizer(settings.device), empty_call_ns()),
        settings.effort,
        flusher(settings.device) if settings.cache == COLD else None,
        announce,
        settings.seed,
    )
    if settings.cache == PROGRAM:
        around = _around(rows, settings, surroundings, announce, without)
        measurer.in_rounds(_groups(rows, settings, surroundings, around))
    else:
        measurer.one_by_one(_groups(rows, settings, surroundings, {}))
    return [row for _, prepared in rows for row in _filled(prepared, settings)]


def _around(
    rows: Sequence[tuple[Case, list[Prepared]]],
    settings: Settings,
    surroundings: Surroundings,
    announce: Announce,
    without: Collection[int],
) -> dict[int, Subject]:
    """Subjects of all calls that stand before those that are measured, these included."""
    found = {subject.number: subject for _, prepared in reversed(rows) for _, subject in reversed(prepared) if subject}
    plain = replace(settings, values=(RECORDED,), backward=False, memory=False)
    for case in surroundings.around([case for case, _ in rows]):
        if case.number not in without and case.captured_us < QUICK_US:
            announce(case.number)
            subjects = [subject for _, subject in prepare(replace(case, variants=()), plain)]
            found.update((case.number, subject) for subject in subjects if subject is not None)
    return found


def _groups(
    rows: Sequence[tuple[Case, list[Prepared]]],
    settings: Settings,
    surroundings: Surroundings,
    around: Mapping[int, Subject],
) -> list[Group]:
    """Subjects by the settings of torch that they run under."""
    groups: dict[str, Group] = {}
    for case, prepared in rows:
        context, grad = settings.context_of(case), settings.wants_grad(case)
        group = groups.setdefault(f"{sorted(context.items())} {grad}", Group(context, grad, [], around))
        for _, subject in prepared:
            if subject is not None:
                subject.places = surroundings.places.get(case.number) or subject.places
                group.subjects.append(subject)
    return list(groups.values())


def _filled(prepared: Sequence[Prepared], settings: Settings) -> Iterator[Result]:
    """The rows of one case, with what was measured."""
    first: dict[str, Subject] = {}
    for result, subject in prepared:
        if subject is None:
            yield result
            continue
        if subject.failure is not None:
            status, reason = describe_failure(subject.failure)
            yield replace(result, status=status, error=reason)
            continue
        base = first.setdefault(result.direction, subject)
        ratio = (None, None, None) if base is subject else ratio_quantiles(subject.times_ns, base.times_ns)
        yield _with_times(result, subject, settings, ratio)


def _with_times(
    result: Result, subject: Subject, settings: Settings, ratio: tuple[float | None, float | None, float | None]
) -> Result:
    samples = subject.samples
    return replace(
        result,
        median_us=samples.quantile_us(0.5),
        p10_us=samples.quantile_us(0.1),
        p90_us=samples.quantile_us(0.9),
        samples=len(samples),
        spread=samples.spread if len(samples) > 1 else None,
        stopped=samples.done(settings.effort) or "most",
        dropped=samples.dropped,
        noisy=samples.spread > NOISY if len(samples) > 1 else None,
        method=settings.method,
        cache=settings.cache,
        ratio_p10=ratio[0],
        ratio=ratio[1],
        ratio_p90=ratio[2],
    )
