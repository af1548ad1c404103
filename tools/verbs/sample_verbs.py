"""`opgrip samples list`, `show` and `tags`: the samples that ship."""

from __future__ import annotations

import argparse
import inspect
import sys
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from opgrip.cli.command import counted
from opgrip.display.tables import TableColumn, print_table
from opgrip.errors import UserError
from opgrip.tools.verbs import verb

if TYPE_CHECKING:
    from opgrip.samples import Sample

LIST_EXAMPLES = """\
examples:
  opgrip samples list
  opgrip samples list --tag ForLoop --tag InputAware    samples with both tags
  opgrip samples list --source mmdetection '*_loss'
"""
COLUMNS = (
    TableColumn("name", itemgetter(0), least=30),
    TableColumn("family", itemgetter(1), least=10, rank=1),
    TableColumn("tags", itemgetter(2), least=24),
    TableColumn("project", itemgetter(3), rank=2),
    TableColumn("", itemgetter(4)),
)


def prepare_list(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="GLOB", help="only samples whose names match")
    parser.add_argument("--tag", action="append", default=[], metavar="TAG", help="only with this tag; can be repeated")
    parser.add_argument("--source", metavar="TEXT", help="only from projects with this in their name or address")


@verb("samples list", "list the samples of the package", LIST_EXAMPLES, prepare_list)
def run_list(args: argparse.Namespace) -> int:
    from opgrip.replay.cases.sources.samples import find_samples

    samples = find_samples(patterns=args.names, tags=args.tag)
    if not samples:
        raise UserError("no sample matches these names and tags", "opgrip samples list shows all")
    if args.source is not None:
        samples = [sample for sample in samples if args.source.lower() in f"{sample.project} {sample.url}".lower()]
        if not samples:
            raise UserError(f"no sample is from {args.source!r}", "opgrip samples list shows all projects")
    rows = [
        (
            sample.name,
            sample.family,
            " ".join(sorted(tag.value for tag in sample.tags)),
            sample.project,
            "jax" if sample.has_jax() else "",
        )
        for sample in samples
    ]
    if not sys.stdout.isatty():
        sys.stdout.writelines("\t".join(row) + "\n" for row in rows)
        return 0
    print_table(COLUMNS, rows, sys.stdout)
    print(counted(len(rows), "sample"))
    return 0


SHOW_EXAMPLES = """\
examples:
  opgrip samples show delta2bbox
  opgrip samples show nms | less
"""


def prepare_show(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="name of the sample")


@verb("samples show", "show the description, inputs and source of a sample", SHOW_EXAMPLES, prepare_show)
def run_show(args: argparse.Namespace) -> int:
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


TAGS_EXAMPLES = """\
examples:
  opgrip samples tags
"""


@verb("samples tags", "list the tags, with the number of samples", TAGS_EXAMPLES)
def run_tags(args: argparse.Namespace) -> int:
    from opgrip.samples import Tag, samples

    for tag in Tag:
        count = sum(tag in sample.tags for sample in samples().values())
        print(f"{tag.value:<20}{count:>5}  {tag.meaning}")
    return 0
