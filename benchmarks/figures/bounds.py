"""Read, set and apply the table of performance thresholds."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from enum import Enum
from pathlib import Path
from statistics import median

from figures.figure import Figure, Reading

TABLE = Path(__file__).parent / "bounds.csv"
DIGITS = 3
"""significant digits of a threshold, rounded to the looser side"""
BETTER_BY = 0.05
"""relative improvement of the whole interval from which a threshold is outdated"""
FEWEST_RUNS = 3
"""fewest runs to set a threshold"""
HEAD = """\
# What no run of benchmarks/held.py may be worse than; docs/development.md says how a bound is set and lowered.
# when_set: the figure's median over the runs that set its bound; a note says where that is not the worst of them.
# Rows of bounds-X.csv stand in place of those of bounds.csv on a processor whose widest vectors are X.
"""


@dataclass(frozen=True, slots=True)
class Bound:
    """A row of the table.

    Attributes
    ----------
    figure : its name
    bound : the most that it may be, or the least if larger is better
    when_set : its value then
    set_on : day
    note : the reason, if one is needed
    """

    figure: str
    bound: float
    when_set: float
    set_on: str
    note: str = ""


class Verdict(Enum):
    """Result of comparing a figure with its threshold."""

    HELD = "held"
    BETTER = "better: its bound can be lowered"
    NOISE = "held: worse, within the noise"
    WORSE = "WORSE"
    UNBOUND = "NO BOUND"
    NOT_MEASURED = "not measured"
    BROKEN = "FAILED"

    @property
    def fails(self) -> bool:
        """Return True if the run fails."""
        return self in (Verdict.WORSE, Verdict.UNBOUND, Verdict.BROKEN)


def judge(figure: Figure, reading: Reading, bound: Bound | None) -> Verdict:
    """Compare a figure with its threshold: it is worse only if its whole interval is."""
    if bound is None:
        return Verdict.UNBOUND
    if figure.is_worse(reading.best(figure), bound.bound):
        return Verdict.WORSE
    if figure.is_worse(reading.value, bound.bound):
        return Verdict.NOISE
    better = bound.when_set * (1 + BETTER_BY if figure.larger_is_better else 1 - BETTER_BY)
    return Verdict.BETTER if figure.is_worse(better, reading.worst(figure)) else Verdict.HELD


def new_bound(figure: Figure, values: Sequence[float], day: str) -> Bound:
    """Return the threshold set by several runs: the worst of their values."""
    worst = figure.worst(values)
    step = 10.0 ** (math.floor(math.log10(abs(worst))) - DIGITS + 1) if worst else 1.0
    loose = math.floor(worst / step) * step if figure.larger_is_better else math.ceil(worst / step) * step
    return Bound(figure.name, float(f"{loose:.6g}"), float(f"{median(values):.{DIGITS + 1}g}"), day)


def lower(figures: Iterable[Figure], bounds: Mapping[str, Bound], new: Mapping[str, Bound]) -> dict[str, Bound]:
    """Return the thresholds in the figures' order, with new or tighter ones replaced."""
    lowered = {}
    for figure in figures:
        old, other = bounds.get(figure.name), new.get(figure.name)
        if other is not None and (old is None or figure.is_worse(old.bound, other.bound)):
            lowered[figure.name] = other
        elif old is not None:
            lowered[figure.name] = old
    return lowered


def read_bounds(path: Path | None = None) -> dict[str, Bound]:
    """Read a table, by default the common one, by figure name."""
    with (path or TABLE).open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    return {
        row["figure"]: Bound(row["figure"], float(row["bound"]), float(row["when_set"]), row["set_on"], row["note"])
        for row in rows
    }


def bounds_on(processor: str) -> dict[str, Bound]:
    """Return the thresholds for a processor: the common table, updated with the processor's own.

    Parameters
    ----------
    processor : its widest vector instructions, from `torch.backends.cpu.get_cpu_capability`
    """
    own = table_of(processor)
    return read_bounds() | (read_bounds(own) if own.exists() else {})


def table_of(processor: str) -> Path:
    """Return the file of thresholds for one kind of processor, which may not exist."""
    return TABLE.with_name(f"bounds-{processor.lower()}.csv")


def lower_bounds(figures: Iterable[Figure], new: Mapping[str, Bound], processor: str) -> None:
    """Lower the thresholds for a processor, each in the table that holds it."""
    every, own = list(figures), table_of(processor)
    rows = read_bounds(own) if own.exists() else {}
    write_bounds(lower(every, read_bounds(), {name: row for name, row in new.items() if name not in rows}))
    if rows:
        write_bounds(lower(every, rows, {name: row for name, row in new.items() if name in rows}), own)


def write_bounds(bounds: Mapping[str, Bound], path: Path | None = None) -> None:
    """Write a table, by default the common one, with the comments in `HEAD`."""
    with (path or TABLE).open("w", encoding="utf-8", newline="") as file:
        file.write(HEAD)
        writer = csv.DictWriter(file, [field.name for field in fields(Bound)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(bound) for bound in bounds.values())
