"""Printed report of an accuracy replay."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import IO, TYPE_CHECKING

from opgrip.cli.command import counted, printable
from opgrip.cli.terminal import print_line
from opgrip.display.tables import TableColumn, print_table

if TYPE_CHECKING:
    from opgrip.replay.sequences.accuracy.attribution import Attribution
    from opgrip.replay.sequences.accuracy.judge import AccuracyResult, CallError

EXPORTED = 5  # maximum number of calls for which commands are printed
NAMED = 3  # maximum number of operators or modules that the last line names
MOST_ERRORS = 10  # default number of calls and of modules that are printed
MOST = 1e30  # relative error of results that are not finite


def print_accuracy(judged: AccuracyResult, most: int, file: IO[str], trace: str, mode_of: Callable[[str], str]) -> None:
    """Print the errors, and last the calls that explain those of the results, with commands that export these calls.

    mode_of : function that returns the mode in which the script of an operator shows its error, or an empty text
    """
    print_line(_heading(judged), file)
    calls = [call for call in judged.calls if call.units or call.accumulated or call.is_lost]
    calls.sort(
        key=(lambda call: (-call.is_local, -call.excess))
        if judged.variant
        else lambda call: -(call.magnification or 0.0)
    )
    columns = CALL_COLUMNS if judged.variant else MAGNIFICATION_COLUMNS
    if calls:
        print_table(columns, calls[:most], file, "calls")
        modules = sorted(judged.modules, key=lambda item: -item.left)
        print_table(MODULE_COLUMNS, modules[:most], file, "modules")
    for line in _lines(judged):
        print_line(printable(line), file, indent=2)
    if judged.attribution is not None:
        for line in _commands(judged, judged.attribution, trace, mode_of):
            print_line(line, file)
        print_line(printable(_last_line(judged, judged.attribution)), file)


def _heading(judged: AccuracyResult) -> str:
    what = judged.variant or "inputs changed in their last place"
    in_program = f"; {judged.in_program:,} of them in the variant" if judged.variant else ""
    not_run = f", {counted(judged.not_run, 'call')} not run" if judged.not_run else ""
    replays = counted(judged.passes, "replay")
    return f"{what}: {counted(len(judged.calls), 'call')} compared{in_program}{not_run}, {replays} of the step"


def _lines(judged: AccuracyResult) -> list[str]:
    lines = []
    first, lost = judged.first_beyond, judged.first_lost
    if judged.variant and first is not None:
        lines.append(f"first call beyond the noise: {_named(first)}, relative error {_error(first.accumulated)}")
    elif judged.variant:
        lines.append("no call leaves the noise of rounding")
    if lost is not None:
        lines.append(f"first NaN or infinity that the reference does not have: {_named(lost)}")
    rejoined = Counter(call.rejoined for call in judged.calls if call.rejoined)
    for reason, count in rejoined.most_common(3):
        lines.append(f"{counted(count, 'call')} continued with the reference's results: {reason}")
    for reason, count in Counter(judged.reasons.values()).most_common(3):
        lines.append(f"{counted(count, 'signature')} ran as in the reference: {reason}")
    results = sorted(judged.results, key=lambda item: -item.relative)
    for item in results[:3]:
        name = printable(f"{item.op} ({item.module})" if item.module else item.op)
        lines.append(f"result of call {item.index}, {name}: relative error {_error(item.relative)}")
    if len(results) > 3:
        lines.append(f"{counted(len(results) - 3, 'more result')} with smaller errors")
    return lines


def _commands(judged: AccuracyResult, found: Attribution, trace: str, mode_of: Callable[[str], str]) -> Iterator[str]:
    by_index = {call.index: call for call in judged.calls}
    ops = {by_index[index].signature: by_index[index].op for index in found.calls}
    for number, op in list(ops.items())[:EXPORTED]:
        mode = mode_of(op)
        option = f" --mode {shlex.quote(mode)}" if mode else ""
        yield f"opgrip trace export-case {shlex.quote(trace)} {number}{option} -o case{number}.py"


def _last_line(judged: AccuracyResult, found: Attribution) -> str:
    by_index = {call.index: call for call in judged.calls}
    calls = [by_index[index] for index in found.calls]
    if found.cancelled:
        both = f"both by {_error(found.error)}"
        names = " and ".join(map(_named, calls))
        return f"{names} cancel each other: the first alone changes the results by {_error(found.cancelled)}, {both}"
    count, names = found.count, ", ".join(found.names[:3]) + (", ..." if len(found.names) > 3 else "")
    what = f"{counted(len(found.names), found.kind[:-1])} ({names})"
    if found.kind == "calls":
        ops, modules = dict.fromkeys(found.names), dict.fromkeys(filter(None, (call.module for call in calls)))
        where = f" ({', '.join(modules)})" if 0 < len(modules) <= NAMED else ""
        what = (
            f"{counted(count, 'call')} of {' and '.join(ops) if len(ops) <= NAMED else f'{len(ops)} operators'}{where}"
        )
    explains = "explains" if len(found.names) == 1 else "explain"
    return f"{what} {explains} {100 * found.explained:.0f} % of the results' error"


def _named(call: CallError) -> str:
    return f"call {call.index}, {call.op}{f' ({call.module})' if call.module else ''}"


def _error(value: float) -> str:
    return "infinite" if value >= MOST else f"{value:.2g}"


def _units(value: float) -> str:
    return "NaN or inf" if value >= MOST else f"{value:,.1f}"


_CALL: Sequence[TableColumn] = (
    TableColumn("call", "index", "d"),
    TableColumn("operator", lambda call: printable(call.op)),
    TableColumn("module", lambda call: printable(call.module), rank=1),
    TableColumn("phase", "phase", rank=3),
)
_MAGNIFIED = TableColumn("magnified", "magnification", ",.2f", rank=2)
CALL_COLUMNS = (
    *_CALL,
    TableColumn("local units", lambda call: _units(call.units)),
    TableColumn("explained", lambda call: "no" if call.is_local else "by rounding", rank=1),
    TableColumn("accumulated", lambda call: _error(call.accumulated)),
    TableColumn("noise", lambda call: _error(call.noise), rank=2),
    _MAGNIFIED,
)
MAGNIFICATION_COLUMNS = (*_CALL, TableColumn("relative error", lambda call: _error(call.accumulated)), _MAGNIFIED)
MODULE_COLUMNS = (
    TableColumn("module", lambda item: printable(item.module) or "-"),
    TableColumn("phase", "phase"),
    TableColumn("calls", "calls", ",d", rank=1),
    TableColumn("local units", lambda item: _units(item.units)),
    TableColumn("error in", lambda item: _error(item.entered)),
    TableColumn("error out", lambda item: _error(item.left)),
    TableColumn("magnified", "magnification", ",.2f", rank=2),
)
