import torch
from torch import Tensor
from torch.nn import functional

from opgrip.samples.sample import sample


@sample(
    lambda draw, images, height, width, channels=256, features=128, positions=50: (
        draw.normal(images, channels, height, width),
        draw.uniform(positions, features, grad=True),
        draw.uniform(positions, features, grad=True),
    ),
    {
        "DETR R50, 800x1333, training, one image": (1, 25, 42),
        "DETR R50, 800x1333, training, 8 images": (8, 25, 42),
    },
    tags="ViewAttribute AdvancedIndexing",
    url="https://github.com/facebookresearch/detr/blob/14602a71482082746399dd6bc5712a9aa8f804d2/models/position_encoding.py#L51",
)
def position_embedding_learned(features: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Return, per position, the vector of its column followed by that of its row.

    Parameters
    ----------
    features : (B, C, H, W), only its shape and device are used
    rows, columns : (positions, D) float, at least as many positions as `features` has

    Returns (B, 2 * D, H, W) float, the same for all images
    Source: Carion et al. 2020, "End-to-End Object Detection with Transformers" (DETR), learned positional encodings.
    """
    images, _, height, width = features.shape
    across = functional.embedding(torch.arange(width, device=features.device), columns)
    down = functional.embedding(torch.arange(height, device=features.device), rows)
    both = torch.cat([across.repeat(height, 1, 1), down[:, None].repeat(1, width, 1)], dim=2)
    return both.permute(2, 0, 1).repeat(images, 1, 1, 1)
