"""`opgrip machine` and `opgrip autostart`: this machine's peaks, and recording on demand of unchanged programs."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING

from opgrip.capture.on_demand.autostart import LINE, VARIABLE, startup_file
from opgrip.cli.command import counted
from opgrip.cli.output_files import cannot_be_written, check_output, whole_file
from opgrip.cli.progress import Reporter
from opgrip.cli.terminal import print_line
from opgrip.display.tables import TableColumn, print_table
from opgrip.errors import UserError
from opgrip.platform.machine import check_device
from opgrip.tools.verbs import add_output, verb

if TYPE_CHECKING:
    from opgrip.platform.peaks import Peaks

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


@verb("machine", "measure the peak bandwidth and arithmetic rate of this machine", EXAMPLES, prepare)
def run(args: argparse.Namespace) -> int:
    from opgrip.platform.peaks import keep, read_cached_peaks, write
    from opgrip.replay.analyses.roofline.measuring import measure

    device = str(check_device(args.device))
    check_output(args.output, args.force)
    reporter = Reporter("opgrip machine")
    peaks = None if args.again else read_cached_peaks(device)
    if peaks is None:
        with reporter.following(f"measuring the peak bandwidth and arithmetic rates of {device}") as on_progress:
            peaks = measure(device, on_progress)
        reporter.say(f"saved the peak bandwidths and arithmetic rates of {device} in {keep(peaks, device)}")
    _print(peaks, sys.stdout)
    if args.output is not None:
        write(peaks, args.output, args.force)
        reporter.say(f"wrote the peak bandwidth and arithmetic rates to {args.output}")
    return 0


def _print(peaks: Peaks, file: IO[str]) -> None:
    print_line(f"{' '.join(peaks.machine)}, torch {peaks.torch}, {peaks.time}", file)
    threads = sorted({1, peaks.threads})
    columns = [TableColumn("level", "name"), TableColumn("bytes", lambda level: _size(level.size), ">")]
    columns += [TableColumn(_threads(count), partial(peaks.bandwidth, threads=count), ",.0f") for count in threads]
    print_table(columns, peaks.levels, file, "copies, GB/s")
    columns = [TableColumn("dtype", str)]
    columns += [TableColumn(_threads(count), partial(peaks.rate, threads=count), ",.0f") for count in threads]
    print_table(columns, list(peaks.rates), file, "products of matrices, Gflop/s")
    print_line(
        f"time of a call: {peaks.launch_us:.2f} us for an operator on one element, "
        f"{peaks.dispatch_us:.2f} us for a view",
        file,
    )


def _threads(count: int) -> str:
    return counted(count, "thread")


def _size(size: int | None) -> str:
    if size is None:
        return "-"
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


AUTOSTART_EXAMPLES = """\
examples:
  opgrip autostart on
  OPGRIP_CAPTURE=step-%h-%p.jsonl OPGRIP_STEPS=3 python server.py     and then: opcapture trigger server
  opgrip autostart off

Autostart adds a start-up file to this Python environment. Programs that are started with OPGRIP_CAPTURE set then accept
requests of opcapture trigger.
"""


@verb("autostart on", "let opcapture trigger record Python programs without changing them", AUTOSTART_EXAMPLES)
def run_on(args: argparse.Namespace) -> int:
    path = startup_file()
    if _is_ours(path):
        print(f"opgrip autostart: already on: {path} exists")
        return 0
    if path.exists():
        raise UserError(f"{path} was written by another version", "remove it with opgrip autostart off")
    try:
        with whole_file(path, force=False) as file:
            file.write(LINE.encode())
    except OSError as error:
        raise cannot_be_written(path, error) from error
    print(f"opgrip autostart: {path}: programs with {VARIABLE} set now accept requests to record")
    return 0


@verb("autostart off", "undo opgrip autostart on", AUTOSTART_EXAMPLES)
def run_off(args: argparse.Namespace) -> int:
    path = startup_file()
    if not path.exists():
        print(f"opgrip autostart: already off: {path} does not exist")
        return 0
    try:
        path.unlink()
    except OSError as error:
        raise cannot_be_written(path, error) from error
    print(f"opgrip autostart: removed {path}")
    return 0


@verb("autostart status", "show whether autostart is on", AUTOSTART_EXAMPLES)
def run_status(args: argparse.Namespace) -> int:
    path = startup_file()
    if not path.exists():
        print(f"autostart is off: {path} does not exist")
    elif _is_ours(path):
        print(f"autostart is on: {path}; programs of {sys.prefix} that start with {VARIABLE} set can be recorded")
    else:
        print(f"autostart is on, from another version: {path}; update it with opgrip autostart off, then on")
    return 0


def _is_ours(path: Path) -> bool:
    try:
        return path.read_bytes() == LINE.encode()
    except OSError:
        return False
