"""Coders of boxes, compared with their originals."""

from __future__ import annotations

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
from opgrip.samples.coders.bbox2delta import bbox2delta
from opgrip.samples.coders.bbox2offset import bbox2offset
from opgrip.samples.coders.bbox2tblr import bbox2tblr
from opgrip.samples.coders.bucket2bbox import bucket2bbox
from opgrip.samples.coders.decode import decode
from opgrip.samples.coders.delta2bbox import delta2bbox
from opgrip.samples.coders.encode import encode
from opgrip.samples.coders.generate_buckets import generate_buckets
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
    """Return the arguments with floating-point tensors that require gradients."""
    return tuple(
        value.detach().requires_grad_() if isinstance(value, Tensor) and value.is_floating_point() else value
        for value in arguments
    )


CONFIGURATIONS = [
    pytest.param(name, configuration, id=f"{name}, {configuration}")
    for name in [*ORIGINALS, "yolo_decode", "yolo_encode"]
    for configuration in samples()[name].configurations
]


@pytest.mark.parametrize(("name", "configuration"), CONFIGURATIONS)
def test_coder_equals_that_of_mmdetection(name: str, configuration: str) -> None:
    optional("mmdet")
    one = samples()[name]
    make = partial(one.arguments, configuration)
    compare_with(original(name), one.function, lambda: learning(make()), one.rtol, one.atol)


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


@pytest.mark.parametrize(("name", "make", "options", "theirs"), OPTIONS)
def test_options_behave_as_in_mmdetection(
    name: str, make: Callable[[Draw], tuple[Any, ...]], options: dict[str, Any], theirs: dict[str, Any] | None
) -> None:
    optional("mmdet")
    one = samples()[name]
    expected, ours = (
        partial(original(name), **(options if theirs is None else theirs)),
        partial(one.function, **options),
    )
    compare_with(expected, ours, lambda: learning(make(Draw(1))), 1e-5, 1e-4)


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


def test_edge_is_found_in_its_bucket() -> None:
    boxes = torch.tensor([[0.0, 0.0, 140.0, 280.0]])
    width, height, left, _, _, bottom = generate_buckets(boxes, 14)
    assert (width.item(), height.item()) == (10, 20)
    assert left.tolist() == [[5, 15, 25, 35, 45, 55, 65]]
    assert bottom.tolist() == [[270, 250, 230, 210, 190, 170, 150]]
    scores, offsets = torch.full((1, 28), -50.0), torch.zeros(1, 28)
    scores[0, [2, 7 + 1, 14 + 0, 21 + 6]] = 50.0
    offsets[0, [2, 7 + 1]] = torch.tensor([0.5, -0.5])
    found, sureness = bucket2bbox(boxes, scores, offsets, 14)
    torch.testing.assert_close(found, torch.tensor([[20.0, 10, 130, 150]]))
    assert sureness.tolist() == [1.0]
