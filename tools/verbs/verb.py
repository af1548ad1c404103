"""The type and the registry of verbs."""

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
    summary, examples : texts of its help
    prepare : adds its options to a parser that has `--debug`, or None
    run : runs the verb and returns the exit status
    runs_program : True if the arguments after `--` belong to a program and are stored in `args.program`
    needs_torch : False for a verb that works without torch, which takes seconds to load
    """

    summary: str
    examples: str
    prepare: Callable[[argparse.ArgumentParser], None] | None
    run: Callable[[argparse.Namespace], int]
    runs_program: bool = False
    needs_torch: bool = True


verbs: Registry[Verb] = Registry("opgrip.tools.verbs", "opgrip.verbs")
"""verbs by group and name, such as `trace info`; `grip` has no group"""
