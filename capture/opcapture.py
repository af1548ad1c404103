"""The command `opcapture`: runs a model, and writes what it ran to a trace."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

import torch

from opgrip.capture.capture import Capture
from opgrip.capture.extensions import KNOWN_EXTENSIONS
from opgrip.capture.models import load_program, model_sources
from opgrip.capture.program import RUNS, ModelOptions, Program
from opgrip.traces.command import OneLineParser, add_debug, not_negative, positive, run_command, seed
from opgrip.traces.errors import UserError
from opgrip.traces.output import check_writable
from opgrip.traces.progress import Reporter

DEFAULT_MODEL = "builtin:faster_rcnn"
DESCRIPTION = "Run a model and record every operator and extension function that it calls, in a trace file."
EXAMPLES = """\
examples:
  opcapture                                               the built-in detector, to faster_rcnn.jsonl
  opcapture --model faster-rcnn_r50_fpn_1x_coco.py --run train -o traces/faster_rcnn.jsonl.gz
  opcapture --model my_package.models:small_unet --batch-size 8 --device cuda
  opcapture --model retinanet_r50_fpn_1x_coco.py --cfg-options model.test_cfg.score_thr=0 -o - | jq .op
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; see `opcapture --help`."""
    return run_command(make_parser(), run, argv)


def make_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = OneLineParser("opcapture", description=DESCRIPTION, epilog=EXAMPLES)
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
        "--steps", type=positive, default=1, metavar="N", help="steps that are captured (default: %(default)s)"
    )
    parser.add_argument("--checkpoint", type=Path, metavar="FILE", help="weights to load (default: random ones)")
    parser.add_argument(
        "--cfg-options", nargs="+", default=[], metavar="KEY=VALUE", help="settings that override an OpenMMLab config's"
    )
    parser.add_argument(
        "--extension",
        action="append",
        metavar="MODULE",
        help=f"an extension module to record too, besides {', '.join(KNOWN_EXTENSIONS)}; can be repeated",
    )
    add_debug(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Load the model, warm it up, capture it."""
    reporter = Reporter("opcapture")
    if args.output not in (None, "-"):
        check_writable(Path(args.output), args.force)
    options = ModelOptions(
        run=args.run,
        batch_size=args.batch_size,
        input_size=args.input_size,
        device=args.device,
        checkpoint=args.checkpoint,
        cfg_options=tuple(args.cfg_options),
    )
    # what models print is not what was asked for
    with redirect_stdout(sys.stderr), warnings.catch_warnings():
        # told below, as an error
        warnings.filterwarnings("ignore", message="the trace .* could not be written")
        torch.manual_seed(args.seed)
        with reporter.doing(f"building {args.model}"):
            program = load_program(args.model, options)
        capture = _capture(program, args, reporter)
    if isinstance(capture.failure, BrokenPipeError):
        raise capture.failure
    if capture.failure is not None:
        raise UserError(f"{capture.path} could not be written", str(capture.failure))
    _tell(capture, reporter)
    return 0


def _capture(program: Program, args: argparse.Namespace, reporter: Reporter) -> Capture:
    model = {"name": program.name, "run": args.run, **program.details}
    settings = {"seed": args.seed, "warmup": args.warmup, "steps": args.steps, "device": args.device}
    capture = Capture(
        args.output or f"{program.name}.jsonl",
        model=program.model,
        extensions=(*KNOWN_EXTENSIONS, *(args.extension or ())),
        details={"model": model, **settings},
        force=args.force,
    )
    inputs = [program.inputs() for _ in range(args.warmup + args.steps)]
    with reporter.doing(f"running {args.warmup} warm-up and {args.steps} captured steps", len(inputs)) as advance:
        for _ in range(args.warmup):
            _step(program, inputs.pop())
            advance()
        with capture:
            for _ in range(args.steps):
                try:
                    _step(program, inputs.pop())
                except UserError:
                    capture.discard()
                    raise
                advance()
    return capture


def _step(program: Program, inputs: object) -> None:
    try:
        program.step(inputs)
    except UserError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{program.name} fails in its step", f"{type(error).__name__}: {reason}") from error


def _tell(capture: Capture, reporter: Reporter) -> None:
    size = f"{capture.bytes_written / 1000:,.0f} kB"
    where = "stdout" if str(capture.path) == "-" else str(capture.path)
    reporter.say(f"{capture.calls:,} calls of {capture.signatures:,} signatures, {size}, to {where}")
    if capture.dropped:
        reporter.say(f"{capture.dropped:,} calls could not be recorded; `opgrip trace info {where}` says why")
    if where != "stdout":
        reporter.say(f"run them again with: opreplay {where}")


def image_size(text: str) -> tuple[int, int]:
    """`HxW`, or one number for a square."""
    numbers = text.lower().split("x")
    if len(numbers) > 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 800x1333")
    height, width = positive(numbers[0]), positive(numbers[-1])
    return height, width
