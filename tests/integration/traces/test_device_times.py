"""Launches of graphs, device times and perturbed times in constructed traces, and figures that use them."""

from collections.abc import Sequence
from pathlib import Path
from zipfile import ZipFile

import pytest
import torch
from example_trace import SPEC, write
from programs import ROOT

from opgrip.errors import FormatError, UserError
from opgrip.replay.cases.cases import make_cases
from opgrip.replay.inputs.inputs import device_map
from opgrip.replay.sequences.call_timers import SequenceSettings
from opgrip.replay.sequences.step_replay import replay_sequence
from opgrip.tools.opgrip import main as opgrip
from opgrip.traces import Trace, load, read
from opgrip.traces.analysis.dataflow import make_graph
from opgrip.traces.analysis.longtail import find_longtail
from opgrip.traces.analysis.merge import merge
from opgrip.traces.codec.record_forms import from_json
from opgrip.traces.schema.arguments import TensorSpec
from opgrip.traces.schema.records import (
    FUNCTION,
    NO_STORAGE,
    Calls,
    DeviceTimes,
    End,
    Graph,
    GraphTimes,
    Kernels,
    Record,
    Scope,
    Signature,
    Thread,
    Values,
)
from opgrip.traces.table import call_source
from opgrip.traces.table.call_source import BY_ESTIMATE, BY_KERNELS
from opgrip.traces.values.exact import Booleans

EXTENSION_CALL, MULTIPLY, GRIPPED = 0, 1, 2
RECORDS: list[Record] = [
    Values(0, Booleans(3, 70)),
    Signature(EXTENSION_CALL, "extension", "kernels:nms", (SPEC,), {}, SPEC),
    Signature(MULTIPLY, "operator", "aten.mul.Tensor", (SPEC, 2.5), {}, SPEC),
    Signature(GRIPPED, FUNCTION, "net:scale", (SPEC,), {}, SPEC),
    Scope(0, "", "", "forward", None, "main", "net.py", 1),
    Scope(1, "", "", "forward", "net:scale", "scale", "net.py", 2, gripped=True),
    Scope(2, "", "", "forward", "kernels:nms", "scale", "net.py", 3),
    Thread(0, "MainThread"),
    Thread(1, "other"),
    # inner calls end first: mul in nms, nms and mul in scale, scale, mul
    Calls(
        0,
        *([MULTIPLY, EXTENSION_CALL, MULTIPLY, GRIPPED, MULTIPLY], [2, 1, 1, 0, 0]),
        *([30, 20, 60, 10, 200], [5, 30, 10, 90, 10]),
        device_ns=[400, 1000, 500, -1, -1],
    ),
    Calls(1, [MULTIPLY], [0], [25], [10], device_ns=[7000]),
    Calls(0, [MULTIPLY], [0], [300], [10]),
    End(7, 3, 400),
]


def test_function_has_the_device_time_of_its_inner_calls(tmp_path: Path) -> None:
    trace = load(write(tmp_path / "t.jsonl", RECORDS))
    calls = trace.calls.set_index("start_ns")
    assert calls.loc[10, "device_ns"] == 1500
    assert calls.loc[200, "time_ns"] == calls.loc[200, "duration_ns"] == 10
    assert trace.summary().set_index("op").loc["kernels:nms", "total_us"] == 1.0


def test_later_device_times_belong_to_the_calls_of_their_thread(tmp_path: Path) -> None:
    later: list[Record] = [DeviceTimes(0, 4, [300, 0]), DeviceTimes(1, 1, [9]), DeviceTimes(5, 0, [9])]
    trace = load(write(tmp_path / "t.jsonl", [*RECORDS[:-1], *later, RECORDS[-1]]))
    calls = trace.calls.set_index("start_ns")
    assert calls.loc[[200, 300, 25], "device_ns"].tolist() == [300, 0, 7000]


def test_merged_trace_has_the_times_and_kernels_of_all(tmp_path: Path) -> None:
    later: list[Record] = [DeviceTimes(0, 4, [300, 0]), Kernels(MULTIPLY, ["mul"], [2], [300])]
    paths = [write(tmp_path / f"{name}.jsonl", [*RECORDS[:-1], *later, RECORDS[-1]]) for name in "ab"]
    merge(paths, tmp_path / "m.jsonl")
    merged = load(tmp_path / "m.jsonl", partial=False)
    assert sorted(merged.calls["device_ns"].dropna()) == sorted([*load(paths[0]).calls["device_ns"].dropna()] * 2)
    table = merged.kernels_by_operator()
    assert table.iloc[0].tolist() == ["mul", "aten.mul.Tensor", 4, 0.6, 1.0]


def test_info_shows_kernels_in_a_separate_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kernels: list[Record] = [
        Kernels(MULTIPLY, ["void mul<float>()", "Memset"], [3, 1], [9000, 1000]),
        Kernels(MULTIPLY, ["void mul<float>()"], [1], [5000]),
    ]
    write(tmp_path / "t.jsonl", [*RECORDS[:-1], *kernels, RECORDS[-1]])
    assert opgrip(["trace", "info", str(tmp_path / "t.jsonl"), "--by", "kernel"]) == 0
    text = capsys.readouterr().out
    assert "kernels by share of time (2 in total)" in text
    assert ["93.3%", "14", "4", "void"] in [line.split()[:4] for line in text.splitlines()]


@pytest.mark.parametrize(
    "form",
    [
        {"type": "device_times", "thread": 0, "first": -1, "device_ns": [1]},
        {"type": "device_times", "thread": 0, "first": 0, "device_ns": "1"},
        {"type": "kernels", "signature": 0, "names": ["a"], "launches": [1], "device_ns": [-1]},
    ],
)
def test_invalid_time_records_are_damage(form: dict[str, object]) -> None:
    with pytest.raises(FormatError):
        from_json(form)


def h100_trace(folder: Path, way: str) -> Path:
    with ZipFile(ROOT / "benchmarks/results/h100/raw.zip") as archive:
        return Path(archive.extract(f"clocks-{way}.jsonl", folder))


def test_event_times_that_include_host_time_are_doubted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert opgrip(["trace", "info", str(h100_trace(tmp_path, "events"))]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "device times were measured by events, and 22% of them belongs to calls that took longer to launch" in words
    assert opgrip(["trace", "info", str(h100_trace(tmp_path, "kernels"))]) == 0
    assert "by events" not in capsys.readouterr().out


SQUARE = TensorSpec((8, 8), (8, 1), torch.float32, "cpu")
SIN_NS, EXP_NS, PERTURBED_NS = 1_000_000, 10_000, 50_000_000
INTERRUPTED_NS = 80_000_000
GAP_NS, PERTURBED_GAP_NS = 5_000, 30_000_000


def trace_of(
    path: Path, perturbed: Sequence[int], device_ns: Sequence[int] = (), exps: int = 3, interrupted: Sequence[int] = ()
) -> Trace:
    """Write a trace of a chain of four sines, then independent exponentials, some perturbed or interrupted."""
    ops = ("aten.sin.default", "aten.exp.default")
    calls = 4 + exps
    signature = [0] * 4 + [1] * exps
    durations = [SIN_NS] * 4 + [PERTURBED_NS if place in perturbed else EXP_NS for place in range(4, calls)]
    durations = [INTERRUPTED_NS if place in interrupted else duration for place, duration in enumerate(durations)]
    starts = [0]
    for place, duration in enumerate(durations[:-1], start=1):
        starts.append(starts[-1] + duration + (PERTURBED_GAP_NS if place in perturbed else GAP_NS))
    flows = [0, 1, 1, 2, 2, 3, 3, 4, *range(10, 10 + 2 * exps)]
    marks = [(place, 1) for place in perturbed]
    table = Calls(0, signature, [0] * calls, starts, durations, [2] * calls, flows, -1, [*device_ns], perturbed=marks)
    return load(
        write(
            path / "t.jsonl",
            [
                *(Signature(number, "operator", op, (SQUARE,), {}, SQUARE) for number, op in enumerate(ops)),
                Scope(0, "m", "M", "forward", None, "wave", "waves.py", 1),
                Thread(0, "MainThread"),
                table,
                End(calls, 2, 10**9, [], []),
            ],
        ),
        partial=False,
    )


def test_critical_path_uses_unperturbed_times(tmp_path: Path) -> None:
    graph = make_graph(trace_of(tmp_path, [4]))
    assert list(graph.facts.critical_path) == [0, 1, 2, 3]
    assert graph.facts.critical_ns == graph.facts.critical_host_ns == 4 * SIN_NS


@pytest.mark.parametrize("device_ns", [[], [-1] * 4 + [2 * EXP_NS] * 3])
def test_captured_times_of_a_sequence_are_unperturbed(tmp_path: Path, device_ns: list[int]) -> None:
    settings = SequenceSettings(device_map("cpu", None), "cpu", repeats=1)
    result = replay_sequence(trace_of(tmp_path, [4], device_ns), settings)
    exp_ns = 2 * EXP_NS if device_ns else EXP_NS
    assert result.captured_ms == (4 * SIN_NS + 3 * exp_ns) / 1e6
    assert result.captured_host_ms == (4 * SIN_NS + 3 * EXP_NS) / 1e6
    assert result.captured_critical_ms == 4 * SIN_NS / 1e6


def test_longtail_times_are_unperturbed(tmp_path: Path) -> None:
    (function,) = find_longtail([trace_of(tmp_path, range(5, 24), exps=20)], lambda trace: 1e10).functions
    assert function.operator_ns == 4 * SIN_NS + 20 * EXP_NS
    assert function.between_ns == 23 * GAP_NS


def test_interrupted_unperturbed_call_does_not_determine_the_time(tmp_path: Path) -> None:
    calls = trace_of(tmp_path, [4, 5], interrupted=[6]).calls
    assert calls["time_ns"].tolist() == [SIN_NS] * 4 + [PERTURBED_NS] * 3
    calls = trace_of(tmp_path, [4, 5], exps=4, interrupted=[6]).calls
    assert calls["time_ns"].tolist() == [SIN_NS] * 4 + [(INTERRUPTED_NS + EXP_NS) / 2] * 2 + [INTERRUPTED_NS, EXP_NS]
    assert trace_of(tmp_path, [4, 5]).calls["time_ns"].tolist() == [SIN_NS] * 4 + [EXP_NS] * 3


SMALL, LARGE = (TensorSpec((size,), (1,), torch.float32, "cuda:0") for size in (100, 300))
LAUNCHED: list[Record] = [
    Scope(0, "", "", "forward"),
    Signature(0, "operator", "aten.sin.default", (SMALL,), {}, SMALL),
    Signature(1, "operator", "aten.view.default", (SMALL, [10, 10]), {}, SMALL),
    Signature(2, "operator", "aten.cos.default", (LARGE,), {}, LARGE),
    Signature(3, "extension", "torch.cuda:CUDAGraph.replay", (1,), {"device": torch.device("cuda:0")}, None),
    Graph(3, [0, 1, 2], [0, 0, 0], [2, 2, 2], [4, 5, 5, 5, 6, NO_STORAGE]),
    Thread(0, "MainThread"),
    Calls(
        *(0, [0, 3, 2, 3], [0] * 4, [10, 100, 500, 600], [50, 90, 70, 80], [2, 0, 2, 0], [0, 1, 2, 3]),
        device_ns=[400, 1600, -1, -1],
        page_faults=[(2, 5)],
        streams=[0, 7, 0, 0],
        perturbed=[(1, 2)],
    ),
    DeviceTimes(0, 3, [3200]),
]
NAMES = ["sin", "sin", "view", "cos", "cos", "sin", "view", "cos"]


def launched_trace(path: Path, *more: Record) -> Path:
    return write(path, [*LAUNCHED, *more, End(4, 4, 700)])


def names_of(trace: Trace) -> list[str]:
    return [str(op).split(".")[1] for op in trace.calls["op"]]


@pytest.mark.parametrize(
    ("more", "split", "times"),
    [
        # 400 ns for 800 bytes of sin outside of the graph; cos has three times the bytes and no measured time
        ([], BY_ESTIMATE, [400, 0, 1200, 800, 0, 2400]),
        ([GraphTimes(3, [100, 0, 100]), GraphTimes(3, [200, 0, 0])], BY_KERNELS, [1200, 0, 400, 2400, 0, 800]),
    ],
)
def test_launches_are_the_calls_of_their_graph(
    tmp_path: Path, more: list[Record], split: str, times: list[int]
) -> None:
    trace = load(launched_trace(tmp_path / "t.jsonl", *more), partial=False)
    calls = trace.calls
    assert names_of(trace) == NAMES
    inner = calls[calls["duration_ns"] == 0]
    assert inner["device_ns"].tolist() == times
    assert inner["start_ns"].tolist() == [100, 130, 160, 600, 626, 653]
    assert inner["stream"].tolist() == [7, 7, 7, 0, 0, 0]
    assert calls["page_faults"].tolist() == [0, 0, 0, 0, 5, 0, 0, 0]
    assert calls["perturbed"].tolist() == [False] * 4 + [True] + [False] * 3
    flows = [trace.storages[row.first_storage : row.first_storage + row.tensors].tolist() for row in calls.itertuples()]
    assert flows == [[0, 1], [4, 5], [5, 5], [6, NO_STORAGE], [2, 3], [4, 5], [5, 5], [6, NO_STORAGE]]
    (row,) = trace.graphs.itertuples()
    assert (row.calls, row.captured, row.split, row.launches) == (3, True, split, 2)
    assert row.share == pytest.approx(4800 / 5200)
    cases = {case.signature.op: case for case in make_cases(trace)}
    assert cases["aten.cos.default"].count == 3
    assert (cases["aten.cos.default"].captured_spread is None) is (split == BY_ESTIMATE)


def test_filters_select_calls_in_launches(tmp_path: Path) -> None:
    path = launched_trace(tmp_path / "t.jsonl")
    trace = load(path, partial=False, op="aten.cos*")
    assert (names_of(trace), trace.call_count) == (["cos"] * 3, 3)


def test_traces_whose_launches_run_too_many_calls_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_source, "MOST_IN_LAUNCHES", 5)
    with pytest.raises(UserError, match="run 6 calls"):
        load(launched_trace(tmp_path / "t.jsonl"), partial=False)


def test_graphs_stay_in_parts_and_redacted_traces(tmp_path: Path) -> None:
    path = launched_trace(tmp_path / "t.jsonl", GraphTimes(3, [100, 0, 300]))
    part, redacted = tmp_path / "part.jsonl", tmp_path / "redacted.jsonl"
    assert opgrip(["trace", "trim", str(path), "--op", "torch.cuda*", "-o", str(part)]) == 0
    assert opgrip(["trace", "redact", str(path), "-o", str(redacted)]) == 0
    assert names_of(load(part, partial=False)) == ["sin", "view", "cos"] * 2
    assert names_of(load(redacted, partial=False)) == NAMES
    for file in (path, part, redacted):
        assert opgrip(["trace", "validate", str(file)]) == 0
        assert load(file).graphs["split"].tolist() == [BY_KERNELS]


def test_merged_traces_keep_the_graphs_of_each(tmp_path: Path) -> None:
    first = launched_trace(tmp_path / "a.jsonl")
    other = [record for record in LAUNCHED if not isinstance(record, Graph)]
    graph = Graph(3, [2], [0], [2], [8, 9])
    second = write(tmp_path / "b.jsonl", [*other, graph, End(4, 4, 700)])
    merged = tmp_path / "merged.jsonl"
    assert opgrip(["trace", "merge", str(first), str(second), "-o", str(merged)]) == 0
    assert opgrip(["trace", "validate", str(merged)]) == 0
    assert [len(record.calls) for record in read(merged) if isinstance(record, Graph)] == [3, 1]
    counts = load(merged, partial=False).summary().set_index("op")["calls"].to_dict()
    assert counts == {"aten.cos.default": 6, "aten.sin.default": 4, "aten.view.default": 2}
