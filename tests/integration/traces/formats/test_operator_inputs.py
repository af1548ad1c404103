"""Tests of operator inputs of TritonBench and BackendBench, read as traces and written."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow
import pytest
import torch
from foreign_data import data_files, needs_data, write_as
from programs import SHIPPED_TRACES
from pyarrow import parquet

from opgrip.errors import UserError
from opgrip.traces import TraceReader, load
from opgrip.traces.formats.operator_inputs import parse_call
from opgrip.traces.io.foreign_files import format_of
from opgrip.traces.schema.arguments import TensorSpec
from opgrip.traces.schema.records import Signature

BASE = """\
Operator: aten.add.Tensor
cnt: 3, ((T([2, 3], f16), T([2, 3], f16, stride=(0, 1))), {'alpha': -2})
cnt: 1, ((T([2, 3], i64), 1e-06), {})
Operator: aten._to_copy.default
cnt: 2, ((T([4], f32),), {'dtype': f16, 'layout': torch.strided, 'device': 'cuda'})
"""


def test_operators_counts_shapes_and_settings_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(BASE)
    trace = load(tmp_path / "a.txt")
    assert trace.calls["op"].value_counts().to_dict() == {"aten.add.Tensor": 4, "aten._to_copy.default": 2}
    first, second, third = trace.signatures
    assert first.args == (
        TensorSpec((2, 3), (3, 1), torch.float16, "cpu"),
        TensorSpec((2, 3), (0, 1), torch.float16, "cpu"),
    )
    assert first.kwargs == {"alpha": -2}
    assert second.args[1] == 1e-06
    assert third.kwargs == {"dtype": torch.float16, "layout": torch.strided, "device": torch.device("cuda")}
    assert trace.header["converted_from"] == "tritonbench"
    assert trace.summary()["share"].tolist() == pytest.approx([4 / 6, 2 / 6])


@needs_data
@pytest.mark.parametrize("path", data_files("tritonbench/*.txt"), ids=lambda path: path.stem)
def test_real_files_load_and_failures_are_counted(path: Path, tmp_path: Path) -> None:
    reader = TraceReader(path)
    trace = load(path, reader=reader)
    assert trace.end is not None
    # overloads unknown to this torch are replaced by known ones, which is reported
    dropped = {item.op for item in trace.end.dropped} | {text.partition(":")[0] for text in reader.losses.defaults}
    operators = {line.split()[1] for line in path.read_text().splitlines() if line.startswith("Operator:")}
    assert len(set(trace.calls["op"])) >= 0.95 * len(operators)
    assert set(trace.calls["op"]) | dropped >= operators

    written = tmp_path / "again.txt"
    losses = write_as("tritonbench", trace, written)
    again = load(written)
    assert sorted(map(call_of, again.signatures)) == sorted(map(call_of, trace.signatures))
    assert not losses.skipped


def call_of(signature: Signature) -> str:
    return f"{signature.op} {signature.args} {signature.kwargs}"


@pytest.mark.parametrize(
    "text",
    [
        "((__import__('os').system('true'),), {})",
        "((T([1] * 10**9, f32),), {})",
        "((T([-1], f32),), {})",
        "((T([2, 3], f32, stride=(1,)),), {})",
        "((lambda: 1,), {})",
        "(" * 2000,
        "((T([99999999999999999999999999], f32),), {})",
        "((), {**{}})x",
        "((torch.load,), {})",
        # too long to be written as decimal text
        "((0x" + "f" * 5000 + ",), {})",
        "((-0x" + "f" * 5000 + ",), {})",
        "(({0x" + "f" * 5000 + ": 1},), {})",
    ],
)
def test_text_that_is_not_a_call_is_refused_and_not_run(text: str) -> None:
    with pytest.raises(ValueError, match=r"do not fit|cannot be read|unsupported|more than 64|are not|is not"):
        parse_call(text)


# keys with equal hashes, since hash(-1) == hash(-2)
COLLIDING = "{" + ", ".join(f"{key}: 1" for key in product((-1, -2), repeat=8)) + "},"


@pytest.mark.parametrize("items", ["0, " * 100_000, COLLIDING])
def test_expensive_call_text_is_refused(items: str) -> None:
    with pytest.raises(ValueError, match=r"more than 262,144 characters|keys of a dictionary have the same hash"):
        parse_call(f"(({items}), {{}})")


def test_line_with_too_many_calls_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Operator: aten.relu.default\ncnt: 9999999, ((T([4], f32),), {})\n")
    with pytest.raises(UserError, match="counts more than 1,000,000 calls"):
        list(TraceReader(tmp_path / "a.txt"))


def test_overload_of_older_torch_is_replaced_by_a_matching_one(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Operator: aten.sum.SymInt\ncnt: 1, ((T([2, 3], f16), [1], True), {})\n")
    assert load(tmp_path / "a.txt").calls["op"].tolist() == ["aten.sum.dim_IntList"]


def test_lines_that_are_not_calls_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(BASE + "cnt: 2, ((T([4], x9),), {})\nnonsense\n")
    trace = load(tmp_path / "a.txt")
    assert trace.end is not None
    assert sum(item.count for item in trace.end.dropped) == 3
    assert len(trace.calls) == 6


ROWS = [
    ("aten.add.Tensor", "((T([2, 3], f16), T([2, 3], f16, stride=(0, 1))), {'alpha': -2})", 3),
    ("aten._to_copy.default", "((T([4], f32, [2]),), {'dtype': 'f16', 'device': \"torch.device('cpu')\"})", 2),
    ("aten.relu.default", "'((T([5], bf16),), {})'", 0),
]


def table(rows: list[tuple[Any, ...]], path: Path) -> Path:
    columns = ["op_name", "args", "count"]
    pd.DataFrame(rows, columns=columns).assign(included_in_benchmark=True).to_parquet(path)
    return path


def test_operators_arguments_and_counts_are_read(tmp_path: Path) -> None:
    path = table(ROWS, tmp_path / "a.parquet")
    assert format_of(path) == "backendbench"
    trace = load(path)
    counts = trace.calls["op"].value_counts().to_dict()
    assert counts == {"aten.add.Tensor": 3, "aten._to_copy.default": 2, "aten.relu.default": 1}
    first, second, third = trace.signatures
    assert first.args[1] == TensorSpec((2, 3), (0, 1), torch.float16, "cpu")
    assert first.kwargs == {"alpha": -2}
    assert second.args == (TensorSpec((4,), (2,), torch.float32, "cpu"),)
    assert second.kwargs == {"dtype": torch.float16, "device": torch.device("cpu")}
    assert third.args == (TensorSpec((5,), (1,), torch.bfloat16, "cpu"),)


@pytest.mark.slow
def test_trace_is_written_with_the_columns_of_the_data_set(tmp_path: Path) -> None:
    trace = load(SHIPPED_TRACES[0])
    losses = write_as("backendbench", trace, tmp_path / "a.parquet")
    written = pd.read_parquet(tmp_path / "a.parquet")
    assert written.columns.tolist() == [
        *("uuid", "op_name", "args", "count", "is_synthetic", "included_in_benchmark", "why_excluded", "runtime_ms"),
        *("relative_runtime_to_kernel_launch", "runnable", "is_overhead_dominated_op"),
    ]
    assert written["uuid"].is_unique
    assert (written["runtime_ms"] > 0).all()
    assert int(written["count"].sum()) + sum(losses.skipped.values()) == len(trace.own_calls)

    again = load(tmp_path / "a.parquet")
    assert len(again.calls) == written["count"].sum()
    write_as("backendbench", again, tmp_path / "b.parquet")
    columns = ["uuid", "op_name", "args", "count"]
    assert written[columns].equals(pd.read_parquet(tmp_path / "b.parquet")[columns])


BAD_ROWS = [
    ("aten.relu.default", "((__import__('os').system('true'),), {})", 2),
    ("aten.relu.default", None, 3),
    (None, "((), {})", 4),
    ("rm -rf /", "((), {})", 5),
    ("aten.relu.default", "((T([4], f32),), {'device': \"torch.device('nowhere:x')\"})", 2),
]


def test_rows_that_are_not_calls_are_counted(tmp_path: Path) -> None:
    reader = TraceReader(table([*ROWS, *BAD_ROWS], tmp_path / "a.parquet"))
    assert list(reader)
    counts = [(reason, count) for (_, reason), count in reader.losses.skipped.items()]
    for words, expected in (("unsupported argument", 2), ("not written as Python literals", 3)):
        assert sum(count for reason, count in counts if words in reason) == expected
    assert sum(count for reason, count in counts if "has no operator name" in reason) == 9


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (pd.DataFrame({"op_name": [1], "args": ["((), {})"]}), "not string"),
        (pd.DataFrame({"op_name": ["aten.relu.default"], "args": ["((), {})"], "count": [1 << 40]}), "counts more"),
    ],
)
def test_columns_of_other_types_are_refused(tmp_path: Path, frame: pd.DataFrame, reason: str) -> None:
    frame.to_parquet(tmp_path / "a.parquet")
    with pytest.raises(UserError, match=reason):
        list(TraceReader(tmp_path / "a.parquet", format_name="backendbench"))


def test_large_text_counts_in_each_row_that_refers_to_it(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    text = f"((T([1], f32), '{'x' * (1 << 14)}'), {{}})"
    texts = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 2000), pyarrow.array([text]))
    names = pyarrow.array(["aten.relu.default"] * 2000)
    parquet.write_table(pyarrow.table({"op_name": names, "args": texts}), path)
    assert path.stat().st_size < 1 << 16
    with pytest.raises(UserError, match="the texts of its rows have more than"):
        list(TraceReader(path))
