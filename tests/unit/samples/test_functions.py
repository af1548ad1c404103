"""Long-tail functions, compared with plain loops and mathematical laws."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opgrip.samples.anchors.gen_base_anchors import gen_base_anchors
from opgrip.samples.anchors.grid_anchors import grid_anchors
from opgrip.samples.anchors.map_roi_levels import map_roi_levels
from opgrip.samples.boxes.bbox_overlaps import bbox_overlaps
from opgrip.samples.boxes.multiclass_nms import multiclass_nms
from opgrip.samples.boxes.nms import nms
from opgrip.samples.boxes.roi_align import roi_align


def boxes(count: int, seed: int = 0, reach: float = 100.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    corner = torch.rand(count, 2, generator=generator, dtype=torch.float64) * reach
    return torch.cat([corner, corner + 1 + torch.rand(count, 2, generator=generator) * reach / 2], dim=1)


def overlap(first: list[float], second: list[float]) -> float:
    width = min(first[2], second[2]) - max(first[0], second[0])
    height = min(first[3], second[3]) - max(first[1], second[1])
    shared = max(width, 0) * max(height, 0)
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (first, second)]
    return shared / (sum(areas) - shared)


def test_overlaps_equal_those_of_a_loop() -> None:
    first, second = boxes(20), boxes(15, seed=1)
    expected = [[overlap(one, other) for other in second.tolist()] for one in first.tolist()]
    torch.testing.assert_close(bbox_overlaps(first, second), torch.tensor(expected, dtype=torch.float64))


def test_boxes_without_area_have_no_overlap() -> None:
    empty = torch.tensor([[5.0, 5, 5, 5]])
    assert bbox_overlaps(empty, empty).tolist() == [[0]]


def test_anchors_have_their_centres_areas_and_ratios() -> None:
    base = gen_base_anchors(16, torch.tensor([8.0]), torch.tensor([0.5, 1.0, 2.0]), center_offset=0.5)
    anchors = grid_anchors(base, (2, 3), (16, 16))
    assert anchors.shape == (18, 4)
    size = anchors[:, 2:] - anchors[:, :2]
    torch.testing.assert_close(size.prod(dim=1), torch.full((18,), 128.0**2))
    torch.testing.assert_close((size[:, 1] / size[:, 0])[:3], torch.tensor([0.5, 1.0, 2.0]))
    centres = (anchors[::3, :2] + anchors[::3, 2:]) / 2
    expected = torch.tensor([[8.0, 8], [24, 8], [40, 8], [8, 24], [24, 24], [40, 24]])
    torch.testing.assert_close(centres, expected)


@given(st.integers(0, 1000), st.floats(0.1, 0.9))
@settings(deadline=None, max_examples=30)
def test_suppression_keeps_the_boxes_that_a_loop_keeps(seed: int, threshold: float) -> None:
    found, scores = boxes(25, seed, reach=40), torch.rand(25, generator=torch.Generator().manual_seed(seed))
    kept: list[int] = []
    for index in sorted(range(25), key=lambda index: -float(scores[index])):
        if all(overlap(found[index].tolist(), found[other].tolist()) <= threshold for other in kept):
            kept.append(index)
    assert nms(found, scores, threshold).tolist() == kept


def test_suppression_of_no_boxes_is_empty() -> None:
    assert nms(torch.zeros(0, 4), torch.zeros(0), 0.5).shape == (0,)


def test_classes_do_not_suppress_each_other() -> None:
    same = torch.tensor([[0.0, 0, 10, 10]]).expand(2, 3, 4)
    scores = torch.tensor([[0.9, 0.8, 0.0], [0.7, 0.95, 0.0]])
    found, values, labels = multiclass_nms(same, scores, 0.1, 0.5, candidates=10, limit=10)
    assert labels.tolist() == [1, 0]
    assert values.tolist() == pytest.approx([0.95, 0.9])
    assert found.shape == (2, 4)
    assert multiclass_nms(same, scores * 0, 0.1, 0.5, 10, 10)[0].shape == (0, 4)


def test_classes_are_separate_with_negative_coordinates() -> None:
    same = torch.tensor([-100.0, -100, 10, 10]).expand(2, 2, 4)
    scores = torch.tensor([[0.9, 0.0], [0.0, 0.8]])
    assert multiclass_nms(same, scores, 0.1, 0.5, candidates=10, limit=10)[2].tolist() == [0, 1]


def test_only_the_best_candidates_are_considered() -> None:
    apart = torch.tensor([[[0.0, 0, 1, 1]], [[5, 5, 6, 6]], [[9, 9, 10, 10]]])
    scores = torch.tensor([[0.5], [0.9], [0.7]])
    assert multiclass_nms(apart, scores, 0.1, 0.5, candidates=2, limit=10)[1].tolist() == pytest.approx([0.9, 0.7])


def test_doubling_a_box_raises_its_level_by_one() -> None:
    sides = torch.tensor([1.0, 55, 57, 111, 113, 223, 225, 447, 449, 5000])
    squares = torch.stack([sides * 0, sides * 0, sides * 0, sides, sides], dim=1)
    assert map_roi_levels(squares, 4).tolist() == [0, 0, 0, 0, 1, 1, 2, 2, 3, 3]


def sample(plane: torch.Tensor, y: float, x: float) -> float:
    height, width = plane.shape
    if not (-1 <= y <= height and -1 <= x <= width):
        return 0.0
    y, x = min(max(y, 0), height - 1), min(max(x, 0), width - 1)
    top, left = int(y), int(x)
    bottom, right = min(top + 1, height - 1), min(left + 1, width - 1)
    down, across = y - top, x - left
    upper = plane[top, left] * (1 - across) + plane[top, right] * across
    lower = plane[bottom, left] * (1 - across) + plane[bottom, right] * across
    return float(upper * (1 - down) + lower * down)


def test_region_features_equal_those_of_a_loop() -> None:
    features = torch.randn(2, 3, 9, 11, dtype=torch.float64)
    rois = torch.tensor([[0.0, 3, 5, 30, 33], [1, -9, -4, 12, 60], [1, 20, 10, 90, 41]], dtype=torch.float64)
    size, scale, samples = 4, 0.25, 2
    expected = torch.zeros(3, 3, size, size, dtype=torch.float64)
    for box, (image, x1, y1, x2, y2) in enumerate(rois.tolist()):
        left, top = x1 * scale - 0.5, y1 * scale - 0.5
        step_x, step_y = ((x2 - x1) * scale / (size * samples), (y2 - y1) * scale / (size * samples))
        for channel in range(3):
            plane = features[int(image), channel]
            for row in range(size * samples):
                for column in range(size * samples):
                    value = sample(plane, top + (row + 0.5) * step_y, left + (column + 0.5) * step_x)
                    expected[box, channel, row // samples, column // samples] += value / samples**2
    torch.testing.assert_close(roi_align(features, rois, size, scale, samples), expected)
