"""Losses of shipped samples, compared with their originals or with loops over numpy."""

import math
from collections.abc import Callable
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple

import loss_references
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from implementations import compare, compare_with, gradients, leaves
from optional import optional
from torch import Tensor

from opgrip.samples import Draw, samples
from opgrip.samples.losses.bmn_loss import bmn_loss
from opgrip.samples.losses.carl_loss import carl_loss
from opgrip.samples.losses.charbonnier_loss import charbonnier_loss
from opgrip.samples.losses.gaussian_focal_loss import gaussian_targets
from opgrip.samples.losses.get_softgauss_loss_weight import inputs as mostly_right
from opgrip.samples.losses.ghmr_loss import ghmr_loss
from opgrip.samples.losses.joints_mse_loss import joints_mse_loss
from opgrip.samples.losses.label_maps import IGNORED, edge_maps, label_maps
from opgrip.samples.losses.landmark2heatmap import landmark2heatmap
from opgrip.samples.losses.mmdetection_accuracy import mmdetection_accuracy
from opgrip.samples.losses.parse_loss import parse_loss
from opgrip.samples.losses.set_prediction_loss import set_prediction_loss
from opgrip.samples.losses.weight_reduce_loss import weight_reduce_loss

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


def gaussian_focal_loss(pred: Tensor, target: Tensor, *rest: Any) -> Any:
    original = optional("mmdet.models.losses.gaussian_focal_loss").gaussian_focal_loss
    return original(pred, target, *rest[:3], **dict(zip(("alpha", "gamma"), rest[3:], strict=False)))


def sigmoid_focal_loss(*arguments: Any) -> Any:
    return optional("mmdet.models.losses.focal_loss").py_sigmoid_focal_loss(*arguments)


def varifocal_loss(*arguments: Any) -> Any:
    return optional("mmdet.models.losses.varifocal_loss").varifocal_loss(*arguments)


def kd_kl_loss(pred: Tensor, soft_label: Tensor, temperature: float, *rest: Any) -> Any:
    original = optional("mmdet.models.losses.kd_loss").knowledge_distillation_kl_div_loss
    return original(pred, soft_label, *rest, T=temperature)


def edge_wbceloss(edge_pred: Tensor, edge_target: Tensor) -> Any:
    losses = optional("mmseg.models.losses.boundary_loss")
    return losses.BoundaryLoss(loss_weight=10.0)(edge_pred, edge_target)


def label_smooth_celoss(scores: Tensor, label: Tensor, smooth_ratio: float = 0.1) -> Any:
    return F.cross_entropy(scores, label.long().view(-1), label_smoothing=smooth_ratio)


def contrastive_loss(images: Tensor, texts: Tensor, logit_scale: Tensor) -> Any:
    clip = optional("transformers.models.clip.modeling_clip")
    images, texts = (features / clip._get_vector_norm(features) for features in (images, texts))
    return clip.image_text_contrastive_loss(texts @ images.t() * logit_scale.exp())


def detr_loss_cardinality(outputs: dict[str, Tensor], targets: list[dict[str, Tensor]]) -> Any:
    losses = optional("transformers.loss.loss_for_object_detection")
    known = [{"class_labels": target["labels"]} for target in targets]
    return losses.ImageLoss.loss_cardinality(None, {"logits": outputs["pred_logits"]}, known, None, None)


def mask_point_loss(preds: Tensor, targets: Tensor, num_masks: float, points: None, num_points: int) -> Any:
    mask2former = optional("transformers.models.mask2former.modeling_mask2former")
    config = optional("transformers").Mask2FormerConfig(num_labels=3, train_num_points=num_points)
    every = torch.arange(len(preds))
    losses = mask2former.Mask2FormerLoss(config, {}).loss_masks(
        preds.unsqueeze(0), [targets.float()], [(every, every)], num_masks
    )
    return losses["loss_mask"], losses["loss_dice"]


def denoising_queries(
    boxes: list[Tensor], labels: list[Tensor], sizes: Any, embedding: Tensor, matching: int, *rest: Any
) -> Any:
    layers = optional("mmdet.models.layers.transformer.dino_layers")
    pairs, label_noise, box_noise = (*rest, *(100, 0.5, 1.0)[len(rest) :])
    made = layers.CdnQueryGenerator(
        *embedding.shape, matching, label_noise, box_noise, {"dynamic": True, "num_dn_queries": pairs}
    )
    del made.label_embedding
    made.label_embedding = lambda index: F.embedding(index, embedding)
    # the embedding has drawn random numbers
    torch.manual_seed(0)
    *results, meta = made(
        [
            SimpleNamespace(img_shape=size, gt_instances=SimpleNamespace(bboxes=own, labels=kinds))
            for own, kinds, size in zip(boxes, labels, sizes, strict=True)
        ]
    )
    return *results, meta["num_denoising_groups"]


ORIGINALS: list[tuple[Callable[..., Any], list[Maker]]] = [
    (
        gaussian_focal_loss,
        [heatmaps, lambda draw: (*heatmaps(draw), draw.uniform(2, 3, 16, 16), "none")],
    ),
    (
        sigmoid_focal_loss,
        [
            scores,
            lambda draw: (*scores(draw), draw.uniform(12), 1.5, 0.4, "none"),
        ],
    ),
    (
        varifocal_loss,
        [overlaps, lambda draw: (*overlaps(draw), draw.uniform(12, 5), 0.6, 1.5, False, "sum")],
    ),
    (
        kd_kl_loss,
        [
            lambda draw: (*teaching(draw), 10.0),
            lambda draw: (*teaching(draw), 2.0, draw.uniform(6), "mean", 4.0),
        ],
    ),
    (edge_wbceloss, [edges, lambda draw: edges(draw, share=0.0)]),
    (
        label_smooth_celoss,
        [
            lambda draw: (draw.normal(5, 7, grad=True), draw.integers(5, high=7)),
            lambda draw: (draw.normal(5, 7, grad=True), draw.integers(5, 1, high=7).float(), 0.3),
        ],
    ),
    (
        contrastive_loss,
        [
            lambda draw: (draw.normal(6, 8, grad=True), draw.normal(6, 8, grad=True), torch.tensor(2.6)),
            lambda draw: (draw.normal(1, 8), draw.normal(1, 8), torch.tensor(2.6, requires_grad=True)),
        ],
    ),
    (
        detr_loss_cardinality,
        [lambda draw: detections(draw, 3), lambda draw: detections(draw, 0, 14, 20)],
    ),
    (
        mask_point_loss,
        [
            lambda draw: masks(draw, 1, 64),
            lambda draw: masks(draw, 5, 100),
        ],
    ),
    (
        denoising_queries,
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


@pytest.mark.slow
@pytest.mark.parametrize(("original", "make"), listed(ORIGINALS))
def test_loss_equals_its_original(original: Callable[..., Any], make: Maker) -> None:
    compare_with(original, ours(original), lambda: make(Draw(1)), 1e-5, 1e-6)


def doubled(arguments: Any) -> Any:
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


REDUCTIONS = [("mean", None), ("mean", 7.0), ("mean", 0.0), ("sum", None), ("none", None), ("none", 7.0)]


def deltas() -> Arguments:
    draw = Draw(1)
    return draw.normal(40, 4, grad=True), draw.normal(40, 4), draw.mask(40, 4).float()


def boxes() -> Arguments:
    draw = Draw(2)
    truths = draw.boxes(40)
    predicted = torch.cat([draw.near(truths[:30], 0.2), draw.near(truths[30:], 2.0)])
    predicted[0] = truths[1]
    predicted[1] = truths[0] + 2000
    predicted[2, 2:] = predicted[2, :2]
    predicted[3] = truths[3] + torch.tensor([5.0, 5, -1, -1])
    return predicted.requires_grad_(), truths, draw.uniform(40)


def weighed_sides() -> Arguments:
    return *boxes()[:2], Draw(3).uniform(40, 4)


def same_boxes() -> Arguments:
    truths = Draw(4).boxes(5)
    return truths.clone().requires_grad_(), truths, torch.ones(5)


def qualities() -> Arguments:
    draw = Draw(5)
    labels = draw.integers(60, low=-1, high=10)
    return draw.normal(60, 7, grad=True), (labels, draw.uniform(60)), draw.uniform(60)


def no_qualities() -> Arguments:
    predicted, (labels, quality), weight = qualities()
    return predicted, (torch.full_like(labels, 7), quality), weight


def distances() -> Arguments:
    draw = Draw(6)
    return draw.normal(50, 17, grad=True), draw.uniform(50, high=15.9), draw.uniform(50)


def take(make: Callable[[], Arguments], weighted: bool = True) -> Arguments:
    predicted, target, weight = make()
    target = (target[0], target[1].double()) if isinstance(target, tuple) else target.double()
    return predicted.detach().double().requires_grad_(), target, weight.double() if weighted else None


class Case(NamedTuple):
    """Loss in one of mmdet's modules, its arguments and options."""

    name: str
    module: str
    make: Callable[[], Arguments] = boxes
    options: dict[str, Any] = {}  # noqa: RUF012


CASES = [
    Case("smooth_l1_loss", "smooth_l1_loss", deltas),
    Case("smooth_l1_loss", "smooth_l1_loss", deltas, {"beta": 1 / 9}),
    Case("l1_loss", "smooth_l1_loss", deltas),
    Case("l2_loss", "l2_loss", deltas),
    Case("balanced_l1_loss", "balanced_l1_loss", deltas),
    Case("balanced_l1_loss", "balanced_l1_loss", deltas, {"beta": 0.11, "alpha": 0.4, "gamma": 1.2}),
    Case("iou_loss", "iou_loss"),
    Case("iou_loss", "iou_loss", same_boxes),
    Case("iou_loss", "iou_loss", boxes, {"mode": "linear"}),
    Case("iou_loss", "iou_loss", boxes, {"mode": "square", "eps": 1e-16}),
    Case("bounded_iou_loss", "iou_loss", weighed_sides),
    Case("bounded_iou_loss", "iou_loss", weighed_sides, {"beta": 0.5, "eps": 0.1}),
    Case("giou_loss", "iou_loss"),
    Case("giou_loss", "iou_loss", same_boxes, {"eps": 1e-6}),
    Case("diou_loss", "iou_loss"),
    Case("diou_loss", "iou_loss", same_boxes, {"eps": 1e-3}),
    Case("ciou_loss", "iou_loss"),
    Case("ciou_loss", "iou_loss", same_boxes),
    Case("eiou_loss", "iou_loss"),
    Case("eiou_loss", "iou_loss", boxes, {"smooth_point": 0.5}),
    Case("siou_loss", "iou_loss"),
    Case("siou_loss", "iou_loss", boxes, {"neg_gamma": True}),
    Case("quality_focal_loss", "gfocal_loss", qualities),
    Case("quality_focal_loss", "gfocal_loss", no_qualities, {"beta": 1.0}),
    Case("distribution_focal_loss", "gfocal_loss", distances),
]
BY_CASE = [pytest.param(case, id="-".join([case.name, case.make.__name__, *case.options])) for case in CASES]


def mmdet(module: str, name: str) -> Any:
    return getattr(optional(f"mmdet.models.losses.{module}"), name)


@pytest.mark.slow
@pytest.mark.parametrize("case", BY_CASE)
def test_loss_equals_that_of_mmdet(case: Case) -> None:
    original, ours = mmdet(case.module, case.name), samples()[case.name].function
    for weighted, (reduction, avg_factor) in product((True, False), REDUCTIONS):
        options = {"reduction": reduction, "avg_factor": avg_factor} | case.options
        make = partial(take, case.make, weighted)
        compare_with(partial(original, **options), partial(ours, **options), make, 1e-7, 1e-9)


def weighed(width: int) -> Arguments:
    return Draw(7).normal(30, 5, grad=True), Draw(8).uniform(30, width) if width else None


@pytest.mark.slow
@pytest.mark.parametrize("project", ["mmdet", "mmseg"])
def test_weights_and_reductions_equal_those_of_openmmlab(project: str) -> None:
    original = optional(f"{project}.models.losses.utils").weight_reduce_loss
    for width, (reduction, avg_factor) in product((5, 1, 0), REDUCTIONS):
        options = {"reduction": reduction, "avg_factor": avg_factor}
        make = partial(weighed, width)
        compare_with(partial(original, **options), partial(weight_reduce_loss, **options), make, 1e-5, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("topk", [1, 3, (1,), (1, 5)])
@pytest.mark.parametrize("thresh", [None, 1.0])
@pytest.mark.parametrize("count", [50, 1, 0])
def test_accuracy_equals_that_of_mmdet(topk: int | tuple[int, ...], thresh: float | None, count: int) -> None:
    scores, labels = Draw(8).normal(count, 9), Draw(9).integers(count, high=9)
    compare(
        mmdetection_accuracy(scores, labels, topk, thresh), mmdet("accuracy", "accuracy")(scores, labels, topk, thresh)
    )


@pytest.mark.slow
@pytest.mark.parametrize("positives", [0, 1, 30])
@pytest.mark.parametrize("momentum", [0.0, 0.7])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_harmonized_loss_equals_that_of_mmdet(positives: int, momentum: float, reduction: str) -> None:
    original = mmdet("ghm_loss", "GHMR")(mu=0.1, bins=6, momentum=momentum, reduction=reduction)
    counts = torch.zeros(6)

    def arguments() -> Arguments:
        draw = Draw(10)
        weight = torch.zeros(40, 4)
        weight[:positives] = 1
        return draw.normal(40, 4, grad=True), draw.normal(40, 4, std=0.3), weight

    ours = partial(ghmr_loss, counts=counts, momentum=momentum, mu=0.1, bins=6, reduction=reduction)
    # twice, since the counts accumulate
    for _ in range(2):
        compare_with(original, ours, arguments, 1e-5, 1e-5)
    if momentum:
        compare(counts, original.acc_sum)
        assert bool(counts.any()) == bool(positives)


@pytest.mark.slow
@pytest.mark.parametrize("sigmoid", [True, False])
@pytest.mark.parametrize("per_class", [True, False])
@pytest.mark.parametrize(("k", "bias", "avg_factor"), [(1.0, 0.2, None), (2.0, 0.0, 13.0)])
@pytest.mark.parametrize("positives", [20, 0])
def test_classification_aware_loss_equals_that_of_mmdet(
    sigmoid: bool, per_class: bool, k: float, bias: float, avg_factor: float | None, positives: int
) -> None:
    loss = mmdet("smooth_l1_loss", "SmoothL1Loss")(beta=0.5)
    options = {"k": k, "bias": bias, "avg_factor": avg_factor, "sigmoid": sigmoid, "num_class": 5}

    def arguments() -> Arguments:
        draw = Draw(11)
        labels = torch.full((40,), 5)
        labels[:positives] = draw.integers(positives, high=5)
        width = 20 if per_class else 4
        return draw.normal(40, 6, grad=True), labels, draw.normal(40, width, grad=True), draw.normal(40, 4)

    original = partial(mmdet("pisa_loss", "carl_loss"), loss_bbox=loss, **options)
    compare_with(original, partial(carl_loss, beta=0.5, **options), arguments, 1e-5, 1e-5)


@pytest.mark.slow
def test_losses_are_added_up_as_in_mmengine() -> None:
    model = optional("mmengine.model").BaseModel

    def arguments() -> Arguments:
        draw = Draw(12)
        listed = [draw.normal(3, grad=True), draw.normal(2, 2, grad=True)]
        return ({"loss_cls": listed, "acc": draw.uniform(1), "aux_loss": draw.normal(4, grad=True)},)

    total, numbers = parse_loss(*arguments())
    expected, tensors = model.parse_losses(None, *arguments())
    compare(total, expected)
    assert list(numbers) == ["loss_cls", "acc", "aux_loss", "loss"]
    assert numbers == pytest.approx({name: value.item() for name, value in tensors.items()})
    compare_with(
        lambda losses: model.parse_losses(None, losses)[0], lambda losses: parse_loss(losses)[0], arguments, 0, 0
    )


@pytest.mark.slow
@pytest.mark.parametrize("objects", [7, 1, 0])
@pytest.mark.parametrize("no_object", [0.1, 0.4])
def test_set_loss_equals_that_of_transformers(objects: int, no_object: float) -> None:
    criterion = optional("transformers.loss.loss_for_object_detection").ImageLoss

    def original(
        logits: Tensor, predicted: Tensor, queries: Tensor, owners: Tensor, labels: Tensor, truths: Tensor
    ) -> dict[str, Tensor]:
        loss = criterion(lambda outputs, targets: [(queries, owners)], 5, no_object, ["labels", "boxes"])
        outputs = {"logits": logits[None], "pred_boxes": predicted[None]}
        losses: dict[str, Tensor] = loss(outputs, [{"class_labels": labels, "boxes": truths}])
        return losses

    def arguments() -> Arguments:
        draw = Draw(13)
        pairs = draw.permutation(20)[:objects], draw.permutation(objects)
        truths = draw.uniform(objects, 4, low=0.2, high=0.6)
        predicted = draw.uniform(20, 4, low=0.2, high=0.8, grad=True)
        return draw.normal(20, 6, grad=True), predicted, *pairs, draw.integers(objects, high=5), truths

    compare_with(original, partial(set_prediction_loss, no_object=no_object), arguments, 1e-5, 1e-5)


@pytest.mark.parametrize("channels", [3, 1, None])
@pytest.mark.parametrize("sample_wise", [True, False])
def test_charbonnier_loss_equals_that_of_a_loop(channels: int | None, sample_wise: bool) -> None:
    draw = Draw(14)
    predicted, target = draw.uniform(2, 3, 5, 4), draw.uniform(2, 3, 5, 4)
    weight = None if channels is None else draw.uniform(2, channels, 5, 4)
    lost = np.zeros((2, 3, 5, 4))
    counted = np.zeros((2, 3, 5, 4))
    for place in np.ndindex(2, 3, 5, 4):
        image, channel, row, column = place
        counted[place] = 1 if weight is None else weight[image, channel % weight.shape[1], row, column]
        lost[place] = math.sqrt((float(predicted[place]) - float(target[place])) ** 2 + 1e-6) * counted[place]
    loss = partial(charbonnier_loss, predicted, target, weight, sample_wise=sample_wise, eps=1e-6)
    whole = lost.sum() / counted.sum()
    each = np.mean([lost[image].sum() / counted[image].sum() for image in range(2)])
    compare(float(loss("mean")), pytest.approx(each if sample_wise else whole, rel=1e-5))
    compare(loss("none"), lost)
    compare(float(loss("sum")), pytest.approx(lost.sum(), rel=1e-5))


@pytest.mark.parametrize("weighted", [True, False])
def test_heatmap_loss_equals_that_of_a_loop(weighted: bool) -> None:
    draw = Draw(15)
    predicted, target, weight = draw.normal(3, 4, 5, 6), draw.normal(3, 4, 5, 6), draw.uniform(3, 4, 1)
    expected = 0.0
    for place in np.ndindex(3, 4, 5, 6):
        factor = float(weight[place[0], place[1], 0]) if weighted else 1.0
        expected += (factor * float(predicted[place] - target[place])) ** 2 / predicted.numel()
    assert float(joints_mse_loss(predicted, target, weight if weighted else None)) == pytest.approx(expected, rel=1e-5)


def test_heatmap_is_brightest_at_its_landmark() -> None:
    landmarks = torch.tensor([[-1.0, 0.5, 0.25, -0.75]], dtype=torch.float64)
    maps = landmark2heatmap(landmarks, (9, 17), inv_std=7.0)
    expected = np.zeros((1, 2, 9, 17))
    for landmark, (x, y) in enumerate([(-1.0, 0.5), (0.25, -0.75)]):
        for row, column in np.ndindex(9, 17):
            across, down = abs(x - (column / 8 - 1)) * 7, abs(y - (row / 4 - 1)) * 7
            expected[0, landmark, row, column] = math.exp(-math.sqrt(across + 1e-4) - math.sqrt(down + 1e-4))
    compare(maps, expected)
    assert [divmod(int(each.argmax()), 17) for each in maps[0]] == [(6, 0), (1, 10)]


def segments(share: float) -> Arguments:
    draw = Draw(16)
    mask = torch.ones(6, 6).triu().flip(0)
    scores = [draw.uniform(*shape, low=0.05, high=0.95).double() for shape in ((3, 2, 6, 6), (3, 6), (3, 6))]
    truths = [draw.uniform(*shape).double() for shape in ((3, 6, 6), (3, 6), (3, 6))]
    return *(each.requires_grad_() for each in scores), *(each * share for each in truths), mask.double()


def balanced(scores: list[float], positive: list[bool], entries: float) -> float:
    ratio = min(max(entries / max(sum(positive), 1), 1.05), 21)
    total = 0.0
    for score, good in zip(scores, positive, strict=True):
        total -= 0.5 * ratio * math.log(score + 1e-5) if good else 0.5 * ratio / (ratio - 1) * math.log(1.00001 - score)
    return total / entries


def chosen(overlap: Tensor, mask: Tensor) -> list[tuple[int, ...]]:
    """Return segments that overlap well, and equally many of both kinds that overlap less, chosen by one draw
    per kind.
    """
    kinds: dict[str, list[tuple[int, ...]]] = {"high": [], "middle": [], "low": []}
    for place in np.ndindex(*overlap.shape):
        value = float(overlap[place])
        if value > 0.7:
            kinds["high"].append(place)
        elif value > 0.3:
            kinds["middle"].append(place)
        elif value > 0 and mask[place[1:]]:
            kinds["low"].append(place)
    found = kinds["high"]
    for kind in ("middle", "low"):
        draws = torch.rand(overlap.shape, dtype=torch.float64)
        share = len(kinds["high"]) / max(len(kinds[kind]), 1)
        found = found + [place for place in kinds[kind] if draws[place] > 1 - share]
    return found


# 1: some segments of each kind; 0.8: no segment overlaps enough to be positive
@pytest.mark.parametrize("share", [1.0, 0.8])
def test_boundary_matching_loss_equals_that_of_a_loop(share: float) -> None:
    scores, start, end, overlap, gt_start, gt_end, mask = segments(share)
    torch.manual_seed(3)
    met = bmn_loss(scores, start, end, overlap, gt_start, gt_end, mask, 2.0, 5.0, 3.0)

    torch.manual_seed(3)
    overlap = overlap * mask
    kept = chosen(overlap, mask)
    scores = scores.detach()
    regressed = sum(float(scores[b, 0, d, t] - overlap[b, d, t]) ** 2 for b, d, t in kept) / 2 / len(kept)
    inside = [place for place in np.ndindex(*overlap.shape) if mask[place[1:]]]
    fits = [bool(overlap[place] > 0.9) for place in inside]
    entries = max(sum(fits), 1) + len(fits) - sum(fits)
    classified = balanced([float(scores[b, 1, d, t]) for b, d, t in inside], fits, entries)
    bounded = sum(
        balanced(found.flatten().tolist(), (truth.flatten() > 0.5).tolist(), truth.numel())
        for found, truth in ((start, gt_start), (end, gt_end))
    )
    total = 2 * bounded + 5 * regressed + 3 * classified
    assert [each.item() for each in met] == pytest.approx([total, bounded, regressed, classified], rel=1e-5)
    assert any(fits) == (share == 1.0)
