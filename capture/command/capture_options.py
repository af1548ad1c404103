"""The options of `opcapture`: declared once, for the command line, Python and the documentation."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from opgrip.capture.models import model_sources
from opgrip.capture.models.sources import ModelOptions, OperatorOptions
from opgrip.capture.program.capture_choices import (
    AUTO,
    COMPILED,
    DEVICE_TIMES,
    KNOWN_EXTENSIONS,
    OPERATORS,
    SKETCH,
    VALUE_SHARE,
    VALUES,
)
from opgrip.cli.command import OneLineParser, add_debug, add_version, not_negative, part_of_one, positive, seed
from opgrip.cli.option_types import byte_count, interval, percent
from opgrip.cli.options import add_all_options, all_from_arguments, flag_of, option, options_in, refuse_options, titled
from opgrip.errors import UserError

DEFAULT_MODEL = "builtin:faster_rcnn"
DESCRIPTION = "Run a model or a script, and record every operator and extension function that it calls in a trace file."
EXAMPLES = """\
examples:
  opcapture                                               the built-in detector, to faster_rcnn.jsonl
  opcapture --model my_package.models:small_unet --batch-size 8 --device cuda
  opcapture -o train.jsonl.zst -- train.py --epochs 1     any script (or -- -m package), with the script's exit status
  opcapture --model faster-rcnn_r50_fpn_1x_coco.py --run train -o traces/faster_rcnn.jsonl.gz
  opcapture --model retinanet_r50_fpn_1x_coco.py --cfg-options model.test_cfg.score_thr=0 -o - | jq .op
  opcapture --model transformers:gpt2 --run generate --autocast bfloat16    a prompt, then token by token
  opcapture --model bert.py:make --run train --audit      compare the trace with torch's own count of operators
  opcapture --model bert.py:make --find-longtail          rank functions that break into many small operators
  opcapture --model faster-rcnn_r50_fpn_1x_coco.py --grip 'mmdet.*:delta2bbox'  also write a function as a sample
  opcapture --model opinfo:all -o operators.jsonl.zst     every operator of torch, with torch's own sample inputs
  torchrun --nproc-per-node 2 --no-python opcapture -o step.jsonl -- train.py   one trace per rank
"""
SCRIPT = "put a script after --, as in opcapture -- train.py"


_OF_MODELS = ("models", "modules")


@titled("model")
@dataclass(frozen=True, slots=True)
class ModelName:
    model: str = option(
        DEFAULT_MODEL,
        lambda: (
            f"source of the model: {'; '.join(source.form for source in model_sources.values())} (default: %(default)s)"
        ),
        short="-m",
        metavar="SOURCE",
        only=("models",),
        common=True,
    )


@titled("trace file")
@dataclass(frozen=True, slots=True)
class TraceOutput:
    output: str | None = option(
        None,
        "trace file; .gz and .zst compress it, - is stdout (default: MODEL.jsonl, or private.jsonl with --private)",
        short="-o",
        metavar="FILE",
        common=True,
    )
    force: bool = option(False, "replace an existing trace", short="-f", common=True)


@titled("steps")
@dataclass(frozen=True, slots=True)
class Steps:
    seed: int = option(
        0, "random seed for weights, inputs and everything else (default: %(default)s)", parse=seed, common=True
    )
    warmup: int = option(
        2,
        "steps to run before the recorded ones; during the last two the capture already examines the calls, so that "
        "recorded steps are slowed down less (default: %(default)s)",
        parse=not_negative,
        only=_OF_MODELS,
        common=True,
    )
    steps: int = option(
        3, "number of steps to record (default: %(default)s)", parse=positive, only=_OF_MODELS, common=True
    )


@titled("contents of the trace")
@dataclass(frozen=True, slots=True)
class RecordingOptions:
    extension: tuple[str, ...] = option(
        (),
        f"extension module to record, in addition to {', '.join(KNOWN_EXTENSIONS)}; can be repeated",
        repeated=True,
        metavar="MODULE",
        common=True,
    )
    grip: tuple[str, ...] = option(
        (),
        "also record the calls of functions whose names match a pattern, such as 'mmdet.models.*:delta2bbox', and "
        "write each function as a sample; can be repeated",
        repeated=True,
        metavar="PATTERN",
        common=True,
    )
    grip_to: Path | None = option(
        None, "folder for the samples that --grip writes (default: grips)", parse=Path, metavar="FOLDER"
    )
    compiled: str = option(
        OPERATORS,
        "record a compiled region as its original operators, or as one opaque call (default: %(default)s)",
        choices=COMPILED,
        common=True,
    )
    values: str = option(
        SKETCH,
        "sketch keeps enough to generate similar tensor values; full also stores, in a second file, the values of each "
        "signature's first call, which can be private data (default: %(default)s)",
        choices=VALUES,
        common=True,
    )
    value_share: float = option(
        VALUE_SHARE,
        "maximum share of the program's time for reading the values of a signature's later calls, outside of warm-up "
        "steps (default: %(default)s)",
        parse=part_of_one,
        metavar="SHARE",
    )
    device_time: str = option(
        AUTO,
        "how to time calls on an accelerator: events (one before and one after each call); kernels (by the device's "
        "records of kernels, which also adds their names); auto (kernels if possible) (default: %(default)s)",
        choices=DEVICE_TIMES,
        common=True,
    )
    private: bool = option(
        False, "leave out names, paths, texts and values of the program, as `opgrip trace redact` does", common=True
    )
    salt_file: Path | None = option(
        None,
        "with --private: file with the salt that names are hashed with, created if missing; traces with the same salt "
        "can be compared",
        parse=Path,
    )
    stack_depth: int = option(
        1,
        "keep the N innermost frames of the program for each call, each with function, file and line "
        "(default: %(default)s)",
        parse=positive,
        common=True,
    )
    max_calls: int | None = option(
        None, "stop the recording, but not the program, after N calls", parse=positive, common=True
    )
    max_bytes: int | None = option(
        None,
        "stop the recording after N bytes of trace, counted before compression, and with the values that --values full "
        "keeps",
        parse=positive,
    )
    max_memory: int | None = option(
        None, "stop the recording when it uses this much memory, such as 500MB", parse=byte_count, metavar="SIZE"
    )
    max_overhead: float | None = option(
        None,
        "leave out whole steps, so that recording takes at most this share of the program's time, such as 5%%",
        parse=percent,
        metavar="SHARE",
        common=True,
    )
    last: int | None = option(
        None,
        "keep the last N calls in memory, and write them only if the program fails, receives a signal or requests it",
        parse=positive,
        common=True,
    )
    write_ahead: bool = option(
        False,
        "write each call before it runs, to find the one that crashes or hangs; slow; with --last, to a "
        "file of constant size",
    )


@titled("recording on demand")
@dataclass(frozen=True, slots=True)
class OnDemandOptions:
    on_demand: bool = option(
        False,
        "run the script at full speed, and record steps when `opcapture trigger` or a signal requests it",
        common=True,
    )
    step_module: str | None = option(
        None,
        "count each outermost call of a module whose class matches the pattern as a step (default: the steps that the "
        "program marks with opgrip.capture.step(), or if it marks none, outermost calls of modules)",
        metavar="PATTERN",
    )
    seconds: float | None = option(
        None, "record all steps that begin within this time, instead of --steps", parse=interval, metavar="TIME"
    )
    signal: str | None = option(None, "signal that starts a recording, such as USR1", metavar="NAME")


@titled("reports")
@dataclass(frozen=True, slots=True)
class Findings:
    find_longtail: bool = option(
        False, "rank the functions that break into many small operators, like `opgrip longtail`", common=True
    )
    audit: bool = option(
        False,
        "build the model again, and compare the trace with torch's own count of the operators in the model's steps",
        only=_OF_MODELS,
    )


# option classes in the order of the help text
OPTIONS = (ModelName, ModelOptions, OperatorOptions, Steps, TraceOutput, RecordingOptions, OnDemandOptions, Findings)


def make_parser() -> argparse.ArgumentParser:
    usage = "opcapture [options] [-- SCRIPT [ARGUMENT ...] | -- -m MODULE [ARGUMENT ...]]"
    parser = OneLineParser("opcapture", usage=usage, description=DESCRIPTION, epilog=EXAMPLES, surplus=SCRIPT)
    add_all_options(parser, OPTIONS)
    add_debug(parser)
    add_version(parser)
    return parser


def check_grips(args: argparse.Namespace) -> None:
    if args.private and args.grip:
        raise UserError(
            "--private cannot be combined with --grip, which writes source and values", "leave out one of them"
        )
    if args.grip_to is not None and not args.grip:
        raise UserError("--grip-to needs --grip", "name the functions to grip with --grip")


def check_not_for_models(args: argparse.Namespace) -> None:
    refuse_options(all_from_arguments(OPTIONS, args), ("models",), "a script after -- has its own options")


def check_on_demand(args: argparse.Namespace) -> None:
    if args.on_demand:
        return
    for _, word, default, _ in options_in(OnDemandOptions):
        if getattr(args, word) != default:
            raise UserError(f"{flag_of(word)} is for programs that keep running", "add --on-demand")
