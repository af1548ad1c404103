"""What results are held against: times of each case of each trace on one machine, as a small file.

::

    {"format": 1, "about": {...}, "traces": {"NAME": {"model": ..., "trace_hash": ..., "cases": [
        ["<key>", <count>, <median_us>, <deviation of its logarithm>], ...]}}}

A case without a time there has null in its place.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from opgrip.cli.command import counted, printable
from opgrip.cli.output_files import Damage, compress_to, read_chunks, whole_file
from opgrip.errors import UserError
from opgrip.replay.cases.variants import FORWARD
from opgrip.replay.modes import EAGER
from opgrip.replay.outcome import Results
from opgrip.replay.results.origins import Origin, origin_in, origin_of
from opgrip.replay.results.results import OK, SETTINGS, SKIPPED, UNUSUAL, Result
from opgrip.traces.schema.limits import check_nesting
from opgrip.traces.zoo import manifest
from opgrip.zoo.scoring.spread import MOST_DEVIATION, deviation_of

FORMAT = 1
SHIPPED = ("baseline.json.zst", "baseline.json")
"""Beside the manifest's code: the baseline of the zoo."""
MOST_BYTES = 1 << 25
"""Of a baseline: a hundred traces have some five million, and each byte takes twenty in memory."""
LEAST_US, MOST_US = 1e-6, 1e15
"""Between these are times and numbers of calls."""
OF_MACHINE = ("machine", "processor", "processors", "threads", "system", "python", "versions")
"""What a baseline keeps of the environment of its results."""
Key = tuple[str, int]
"""A case's key, and its place among those of its trace that are called alike."""


@dataclass(frozen=True, slots=True)
class BaselineCase:
    """A case there.

    Attributes
    ----------
    count : calls in the program
    median_us : None where it was not ok
    deviation : standard deviation of the logarithm of the median
    """

    count: int
    median_us: float | None
    deviation: float = 0.0

    @property
    def total_us(self) -> float:
        """Of all its calls."""
        return self.count * (self.median_us or 0.0)


@dataclass(frozen=True, slots=True)
class BaselineTrace:
    """A trace there.

    Attributes
    ----------
    trace_hash : of the file
    """

    origin: Origin
    trace_hash: str
    cases: Mapping[Key, BaselineCase]

    @property
    def total_us(self) -> float:
        """Predicted time of its program: of all its calls."""
        return sum(case.total_us for case in self.cases.values())


@dataclass(frozen=True, slots=True)
class Baseline:
    """Times of a machine.

    Attributes
    ----------
    about : the machine, the device and versions
    """

    about: Mapping[str, Any] = field(default_factory=dict)
    traces: Mapping[str, BaselineTrace] = field(default_factory=dict)

    @property
    def machine(self) -> str:
        """In a few words."""
        about = self.about
        parts = (about.get("processor") or about.get("machine"), about.get("device"), _torch(about))
        threads = counted(about["threads"], "thread") if isinstance(about.get("threads"), int) else None
        return ", ".join(str(part) for part in (*parts, threads) if part) or "a machine that it does not name"


def _torch(about: Mapping[str, Any]) -> str | None:
    return f"torch {about['torch']}" if "torch" in about else None


def keyed(rows: Iterable[Result]) -> Iterator[tuple[Key, Result]]:
    """Rows of one trace and way with what joins them with those of other runs."""
    seen: Counter[str] = Counter()
    for row in rows:
        name = row.key or f"{row.op} {row.shapes}"
        yield (name, seen[name]), row
        seen[name] += 1


def baseline_of(results: Results) -> Baseline:
    """What results of several traces say as a baseline: their rows under eager, as they were recorded.

    Raises
    ------
    UserError : where they have no such rows, have times that no machine takes, or are of options that decide what times
        are
    """
    if unusual := unusual_in(results):
        raise UserError(f"these results are of {', '.join(unusual)}", "a baseline is of a replay without such options")
    rows_of: dict[str, list[Result]] = {}
    for row in results:
        if row.trace and is_plain(row) and row.status != SKIPPED:
            rows_of.setdefault(row.trace, []).append(row)
    if not rows_of:
        problem = "these results have no rows of several traces, run as they were recorded"
        raise UserError(problem, "make some with opreplay zoo -o results.parquet")
    facts = results.header.get("traces") or {}
    traces = {}
    for name, rows in rows_of.items():
        about = facts.get(name)
        trace_hash = about.get("trace_hash") if isinstance(about, Mapping) else None
        cases = {key: _case(row) for key, row in keyed(rows)}
        traces[name] = BaselineTrace(origin_of(rows[0]), str(trace_hash or ""), cases)
    return Baseline(about_of(results), traces)


def about_of(results: Results) -> dict[str, Any]:
    """What results say of the machine, the device and versions."""
    header, environment = results.header, results.header.get("environment") or {}
    about = {name: environment[name] for name in OF_MACHINE if name in environment}
    return about | {name: header[name] for name in ("time", "torch", "device", "accelerator") if name in header}


def added(baseline: Baseline, more: Baseline) -> Baseline:
    """A baseline with the traces of another one too, which take the place of its own.

    Raises
    ------
    UserError : where they are of different machines, devices, numbers of threads or versions of torch
    """
    if baseline.machine != more.machine:
        problem = f"the baseline is of {baseline.machine}, these results of {more.machine}"
        raise UserError(problem, "a baseline is of one machine: replay there")
    return Baseline(more.about, {**baseline.traces, **more.traces})


def unusual_in(results: Results) -> list[str]:
    """The options, in words, that decided what the rows of results are and that these do not tell."""
    settings = results.header.get(SETTINGS) or {}
    words = [f"{name} {value}" for name, value in settings.items() if name not in ("seed", "pin", "processors")]
    return words + [str(word) for word in results.header.get(UNUSUAL) or ()]


def is_time(us: float | None) -> bool:
    """Whether so many microseconds are a time that something takes: a stranger's file can say any number."""
    return us is not None and LEAST_US < us < MOST_US


def is_of_program(row: Result) -> bool:
    """Whether a program runs such a thing: no gradients alone, no other batch or dtype, no several at once."""
    is_as_recorded = not row.dtype and not row.tune
    return row.direction == FORWARD and row.batch_scale == row.streams == 1 and is_as_recorded


def is_plain(row: Result) -> bool:
    """Whether a row is of a case as it was recorded: eager, on the usual threads, batch, values and caches."""
    return row.mode == EAGER and row.direction == FORWARD and not row.variant


def _case(row: Result) -> BaselineCase:
    is_timed = row.status == OK and bool(row.median_us)
    try:
        return _checked_case(row.count, row.median_us if is_timed else None, deviation_of(row) if is_timed else 0.0)
    except ValueError as error:
        what = f"{printable(row.op)} of {printable(row.trace)} has a number of calls or a time that no machine has"
        raise UserError(what, "replay it again") from error


def read_baselines(path: Path | None = None) -> Baseline:
    """A baseline of a file; of none, the one that ships, which is empty where none does.

    Raises
    ------
    UserError : where the file cannot be read or is none
    """
    if path is None:
        folder = Path(manifest.__file__).parent
        path = next((folder / name for name in SHIPPED if (folder / name).is_file()), None)
    return Baseline() if path is None else _read(path)


def write_baseline(baseline: Baseline, path: Path, force: bool = False) -> None:
    """Write a baseline; a name that ends in `.zst` or `.gz` compresses it."""
    traces = {
        name: {
            **{key: value for key, value in trace.origin.plain().items() if key != "trace" and value},
            "trace_hash": trace.trace_hash,
            "cases": [
                [key, case.count, _digits(case.median_us), _digits(case.deviation, 2)]
                for (key, _), case in trace.cases.items()
            ],
        }
        for name, trace in baseline.traces.items()
    }
    head = json.dumps({"format": FORMAT, "about": baseline.about})[:-1]
    text = f"{head},\n" + '"traces": {' + ",\n".join(_lines(traces)) + "}}\n"
    with whole_file(path, force) as file:
        sink = compress_to(file, path.name)
        sink.write(text.encode())
        if sink is not file:
            sink.flush()
            sink.close()


def _lines(traces: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Each trace, a line a case, which a tool that compares lines can follow."""
    for name, about in traces.items():
        facts = json.dumps({key: value for key, value in about.items() if key != "cases"})[:-1]
        cases = ",\n".join(json.dumps(case, separators=(",", ":")) for case in about["cases"])
        yield f'{json.dumps(name)}: {facts}, "cases": [\n{cases}]}}'


def _digits(value: float | None, digits: int = 5) -> float | None:
    return None if value is None else float(f"{value:.{digits}g}")


def _read(path: Path) -> Baseline:
    try:
        content = _content(path)
        document = json.loads(content)
        check_nesting(content, document)
        if document["format"] > FORMAT:
            raise UserError(f"{path} is of a newer opgrip", "install that")
        traces = {str(name): _trace(str(name), plain) for name, plain in document["traces"].items()}
        return Baseline(dict(document.get("about") or {}), traces)
    except (Damage, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise UserError(f"{path} is no baseline", "write one with opgrip zoo baseline") from error


def _content(path: Path) -> bytes:
    chunks, size = [], 0
    for chunk in read_chunks(path):
        chunks.append(chunk)
        size += len(chunk)
        if size > MOST_BYTES:
            raise UserError(f"{path} is larger than a baseline is", "write one with opgrip zoo baseline")
    return b"".join(chunks)


def _trace(name: str, plain: Mapping[str, Any]) -> BaselineTrace:
    seen: Counter[str] = Counter()
    cases: dict[Key, BaselineCase] = {}
    for key, count, median_us, deviation in plain["cases"]:
        cases[str(key), seen[str(key)]] = _checked_case(count, median_us, deviation)
        seen[str(key)] += 1
    return BaselineTrace(origin_in(name, plain), str(plain.get("trace_hash")), cases)


def _checked_case(count: Any, median_us: Any, deviation: Any) -> BaselineCase:
    numbers: Sequence[Any] = [count, deviation or 0.0, 1.0 if median_us is None else median_us]
    if any(isinstance(item, bool) or not isinstance(item, int | float) for item in numbers):
        raise ValueError("no number")
    if any(not isfinite(item) for item in numbers) or not 0 <= numbers[1] <= MOST_DEVIATION:
        raise ValueError("a number that is no measurement's")
    if not 0 <= count < MOST_US or not is_time(numbers[2]):
        raise ValueError("a number that no time has")
    return BaselineCase(int(count), None if median_us is None else float(median_us), float(deviation or 0.0))
