"""The command line of `opreplay`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from opgrip.replay.arguments.values import RECORDED
from opgrip.replay.cases.samples import names_samples
from opgrip.replay.cases.units import CALL, FUNCTION, UNIT_KINDS
from opgrip.replay.cases.ways import EAGER
from opgrip.replay.modes import Tuning, find_mode, modes
from opgrip.replay.operators.lookup import TRUSTED_EXTENSIONS
from opgrip.replay.option_types import (
    byte_count,
    counts,
    cpus,
    floating_dtype,
    names,
    seconds,
    share,
    tolerance,
    value_kinds,
)
from opgrip.replay.profilers.options import add_profilers
from opgrip.replay.roofline.options import add_roofline
from opgrip.replay.timing.caches import CACHES, PROGRAM, WARM
from opgrip.replay.timing.methods import CONTINUOUS, DISCRETE, METHODS, ON_DEVICE
from opgrip.replay.timing.samples import Effort
from opgrip.replay.workers.job import SAMPLE, Job
from opgrip.traces.command import OneLineParser, add_debug, add_version, not_negative, positive, refuse_options, seed
from opgrip.traces.errors import UserError
from opgrip.traces.machine import cache_folder

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
TIMEOUT_S = 120.0
OF_CASES = (
    *("unit", "samples", "tag", "op", "module", "top", "start", "stop", "append", "resume"),
    *("dtype", "threads", "values", "backward"),
    *("exec_mode", "cache", "budget", "warmup", "timeout", "batch_scale", "streams", "pin", "sweep"),
    *("mode", "reference", "rtol", "atol", "jobs", "tune", "tuner", "nsys", "ncu", "profile", "roofline", "energy"),
)
"""Options that a whole sequence does not take."""
OF_TRACES = ("unit", "module", "sequence", "partial", "batch_scale", "values")
"""Options that samples do not take."""


def make_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = OneLineParser("opreplay", description=DESCRIPTION, epilog=EXAMPLES)
    parser.add_argument(
        "trace",
        type=Path,
        metavar="TRACE",
        help="a file that opcapture wrote; samples, samples/NAME, or a folder that grip wrote",
    )
    _add_output(parser.add_argument_group("results"))
    _add_selection(parser.add_argument_group("which cases"))
    _add_modes(parser.add_argument_group("how they are run"))
    _add_inputs(parser.add_argument_group("what they run on"))
    _add_timing(parser.add_argument_group("how they are timed"))
    add_profilers(parser.add_argument_group("profilers"))
    add_roofline(parser.add_argument_group("the machine's limits"))
    _add_limits(parser.add_argument_group("limits"))
    add_debug(parser)
    add_version(parser)
    return parser


def job_of(args: argparse.Namespace) -> Job:
    """The replay that a command line asks for.

    Raises
    ------
    UserError : for options that do not go together
    """
    of_samples = names_samples(str(args.trace))
    cache = args.cache or (WARM if of_samples or args.exec_mode == CONTINUOUS else PROGRAM)
    if args.exec_mode == CONTINUOUS and cache != WARM:
        raise UserError(f"--exec-mode continuous runs with warm caches, and --cache {cache} with others", "leave one")
    if args.sequence:
        _check_sequence(args)
    if of_samples:
        _check_samples(args)
    if args.samples and (of_samples or args.unit != FUNCTION):
        raise UserError("--samples is for gripped calls of a trace", "give a trace, and --unit function")
    if not of_samples and args.tag:
        raise UserError("--tag is for samples", "replay them by: opreplay samples --tag ...")
    if args.sweep and not any(len(points) > 1 for points in (args.threads, args.batch_scale, args.streams)):
        raise UserError("--sweep has one point only", "give several: --threads 1,2,4, --batch-scale or --streams")
    return Job(
        trace=str(args.trace),
        partial=args.partial,
        unit=SAMPLE if of_samples else args.unit,
        tags=args.tag,
        samples=args.samples,
        ops=args.op,
        modules=args.module,
        top=args.top,
        start=args.start,
        stop=args.stop,
        device=args.device,
        dtype=args.dtype,
        threads=args.threads,
        batch_scale=args.batch_scale,
        streams=args.streams,
        modes=modes_of(args.mode, args.reference, Tuning(args.tune, args.tuner)),
        reference=args.reference,
        rtol=args.rtol,
        atol=args.atol,
        tune=args.tune,
        tuner=args.tuner,
        cpus=args.pin,
        detail=args.debug,
        store=str(cache_folder()),
        values=args.values,
        method=args.exec_mode,
        cache=cache,
        backward=args.backward,
        warmup=args.warmup,
        iterations=args.iterations,
        precision=args.precision,
        budget_s=args.budget,
        seed=args.seed,
        extensions=args.extension,
        memory_limit=args.memory_limit,
        count_work=args.roofline,
        energy=args.energy,
    )


def modes_of(requested_modes: Sequence[str], reference: str, tuning: Tuning) -> tuple[str, ...]:
    """The modes to run: those that are asked for, and the one that they are compared with.

    Raises
    ------
    UserError : where one does not exist, or lacks a package, or none can search as it is asked to
    """
    modes_to_run = tuple(dict.fromkeys((reference, *requested_modes)))
    tuners = [tuner for name in modes_to_run for tuner in find_mode(name)[0].tuners]
    if tuning.tuner is not None and not tuning.trials:
        raise UserError("--tuner is for a search", "say how many programs to try: --tune 64")
    if tuning.trials and not tuners:
        raise UserError("none of these modes can search for better programs", "leave --tune away, or add tvm")
    if tuning.tuner is not None and tuning.tuner not in tuners:
        raise UserError(f"there is no tuner {tuning.tuner!r}", f"there are {', '.join(tuners)}")
    return modes_to_run


def _check_sequence(args: argparse.Namespace) -> None:
    """Refuse what is for single cases."""
    refuse_options(args, _without_options(), OF_CASES, "single cases", "leave it away with --sequence")


def _check_samples(args: argparse.Namespace) -> None:
    """Refuse what a sample, which stands in no program, has nothing for."""
    refuse_options(args, _without_options(), OF_TRACES, "traces", "leave it away with samples")
    if args.cache == PROGRAM:
        raise UserError("samples stand in no program that --cache program could follow", "use warm or cold")


def _without_options() -> argparse.Namespace:
    return make_parser().parse_args(["trace"])


def check_method(method: str, device: str) -> None:
    """Raise `UserError` where a way to time runs is not for this device."""
    if method in ON_DEVICE and not device.startswith("cuda"):
        raise UserError(f"--exec-mode {method} reads the clock of a GPU, and {device} has none", "use discrete")


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="also write the results, as the suffix says: .json, .csv, .md; .svg draws",
    )
    group.add_argument("-f", "--force", action="store_true", help="replace an existing file")
    group.add_argument("--append", action="store_true", help="add the rows to an existing file's (.json, .csv)")
    group.add_argument("--resume", action="store_true", help="go on where an interrupted replay to --output stopped")
    group.add_argument("--strict", action="store_true", help="exit with status 1 where a case is not ok")


def _add_selection(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--unit",
        choices=UNIT_KINDS,
        default=CALL,
        help="what a case is: one call, or all calls of a Python function or a module as one, which --op and --module "
        "name (default: %(default)s)",
    )
    group.add_argument(
        "--samples",
        action="append",
        default=[],
        metavar="FOLDER",
        help="with --unit function: calls of gripped functions, by the code in sample folders that you trust; "
        "can be repeated",
    )
    group.add_argument(
        "--tag", action="append", default=[], metavar="TAG", help="only samples with this tag; can be repeated"
    )
    group.add_argument(
        "--op",
        action="append",
        default=[],
        metavar="GLOB",
        help="only operators or samples of such names; can be repeated",
    )
    group.add_argument(
        "--module",
        action="append",
        default=[],
        metavar="GLOB",
        help="only calls of modules of such paths; can be repeated",
    )
    group.add_argument("--top", type=positive, metavar="N", help="only the N cases with the largest share of time")
    group.add_argument(
        "--start", type=not_negative, default=0, metavar="N", help="from this case of the table, the first being 0"
    )
    group.add_argument("--stop", type=positive, metavar="N", help="up to the case before this one")
    group.add_argument("--partial", action="store_true", help="replay what there is of a cut or damaged trace")


def _add_inputs(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--device", help="where to replay, such as cuda:0 (default: where it was captured)")
    group.add_argument("--dtype", type=floating_dtype, help="of floating-point tensors, such as bfloat16")
    group.add_argument(
        "--threads", type=counts, default=(), metavar="N,...", help="of an operator (default: as captured)"
    )
    group.add_argument(
        "--batch-scale", type=counts, default=(1,), metavar="N,...", help="times the recorded batch (default: 1)"
    )
    group.add_argument(
        "--streams",
        type=counts,
        default=(1,),
        metavar="N,...",
        help="cases that run at once, on threads or on a GPU's streams (default: 1)",
    )
    group.add_argument("--pin", type=cpus, default=(), metavar="CPUS", help="run on these processors only, as in 0,2-3")
    group.add_argument(
        "--values",
        type=value_kinds,
        default=(RECORDED,),
        metavar="KIND,...",
        help="draw values as recorded, or random or zeros as tools do that know shapes alone; several are run in turn "
        "and compared with the first (default: recorded)",
    )
    group.add_argument("--seed", type=seed, default=0, help="of the values that are drawn (default: %(default)s)")
    group.add_argument(
        "--sequence",
        action="store_true",
        help="run all calls in their order on what flows between them, for the time and memory of the whole step",
    )
    group.add_argument("--backward", action="store_true", help="time the gradients of each forward call too")
    group.add_argument(
        "--extension",
        action="append",
        default=[],
        metavar="MODULE",
        help=f"an extension module that the trace may call, besides {', '.join(TRUSTED_EXTENSIONS)}; can be repeated",
    )


def _add_modes(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--mode",
        type=names,
        default=(EAGER,),
        metavar="NAME,...",
        help=f"{', '.join(modes.names())}; compile:NAME for another backend of dynamo (default: {EAGER})",
    )
    group.add_argument(
        "--reference", default=EAGER, metavar="MODE", help="what results and times are compared with (default: eager)"
    )
    group.add_argument("--rtol", type=tolerance, metavar="X", help="relative tolerance of results (default: by dtype)")
    group.add_argument("--atol", type=tolerance, metavar="X", help="absolute tolerance of results (default: by dtype)")
    group.add_argument(
        "--jobs", type=positive, metavar="N", help="cases that compile at once (default: one a processor)"
    )
    group.add_argument(
        "--tune", type=positive, default=0, metavar="TRIALS", help="let a compiler that can search try so many programs"
    )
    group.add_argument("--tuner", metavar="NAME", help="its way to search")
    group.add_argument("--sweep", action="store_true", help="print how times scale with --threads and the like")


def _add_timing(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--exec-mode",
        choices=METHODS,
        default=DISCRETE,
        help="time each run alone, many at once, by a GPU's events, or as a CUDA graph (default: %(default)s)",
    )
    group.add_argument(
        "--cache",
        choices=CACHES,
        help="what caches hold before a run: what other calls of the program left, the run before, or nothing "
        "(default: program)",
    )
    group.add_argument(
        "--precision",
        type=share,
        default=Effort().precision,
        metavar="SHARE",
        help="run until the interquartile range is this share of the median (default: %(default)s)",
    )
    group.add_argument(
        "--budget",
        type=seconds,
        default=Effort().budget_s,
        metavar="SECONDS",
        help="or for so long a case (default: %(default)s)",
    )
    group.add_argument("--iterations", type=positive, metavar="N", help="or so often")
    group.add_argument(
        "--warmup",
        type=not_negative,
        default=Effort().warmup,
        metavar="N",
        help="runs before those that are timed (default: %(default)s)",
    )


def _add_limits(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--timeout",
        type=seconds,
        default=TIMEOUT_S,
        metavar="SECONDS",
        help="end a case of which one run takes longer (default: %(default)g)",
    )
    group.add_argument(
        "--memory-limit",
        type=byte_count,
        metavar="BYTES",
        help="for cases, such as 8GB (default: what the machine has left)",
    )
