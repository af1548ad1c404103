"""Gates: conditions on a comparison, such as `slower<=5%`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from math import inf

from opgrip.cli.command import counted
from opgrip.cli.terminal import shorten
from opgrip.errors import UserError
from opgrip.replay.reports.comparison.comparison import MARGIN, Comparison, Pair
from opgrip.replay.reports.comparison.unpaired_ratio import RatioVerdict, Verdict, interval_text
from opgrip.replay.results.judgement import JudgedStep, is_slower_by, may_be_slower_by
from opgrip.replay.results.ratios import shares_by
from opgrip.replay.results.results import Result

_FORM = re.compile(r"\s*(\w+)\s*<=\s*(\d+(?:\.\d+)?)\s*(%?)\s*")
# gates that limit a number of rows, with functions that return these rows
COUNTED: dict[str, Callable[[Comparison], list[Result]]] = {
    "failed": lambda comparison: [pair.new for pair in comparison.broken],
    "changed": lambda comparison: [pair.new for pair in comparison.changed],
    "missing": lambda comparison: list(comparison.missing),
}
ROWS, TOTAL = "slower", "total"
# gates that limit a time: of each row, of all rows together, or of each group
TIMED = (ROWS, TOTAL, "op", "module", "family", "mode")
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
    count = counted(len(limited), *(("row",) if gate.name in (ROWS, TOTAL) else (gate.name, PLURALS.get(gate.name))))
    slower = [item for item in limited if item.is_slower(limit)]
    if slower:
        worst = max(slower, key=lambda item: item.loss(is_certain=True))
        return Held(gate, Outcome.FAILED, f"{len(slower):,} of {count}, worst {worst}", _rows_of(slower))
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
        return Held(gate, Outcome.NOT_DECIDED, reason, _rows_of(undecided))
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
    if gate.name == ROWS:
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


def _rows_of(limited: Iterable[_Limited]) -> list[Result]:
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
        rows = [row for step in steps for row in step.rows]
        slower = [describe(row) for row in rows if is_slower_by(row, limit)]
        undecided = [describe(row) for row in rows if may_be_slower_by(row, limit * ROW_END)]
        count = counted(len(rows), "signature")
    for outcome, worst in ((Outcome.FAILED, slower), (Outcome.NOT_DECIDED, undecided)):
        if worst:
            return Held(gate, outcome, f"{len(worst):,} of {count}, first {worst[0].removeprefix(': ')}")
    return Held(gate, Outcome.PASSED)


def parse_candidate_gate(text: str) -> Gate:
    gate = parse_gate(text)
    if gate.name not in (ROWS, TOTAL):
        raise UserError(f"{text!r} is not a gate on candidates", f"write {ROWS}<=5% or {TOTAL}<=5%")
    return gate
