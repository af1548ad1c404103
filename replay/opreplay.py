"""The command `opreplay`: runs the calls of a trace again, and measures them."""

from __future__ import annotations

import argparse
import io
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from opgrip.replay.cases import Selection, make_cases
from opgrip.replay.inputs import device_map
from opgrip.replay.operators import TRUSTED_EXTENSIONS
from opgrip.replay.replay import Settings, replay
from opgrip.replay.reports import reports
from opgrip.replay.reports.table import print_table
from opgrip.replay.results import OK, Result, summarize
from opgrip.replay.timing import Effort
from opgrip.traces import Trace, load
from opgrip.traces.arguments import tensors
from opgrip.traces.command import OneLineParser, add_debug, not_negative, positive, run_command, seed
from opgrip.traces.devices import check_device
from opgrip.traces.errors import UserError
from opgrip.traces.output import check_writable, whole_file
from opgrip.traces.progress import Reporter

DESCRIPTION = "Run every distinct call of a trace again, without the model, and compare its time with the captured one."
EXAMPLES = """\
examples:
  opreplay traces/faster_rcnn.jsonl
  opreplay traces/faster_rcnn.jsonl --op 'aten.index*' --op 'aten.sort*' --iterations 50
  opreplay traces/faster_rcnn.jsonl --module 'backbone.*' --top 20 -o backbone.csv
  opreplay traces/faster_rcnn.jsonl --device cuda -o results.json
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; see `opreplay --help`."""
    return run_command(make_parser(), run, argv)


def make_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = OneLineParser("opreplay", description=DESCRIPTION, epilog=EXAMPLES)
    parser.add_argument("trace", type=Path, metavar="TRACE", help="a file that opcapture wrote")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="also write the results, as the suffix says: .json, .csv, .md"
    )
    parser.add_argument("-f", "--force", action="store_true", help="replace an existing file")
    parser.add_argument(
        "--op", action="append", default=[], metavar="GLOB", help="only operators of such names; can be repeated"
    )
    parser.add_argument(
        "--module",
        action="append",
        default=[],
        metavar="GLOB",
        help="only calls of modules of such paths; can be repeated",
    )
    parser.add_argument("--top", type=positive, metavar="N", help="only the N cases with the largest share of time")
    parser.add_argument("--device", help="where to replay, such as cuda:0 (default: where it was captured)")
    parser.add_argument(
        "--warmup",
        type=not_negative,
        default=Effort().warmup,
        metavar="N",
        help="runs before those that are timed (default: %(default)s)",
    )
    parser.add_argument(
        "--iterations",
        type=positive,
        metavar="N",
        help="timed runs of each case (default: as many as fit 0.1 s, 3 to 100)",
    )
    parser.add_argument("--seed", type=seed, default=0, help="of the values that are drawn (default: %(default)s)")
    parser.add_argument(
        "--extension",
        action="append",
        default=[],
        metavar="MODULE",
        help=f"an extension module that the trace may call, besides {', '.join(TRUSTED_EXTENSIONS)}; can be repeated",
    )
    parser.add_argument("--partial", action="store_true", help="replay what there is of a cut or damaged trace")
    parser.add_argument("--strict", action="store_true", help="exit with status 1 where a case is not ok")
    add_debug(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Load the trace, replay its cases, print the table."""
    reporter = Reporter("opreplay")
    report = _report_for(args.output, args.force)
    trace = load(args.trace, partial=args.partial)
    if trace.missing:
        reporter.say(trace.missing)
    cases = make_cases(trace, Selection(args.op, args.module, args.top))
    recorded = recorded_device(trace)
    device = str(check_device(args.device or recorded))
    settings = Settings(
        place=device_map(recorded, args.device),
        device=device,
        effort=Effort(args.warmup, args.iterations),
        seed=args.seed,
        extensions=(*TRUSTED_EXTENSIONS, *args.extension),
    )
    results: list[Result] = []
    with reporter.doing(f"replaying {len(cases)} cases on {device}", len(cases)) as advance:
        for result in replay(cases, settings):
            results.append(result)
            advance()
    print_table(results, sys.stdout)
    if report is not None:
        text = io.StringIO()
        report(results, _header(args, device), text)
        with whole_file(args.output, args.force) as file:
            file.write(text.getvalue().encode())
    reporter.say(summarize(results))
    return 1 if args.strict and any(result.status != OK for result in results) else 0


def recorded_device(trace: Trace) -> str:
    """The device that most of a trace's tensors are on that are not on the CPU; `cpu` where all are."""
    devices = Counter(
        spec.device for signature in trace.signatures for spec in tensors([signature.args, signature.kwargs])
    )
    del devices["cpu"]
    return devices.most_common(1)[0][0] if devices else "cpu"


def _report_for(output: Path | None, force: bool) -> Any:
    if output is None:
        return None
    report = reports.get(output.suffix)
    if report is None:
        raise UserError(f"{output} has no known form", f"end its name in {', '.join(reports.names())}")
    check_writable(output, force)
    return report


def _header(args: argparse.Namespace, device: str) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else device
    return {"trace": str(args.trace), "torch": torch.__version__, "device": name, "seed": args.seed}
