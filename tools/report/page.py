"""The page: one HTML file with the libraries, scripts and styles that it needs."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from string import Template
from types import ModuleType
from typing import Any

from opgrip.cli.plugins import needed
from opgrip.errors import UserError
from opgrip.replay.outcome import Results
from opgrip.tools.report.comparisons import GATES, describe_comparisons
from opgrip.tools.report.corpus_view import describe_corpus
from opgrip.tools.report.launches import SHORT_US
from opgrip.tools.report.runs import command_of, describe_runs
from opgrip.tools.report.trace_views import describe_trace
from opgrip.traces.table.trace import Trace
from opgrip.zoo.corpus import Corpus

SCRIPTS = ("base.js", "charts.js", "tables.js", "views.js", "launches.js", "corpus.js", "case.js", "main.js")
"""The page's own, in the order in which they run."""


@cache
def plotly() -> str:
    """The script of Plotly, which draws."""
    return _file(needed("plotly", "report"), "package_data/plotly.min.js")


@cache
def tables() -> tuple[str, str]:
    """Module and style sheet of DataTables, as itables brings them."""
    package = needed("itables", "report")
    return _file(package, "html/dt_bundle.js"), _file(package, "html/dt_bundle.css")


@cache
def own(name: str) -> str:
    """A file of this package."""
    return (files(__package__) / "static" / name).read_text(encoding="utf-8")


def own_script() -> str:
    """The page's own scripts as one, whose names nothing else sees."""
    return '(() => {\n"use strict";\n' + "\n".join(map(own, SCRIPTS)) + "\n})();"


def _file(package: ModuleType, name: str) -> str:
    path = Path(str(package.__file__)).parent / name
    if not path.is_file():
        raise UserError(f"{package.__name__} has no {name}", "pip install --upgrade 'opgrip[report]'")
    return path.read_text(encoding="utf-8")


def make_page(
    runs: Mapping[str, Results],
    traces: Mapping[str, Trace],
    title: str,
    corpus: Corpus | None = None,
    gates: Sequence[str] = GATES,
) -> str:
    """The page of some runs and traces.

    Parameters
    ----------
    runs, traces : by the names that the page has for them
    corpus : many traces, of which the page shows what they say together
    gates : conditions that each run has to meet, compared with the first
    """
    data = {
        "title": title,
        "version": version("opgrip"),
        **describe_runs(runs),
        "comparisons": list(describe_comparisons(runs, gates)),
        "commands": [command_of(run.header, row) for run in runs.values() for row in run],
        "short_us": SHORT_US,
        "corpus": None if corpus is None else describe_corpus(corpus),
        "traces": [describe_trace(name, trace) for name, trace in traces.items()],
    }
    table_module, table_style = tables()
    scripts = [_inline(plotly()), _inline(own_script())]
    return Template(own("page.html")).substitute(
        title=html.escape(title),
        policy=_policy(scripts),
        styles=f"{table_style}\n{own('page.css')}".replace("</", "<\\/"),
        data=_embedded(data),
        tables=base64.b64encode(table_module.encode()).decode(),
        plotly=scripts[0],
        script=scripts[1],
    )


def _embedded(data: Any) -> str:
    """JSON that no text in it can end, whatever strangers call their operators."""
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _inline(script: str) -> str:
    """A script as it stands in a page: nothing in it ends its element."""
    return script.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _policy(scripts: Sequence[str]) -> str:
    """What a browser lets the page do: run these scripts and the tables' module, and ask nobody for anything."""
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in scripts
    )
    return (
        f"default-src 'none'; script-src {hashes} blob:; style-src 'unsafe-inline'; img-src data: blob:; "
        "font-src data:; form-action 'none'; base-uri 'none'"
    )
