"""What `opcapture` does with processes that run: a file a verb."""

from __future__ import annotations

import argparse
from importlib import import_module

from opgrip.cli.command import OneLineParser, add_debug

VERBS = ("attach", "list", "stop", "trigger")
"""Each is a module here, with a `DESCRIPTION`, `EXAMPLES`, `prepare` and `run`."""


def make_verb_parser(verb: str) -> argparse.ArgumentParser:
    """The parser of a verb, whose `run` the arguments hold."""
    module = import_module(f"{__name__}.{verb}")
    parser = OneLineParser(f"opcapture {verb}", description=module.DESCRIPTION, epilog=module.EXAMPLES)
    module.prepare(parser)
    add_debug(parser)
    parser.set_defaults(run=module.run)
    return parser
