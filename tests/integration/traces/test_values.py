"""Tests of values drawn for recorded and unrecorded arguments: operators behave on them as on recorded ones."""

from __future__ import annotations

import math
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch
from foreign_data import operator_of
from hypothesis import given, settings
from hypothesis import strategies as st
from redrawn import drawn, fitted, read_again
from versions import is_removed

from opgrip.replay.inputs.input_options import RECORDED, with_values
from opgrip.replay.inputs.inputs import Inputs, device_map
from opgrip.traces import load
from opgrip.traces.schema.arguments import TensorSpec
from opgrip.traces.schema.records import OPERATOR, Signature
from opgrip.traces.values import fit, value_model_from_json, value_model_to_json, value_models
from opgrip.traces.values.defaults import DEFAULTS, default_values
from opgrip.traces.values.exact import Booleans, Constant, Exact, OneHot

DTYPES = [torch.float16, torch.bfloat16, torch.complex64, torch.int8, torch.uint64, torch.bool, torch.float8_e5m2]


def test_doubles_and_the_largest_integers_are_kept_exactly() -> None:
    for tensor in (
        torch.tensor([math.pi, 1e300, 5e-324], dtype=torch.float64),
        torch.tensor([2**64 - 1, 2**63, 0], dtype=torch.uint64),
        torch.tensor([-(2**63), 2**63 - 1]),
        torch.tensor([complex(math.nan, math.inf), 1j], dtype=torch.complex128),
    ):
        assert torch.equal(drawn(fitted(tensor, Exact), tensor).view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_small_tensor_of_any_dtype_is_kept_exactly(dtype: torch.dtype) -> None:
    tensor = torch.tensor([0, 1, 1, 0]).to(dtype)
    assert torch.equal(drawn(fitted(tensor, Exact), tensor).view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [0, 1])
def test_constant_of_any_dtype_is_kept_exactly(dtype: torch.dtype, value: int) -> None:
    tensor = torch.full((20, 30), value).to(dtype)
    assert torch.equal(drawn(fitted(tensor, Constant), tensor).view(torch.uint8), tensor.view(torch.uint8))


@given(st.integers(65, 5000), st.floats(0.01, 0.99), st.floats(0, 0.99), st.integers(0, 9))
@settings(deadline=None)
def test_booleans_keep_their_count_and_number_of_runs(count: int, share: float, stay: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    # runs of equal values, longer the more likely an element equals the one before
    pieces = (torch.rand(count, generator=generator) >= stay).cumsum(0)
    tensor = (torch.rand(count + 1, generator=generator) < share)[pieces]
    tensor[0], tensor[-1] = True, False
    model = fitted(tensor, Booleans)
    assert fit(drawn(model, tensor)) == model


@given(st.integers(20, 400), st.integers(2, 100), st.sampled_from([torch.bool, torch.int64, torch.float16]))
@settings(deadline=None)
def test_one_hot_rows_stay_one_hot_in_their_classes(rows: int, classes: int, dtype: torch.dtype) -> None:
    at = torch.randint(0, classes, (rows,), generator=torch.Generator().manual_seed(rows)) // 2
    at[0], at[-1] = 0, 1
    tensor = torch.nn.functional.one_hot(at, classes).to(dtype)
    if tensor.numel() <= 64:
        return
    again = drawn(fitted(tensor, OneHot), tensor)
    assert bool((again.float().sum(-1) == 1).all())
    assert torch.equal(again.float().sum(0), tensor.float().sum(0))


def test_fitting_draws_no_random_number_and_changes_nothing() -> None:
    tensors = [torch.randn(300), torch.randint(0, 9, (300,)), torch.rand(300, 4), torch.rand(300) > 0.5]
    tensors += [torch.randperm(300), torch.randn(40, 40).softmax(-1), torch.eye(20), torch.arange(300)]
    before = [tensor.clone() for tensor in tensors]
    state = torch.get_rng_state()
    for tensor in tensors:
        fit(tensor, requested_kinds=value_models.names())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, old) for tensor, old in zip(tensors, before, strict=True))


def test_drawing_uses_only_its_generator() -> None:
    tensors = [torch.randn(300).relu(), torch.randint(0, 9, (300,)), torch.rand(300) > 0.5, torch.randperm(300)]
    state = torch.get_rng_state()
    for tensor in tensors:
        model = fit(tensor)
        assert model is not None
        assert torch.equal(drawn(model, tensor, 3), drawn(model, tensor, 3))
        assert not torch.equal(drawn(model, tensor, 3), drawn(model, tensor, 4))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("view", ["transposed", "expanded", "stepped", "conjugated"])
def test_view_is_fitted_by_its_elements(view: str) -> None:
    tensor = torch.randn(40, 40, dtype=torch.complex64 if view == "conjugated" else torch.float32)
    shown = {
        "transposed": lambda: tensor.T,
        "expanded": lambda: tensor[:, :1].expand(40, 40),
        "stepped": lambda: tensor[::2, ::3],
        "conjugated": lambda: tensor.conj(),
    }[view]()
    assert fit(shown) == fit(shown.resolve_conj().contiguous())


OLD = {
    "exact": {"data": [1, 2.5]},
    "booleans": {"true": 3, "total": 10},
    "integers": {"frequent": [[7, 5]], "low": 0, "high": 9, "others": 60, "ascending": True},
    "boxes": {"first": 0, "low": [0] * 4, "high": [9.5] * 4, "whole": [False] * 4},
    "floats": {"mean": 0, "std": 1, "low": -2, "high": 2, "zeros": 0.5, "nan": 0, "inf": 0, "minus_inf": 0},
}


@pytest.mark.parametrize("name", OLD)
def test_model_of_the_first_format_is_read_and_drawn(name: str) -> None:
    model = value_model_from_json({"type": "values", "id": 3, "model": name, "later": {"unheard": "of"}, **OLD[name]})
    assert model.draw((13, 4), torch.float32, torch.Generator()).shape == (13, 4)
    assert read_again(model) == model
    assert OLD[name].items() <= value_model_to_json(model).items()


REFUSED_OTHERWISE = """\
Operator: aten.bernoulli.default
cnt: 1, ((T([20, 3], f32),), {})
Operator: aten.multinomial.default
cnt: 1, ((T([20, 30], f32), 4), {})
Operator: aten.binary_cross_entropy.default
cnt: 1, ((T([20, 3], f32), T([20, 3], f32)), {})
Operator: aten.poisson.default
cnt: 1, ((T([10, 20], f32),), {})
Operator: aten.linalg_cholesky.default
cnt: 1, ((T([2, 20, 20], f64),), {})
Operator: aten.div.Tensor_mode
cnt: 1, ((T([20, 20], i64), T([20, 20], i64)), {'rounding_mode': 'floor'})
Operator: aten.index_put.default
cnt: 1, ((T([100, 5], f32), [T([100], b8)], T([40, 5], f32)), {})
cnt: 1, ((T([100, 5], f32), [T([30], i64), T([30], i64)], T([30], f32)), {})
Operator: aten._pack_padded_sequence.default
cnt: 1, ((T([20, 5, 7], f32), T([5], i64), False), {})
Operator: aten.repeat_interleave.Tensor
cnt: 1, ((T([20], i64),), {'output_size': 60})
Operator: aten._assert_async.default
cnt: 1, ((T([], b8),), {})
Operator: aten.max_unpool2d.default
cnt: 1, ((T([2, 3, 4, 4], f32), T([2, 3, 4, 4], i64), [8, 8]), {})
Operator: aten._embedding_bag.default
cnt: 1, ((T([1000, 64], f32), T([200], i64), T([10], i64)), {})
"""


def values_of(op: str, *args: object, **kwargs: object) -> tuple[torch.Tensor, ...]:
    signature, models = with_values(Signature(0, OPERATOR, op, args, kwargs), {}, RECORDED)
    made, named = Inputs(signature.args, signature.kwargs, models, device_map("cpu", None), 0).make()
    flat = [*made, *named.values()]
    items = (item for each in flat for item in (each if isinstance(each, list) else [each]))
    return tuple(item for item in items if isinstance(item, torch.Tensor))


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> TensorSpec:
    return TensorSpec(shape, torch.empty(shape, device="meta").stride(), dtype, "cpu")


def test_operators_accept_their_default_values(tmp_path: Path) -> None:
    (tmp_path / "calls.txt").write_text(REFUSED_OTHERWISE)
    for signature in load(tmp_path / "calls.txt").signatures:
        signature, models = with_values(signature, {}, RECORDED)
        args, kwargs = Inputs(signature.args, signature.kwargs, models, device_map("cpu", None), 0).make()
        operator_of(signature)(*args, **kwargs)


def test_default_row_indices_cover_the_table() -> None:
    _, indices = values_of("aten.embedding.default", tensor(1000, 4), tensor(50, 20, dtype=torch.int64))
    assert int(indices.min()) >= 0
    assert int(indices.max()) < 1000
    assert len(indices.unique()) > 500
    _, picked = values_of("aten.index.Tensor", tensor(7, 900), [None, tensor(500, dtype=torch.int64)])
    assert len(picked.unique()) > 300
    assert int(picked.max()) < 900


def test_default_mask_has_half_or_the_recorded_number_of_true() -> None:
    _, mask = values_of("aten.masked_fill.Scalar", tensor(10, 10), tensor(10, 10, dtype=torch.bool), 0)
    assert int(mask.sum()) == 50
    signature = ("aten.nonzero.default", (tensor(100, dtype=torch.bool),), {}, tensor(7, 1, dtype=torch.int64))
    (model,) = default_values(*signature)[2].values()
    drawn = model.draw((100,), torch.bool, torch.Generator().manual_seed(0))
    assert int(drawn.sum()) == 7


def test_recorded_values_and_unknown_calls_are_unchanged() -> None:
    recorded = TensorSpec((4,), (1,), torch.bool, "cpu", values=3)
    args, kwargs, models = default_values("aten.logical_not.default", (recorded,), {})
    assert (args, kwargs, models) == ((recorded,), {}, {})
    assert default_values("mmcv.nms.default", (tensor(4),), {}) == ((tensor(4),), {}, {})
    # an operator called with nonsense
    assert default_values("aten.gather.default", (1, "x", tensor(4, dtype=torch.int64)), {})[2] == {}


def test_every_default_refers_to_existing_arguments() -> None:
    schemas = [schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("aten::")]
    named = [
        (f"aten.{schema.name.removeprefix('aten::')}.{schema.overload_name or 'default'}", argument.name)
        for schema in schemas
        for argument in schema.arguments
        if "Tensor" in str(argument.type)
    ]
    for op, patterns in ((op, row.argument.split("|")) for row in DEFAULTS for op in row.op.split("|")):
        if op.startswith("aten.") and not is_removed(op):
            arguments = {argument for name, argument in named if fnmatchcase(name, op)}
            assert any(fnmatchcase(item, pattern) for item in arguments for pattern in patterns), op
