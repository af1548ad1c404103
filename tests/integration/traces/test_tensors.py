"""Properties of tensors survive writing, reading and viewing as arrays; impossible tensors are refused."""

from __future__ import annotations

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
from described_calls import HERE, described
from hypothesis import given, settings
from hypothesis import strategies as st
from unusual_tensors import ALL, UNUSUAL

from opgrip.capture import Capture
from opgrip.replay.cases.cases import make_cases
from opgrip.replay.inputs.inputs import Inputs
from opgrip.replay.operators.lookup import Unsupported
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


COO, CSR, PER, NESTED = (
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
    "nested tensors beyond their buffer": ("nested", (*NESTED, "offsets"), [0, 61]),
    "nested tensors larger than their buffer": ("nested", (*NESTED, "sizes"), [[2, 30], [5, 30]]),
    "nested strides that are missing": ("nested", (*NESTED, "strides"), [[30, 1]]),
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
@settings(max_examples=150, deadline=None)
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
