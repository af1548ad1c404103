"""Comparisons as rows, as a data frame, as HTML for notebooks, and as printed text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import IO, Any

import pandas as pd

from opgrip.cli.command import counted, printable
from opgrip.cli.terminal import print_line, shorten
from opgrip.display.figures import as_html
from opgrip.display.tables import TableColumn, print_table
from opgrip.replay.operators.lookup import family_of
from opgrip.replay.reports.comparison.comparison import UNREADABLE, Comparison, Pair, Total
from opgrip.replay.reports.comparison.gate import Held, Outcome
from opgrip.replay.reports.comparison.unpaired_ratio import CONFIDENCE, Verdict, interval_text
from opgrip.replay.results.columns import Columns, column, columns_in
from opgrip.replay.results.results import OK, Result


def origin(header: Mapping[str, Any]) -> str:
    environment = header.get("environment", {})
    parts = (
        header.get("trace"),
        environment.get("machine"),
        header.get("device"),
        f"torch {header['torch']}" if "torch" in header else None,
        header.get("time"),
    )
    return ", ".join(str(part) for part in parts if part) or "a file that does not state its origin"


def summary(comparison: Comparison) -> str:
    counts = [f"{comparison.counts[verdict]:,} {verdict.value}" for verdict in Verdict if comparison.counts[verdict]]
    others = {
        "no longer ok": comparison.broken,
        "with other results": comparison.changed,
        "not timed": comparison.untimed,
        "missing": comparison.missing,
        "ok again": comparison.fixed,
        "new": comparison.added,
    }
    counts += [f"{len(rows):,} {word}" for word, rows in others.items() if rows]
    return f"{counted(len(comparison.pairs), 'case')} timed in both: {', '.join(counts) or 'none'}"


def total_line(total: Total) -> str:
    judgement = total.judgement
    interval = f"{judgement.ratio:.3f} times ({interval_text(judgement.low, judgement.high)})"
    times = f"{total.base_us / 1e3:,.2f} ms, now {total.new_us / 1e3:,.2f} ms"
    return f"all calls of these cases: {times}, {interval}: {judgement.verdict.value}"


def advice(comparison: Comparison) -> Iterator[str]:
    unsure = [pair for pair in comparison.pairs if pair.verdict is Verdict.UNSURE]
    unreadable = sum(pair.judgement is None for pair in unsure)
    if unreadable:
        yield f"{counted(unreadable, 'case')}: {UNREADABLE}"
    doubtful = [pair.reason for pair in unsure if pair.judgement is not None and pair.reason]
    if doubtful:
        like = ", or the like" if len(set(doubtful)) > 1 else ""
        yield f"{counted(len(doubtful), 'case')} with a wider interval: {doubtful[0]}{like}"
    more = sorted(pair.more_runs for pair in unsure if pair.more_runs is not None)
    if more:
        half = more[len(more) // 2]
        yield (
            f"{counted(len(more), 'case')} would be decided by more repeats, half of them by {half} "
            "more of each run: opreplay --repeats, or --until-decided BASE"
        )
    lost = sum(pair.more_runs is None and pair.judgement is not None and not pair.reason for pair in unsure)
    if lost:
        verb = "differs" if lost == 1 else "differ"
        yield (
            f"{counted(lost, 'case')} {verb} by about the margin, or by less than a machine's speed "
            "changes between runs"
        )


INTERVAL = f"{CONFIDENCE:.0%} interval"


FAILED, FIXED, CHANGED, MISSING, ADDED = "FAILED", "FIXED", "CHANGED", "MISSING", "ADDED"
UNTIMED = "UNTIMED"  # verdicts of rows without a time in both runs, or with changed results


@dataclass(frozen=True, slots=True)
class ComparisonColumns(Columns):
    verdict: str = column(
        "`SLOWER`, `FASTER`, `SAME` or `UNSURE`; for other rows `FAILED` (results only in the base), "
        "`FIXED` (ok only in the new run), `MISSING`, `ADDED` (only in one run) or `UNTIMED`; `CHANGED` if the results "
        "are no longer right",
        default="",
    )
    op: str = column("name of the operator, sample, module or function", default="")
    shapes: str = column("dtypes and shapes of the arguments, in short form", default="")
    mode: str = column("mode in which the case was run", default="")
    variant: str = column(
        "settings other than the mode, if not the defaults: direction, values, threads, batch, streams, cache",
        default="",
    )
    module: str = column("path of the module that made the calls; a pattern if there are several", default="")
    family: str = column("kind of work of the operator", default="")
    key: str = column(
        "hash of operator, shapes, dtypes and settings, which is the same for equal cases of all traces", default=""
    )
    count: int | None = column("number of calls in the program, according to the base")
    base_us: float | None = column(
        "time of one call in the base: geometric mean over the repeats of their medians, or of their fastest runs if "
        "medians are less reliable",
        "us",
    )
    new_us: float | None = column("time of one call in the new run, computed in the same way", "us")
    ratio: float | None = column("`new_us` divided by `base_us`")
    low: float | None = column("lower end of the 95 % interval of `ratio`")
    high: float | None = column("upper end of the 95 % interval of `ratio`")
    probability: float | None = column("probability that an unchanged case differs by as much", "1")
    more_runs: int | None = column(
        "number of further repeats of each run that would decide the verdict; empty if it is decided or cannot be"
    )
    base_repeats: int | None = column("number of repeats of the base")
    new_repeats: int | None = column("number of repeats of the new run")
    reason: str | None = column("reason for a wider interval, for a missing interval, or for a status other than ok")


def rows_of(comparison: Comparison) -> Iterator[ComparisonColumns]:
    return (cells for cells, _ in rows_with_results(comparison))


def rows_with_results(comparison: Comparison) -> Iterator[tuple[ComparisonColumns, Result]]:
    """Yield (row of the comparison, result row of the new run, or of the base if the new run has none)."""
    worse: list[tuple[str, list[Pair]]] = [(FAILED, [*comparison.broken]), (CHANGED, [*comparison.changed])]
    for word, pairs in worse:
        for pair in pairs:
            yield _row(word, pair.base, pair.new, reason=pair.new.error)
    for row in comparison.missing:
        yield _row(MISSING, row, None)
    for verdict in (Verdict.SLOWER, Verdict.UNSURE, Verdict.SAME, Verdict.FASTER):
        for pair in comparison.pairs:
            if pair.verdict is verdict:
                yield _timed_row(pair)
    for pair in comparison.fixed:
        yield _row(FIXED, pair.base, pair.new, reason=f"was {pair.base.status}")
    for pair in comparison.untimed:
        yield _row(UNTIMED, pair.base, pair.new, reason=_why_untimed(pair.new))
    for row in comparison.added:
        yield _row(ADDED, None, row, reason=None if row.status == OK else _why_untimed(row))


def _why_untimed(row: Result) -> str:
    return f"{row.status}: {row.error}" if row.error else row.status


def _timed_row(pair: Pair) -> tuple[ComparisonColumns, Result]:
    judgement, compared = pair.judgement, pair.compared
    figures: dict[str, Any] = {}
    if judgement is not None and compared is not None:
        figures = {name: getattr(judgement, name) for name in ("ratio", "low", "high", "probability")}
        figures |= {"base_us": compared.base_us, "new_us": compared.new_us}
    return _row(
        pair.verdict.value, pair.base, pair.new, **figures, more_runs=pair.more_runs, reason=pair.reason or None
    )


def _row(word: str, base: Result | None, new: Result | None, **figures: Any) -> tuple[ComparisonColumns, Result]:
    row, latest = base or new, new or base
    assert row is not None, "a row of a comparison is in one of the two runs"
    assert latest is not None, "a row of a comparison is in one of the two runs"
    times = {"base_us": base and base.median_us, "new_us": new and new.median_us}
    cells = ComparisonColumns(
        verdict=word,
        op=row.op,
        shapes=row.shapes,
        mode=row.mode,
        variant=row.variant,
        module=row.module,
        family=family_of(row.op),
        key=row.key,
        count=row.count,
        base_repeats=None if base is None else len(base.repeats or (1,)),
        new_repeats=None if new is None else len(new.repeats or (1,)),
        **(times | figures),
    )
    return cells, latest


HIDDEN = ("module", "family", "key", "probability", "base_repeats", "new_repeats")  # columns that notebooks leave out


def to_frame(comparison: Comparison) -> pd.DataFrame:
    names = [about.name for about in columns_in(ComparisonColumns)]
    return pd.DataFrame([asdict(row) for row in rows_of(comparison)], columns=names)


def to_html(comparison: Comparison) -> str:
    lines = [
        summary(comparison),
        *(total_line(total) for total in comparison.totals()),
        f"base: {origin(comparison.base)}",
        f"new: {origin(comparison.new)}",
        *(f"differs: {name}: {old}, now {now}" for name, old, now in comparison.differs),
        *advice(comparison),
    ]
    frame = to_frame(comparison)
    filled = [name for name in frame if name not in HIDDEN and (frame[name].notna() & (frame[name] != "")).any()]
    return as_html(lines, frame[filled])


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
