"""Tests of profiles whose device time is in launches of graphs, and of joining them with the profile of the capture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from foreign_data import CASES, needs_cases
from programs import succeed

from opgrip.errors import UserError
from opgrip.traces import TraceReader, load


def event(kind: str, name: str, start: float, duration: float, tid: int = 1, **facts: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "name": name, "pid": 1, "tid": tid, "ts": start, "dur": duration, "args": facts}


def operator(name: str, start: float, external: int) -> dict[str, Any]:
    facts = {"Input type": ["float"], "Input Dims": [[8]], "Input Strides": [[1]], "Concrete Inputs": [""]}
    return event("cpu_op", name, start, 9, **{"External id": external, **facts})


def launch(start: float, external: int, kernel: str | None, name: str = "cudaLaunchKernel") -> dict[str, Any]:
    facts = {} if kernel is None else {"kernel": kernel}
    return event("cuda_runtime", name, start, 1, **{"External id": external, "correlation": int(start), **facts})


def kernel(name: str, start: float, duration: float, correlation: int, **facts: Any) -> dict[str, Any]:
    return event("kernel", name, start, duration, 7, device=0, stream=7, correlation=correlation, **facts)


EXECUTION = [
    operator("aten::abs", 10, 1),
    launch(11, 1, "abs_kernel"),
    kernel("abs_kernel", 30, 4, 11, **{"External id": 1}),
    event("cuda_runtime", "cudaGraphLaunch", 40, 20, correlation=40),
    kernel("neg_kernel", 50, 60, 40),
    kernel("relu_kernel", 120, 30, 40),
    event("cuda_runtime", "cudaGraphLaunch", 200, 20, correlation=200),
    kernel("neg_kernel", 210, 5, 200),
    kernel("relu_kernel", 220, 1, 200),
]


def captured(with_names: bool = True, first: str = "neg") -> list[dict[str, Any]]:
    names = [f"{first}_kernel", "relu_kernel"] if with_names else [None, None]
    return [
        operator("aten::sin", 1, 20),
        launch(2, 20, "sin_kernel"),
        event("cuda_runtime", "cudaStreamBeginCapture_v10000", 100, 1),
        operator(f"aten::{first}", 110, 21),
        launch(111, 21, names[0]),
        operator("aten::alias", 125, 22),
        operator("aten::relu", 140, 23),
        launch(141, 23, names[1]),
        event("cuda_runtime", "cudaStreamEndCapture", 160, 1),
        operator("aten::cos", 170, 24),
    ]


def write(path: Path, events: list[dict[str, Any]]) -> Path:
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    return path


DOUBT = "96 % of the device's time is in graph launches, whose operators this file does not have: add the capture-phase"


def test_profile_of_graph_launches_is_reported_as_doubtful(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", EXECUTION)
    first, *_ = succeed("opgrip", "trace", "info", path).stdout.splitlines()
    assert " ".join(first.split()).startswith(f"doubtful {DOUBT}"[:60])
    assert load(path).doubts[0].startswith(DOUBT)
    assert DOUBT in " ".join(succeed("opreplay", path, "--list", "--device", "cpu").stderr.split())
    few = [{**item, "dur": 1} if item["args"].get("correlation") in (40, 200) else item for item in EXECUTION]
    assert (
        load(write(tmp_path / "b.json", [*few, kernel("abs_kernel", 300, 40, 11, **{"External id": 1})])).doubts == []
    )


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
        "graphs: 100 % of the device's time in their launches is of operators"
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
    assert several.end.dropped[0].reason == "its 2 kernels match 2 different of the captured graphs"


def test_graphs_of_equal_calls_are_launched_in_turn(tmp_path: Path) -> None:
    def layer(number: int, start: float) -> list[dict[str, Any]]:
        module = event("python_function", f"nn.Module: Layer_{number}", start + 99, 70)
        outer = event("python_function", "nn.Module: Model_0", start + 98, 90)
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
    with pytest.raises(UserError, match="is not a profile with launches of graphs: remove --capture"):
        joined(tmp_path / "a.txt", path)


@needs_cases
@pytest.mark.slow
def test_real_profiles_of_a_server_are_joined(tmp_path: Path) -> None:
    folder = CASES / "files/tracelens"
    execution = folder / "inference_sglang_decode_sglang_Qwen3-8B_decode.json.gz"
    capture = folder / "inference_sglang_decode_capture_traces_bs_32_rank0.json.gz"
    shown = succeed("opgrip", "trace", "info", execution).stdout
    assert "99 % of the device's time is in graph launches" in shown.splitlines()[0]
    done = succeed("opgrip", "trace", "convert", execution, tmp_path / "t.jsonl", "--capture", capture)
    assert "of the device's time in their launches is of operators in" in done.stderr
    trace = load(tmp_path / "t.jsonl")
    products = trace.calls[trace.calls["op"] == "aten.mm.default"]
    assert len(products) == 145
    assert (products["device_ns"] > 0).all()
