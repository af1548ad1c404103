"""Units: all calls of a module, or of a Python function, taken as one case, so that a compiler can fuse them."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from opgrip.errors import NothingSelectedError, UserError
from opgrip.replay.cases.call_sites import CallSite
from opgrip.replay.cases.cases import (
    ALL_EXCLUDED,
    NO_CALL_MATCHES_BOTH,
    NO_CALL_WITHIN,
    Case,
    labeled_calls,
    no_match,
    values_of,
)
from opgrip.replay.cases.selection import MODULE, Selection
from opgrip.replay.cases.units.facts import Facts, facts_of
from opgrip.replay.cases.units.graphs import UnitOperator
from opgrip.replay.cases.units.links import link
from opgrip.replay.cases.units.places import make_places, module_types, names_of, unit_name
from opgrip.replay.cases.units.runs import Run, UnitCall, make_runs
from opgrip.replay.inputs.stored import drawn_values
from opgrip.replay.operators.lookup import TRUSTED_EXTENSIONS
from opgrip.traces import Trace
from opgrip.traces.analysis.module_runs import origins
from opgrip.traces.schema.records import Scope, Signature
from opgrip.traces.table.unconverted import no_calls
from opgrip.traces.values import Drawable

UNIT = "unit"
"""Kind of the signature of a unit, which no trace holds."""


def make_units(
    trace: Trace,
    selection: Selection,
    unit: str,
    extensions: Collection[str] = TRUSTED_EXTENSIONS,
) -> list[Case]:
    """One case a unit whose calls have equal signatures and hang together equally, by falling share of time.

    A unit is an uninterrupted run of calls that a thread made in one module or function, forward, backward and
    optimizer apart. A case's function takes the tensors that come from outside, each once, and what says where and in
    what they are; it gives a tuple of the results that later calls take, or those of its last call.

    Parameters
    ----------
    selection : `ops` are of names of units, `modules` of module paths. With `modules`, the outermost module that a
        pattern matches is the unit of all calls in it; with `ops`, the innermost function that one matches.
    unit : `module` or `function`
    extensions : modules whose functions may be called

    Raises
    ------
    UserError : where a pattern selects nothing, or the trace does not tell what memory calls share
    """
    calls = trace.own_calls
    if calls.empty:
        raise no_calls(trace)
    facts = {signature.number: facts_of(signature) for signature in trace.signatures}
    if not len(trace.storages) and any(item.takes for item in facts.values()):
        raise UserError("the trace does not tell what flows between its calls", "capture it again")
    runs = make_runs(trace, make_places(trace, unit, selection), facts, labeled_calls(trace, selection))
    if not runs:
        raise _nothing_selected(trace, unit, selection)
    types = module_types(trace) if unit == MODULE else {}
    runs = [run for run in runs if not any(map(selection.excludes, (run.place.name, unit_name(run.place, types))))]
    if not runs:
        raise NothingSelectedError(*ALL_EXCLUDED)
    alike: dict[tuple[str, str, tuple[UnitCall, ...]], list[Run]] = {}
    for run in runs:
        alike.setdefault((run.place.name, run.place.phase, run.calls), []).append(run)
    total = max(sum(len(group) * _median_ns(group) for group in alike.values()), 1.0)
    drawn, scopes = drawn_values(trace), origins(trace)
    cases = [
        _case(
            number,
            unit_name(group[0].place, types),
            group,
            facts,
            drawn,
            trace.contexts,
            total,
            extensions,
            _call_sites(group, scopes, unit),
        )
        for number, group in enumerate(alike.values())
    ]
    cases.sort(key=lambda case: (-case.share, case.number))
    return cases[: selection.top]


def _case(
    number: int,
    name: str,
    runs: Sequence[Run],
    facts: Mapping[int, Facts],
    drawn: Mapping[int, Drawable],
    contexts: Mapping[int, Mapping[str, Any]],
    total_ns: float,
    extensions: Collection[str],
    call_sites: Sequence[CallSite],
) -> Case:
    place = runs[0].place
    links = link(runs[0].calls, facts, sorted(set().union(*(run.escaping_results for run in runs))))
    signature = Signature(number, UNIT, name, (*links.outside, *links.settings), {}, links.results)
    median_ns, raw_ns = _median_ns(runs), sum(run.raw_ns for run in runs)
    context = _most_frequent(chain.from_iterable(run.contexts for run in runs))
    return Case(
        signature,
        values_of([signature], drawn),
        *(len(runs), median_ns / 1e3, raw_ns / 1e3, len(runs) * median_ns / total_ns),
        context={} if context is None else contexts.get(context, {}),
        phase=place.phase,
        operator=UnitOperator(links, extensions),
        captured_spread=_spread(runs),
        perturbed=sum(run.perturbed for run in runs),
        call_sites=call_sites,
    )


def _call_sites(runs: Sequence[Run], scopes: Mapping[int, Scope], unit: str) -> list[CallSite]:
    """Return the modules that runs of a unit are in; the line of a function is that of its first call."""
    sites: dict[tuple[str, str, str], list[float]] = {}
    for run in runs:
        scope = scopes[run.scope]
        if unit == MODULE:
            module, line = run.place.name if scope.module_type else "", ""
        else:
            module, line = scope.module, f"{scope.file}:{scope.line} {scope.function}" if scope.file else ""
        sites.setdefault((module, run.place.phase, line), []).append(run.raw_ns / 1e3)
    counted = (CallSite(*where, len(times), sum(times)) for where, times in sites.items())
    return sorted(counted, key=lambda site: -site.count)


def _median_ns(runs: Sequence[Run]) -> float:
    return statistics.median(run.time_ns for run in runs)


def _spread(runs: Sequence[Run]) -> float | None:
    """Interquartile range of the runs' times, as a share of their median; None for one run."""
    if len(runs) == 1:
        return None
    low, _, high = statistics.quantiles((run.time_ns for run in runs), n=4, method="inclusive")
    return (high - low) / max(_median_ns(runs), 1.0)


def _most_frequent(numbers: Iterable[int | None]) -> int | None:
    most = Counter(number for number in numbers if number is not None).most_common(1)
    return most[0][0] if most else None


def _nothing_selected(trace: Trace, unit: str, selection: Selection) -> UserError:
    """Which of the patterns it is that selects nothing."""
    calls = trace.own_calls
    everything = names_of(make_places(trace, unit, Selection()))
    names = calls["scope"].map(everything).rename(unit)
    calling_scopes = set(calls["scope"])
    if not calling_scopes & make_places(trace, unit, replace(selection, module=())).keys():
        return no_match(names, selection.op, "--op")
    if not calling_scopes & make_places(trace, unit, replace(selection, op=())).keys():
        return no_match(calls["module"], selection.module, "--module")
    selects_some = calling_scopes & make_places(trace, unit, selection).keys()
    return NothingSelectedError(*(NO_CALL_WITHIN if selects_some else NO_CALL_MATCHES_BOTH))
