"""Coders, assigners and samplers of boxes, compared with their originals."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from math import exp, log
from typing import Any

import pytest
import torch
from implementations import Function, compare_with
from optional import optional
from torch import Tensor

from opgrip.samples import Draw, samples
from opgrip.samples.assigners.fcos_matcher import fcos_matcher
from opgrip.samples.assigners.hungarian_assign import hungarian_assign
from opgrip.samples.assigners.priors import grid_boxes, grid_points
from opgrip.samples.coders.bbox2delta import bbox2delta
from opgrip.samples.coders.bbox2offset import bbox2offset
from opgrip.samples.coders.bbox2tblr import bbox2tblr
from opgrip.samples.coders.decode import decode
from opgrip.samples.coders.delta2bbox import delta2bbox
from opgrip.samples.coders.encode import encode
from opgrip.samples.coders.legacy_bbox2delta import legacy_bbox2delta
from opgrip.samples.coders.legacy_delta2bbox import legacy_delta2bbox
from opgrip.samples.coders.offset2bbox import offset2bbox
from opgrip.samples.coders.tblr2bbox import tblr2bbox
from opgrip.samples.coders.yolo_decode import yolo_decode
from opgrip.samples.coders.yolo_encode import yolo_encode

MMDET = "mmdet.models.task_modules.coders"
STDS = (0.1, 0.1, 0.2, 0.2)

# MMDetection's functions by sample
ORIGINALS = {
    "bbox2delta": "delta_xywh_bbox_coder.bbox2delta",
    "delta2bbox": "delta_xywh_bbox_coder.delta2bbox",
    "legacy_bbox2delta": "legacy_delta_xywh_bbox_coder.legacy_bbox2delta",
    "legacy_delta2bbox": "legacy_delta_xywh_bbox_coder.legacy_delta2bbox",
    "bbox2tblr": "tblr_bbox_coder.bboxes2tblr",
    "tblr2bbox": "tblr_bbox_coder.tblr2bboxes",
    "generate_buckets": "bucketing_bbox_coder.generat_buckets",
    "bbox2bucket": "bucketing_bbox_coder.bbox2bucket",
    "bucket2bbox": "bucketing_bbox_coder.bucket2bbox",
}


def original(name: str) -> Function:
    if name.startswith("yolo"):
        return partial(yolo, name.removeprefix("yolo_"))
    module, _, function = ORIGINALS[name].partition(".")
    return getattr(import_module(f"{MMDET}.{module}"), function)  # type: ignore[no-any-return]


def yolo(method: str, *arguments: Any, eps: float = 1e-6) -> Any:
    coder = import_module(f"{MMDET}.yolo_bbox_coder").YOLOBBoxCoder(eps=eps, use_box_type=False)
    return getattr(coder, method)(*arguments)


def learning(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(
        value.detach().requires_grad_() if isinstance(value, Tensor) and value.is_floating_point() else value
        for value in arguments
    )


def deltas(draw: Draw, count: int = 20, classes: int = 3, std: float = 3.0) -> tuple[Tensor, Tensor]:
    """Return boxes, and deltas so large that many results are clipped."""
    return draw.boxes(count), draw.normal(count, 4 * classes, std=std)


def pairs(draw: Draw) -> tuple[Tensor, Tensor]:
    boxes = draw.boxes(20)
    return boxes, draw.near(boxes, 0.6)


def buckets(draw: Draw, boxes: int = 20, count: int = 7) -> tuple[Any, ...]:
    return draw.boxes(boxes), draw.normal(boxes, 4 * count), draw.normal(boxes, 4 * count)


def images(draw: Draw) -> tuple[Tensor, Tensor]:
    return draw.boxes(20).reshape(2, 10, 4), draw.normal(2, 10, 4)


# Samples with arguments, options, and MMDetection's names of these if they differ.
OPTIONS: list[tuple[str, Callable[[Draw], tuple[Any, ...]], dict[str, Any], dict[str, Any] | None]] = [
    ("bbox2delta", pairs, {"means": (0.1, 0.2, 0.3, 0.4), "stds": STDS}, None),
    ("delta2bbox", deltas, {"means": (0.1, 0.2, 0.3, 0.4), "stds": STDS}, None),
    ("delta2bbox", deltas, {"max_shape": (300, 400), "wh_ratio_clip": 0.5}, None),
    ("delta2bbox", deltas, {"ctr_clamp": 32}, {"add_ctr_clamp": True, "ctr_clamp": 32}),
    ("legacy_bbox2delta", pairs, {"means": (0.1, 0.2, 0.3, 0.4), "stds": STDS}, None),
    ("legacy_delta2bbox", deltas, {"means": (0.1, 0.2, 0.3, 0.4), "stds": STDS, "max_shape": (300, 400)}, None),
    ("legacy_delta2bbox", deltas, {"wh_ratio_clip": 0.5}, None),
    ("bbox2tblr", pairs, {"normalizer": (1.0, 2.0, 3.0, 4.0)}, None),
    ("bbox2tblr", pairs, {"normalize_by_wh": False}, None),
    ("tblr2bbox", images, {"normalizer": (1.0, 2.0, 3.0, 4.0), "max_shape": [(300, 400), (200, 600)]}, None),
    ("tblr2bbox", partial(deltas, classes=1), {"normalize_by_wh": False, "max_shape": (300, 400)}, None),
    ("generate_buckets", lambda draw: (draw.boxes(20), 7), {}, None),
    ("bbox2bucket", lambda draw: (*pairs(draw), 7, 1.0), {"offset_topk": 3, "offset_upperbound": 0.4}, None),
    ("bbox2bucket", lambda draw: (*pairs(draw), 8, 1.3), {"offset_topk": 1, "cls_ignore_neighbor": False}, None),
    ("bucket2bbox", lambda draw: (*buckets(draw), 14), {"scale_factor": 2.0}, None),
    ("bucket2bbox", lambda draw: (*buckets(draw, 5, 4), 7), {"max_shape": (300, 400)}, None),
    ("yolo_decode", lambda draw: (*deltas(draw, classes=1), 16), {}, None),
    ("yolo_encode", lambda draw: (*pairs(draw), 16), {"eps": 0.2}, None),
]


def offsets_by_loop(boxes: Tensor, gt: Tensor, weights: tuple[float, ...] = (1, 1, 1, 1)) -> Tensor:
    rows = []
    for (x1, y1, x2, y2), (X1, Y1, X2, Y2) in zip(boxes.tolist(), gt.tolist(), strict=True):
        w, h, W, H = x2 - x1 + 1, y2 - y1 + 1, X2 - X1 + 1, Y2 - Y1 + 1
        moved = ((X1 + W / 2 - x1 - w / 2) / w, (Y1 + H / 2 - y1 - h / 2) / h, log(W / w), log(H / h))
        rows.append([weight * value for weight, value in zip(weights, moved, strict=True)])
    return torch.tensor(rows, dtype=boxes.dtype).reshape(-1, 4)


def boxes_by_loop(boxes: Tensor, offset: Tensor, weights: tuple[float, ...] = (1, 1, 1, 1)) -> Tensor:
    rows = []
    for (x1, y1, x2, y2), predicted in zip(boxes.tolist(), offset.tolist(), strict=True):
        w, h, row = x2 - x1 + 1, y2 - y1 + 1, []
        for first in range(0, len(predicted), 4):
            dx, dy, dw, dh = (
                value / weight for value, weight in zip(predicted[first : first + 4], weights, strict=True)
            )
            x, y = x1 + w / 2 + dx * w, y1 + h / 2 + dy * h
            W, H = w * min(exp(dw), 62.5), h * min(exp(dh), 62.5)
            row += [x - W / 2, y - H / 2, x + W / 2 - 1, y + H / 2 - 1]
        rows.append(row)
    return torch.tensor(rows, dtype=boxes.dtype).reshape(len(boxes), -1)


def decoded_by_loop(loc: Tensor, priors: Tensor, yolo: bool = False) -> Tensor:
    rows = []
    for (dx, dy, dw, dh), (x, y, w, h) in zip(loc.tolist(), priors.tolist(), strict=True):
        X, Y = (x + dx, y + dy) if yolo else (x + 0.1 * dx * w, y + 0.1 * dy * h)
        W, H = (w * exp(dw), h * exp(dh)) if yolo else (w * exp(0.2 * dw), h * exp(0.2 * dh))
        rows.append([X - W / 2, Y - H / 2, X + W / 2, Y + H / 2])
    return torch.tensor(rows, dtype=loc.dtype).reshape(-1, 4)


def encoded_by_loop(matched: Tensor, priors: Tensor, yolo: bool = False) -> Tensor:
    rows = []
    for (x1, y1, x2, y2), (x, y, w, h) in zip(matched.tolist(), priors.tolist(), strict=True):
        dx, dy, dw, dh = (x1 + x2) / 2 - x, (y1 + y2) / 2 - y, log((x2 - x1) / w), log((y2 - y1) / h)
        rows.append([dx, dy, dw, dh] if yolo else [dx / w / 0.1, dy / h / 0.1, dw / 0.2, dh / 0.2])
    return torch.tensor(rows, dtype=matched.dtype).reshape(-1, 4)


# Samples, loops with the same results, and values of their options.
LOOPS: list[tuple[str, Callable[..., Tensor], tuple[Any, ...]]] = [
    ("bbox2offset", offsets_by_loop, ((10.0, 10.0, 5.0, 5.0),)),
    ("offset2bbox", boxes_by_loop, ((10.0, 10.0, 5.0, 5.0),)),
    ("decode", decoded_by_loop, (True,)),
    ("encode", encoded_by_loop, (True,)),
]


@pytest.mark.parametrize(("name", "loop", "options"), LOOPS)
def test_coder_equals_a_loop(name: str, loop: Callable[..., Tensor], options: tuple[Any, ...]) -> None:
    one = samples()[name]
    exact = [value.detach().double() for value in one.arguments()]
    for values in ((), options):
        torch.testing.assert_close(one.function(*exact, *values), loop(*exact, *values))
        few = [value[:3].clone().requires_grad_() for value in exact]
        assert torch.autograd.gradcheck(partial(one.function), (*few, *values))
        none = one.function(*(value[:0] for value in exact), *values)
        assert none.shape == (0, 4)


def unit(boxes: Tensor) -> Tensor:
    return boxes / 1333


def centres(boxes: Tensor) -> Tensor:
    return torch.cat([(boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]], dim=1)


@pytest.mark.parametrize(
    "there_and_back",
    [
        lambda boxes, gt: delta2bbox(boxes, bbox2delta(boxes, gt, stds=STDS), stds=STDS),
        lambda boxes, gt: offset2bbox(boxes, bbox2offset(boxes, gt, STDS), STDS),
        lambda boxes, gt: tblr2bbox(boxes, bbox2tblr(boxes, gt)),
        # the decoder does not subtract the last pixel
        lambda boxes, gt: legacy_delta2bbox(boxes, legacy_bbox2delta(boxes, gt)) + torch.tensor([0.5, 0.5, -0.5, -0.5]),
        lambda boxes, gt: decode(encode(unit(gt), centres(unit(boxes))), centres(unit(boxes))) * 1333,
        lambda boxes, gt: yolo_decode(boxes, yolo_encode(boxes, gt, 5000), 5000),
    ],
    ids=["delta", "offset", "tblr", "legacy delta", "SSD", "YOLO"],
)
def test_decoding_inverts_encoding(there_and_back: Callable[[Tensor, Tensor], Tensor]) -> None:
    draw = Draw(0)
    boxes = draw.boxes(50)
    gt = draw.near(boxes, 0.3)
    torch.testing.assert_close(there_and_back(boxes, gt), gt, rtol=1e-4, atol=1e-3)


def instances(**tensors: Tensor) -> Any:
    from mmengine.structures import InstanceData

    return InstanceData(**tensors)


def fields(result: Any) -> tuple[Tensor, ...]:
    return result.gt_inds, result.max_overlaps, result.labels


def mmdet_max_iou(overlaps: Tensor, labels: Tensor, pos: float, neg: Any, *rest: Any, **options: Any) -> Any:
    from mmdet.models.task_modules.assigners import MaxIoUAssigner

    names = ("min_pos_iou", "gt_max_assign_all", "match_low_quality")
    assigner = MaxIoUAssigner(pos, neg, **dict(zip(names, rest, strict=False)), **options)
    return fields(assigner.assign_wrt_overlaps(overlaps, labels))


def mmdet_sampler(
    inds: Tensor, priors: Tensor, boxes: Tensor, labels: Tensor, num: int, share: float, *rest: Any, **options: Any
) -> Any:
    from mmdet.models.task_modules.assigners import AssignResult
    from mmdet.models.task_modules.samplers import RandomSampler

    names = ("neg_pos_ub", "add_gt_as_proposals")
    sampler = RandomSampler(num, share, **dict(zip(names, rest, strict=False)), **options)
    # labels of other boxes than positives are never read
    found = labels[(inds - 1).clamp(min=0)] if len(labels) else inds
    assigned = AssignResult(len(boxes), inds, torch.zeros(len(inds)), found)
    result = sampler.sample(assigned, instances(priors=priors), instances(bboxes=boxes, labels=labels))
    chosen = result.pos_inds, result.neg_inds, result.pos_priors, result.neg_priors
    return *chosen, result.pos_gt_bboxes, result.pos_gt_labels


def mmdet_targets(
    positives: Tensor,
    negatives: Tensor,
    boxes: Tensor,
    labels: Tensor,
    num_classes: int = 80,
    pos_weight: float = -1.0,
    decoded: bool = False,
    target_means: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0),
    target_stds: tuple[float, ...] = (0.1, 0.1, 0.2, 0.2),
) -> Any:
    from mmdet.models.roi_heads.bbox_heads import BBoxHead
    from mmengine.config import ConfigDict

    coder = {"type": "DeltaXYWHBBoxCoder", "target_means": target_means, "target_stds": target_stds}
    head = BBoxHead(roi_feat_size=1, in_channels=1, num_classes=num_classes, bbox_coder=coder, reg_decoded_bbox=decoded)
    return head._get_targets_single(positives, negatives, boxes, labels, ConfigDict(pos_weight=pos_weight))


def mmdet_atss(priors: Tensor, counts: list[int], boxes: Tensor, labels: Tensor, topk: int = 9) -> Any:
    from mmdet.models.task_modules.assigners import ATSSAssigner

    return fields(ATSSAssigner(topk).assign(instances(priors=priors), counts, instances(bboxes=boxes, labels=labels)))


def mmdet_task_aligned(
    priors: Tensor, predicted: Tensor, scores: Tensor, boxes: Tensor, labels: Tensor, topk: int = 13, **options: Any
) -> Any:
    from mmdet.models.task_modules.assigners import TaskAlignedAssigner

    found = instances(priors=priors, bboxes=predicted, scores=scores)
    result = TaskAlignedAssigner(topk).assign(found, instances(bboxes=boxes, labels=labels), **options)
    return fields(result), result.assign_metrics


def mmdet_dynamic(
    predicted: Tensor, scores: Tensor, priors: Tensor, boxes: Tensor, labels: Tensor, **options: Any
) -> Any:
    from mmdet.models.task_modules.assigners import DynamicSoftLabelAssigner

    found = instances(priors=priors, bboxes=predicted, scores=scores)
    return fields(DynamicSoftLabelAssigner(**options).assign(found, instances(bboxes=boxes, labels=labels)))


ASSIGNER_ORIGINALS: dict[str, Function] = {
    "assign_wrt_overlaps": mmdet_max_iou,
    "random_sampler": mmdet_sampler,
    "get_target_single": mmdet_targets,
    "atss_assign": mmdet_atss,
    "task_aligned_assign": mmdet_task_aligned,
    "dynamic_soft_label_assign": mmdet_dynamic,
}

CONFIGURATIONS = [
    pytest.param(name, configuration, id=f"{name}, {configuration}")
    for name in [*ORIGINALS, "yolo_decode", "yolo_encode", *ASSIGNER_ORIGINALS]
    for configuration in samples()[name].configurations
]


def compare_with_mmdetection(
    name: str, make: Callable[[], tuple[Any, ...]], ours: Any, theirs: Any, *within: float
) -> None:
    """Compare results, and those of coders also in their gradients."""
    optional("mmdet")
    is_assigner = name in ASSIGNER_ORIGINALS
    expected = partial(ASSIGNER_ORIGINALS[name] if is_assigner else original(name), **theirs)
    compare_with(
        expected, partial(samples()[name].function, **ours), make if is_assigner else lambda: learning(make()), *within
    )


@pytest.mark.slow
@pytest.mark.parametrize(("name", "configuration"), CONFIGURATIONS)
def test_function_equals_that_of_mmdetection(name: str, configuration: str) -> None:
    one = samples()[name]
    compare_with_mmdetection(name, partial(one.arguments, configuration), {}, {}, one.rtol, one.atol)


def overlaps(draw: Draw, truths: int = 5, boxes: int = 300) -> tuple[Any, ...]:
    # in tenths, so that values equal thresholds and each other
    return draw.integers(truths, boxes, high=9) / 10, draw.integers(truths, high=80), 0.7, 0.3


def assignment(draw: Draw, boxes: int = 100, truths: int = 5) -> tuple[Any, ...]:
    inds = draw.integers(boxes, low=-1, high=truths + 1)
    return inds, draw.boxes(boxes), draw.boxes(truths), draw.integers(truths, high=80), 40, 0.5


def sampled(draw: Draw, positives: int = 6, negatives: int = 9) -> tuple[Any, ...]:
    boxes = draw.boxes(positives)
    return boxes, draw.boxes(negatives), draw.near(boxes), draw.integers(positives, high=3), 3


def pyramid(draw: Draw, truths: int = 4, size: tuple[int, int] = (256, 320)) -> tuple[Any, ...]:
    levels = grid_boxes(size)
    counts = [len(level) for level in levels]
    return torch.cat(levels), counts, draw.boxes(truths, (256.0, 320.0)), draw.integers(truths, high=3)


def predictions(draw: Draw, truths: int = 4, apart: float = 0.0) -> tuple[Any, ...]:
    priors, _, gt, labels = pyramid(draw, truths)
    return priors, draw.near(priors, 0.3) + apart, draw.uniform(len(priors), 3), gt, labels


def points(draw: Draw, truths: int = 4, apart: float = 0.0) -> tuple[Any, ...]:
    places = torch.cat(grid_points((256, 320), (8, 16, 32)))
    reach = draw.uniform(len(places), 4, low=0.5, high=6.0) * places[:, 2:]
    predicted = torch.cat([places[:, :2] - reach[:, :2], places[:, :2] + reach[:, 2:]], dim=1)
    gt, labels = draw.boxes(truths, (256.0, 320.0)) + apart, draw.integers(truths, high=3)
    return predicted, draw.normal(len(places), 3), torch.cat([places, places[:, 2:]], dim=1), gt, labels


# A ground-truth box that contains all points, and its class.
EVERYWHERE = torch.tensor([[-10.0, -10.0, 400.0, 400.0]]), torch.tensor([2])

# Samples with arguments and options that have the same names in MMDetection.
ASSIGNER_OPTIONS: list[tuple[str, Callable[[Draw], tuple[Any, ...]], dict[str, Any]]] = [
    ("assign_wrt_overlaps", overlaps, {}),
    ("assign_wrt_overlaps", overlaps, {"min_pos_iou": 0.8, "gt_max_assign_all": False}),
    ("assign_wrt_overlaps", overlaps, {"match_low_quality": False}),
    ("assign_wrt_overlaps", lambda draw: (*overlaps(draw)[:3], (0.1, 0.4)), {"min_pos_iou": 0.9}),
    ("assign_wrt_overlaps", partial(overlaps, truths=0), {}),
    ("random_sampler", assignment, {}),
    ("random_sampler", assignment, {"add_gt_as_proposals": False}),
    ("random_sampler", lambda draw: (*assignment(draw)[:5], 0.1), {"neg_pos_ub": 2}),
    ("random_sampler", partial(assignment, truths=0), {"neg_pos_ub": 3}),
    ("get_target_single", sampled, {"pos_weight": 3.0, "target_means": (0.1, 0.2, 0.3, 0.4)}),
    ("get_target_single", partial(sampled, positives=0), {}),
    ("atss_assign", pyramid, {"topk": 3}),
    ("atss_assign", partial(pyramid, truths=0), {}),
    ("task_aligned_assign", predictions, {"topk": 4, "alpha": 0.5, "beta": 2}),
    ("task_aligned_assign", partial(predictions, truths=0), {}),
    # no prediction overlaps a ground-truth box
    ("task_aligned_assign", lambda draw: (*predictions(draw, apart=5000.0)[:3], *EVERYWHERE), {}),
    ("dynamic_soft_label_assign", points, {"topk": 5, "soft_center_radius": 1.0, "iou_weight": 1.0}),
    ("dynamic_soft_label_assign", partial(points, truths=0), {}),
    # no point is inside of a ground-truth box
    ("dynamic_soft_label_assign", partial(points, apart=5000.0), {}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "make", "options", "theirs"), [*OPTIONS, *((*row, None) for row in ASSIGNER_OPTIONS)])
def test_options_behave_as_in_mmdetection(
    name: str, make: Callable[[Draw], tuple[Any, ...]], options: dict[str, Any], theirs: dict[str, Any] | None
) -> None:
    named = options if theirs is None else theirs
    compare_with_mmdetection(name, lambda: make(Draw(1)), options, named, 1e-5, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("objects", [(5, 3), (1,), (0, 4), (120, 0)])
def test_sets_are_matched_as_in_transformers(objects: tuple[int, ...]) -> None:
    loss = optional("transformers.loss.loss_for_object_detection")

    def original(logits: Tensor, boxes: Tensor, targets: list[dict[str, Tensor]]) -> Any:
        renamed = [{"class_labels": target["labels"], "boxes": target["boxes"]} for target in targets]
        return loss.HungarianMatcher(1, 5, 2)({"logits": logits, "pred_boxes": boxes}, renamed)

    one = samples()["hungarian_assign"]
    make = partial(one.inputs, queries=100, classes=91, objects=objects)
    compare_with(original, hungarian_assign, lambda: make(Draw(0)), 0, 0)


def pyramid_of_points(draw: Draw, truths: int = 6, ignored: int = 0, square: bool = False) -> tuple[Any, ...]:
    levels = grid_points((256, 320), (8, 16, 32))
    ranges = [torch.tensor(reach).expand(len(level), 2) for level, reach in zip(levels, RANGES, strict=True)]
    boxes = draw.boxes(truths, (256.0, 320.0))
    if square:
        boxes[:, 3] = boxes[:, 1] + boxes[:, 2] - boxes[:, 0]
    gt = torch.cat([boxes, draw.integers(truths, 1, low=1, high=4).float()], dim=1)
    ignore = draw.boxes(ignored, (256.0, 320.0)) if ignored else None
    return torch.cat(levels)[:, :2], gt, torch.cat(ranges), [len(level) for level in levels], (8, 16, 32), ignore


RANGES = (-1.0, 40.0), (40.0, 80.0), (80.0, 1000.0)


def matched_by_loop(
    points: Tensor, gt: Tensor, ranges: Tensor, counts: Any, strides: Any, ignored: Any, central: bool, radius: float
) -> Tensor:
    reaches = [stride * radius for count, stride in zip(counts, strides, strict=True) for _ in range(count)]
    labels = []
    for (x, y), (least, most), reach in zip(points.tolist(), ranges.tolist(), reaches, strict=True):
        choices = [(float("inf"), 0.0)]
        for x1, y1, x2, y2, label in gt.tolist():
            inside = x1 < x < x2 and y1 < y < y2
            if central:
                inside = inside and abs(x - (x1 + x2) / 2) < reach and abs(y - (y1 + y2) / 2) < reach
            if inside and least <= max(x - x1, y - y1, x2 - x, y2 - y) <= most:
                choices.append(((x2 - x1 + 1) * (y2 - y1 + 1), label))
        out = ignored is not None and any(x1 < x < x2 and y1 < y < y2 for x1, y1, x2, y2 in ignored.tolist())
        labels.append(-1.0 if out else min(choices)[1])
    return torch.tensor(labels)


@pytest.mark.parametrize("central", [(False, 1.0), (True, 1.0), (True, 2.5)])
@pytest.mark.parametrize("ignored", [0, 2])
def test_points_are_matched_as_by_a_loop(central: tuple[bool, float], ignored: int) -> None:
    arguments = (*pyramid_of_points(Draw(0), ignored=ignored), *central)
    labels, targets = fcos_matcher(*arguments)
    assert labels.tolist() == matched_by_loop(*arguments).tolist()
    assert len(labels.unique()) == 4 + bool(ignored)
    assert bool((targets[labels > 0] > 0).all())


def test_smallest_truth_is_the_one_with_the_fewest_pixels() -> None:
    points, _, ranges, *rest = pyramid_of_points(Draw(0))
    # 10 by 40 is smaller than 20 by 20.1, but with the last pixels included 11 by 41 is larger than 21 by 21.1
    gt = torch.tensor([[10.0, 10, 20, 50, 1], [6, 6, 26, 26.1, 2]])
    labels, targets = fcos_matcher(points, gt, ranges, *rest)
    both = int(torch.nonzero((points == 12).all(dim=1)))
    assert labels[both] == 2
    torch.testing.assert_close(targets[both], torch.tensor([6, 6, 14, 14.1]))
