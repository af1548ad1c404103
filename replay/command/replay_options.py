"""All options of `opreplay` in the order of the help text: those of each stage of a replay, then those of analyses."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from opgrip.cli.command import OneLineParser, add_debug, add_version
from opgrip.cli.options import (
    CASES,
    OUTPUT,
    RUN,
    add_all_options,
    arguments_of,
    from_arguments,
    option,
    options_in,
    refuse_options,
    titled,
)
from opgrip.errors import UserError
from opgrip.platform.machine import cache_folder
from opgrip.replay.analyses import analyses, in_order
from opgrip.replay.cases.selection import CALL, MODULE, PROGRAM
from opgrip.replay.inputs.input_options import InputOptions
from opgrip.replay.modes import CANDIDATE, EAGER
from opgrip.replay.modes.candidate import OF_MODULES
from opgrip.replay.reports import OutputOptions
from opgrip.replay.run.request import OPTION_GROUPS, RunRequest
from opgrip.replay.sequences.step_options import RankOptions, SequenceOptions, launch_of
from opgrip.replay.timing.timing_options import DISCRETE, GRAPH, WARM
from opgrip.replay.workers.executors import PROCESSES, EngineOptions

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


def run_settings(args: argparse.Namespace) -> dict[str, str]:
    return {
        word: _text(getattr(args, word))
        for declared in option_classes()
        for _, word, default, about in options_in(declared)
        if about.role == RUN and getattr(args, word) != default
    }


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else "yes" if value is True else str(value)


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


def request_with(trace: str | Path | None, **options: Any) -> RunRequest:
    return request_of(arguments_of(make_parser(), words_of(trace), options))


def words_of(trace: str | Path | Sequence[str | Path] | None) -> list[str]:
    if isinstance(trace, str | Path):
        return [str(trace)]
    return list(map(str, trace or ()))


def request_of(args: argparse.Namespace) -> RunRequest:
    from opgrip.replay.cases.sources import source_of

    target = _target_of(args)
    source, launch = source_of(target), launch_of()
    if args.sequence:
        _check_sequence(args)
    if args.sequence and launch and args.sandbox:
        raise UserError(
            "--sandbox confines worker processes, but ranks run in processes of the launcher", "leave it out"
        )
    if not (args.sequence and launch):
        refuse_options(args, option_classes(), ("ranks",), "start them by torchrun, with --sequence")
    refuse_options(args, option_classes(), source.lacks, source.hint)
    if args.engine != PROCESSES:
        # options that apply to a process on this machine only
        refuse_options(args, option_classes(), ("one trace",), f"leave it out with --engine {args.engine}")
    if not source.in_program:
        if PROGRAM in args.cache:
            raise UserError(
                f"--cache program needs a trace of a program, which {target} is not", "use --cache warm or cold"
            )
        args.cache = args.cache or (WARM,)
    return replace(options_of(args), trace=target, shard=from_arguments(EngineOptions, args).shard)


def _check_sequence(args: argparse.Namespace) -> None:
    in_graphs = args.exec_mode == GRAPH and launch_of() is None
    others = argparse.Namespace(**{**vars(args), "exec_mode": None}) if in_graphs else args
    refuse_options(others, option_classes(), ("single cases",), "leave it out with --sequence")
    if from_arguments(InputOptions, args).is_spread:
        raise UserError("--sequence runs on one device", "name one with --device")
    if len(args.mode) > 1:
        raise UserError("--sequence runs under one mode", "name one with --mode")
    from opgrip.replay.sequences.call_timers import check_mode

    check_mode(args.mode[0])
    if in_graphs and args.mode[0] != EAGER:
        raise UserError("--sequence --exec-mode graph runs all calls in eager", "leave out --mode")


def _target_of(args: argparse.Namespace) -> str:
    request = from_arguments(OperatorRequest, args)
    if request.operator and args.trace:
        raise UserError("--operator cannot be combined with a trace", f"leave out {args.trace[0]}, or --operator")
    if request.operator:
        from opgrip.replay.cases.sources.operator import target_of

        return target_of(request.operator, request.inputs, args.extension)
    if not args.trace:
        raise UserError("there is nothing to replay", "name a trace, samples, or an operator with --operator")
    if len(args.trace) > 1:
        raise UserError(f"exactly one trace can be replayed here, got {len(args.trace)}", "name one")
    return str(args.trace[0])


def options_of(args: argparse.Namespace) -> RunRequest:
    groups = {name: from_arguments(declared, args) for name, declared in OPTION_GROUPS.items()}
    requested = [item for item in analyses.values() if item.is_requested(from_arguments(item.options, args))]
    if args.sandbox or args.operator:
        groups["inputs"] = replace(groups["inputs"], trust=True)
    request = RunRequest(
        **groups,
        detail=args.debug,
        # a later replay without a sandbox would load compiled programs that an untrusted trace could have changed
        store=None if args.sandbox else str(cache_folder()),
        count_work=any(item.counts_work for item in requested),
        sandbox=args.sandbox,
    )
    request.timing.check()
    request.modes.check(request.tuning, in_graph=request.timing.exec_mode == GRAPH)
    request = replace(request, candidates=request.candidates.read())
    if request.candidates.candidate:
        request = _with_candidates(request)
    if request.candidates.untrusted:
        request = _with_untrusted(request)
    # fill in defaults, so that giving a default value does not change the request
    timing = replace(request.timing, cache=request.timing.caches)
    return replace(request, timing=timing, modes=replace(request.modes, mode=request.modes.all_names))


def _with_untrusted(request: RunRequest) -> RunRequest:
    names = {*request.modes.all_names} - {EAGER, CANDIDATE}
    refused = {
        "--backward": request.timing.backward,
        "--exec-mode": request.timing.exec_mode not in (None, DISCRETE),
        "--streams": any(point.streams > 1 for point in request.points),
        "--energy": request.energy.energy,
        "--sandbox": request.sandbox,
        f"--mode {','.join(sorted(names))}": bool(names),
    }
    for flag, is_used in refused.items():
        if is_used:
            raise UserError(f"--untrusted does not support {flag}", "leave it out")
    return replace(request, timing=request.timing.with_method(DISCRETE))


def _with_candidates(request: RunRequest) -> RunRequest:
    operators, modules, selection = request.candidates.operators, request.candidates.modules, request.selection
    if selection.op:
        raise UserError("--candidate selects the calls of its operator", "leave --op out")
    if modules:
        _check_modules(request)
        selection = replace(selection, module=modules)
    elif selection.unit != CALL:
        raise UserError(
            f"--candidate {operators[0]} is for single calls, not for --unit {selection.unit}",
            "leave --unit out, or judge a module: --unit module --candidate module:PATH=FILE.py:CLASS",
        )
    modes = replace(request.modes, mode=(*request.modes.mode, CANDIDATE))
    return replace(request, modes=modes, selection=replace(selection, op=operators, for_candidates=True))


def _check_modules(request: RunRequest) -> None:
    candidates, selection = request.candidates, request.selection
    named = f"--candidate {OF_MODULES}{candidates.modules[0]}"
    if selection.unit != MODULE:
        raise UserError(f"{named} is for modules as a whole", "add --unit module")
    if candidates.operators:
        raise UserError(
            f"{named} is for --unit module, unlike {candidates.operators[0]}",
            "judge modules and operators in separate runs",
        )
    refused = {
        "--module": bool(selection.module),
        "--untrusted": candidates.untrusted,
        "--confirm": candidates.confirm,
        "--streams": any(point.streams > 1 for point in request.points),
    }
    for flag, is_used in refused.items():
        if is_used:
            raise UserError(f"candidates for modules do not support {flag}", "leave it out")
