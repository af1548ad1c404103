"""Indices that operators do not check, and traces that would access memory out of bounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from example_trace import write
from programs import run_command, succeed

from opgrip.replay import load_results
from opgrip.replay.operators.admission import Unsupported
from opgrip.replay.operators.agreement.indices import bound_indices, bounded_arguments, bounding
from opgrip.traces.schema.arguments import TensorSpec
from opgrip.traces.schema.records import OPERATOR, Calls, End, Record, Scope, Signature, Values
from opgrip.traces.values.exact import Constant

FAR = 10**9
BACKWARD = torch.ops.aten.max_pool2d_with_indices_backward.default


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


def far(*shape: int) -> torch.Tensor:
    return torch.full(shape, FAR)


def pooled(index: torch.Tensor) -> tuple[Any, ...]:
    return ones(1, 1, 2, 2), ones(1, 1, 4, 4), [2, 2], [2, 2], [0, 0], [1, 1], False, index


@pytest.mark.parametrize(
    ("op", "args", "kwargs", "index", "most"),
    [
        ("max_pool2d_with_indices_backward.default", pooled(far(1, 1, 2, 2)), {}, 7, 15),
        ("adaptive_max_pool2d_backward.default", (ones(1, 1, 2, 2), ones(1, 1, 4, 4), far(1, 1, 2, 2)), {}, 2, 15),
        ("_ctc_loss.default", (ones(5, 1, 3), far(1, 2), [5], [2]), {}, 1, 2),
        ("embedding_sparse_backward.default", (ones(1, 2), far(1), 5, -1, False), {}, 1, 4),
        ("_convert_indices_from_coo_to_csr.default", (far(3), 4), {}, 0, 3),
        ("_convert_indices_from_csr_to_coo.default", (far(3), torch.arange(4)), {}, 0, 4),
        ("segment_reduce.default", (ones(5), "sum"), {"lengths": far(2), "unsafe": True}, "lengths", 5),
        ("segment_reduce.default", (ones(5), "sum"), {"offsets": far(2), "unsafe": True}, "offsets", 5),
        ("_embedding_bag_dense_backward.default", (ones(1, 2), *[far(1)] * 4, 5, False, 0, None), {}, 1, 4),
    ],
)
def test_out_of_bounds_indices_are_clamped(
    op: str, args: tuple[Any, ...], kwargs: dict[str, Any], index: int | str, most: int
) -> None:
    packet, _, overload = op.partition(".")
    function = getattr(getattr(torch.ops.aten, packet), overload)
    bound_indices(function, args, kwargs)
    tensor = args[index] if isinstance(index, int) else kwargs[index]
    assert 0 <= int(tensor.min()) <= int(tensor.max()) <= most
    function(*args, **kwargs)


def test_valid_indices_are_unchanged() -> None:
    index = torch.tensor([[[[0, 5], [15, 3]]]])
    bound_indices(BACKWARD, pooled(index), {})
    assert index.flatten().tolist() == [0, 5, 15, 3]
    lengths = torch.tensor([4, 0, 1])
    bound_indices(torch.ops.aten.segment_reduce.default, (ones(5), "sum"), {"lengths": lengths, "unsafe": True})
    assert lengths.tolist() == [4, 0, 1]


def test_indices_that_share_memory_are_clamped() -> None:
    index = far(1).expand(1, 1, 2, 2)
    bound_indices(BACKWARD, pooled(index), {})
    assert index.unique().tolist() == [0]


def test_indices_read_by_other_calls_are_copied_before_clamping() -> None:
    padded = torch.tensor([[1, 2, -1, -1]])
    args, _ = bounded_arguments(torch.ops.aten._ctc_loss.default, (ones(5, 1, 3), padded, [5], [2]), {})
    assert args[1].tolist() == [[1, 2, 0, 0]]
    assert padded.tolist() == [[1, 2, -1, -1]]
    within = torch.tensor([[1, 2, 0, 0]])
    args, _ = bounded_arguments(torch.ops.aten._ctc_loss.default, (ones(5, 1, 3), within, [5], [2]), {})
    assert args[1] is within
    with pytest.raises(Unsupported, match="clamped to valid values"):
        bounded_arguments(torch.ops.aten._ctc_loss.default, (ones(5, 1, 0), padded, [5], [2]), {})


def test_operator_that_checks_its_indices_is_called_unchanged() -> None:
    gather = torch.ops.aten.gather.default
    assert bounding(gather) is gather
    assert bounding(BACKWARD) is not BACKWARD


def float_spec(*shape: int, **others: Any) -> TensorSpec:
    return spec(torch.float32, *shape, **others)


def spec(dtype: torch.dtype, *shape: int, **others: Any) -> TensorSpec:
    stride = tuple(torch.empty(shape, device="meta").stride())
    return TensorSpec(shape, stride, dtype, "cpu", **others)


def trace_of(path: Path, calls: list[tuple[str, tuple[Any, ...], Any, list[int]]]) -> Path:
    """Write a trace of calls in one module, from operator, arguments, outputs and the storages of both."""
    signatures: list[Record] = [
        Signature(number, OPERATOR, op, args, {}, outputs) for number, (op, args, outputs, _) in enumerate(calls)
    ]
    numbers = list(range(len(calls)))
    storages = [storage for *_, own in calls for storage in own]
    block = Calls(
        *(0, numbers, [0] * len(calls), [10 * number for number in numbers], [5] * len(calls)),
        *([len(own) for *_, own in calls], storages),
    )
    records = [
        Scope(0, "net", "Net", "forward"),
        *signatures,
        block,
        End(len(calls), len(calls), 10 * len(calls)),
    ]
    return write(path, records)


POOLED = (float_spec(1, 1, 2, 2), float_spec(1, 1, 4, 4), [2, 2], [2, 2], [0, 0], [1, 1], False)
INDEX = spec(torch.int64, 1, 1, 2, 2)


@pytest.mark.parametrize("way", [[], ["--unit", "module"], ["--sequence"]])
def test_out_of_bounds_indices_of_a_trace_end_no_process(tmp_path: Path, way: list[str]) -> None:
    path = trace_of(
        tmp_path / "t.jsonl",
        [
            ("aten.fill_.Scalar", (INDEX, FAR * 8), INDEX, [3, 3]),
            ("aten.max_pool2d_with_indices_backward.default", (*POOLED, INDEX), float_spec(1, 1, 4, 4), [1, 2, 3, 4]),
        ],
    )
    done = succeed("opreplay", path, "--iterations", "2", *way, cwd=tmp_path)
    assert "ended its process" not in done.stdout + done.stderr


def test_out_of_bounds_values_of_a_case_are_clamped(tmp_path: Path) -> None:
    index = spec(torch.int64, 1, 1, 2, 2, values=0)
    signature = Signature(0, OPERATOR, str(BACKWARD), (*POOLED, index), {}, float_spec(1, 1, 4, 4))
    block = Calls(0, [0], [0], [0], [5])
    path = write(
        tmp_path / "t.jsonl",
        [Values(0, Constant(FAR * 8)), Scope(0, "", "", "forward"), signature, block, End(1, 1, 10)],
    )
    output = tmp_path / "r.json"
    succeed("opreplay", path, "--iterations", "2", "-o", output, cwd=tmp_path)
    assert load_results(output)["status"].tolist() == ["ok"]


def test_view_beyond_its_memory_is_refused_in_a_unit(tmp_path: Path) -> None:
    source, beyond = float_spec(4), float_spec(4, offset=1000)
    path = trace_of(
        tmp_path / "t.jsonl",
        [
            ("inductor._reinterpret_tensor.default", (source, [4], [1], 1000), beyond, [1, 1]),
            ("aten.fill_.Scalar", (beyond, 1.5), beyond, [1, 1]),
        ],
    )
    output = tmp_path / "r.json"
    done = run_command("opreplay", path, "--unit", "module", "--iterations", "2", "-o", output, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    (row,) = load_results(output).to_dict("records")
    assert row["status"] == "unsupported"
    assert "is for torch's own compilers" in row["error"]
