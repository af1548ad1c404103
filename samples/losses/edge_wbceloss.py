import torch.nn.functional as F
from torch import Tensor

from opgrip.samples.losses.label_maps import IGNORED, edge_maps
from opgrip.samples.sample import sample


@sample(
    lambda draw, images, size: (draw.normal(images, 1, *size, grad=True), edge_maps(draw, images, size)),
    {
        "HED, BSDS500, 321x481, training, one image, sizes of the paper": (1, (321, 481)),
        "PIDNet-S, Cityscapes, 1024x1024 crops, training, 6 images": (6, (1024, 1024)),
    },
    tags="ViewAttribute AdvancedIndexing InPlace Reduce",
    url="https://github.com/DeepLink-org/DLOP-Bench/blob/9b2f941889c74f085024ff17e0374f421adde031/bench/samples/long_tail/edge_wbceloss/torch_impl.py",
)
def edge_wbceloss(
    edge_pred: Tensor,
    edge_target: Tensor,
    ignore_index: int = IGNORED,
    reduction: str = "mean",
    loss_weight: float = 10.0,
) -> Tensor:
    """Return binary cross entropy with edges weighted by the share of other pixels, and these by the share of edges.

    Parameters
    ----------
    edge_pred : (N, 1, H, W) float, scores of an edge
    edge_target : (N, H, W) int64, 1 on an edge, 0 elsewhere
    ignore_index : label of pixels that count as no edge
    reduction : "mean" or "sum"
    loss_weight : factor of the loss

    Returns () float
    Source: Xie and Tu 2015, "Holistically-Nested Edge Detection", equation 2; the original, of SegmentBase2, is only
    published in DLOP-Bench.
    """
    target = edge_target.clone().unsqueeze(1)
    target[target == ignore_index] = 0
    target = target.type_as(edge_pred)
    others = 1 - target.mean()
    weight = 1 - others + (2 * others - 1) * target
    loss = F.binary_cross_entropy_with_logits(edge_pred, target, weight=weight, reduction=reduction)
    return loss_weight * loss
