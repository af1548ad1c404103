"""Boxes and overlaps, compared with their original projects or with loops."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from implementations import Function, compare, compare_with, jax_results
from optional import optional
from torch import Tensor

from opgrip.samples import Draw, Sample, samples
from opgrip.samples.boxes.boxes_for_nms import boxes_for_nms
from opgrip.samples.boxes.generalized_box_iou import generalized_box_iou
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


def mmdet_sides(*arguments: Any) -> tuple[Tensor, Tensor]:
    return yolact().sanitize_coordinates(*arguments)


def mmdet_crop(*arguments: Any) -> Tensor:
    return yolact().crop_single(*arguments)


def yolact() -> Any:
    return optional("mmdet.models.dense_heads").YOLACTProtonet(num_classes=1)


def mmcv_nms(boxes: Tensor, scores: Tensor, threshold: float) -> Tensor:
    return optional("mmcv.ops").nms(boxes, scores, threshold)[1]


def mmdet_multiclass_nms(boxes: Tensor, scores: Tensor, low: float, overlap: float, _: int, limit: int) -> Any:
    scores = torch.cat([scores, torch.zeros(len(scores), 1)], dim=1)
    suppression = {"type": "nms", "iou_threshold": overlap}
    found, labels = installed("mmdet.models.layers:multiclass_nms")(
        boxes.reshape(len(boxes), -1), scores, low, suppression, limit
    )
    return found[:, :4], found[:, 4], labels


def mmcv_roi_align(features: Tensor, rois: Tensor, size: int, scale: float, samples: int = 2) -> Tensor:
    return installed("mmcv.ops:roi_align")(features, rois, size, scale, samples, "avg", True)


def gathered(src: Tensor, idx: Tensor) -> Tensor:
    return src.gather(1, idx)


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
    """Return boxes that overlap; the first ones require gradients."""
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
    """Return masks of eight by eight cells, and boxes that end at cell borders."""
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
    """Return a configuration of a sample as arguments."""
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
        mmdet_sides,
        [sides(138), sides(138, 1), sides(100, 3, False), sides(7, 0, True)],
    ),
    (
        "crop",
        mmdet_crop,
        [of("crop", 6, 20), like(of("crop", 6, 20), 0), like(of("crop", 4, 11), 4), of("crop", 0, 5), whole_cells],
    ),
    ("index2d", gathered, [of("index2d", 6, 9), lambda: (Draw().normal(3, 5, grad=True), torch.tensor([[4] * 5] * 3))]),
    ("masks_to_boxes", hulls, [masks(8), masks(4, 0.01), masks(2, 1.0), masks(3, 0.0), masks(0)]),
    ("nms", mmcv_nms, [of("nms", 5, 200, threshold) for threshold in (0.1, 0.5, 0.9)]),
    ("multiclass_nms", mmdet_multiclass_nms, [of("multiclass_nms", 60, 4, 0.1, 10**6)]),
    ("roi_align", mmcv_roi_align, [pooled(7, 0.25, 2), pooled(3, 0.2, 1), pooled(4, 0.125, 3)]),
]


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


def test_inverted_boxes_have_no_generalized_overlap() -> None:
    right, wrong = torch.tensor([[0.0, 0, 1, 1]]), torch.tensor([[0.0, 1, 1, 0]])
    for pair in ((right, wrong), (wrong, right)):
        with pytest.raises(ValueError, match="x2 < x1"):
            generalized_box_iou(*pair)


def test_overlaps_of_a_batch_equal_those_of_each_image() -> None:
    first, second = Draw().boxes(12).reshape(3, 4, 4), Draw(1).boxes(6).reshape(3, 2, 4)
    for name in ("intersect", "jaccard", "box_iou", "generalized_box_iou", "bbox_overlaps"):
        function = SAMPLES[name].function
        one_by_one = [function(*pair) for pair in zip(first, second, strict=True)]
        stacked = [torch.stack(parts) for parts in zip(*one_by_one, strict=True)] if name == "box_iou" else one_by_one
        compare(function(first, second), stacked if name == "box_iou" else torch.stack(stacked))


def test_shifted_boxes_are_suppressed_like_groups_of_mmcv() -> None:
    ops = optional("mmcv.ops")
    boxes, scores, threshold = SAMPLES["nms"].arguments()
    boxes = boxes.clamp(min=0)
    groups = Draw().integers(len(boxes), high=4)
    kept = SAMPLES["nms"].function(boxes_for_nms(boxes, groups), scores, threshold)
    _, expected = ops.batched_nms(boxes, scores, groups, {"type": "nms", "iou_threshold": threshold})
    assert kept.tolist() == expected.tolist()
    assert kept.tolist() != SAMPLES["nms"].function(boxes, scores, threshold).tolist()


def test_no_score_above_the_threshold_gives_no_detection() -> None:
    found = multiclass_nms(torch.ones(3, 2, 4), torch.zeros(3, 2), 0.1, 0.5, 10, 10)
    assert [tuple(part.shape) for part in found] == [(0, 4), (0,), (0,)]


@pytest.mark.parametrize(
    "sample",
    [
        pytest.param(sample, id=sample.name)
        for sample in SAMPLES.values()
        if sample.family in ("boxes", "anchors") and sample.has_jax()
    ],
)
def test_function_compiles_in_jax(sample: Sample) -> None:
    jax = optional("jax")
    arguments = sample.arguments()
    at = [index for index, argument in enumerate(arguments) if isinstance(argument, Tensor)]

    def compiled(*given: Any) -> Any:
        # the tensors are traced; other arguments are static
        def call(*arrays: Any) -> Any:
            return sample.jax()(*(arrays[at.index(i)] if i in at else other for i, other in enumerate(given)))

        return jax.jit(call)(*(given[index] for index in at))

    compare(jax_results(compiled, arguments), sample.function(*arguments), sample.rtol, sample.atol)
