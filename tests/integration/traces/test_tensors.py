"""Tensors of every layout: they survive programs, files and views as arrays, and impossible ones are refused."""

import copy
import gc
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from redrawn import HERE, described
from unusual_tensors import ALL, NESTED, QUANTIZED, SPARSE, STRIDED, UNUSUAL, outline, thin
from versions import has_detached_views

from opgrip.capture import Capture
from opgrip.capture.signatures.signatures import call_key, describe_call
from opgrip.replay.cases.cases import Case, make_cases
from opgrip.replay.inputs.inputs import Inputs
from opgrip.replay.operators.lookup import Unsupported, find_operator
from opgrip.traces import load
from opgrip.traces.analysis.merge import merge
from opgrip.traces.schema.arguments import FormatError, TensorSpec, decode, encode, tensors
from opgrip.traces.schema.tensor_specs import map_values, stored_elements, value_numbers
from opgrip.traces.values import value_models
from opgrip.traces.values.model import array_of, fit

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta"),
    pytest.mark.filterwarnings("ignore:.*quantiz"),
]


def form_of(name: str) -> Any:
    specs, _ = described(ALL[name]())
    return json.loads(json.dumps(encode(specs[0]), allow_nan=False))


@pytest.mark.parametrize("name", ALL)
def test_tensor_of_any_layout_survives_writing_and_reading(name: str) -> None:
    specs, _ = described(ALL[name]())
    assert decode(form_of(name)) == specs[0]
    assert hash(specs[0]) == hash(decode(form_of(name)))


def test_value_models_of_parts_are_found_and_renumbered_in_order() -> None:
    for name in ("coo", "csr", "nested", "quint8", "expanded"):
        specs, models = described(ALL[name]())
        (spec,) = specs
        assert list(value_numbers(spec)) == list(range(len(models)))
        moved = map_values(lambda number: None if number is None else number + 5, spec)
        assert list(value_numbers(moved)) == list(range(5, 5 + len(models)))
        assert map_values(lambda number: None if number is None else number - 5, moved) == spec


def test_stored_elements_of_a_tensor_are_counted() -> None:
    (spec,), _ = described(torch.eye(30).to_sparse())
    assert stored_elements(spec) == 30
    (spec,), _ = described(torch.ones(3, 1).expand(3, 9))
    assert stored_elements(spec) == 3


def test_traces_merge_with_the_values_of_tensor_parts(tmp_path: Path) -> None:
    for number in range(2):
        with Capture(tmp_path / f"{number}.jsonl"):
            torch.ones(number + 1) + 1
            (torch.rand(200, 9) > 0.5).float().to_sparse_csr() * (number + 2.0)
    merge([tmp_path / "0.jsonl", tmp_path / "1.jsonl"], tmp_path / "both.jsonl")
    apart = [*models_of(tmp_path / "0.jsonl"), *models_of(tmp_path / "1.jsonl")]
    assert set(models_of(tmp_path / "both.jsonl")) == set(apart)


def test_calls_with_other_scalars_share_the_values_of_tensor_parts(tmp_path: Path) -> None:
    sparse = (torch.rand(200, 9) > 0.5).float().to_sparse_csr()
    with Capture(tmp_path / "t.jsonl"):
        sparse * 2.0
        sparse * 3.0
    (_, first), (_, second) = (models for models in models_of(tmp_path / "t.jsonl") if models[0] == "aten.mul.Tensor")
    assert first == second
    assert len(first) == 3
    assert "None" not in first


def models_of(path: Path) -> list[tuple[str, tuple[str, ...]]]:
    found = []
    for case in make_cases(load(path)):
        numbers = [number for spec in tensors(case.signature.args) for number in value_numbers(spec)]
        found.append((case.op, tuple(str(case.values.get(number)) for number in numbers)))
    return found


def changed(body: Any, path: tuple[Any, ...], value: Any) -> Any:
    body = copy.deepcopy(body)
    at = body
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    return body


COO, CSR, PER, NESTED_FORM = (
    ("tensor", "made_of", "coo"),
    ("tensor", "made_of", "compressed"),
    ("tensor", "made_of"),
    ("tensor", "made_of", "nested"),
)
HOSTILE: dict[str, tuple[str, tuple[Any, ...], Any]] = {
    "indices of fewer elements": ("coo", (*COO, "indices", "shape"), [2, 3]),
    "float indices": ("coo", (*COO, "indices", "dtype"), "float32"),
    "rows that are missing": ("coo", (*COO, "rows"), [None]),
    "values of another dtype": ("coo", (*COO, "values", "dtype"), "int8"),
    "values of a subclass": ("coo", (*COO, "values", "cls"), "Twice"),
    "parts in parts": ("coo", (*COO, "values", "made_of"), {"coo": {}}),
    "fewer places than elements": ("coo", ("tensor", "shape"), [2, 3]),
    "another layout": ("coo", ("tensor", "layout"), "sparse_csr"),
    "a matrix of other rows": ("csr", ("tensor", "shape"), [51, 60]),
    "a matrix by columns": ("csr", ("tensor", "layout"), "sparse_csc"),
    "fewer columns than elements": ("csr", (*CSR, "plain", "shape"), [5]),
    "blocks of nothing": ("bsr", (*CSR, "values", "shape"), [3, 0, 3]),
    "blocks that do not fit": ("bsr", (*CSR, "values", "shape"), [3, 7, 3]),
    "a zero point out of range": ("quint8", (*PER, "per_tensor", "zero_point"), 256),
    "an axis that is not there": ("per channel", (*PER, "per_channel", "axis"), 2),
    "fewer scales than channels": ("per channel", (*PER, "per_channel", "scales"), [0.5]),
    "nested tensors beyond their buffer": ("nested", (*NESTED_FORM, "offsets"), [0, 61]),
    "nested tensors larger than their buffer": ("nested", (*NESTED_FORM, "sizes"), [[2, 30], [5, 30]]),
    "nested strides that are missing": ("nested", (*NESTED_FORM, "strides"), [[30, 1]]),
    "nested tensors of another shape": ("nested", ("tensor", "shape"), [2, 4, 31]),
    "sizes beyond 64 bits": ("expanded", ("tensor", "shape"), [1 << 63, 1, 1]),
    "made of nothing": ("expanded", ("tensor", "made_of"), {}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_impossible_tensor_is_refused_while_reading(name: str) -> None:
    kind, path, value = HOSTILE[name]
    with pytest.raises(FormatError):
        decode(changed(form_of(kind), path, value))


def test_tensor_layout_of_a_later_version_is_unsupported() -> None:
    spec = decode(changed(form_of("coo"), ("tensor", "made_of"), {"hyperbolic": {"x": 1}}))
    assert spec.made_of is None
    with pytest.raises(Unsupported, match="layout sparse_coo"):
        Inputs((spec,), {}, {}, HERE, seed=0)


def paths(form: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = form.items() if isinstance(form, dict) else enumerate(form) if isinstance(form, list) else ()
    return [path for key, item in items for path in ((*here, key), *paths(item, (*here, key)))]


FORMS: dict[str, Callable[[], Any]] = {name: (lambda name=name: form_of(name)) for name in UNUSUAL}
junk = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 70),
    st.sampled_from([1 << 31, 1 << 62, (1 << 63) - 1, 1 << 64, -(1 << 63)]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(["", "cpu", "int64", "int32", "float32", "quint8", "sparse_csr", "sparse_bsc", "strided"]),
    st.lists(st.integers(0, 70), max_size=3),
    st.just({}),
)


@given(st.sampled_from(sorted(FORMS)), st.lists(st.tuples(st.integers(0, 10**6), junk), min_size=1, max_size=2))
@settings(max_examples=150)
def test_mutated_tensor_form_is_refused_or_usable(name: str, changes: list[tuple[int, Any]]) -> None:
    form = FORMS[name]()
    for place, value in changes:
        known = paths(form)
        form = changed(form, known[place % len(known)], value)
    _, models = described(ALL[name]())
    try:
        spec = decode(form)
        if not isinstance(spec, TensorSpec) or Inputs.bytes_needed((spec,), {}) > 1 << 20:
            return
        (made,), _ = Inputs((spec,), {}, models, HERE, seed=0).make()
    except (FormatError, Unsupported):
        return
    # an accepted tensor must be usable
    if made.is_nested:
        made.values().sum()
    elif made.layout is not torch.strided and made.numel() < 1 << 20:
        made.to_dense()
    elif made.is_quantized and made.numel() < 1 << 20:
        # some quantization schemes do not support all strides
        with suppress(RuntimeError):
            made.dequantize()


REAL = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
REAL += [torch.float16, torch.float32, torch.float64]
WIDE = [torch.uint16, torch.uint32, torch.uint64]
COMPLEX = [torch.complex64, torch.complex128]
VIEWS = {
    "whole": lambda tensor: tensor,
    "transposed": lambda tensor: tensor.t(),
    "every second row": lambda tensor: tensor[::2],
    "columns": lambda tensor: tensor[:, 1:3],
    "expanded": lambda tensor: tensor[:, :1].expand(-1, 7),
    "one element": lambda tensor: tensor[1, 1],
    "empty": lambda tensor: tensor[:0],
}


def filled(dtype: torch.dtype, rows: int = 6, columns: int = 5) -> torch.Tensor:
    return torch.arange(rows * columns).sub(7).reshape(rows, columns).to(dtype)


def is_resizable(tensor: torch.Tensor) -> bool:
    return bool(tensor.untyped_storage().resizable())


@given(st.sampled_from([*REAL, *WIDE, *COMPLEX]), st.sampled_from(sorted(VIEWS)))
def test_array_equals_that_of_torch_and_the_tensor_remains_resizable(dtype: torch.dtype, view: str) -> None:
    tensor = VIEWS[view](filled(dtype))
    array = array_of(tensor)
    assert is_resizable(tensor)
    assert not (array.size and array.flags.writeable)
    expected = tensor.numpy()
    assert array.dtype == expected.dtype
    assert array.shape == expected.shape
    assert np.array_equal(array, expected)
    if tensor.numel():
        assert np.shares_memory(array, expected)


def test_array_keeps_its_memory_alive() -> None:
    array = array_of(torch.full((1 << 20,), 7.0))
    gc.collect()
    torch.full((1 << 20,), 8.0)
    assert (array == 7.0).all()


def test_freed_memory_is_not_accessed() -> None:
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="freed"):
        array_of(tensor)


@pytest.mark.parametrize("exact", [True, False], ids=["all", "pieces"])
@pytest.mark.parametrize("dtype", [*REAL, *WIDE, torch.bfloat16, *COMPLEX], ids=str)
def test_tensor_remains_resizable_after_fitting(dtype: torch.dtype, exact: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    draws: list[Any] = [
        filled(dtype),
        filled(dtype, 100, 100),
        torch.randint(0, 100, (100, 100), generator=generator).to(dtype),
        torch.rand(100, 100, generator=generator).mul(40).to(dtype),
        torch.randperm(10_000, generator=generator).to(dtype),
        torch.arange(10_000).div(3).to(dtype),
    ]
    for tensor in draws:
        for view in (tensor, tensor.t()):
            fit(view, value_models.names(), exact)
            assert is_resizable(tensor)


def captured_case(path: Path, program: Callable[[], Any], op: str) -> Case:
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
    return inputs_of(captured_case(path, lambda: torch.ops.aten.detach(tensor), "aten.detach.default"))


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
        case = captured_case(tmp_path, program, op)
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
    case = captured_case(tmp_path, lambda: torch._foreach_add([whole, part, halves], 1), "aten._foreach_add.Scalar")
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
