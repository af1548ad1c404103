"""Gates: conditions such as `slower<=5%` that a comparison passes, fails, or leaves undecided."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from math import inf

from opgrip.cli.command import counted
from opgrip.cli.terminal import shorten
from opgrip.errors import UserError
from opgrip.replay.comparison.comparison import MARGIN, Comparison, Pair
from opgrip.replay.comparison.differences import Judgement, Verdict, interval_text
from opgrip.replay.results.judgement import JudgedStep, is_slower_by, may_be_slower_by
from opgrip.replay.results.ratios import shares_by
from opgrip.replay.results.results import Result

_FORM = re.compile(r"\s*(\w+)\s*<=\s*(\d+(?:\.\d+)?)\s*(%?)\s*")
COUNTED: dict[str, Callable[[Comparison], list[Result]]] = {
    "failed": lambda comparison: [pair.new for pair in comparison.broken],
    "changed": lambda comparison: [pair.new for pair in comparison.changed],
    "missing": lambda comparison: list(comparison.missing),
}
"""gates that limit a number of rows, with functions that return these rows"""
ROWS, TOTAL = "slower", "total"
TIMED = (ROWS, TOTAL, "op", "module", "family", "mode")
"""gates that limit a time: of each row, of all rows together, or of each group"""
PLURALS = {"family": "families"}
NOTHING = "no case was timed in both runs"
HINT = f"write {', '.join(f'{name}<=5%' for name in TIMED)}, or {', '.join(f'{name}<=0' for name in COUNTED)}"

TOTAL_END, ROW_END, ROW_RATIO = 1.05, 1.25, 1.5
"""factors on a gate's limit: maximum upper end of the total's interval, maximum upper end of a decided row's interval,
and maximum ratio of an undecided row
"""
REPEATS, MOST_REPEATS = 5, 20
"""smallest and largest number of repeats that is recommended"""


class Outcome(Enum):
    """Outcome of a gate, from best to worst."""

    PASSED = "passed"
    NOT_DECIDED = "not decided"
    FAILED = "failed"

    @property
    def exit_status(self) -> int:
        """Exit status of a command that checked the gate."""
        return {Outcome.PASSED: 0, Outcome.FAILED: 1, Outcome.NOT_DECIDED: 3}[self]


@dataclass(frozen=True, slots=True)
class Gate:
    """A condition on a comparison.

    name : a name in `TIMED` or `COUNTED`
    most : largest allowed relative difference, or number of rows
    text : condition as the user wrote it
    """

    name: str
    most: float
    text: str


@dataclass(frozen=True, slots=True)
class Held:
    """A gate with its outcome.

    reason : explanation of the outcome; empty if the gate passed without a remark
    rows : rows that caused the outcome, from the new run or, if missing there, from the base; empty if the gate is on
        the total
    """

    gate: Gate
    outcome: Outcome
    reason: str = ""
    rows: Sequence[Result] = ()

    @property
    def line(self) -> str:
        """Line of text that every report shows for the gate."""
        text = f"gate {self.gate.text}: {self.outcome.value}"
        return f"{text}: {self.reason}" if self.reason else text


@dataclass(frozen=True, slots=True)
class _Subject:
    """A row, a group or the total, to which a gate applies.

    judgement : verdict with ratio and interval; None if it has no time in one of the runs
    share : share of the base's time; 1 if unknown
    """

    name: str
    judgement: Judgement | None
    pairs: Sequence[Pair]
    share: float = 1.0

    def is_slower(self, limit: float) -> bool:
        judgement = self.judgement
        return judgement is not None and judgement.verdict is Verdict.SLOWER and judgement.ratio > limit

    def ends_above(self, most: float) -> bool:
        """Return True if the upper end of the interval is above `most`."""
        return self.judgement is None or self.judgement.high > most

    def loss(self, is_certain: bool = False) -> float:
        """Return the largest possible loss as a share of the total time; with `is_certain`, the loss by the ratio
        itself.
        """
        if self.judgement is None:
            return inf
        return self.judgement.ratio if is_certain else self.share * (self.judgement.high - 1)

    def __str__(self) -> str:
        if self.judgement is None:
            return f"{self.name}: no time"
        interval = interval_text(self.judgement.low, self.judgement.high)
        return f"{self.name}: {self.judgement.ratio:.3f} times ({interval})"


def hold(gate: Gate, comparison: Comparison) -> Held:
    """Return the outcome of a gate.

    It fails if a row, a group or the total is SLOWER by more than the limit. It passes if the upper end of the total's
    interval is close to the limit, and the rows whose interval ends clearly above the limit could add only little time;
    docs/results.md has the exact rule. Otherwise it is undecided.
    """
    if gate.name in COUNTED:
        rows = COUNTED[gate.name](comparison)
        if len(rows) <= gate.most:
            return Held(gate, Outcome.PASSED)
        return Held(gate, Outcome.FAILED, f"{counted(len(rows), 'row')}, first {describe(rows[0])}", rows)
    if not any(pair.judgement for pair in comparison.pairs):
        return Held(gate, Outcome.NOT_DECIDED, NOTHING)
    limit, subjects = 1 + gate.most, _subjects(gate, comparison)
    sums = [_Subject(_all_rows(total.cases), total.judgement, ()) for total in comparison.totals()]
    count = counted(len(subjects), *(("row",) if gate.name in (ROWS, TOTAL) else (gate.name, PLURALS.get(gate.name))))
    slower = [item for item in subjects if item.is_slower(limit)]
    if slower:
        worst = max(slower, key=lambda item: item.loss(is_certain=True))
        return Held(gate, Outcome.FAILED, f"{len(slower):,} of {count}, worst {worst}", _rows_of(slower))
    for total in sums:
        if total.is_slower(limit):
            return Held(gate, Outcome.FAILED, str(total))
    remedy = _remedy(comparison.pairs)
    undecided = [item for item in subjects if item.ends_above(limit * ROW_END)]
    if sum(item.loss() for item in undecided) > gate.most or any(
        item.loss(is_certain=True) > limit * ROW_RATIO for item in undecided
    ):
        worst = max(undecided, key=_Subject.loss)
        reason = f"{len(undecided):,} of {count}, worst {worst}: {remedy}"
        return Held(gate, Outcome.NOT_DECIDED, reason, _rows_of(undecided))
    for total in sums:
        if total.ends_above(limit * TOTAL_END):
            return Held(gate, Outcome.NOT_DECIDED, f"{total}: {remedy}")
    remarks = " and ".join(_remarks(undecided, count, comparison))
    return Held(gate, Outcome.PASSED, f"but {remarks}" if remarks else "")


def _remarks(undecided: Sequence[_Subject], count: str, comparison: Comparison) -> Iterator[str]:
    """Yield remarks about rows that a passed gate left out: undecided rows (`count` says out of how many) and missing
    rows.
    """
    if undecided:
        share = sum(item.share for item in undecided)
        yield f"{len(undecided):,} of {count}, {share:.1%} of the time, could not be decided"
    missing_us = [max(row.count, 1) * row.median_us for row in comparison.missing if row.median_us]
    if missing_us:
        whole_us = sum(missing_us) + sum(pair.base_us for pair in comparison.pairs)
        rows, is_one = counted(len(missing_us), "row"), len(missing_us) == 1
        yield f"{rows} of the base, {sum(missing_us) / whole_us:.1%} of its time, {'is' if is_one else 'are'} missing"


def hold_all(gates: Iterable[Gate], comparison: Comparison) -> list[Held]:
    return [hold(gate, comparison) for gate in gates]


def exit_status(held: Iterable[Held]) -> int:
    """Return the exit status for the worst outcome: failed, else undecided, else passed."""
    outcomes = {item.outcome for item in held}
    return next((item.exit_status for item in reversed(Outcome) if item in outcomes), 0)


def margin_for(gates: Iterable[Gate]) -> float:
    """Return the margin within which times count as the same: the default, or the smallest limit of a gate if
    smaller.
    """
    return min([MARGIN, *(gate.most for gate in gates if gate.name in TIMED)])


def _subjects(gate: Gate, comparison: Comparison) -> list[_Subject]:
    """Return the rows or groups to which a gate applies one by one, and rows whose time is in no total."""
    whole_us = sum(total.base_us for total in comparison.totals())
    single = [
        pair for pair in comparison.pairs if pair.is_contended or (pair.judgement is None and _may_be_slower(pair))
    ]
    single += [pair for pair in (*comparison.broken, *comparison.untimed) if _lost_its_time(pair)]
    subjects = [_Subject(describe(pair.new), pair.judgement, [pair]) for pair in single]
    if gate.name == TOTAL:
        return subjects
    summed = [pair for pair in comparison.pairs if pair.judgement is not None and not pair.is_contended]
    if gate.name == ROWS:
        rows = [_Subject(describe(pair.new), pair.judgement, [pair], pair.base_us / whole_us) for pair in summed]
        return rows + subjects
    members: dict[str, list[Pair]] = {}
    for pair in summed:
        for name in shares_by(pair.base, gate.name):
            members.setdefault(name, []).append(pair)
    groups = comparison.totals(gate.name)
    return [
        _Subject(item.name, item.judgement, members[item.name], item.base_us / whole_us) for item in groups
    ] + subjects


def _all_rows(count: int) -> str:
    return "the only row" if count == 1 else f"all {count:,} rows together"


def _rows_of(subjects: Iterable[_Subject]) -> list[Result]:
    return [pair.new for subject in subjects for pair in subject.pairs]


def _lost_its_time(pair: Pair) -> bool:
    return pair.base.median_us is not None and pair.new.median_us is None


def _may_be_slower(pair: Pair) -> bool:
    """Return True if one of the rows has no time, or the new time is longer."""
    base_us, new_us = pair.base.median_us, pair.new.median_us
    return base_us is None or new_us is None or not new_us <= base_us


def _remedy(pairs: Sequence[Pair]) -> str:
    """Return advice on how to get a decision on a gate."""
    made = max(min(len(row.repeats or (1,)) for row in (pair.base, pair.new)) for pair in pairs)
    remedies = [f"replay both with --repeats {min(max(REPEATS, 2 * made), MOST_REPEATS)}"]
    if made >= MOST_REPEATS:
        remedies = ["allow more"]
    if any(pair.reason for pair in pairs if pair.judgement is not None):
        remedies.append("on a quieter machine")
    return " ".join(remedies)


def describe(row: Result) -> str:
    """Return operator, shapes, mode and variant of a row as one line."""
    variant = f"{row.mode}, {row.variant}" if row.variant else row.mode
    return f"{shorten(f'{row.op} {row.shapes}')} ({variant})"


def parse_gate(text: str) -> Gate:
    """Parse a gate as written on the command line; raise `UserError` if it is malformed."""
    match = _FORM.fullmatch(text)
    if match is None or match[1] not in (*TIMED, *COUNTED) or (match[1] in TIMED) != (match[3] == "%"):
        raise UserError(f"{text!r} is not a gate", HINT)
    return Gate(match[1], float(match[2]) / (100 if match[3] else 1), text.strip())


def hold_candidates(gate: Gate, steps: Sequence[JudgedStep]) -> Held:
    """Return the outcome of a gate on candidates, of which each signature, or each step, is compared with the operator.

    A step is judged by its interval of 95 %, a signature by its verdict.
    """
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
    """Parse a gate on candidates; raise `UserError` if it is none."""
    gate = parse_gate(text)
    if gate.name not in (ROWS, TOTAL):
        raise UserError(f"{text!r} is not a gate on candidates", f"write {ROWS}<=5% or {TOTAL}<=5%")
    return gate
