"""Comparison of two runs: a verdict on each case, sums of times by group, and differences in configuration."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opgrip.replay.reports.comparison.unpaired_ratio import (
    ComparedRows,
    RatioVerdict,
    Verdict,
    compare_rows,
    difference_of_sums,
    doubts,
    judge,
    memory_rates,
)
from opgrip.replay.reports.outcome import Results
from opgrip.replay.results.ratios import shares_by
from opgrip.replay.results.results import CONTENDED, OK, SETTINGS, UNUSUAL, WRONG, Result

if TYPE_CHECKING:
    import pandas as pd

    from opgrip.replay.reports.comparison.gate import Held


OF_HEADER = ("device", "trace_hash", "seed")
OF_ENVIRONMENT = ("machine", "system", "processor", "processors", "governor", "max_mhz", "threads", "python")
UNKNOWN = "not known"
# columns that may have one value in all rows of a run and another in all rows of the other run, with the meaning of an
# empty cell
OF_RUN = {
    "dtype": "as recorded",
    "tune": "none",
    "threads": "as recorded",
    "values": "",
    "streams": "",
    "cache": "",
    "method": "",
}
SAID = ("seed", "exec_mode")  # settings that are not listed, because a header field or a column already contains them


def what_differs(base: Results, new: Results) -> list[tuple[str, str, str]]:
    """Return (name, value in base, value in new) of each setting that differs."""
    return [
        (name.replace("_", " ") if name.islower() else name, old, now)
        for name, old, now in _facts(base.header, new.header)
        if old != now and not (UNKNOWN in (old, now) and name != "device")
    ] + [(name, old, now) for name, old, now in _settings(base, new) if old != now]


def _facts(base: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    for name in OF_HEADER:
        yield name, _text(base.get(name)), _text(new.get(name))
    old, now = _part(base, "environment"), _part(new, "environment")
    for name in OF_ENVIRONMENT:
        yield name, _text(old.get(name)), _text(now.get(name))
    if old and now:
        # a run without environment variables has no `variables` in its environment
        yield from _members(_part(old, "variables"), _part(now, "variables"))
    libraries = [_part(_part(header, "accelerator"), "libraries") for header in (base, new)]
    for first, second in ((_part(old, "versions"), _part(now, "versions")), libraries):
        if first and second:
            yield from _members(first, second)


def run_columns(base: Results, new: Results) -> list[str]:
    columns: list[str] = []
    for name in ("device", *OF_RUN):
        if all(_count(run, [*columns, name]) == _count(run, columns) for run in (base, new)):
            columns.append(name)
    return columns


def _count(run: Results, columns: Sequence[str]) -> int:
    return len({row.identity_without(*columns) for row in run})


def _settings(base: Results, new: Results) -> Iterator[tuple[str, str, str]]:
    for name, usual in OF_RUN.items():
        if base.rows and new.rows:
            yield name, _values(base, name) or usual, _values(new, name) or usual
    old, now = _settings_of(base.header), _settings_of(new.header)
    yield from _members(old, now)


def _settings_of(header: Mapping[str, Any]) -> dict[str, str]:
    earlier = header.get(UNUSUAL)
    settings = {str(name): str(value) for name, value in _part(header, SETTINGS).items() if name not in SAID}
    return settings | ({"options": ", ".join(map(str, earlier))} if earlier else {})


def _values(side: Results, name: str) -> str:
    return ", ".join(sorted({str(value) for row in side.rows if (value := getattr(row, name)) not in (None, "")}))


def _members(old: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    for name in sorted({*old, *now}):
        yield name, str(old.get(name, "-")), str(now.get(name, "-"))


def _part(facts: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = facts.get(name)
    return value if isinstance(value, Mapping) else {}


def _text(value: object) -> str:
    return UNKNOWN if value is None else str(value)


MARGIN = 0.05  # largest relative difference at which times count as the same
UNREADABLE = "a run takes no longer than reading the clock"


@dataclass(frozen=True, slots=True)
class Pair:
    """One case in one mode: its row in the base run and its row in the new run.

    judgement : verdict with the ratio of the times and its interval; None if one of the rows has no usable time
    """

    base: Result
    new: Result
    judgement: RatioVerdict | None = None
    compared: ComparedRows | None = None
    reason: str = ""

    @property
    def verdict(self) -> Verdict:
        return Verdict.UNSURE if self.judgement is None else self.judgement.verdict

    @property
    def more_runs(self) -> int | None:
        return None if self.judgement is None else self.judgement.more_runs

    @property
    def more_new_runs(self) -> int | None:
        return None if self.judgement is None else self.judgement.more_new_runs

    @property
    def is_contended(self) -> bool:
        return CONTENDED in (self.base.status, self.new.status)

    @property
    def base_us(self) -> float:
        return max(self.base.count, 1) * (self.compared.base_us if self.compared else self.base.median_us or 0.0)

    @property
    def new_us(self) -> float:
        return max(self.base.count, 1) * (self.compared.new_us if self.compared else self.new.median_us or 0.0)

    @property
    def lost_us(self) -> float:
        return self.new_us - self.base_us


@dataclass(frozen=True, slots=True)
class Total:
    name: str
    cases: int
    base_us: float
    new_us: float
    judgement: RatioVerdict


@dataclass(frozen=True, slots=True, repr=False)
class Comparison:
    """Result of comparing two runs of a replay.

    differs : settings that differ, as (name, value in base, value in new)
    pairs : cases timed in both runs
    fixed : cases that are ok in the new run, and were neither ok nor contended in the base
    untimed : other cases without a time in at least one run
    changed : cases whose results were correct in the base and are wrong in the new run
    margin : largest relative difference at which times count as the same
    """

    base: Mapping[str, Any]
    new: Mapping[str, Any]
    differs: Sequence[tuple[str, str, str]]
    pairs: Sequence[Pair]
    broken: Sequence[Pair] = ()
    fixed: Sequence[Pair] = ()
    untimed: Sequence[Pair] = ()
    changed: Sequence[Pair] = ()
    missing: Sequence[Result] = ()
    added: Sequence[Result] = ()
    margin: float = MARGIN

    @property
    def frame(self) -> pd.DataFrame:
        """Data frame with the columns that `opgrip compare -o` writes; a case with two verdicts has a row for each."""
        from opgrip.replay.reports.comparison.comparison_report import to_frame

        return to_frame(self)

    def __repr__(self) -> str:
        from opgrip.replay.reports.comparison.comparison_report import summary

        return f"<Comparison: {summary(self)}>"

    def _repr_html_(self) -> str:
        from opgrip.replay.reports.comparison.comparison_report import to_html

        return to_html(self)

    def gate(self, *conditions: str) -> list[Held]:
        """Return the outcomes of gates (conditions such as `slower<=5%`), as `opgrip compare --gate` reports them."""
        from opgrip.replay.reports.comparison.gate import hold_all, parse_gate

        return hold_all(map(parse_gate, conditions), self)

    @property
    def counts(self) -> Counter[Verdict]:
        return Counter(pair.verdict for pair in self.pairs)

    def totals(self, by: str | None = None) -> list[Total]:
        """Return the total times of the cases in each group.

        by : `op`, `family`, `mode`, `module`, `phase` or `line`; None for a single group of all cases
        """
        members: dict[str, list[tuple[float, ComparedRows]]] = defaultdict(list)
        for pair in self.pairs:
            if pair.compared is not None and not pair.is_contended:
                for name, share in ({"all": 1.0} if by is None else shares_by(pair.base, by)).items():
                    members[name].append((share * max(pair.base.count, 1), pair.compared))
        base_us = {name: fsum(calls * row.base_us for calls, row in rows) for name, rows in members.items()}
        names = sorted(members, key=lambda name: -base_us[name])
        judgements = judge([difference_of_sums(members[name]) for name in names], self.margin)
        return [
            Total(
                name,
                len(members[name]),
                base_us[name],
                fsum(calls * row.new_us for calls, row in members[name]),
                judgement,
            )
            for name, judgement in zip(names, judgements, strict=True)
        ]


def compare(base: Results | str | Path, new: Results | str | Path, margin: float = MARGIN) -> Comparison:
    """Compare two runs of a replay, or files of their results, case by case.

    Cases are matched by operator, shapes, recorded dtypes, settings and mode, not by their numbers in a trace.

    margin : largest relative difference at which times count as the same
    """
    base, new = (run if isinstance(run, Results) else Results.load(run) for run in (base, new))
    ignored_columns = run_columns(base, new)
    base_rows, new_rows = _by_identity(base.rows, ignored_columns), _by_identity(new.rows, ignored_columns)
    both = [(row, new_rows[identity]) for identity, row in base_rows.items() if identity in new_rows]
    timed = [pair for pair in both if _is_timed(pair[0]) and _is_timed(pair[1])]
    rates = memory_rates(timed)
    compared = compare_rows(timed, rates)
    judged = iter(judge([item.difference for item in compared if item is not None], margin))
    pairs = [
        Pair(old, now, reason=UNREADABLE)
        if item is None
        else Pair(old, now, next(judged), item, "; ".join(doubts(old, now, rates)))
        for (old, now), item in zip(timed, compared, strict=True)
    ]
    pairs.sort(key=lambda pair: -pair.lost_us)
    broken = [Pair(old, now) for old, now in both if _gave_results(old) and not _gave_results(now)]
    fixed = [Pair(old, now) for old, now in both if old.status not in (OK, CONTENDED) and now.status == OK]
    named = {id(pair.new) for pair in (*pairs, *broken, *fixed)}
    return Comparison(
        base.header,
        new.header,
        what_differs(base, new),
        pairs,
        broken=broken,
        fixed=fixed,
        untimed=[Pair(old, now) for old, now in both if id(now) not in named],
        changed=[
            Pair(old, now)
            for old, now in both
            if old.status == OK and old.faithful is not False
            if now.status == WRONG or (now.status == OK and now.faithful is False)
        ],
        missing=[row for identity, row in base_rows.items() if identity not in new_rows],
        added=[row for identity, row in new_rows.items() if identity not in base_rows],
        margin=margin,
    )


def _by_identity(rows: Iterable[Result], ignored: Sequence[str]) -> dict[tuple[object, ...], Result]:
    counts: Counter[tuple[object, ...]] = Counter()
    by_identity: dict[tuple[object, ...], Result] = {}
    for row in rows:
        identity = row.identity_without(*ignored)
        by_identity[(*identity, counts[identity])] = row
        counts[identity] += 1
    return by_identity


def _gave_results(row: Result) -> bool:
    return row.status in (OK, WRONG, CONTENDED)


def _is_timed(row: Result) -> bool:
    return _gave_results(row) and (row.median_us is not None or bool(row.times_us))
