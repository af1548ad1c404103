import torch
from torch import Tensor

from opgrip.samples.sample import sample


@sample(
    lambda draw, images, classes: (draw.normal(images, classes, grad=True), draw.integers(images, high=classes)),
    {
        "ResNet-50, ImageNet, training, 32 images": (32, 1000),
        "Swin-B, ImageNet-21k, training, 128 images": (128, 21841),
    },
    tags="ViewAttribute AdvancedIndexing InPlace Reduce",
    url="https://github.com/DeepLink-org/DLOP-Bench/blob/743d8e31b584cab15ea5ee95d2b961a0c8f18933/bench/samples/long_tail/label_smooth_celoss/torch_impl.py",
)
def label_smooth_celoss(scores: Tensor, label: Tensor, smooth_ratio: float = 0.1) -> Tensor:
    """Return the mean over rows of the cross entropy with smoothed labels.

    Parameters
    ----------
    scores : (N, C) float
    label : (N,) or (N, 1), of any dtype, the true classes
    smooth_ratio : share of the probability that is spread evenly over all classes

    Returns () float
    Source: Szegedy et al. 2016, "Rethinking the Inception Architecture", section 7.
    """
    share = smooth_ratio / scores.shape[1]
    smoothed = torch.zeros_like(scores, requires_grad=False).fill_(share)
    smoothed.scatter_(1, label.long().view(-1, 1), 1 - smooth_ratio + share)
    return -(scores.log_softmax(dim=1) * smoothed).sum() / len(scores)
