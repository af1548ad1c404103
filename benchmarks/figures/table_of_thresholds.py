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

TABLE = Path(__file__).parent / "thresholds.csv"
DIGITS = 3  # significant digits of a threshold, rounded to the looser side
BETTER_BY = 0.05  # relative improvement of the whole interval from which a threshold is outdated
FEWEST_RUNS = 3  # fewest runs to set a threshold
HEAD = """\
# No run of benchmarks/thresholds.py may be worse than this; docs/development.md describes how to lower a threshold.
# when_set: the figure's median over the runs that set its threshold; a note says if that is not the worst of them.
# Rows of thresholds-X.csv replace rows of thresholds.csv on a processor whose widest vectors are X.
"""


@dataclass(frozen=True, slots=True)
class Threshold:
    """A row of the table.

    figure : name of the figure
    threshold : maximum of the figure, or its minimum if larger is better
    when_set : value of the figure when the threshold was set
    set_on : day on which the threshold was set
    note : remark on the threshold, such as its reason; may be empty
    """

    figure: str
    threshold: float
    when_set: float
    set_on: str
    note: str = ""


class Verdict(Enum):
    """Result of comparing a figure with its threshold."""

    REACHED = "reached"
    BETTER = "better: its threshold can be lowered"
    NOISE = "reached: worse, within the noise"
    WORSE = "WORSE"
    NO_THRESHOLD = "NO THRESHOLD"
    NOT_MEASURED = "not measured"
    BROKEN = "FAILED"

    @property
    def fails(self) -> bool:
        """Return True if this verdict on a figure makes the benchmark fail."""
        return self in (Verdict.WORSE, Verdict.NO_THRESHOLD, Verdict.BROKEN)


def judge(figure: Figure, reading: Reading, threshold: Threshold | None) -> Verdict:
    """Compare a figure's value in a run with its threshold: it is worse only if its whole interval is."""
    if threshold is None:
        return Verdict.NO_THRESHOLD
    if figure.is_worse(reading.best(figure), threshold.threshold):
        return Verdict.WORSE
    if figure.is_worse(reading.value, threshold.threshold):
        return Verdict.NOISE
    better = threshold.when_set * (1 + BETTER_BY if figure.larger_is_better else 1 - BETTER_BY)
    return Verdict.BETTER if figure.is_worse(better, reading.worst(figure)) else Verdict.REACHED


def new_threshold(figure: Figure, values: Sequence[float], day: str) -> Threshold:
    """Return the threshold that follows from a figure's values in several runs: the worst value, rounded.

    day : date of the threshold, as text
    """
    worst = figure.worst(values)
    step = 10.0 ** (math.floor(math.log10(abs(worst))) - DIGITS + 1) if worst else 1.0
    loose = math.floor(worst / step) * step if figure.larger_is_better else math.ceil(worst / step) * step
    return Threshold(figure.name, float(f"{loose:.6g}"), float(f"{median(values):.{DIGITS + 1}g}"), day)


def lower(
    figures: Iterable[Figure], thresholds: Mapping[str, Threshold], new: Mapping[str, Threshold]
) -> dict[str, Threshold]:
    """Return the thresholds in the figures' order, replaced by those in `new` that are tighter or did not exist."""
    lowered = {}
    for figure in figures:
        old, other = thresholds.get(figure.name), new.get(figure.name)
        if other is not None and (old is None or figure.is_worse(old.threshold, other.threshold)):
            lowered[figure.name] = other
        elif old is not None:
            lowered[figure.name] = old
    return lowered


def read_thresholds(path: Path | None = None) -> dict[str, Threshold]:
    """Read a table, by default the common one, by figure name."""
    with (path or TABLE).open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    return {
        row["figure"]: Threshold(
            row["figure"], float(row["threshold"]), float(row["when_set"]), row["set_on"], row["note"]
        )
        for row in rows
    }


def thresholds_on(processor: str) -> dict[str, Threshold]:
    """Return the thresholds for a processor: the common table, updated with the processor's own.

    processor : its widest vector instructions, from `torch.backends.cpu.get_cpu_capability`
    """
    own = table_of(processor)
    return read_thresholds() | (read_thresholds(own) if own.exists() else {})


def table_of(processor: str) -> Path:
    """Return the file of thresholds for one kind of processor, which may not exist."""
    return TABLE.with_name(f"thresholds-{processor.lower()}.csv")


def lower_thresholds(figures: Iterable[Figure], new: Mapping[str, Threshold], processor: str) -> None:
    """Lower the thresholds for a processor, each in the table that holds it: its own or the one for all.

    figures : all figures
    new : thresholds from new measurements, by name of the figure
    """
    every, own = list(figures), table_of(processor)
    rows = read_thresholds(own) if own.exists() else {}
    write_thresholds(lower(every, read_thresholds(), {name: row for name, row in new.items() if name not in rows}))
    if rows:
        write_thresholds(lower(every, rows, {name: row for name, row in new.items() if name in rows}), own)


def write_thresholds(thresholds: Mapping[str, Threshold], path: Path | None = None) -> None:
    """Write thresholds to the table `path`, by default the one for all processors, with the comments in `HEAD`."""
    with (path or TABLE).open("w", encoding="utf-8", newline="") as file:
        file.write(HEAD)
        writer = csv.DictWriter(file, [field.name for field in fields(Threshold)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(threshold) for threshold in thresholds.values())
