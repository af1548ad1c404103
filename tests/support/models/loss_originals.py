"""Losses of installed packages, each with the name and the arguments of our sample."""

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from optional import optional
from torch import Tensor


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
