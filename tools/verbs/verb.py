"""What a verb is."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from opgrip.cli.plugins import Registry


@dataclass(frozen=True, slots=True)
class Verb:
    """A verb of the `opgrip` command.

    Attributes
    ----------
    summary, examples : for its help
    prepare : adds its options to a parser
    run : does it, and gives the exit status
    runs_program : what follows `--` on the command line is a program's own, and `args.program`
    needs_torch : its loading takes seconds, which a verb that only tells what there is does without
    """

    summary: str
    examples: str
    prepare: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    runs_program: bool = False
    needs_torch: bool = True


verbs: Registry[Verb] = Registry("opgrip.tools.verbs", "opgrip.verbs")
"""Verbs by group and name: `trace info`; `grip` has no group."""
