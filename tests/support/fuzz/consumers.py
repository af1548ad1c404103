"""Readers of untrusted traces, each of which may raise only `UserError`."""

import ast
import io
import sys
import warnings
import zlib
from collections.abc import Callable, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

from settings import settings_of

from opgrip.errors import UserError
from opgrip.replay.cases.cases import Case, make_cases
from opgrip.replay.cases.flow import make_flow, new_memory
from opgrip.replay.cases.preceding_calls import make_preceding_calls
from opgrip.replay.cases.selection import FUNCTION, MODULE, Selection
from opgrip.replay.cases.subgraphs import make_units
from opgrip.replay.inputs.inputs import Inputs
from opgrip.replay.operators.lookup import Unsupported, find_operator
from opgrip.replay.reports import reports
from opgrip.replay.reports.outcome import write_results
from opgrip.replay.reports.results_table import print_results
from opgrip.replay.run.workload import empty_rows
from opgrip.tools.exports.exported_cases import source_of
from opgrip.tools.opgrip import main
from opgrip.traces import Trace, TraceReader, load
from opgrip.traces.codec.record_forms import to_json
from opgrip.traces.table.live_calls import LiveArguments

LARGE = 3 << 20  # Size of arguments in bytes from which they are not made.
MOST_CASES = 40
MOST_RECORDS = 100_000
FEW = 4
FEW_FOREIGN = 2
MARK = "@"  # Part of a mutant folder's name for files of other tools, followed by the name of the format.


class Unprintable(Exception):
    """Error for a command that printed control sequences of a terminal."""


@contextmanager
def _shown() -> Any:
    streams = sys.stdout, sys.stderr
    sink = io.TextIOWrapper(io.BytesIO(), "utf-8", newline="")
    sys.stdout = sys.stderr = sink
    try:
        yield
        sink.flush()
        text = sink.buffer.getvalue().decode()  # type: ignore[attr-defined]
        strange = next((mark for mark in text if not (mark.isprintable() or mark in "\n\t")), None)
        if strange is not None:
            raise Unprintable(f"{strange!r} was printed: {text[max(0, text.index(strange) - 60) :][:120]!r}")
    finally:
        sys.stdout, sys.stderr = streams


def _verb(*words: str) -> Callable[[Path], None]:
    def consume(path: Path) -> None:
        names = [word.replace("OUT", str(path.parent / "out")) for word in words]
        places = [str(path) if name == "TRACE" else name for name in names]
        with _shown(), suppress(SystemExit):
            main(places)

    consume.__name__ = " ".join(words)
    return consume


def _load(path: Path) -> None:
    trace = load(path)
    repr(trace)
    trace.summary()
    trace._repr_html_()


def _records(path: Path) -> None:
    """Read the records of a file as its original format, even if the mutation made it look like another format."""
    name = format_name_of(path)
    for record in islice(TraceReader(path, format_name=name), MOST_RECORDS):
        to_json(record)


def _cases(path: Path) -> None:
    """Make cases and their inputs as opreplay does, and write rows of them in every form."""
    trace = load(path)
    settings = settings_of(memory_limit=LARGE)
    cases = make_cases(trace)
    for case in cases[:MOST_CASES]:
        _make(case, settings)
    rows = [row for case in cases[:300] for row in empty_rows(case, settings, "skipped", "not run").values()]
    with _shown():
        print_results(rows, sys.stdout)
    for name, form in reports.items():
        if not form.needs:
            write_results(rows, {"trace": str(path)}, path.parent / f"out{name}", force=True)


def _make(case: Case, settings: Any) -> None:
    signature = case.signature
    with suppress(Unsupported):
        find_operator(signature)
        if Inputs.bytes_needed(signature.args, signature.kwargs) < LARGE:
            Inputs(signature.args, signature.kwargs, case.values, settings.place, 0)


def _scripts(path: Path) -> None:
    """Check that scripts of calls are valid Python, whatever text the trace has."""
    trace = load(path)
    for case in make_cases(trace)[:MOST_CASES]:
        with suppress(UserError):
            ast.parse(source_of(trace, case))


def _around(path: Path) -> None:
    trace = load(path)
    new_memory(trace, make_flow(trace))
    make_preceding_calls(trace)


def _units(path: Path) -> None:
    trace = load(path)
    for unit in (MODULE, FUNCTION):
        with suppress(UserError):
            for case in make_units(trace, Selection(unit=unit), unit, ())[:MOST_CASES]:
                with suppress(Unsupported):
                    assert case.operator is not None
                    assert case.operator.function is not None


def _live(path: Path) -> None:
    trace: Trace = load(path)
    live = LiveArguments(trace, {})
    for signature in trace.signatures[:MOST_CASES]:
        if Inputs.bytes_needed(signature.args, signature.kwargs) < LARGE:
            with suppress(UserError):
                live.make((signature.args, signature.kwargs))


CONSUMERS: Sequence[Callable[[Path], None]] = (
    _load,
    _verb("trace", "info", "TRACE", "--partial", *(f"--by={by}" for by in ("op", "module", "function", "line"))),
    _verb("trace", "info", "TRACE", "--partial", *(f"--by={by}" for by in ("device", "stream", "kernel"))),
    _verb("trace", "info", "TRACE", "--partial", "--by=op", "--by=module", "-f", "-o", "OUT.json"),
    _verb("trace", "info", "TRACE", "--partial", "--by=kernel", "-f", "-o", "OUT.csv"),
    _verb("trace", "graph", "TRACE", "--partial", "-f", "-o", "OUT.json"),
    _verb("trace", "timeline", "TRACE", "--partial"),
    _verb("trace", "timeline", "TRACE", "--partial", "-f", "-o", "OUT.json.gz"),
    _verb("trace", "validate", "TRACE", "-f", "-o", "OUT.json"),
    _verb("trace", "cat", "TRACE", "--partial"),
    _verb("trace", "cat", "TRACE", "--partial", "--json", "--module", "*"),
    _verb("trace", "trim", "TRACE", "--partial", "--phase", "forward", "--with-producers", "-f", "-o", "OUT.jsonl"),
    _verb("trace", "trim", "TRACE", "--partial", "--op", "aten.*", "--time", ":1ms", "-f", "-o", "OUT.jsonl.gz"),
    _verb("trace", "diff", "TRACE", "TRACE", "--partial", "-f", "-o", "OUT.json"),
    _verb("trace", "diff", "TRACE", "TRACE", "--partial", "-f", "-o", "OUT.md"),
    _scripts,
    _verb("trace", "merge", "TRACE", "TRACE", "--partial", "-f", "-o", "OUT.jsonl"),
    _verb("trace", "ranks", "TRACE", "--partial", "-f", "-o", "OUT.json"),
    _verb("longtail", "TRACE", "--partial", "--bandwidth", "100", "-f", "-o", "OUT.csv"),
    _verb("longtail", "TRACE", "--partial", "--bandwidth", "100", "-f", "-o", "OUT.json"),
    _cases,
    _around,
    _units,
    _live,
)

# consumers of other tools' files
FOREIGN_CONSUMERS: Sequence[Callable[[Path], None]] = (
    _records,
    _load,
    _verb("trace", "convert", "TRACE", "OUT.jsonl", "-f"),
    _verb("trace", "convert", "TRACE", "OUT.txt", "--to", "tritonbench", "-f", "--report", "OUT.loss.json"),
    _verb("trace", "validate", "TRACE"),
    _verb("trace", "info", "TRACE", "--by=op"),
    _verb("trace", "cat", "TRACE"),
    _cases,
)


def format_name_of(path: Path) -> str | None:
    """Return the original format of a mutant, or None for a trace of opgrip."""
    folders = (name for name in (path.name, path.parent.name) if MARK in name)
    return next((name.partition(MARK)[2] for name in folders), None)


def chosen(path: Path) -> Sequence[Callable[[Path], None]]:
    """Return some consumers of a file: the first and others chosen by its content, so that more files are tried."""
    if format_name_of(path) is not None:
        return [FOREIGN_CONSUMERS[0], *Random(path.name).sample(FOREIGN_CONSUMERS[1:], FEW_FOREIGN)]
    others = Random(zlib.crc32(path.read_bytes())).sample(CONSUMERS[1:], FEW)
    return [CONSUMERS[0], *others]


def consume(path: Path, consumer: Callable[[Path], None]) -> None:
    with warnings.catch_warnings(), suppress(UserError):
        warnings.simplefilter("ignore")
        consumer(path)
