"""The options of `opcapture`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from opgrip.capture.command.on_demand_options import OnDemand
from opgrip.capture.models import model_sources
from opgrip.capture.models.program import ModelOptions, OperatorOptions
from opgrip.capture.program.capture_choices import (
    COMPILED,
    DEVICE_TIMES,
    EVENTS,
    KNOWN_EXTENSIONS,
    OPERATORS,
    SKETCH,
    VALUE_SHARE,
    VALUES,
)
from opgrip.cli.command import OneLineParser, add_debug, add_version, not_negative, part_of_one, positive, seed
from opgrip.cli.option_types import byte_count, percent
from opgrip.cli.options import add_all_options, option, refuse_options, titled
from opgrip.errors import UserError

DEFAULT_MODEL = "builtin:faster_rcnn"
DESCRIPTION = "Run a model and record every operator and extension function that it calls, in a trace file."
EXAMPLES = """\
examples:
  opcapture                                               the built-in detector, to faster_rcnn.jsonl
  opcapture --model faster-rcnn_r50_fpn_1x_coco.py --run train -o traces/faster_rcnn.jsonl.gz
  opcapture --model my_package.models:small_unet --batch-size 8 --device cuda
  opcapture --model retinanet_r50_fpn_1x_coco.py --cfg-options model.test_cfg.score_thr=0 -o - | jq .op
  opcapture --model bert.py:make --run train --audit      name what torch ran and the trace does not have
  opcapture --model faster-rcnn_r50_fpn_1x_coco.py --grip 'mmdet.*:delta2bbox'  functions too, and samples of them
  opcapture --model bert.py:make --find-longtail          name the functions that break into many small operators
  opcapture --model transformers:gpt2 --run generate --autocast bfloat16    prefill, and then token by token
  opcapture -o train.jsonl.zst -- train.py --epochs 1     any script, or -- -m package, with its own exit status
  opcapture --model opinfo:all -o operators.jsonl.zst     every operator of torch, with torch's own sample inputs
  torchrun --nproc-per-node 2 --no-python opcapture -o step.jsonl -- train.py     one trace a rank
"""
SCRIPT = "put a script after --, as in opcapture -- train.py"


@titled("the model")
@dataclass(frozen=True, slots=True)
class ModelName:
    """Which model is built."""

    model: str = option(
        DEFAULT_MODEL,
        lambda: f"{'; '.join(source.form for source in model_sources.values())} (default: %(default)s)",
        short="-m",
        metavar="SOURCE",
        only=("models",),
    )


@titled("the trace")
@dataclass(frozen=True, slots=True)
class Output:
    """Where the trace goes."""

    output: str | None = option(
        None,
        "the trace; .gz and .zst compress it, - is stdout (default: MODEL.jsonl, with --private private.jsonl)",
        short="-o",
        metavar="FILE",
    )
    force: bool = option(False, "replace an existing trace", short="-f")


@titled("its steps")
@dataclass(frozen=True, slots=True)
class Steps:
    """Which steps of a model are captured."""

    seed: int = option(0, "of weights, inputs and all else random (default: %(default)s)", parse=seed)
    warmup: int = option(
        2,
        "steps before those that are recorded; in the last two the capture learns (default: %(default)s)",
        parse=not_negative,
        metavar="N",
        only=("models", "modules"),
    )
    steps: int = option(
        3, "steps that are recorded (default: %(default)s)", parse=positive, metavar="N", only=("models", "modules")
    )


@titled("what is recorded")
@dataclass(frozen=True, slots=True)
class Recording:
    """What is recorded: keywords of `Capture`, of the same names."""

    extension: tuple[str, ...] = option(
        (),
        f"an extension module to record too, besides {', '.join(KNOWN_EXTENSIONS)}; can be repeated",
        repeated=True,
        metavar="MODULE",
    )
    grip: tuple[str, ...] = option(
        (),
        "functions whose calls are recorded too, such as 'mmdet.models.*:delta2bbox', each also written as a "
        "sample; can be repeated",
        repeated=True,
        metavar="PATTERN",
    )
    grip_to: Path | None = option(
        None, "where the samples go that --grip writes (default: grips)", parse=Path, metavar="FOLDER"
    )
    compiled: str = option(
        OPERATORS,
        "record compiled regions as the operators they were made of, or each as one call (default: %(default)s)",
        choices=COMPILED,
    )
    values: str = option(
        SKETCH,
        "full also keeps the values of each signature's first call, which can be private, in a file beside "
        "(default: %(default)s)",
        choices=VALUES,
    )
    value_share: float = option(
        VALUE_SHARE,
        "the most of the program's time that looks at values of later calls take, beside steps in which the capture "
        "learns (default: %(default)s)",
        parse=part_of_one,
        metavar="SHARE",
    )
    device_time: str = option(
        EVENTS,
        "time calls on an accelerator from an event before to one after, or by its own records of their kernels, whose "
        "names the trace then has (default: %(default)s)",
        choices=DEVICE_TIMES,
    )
    private: bool = option(
        False, "write no names, paths, texts and values of the program, as `opgrip trace redact` would, while recording"
    )
    salt_file: Path | None = option(
        None,
        "the salt of the names under --private, made where there is none: traces of one salt can be compared",
        parse=Path,
        metavar="FILE",
    )
    stack_depth: int = option(1, "source lines kept (default: %(default)s)", parse=positive, metavar="N")
    max_calls: int | None = option(None, "end the recording, not the program, after N", parse=positive, metavar="N")
    max_bytes: int | None = option(
        None,
        "the same, after N bytes of trace before compression, whole values included",
        parse=positive,
        metavar="N",
    )
    max_memory: int | None = option(
        None,
        "the same, once what is kept of the program takes about so much, such as 500MB",
        parse=byte_count,
        metavar="SIZE",
    )
    max_overhead: float | None = option(
        None,
        "the most of the program's time that recording takes, such as 5%%: near it, values, scopes and then whole "
        "steps are left out, which the trace says",
        parse=percent,
        metavar="SHARE",
    )
    last: int | None = option(
        None,
        "keep the last N calls in memory, and write them only when the program raises, is stopped by a signal, or asks",
        parse=positive,
        metavar="N",
    )
    write_ahead: bool = option(
        False,
        "write each call before it runs, to find the one that crashes or hangs; slow. With --last, to a file that does "
        "not grow",
    )


@titled("what is told of it")
@dataclass(frozen=True, slots=True)
class Findings:
    """What is said of a capture when it is done."""

    find_longtail: bool = option(
        False, "rank the functions that break into many small operators, as `opgrip longtail` does"
    )
    audit: bool = option(
        False,
        "build the model again, and compare with what torch counts of its steps",
        only=("models", "modules"),
    )


OPTIONS = (ModelName, ModelOptions, OperatorOptions, Steps, Output, Recording, OnDemand, Findings)
"""The classes of options, in the order of the help."""


def make_parser() -> argparse.ArgumentParser:
    """The command's options."""
    usage = "opcapture [options] [-- SCRIPT [ARGUMENT ...] | -- -m MODULE [ARGUMENT ...]]"
    parser = OneLineParser("opcapture", usage=usage, description=DESCRIPTION, epilog=EXAMPLES, surplus=SCRIPT)
    add_all_options(parser, OPTIONS)
    add_debug(parser)
    add_version(parser)
    return parser


def check_grips(args: argparse.Namespace) -> None:
    """Raise `UserError` where functions cannot be gripped as it is asked for."""
    if args.private and args.grip:
        raise UserError("--grip writes samples with source and values", "leave out --private or --grip")
    if args.grip_to is not None and not args.grip:
        raise UserError("--grip-to without --grip", "name the functions to grip with --grip")


def check_not_for_models(args: argparse.Namespace) -> None:
    """Raise `UserError` for options of models beside a script."""
    refuse_options(args, OPTIONS, ("models",), "a script after -- has its own options")
