"""Anchors and locations, compared with their original projects."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from implementations import Function, compare_with
from optional import optional

from opgrip.samples import Draw, samples
from opgrip.samples.anchors.compute_locations import compute_locations
from opgrip.samples.anchors.gen_base_anchors import gen_base_anchors
from opgrip.samples.anchors.grid_anchors import grid_anchors
from opgrip.samples.anchors.map_roi_levels import map_roi_levels
from opgrip.samples.anchors.valid_flags import valid_flags

SCALES = torch.tensor([4.0, 5.04, 6.35])
RATIOS = torch.tensor([0.5, 1.0, 2.0])


def generator(**options: Any) -> Any:
    """Return mmdet's generator of anchors for one level."""
    generators = optional("mmdet.models.task_modules.prior_generators")
    return generators.AnchorGenerator(**({"strides": [16], "ratios": [1.0], "scales": [8]} | options))


def mmdet_base_anchors(*arguments: Any) -> torch.Tensor:
    size, scales, ratios, scale_major, center_offset, center = arguments
    made = generator(scale_major=scale_major, center_offset=center_offset)
    return made.gen_single_level_base_anchors(size, scales, ratios, center)


def mmdet_grid_anchors(base: torch.Tensor, size: tuple[int, int], stride: tuple[float, float] = (16, 16)) -> Any:
    made = generator(strides=[stride])
    made.base_anchors = [base]
    return made.single_level_grid_priors(size, 0, dtype=base.dtype, device="cpu")


def mmdet_valid_flags(*arguments: Any) -> torch.Tensor:
    return generator().single_level_valid_flags(*arguments, device="cpu")


def mmdet_roi_levels(rois: torch.Tensor, levels: int = 4, finest_scale: int = 56) -> torch.Tensor:
    extractors = optional("mmdet.models.roi_heads.roi_extractors")
    layer = {"type": "RoIAlign", "output_size": 7, "sampling_ratio": 2}
    extractor = extractors.SingleRoIExtractor(layer, 1, [4] * levels, finest_scale=finest_scale)
    return extractor.map_roi_levels(rois, levels)


def mmdet_locations(size: tuple[int, int], stride: int) -> torch.Tensor:
    generators = optional("mmdet.models.task_modules.prior_generators")
    return generators.MlvlPointGenerator([stride]).single_level_grid_priors(size, 0, device="cpu")


def rois(count: int) -> torch.Tensor:
    return torch.cat([torch.zeros(count, 1), Draw().boxes(count, smallest=2.0)], dim=1)


@pytest.mark.parametrize(
    ("original", "ours", "arguments"),
    [
        (mmdet_base_anchors, gen_base_anchors, (8, SCALES, RATIOS, True, 0.0, None)),
        (mmdet_base_anchors, gen_base_anchors, (8, SCALES, RATIOS, False, 0.5, None)),
        (mmdet_base_anchors, gen_base_anchors, (7.5, SCALES[:1], RATIOS, True, 0.0, (3.9, 4.1))),
        (mmdet_grid_anchors, grid_anchors, (Draw().boxes(9), (5, 7), (8, 8))),
        (mmdet_grid_anchors, grid_anchors, (Draw().boxes(3), (4, 6), (7.97, 15.7))),
        (mmdet_grid_anchors, grid_anchors, (Draw().boxes(3).double(), (2, 3))),
        (mmdet_grid_anchors, grid_anchors, (Draw().boxes(3), (0, 3))),
        (mmdet_valid_flags, valid_flags, ((5, 7), (3, 7), 9)),
        (mmdet_valid_flags, valid_flags, ((5, 7), (5, 2), 1)),
        (mmdet_valid_flags, valid_flags, ((5, 7), (0, 0), 3)),
        (mmdet_roi_levels, map_roi_levels, (rois(500),)),
        (mmdet_roi_levels, map_roi_levels, (rois(500), 2, 16)),
        (mmdet_roi_levels, map_roi_levels, (rois(0),)),
        (mmdet_locations, compute_locations, ((5, 7), 8)),
        (mmdet_locations, compute_locations, ((1, 3), 128)),
    ],
)
def test_anchors_equal_those_of_the_original(original: Function, ours: Function, arguments: tuple[Any, ...]) -> None:
    compare_with(original, ours, lambda: arguments, rtol=1e-6, atol=1e-5)


def test_anchors_of_a_cell_are_sorted_by_ratio_then_scale() -> None:
    anchors = gen_base_anchors(10, torch.tensor([1.0, 2.0]), torch.tensor([0.25, 4.0]))
    assert anchors.tolist() == [[-10, -2.5, 10, 2.5], [-20, -5, 20, 5], [-2.5, -10, 2.5, 10], [-5, -20, 5, 20]]


def test_flags_are_in_the_order_of_the_anchors() -> None:
    anchors = grid_anchors(torch.tensor([[0.0, 0, 1, 1], [0, 0, 2, 2]]), (3, 4), (8, 8))
    flags = valid_flags((3, 4), (2, 3), 2)
    assert flags.tolist() == ((anchors[:, 0] < 24) & (anchors[:, 1] < 16)).tolist()


def test_dense_points_surround_the_centres() -> None:
    corners = [[2, 2], [6, 2], [2, 6], [6, 6]]
    assert compute_locations((1, 1), 8).tolist() == [[4, 4]]
    assert compute_locations((1, 1), 8, 4).tolist() == corners
    assert compute_locations((1, 1), 8, 5).tolist() == [*corners[:2], [4, 4], *corners[2:]]
    assert compute_locations((2, 2), 8, 4).tolist() == [
        [x + dx, y + dy] for y in (0, 8) for x in (0, 8) for dx, dy in corners
    ]
    with pytest.raises(ValueError, match="use 1, 4 or 5"):
        compute_locations((1, 1), 8, 3)


def test_levels_of_retinanet_have_all_its_anchors() -> None:
    sizes = [(100, 168), (50, 84), (25, 42), (13, 21), (7, 11)]
    base = gen_base_anchors(8, SCALES, RATIOS)
    assert sum(len(grid_anchors(base, size, (8, 8))) for size in sizes) == 201600
    assert (201600,) in samples()["box_area"].configurations.values()
