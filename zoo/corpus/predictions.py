"""What distilled cases predict of traces and models, beside what these take in another replay."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import fsum, isfinite
from typing import IO, Any

from opgrip.cli.terminal import print_line
from opgrip.display.tables import TableColumn, print_table
from opgrip.zoo.corpus.corpus import Corpus
from opgrip.zoo.corpus.distill import Distilled
from opgrip.zoo.scoring.case_times import Times

HELD = 0.1
"""Relative error that is held."""


@dataclass(frozen=True, slots=True)
class Check:
    """A trace, or all traces of a model, whose time is known, and what the distilled cases say of it.

    Attributes
    ----------
    trace : empty for all of the model
    """

    trace: str
    model: str
    real_us: float
    predicted_us: float

    @property
    def error(self) -> float:
        """Relative; below 0 where too little is predicted."""
        return self.predicted_us / self.real_us - 1

    @property
    def is_held(self) -> bool:
        """Whether the error is small enough."""
        return abs(self.error) <= HELD


def check_of(corpus: Corpus, distilled: Distilled, times: Times) -> list[Check]:
    """Hold what is predicted of each trace against the sum of its cases' times in another replay."""
    # a score knows of a case what it takes after the calls of the trace that it is written from
    chosen = {key: times[trace, key] for key, trace in distilled.sources.items() if (trace, key) in times}
    models = {member.name: member.model for member in corpus.members}
    checks = []
    for name, rows in corpus.frame[corpus.frame["trace"].isin(list(distilled.weights_us))].groupby("trace", sort=False):
        timed = [(count, times.get((str(name), key)), us) for count, key, us in _columns(rows)]
        known_us = fsum(count * us for count, time, us in timed if time is not None)
        real_us = fsum(count * time for count, time, _ in timed if time is not None)
        whole_us = fsum(count * us for count, _, us in timed)
        predicted_us = distilled.predicted_us(str(name), chosen)
        if real_us > 0 and isfinite(predicted_us):
            # of cases that have no time there, nothing can be held
            checks.append(Check(str(name), models[str(name)], real_us, predicted_us * known_us / whole_us))
    return checks


def _columns(rows: Any) -> Any:
    return zip(rows["count"].tolist(), rows["key"].tolist(), rows["median_us"].tolist(), strict=True)


def _by_model(checks: Iterable[Check]) -> list[tuple[Check, list[Check]]]:
    """The total of each model, and its traces."""
    traces_of: dict[str, list[Check]] = {}
    for check in checks:
        traces_of.setdefault(check.model, []).append(check)
    return [
        (Check("", model, fsum(item.real_us for item in own), fsum(item.predicted_us for item in own)), own)
        for model, own in traces_of.items()
    ]


def print_check(checks: Sequence[Check], file: IO[str]) -> None:
    """Print a line a model, one for each of its traces below it, and how many are held."""
    models = _by_model(checks)
    rows = [item for total, own in models for item in (total, *own)]
    columns = [
        TableColumn("model, traces", lambda item: f"  {item.trace}" if item.trace else item.model),
        TableColumn("real ms", lambda item: item.real_us / 1e3, ",.2f"),
        TableColumn("predicted ms", lambda item: item.predicted_us / 1e3, ",.2f"),
        TableColumn("error", "error", "+.1%"),
    ]
    if rows:
        print_table(columns, rows, file, style=lambda item: None if item.trace else "bold")
    for name, items in (("models", [total for total, _ in models]), ("traces", checks)):
        held = sum(item.is_held for item in items)
        print_line(f"{held} of {len(items)} {name} are predicted within {HELD:.0%}", file)
