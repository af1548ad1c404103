"""Choice of a few cases that represent the cases of many traces, and a check of the times that they predict."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heapreplace
from math import fsum, isfinite
from typing import IO, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from opgrip.cli.command import counted
from opgrip.cli.terminal import print_line
from opgrip.display.tables import TableColumn, print_table
from opgrip.errors import UserError
from opgrip.traces.zoo import read_manifest
from opgrip.traces.zoo.manifest import distinct_names, name_of_file
from opgrip.zoo.corpus.corpus import OF_MEMBER, Corpus, weighted, written_from
from opgrip.zoo.scoring.baselines import Times

Floats = NDArray[np.float64]
Wholes = NDArray[np.int64]
MOST_CANDIDATES = 3000  # maximum number of candidates per group; those with the largest weights are kept
MOST_PAIRS = 250_000_000  # maximum number of similarities in memory, at 4 bytes each
AT_ONCE = 256  # number of candidates that are compared with all points of their group at a time


@dataclass(frozen=True, slots=True)
class Points:
    """N points, some of which are chosen to represent the others; a point is a case, and near points are similar cases.

    numbers : (N, D) coordinates
    kinds : (N,) number of each point's category
    category_distance : distance along a further dimension between points of different categories
    """

    numbers: Floats
    kinds: Wholes
    category_distance: float = 0.0

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, indices: Any) -> Points:
        return Points(self.numbers[indices], self.kinds[indices], self.category_distance)


def choose(points: Points, groups: Wholes, weights: Floats, count: int) -> list[int]:
    """Return the indices of the points that represent the others best, the most representative first.

    The method is greedy facility location: each step chooses the point that most increases the weighted sum, over all
    points, of the similarity to the nearest chosen point. At most `count` points are chosen.

    points : N points; two points at distance d have the similarity exp(-d)
    groups : (N,) group of each point; points of different groups have the similarity 0
    weights : (N,) weight of each point in the sum
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
    """Return the distances, shape (N, M), between N points and M other points."""
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
    sources : by key, the name of the trace that spends the most time on the case, from which its calls are written
    times_us : by key, the time of one call in that trace
    weights_us : by trace and key, the total time of the calls in the trace that the case represents. The predicted time
        of the trace on another machine is the sum over cases of this weight times the case's time there, divided by its
        `times_us`
    likeness : mean similarity, from 0 to 1 and weighted by time, of the corpus's cases to the cases that represent them
    """

    keys: list[str]
    sources: dict[str, str]
    times_us: dict[str, float]
    weights_us: dict[str, dict[str, float]]
    likeness: float

    def predicted_us(self, trace: str, times_us: Mapping[str, float]) -> float:
        """Return the predicted time of a trace on another machine, from times of the representing cases there.

        Cases without a time are assumed to be as much faster or slower there as the others.

        times_us : by key, the time of one call on the other machine
        """
        weights = self.weights_us[trace]
        timed = [(weight, times_us[key] / self.times_us[key]) for key, weight in weights.items() if key in times_us]
        whole, there = sum(weights.values()), sum(weight for weight, _ in timed)
        return sum(weight * ratio for weight, ratio in timed) * (whole / there) if there else float("nan")

    def field(self, corpus: Corpus, base: str = "") -> dict[str, Any]:
        """Return what the distilled trace's header stores: the represented traces, and the time in each that a case
        represents.

        base : machine on which these times were measured; empty if they are captured times
        """
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
    """Return the corpus with its traces named after their files, as in results of a replay of several traces."""
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
    """Return the corpus with other times of its cases; cases without one are dropped.

    times_us : by name of the trace and key of the case, the time of one call

    Raises UserError if no case has a time.
    """
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
    """Return `count` cases that represent the time and the variety of a corpus.

    Raises UserError if no case has a time.
    """
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
    return f"{counted(len(distilled.keys), 'case')} represent {traces}, {distilled.likeness:.1%} alike by time"


HELD = 0.1  # relative error up to which a prediction passes


@dataclass(frozen=True, slots=True)
class Check:
    """Measured and predicted time of a trace, or of all traces of a model, in a replay of all their cases.

    trace : name of the trace; empty for a whole model
    real_us : sum of the measured times
    predicted_us : time predicted from the representing cases
    """

    trace: str
    model: str
    real_us: float
    predicted_us: float

    @property
    def error(self) -> float:
        """Relative error of the predicted time; negative if the prediction is too low."""
        return self.predicted_us / self.real_us - 1

    @property
    def is_held(self) -> bool:
        return abs(self.error) <= HELD


def check_of(corpus: Corpus, distilled: Distilled, times: Times) -> list[Check]:
    """Return, for each trace, the time predicted from the representing cases and the measured time of all its cases.

    times : times of the corpus's cases in a replay other than the one from which the representing cases were chosen
    """
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
        print_line(f"{held} of {len(items)} {name} are predicted within {HELD:.0%}", file)
