"""Operators named on the command line or registered by a program, and operator inputs of other benchmarks."""

import json
import os
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow
import pytest
import torch
from foreign_data import data_files, needs_data, write_as
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import SHIPPED_TRACES, refusal, run_command, succeed
from pyarrow import parquet

from opgrip.capture.torch_compat.torch_private import registered_by
from opgrip.errors import UserError
from opgrip.replay import replay
from opgrip.replay.cases.selection import Selection
from opgrip.replay.cases.sources.operator import OperatorSource, target_of
from opgrip.replay.operators.admission import LOOK_FOR
from opgrip.traces import TraceReader, load
from opgrip.traces.formats.operator_inputs import parse_call
from opgrip.traces.io.foreign_files import format_of
from opgrip.traces.schema.arguments import TensorSpec, tensors
from opgrip.traces.schema.records import Signature
from opgrip.traces.values import fit

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


def calls_of(folder: Path, name: str, table: dict[str, list[Any]]) -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    path = folder / f"{name}.json"
    path.write_text(json.dumps(table))
    trace = load(path)
    signatures = {item.number: item for item in trace.signatures}
    calls = (signatures[number] for number in trace.calls["signature"])
    return [(call.op, call.args, call.kwargs) for call in calls]


def tensor(*shape: int, dtype: torch.dtype = torch.float32, values: int | None = None) -> TensorSpec:
    stride = torch.empty(shape, device="meta").stride()
    return TensorSpec(shape, stride, dtype, "cpu", values=values)


def test_columns_without_an_argument_name_are_matched_by_position(tmp_path: Path) -> None:
    table = {"x1": [[4, 784, 192]], "x2": [[192]], "x3": [[192]], "x4": [[192]], "x5": [1e-5]}
    assert calls_of(tmp_path, "layer_norm", table) == [
        ("aten.layer_norm.default", (tensor(4, 784, 192), [192], tensor(192), tensor(192), 1e-5), {})
    ]


@pytest.mark.parametrize("missing", [None, "None", [False]])
def test_spellings_of_a_missing_value_are_accepted(tmp_path: Path, missing: object) -> None:
    sizes = {"input_size": [[1, 4, 9, 9]], "kernel_size": [[8, 4, 3, 3]], "bias": [missing]}
    ((op, args, kwargs),) = calls_of(tmp_path, "conv2d", {**sizes, "stride": [[2, 2]], "groups": [[1]]})
    assert op == "aten.conv2d.default"
    assert args[:2] == (tensor(1, 4, 9, 9), tensor(8, 4, 3, 3))
    assert {"stride": [2, 2], "groups": 1}.items() <= kwargs.items()


def test_overload_is_chosen_by_the_cells(tmp_path: Path) -> None:
    table = {"eq_0": [[3, 4], [3, 4], [3, 4]], "eq_1": [[3, 4], 1, [4]]}
    assert [op for op, _, _ in calls_of(tmp_path, "eq", table)] == [
        "aten.eq.Tensor",
        "aten.eq.Scalar",
        "aten.eq.Tensor",
    ]
    table = {"max1": [[2, 5], [2, 5]], "max2": [[], [5]]}
    assert [op for op, _, _ in calls_of(tmp_path, "max", table)] == ["aten.max.default", "aten.max.other"]


def test_list_of_fractions_is_a_tensor_of_these_values(tmp_path: Path) -> None:
    table = {"add1": [[128, 256]], "add2": [[1e-06]]}
    assert calls_of(tmp_path, "add", table) == [("aten.add.Tensor", (tensor(128, 256), tensor(1, values=0)), {})]
    trace = load(tmp_path / "add.json")
    assert trace.values == {0: fit(torch.tensor([1e-06]))}
    table = {"input": [[9, 2]], "target": [[9]], "weight": [[[1.0, 0.5], "cuda:0"]]}
    ((_, args, _),) = calls_of(tmp_path, "cross_entropy", table)
    assert args == (tensor(9, 2), tensor(9, dtype=torch.int64), tensor(2, values=0))


def test_words_texts_and_dtypes_are_converted_for_the_operator(tmp_path: Path) -> None:
    table = {"x1": [[5, 2]], "x2": [[5, 2]], "reduction": ["none"]}
    assert calls_of(tmp_path, "mse_loss", table)[0][1] == (tensor(5, 2), tensor(5, 2), 0)
    table = {"input": [[4, 8]], "masked": [[4, 8]], "value": ["-inf"]}
    mask = tensor(4, 8, dtype=torch.bool)
    assert calls_of(tmp_path, "masked_fill", table)[0][1] == (tensor(4, 8), mask, float("-inf"))
    table = {"size": [[32], 7], "fill_value": [1, 2], "dtype": ["int64", "None"]}
    calls = calls_of(tmp_path, "full", table)
    assert calls == [
        ("aten.full.default", ([32], 1), {"dtype": torch.int64}),
        ("aten.full.default", ([7], 2), {}),
    ]


def test_tensors_of_several_columns_are_one_argument(tmp_path: Path) -> None:
    table = {"dim": [[False], [1]], "tensor0": [[2, 3], [4, 1]], "tensor1": [[2, 5], [4, 2]], "tensor2": [[], [4, 3]]}
    assert calls_of(tmp_path, "cat", table) == [
        ("aten.cat.default", ([tensor(2, 3), tensor(2, 5)], 1), {}),
        ("aten.cat.default", ([tensor(4, 1), tensor(4, 2), tensor(4, 3)], 1), {}),
    ]


def test_function_of_several_operators_becomes_their_calls(tmp_path: Path) -> None:
    (tmp_path / "normalize.json").write_text(json.dumps({"input_size": [[4, 8], [2, 2], [3]], "p": [2, "", "two"]}))
    trace = load(tmp_path / "normalize.json")
    assert list(trace.calls["op"][:4]) == [
        "aten.linalg_vector_norm.default",
        *("aten.clamp_min.default", "aten.expand.default", "aten.div.Tensor"),
    ]
    assert len(trace.calls) == 8
    assert trace.end is not None
    (dropped,) = trace.end.dropped
    assert (dropped.op, dropped.count, dropped.reason) == ("normalize", 1, "the argument p is not a number: two")


@needs_data
@pytest.mark.slow
def test_most_operators_of_the_real_files_become_calls() -> None:
    paths = data_files("dlop/*.json")
    traces = {path.stem: load(path) for path in paths}
    assert [path for path in paths if format_of(path) != "dlop"] == []
    empty = [name for name, trace in traces.items() if trace.calls.empty]
    assert empty == []
    attention = traces.pop("mhaf")
    assert attention.end is not None
    assert not attention.end.dropped
    assert sum(attention.calls["op"] == "aten.bmm.default") == 2 * 20
    rows = {path.stem: max(map(len, json.loads(path.read_bytes()).values())) for path in paths}
    del rows["mhaf"]
    for name, trace in traces.items():
        assert trace.end is not None
        assert len(trace.calls) + sum(item.count for item in trace.end.dropped) == rows[name], name
    assert sum(len(trace.calls) for trace in traces.values()) >= 0.98 * sum(rows.values())


CSV = """id,source_neural_network,num_of_calls,parameters
#0,detr_r50_8x2_150e_coco,24,"{'input': [[16, 1, 391]], 'masked': [[16, 1, 391]], 'value': ['-inf']}"
#1,master_toy_dataset,5,"{'input': [[1, 1, 30, 30]], 'masked': [[1, 1, 30, 30]], 'value': [0]}"
"""


def test_csv_table_has_a_configuration_per_line(tmp_path: Path) -> None:
    path = tmp_path / "masked_fill_.csv"
    path.write_bytes(b"\xef\xbb\xbf" + CSV.replace("\n", "\r\n").encode())
    trace = load(path)
    assert list(trace.calls.groupby("module", observed=True)["signature"].count().items()) == [
        ("detr_r50_8x2_150e_coco", 24),
        ("master_toy_dataset", 5),
    ]
    assert [(item.op, item.args) for item in trace.signatures] == [
        ("aten.masked_fill_.Scalar", (tensor(16, 1, 391), tensor(16, 1, 391, dtype=torch.bool), float("-inf"))),
        ("aten.masked_fill_.Scalar", (tensor(1, 1, 30, 30), tensor(1, 1, 30, 30, dtype=torch.bool), 0)),
    ]


@pytest.mark.parametrize(
    "line",
    [
        "#2,net,3,__import__('os').abort()",
        "#2,net,3," + "[" * 5000,
        "#2,net,1000000000,{'input': [[2]]}",
        "#2,net,many,{'input': [[2]]}",
        "#2,net,3,{'input': [[2], [3]]}",
        "#2,net",
        "#2,net,3," + "1" * 200_000,
    ],
)
def test_unreadable_line_of_a_csv_table_is_counted(tmp_path: Path, line: str) -> None:
    (tmp_path / "masked_fill_.csv").write_text(CSV + line + "\n")
    reader = TraceReader(tmp_path / "masked_fill_.csv")
    assert list(reader)
    assert list(reader.losses.skipped.items()) == [
        (("masked_fill_", "a line does not hold id, network, number of calls and parameters"), 1)
    ]


COLUMNS = ["x1", "x2", "x3", "input_size", "mode", "dim", "dtype", "padding", "tensor0", "stride"]
CELLS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=6,
)


@given(
    st.sampled_from(
        ["add", "cat", "conv2d", "interpolate", "ctc_loss", "einsum", "max_unpool2d", "triu", "max", "view"]
    ),
    st.dictionaries(st.sampled_from(COLUMNS), st.lists(CELLS, max_size=3), max_size=8),
)
def test_arbitrary_cells_are_read_or_counted(tmp_path: Path, name: str, table: dict[str, list[object]]) -> None:
    (tmp_path / f"{name}.json").write_text(json.dumps(table))
    reader = TraceReader(tmp_path / f"{name}.json", format_name="dlop")
    records = list(reader)
    assert records
    assert sum(reader.losses.skipped.values()) <= max(map(len, table.values()), default=0)


ADD = {"self": [16, 8], "other": [16, 8]}


def signatures(operator: str, *configurations: Any) -> list[Any]:
    target = target_of([operator], [json.dumps(item) for item in configurations])
    assert OperatorSource().takes(target)
    return [case.signature for case in OperatorSource().open(target, Selection(), ()).cases]


def test_operator_is_replayed_without_a_trace() -> None:
    inputs = json.dumps(ADD)
    done = succeed("opreplay", "--operator", "aten.add.Tensor", "--inputs", inputs, "--iterations", "1", "--strict")
    assert "float32[16,8] float32[16,8]" in done.stdout
    assert "1 case: 1 ok" in done.stderr


def test_overload_is_chosen_by_the_arguments() -> None:
    ops = [item.op for item in signatures("aten::add", ADD, {"self": [3], "other": 2.5})]
    assert ops == ["aten.add.Tensor", "aten.add.Scalar"]
    assert signatures("mm", {"self": [2, 3], "mat2": [3, 4]})[0].op == "aten.mm.default"


def test_pattern_selects_the_operators_that_take_the_arguments() -> None:
    ops = [item.op for item in signatures("aten.add*", ADD)]
    assert ops == ["aten.add.Tensor", "aten.add_.Tensor"]
    assert [item.op for item in signatures("aten::ma*imum", ADD, ADD)] == ["aten.maximum.default"] * 2


@pytest.mark.parametrize(
    "name", ["torch.relu", "torch.nn.functional.relu", "nn.functional.relu", "F.relu", "torch.Tensor.relu", "aten.relu"]
)
def test_operator_is_found_by_its_python_names(name: str) -> None:
    assert [item.op for item in signatures(name, {"self": [3]})] == ["aten.relu.default"]


def test_values_are_converted_by_the_schema() -> None:
    (signature,) = signatures("aten.sum.dim_IntList", {"self": [4, 5], "dim": [1], "keepdim": True, "dtype": "float64"})
    assert signature.args[1:] == ([1], True)
    assert signature.kwargs == {"dtype": torch.float64}
    (signature,) = signatures("aten.embedding", {"weight": [10, 4], "indices": [3]})
    assert [spec.dtype for spec in tensors(signature.args)] == [torch.float32, torch.int64]
    (signature,) = signatures("aten.cat", {"tensors": [[2, 3], [4, 3]]})
    assert [spec.shape for spec in tensors(signature.args)] == [(2, 3), (4, 3)]


def test_tensor_may_have_strides_and_dtype() -> None:
    form = {"self": {"shape": [4, 3], "stride": [1, 4], "dtype": "int32"}}
    (spec,) = tensors(signatures("aten.neg", form)[0].args)
    assert (spec.stride, spec.dtype, spec.requires_grad) == ((1, 4), torch.int32, False)


def test_tensor_of_any_size_is_a_row() -> None:
    frame = replay(operator="aten.neg", inputs=json.dumps({"self": [10**15]}), iterations=1).frame
    assert list(frame["status"]) == ["failed"]
    assert "out of memory" in frame["error"][0]


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["shape", "dtype", "self"]), inner),
    max_leaves=6,
)


@settings(max_examples=150)
@given(st.sampled_from(["aten.add", "aten.sum", "aten.cat", "aten.to", "aten.full"]), values, values)
def test_any_configuration_is_accepted_or_refused_in_one_line(operator: str, one: Any, other: Any) -> None:
    with suppress(UserError):
        for signature in signatures(operator, {"self": one, "other": other}, {"tensors": one, "dim": other}):
            assert signature.op.startswith("aten.")


OWN = """
import torch
library = torch.library.Library("myops", "DEF")
library.define("twice(Tensor x) -> Tensor")
library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
"""


@pytest.fixture
def own_operators(tmp_path: Path) -> Path:
    (tmp_path / "myops.py").write_text(OWN)
    return tmp_path


@pytest.mark.slow
def test_operator_of_an_extension_is_replayed(own_operators: Path) -> None:
    words = ("--operator", "myops.twice", "--extension", "myops", "--inputs", '{"x": [8]}', "--iterations", "1")
    done = succeed("opreplay", *words, "--strict", cwd=own_operators)
    assert "myops.twice.default" in done.stdout


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import os; os.abort()", "its process ended: Aborted"),
        ("import sys; sys.exit(0)", "its process ended: status 0"),
    ],
)
def test_extension_that_cannot_be_imported_is_reported_in_one_line(own_operators: Path, text: str, reason: str) -> None:
    (own_operators / "myops.py").write_text(text)
    words = ("--operator", "myops.twice", "--extension", "myops", "--inputs", '{"x": [8]}')
    error = refusal("opreplay", *words, cwd=own_operators)
    assert error == f"opreplay: error: --extension myops cannot be imported: {reason}\n"


CUSTOM_OP = """
import torch
@torch.library.custom_op("first::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2
"""
LIBRARY = """
import torch
library = torch.library.Library("_C", "DEF")
library.define("thrice(Tensor x) -> Tensor")
library.impl("thrice", lambda x: x * 3, "CompositeExplicitAutograd")
"""
SCRIPT = """
import sys, torch
import helper
@torch.library.custom_op("own::half", mutates_args=())
def half(x: torch.Tensor) -> torch.Tensor:
    return x / 2
if __name__ == "__main__":
    import mypackage.deep.ops, mypackage._kernels
    x = torch.ones(3)
    half(torch.ops.first.twice(torch.ops._C.thrice(x)))
torch.ones(2, requires_grad=True).sum().backward()
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("custom")
    package = folder / "my programs" / "mypackage"
    (package / "deep").mkdir(parents=True)
    for file, text in (("__init__.py", ""), ("deep/__init__.py", ""), ("deep/ops.py", CUSTOM_OP)):
        (package / file).write_text(text, encoding="utf-8")
    (package / "_kernels.py").write_text(LIBRARY, encoding="utf-8")
    (package.parent / "helper.py").write_text("open('imported', 'w').close()", encoding="utf-8")
    (package.parent / "train.py").write_text(SCRIPT, encoding="utf-8")
    succeed("opcapture", "-o", "t.jsonl", "--", "my programs/train.py", cwd=folder)
    (folder / "imported").unlink()
    return folder


def rows(folder: Path, *words: str, env: dict[str, str] | None = None) -> dict[str, dict[str, str]]:
    run_command("opreplay", *words, "--iterations", "1", "-f", "-o", "r.json", cwd=folder, env=env)
    found = json.loads((folder / "r.json").read_text(encoding="utf-8"))
    return {row["op"]: row for row in found["results"]}


def test_trace_has_the_module_or_file_that_registered_an_operator(program: Path) -> None:
    origins = {item.op: item.registered_by for item in load(program / "t.jsonl", partial=False).signatures}
    assert origins["own.half.default"] == str(program / "my programs" / "train.py")
    assert origins["first.twice.default"] == "mypackage.deep.ops"
    assert origins["_C.thrice.default"] == "mypackage._kernels"
    assert origins["aten.ones.default"] is None
    hidden = run_command("opgrip", "trace", "redact", "t.jsonl", "-f", "-o", "hidden.jsonl", cwd=program)
    assert hidden.returncode == 0, hidden.stderr
    assert not any(item.registered_by for item in load(program / "hidden.jsonl").signatures)


@pytest.mark.slow
def test_custom_operator_runs_once_its_module_or_file_is_named(program: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(program / "my programs")}
    words: list[str] = ["t.jsonl"]
    script = str(program / "my programs" / "train.py")
    origins = {
        "own.half.default": script,
        "first.twice.default": "mypackage.deep.ops",
        "_C.thrice.default": "mypackage._kernels",
    }
    for op, origin in origins.items():
        row = rows(program, *words, env=env)[op]
        assert row["status"] == "unsupported"
        # a command that runs what only the trace names is not offered, and nothing of it was imported
        assert row["error"] == f"{op} is not trusted: {LOOK_FOR}"
        assert (program / "imported").exists() is (len(words) > 1)
        words += ["--extension", origin]
        row = rows(program, *words, env=env)[op]
        assert row["status"] == "ok", row["error"]
    assert len(words) == 7
    by_op = rows(program, *words, env=env)
    assert {row["status"] for row in by_op.values()} == {"ok"}


def test_module_of_a_triton_operator_is_found() -> None:
    @torch.library.triton_op("own_triton::twice", mutates_args={})
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    assert registered_by(torch.ops.own_triton.twice.default) == __name__
    assert registered_by(torch.ops.aten.add.Tensor) is None
