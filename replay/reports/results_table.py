"""Tables of results and of cases, for a terminal, a pipe or Markdown."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import fsum, inf
from typing import IO, Any

from opgrip.cli.command import DEVICE_TIME, counted, printable
from opgrip.cli.terminal import print_line, shorten
from opgrip.display.tables import TableColumn, literal, markdown_table, print_table
from opgrip.replay.cases.cases import Case
from opgrip.replay.cases.selection import FORWARD
from opgrip.replay.inputs.input_options import RECORDED
from opgrip.replay.modes import EAGER
from opgrip.replay.reports import report
from opgrip.replay.reports.cells import added_columns
from opgrip.replay.reports.fidelity import FACTOR, REASONS
from opgrip.replay.results.columns import columns_in, short
from opgrip.replay.results.ratios import ClusterColumns
from opgrip.replay.results.results import CONTENDED, DIFFERS, IMPOSSIBLE, LAUNCH_BOUND, RAN, Result, describe_shapes
from opgrip.replay.sequences.step_options import SequenceColumns
from opgrip.replay.timing.timing_options import ON_DEVICE

COLUMNS = ("case", "share", "count", "operator", "shapes")


def list_cases(cases: Sequence[Case], file: IO[str]) -> None:
    rows = [COLUMNS]
    for item in cases:
        described = printable(describe_shapes(item.signature))
        rows.append((str(item.number), f"{item.share:.1%}", f"{item.count:,}", printable(item.op), described))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    most = shutil.get_terminal_size().columns if file.isatty() else None
    for case, share, count, operator, shapes in rows:
        numbers = f"{case:>{widths[0]}}  {share:>{widths[1]}}  {count:>{widths[2]}}"
        print(f"{numbers}  {operator:<{widths[3]}}  {shapes}"[:most].rstrip(), file=file)
    print(f"{len(cases)} cases" if len(cases) != 1 else "one case", file=file)


STYLES = {
    "wrong": "bold red",
    "failed": "red",
    "timeout": "red",
    "unsupported": "yellow",
    "skipped": "dim",
    "contended": "yellow",
}
# explanations of the words that can follow the status `ok`
MEANINGS = {
    "unfaithful": "the results have other shapes or dtypes than the recorded ones",
    "noisy": "the middle half of the runs spreads over more than a quarter of the median",
    "slowed": "other processes used the cores, or the GPU's clock was throttled, during most runs",
    IMPOSSIBLE: "this machine needs longer: the candidate leaves work out, or the bytes and operations of this call "
    "are counted wrongly",
    LAUNCH_BOUND: "the device waited for the host in most runs, so the time is that of the launches: "
    "--exec-mode graph times the device",
    **{f"{DIFFERS} ({reason})": meaning for reason, meaning in REASONS.items()},
}
DOUBTFUL = "~"  # mark before doubtful captured times and speed-ups
OF_THESE = "share of these"  # heading of the share of time among the selected calls
SPEED_UP = "speed-up: replayed us of the row that a row is compared with, divided by replayed us of the row itself"
SHORT = 60  # maximum number of characters of operator and shapes in a note
NOTE = 40  # maximum number of characters of a note
QUIETER = "wait until the machine is quiet, leave others a core with --threads 1, or choose idle cores with --pin"
OPERATORS = 3  # maximum number of operators listed with a reason
MOST_INPUTS = 60  # maximum number of rows in a table of the inputs of several traces


def print_results(results: Sequence[Result], file: IO[str], share: str = "share") -> None:
    print_table(table_columns(results, share), results, file, style=lambda result: STYLES.get(result.status))
    for line in _notes(results):
        print_line(line, file)


def print_inputs(results: Sequence[Result], file: IO[str]) -> None:
    inputs = distinct_inputs(results)
    print_results(inputs[:MOST_INPUTS], file, OF_THESE)
    if len(inputs) > MOST_INPUTS:
        print_line(f"and {counted(len(inputs) - MOST_INPUTS, 'more row')}: -o FILE writes all of them", file)


def distinct_inputs(results: Sequence[Result]) -> list[Result]:
    by_input: dict[object, dict[object, list[Result]]] = {}
    for row in results:
        variants = by_input.setdefault(row.key or (row.op, row.shapes), {})
        variants.setdefault(row.identity_without("trace"), []).append(row)
    inputs = [[_joined(rows) for rows in variants.values()] for variants in by_input.values()]
    total_us = fsum(rows[0].captured_total_us or 0.0 for rows in inputs)
    ordered = sorted(inputs, key=lambda rows: min(map(_rank, rows)))
    everything = (row for rows in ordered for row in rows)
    return [replace(row, share=(row.captured_total_us or 0.0) / total_us if total_us else None) for row in everything]


def _joined(rows: Sequence[Result]) -> Result:
    worst = min(rows, key=_rank)
    traces = {row.trace for row in rows}
    return replace(
        worst,
        count=sum(row.count for row in rows),
        captured_total_us=fsum(row.captured_total_us or 0.0 for row in rows),
        trace=worst.trace if len(traces) == 1 else counted(len(traces), "trace"),
    )


def _rank(row: Result) -> tuple[bool, float, float]:
    return row.status in RAN, row.speed_up or inf, -row.count * (row.median_us or 0.0)


def print_reasons(results: Sequence[Result], file: IO[str]) -> None:
    for line in _reasons(results):
        print_line(line, file)


@report(".md")
def write_markdown(results: Sequence[Result], header: Mapping[str, Any], file: IO[str]) -> None:
    origin = _scalars({name: value for name, value in header.items() if not isinstance(value, float)})
    totals = f"the whole step: {_scalars(header['sequence'])}" if "sequence" in header else ""
    paragraphs = [literal(origin), *([literal(totals)] if totals else [])]
    table = "\n".join(markdown_table(table_columns(results), results))
    file.write("\n\n".join([*paragraphs, table]) + "\n")
    for line in _notes(results):
        file.write(f"\n{literal(line)}\n")


def _notes(results: Sequence[Result]) -> list[str]:
    return [
        *(*_clocks(results), *_speed_ups(results), *_doubts(results), *_behaviours(results), *_contended(results)),
        *_reasons(results),
    ]


def _scalars(header: Mapping[str, Any]) -> str:
    shown = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in header.items()}
    return ", ".join(f"{name} {value}" for name, value in shown.items() if isinstance(value, str | int))


def table_columns(results: Sequence[Result], share: str = "share") -> list[TableColumn]:
    # samples have no captured time, and neither do gripped calls
    in_program = any(result.captured_total_us for result in results)
    has_caches = len({result.cache for result in results if result.cache is not None}) > 1
    declared = {about.name: about for about in columns_in(Result)}
    return [
        TableColumn(share, "share", ".1%", rank=3, when=lambda _: in_program),
        TableColumn("trace", "trace", least=12, when=lambda row: row.trace),
        TableColumn("operator", _operator, least=20),
        TableColumn("mode", _mode, least=8, when=lambda row: row.mode != EAGER or row.note),
        declared["threads"].in_table(),
        TableColumn("tune", lambda row: row.tune or None, when=lambda row: row.tune),
        TableColumn("cache", lambda row: row.cache or None, when=lambda _: has_caches),
        *(declared[name].in_table() for name in ("batch_scale", "streams")),
        TableColumn("shapes", "shapes", below=True),
        replace(declared["count"].in_table(), when=lambda row: in_program or row.count != 1),
        TableColumn("captured us", _captured, ">", rank=2, when=lambda _: in_program),
        declared["captured_host_us"].in_table(),
        *(declared[name].in_table(always=True) for name in ("median_us", "p10_us", "p90_us", "mean_us")),
        declared["samples"].in_table(),
        TableColumn("speed-up", _speed_up, ">", rank=1, when=lambda row: row.speed_up),
        replace(declared["first_ms"].in_table(), when=lambda row: row.mode != EAGER),
        replace(declared["peak_bytes"].in_table(), when=lambda row: row.peak_bytes),
        *(declared[name].in_table() for name in ("gflop_per_s", "gb_per_s")),
        *(about.in_table() for about in added_columns() if about.heading),
        TableColumn("status", "marked_status", least=11),
    ]


def _operator(result: Result) -> str:
    return " ".join(
        [result.op, *(word for word in (result.direction, result.values) if word not in (FORWARD, RECORDED))]
    )


def _mode(result: Result) -> str:
    return f"{result.mode} ({shorten(result.note, NOTE)})" if result.note else result.mode


def _speed_up(result: Result) -> str:
    if result.speed_up is None:
        return "-"
    return f"{DOUBTFUL if result.is_speed_up_doubtful else ''}{result.speed_up:.2f}"


def _captured(result: Result) -> str:
    captured = short(result.captured_us) if result.captured_us else "-"
    return f"{DOUBTFUL if result.is_captured_doubtful else ''}{captured}"


def _clocks(results: Sequence[Result]) -> list[str]:
    if not any(result.captured_host_us for result in results):
        return []
    by_device = {
        result.method in ON_DEVICE or SequenceColumns.of(result).replayed_host_us is not None
        for result in results
        if result.median_us is not None
    }
    clocks = " and ".join("the device's clock" if is_so else "the host's" for is_so in sorted(by_device, reverse=True))
    replayed = f"; replayed ones are by {clocks}" if clocks else ""
    return [f"captured {DEVICE_TIME}, captured host us is the time on the host{replayed}"]


def _speed_ups(results: Sequence[Result]) -> list[str]:
    if not any(result.speed_up for result in results):
        return []
    doubt = f"; {DOUBTFUL}: paired runs give a speed-up that differs by over 10 %"
    is_marked = any(result.is_speed_up_doubtful for result in results)
    return [f"{SPEED_UP}{doubt if is_marked else ''}"]


def _doubts(results: Sequence[Result]) -> list[str]:
    lines = []
    if any(result.is_captured_doubtful for result in results):
        lines.append(
            f"{DOUBTFUL} doubtful: from a single call, estimated from a graph's launches, from times that differ by "
            "over a quarter, or disturbed by the capture, slow memory or other processes"
        )
    different = [result.share or 0.0 for result in results if result.differs]
    words = {word for result in results for word in result.doubts.split(", ")}
    if different:
        rows = f"{counted(len(different), 'row')} with {fsum(different):.1%} of the time"
        line = f"{DIFFERS}: {rows} took over {FACTOR} times longer or shorter than in the program"
        lines.append(f"{line}; likely reasons:" if any(word.startswith(f"{DIFFERS} (") for word in words) else line)
    return lines + [f"{word}: {meaning}" for word, meaning in MEANINGS.items() if word in words]


def _behaviours(results: Sequence[Result]) -> Iterator[str]:
    for result in results:
        clusters = ClusterColumns.of(result)
        if clusters.behaviour_shares is not None:
            columns = (clusters.behaviour_shares, clusters.behaviours_captured_us or [], clusters.behaviours_us or [])
            parts = [
                f"{share:.0%} of calls captured {short(captured)}, replayed {short(replayed)} us"
                for share, captured, replayed in zip(*columns, strict=False)
            ]
            mode = "" if result.mode == EAGER else f" {printable(result.mode)}"
            case = shorten(f"{result.op} {result.shapes}", SHORT)
            yield f"{case}{mode}: {'; '.join(parts)}: --split adds a row for each"


def _contended(results: Sequence[Result]) -> list[str]:
    count = sum(result.status == CONTENDED for result in results)
    if not count:
        return []
    rows = f"{counted(count, 'row')} {'is' if count == 1 else 'are'} contended"
    return [f"{rows}: other processes used the cores in all runs, so these times are not used: {QUIETER}"]


def _reasons(results: Sequence[Result]) -> list[str]:
    operators: dict[str, dict[str, int]] = {}
    for result in results:
        if result.error is not None:
            where = "" if result.mode == EAGER else f"{result.mode} "
            counts = operators.setdefault(f"{where}{result.status}: {result.error}", {})
            counts[result.op] = counts.get(result.op, 0) + 1
    return [f"{_names(counts)}: {printable(reason)}" for reason, counts in operators.items()]


def _names(counts: Mapping[str, int]) -> str:
    names = [
        f"{shorten(op)} ({counted(count, 'case')})" if count > 1 else shorten(op)
        for op, count in list(counts.items())[:OPERATORS]
    ]
    more = len(counts) - len(names)
    return ", ".join([*names, *([f"{more} more"] if more else [])])
