"""Entry point of `opcapture`, which parses the arguments before it imports slow modules."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from opgrip.capture.command.capture_options import check_on_demand, make_parser
from opgrip.capture.command.script import check_script
from opgrip.capture.on_demand.verbs import VERBS, make_verb_parser
from opgrip.cli.command import run_command
from opgrip.cli.progress import loading


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv and argv[0] in VERBS:
        return run_command(make_verb_parser(argv[0]), lambda args: int(args.run(args)), argv[1:])
    own_arguments, has_program, program = _split(argv)
    return run_command(make_parser(), lambda args: _run(args, program if has_program else None), own_arguments)


def _split(argv: list[str]) -> tuple[list[str], bool, list[str]]:
    place = argv.index("--") if "--" in argv else len(argv)
    return argv[:place], place < len(argv), argv[place + 1 :]


def _run(args: argparse.Namespace, program: Sequence[str] | None) -> int:
    if program is not None:
        check_script(program)
    check_on_demand(args)
    if args.on_demand:
        from opgrip.capture.on_demand.verbs import run_on_demand

        return run_on_demand(args, program)
    with loading("opcapture"):
        from opgrip.capture.command.opcapture import run
    return run(args, program)
