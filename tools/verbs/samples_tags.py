"""`opgrip samples tags`: the meaning of each tag, and its number of samples."""

from __future__ import annotations

import argparse

from opgrip.cli.command import add_debug
from opgrip.tools.verbs.verb import Verb, verbs

EXAMPLES = """\
examples:
  opgrip samples tags
"""


def prepare(parser: argparse.ArgumentParser) -> None:
    """Add the options of the verb."""
    add_debug(parser)


def run(args: argparse.Namespace) -> int:
    """Print one line per tag."""
    from opgrip.samples import Tag, samples

    for tag in Tag:
        count = sum(tag in sample.tags for sample in samples().values())
        print(f"{tag.value:<20}{count:>5}  {tag.meaning}")
    return 0


verbs.register("samples tags")(Verb("list the tags, and how many samples have each", EXAMPLES, prepare, run))
