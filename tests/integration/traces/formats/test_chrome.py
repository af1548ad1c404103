"""Tests of reading torch.profiler traces, compared with captures, and of joining graph launches with their capture."""

import gzip
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import refusal
from torch import nn
from torch.profiler import ProfilerActivity, profile

from opgrip.capture import Capture
from opgrip.errors import UserError
from opgrip.traces import Trace, TraceReader, load, read
from opgrip.traces.analysis.differences import Tolerances, compare_traces
from opgrip.traces.schema.arguments import TensorSpec, tensors
from opgrip.traces.schema.records import Kernels


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.words = nn.Embedding(10, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, image: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        joined = torch.cat([self.features(image).mean((2, 3)), self.words(words)], 0)
        return torch.softmax(self.head(joined).transpose(0, 1), -1).clamp(max=0.9).to(torch.float64)


MODEL = Model()
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), lr=0.1, momentum=0.9)
IMAGE, WORDS = torch.randn(2, 3, 8, 8), torch.arange(2)


def step() -> None:
    OPTIMIZER.zero_grad()
    MODEL(IMAGE, WORDS).square().mean().backward()
    OPTIMIZER.step()


def profiled(path: Path, function: Callable[[], object] = step, **settings: Any) -> Path:
    with profile(activities=[ProfilerActivity.CPU], **{"record_shapes": True, **settings}) as profiler:
        function()
    profiler.export_chrome_trace(str(path))
    return path


def calls_of(trace: Trace) -> list[tuple[str, list[tuple[int, ...]], str]]:
    """Return operator, argument shapes and strides, and phase of each call; the profiler shows numbers as empty
    shapes.
    """
    signatures = {item.number: item for item in trace.signatures}
    calls = []
    for row in trace.own_calls.sort_values("start_ns").itertuples():
        signature = signatures[row.signature]
        if not row.op.startswith("aten.detach"):
            specs = tensors([signature.args, signature.kwargs])
            calls.append((row.op, [(spec.shape, spec.stride) for spec in specs if spec.shape], row.phase))
    return calls


def test_calls_equal_those_of_a_capture(tmp_path: Path) -> None:
    step()
    with Capture(tmp_path / "own.jsonl"):
        step()
    own, trace = load(tmp_path / "own.jsonl"), load(profiled(tmp_path / "a.json"))
    assert trace.end is not None
    assert not trace.end.dropped
    assert calls_of(trace) == calls_of(own)
    assert {row.phase for row in trace.calls.itertuples()} == {"forward", "backward", "optimizer"}
    difference = compare_traces(trace, own, ("a", "own"), Tolerances(shares=1.0))
    assert difference.by_call
    assert {row.op for row in difference.changed} <= {"aten.detach.default"}


def test_arguments_are_read_by_the_schema(tmp_path: Path) -> None:
    def function() -> None:
        x = torch.ones(4, 4)
        torch.add(x, x, alpha=2)
        x.sum(1, keepdim=True, dtype=torch.float64)
        x.clamp(min=-1e-06, max=float("inf"))
        torch.empty(2, 3, dtype=torch.int16)
        torch.ones(1, 2, 3, 4).clone(memory_format=torch.channels_last)
        torch.stack([x.half(), x.half()], 1)

    trace = load(profiled(tmp_path / "a.json", function))
    by_op = {item.op: item for item in trace.signatures}
    assert by_op["aten.add.Tensor"].kwargs == {"alpha": 2}
    summed = by_op["aten.sum.dim_IntList"]
    assert (*summed.args[1:], summed.kwargs) == ([1], True, {"dtype": torch.float64})
    assert by_op["aten.clamp.default"].args[1:] == (-1e-06, float("inf"))
    assert by_op["aten.empty.memory_format"].args == ([2, 3],)
    assert by_op["aten.empty.memory_format"].kwargs["dtype"] == torch.int16
    assert by_op["aten.clone.default"].kwargs == {"memory_format": torch.channels_last}
    assert by_op["aten.clone.default"].args == (TensorSpec((1, 2, 3, 4), (24, 12, 4, 1), torch.float32, "cpu"),)


def test_times_and_threads_are_read_from_the_file(tmp_path: Path) -> None:
    path = profiled(tmp_path / "a.json")
    trace = load(path)
    events = [item for item in json.loads(path.read_text())["traceEvents"] if item.get("cat") == "cpu_op"]
    durations = Counter(item["dur"] for item in events if item["name"] == "aten::convolution")
    calls = trace.calls[trace.calls["op"] == "aten.convolution.default"]
    assert Counter(calls["duration_ns"] / 1e3) == durations
    assert trace.calls["thread"].nunique() == 1
    assert trace.header["timed"]


def test_modules_and_functions_are_read_from_the_file(tmp_path: Path) -> None:
    trace = load(profiled(tmp_path / "a.json", with_stack=True, with_modules=True))
    calls = trace.calls
    (convolution,) = calls[calls["op"] == "aten.convolution.default"].to_dict("records")
    assert convolution["module"] == "Sequential_0.Conv2d_0"
    (backward,) = calls[calls["op"] == "aten.convolution_backward.default"].to_dict("records")
    assert (backward["phase"], backward["module"]) == ("backward", "Sequential_0.Conv2d_0")
    (joined,) = calls[calls["op"] == "aten.cat.default"].to_dict("records")
    assert joined["function"] == "forward"
    assert joined["file"].endswith("test_chrome.py")


def test_file_without_shapes_is_refused_in_one_line(tmp_path: Path) -> None:
    path = profiled(tmp_path / "a.json", record_shapes=False)
    with pytest.raises(UserError, match=r"a\.json contains no shapes of tensors: profile with record_shapes=True"):
        load(path)
    refusal("opgrip", "trace", "info", path, in_one_line=True)


def timed_event(kind: str, name: str, start: float, duration: float, tid: int = 1, **facts: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "name": name, "pid": 1, "tid": tid, "ts": start, "dur": duration, "args": facts}


def event(name: str, start: float, duration: float, external: int, **facts: Any) -> dict[str, Any]:
    return timed_event("cpu_op", name, start, duration, **{"External id": external, **facts})


def inputs(*specs: tuple[str, list[Any], str]) -> dict[str, Any]:
    types, shapes, texts = ([spec[place] for spec in specs] for place in range(3))
    strides = [[1] * len(shape) if kind != "TensorList" else [[1]] * len(shape) for kind, shape, _ in specs]
    return {"Input type": types, "Input Dims": shapes, "Input Strides": strides, "Concrete Inputs": texts}


def kernel(name: str, duration: float, external: int, kind: str = "kernel") -> dict[str, Any]:
    return timed_event(kind, name, 9, duration, 7, **{"External id": external, "device": 1, "stream": 7})


UNTOLD = [("", [], "")] * 4
GPU = [
    event("aten::relu", 10, 5, 1, **inputs(("float", [8], ""))),
    event("aten::clamp_min", 11, 3, 2, **inputs(("float", [8], ""), ("Scalar", [], "0"))),
    event("aten::_to_copy", 20, 9, 3, **inputs(("float", [8], ""), *UNTOLD, ("Scalar", [], "False"), ("", [], ""))),
    event("aten::copy_", 21, 5, 4, **inputs(("float", [8], ""), ("float", [8], ""), ("Scalar", [], "False"))),
    event("aten::split_with_sizes_copy", 40, 1, 5, **inputs(("float", [8], ""), ("ScalarList", [], "[4]"), UNTOLD[0])),
    event("mine::op", 50, 4, 6, **inputs(("float", [8], ""))),
    event("aten::neg", 51, 2, 7, **inputs(("float", [8], ""))),
    event("triton_poi_fused_0", 60, 2, 8, **inputs(("float", [8], ""))),
    kernel("clamp_kernel", 2.5, 2),
    kernel("clamp_kernel", 1.5, 2),
    kernel("Memcpy HtoD (Pageable -> Device)", 3, 4, "gpu_memcpy"),
]


def test_kernels_belong_to_the_call_that_launched_them(tmp_path: Path) -> None:
    path = tmp_path / "a.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": GPU}).encode()))
    trace = load(path)
    assert list(trace.calls["op"]) == ["aten.relu.default", "aten._to_copy.default", "aten.neg.default"]
    assert trace.calls["device_ns"].tolist()[:2] == [4000, 3000]
    relu, copied, _ = trace.signatures
    assert [spec.device for spec in tensors(relu.args)] == ["cuda:1"]
    assert [spec.device for spec in tensors(copied.args)] == ["cpu"]
    assert trace.end is not None
    assert {item.op for item in trace.end.dropped} == {"aten.split_with_sizes_copy", "mine::op", "triton_poi_fused_0"}
    kernels = [record for record in read(path) if isinstance(record, Kernels)]
    assert Kernels(0, ["clamp_kernel"], [2], [4000]) in kernels


def test_calls_with_unknown_arguments_are_counted(tmp_path: Path) -> None:
    def function() -> None:
        x = torch.ones(40)
        x[torch.tensor([1, 2])]
        torch.div(x, x, rounding_mode="floor")
        x.view([1] * 35 + [40])

    trace = load(profiled(tmp_path / "a.json", function))
    assert trace.end is not None
    assert {item.op: item.reason for item in trace.end.dropped} == {
        "aten.index": "the file has no value for the argument indices",
        "aten.div": "the file has no value for the argument rounding_mode",
        "aten.view": "the file has no value for the argument size",
    }


GOOD = [
    json.dumps(event(f"aten::{name}", 10 * place, 2, place, **inputs(("float", [8], ""))))
    for place, name in enumerate(("neg", "abs", "sin"))
]
QUOTES = '{"ph": "X", "name": "{"device": "cpu"}(12): [{"a": 1}], run", "ts": 5, "dur": 1, "args": {"x": 1}}'


@pytest.mark.parametrize(
    ("events", "names", "skipped"),
    [
        ([QUOTES, *GOOD], ["neg", "abs", "sin"], 1),
        ([GOOD[0], QUOTES, QUOTES, GOOD[1], QUOTES], ["neg", "abs"], 3),
        ([GOOD[0], GOOD[1][:-1], GOOD[2]], ["neg", "sin"], 1),
        ([GOOD[0], GOOD[1].replace('"dur": 2', '"dur": ,'), GOOD[2]], ["neg", "sin"], 1),
        ([GOOD[0], GOOD[1] + "}", GOOD[2]], ["neg", "sin"], 1),
        ([GOOD[0], GOOD[1].replace("aten::abs", "C:\\x"), GOOD[2]], ["neg", "sin"], 1),
        ([GOOD[0], GOOD[1].replace('"ts": 10', '"ts": ' + "9" * 5000), GOOD[2]], ["neg", "sin"], 1),
        ([GOOD[0], GOOD[1].replace("aten::abs", "aten::abs\x01"), GOOD[2], ""], ["neg", "sin"], 0),
    ],
    ids=["first", "several and last", "brace missing", "value missing", "brace too many", "escape", "digits", "kept"],
)
@pytest.mark.parametrize("size", [1, 50, 1 << 20])
def test_events_that_are_not_json_are_skipped_and_counted(
    events: list[str], names: list[str], skipped: int, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opgrip.cli.output_files.CHUNK", size)
    path = tmp_path / "a.json"
    path.write_text('{"traceEvents": [' + ", ".join(events) + '], "traceName": "x"}')
    trace = load(path, partial=False)
    assert [row.op for row in trace.calls.itertuples()] == [f"aten.{name}.default" for name in names]
    assert trace.end is not None
    assert sum(item.count for item in trace.end.dropped if "is not JSON" in item.reason) == skipped
    assert trace.header["profiled"] == {"traceName": "x"}


@pytest.mark.parametrize("end", [", ", ', {"ph": "X", "cat": "cp', ', {"ph": "X", "name": "{"dev'])
def test_cut_profile_is_read_up_to_the_cut(end: str, tmp_path: Path) -> None:
    content = '{"traceEvents": [' + ", ".join(GOOD[:2]) + end
    (tmp_path / "a.json").write_text(content)
    packed = gzip.compress((content + "x" * 9999).encode())
    (tmp_path / "a.json.gz").write_bytes(packed[:-20])
    for path in (tmp_path / "a.json", tmp_path / "a.json.gz"):
        trace = load(path, partial=True)
        assert [row.op for row in trace.calls.itertuples()] == ["aten.neg.default", "aten.abs.default"]
        assert "after event 2" in str(trace.missing)
        with pytest.raises(UserError, match="after event 2"):
            load(path, partial=False)


@pytest.mark.slow
def test_search_for_the_next_event_is_bounded(tmp_path: Path) -> None:
    # each place where an event might begin is parsed up to the end
    piece = ',{"a":[' + "0," * 50_000 + "0"
    (tmp_path / "a.json").write_text('{"traceEvents": [' + GOOD[0] + ", {]" + piece * 100 + "}, " + GOOD[1] + "]}")
    with pytest.raises(UserError, match="is refused"):
        load(tmp_path / "a.json")


def test_events_with_wrong_types_are_counted(tmp_path: Path) -> None:
    good = event("aten::neg", 1, 2, 1, **inputs(("float", [8], "")))
    changes: list[Any] = [
        {**good, "ts": "x"},
        {**good, "ts": 1e300},
        {**good, "dur": -1},
        {**good, "args": {**good["args"], "Input Dims": [[8], [8]]}},
        {**good, "args": {**good["args"], "Input Dims": [[-8]]}},
        {**good, "args": {**good["args"], "Input Dims": [[1 << 70]]}},
        {**good, "args": {**good["args"], "Input Dims": [["8"]]}},
        {**good, "args": {**good["args"], "Input type": [["float"]]}},
        {**good, "args": {**good["args"], "Input Strides": [[1, 1]]}},
        7,
    ]
    apart = [{**item, "ts": 10 * place} if item.get("ts") == 1 else item for place, item in enumerate(changes[:-1], 1)]
    (tmp_path / "a.json").write_text(json.dumps({"traceEvents": [*apart, 7, good]}))
    trace = load(tmp_path / "a.json")
    assert trace.end is not None
    assert len(trace.calls) == 1
    assert sum(item.count for item in trace.end.dropped) == len(changes)


def operator(name: str, start: float, external: int) -> dict[str, Any]:
    return event(name, start, 9, external, **inputs(("float", [8], "")))


def launch(start: float, external: int, kernel: str | None, name: str = "cudaLaunchKernel") -> dict[str, Any]:
    facts = {} if kernel is None else {"kernel": kernel}
    return timed_event("cuda_runtime", name, start, 1, **{"External id": external, "correlation": int(start), **facts})


def graph_kernel(name: str, start: float, duration: float, correlation: int, **facts: Any) -> dict[str, Any]:
    return timed_event("kernel", name, start, duration, 7, device=0, stream=7, correlation=correlation, **facts)


EXECUTION = [
    operator("aten::abs", 10, 1),
    launch(11, 1, "abs_kernel"),
    graph_kernel("abs_kernel", 30, 4, 11, **{"External id": 1}),
    timed_event("cuda_runtime", "cudaGraphLaunch", 40, 20, correlation=40),
    graph_kernel("neg_kernel", 50, 60, 40),
    graph_kernel("relu_kernel", 120, 30, 40),
    timed_event("cuda_runtime", "cudaGraphLaunch", 200, 20, correlation=200),
    graph_kernel("neg_kernel", 210, 5, 200),
    graph_kernel("relu_kernel", 220, 1, 200),
]


def captured(with_names: bool = True, first: str = "neg") -> list[dict[str, Any]]:
    names = [f"{first}_kernel", "relu_kernel"] if with_names else [None, None]
    return [
        operator("aten::sin", 1, 20),
        launch(2, 20, "sin_kernel"),
        timed_event("cuda_runtime", "cudaStreamBeginCapture_v10000", 100, 1),
        operator(f"aten::{first}", 110, 21),
        launch(111, 21, names[0]),
        operator("aten::alias", 125, 22),
        operator("aten::relu", 140, 23),
        launch(141, 23, names[1]),
        timed_event("cuda_runtime", "cudaStreamEndCapture", 160, 1),
        operator("aten::cos", 170, 24),
    ]


def write(path: Path, events: list[dict[str, Any]]) -> Path:
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    return path


DOUBT = "96 % of the device's time is in graph launches, whose operators this file does not have: name the profile"


def test_profile_of_graph_launches_is_reported_as_doubtful(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", EXECUTION)
    assert load(path).doubts[0].startswith(DOUBT)
    few = [{**item, "dur": 1} if item["args"].get("correlation") in (40, 200) else item for item in EXECUTION]
    few.append(graph_kernel("abs_kernel", 300, 40, 11, **{"External id": 1}))
    assert load(write(tmp_path / "b.json", few)).doubts == []


@pytest.mark.parametrize("with_names", [True, False], ids=["with names", "by order"])
def test_captured_calls_get_the_kernel_times_of_each_launch(with_names: bool, tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", EXECUTION)
    trace = joined(path, write(tmp_path / "capture.json", captured(with_names)))
    rows = [(row.op.split(".")[1], row.device_ns) for row in trace.calls.fillna({"device_ns": -1}).itertuples()]
    assert rows == [
        *[("abs", 4000), ("neg", 60_000), ("alias", -1), ("relu", 30_000)],
        *[("neg", 5000), ("alias", -1), ("relu", 1000)],
    ]
    assert trace.doubts == []
    assert trace.header["defaults"][-1].startswith(
        "graphs: 100 % of the device's time in graph launches is of operators"
    )
    assert {kernels.names[0]: sum(kernels.launches) for kernels in trace.kernels} == {
        "abs_kernel": 1,
        "neg_kernel": 2,
        "relu_kernel": 2,
    }


def joined(path: Path, capture: Path) -> Any:
    return load(path, reader=TraceReader(path, capture=capture))


def test_kernels_of_parallel_branches_are_paired_by_name(tmp_path: Path) -> None:
    swapped = [
        {**item, "ts": 50} if item["name"] == "relu_kernel" and item["ts"] == 120 else item for item in EXECUTION
    ]
    swapped = [{**item, "ts": 120} if item["name"] == "neg_kernel" and item["ts"] == 50 else item for item in swapped]
    trace = joined(write(tmp_path / "a.json", swapped), write(tmp_path / "c.json", captured()))
    assert trace.calls["device_ns"].tolist()[1] == 60_000


def test_launches_without_a_unique_capture_are_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", EXECUTION)
    other = joined(path, write(tmp_path / "other.json", captured(first="abs")))
    assert [(item.op, item.reason, item.count) for item in other.end.dropped] == [
        ("graph launch", "its 2 kernels match none of the captured graphs", 2)
    ]
    assert other.doubts[0].startswith("96 % of the device's time is in graph launches")
    later = [{**item, "ts": item["ts"] + 1000} for item in captured()]
    large = [
        {**item, "args": {**item["args"], "Input Dims": [[9]]}} if "aten" in item["name"] else item for item in later
    ]
    several = joined(path, write(tmp_path / "several.json", [*captured(), *large]))
    assert several.end.dropped[0].reason == "its 2 kernels match 2 different captured graphs"


def test_graphs_of_equal_calls_are_launched_in_turn(tmp_path: Path) -> None:
    def layer(number: int, start: float) -> list[dict[str, Any]]:
        module = timed_event("python_function", f"nn.Module: Layer_{number}", start + 99, 70)
        outer = timed_event("python_function", "nn.Module: Model_0", start + 98, 90)
        return [outer, module, *({**item, "ts": item["ts"] + start} for item in captured())]

    capture = write(tmp_path / "capture.json", [*layer(0, 0), *layer(1, 1000)])
    calls = joined(write(tmp_path / "a.json", EXECUTION), capture).calls
    modules = calls["module"][calls["op"] == "aten.neg.default"]
    assert modules.tolist() == ["Layer_0", "Layer_1"]


def test_other_files_are_refused_as_captures(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", EXECUTION)
    with pytest.raises(
        UserError, match="does not contain the capture of a CUDA graph: profile the program while it captures"
    ):
        joined(path, path)
    (tmp_path / "a.txt").write_text("Operator: aten.relu.default\ncnt: 3, ((T([8], f32),), {})\n")
    with pytest.raises(UserError, match="is not a profile with launches of CUDA graphs: remove --capture"):
        joined(tmp_path / "a.txt", path)
