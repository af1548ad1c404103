"""Check that performance figures are still reached: measure each and compare it with its threshold.

A figure is the ratio of two quantities that were measured alternately in this run. It fails if its whole interval is
worse than its threshold, also after adding the rounds of a second measurement. Thresholds are in
benchmarks/figures/thresholds.csv, for processors without AVX-512 in thresholds-avx2.csv. The exit status is 1 if a
figure fails.

    python benchmarks/thresholds.py                                   # about ten minutes on two quiet cores
    python benchmarks/thresholds.py --quick                           # about two, part of the figures
    python benchmarks/thresholds.py --only 'capture of BERT*' -o run.json
    python benchmarks/thresholds.py --set run1.json run2.json run3.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from fnmatch import fnmatchcase
from pathlib import Path
from time import perf_counter
from types import MappingProxyType

import torch
from figures.capture import CAPTURE
from figures.commands import COMMANDS
from figures.engines import ENGINES
from figures.figure import Experiment, Figure, NotMeasuredError, Reading, Rounds, read_figure
from figures.idle import SERVICE
from figures.replay import REPLAY
from figures.table_of_thresholds import (
    FEWEST_RUNS,
    Threshold,
    Verdict,
    judge,
    lower_thresholds,
    new_threshold,
    thresholds_on,
)
from others import in_a_process
from rich.console import Console
from rich.table import Table

from opgrip.platform.machine import processor

EXPERIMENTS: tuple[Experiment, ...] = (*CAPTURE, *REPLAY, *SERVICE, *ENGINES, *COMMANDS)
# widest vector instructions of this processor, which may have separate thresholds
VECTORS = torch.backends.cpu.get_cpu_capability()
FIGURES = {figure.name: figure for experiment in EXPERIMENTS for figure in experiment.figures}


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a figure in a run.

    rounds : measured quantities of each round; empty if the figure was not measured
    why : reason why the figure was not measured, or empty
    """

    figure: Figure
    rounds: Rounds
    verdict: Verdict
    reading: Reading | None = None
    why: str = ""


def main() -> int:
    """Measure, print the table, and return 1 if a threshold is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="part of the figures, by fewer rounds")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="figures by name, such as '*first step*'")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="keep the figures' rounds as JSON")
    parser.add_argument("--set", nargs="+", type=Path, metavar="FILE", help="lower thresholds to what these runs gave")
    args = parser.parse_args()
    if args.set:
        if len(args.set) < FEWEST_RUNS:
            parser.error(f"thresholds are set by {FEWEST_RUNS} runs or more, of which they keep the worst")
        set_thresholds(args.set)
        return 0
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 180)
    machine = f"torch {torch.__version__}, Python {platform.python_version()}, {processor('cpu')[1]}"
    console.print(f"{machine}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    outcomes = list(outcomes_of(EXPERIMENTS, args.only, args.quick, console))
    if not outcomes:
        parser.error(f"no figure is called {args.only!r}" + (" in a quick run" if args.quick else ""))
    print_table(console, outcomes)
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        rounds = {outcome.figure.name: outcome.rounds for outcome in outcomes if outcome.rounds}
        document = {"machine": machine, "processor": VECTORS, "rounds": rounds}
        args.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return any(outcome.verdict.fails for outcome in outcomes)


def outcomes_of(experiments: Iterable[Experiment], pattern: str, quick: bool, console: Console) -> Iterator[Outcome]:
    """Yield the outcomes of the figures that match `pattern`, running each experiment in a separate process.

    Experiments with a figure that is worse run once more at the end.

    quick : True to use `quick_rounds`
    """
    thresholds = thresholds_on(VECTORS)
    outcomes: dict[str, list[Outcome]] = {}
    again = []
    for experiment in experiments:
        rounds = experiment.quick_rounds if quick else experiment.rounds
        if rounds and any(is_named(figure, pattern) for figure in experiment.figures):
            start = perf_counter()
            outcomes[experiment.name] = run_experiment(experiment, rounds, thresholds)
            console.print(f"{experiment.name}: {rounds} rounds in {perf_counter() - start:.0f} s")
            worse = [item.figure for item in outcomes[experiment.name] if item.verdict is Verdict.WORSE]
            if experiment.rounds > 1 and any(is_named(figure, pattern) for figure in worse):
                again.append(experiment)
    for experiment in again:
        # after all others, because a slow phase of a shared machine affects all rounds of a short experiment
        console.print(f"{experiment.name}: worse, so {experiment.rounds} more rounds are measured")
        before = {outcome.figure: outcome.rounds for outcome in outcomes[experiment.name]}
        outcomes[experiment.name] = run_experiment(experiment, experiment.rounds, thresholds, before)
    for own in outcomes.values():
        yield from (outcome for outcome in own if is_named(outcome.figure, pattern))


def is_named(figure: Figure, pattern: str) -> bool:
    return fnmatchcase(figure.name, pattern)


def run_experiment(
    experiment: Experiment,
    rounds: int,
    thresholds: Mapping[str, Threshold],
    before: Mapping[Figure, Rounds] = MappingProxyType({}),
) -> list[Outcome]:
    """Return the outcomes of an experiment's figures; the rounds in `before`, measured earlier, count too.

    thresholds : threshold by name of the figure
    """
    try:
        rounds_by_figure = in_a_process(experiment.measure, rounds)
    except NotMeasuredError as error:
        return [Outcome(figure, [], Verdict.NOT_MEASURED, why=str(error)) for figure in experiment.figures]
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        return [Outcome(figure, [], Verdict.BROKEN, why=why) for figure in experiment.figures]
    outcomes = []
    for figure, own in zip(experiment.figures, rounds_by_figure, strict=True):
        every = [*before.get(figure, ()), *own]
        reading = read_figure(figure, every)
        outcomes.append(Outcome(figure, every, judge(figure, reading, thresholds.get(figure.name)), reading))
    return outcomes


def print_table(console: Console, outcomes: Sequence[Outcome]) -> None:
    """Print one row per figure."""
    thresholds = thresholds_on(VECTORS)
    table = Table("figure", "threshold", "now", "interval", "when set", "verdict")
    table.columns[0].no_wrap = True
    for column in table.columns[1:5]:
        column.justify = "right"
    for outcome in outcomes:
        figure, reading, threshold = outcome.figure, outcome.reading, thresholds.get(outcome.figure.name)
        limit = f"{'>=' if figure.larger_is_better else '<='} {threshold.threshold:.4g}" if threshold else "-"
        now = (
            (f"{reading.value:.4g} {figure.unit}".strip(), f"{reading.low:.4g} - {reading.high:.4g}")
            if reading
            else ("-", "-")
        )
        before = f"{threshold.when_set:.4g}" if threshold else "-"
        verdict = f"{outcome.verdict.value}: {outcome.why}" if outcome.why else outcome.verdict.value
        table.add_row(figure.name, limit, *now, before, verdict, style="red" if outcome.verdict.fails else "")
    console.print(table)
    failing = [outcome.figure for outcome in outcomes if outcome.verdict.fails]
    for figure in failing:
        console.print(f"{figure.name}: {figure.meaning}", style="red")
    if failing:
        console.print(f"{len(failing)} of {len(outcomes)} figures miss their thresholds")
    else:
        console.print("all measured figures reach their thresholds")


def set_thresholds(paths: Sequence[Path]) -> None:
    """Lower each threshold to the worst value in the runs, whose files are `paths`, if they all have the figure."""
    documents = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    processors = {document["processor"] for document in documents}
    if len(processors) > 1:
        kinds = " and ".join(sorted(processors))
        sys.exit(f"thresholds.py: these runs are of {kinds}: thresholds are set by runs of one kind")
    runs = [document["rounds"] for document in documents]
    day = date.today().isoformat()
    new = {
        name: new_threshold(figure, [read_figure(figure, run[name]).value for run in runs], day)
        for name, figure in FIGURES.items()
        if all(name in run for run in runs)
    }
    lower_thresholds(FIGURES.values(), new, *processors)


if __name__ == "__main__":
    sys.exit(main())
