"""The options of `opreplay`, and the job that a command line or the keywords of a call request."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from opgrip.cli.command import OneLineParser, add_debug, add_version
from opgrip.cli.options import (
    CASES,
    OUTPUT,
    RUN,
    add_all_options,
    all_from_arguments,
    arguments_of,
    option,
    options_in,
    titled,
)
from opgrip.replay.analyses import Analysis, in_order
from opgrip.replay.reports import OutputOptions
from opgrip.replay.run.request import OPTION_GROUPS
from opgrip.replay.sequences.step_options import RankOptions, SequenceOptions
from opgrip.replay.workers.executors import EngineOptions

T = TypeVar("T")


@titled("results")
@dataclass(frozen=True, slots=True)
class ScoreOptions:
    baseline: Path | None = option(
        None,
        "with several traces: baseline file to compute scores against, written by opgrip zoo baseline "
        "(default: the one that ships)",
        parse=Path,
        role=OUTPUT,
    )


@titled("cases")
@dataclass(frozen=True, slots=True)
class OperatorRequest:
    operator: tuple[str, ...] = option(
        (),
        "replay this operator instead of a trace, such as aten.add.Tensor, aten.mm, or 'aten.add*' for all "
        "matching operators that take the --inputs; can be repeated",
        repeated=True,
        metavar="NAME",
        role=CASES,
    )
    inputs: tuple[str, ...] = option(
        (),
        "with --operator: its arguments as JSON, with tensors by shape and other arguments by value: "
        """'{"self": [64, 64], "other": [64, 64]}'; or a list of such objects; can be repeated""",
        repeated=True,
        metavar="JSON",
        needs=("--operator",),
        role=CASES,
    )


def option_classes() -> list[type]:
    of_cases: list[type] = [OperatorRequest, *OPTION_GROUPS.values(), SequenceOptions, OutputOptions, ScoreOptions]
    return [*of_cases, RankOptions, EngineOptions, *(analysis.options for analysis in in_order())]


@dataclass(frozen=True, slots=True)
class ReplayJob:
    """A replay as a command line or the keywords of a call request it.

    traces : what to replay, by name; empty for operators
    options : values of the options, by the class that declares them
    """

    traces: tuple[str, ...]
    options: Mapping[type, Any]
    debug: bool = False

    def __getitem__(self, declared: type[T]) -> T:
        values: T = self.options[declared]
        return values

    def having(self, declared: type, **changes: Any) -> ReplayJob:
        return replace(self, options={**self.options, declared: replace(self.options[declared], **changes)})

    @property
    def is_step(self) -> bool:
        return self[SequenceOptions].sequence

    @property
    def analyses(self) -> list[type[Analysis]]:
        return [analysis for analysis in in_order() if analysis.is_requested(self.options[analysis.options])]

    @property
    def settings(self) -> dict[str, str]:
        """Options that change the meaning of all rows and are not at their defaults, as texts by name."""
        return {
            word: _text(getattr(values, name))
            for declared, values in self.options.items()
            for name, word, default, about in options_in(declared)
            if about.role == RUN and getattr(values, name) != default
        }


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else "yes" if value is True else str(value)


DESCRIPTION = (
    "Replay every distinct call of a trace (a case) without the model, and compare its time with the captured time."
)
EXAMPLES = """\
examples:
  opreplay trace:faster_rcnn                                               all cases of a trace
  opreplay trace:faster_rcnn --op 'aten.index*' --op 'aten.sort*' --precision 0.01
  opreplay trace:faster_rcnn --module 'backbone.*' --top 20 -o backbone.csv
  opreplay trace:faster_rcnn --unit module --module 'backbone.layer1.*'    each block as one case
  opreplay trace:faster_rcnn --values recorded,random,zeros                the effect of values on time
  opreplay trace:faster_rcnn -o results.json --resume                      continue after Ctrl-C or a crash
  opreplay trace:faster_rcnn --mode jit,compile,onnxruntime                under compilers, checked against eager
  opreplay trace:faster_rcnn --threads 1,2,4 --sweep                       speed-up with more threads
  opreplay trace:faster_rcnn --sequence                                    the whole step, with its dataflow
  opreplay trace:faster_rcnn --sequence --accuracy --dtype bfloat16        the calls that explain the error
  opreplay trace:faster_rcnn --device cuda --exec-mode events --cache cold   on a GPU, with cold caches
  opreplay trace:faster_rcnn --top 20 --nsys -o top.json                   kernels of each call, by Nsight Systems
  opreplay trace:faster_rcnn --device cuda --ncu -o all.json               kernel metrics, by Nsight Compute
  opreplay trace:faster_rcnn --profile -o all.json                         timeline for Perfetto, by torch's profiler
  opreplay zoo --top 200 -o zoo.parquet                                    the 200 longest cases of each model
  opreplay 'zoo:mmdet' --mode compile                                      the models of mmdet, compiled
  opreplay sample:nms                                                      one of the samples that ship
  opreplay samples --tag ForLoop --mode eager,compile                      all samples with a tag
  opreplay --operator aten.mm --inputs '{"self": [512, 512], "mat2": [512, 512]}' --dtype bfloat16 --backward
  torchrun --nproc-per-node 4 -m opgrip.replay step.jsonl --sequence       a step of four ranks, with its collectives
"""


def make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser("opreplay", usage="opreplay [options] [TRACE ...]", description=DESCRIPTION, epilog=EXAMPLES)
    parser.add_argument(
        "trace",
        type=Path,
        metavar="TRACE",
        nargs="*",
        help=(
            "a trace, or a file of another tool; several traces, a folder of traces, zoo or "
            "zoo:PATTERN; samples, sample:NAME, or a folder that opgrip grip wrote"
        ),
    )
    add_all_options(parser, option_classes())
    add_debug(parser)
    add_version(parser)
    return parser


def job_from_arguments(args: argparse.Namespace) -> ReplayJob:
    return ReplayJob(tuple(map(str, args.trace)), all_from_arguments(option_classes(), args), args.debug)


def job_from_keywords(
    trace: str | Path | Sequence[str | Path] | None,
    keywords: Mapping[str, Any],
    excluded: Collection[str] = (),
    only: Collection[str] | None = None,
) -> ReplayJob:
    traces = [trace] if isinstance(trace, str | Path) else trace or ()
    return job_from_arguments(arguments_of(make_parser(), list(map(str, traces)), keywords, excluded, only))
