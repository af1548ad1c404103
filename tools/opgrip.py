"""The command `opgrip`: verbs on traces, and the gripper."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from opgrip.tools.verbs import verbs
from opgrip.traces.command import OneLineParser, add_version, run_command
from opgrip.traces.loading import loading

DESCRIPTION = (
    "Look into traces and work on them, and take functions out of programs. "
    "Record traces with opcapture, replay them with opreplay."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; see `opgrip --help`."""
    argv = sys.argv[1:] if argv is None else list(argv)
    named = (verbs.get(" ".join(argv[:words])) for words in (1, 2))
    program: list[str] = []
    if any(verb is not None and verb.runs_program for verb in named) and "--" in argv:
        place = argv.index("--")
        argv, program = argv[:place], argv[place + 1 :]
    parser = make_parser()
    parser.set_defaults(program=program)
    return run_command(parser, _run, argv)


def _run(args: argparse.Namespace) -> int:
    with loading(args.prog):
        import torch  # noqa: F401 - what a verb does begins with it
    return int(args.run(args))


def _list_verbs() -> str:
    """A line for each verb: what it does."""
    width = max(len(name) for name, _ in verbs.items())
    lines = [f"  opgrip {name:<{width}}  {verb.summary}" for name, verb in verbs.items()]
    return "\n".join(["what they do:", *lines])


def make_parser() -> argparse.ArgumentParser:
    """A parser with a branch for each verb: `trace info` is the verb `info` of the group `trace`, `grip` is in none."""
    parser = OneLineParser("opgrip", description=DESCRIPTION, epilog=_list_verbs())
    add_version(parser)
    groups = parser.add_subparsers(metavar="GROUP or VERB", required=True, dest="group")
    members: dict[str, argparse._SubParsersAction[OneLineParser]] = {}
    for name, verb in verbs.items():
        group, _, last = name.partition(" ")
        if last and group not in members:
            names = [other.partition(" ")[2] for other, _ in verbs.items() if other.startswith(f"{group} ")]
            holder = groups.add_parser(group, help=", ".join(names))
            members[group] = holder.add_subparsers(metavar="VERB", required=True, dest="verb")
        place = members[group] if last else groups
        branch = place.add_parser(last or group, help=verb.summary, description=verb.summary, epilog=verb.examples)
        verb.prepare(branch)
        branch.set_defaults(run=verb.run, prog=f"opgrip {name}")
    return parser
