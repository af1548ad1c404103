"""All options of `opreplay`: those of each stage, in the order of the help, and those of the analyses."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from opgrip.replay.analyses import analyses
from opgrip.replay.arguments.options import InputOptions
from opgrip.replay.cases.selection import Selection
from opgrip.replay.cases.sources import source_of
from opgrip.replay.cases.ways import Points
from opgrip.replay.checks import Tolerance
from opgrip.replay.measuring.energy import EnergyOptions
from opgrip.replay.measuring.settings import GROUPS, Plan
from opgrip.replay.modes import ModeOptions, Tuning
from opgrip.replay.sequences.sequence import SequenceOptions
from opgrip.replay.timing.caches import PROGRAM, WARM
from opgrip.replay.timing.options import TimingOptions
from opgrip.replay.timing.samples import Effort
from opgrip.replay.workers.job import Job
from opgrip.replay.workers.options import Limits
from opgrip.traces.command import OneLineParser, add_debug, add_version
from opgrip.traces.errors import UserError
from opgrip.traces.keywords import arguments_of
from opgrip.traces.machine import cache_folder
from opgrip.traces.options import add_options, from_arguments, option, refuse_options

DESCRIPTION = "Run every distinct call of a trace again, without the model, and compare its time with the captured one."
EXAMPLES = """\
examples:
  opreplay traces/faster_rcnn.jsonl
  opreplay traces/faster_rcnn.jsonl --op 'aten.index*' --op 'aten.sort*' --precision 0.01
  opreplay traces/faster_rcnn.jsonl --module 'backbone.*' --top 20 -o backbone.csv
  opreplay traces/faster_rcnn.jsonl --unit module --module 'backbone.layer1.*'    each block as one case
  opreplay traces/faster_rcnn.jsonl --values recorded,random,zeros     what values do to the time
  opreplay traces/faster_rcnn.jsonl -o results.json --resume           go on after Ctrl-C, or a crash of the machine
  opreplay traces/faster_rcnn.jsonl --mode jit,compile,onnxruntime     under compilers, checked against eager
  opreplay traces/faster_rcnn.jsonl --threads 1,2,4 --sweep            which operators gain by threads
  opreplay traces/faster_rcnn.jsonl --sequence                         the whole step, with its dataflow
  opreplay traces/faster_rcnn.jsonl --top 20 --nsys -o top.json        kernels of each call, by Nsight Systems
  opreplay traces/faster_rcnn.jsonl --device cuda --ncu -o all.json    counters of its kernels, by Nsight Compute
  opreplay traces/faster_rcnn.jsonl --profile -o all.json              a timeline for Perfetto, by torch's profiler
  opreplay samples/nms                                                 a sample that ships
  opreplay samples --tag ForLoop --mode eager,compile                  all with a property
  opreplay traces/faster_rcnn.jsonl --device cuda --exec-mode events --cache cold
"""


@dataclass(frozen=True, slots=True)
class Output:
    """Where the results go."""

    output: Path | None = option(
        None,
        "also write the results, as the suffix says: .json, .csv, .md; .svg draws",
        short="-o",
        parse=Path,
        metavar="FILE",
    )
    force: bool = option(False, "replace an existing file", short="-f")
    append: bool = option(False, "add the rows to an existing file's (.json, .csv)", only=("single cases",))
    resume: bool = option(False, "go on where an interrupted replay to --output stopped", only=("single cases",))
    strict: bool = option(False, "exit with status 1 where a case is not ok")

    @property
    def may_replace(self) -> bool:
        """Whether the output may exist."""
        return self.force or self.append or self.resume


STAGES: tuple[tuple[str, tuple[type, ...]], ...] = (
    ("results", (Output,)),
    ("which cases", (Selection,)),
    ("what they run on", (InputOptions, Points)),
    ("how they are run", (ModeOptions, Tuning, Tolerance, SequenceOptions)),
    ("how they are timed", (TimingOptions, Effort)),
    ("the machine's limits", (EnergyOptions,)),
    ("limits", (Limits,)),
)
"""The classes of options of each stage, with their title in the help."""


def option_groups() -> Iterator[tuple[str, type]]:
    """Title and class of all options."""
    for title, groups in STAGES:
        for declared in groups:
            yield title, declared
    for analysis in analyses.values():
        yield analysis.title, analysis.options


def make_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = OneLineParser("opreplay", description=DESCRIPTION, epilog=EXAMPLES)
    parser.add_argument(
        "trace",
        type=Path,
        metavar="TRACE",
        help="a file that opcapture wrote; samples, samples/NAME, or a folder that grip wrote",
    )
    by_title: dict[str, argparse._ArgumentGroup] = {}
    for title, declared in option_groups():
        if title not in by_title:
            by_title[title] = parser.add_argument_group(title)
        add_options(by_title[title], declared)
    add_debug(parser)
    add_version(parser)
    return parser


def job_with(trace: str | Path, **options: Any) -> Job:
    """The replay that options ask for, by their long names with `_` for `-`; raises as `job_of` does."""
    return job_of(arguments_of(make_parser(), [str(trace)], options))


def job_of(args: argparse.Namespace) -> Job:
    """The replay that a command line asks for.

    Raises
    ------
    UserError : for options that do not go together
    """
    target = str(args.trace)
    plan = plan_of(args)
    source = source_of(target)
    declared = [group for _, group in option_groups()]
    if args.sequence:
        refuse_options(args, declared, ("single cases",), "leave it away with --sequence")
    refuse_options(args, declared, source.lacks, source.hint)
    if not source.in_program:
        if plan.timing.cache == PROGRAM:
            raise UserError("samples stand in no program that --cache program could follow", "use warm or cold")
        plan = replace(plan, timing=replace(plan.timing, cache=plan.timing.cache or WARM))
    return Job(target, from_arguments(Selection, args), plan)


def plan_of(args: argparse.Namespace) -> Plan:
    """How a command line says that cases are run.

    Raises
    ------
    UserError : for options that do not go together
    """
    plan = Plan(
        **{name: from_arguments(declared, args) for name, declared in GROUPS.items()},
        detail=args.debug,
        store=str(cache_folder()),
        memory_limit=args.memory_limit,
        count_work=any(
            item.counts_work and item.is_wanted(from_arguments(item.options, args)) for item in analyses.values()
        ),
    )
    plan.timing.check()
    plan.modes.check(plan.tuning)
    return plan
