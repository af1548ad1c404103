"""Generative adversarial network: a generator of images, and a discriminator of generated and real ones."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

NOISE = 100
WIDTH = 64
LEARNING_RATE = 2e-4


class GAN(nn.Module):
    """A generator of 64x64 images from noise, and a discriminator of generated and real images.

    Parameters
    ----------
    width : channels of the layers next to the image

    Source: Radford et al. 2016, section 3 and figure 1; Goodfellow et al. 2014 for the losses.
    """

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        widths = (8 * width, 4 * width, 2 * width, width)
        up: list[nn.Module] = []
        down: list[nn.Module] = []
        for index, outputs in enumerate(widths):
            inputs = widths[index - 1] if index else NOISE
            up += [nn.ConvTranspose2d(inputs, outputs, 4, 2 if index else 1, 1 if index else 0, bias=False)]
            up += [nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
            down = [*([nn.BatchNorm2d(outputs)] if outputs != width else []), nn.LeakyReLU(0.2, inplace=True), *down]
            below = widths[index + 1] if index + 1 < len(widths) else 3
            down = [nn.Conv2d(below, outputs, 4, 2, 1, bias=False), *down]
        self.maker = nn.Sequential(*up, nn.ConvTranspose2d(width, 3, 4, 2, 1, bias=False), nn.Tanh())
        self.judge = nn.Sequential(*down, nn.Conv2d(widths[0], 1, 4, bias=False), nn.Flatten(0))
        self.apply(_initialize)

    def forward(self, noise: Tensor, real: Tensor | None = None) -> Tensor | dict[str, Tensor]:
        """Return images (B, 3, 64, 64), or the losses of both networks if real images (B, 3, 64, 64) are given.

        Parameters
        ----------
        noise : (B, 100, 1, 1) float
        """
        images: Tensor = self.maker(noise)
        if real is None:
            return images
        true, false = self.judge(real), self.judge(images.detach())
        judged = _loss(true, 1.0) + _loss(false, 0.0)
        # the generator's loss passes through the discriminator without updating it
        frozen = {name: value.detach() for name, value in self.judge.named_parameters()}
        return {"judge": judged, "maker": _loss(functional_call(self.judge, frozen, (images,)), 1.0)}

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """Return one optimizer for the discriminator and one for the generator."""
        parts = (self.judge, self.maker)
        return [torch.optim.Adam(part.parameters(), lr=LEARNING_RATE, betas=(0.5, 0.999)) for part in parts]


def _loss(scores: Tensor, truth: float) -> Tensor:
    return functional.binary_cross_entropy_with_logits(scores, torch.full_like(scores, truth))


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.normal_(module.weight, 0.0, 0.02)


def gan(batch_size: int = 16, run: str = "predict") -> tuple[GAN, dict[str, Any]]:
    """Return both networks with random weights, and arguments for them by name.

    Parameters
    ----------
    batch_size : number of images
    run : `predict`, `loss` or `train`; the latter two also need real images, which are random here
    """
    inputs: dict[str, Any] = {"noise": torch.randn(batch_size, NOISE, 1, 1)}
    if run != "predict":
        inputs["real"] = torch.rand(batch_size, 3, 64, 64) * 2 - 1
    return GAN(), inputs
