"""First stage of a two-stage detector: proposes boxes."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from opgrip.samples.anchors.gen_base_anchors import gen_base_anchors
from opgrip.samples.anchors.grid_anchors import grid_anchors
from opgrip.samples.assigners.assign_wrt_overlaps import assign_wrt_overlaps
from opgrip.samples.assigners.random_sampler import random_sampler
from opgrip.samples.boxes.bbox_overlaps import bbox_overlaps
from opgrip.samples.boxes.nms import nms
from opgrip.samples.coders.bbox2delta import bbox2delta
from opgrip.samples.coders.delta2bbox import delta2bbox
from opgrip.samples.losses.smooth_l1_loss import smooth_l1_loss

SCALE = 8.0
RATIOS = (0.5, 1.0, 2.0)


class AnchorPredictions(NamedTuple):
    """Predictions of the first stage for B images with N anchors each.

    Attributes
    ----------
    scores : (B, N) float, logits that an anchor contains an object
    deltas : (B, N, 4) float, dx dy dw dh that turn anchors into boxes
    anchors : anchors of each level, (A, 4) float, x1 y1 x2 y2 in pixels; N is the sum of A
    """

    scores: Tensor
    deltas: Tensor
    anchors: list[Tensor]


class ProposalHead(nn.Module):
    """Predicts scores and deltas of anchors.

    Parameters
    ----------
    width : channels of the pyramid's levels
    strides : side in pixels of a cell of each level

    Source: Ren et al. 2015, section 3.1.
    """

    def __init__(self, width: int, strides: tuple[int, ...]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, 1, 1)
        self.objectness = nn.Conv2d(width, len(RATIOS), 1)
        self.deltas = nn.Conv2d(width, 4 * len(RATIOS), 1)
        self.select = ProposalSelector()
        self.loss = ProposalLoss()
        self.strides = strides

    def forward(self, levels: list[Tensor]) -> AnchorPredictions:
        """Return the predictions for all anchors of the pyramid's levels.

        levels : maps of features, (B, width, H, W) float, one for each stride
        """
        scores, deltas, anchors = [], [], []
        for level, stride in zip(levels, self.strides, strict=True):
            hidden = functional.relu(self.conv(level))
            batch, _, height, width = level.shape
            scores.append(self.objectness(hidden).permute(0, 2, 3, 1).reshape(batch, -1))
            deltas.append(self.deltas(hidden).permute(0, 2, 3, 1).reshape(batch, -1, 4))
            base = gen_base_anchors(stride, level.new_tensor((SCALE,)), level.new_tensor(RATIOS), center_offset=0.5)
            anchors.append(grid_anchors(base, (height, width), (stride, stride)))
        return AnchorPredictions(torch.cat(scores, dim=1), torch.cat(deltas, dim=1), anchors)


class ProposalSelector(nn.Module):
    """Selects the best proposals of each image; a module, so that its operators have a module path in a trace.

    Parameters
    ----------
    candidates : number of best anchors per level before non-maximum suppression
    limit : most proposals per image
    """

    def __init__(self, candidates: int = 60, limit: int = 200) -> None:
        super().__init__()
        self.candidates = candidates
        self.limit = limit

    @torch.no_grad()
    def forward(self, predictions: AnchorPredictions, image_size: tuple[int, int]) -> list[Tensor]:
        """Return the proposals of each image, (P, 4) float, x1 y1 x2 y2 in pixels, best first.

        predictions : scores and deltas of all anchors
        image_size : height and width of the images in pixels; boxes are clipped to it
        """
        sizes = [len(anchors) for anchors in predictions.anchors]
        proposals = []
        for scores, deltas in zip(predictions.scores, predictions.deltas, strict=True):
            boxes, values = [], []
            parts = zip(predictions.anchors, scores.split(sizes), deltas.split(sizes), strict=True)
            for anchors, level_scores, level_deltas in parts:
                best = level_scores.topk(min(self.candidates, len(anchors)))
                level_boxes = delta2bbox(anchors[best.indices], level_deltas[best.indices], max_shape=image_size)
                survivors = nms(level_boxes, best.values, 0.7)
                boxes.append(level_boxes[survivors])
                values.append(best.values[survivors])
            order = torch.cat(values).argsort(descending=True)[: self.limit]
            proposals.append(torch.cat(boxes)[order])
        return proposals


class ProposalLoss(nn.Module):
    """Loss of the first stage; a module, so that its operators have a module path in a trace."""

    def forward(self, predictions: AnchorPredictions, truths: list[Tensor]) -> dict[str, Tensor]:
        """Return the losses of scores and of boxes by name, () float each.

        predictions : scores and deltas of all anchors
        truths : true boxes of each image, (T, 4) float, x1 y1 x2 y2 in pixels
        """
        anchors = torch.cat(predictions.anchors)
        scores, deltas = predictions.scores.sum() * 0, predictions.deltas.sum() * 0
        for image, boxes in enumerate(truths):
            objects = torch.zeros(len(boxes), dtype=torch.long, device=boxes.device)
            assigned = assign_wrt_overlaps(bbox_overlaps(boxes, anchors), objects, 0.7, 0.3, min_pos_iou=0.3)
            sampled = random_sampler(
                assigned.gt_inds, anchors, boxes, objects, num=256, pos_fraction=0.5, add_gt_as_proposals=False
            )
            chosen = torch.cat([sampled.pos_inds, sampled.neg_inds])
            labels = (assigned.gt_inds[chosen] > 0).to(scores.dtype)
            scores = scores + functional.binary_cross_entropy_with_logits(predictions.scores[image, chosen], labels)
            target_deltas = bbox2delta(sampled.pos_priors, sampled.pos_gt_bboxes)
            distance = smooth_l1_loss(
                predictions.deltas[image, sampled.pos_inds], target_deltas, reduction="sum", beta=1 / 9
            )
            deltas = deltas + distance / max(chosen.numel(), 1)
        return {"rpn_cls": scores / len(truths), "rpn_box": deltas / len(truths)}
