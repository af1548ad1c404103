"""The HTML page of a report: its assembly, and its views of runs and comparisons."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from itertools import islice
from pathlib import Path
from string import Template
from types import ModuleType
from typing import Any

import numpy as np

from opgrip.cli.plugins import install_command, needed
from opgrip.errors import UserError
from opgrip.platform.peaks import from_json
from opgrip.replay.analyses.speed_ups import summarize_modes
from opgrip.replay.comparison.comparison import compare
from opgrip.replay.comparison.comparison_report import advice, rows_of, summary, total_line
from opgrip.replay.comparison.gate import hold_all, margin_for, parse_gate
from opgrip.replay.operators.lookup import family_of
from opgrip.replay.outcome import Results
from opgrip.replay.reports.cells import all_columns
from opgrip.replay.results.columns import Column
from opgrip.replay.results.judgement import JUDGEMENT, judged_steps, saving_lines, summary_lines
from opgrip.replay.results.ratios import reference_of, with_ratios_by_case
from opgrip.replay.results.results import OK, Result
from opgrip.tools.report.trace_views import SHORT_US, describe_corpus, describe_trace, plain, rounded
from opgrip.traces.table.trace import Trace
from opgrip.zoo.corpus import Corpus

# the page's scripts in execution order
SCRIPTS = (
    "base.js",
    "charts.js",
    "tables.js",
    "views.js",
    "launches.js",
    "corpus.js",
    "candidates.js",
    "case.js",
    "main.js",
)

GATES = ("slower<=5%", "failed<=0", "changed<=0")  # default gates of a page


@cache
def plotly() -> str:
    return _file(needed("plotly", "report"), "package_data/plotly.min.js")


@cache
def tables() -> tuple[str, str]:
    """Return the text of DataTables' JavaScript module, and of its style sheet."""
    package = needed("itables", "report")
    return _file(package, "html/dt_bundle.js"), _file(package, "html/dt_bundle.css")


@cache
def own(name: str) -> str:
    """Return the text of a static file of this package."""
    return (files(__package__) / "static" / name).read_text(encoding="utf-8")


def own_script() -> str:
    """Return the scripts of the page joined into one text, in a private scope."""
    return '(() => {\n"use strict";\n' + "\n".join(map(own, SCRIPTS)) + "\n})();"


def _file(package: ModuleType, name: str) -> str:
    path = Path(str(package.__file__)).parent / name
    if not path.is_file():
        raise UserError(
            f"{package.__name__} has no {name}", install_command("report").replace("install", "install --upgrade")
        )
    return path.read_text(encoding="utf-8")


def make_page(
    runs: Mapping[str, Results],
    traces: Mapping[str, Trace],
    title: str,
    corpus: Corpus | None = None,
    gates: Sequence[str] = GATES,
) -> str:
    """Return the text of the HTML page that shows runs and traces.

    runs, traces : results and traces by their names on the page
    corpus : several traces to summarize on the page; None for none
    gates : conditions to check for each run, compared with the first run
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
    """JSON text that is safe within a script element, even with untrusted names."""
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _inline(script: str) -> str:
    return script.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _policy(scripts: Sequence[str]) -> str:
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in scripts
    )
    return (
        f"default-src 'none'; script-src {hashes} blob:; style-src 'unsafe-inline'; img-src data: blob:; "
        "font-src data:; form-action 'none'; base-uri 'none'"
    )


# columns that the page adds to the result columns, or shows instead of one with the same name
DERIVED = (
    Column("file of the row", name="run"),
    Column("kind of work of the operator", name="family"),
    Column("settings other than the mode, if not the defaults", name="variant"),
    Column("`ok` or the reason of a failure, and warnings about the time", name="marked_status"),
    Column("True if paired runs differ from the speed-up by over 10 %, shown as ~", name="is_speed_up_doubtful"),
    Column("True if another row of the case, with other settings, counts in totals", name="again", whole=True),
    Column("time of all calls in the program, by the replayed median", "us", name="total_us"),
    Column("number of calls after which the preparation pays off, compared with eager", name="break_even", whole=True),
)
MOST_TIMES = 400_000  # maximum number of single times on a page; if there are more, each row has quantiles instead
QUANTILES = np.linspace(0, 1, 21)

Plain = dict[str, Any]


def describe_runs(runs: Mapping[str, Results]) -> Plain:
    """Return the page's data about runs: result rows by column, times of their runs, call sites, and facts about each
    run.
    """
    left_out = {"detail", *(about.name for about in DERIVED)}
    columns = [*DERIVED, *(about for about in all_columns() if not about.hidden and about.name not in left_out)]
    # results of older versions contain ratios of paired runs
    rows = [(name, row) for name, run in runs.items() for row in with_ratios_by_case(run, reference_of(run.rows))]
    timed = [(name, row) for name, row in rows if row.median_us and row.status == OK]
    eager = {(name, _key_without_mode(row)): row.median_us for name, row in timed if row.mode == "eager"}
    ways: dict[tuple[str, str, str], object] = {}
    cells = [_cells(name, row, eager.get((name, _key_without_mode(row))), ways) for name, row in rows]
    filled = [about for about in columns if any(cell.get(about.name) not in (None, "") for cell in cells)]
    return {
        "columns": [{"name": about.name, "unit": about.unit, "meaning": about.meaning} for about in filled],
        "rows": {about.name: [_cell(cell.get(about.name)) for cell in cells] for about in filled},
        "times": list(_times([row for _, row in rows])),
        "sites": _sites([row for _, row in rows]),
        "modes": list(_modes(rows)),
        "judgements": list(_judgements(runs)),
        "runs": [
            {"name": name, "facts": list(_facts(run.header)), **_ceilings(run.header)} for name, run in runs.items()
        ],
    }


def _modes(rows: Sequence[tuple[str, Result]]) -> Iterator[Plain]:
    for name in dict.fromkeys(name for name, _ in rows):
        own = [row for run, row in rows if run == name]
        for item in summarize_modes(own, reference_of(own)):
            cells = {} if item.speed_up is None else asdict(item.speed_up)
            speed_up = {fact: _cell(value) for fact, value in cells.items()} or None
            yield {"run": name, "mode": item.mode, "statuses": item.statuses, "speed_up": speed_up}


def _judgements(runs: Mapping[str, Results]) -> Iterator[Plain]:
    for name, run in runs.items():
        if steps := judged_steps(run):
            parts = [[_cell(value) for value in asdict(line).values()] for line in saving_lines(steps)]
            yield {"run": name, "lines": [plain(line) for line in summary_lines(steps)], "parts": parts}


def _cell(value: Any) -> Any:
    return plain(value, infinite="inf")


def _sites(rows: Sequence[Result]) -> Plain:
    names: dict[str, int] = {}
    lists: dict[tuple[object, ...], int] = {}
    of_row = []
    for row in rows:
        sites = row.sites
        calls = sum(site.count for site in sites)
        shares = tuple(
            (
                *(names.setdefault(_cell(name), len(names)) for name in (site.module, site.phase, site.line)),
                rounded(site.count / calls),
            )
            for site in sites
        )
        of_row.append(lists.setdefault(shares, len(lists)))
    return {"names": list(names), "lists": list(lists), "of_row": of_row}


def _key_without_mode(row: Result) -> object:
    return (row.case, *row.identity_without("mode"))


def _cells(name: str, row: Result, eager_us: float | None, ways: dict[tuple[str, str, str], object]) -> Plain:
    cells = row.to_plain() | {"run": name, "family": family_of(row.op), "variant": row.variant}
    cells |= {"marked_status": row.marked_status, "is_speed_up_doubtful": row.is_speed_up_doubtful or None}
    if row.median_us is not None and row.status == OK:
        cells["total_us"] = row.median_us * max(row.count, 1)
        if ways.setdefault((name, row.mode, f"{row.trace} {row.case} {row.key}"), row.variant) != row.variant:
            cells["again"] = 1
        won_us = (eager_us or 0.0) - row.median_us
        if row.first_ms and won_us > 0 and row.mode != "eager":
            cells["break_even"] = math.ceil(row.first_ms * 1e3 / won_us)
    return cells


def _times(rows: Sequence[Result]) -> Iterator[list[float] | None]:
    total = sum(len(row.times_us or ()) for row in rows)
    for row in rows:
        if not row.times_us:
            yield None
        elif total <= MOST_TIMES:
            yield [rounded(time) for time in row.times_us]
        else:
            yield [rounded(float(time)) for time in np.quantile(row.times_us, QUANTILES)]


def _facts(header: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    for name, value in header.items():
        if name not in ("ceilings", JUDGEMENT):
            # underscores belong to the names of environment variables
            title = f"{before}{name if name.isupper() else name.replace('_', ' ')}"
            if isinstance(value, Mapping):
                yield from _facts(value, f"{title}, ")
            else:
                yield title, str(value)


def _ceilings(header: Mapping[str, Any]) -> Plain:
    form = header.get("ceilings")
    if not isinstance(form, Mapping):
        return {}
    try:
        ceilings, threads = from_json(dict(form)), int(header.get("threads", 1))
        levels = [(level.name, ceilings.bandwidth(level, threads)) for level in ceilings.levels]
        rates = [(dtype, ceilings.rate(dtype, threads)) for dtype in ceilings.rates]
    except (KeyError, TypeError, ValueError, AttributeError, StopIteration):
        return {}
    return {"ceilings": {"bandwidths": levels, "rates": rates}}


# options of a run that are not repeated in the command for a single operator
_SELECTING = ("-o", "--output", "--op", "--top", "--mode", "--device", "--sample")


def _without(words: Sequence[str], options: Sequence[str]) -> Iterator[str]:
    rest = iter(words)
    for word in rest:
        if word in options:
            next(rest, None)
        elif not word.startswith(tuple(f"{option}=" for option in options)):
            yield word


def command_of(header: Mapping[str, Any], row: Result) -> str:
    """Return the command that replays all cases with the operator of a row again, with the options of the run."""
    program, *arguments = shlex.split(str(header.get("command", ""))) or [""]
    if program == "opreplay":
        words = [program, *_without(arguments, _SELECTING), "--op", row.op]
    else:
        words = ["opreplay", str(header.get("trace", "TRACE")), "--op", row.op]
    if row.mode != "eager":
        words += ["--mode", row.mode]
    device = str(header.get("device", "cpu"))
    return shlex.join(words + (["--device", "cuda"] if device not in ("cpu", "meta") else []))


MOST_ROWS = 20_000  # maximum number of rows of a comparison on a page, slowest rows first
COLUMNS = ("verdict", "op", "shapes", "mode", "variant", "base_us", "new_us", "ratio", "low", "high", "reason")


def describe_comparisons(runs: Mapping[str, Results], gates: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the page's data about the comparison of each run with the first run."""
    conditions = list(map(parse_gate, gates))
    names = list(runs)
    for name in names[1:]:
        comparison = compare(runs[names[0]], runs[name], margin_for(conditions))
        lines = [summary(comparison), *map(total_line, comparison.totals()), *advice(comparison)]
        rows = list(islice(rows_of(comparison), MOST_ROWS))
        yield {
            "name": name,
            "base": names[0],
            "lines": list(map(plain, lines)),
            "gates": [plain(item.line) for item in hold_all(conditions, comparison)],
            "columns": COLUMNS,
            "rows": [[plain(getattr(row, column)) for column in COLUMNS] for row in rows],
        }
