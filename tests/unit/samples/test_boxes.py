"""Boxes and overlaps, compared with their original projects or with loops."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from implementations import Function, compare_with
from optional import optional
from torch import Tensor

from opgrip.samples import Draw, samples
from opgrip.samples.anchors.compute_locations import compute_locations
from opgrip.samples.anchors.gen_base_anchors import gen_base_anchors
from opgrip.samples.anchors.grid_anchors import grid_anchors
from opgrip.samples.anchors.map_roi_levels import map_roi_levels
from opgrip.samples.anchors.valid_flags import valid_flags
from opgrip.samples.boxes.multiclass_nms import multiclass_nms

SAMPLES = samples()
Arguments = Callable[[], tuple[Any, ...]]


def installed(path: str) -> Function:
    """Return a function of another package, named `module:name`, which is imported when it is called."""
    module, _, name = path.partition(":")

    def call(*arguments: Any) -> Any:
        optional(module.partition(".")[0])
        return getattr(import_module(module), name)(*arguments)

    return call


mmdet_overlaps = installed("mmdet.structures.bbox:bbox_overlaps")
detr_overlaps = installed("transformers.loss.loss_for_object_detection:box_iou")


def detr_shared(first: Tensor, second: Tensor) -> Tensor:
    overlap, union = detr_overlaps(first, second)
    return overlap * union


def mmdet_jaccard(first: Tensor, second: Tensor, crowd: bool = False) -> Tensor:
    return mmdet_overlaps(first, second, "iof" if crowd else "iou", False, 0.0)


def yolact() -> Any:
    return optional("mmdet.models.dense_heads").YOLACTProtonet(num_classes=1)


def mmdet_multiclass_nms(boxes: Tensor, scores: Tensor, low: float, overlap: float, _: int, limit: int) -> Any:
    scores = torch.cat([scores, torch.zeros(len(scores), 1)], dim=1)
    suppression = {"type": "nms", "iou_threshold": overlap}
    found, labels = installed("mmdet.models.layers:multiclass_nms")(
        boxes.reshape(len(boxes), -1), scores, low, suppression, limit
    )
    return found[:, :4], found[:, 4], labels


def mmcv_roi_align(features: Tensor, rois: Tensor, size: int, scale: float, samples: int = 2) -> Tensor:
    return installed("mmcv.ops:roi_align")(features, rois, size, scale, samples, "avg", True)


def expanded(targets: Tensor, weights: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    rows = []
    for values in (targets, weights):
        cells = [
            [values[row][column % 4] if 0 < label == column // 4 else 0.0 for column in range(4 * classes)]
            for row, label in enumerate(labels.tolist())
        ]
        rows.append(torch.tensor(cells).reshape(-1, 4 * classes))
    return rows[0], rows[1]


def hulls(masks: Tensor) -> Tensor:
    found = []
    for mask in masks:
        y, x = mask.nonzero(as_tuple=True)
        found.append([x.min(), y.min(), x.max(), y.max()] if mask.any() else [1e8, 1e8, 0, 0])
    return torch.tensor(found, dtype=torch.float32).reshape(-1, 4)


def shifted(boxes: Tensor, groups: Tensor, class_agnostic: bool = False) -> Tensor:
    reach = 0 if class_agnostic else max(boxes.flatten().tolist()) + 1
    return torch.stack([box + group * reach for box, group in zip(boxes, groups, strict=True)])


def some(*counts: int) -> Arguments:
    gradient = all(counts)
    return lambda: tuple(
        Draw(count).boxes(count, (200.0, 300.0), grad=gradient and index == 0) for index, count in enumerate(counts)
    )


def paired(count: int, *options: Any) -> Arguments:
    def make() -> tuple[Any, ...]:
        boxes = Draw().boxes(count)
        return Draw(1).near(boxes, grad=count > 0), boxes, *options

    return make


def sides(*options: Any) -> Arguments:
    return lambda: (*Draw().uniform(2, 30, low=-0.2, high=1.2).unbind(), *options)


def whole_cells() -> tuple[Tensor, Tensor]:
    return torch.ones(8, 8, 2), torch.tensor([[0.25, 0.375, 0.5, 0.75], [0.0, 0.0, 1.0, 0.125]])


def pooled(size: int, scale: float, samples: int) -> Arguments:
    def make() -> tuple[Any, ...]:
        draw = Draw()
        boxes = draw.boxes(20, (70.0, 90.0), 2.0) + draw.normal(20, 2, std=5).repeat(1, 2)
        rois = torch.cat([draw.integers(20, 1, high=3).float(), boxes], dim=1)
        return draw.normal(3, 5, 16, 20, grad=True), rois, size, scale, samples

    return make


def masks(count: int, share: float = 0.1) -> Arguments:
    return lambda: (Draw().mask(count, 9, 12, share=share),)


def like(arguments: Arguments, *more: Any) -> Arguments:
    return lambda: (*arguments(), *more)


def of(name: str, *configuration: Any) -> Arguments:
    sample = SAMPLES[name]
    return lambda: sample.inputs(Draw(3), *configuration)


CASES: list[tuple[str, Function, list[Arguments]]] = [
    ("box_area", installed("transformers.loss.loss_for_object_detection:box_area"), [some(30), some(0)]),
    (
        "box_cxcywh_to_xyxy",
        installed("transformers.image_transforms:center_to_corners_format"),
        [some(30), lambda: (Draw().uniform(2, 5, 4, grad=True),)],
    ),
    ("box_xyxy_to_cxcywh", installed("transformers.image_transforms:corners_to_center_format"), [some(30), some(0)]),
    ("box_iou", detr_overlaps, [some(30, 20), some(5, 0)]),
    (
        "generalized_box_iou",
        installed("transformers.loss.loss_for_object_detection:generalized_box_iou"),
        [some(30, 20), some(0, 4)],
    ),
    ("intersect", detr_shared, [some(30, 20), some(0, 4)]),
    ("jaccard", mmdet_jaccard, [some(30, 20), like(some(30, 20), True)]),
    (
        "bbox_overlaps",
        mmdet_overlaps,
        [like(some(30, 20), mode) for mode in ("iou", "iof", "giou")]
        + [paired(30, mode, True) for mode in ("iou", "iof", "giou")]
        + [like(some(*counts), "giou") for counts in ((0, 4), (4, 0), (0, 0))]
        + [paired(0, "iou", True)]
        + [lambda: tuple(boxes.reshape(2, -1, 4) for boxes in some(20, 30)())],
    ),
    (
        "bbox2roi",
        installed("mmdet.structures.bbox:bbox2roi"),
        [lambda: ([*some(5, 0, 3)()],), lambda: ([*some(0, 0)()],)],
    ),
    ("boxes_for_nms", shifted, [of("boxes_for_nms", 50, 7), like(of("boxes_for_nms", 50, 7), True)]),
    ("bbox_expand", expanded, [of("bbox_expand", 40, 5), of("bbox_expand", 3, 2)]),
    (
        "sanitize_coordinates",
        lambda *arguments: yolact().sanitize_coordinates(*arguments),
        [sides(138), sides(138, 1), sides(100, 3, False), sides(7, 0, True)],
    ),
    (
        "crop",
        lambda *arguments: yolact().crop_single(*arguments),
        [of("crop", 6, 20), like(of("crop", 6, 20), 0), like(of("crop", 4, 11), 4), of("crop", 0, 5), whole_cells],
    ),
    (
        "index2d",
        lambda src, idx: src.gather(1, idx),
        [of("index2d", 6, 9), lambda: (Draw().normal(3, 5, grad=True), torch.tensor([[4] * 5] * 3))],
    ),
    ("masks_to_boxes", hulls, [masks(8), masks(4, 0.01), masks(2, 1.0), masks(3, 0.0), masks(0)]),
    (
        "nms",
        lambda *arguments: optional("mmcv.ops").nms(*arguments)[1],
        [of("nms", 5, 200, threshold) for threshold in (0.1, 0.5, 0.9)],
    ),
    ("multiclass_nms", mmdet_multiclass_nms, [of("multiclass_nms", 60, 4, 0.1, 10**6)]),
    ("roi_align", mmcv_roi_align, [pooled(7, 0.25, 2), pooled(3, 0.2, 1), pooled(4, 0.125, 3)]),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "expected", "make"),
    [
        pytest.param(name, expected, make, id=f"{name}-{index}")
        for name, expected, makers in CASES
        for index, make in enumerate(makers)
    ],
)
def test_function_equals_its_original(name: str, expected: Function, make: Arguments) -> None:
    sample = SAMPLES[name]
    compare_with(expected, sample.function, make, sample.rtol, sample.atol)


def test_every_box_function_has_a_case() -> None:
    assert {sample.name for sample in SAMPLES.values() if sample.family == "boxes"} == {case[0] for case in CASES}


SCALES = torch.tensor([4.0, 5.04, 6.35])
RATIOS = torch.tensor([0.5, 1.0, 2.0])


def generator(**options: Any) -> Any:
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


@pytest.mark.slow
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


def test_doubling_a_box_raises_its_level_by_one() -> None:
    sides = torch.tensor([1.0, 55, 57, 111, 113, 223, 225, 447, 449, 5000])
    squares = torch.stack([sides * 0, sides * 0, sides * 0, sides, sides], dim=1)
    assert map_roi_levels(squares, 4).tolist() == [0, 0, 0, 0, 1, 1, 2, 2, 3, 3]
