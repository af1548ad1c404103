"""Baselines of scores: times of cases on one machine, in a small JSON file."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import fsum, isclose, isfinite, sqrt
from pathlib import Path
from statistics import median
from typing import Any, TypeGuard

import numpy as np

from opgrip.cli.command import counted, printable
from opgrip.cli.output_files import Damage, compress_to, read_chunks, whole_file
from opgrip.errors import UserError
from opgrip.replay.cases.selection import FORWARD
from opgrip.replay.inputs.input_options import RECORDED
from opgrip.replay.modes import EAGER
from opgrip.replay.reports.comparison.unpaired_ratio import DRIFT, SHORT_US, USUAL, estimate
from opgrip.replay.reports.outcome import Results
from opgrip.replay.results.origins import Origin, origin_in, origin_of
from opgrip.replay.results.results import OK, SETTINGS, SKIPPED, UNUSUAL, Result
from opgrip.traces.schema.json_values import check_nesting
from opgrip.traces.zoo import manifest

FORMAT = 1
SHIPPED = ("baseline.json.zst", "baseline.json")  # names of the zoo's baseline in the folder of the manifest's module
MOST_BYTES = 1 << 25  # of a decompressed baseline; a hundred traces need 5 MB, and reading takes twenty times as much
LEAST_US, MOST_US = 1e-6, 1e15  # limits of times in us; the upper one also limits numbers of calls
# fields of a results' environment
OF_MACHINE = ("machine", "processor", "processors", "threads", "system", "python", "versions")
Key = tuple[str, int]  # a case's key, and its index among the cases of its trace with the same key


@dataclass(frozen=True, slots=True)
class BaselineCase:
    """Time of one case in a baseline.

    median_us : median time of a call; None if the case was not ok
    deviation : standard deviation of the logarithm of `median_us`
    """

    count: int
    median_us: float | None
    deviation: float = 0.0

    @property
    def total_us(self) -> float:
        return self.count * (self.median_us or 0.0)


@dataclass(frozen=True, slots=True)
class BaselineTrace:
    origin: Origin
    trace_hash: str
    cases: Mapping[Key, BaselineCase]

    @property
    def total_us(self) -> float:
        return sum(case.total_us for case in self.cases.values())


@dataclass(frozen=True, slots=True)
class Baseline:
    """Times of the cases of several traces on one machine.

    about : names and versions, such as `processor`, `device`, `torch` and `threads`
    """

    about: Mapping[str, Any] = field(default_factory=dict)
    traces: Mapping[str, BaselineTrace] = field(default_factory=dict)

    @property
    def machine(self) -> str:
        """Short text on the machine: processor, device, version of torch and number of threads."""
        about = self.about
        torch = f"torch {about['torch']}" if "torch" in about else None
        parts = (about.get("processor") or about.get("machine"), about.get("device"), torch)
        threads = counted(about["threads"], "thread") if isinstance(about.get("threads"), int) else None
        return ", ".join(str(part) for part in (*parts, threads) if part) or "an unknown machine"


def keyed(rows: Iterable[Result]) -> Iterator[tuple[Key, Result]]:
    counts: Counter[str] = Counter()
    for row in rows:
        name = row.key or f"{row.op} {row.shapes}"
        yield (name, counts[name]), row
        counts[name] += 1


def baseline_of(results: Results) -> Baseline:
    if unusual := unusual_in(results):
        raise UserError(f"these results were made with {', '.join(unusual)}", "replay without these options")
    rows_of: dict[str, list[Result]] = {}
    for row in results:
        if row.trace and is_plain(row) and row.status != SKIPPED:
            rows_of.setdefault(row.trace, []).append(row)
    if not rows_of:
        problem = "these results have no rows of several traces, replayed as recorded"
        raise UserError(problem, "create them with opreplay zoo -o results.parquet")
    facts = results.header.get("traces") or {}
    traces = {}
    for name, rows in rows_of.items():
        about = facts.get(name)
        trace_hash = about.get("trace_hash") if isinstance(about, Mapping) else None
        cases = {key: _case(row) for key, row in keyed(rows)}
        traces[name] = BaselineTrace(origin_of(rows[0]), str(trace_hash or ""), cases)
    return Baseline(about_of(results), traces)


def about_of(results: Results) -> dict[str, Any]:
    header, environment = results.header, results.header.get("environment") or {}
    about = {name: environment[name] for name in OF_MACHINE if name in environment}
    return about | {name: header[name] for name in ("time", "torch", "device", "accelerator") if name in header}


def added(baseline: Baseline, more: Baseline) -> Baseline:
    if baseline.machine != more.machine:
        problem = f"the baseline was measured on {baseline.machine}, these results on {more.machine}"
        raise UserError(problem, "a baseline belongs to one machine: replay on that machine")
    return Baseline(more.about, {**baseline.traces, **more.traces})


def unusual_in(results: Results) -> list[str]:
    settings = results.header.get(SETTINGS) or {}
    words = [f"{name} {value}" for name, value in settings.items() if name not in ("seed", "pin", "processors")]
    return words + [str(word) for word in results.header.get(UNUSUAL) or ()]


def is_time(us: float | None) -> TypeGuard[float]:
    return us is not None and LEAST_US < us < MOST_US


def is_of_program(row: Result) -> bool:
    is_as_recorded = not row.dtype and not row.tune
    return row.direction == FORWARD and row.batch_scale == row.streams == 1 and is_as_recorded


def is_plain(row: Result) -> bool:
    return row.mode == EAGER and row.direction == FORWARD and not row.variant


def _case(row: Result) -> BaselineCase:
    is_timed = row.status == OK and bool(row.median_us)
    try:
        return _checked_case(row.count, row.median_us if is_timed else None, deviation_of(row) if is_timed else 0.0)
    except ValueError as error:
        what = f"{printable(row.op)} of {printable(row.trace)} has an impossible number of calls or time"
        raise UserError(what, "replay it again") from error


def read_baselines(path: Path | None = None) -> Baseline:
    if path is None:
        folder = Path(manifest.__file__).parent
        path = next((folder / name for name in SHIPPED if (folder / name).is_file()), None)
    return Baseline() if path is None else _read(path)


def write_baseline(baseline: Baseline, path: Path, force: bool = False) -> None:
    traces = {
        name: {
            **{key: value for key, value in asdict(trace.origin).items() if key != "trace" and value},
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
            raise UserError(f"{path} was written by a newer opgrip", "install a newer version of opgrip")
        traces = {str(name): _trace(str(name), plain) for name, plain in document["traces"].items()}
        return Baseline(dict(document.get("about") or {}), traces)
    except (Damage, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise UserError(f"{path} is not a baseline", "write one with opgrip zoo baseline") from error


def _content(path: Path) -> bytes:
    chunks, size = [], 0
    for chunk in read_chunks(path):
        chunks.append(chunk)
        size += len(chunk)
        if size > MOST_BYTES:
            raise UserError(f"{path} is too large for a baseline", "write one with opgrip zoo baseline")
    return b"".join(chunks)


def _trace(name: str, plain: Mapping[str, Any]) -> BaselineTrace:
    counts: Counter[str] = Counter()
    cases: dict[Key, BaselineCase] = {}
    for key, count, median_us, deviation in plain["cases"]:
        cases[str(key), counts[str(key)]] = _checked_case(count, median_us, deviation)
        counts[str(key)] += 1
    return BaselineTrace(origin_in(name, plain), str(plain.get("trace_hash")), cases)


def _checked_case(count: Any, median_us: Any, deviation: Any) -> BaselineCase:
    numbers: Sequence[Any] = [count, deviation or 0.0, 1.0 if median_us is None else median_us]
    if any(isinstance(item, bool) or not isinstance(item, int | float) for item in numbers):
        raise ValueError(f"the count, deviation or time of a case is not a number: {numbers}"[:200])
    if any(not isfinite(item) for item in numbers) or not 0 <= numbers[1] <= MOST_DEVIATION:
        raise ValueError(f"expected finite numbers and a deviation of 0 to {MOST_DEVIATION}, got {numbers}"[:200])
    if not 0 <= count < MOST_US or not is_time(numbers[2]):
        raise ValueError(f"the count or time of a case is negative or too large: {numbers}"[:200])
    return BaselineCase(int(count), None if median_us is None else float(median_us), float(deviation or 0.0))


CPU = "cpu"


@dataclass(frozen=True, slots=True)
class Measured:
    way: str
    machine: str = ""
    device: str = ""
    torch: str = ""
    trace: str = ""
    trace_hash: str = ""


def measured_of(results: Results, way: str, rows: Iterable[Result]) -> Measured:
    about = about_of(results)
    if any(row.threads is not None for row in rows):
        # the variant names them
        about.pop("threads", None)
    words = (str(results.header.get(name) or "") for name in ("device", "torch", "trace", "trace_hash"))
    return Measured(way, Baseline(about).machine, *words)


def way_of(row: Result, unusual: Sequence[str]) -> str:
    device = "" if row.device == CPU else row.device
    return ", ".join(filter(None, (row.mode, device, row.variant, *unusual)))


Times = Mapping[tuple[str, str], float]  # time in us by trace and key


def times_of(results: Results) -> Times:
    if unusual := unusual_in(results):
        raise UserError(f"these results were made with {', '.join(unusual)}", "replay the traces without these options")
    _variant_of(results)
    return _medians(
        (row.trace, row.key, time_us)
        for row in results
        if is_plain_but_threads(row) and row.status == OK and row.key and is_time(time_us := row.median_us or 0.0)
    )


def machine_of(results: Results) -> str:
    about, variant = about_of(results), _variant_of(results)
    if variant:
        about.pop("threads", None)
    return ", ".join(filter(None, (Baseline(about).machine, variant)))


def _variant_of(results: Results) -> str:
    variants = list(dict.fromkeys(row.variant for row in results if is_plain_but_threads(row)))
    if len(variants) > 1:
        ways = " and ".join(variant or "as in the program" for variant in variants[:2])
        raise UserError(
            f"these results have several run configurations: {ways}",
            "replay with one value of --threads and one of --cache",
        )
    return variants[0] if variants else ""


def times_of_baseline(baseline: Baseline) -> Times:
    return _medians(
        (name, key, case.median_us)
        for name, trace in baseline.traces.items()
        for (key, _), case in trace.cases.items()
        if case.median_us is not None
    )


def _medians(rows: Iterable[tuple[str, str, float]]) -> Times:
    times: dict[tuple[str, str], list[float]] = {}
    for trace, key, time_us in rows:
        times.setdefault((trace, key), []).append(time_us)
    return {pair: median(values) for pair, values in times.items()}


def is_plain_but_threads(row: Result) -> bool:
    return row.mode == EAGER and row.values == RECORDED and is_of_program(row)


def is_replay_of(times: Times, others: Times) -> bool:
    """Return True if two sets of times agree in most of the cases that both contain."""
    shared = [(time, others[pair]) for pair, time in times.items() if pair in others]
    # two replays have a few equal times by chance, and a baseline rounds to five digits
    return 2 * sum(isclose(*pair, rel_tol=1e-4) for pair in shared) > len(shared)


RESAMPLES, SEED = 10_000, 0  # number of bootstrap samples of the models, and their random seed
DRAWN_AT_ONCE = 1 << 20  # models drawn at a time, because an untrusted file can contain any number of models
MOST_DEVIATION = 10.0  # limit of the deviation of a logarithm; no measurement exceeds it


def deviation_of(row: Result) -> float:
    """Return the standard deviation of the logarithm of a row's median time."""
    estimated = estimate(row)
    if estimated is None:
        return 0.0
    repeats = len(estimated.logs)
    variance, _ = USUAL[(row.median_us or 0.0) < SHORT_US].posterior(estimated.squares, repeats - 1)
    deviation = sqrt((variance + (estimated.within if repeats == 1 else 0.0)) / repeats)
    # this form also replaces NaN
    return deviation if deviation < MOST_DEVIATION else MOST_DEVIATION


@dataclass(frozen=True, slots=True)
class Uncertainty:
    """Uncertainty of a computed time, as standard deviations of its logarithm.

    own : deviation that each measured time causes, by name of the measurement
    drift : deviation from changes in the machine's speed, which all measurements share
    """

    own: Mapping[Hashable, float] = field(default_factory=dict)
    drift: float = 0.0

    @property
    def deviation(self) -> float:
        return sqrt(fsum(part**2 for part in self.own.values()) + self.drift**2)


def of_sum(parts: Iterable[tuple[Hashable, float, float, float]]) -> Uncertainty:
    """Return the uncertainty of a sum of times.

    parts : for each case, the name of its measurement, the time of all its calls, the time of one call in us, and the
        standard deviation of the logarithm of that time
    """
    cases = list(parts)
    total = fsum(time for _, time, _, _ in cases)
    if not total:
        return Uncertainty()
    drift = fsum(time / total * DRIFT[one_us < SHORT_US] for _, time, one_us, _ in cases)
    return Uncertainty(_added((name, time / total * deviation) for name, time, _, deviation in cases), drift)


def of_ratio(first: Uncertainty, second: Uncertainty) -> Uncertainty:
    return Uncertainty({**first.own, **second.own}, sqrt(first.drift**2 + second.drift**2))


def of_mean(parts: Iterable[tuple[float, Uncertainty]]) -> Uncertainty:
    """Return the uncertainty of a weighted geometric mean of times.

    parts : weight and uncertainty of each time; the weights sum to 1
    """
    weighted = list(parts)
    own = _added((name, weight * moved) for weight, part in weighted for name, moved in part.own.items())
    return Uncertainty(own, fsum(weight * part.drift for weight, part in weighted))


def interval_of(models: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """Return the 95 % confidence interval of the weighted geometric mean of the models' scores.

    models : logarithm of the score, and weight, of each model
    """
    if len(models) < 2:
        return None
    logs, weights = (np.array(column) for column in zip(*models, strict=True))
    generator, means = np.random.default_rng(SEED), []
    at_once = max(DRAWN_AT_ONCE // len(models), 1)
    for first in range(0, RESAMPLES, at_once):
        drawn = generator.integers(0, len(models), (min(at_once, RESAMPLES - first), len(models)))
        means.append((logs[drawn] * weights[drawn]).sum(axis=1) / weights[drawn].sum(axis=1))
    low, high = np.exp(np.quantile(np.concatenate(means), (0.025, 0.975)))
    return float(low), float(high)


def _added(parts: Iterable[tuple[Hashable, float]]) -> dict[Hashable, float]:
    sums: dict[Hashable, float] = defaultdict(float)
    for name, moved in parts:
        sums[name] += moved
    return dict(sums)
