"""Verdicts on candidates (a user's implementations of operators): right, faster or slower than the operator."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, comb, exp, floor, hypot, log, sqrt
from statistics import fmean, stdev

from opgrip.replay.cases.selection import FORWARD
from opgrip.replay.modes import CANDIDATE
from opgrip.replay.results.columns import Columns, column
from opgrip.replay.results.results import FAILED, OK, RAN, SKIPPED, WRONG, Result

SLOWER, FASTER, EQUAL, UNDECIDED = "slower", "faster", "equal", "undecided"
VERDICTS = (WRONG, FAILED, SLOWER, UNDECIDED, EQUAL, FASTER)
"""verdicts in the order of tables, worst first"""

MARGIN = 0.05
"""relative difference of two times up to which they count as equal"""
CERTAIN = 3.3
"""standard errors by which a time must differ to be slower or faster: 1 in 1,000 if errors are normal"""
CHANCE = 1e-3
"""largest probability of chance of a verdict, by the sign test"""
WITHIN_95 = 1.96
TWO_MEMORIES, CLOCK_US = 0.04, 0.25
"""standard deviation of the difference of two identical functions' times in one process, relative and in us

Their arguments and results lie in other memory, which no number of runs averages out: of 160 softmaxes on a virtual
machine, one differed from itself by 9 %.
"""


@dataclass(frozen=True, slots=True)
class CandidateColumns(Columns):
    """The columns of a candidate's row: its verdict, and how much of the step it saves."""

    verdict: str | None = column(
        "verdict on the candidate: `wrong`, `failed`, `slower`, `faster`, `equal` (within 5 %), `undecided`",
        heading="verdict",
    )
    ratio_low: float | None = column("lower end of the 95 % interval of the candidate's time over the operator's")
    ratio_high: float | None = column("upper end of the 95 % interval of the candidate's time over the operator's")
    step_share: float | None = column("share of the step's captured time that the row's calls take", "1")
    step_saving: float | None = column(
        "share of the step's captured time that the candidate saves in the row's calls; negative if it is slower", "1"
    )
    step_saving_error: float | None = column("half of the 95 % interval of `step_saving`", "1")
    export: str | None = column("command that exports a wrong call as one file")
    labels: str | None = column(
        "JSON: for each label of `record_function` with some of the row's calls, their number and their share of the "
        "captured time of all calls within the label",
        hidden=True,
    )


@dataclass(frozen=True, slots=True)
class PairedRatio:
    """The time of a candidate divided by that of the operator, from alternating runs of both.

    log : natural logarithm of the ratio
    error : standard error of `log`
    chance : probability that the numbers of slower and faster pairs of runs differ this much if both take the same time
    """

    log: float
    error: float
    chance: float

    @property
    def verdict(self) -> str:
        if abs(self.log) > CERTAIN * self.error and self.chance < CHANCE:
            return SLOWER if self.log > 0 else FASTER
        return EQUAL if abs(self.log) + WITHIN_95 * self.error < log(1 + MARGIN) else UNDECIDED

    @property
    def ratio(self) -> float:
        return exp(self.log)

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the ratio."""
        return exp(self.log - WITHIN_95 * self.error), exp(self.log + WITHIN_95 * self.error)


def paired_ratio(row: Result, base: Result | None) -> PairedRatio | None:
    """Return a candidate's time divided by the operator's (the row `base`); None if one of the two rows has no valid
    time.
    """
    if base is None or OK not in (row.status, base.status) or not row.ratio or not row.ratio_p50:
        return None
    # loads torch, which declarations of options must not
    from opgrip.replay.results.ratios import repeats_of
    from opgrip.replay.timing.samples import quantile

    pairs = zip(repeats_of(row), repeats_of(base), strict=False)
    runs = zip(row.times_us or (), base.times_us or (), strict=False)
    paired = sorted(log(ours / theirs) for ours, theirs in runs if ours > 0 and theirs > 0)
    if not paired:
        return None
    chance, of_one = _chance(paired), _error_of_one_process(base)
    logs = [log(quantile(*ours, 0.5) / quantile(*theirs, 0.5)) for ours, theirs in pairs]
    if len(logs) > 1:
        error = hypot(max(stdev(logs), of_one) / sqrt(len(logs)), of_one / len(logs))
        return PairedRatio(fmean(logs), error, chance)
    middle = log(row.ratio_p50)
    # the median of the pairs and the ratio of the medians differ if times have several levels
    return PairedRatio(middle, hypot(_error_of_median(paired), of_one, (middle - log(row.ratio)) / 2), chance)


def _error_of_one_process(base: Result) -> float:
    """Return the part of the standard error of a log ratio that all runs in one process share, so that more runs do not
    reduce it.

    base : row of the operator
    """
    return hypot(TWO_MEMORIES, CLOCK_US / max(base.median_us or 0.0, CLOCK_US))


def _chance(logs: Sequence[float]) -> float:
    """Return the two-sided p-value of the sign test: the probability that the signs of the logarithms are this unequal
    by chance.
    """
    above, below = sum(item > 0 for item in logs), sum(item < 0 for item in logs)
    count = above + below
    as_few = sum(comb(count, number) for number in range(min(above, below) + 1))
    return min(1.0, float(2 * as_few / 2**count))


def _error_of_median(logs: Sequence[float]) -> float:
    """Return the standard error of the median of sorted numbers, such as logarithms of ratios, from their order
    statistics.
    """
    half, reach = (len(logs) - 1) / 2, WITHIN_95 * sqrt(len(logs)) / 2
    low, high = max(floor(half - reach), 0), min(ceil(half + reach), len(logs) - 1)
    return (logs[high] - logs[low]) / (2 * WITHIN_95)


def judge_rows(
    rows: Sequence[Result],
    reference: str,
    step_us: float | None,
    export: str,
    labels: Mapping[int, Mapping[str, tuple[int, float]]],
) -> list[Result]:
    """Return the rows, in which rows of candidates have verdicts.

    Parameters
    ----------
    rows : results of all modes
    reference : mode with which candidates are compared
    step_us : captured time of all calls of the step in us; None if the rows belong to no step
    export : start of the command that exports a case, to which the number of the case is added; empty for none
    labels : by number of the case and label of `record_function`: the number of the case's calls within the label, and
        the share of the label's captured time that they take
    """
    from opgrip.replay.results.ratios import base_place

    judged = list(rows)
    by_case: dict[tuple[object, ...], list[int]] = {}
    for place, row in enumerate(rows):
        by_case.setdefault((row.case_of_trace, row.device, row.dtype), []).append(place)
    for places in by_case.values():
        own = [rows[place] for place in places]
        for place, row in zip(places, own, strict=True):
            if row.mode == CANDIDATE:
                base = base_place(own.index(row), own, reference)
                judged_row = _judged(row, None if base is None else own[base], step_us, export)
                if row.case in labels and row.direction == FORWARD:
                    judged_row = judged_row.adding(
                        replace(CandidateColumns.of(judged_row), labels=json.dumps(labels[row.case]))
                    )
                judged[place] = judged_row
    return judged


def _judged(row: Result, base: Result | None, step_us: float | None, export: str) -> Result:
    if row.status == SKIPPED:
        return row
    share = row.captured_total_us / step_us if step_us and row.direction == FORWARD else None
    if row.status not in RAN:
        verdict = WRONG if row.status == WRONG else FAILED
        command = f"{export} {_words_of(row)} -o case{row.case}.py" if export and row.status == WRONG else None
        return row.adding(CandidateColumns(verdict, step_share=share, export=command))
    ratio = paired_ratio(row, base)
    if ratio is None:
        return row.adding(CandidateColumns(UNDECIDED, step_share=share))
    saving = error = None
    if share is not None:
        saving, error = share * (1 - ratio.ratio), WITHIN_95 * share * ratio.ratio * ratio.error
    return row.adding(CandidateColumns(ratio.verdict, *ratio.interval, share, saving, error))


def is_of_module(row: Result) -> bool:
    """Return True if a row is of a module as a whole, False if it is of an operator."""
    return bool(row.module) and row.op.split(" ")[0] == row.module


def _words_of(row: Result) -> str:
    """Return the words that name the row's case on the command line of `opgrip trace export-case`."""
    return f"{shlex.quote(row.module)} --unit module" if is_of_module(row) else str(row.case)


def is_slower_by(row: Result, limit: float) -> bool:
    """Return True if a candidate's row has the verdict `slower`, and its time over the operator's exceeds `limit`."""
    return CandidateColumns.of(row).verdict == SLOWER and (row.ratio_p50 or 0.0) > limit


def may_be_slower_by(row: Result, limit: float) -> bool:
    """Return True if a candidate's row is undecided, and its time over the operator's may exceed `limit` according to
    its 95 % interval.
    """
    judged = CandidateColumns.of(row)
    return judged.verdict == UNDECIDED and (judged.ratio_high is None or judged.ratio_high > limit)
