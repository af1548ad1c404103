"""Value models of boxes: drawn boxes overlap, index and survive suppression like the recorded ones."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from optional import optional
from redrawn import drawn, fitted, seeded

from opgrip.traces.values.boxes import Boxes, overlapping


def proposals(count: int, seed: int = 0, *, sides: float = 200.0) -> torch.Tensor:
    corners = torch.rand(count, 2, generator=seeded(seed)) * torch.tensor([1200.0, 700.0])
    return torch.cat([corners, corners + 2 + torch.rand(count, 2, generator=seeded(seed + 1)) * sides], dim=1)


def told(boxes: torch.Tensor, groups: int) -> Boxes:
    model = fitted(boxes, Boxes)
    return Boxes(model.first, model.low, model.high, model.whole, model.quantiles, model.overlap, groups)


def kept(boxes: torch.Tensor, scores: torch.Tensor, threshold: float, offset: int) -> int:
    """Return the number of boxes that a greedy suppression keeps."""
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


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.7, 0.95])
@pytest.mark.parametrize(("count", "groups"), [(300, 1), (300, 40), (300, 299), (300, 300), (1500, 500)])
def test_suppression_keeps_the_recorded_number_of_boxes(count: int, groups: int, threshold: float, offset: int) -> None:
    boxes = proposals(count)
    again = drawn(told(boxes, groups), boxes)
    for seed in (0, 1):
        assert kept(again, torch.rand(count, generator=seeded(seed)), threshold, offset) == groups


@given(st.integers(17, 400), st.floats(0, 1), st.floats(1, 2000), st.booleans(), st.floats(0, 90_000))
@settings(deadline=None, max_examples=50)
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


@pytest.mark.parametrize(("count", "groups"), [(5000, 1000), (20_000, 1000), (20_000, 15_000)])
def test_mmcv_keeps_the_recorded_number_of_many_boxes(count: int, groups: int) -> None:
    ops = optional("mmcv.ops")
    boxes = proposals(count)
    again = drawn(told(boxes, groups), boxes)
    for threshold in (0.3, 0.5, 0.7):
        _, places = ops.nms(again, torch.rand(count, generator=seeded(3)), threshold)
        assert len(places) == groups


def test_boxes_of_one_size_keep_it_if_they_fit() -> None:
    corners = torch.rand(400, 2, generator=seeded(0)) * 1000
    boxes = torch.cat([corners, corners + 32], dim=1).round()
    again = drawn(told(boxes, 100), boxes)
    sides = again[:, 2:] - again[:, :2]
    assert float((sides - 32).abs().max()) <= 1


def test_groups_have_about_equal_size() -> None:
    boxes = proposals(300)
    again = drawn(told(boxes, 50), boxes)
    assert overlapping(again) == pytest.approx(5, abs=0.1)


def test_boxes_that_cannot_be_separated_are_drawn() -> None:
    boxes = torch.tensor([[5.0, 5.0, 9.0, 9.0]]).repeat(100, 1)
    boxes[:, 4:] = 0
    boxes[0, 2] += 1
    again = drawn(told(boxes, 60), boxes)
    assert bool((again[:, 2:] > again[:, :2]).all())


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


def test_boxes_with_scores_are_boxes() -> None:
    detections = torch.cat([proposals(500), torch.rand(500, 1, generator=seeded(7))], dim=1)
    model = fitted(detections, Boxes)
    assert model.first == 0
    assert bool((drawn(model, detections)[:, 4] <= 1).all())


def test_sizes_of_boxes_keep_their_distribution() -> None:
    boxes = proposals(4000)
    boxes[:, 2:] = boxes[:, :2] + torch.rand(4000, 2, generator=seeded(3)).pow(6) * 800 + 1
    again = drawn(fitted(boxes, Boxes), boxes)
    one, other = ((rows[:, 2] - rows[:, 0]).median() for rows in (boxes, again))
    assert float(one) == pytest.approx(float(other), rel=0.3)


def test_fit_of_drawn_boxes_equals_the_model() -> None:
    for boxes in (proposals(3000), proposals(3000).round()):
        model = fitted(boxes, Boxes)
        again = fitted(drawn(model, boxes), Boxes)
        assert again.whole == model.whole
        assert again.low == pytest.approx(model.low, abs=5)
        assert again.high == pytest.approx(model.high, abs=5)
