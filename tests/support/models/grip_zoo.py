"""Functions and methods of mmdet and mmseg, with arguments for them."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opgrip.capture.grip.gripped import Gripped, GrippedCall


@dataclass(frozen=True)
class Specimen:
    """A function to grip.

    path : the function, as `module:qualname`
    arguments : returns the positional arguments of its call; `keywords` are the named ones
    suffix : end of the sample's name, which distinguishes specimens of one function
    """

    path: str
    arguments: Callable[[], tuple[Any, ...]]
    keywords: dict[str, Any]
    suffix: str = ""

    @property
    def name(self) -> str:
        module, _, entry = self.path.partition(":")
        return f"{module.partition('.')[0]}_{entry.replace('.', '_')}{self.suffix}"


ZOO: list[Specimen] = []
COMPILED: list[Specimen] = []


def specimen(path: str, arguments: Callable[[], tuple[Any, ...]], **keywords: Any) -> None:
    ZOO.append(Specimen(path, arguments, keywords))


def method(
    path: str, fields: tuple[Any, ...] | dict[str, Any], arguments: Callable[[], tuple[Any, ...]], **keywords: Any
) -> None:
    """Add the method at `path`, of an object that its class makes from `fields`, to the specimens."""
    args, named = ((), fields) if isinstance(fields, dict) else (fields, {})
    owner = path.rpartition(".")[0]
    specimen(path, lambda: (made(owner, *args, **named), *arguments()), **keywords)


def found(path: str) -> tuple[Callable[..., Any], type | None, str]:
    """Return the function at a path `module:qualname`, its class if it is a method, and its qualname."""
    module, _, entry = path.partition(":")
    owner, thing = None, import_module(module)
    for name in entry.split("."):
        owner = thing if isinstance(thing, type) else None
        thing = getattr(thing, name) if owner is None else inspect.getattr_static(thing, name)
    return getattr(thing, "__func__", thing), owner, entry


def gripped(one: Specimen) -> Gripped:
    """Return the gripped function of a specimen, with one recorded call."""
    function, owner, entry = found(one.path)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    torch.manual_seed(1)
    args = one.arguments()
    torch.set_rng_state(state)
    results = function(*args, **one.keywords)
    torch.manual_seed(1)
    call = GrippedCall(one.arguments(), one.keywords, results, None, state, 0, 0, 0)
    return Gripped(function, owner, entry, one.name, frozenset(), [call])


def boxes(count: int, size: float = 100.0) -> Tensor:
    corner = torch.rand(count, 2) * size
    return torch.cat([corner, corner + torch.rand(count, 2) * size / 2 + 1], 1)


def made(path: str, *args: Any, **keywords: Any) -> Any:
    """Return an object of the class at a path `module:name`, made with these arguments."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)(*args, **keywords)


def instances(**fields: Any) -> Any:
    return made("mmengine.structures:InstanceData", **fields)


class Sizes(dict[str, int]):
    """Settings that are readable as attributes and as items."""

    def __init__(self, mask_size: int) -> None:
        self.mask_size = mask_size


CODERS = "mmdet.models.task_modules.coders"
ASSIGNERS = "mmdet.models.task_modules.assigners"
SAMPLERS = "mmdet.models.task_modules.samplers"
PRIORS = "mmdet.models.task_modules.prior_generators"
LOSSES = "mmdet.models.losses"
SEG_LOSSES = "mmseg.models.losses"
LAYERS = "mmdet.models.layers"

# boxes
specimen(f"{CODERS}.delta_xywh_bbox_coder:delta2bbox", lambda: (boxes(8), torch.randn(8, 4)), max_shape=(90, 80))
specimen(f"{CODERS}.delta_xywh_bbox_coder:bbox2delta", lambda: (boxes(8), boxes(8)))
method(f"{CODERS}:DeltaXYWHBBoxCoder.decode", {"use_box_type": False}, lambda: (boxes(8), torch.randn(8, 4)))
method(
    f"{CODERS}:DeltaXYWHBBoxCoder.encode",
    (),
    lambda: (made("mmdet.structures.bbox:HorizontalBoxes", boxes(5)), boxes(5)),
)
method(
    f"{CODERS}:DistancePointBBoxCoder.decode",
    {"use_box_type": True},
    lambda: (torch.rand(8, 2) * 50, torch.rand(8, 4) * 9),
)
specimen("mmdet.structures.bbox:bbox_overlaps", lambda: (boxes(6), boxes(9)), mode="giou")
specimen("mmdet.structures.bbox:bbox2roi", lambda: ([boxes(3), boxes(2)],))

# priors
method(
    f"{PRIORS}:AnchorGenerator.single_level_grid_priors", ([8, 16], [0.5, 1.0], [8]), lambda: ((3, 4), 1), device="cpu"
)
method(
    f"{PRIORS}:MlvlPointGenerator.grid_priors", ([8, 16],), lambda: ([(3, 4), (2, 2)],), device="cpu", with_stride=True
)


# assigners and samplers
def max_iou() -> Any:
    return made(f"{ASSIGNERS}:MaxIoUAssigner", pos_iou_thr=0.5, neg_iou_thr=0.3, min_pos_iou=0.1)


def to_assign(count: int = 12) -> tuple[Any, Any]:
    labels = torch.tensor([1, 0, 2])
    return instances(priors=boxes(count)), instances(bboxes=boxes(3), labels=labels)


specimen(f"{ASSIGNERS}:MaxIoUAssigner.assign_wrt_overlaps", lambda: (max_iou(), torch.rand(3, 12), torch.arange(3)))
specimen(f"{ASSIGNERS}:MaxIoUAssigner.assign", lambda: (max_iou(), *to_assign()))
method(f"{ASSIGNERS}:ATSSAssigner.assign", {"topk": 3}, lambda: (to_assign()[0], [12], to_assign()[1]))
method(
    f"{ASSIGNERS}:TaskAlignedAssigner.assign",
    {"topk": 4},
    lambda: (instances(priors=boxes(12), bboxes=boxes(12), scores=torch.rand(12, 3)), to_assign()[1]),
)
specimen(
    f"{ASSIGNERS}:HungarianAssigner.assign",
    lambda: (
        made(
            f"{ASSIGNERS}:HungarianAssigner",
            [
                {"type": "mmdet.FocalLossCost", "weight": 2.0},
                {"type": "mmdet.BBoxL1Cost", "weight": 5.0, "box_format": "xywh"},
                {"type": "mmdet.IoUCost", "iou_mode": "giou"},
            ],
        ),
        instances(bboxes=boxes(12), scores=torch.randn(12, 3)),
        to_assign()[1],
    ),
    img_meta={"img_shape": (120, 160)},
)
method(f"{ASSIGNERS}.iou2d_calculator:BboxOverlaps2D.__call__", (), lambda: (boxes(3), boxes(4)))
method(f"{SAMPLERS}:RandomSampler.sample", (4, 0.5), lambda: (max_iou().assign(*to_assign()), *to_assign()))

# losses of mmdet
specimen(f"{LOSSES}.iou_loss:giou_loss", lambda: (boxes(6), boxes(6), torch.rand(6)), avg_factor=3.0)
specimen(f"{LOSSES}.smooth_l1_loss:smooth_l1_loss", lambda: (torch.rand(6, 4), torch.rand(6, 4)), beta=0.5)
specimen(f"{LOSSES}.focal_loss:py_sigmoid_focal_loss", lambda: (torch.randn(6, 3), torch.eye(3).repeat(2, 1)))
specimen(f"{LOSSES}.gfocal_loss:quality_focal_loss", lambda: (torch.randn(6, 3), (torch.arange(6) % 4, torch.rand(6))))
specimen(f"{LOSSES}.gfocal_loss:distribution_focal_loss", lambda: (torch.randn(6, 9), torch.rand(6) * 7))
specimen(f"{LOSSES}.gaussian_focal_loss:gaussian_focal_loss", lambda: (torch.rand(2, 3, 8, 8), torch.rand(2, 3, 8, 8)))
specimen(f"{LOSSES}.dice_loss:dice_loss", lambda: (torch.rand(4, 9), torch.rand(4, 9)), avg_factor=4)
specimen(f"{LOSSES}.kd_loss:knowledge_distillation_kl_div_loss", lambda: (torch.randn(4, 9), torch.randn(4, 9)), T=2)
specimen(
    f"{LOSSES}.cross_entropy_loss:binary_cross_entropy",
    lambda: (torch.randn(6, 3), torch.tensor([0, 1, 2, 255, 3, 1])),
    ignore_index=255,
)
specimen(f"{LOSSES}.accuracy:accuracy", lambda: (torch.randn(6, 9), torch.arange(6)), topk=(1, 5))
method(f"{LOSSES}:CrossEntropyLoss.forward", (), lambda: (torch.randn(6, 9), torch.arange(6)))

# what heads use
specimen(
    "mmdet.models.utils:multi_apply",
    lambda: (found(f"{LOSSES}.accuracy:accuracy")[0], [torch.randn(6, 9)] * 2, [torch.arange(6)] * 2),
    topk=(1, 5),
)
specimen("mmdet.models.utils:filter_scores_and_topk", lambda: (torch.rand(30, 4), 0.5, 10, {"boxes": boxes(30)}))
specimen(
    "mmdet.models.utils:get_uncertain_point_coords_with_randomness",
    lambda: (torch.randn(2, 3, 8, 8), torch.tensor([0, 2]), 12, 3.0, 0.75),
)
specimen("mmdet.models.utils:gen_gaussian_target", lambda: (torch.zeros(20, 20), [5, 9], 4))
specimen("mmdet.models.utils:transpose_and_gather_feat", lambda: (torch.rand(2, 3, 8, 8), torch.arange(6).view(2, 3)))
specimen(f"{LAYERS}:fast_nms", lambda: (boxes(20).view(5, 4, 4)[:, 0], torch.rand(5, 4), torch.rand(5, 6), 0.5, 0.1, 3))
specimen(f"{LAYERS}:mask_matrix_nms", lambda: (torch.rand(6, 8, 8) > 0.5, torch.arange(6) % 2, torch.rand(6)))
specimen(
    f"{LAYERS}:SinePositionalEncoding.forward",
    lambda: (made(f"{LAYERS}:SinePositionalEncoding", 8, normalize=True), torch.rand(2, 6, 7) > 0.8),
)
method("mmdet.models.dense_heads.gfl_head:Integral.forward", (7,), lambda: (torch.randn(5, 32),))
# mmseg
specimen(
    f"{SEG_LOSSES}.lovasz_loss:lovasz_softmax",
    lambda: (torch.rand(2, 4, 6, 6).softmax(1), torch.arange(72).view(2, 6, 6) % 4),
)
specimen(
    f"{SEG_LOSSES}.dice_loss:dice_loss", lambda: (torch.rand(2, 4, 9), torch.rand(2, 4, 9), None), ignore_index=None
)
specimen(
    f"{SEG_LOSSES}.tversky_loss:tversky_loss",
    lambda: (torch.rand(2, 4, 6, 6), torch.eye(4)[torch.arange(72) % 4].view(2, 6, 6, 4)),
    valid_mask=torch.ones(2, 6, 6),
)
specimen(
    f"{SEG_LOSSES}.cross_entropy_loss:cross_entropy",
    lambda: (torch.randn(2, 4, 6, 6), torch.arange(72).view(2, 6, 6) % 4),
    avg_non_ignore=True,
)
specimen(
    "mmseg.models.utils.wrappers:resize",
    lambda: (torch.rand(1, 2, 5, 5),),
    size=(9, 9),
    mode="bilinear",
    align_corners=True,
)
method("mmseg.models.utils.encoding:Encoding.forward", (5, 4), lambda: (torch.rand(2, 5, 3, 3),))
specimen(
    "mmseg.evaluation.metrics.iou_metric:IoUMetric.intersect_and_union",
    lambda: (torch.arange(36).view(6, 6) % 3, torch.arange(36).view(6, 6) % 4, 4, 3),
)

# with functions of mmcv that are compiled
COMPILED.append(
    Specimen(
        "mmdet.structures.mask.mask_target:mask_target_single",
        lambda: (
            boxes(4, 20),
            torch.tensor([0, 1, 1, 0]),
            made(
                "mmdet.structures.mask:BitmapMasks", (np.arange(1800).reshape(2, 30, 30) % 5 > 2) * np.uint8(1), 30, 30
            ),
            Sizes(7),
        ),
        {},
    )
)
COMPILED.append(
    Specimen(
        f"{LAYERS}:multiclass_nms",
        lambda: (boxes(20), torch.rand(20, 4), 0.3, {"type": "nms", "iou_threshold": 0.5}, 10),
        {},
    )
)
COMPILED.append(
    Specimen(
        f"{LAYERS}:multiclass_nms",
        lambda: (boxes(20), torch.rand(20, 4), 0.3, {"type": "soft_nms", "iou_threshold": 0.5}, 10),
        {},
        suffix="_soft",
    )
)
