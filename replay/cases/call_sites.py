"""Call sites of a case: the module, phase and source line from which the program made each of its calls."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

MOST_SITES = 2048  # call sites of a case; if there are more, those with few calls are added up by module and phase
OTHERS = "(others)"  # text in place of the module or line in an entry that adds up several call sites
PHASES = ("forward", "backward", "optimizer")
COLUMNS = ["module", "phase", "file", "line", "function"]

Where = tuple[str, str, str]  # module, phase and line
Amount = tuple[int, float]  # number of calls, and the sum of their times in us


@dataclass(frozen=True, slots=True)
class CallSite:
    """The calls of one case from one source line, in one module and one phase.

    line : `file:line function`; empty if unknown
    """

    module: str
    phase: str
    line: str
    count: int
    captured_us: float


def count_call_sites(calls: pd.DataFrame, groups: pd.Series[int]) -> dict[int, tuple[CallSite, ...]]:
    import pandas as pd

    from opgrip.traces.table.call_table import COUNT

    amounts = pd.DataFrame({"group": groups, "scope": calls["scope"], COUNT: calls[COUNT]})
    amounts["us"] = calls["raw_ns"] * calls[COUNT] / 1e3
    sums = amounts.groupby(["group", "scope"], sort=False)[[COUNT, "us"]].sum()
    scopes = calls.drop_duplicates("scope").set_index("scope")[COLUMNS].astype(object)
    where_of = {
        scope: (_text(module), _text(phase), f"{file}:{line} {function}" if _text(file) else "")
        for scope, module, phase, file, line, function in scopes.itertuples(name=None)
    }
    totals: dict[int, dict[Where, Amount]] = defaultdict(dict)
    for (group, scope), count, time_us in sums.itertuples(name=None):
        _add(totals[int(group)], where_of[scope], (int(count), float(time_us)))
    sites_of_group = {
        group: [CallSite(*key, count, round(time_us, 3)) for key, (count, time_us) in _capped(own).items()]
        for group, own in totals.items()
    }
    return {group: tuple(sorted(sites, key=_order)) for group, sites in sites_of_group.items()}


def _text(cell: object) -> str:
    return cell if isinstance(cell, str) else ""


def _add(totals: dict[Where, Amount], key: Where, one: Amount) -> None:
    count, time_us = totals.get(key, (0, 0.0))
    totals[key] = count + one[0], time_us + one[1]


def _capped(totals: Mapping[Where, Amount]) -> Mapping[Where, Amount]:
    if len(totals) <= MOST_SITES:
        return totals
    # merge call sites with few calls in one module and phase; if that is not enough, whole modules of one phase
    modules = {(module, phase) for module, phase, _ in totals}
    by_module = _fold(totals, MOST_SITES - len(modules), lambda module, phase: (module, phase, OTHERS))
    if len(by_module) <= MOST_SITES:
        return by_module
    return _fold(by_module, MOST_SITES, lambda module, phase: (OTHERS, phase, OTHERS))


def _fold(totals: Mapping[Where, Amount], limit: int, where: Callable[[str, str], Where]) -> dict[Where, Amount]:
    ordered = sorted(totals.items(), key=lambda item: -item[1][0])
    folded = dict(ordered[: max(limit, 0)])
    for (module, phase, _), amount in ordered[max(limit, 0) :]:
        _add(folded, where(module, phase), amount)
    return folded


def _order(site: CallSite) -> tuple[int, str, str, str]:
    return -site.count, site.phase, site.line, site.module


def to_text(sites: Iterable[CallSite]) -> str:
    """Return call sites as JSON, {phase: {line: {module: [number of calls, their time in us]}}}, or empty text."""
    tree: dict[str, dict[str, dict[str, tuple[int, float]]]] = {}
    for site in sites:
        tree.setdefault(site.phase, {}).setdefault(site.line, {})[site.module] = site.count, site.captured_us
    return json.dumps(tree, separators=(",", ":")) if tree else ""


def from_text(text: str) -> tuple[CallSite, ...]:
    try:
        sites = [
            CallSite(str(module), str(phase), str(line), int(count), float(time_us))
            for phase, lines in (json.loads(text) if text else {}).items()
            for line, modules in lines.items()
            for module, (count, time_us) in modules.items()
        ]
    except (AttributeError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"call_sites is not an object of phases, lines and modules: {text[:60]!r}") from error
    if not all(site.count > 0 and isfinite(site.captured_us) for site in sites):
        raise ValueError("call_sites has a call site without calls, or with an invalid time")
    return tuple(sorted(sites, key=_order))


def module_of(sites: Sequence[CallSite]) -> str:
    """Return the module path of all call sites; if paths differ, with `*` for the part that differs."""
    paths = list(dict.fromkeys(site.module for site in sites))
    if len(paths) < 2:
        return paths[0] if paths else ""
    parts = [path.split(".") for path in paths]
    before = _common(parts)
    after = _common([path[len(before) :][::-1] for path in parts])[::-1]
    return ".".join([*before, "*", *after])


def _common(parts: Iterable[Sequence[str]]) -> list[str]:
    common = []
    for names in zip(*parts, strict=False):
        if len(set(names)) > 1:
            break
        common.append(names[0])
    return common


def phase_of(sites: Sequence[CallSite]) -> str:
    phases = {site.phase for site in sites}
    return ", ".join([*(phase for phase in PHASES if phase in phases), *sorted(phases - {*PHASES})])
