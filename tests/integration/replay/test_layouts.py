"""Tests that tensors of every layout come back from a captured program unchanged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from unusual_tensors import ALL, NESTED, QUANTIZED, SPARSE, STRIDED, outline, thin
from versions import has_detached_views

from opgrip.capture import Capture
from opgrip.replay.cases.cases import Case, make_cases
from opgrip.replay.inputs.inputs import Inputs, device_map
from opgrip.replay.operators.lookup import find_operator
from opgrip.traces import load

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta"),
    pytest.mark.filterwarnings("ignore:.*quantize_per"),
    pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated"),
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
