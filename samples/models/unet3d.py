"""Segmentation of volumes: a 3D U-Net with overlapping windows for large volumes."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from opgrip.samples.losses.dice_loss import dice_loss

CLASSES = 4
WIDTHS = (32, 64, 128)
WINDOW = 48
LEARNING_RATE = 0.01


class Block(nn.Sequential):
    """Two convolutions of volumes, each followed by a normalization and a leaky ReLU.

    inputs, outputs : number of channels before and after the block
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        layers: list[nn.Module] = []
        for before in (inputs, outputs):
            layers += [nn.Conv3d(before, outputs, 3, padding=1, bias=False)]
            layers += [nn.InstanceNorm3d(outputs, affine=True), nn.LeakyReLU(0.01, inplace=True)]
        super().__init__(*layers)


class UNet3D(nn.Module):
    """Network that predicts the class of each voxel of a volume.

    Parameters
    ----------
    widths : number of channels of each level, from the finest to the coarsest
    window : height, width and depth in voxels of the windows into which a volume is divided for predictions

    Source: Cicek et al. 2016, section 2; Isensee et al. 2021, methods, for norms, loss and windows.
    """

    def __init__(self, widths: Sequence[int] = WIDTHS, window: int = WINDOW) -> None:
        super().__init__()
        self.window = window
        self.down = nn.ModuleList(Block(*pair) for pair in itertools.pairwise((1, *widths)))
        self.up = nn.ModuleList(Block(below + here, here) for here, below in itertools.pairwise(widths))
        self.classes = nn.Conv3d(widths[0], CLASSES, 1)

    def forward(self, volume: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return the class of each voxel, (B, D, H, W) int64, or the loss if `labels` is given.

        Parameters
        ----------
        volume : (B, 1, D, H, W) float
        labels : (B, D, H, W) int64, true class of each voxel
        """
        if labels is not None:
            scores = self.scores(volume)
            overlap = dice_loss(scores, labels, squared_pred=False, jaccard=False)
            return functional.cross_entropy(scores, labels) + overlap
        return self.by_windows(volume).argmax(dim=1)

    def scores(self, volume: Tensor) -> Tensor:
        """Return the scores of the classes of each voxel, (B, classes, D, H, W) float, computed in one window.

        volume : (B, 1, D, H, W) float
        """
        seen = []
        hidden = volume
        for depth, block in enumerate(self.down):
            hidden = block(hidden if depth == 0 else functional.max_pool3d(hidden, 2))
            seen.append(hidden)
        for block, finer in zip(reversed(self.up), reversed(seen[:-1]), strict=True):
            coarse = functional.interpolate(hidden, size=finer.shape[2:], mode="trilinear", align_corners=False)
            hidden = block(torch.cat([coarse, finer], dim=1))
        return self.classes(hidden)  # type: ignore[no-any-return]

    def by_windows(self, volume: Tensor) -> Tensor:
        """Return the probabilities of the classes of each voxel, (B, classes, D, H, W) float, computed window by
        window.

        Windows overlap by half; the probabilities of a voxel are averaged, with low weights at the borders of windows.

        volume : (B, 1, D, H, W) float
        """
        size = self.window
        volume = functional.pad(volume, [2] * 6, mode="replicate")
        weight = bell(size, volume)
        total = volume.new_zeros(len(volume), CLASSES, *volume.shape[2:])
        weights = torch.zeros_like(total[:1, :1])
        for place in itertools.product(*(starts(length, size) for length in volume.shape[2:])):
            inside = (slice(None), slice(None), *(slice(first, first + size) for first in place))
            total[inside] += functional.softmax(self.scores(volume[inside]), dim=1) * weight
            weights[inside] += weight
        return (total / weights)[:, :, 2:-2, 2:-2, 2:-2]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return an optimizer that updates weights with operators on lists of tensors, as is usual on accelerators."""
        return torch.optim.SGD(self.parameters(), LEARNING_RATE, 0.99, nesterov=True, weight_decay=3e-5, foreach=True)


def starts(length: int, size: int) -> list[int]:
    """Return the starts of windows that cover an axis and overlap by half.

    Parameters
    ----------
    length : length of the axis in voxels
    size : length of a window in voxels
    """
    return [*range(0, max(length - size, 0), size // 2), max(length - size, 0)]


def bell(size: int, like: Tensor) -> Tensor:
    """Return the weights of a window's voxels, (size, size, size) float: 1 at its centre, halved at an eighth of `size`
    from it.

    like : tensor whose dtype and device the weights get
    """
    away = torch.linspace(-4.0, 4.0, size, dtype=like.dtype, device=like.device)
    line = torch.exp2(-(away**2))
    return torch.einsum("i,j,k->ijk", line, line, line).clamp_min(1e-4)


def unet3d(batch_size: int = 1, run: str = "predict") -> tuple[UNet3D, dict[str, Any]]:
    """Return the network with random weights, and arguments for it by name.

    Parameters
    ----------
    batch_size : number of volumes
    run : `predict` for volumes of 68x60x44 voxels; `loss` or `train` for 48x48x48 voxels with labels
    """
    if run == "predict":
        return UNet3D(), {"volume": torch.randn(batch_size, 1, 68, 60, 44)}
    size = (batch_size, WINDOW, WINDOW, WINDOW)
    return UNet3D(), {"volume": torch.randn(size).unsqueeze(1), "labels": torch.randint(0, CLASSES, size)}
