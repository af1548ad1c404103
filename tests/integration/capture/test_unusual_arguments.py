"""Tests of arguments other than plain tensors: storages, subclasses, packed parameters, meta and fake tensors."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import captured, succeed
from settings import rows_of, settings_of
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from opgrip.replay.cases.cases import make_cases
from opgrip.replay.inputs.inputs import Inputs, device_map
from opgrip.replay.results.results import OK
from opgrip.traces import Trace
from opgrip.traces.schema.arguments import TensorSpec
from opgrip.traces.schema.python_objects import ObjectSpec
from opgrip.traces.schema.records import NO_STORAGE, ON_FAKE, ON_META, Signature
from opgrip.traces.schema.tensor_specs import STORAGE

SETTINGS = settings_of(warmup=0, iterations=1)
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "full": {"values": "full"},
    "private": {"private": True},
}
PACKS = pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated", "ignore:.*quantize_per")


def signature_of(trace: Trace, op: str) -> Signature:
    (signature,) = (item for item in trace.signatures if item.op == op)
    return signature


def remade(trace: Trace, op: str) -> tuple[Any, ...]:
    signature = signature_of(trace, op)
    return Inputs(signature.args, signature.kwargs, trace.values, device_map("cpu", None), seed=0).make()[0]


def storages_of(trace: Trace, op: str) -> list[list[int]]:
    calls = trace.calls[trace.calls["op"] == op]
    pairs = zip(calls["first_storage"].tolist(), calls["tensors"].tolist(), strict=True)
    return [trace.storages[first : first + count].tolist() for first, count in pairs]


def assert_replays(trace: Trace) -> None:
    rows = rows_of(make_cases(trace), SETTINGS)
    assert [(row.op, row.error) for row in rows if row.status != OK or row.faithful is False] == []


@pytest.mark.parametrize("mode", MODES)
def test_storage_is_recreated_with_its_size(tmp_path: Path, mode: str) -> None:
    x = torch.arange(6.0)
    program = lambda: torch.empty(0).set_(x.untyped_storage(), 2, (2,), (2,))  # noqa: E731
    trace = captured(tmp_path, program, **MODES[mode])
    spec = signature_of(trace, "aten.set_.source_Storage_storage_offset").args[1]
    assert (spec.cls, spec.shape, spec.dtype) == (STORAGE, (24,), torch.uint8)
    _, storage, *numbers = remade(trace, "aten.set_.source_Storage_storage_offset")
    assert isinstance(storage, torch.UntypedStorage)
    assert (storage.nbytes(), numbers) == (24, [2, [2], [2]])
    assert_replays(trace)


def test_tensor_and_its_storage_share_memory_again(tmp_path: Path) -> None:
    x = torch.arange(6.0)
    trace = captured(tmp_path, lambda: x.set_(x.untyped_storage(), 1, (4,), (1,)))
    tensor, storage, *_ = remade(trace, "aten.set_.source_Storage_storage_offset")
    assert tensor.untyped_storage().data_ptr() == storage.data_ptr()


@pytest.mark.parametrize("of_tensor", [False, True], ids=["storage", "tensor"])
def test_set_connects_a_tensor_with_its_source_at_every_call(tmp_path: Path, of_tensor: bool) -> None:
    x = torch.arange(6.0)

    def program() -> None:
        x.add_(1)
        for _ in range(8):
            torch.empty(0).set_(x if of_tensor else x.untyped_storage())

    trace = captured(tmp_path, program)
    ((memory, _),) = storages_of(trace, "aten.add_.Tensor")
    calls = storages_of(trace, "aten.set_.source_Tensor" if of_tensor else "aten.set_.source_Storage")
    assert len(calls) == 8
    assert all(storages[0] not in (memory, NO_STORAGE) and storages[1:] == [memory, memory] for storages in calls)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_operator_is_recorded_for_plain_and_nested_tensors(tmp_path: Path) -> None:
    plain, nested = torch.ones(2, 3), torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)])
    trace = captured(tmp_path, lambda: [torch.relu(x) for _ in range(8) for x in (plain, plain, nested)])
    assert trace.end is not None
    assert not trace.end.dropped
    assert len(trace.calls) == 24


class Logged(torch.Tensor):
    """Subclass without `__torch_dispatch__` that counts what is done with it."""

    calls = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls += 1
        return super().__torch_function__(func, types, args, kwargs or {})


def use_logged() -> int:
    """Run operators on `Logged` tensors forward and backward; return the number of calls that the class saw."""
    Logged.calls = 0
    weight = torch.linspace(0, 1, 12).view(4, 3).as_subclass(Logged).requires_grad_()
    for _ in range(6):
        loss = (weight * 2 + weight).relu().sum()
        loss.backward()
    with torch.no_grad():
        weight.add_(1)
    return Logged.calls


@pytest.mark.parametrize("mode", MODES)
def test_tensor_subclasses_replay_as_plain_tensors(tmp_path: Path, mode: str) -> None:
    trace = captured(tmp_path, use_logged, **MODES[mode])
    specs = [leaf for item in trace.signatures for leaf in item.args if isinstance(leaf, TensorSpec)]
    assert {spec.cls for spec in specs} == {None}
    # a private trace has no values
    assert {spec.values is None for spec in specs} == {mode == "private"}
    assert_replays(trace)


def test_capture_does_not_call_functions_of_a_subclass(tmp_path: Path) -> None:
    expected, seen = use_logged(), []
    captured(tmp_path, lambda: seen.append(use_logged()))
    assert seen == [expected]


def pack_linear() -> Any:
    weight = torch.quantize_per_channel(torch.randn(4, 8), torch.full((4,), 0.1), torch.zeros(4).long(), 0, torch.qint8)
    return torch.ops.quantized.linear_prepack(weight, torch.randn(4))


def pack_convolution() -> Any:
    weight = torch.quantize_per_tensor(torch.randn(4, 4, 3, 3), 0.1, 0, torch.qint8)
    return torch.ops.quantized.conv2d_prepack(weight, None, [2, 1], [1, 1], [1, 1], 1)


def quantized_images() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.randn(2, 4, 8, 8), 0.1, 3, torch.quint8)


QUANTIZED: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], str]] = {
    "linear": (
        pack_linear,
        lambda packed: torch.ops.quantized.linear_dynamic(torch.randn(2, 8), packed),
        "linear_prepack",
    ),
    "convolution": (
        pack_convolution,
        lambda packed: torch.ops.quantized.conv2d(quantized_images(), packed, 0.2, 1),
        "conv2d_prepack",
    ),
    "embedding": (
        lambda: torch.ops.quantized.embedding_bag_prepack(
            torch.quantize_per_channel(torch.rand(9, 8), torch.full((9,), 0.1), torch.zeros(9), 0, torch.quint8)
        ),
        lambda packed: torch.ops.quantized.embedding_bag_byte(packed, torch.tensor([1, 2]), torch.tensor([0, 1])),
        "embedding_bag_prepack",
    ),
}


@PACKS
@pytest.mark.parametrize("case", list(zip(QUANTIZED, MODES, strict=True)), ids=": ".join)
def test_packed_parameters_are_packed_again(tmp_path: Path, case: tuple[str, str]) -> None:
    name, mode = case
    pack, use, packer = QUANTIZED[name]
    packed = pack()
    trace = captured(tmp_path, lambda: [use(packed) for _ in range(6)], **MODES[mode])
    specs = [leaf for item in trace.signatures for leaf in item.args if isinstance(leaf, ObjectSpec)]
    assert [spec.cls for spec in specs] == [f"torch.ops.quantized:{packer}"]
    assert_replays(trace)


@PACKS
def test_packed_weight_has_the_same_values_with_full_values(tmp_path: Path) -> None:
    packed = pack_linear()
    x = torch.randn(2, 8)
    trace = captured(tmp_path, lambda: [torch.ops.quantized.linear_dynamic(x, packed) for _ in range(6)], values="full")
    from opgrip.replay.inputs.filling import drawn_values

    signature = signature_of(trace, "quantized.linear_dynamic.default")
    args, _ = Inputs(signature.args, signature.kwargs, drawn_values(trace), device_map("cpu", None), seed=0).make()
    assert torch.equal(args[1].unpack()[0].int_repr(), packed.unpack()[0].int_repr())
    assert torch.equal(args[1].unpack()[1], packed.unpack()[1])
    assert {len(storages) for storages in storages_of(trace, signature.op)} == {4}
    assert all(storages[1:3] == [NO_STORAGE] * 2 for storages in storages_of(trace, signature.op))


@PACKS
def test_different_packed_weights_have_different_signatures(tmp_path: Path) -> None:
    weights = [torch.quantize_per_tensor(torch.randn(rows, 8), 0.1, 0, torch.qint8) for rows in (4, 5)]
    layers = [torch.ops.quantized.linear_prepack(weight, None) for weight in weights]
    x = torch.randn(2, 8)
    trace = captured(tmp_path, lambda: [torch.ops.quantized.linear_dynamic(x, layer) for layer in layers * 5])
    shapes = [item.args[1].content[0].shape for item in trace.signatures if "linear_dynamic" in item.op]
    assert shapes == [(4, 8), (5, 8)]


def without_work(trace: Trace) -> Counter[str]:
    assert trace.end is not None
    counts: Counter[str] = Counter()
    for item in trace.end.without_work:
        counts[item.reason] += item.count
    return counts


def use_meta() -> None:
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(1 << 20, 64), nn.ReLU())
    for _ in range(6):
        net(torch.empty(4, 1 << 20, device="meta"))
    torch.ones(3).to("meta")
    torch.ones(3).add(1)


def use_fake() -> None:
    torch.ones(3).add(1)
    with FakeTensorMode():
        for _ in range(6):
            (torch.randn(1000, 1000, 1000) @ torch.randn(1000, 1000)).relu()
    torch.ones(3).add(1)


@pytest.mark.parametrize("mode", ["plain", "private"])
@pytest.mark.parametrize(("program", "reason"), [(use_meta, ON_META), (use_fake, ON_FAKE)], ids=["meta", "fake"])
def test_calls_on_meta_and_fake_tensors_are_counted_separately(
    tmp_path: Path, program: Any, reason: str, mode: str
) -> None:
    trace = captured(tmp_path, program, **MODES[mode])
    assert set(trace.calls["op"]) <= {"aten.ones.default", "aten.add.Tensor"}
    assert without_work(trace)[reason] >= 24
    assert trace.end is not None
    assert (trace.end.dropped, trace.end.passed_by, trace.unfinished) == ([], [], [])
    assert_replays(trace)
    assert f" calls {reason}" in succeed("opgrip", "trace", "info", tmp_path / "t.jsonl").stdout


def test_predicted_call_under_a_fake_mode_is_not_recorded(tmp_path: Path) -> None:
    def program() -> None:
        for is_fake in [False] * 8 + [True] * 3:
            if is_fake:
                with FakeTensorMode():
                    torch.zeros(5)
            else:
                torch.zeros(5)

    trace = captured(tmp_path, program)
    assert (len(trace.calls), without_work(trace)) == (8, Counter({ON_FAKE: 3}))
