"""Launches of tritonparse and lists of aiter, read as traces, and lists of problems for tuners of kernels."""

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from foreign_data import case_files, results_of
from torch.cuda import tunable
from torch.utils._python_dispatch import TorchDispatchMode

from opgrip import Capture
from opgrip.replay import replay
from opgrip.tools.opgrip import main
from opgrip.traces import Trace, TraceReader, load
from opgrip.traces.formats.tuners import MIXTURE, recognizes
from opgrip.traces.io.foreign_files import Head
from opgrip.traces.schema.arguments import TensorSpec
from opgrip.traces.schema.operator_arguments import is_launch, launch_facts

BFLOAT16 = torch.bfloat16
UNTUNED = "M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle"


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tuners") / "step.jsonl"
    x, weight, bias = torch.randn(32, 64), torch.randn(48, 64), torch.randn(48)
    with Capture(path), torch.no_grad():
        for _ in range(2):
            torch.addmm(bias, x, weight.t())
        torch.mm(x, torch.randn(64, 48))
        torch.mm(torch.randn(64, 32).t(), torch.randn(64, 48))
        torch.mm(x[:, :40], torch.randn(40, 24))
        torch.mm(x.to(BFLOAT16), weight.to(BFLOAT16).t())
        torch.bmm(torch.randn(3, 32, 16), torch.randn(3, 24, 16).transpose(1, 2))
        torch.bmm(torch.randn(3, 32, 16, dtype=BFLOAT16), torch.randn(3, 24, 16, dtype=BFLOAT16).transpose(1, 2))
        torch.nn.functional.conv2d(
            torch.randn(2, 8, 16, 20), torch.randn(12, 4, 3, 5), torch.randn(12), 2, (1, 2), 1, 2
        )
        torch.nn.functional.conv_transpose1d(torch.randn(2, 8, 16), torch.randn(8, 6, 4), stride=2)
        torch.nn.functional.scaled_dot_product_attention(*(torch.randn(2, 4, 16, 8) for _ in range(3)))
    return path


def lines_for(tuner: str, trace: Path, folder: Path) -> list[str]:
    assert main(["trace", "tuner", str(trace), "--for", tuner, "-o", str(folder / "list.txt")]) == 0
    return (folder / "list.txt").read_text(encoding="utf-8").splitlines()


def products_of(trace: Path) -> set[tuple[Any, ...]]:
    products = set()
    for signature in load(trace).signatures:
        name = signature.op.split(".")[1]
        if name in ("mm", "addmm", "bmm"):
            left, right = signature.args[-2:]
            products.add((left.dtype, left.shape, left.stride, right.shape, right.stride))
    return products


class Products(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.products: set[tuple[Any, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default):
            left, right = args[-2:]
            self.products.add((left.dtype, tuple(left.shape), left.stride(), tuple(right.shape), right.stride()))
        return func(*args, **(kwargs or {}))


def test_torch_makes_the_recorded_products_of_the_list_for_tunableop(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_cpu(make: Any) -> Any:
        def made(*args: Any, **kwargs: Any) -> Any:
            return make(*("cpu" if item == "cuda:0" else item for item in args), **kwargs)

        return made

    for name in ("_create_matrices", "_create_batch_matrices"):
        monkeypatch.setattr(tunable, name, on_cpu(getattr(tunable, name)))
    original = torch.rand
    monkeypatch.setattr(torch, "rand", lambda *args, **kwargs: original(*args, **{**kwargs, "device": "cpu"}))
    lines = [line for line in lines_for("tunableop", trace, tmp_path) if line.startswith(("Gemm", "ScaledGemm"))]
    assert any(line.startswith("GemmAndBiasTunableOp_float_TN,tn_48_32_64_ld_64_64_48") for line in lines)
    with Products() as made, warnings.catch_warnings():
        warnings.simplefilter("error")
        for line in lines:
            tunable._process_single_offline_gemm(line, 0)
    dense = {item for item in products_of(trace) if item[2] != (64, 1) or item[1] != (32, 40)}
    assert dense <= made.products
    # torch pads a matrix with a larger leading dimension in its own way
    shapes = {(item[0], item[1], item[3]) for item in made.products}
    assert shapes == {(item[0], item[1], item[3]) for item in products_of(trace)}


def test_list_for_aiter_has_the_columns_of_its_files_and_is_read_as_the_same_products(
    trace: Path, tmp_path: Path
) -> None:
    lines = lines_for("aiter", trace, tmp_path)
    for file in case_files("aiter/bf16_untuned_gemm.csv"):
        header, first = file.read_text(encoding="utf-8").splitlines()[:2]
        assert lines[0] == f"{header},count"
        assert len(first.split(",")) == len(header.split(","))
    assert lines[0] == f"{UNTUNED},count"
    assert "32,48,64,True,torch.float32,torch.float32,False,False,2" in lines
    assert "32,48,64,False,torch.bfloat16,torch.bfloat16,False,False,1" in lines
    batched = (tmp_path / "list_batched.txt").read_text(encoding="utf-8").splitlines()
    assert batched == ["B,M,N,K,count", "3,32,24,16,1"]
    again = load(tmp_path / "list.txt")
    assert [item.op for item in again.signatures] == ["aten.linear.default"] * (len(lines) - 1)
    (tmp_path / "again").mkdir()
    rows = [line.rpartition(",")[0] for line in lines_for("aiter", tmp_path / "list.txt", tmp_path / "again")]
    assert sorted(rows) == sorted(line.rpartition(",")[0] for line in lines)


def test_lists_for_hipblaslt_and_benchdnn_have_the_forms_of_their_documentation(trace: Path, tmp_path: Path) -> None:
    (first, *_) = [line for line in lines_for("hipblaslt", trace, tmp_path) if "bias_vector" in line]
    assert first.startswith(
        "- { function: matmul, M: 48, N: 32, K: 64, lda: 64, ldb: 64, ldc: 48, ldd: 48, stride_a: 0"
    )
    assert "transA: T, transB: N, batch_count: 1, a_type: f32_r" in first
    entries = yaml.safe_load((tmp_path / "list.txt").read_text(encoding="utf-8"))
    assert {entry["batch_count"] for entry in entries} == {1, 3}
    (tmp_path / "dnn").mkdir()
    lines_for("benchdnn", trace, tmp_path / "dnn")
    lists = {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "dnn").iterdir()}
    text = "\n".join(lists.values())
    assert "--reset --dt=f32:f32:f32 --strides=64x1:1x64: --bia_dt=f32 --bia_mask=2 32x64:64x48\n" in text
    assert "--reset --dt=f32:f32:f32 --strides=512x16x1:384x1x16: 3x32x16:3x16x24\n" in text
    assert "--dir=FWD_B --dt=f32:f32:f32 g2mb2ic8oc12_ih16iw20_oh8ow10_kh3kw5_sh2sw2_ph1pw2_dh0dw0\n" in text
    assert "--dir=FWD_D --dt=f32:f32:f32 g1mb2ic8oc6_iw16_ow34_kw4_sw2_pw0_dw0\n" in text
    assert {name for name, lines in lists.items() if "_iw16_" in lines} <= {"list.txt", "list_deconv.txt"}


def tuned_files(trace: Path, folder: Path) -> Iterator[Path]:
    entry = next(line for line in lines_for("tunableop", trace, folder) if "_NN,nn_48_32_64" in line)
    files = {
        "tunableop.csv": f"Validator,PT_VERSION,2.13.0\n{entry},Gemm_Hipblaslt_1219,1.262\n",
        "aiter.csv": f"cu_num,{UNTUNED},libtype,solidx,splitK,us,kernelName,err_ratio,tflops,bw\n"
        "80,32,48,64,True,torch.float32,torch.float32,False,False,hipblaslt,7,0,1.5,x,0.0,1,2\n",
        "hipblaslt.txt": "transA,transB,grouped_gemm,batch_count,m,n,k,a_type,b_type,c_type,d_type,compute_type,us\n"
        "N,N,0,1,48,32,64,f32_r,f32_r,f32_r,f32_r,f32_r,16.1\n",
        "matmul_kernel.autotune.json": json.dumps(
            {"key": [32, 48, 64, *["torch.bfloat16"] * 3], "configs_timings": [[{"num_warps": 4}, 0.1]]}
        ),
    }
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
        yield folder / name


def test_share_of_tuned_entries_is_reported(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in tuned_files(trace, tmp_path):
        capsys.readouterr()
        assert main(["trace", "tuner", str(trace), "--tuned", str(path)]) == 0
        first, *_ = capsys.readouterr().out.splitlines()
        assert first.startswith("1 of "), path
        assert "have a tuned entry: " in first


UNTUNED_SHAPES = """\
M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle
2,3, 4,False,torch.float32,torch.float32,False,False
2,3,4,True,torch.float32,torch.float32,False,False
2,3,4,False,torch.bfloat16,torch.float32,False,False
"""
TUNED = "gfx,cu_num,M,N,K,kernelId,us,kernelName\ngfx950,256,2,3,4,5,7.5,a\ngfx950,256,2,3,4,5,0.5,a\n"


def test_rows_are_products_with_bias_and_result_dtype(tmp_path: Path) -> None:
    trace, _ = trace_of(tmp_path / "shapes.csv", UNTUNED_SHAPES)
    linear, biased, widening = trace.signatures
    assert [item.op for item in trace.signatures] == ["aten.linear.default", "aten.linear.default", "aten.mm.dtype"]
    assert [tensor.shape for tensor in linear.args] == [(2, 4), (3, 4)]
    assert [tensor.shape for tensor in biased.args] == [(2, 4), (3, 4), (3,)]
    assert widening.args[1:] == (TensorSpec((4, 3), (1, 4), torch.bfloat16, "cpu"), torch.float32)
    rows = replay(tmp_path / "shapes.csv", device="cpu", iterations=1)
    # the processor has no product with another dtype
    assert [row.status for row in rows] == ["ok", "ok", "unsupported"]


def test_batches_are_batched_products(tmp_path: Path) -> None:
    trace, reader = trace_of(tmp_path / "bf16_untuned_batched_gemm.csv", "B,M,N,K\n16,2,3,4\n")
    assert [tuple(result.shape) for _, result in results_of(trace)] == [(16, 2, 3)]
    assert any(text.startswith("dtypes") for text in reader.losses.defaults)


def test_line_of_json_is_not_a_table() -> None:
    stack = b'{"stack": "matmul(a, b, c, M, N, K, stride)"}\n'
    assert not recognizes(Head(Path("a.ndjson"), ".ndjson", stack))


def test_tuned_files_have_times(tmp_path: Path) -> None:
    trace, reader = trace_of(tmp_path / "bf16_tuned_gemm.csv", TUNED)
    assert trace.calls["duration_ns"].tolist() == [7500, 500]
    assert trace.calls["device_ns"].tolist() == [7500, 500]
    assert not any(text.startswith("durations") for text in reader.losses.defaults)


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("a8w8_untuned_gemm.csv", "M,N,K\n1,2,3\n", "quantized"),
        ("a.csv", f"{','.join(MIXTURE)},dtype\n4,8,8,2,2,torch.bfloat16\n", "mixture of experts"),
        ("a.csv", "M,N,K,dtype\n1,2,3,torch.float99\n", "unknown dtype"),
        ("a.csv", "M,N,K\n1,two,3\n", "expected a size in digits, got 'two'"),
        ("a.csv", "M,N,K\n9999999999,9999999999,9999999999\n", "is too large"),
        ("a.csv", "M,N,K\n1,2\n", "a row has no column 'K'"),
        ("a.csv", "M,N,K,us\n1,2,3,nan\n", "expected a time in us, got 'nan'"),
    ],
)
def test_rows_without_a_torch_operator_are_counted(tmp_path: Path, name: str, text: str, reason: str) -> None:
    trace, reader = trace_of(tmp_path / name, text)
    assert trace.calls.empty
    ((_, told),) = reader.losses.skipped
    assert reason in told


TENSOR = {"type": "tensor", "shape": [8, 4], "dtype": "torch.float16", "device": "cuda:0", "stride": [1, 8]}
CODE = "@triton.jit\ndef scale(x, out, count, BLOCK: tl.constexpr, KIND: 'tl.constexpr'):\n    pass\n"
COMPILATION = {
    "event_type": "compilation",
    "payload": {
        "metadata": {"hash": "7f", "name": "scale"},
        "python_source": {"file_path": "/home/a/kernels.py", "code": CODE},
    },
}
TRITON = "/usr/lib/site-packages/triton/runtime"
STACK = [
    {"line": 3, "name": "<module>", "filename": "/home/a/train.py", "loc": "main()"},
    {"line": 12, "name": "main", "filename": "/home/a/train.py", "loc": "scale[grid](x)"},
    {"line": 370, "name": "<lambda>", "filename": f"{TRITON}/jit.py", "loc": "return"},
    {"line": 40, "name": "convert", "filename": "/home/a/structured_logging.py", "loc": "stack"},
]
LAUNCH: dict[str, Any] = {
    "event_type": "launch",
    "pid": 7,
    "name": "scale",
    "grid": [4, 2],
    "compilation_metadata": {"hash": "7f", "num_warps": 4, "num_stages": 2, "num_ctas": 1, "maxnreg": None},
    "extracted_args": {
        "x": {**TENSOR, "storage_offset": 0, "data_ptr": "0x7f0000000000"},
        "out": {**TENSOR, "storage_offset": 2, "data_ptr": "0x7f0000000004"},
        "count": {"type": "int", "value": 32},
        "BLOCK": {"type": "int", "value": 16},
        "KIND": {"type": "dtype", "repr": "bf16"},
    },
    "stack": STACK,
}


def trace_of(path: Path, *events: Any) -> tuple[Trace, TraceReader]:
    path.write_text("".join(event if isinstance(event, str) else f"{json.dumps(event)}\n" for event in events))
    reader = TraceReader(path)
    return load(path, reader=reader), reader


def test_launches_have_grid_constants_options_and_scope(tmp_path: Path) -> None:
    trace, _ = trace_of(tmp_path / "log.ndjson", COMPILATION, LAUNCH, LAUNCH)
    (signature,) = trace.signatures
    assert (signature.op, len(trace.calls)) == ("kernels:scale", 2)
    assert is_launch(signature)
    facts = {"grid": (4, 2), "BLOCK": 16, "KIND": torch.bfloat16, "num_warps": 4, "num_stages": 2, "num_ctas": 1}
    assert launch_facts(signature) == facts
    x, out, count = signature.args
    assert (x, count) == (TensorSpec((8, 4), (1, 8), torch.float16, "cuda:0", storage=0), 32)
    # both begin at the same address
    assert (out.storage, out.offset) == (0, 2)
    assert trace.calls[["file", "line", "function"]].iloc[0].tolist() == ["/home/a/train.py", 12, "main"]


def test_trial_launches_of_the_autotuner_are_counted_separately(tmp_path: Path) -> None:
    tuning = [*STACK[:2], {"line": 164, "name": "_bench", "filename": f"{TRITON}/autotuner.py"}, *STACK[2:]]
    parsed = {**LAUNCH, "autotune_launch_type": "benchmark"}
    trace, reader = trace_of(tmp_path / "log.ndjson", COMPILATION, {**LAUNCH, "stack": tuning}, parsed, LAUNCH)
    assert len(trace.calls) == 1
    ((name, reason),) = reader.losses.skipped
    assert (name, "autotuner" in reason, reader.losses.skipped[name, reason]) == ("scale", True, 2)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"extracted_args": {"_note": "argument extraction skipped during CUDA graph capture"}},
            "argument _note has no type",
        ),
        (
            {"extracted_args": {"f": {"type": "function", "repr": "<function f>"}}},
            "the kernel's argument f, a function",
        ),
        ({"extracted_args": {"x": {**TENSOR, "stride": [1]}}}, "strides or offset do not fit"),
        ({"extracted_args": {"BLOCK": TENSOR}}, "a tensor is passed for a constexpr argument"),
        ({"extracted_args": {"n": {"type": "int", "value": 1 << 70}}}, "64 bits"),
        ({"grid": [1 << 40]}, "grid"),
    ],
)
def test_launches_that_cannot_be_repeated_are_counted(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    trace, reader = trace_of(tmp_path / "log.ndjson", COMPILATION, {**LAUNCH, **change})
    assert trace.calls.empty
    ((_, told),) = reader.losses.skipped
    assert reason in told


def test_broken_lines_and_unknown_kernels_are_skipped(tmp_path: Path) -> None:
    broken = '{"event_type": "launch", "na{"event_type": "launch"\n'
    other = {**LAUNCH, "compilation_metadata": {"hash": "80"}}
    trace, reader = trace_of(tmp_path / "log.ndjson", COMPILATION, broken, other)
    assert [item.op for item in trace.signatures] == ["train:scale"]
    assert dict(reader.losses.skipped) == {("?", "a line is not JSON"): 1}


def test_log_with_compilations_only_explains_how_to_log_launches(tmp_path: Path) -> None:
    trace, reader = trace_of(tmp_path / "log.ndjson", COMPILATION)
    assert trace.calls.empty
    ((name, reason),) = reader.losses.skipped
    assert (name, "enable_trace_launch=True" in reason) == ("scale", True)
