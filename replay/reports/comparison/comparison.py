"""Comparison of two runs: verdicts on cases, sums of times by group, differences in configuration, rows, and gates."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from math import fsum, inf
from pathlib import Path
from typing import Any

import pandas as pd

from opgrip.cli.command import counted
from opgrip.cli.terminal import shorten
from opgrip.display.figures import as_html
from opgrip.errors import UserError
from opgrip.replay.operators.lookup import family_of
from opgrip.replay.reports.comparison.unpaired_ratio import (
    ComparedRows,
    RatioVerdict,
    Verdict,
    compare_rows,
    difference_of_sums,
    doubts,
    interval_text,
    judge,
    memory_rates,
)
from opgrip.replay.reports.outcome import Results
from opgrip.replay.results.columns import Columns, column, columns_in
from opgrip.replay.results.judgement import CandidateColumns, JudgedStep
from opgrip.replay.results.paired_ratio import SLOWER, UNDECIDED
from opgrip.replay.results.ratios import shares_by
from opgrip.replay.results.results import CONTENDED, OK, SETTINGS, UNUSUAL, WRONG, Result

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
        return to_frame(self)

    def __repr__(self) -> str:
        return f"<Comparison: {summary(self)}>"

    def _repr_html_(self) -> str:
        return to_html(self)

    def gate(self, *conditions: str) -> list[Held]:
        """Return the outcomes of gates (conditions such as `slower<=5%`), as `opgrip compare --gate` reports them."""
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


def origin(header: Mapping[str, Any]) -> str:
    environment = header.get("environment", {})
    parts = (
        header.get("trace"),
        environment.get("machine"),
        header.get("device"),
        f"torch {header['torch']}" if "torch" in header else None,
        header.get("time"),
    )
    return ", ".join(str(part) for part in parts if part) or "a file that does not state its origin"


def summary(comparison: Comparison) -> str:
    counts = [f"{comparison.counts[verdict]:,} {verdict.value}" for verdict in Verdict if comparison.counts[verdict]]
    others = {
        "no longer ok": comparison.broken,
        "with other results": comparison.changed,
        "not timed": comparison.untimed,
        "missing": comparison.missing,
        "ok again": comparison.fixed,
        "new": comparison.added,
    }
    counts += [f"{len(rows):,} {word}" for word, rows in others.items() if rows]
    return f"{counted(len(comparison.pairs), 'case')} timed in both: {', '.join(counts) or 'none'}"


def total_line(total: Total) -> str:
    judgement = total.judgement
    interval = f"{judgement.ratio:.3f} times ({interval_text(judgement.low, judgement.high)})"
    times = f"{total.base_us / 1e3:,.2f} ms, now {total.new_us / 1e3:,.2f} ms"
    return f"all calls of these cases: {times}, {interval}: {judgement.verdict.value}"


def advice(comparison: Comparison) -> Iterator[str]:
    unsure = [pair for pair in comparison.pairs if pair.verdict is Verdict.UNSURE]
    unreadable = sum(pair.judgement is None for pair in unsure)
    if unreadable:
        yield f"{counted(unreadable, 'case')}: {UNREADABLE}"
    doubtful = [pair.reason for pair in unsure if pair.judgement is not None and pair.reason]
    if doubtful:
        like = ", or the like" if len(set(doubtful)) > 1 else ""
        yield f"{counted(len(doubtful), 'case')} with a wider interval: {doubtful[0]}{like}"
    more = sorted(pair.more_runs for pair in unsure if pair.more_runs is not None)
    if more:
        half = more[len(more) // 2]
        yield (
            f"{counted(len(more), 'case')} would be decided by more repeats, half of them by {half} "
            "more of each run: opreplay --repeats, or --until-decided BASE"
        )
    lost = sum(pair.more_runs is None and pair.judgement is not None and not pair.reason for pair in unsure)
    if lost:
        verb = "differs" if lost == 1 else "differ"
        yield (
            f"{counted(lost, 'case')} {verb} by about the margin, or by less than a machine's speed "
            "changes between runs"
        )


FAILED, FIXED, CHANGED, MISSING, ADDED = "FAILED", "FIXED", "CHANGED", "MISSING", "ADDED"
UNTIMED = "UNTIMED"  # verdicts of rows without a time in both runs, or with changed results


@dataclass(frozen=True, slots=True)
class ComparisonColumns(Columns):
    verdict: str = column(
        "`SLOWER`, `FASTER`, `SAME` or `UNSURE`; for other rows `FAILED` (results only in the base), "
        "`FIXED` (ok only in the new run), `MISSING`, `ADDED` (only in one run) or `UNTIMED`; `CHANGED` if the results "
        "are no longer right",
        default="",
    )
    op: str = column("name of the operator, sample, module or function", default="")
    shapes: str = column("dtypes and shapes of the arguments, in short form", default="")
    mode: str = column("mode in which the case was run", default="")
    variant: str = column(
        "settings other than the mode, if not the defaults: direction, values, threads, batch, streams, cache",
        default="",
    )
    module: str = column("path of the module that made the calls; a pattern if there are several", default="")
    family: str = column("kind of work of the operator", default="")
    key: str = column(
        "hash of operator, shapes, dtypes and settings, which is the same for equal cases of all traces", default=""
    )
    count: int | None = column("number of calls in the program, according to the base")
    base_us: float | None = column(
        "time of one call in the base: geometric mean over the repeats of their medians, or of their fastest runs if "
        "medians are less reliable",
        "us",
    )
    new_us: float | None = column("time of one call in the new run, computed in the same way", "us")
    ratio: float | None = column("`new_us` divided by `base_us`")
    low: float | None = column("lower end of the 95 % interval of `ratio`")
    high: float | None = column("upper end of the 95 % interval of `ratio`")
    probability: float | None = column("probability that an unchanged case differs by as much", "1")
    more_runs: int | None = column(
        "number of further repeats of each run that would decide the verdict; empty if it is decided or cannot be"
    )
    base_repeats: int | None = column("number of repeats of the base")
    new_repeats: int | None = column("number of repeats of the new run")
    reason: str | None = column("reason for a wider interval, for a missing interval, or for a status other than ok")


def rows_of(comparison: Comparison) -> Iterator[ComparisonColumns]:
    return (cells for cells, _ in rows_with_results(comparison))


def rows_with_results(comparison: Comparison) -> Iterator[tuple[ComparisonColumns, Result]]:
    """Yield (row of the comparison, result row of the new run, or of the base if the new run has none)."""
    worse: list[tuple[str, list[Pair]]] = [(FAILED, [*comparison.broken]), (CHANGED, [*comparison.changed])]
    for word, pairs in worse:
        for pair in pairs:
            yield _row(word, pair.base, pair.new, reason=pair.new.error)
    for row in comparison.missing:
        yield _row(MISSING, row, None)
    for verdict in (Verdict.SLOWER, Verdict.UNSURE, Verdict.SAME, Verdict.FASTER):
        for pair in comparison.pairs:
            if pair.verdict is verdict:
                yield _timed_row(pair)
    for pair in comparison.fixed:
        yield _row(FIXED, pair.base, pair.new, reason=f"was {pair.base.status}")
    for pair in comparison.untimed:
        yield _row(UNTIMED, pair.base, pair.new, reason=_why_untimed(pair.new))
    for row in comparison.added:
        yield _row(ADDED, None, row, reason=None if row.status == OK else _why_untimed(row))


def _why_untimed(row: Result) -> str:
    return f"{row.status}: {row.error}" if row.error else row.status


def _timed_row(pair: Pair) -> tuple[ComparisonColumns, Result]:
    judgement, compared = pair.judgement, pair.compared
    figures: dict[str, Any] = {}
    if judgement is not None and compared is not None:
        figures = {name: getattr(judgement, name) for name in ("ratio", "low", "high", "probability")}
        figures |= {"base_us": compared.base_us, "new_us": compared.new_us}
    return _row(
        pair.verdict.value, pair.base, pair.new, **figures, more_runs=pair.more_runs, reason=pair.reason or None
    )


def _row(word: str, base: Result | None, new: Result | None, **figures: Any) -> tuple[ComparisonColumns, Result]:
    row, latest = base or new, new or base
    assert row is not None, "a row of a comparison is in one of the two runs"
    assert latest is not None, "a row of a comparison is in one of the two runs"
    times = {"base_us": base and base.median_us, "new_us": new and new.median_us}
    cells = ComparisonColumns(
        verdict=word,
        op=row.op,
        shapes=row.shapes,
        mode=row.mode,
        variant=row.variant,
        module=row.module,
        family=family_of(row.op),
        key=row.key,
        count=row.count,
        base_repeats=None if base is None else len(base.repeats or (1,)),
        new_repeats=None if new is None else len(new.repeats or (1,)),
        **(times | figures),
    )
    return cells, latest


HIDDEN = ("module", "family", "key", "probability", "base_repeats", "new_repeats")  # columns that notebooks leave out


def to_frame(comparison: Comparison) -> pd.DataFrame:
    names = [about.name for about in columns_in(ComparisonColumns)]
    return pd.DataFrame([asdict(row) for row in rows_of(comparison)], columns=names)


def to_html(comparison: Comparison) -> str:
    lines = [
        summary(comparison),
        *(total_line(total) for total in comparison.totals()),
        f"base: {origin(comparison.base)}",
        f"new: {origin(comparison.new)}",
        *(f"differs: {name}: {old}, now {now}" for name, old, now in comparison.differs),
        *advice(comparison),
    ]
    frame = to_frame(comparison)
    filled = [name for name in frame if name not in HIDDEN and (frame[name].notna() & (frame[name] != "")).any()]
    return as_html(lines, frame[filled])


_FORM = re.compile(r"\s*(\w+)\s*<=\s*(\d+(?:\.\d+)?)\s*(%?)\s*")
# gates that limit a number of rows, with functions that return these rows
COUNTED: dict[str, Callable[[Comparison], list[Result]]] = {
    "failed": lambda comparison: [pair.new for pair in comparison.broken],
    "changed": lambda comparison: [pair.new for pair in comparison.changed],
    "missing": lambda comparison: list(comparison.missing),
}
EACH, TOTAL = "slower", "total"
# gates that limit a time: of each row, of all rows together, or of each group
TIMED = (EACH, TOTAL, "op", "module", "family", "mode")
PLURALS = {"family": "families"}
NOTHING = "no case was timed in both runs"
HINT = f"write {', '.join(f'{name}<=5%' for name in TIMED)}, or {', '.join(f'{name}<=0' for name in COUNTED)}"

# factors that are applied to a gate's limit: for the upper end of the total's interval, for that of a decided row's,
# and for the ratio of an undecided row
TOTAL_END, ROW_END, ROW_RATIO = 1.05, 1.25, 1.5
MOST_CONTENDED = 2.0  # largest ratio that is assumed for a row without an upper end because of contention
REPEATS, MOST_REPEATS = 5, 20  # smallest and largest number of repeats that is recommended


class Outcome(Enum):
    PASSED = "passed"
    NOT_DECIDED = "not decided"
    FAILED = "failed"

    @property
    def exit_status(self) -> int:
        return {Outcome.PASSED: 0, Outcome.FAILED: 1, Outcome.NOT_DECIDED: 3}[self]


@dataclass(frozen=True, slots=True)
class Gate:
    """A condition on a comparison, such as `slower<=5%`.

    most : largest allowed relative slowdown (0.05 for 5 %), or largest allowed number of rows
    """

    name: str
    most: float
    text: str


@dataclass(frozen=True, slots=True)
class Held:
    gate: Gate
    outcome: Outcome
    reason: str = ""
    rows: Sequence[Result] = ()

    @property
    def line(self) -> str:
        text = f"gate {self.gate.text}: {self.outcome.value}"
        return f"{text}: {self.reason}" if self.reason else text


@dataclass(frozen=True, slots=True)
class _Limited:
    name: str
    judgement: RatioVerdict | None
    pairs: Sequence[Pair]
    share: float = 1.0
    most: float = inf

    def is_slower(self, limit: float) -> bool:
        judgement = self.judgement
        return judgement is not None and judgement.verdict is Verdict.SLOWER and judgement.ratio > limit

    def ends_above(self, most: float) -> bool:
        return self.judgement is None or self.judgement.high > most

    def loss(self, is_certain: bool = False) -> float:
        if self.judgement is None:
            return inf
        return self.judgement.ratio if is_certain else self.share * (min(self.judgement.high, self.most) - 1)

    def __str__(self) -> str:
        if self.judgement is None:
            return f"{self.name}: no time"
        interval = interval_text(self.judgement.low, self.judgement.high)
        return f"{self.name}: {self.judgement.ratio:.3f} times ({interval})"


def hold(gate: Gate, comparison: Comparison) -> Held:
    """Return the outcome of a gate for a comparison; docs/results.md explains when a gate fails."""
    if gate.name in COUNTED:
        rows = COUNTED[gate.name](comparison)
        if len(rows) <= gate.most:
            return Held(gate, Outcome.PASSED)
        return Held(gate, Outcome.FAILED, f"{counted(len(rows), 'row')}, first {describe(rows[0])}", rows)
    if not any(pair.judgement for pair in comparison.pairs):
        return Held(gate, Outcome.NOT_DECIDED, NOTHING)
    limit, limited = 1 + gate.most, _limited_rows(gate, comparison)
    sums = [
        _Limited("the only row" if total.cases == 1 else f"all {total.cases:,} rows together", total.judgement, ())
        for total in comparison.totals()
    ]
    count = counted(len(limited), *(("row",) if gate.name in (EACH, TOTAL) else (gate.name, PLURALS.get(gate.name))))
    slower = [item for item in limited if item.is_slower(limit)]
    if slower:
        worst = max(slower, key=lambda item: item.loss(is_certain=True))
        return Held(gate, Outcome.FAILED, f"{len(slower):,} of {count}, worst {worst}", _rows_of_limited(slower))
    for total in sums:
        if total.is_slower(limit):
            return Held(gate, Outcome.FAILED, str(total))
    remedy = _remedy(comparison.pairs)
    undecided = [item for item in limited if item.ends_above(limit * ROW_END)]
    if sum(item.loss() for item in undecided) > gate.most or any(
        item.loss(is_certain=True) > limit * ROW_RATIO for item in undecided
    ):
        worst = max(undecided, key=_Limited.loss)
        reason = f"{len(undecided):,} of {count}, worst {worst}: {remedy}"
        return Held(gate, Outcome.NOT_DECIDED, reason, _rows_of_limited(undecided))
    for total in sums:
        if total.ends_above(limit * TOTAL_END):
            return Held(gate, Outcome.NOT_DECIDED, f"{total}: {remedy}")
    highs = [item.judgement.high for item in limited if item.judgement is not None and item.ends_above(limit)]
    remarks = " and ".join(_remarks(undecided, highs, count, comparison))
    return Held(gate, Outcome.PASSED, f"but {remarks}" if remarks else "")


def _remarks(undecided: Sequence[_Limited], highs: list[float], count: str, comparison: Comparison) -> Iterator[str]:
    if undecided:
        share = sum(item.share for item in undecided)
        yield f"{len(undecided):,} of {count}, {share:.1%} of the time, could not be decided"
    missing_us = [max(row.count, 1) * row.median_us for row in comparison.missing if row.median_us]
    if missing_us:
        whole_us = sum(missing_us) + sum(pair.base_us for pair in comparison.pairs)
        rows, is_one = counted(len(missing_us), "row"), len(missing_us) == 1
        yield f"{rows} of the base, {sum(missing_us) / whole_us:.1%} of its time, {'is' if is_one else 'are'} missing"
    if highs and not undecided:
        yield f"{len(highs):,} of {count} may take up to {max(highs):.2f} times as long"


def hold_all(gates: Iterable[Gate], comparison: Comparison) -> list[Held]:
    return [hold(gate, comparison) for gate in gates]


def exit_status(held: Iterable[Held]) -> int:
    outcomes = {item.outcome for item in held}
    return next((item.exit_status for item in reversed(Outcome) if item in outcomes), 0)


def margin_for(gates: Iterable[Gate]) -> float:
    """Return the relative difference up to which times count as the same."""
    return min([MARGIN, *(gate.most for gate in gates if gate.name in TIMED)])


def _limited_rows(gate: Gate, comparison: Comparison) -> list[_Limited]:
    whole_us = sum(total.base_us for total in comparison.totals())
    single = [
        pair for pair in comparison.pairs if pair.is_contended or (pair.judgement is None and _may_be_slower(pair))
    ]
    single += [
        pair
        for pair in (*comparison.broken, *comparison.untimed)
        if pair.base.median_us is not None and pair.new.median_us is None
    ]
    limited = [
        _Limited(describe(pair.new), pair.judgement, [pair], min(pair.base_us / whole_us, 1.0), MOST_CONTENDED)
        if pair.is_contended and pair.base_us and whole_us
        else _Limited(describe(pair.new), pair.judgement, [pair])
        for pair in single
    ]
    if gate.name == TOTAL:
        return limited
    summed = [pair for pair in comparison.pairs if pair.judgement is not None and not pair.is_contended]
    if gate.name == EACH:
        rows = [_Limited(describe(pair.new), pair.judgement, [pair], pair.base_us / whole_us) for pair in summed]
        return rows + limited
    members: dict[str, list[Pair]] = {}
    for pair in summed:
        for name in shares_by(pair.base, gate.name):
            members.setdefault(name, []).append(pair)
    groups = comparison.totals(gate.name)
    return [
        _Limited(item.name, item.judgement, members[item.name], item.base_us / whole_us) for item in groups
    ] + limited


def _rows_of_limited(limited: Iterable[_Limited]) -> list[Result]:
    return [pair.new for item in limited for pair in item.pairs]


def _may_be_slower(pair: Pair) -> bool:
    base_us, new_us = pair.base.median_us, pair.new.median_us
    return base_us is None or new_us is None or not new_us <= base_us


def _remedy(pairs: Sequence[Pair]) -> str:
    repeats = max(min(len(row.repeats or (1,)) for row in (pair.base, pair.new)) for pair in pairs)
    remedies = [f"replay both with --repeats {min(max(REPEATS, 2 * repeats), MOST_REPEATS)}"]
    if repeats >= MOST_REPEATS:
        remedies = ["raise the limit, or replay both again"]
    if any(pair.reason for pair in pairs if pair.judgement is not None):
        remedies.append("on a quieter machine")
    return " ".join(remedies)


def describe(row: Result) -> str:
    variant = f"{row.mode}, {row.variant}" if row.variant else row.mode
    return f"{shorten(f'{row.op} {row.shapes}')} ({variant})"


def parse_gate(text: str) -> Gate:
    match = _FORM.fullmatch(text)
    if match is None or match[1] not in (*TIMED, *COUNTED) or (match[1] in TIMED) != (match[3] == "%"):
        raise UserError(f"{text!r} is not a gate", HINT)
    return Gate(match[1], float(match[2]) / (100 if match[3] else 1), text.strip())


def hold_candidates(gate: Gate, steps: Sequence[JudgedStep]) -> Held:
    limit = 1 + gate.most
    if gate.name == TOTAL:
        judged = [step for step in steps if step.share]
        slower = [f"{step.trace}: {step.line}" for step in judged if step.ratio_low > limit]
        undecided = [f"{step.trace}: {step.line}" for step in judged if step.ratio_high > limit * TOTAL_END]
        count = counted(len(judged), "step")
    else:
        rows = [(row, CandidateColumns.of(row)) for step in steps for row in step.rows]
        slower = [describe(row) for row, own in rows if own.verdict == SLOWER and (row.ratio_p50 or 0.0) > limit]
        most = limit * ROW_END
        undecided = [describe(row) for row, own in rows if own.verdict == UNDECIDED and (own.ratio_high or inf) > most]
        count = counted(len(rows), "signature")
    for outcome, worst in ((Outcome.FAILED, slower), (Outcome.NOT_DECIDED, undecided)):
        if worst:
            return Held(gate, outcome, f"{len(worst):,} of {count}, first {worst[0].removeprefix(': ')}")
    return Held(gate, Outcome.PASSED)


def parse_candidate_gate(text: str) -> Gate:
    gate = parse_gate(text)
    if gate.name not in (EACH, TOTAL):
        raise UserError(f"{text!r} is not a gate on candidates", f"write {EACH}<=5% or {TOTAL}<=5%")
    return gate
