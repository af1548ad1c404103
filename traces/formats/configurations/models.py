"""Models that operator configurations name, written from their papers: what runs is that of `torch.nn` alone."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn


def alex_net(num_classes: int = 1000, dropout: float = 0.5) -> nn.Module:
    """AlexNet in one column: Krizhevsky 2014, "One weird trick for parallelizing convolutional neural networks"."""
    channels = (3, 64, 192, 384, 256, 256)
    kernels = ((11, 4, 2), (5, 1, 2), (3, 1, 1), (3, 1, 1), (3, 1, 1))
    layers: list[nn.Module] = []
    for place, ((inner, outer), (size, stride, padding)) in enumerate(zip(pairwise(channels), kernels, strict=True)):
        layers += [nn.Conv2d(inner, outer, size, stride, padding), nn.ReLU(inplace=True)]
        if place in (0, 1, 4):
            layers.append(nn.MaxPool2d(3, 2))
    classifier: list[nn.Module] = []
    for inner, outer in ((256 * 36, 4096), (4096, 4096)):
        classifier += [nn.Dropout(dropout), nn.Linear(inner, outer), nn.ReLU(inplace=True)]
    return nn.Sequential(
        nn.Sequential(*layers),
        nn.AdaptiveAvgPool2d(6),
        nn.Flatten(),
        nn.Sequential(*classifier, nn.Linear(4096, num_classes)),
    )


class Bottleneck(nn.Module):
    """A block of three convolutions beside a shortcut, its stride in the second of them."""

    def __init__(self, inner: int, width: int, stride: int) -> None:
        super().__init__()
        outer = 4 * width
        self.body = nn.Sequential(
            *_normalized(inner, width, 1),
            nn.ReLU(inplace=True),
            *_normalized(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *_normalized(width, outer, 1),
        )
        is_same = stride == 1 and inner == outer
        self.shortcut = nn.Identity() if is_same else nn.Sequential(*_normalized(inner, outer, 1, stride))
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """(N, inner, H, W) to (N, 4 * width, H / stride, W / stride)."""
        y: Tensor = self.body(x)
        y += self.shortcut(x)
        result: Tensor = self.activation(y)
        return result


def resnet(num_classes: int = 1000) -> nn.Module:
    """ResNet-50: He et al. 2016, "Deep residual learning for image recognition", table 1."""
    blocks: list[nn.Module] = []
    inner = 64
    for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for place in range(count):
            blocks.append(Bottleneck(inner, width, 1 if place else stride))
            inner = 4 * width
    stem = (*_normalized(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inner, num_classes))


def _normalized(inner: int, outer: int, size: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(inner, outer, size, stride, size // 2, bias=False), nn.BatchNorm2d(outer)


MODELS = {"pytorch.model.alex_net": alex_net, "pytorch.model.resnet": resnet}
"""Models by the names that stand in files."""
