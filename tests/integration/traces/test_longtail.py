"""Tests that long-tail functions are found in traces of programs whose functions are known."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from example_trace import write
from programs import SHIPPED_TRACES, captured
from torch import Tensor, nn

from opgrip.errors import UserError
from opgrip.platform.peaks import bandwidth
from opgrip.traces import Trace, load
from opgrip.traces.analysis.longtail import LongTail, LongTailFunction, bandwidth_of, find_longtail
from opgrip.traces.schema.arguments import TensorSpec
from opgrip.traces.schema.records import Calls, End, Scope, Signature

SPEED = 1e10


def centers(boxes: Tensor) -> Tensor:
    middle = (boxes[:, :2] + boxes[:, 2:]) * 0.5
    size = boxes[:, 2:] - boxes[:, :2]
    return torch.cat([middle, size], dim=1)


def middling(first: Tensor, second: Tensor) -> Tensor:
    difference = (first - second).abs()
    larger = difference * 2
    return larger + 1


def doubled(numbers: Tensor) -> Tensor:
    return numbers * 2


def penalty(weight: Tensor, other: Tensor) -> Tensor:
    return (weight - other).abs().sum()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        images = self.conv(images)
        images = images.relu()
        return images + 1


def find(*traces: Trace) -> LongTail:
    return find_longtail(traces, lambda trace: SPEED)


def by_name(found: LongTail) -> dict[str, LongTailFunction]:
    return {item.name: item for item in found.functions}


def test_operators_and_calls_of_a_function_are_counted(tmp_path: Path) -> None:
    boxes = torch.rand(8, 4)

    def program() -> None:
        for _ in range(3):
            doubled(centers(boxes))
            centers(centers(boxes))

    # torch.stack is one operator or five, depending on the version of torch
    each = len(captured(tmp_path, lambda: centers(boxes), "one.jsonl").calls)
    found = by_name(find(captured(tmp_path, program)))
    item = found["centers"]
    assert each in (8, 12)
    assert (item.calls, item.launches, item.backward_launches) == (9, 9 * each, 0)
    assert item.pattern.endswith("test_longtail:centers")
    assert "doubled" not in found


def test_waiting_for_other_processes_is_not_longtail(tmp_path: Path) -> None:
    vector = TensorSpec((4,), (1,), torch.float32, "cpu")
    scope = Scope(0, "", "", "forward", function="wait_for_all", file="/a/waits.py", line=3)
    names = ("aten.mul.Tensor", "_c10d_functional.wait_tensor.default")
    signatures = [Signature(place, "operator", name, (vector,), {}, vector) for place, name in enumerate(names)]
    order = [0, 0, 1, 0, 0] * 4
    starts = [1_000_000 * place for place in range(len(order))]
    durations = [900_000 if number else 1000 for number in order]
    calls = Calls(0, order, [0] * len(order), starts, durations)
    path = write(tmp_path / "t.jsonl", [scope, *signatures, calls, End(len(order), 2, 20_000_000)])
    item = by_name(find(load(path)))["wait_for_all"]
    assert item.operator_ns == 16 * 1000


def test_functions_of_one_dense_kernel_are_not_longtail(tmp_path: Path) -> None:
    block, images = Block(), torch.rand(2, 16, 64, 64)
    trace = captured(tmp_path, lambda: [block(images) for _ in range(4)])
    assert "Block.forward" not in by_name(find(trace))


def test_bytes_are_those_of_inputs_and_outputs(tmp_path: Path) -> None:
    first, second = torch.rand(1000), torch.rand(1000)
    found = find(captured(tmp_path, lambda: doubled(middling(first, second))))
    item = by_name(found)["middling"]
    assert item.bytes == 3 * 4000
    assert item.fused_ns == pytest.approx(3 * 4000 / SPEED * 1e9)
    assert item.saving_ns == max(0, item.wall_ns - item.fused_ns)


def test_bytes_of_a_view_are_those_of_its_elements(tmp_path: Path) -> None:
    numbers = torch.rand(1000, 10)
    found = find(captured(tmp_path, lambda: middling(numbers[:, 0], numbers[:, 1])))
    assert by_name(found)["middling"].bytes == 3 * 4000


def test_backward_calls_belong_to_the_function_of_their_forward_call(tmp_path: Path) -> None:
    weight, other = torch.rand(50, requires_grad=True), torch.rand(50)

    def program() -> None:
        for _ in range(2):
            penalty(weight, other).backward()

    item = by_name(find(captured(tmp_path, program)))["penalty"]
    assert (item.calls, item.launches) == (2, 2 * 3)
    assert item.backward_launches >= 2 * 3
    assert 0 < item.backward_ns < item.wall_ns


def test_traces_of_a_set_are_added_up(tmp_path: Path) -> None:
    one = captured(tmp_path, lambda: centers(torch.rand(8, 4)))
    two = captured(tmp_path, lambda: [centers(torch.rand(9, 4)) for _ in range(2)], "u.jsonl")
    alone, both = by_name(find(one))["centers"], by_name(find(one, two))["centers"]
    assert (both.calls, both.traces) == (3, 2)
    assert both.bytes == alone.bytes + by_name(find(two))["centers"].bytes


def test_shipped_detector_has_its_box_code_first() -> None:
    trace = next(load(path) for path in SHIPPED_TRACES if path.name == "faster_rcnn.jsonl")
    names = [item.name for item in find(trace).functions]
    assert {"delta2bbox", "AnchorGenerator.single_level_grid_priors"} <= set(names[:5])
    assert not any("Bottleneck" in name or name == "RoIAlignFunction.forward" for name in names)


def test_bandwidth_is_measured_once_and_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPGRIP_CACHE", str(tmp_path))
    speed = bandwidth()
    assert 1e8 < speed < 1e14
    assert bandwidth() == speed
    (tmp_path / "measured.json").write_text('{"bandwidth": "fast"}')
    assert bandwidth() > 0


def test_bandwidth_of_a_missing_device_is_not_guessed(tmp_path: Path) -> None:
    trace = captured(tmp_path, lambda: torch.ones(3) + 1)
    text = (tmp_path / "t.jsonl").read_text().replace('"device":"cpu"', '"device":"cuda:7"')
    (tmp_path / "t.jsonl").write_text(text)
    assert bandwidth_of(trace) > 0
    with pytest.raises(UserError, match="--bandwidth"):
        bandwidth_of(load(tmp_path / "t.jsonl"))
