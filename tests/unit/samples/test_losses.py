"""Losses of classes, masks, embeddings, edges and distillation, compared with their originals or with loops
over numpy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import loss_originals
import loss_references
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from implementations import compare, compare_with, gradients, leaves
from optional import optional
from torch import Tensor

from opgrip.samples import Draw, samples
from opgrip.samples.losses.gaussian_focal_loss import gaussian_targets
from opgrip.samples.losses.get_softgauss_loss_weight import inputs as mostly_right
from opgrip.samples.losses.label_maps import IGNORED, edge_maps, label_maps

Arguments = tuple[Any, ...]
Maker = Callable[[Draw], Arguments]
SIZE = (12, 10)


def heatmaps(draw: Draw, objects: int = 3) -> tuple[Tensor, Tensor]:
    return draw.uniform(2, 3, 16, 16, low=0.01, high=0.99, grad=True), gaussian_targets(draw, 2, 3, 16, objects)


def scores(draw: Draw, rows: int = 12, classes: int = 5) -> tuple[Tensor, Tensor]:
    target = F.one_hot(draw.integers(rows, high=classes), classes) * draw.mask(rows, 1)
    return draw.normal(rows, classes, grad=True), target


def overlaps(draw: Draw) -> tuple[Tensor, Tensor]:
    pred, target = scores(draw)
    return pred, target * draw.uniform(len(pred), 1)


def edges(draw: Draw, share: float = 0.2) -> tuple[Tensor, Tensor]:
    return draw.normal(2, 1, *SIZE, grad=True), draw.mask(2, *SIZE, share=share).long()


def teaching(draw: Draw) -> tuple[Tensor, Tensor]:
    return draw.normal(6, 17, grad=True), draw.normal(6, 17)


def detections(draw: Draw, *objects: int) -> Arguments:
    targets = [{"labels": torch.zeros(count)} for count in objects]
    return {"pred_logits": draw.normal(len(objects), 20, 4)}, targets


def truths(draw: Draw, *objects: int, rest: Arguments = ()) -> Arguments:
    sizes = [(64, 96), (80, 60), (32, 32)][: len(objects)]
    boxes = [draw.boxes(count, size) for count, size in zip(objects, sizes, strict=True)]
    labels = [draw.integers(count, high=7) for count in objects]
    return boxes, labels, sizes, draw.normal(7, 16, grad=True), 20, *rest


def masks(draw: Draw, count: int, points: int) -> Arguments:
    return draw.normal(count, 16, 24, grad=True), draw.mask(count, 64, 96), float(count), None, points


ORIGINALS: list[tuple[Callable[..., Any], list[Maker]]] = [
    (
        loss_originals.gaussian_focal_loss,
        [heatmaps, lambda draw: (*heatmaps(draw), draw.uniform(2, 3, 16, 16), "none")],
    ),
    (
        loss_originals.sigmoid_focal_loss,
        [
            scores,
            lambda draw: (*scores(draw), draw.uniform(12), 1.5, 0.4, "none"),
        ],
    ),
    (
        loss_originals.varifocal_loss,
        [overlaps, lambda draw: (*overlaps(draw), draw.uniform(12, 5), 0.6, 1.5, False, "sum")],
    ),
    (
        loss_originals.kd_kl_loss,
        [
            lambda draw: (*teaching(draw), 10.0),
            lambda draw: (*teaching(draw), 2.0, draw.uniform(6), "mean", 4.0),
        ],
    ),
    (loss_originals.edge_wbceloss, [edges, lambda draw: edges(draw, share=0.0)]),
    (
        loss_originals.label_smooth_celoss,
        [
            lambda draw: (draw.normal(5, 7, grad=True), draw.integers(5, high=7)),
            lambda draw: (draw.normal(5, 7, grad=True), draw.integers(5, 1, high=7).float(), 0.3),
        ],
    ),
    (
        loss_originals.contrastive_loss,
        [
            lambda draw: (draw.normal(6, 8, grad=True), draw.normal(6, 8, grad=True), torch.tensor(2.6)),
            lambda draw: (draw.normal(1, 8), draw.normal(1, 8), torch.tensor(2.6, requires_grad=True)),
        ],
    ),
    (
        loss_originals.detr_loss_cardinality,
        [lambda draw: detections(draw, 3), lambda draw: detections(draw, 0, 14, 20)],
    ),
    (
        loss_originals.mask_point_loss,
        [
            lambda draw: masks(draw, 1, 64),
            lambda draw: masks(draw, 5, 100),
        ],
    ),
    (
        loss_originals.denoising_queries,
        [lambda draw: truths(draw, 4), lambda draw: truths(draw, 30, 2, rest=(10, 1.0, 0.4))],
    ),
]


def listed(table: list[tuple[Callable[..., Any], list[Maker]]]) -> list[Any]:
    return [
        pytest.param(expected, make, id=f"{expected.__name__}-{number}")
        for expected, makers in table
        for number, make in enumerate(makers)
    ]


def ours(expected: Callable[..., Any]) -> Callable[..., Any]:
    return samples()[expected.__name__].function


@pytest.mark.parametrize(("original", "make"), listed(ORIGINALS))
def test_loss_equals_its_original(original: Callable[..., Any], make: Maker) -> None:
    compare_with(original, ours(original), lambda: make(Draw(1)), 1e-5, 1e-6)


def doubled(arguments: Any) -> Any:
    """Return arguments in float64, the precision of the loops over numpy."""
    if isinstance(arguments, list | tuple):
        return type(arguments)(doubled(argument) for argument in arguments)
    if isinstance(arguments, Tensor) and arguments.is_floating_point():
        return arguments.detach().double().requires_grad_(arguments.requires_grad)
    return arguments


def as_numpy(arguments: Any) -> Any:
    if isinstance(arguments, list | tuple):
        return type(arguments)(as_numpy(argument) for argument in arguments)
    return arguments.detach().numpy() if isinstance(arguments, Tensor) else arguments


def pixels(draw: Draw, classes: int = 3) -> tuple[Tensor, Tensor]:
    return draw.normal(2, classes, *SIZE, grad=True), label_maps(draw, 2, SIZE, classes, objects=2, border=1)


def students(draw: Draw, size: tuple[int, int] = SIZE, classes: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    labels = label_maps(draw, 2, (2 * SIZE[0], 2 * SIZE[1]), classes, objects=2, border=2)
    return draw.normal(2, 4, *size, grad=True), draw.normal(2, 4, *SIZE), labels.unsqueeze(1)


def taught(draw: Draw, size: tuple[int, int] = SIZE) -> Arguments:
    return *pixels(draw), draw.normal(2, 3, *size, std=2.0)


def people(draw: Draw, *seen: tuple[float, ...]) -> Arguments:
    """Return tags, and each image's people, of whose 5 joints a share is visible."""
    share = torch.tensor(seen).unsqueeze(2).expand(-1, -1, 5)
    joints = torch.stack([draw.integers(*share.shape, high=40), draw.uniform(*share.shape).lt(share)], dim=-1)
    return draw.normal(len(seen), 40, 1, grad=True), joints


def corners(draw: Draw, share: float = 0.5) -> Arguments:
    return [draw.normal(3, 8, 1, grad=True), draw.normal(3, 8, 1, grad=True)], draw.mask(3, 8, share=share)


def volumes(draw: Draw, classes: int) -> tuple[Tensor, Tensor]:
    return draw.normal(2, classes, 2, 3, 4, grad=True), draw.uniform(2, classes, 2, 3, 4)


def smooth(draw: Draw, *rest: Any) -> Arguments:
    return draw.normal(2, 3, *SIZE, grad=True), draw.normal(2, 1, *SIZE), edge_maps(draw, 2, SIZE), *rest


REFERENCES: list[tuple[Callable[..., Any], list[Maker]]] = [
    (
        loss_references.aeloss,
        [
            lambda draw: people(draw, (0.8, 0.0, 1.0, 0.4), (1.0, 1.0, 1.0, 1.0)),
            lambda draw: (*people(draw, (1.0, 0.0), (0.0, 0.0), (1.0, 1.0)), "max"),
        ],
    ),
    (loss_references.associative_pull_loss, [corners, lambda draw: corners(draw, share=0.0)]),
    (loss_references.associative_push_loss, [corners, lambda draw: corners(draw, share=0.0)]),
    (
        loss_references.coeff_diversity_loss,
        [lambda draw: (draw.normal(7, 4, grad=True), draw.integers(7, 1, high=3))],
    ),
    (
        loss_references.dice_loss,
        [
            lambda draw: (draw.normal(2, 3, *SIZE, grad=True), draw.integers(2, *SIZE, high=3)),
            lambda draw: (*volumes(draw, 1), 1.0, "sigmoid", False, False),
            lambda draw: (*volumes(draw, 3), 1e-5, "softmax", False),
        ],
    ),
    (loss_references.edge_smoothloss, [smooth, lambda draw: smooth(draw, 2.0, 5, 4.0, "ps")]),
    (
        loss_references.edge_wbceloss,
        [lambda draw: (draw.normal(2, 1, *SIZE, grad=True), edge_maps(draw, 2, SIZE), IGNORED, "sum")],
    ),
    (loss_references.focal_loss, [pixels, lambda draw: (*pixels(draw), 0.5, 0.7)]),
    (
        loss_references.gaussian_sigmoid_focalloss,
        [
            heatmaps,
            lambda draw: (10 * draw.normal(1, 2, 8, 8, grad=True), gaussian_targets(draw, 1, 2, 8, 0), 1.5, 3.0),
        ],
    ),
    (
        loss_references.gradient_loss,
        [
            lambda draw: (*students(draw)[:2], students(draw)[2].squeeze(1)),
            lambda draw: (*students(draw, (6, 5))[:2], students(draw)[2].squeeze(1)),
        ],
    ),
    (
        loss_references.ifv_loss,
        [
            lambda draw: (*students(draw), 3),
            lambda draw: (*students(draw, (6, 5)), 3, False),
        ],
    ),
    (
        loss_references.inter_region_loss,
        [lambda draw: (*students(draw), 3), lambda draw: (*students(draw, (6, 5)), 5)],
    ),
    (loss_references.knowledge_gap_loss, [taught, lambda draw: (*taught(draw, (6, 5)), 2.0)]),
    (loss_references.sce_loss, [taught, lambda draw: (*taught(draw, (6, 5)), 2.0, True)]),
    (
        loss_references.get_softgauss_loss_weight,
        [
            lambda draw: (*pixels(draw, classes=200), 2.0),
            lambda draw: (*mostly_right(draw, 1, 3, (64, 200)), 2.0),
        ],
    ),
    (loss_references.softgbw_loss, [pixels]),
    (loss_references.margin_loss, [pixels, lambda draw: (*pixels(draw, classes=2), 0.4, 3.0)]),
]


@pytest.mark.parametrize(("reference", "make"), listed(REFERENCES))
def test_loss_equals_numpy_loops(reference: Callable[..., Any], make: Maker) -> None:
    if "soft" in reference.__name__ or "margin" in reference.__name__:
        optional("cv2")
    arguments = doubled(make(Draw(2)))
    expected = reference(*as_numpy(arguments))
    compare(ours(reference)(*arguments), tuple(map(np.asarray, leaves(expected))), 1e-6, 1e-7)


# computed in float32; a weight that is treated as a constant; no gradient
NOT_CHECKED = {"associative_pull_loss", "associative_push_loss", "knowledge_gap_loss", "get_softgauss_loss_weight"}


@pytest.mark.parametrize(
    ("reference", "make"), listed([row for row in REFERENCES if row[0].__name__ not in NOT_CHECKED])
)
def test_gradient_equals_finite_differences(reference: Callable[..., Any], make: Maker) -> None:
    assert torch.autograd.gradcheck(ours(reference), doubled(make(Draw(3))), fast_mode=True)


@pytest.mark.parametrize(
    ("name", "place"),
    [("ifv_loss", 1), ("inter_region_loss", 1), ("kd_kl_loss", 1), ("knowledge_gap_loss", 2), ("sce_loss", 2)],
)
def test_teacher_receives_no_gradient(name: str, place: int) -> None:
    arguments = samples()[name].arguments()
    arguments[place].requires_grad_()
    student, teacher = gradients(samples()[name].function(*arguments), arguments)
    assert student is not None
    assert teacher is None
