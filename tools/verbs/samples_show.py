"""`opgrip samples show`: description, inputs and source of a sample."""

from __future__ import annotations

import argparse
import inspect
import sys
from typing import TYPE_CHECKING, Any

from opgrip.cli.command import add_debug
from opgrip.tools.verbs.verb import Verb, verbs

if TYPE_CHECKING:
    from opgrip.samples import Sample

EXAMPLES = """\
examples:
  opgrip samples show delta2bbox
  opgrip samples show nms | less
"""


def prepare(parser: argparse.ArgumentParser) -> None:
    """Add the options of the verb."""
    parser.add_argument("name", metavar="NAME", help="name of the sample")
    add_debug(parser)


def run(args: argparse.Namespace) -> int:
    """Print the sample."""
    from opgrip.replay.cases.sources.samples import PREFIX, find_samples

    (sample,) = find_samples(args.name)
    print(f"name      {sample.name}, in {sample.family}")
    print(f"tags      {' '.join(sorted(tag.value for tag in sample.tags)) or 'none'}")
    print(f"source    {sample.project}, {sample.url}")
    print(f"jax       {'yes' if sample.has_jax() else 'no'}")
    for configuration in sample.configurations:
        print(f"inputs    {configuration}: {_outline(sample, configuration)}")
    print(f"run it    opreplay {PREFIX}{sample.name} --mode eager,compile\n")
    print(inspect.getsource(sys.modules[sample.function.__module__]), end="")
    return 0


def _outline(sample: Sample, configuration: str) -> str:
    from opgrip.traces.schema.arguments import map_leaves
    from opgrip.traces.schema.tensor_specs import tensor_outline

    def short(leaf: Any) -> Any:
        return _Plain(tensor_outline(leaf.dtype, leaf.shape)) if hasattr(leaf, "shape") else leaf

    return ", ".join(map(repr, map_leaves(short, sample.arguments(configuration))))


class _Plain(str):
    """Text that is shown without quotation marks among other values."""

    __slots__ = ()

    __repr__ = str.__str__


verbs.register("samples show")(Verb("show what a sample computes, its inputs and its source", EXAMPLES, prepare, run))
