"""The command `opcapture`: runs a model, and writes what it ran to a trace."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import nn

from opgrip.capture import full_values
from opgrip.capture.audit import Difference, audit
from opgrip.capture.capture import Capture
from opgrip.capture.compiled import CHOICES, OPERATORS
from opgrip.capture.extensions import KNOWN_EXTENSIONS
from opgrip.capture.models import load_program, model_sources
from opgrip.capture.own_cost import own_cost
from opgrip.capture.program import RUNS, ModelOptions, Program
from opgrip.capture.script import run_script, script_name
from opgrip.traces.ceilings.bandwidth import bandwidth_of
from opgrip.traces.command import (
    USAGE_ERROR,
    OneLineParser,
    add_debug,
    add_version,
    not_negative,
    positive,
    run_command,
    seed,
)
from opgrip.traces.errors import UserError, one_line
from opgrip.traces.longtail import find_longtail, lines_of
from opgrip.traces.output import check_writable
from opgrip.traces.progress import Reporter
from opgrip.traces.tensor_file import load_safetensors
from opgrip.traces.trace import load

LONGTAIL_STEPS = 3
"""In the first step, the capture describes everything that is new to it, and times between calls hold that."""
LONGTAIL_TOP = 30
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; see `opcapture --help`."""
    own, found, program = _split(sys.argv[1:] if argv is None else list(argv))
    return run_command(make_parser(), lambda args: run(args, program if found else None), own)


def _split(argv: list[str]) -> tuple[list[str], bool, list[str]]:
    """What stands before and after `--`, and whether there is one."""
    place = argv.index("--") if "--" in argv else len(argv)
    return argv[:place], place < len(argv), argv[place + 1 :]


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
        metavar="MODULE",
        help=f"an extension module to record too, besides {', '.join(KNOWN_EXTENSIONS)}; can be repeated",
    )
    parser.add_argument(
        "--grip",
        action="append",
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


def run(args: argparse.Namespace, program: Sequence[str] | None) -> int:
    """Capture a script, or load a model, warm it up and capture it."""
    reporter = Reporter("opcapture")
    return _run_script(args, program, reporter) if program is not None else _run_model(args, reporter)


def _run_script(args: argparse.Namespace, arguments: Sequence[str], reporter: Reporter) -> int:
    defaults = make_parser().parse_args([])
    for name in (*MODEL_OPTIONS, "audit"):
        if getattr(args, name) != getattr(defaults, name):
            raise UserError(f"--{name.replace('_', '-')} is for models", "a script after -- has its own options")
    _check_grips(args)
    if args.output == "-":
        raise UserError("a script's own output goes to stdout", "name a file for the trace with --output")
    capture = _make_capture(args, args.output or f"{script_name(arguments)}.jsonl", {"script": list(arguments)})
    with warnings.catch_warnings():
        _ignore_what_is_told()
        with capture:
            status = run_script(arguments, capture.grips.script_compiler())
    if capture.failure is None:
        _tell(capture, reporter)
        problem = _values_problem(capture)
    else:
        problem = f"{capture.path} could not be written: {capture.failure}"
    if problem:
        reporter.say(f"error: {problem}")
    elif args.find_longtail:
        # the script's own output went to stdout
        print("\n".join(_longtail(capture)), file=sys.stderr)
    return status or (USAGE_ERROR if problem else 0)


def _run_model(args: argparse.Namespace, reporter: Reporter) -> int:
    _check_grips(args)
    if args.output not in (None, "-"):
        check_writable(Path(args.output), args.force)
    if args.values == full_values.FULL:
        full_values.check(args.output, args.force)
    for name in ("audit", "find_longtail"):
        if getattr(args, name) and args.output == "-":
            raise UserError(f"--{name.replace('_', '-')} reads the trace again", "name a file with --output")
    args.steps = args.steps or (LONGTAIL_STEPS if args.find_longtail else 1)
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
        _ignore_what_is_told()
        program = _load(args, options, reporter)
        capture = _capture(program, args, reporter)
        if isinstance(capture.failure, BrokenPipeError):
            raise capture.failure
        if capture.failure is not None:
            raise UserError(f"{capture.path} could not be written", str(capture.failure))
        _tell(capture, reporter)
        if problem := _values_problem(capture):
            raise UserError(problem)
        if args.audit:
            del program
            _tell_audit(_audit(_load(args, options, reporter), capture, args, reporter), reporter)
    if args.find_longtail:
        print("\n".join(_longtail(capture)))
    return 0


def _check_grips(args: argparse.Namespace) -> None:
    if args.grip_to is not None and not args.grip:
        raise UserError("--grip-to without --grip", "name the functions to grip with --grip")
    if args.grip:
        load_safetensors()


def _ignore_what_is_told() -> None:
    """The warnings at the end of a capture: what they say is said by the command."""
    for message in ("the trace .* could not be written", ".* was not gripped"):
        warnings.filterwarnings("ignore", message=message)


def _load(args: argparse.Namespace, options: ModelOptions, reporter: Reporter) -> Program:
    torch.manual_seed(args.seed)
    with reporter.doing(f"building {args.model}"):
        return load_program(args.model, options)


def _make_capture(
    args: argparse.Namespace, output: str, details: dict[str, Any], model: nn.Module | None = None
) -> Capture:
    return Capture(
        output,
        model=model,
        extensions=(*KNOWN_EXTENSIONS, *(args.extension or ())),
        max_calls=args.max_calls,
        max_bytes=args.max_bytes,
        stack_depth=args.stack_depth,
        compiled=args.compiled,
        write_ahead=args.write_ahead,
        values=args.values,
        grip=args.grip or (),
        grip_to=args.grip_to or GRIP_TO,
        details=details,
        force=args.force,
    )


def _capture(program: Program, args: argparse.Namespace, reporter: Reporter) -> Capture:
    model = {"name": program.name, "run": args.run, **program.details}
    settings = {"seed": args.seed, "warmup": args.warmup, "steps": args.steps, "device": args.device}
    capture = _make_capture(args, args.output or f"{program.name}.jsonl", {"model": model, **settings}, program.model)
    total = args.warmup + args.steps
    with reporter.doing(f"running {args.warmup} warm-up and {args.steps} captured steps", total) as advance:
        for _ in range(args.warmup):
            _step(program, program.inputs())
            advance()
        # made outside of the capture, where they are few
        inputs = [program.inputs() for _ in range(args.steps)]
        with capture:
            while inputs:
                try:
                    _step(program, inputs.pop())
                except UserError:
                    capture.discard()
                    raise
                advance()
    return capture


def _audit(program: Program, capture: Capture, args: argparse.Namespace, reporter: Reporter) -> list[Difference]:
    with reporter.doing("auditing"):
        for _ in range(args.warmup):
            _step(program, program.inputs())
        inputs = [program.inputs() for _ in range(args.steps)]

        def steps() -> None:
            while inputs:
                _step(program, inputs.pop())

        return audit(capture.path, steps)


def _tell_audit(found: list[Difference], reporter: Reporter) -> None:
    unexplained = [item for item in found if item.explained is None]
    for item in found:
        reporter.say(
            f"audit: {item.op}: torch counts {item.torch_calls:,}, the trace {item.trace_calls:,}: "
            f"{item.explained or 'NOT EXPLAINED'}"
        )
    reporter.say(f"audit: {len(found)} operators differ, {len(unexplained)} without an explanation")


def _step(program: Program, inputs: object) -> None:
    try:
        program.step(inputs)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{program.name} fails in its step", one_line(error, 300)) from error


def _tell(capture: Capture, reporter: Reporter) -> None:
    size = f"{capture.bytes_written / 1000:,.0f} kB"
    where = "stdout" if str(capture.path) == "-" else str(capture.path)
    reporter.say(f"{capture.calls:,} calls of {capture.signatures:,} signatures, {size}, to {where}")
    if capture.dropped:
        reporter.say(f"{capture.dropped:,} calls could not be recorded; `opgrip trace info {where}` says why")
    if (full := capture.full_values) is not None and full.failure is None:
        size = f"{full.bytes_written / 1000:,.0f} kB"
        reporter.say(f"whole values of {full.tensors:,} tensors, {size}, to {full.path.name}: they can be private data")
    for folder in capture.grips.written:
        reporter.say(f"a sample in {folder}: run it with pytest")
    for name, reason in capture.grips.refused.items():
        reporter.say(f"{name} was not gripped: {reason}")
    if where != "stdout":
        reporter.say(f"run them again with: opreplay {where}")


def _longtail(capture: Capture) -> list[str]:
    return lines_of(find_longtail([load(capture.path)], bandwidth_of, own_cost()), LONGTAIL_TOP)


def _values_problem(capture: Capture) -> str | None:
    full = capture.full_values
    if full is None or full.failure is None:
        return None
    return f"whole values could not be written to {full.path.name}: {full.failure}"


def image_size(text: str) -> tuple[int, int]:
    """`HxW`, or one number for a square."""
    numbers = text.lower().split("x")
    if len(numbers) > 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 800x1333")
    height, width = positive(numbers[0]), positive(numbers[-1])
    return height, width
