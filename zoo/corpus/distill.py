"""Choice of a few cases that represent many traces, and a check of the times that they predict."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from heapq import heapify, heapreplace
from itertools import count
from math import fsum, isfinite
from pathlib import Path
from typing import IO, Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from opgrip.cli.command import counted
from opgrip.cli.terminal import print_line
from opgrip.display.tables import TableColumn, print_table
from opgrip.errors import UserError
from opgrip.platform.machine import page_size
from opgrip.replay.cases.cases import contexts_of
from opgrip.traces.io.writer import TraceWriter
from opgrip.traces.schema.arguments import numbers_of, with_numbers
from opgrip.traces.schema.records import (
    NO_STORAGE,
    Calls,
    Context,
    End,
    Header,
    Observed,
    Record,
    Scope,
    Signature,
    Thread,
    Values,
)
from opgrip.traces.table.trace import Trace, load
from opgrip.traces.zoo import read_manifest
from opgrip.traces.zoo.manifest import distinct_names, name_of_file
from opgrip.zoo.corpus.corpus import OF_MEMBER, Corpus, Reading, weighted, written_from
from opgrip.zoo.scoring.baselines import Times

PAGE_BYTES = 4096  # page size of the trace that is written


@dataclass(frozen=True, slots=True)
class Surrounding:
    places: int = 1
    before: int = 0


ALONE, IN_PROGRAM = Surrounding(), Surrounding(places=8, before=48)


def write_cases(
    corpus: Corpus,
    keys: Sequence[str],
    path: Path,
    force: bool = False,
    unbounded: bool = False,
    reading: Reading = lambda path: nullcontext(),
    fields: Mapping[str, Any] | None = None,
    surrounding: Surrounding = ALONE,
) -> int:
    """Write a trace with calls of chosen signatures, and return the number of these signatures."""
    numbers = {key: number for number, key in enumerate(keys)}
    chosen = written_from(corpus.frame, keys)
    facts = {"model": {"name": "corpus", "run": "cases"}, "torch": torch.__version__, "steps": 1}
    header = Header({**facts, "page_size": PAGE_BYTES, **(fields or {})})
    numbering = _Numbering(len(keys))
    with TraceWriter(path, header, force) as writer:
        writer.write(Thread(0, "main"))
        for member in corpus.members:
            own = chosen[chosen["trace"] == member.name]
            if not own.empty:
                columns = (own[name].tolist() for name in ("signature", "key", "median_us"))
                cases = {number: (numbers[key], us) for number, key, us in zip(*columns, strict=True)}
                with reading(member.path):
                    trace = load(member.path, True, unbounded)
                for record in _CaseRecords(member.model, trace, cases, numbering).all(surrounding):
                    writer.write(record)
        writer.write(End(numbering.calls, numbering.signatures, numbering.now_ns))
    return len(chosen)


class _Numbering:
    def __init__(self, cases: int) -> None:
        self.calls = self.signatures = self.now_ns = 0
        self.newest = NO_STORAGE
        self.others = count(cases)
        self.values = count()
        self.scopes = count()
        self.storages = count()


class _CaseRecords:
    def __init__(self, model: str, trace: Trace, cases: Mapping[int, tuple[int, float]], numbering: _Numbering) -> None:
        self._model, self._trace, self._chosen, self._new = model, trace, cases, numbering
        self._signatures = {signature.number: signature for signature in trace.signatures}
        self._usual = contexts_of(trace, trace.own_calls)
        self._contexts = {scope.number: trace.contexts.get(scope.context or 0, {}) for scope in trace.scopes}
        self._page = page_size(trace.header) or 0
        self._numbers: dict[tuple[int, bool], int] = {}
        self._scopes: dict[str, int] = {}

    def all(self, surrounding: Surrounding) -> Iterator[Record]:
        for calls, are_cases in _stretches(self._trace.own_calls, self._chosen, surrounding):
            yield from self._definitions(calls, are_cases)
            yield self._block(calls, are_cases)

    def _definitions(self, calls: pd.DataFrame, are_cases: Sequence[bool]) -> Iterator[Record]:
        for number, scope, is_case in zip(calls["signature"].tolist(), calls["scope"].tolist(), are_cases, strict=True):
            settings = self._settings(number, scope, is_case)
            if repr(settings) not in self._scopes:
                index = self._scopes[repr(settings)] = next(self._new.scopes)
                yield Context(index, dict(settings))
                yield Scope(index, self._model, "", "forward", context=index)
            if (number, is_case) not in self._numbers:
                own = self._numbers[number, is_case] = self._chosen[number][0] if is_case else next(self._new.others)
                yield from self._definition(self._signatures[number], own)
                if is_case:
                    yield from self._observed(self._signatures[number], own)

    def _settings(self, number: int, scope: int, is_case: bool) -> Mapping[str, Any]:
        return self._usual.get(number, {}) if is_case else self._contexts.get(scope, {})

    def _definition(self, signature: Signature, own_number: int) -> Iterator[Record]:
        arguments = (signature.args, signature.kwargs)
        values, renumbered = self._values(numbers_of(arguments))
        yield from values
        args, kwargs = with_numbers(arguments, renumbered)
        self._new.signatures += 1
        outputs = _without_values(signature.outputs)
        yield replace(signature, number=own_number, args=args, kwargs=kwargs, outputs=outputs)

    def _observed(self, signature: Signature, own_number: int) -> Iterator[Record]:
        for item in self._trace.observed.get(signature.number, ()):
            values, renumbered = self._values(item.values)
            yield from values
            yield Observed(own_number, renumbered, _without_values(item.outputs))

    def _values(self, numbers: Iterable[int | None]) -> tuple[list[Record], list[int | None]]:
        numbers, own = list(numbers), {}
        own_numbers = dict.fromkeys(number for number in numbers if number is not None and number in self._trace.values)
        for number in own_numbers:
            own[number] = next(self._new.values)
        records: list[Record] = [Values(here, self._trace.values[number]) for number, here in own.items()]
        return records, [None if number is None else own.get(number) for number in numbers]

    def _block(self, calls: pd.DataFrame, are_cases: Sequence[bool]) -> Calls:
        columns = (calls[name].tolist() for name in ("signature", "scope", "time_ns", "perturbed", "page_faults"))
        block = Calls(0, [], [], [], [], calls["tensors"].tolist(), self._memory(calls), self._new.newest)
        for index, (is_case, number, scope, time_ns, is_perturbed, faults) in enumerate(
            zip(are_cases, *columns, strict=True)
        ):
            block.signature.append(self._numbers[number, is_case])
            block.scope.append(self._scopes[repr(self._settings(number, scope, is_case))])
            block.start_ns.append(self._new.now_ns)
            block.duration_ns.append(max(round(self._chosen[number][1] * 1e3 if is_case else time_ns), 1))
            self._new.now_ns += block.duration_ns[-1]
            # all calls of a case get its median time, so they are not marked as perturbed
            if is_perturbed and not is_case:
                block.perturbed.append((index, 1))
            if faults * self._page >= PAGE_BYTES:
                block.page_faults.append((index, faults * self._page // PAGE_BYTES))
        self._new.calls += len(calls)
        self._new.newest = max(self._new.newest, *block.storages, NO_STORAGE)
        return block

    def _memory(self, calls: pd.DataFrame) -> list[int]:
        numbers = {NO_STORAGE: NO_STORAGE}
        memory: list[int] = []
        for first, tensors in zip(calls["first_storage"].tolist(), calls["tensors"].tolist(), strict=True):
            for number in self._trace.storages[first : first + tensors].tolist():
                if number not in numbers:
                    numbers[number] = next(self._new.storages)
                memory.append(numbers[number])
        return memory


def _without_values(outputs: Any) -> Any:
    return with_numbers(outputs, [None] * len(numbers_of(outputs)))


def _stretches(
    calls: pd.DataFrame, chosen_signatures: Mapping[int, object], surrounding: Surrounding
) -> Iterator[tuple[pd.DataFrame, list[bool]]]:
    chosen: list[int] = []
    for _, rows in calls[calls["signature"].isin(list(chosen_signatures))].groupby("signature", sort=False):
        calm = rows[~rows["perturbed"].astype(bool)]
        usual = rows if calm.empty else calm
        steps = np.linspace(0, len(usual) - 1, min(len(usual), surrounding.places)).astype(int)
        chosen += usual.index[steps].tolist()
    for _, own in calls.groupby(["process", "thread"], sort=False, observed=True, dropna=False):
        is_case = own.index.isin(chosen)
        is_written = is_case.copy()
        for index in np.flatnonzero(is_case).tolist():
            is_written[max(0, index - surrounding.before) : index] = True
        edges = np.flatnonzero(np.diff(is_written.astype(np.int8), prepend=0, append=0)).tolist()
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            yield own.iloc[start:end], is_case[start:end].tolist()


Floats = NDArray[np.float64]
Wholes = NDArray[np.int64]
MOST_CANDIDATES = 3000  # maximum number of candidates per group; those with the largest weights are kept
MOST_PAIRS = 250_000_000  # maximum number of similarities in memory, at 4 bytes each
AT_ONCE = 256  # number of candidates that are compared with all points of their group at a time


@dataclass(frozen=True, slots=True)
class Points:
    numbers: Floats
    kinds: Wholes
    category_distance: float = 0.0

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, indices: Any) -> Points:
        return Points(self.numbers[indices], self.kinds[indices], self.category_distance)


def choose(points: Points, groups: Wholes, weights: Floats, count: int) -> list[int]:
    """Return the indices of at most `count` points that represent the others best, the most representative first.

    groups : (N,) group of each point; points of different groups have the similarity 0
    weights : (N,) weight of each point
    """
    most = max(1, min(MOST_CANDIDATES, MOST_PAIRS // max(len(points), 1)))
    order = np.argsort(groups, kind="stable")
    members = np.split(order, np.flatnonzero(np.diff(groups[order])) + 1)
    parts = [_Part(own, points, weights, most) for own in members if len(own)]
    heap = [(-gain, number, index, 0) for number, part in enumerate(parts) for index, gain in enumerate(part.gains)]
    heapify(heap)
    chosen: list[int] = []
    while heap and len(chosen) < min(count, len(points)):
        _, number, index, version = heap[0]
        part = parts[number]
        if index in part.chosen:
            heapreplace(heap, (1.0, number, index, version))
            if heap[0][0] > 0:
                break
        elif version == len(part.chosen):
            part.choose(index)
            chosen.append(int(part.candidates[index]))
            heapreplace(heap, (1.0, number, index, version))
        else:
            heapreplace(heap, (-part.gain(index), number, index, len(part.chosen)))
    return chosen


class _Part:
    def __init__(self, members: Wholes, points: Points, weights: Floats, most: int) -> None:
        heaviest = np.argsort(-weights[members], kind="stable")[:most]
        self.candidates = members[heaviest]
        self.chosen: set[int] = set()
        self._weights = weights[members]
        self._likeness: NDArray[Any] = np.empty((len(self.candidates), len(members)), "f4")
        self.gains: list[float] = []
        for first in range(0, len(self.candidates), AT_ONCE):
            some = slice(first, first + AT_ONCE)
            likeness = np.exp(-distances(points[self.candidates[some]], points[members]))
            self._likeness[some] = likeness
            self.gains.extend((likeness @ self._weights).tolist())
        self._best = np.zeros(len(members))

    def gain(self, place: int) -> float:
        return float(np.clip(self._likeness[place] - self._best, 0, None) @ self._weights)

    def choose(self, place: int) -> None:
        self.chosen.add(place)
        self._best = np.maximum(self._best, self._likeness[place])


def distances(points: Points, others: Points) -> Floats:
    own, theirs = points.numbers, others.numbers
    squares = (own**2).sum(axis=1)[:, None] + (theirs**2).sum(axis=1)[None, :] - 2 * own @ theirs.T
    squares += points.category_distance**2 * (points.kinds[:, None] != others.kinds[None, :])
    lengths: Floats = np.sqrt(np.clip(squares, 0, None))
    return lengths


OF_MODEL = OF_MEMBER[2:]  # columns that describe the model of a trace
VARIETY = 0.1  # share of the total weight that is spread evenly over all cases, whatever their time
SHAPE = re.compile(r"\[([\d,]*)\]")
SHAPES = 3  # number of leading tensors of a case whose sizes are compared
OTHER_OP, OTHER_DTYPE = 6.0, 2.0  # distances between operators and dtypes; a factor of e in time has distance 1
SIZES = 0.5  # weight of a tensor's size in the distance of two cases, relative to that of the time


@dataclass(frozen=True, slots=True)
class Distilled:
    """The cases that represent a corpus.

    keys : keys of the representing cases, the most representative first
    sources : by key, the name of the trace that the case's calls are written from
    times_us : by key, the time of one call in that trace
    weights_us : by trace and key, the total time of the calls in the trace that the case represents
    likeness : mean similarity, from 0 to 1, of the corpus's cases to the cases that represent them
    """

    keys: list[str]
    sources: dict[str, str]
    times_us: dict[str, float]
    weights_us: dict[str, dict[str, float]]
    likeness: float

    def predicted_us(self, trace: str, times_us: Mapping[str, float]) -> float:
        """Return the predicted time in us of a trace on the machine where the cases took `times_us`."""
        weights = self.weights_us[trace]
        timed = [(weight, times_us[key] / self.times_us[key]) for key, weight in weights.items() if key in times_us]
        whole, there = sum(weights.values()), sum(weight for weight, _ in timed)
        return sum(weight * ratio for weight, ratio in timed) * (whole / there) if there else float("nan")

    def field(self, corpus: Corpus, base: str = "") -> dict[str, Any]:
        about = {member.name: member for member in corpus.members}
        index = {key: number for number, key in enumerate(self.keys)}
        traces = {}
        for name, weights in self.weights_us.items():
            member = about[name]
            words = {word: getattr(member, word) for word in OF_MODEL}
            pairs = sorted((index[key], weight) for key, weight in weights.items())
            cases, us = [number for number, _ in pairs], [float(f"{weight:.5g}") for _, weight in pairs]
            traces[name] = {**{word: value for word, value in words.items() if value}, "cases": cases, "us": us}
        facts = {"method": "facility location", **({"base": base} if base else {})}
        return {**facts, "keys": self.keys, "traces": traces}


def named_by_files(corpus: Corpus) -> Corpus:
    manifest = {trace.name: trace for trace in read_manifest()}
    file_names = [name_of_file(member.path, manifest) for member in corpus.members]
    names = dict(
        zip((item.name for item in corpus.members), distinct_names([item.name for item in file_names]), strict=True)
    )
    members = [
        replace(member, **({} if member.name in manifest else item._asdict()) | {"name": names[member.name]})
        for member, item in zip(corpus.members, file_names, strict=True)
    ]
    traces = corpus.frame["trace"].map(names)
    about = {member.name: member for member in members}
    words = {word: traces.map({name: getattr(about[name], word) for name in about}) for word in OF_MODEL}
    return Corpus(corpus.frame.assign(trace=traces, **words), members)


def with_times(corpus: Corpus, times_us: Mapping[tuple[str, str], float]) -> Corpus:
    """Return the corpus with other times of its cases; cases without a new time are dropped."""
    frame = corpus.frame
    median = pd.Series([times_us.get(pair) for pair in zip(frame["trace"], frame["key"], strict=True)], frame.index)
    frame = frame.assign(median_us=median.astype(float))[median.notna()]
    if frame.empty:
        raise UserError(
            "the results do not belong to any of the traces", "replay them: opreplay FOLDER -o results.parquet"
        )
    frame = frame.assign(time_us=frame["count"] * frame["median_us"])
    frame["share"] = frame["time_us"] / frame.groupby("trace")["time_us"].transform("sum")
    return Corpus(weighted(frame), corpus.members, corpus.notes)


def distill(corpus: Corpus, count: int) -> Distilled:
    # the weight of a model comes from its traces that have times
    frame = weighted(corpus.frame[corpus.frame["median_us"] > 0])
    if frame.empty:
        raise UserError("no call of these traces has a time", "use --times with results of a replay")
    cases = _cases(frame)
    weights = (1 - VARIETY) * cases["weight"].to_numpy() + VARIETY / len(cases)
    points = _points(cases)
    ops = pd.factorize(cases["op"])[0].astype(np.int64)
    indices = np.array(choose(points, ops, weights, count))
    nearest, likeness = _assign(points, ops, indices)
    keys = cases.index.to_numpy()
    representatives = dict(zip(keys, keys[indices[nearest]], strict=True))
    sums = frame.assign(by=frame["key"].map(representatives)).groupby(["trace", "by"], sort=False)["time_us"].sum()
    weights_us: dict[str, dict[str, float]] = {}
    for pair, time_us in zip(sums.index.tolist(), sums.tolist(), strict=True):
        weights_us.setdefault(pair[0], {})[pair[1]] = time_us
    chosen = [str(key) for key in keys[indices]]
    written = written_from(frame, chosen).set_index("key")
    sources = {str(key): str(trace) for key, trace in written["trace"].items()}
    times = {str(key): float(time_us) for key, time_us in written["median_us"].items()}
    return Distilled(chosen, sources, times, weights_us, float((cases["weight"].to_numpy() * likeness).sum()))


def _cases(frame: pd.DataFrame) -> pd.DataFrame:
    weight = frame["weight"] * frame["share"]
    cases = (
        frame.assign(weight=weight)
        .groupby("key", sort=False)
        .agg({"op": "first", "dtypes": "first", "shapes": "first", "median_us": "median", "weight": "sum"})
    )
    return cases.assign(weight=cases["weight"] / cases["weight"].sum())


def _points(cases: pd.DataFrame) -> Points:
    sizes = np.zeros((len(cases), SHAPES))
    for row, shapes in enumerate(cases["shapes"]):
        for column, shape in enumerate(SHAPE.findall(shapes)[:SHAPES]):
            sizes[row, column] = sum(np.log(max(float(size), 1.0)) for size in shape.split(",") if size)
    times = np.log(cases["median_us"].to_numpy())[:, None]
    dtypes = pd.factorize(cases["dtypes"])[0].astype(np.int64)
    return Points(np.hstack([times, SIZES * sizes]), dtypes, OTHER_DTYPE)


def _assign(points: Points, ops: np.ndarray[Any, Any], indices: np.ndarray[Any, Any]) -> tuple[Any, Floats]:
    nearest, likeness = np.zeros(len(points), dtype=int), np.zeros(len(points))
    for first in range(0, len(points), 1000):
        part = slice(first, first + 1000)
        costs = distances(points[part], points[indices])
        costs += OTHER_OP * (ops[part][:, None] != ops[indices][None, :])
        nearest[part] = costs.argmin(axis=1)
        likeness[part] = np.exp(-costs.min(axis=1))
    return nearest, likeness


def describe(distilled: Distilled) -> str:
    traces = counted(len(distilled.weights_us), "trace")
    return f"{counted(len(distilled.keys), 'case')} represent {traces}, mean similarity {distilled.likeness:.1%}"


HELD = 0.1  # relative error up to which a prediction passes


@dataclass(frozen=True, slots=True)
class Check:
    trace: str
    model: str
    real_us: float
    predicted_us: float

    @property
    def error(self) -> float:
        return self.predicted_us / self.real_us - 1

    @property
    def is_held(self) -> bool:
        return abs(self.error) <= HELD


def check_of(corpus: Corpus, distilled: Distilled, times: Times) -> list[Check]:
    # a score uses the time of a case after the preceding calls of the trace that it is written from
    chosen = {key: times[trace, key] for key, trace in distilled.sources.items() if (trace, key) in times}
    models = {member.name: member.model for member in corpus.members}
    checks = []
    for name, rows in corpus.frame[corpus.frame["trace"].isin(list(distilled.weights_us))].groupby("trace", sort=False):
        columns = (rows[column].tolist() for column in ("count", "key", "median_us"))
        timed = [(count, times.get((str(name), key)), us) for count, key, us in zip(*columns, strict=True)]
        known_us = fsum(count * us for count, time, us in timed if time is not None)
        real_us = fsum(count * time for count, time, _ in timed if time is not None)
        whole_us = fsum(count * us for count, _, us in timed)
        predicted_us = distilled.predicted_us(str(name), chosen)
        if real_us > 0 and isfinite(predicted_us):
            # cases without a time in that replay cannot be checked, so scale the prediction to the timed ones
            checks.append(Check(str(name), models[str(name)], real_us, predicted_us * known_us / whole_us))
    return checks


def _by_model(checks: Iterable[Check]) -> list[tuple[Check, list[Check]]]:
    traces_of: dict[str, list[Check]] = {}
    for check in checks:
        traces_of.setdefault(check.model, []).append(check)
    return [
        (Check("", model, fsum(item.real_us for item in own), fsum(item.predicted_us for item in own)), own)
        for model, own in traces_of.items()
    ]


def print_check(checks: Sequence[Check], file: IO[str]) -> None:
    models = _by_model(checks)
    rows = [item for total, own in models for item in (total, *own)]
    columns = [
        TableColumn("model, traces", lambda item: f"  {item.trace}" if item.trace else item.model),
        TableColumn("measured ms", lambda item: item.real_us / 1e3, ",.2f"),
        TableColumn("predicted ms", lambda item: item.predicted_us / 1e3, ",.2f"),
        TableColumn("error", "error", "+.1%"),
    ]
    if rows:
        print_table(columns, rows, file, style=lambda item: None if item.trace else "bold")
    for name, items in (("models", [total for total, _ in models]), ("traces", checks)):
        held = sum(item.is_held for item in items)
        print_line(f"the times of {held} of {len(items)} {name} are predicted within {HELD:.0%}", file)
