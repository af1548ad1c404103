"""Value models of floats and boxes: drawn values cost, sort, sum up and overlap like the recorded ones."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from redrawn import drawn, fitted, seeded

from opgrip.traces.values import fit
from opgrip.traces.values.boxes import Boxes, overlapping
from opgrip.traces.values.defaults import Factorable, Triangular
from opgrip.traces.values.drawing import at_quantiles
from opgrip.traces.values.floats import PROBABILITIES, Floats, Probabilities

WIDE = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@given(st.floats(-1e3, 1e3), st.floats(0.01, 1e3), st.floats(0, 0.8), st.integers(0, 9))
@settings(deadline=None, max_examples=30)
def test_fit_of_drawn_floats_equals_the_model(mean: float, std: float, zeros: float, seed: int) -> None:
    generator = seeded(seed)
    tensor = torch.randn(5000, generator=generator, dtype=torch.float64) * std + mean
    tensor[torch.rand(5000, generator=generator) < zeros] = 0
    model = fitted(tensor, Floats)
    again = fitted(drawn(model, tensor), Floats)
    assert abs(again.mean - model.mean) < 0.3 * model.std
    assert again.std == pytest.approx(model.std, rel=0.2)
    assert again.zeros == model.zeros
    assert (again.low, again.high) == (model.low, model.high)


@pytest.mark.parametrize(
    ("shape", "tensor"),
    [
        ("normal", torch.randn(20_000, generator=seeded(0)) * 5 - 3),
        ("uniform", torch.rand(20_000, generator=seeded(0)) * 5 - 3),
        ("quantiles", torch.rand(20_000, generator=seeded(0)).log()),
        ("quantiles", torch.cat([torch.randn(10_000), torch.randn(10_000) + 50])),
        ("quantiles", torch.randint(0, 4, (20_000,), generator=seeded(0)).float() + 1),
    ],
    ids=["normal", "uniform", "exponential", "two hills", "whole"],
)
def test_distribution_keeps_its_shape(shape: str, tensor: torch.Tensor) -> None:
    model = fitted(tensor, Floats)
    assert model.shape == shape
    again = drawn(model, tensor)
    levels = torch.linspace(0.02, 0.98, 25)
    apart = (again.quantile(levels) - tensor.quantile(levels)).abs()
    assert float(apart.median()) <= 0.05 * float(tensor.std())
    assert (again.min(), again.max()) == (tensor.min(), tensor.max())


@pytest.mark.parametrize("dtype", WIDE, ids=str)
@pytest.mark.parametrize("count", [700, 300_000])
def test_special_values_keep_their_number(dtype: torch.dtype, count: int) -> None:
    tensor = torch.randn(count, generator=seeded(0)).to(dtype)
    tiny = torch.finfo(dtype).tiny
    tensor[tensor.abs() < tiny] = 1
    mixed = torch.randperm(count, generator=seeded(1))
    specials = {0.0: 201, math.nan: 33, math.inf: 17, -math.inf: 5, tiny / 8: 101, -tiny / 4: 7}
    begin = 0
    for value, times in specials.items():
        tensor[mixed[begin : begin + times]] = value
        begin += times
    again = drawn(fitted(tensor, Floats), tensor)
    assert int((again == 0).sum()) == 201
    assert int(again.isnan().sum()) == 33
    assert int((again == math.inf).sum()) == 17
    assert int((again == -math.inf).sum()) == 5
    assert int(((again != 0) & (again.abs() < tiny)).sum()) == 108


def test_zeros_of_relu_stay_together() -> None:
    kept = (torch.rand(100, generator=seeded(0)) < 0.5).repeat_interleave(20)
    tensor = torch.randn(2000, generator=seeded(1)).abs() * kept
    again = drawn(fitted(tensor, Floats), tensor)
    assert int((again == 0).sum()) == int((tensor == 0).sum())

    def borders(values: torch.Tensor) -> int:
        return int((values == 0).diff().sum())

    # zeros at random positions would have five times as many borders
    assert borders(again) == pytest.approx(borders(tensor), rel=1)


@pytest.mark.parametrize("dtype", [*WIDE, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_every_floating_point_dtype_is_fitted_and_drawn(dtype: torch.dtype) -> None:
    tensor = torch.randn(300, generator=seeded(0)).to(dtype)
    again = drawn(fitted(tensor, Floats), tensor).to(torch.complex64 if dtype.is_complex else torch.float32)
    assert 0.8 < float(again.std()) < 1.3


@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_sorted_floats_stay_sorted(dtype: torch.dtype) -> None:
    tensor = torch.rand(500, generator=seeded(0)).to(dtype).sort().values
    for values in (tensor, tensor.flip(0)):
        again = drawn(fitted(values, Floats), values)
        assert torch.equal(again, again.sort(descending=values is not tensor).values)


def test_sorted_rows_stay_sorted() -> None:
    scores = torch.rand(30, 200, generator=seeded(0)).sort(dim=-1, descending=True).values
    again = drawn(fitted(scores, Floats), scores)
    assert float(again.diff(dim=-1).max()) <= 0
    boundaries = torch.randn(4, 100, generator=seeded(0)).sort(dim=-1).values + torch.arange(0, 400, 100)[:, None]
    assert float(drawn(fitted(boundaries, Floats), boundaries).diff(dim=-1).min()) >= 0


def test_similar_neighbours_stay_similar() -> None:
    image = torch.nn.functional.interpolate(
        torch.randn(1, 3, 8, 8, generator=seeded(0)), scale_factor=16, mode="bilinear"
    )
    model = fitted(image, Floats)
    assert model.step is not None
    again = drawn(model, image)
    assert float(again.reshape(-1).diff().abs().mean()) == pytest.approx(model.step, rel=1)
    assert float(again.std()) == pytest.approx(float(image.std()), rel=0.1)


@given(st.integers(65, 3000), st.integers(1, 3000), st.sampled_from([torch.float32, torch.float64]))
@settings(deadline=None, max_examples=30)
def test_requested_number_of_distinct_floats_is_drawn(count: int, kinds: int, dtype: torch.dtype) -> None:
    kinds = min(kinds, count)
    model = Floats(0.0, 1.0, -4.0, 4.0, 0.0, 0.0, 0.0, 0.0, distinct=kinds)
    assert len(drawn(model, torch.empty(count, dtype=dtype)).unique()) == kinds


@pytest.mark.parametrize("dtype", WIDE, ids=str)
@pytest.mark.parametrize("heat", [0.1, 5, 30])
@pytest.mark.parametrize("shape", [(2, 3, 16, 8), (300,)])
def test_probabilities_sum_to_one_and_keep_their_peak(dtype: torch.dtype, heat: float, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape, generator=seeded(0)) * heat).softmax(-1).to(dtype)
    model = fitted(tensor, Probabilities)
    again = drawn(model, tensor)
    assert float(again.min()) >= 0
    assert type(fit(again)) is Probabilities
    assert float(again.float().amax(-1).mean()) == pytest.approx(model.peak, abs=0.02 if len(shape) > 1 else 0.15)
    assert int((again == 0).sum()) == int((tensor == 0).sum())
    tiny = torch.finfo(dtype).tiny
    assert int((again.abs() < tiny).sum()) == int((tensor.abs() < tiny).sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", [9, 64, 300])
def test_positive_definite_matrices_stay_positive_definite(dtype: torch.dtype, size: int) -> None:
    factor = torch.randn(3, size, size, dtype=dtype, generator=seeded(0))
    tensor = factor @ factor.mT * 7 + torch.eye(size, dtype=dtype)
    model = fit(tensor, requested_kinds=["factorable"])
    assert isinstance(model, Factorable)
    again = drawn(model, tensor)
    torch.linalg.cholesky(again)
    assert float(again.diagonal(dim1=-2, dim2=-1).mean()) == pytest.approx(model.diagonal, rel=0.2)
    assert float(again.std()) == pytest.approx(float(tensor.std()), rel=0.3)
    assert not isinstance(fit(tensor), Factorable)


@pytest.mark.parametrize("upper", [True, False])
@pytest.mark.parametrize("size", [10, 400])
def test_triangular_matrices_stay_solvable(upper: bool, size: int) -> None:
    factor = torch.randn(size, size, generator=seeded(0)) / size + torch.eye(size)
    tensor = (factor.triu() if upper else factor.tril()).contiguous()
    model = fit(tensor, requested_kinds=["factorable", "triangular"])
    assert isinstance(model, Triangular)
    again = drawn(model, tensor)
    solution = torch.linalg.solve_triangular(again, torch.randn(size, 2, generator=seeded(1)), upper=upper)
    assert float(solution.abs().max()) < 1e4
    assert torch.equal(again, again.triu() if upper else again.tril())


def test_distant_quantiles_give_finite_values() -> None:
    levels = [-1.7e308, *[0.0] * (len(PROBABILITIES) - 2), 1.7e308]
    assert bool(at_quantiles(levels, PROBABILITIES, 100_000, torch.Generator().manual_seed(0)).isfinite().all())


def proposals(count: int, seed: int = 0, *, sides: float = 200.0) -> torch.Tensor:
    corners = torch.rand(count, 2, generator=seeded(seed)) * torch.tensor([1200.0, 700.0])
    return torch.cat([corners, corners + 2 + torch.rand(count, 2, generator=seeded(seed + 1)) * sides], dim=1)


def told(boxes: torch.Tensor, groups: int) -> Boxes:
    model = fitted(boxes, Boxes)
    return Boxes(model.first, model.low, model.high, model.whole, model.quantiles, model.overlap, groups)


def kept(boxes: torch.Tensor, scores: torch.Tensor, threshold: float, offset: int) -> int:
    boxes = boxes[scores.argsort(descending=True)]
    areas = (boxes[:, 2:] - boxes[:, :2] + offset).prod(1)
    alive = torch.ones(len(boxes), dtype=torch.bool)
    count = 0
    for at in range(len(boxes)):
        if not alive[at]:
            continue
        count += 1
        sides = torch.minimum(boxes[at, 2:], boxes[:, 2:]) - torch.maximum(boxes[at, :2], boxes[:, :2]) + offset
        inside = sides.clamp(min=0).prod(1)
        alive &= inside / (areas[at] + areas - inside) <= threshold
    return count


@given(st.integers(17, 400), st.floats(0, 1), st.floats(1, 2000), st.booleans(), st.floats(0, 90_000))
@settings(deadline=None, max_examples=15)
def test_suppression_keeps_the_recorded_number_at_any_sizes(
    count: int, share: float, sides: float, whole: bool, away: float
) -> None:
    boxes = proposals(count, sides=sides) + away
    if whole:
        boxes = boxes.round()
    groups = max(1, round(share * count))
    again = drawn(told(boxes, groups), boxes)
    for threshold in (0.3, 0.7):
        assert kept(again, torch.rand(count, generator=seeded(0)), threshold, 0) == groups
    low, high = (again[:, :2].amin(0), again[:, :2].amax(0))
    assert bool((low >= boxes[:, :2].amin(0) - 1).all() and (high <= boxes[:, :2].amax(0) + 1 + 0.01 * sides).all())


def test_crowded_boxes_stay_crowded() -> None:
    centres = proposals(50)
    boxes = (centres[:, None] + torch.rand(50, 20, 4, generator=seeded(5))).reshape(-1, 4)
    model = fitted(boxes, Boxes)
    assert model.overlap is not None
    assert overlapping(drawn(model, boxes)) == pytest.approx(model.overlap, rel=0.3)
    alone = proposals(1000, sides=20)
    assert overlapping(drawn(fitted(alone, Boxes), alone)) < 1


def test_boxes_stay_boxes_and_image_indices_stay_indices() -> None:
    image = torch.randint(0, 3, (500, 1), generator=seeded(0)).float()
    rois = torch.cat([image, proposals(500)], dim=1)
    again = drawn(fitted(rois, Boxes), rois)
    assert set(again[:, 0].tolist()) <= {0.0, 1.0, 2.0}
    assert bool((again[:, 3:] >= again[:, 1:3]).all())


def test_fit_of_drawn_boxes_equals_the_model() -> None:
    for boxes in (proposals(3000), proposals(3000).round()):
        model = fitted(boxes, Boxes)
        again = fitted(drawn(model, boxes), Boxes)
        assert again.whole == model.whole
        assert again.low == pytest.approx(model.low, abs=5)
        assert again.high == pytest.approx(model.high, abs=5)
