"""The HTML page of a report, with its views of runs and comparisons."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import shlex
from collections import defaultdict
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
import pandas as pd

from opgrip.capture.command.opcapture import own_cost
from opgrip.cli.command import counted
from opgrip.cli.plugins import install_command, needed
from opgrip.cli.terminal import shorten
from opgrip.errors import UserError
from opgrip.platform.peaks import from_json
from opgrip.replay.analyses.speed_ups import summarize_modes
from opgrip.replay.cases.batch_scale import named_tensors
from opgrip.replay.cases.call_sites import count_call_sites
from opgrip.replay.cases.cases import contexts_of
from opgrip.replay.operators.lookup import family_of
from opgrip.replay.reports.cells import all_columns
from opgrip.replay.reports.comparison.comparison import (
    advice,
    compare,
    hold_all,
    margin_for,
    parse_gate,
    rows_of,
    summary,
    total_line,
)
from opgrip.replay.reports.outcome import Results
from opgrip.replay.results.columns import Column
from opgrip.replay.results.judgement import JUDGEMENT, judged_steps, saving_lines, summary_lines
from opgrip.replay.results.ratios import reference_of, with_ratios_by_case
from opgrip.replay.results.results import OK, Result, describe_shapes
from opgrip.traces.analysis.dataflow import make_graph
from opgrip.traces.analysis.longtail import bandwidth_of, find_longtail
from opgrip.traces.analysis.timeline import frames_of, origins
from opgrip.traces.codec.record_forms import key_of_case
from opgrip.traces.schema.arguments import TensorSpec
from opgrip.traces.schema.records import Signature, ValueModel
from opgrip.traces.table.trace import Trace
from opgrip.traces.values.model import value_model_to_json
from opgrip.zoo.corpus import Corpus, summarize
from opgrip.zoo.corpus.summaries import cover, records, summarize_coverage

MOST_CALLS = 20_000  # maximum number of calls in a timeline; the longest are kept, in order
NO_CODE = "outside the program's code"
MOST_PLACES = 20  # maximum number of call sites listed for a case
BANDWIDTH = 20e9  # memory bandwidth in bytes per second that is assumed to compare savings

Called = tuple[Signature, str]


def describe_trace(name: str, trace: Trace) -> Plain:
    called = list(_called(trace))
    table = trace.summary("signature").set_index("signature")
    # as in all tables, each call counts with the median of its signature
    calls = trace.own_calls.assign(typical_us=lambda own: own["signature"].map(table["time_us"] / table["calls"]))
    return {
        "name": name,
        "stacks": _stacks(trace, calls),
        "lines": _lines(calls),
        "timeline": _timeline(trace),
        **_longtail(trace),
        "launches": describe_launches(trace, {signature.number: key for signature, key in called}),
        "cases": dict(_cases(trace, called)),
    }


def _stacks(trace: Trace, calls: pd.DataFrame) -> list[tuple[list[str], float]]:
    by_number = origins(trace)
    stacks: dict[tuple[str, ...], float] = defaultdict(float)
    sums = calls.groupby(["scope", "op"], observed=True)["typical_us"].sum().reset_index()
    for scope, op, time_us in sums.itertuples(index=False, name=None):
        record = by_number.get(int(scope))
        frames = () if record is None else reversed(frames_of(record))
        outer = [f"{function} ({file.rsplit('/', 1)[-1]})" for file, function in frames if function]
        stacks[(*outer, str(op))] += time_us
    return [(list(stack), time_us) for stack, time_us in stacks.items()]


def _lines(calls: pd.DataFrame) -> list[tuple[str, int, str, float, int]]:
    grouped = calls.dropna(subset=["file"]).groupby(["file", "line", "function"], observed=True)["typical_us"]
    sums = grouped.agg(["sum", "size"])
    return [
        (str(file), int(line), str(function), float(total), int(count))
        for (file, line, function), total, count in zip(sums.index, sums["sum"], sums["size"], strict=True)
    ]


def _timeline(trace: Trace) -> Plain:
    graph = make_graph(trace)
    critical = set(graph.facts.critical_path)
    steps = sorted(graph.steps.values(), key=lambda step: -step.duration_ns)[:MOST_CALLS]
    steps.sort(key=lambda step: step.start_ns)
    threads = list(dict.fromkeys(step.thread for step in steps))
    first_ns = min((step.start_ns for step in graph.steps.values()), default=0)
    return {
        "threads": threads,
        "left_out": len(graph.steps) - len(steps),
        "calls": [
            (
                round((step.start_ns - first_ns) / 1e3, 1),
                round(step.duration_ns / 1e3, 1),
                threads.index(step.thread),
                step.op,
                step.module,
                step.phase,
                int(step.number in critical),
            )
            for step in steps
        ],
        "critical_us": graph.facts.critical_ns / 1e3,
    }


def _longtail(trace: Trace) -> Plain:
    if not trace.calls["function"].notna().any():
        return {"longtail": []}
    try:
        speed = bandwidth_of(trace)
    except UserError:
        # it was made on a device that this machine lacks
        speed = BANDWIDTH
    longtail = find_longtail([trace], lambda _: speed, own_cost())
    rows = [
        {
            "function": f"{item.name} ({item.file})",
            "calls": item.calls,
            "operators": item.launches + item.backward_launches,
            "time_us": item.wall_ns / 1e3,
            "saving_us": item.saving_ns / 1e3,
        }
        for item in longtail.functions
    ]
    return {"longtail": rows, "gb_per_s": speed / 1e9}


def _called(trace: Trace) -> Iterator[Called]:
    contexts, numbers = contexts_of(trace, trace.own_calls), set(trace.own_calls["signature"])
    for signature in trace.signatures:
        if signature.number in numbers:
            yield signature, key_of_case(signature, contexts.get(signature.number, {}))


def _cases(trace: Trace, called: Sequence[Called]) -> Iterator[tuple[str, Plain]]:
    calls = trace.own_distinct_calls
    sites_by_signature = count_call_sites(calls, calls["signature"])
    for signature, key in called:
        sites = sites_by_signature[signature.number]
        indices = [
            (f"{site.line or NO_CODE}, in {site.module or 'no module'}, {site.phase}", site.count) for site in sites
        ]
        yield (
            key,
            {
                "family": family_of(signature.op),
                "arguments": list(_arguments(signature, trace)),
                "places": indices[:MOST_PLACES],
                "more_places": max(0, len(indices) - MOST_PLACES),
            },
        )


def _arguments(signature: Signature, trace: Trace) -> Iterator[tuple[str, str]]:
    yield "all", describe_shapes(signature)
    for place, (spec, name) in enumerate(named_tensors(signature)):
        model = None if spec.values is None else trace.values.get(spec.values)
        values_text = "" if model is None else f": {shorten(_model_in_words(model), 200)}"
        layout = "" if _is_contiguous(spec) else f", strides {list(spec.stride or ())}"
        yield name or f"tensor {place}", f"{spec.dtype} {list(spec.shape)} on {spec.device}{layout}{values_text}"


def _model_in_words(model: ValueModel) -> str:
    facts = value_model_to_json(model)
    kind = facts.pop("model")
    return f"{kind}, {', '.join(f'{name} {_in_brief(fact)}' for name, fact in facts.items() if fact)}"


def _in_brief(fact: object) -> str:
    if isinstance(fact, list | dict):
        return f"of {counted(len(fact), 'part')}"
    return f"{fact:.4g}" if isinstance(fact, float) else "yes" if fact is True else str(fact)


def _is_contiguous(spec: TensorSpec) -> bool:
    expected = 1
    for size, stride in reversed(list(zip(spec.shape, spec.stride or (), strict=False))):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


SHORT_US = 10.0  # a shorter launch is mostly overhead: passing work to an operator or a kernel takes 2 to 10 us
SUMMED = ["calls", "launches", "time_us", "short", "short_us"]
POINTS_A_DECADE = 10  # number of points per decade of the curve over the launch time


def describe_launches(trace: Trace, key_by_signature: Mapping[int, str]) -> Plain:
    """Return statistics of launches, by module, operator and case, and the distribution of their times.

    key_by_signature : key of the case of each signature, by signature number
    """
    launches = _launches(trace)
    shapes = {signature.number: describe_shapes(signature) for signature in trace.signatures}
    return {
        "are_kernels": bool(trace.kernels),
        "all": next(_sums(launches.assign(all="all"), ["all"]), ("all", 0, 0, 0, 0, 0)),
        "module": [(module or "(outside)", *figures) for module, *figures in _sums(launches, ["module"])],
        "op": list(_sums(launches, ["op"])),
        "case": [
            (op, *figures, shapes.get(number, ""), key_by_signature.get(number, ""))
            for op, number, *figures in _sums(launches, ["op", "signature"])
        ],
        "curve": list(_curve(launches)),
    }


def _launches(trace: Trace) -> pd.DataFrame:
    own = trace.own_calls
    launches = _per_call(trace, own["signature"])
    time_us = own["time_ns"] / 1e3
    of_launch = time_us / launches.where(launches > 0)
    # without times, no launch counts as short
    is_short = (of_launch < SHORT_US) & bool(time_us.any())
    return own[["op", "signature"]].assign(
        module=own["module"].astype(object).fillna(""),
        calls=1,
        launches=launches,
        time_us=time_us,
        short=launches.where(is_short, 0.0),
        short_us=time_us.where(is_short, 0.0),
        of_launch=of_launch,
    )


def _per_call(trace: Trace, signatures: pd.Series[int]) -> pd.Series[float]:
    if not trace.kernels:
        return pd.Series(1.0, signatures.index)
    kernels: dict[int, float] = {}
    for record in trace.kernels:
        kernels[record.signature] = kernels.get(record.signature, 0.0) + sum(record.launches)
    counts = signatures.value_counts()
    per_call = {number: count / counts[number] for number, count in kernels.items() if number in counts}
    return signatures.map(per_call).astype(float).fillna(0.0)


def _sums(launches: pd.DataFrame, names: list[str]) -> Iterator[tuple[Any, ...]]:
    sums = launches.groupby(names, observed=True)[SUMMED].sum().reset_index()
    for row in sums.sort_values("launches", ascending=False, kind="stable").itertuples(index=False, name=None):
        yield (*row[: len(names)], *map(rounded, row[len(names) :]))


def _curve(launches: pd.DataFrame) -> Iterator[tuple[float, float, float]]:
    timed = launches[launches["of_launch"] > 0].sort_values("of_launch")
    if timed.empty:
        return
    times = timed["of_launch"].to_numpy()
    low, high = np.log10(times[[0, -1]])
    points = [*10 ** np.arange(np.floor(low), high, 1 / POINTS_A_DECADE), times[-1]]
    indices = np.searchsorted(times, points, side="right")
    sums = [np.append(0.0, np.cumsum(timed[name].to_numpy())) for name in ("launches", "time_us")]
    for point, index in zip(points, indices, strict=True):
        count, time = (float(f"{each[index] / each[-1]:.4g}") for each in sums)
        yield float(f"{point:.4g}"), count, time


TABLES = ("op", "shape", "dtype", "signature", "model", "family")
COVERAGE = "coverage"  # additional table of the coverage of torch's public operators
MOST_TABLE_ROWS = 5_000  # maximum number of rows of a table; those with the largest share of time are kept
MEANINGS = {
    "source": "opgrip, or the tool that wrote the files",
    "op": "operator",
    "call": "operator and arguments",
    "models": "number of models with such calls",
    "traces": "number of traces with such calls",
    "calls": "number of calls in all traces",
    "signatures": "distinct combinations of operator, shapes, strides, dtypes, scalars and settings",
    "operators": "number of distinct operators",
    "share": "share of time in percent, all models of a source weighted equally",
    "time_us": "time of all calls, by the median of their signature",
    "own_operators": "operators called by no other model",
    "alike": "share of the model's signatures that another model also has",
    "elements_p10": "elements of a call's largest tensor, 10th percentile",
    "elements_p50": "elements of a call's largest tensor, median",
    "elements_p90": "elements of a call's largest tensor, 90th percentile",
    "usual_shapes": "most frequent shapes",
    "usual_dtypes": "most frequent dtypes",
    "named": "names of the models",
    "category": "kind of work of the operators",
    "of_torch": "public operators of torch of this kind",
    "covered": "public operators that the corpus contains",
    "part_covered": "covered share of these operators in percent",
    "missing": "public operators that the corpus lacks",
}


def describe_corpus(corpus: Corpus) -> Plain:
    members = [[member.name, member.source, member.model, member.run, member.library] for member in corpus.members]
    tables = {by: _table(_in_percent(summarize(corpus, by).table, "share")) for by in TABLES}
    coverage = summarize_coverage(cover(corpus)).rename(columns={"operators": "of_torch", "share": "part_covered"})
    return {"members": members, "tables": {**tables, COVERAGE: _table(_in_percent(coverage, "part_covered"))}}


def _in_percent(table: pd.DataFrame, column: str) -> pd.DataFrame:
    return table.assign(**{column: table[column] * 100})


def _table(table: pd.DataFrame) -> Plain:
    shown = table.drop(columns="key", errors="ignore").head(MOST_TABLE_ROWS)
    rows = [[plain(cell) for cell in row.values()] for row in records(shown)]
    columns = [
        {
            "name": name,
            "meaning": MEANINGS.get(str(name), str(name)),
            "is_number": bool(pd.api.types.is_numeric_dtype(shown[name])),
        }
        for name in shown.columns
    ]
    return {"columns": columns, "rows": rows, "left_out": len(table) - len(shown)}


def plain(cell: Any, infinite: Any = None) -> Any:
    """Return a cell in a form that JSON and browsers accept, with floats rounded."""
    if isinstance(cell, float):
        return infinite if math.isinf(cell) else None if math.isnan(cell) else rounded(cell)
    return cell.encode("utf-8", "backslashreplace").decode() if isinstance(cell, str) else cell


def rounded(value: float) -> float:
    return float(f"{value:.6g}")


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
    package = needed("itables", "report")
    return _file(package, "html/dt_bundle.js"), _file(package, "html/dt_bundle.css")


@cache
def own(name: str) -> str:
    return (files(__package__) / "static" / name).read_text(encoding="utf-8")


def own_script() -> str:
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
# options that run code or trust it, which results of other people may name
_RUNNING = (
    *("--extension", "--samples", "--candidate", "--candidates", "--batch-command"),
    *(f"--{tool}-{what}" for tool in ("nsys", "ncu") for what in ("bin", "args-file")),
)
_TRUSTING = ("--trust", "--unbounded")


def _without(words: Sequence[str], options: Sequence[str]) -> Iterator[str]:
    rest = iter(words)
    for word in rest:
        if word in options:
            next(rest, None)
        elif not word.startswith(tuple(f"{option}=" for option in options)):
            yield word


def command_of(header: Mapping[str, Any], row: Result) -> str:
    """Return the command that replays the cases of a row's operator again."""
    program, *arguments = shlex.split(str(header.get("command", ""))) or [""]
    if program == "opreplay":
        arguments = [word for word in arguments if word not in _TRUSTING]
        words = [program, *_without(arguments, _SELECTING + _RUNNING), "--op", row.op]
    else:
        words = ["opreplay", str(header.get("trace", "TRACE")), "--op", row.op]
    if row.mode != "eager":
        words += ["--mode", row.mode]
    device = str(header.get("device", "cpu"))
    return shlex.join(words + (["--device", "cuda"] if device not in ("cpu", "meta") else []))


MOST_ROWS = 20_000  # maximum number of rows of a comparison on a page, slowest rows first
COLUMNS = ("verdict", "op", "shapes", "mode", "variant", "base_us", "new_us", "ratio", "low", "high", "reason")


def describe_comparisons(runs: Mapping[str, Results], gates: Sequence[str]) -> Iterator[dict[str, Any]]:
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
