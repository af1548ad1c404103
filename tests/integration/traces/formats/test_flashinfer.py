"""Tests of reading FlashInfer-Bench's definitions and workloads as traces, and of writing traces as such."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from optional import optional
from programs import SHIPPED_TRACES, run_command, succeed

from opgrip import Capture
from opgrip.errors import FormatError, UserError
from opgrip.replay import replay
from opgrip.traces import Trace, TraceReader, load
from opgrip.traces.io.foreign_files import Losses, format_of, formats
from opgrip.traces.io.tensor_file import read_foreign_tensor, write_foreign_tensors
from opgrip.traces.schema.arguments import TensorSpec, leaves, tensors
from opgrip.traces.values import fit

GEMM = {
    "name": "gemm_n64_k32",
    "op_type": "gemm",
    "axes": {"M": {"type": "var"}, "N": {"type": "const", "value": 64}, "K": {"type": "const", "value": 32}},
    "inputs": {"A": {"shape": ["M", "K"], "dtype": "float16"}, "B": {"shape": ["N", "K"], "dtype": "float16"}},
    "outputs": {"C": {"shape": ["M", "N"], "dtype": "float16"}},
    "reference": "import torch\n\ndef run(A, B):\n    C = torch.matmul(A, B.T)\n    return C",
}
NORM = {
    "name": "rmsnorm_h8",
    "op_type": "rmsnorm",
    "axes": {"rows": {"type": "var"}, "hidden": {"type": "const", "value": 8}},
    "inputs": {
        "hidden_states": {"shape": ["rows", "hidden"], "dtype": "bfloat16"},
        "weight": {"shape": ["hidden"], "dtype": "bfloat16"},
    },
    "outputs": {"output": {"shape": ["rows", "hidden"], "dtype": "bfloat16"}},
    "reference": "def run(hidden_states, weight):\n    EPS = 1e-5\n    return hidden_states * weight",
}
GATHER = {
    "name": "index_select_1",
    "op_type": "index_select",
    "axes": {"n": {"type": "const", "value": 9}, "k": {"type": "var"}},
    "inputs": {"self": {"shape": ["n"], "dtype": "float32"}, "index": {"shape": ["k"], "dtype": "int64"}},
    "outputs": {},
    "reference": "import torch\ndef run(self, index):\n    return torch.ops.aten.index_select.default(self, 0, index)",
}


def workload(name: str, axes: dict[str, Any], inputs: dict[str, Any] | None = None, number: int = 0) -> str:
    kept = {"uuid": f"{name}-{number}", "axes": axes, "inputs": inputs or {}}
    return json.dumps({"definition": name, "workload": kept, "solution": None, "evaluation": None}) + "\n"


def data_set(root: Path, *definitions: dict[str, Any], lines: str) -> Path:
    for definition in definitions:
        path = root / "definitions" / definition["op_type"] / f"{definition['name']}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(definition))
    path = root / "workloads" / "all.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_text(lines)
    return path


def skipped(path: Path) -> set[str]:
    reader = TraceReader(path, format_name="flashinfer")
    assert list(reader)
    return {reason for _, reason in reader.losses.skipped}


def test_workloads_are_calls_of_the_equivalent_operator(tmp_path: Path) -> None:
    lines = workload("gemm_n64_k32", {"M": 5}) + workload("rmsnorm_h8", {"rows": 3})
    path = data_set(tmp_path, GEMM, NORM, lines=lines)
    assert format_of(path) == format_of(tmp_path) == "flashinfer"
    for trace in (load(path), load(tmp_path)):
        gemm, norm = trace.signatures
        half = torch.float16
        assert (gemm.op, gemm.args) == (
            "aten.linear.default",
            (TensorSpec((5, 32), (32, 1), half, "cpu"), TensorSpec((64, 32), (32, 1), half, "cpu")),
        )
        assert norm.op == "aten.rms_norm.default"
        assert norm.args[1:] == ([8], TensorSpec((8,), (1,), torch.bfloat16, "cpu"), 1e-5)


def test_definition_is_called_with_the_workloads_of_its_folder(tmp_path: Path) -> None:
    data_set(tmp_path, GEMM, lines="")
    (tmp_path / "workloads" / "gemm_n64_k32.jsonl").write_text(
        workload("gemm_n64_k32", {"M": 5}) + workload("gemm_n64_k32", {"M": 6}, number=1)
    )
    path = tmp_path / "definitions" / "gemm" / "gemm_n64_k32.json"
    assert format_of(path) == "flashinfer"
    assert [item.args[0].shape for item in load(path).signatures] == [(5, 32), (6, 32)]
    (tmp_path / "workloads" / "gemm_n64_k32.jsonl").unlink()
    assert skipped(path) == {"the workload has no size for the axis M"}


def test_calls_that_differ_in_strides_are_workloads_of_one_definition(tmp_path: Path) -> None:
    with Capture(tmp_path / "step.jsonl"):
        for step, mask in (
            (1, [True, True, True, False]),
            (2, [True, True, True, False]),
            (3, [True, True, False, False]),
        ):
            torch.arange(4.0 * step)[::step][torch.tensor(mask)]
    trace = load(tmp_path / "step.jsonl")
    (tmp_path / "set").mkdir()
    written = formats.get("flashinfer")
    assert written is not None
    assert written.write_folder is not None
    written.write_folder(trace, tmp_path / "set", Losses())
    again = load(tmp_path / "set")
    assert list(again.calls["op"]).count("aten.index.Tensor") == 3


def test_stored_values_are_restored(tmp_path: Path) -> None:
    source = {"type": "safetensors", "path": "blob/a.safetensors", "tensor_key": "index"}
    path = data_set(tmp_path, GATHER, lines=workload("index_select_1", {"k": 3}, {"index": source}))
    (tmp_path / "blob").mkdir()
    values = torch.tensor([8, 0, 3])
    write_foreign_tensors(tmp_path / "blob" / "a.safetensors", {"index": values})
    trace = load(path)
    assert trace.calls["op"].tolist() == ["aten.index_select.default"]
    assert trace.values == {0: fit(values)}
    assert trace.signatures[0].args[2].values == 0


@pytest.mark.parametrize("name", ["../a.safetensors", "/etc/passwd", "blob/none.safetensors", "blob/pipe.safetensors"])
def test_missing_or_outside_values_file_is_reported(tmp_path: Path, name: str) -> None:
    write_foreign_tensors(tmp_path / "a.safetensors", {"index": torch.tensor([8, 0, 3])})
    source = {"type": "safetensors", "path": name, "tensor_key": "index"}
    path = data_set(tmp_path / "set", GATHER, lines=workload("index_select_1", {"k": 3}, {"index": source}))
    (tmp_path / "set" / "blob").mkdir()
    os.mkfifo(tmp_path / "set" / "blob" / "pipe.safetensors")
    reader = TraceReader(path)
    assert not load(path, reader=reader).values
    assert any(name in text for text in reader.losses.defaults)


@pytest.mark.parametrize(
    ("change", "axes", "reason"),
    [
        (
            {"op_type": "gqa_paged", "reference": "def run(A, B):\n    import os\n    os.abort()"},
            {"M": 1},
            "no operator",
        ),
        ({}, {}, "the workload has no size for the axis M"),
        ({}, {"M": -1}, "number of elements"),
        ({"inputs": {"A": {"shape": ["M", "Q"], "dtype": "float16"}}}, {"M": 1}, "undefined axis"),
        ({"inputs": {"A": {"shape": ["M"], "dtype": "float4_e2m1"}}}, {"M": 1}, "unknown dtype: float4_e2m1"),
        ({"inputs": [1]}, {"M": 1}, "`inputs` of the definition or workload is not a JSON object"),
    ],
)
def test_unconvertible_definition_is_counted_with_the_reason(
    tmp_path: Path, change: dict[str, Any], axes: dict[str, Any], reason: str
) -> None:
    path = data_set(tmp_path, {**GEMM, **change}, lines=workload("gemm_n64_k32", axes))
    (told,) = skipped(path)
    assert reason in told


@pytest.mark.parametrize("name", ["../../secret", "", "a/b", "x" * 500, "nothing"])
def test_definitions_are_looked_up_only_in_their_folder(tmp_path: Path, name: str) -> None:
    path = data_set(tmp_path, GEMM, lines=workload(name, {"M": 1}))
    assert skipped(path) == {"no definition of this name in its folder"}


@pytest.mark.parametrize(
    "text",
    [
        "torch.ops.aten.relu.default(__import__('os').abort())",
        "torch.ops.aten.relu.default(*A)",
        "torch.ops.aten.relu.default(" + "[" * 3000 + "]" * 3000 + ")",
        "torch.ops.aten.relu.default(A)()",
        "open('/etc/passwd')",
    ],
)
def test_reference_is_never_run(tmp_path: Path, text: str) -> None:
    definition = {**GEMM, "op_type": "other", "reference": f"import torch\ndef run(A, B):\n    return {text}"}
    path = data_set(tmp_path, definition, lines=workload("gemm_n64_k32", {"M": 1}))
    (told,) = skipped(path)
    assert "no operator of torch corresponds" in told


def problem(folder: Path, change: dict[str, Any] | None = None) -> Path:
    folder.mkdir(parents=True)
    definition = {
        "name": "moe_combine",
        "op_type": None,
        "axes": {
            "batch": {"type": "var"},
            "hidden": {"type": "const", "value": 8},
            "tokens": {"type": "expr", "expression": "batch * 3"},
        },
        "custom_inputs_entrypoint": "make",
        "inputs": {
            "rows": {"shape": ["batch", "hidden"], "dtype": "float32"},
            "outputs": {"shape": ["tokens", "hidden"], "dtype": "float32"},
            "index": {"shape": ["tokens"], "dtype": "int64"},
        },
        "outputs": {"y": {"shape": ["batch", "hidden"], "dtype": "float32"}},
        "reference": "import torch\n\n\ndef run(rows, outputs, index):\n"
        "    return torch.ops.aten.index_add.default(rows, 0, index, outputs)\n",
        **(change or {}),
    }
    (folder / "definition.json").write_text(json.dumps(definition, indent=2))
    inputs = {name: {"type": "custom"} for name in definition["inputs"]}
    lines = [json.dumps({"uuid": f"u{size}", "axes": {"batch": size}, "inputs": inputs}) for size in (2, 5)]
    (folder / "workload.jsonl").write_text("\n".join(lines))
    return folder


@pytest.mark.parametrize("part", [".", "definition.json", "workload.jsonl"])
def test_sol_execbench_kernels_are_calls_of_their_references(tmp_path: Path, part: str) -> None:
    path = problem(tmp_path / "a") / part
    assert format_of(path) == "flashinfer"
    reader = TraceReader(path)
    trace = load(path, reader=reader)
    assert trace.calls["op"].tolist() == ["aten.index_add.default"] * 2
    assert trace.calls["function"].tolist() == ["moe_combine"] * 2
    assert [[spec.shape for spec in tensors(item.args)] for item in trace.signatures] == [
        [(2, 8), (6,), (6, 8)],
        [(5, 8), (15,), (15, 8)],
    ]
    assert any("not run" in text for text in reader.losses.defaults)
    assert {row.status for row in replay(path, device="cpu", iterations=1)} == {"ok"}


def test_folder_of_sol_execbench_kernels_is_read_completely(tmp_path: Path) -> None:
    problem(tmp_path / "set" / "a")
    problem(tmp_path / "set" / "b", {"name": "other", "reference": "def run(rows, outputs, index):\n    os.abort()\n"})
    reader = TraceReader(tmp_path / "set")
    assert len(load(tmp_path / "set", reader=reader).calls) == 2
    ((name, reason),) = reader.losses.skipped
    assert (name, "its reference is not a single call" in reason) == ("other", True)


@pytest.mark.parametrize("expression", ["batch ** batch ** batch * nothing", "__import__('os')", 3])
def test_axis_that_cannot_be_computed_is_counted(tmp_path: Path, expression: object) -> None:
    tokens = {"type": "expr", "expression": expression}
    axes = {"batch": {"type": "var"}, "hidden": {"type": "const", "value": 8}, "tokens": tokens}
    (told,) = skipped(problem(tmp_path / "a", {"axes": axes}))
    assert "cannot be computed" in told


def test_workloads_without_their_definition_name_what_is_missing(tmp_path: Path) -> None:
    path = problem(tmp_path / "a") / "workload.jsonl"
    path.with_name("definition.json").unlink()
    with pytest.raises(UserError, match=r"put its definition\.json into the same folder"):
        load(path)


def written(trace: Trace, folder: Path) -> Losses:
    format_ = formats.get("flashinfer")
    assert format_ is not None
    assert format_.write_folder is not None
    folder.mkdir()
    losses = Losses()
    format_.write_folder(trace, folder, losses)
    return losses


def plain(trace: Trace) -> set[str]:
    """Return operators with their arguments' shapes, dtypes and plain values, with tuples as lists."""

    def form(value: Any) -> Any:
        match value:
            case TensorSpec():
                return (value.shape, value.dtype)
            case list() | tuple():
                return [form(item) for item in value]
            case dict():
                return {name: form(item) for name, item in value.items()}
        return value

    own = set(trace.own_calls["signature"])
    return {f"{item.op} {form(item.args)} {form(item.kwargs)}" for item in trace.signatures if item.number in own}


@pytest.mark.slow
def test_written_trace_has_the_same_calls_except_reported_losses(tmp_path: Path) -> None:
    trace = load(SHIPPED_TRACES[0])
    losses = written(trace, tmp_path / "set")
    reader = TraceReader(tmp_path / "set")
    again = load(reader.path, reader=reader)
    assert not reader.losses.skipped
    assert plain(again) <= plain(trace)
    missing = {text.partition(" ")[0] for text in plain(trace) - plain(again)}
    assert missing <= {op for op, _ in losses.skipped}
    assert len(again.calls) >= 0.9 * trace.own_calls["signature"].nunique()
    # values that decide where an operator reads or writes are restored
    indices = [
        leaf
        for item in again.signatures
        for leaf in leaves(item.args)
        if isinstance(leaf, TensorSpec) and leaf.dtype == torch.int64 and math.prod(leaf.shape)
    ]
    assert indices
    assert all(leaf.values is not None for leaf in indices)


def test_flashinfer_bench_reads_the_written_files(tmp_path: Path) -> None:
    data = optional("flashinfer_bench.data")
    written(load(SHIPPED_TRACES[0]), tmp_path / "set")
    traces = data.TraceSet.from_path(str(tmp_path / "set"))
    for name, items in traces.workloads.items():
        for item in items:
            definition = traces.definitions[name]
            assert set(item.workload.inputs) == set(definition.inputs)
            assert len(definition.get_input_shapes(item.workload.axes)) == len(definition.inputs)


def test_commands_write_and_replay_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Operator: aten.relu.default\ncnt: 3, ((T([4, 3], f32),), {})\n")
    convert = ("opgrip", "trace", "convert", "a.txt", "set", "--to", "flashinfer")
    done = succeed(*convert, cwd=tmp_path)
    assert "how often it was called" in done.stderr
    done = run_command(*convert, cwd=tmp_path)
    assert (done.returncode, "set exists" in done.stderr) == (2, True)
    (path,) = tmp_path.glob("set/workloads/*/*.jsonl")
    for target in (path, "set"):
        done = succeed("opreplay", target, "--iterations", "1", "--strict", cwd=tmp_path)
        assert "aten.relu.default" in done.stdout


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "I64", "shape": [1 << 40], "data_offsets": [0, 1 << 43]},
        {"dtype": "I64", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "I64", "shape": [-1], "data_offsets": [8, 0]},
        {"dtype": "X9", "shape": [1], "data_offsets": [0, 8]},
        {"dtype": "I64", "shape": [4], "data_offsets": [0, 32]},
        [1],
    ],
)
def test_tensor_that_contradicts_its_header_is_refused(tmp_path: Path, entry: object) -> None:
    header = json.dumps({"a": entry}).encode()
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(FormatError):
        read_foreign_tensor(tmp_path / "a.safetensors", "a")
