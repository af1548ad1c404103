"""Subcommands of `opcapture` for running processes, such as `opcapture trigger`, and `opcapture --on-demand`."""

from __future__ import annotations

import argparse
import errno
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any

from opgrip.capture.command.capture_options import OPTIONS, RecordingOptions, Steps
from opgrip.capture.command.script import run_script, script_name
from opgrip.capture.on_demand.autostart import load_recording, start
from opgrip.capture.on_demand.protocol import (
    ABOUT,
    ARMED,
    DONE,
    PROTOCOL,
    RECORD,
    REFUSED,
    STOP,
    TELL,
    WAITING,
    MessageSocket,
    check_answer,
    lines_of,
    peer_of,
    pid_of,
    sockets,
)
from opgrip.capture.on_demand.settings import DEFAULT, PRIVATE_DEFAULT, WARMUP, AgentSettings, check_pattern, signal_of
from opgrip.capture.program.capture_choices import KNOWN_EXTENSIONS
from opgrip.capture.program.patches import LateModules
from opgrip.cli.command import (
    INTERRUPTED,
    USAGE_ERROR,
    OneLineParser,
    add_debug,
    listed,
    not_negative,
    positive,
    printable,
)
from opgrip.cli.option_types import interval, percent
from opgrip.cli.options import all_from_arguments, flag_of, from_arguments, refuse_options
from opgrip.cli.progress import Reporter
from opgrip.display.tables import TableColumn, print_table
from opgrip.errors import UserError

CONNECT_S = 2.0
TELL_S = 5.0  # time for a process to describe itself; one that holds the interpreter lock longer counts as busy
MOST_AT_ONCE = 16
END_S = 10.0  # time in seconds for writing a recording that Ctrl-C has ended
MOST_WORKERS = 4  # maximum number of process ids of workers that are printed


@dataclass(frozen=True, slots=True)
class RecordableProcess:
    pid: int
    socket: Path
    about: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.about.get("name", "?"))

    def is_worker_of(self, other: RecordableProcess) -> bool:
        """Return True if `other` started this process, and both have the same name and rank."""
        return self.about.get("parent") == other.pid and (self.name, self.rank) == (other.name, other.rank)

    @property
    def rank(self) -> int | None:
        number = self.about.get("rank")
        return number if isinstance(number, int) else None


def processes() -> list[RecordableProcess]:
    paths = list(sockets())
    if not paths:
        return []
    with ThreadPoolExecutor(min(len(paths), MOST_AT_ONCE)) as pool:
        items = [item for item in pool.map(_process_at, paths) if item is not None]
    return sorted(items, key=lambda item: item.pid)


def find_process(word: str, rank: int | None, reporter: Reporter) -> RecordableProcess:
    everyone = processes()
    items = [item for item in everyone if str(item.pid) == word]
    if not items:
        named = [item for item in everyone if item.name == word]
        items = [item for item in named if not any(item.is_worker_of(other) for other in named)]
    if not items:
        raise UserError(f"process {word} does not accept requests to record", _advice(word, everyone))
    ranks = [item for item in items if rank in (None, item.rank)]
    if not ranks:
        raise UserError(f"no process {word} on this machine has rank {rank}", "see opcapture list")
    if len(ranks) > 1:
        numbers = ", ".join(str(item.pid) for item in ranks)
        choice = " or --rank" if rank is None and len({item.rank for item in ranks}) == len(ranks) else ""
        raise UserError(f"{len(ranks)} processes are called {word}", f"choose one by its PID{choice}: {numbers}")
    (process,) = ranks
    workers = [str(item.pid) for item in everyone if item.is_worker_of(process)]
    if workers and word == process.name:
        numbers = ", ".join(workers[:MOST_WORKERS] + ["..."] * (len(workers) > MOST_WORKERS))
        reporter.say(
            f"process {process.pid} has started others with the same name, which are not recorded: to record one, give "
            f"its PID: {numbers}"
        )
    return process


def record(process: RecordableProcess, request: Mapping[str, Any], reporter: Reporter) -> dict[str, Any]:
    """Ask a process to record steps and report its progress; return the same dictionary as `Agent.record`."""
    connection = _send(process, RECORD, request)
    try:
        try:
            return _follow(process, connection, inf, reporter)
        except KeyboardInterrupt:
            with suppress(UserError):
                list(converse(process, STOP))
                _follow(process, connection, monotonic() + END_S, reporter)
            raise
    finally:
        connection.close()


def _follow(
    process: RecordableProcess, connection: MessageSocket, until_s: float, reporter: Reporter
) -> dict[str, Any]:
    file = ""
    for answer in _answers(process, connection, until_s):
        if answer.get("answer") == ARMED:
            file = printable(answer.get("file", ""))
            reporter.say(f"process {process.pid} waits for a step")
        elif answer.get("answer") == WAITING:
            reporter.say(f"process {process.pid}: no step has begun yet: {printable(answer.get('why', ''))}")
        elif answer.get("answer") == DONE:
            for line in lines_of(answer):
                reporter.say(f"process {process.pid}: {printable(line)}")
            return answer
    hint = (
        f"its calls up to then are in {file}, or in the .part file next to it: read it with --partial" if file else ""
    )
    raise UserError(f"process {process.pid} ended before its recording did", hint)


def converse(process: RecordableProcess, do: str) -> Iterator[dict[str, Any]]:
    """Send the request `do`, such as `stop`, to a process, and yield its answers as they arrive."""
    connection = _send(process, do, {})
    try:
        yield from _answers(process, connection, monotonic() + TELL_S)
    finally:
        connection.close()


def _send(process: RecordableProcess, do: str, fields: Mapping[str, Any]) -> MessageSocket:
    try:
        connection = _connect(process.socket)
    except OSError as error:
        raise UserError(f"process {process.pid} cannot be reached", _reason(error)) from error
    try:
        connection.send({"protocol": PROTOCOL, "do": do, **fields})
    except OSError as error:
        connection.close()
        raise UserError(f"process {process.pid} no longer responds", _reason(error)) from error
    return connection


def _answers(process: RecordableProcess, connection: MessageSocket, until_s: float) -> Iterator[dict[str, Any]]:
    while True:
        try:
            message = connection.receive(None if until_s == inf else until_s - monotonic())
            if message is None:
                return
            check_answer(message)
        except ValueError as error:
            raise UserError(f"the answer of process {process.pid} cannot be read", printable(error)) from error
        except OSError as error:
            raise UserError(f"process {process.pid} no longer responds", _reason(error)) from error
        if message.get("answer") == REFUSED:
            raise UserError(printable(message.get("why")))
        yield message


def _reason(error: OSError) -> str:
    return str(error.strerror or error).lower()


def _process_at(path: Path) -> RecordableProcess | None:
    pid = pid_of(path)
    if pid is None:
        return None
    try:
        connection = _connect(path)
    except OSError as error:
        # outside of Linux a busy process refuses connections too, and the pid may have been reused
        if error.errno == errno.ECONNREFUSED and (sys.platform == "linux" or not _runs(pid)):
            with suppress(OSError):
                path.unlink()
        return None
    try:
        connection.send({"protocol": PROTOCOL, "do": TELL})
        message = connection.receive(TELL_S) or {}
        check_answer(message)
    except (OSError, ValueError):
        message = {}
    finally:
        connection.close()
    return RecordableProcess(pid, path, message if message.get("answer") == ABOUT else {})


def _connect(path: Path) -> MessageSocket:
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    link.settimeout(CONNECT_S)
    try:
        link.connect(str(path))
        peer = peer_of(link)
        if peer is not None and peer != (pid_of(path), path.parent.lstat().st_uid):
            raise PermissionError(errno.EPERM, "its socket was opened by another process")
    except OSError:
        link.close()
        raise
    return MessageSocket(link)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _user_of(pid: int) -> int | None:
    with suppress(OSError):
        return Path(f"/proc/{pid}").stat().st_uid
    return None


def _advice(word: str, everyone: Sequence[RecordableProcess]) -> str:
    if word.isdecimal() and _runs(int(word)):
        if _user_of(int(word)) not in (None, os.geteuid()):
            return "it belongs to another user: run this as that user, with the process's TMPDIR and XDG_RUNTIME_DIR"
        return "it runs without an agent: start it with opcapture --on-demand -- SCRIPT"
    if everyone:
        return f"these can: {listed([f'{item.pid} ({printable(item.name)})' for item in everyone])}"
    return "no process can; start one with opcapture --on-demand -- SCRIPT"


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
        "--rank", type=not_negative, metavar="N", help="rank of the process, if several ranks of a job have this name"
    )


def _list(args: argparse.Namespace) -> int:
    items = processes()
    if not items:
        print("no process can be asked to record; start one with opcapture --on-demand -- SCRIPT", file=sys.stderr)
        return 0
    columns = [
        TableColumn("pid", "pid", "d"),
        TableColumn("name", "name", least=8),
        TableColumn(
            "state", lambda item: "recording" if item.about.get("recording") else "idle" if item.about else "busy"
        ),
        TableColumn("rank", lambda item: "" if item.rank is None else item.rank, ">"),
        TableColumn("recordings", lambda item: item.about.get("recordings", ""), ">"),
        TableColumn("command", lambda item: item.about.get("command", "")),
    ]
    print_table(columns, items, sys.stdout)
    return 0


def _stop(args: argparse.Namespace) -> int:
    process = find_process(args.process, args.rank, Reporter("opcapture"))
    stopped = any(answer.get("stopped") for answer in converse(process, STOP))
    words = "the recording ends" if stopped else "no recording is running"
    print(f"opcapture: process {process.pid}: {words}", file=sys.stderr)
    return 0


def _add_trigger_options(parser: argparse.ArgumentParser) -> None:
    _add_process(parser)
    parser.add_argument("--steps", type=positive, metavar="N", help="number of steps to record (default: 3)")
    parser.add_argument("--seconds", type=interval, metavar="S", help="record all steps that begin within S seconds")
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
        help="leave out whole steps, so that recording takes at most this share of the program's time, such as 5%%",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="PATTERN",
        help="trace file (default: named by the pattern that the process was started with)",
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
    if program is None:
        raise UserError("--on-demand is for scripts", "put one after --, as in opcapture --on-demand -- server.py")
    others = [declared for declared in OPTIONS if declared is not Steps]
    refuse_options(all_from_arguments(others, args), ("models",), "a script after -- has its own options")
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
