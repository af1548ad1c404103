"""Comparisons as printed text, and as files: JSON, CSV, GitHub-flavoured Markdown and JUnit XML."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, fields
from pathlib import Path
from typing import IO

from opgrip.cli.command import printable
from opgrip.cli.output_files import csv_text, whole_file
from opgrip.cli.terminal import print_line, shorten
from opgrip.display.tables import TableColumn, literal, markdown_table, print_table
from opgrip.errors import UserError
from opgrip.replay.reports.comparison.comparison import (
    CHANGED,
    FAILED,
    MISSING,
    UNTIMED,
    Comparison,
    ComparisonColumns,
    Gate,
    Held,
    Outcome,
    advice,
    describe,
    exit_status,
    hold_all,
    origin,
    rows_of,
    rows_with_results,
    summary,
    total_line,
)
from opgrip.replay.reports.comparison.unpaired_ratio import CONFIDENCE, Verdict, interval_text
from opgrip.replay.reports.result_files import Suite, Test, write_suites
from opgrip.replay.results.results import Result

INTERVAL = f"{CONFIDENCE:.0%} interval"
STYLES = {"SLOWER": "bold red", "FAILED": "bold red", "CHANGED": "bold red", "FASTER": "green", "UNSURE": "yellow"}
BECAUSE = "because"
QUIET = {Verdict.SAME.value, Verdict.UNSURE.value, UNTIMED}  # verdicts of rows that are shown only on request
OUTCOMES = {Outcome.PASSED: "green", Outcome.FAILED: "bold red", Outcome.NOT_DECIDED: "yellow"}


def print_comparison(
    comparison: Comparison, file: IO[str], by: str | None = None, all_rows: bool = False, held: Sequence[Held] = ()
) -> None:
    for name, header in (("base", comparison.base), ("new", comparison.new)):
        print_line(f"{name:<8}{printable(origin(header))}", file)
    for name, old, new in comparison.differs:
        print_line(
            f"{printable(name)} differs: {printable(old)} in the base, {printable(new)} in the new run", file, "yellow"
        )
    if by is not None:
        _print_groups(comparison, by, file)
    rows = list(rows_of(comparison)) if all_rows else shown_rows(comparison)
    if rows:
        columns = [column for column in COLUMNS if column.heading != BECAUSE]
        print_table(columns, rows, file, style=lambda row: STYLES.get(row.verdict))
    # print reasons below the table, because a narrow terminal has no space for them in a column
    for line in _reasons(rows):
        print_line(line, file)
    print_line(summary(comparison), file, "bold")
    for total in comparison.totals():
        print_line(total_line(total), file)
    for line in advice(comparison):
        print_line(line, file)
    for item in held:
        print_line(item.line, file, OUTCOMES[item.outcome])


def shown_rows(comparison: Comparison) -> list[ComparisonColumns]:
    """Return the rows whose verdict means a change."""
    return [row for row in rows_of(comparison) if row.verdict not in QUIET]


def _reasons(rows: Sequence[ComparisonColumns]) -> list[str]:
    operators: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.reason and row.verdict not in QUIET:
            operators.setdefault((row.verdict, row.reason), []).append(row.op)
    return [
        f"{verdict} {shorten(ops[0])}{f' and {len(ops) - 1:,} more' if len(ops) > 1 else ''}: {printable(reason)}"
        for (verdict, reason), ops in operators.items()
    ]


def _print_groups(comparison: Comparison, by: str, file: IO[str]) -> None:
    columns = [
        TableColumn("verdict", lambda total: total.judgement.verdict.value),
        TableColumn(by, "name"),
        TableColumn("cases", "cases", ",d", rank=3),
        TableColumn("base ms", lambda total: total.base_us / 1e3, ",.2f"),
        TableColumn("new ms", lambda total: total.new_us / 1e3, ",.2f"),
        TableColumn("ratio", lambda total: total.judgement.ratio, ".3f"),
        TableColumn(INTERVAL, lambda total: interval_text(total.judgement.low, total.judgement.high), ">", rank=1),
    ]
    print_table(columns, comparison.totals(by), file, style=lambda total: STYLES.get(total.judgement.verdict.value))


def _time(value: float | None) -> str | None:
    return None if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.2f}"


# columns of the printed table
COLUMNS = (
    TableColumn("verdict", "verdict"),
    TableColumn("operator", "op", least=24),
    TableColumn("mode", "mode", rank=3),
    TableColumn("variant", lambda row: row.variant or None, when=lambda row: row.variant),
    TableColumn("shapes", "shapes", below=True),
    TableColumn("count", "count", ",d", rank=4),
    TableColumn("base us", lambda row: _time(row.base_us), ">"),
    TableColumn("new us", lambda row: _time(row.new_us), ">"),
    TableColumn("ratio", "ratio", ".3f"),
    TableColumn(INTERVAL, lambda row: interval_text(row.low, row.high) if row.low and row.high else None, ">", rank=1),
    TableColumn("more runs", lambda row: row.more_runs or None, ">", rank=2),
    TableColumn(BECAUSE, lambda row: row.reason or "", rank=5, when=lambda row: row.reason),
)


Gates = Sequence[Gate]
MARKS = {"SLOWER": "🔴", "FAILED": "🔴", "CHANGED": "🔴", "MISSING": "🟠", "FASTER": "🟢", "UNSURE": "🟡"}
WORSE = ("SLOWER", FAILED, CHANGED, MISSING)  # verdicts that fail a JUnit test without gates
# verdicts of the rows that a gate limits in number, by name of the gate
COUNTED = {"failed": FAILED, "changed": CHANGED, "missing": MISSING}
# JUnit elements by outcome; CI services distinguish an error from a failed test
JUNIT = {Outcome.PASSED: "", Outcome.FAILED: "failure", Outcome.NOT_DECIDED: "error"}
ROWS = 100  # maximum number of rows of a Markdown table, because GitHub truncates text at 65,536 characters


def write_comparisons(comparisons: Sequence[Comparison], gates: Gates, path: Path, force: bool) -> None:
    write = form_for(path)
    with whole_file(path, force) as file:
        file.write(write(comparisons, gates).encode(errors="backslashreplace"))


def form_for(path: Path) -> Callable[[Sequence[Comparison], Gates], str]:
    if path.suffix not in FORMS:
        raise UserError(f"{path} has no known suffix", f"end its name in {', '.join(FORMS)}")
    return FORMS[path.suffix]


def as_markdown(comparisons: Sequence[Comparison], gates: Gates) -> str:
    return "\n".join(_markdown(item, gates) for item in comparisons)


def _markdown(comparison: Comparison, gates: Gates) -> str:
    held = hold_all(gates, comparison)
    worst = next((item.value for item in Outcome if held and item.exit_status == exit_status(held)), "")
    title = "opgrip compare" + (f": {worst}" if worst else "")
    lines = [f"### {title}", "", _cell(summary(comparison)), ""]
    lines += [f"- base: {_cell(origin(comparison.base))}", f"- new: {_cell(origin(comparison.new))}"]
    lines += [f"- **{_cell(name)}**: {_cell(old)}, now {_cell(new)}" for name, old, new in comparison.differs]
    lines += [f"- {total_line(total)}" for total in comparison.totals()]
    lines += [f"- {literal(line)}" for line in advice(comparison)]
    lines += [
        f"- `gate {item.gate.text}: {item.outcome.value}`" + (f": {literal(item.reason)}" if item.reason else "")
        for item in held
    ]
    rows = shown_rows(comparison)
    if rows:
        mark = TableColumn("", lambda row: MARKS.get(row.verdict, ""))
        lines += ["", *markdown_table([mark, *COLUMNS], rows[:ROWS])]
        if len(rows) > ROWS:
            lines.append(f"\n{len(rows) - ROWS:,} more rows")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return literal(shorten(text))


def as_json(comparisons: Sequence[Comparison], gates: Gates) -> str:
    return json.dumps([_plain(item, gates) for item in comparisons], indent=1, ensure_ascii=False) + "\n"


def _plain(comparison: Comparison, gates: Gates) -> dict[str, object]:
    return {
        "base": dict(comparison.base),
        "new": dict(comparison.new),
        "differs": [dict(zip(("name", "base", "new"), item, strict=True)) for item in comparison.differs],
        "verdicts": {verdict.value: count for verdict, count in comparison.counts.items()},
        "total": [{**asdict(total), "judgement": _judgement(total.judgement)} for total in comparison.totals()],
        "gates": [
            {
                "gate": item.gate.text,
                "outcome": item.outcome.value,
                "line": item.line,
                "rows": list(map(describe, item.rows)),
            }
            for item in hold_all(gates, comparison)
        ],
        "rows": [asdict(row) for row in rows_of(comparison)],
    }


def _judgement(judgement: object) -> dict[str, object]:
    return {name: getattr(judgement, name) for name in ("ratio", "low", "high", "probability")} | {
        "verdict": judgement.verdict.value  # type: ignore[attr-defined]
    }


def as_csv(comparisons: Sequence[Comparison], gates: Gates) -> str:
    names = ("comparison", *(item.name for item in fields(ComparisonColumns)))
    rows = ((number, *astuple(row)) for number, one in enumerate(comparisons) for row in rows_of(one))
    return csv_text(names, rows)


def as_junit(comparisons: Sequence[Comparison], gates: Gates) -> str:
    text = io.StringIO()
    write_suites([_suite(comparison, gates) for comparison in comparisons], text)
    return text.getvalue()


def _suite(comparison: Comparison, gates: Gates) -> Suite:
    held = hold_all(gates, comparison)
    outcomes = {
        (COUNTED.get(item.gate.name, ""), id(row)): JUNIT[item.outcome]
        for item in sorted(held, key=lambda item: item.outcome is Outcome.FAILED)
        for row in item.rows
        if item.outcome is not Outcome.PASSED
    }
    tests = [_test(cells, row, outcomes if gates else None) for cells, row in rows_with_results(comparison)]
    tests += [Test("gates", item.gate.text, 0.0, JUNIT[item.outcome], item.line) for item in held]
    facts = {"base": origin(comparison.base), "new": origin(comparison.new)}
    return Suite("opgrip compare", tests, facts | {f"gate {item.gate.text}": item.line for item in held})


def _test(cells: ComparisonColumns, row: Result, outcomes: dict[tuple[str, int], str] | None) -> Test:
    is_skipped = cells.verdict in ("ADDED", "UNTIMED") or (cells.verdict == "UNSURE" and outcomes is None)
    outcome = "skipped" if is_skipped else ""
    if outcomes is None:
        outcome = "failure" if cells.verdict in WORSE else outcome
    else:
        gated = cells.verdict if cells.verdict in COUNTED.values() else ""
        outcome = outcomes.get((gated, id(row)), outcomes.get(("", id(row)), outcome))
    ratio = cells.reason or ""
    if cells.ratio:
        ratio = f"{cells.ratio:.3f} times ({interval_text(cells.low or 0.0, cells.high or 0.0)})"
    name = " ".join(filter(None, (cells.op, cells.shapes, f"({cells.variant})" if cells.variant else "")))
    return Test(cells.mode, name, (cells.new_us or 0.0) / 1e6, outcome, f"{cells.verdict}: {ratio}")


FORMS: dict[str, Callable[[Sequence[Comparison], Gates], str]] = {
    ".json": as_json,
    ".csv": as_csv,
    ".md": as_markdown,
    ".xml": as_junit,
}
