"""The table of bounds, and what a figure is when it is held against its own."""

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
"""That a bound has; it is rounded to its loose side."""
BETTER_BY = 0.05
"""Share of what a figure was, by which all of its interval is better when its bound is out of date."""
FEWEST_RUNS = 3
"""That a bound is set by."""
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
    bound : the most that it may be, or the least where larger is better
    when_set : what it was then
    set_on : day
    note : why it is so, where that needs saying
    """

    figure: str
    bound: float
    when_set: float
    set_on: str
    note: str = ""


class Verdict(Enum):
    """What a figure is when it is held against its bound."""

    HELD = "held"
    BETTER = "better: its bound can be lowered"
    NOISE = "held: worse, within the noise"
    WORSE = "WORSE"
    UNBOUND = "NO BOUND"
    NOT_MEASURED = "not measured"
    BROKEN = "FAILED"

    @property
    def fails(self) -> bool:
        """Whether the run does."""
        return self in (Verdict.WORSE, Verdict.UNBOUND, Verdict.BROKEN)


def judge(figure: Figure, reading: Reading, bound: Bound | None) -> Verdict:
    """The verdict on a figure: it is worse only where all of its interval is."""
    if bound is None:
        return Verdict.UNBOUND
    if figure.is_worse(reading.best(figure), bound.bound):
        return Verdict.WORSE
    if figure.is_worse(reading.value, bound.bound):
        return Verdict.NOISE
    better = bound.when_set * (1 + BETTER_BY if figure.larger_is_better else 1 - BETTER_BY)
    return Verdict.BETTER if figure.is_worse(better, reading.worst(figure)) else Verdict.HELD


def new_bound(figure: Figure, values: Sequence[float], day: str) -> Bound:
    """The bound that the values of several runs set: the worst of them."""
    worst = figure.worst(values)
    step = 10.0 ** (math.floor(math.log10(abs(worst))) - DIGITS + 1) if worst else 1.0
    loose = math.floor(worst / step) * step if figure.larger_is_better else math.ceil(worst / step) * step
    return Bound(figure.name, float(f"{loose:.6g}"), float(f"{median(values):.{DIGITS + 1}g}"), day)


def lower(figures: Iterable[Figure], bounds: Mapping[str, Bound], new: Mapping[str, Bound]) -> dict[str, Bound]:
    """The bounds in the figures' order, a new one where there was none or where it is the tighter one."""
    lowered = {}
    for figure in figures:
        old, other = bounds.get(figure.name), new.get(figure.name)
        if other is not None and (old is None or figure.is_worse(old.bound, other.bound)):
            lowered[figure.name] = other
        elif old is not None:
            lowered[figure.name] = old
    return lowered


def read_bounds(path: Path | None = None) -> dict[str, Bound]:
    """A table, by default the common one, by the figures' names."""
    with (path or TABLE).open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    return {
        row["figure"]: Bound(row["figure"], float(row["bound"]), float(row["when_set"]), row["set_on"], row["note"])
        for row in rows
    }


def bounds_on(processor: str) -> dict[str, Bound]:
    """What holds on a processor: the table, with the rows of its own table, if it has one, in place of its.

    Parameters
    ----------
    processor : its widest vectors by `torch.backends.cpu.get_cpu_capability`
    """
    own = table_of(processor)
    return read_bounds() | (read_bounds(own) if own.exists() else {})


def table_of(processor: str) -> Path:
    """Where rows that hold on a processor alone stand, if there are any."""
    return TABLE.with_name(f"bounds-{processor.lower()}.csv")


def lower_bounds(figures: Iterable[Figure], new: Mapping[str, Bound], processor: str) -> None:
    """Lower the bounds that hold on a processor, each in the table that it stands in."""
    every, own = list(figures), table_of(processor)
    rows = read_bounds(own) if own.exists() else {}
    write_bounds(lower(every, read_bounds(), {name: row for name, row in new.items() if name not in rows}))
    if rows:
        write_bounds(lower(every, rows, {name: row for name, row in new.items() if name in rows}), own)


def write_bounds(bounds: Mapping[str, Bound], path: Path | None = None) -> None:
    """Write a table, by default the common one; its remarks are those of `HEAD`."""
    with (path or TABLE).open("w", encoding="utf-8", newline="") as file:
        file.write(HEAD)
        writer = csv.DictWriter(file, [field.name for field in fields(Bound)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(bound) for bound in bounds.values())
