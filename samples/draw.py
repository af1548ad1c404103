"""Draws arguments that look like those of the models."""

from __future__ import annotations

import torch
from torch import Tensor


class Draw:
    """Random tensors on the CPU, the same for the same seed.

    Parameters
    ----------
    seed : of its generator; torch's own is left alone

    Attributes
    ----------
    generator : for what has no method here
    """

    def __init__(self, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, mean: float = 0.0, std: float = 1.0, grad: bool = False) -> Tensor:
        """Float32 numbers; `grad` asks for the gradient of what is drawn, here and below."""
        return (torch.randn(shape, generator=self.generator) * std + mean).requires_grad_(grad)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0, grad: bool = False) -> Tensor:
        """Float32 numbers from `low` to `high`."""
        return (torch.rand(shape, generator=self.generator) * (high - low) + low).requires_grad_(grad)

    def integers(self, *shape: int, low: int = 0, high: int) -> Tensor:
        """Int64 numbers from `low` to below `high`, such as labels of classes."""
        return torch.randint(low, high, shape, generator=self.generator)

    def mask(self, *shape: int, share: float = 0.5) -> Tensor:
        """Booleans, of which about a share is true."""
        return torch.rand(shape, generator=self.generator) < share

    def permutation(self, count: int) -> Tensor:
        """The numbers below `count`, shuffled."""
        return torch.randperm(count, generator=self.generator)

    def distribution(self, *shape: int, grad: bool = False) -> Tensor:
        """Float32 probabilities that sum to one over the last dimension."""
        return torch.randn(shape, generator=self.generator).softmax(dim=-1).requires_grad_(grad)

    def boxes(
        self, count: int, size: tuple[float, float] = (800.0, 1333.0), smallest: float = 8.0, grad: bool = False
    ) -> Tensor:
        """Boxes in an image, (count, 4) float32, x1 y1 x2 y2 in pixels.

        Parameters
        ----------
        size : of the image, height and width
        smallest : width and height, which go up to half of the image's, small ones being frequent
        """
        whole = torch.tensor([size[1], size[0]])
        extent = smallest * (whole / 2 / smallest) ** torch.rand(count, 2, generator=self.generator)
        corner = torch.rand(count, 2, generator=self.generator) * (whole - extent)
        return torch.cat([corner, corner + extent], dim=1).requires_grad_(grad)

    def near(self, boxes: Tensor, shift: float = 0.1, grad: bool = False) -> Tensor:
        """Boxes, (N, 4), each moved and stretched by about a share of its size, as a detector's guesses are."""
        extent = (boxes[:, 2:] - boxes[:, :2]).detach()
        noise = torch.randn(len(boxes), 4, generator=self.generator) * shift
        corner = boxes[:, :2].detach() + noise[:, :2] * extent
        return torch.cat([corner, corner + extent * noise[:, 2:].exp()], dim=1).requires_grad_(grad)
