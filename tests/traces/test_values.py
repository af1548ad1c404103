"""Values that are drawn make operators behave as the recorded ones did."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opgrip.traces.arguments import FormatError
from opgrip.traces.values import ValueModel, fit, value_model_from_json, value_model_to_json
from opgrip.traces.values.booleans import Booleans
from opgrip.traces.values.boxes import Boxes
from opgrip.traces.values.exact import Exact
from opgrip.traces.values.floats import Floats
from opgrip.traces.values.integers import Integers


def drawn(model: ValueModel, tensor: torch.Tensor, seed: int = 1) -> torch.Tensor:
    """Values for a tensor like this one, after a way through the file."""
    form = json.loads(json.dumps({"type": "values", "id": 0, **value_model_to_json(model)}, allow_nan=False))
    values = value_model_from_json(form).draw(
        tuple(tensor.shape), tensor.dtype, torch.Generator(tensor.device).manual_seed(seed)
    )
    assert values.shape == tensor.shape
    assert values.dtype == tensor.dtype
    return values


def fitted(tensor: torch.Tensor, kind: type) -> ValueModel:
    model = fit(tensor)
    assert type(model) is kind
    return model


@given(st.lists(st.floats(width=32), min_size=1, max_size=64))
def test_a_small_tensor_is_kept_exactly(values: list[float]) -> None:
    tensor = torch.tensor(values)
    again = drawn(fitted(tensor, Exact), tensor)
    assert torch.equal(again.view(torch.int32)[~tensor.isnan()], tensor.view(torch.int32)[~tensor.isnan()])
    assert torch.equal(again.isnan(), tensor.isnan())


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.complex64, torch.int8, torch.uint64, torch.bool]
)
def test_a_small_tensor_of_any_dtype_is_kept_exactly(dtype: torch.dtype) -> None:
    tensor = torch.tensor([0, 1, 1, 0]).to(dtype)
    assert torch.equal(drawn(fitted(tensor, Exact), tensor), tensor)


@given(st.integers(65, 5000), st.floats(0, 1), st.integers(0, 9))
def test_as_many_booleans_are_true_as_were(count: int, share: float, seed: int) -> None:
    tensor = torch.rand(count, generator=torch.Generator().manual_seed(seed)) < share
    assert int(drawn(fitted(tensor, Booleans), tensor).sum()) == int(tensor.sum())


@given(st.integers(65, 5000), st.integers(-1000, 1000), st.integers(1, 100_000), st.integers(0, 9))
@settings(deadline=None)
def test_drawn_integers_index_what_the_recorded_ones_did(count: int, low: int, width: int, seed: int) -> None:
    tensor = torch.randint(low, low + width, (count,), generator=torch.Generator().manual_seed(seed))
    again = drawn(fitted(tensor, Integers), tensor)
    assert int(again.min()) >= int(tensor.min())
    assert int(again.max()) <= int(tensor.max())
    assert fit(again) is not None


def test_an_index_to_ignore_stays_beside_the_labels() -> None:
    labels = torch.randint(0, 1000, (4000,))
    labels[::3] = -100
    again = drawn(fitted(labels, Integers), labels)
    assert int((again == -100).sum()) == int((labels == -100).sum())
    assert int(again[again != -100].min()) >= 0
    torch.nn.functional.cross_entropy(torch.randn(4000, 1000), again)


def test_few_distinct_integers_keep_their_counts() -> None:
    tensor = torch.tensor([0] * 70 + [3] * 20 + [7] * 10)
    assert torch.equal(drawn(fitted(tensor, Integers), tensor).bincount(), tensor.bincount())


def test_offsets_still_ascend_from_their_first_to_their_last() -> None:
    offsets = torch.cumsum(torch.randint(1, 9, (200,)), dim=0)
    again = drawn(fitted(offsets, Integers), offsets)
    assert bool((again[1:] >= again[:-1]).all())
    assert (int(again[0]), int(again[-1])) == (int(offsets[0]), int(offsets[-1]))


def test_the_largest_integers_can_be_drawn() -> None:
    top = torch.iinfo(torch.int64).max
    for tensor in (torch.arange(top - 99, top), torch.full((100,), top), torch.tensor([*range(99), top])):
        again = drawn(fitted(tensor, Integers), tensor)
        assert int(again.max()) == int(tensor.max())


def test_large_integers_are_counted_on_a_sample_but_ranged_on_all() -> None:
    tensor = torch.zeros(1 << 19, dtype=torch.int64)
    tensor[12345] = 1 << 40
    model = fitted(tensor, Integers)
    assert isinstance(model, Integers)
    assert model.high == 1 << 40


@given(st.floats(-1e3, 1e3), st.floats(0.01, 1e3), st.floats(0, 0.8), st.integers(0, 9))
@settings(deadline=None)
def test_floats_fit_again_to_what_they_were_drawn_from(mean: float, std: float, zeros: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.randn(5000, generator=generator, dtype=torch.float64) * std + mean
    tensor[torch.rand(5000, generator=generator) < zeros] = 0
    model = fitted(tensor, Floats)
    again = fit(drawn(model, tensor))
    assert isinstance(model, Floats)
    assert isinstance(again, Floats)
    spread = max(model.std, 1e-9)
    assert abs(again.mean - model.mean) < 0.3 * spread
    assert abs(again.zeros - model.zeros) < 0.05
    assert model.low <= again.low <= again.high <= model.high


def test_nan_and_inf_keep_their_shares() -> None:
    tensor = torch.randn(10_000)
    tensor[:1000], tensor[1000:3000], tensor[3000:3500] = math.nan, math.inf, -math.inf
    again = drawn(fitted(tensor, Floats), tensor)
    shares = (again.isnan().float().mean(), (again == math.inf).float().mean(), (again == -math.inf).float().mean())
    assert [round(float(share), 2) for share in shares] == pytest.approx([0.1, 0.2, 0.05], abs=0.02)


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, -3.5])
def test_a_constant_tensor_stays_constant(value: float) -> None:
    tensor = torch.full((500,), value)
    assert torch.equal(drawn(fitted(tensor, Floats), tensor), tensor) or math.isnan(value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.complex64, torch.float8_e4m3fn])
def test_every_kind_of_float_is_fitted_and_drawn(dtype: torch.dtype) -> None:
    again = drawn(fitted(torch.randn(300).to(dtype), Floats), torch.randn(300).to(dtype))
    assert bool(again.to(torch.complex64 if dtype.is_complex else torch.float32).abs().max() > 0.5)


def test_boxes_stay_boxes_and_image_indices_stay_indices() -> None:
    corners = torch.rand(500, 2) * 100
    image = torch.randint(0, 3, (500, 1)).float()
    rois = torch.cat([image, corners, corners + torch.rand(500, 2) * 50], dim=1)
    again = drawn(fitted(rois, Boxes), rois)
    assert set(again[:, 0].tolist()) <= {0.0, 1.0, 2.0}
    assert bool((again[:, 3:] >= again[:, 1:3]).all())


def test_boxes_with_scores_behind_them_are_boxes_too() -> None:
    corners = torch.rand(500, 2) * 100
    detections = torch.cat([corners, corners + 10 + torch.rand(500, 2) * 50, torch.rand(500, 1)], dim=1)
    model = fitted(detections, Boxes)
    assert isinstance(model, Boxes)
    assert model.first == 0
    assert bool((drawn(model, detections)[:, 4] <= 1).all())


def test_fitting_draws_no_random_number_and_changes_nothing() -> None:
    tensors = [torch.randn(300), torch.randint(0, 9, (300,)), torch.rand(300, 4), torch.rand(300) > 0.5]
    before = [tensor.clone() for tensor in tensors]
    state = torch.get_rng_state()
    for tensor in tensors:
        fit(tensor)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, old) for tensor, old in zip(tensors, before, strict=True))


@pytest.mark.parametrize(
    "form",
    [
        {"model": "nothing"},
        {"model": "exact", "data": []},
        {"model": "exact", "data": ["text"]},
        {"model": "booleans", "true": 5, "total": 3},
        {"model": "integers", "frequent": [], "low": None, "high": None, "others": 0, "ascending": False},
        {"model": "integers", "frequent": [], "low": 5, "high": 1, "others": 3, "ascending": False},
        {"model": "boxes", "first": 0, "low": [0], "high": [1], "whole": [True]},
    ],
)
def test_a_model_that_cannot_be_drawn_from_is_refused(form: dict[str, object]) -> None:
    with pytest.raises(FormatError):
        value_model_from_json(form)


def test_zeros_do_not_bound_the_other_floats_of_a_large_tensor() -> None:
    tensor = torch.rand(1 << 18, generator=torch.Generator().manual_seed(0)) + 0.5
    tensor[::2] = 0
    model = fitted(tensor, Floats)
    assert isinstance(model, Floats)
    assert model.low >= 0.5
    drawn = model.draw((1 << 18,), torch.float32, torch.Generator().manual_seed(1))
    assert float((drawn == 0).float().mean()) == pytest.approx(0.5, abs=0.01)
