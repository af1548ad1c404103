"""Small two-stage detector with dedicated operators and long-tail code, like production models."""

from typing import Any

import torch
from torch import Tensor, nn

from opgrip.samples.models.proposals import ProposalHead
from opgrip.samples.models.pyramid import Backbone, FeaturePyramid
from opgrip.samples.models.regions import RegionHead

CHANNELS = (32, 64, 128, 256)
WIDTH = 64
STRIDES = (4, 8, 16, 32, 64)
CLASSES = 20
OBJECTS = 6
"""Number of boxes in a random image."""


class FasterRCNN(nn.Module):
    """Detector of objects in images: a backbone, a feature pyramid, a head that proposes boxes, and one that classifies
    them.

    Source: Ren et al. 2015, with the feature pyramid of Lin et al. 2017.
    """

    def __init__(self, classes: int = CLASSES) -> None:
        super().__init__()
        self.backbone = Backbone(CHANNELS)
        self.neck = FeaturePyramid(CHANNELS, WIDTH)
        self.rpn = ProposalHead(WIDTH, STRIDES)
        self.roi_head = RegionHead(WIDTH, STRIDES[:-1], classes)

    def forward(
        self, images: Tensor, targets: list[dict[str, Tensor]] | None = None
    ) -> dict[str, Tensor] | list[dict[str, Tensor]]:
        """Return the detections of each image, or losses if `targets` is given.

        Parameters
        ----------
        images : (B, 3, H, W) float
        targets : per image, boxes (T, 4) float, x1 y1 x2 y2 in pixels, and labels (T,) int64
        """
        image_size = (images.shape[2], images.shape[3])
        levels = self.neck(self.backbone(images))
        predictions = self.rpn(levels)
        proposals = self.rpn.select(predictions, image_size)
        if targets is None:
            return self.roi_head(levels, proposals, image_size)  # type: ignore[no-any-return]
        losses = self.rpn.loss(predictions, [target["boxes"] for target in targets])
        return losses | self.roi_head(levels, proposals, image_size, targets)  # type: ignore[no-any-return]


def faster_rcnn(
    batch_size: int = 2, input_size: tuple[int, int] = (256, 256), run: str = "predict"
) -> tuple[FasterRCNN, dict[str, Any]]:
    """Return the detector with random weights, and arguments for it by name.

    Parameters
    ----------
    batch_size : number of images
    input_size : height and width of the images in pixels
    run : `predict`, `loss` or `train`; the latter two also need boxes and labels
    """
    model = FasterRCNN()
    inputs: dict[str, Any] = {"images": torch.randn(batch_size, 3, *input_size)}
    if run != "predict":
        inputs["targets"] = [_objects(input_size) for _ in range(batch_size)]
    return model, inputs


def _objects(image_size: tuple[int, int]) -> dict[str, Tensor]:
    height, width = image_size
    extent = torch.tensor([width, height])
    size = (torch.rand(OBJECTS, 2) * 0.4 + 0.1) * extent
    corner = torch.rand(OBJECTS, 2) * (extent - size)
    return {"boxes": torch.cat([corner, corner + size], dim=1), "labels": torch.randint(0, CLASSES, (OBJECTS,))}
