import torch
import torch.nn.functional as F
from torch import Tensor

from opgrip.samples.losses.label_maps import CROPS, edge_maps
from opgrip.samples.sample import Arguments, Draw, sample


def inputs(draw: Draw, images: int, classes: int, size: tuple[int, int]) -> Arguments:
    logit = draw.normal(images, classes, *size, grad=True)
    return logit, draw.normal(images, 1, *size), edge_maps(draw, images, size)


@sample(
    inputs,
    CROPS,
    tags="ForLoop IfElseBranch ViewAttribute AdvancedIndexing InPlace Broadcast Reduce",
    url="https://github.com/DeepLink-org/DLOP-Bench/blob/3002de2788de8bbaba900cefee094e824fe097ae/bench/samples/long_tail/edge_smoothloss/torch_impl.py",
)
def edge_smoothloss(
    logit: Tensor,
    edge_logit: Tensor,
    edge_target: Tensor,
    beta: float = 10.0,
    kernel: int = 3,
    limit: float = 3.0,
    weight_type: str = "gs",
    loss_weight: float = 10.0,
) -> Tensor:
    """Return the mean difference of class probabilities of neighbouring pixels, with low weights near edges.

    Parameters
    ----------
    logit : (N, C, H, W) float, scores of the classes
    edge_logit : (N, 1, H, W) float, scores of an edge, which get no gradient
    edge_target : (N, H, W) int64, 1 on an edge
    beta : decay of the weight with the strength of the edge
    kernel : side in pixels, odd, of the square in which edge pixels are counted
    limit : upper limit of that count
    weight_type : strength of the edge: "gs" is the count, "ps" the predicted probability, "gps" the mean of the two
    loss_weight : factor of the loss

    Returns () float
    Source: the edge-aware smoothness of Godard et al. 2017, equation 3, for probabilities and known edges; the
    original, of SegmentBase2, is only published in DLOP-Bench, where "gps" gives the result of "ps".
    """
    edges = edge_target.clone().unsqueeze(1).float()
    edges[edges != 1] = 0
    ones = torch.tensor([[1.0] * kernel for _ in range(kernel)]).view(1, 1, kernel, kernel).type_as(edges)
    strength = F.conv2d(edges, ones, padding=kernel // 2)
    strength[strength > limit] = limit
    if weight_type != "gs":
        predicted = edge_logit.detach().sigmoid()
        strength = predicted if weight_type == "ps" else (predicted + strength) / 2

    probability = F.pad(logit.softmax(dim=1), [0, 1, 0, 1], mode="replicate")
    here = probability[:, :, :-1, :-1]
    across = (probability[:, :, :-1, 1:] - here).abs()
    down = (probability[:, :, 1:, :-1] - here).abs()
    weight = (-beta * strength.abs()).exp()
    across *= weight
    down *= weight
    return loss_weight * (across.mean() + down.mean())
