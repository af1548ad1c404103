"""The subcommands of `opgrip`: modules of this package, and entry points `opgrip.verbs` in other packages."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from opgrip.cli.command import positive
from opgrip.cli.plugins import Registry

Prepare: TypeAlias = Callable[[argparse.ArgumentParser], None]
Run: TypeAlias = Callable[[argparse.Namespace], int]


@dataclass(frozen=True, slots=True)
class Verb:
    """A subcommand of `opgrip`.

    prepare : function that adds its options to a parser; None if it has none
    runs_program : True if the words after `--` belong to a program; they are then stored in `args.program`
    """

    summary: str
    examples: str
    prepare: Prepare | None
    run: Run
    runs_program: bool = False
    needs_torch: bool = True


T = TypeVar("T", bound=Prepare | None)

# subcommands by group and name, such as `trace info`; `grip` has no group
verbs: Registry[Verb] = Registry("opgrip.tools.verbs", "opgrip.verbs")


def verb(name: str, summary: str, examples: str, prepare: Prepare | None = None, **others: Any) -> Callable[[Run], Run]:
    def register(run: Run) -> Run:
        verbs.register(name)(Verb(summary, examples, prepare, run, **others))
        return run

    return register


def declare(name: str, summary: str, examples: str, work: str, **others: Any) -> Callable[[T], T]:
    """Return a decorator of the function that adds the options of a subcommand.

    work : function in `opgrip.tools.verb_work` that runs it, such as `trace_info:run`; imported when it is called
    """

    def run(args: argparse.Namespace) -> int:
        module, _, function = work.partition(":")
        return int(getattr(import_module(f"opgrip.tools.verb_work.{module}"), function)(args))

    def register(prepare: T) -> T:
        verbs.register(name)(Verb(summary, examples, prepare, run, **others))
        return prepare

    return register


def add_capture(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--capture",
        type=Path,
        metavar="FILE",
        help="for input with launches of CUDA graphs: profile of the run that captured them, to add their operators",
    )


def add_output(parser: argparse.ArgumentParser, help: str, required: bool = False) -> None:
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", required=required, help=help)
    parser.add_argument("-f", "--force", action="store_true", help="replace an existing file")


def add_top(parser: argparse.ArgumentParser, default: int, rows: str = "rows to show") -> None:
    text = f"number of {rows} (default: %(default)s)"
    parser.add_argument("--top", type=positive, default=default, metavar="N", help=text)


# options that select calls, and what they have in common
FILTERS = {
    "phase": "of this phase",
    "module": "in modules whose paths match, such as 'backbone.*'",
    "op": "of operators whose names match, such as 'aten.index*'",
    "label": "in record_function blocks whose labels match",
}


def add_filters(parser: argparse.ArgumentParser, purpose: str, *names: str) -> None:
    for name in names:
        form: Any = {"choices": ("forward", "backward", "optimizer")} if name == "phase" else {"metavar": "PATTERN"}
        text = f"{purpose} {FILTERS[name]}; can be repeated"
        parser.add_argument(f"--{name}", action="append", default=[], help=text, **form)


def report_output(args: argparse.Namespace, what: str) -> None:
    print(f"{args.prog}: wrote {what} to {args.output}", file=sys.stderr)
