"""The command `opgrip`, with subcommands for traces, results and samples."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

from opgrip.cli.command import USAGE_ERROR, OneLineParser, add_debug, add_version, listed, run_command
from opgrip.cli.progress import loading
from opgrip.tools.verbs import verbs

USAGE = "opgrip [-h] [--version] VERB ..."
WIDTH = 80
# what the subcommands of a group are about, by the name of the group
GROUPS = {
    "autostart": "let Python programs accept requests to record",
    "candidate": "your own implementation of an operator",
    "results": "stored results of replays",
    "samples": "long-tail functions that ship",
    "trace": "one trace or several",
    "zoo": "traces of real models that ship",
}


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    named = {name: verb for words in (1, 2) if (verb := verbs.get(name := " ".join(argv[:words]))) is not None}
    program: list[str] = []
    if any(verb.runs_program for verb in named.values()) and "--" in argv:
        place = argv.index("--")
        argv, program = argv[:place], argv[place + 1 :]
    parser = make_parser(named or None)
    parser.set_defaults(program=program)
    return run_command(parser, _run, argv)


class _VerbParser(OneLineParser):
    def error(self, message: str) -> NoReturn:
        if message.endswith("are required: VERB"):
            self.print_help(sys.stderr)
            self.exit(USAGE_ERROR)
        super().error(message)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            full_names = [f"opgrip {name}" for name in verbs.names() if name.partition(" ")[2] == value]
            if full_names:
                raise argparse.ArgumentError(action, f"invalid choice {value!r}: did you mean {listed(full_names)}?")
        super()._check_value(action, value)


class _OpgripParser(_VerbParser):
    def parse_known_args(  # type: ignore[override]
        self, args: Any = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        words = list(sys.argv[1:] if args is None else args)
        joined = " ".join(words[:2])
        return super().parse_known_args([joined, *words[2:]] if _is_beside(joined) else words, namespace)


def _is_beside(name: str) -> bool:
    group, _, last = name.partition(" ")
    return bool(last) and group in verbs.names() and name in verbs.names()


def _run(args: argparse.Namespace) -> int:
    if args.needs_torch:
        with loading(args.prog):
            import torch  # noqa: F401 - what a verb does begins with it
    return int(args.run(args))


def _list_verbs() -> str:
    names = verbs.names()
    groups: dict[str, list[str]] = {name.partition(" ")[0]: [] for name in names if " " in name}
    for name in names:
        group, _, last = name.partition(" ")
        if last:
            groups[group].append(last)
    beside = {name: groups.pop(name) for name in names if name in groups}
    alone = [
        (name, verb.summary + (f"; {', '.join(beside[name])}" if name in beside else ""))
        for name, verb in verbs.items()
        if " " not in name
    ]
    width = max(map(len, [*groups, *(name for name, _ in alone)]))
    lines = [f"  {name:<{width}}  {summary}" for name, summary in alone]
    for group, members in groups.items():
        text = f"{GROUPS[group]}: {', '.join(members)}" if group in GROUPS else ", ".join(members)
        first, *others = textwrap.wrap(text, WIDTH - width - 4, break_on_hyphens=False)
        lines += [f"  {group:<{width}}  {first}", *(f"{'':<{width + 4}}{line}" for line in others)]
    return "\n".join(["verbs for traces and results (opgrip VERB --help):", *lines])


def make_parser(prepared: Collection[str] | None = None) -> argparse.ArgumentParser:
    parser = _OpgripParser("opgrip", usage=USAGE, epilog=_list_verbs())
    add_version(parser)
    # listed below, with the names in each group
    groups = parser.add_subparsers(
        prog="opgrip", metavar="VERB", required=True, dest="group", help=argparse.SUPPRESS, parser_class=_VerbParser
    )
    members: dict[str, argparse._SubParsersAction[_VerbParser]] = {}
    for name, verb in verbs.items():
        group, _, last = name.partition(" ") if not _is_beside(name) else (name, "", "")
        if last and group not in members:
            names = [other.partition(" ")[2] for other, _ in verbs.items() if other.startswith(f"{group} ")]
            holder = groups.add_parser(group, help=", ".join(names))
            members[group] = holder.add_subparsers(metavar="VERB", required=True, dest="verb")
        place = members[group] if last else groups
        branch = place.add_parser(last or group, help=verb.summary, description=verb.summary, epilog=verb.examples)
        if verb.prepare is not None and (prepared is None or name in prepared):
            verb.prepare(branch)
        add_debug(branch)
        branch.set_defaults(run=verb.run, needs_torch=verb.needs_torch, prog=f"opgrip {name}")
    return parser
