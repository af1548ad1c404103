"""Second stage of a two-stage detector: classifies proposals and refines their boxes."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from opgrip.samples.anchors.map_roi_levels import map_roi_levels
from opgrip.samples.assigners.assign_wrt_overlaps import assign_wrt_overlaps
from opgrip.samples.assigners.get_target_single import get_target_single
from opgrip.samples.assigners.random_sampler import random_sampler
from opgrip.samples.boxes.bbox2roi import bbox2roi
from opgrip.samples.boxes.bbox_overlaps import bbox_overlaps
from opgrip.samples.boxes.multiclass_nms import multiclass_nms
from opgrip.samples.boxes.roi_align import roi_align
from opgrip.samples.coders.delta2bbox import delta2bbox
from opgrip.samples.losses.smooth_l1_loss import smooth_l1_loss

BINS = 7
SPREAD = (0.1, 0.1, 0.2, 0.2)
"""Standard deviations that deltas are divided by, so that the losses have similar sizes."""


class RegionPooler(nn.Module):
    """Pools the features of each box from one level of the feature pyramid, chosen by the size of the box.

    strides : side in pixels of a cell of each level
    """

    def __init__(self, strides: tuple[int, ...]) -> None:
        super().__init__()
        self.strides = strides

    def forward(self, levels: list[Tensor], boxes: list[Tensor]) -> Tensor:
        """Return the features of all boxes, (N, C, 7, 7) float.

        Parameters
        ----------
        levels : features of each level, (B, C, H, W) float, finest first
        boxes : boxes of each image, (P, 4) float, x1 y1 x2 y2 in pixels; N is the sum of P
        """
        rois = bbox2roi(boxes)
        level_of = map_roi_levels(rois, len(self.strides))
        pooled = rois.new_zeros(len(rois), levels[0].shape[1], BINS, BINS)
        for index, stride in enumerate(self.strides):
            mine = torch.nonzero(level_of == index).flatten()
            if mine.numel():
                features = roi_align(levels[index], rois[mine], BINS, 1 / stride)
                pooled = pooled.index_copy(0, mine, features)
        return pooled


class RegionHead(nn.Module):
    """Predicts classes and boxes of proposals.

    Parameters
    ----------
    width : channels of the pyramid's levels
    strides : side in pixels of a cell of each level that is used for pooling
    classes : number of classes, without the background

    Source: Ren et al. 2015, section 3.2; Girshick 2015.
    """

    def __init__(self, width: int, strides: tuple[int, ...], classes: int, hidden: int = 256) -> None:
        super().__init__()
        self.pooler = RegionPooler(strides)
        self.shared = nn.Sequential(
            nn.Flatten(), nn.Linear(width * BINS * BINS, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU()
        )
        self.classifier = nn.Linear(hidden, classes + 1)
        self.regressor = nn.Linear(hidden, 4 * classes)
        self.classes = classes

    def forward(
        self,
        levels: list[Tensor],
        proposals: list[Tensor],
        image_size: tuple[int, int],
        targets: list[dict[str, Tensor]] | None = None,
    ) -> list[dict[str, Tensor]] | dict[str, Tensor]:
        """Return the detections of each image, or the losses by name if `targets` is given.

        Parameters
        ----------
        levels : features of each level, (B, width, H, W) float, finest first
        proposals : boxes of each image, (P, 4) float, x1 y1 x2 y2 in pixels
        image_size : height and width of the images in pixels
        targets : for each image, "boxes", (T, 4) float, and "labels", (T,) int64
        """
        if targets is None:
            return self._detect(levels, proposals, image_size)
        return self._losses(levels, proposals, targets)

    def _predict(self, levels: list[Tensor], boxes: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the predictions for all N boxes: logits (N, classes + 1) with the background last, and deltas (N,
        classes, 4).

        levels, boxes : features and boxes, as `levels` and `proposals` in `forward`
        """
        hidden = self.shared(self.pooler(levels, boxes))
        return self.classifier(hidden), self.regressor(hidden).reshape(-1, self.classes, 4)

    def _detect(
        self, levels: list[Tensor], proposals: list[Tensor], image_size: tuple[int, int]
    ) -> list[dict[str, Tensor]]:
        """Return, for each image, "boxes", (K, 4) float in pixels, "scores", (K,) float, and "labels", (K,) int64, best
        first; parameters as in `forward`.
        """
        logits, deltas = self._predict(levels, proposals)
        scores = functional.softmax(logits, dim=1)[:, :-1]
        sizes = [len(each) for each in proposals]
        detections = []
        parts = zip(proposals, scores.split(sizes), deltas.flatten(1).split(sizes), strict=True)
        for boxes, image_scores, image_deltas in parts:
            moved = delta2bbox(boxes, image_deltas, stds=SPREAD, max_shape=image_size).reshape(-1, self.classes, 4)
            detection = multiclass_nms(moved, image_scores, 0.01, 0.5, candidates=150, limit=100)
            detections.append(dict(zip(("boxes", "scores", "labels"), detection, strict=True)))
        return detections

    def _losses(
        self, levels: list[Tensor], proposals: list[Tensor], targets: list[dict[str, Tensor]]
    ) -> dict[str, Tensor]:
        """Return the losses of classes and of boxes by name, () float each; parameters as in `forward`."""
        chosen, labels, target_deltas = [], [], []
        for boxes, target in zip(proposals, targets, strict=True):
            truths, classes = target["boxes"], target["labels"]
            overlaps = bbox_overlaps(truths, boxes)
            assigned = assign_wrt_overlaps(overlaps, classes, 0.5, 0.5, match_low_quality=False)
            # truths are added to the proposals, since an untrained first stage gives no positives
            sampled = random_sampler(assigned.gt_inds, boxes, truths, classes, num=128, pos_fraction=0.25)
            learned = get_target_single(*sampled[2:], num_classes=self.classes, target_stds=SPREAD)
            chosen.append(torch.cat([sampled.pos_priors, sampled.neg_priors]))
            labels.append(learned[0])
            target_deltas.append(learned[2])
        logits, deltas = self._predict(levels, chosen)
        truth = torch.cat(labels)
        foreground = torch.nonzero(truth < self.classes).flatten()
        predicted = deltas[foreground, truth[foreground]]
        distance = smooth_l1_loss(predicted, torch.cat(target_deltas)[foreground], reduction="sum")
        return {"roi_cls": functional.cross_entropy(logits, truth), "roi_box": distance / max(truth.numel(), 1)}
