"""The command `opgrip`: verbs on traces."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from opgrip.tools.verbs import verbs
from opgrip.traces.command import OneLineParser, run_command

DESCRIPTION = "Look into traces and work on them. Record them with opcapture, replay them with opreplay."


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; see `opgrip --help`."""
    return run_command(make_parser(), lambda args: int(args.run(args)), argv)


def make_parser() -> argparse.ArgumentParser:
    """A parser with a branch for each verb: `trace info` is the verb `info` of the group `trace`, `machine` of none."""
    parser = OneLineParser("opgrip", description=DESCRIPTION)
    groups = parser.add_subparsers(metavar="GROUP", required=True, dest="group")
    members: dict[str, argparse._SubParsersAction[OneLineParser]] = {}
    for name, verb in verbs.items():
        group, _, last = name.partition(" ")
        if last and group not in members:
            holder = groups.add_parser(group, help=f"opgrip {group} --help lists what it does")
            members[group] = holder.add_subparsers(metavar="VERB", required=True, dest="verb")
        around = members[group] if last else groups
        branch = around.add_parser(last or group, help=verb.summary, description=verb.summary, epilog=verb.examples)
        verb.prepare(branch)
        branch.set_defaults(run=verb.run, prog=f"opgrip {name}")
    return parser
