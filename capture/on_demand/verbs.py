"""Subcommands of `opcapture` for running processes, such as `opcapture trigger`, and `opcapture --on-demand`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from opgrip.capture.command.capture_options import OPTIONS, RecordingOptions, Steps
from opgrip.capture.command.script import run_script, script_name
from opgrip.capture.on_demand.autostart import load_recording, start
from opgrip.capture.on_demand.client import RecordableProcess, converse, find_process, processes, record
from opgrip.capture.on_demand.protocol import STOP
from opgrip.capture.on_demand.settings import DEFAULT, PRIVATE_DEFAULT, WARMUP, AgentSettings, check_pattern, signal_of
from opgrip.capture.program.capture_choices import KNOWN_EXTENSIONS
from opgrip.capture.program.patches import LateModules
from opgrip.cli.command import INTERRUPTED, USAGE_ERROR, OneLineParser, add_debug, not_negative, positive, printable
from opgrip.cli.option_types import interval, percent
from opgrip.cli.options import flag_of, from_arguments, refuse_options
from opgrip.cli.progress import Reporter
from opgrip.display.tables import TableColumn, print_table
from opgrip.errors import UserError


@dataclass(frozen=True, slots=True)
class ProcessVerb:
    description: str
    examples: str
    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def make_verb_parser(verb: str) -> argparse.ArgumentParser:
    declared = VERBS[verb]
    epilog = f"examples:\n{declared.examples}"
    parser = OneLineParser(f"opcapture {verb}", description=declared.description, epilog=epilog)
    declared.add_options(parser)
    add_debug(parser)
    parser.set_defaults(run=declared.run)
    return parser


def _add_process(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("process", metavar="PID|NAME", help="PID or name of the process, as opcapture list shows it")
    parser.add_argument(
        "--rank", type=not_negative, metavar="N", help="rank of the process, if several ranks of a job have the name"
    )


def _list(args: argparse.Namespace) -> int:
    items = processes()
    if not items:
        print("no process can be asked to record; start one with opcapture --on-demand -- SCRIPT", file=sys.stderr)
        return 0
    columns = [
        TableColumn("pid", "pid", "d"),
        TableColumn("name", "name", least=8),
        TableColumn("state", _state),
        TableColumn("rank", lambda item: "" if item.rank is None else item.rank, ">"),
        TableColumn("recordings", lambda item: item.about.get("recordings", ""), ">"),
        TableColumn("command", lambda item: item.about.get("command", "")),
    ]
    print_table(columns, items, sys.stdout)
    return 0


def _state(item: RecordableProcess) -> str:
    if not item.about:
        return "busy"
    return "recording" if item.about.get("recording") else "idle"


def _stop(args: argparse.Namespace) -> int:
    process = find_process(args.process, args.rank, Reporter("opcapture"))
    stopped = any(answer.get("stopped") for answer in converse(process, STOP))
    words = "the recording ends" if stopped else "no recording is running"
    print(f"opcapture: process {process.pid}: {words}", file=sys.stderr)
    return 0


def _add_trigger_options(parser: argparse.ArgumentParser) -> None:
    _add_process(parser)
    parser.add_argument("--steps", type=positive, metavar="N", help="number of steps to record (default: 3)")
    parser.add_argument("--seconds", type=interval, metavar="S", help="record the steps that begin within S seconds")
    parser.add_argument(
        "--warmup",
        type=not_negative,
        metavar="N",
        help="steps before the recorded ones, in which the capture already examines the calls, so that recorded steps "
        "are slowed down less (default: 1)",
    )
    parser.add_argument(
        "--step-module",
        metavar="PATTERN",
        help="count each outermost call of a module as a step, if its class matches the pattern",
    )
    parser.add_argument(
        "--wait",
        type=interval,
        default=60.0,
        metavar="S",
        help="give up if no step begins within S seconds (default: %(default)g)",
    )
    parser.add_argument(
        "--max-overhead",
        type=percent,
        metavar="SHARE",
        help="limit recording to this share of the program's time, such as 5%%",
    )
    parser.add_argument(
        "-o", "--output", metavar="PATTERN", help="trace file (default: the pattern that the process was started with)"
    )


def _trigger(args: argparse.Namespace) -> int:
    reporter = Reporter("opcapture")
    process = find_process(args.process, args.rank, reporter)
    request = {
        "steps": args.steps,
        "seconds": args.seconds,
        "warmup": args.warmup,
        "step_module": args.step_module,
        "wait_s": args.wait,
        "output": None if args.output is None else str(Path(args.output).absolute()),
        "options": None if args.max_overhead is None else {"max_overhead": args.max_overhead},
    }
    result = record(process, request, reporter)
    if not result.get("file"):
        return USAGE_ERROR
    print(printable(result["file"]))
    return 0


VERBS = {
    "list": ProcessVerb(
        "Show the processes of this machine that opcapture trigger can record.",
        "  opcapture list\n",
        lambda parser: None,
        _list,
    ),
    "stop": ProcessVerb(
        "End the recording of a process early; the trace contains the completed steps.",
        "  opcapture stop 4711\n",
        _add_process,
        _stop,
    ),
    "trigger": ProcessVerb(
        "Record some steps of a running process that has an agent: opcapture list shows which have one.",
        "  opcapture trigger 4711                    the next three steps, after one in which the capture learns\n"
        "  opcapture trigger server --steps 10       by name, as opcapture list shows it\n"
        "  opcapture trigger 4711 --seconds 2 -o burst-%p-%n.jsonl.zst\n",
        _add_trigger_options,
        _trigger,
    ),
}


_OF_WHOLE_PROGRAMS = ("last", "grip", "grip_to", "find_longtail", "audit", "force")


def run_on_demand(args: argparse.Namespace, program: Sequence[str] | None) -> int:
    """Run a script with an agent in its process, and return the script's exit status.

    program : the script and its arguments
    """
    if program is None:
        raise UserError("--on-demand is for scripts", "put one after --, as in opcapture --on-demand -- server.py")
    others = [declared for declared in OPTIONS if declared is not Steps]
    refuse_options(args, others, ("models",), "a script after -- has its own options")
    settings = _settings_of(args, script_name(program))
    try:
        start(settings)
    except (UserError, OSError) as error:
        # continue without an agent: the program matters more than its recordings
        print(
            f"opgrip: this process does not accept requests to record: {' '.join(str(error).split())}", file=sys.stderr
        )
    # not before the script itself imports torch, in the environment that it prepares
    with LateModules("torch".__eq__, load_recording):
        try:
            return run_script(program)
        except KeyboardInterrupt:
            return INTERRUPTED


def _settings_of(args: argparse.Namespace, name: str) -> AgentSettings:
    pattern = args.output or (PRIVATE_DEFAULT if args.private else DEFAULT)
    check_pattern(pattern)
    unset, recording = asdict(RecordingOptions()), asdict(from_arguments(RecordingOptions, args))
    options = {word: value for word, value in recording.items() if value != unset[word]}
    refused = next((word for word in _OF_WHOLE_PROGRAMS if word in options or getattr(args, word, None)), None)
    if refused is not None:
        raise UserError(
            f"{flag_of(refused)} is for a capture of a whole program", f"leave out --on-demand or {flag_of(refused)}"
        )
    if "extension" in options:
        options["extensions"] = (*KNOWN_EXTENSIONS, *options.pop("extension"))
    if "salt_file" in options:
        # the program may change its folder
        options["salt_file"] = options["salt_file"].absolute()
    if args.private or args.salt_file is not None:
        # loads torch, which the script itself loads later
        from opgrip.capture.program.capture_choices import check_private

        check_private(args.private, args.salt_file, args.values, None)
    if args.signal is not None:
        signal_of(args.signal)
    return AgentSettings(
        name=name,
        output=str(Path(pattern).absolute()),
        steps=None if args.seconds is not None else args.steps,
        seconds=args.seconds,
        # the first steps of a model warm up more than the capture
        warmup=WARMUP if args.warmup == Steps().warmup else args.warmup,
        step_module=args.step_module,
        signal=args.signal,
        options=options,
    )
