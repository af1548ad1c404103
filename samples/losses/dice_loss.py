import torch
from torch import Tensor

from opgrip.samples.losses.label_maps import label_maps
from opgrip.samples.sample import Arguments, Draw, sample


def inputs(draw: Draw, images: int, size: tuple[int, ...], classes: int = 2) -> Arguments:
    scores = draw.normal(images, classes, *size, grad=True)
    labels = label_maps(draw, images, (size[-2], size[-1]), classes, border=0)
    return scores, labels if len(size) == 2 else labels.unsqueeze(1).expand(-1, *size).contiguous()


@sample(
    inputs,
    {
        "UNet-S5-D16 FCN, DRIVE, 64x64 crops, training": (4, (64, 64)),
        "UNet-S5-D16 FCN, HRF, 256x256 crops, training": (4, (256, 256)),
        "V-Net, one volume of 64x128x128, training, sizes of the paper": (1, (64, 128, 128)),
    },
    tags="IfElseBranch Reduce ViewAttribute AdvancedIndexing InPlace",
    url="https://github.com/DeepLink-org/DLOP-Bench/blob/9b2f941889c74f085024ff17e0374f421adde031/bench/samples/long_tail/dice_loss/torch_impl.py",
)
def dice_loss(
    pred: Tensor,
    gt: Tensor,
    smooth: float = 1e-5,
    act: str = "softmax",
    squared_pred: bool = True,
    jaccard: bool = True,
) -> Tensor:
    """Return 1 minus the Dice coefficient, averaged over images and classes.

    Parameters
    ----------
    pred : (N, C, ...) float, scores
    gt : (N, C, ...) float, share of each class; or (N, ...) or (N, 1, ...) int64, the class
    smooth : prevents a division by zero for empty regions
    act : "softmax" over the classes, or "sigmoid"
    squared_pred : True to compute sizes of regions as sums of squares
    jaccard : True to subtract the overlap from the sum of the two sizes; the numerator remains that of Dice, so that
        equal regions give -1, not 0

    Returns () float
    Source: Milletari et al. 2016, "V-Net", section 3, with the options of MONAI's `DiceLoss`; the original is only
    published in DLOP-Bench.
    """
    if act == "sigmoid":
        pred = pred.sigmoid()
    elif act == "softmax":
        pred = pred.softmax(dim=1)
    else:
        raise ValueError(f"unknown act {act}: choose sigmoid or softmax")
    if gt.dim() != pred.dim():
        gt = gt.unsqueeze(1)
    if gt.shape[1] != pred.shape[1]:
        gt = torch.zeros_like(pred).scatter_(1, gt, 1)
    space = list(range(2, pred.dim()))
    overlap = (gt * pred).sum(dim=space)
    if squared_pred:
        gt, pred = gt.square(), pred.square()
    sizes = gt.sum(dim=space) + pred.sum(dim=space)
    if jaccard:
        sizes -= overlap
    return 1 - ((2 * overlap + smooth) / (sizes + smooth)).mean()
