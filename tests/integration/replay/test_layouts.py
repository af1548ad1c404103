"""Tensors of every layout: they come back from a program unchanged, and only equal layouts share a signature."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from unusual_tensors import ALL, NESTED, QUANTIZED, SPARSE, STRIDED, UNUSUAL, outline, thin
from versions import has_detached_views

from opgrip.capture import Capture
from opgrip.capture.signatures.signatures import call_key, describe_call
from opgrip.replay.cases.cases import Case, make_cases
from opgrip.replay.inputs.inputs import Inputs, device_map
from opgrip.replay.operators.lookup import find_operator
from opgrip.traces import load

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta"),
    pytest.mark.filterwarnings("ignore:.*quantiz"),
]
HERE = device_map("cpu", None)


def captured(path: Path, program: Callable[[], Any], op: str) -> Case:
    with Capture(path / "t.jsonl", force=True):
        program()
    trace = load(path / "t.jsonl")
    assert trace.end is not None
    assert not trace.end.dropped
    cases = [case for case in make_cases(trace) if case.op == op]
    case, *others = sorted(cases, key=lambda case: case.number)
    # torch 2.6 detaches a sparse tensor twice
    assert not others or (op == "aten.detach.default" and has_detached_views())
    return case


def inputs_of(case: Case, **options: Any) -> Inputs:
    return Inputs(case.signature.args, case.signature.kwargs, case.values, HERE, seed=0, **options)


def detached(path: Path, tensor: torch.Tensor) -> Inputs:
    """Return the inputs of a call of `detach`, which accepts every kind of tensor."""
    return inputs_of(captured(path, lambda: torch.ops.aten.detach(tensor), "aten.detach.default"))


@pytest.mark.parametrize("name", [pytest.param(name, id=name) for name in ALL])
def test_tensor_of_any_layout_is_recreated(tmp_path: Path, name: str) -> None:
    tensor = ALL[name]()
    inputs = detached(tmp_path, tensor)
    for _ in range(2):
        (again,), _ = inputs.make()
        assert outline(again) == outline(tensor)


@pytest.mark.parametrize("name", ["small", "csr without elements", "hybrid csr", "without sparse dimensions"])
def test_small_sparse_tensor_has_its_recorded_values(tmp_path: Path, name: str) -> None:
    (again,), _ = detached(tmp_path, SPARSE[name]()).make()
    assert torch.equal(again.to_dense(), SPARSE[name]().to_dense())


def test_expanded_tensor_takes_no_additional_memory(tmp_path: Path) -> None:
    inputs = detached(tmp_path, torch.randn(3, 1).expand(3, 1 << 20))
    assert inputs.nbytes == 12
    assert inputs.make()[0][0].shape == (3, 1 << 20)


def test_overlapping_windows_take_no_additional_memory(tmp_path: Path) -> None:
    windows = torch.randn(1 << 21).as_strided((1 << 20, 1 << 20), (1, 1))
    inputs = detached(tmp_path, windows)
    assert inputs.nbytes == windows.untyped_storage().nbytes() - 4
    (again,), _ = inputs.make()
    assert 0.9 < float(again[0].std()) < 1.1


PROGRAMS: dict[str, tuple[str, Callable[[], Any]]] = {
    "coo by dense": ("aten.mm.default", lambda: torch.mm(SPARSE["coo"](), torch.ones(60, 3))),
    "csr by dense": ("aten.mm.default", lambda: torch.mm(SPARSE["csr"](), torch.ones(60, 3))),
    "bsr by dense": ("aten.mm.default", lambda: torch.mm(thin(40, 60).to_sparse_bsr((4, 4)), torch.ones(60, 3))),
    "sparse softmax": ("aten._sparse_softmax.default", lambda: torch.sparse.softmax(SPARSE["coo"](), 1)),
    "dequantize": ("aten.dequantize.self", lambda: QUANTIZED["per channel"]().dequantize()),
    "quantized sum": (
        "quantized.add.default",
        lambda: torch.ops.quantized.add(QUANTIZED["quint8"](), QUANTIZED["quint8"](), 0.2, 1),
    ),
    "padding": ("aten.to_padded_tensor.default", lambda: torch.nested.to_padded_tensor(NESTED["nested"](), 0.0)),
    "convolution": (
        "aten.convolution.default",
        lambda: torch.conv2d(STRIDED["channels last"](), torch.ones(4, 3, 2, 2)),
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_operator_on_unusual_layouts_returns_the_recorded_shapes(tmp_path: Path, name: str) -> None:
    op, program = PROGRAMS[name]
    with torch.no_grad():
        torch.manual_seed(0)
        expected = program()
        torch.manual_seed(0)
        case = captured(tmp_path, program, op)
        args, kwargs = inputs_of(case).make()
        result = find_operator(case.signature).function(*args, **kwargs)
    if result.layout is torch.sparse_coo:
        assert (result.shape, result._nnz()) == (expected.shape, expected._nnz())
    else:
        assert outline(result) == outline(expected)


def test_views_of_one_memory_share_it_again_across_dtypes(tmp_path: Path) -> None:
    memory = torch.arange(40, dtype=torch.int32)
    whole = memory.float().view(5, 8)
    part = whole.view(torch.int16)[1:, 3:]
    halves = whole.view(torch.uint8).flatten()[9:]
    case = captured(tmp_path, lambda: torch._foreach_add([whole, part, halves], 1), "aten._foreach_add.Scalar")
    inputs = inputs_of(case)
    ((first, second, third), _), _ = inputs.make()
    assert [outline(tensor) for tensor in (first, second, third)] == [outline(t) for t in (whole, part, halves)]
    assert len({tensor.untyped_storage()._cdata for tensor in (first, second, third)}) == 1
    assert torch.equal(first, whole)
    assert inputs.nbytes == 160


MUTATIONS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "coo zeroed": ("coo", lambda x: x.zero_()),
    "coo resized": ("coo", lambda x: x.sparse_resize_and_clear_((3, 3), 2, 0)),
    "csr scaled": ("csr", lambda x: x.mul_(3)),
    "nested scaled": ("nested", lambda x: x.mul_(3)),
    "quantized": ("quint8", lambda x: x.copy_(torch.zeros(50, 60))),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutations_of_unusual_layouts_are_undone(tmp_path: Path, name: str) -> None:
    kind, mutate = MUTATIONS[name]
    inputs = detached(tmp_path, ALL[kind]())
    inputs.keep()
    with torch.no_grad():
        (first,), _ = inputs.make()
        before = _values(first)
        about = outline(first)
        mutate(first)
        inputs.restore()
        (again,), _ = inputs.make()
    assert outline(again) == about
    assert torch.equal(_values(again), before)


def _values(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_nested:
        return tensor.values().clone()
    if tensor.is_quantized:
        return tensor.int_repr()
    return tensor.to_dense().clone()


def no_values(argument: int | str) -> Callable[[torch.Tensor], None]:
    return lambda tensor: None


def key(*tensors: torch.Tensor) -> object:
    return call_key("op", tensors, {})


def spec(*tensors: torch.Tensor) -> object:
    return describe_call(tensors, {}, no_values)


def quantized(scale: float, zero_point: int) -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(3), scale, zero_point, torch.quint8)


def by_channel(*scales: float) -> torch.Tensor:
    return torch.quantize_per_channel(torch.ones(2, 2), torch.tensor(scales), torch.zeros(2), 0, torch.quint8)


def coo(*columns: int, coalesced: bool = False) -> torch.Tensor:
    indices = torch.tensor([[0] * len(columns), columns])
    return torch.sparse_coo_tensor(
        indices, torch.ones(len(columns)), (2, 9), check_invariants=True, is_coalesced=coalesced
    )


DIFFERENT: dict[str, tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor]]] = {
    "number of elements": (lambda: coo(1, 2), lambda: coo(1, 2, 3)),
    "coalesced": (lambda: coo(1, 2), lambda: coo(1, 2, coalesced=True)),
    "sparse dimensions": (lambda: torch.ones(3, 1).to_sparse(1), lambda: torch.ones(3, 1).to_sparse(2)),
    "compressed elements": (lambda: torch.eye(3).to_sparse_csr(), lambda: torch.ones(3, 3).to_sparse_csr()),
    "blocks": (lambda: torch.ones(4, 4).to_sparse_bsr((2, 2)), lambda: torch.ones(4, 4).to_sparse_bsr((1, 4))),
    "scale": (lambda: quantized(0.1, 0), lambda: quantized(0.2, 0)),
    "zero point": (lambda: quantized(0.1, 0), lambda: quantized(0.1, 1)),
    "scales": (lambda: by_channel(0.1, 0.2), lambda: by_channel(0.1, 0.3)),
    "nested sizes": (
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(4)]),
        lambda: torch.nested.nested_tensor([torch.ones(4), torch.ones(2)]),
    ),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_keys_distinguish_everything_that_signatures_distinguish(name: str) -> None:
    first, second = DIFFERENT[name]
    assert key(first()) != key(second())
    assert spec(first()) != spec(second())


@pytest.mark.parametrize("name", UNUSUAL)
def test_equal_calls_have_one_key(name: str) -> None:
    assert key(UNUSUAL[name]()) == key(UNUSUAL[name]())
    assert spec(UNUSUAL[name]()) == spec(UNUSUAL[name]())


def test_shared_arguments_are_distinguished_from_equal_ones() -> None:
    one, other = thin(5, 6).to_sparse(), thin(5, 6).to_sparse()
    assert key(one, one) != key(one, other)
    assert spec(one, one) != spec(one, other)


def test_opaque_layout_is_recorded_without_its_parts() -> None:
    packed = torch.ones(3).to_mkldnn()
    ((described,), _) = describe_call((packed,), {}, lambda argument: lambda tensor: 0)
    assert (described.layout, described.made_of, described.values) == (packed.layout, None, None)
    assert key(packed) == key(torch.ones(3).to_mkldnn())


def test_pinned_memory_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: tensor.numel() == 4)
    ((plain, pinned, sparse), _) = describe_call(
        (torch.ones(3), torch.ones(4), torch.eye(4).to_sparse()), {}, no_values
    )
    assert (plain.pinned, pinned.pinned, sparse.pinned, sparse.made_of.values.pinned) == (False, True, False, True)
