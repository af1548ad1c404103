"""Tests of reading aiter's CSV of matrix products as traces."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from foreign_data import CASES, needs_cases, results_of

from opgrip.errors import UserError
from opgrip.replay import replay
from opgrip.traces import Trace, TraceReader, load
from opgrip.traces.formats.tuners import MIXTURE
from opgrip.traces.schema.arguments import TensorSpec

UNTUNED = """\
M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle
2,3, 4,False,torch.float32,torch.float32,False,False
2,3,4,True,torch.float32,torch.float32,False,False
2,3,4,False,torch.bfloat16,torch.float32,False,False
"""
TUNED = "gfx,cu_num,M,N,K,kernelId,us,kernelName\ngfx950,256,2,3,4,5,7.5,a\ngfx950,256,2,3,4,5,0.5,a\n"


def trace_of(path: Path, text: str) -> tuple[Trace, TraceReader]:
    path.write_text(text)
    reader = TraceReader(path)
    return load(path, reader=reader), reader


def test_rows_are_products_with_bias_and_result_dtype(tmp_path: Path) -> None:
    trace, _ = trace_of(tmp_path / "shapes.csv", UNTUNED)
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


@pytest.mark.parametrize("separator", [";", "\t"])
def test_files_of_a_spreadsheet_are_read(tmp_path: Path, separator: str) -> None:
    expected, _ = trace_of(tmp_path / "shapes.csv", UNTUNED)
    (tmp_path / "exported.csv").write_bytes(
        b"\xef\xbb\xbf" + UNTUNED.replace(",", separator).replace("\n", "\r\n").encode()
    )
    assert load(tmp_path / "exported.csv").signatures == expected.signatures


def test_tuned_files_have_times(tmp_path: Path) -> None:
    trace, reader = trace_of(tmp_path / "bf16_tuned_gemm.csv", TUNED)
    assert trace.calls["duration_ns"].tolist() == [7500, 500]
    assert trace.calls["device_ns"].tolist() == [7500, 500]
    assert not any(text.startswith("durations") for text in reader.losses.defaults)


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("a8w8_untuned_gemm.csv", "M,N,K\n1,2,3\n", "quantized"),
        ("a.csv", "M,N,K,q_dtype_w\n1,2,3,torch.int8\n", "quantized"),
        ("a.csv", f"{','.join(MIXTURE)},dtype\n4,8,8,2,2,torch.bfloat16\n", "mixture of experts"),
        ("a.csv", "M,N,K,dtype\n1,2,3,torch.float99\n", "unknown dtype"),
        ("a.csv", "M,N,K\n1,two,3\n", "expected a size in digits, got 'two'"),
        ("a.csv", "M,N,K\n1,-2,3\n", "expected a size in digits, got '-2'"),
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


def test_file_with_too_many_rows_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opgrip.traces.formats.tuners.MOST_ROWS", 2)
    (tmp_path / "a.csv").write_text("M,N,K\n" + "1,2,3\n" * 3)
    with pytest.raises(UserError, match="more than 2 rows"):
        list(TraceReader(tmp_path / "a.csv"))


@needs_cases
def test_real_files_are_read_completely() -> None:
    path = CASES / "files/aiter" / "bf16_untuned_gemm.csv"
    reader = TraceReader(path)
    trace = load(path, reader=reader)
    assert len(trace.calls) == len(path.read_text().splitlines()) - 1
    assert not reader.losses.skipped
    reader = TraceReader(path.with_name("untuned_fmoe.csv"))
    assert load(reader.path, reader=reader).calls.empty
    assert sum(reader.losses.skipped.values()) == len(reader.path.read_text().splitlines()) - 1
