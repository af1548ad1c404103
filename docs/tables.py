"""Generate the tables of options, result columns and zoo traces in docs/ from their declarations.

The pages are docs/opreplay.md, docs/results.md and docs/zoo.md; replay/schema.json describes the columns too.

python docs/tables.py            # with --check, exit with an error if a page is out of date
python docs/tables.py --count    # also load the zoo's traces and count distinct operators: takes minutes
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import results_schema

from opgrip.cli.command import counted
from opgrip.cli.options import Option, flag_of, options_in, title_of, words_in
from opgrip.replay.analyses import in_order
from opgrip.replay.command.job import make_parser, option_classes
from opgrip.replay.reports.cells import ON_REQUEST
from opgrip.replay.reports.comparison.comparison import ComparisonColumns
from opgrip.replay.results.columns import Column, columns_in
from opgrip.replay.results.results import Result
from opgrip.tools.verbs.zoo import summary
from opgrip.traces.zoo import ZooTrace, read_manifest
from opgrip.zoo.making import Distinct, count_distinct

FOLDER = Path(__file__).parent
DISTINCT = re.compile(r"^Over all of them .*$", re.MULTILINE)
"""line of docs/zoo.md that takes minutes to compute; kept unless `--count` is given"""
COLUMNS = "## Columns of results\n"
TRACES = "## The traces\n"
"""heading from which on a page is generated"""


def pages(is_counted_anew: bool = False) -> dict[Path, str]:
    """Return the text of each page.

    Parameters
    ----------
    is_counted_anew : True to load all traces of the zoo and count distinct operators
    """
    results, zoo = FOLDER / "results.md", FOLDER / "zoo.md"
    written, about_zoo = (
        page.read_text(encoding="utf-8").partition(heading) for page, heading in ((results, COLUMNS), (zoo, TRACES))
    )
    counts = DISTINCT.search(about_zoo[2])
    distinct = counts[0] if counts and not is_counted_anew else distinct_line(count_distinct(read_manifest()))
    return {
        FOLDER / "opreplay.md": "\n".join(_options()).rstrip() + "\n",
        results: written[0] + "\n".join(_columns()).rstrip() + "\n",
        results_schema.PATH: results_schema.as_text(),
        zoo: about_zoo[0] + "\n".join(_zoo(distinct)).rstrip() + "\n",
    }


def _options() -> Iterator[str]:
    yield "# Options of opreplay\n"
    yield "This page lists the options of opreplay; `python docs/tables.py` writes it."
    yield "They are keywords of `opgrip.replay.replay` too, with `_` for `-`.\n"
    usual = make_parser().parse_args(["trace"])
    by_title: dict[str, list[str]] = {}
    for declared in option_classes():
        for _, word, _, about in options_in(declared):
            cells = [f"`{_flag(word, about)}`", _text(about).replace("%(default)s", str(getattr(usual, word)))]
            by_title.setdefault(title_of(declared), []).append(_row(*cells))
    for title, rows in by_title.items():
        yield f"## {title.capitalize()}\n"
        yield from ("| option | effect |", "| --- | --- |", *rows, "")


def _columns() -> Iterator[str]:
    yield COLUMNS
    yield "`python docs/tables.py` writes these tables. Every row of a replay has these columns:\n"
    yield from _table(columns_in(Result))
    parts = [item for item in in_order() if item.columns is not None]
    for word, declared in [
        *(((*words_in(item.options), "an analysis")[0], item.columns) for item in parts),
        *ON_REQUEST,
    ]:
        yield f"Added with {word if ' ' in word else f'`{flag_of(word)}`'}:\n"
        yield from _table(columns_in(declared))
    yield "## Columns of comparisons\n"
    yield "The rows that `opgrip compare -o` writes to `.csv` and `.json` have these columns:\n"
    yield from _table(columns_in(ComparisonColumns))


def distinct_line(counts: Distinct) -> str:
    """Return the line of docs/zoo.md that counts distinct operators and functions."""
    operators = f"**{counted(counts.operators, 'operator')}**"
    of_extensions = f"{counts.extension_functions} of them functions of extensions (mmcv's)"
    named = f"**{counted(counts.longtail, 'long-tail function')}** that [`opgrip longtail`](longtail.md) names"
    traces = counted(counts.traces, "trace")
    return f"Over all of them ({traces}) there are {operators}, {of_extensions}, and {named}, each counted once."


def _zoo(distinct: str) -> Iterator[str]:
    traces = read_manifest()
    yield TRACES
    yield f"`python docs/tables.py` writes these tables. {summary(traces)}.\n"
    yield f"{distinct}\n"
    for library in dict.fromkeys(trace.library for trace in traces):
        yield f"### {library}\n"
        yield "| trace | family | inputs | calls | signatures | operators | long tail | kB |"
        yield "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: |"
        yield from (_row(*_zoo_cells(trace)) for trace in traces if trace.library == library)
        yield ""


def _zoo_cells(trace: ZooTrace) -> list[str]:
    words = [f"`{trace.name}`", trace.family, trace.inputs]
    held = trace.recording
    if held is None:
        return [*words, *["not made yet", "", "", "", ""]]
    numbers = (held.calls, held.signatures, held.operators, held.longtail, round(held.size_bytes / 1e3))
    return [*words, *(f"{number:,}" for number in numbers)]


def _table(about: Iterator[Column]) -> list[str]:
    units = {"1": "share"}
    rows = [_row(f"`{item.name}`", units.get(item.unit, item.unit), item.meaning) for item in about]
    return ["| column | unit | meaning |", "| --- | --- | --- |", *rows, ""]


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _flag(word: str, about: Option) -> str:
    value = about.metavar or ("{" + ",".join(about.choices) + "}" if about.choices else "")
    flags = ", ".join(filter(None, (about.short, flag_of(word))))
    return f"{flags} {value}".strip()


def _text(about: Option) -> str:
    text = about.help if isinstance(about.help, str) else about.help()
    return text.replace("%(default)g", "%(default)s").replace("%%", "%")


if __name__ == "__main__":
    for path, text in pages("--count" in sys.argv).items():
        if "--check" not in sys.argv:
            path.write_text(text, encoding="utf-8")
        elif path.read_text(encoding="utf-8") != text:
            sys.exit(f"{path} is out of date: python docs/tables.py")
