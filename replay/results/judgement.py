"""Verdicts on candidates (a user's implementations of operators): whether a row is right, and faster than the operator,
and how much of the step that saves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, comb, exp, floor, fsum, hypot, inf, log, sqrt
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
TWO_MEMORIES, ON_BUSY_MACHINE, CLOCK_US = 0.02, 0.04, 0.25
"""standard deviation of the difference of two identical functions' times in one process: relative on a quiet and on a
busy machine, and absolute

Their arguments and results lie in other memory, which no number of runs averages out.
"""
BUSY = 0.05
"""share of runs that other processes disturbed, above which a machine is busy"""


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


@dataclass(frozen=True, slots=True)
class PairedRatio:
    """The time of a candidate divided by that of the operator, from alternating runs of both.

    log : natural logarithm of the ratio
    error : standard error of `log`
    chance : probability that as many pairs of runs are slower, or faster, if both take the same time
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
    chance, of_one = _chance(paired), _error_of_one_process(row, base)
    logs = [log(quantile(*ours, 0.5) / quantile(*theirs, 0.5)) for ours, theirs in pairs]
    if len(logs) > 1:
        error = hypot(max(stdev(logs), of_one) / sqrt(len(logs)), of_one / len(logs))
        return PairedRatio(fmean(logs), error, chance)
    middle = log(row.ratio_p50)
    # the median of the pairs and the ratio of the medians differ if times have several levels
    return PairedRatio(middle, hypot(_error_of_median(paired), of_one, (middle - log(row.ratio)) / 2), chance)


def _error_of_one_process(row: Result, base: Result) -> float:
    """Return the part of the standard error of a log ratio that all runs in one process share, so that more runs do not
    reduce it.
    """
    disturbed = [(item.slowed or 0.0) + item.dropped / max(item.samples, 1) for item in (row, base)]
    relative = ON_BUSY_MACHINE if max(disturbed) > BUSY else TWO_MEMORIES
    return hypot(relative, CLOCK_US / max(base.median_us or 0.0, CLOCK_US))


def _chance(logs: Sequence[float]) -> float:
    """Return the two-sided p-value of the sign test: the probability that the signs of the logarithms are this unequal
    by chance.
    """
    above, below = sum(item > 0 for item in logs), sum(item < 0 for item in logs)
    count = above + below
    as_few = sum(comb(count, number) for number in range(min(above, below) + 1))
    return min(1.0, float(2 * as_few / 2**count))


def _error_of_median(logs: Sequence[float]) -> float:
    """Return the standard error of the median of sorted numbers, from their order statistics."""
    half, reach = (len(logs) - 1) / 2, WITHIN_95 * sqrt(len(logs)) / 2
    low, high = max(floor(half - reach), 0), min(ceil(half + reach), len(logs) - 1)
    return (logs[high] - logs[low]) / (2 * WITHIN_95)


def judge_rows(rows: Sequence[Result], reference: str, step_us: float | None, export: str) -> list[Result]:
    """Return the rows, in which candidates' rows have a verdict.

    reference : mode with which candidates are compared
    step_us : captured time of all calls of the step in us; None if the rows belong to no step
    export : start of the command that exports a case, to which the case number is added
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
                judged[place] = _judged(row, None if base is None else own[base], step_us, export)
    return judged


def _judged(row: Result, base: Result | None, step_us: float | None, export: str) -> Result:
    if row.status == SKIPPED:
        return row
    share = row.captured_total_us / step_us if step_us and row.direction == FORWARD else None
    if row.status not in RAN:
        verdict = WRONG if row.status == WRONG else FAILED
        command = f"{export} {row.case} -o case{row.case}.py" if export and row.status == WRONG else None
        return row.adding(CandidateColumns(verdict, step_share=share, export=command))
    ratio = paired_ratio(row, base)
    if ratio is None:
        return row.adding(CandidateColumns(UNDECIDED, step_share=share))
    saving = error = None
    if share is not None:
        saving, error = share * (1 - ratio.ratio), WITHIN_95 * share * ratio.ratio * ratio.error
    return row.adding(CandidateColumns(ratio.verdict, *ratio.interval, share, saving, error))


def saving_in_words(saving: float, error: float) -> str:
    """Return a text such as `saves 3.1 % ± 0.4`, or `costs` instead of `saves` for a negative saving.

    saving, error : saved share of the step (0 to 1), and half of its 95 % interval
    """
    return f"{'saves' if saving >= 0 else 'costs'} {100 * abs(saving):.1f} % ± {100 * error:.1f}"


@dataclass(frozen=True, slots=True)
class JudgedStep:
    """How much candidates save in the step of one trace.

    trace : name of the trace if there are several, else empty
    rows : rows of the candidates
    verdicts : number of signatures with each verdict
    share : share of the step's captured time that the judged operators take; None if the rows belong to no step
    saving : share of the step's captured time that the candidates save
    error : half of the 95 % interval of `saving`
    untimed : number of signatures with correct results but without a valid time
    phases : the part of `saving` in each phase
    """

    trace: str
    rows: Sequence[Result]
    verdicts: dict[str, int]
    gradients: dict[str, int]
    share: float | None
    saving: float
    error: float
    untimed: int
    phases: dict[str, float]

    @property
    def signatures(self) -> int:
        return sum(self.verdicts.values())

    @property
    def ratio_low(self) -> float:
        """Lower end of the 95 % interval of a ratio: time of the judged operators with the candidates over their time
        without.
        """
        return 1 - (self.saving + self.error) / self.share if self.share else 0.0

    @property
    def ratio_high(self) -> float:
        """Upper end of the 95 % interval of a ratio: time of the judged operators with the candidates over their time
        without.
        """
        return 1 - (self.saving - self.error) / self.share if self.share else inf

    @property
    def broken(self) -> int:
        """Number of signatures for which a candidate returns wrong results or does not run."""
        return sum(counts[verdict] for counts in (self.verdicts, self.gradients) for verdict in (WRONG, FAILED))

    @property
    def line(self) -> str:
        """The verdicts and the saving in one line of text."""
        of, of_gradients = (counted_signatures(sum(counts.values())) for counts in (self.verdicts, self.gradients))
        parts = [f"{verdict} on {self.verdicts[verdict]} {of}" for verdict in (WRONG, FAILED) if self.verdicts[verdict]]
        parts += [
            f"gradients {verdict} on {self.gradients[verdict]} {of_gradients}"
            for verdict in (WRONG, FAILED)
            if self.gradients[verdict]
        ]
        if self.share is not None:
            what = "this operator takes" if len({row.op for row in self.rows}) == 1 else "these operators take"
            parts.append(
                f"{saving_in_words(self.saving, self.error)} of the step ({what} {100 * self.share:.1f} % of it)"
            )
        else:
            parts.append(f"faster on {self.verdicts[FASTER]} {of}")
        if len(self.phases) > 1:
            parts.append(", ".join(f"{phase} {100 * saving:.1f} %" for phase, saving in self.phases.items()))
        parts.append(f"slower on {self.verdicts[SLOWER]} {of}")
        if self.gradients[SLOWER]:
            parts.append(f"slower in the backward of {self.gradients[SLOWER]} {of_gradients}")
        if self.untimed:
            parts.append(f"{self.untimed} without a valid time")
        return "; ".join(parts)


def counted_signatures(count: int) -> str:
    """Return a number of signatures as part of a sentence, such as `of 4 signatures`."""
    return f"of {count} signature{'s' if count != 1 else ''}"


def is_slower_by(row: Result, limit: float) -> bool:
    """Return True if a candidate's row has the verdict `slower`, and its time over the operator's exceeds `limit`."""
    return CandidateColumns.of(row).verdict == SLOWER and (row.ratio_p50 or 0.0) > limit


def may_be_slower_by(row: Result, limit: float) -> bool:
    """Return True if a candidate's row is undecided, and its time over the operator's may exceed `limit` according to
    its 95 % interval.
    """
    judged = CandidateColumns.of(row)
    return judged.verdict == UNDECIDED and (judged.ratio_high is None or judged.ratio_high > limit)


def judged_steps(rows: Iterable[Result]) -> list[JudgedStep]:
    """Return how much the candidates among the rows save in the step of each trace, in the order of the traces."""
    by_trace: dict[str, list[Result]] = {}
    for row in rows:
        if CandidateColumns.of(row).verdict is not None:
            by_trace.setdefault(row.trace, []).append(row)
    return [_judged_step(trace, own) for trace, own in by_trace.items()]


def _judged_step(trace: str, rows: Sequence[Result]) -> JudgedStep:
    columns = [CandidateColumns.of(row) for row in rows]
    shares = [item.step_share for item in columns if item.step_share is not None]
    phases: dict[str, float] = {}
    for row, item in zip(rows, columns, strict=True):
        calls = sum(site.count for site in row.sites)
        for site in row.sites if item.step_saving is not None else ():
            phases[site.phase] = phases.get(site.phase, 0.0) + (item.step_saving or 0.0) * site.count / calls
    return JudgedStep(
        trace=trace,
        rows=rows,
        verdicts=_by_verdict(row for row in rows if row.direction == FORWARD),
        gradients=_by_verdict(row for row in rows if row.direction != FORWARD),
        share=fsum(shares) if shares else None,
        saving=fsum(item.step_saving or 0.0 for item in columns),
        error=hypot(*(item.step_saving_error or 0.0 for item in columns)),
        untimed=sum(item.verdict == UNDECIDED and item.ratio_low is None for item in columns),
        phases=phases,
    )


def _by_verdict(rows: Iterable[Result]) -> dict[str, int]:
    found = Counter(CandidateColumns.of(row).verdict for row in rows)
    return {verdict: found[verdict] for verdict in VERDICTS}
