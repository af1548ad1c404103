"""Value models of boxes: drawn boxes overlap, index and survive suppression like the recorded ones."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
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


def test_boxes_with_scores_are_boxes() -> None:
    detections = torch.cat([proposals(500), torch.rand(500, 1, generator=seeded(7))], dim=1)
    model = fitted(detections, Boxes)
    assert model.first == 0
    assert bool((drawn(model, detections)[:, 4] <= 1).all())


def test_fit_of_drawn_boxes_equals_the_model() -> None:
    for boxes in (proposals(3000), proposals(3000).round()):
        model = fitted(boxes, Boxes)
        again = fitted(drawn(model, boxes), Boxes)
        assert again.whole == model.whole
        assert again.low == pytest.approx(model.low, abs=5)
        assert again.high == pytest.approx(model.high, abs=5)
