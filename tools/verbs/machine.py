"""`opgrip machine`: the limits of this machine."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import IO, TYPE_CHECKING

from opgrip.cli.command import counted
from opgrip.cli.output_files import check_output
from opgrip.cli.progress import Reporter
from opgrip.cli.terminal import print_line
from opgrip.display.tables import TableColumn, print_table
from opgrip.platform.machine import check_device
from opgrip.tools.verbs import add_output, verb

if TYPE_CHECKING:
    from opgrip.traces.analysis.machine_ceilings import Ceilings

EXAMPLES = """\
examples:
  opgrip machine
  opgrip machine --again -o machine.json
  opgrip machine --device cuda
"""


def prepare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cpu", help="device to measure, such as cuda:0 (default: %(default)s)")
    parser.add_argument("--again", action="store_true", help="measure again even if results are cached")
    add_output(parser, "also write the results as JSON")


@verb("machine", "measure the peaks of this machine", EXAMPLES, prepare)
def run(args: argparse.Namespace) -> int:
    from opgrip.replay.analyses.roofline.measuring import measure
    from opgrip.traces.analysis.machine_ceilings import keep, read_cached_ceilings, write

    device = str(check_device(args.device))
    check_output(args.output, args.force)
    reporter = Reporter("opgrip machine")
    ceilings = None if args.again else read_cached_ceilings(device)
    if ceilings is None:
        with reporter.following(f"measuring the peaks of {device}") as tell:
            ceilings = measure(device, tell)
        reporter.say(f"kept in {keep(ceilings, device)}")
    _print(ceilings, sys.stdout)
    if args.output is not None:
        write(ceilings, args.output, args.force)
        reporter.say(f"the machine's limits to {args.output}")
    return 0


def _print(ceilings: Ceilings, file: IO[str]) -> None:
    print_line(f"{' '.join(ceilings.machine)}, torch {ceilings.torch}, {ceilings.time}", file)
    threads = sorted({1, ceilings.threads})
    columns = [TableColumn("level", "name"), TableColumn("bytes", lambda level: _size(level.size), ">")]
    columns += [TableColumn(_threads(count), partial(ceilings.bandwidth, threads=count), ",.0f") for count in threads]
    print_table(columns, ceilings.levels, file, "copies, GB/s")
    columns = [TableColumn("dtype", str)]
    columns += [TableColumn(_threads(count), partial(ceilings.rate, threads=count), ",.0f") for count in threads]
    print_table(columns, list(ceilings.rates), file, "products of matrices, Gflop/s")
    print_line(f"an operator on one element {ceilings.launch_us:.2f} us, a view {ceilings.dispatch_us:.2f} us", file)


def _threads(count: int) -> str:
    return counted(count, "thread")


def _size(size: int | None) -> str:
    if size is None:
        return "-"
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
