"""Output of long-tail functions as a text table and as a file of rows."""

from __future__ import annotations

import csv
import io
from dataclasses import asdict, fields
from pathlib import Path
from typing import IO

from opgrip.cli.command import DEVICE_TIME, counted, printable
from opgrip.cli.output_files import write_json, write_text
from opgrip.cli.terminal import print_line
from opgrip.display.tables import TableColumn, print_table
from opgrip.traces.analysis.longtail.functions import LongTail, LongTailFunction

MOST_OMITTED = 5
"""maximum number of functions that are named although they are not recommended"""


def print_longtail(longtail: LongTail, top: int, file: IO[str]) -> None:
    """Print one line of totals, then a table of functions, largest saving first.

    Parameters
    ----------
    top : maximum number of rows
    """
    ranked = longtail.functions
    saving = sum(item.saving_ns for item in ranked)
    head = (
        f"{counted(len(ranked), 'long-tail function')} in {counted(longtail.traces, 'trace')} of "
        f"{counted(longtail.launches, 'call')}: one kernel in place of each saves at most {saving / 1e6:,.1f} ms of "
        f"{longtail.wall_ns / 1e6:,.1f}, at {' and '.join(f'{speed / 1e9:,.1f}' for speed in longtail.bandwidths)} GB/s"
    )
    print_line(head, file)
    if longtail.device_launches:
        print_line(f"{DEVICE_TIME}: {longtail.device_launches:,} of them; host ms is the time on the host", file)
    shown = ranked[:top]
    rows = [(item, longtail.wall_ns) for item in shown]
    columns = [column for column in COLUMNS if column.heading != "host ms" or longtail.device_launches]
    print_table(columns, rows, file)
    if longtail.omitted:
        names = [f"{pattern} ({reason})" for pattern, reason in longtail.omitted.items()]
        more = f" and {len(names) - MOST_OMITTED} more" if len(names) > MOST_OMITTED else ""
        print_line(f"left out, as not worth gripping: {', '.join(names[:MOST_OMITTED])}{more}", file)


def _launches(item: LongTailFunction) -> str:
    calls = max(item.calls, 1)
    backward = f"+{item.backward_launches / calls:.0f}" if item.backward_launches else ""
    return f"{item.launches / calls:.0f}{backward}"


def _ms(heading: str, name: str, rank: int, form: str = ",.2f") -> TableColumn:
    return TableColumn(heading, lambda row: getattr(row[0], name) / 1e6, form, rank)


COLUMNS = (
    _ms("saves ms", "saving_ns", 0),
    TableColumn("share", lambda row: row[0].saving_ns / max(row[1], 1), ".2%", rank=1),
    TableColumn("calls", lambda row: row[0].calls, ",d", rank=1),
    TableColumn("ops/call", lambda row: _launches(row[0]), ">", rank=1),
    _ms("ops ms", "operator_ns", 2),
    _ms("between ms", "between_ns", 2),
    _ms("host ms", "host_ns", 2),
    TableColumn("backward", lambda row: row[0].backward_ns / max(row[0].wall_ns, 1), ".0%", rank=4),
    _ms("in+out MB", "bytes", 3),
    _ms("fused ms", "fused_ns", 3, ",.3f"),
    TableColumn("function", lambda row: row[0].name, least=24),
    TableColumn("grip it with", lambda row: row[0].command, below=True, is_command=True, most=1000),
)
"""columns of a function's row, and the time of all traces"""


def write_rows(longtail: LongTail, path: Path, force: bool) -> None:
    """Write all functions with all their figures to a `.json` or `.csv`, one object or row each."""
    rows = [{**asdict(item), "wall_ns": item.wall_ns, "saving_ns": item.saving_ns} for item in longtail.functions]
    if path.suffix == ".json":
        facts = {"traces": longtail.traces, "calls": longtail.launches, "wall_ns": longtail.wall_ns}
        facts["device_calls"] = longtail.device_launches
        write_json({**facts, "bandwidths": longtail.bandwidths, "functions": rows}, path, force)
        return
    text = io.StringIO()
    names = [*(item.name for item in fields(LongTailFunction)), "wall_ns", "saving_ns"]
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(
        {name: printable(cell) if isinstance(cell, str) else cell for name, cell in row.items()} for row in rows
    )
    write_text(text.getvalue(), path, force)
