"""Comparisons in files: JSON, CSV, GitHub-flavoured Markdown, JUnit XML."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path

from opgrip.replay.comparing.comparison import Comparison
from opgrip.replay.comparing.gate import Gate
from opgrip.replay.comparing.reports.rows import ComparisonColumns, rows_of
from opgrip.replay.comparing.reports.table import QUIET, columns_of
from opgrip.replay.comparing.reports.words import advice, origin, summary, total_line
from opgrip.replay.reports.junit_report import Test, write_tests
from opgrip.traces.command import printable
from opgrip.traces.errors import UserError
from opgrip.traces.folding import shorten
from opgrip.traces.output import whole_file

Gates = Sequence[Gate]
MARKS = {"SLOWER": "🔴", "BROKEN": "🔴", "CHANGED": "🔴", "MISSING": "🟠", "FASTER": "🟢", "UNSURE": "🟡"}
ROWS = 100
"""Of a table in Markdown, which GitHub cuts at 65,536 characters."""


def write_comparisons(comparisons: Sequence[Comparison], gates: Gates, path: Path, force: bool) -> None:
    """Write them as the file's suffix says.

    Raises
    ------
    UserError : for another suffix, or where the file exists and `force` is not given, or cannot be written
    """
    write = form_for(path)
    with whole_file(path, force) as file:
        file.write(write(comparisons, gates).encode(errors="backslashreplace"))


def form_for(path: Path) -> Callable[[Sequence[Comparison], Gates], str]:
    """What makes the text of such a file; `UserError` where its suffix says no form."""
    if path.suffix not in FORMS:
        raise UserError(f"{path} has no known form", f"end its name in {', '.join(FORMS)}")
    return FORMS[path.suffix]


def as_markdown(comparisons: Sequence[Comparison], gates: Gates) -> str:
    """As a comment on a pull request shows it: what came of all, then a table of what changed."""
    return "\n".join(_markdown(item, gates) for item in comparisons)


def _markdown(comparison: Comparison, gates: Gates) -> str:
    offenders = [what for gate in gates for what in gate.offenders(comparison)]
    title = "opgrip compare" + (": " + ("failed" if offenders else "passed") if gates else "")
    lines = [f"### {title}", "", _cell(summary(comparison)), ""]
    lines += [f"- base: {_cell(origin(comparison.base))}", f"- new: {_cell(origin(comparison.new))}"]
    lines += [f"- **{_cell(name)}**: {_cell(old)}, now {_cell(new)}" for name, old, new in comparison.differs]
    lines += [f"- {total_line(total)}" for total in comparison.totals()]
    lines += [f"- {line}" for line in advice(comparison)]
    lines += [f"- gate `{gate.text}`: {_broken(gate, comparison)}" for gate in gates]
    rows = [row for row in rows_of(comparison) if row.verdict not in QUIET]
    if rows:
        columns = columns_of(rows[:ROWS])
        lines += ["", f"| | {' | '.join(column.heading for column in columns)} |", f"|{' --- |' * (len(columns) + 1)}"]
        for row, cells in zip(rows, zip(*(column.cells for column in columns), strict=True), strict=False):
            lines.append(f"| {MARKS.get(row.verdict, '')} | {' | '.join(map(_cell, cells))} |")
        if len(rows) > ROWS:
            lines.append(f"\n{len(rows) - ROWS:,} more rows")
    return "\n".join(lines) + "\n"


def _broken(gate: Gate, comparison: Comparison) -> str:
    offenders = list(gate.offenders(comparison))
    return f"failed by {len(offenders):,}" if offenders else "passed"


def _cell(text: str) -> str:
    """Text of a stranger in a table of Markdown: no markup, no break."""
    shown = shorten(text)
    return "".join(f"\\{character}" if character in "|`*_<>[]\\" else character for character in shown)


def as_json(comparisons: Sequence[Comparison], gates: Gates) -> str:
    """A list of one object a comparison."""
    return json.dumps([_plain(item, gates) for item in comparisons], indent=1, ensure_ascii=False) + "\n"


def _plain(comparison: Comparison, gates: Gates) -> dict[str, object]:
    return {
        "base": dict(comparison.base),
        "new": dict(comparison.new),
        "differs": [dict(zip(("name", "base", "new"), item, strict=True)) for item in comparison.differs],
        "verdicts": {verdict.value: count for verdict, count in comparison.counts.items()},
        "total": [{**asdict(total), "judgement": _judgement(total.judgement)} for total in comparison.totals()],
        "gates": {
            gate.text: [f"{row.op} {row.shapes}: {how}" for row, how in gate.offenders(comparison)] for gate in gates
        },
        "rows": [asdict(row) for row in rows_of(comparison)],
    }


def _judgement(judgement: object) -> dict[str, object]:
    return {name: getattr(judgement, name) for name in ("ratio", "low", "high", "probability")} | {
        "verdict": judgement.verdict.value  # type: ignore[attr-defined]
    }


def as_csv(comparisons: Sequence[Comparison], gates: Gates) -> str:
    """A line a row, the comparisons after each other."""
    text = io.StringIO()
    writer = csv.DictWriter(
        text, ["comparison", *(item.name for item in fields(ComparisonColumns))], lineterminator="\n"
    )
    writer.writeheader()
    for number, comparison in enumerate(comparisons):
        for row in rows_of(comparison):
            cells = {name: printable(cell) if isinstance(cell, str) else cell for name, cell in asdict(row).items()}
            writer.writerow({"comparison": number, **cells})
    return text.getvalue()


def as_junit(comparisons: Sequence[Comparison], gates: Gates) -> str:
    """A test a row, which fails where it breaks a gate; without gates where it is slower, broken or missing."""
    text = io.StringIO()
    for comparison in comparisons:
        broken = {(row.key, row.mode): how for gate in gates for row, how in gate.offenders(comparison)}
        tests = [_test(row, broken, bool(gates)) for row in rows_of(comparison)]
        write_tests("opgrip compare", tests, {"base": origin(comparison.base), "new": origin(comparison.new)}, text)
    return text.getvalue()


def _test(row: ComparisonColumns, broken: dict[tuple[str, str], str], has_gates: bool) -> Test:
    how = broken.get((row.key, row.mode), "") if has_gates else row.verdict if row.verdict in MARKS else ""
    is_bad = bool(how) and how not in ("FASTER", "UNSURE")
    outcome = "failure" if is_bad else "skipped" if row.verdict in ("UNSURE", "ADDED") else ""
    ratio = f"{row.ratio:.3f} times ({row.low:.3f} to {row.high:.3f})" if row.ratio else row.reason or ""
    return Test(
        row.mode, f"{row.op} {row.shapes}".strip(), (row.new_us or 0.0) / 1e6, outcome, f"{row.verdict}: {ratio}"
    )


FORMS: dict[str, Callable[[Sequence[Comparison], Gates], str]] = {
    ".json": as_json,
    ".csv": as_csv,
    ".md": as_markdown,
    ".xml": as_junit,
}
