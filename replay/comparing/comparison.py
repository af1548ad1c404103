"""Two runs side by side: their cases joined, judged, and grouped."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum, log
from statistics import median
from typing import TYPE_CHECKING, Any

from opgrip.replay.comparing.differing import run_columns, what_differs
from opgrip.replay.comparing.estimates import Estimate, estimate
from opgrip.replay.comparing.priors import DRIFT, SHORT_US, USUAL, learn
from opgrip.replay.comparing.verdicts import Difference, Judgement, Verdict, judge
from opgrip.replay.measuring.groups import shares_by
from opgrip.replay.measuring.results import OK, WRONG, Result
from opgrip.replay.outcome import Results

if TYPE_CHECKING:
    import pandas as pd

MARGIN = 0.05
"""Relative difference up to which times are the same."""
BUSY = "the machine was busy"
CLOCKS = 0.05
"""Relative difference of a device's clocks in two runs from which on it may be what made one of them slower."""
MOST_DISTURBED = 0.15
"""Share of disturbed runs, of a row or by the median of all, above which times say nothing: what others do to caches
and memory is in the runs that were kept too."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A case under a mode, in both runs.

    Attributes
    ----------
    judgement : None where one of them has no time
    reason : why a verdict is UNSURE whatever the times say; empty else
    """

    base: Result
    new: Result
    judgement: Judgement | None = None
    reason: str = ""

    @property
    def verdict(self) -> Verdict:
        """UNSURE where there is no judgement."""
        return Verdict.UNSURE if self.judgement is None or self.reason else self.judgement.verdict

    @property
    def more_runs(self) -> int | None:
        """How many more repeats of each run would decide it; None where it is decided, or they would not."""
        return None if self.judgement is None or self.reason else self.judgement.more_runs

    @property
    def more_new_runs(self) -> int | None:
        """The same of the new run alone, where the base stays as it is."""
        return None if self.judgement is None or self.reason else self.judgement.more_new_runs

    @property
    def lost_us(self) -> float:
        """Time that all calls of it take more than before."""
        return _total_us(self, self.new) - _total_us(self, self.base)


@dataclass(frozen=True, slots=True)
class Total:
    """Cases taken together: the time of all their calls.

    Attributes
    ----------
    name : what they have in common
    cases, base_us, new_us : their number, and the time in each run
    """

    name: str
    cases: int
    base_us: float
    new_us: float
    judgement: Judgement


@dataclass(frozen=True, slots=True, repr=False)
class Comparison:
    """What became of the cases of a run in another.

    Attributes
    ----------
    base, new : what the headers of both say
    differs : what they were run with that is not the same: name, base, new
    pairs : timed in both, the ones that lost most time first
    broken, mended : gave results in the base alone; ok in the new one alone
    untimed : gave no times in at least one, and are neither
    changed : ok in the base, and in the new one with other results
    missing, added : rows of one run alone
    """

    base: Mapping[str, Any]
    new: Mapping[str, Any]
    differs: Sequence[tuple[str, str, str]]
    pairs: Sequence[Pair]
    broken: Sequence[Pair] = ()
    mended: Sequence[Pair] = ()
    untimed: Sequence[Pair] = ()
    changed: Sequence[Pair] = ()
    missing: Sequence[Result] = ()
    added: Sequence[Result] = ()
    margin: float = MARGIN
    _estimates: Mapping[int, Difference] = field(default_factory=dict, repr=False)

    @property
    def frame(self) -> pd.DataFrame:
        """One row a case and mode, those that got worse first, in the columns that `opgrip compare -o` writes."""
        from opgrip.replay.comparing.reports.frames import to_frame

        return to_frame(self)

    def __repr__(self) -> str:
        from opgrip.replay.comparing.reports.words import summary

        return f"<Comparison: {summary(self)}>"

    def _repr_html_(self) -> str:
        from opgrip.replay.comparing.reports.frames import to_html

        return to_html(self)

    @property
    def counts(self) -> Counter[Verdict]:
        """How many pairs have each verdict."""
        return Counter(pair.verdict for pair in self.pairs)

    def totals(self, by: str | None = None) -> list[Total]:
        """Cases taken together by what `shares_by` has, those that take longest first; all of them for None."""
        members: dict[str, list[tuple[Pair, float]]] = defaultdict(list)
        for pair in self.pairs:
            if pair.judgement is not None:
                for name, share in ({"all": 1.0} if by is None else shares_by(pair.base, by)).items():
                    members[name].append((pair, share))
        names = sorted(members, key=lambda name: -_sum_us(members[name], _base))
        judgements = judge([self._together(members[name]) for name in names], self.margin)
        return [
            Total(
                name,
                len(members[name]),
                _sum_us(members[name], _base),
                _sum_us(members[name], _new),
                judgement,
            )
            for name, judgement in zip(names, judgements, strict=True)
        ]

    def _together(self, pairs: Sequence[tuple[Pair, float]]) -> Difference:
        """The difference of the time of a share of each pair's calls."""
        base, new = _sum_us(pairs, _base), _sum_us(pairs, _new)
        parts = [(self._estimates[id(pair.new)], share * _total_us(pair, pair.new) / new) for pair, share in pairs]
        runs = min(part.base_runs for part, _ in parts), min(part.new_runs for part, _ in parts)
        variances = [(share**2 * part.own_variance, part.freedom) for part, share in parts]
        own = fsum(variance for variance, _ in variances)
        # as F. E. Satterthwaite has it for a sum of variances, Biometrics Bulletin 2 (1946) 110-114
        freedom = own**2 / fsum(variance**2 / freedom for variance, freedom in variances)
        # what all cases have in common does not average out
        drift = fsum(share * part.drift for part, share in parts)
        return Difference(log(new / base), own / (1 / runs[0] + 1 / runs[1]), freedom, *runs, drift)


def compare(base: Results, new: Results, margin: float = MARGIN) -> Comparison:
    """Hold a run against another, case by case.

    Cases are joined by what they call, with which shapes, dtypes and settings, under which mode: not by numbers of a
    trace. Two runs may differ as a whole in dtype, tuning, threads, values, caches or method: `differs` says it. How
    much a case differs from one replay to the next is learned from `--repeats`.

    Parameters
    ----------
    margin : relative difference up to which times are the same
    """
    apart = run_columns(base, new)
    base_rows, new_rows = _by_identity(base.rows, apart), _by_identity(new.rows, apart)
    both = [(row, new_rows[identity]) for identity, row in base_rows.items() if identity in new_rows]
    timed = [pair for pair in both if _is_timed(pair[0]) and _is_timed(pair[1])]
    estimates = [(estimate(old), estimate(now)) for old, now in timed]
    differences = list(_differences(timed, estimates))
    judged = iter(judge([item for item in differences if item is not None], margin))
    judgements = [None if item is None else next(judged) for item in differences]
    busy = [name for name, run in (("BASE", base), ("NEW", new)) if _is_busy(run)]
    pairs = [
        Pair(old, now, judgement, _doubt(old, now, judgement, busy))
        for (old, now), judgement in zip(timed, judgements, strict=True)
    ]
    pairs.sort(key=lambda pair: -pair.lost_us)
    broken = [Pair(old, now) for old, now in both if _gave_results(old) and not _gave_results(now)]
    mended = [Pair(old, now) for old, now in both if old.status != OK and now.status == OK]
    told = {id(pair.new) for pair in (*pairs, *broken, *mended)}
    return Comparison(
        base.header,
        new.header,
        what_differs(base, new),
        pairs,
        broken=broken,
        mended=mended,
        untimed=[Pair(old, now) for old, now in both if id(now) not in told],
        changed=[Pair(old, now) for old, now in both if _gives_other(old, now)],
        missing=[row for identity, row in base_rows.items() if identity not in new_rows],
        added=[row for identity, row in new_rows.items() if identity not in base_rows],
        margin=margin,
        _estimates={id(now): item for (_, now), item in zip(timed, differences, strict=True) if item is not None},
    )


def _by_identity(rows: Iterable[Result], apart: Sequence[str]) -> dict[tuple[object, ...], Result]:
    """Rows by what joins them, some columns apart; of several alike, each by its place among these too."""
    seen: Counter[tuple[object, ...]] = Counter()
    by_identity: dict[tuple[object, ...], Result] = {}
    for row in rows:
        identity = row.identity_without(*apart)
        by_identity[(*identity, seen[identity])] = row
        seen[identity] += 1
    return by_identity


def _gave_results(row: Result) -> bool:
    return row.status in (OK, WRONG)


def _is_timed(row: Result) -> bool:
    return _gave_results(row) and row.median_us is not None


def _differences(
    timed: Sequence[tuple[Result, Result]], estimates: Sequence[tuple[Estimate | None, Estimate | None]]
) -> Iterator[Difference | None]:
    """Of each pair, None where one took no time that could be read."""
    learned = {}
    for is_short, usual in USUAL.items():
        samples = [
            (base.squares + new.squares, len(base.logs) + len(new.logs) - 2)
            for (row, _), (base, new) in zip(timed, estimates, strict=True)
            if base and new and _is_short(row) == is_short and len(base.logs) + len(new.logs) > 2
        ]
        learned[is_short] = learn(samples, usual)
    for (row, _), (base, new) in zip(timed, estimates, strict=True):
        if base is None or new is None:
            yield None
            continue
        freedom = len(base.logs) + len(new.logs) - 2
        variance, whole = learned[_is_short(row)].posterior(base.squares + new.squares, freedom)
        # one repeat says nothing of others, and its runs how sure its median is
        if not freedom:
            variance += (base.within + new.within) / 2
        drift = DRIFT[_is_short(row)]
        yield Difference(new.mean - base.mean, variance, whole, len(base.logs), len(new.logs), drift)


def _is_short(row: Result) -> bool:
    return (row.median_us or 0.0) < SHORT_US


def _is_busy(run: Results) -> bool:
    """Whether others had the processors for much of a run."""
    shares = [row.disturbed for row in run if _is_timed(row)]
    return bool(shares) and median(shares) > MOST_DISTURBED


def _doubt(base: Result, new: Result, judgement: Judgement | None, busy_runs: Sequence[str]) -> str:
    """Why times say nothing."""
    if judgement is None:
        return "it takes no longer than reading the clock"
    disturbed = {"BASE": base.disturbed, "NEW": new.disturbed}
    busy = [name for name, share in disturbed.items() if share > MOST_DISTURBED or name in busy_runs]
    if busy:
        return f"{BUSY} in {' and '.join(busy)}"
    return _doubt_of_clocks(base.clock_mhz, new.clock_mhz, judgement.ratio)


def _doubt_of_clocks(base_mhz: float | None, new_mhz: float | None, ratio: float) -> str:
    """Whether the run that took longer had the slower clock, as of a GPU that was warm or capped."""
    if not base_mhz or not new_mhz or base_mhz < 0 or new_mhz < 0:
        return ""
    change = log(new_mhz / base_mhz)
    if abs(change) <= CLOCKS or (change < 0) != (ratio > 1):
        return ""
    return f"the device's clock was {base_mhz:,.0f} MHz in BASE, {new_mhz:,.0f} MHz in NEW"


def _gives_other(base: Result, new: Result) -> bool:
    """Whether results are right in the base alone."""
    was_right = base.status == OK and base.faithful is not False
    return was_right and (new.status == WRONG or (new.status == OK and new.faithful is False))


def _total_us(pair: Pair, row: Result) -> float:
    """Of all its calls; of as many in both, or a program that calls it more often would be slower."""
    return max(pair.base.count, 1) * (row.median_us or 0.0)


def _sum_us(pairs: Sequence[tuple[Pair, float]], side: Callable[[Pair], Result]) -> float:
    """Return the time of a share of each pair's calls in one run."""
    return fsum(share * _total_us(pair, side(pair)) for pair, share in pairs)


def _base(pair: Pair) -> Result:
    return pair.base


def _new(pair: Pair) -> Result:
    return pair.new
