"""The command line of `opcapture`."""

from __future__ import annotations

import argparse
from pathlib import Path

from opgrip.capture import full_values
from opgrip.capture.compiled import CHOICES, OPERATORS
from opgrip.capture.extensions import KNOWN_EXTENSIONS
from opgrip.capture.models import model_sources
from opgrip.capture.program import RUNS, ModelOptions
from opgrip.traces.command import OneLineParser, add_debug, add_version, not_negative, positive, refuse_options, seed
from opgrip.traces.errors import UserError
from opgrip.traces.tensor_file import load_safetensors

LONGTAIL_STEPS = 3
"""In the first step, the capture describes everything that is new to it, and times between calls hold that."""
DEFAULT_MODEL = "builtin:faster_rcnn"
DESCRIPTION = "Run a model and record every operator and extension function that it calls, in a trace file."
EXAMPLES = """\
examples:
  opcapture                                               the built-in detector, to faster_rcnn.jsonl
  opcapture --model faster-rcnn_r50_fpn_1x_coco.py --run train -o traces/faster_rcnn.jsonl.gz
  opcapture --model my_package.models:small_unet --batch-size 8 --device cuda
  opcapture --model retinanet_r50_fpn_1x_coco.py --cfg-options model.test_cfg.score_thr=0 -o - | jq .op
  opcapture --model bert.py:make --run train --audit      name what torch ran and the trace does not have
  opcapture --model retinanet_r50_fpn_1x_coco.py --grip 'mmdet.*:delta2bbox'    functions too, and samples of them
  opcapture --model bert.py:make --find-longtail          name the functions that break into many small operators
  opcapture -o train.jsonl.zst -- train.py --epochs 1     any script, or -- -m package, with its own exit status
  torchrun --nproc-per-node 2 --no-python opcapture -o step.jsonl -- train.py     one trace a rank
"""
GRIP_TO = Path("samples")
MODEL_OPTIONS = ("model", "run", "batch_size", "input_size", "device", "warmup", "steps", "checkpoint", "cfg_options")


def make_parser() -> argparse.ArgumentParser:
    """The command's options."""
    usage = "opcapture [options] [-- SCRIPT [ARGUMENT ...] | -- -m MODULE [ARGUMENT ...]]"
    parser = OneLineParser("opcapture", usage=usage, description=DESCRIPTION, epilog=EXAMPLES)
    forms = "; ".join(source.form for source in model_sources.values())
    parser.add_argument(
        "-m", "--model", metavar="SOURCE", default=DEFAULT_MODEL, help=f"{forms} (default: %(default)s)"
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="the trace; .gz and .zst compress it, - is stdout (default: MODEL.jsonl)"
    )
    parser.add_argument("-f", "--force", action="store_true", help="replace an existing trace")
    parser.add_argument(
        "--run",
        choices=RUNS,
        default="predict",
        help="train is loss, backward and optimizer step (default: %(default)s)",
    )
    parser.add_argument("--batch-size", type=positive, metavar="N", help="default: the model's own")
    parser.add_argument(
        "--input-size",
        type=image_size,
        metavar="HxW",
        help="of images, in pixels, such as 800x1333 (default: the model's own)",
    )
    parser.add_argument("--device", default="cpu", help="where the model runs, such as cuda:0 (default: %(default)s)")
    parser.add_argument(
        "--seed", type=seed, default=0, help="of weights, inputs and all else random (default: %(default)s)"
    )
    parser.add_argument(
        "--warmup", type=not_negative, default=1, metavar="N", help="steps before the capture (default: %(default)s)"
    )
    parser.add_argument(
        "--steps",
        type=positive,
        metavar="N",
        help=f"steps that are captured (default: 1, or {LONGTAIL_STEPS} with --find-longtail)",
    )
    parser.add_argument("--checkpoint", type=Path, metavar="FILE", help="weights to load (default: random ones)")
    parser.add_argument(
        "--cfg-options", nargs="+", default=[], metavar="KEY=VALUE", help="settings that override an OpenMMLab config's"
    )
    parser.add_argument(
        "--extension",
        action="append",
        default=[],
        metavar="MODULE",
        help=f"an extension module to record too, besides {', '.join(KNOWN_EXTENSIONS)}; can be repeated",
    )
    parser.add_argument(
        "--grip",
        action="append",
        default=[],
        metavar="PATTERN",
        help="functions whose calls are recorded too, such as 'mmdet.models.*:delta2bbox', each also written as a "
        "sample; can be repeated",
    )
    parser.add_argument(
        "--grip-to", type=Path, metavar="FOLDER", help="where the samples go that --grip writes (default: samples)"
    )
    _add_recording_options(parser)
    add_debug(parser)
    add_version(parser)
    return parser


def _add_recording_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--compiled",
        choices=CHOICES,
        default=OPERATORS,
        help="record compiled regions as the operators they were made of, or each as one call (default: %(default)s)",
    )
    parser.add_argument(
        "--values",
        choices=full_values.CHOICES,
        default=full_values.SKETCH,
        help="full also keeps the values of each signature's first call, which can be private, in a file beside "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--stack-depth",
        type=positive,
        default=1,
        metavar="N",
        help="source lines kept (default: %(default)s)",
    )
    parser.add_argument("--max-calls", type=positive, metavar="N", help="end the recording, not the program, after N")
    parser.add_argument(
        "--max-bytes",
        type=positive,
        metavar="N",
        help="the same, after N bytes of trace before compression, whole values included",
    )
    parser.add_argument(
        "--write-ahead",
        action="store_true",
        help="write each call before it runs, to find the one that crashes or hangs; slow",
    )
    parser.add_argument(
        "--find-longtail",
        action="store_true",
        help="rank the functions that break into many small operators, as `opgrip longtail` does",
    )
    parser.add_argument(
        "--audit",
        action="store_true",
        help="build the model again, and compare with what torch counts of its steps",
    )


def model_options(args: argparse.Namespace) -> ModelOptions:
    """What a command line asks of a model."""
    return ModelOptions(
        run=args.run,
        batch_size=args.batch_size,
        input_size=args.input_size,
        device=args.device,
        checkpoint=args.checkpoint,
        cfg_options=tuple(args.cfg_options),
    )


def check_grips(args: argparse.Namespace) -> None:
    """Raise `UserError` where functions cannot be gripped as it is asked for."""
    if args.grip_to is not None and not args.grip:
        raise UserError("--grip-to without --grip", "name the functions to grip with --grip")
    if args.grip:
        load_safetensors()


def check_not_for_models(args: argparse.Namespace) -> None:
    """Raise `UserError` for options of models beside a script."""
    hint = "a script after -- has its own options"
    refuse_options(args, make_parser().parse_args([]), (*MODEL_OPTIONS, "audit"), "models", hint)


def image_size(text: str) -> tuple[int, int]:
    """`HxW`, or one number for a square."""
    numbers = text.lower().split("x")
    if len(numbers) > 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 800x1333")
    height, width = positive(numbers[0]), positive(numbers[-1])
    return height, width
