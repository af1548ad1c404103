"""Diffusion model: a U-Net that removes noise from images."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

GROUPS = 32
STEPS = 1000
"""Number of steps from an image to noise."""
LEARNING_RATE = 1e-4


class ResidualBlock(nn.Module):
    """Two convolutions with a shortcut; the embedding of the time step is added between them.

    Source: Ho et al. 2020, appendix B.
    """

    def __init__(self, inputs: int, outputs: int, time: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(GROUPS, inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.time = nn.Linear(time, outputs)
        self.norm2 = nn.GroupNorm(GROUPS, outputs)
        self.dropout = nn.Dropout(dropout)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.shortcut: nn.Module = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """Return features (B, outputs, H, W) float.

        Parameters
        ----------
        x : (B, inputs, H, W) float
        time : (B, time) float, embedding of the time step
        """
        hidden = self.conv1(functional.silu(self.norm1(x)))
        hidden = hidden + self.time(functional.silu(time))[:, :, None, None]
        hidden = self.conv2(self.dropout(functional.silu(self.norm2(hidden))))
        return hidden + self.shortcut(x)  # type: ignore[no-any-return]


class SpatialAttention(nn.Module):
    """Self-attention between all positions of a map of features.

    Parameters
    ----------
    width : number of channels
    heads : number of attention heads
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(GROUPS, width)
        self.queries_keys_values = nn.Conv2d(width, 3 * width, 1)
        self.out = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the features plus the result of the attention; both are (B, width, H, W) float."""
        batch, width, height, columns = x.shape
        projected = self.queries_keys_values(self.norm(x)).reshape(batch, 3, self.heads, -1, height * columns)
        queries, keys, values = projected.transpose(3, 4).unbind(1)
        seen = functional.scaled_dot_product_attention(queries, keys, values)
        return x + self.out(seen.transpose(2, 3).reshape(batch, width, height, columns))  # type: ignore[no-any-return]


class Stage(nn.Module):
    """A residual block, followed by attention if `heads` is not 0.

    Parameters
    ----------
    inputs, outputs : number of channels before and after the block
    time : length of the embedding of the time step
    heads : number of attention heads
    """

    def __init__(self, inputs: int, outputs: int, time: int, heads: int) -> None:
        super().__init__()
        self.block = ResidualBlock(inputs, outputs, time)
        self.attention: nn.Module = SpatialAttention(outputs, heads) if heads else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """Return features (B, outputs, H, W) float.

        Parameters
        ----------
        x : (B, inputs, H, W) float
        time : (B, time) float, embedding of the time step
        """
        return self.attention(self.block(x, time))  # type: ignore[no-any-return]


class UNet(nn.Module):
    """Network that predicts the noise in images, with one step of a sampler for predictions, and the loss for training.

    Parameters
    ----------
    width : channels of the first level
    multiples : channels of each level, as a multiple of `width`
    attended : indices of the levels with attention
    blocks : residual blocks per level on the way down; there is one more on the way up
    heads : number of attention heads

    Source: Ho et al. 2020; Song et al. 2021 for the step of a prediction.
    """

    alphas: Tensor

    def __init__(
        self,
        width: int = 128,
        multiples: tuple[int, ...] = (1, 2, 2, 2),
        attended: tuple[int, ...] = (1,),
        blocks: int = 2,
        heads: int = 4,
    ) -> None:
        super().__init__()
        time, channels = 4 * width, [width]
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        for level, multiple in enumerate(multiples):
            for _ in range(blocks):
                self.down.append(Stage(channels[-1], width * multiple, time, heads if level in attended else 0))
                channels.append(width * multiple)
            if level < len(multiples) - 1:
                self.down.append(nn.Conv2d(channels[-1], channels[-1], 3, 2, 1))
                channels.append(channels[-1])
        inner = channels[-1]
        self.middle = nn.ModuleList([Stage(inner, inner, time, heads), Stage(inner, inner, time, 0)])
        for level, multiple in reversed([*enumerate(multiples)]):
            for _ in range(blocks + 1):
                inputs, inner = inner + channels.pop(), width * multiple
                self.up.append(Stage(inputs, inner, time, heads if level in attended else 0))
            if level:
                self.up.append(nn.Conv2d(inner, inner, 3, padding=1))
        self.norm = nn.GroupNorm(GROUPS, width)
        self.last = nn.Conv2d(width, 3, 3, padding=1)
        # share of the image that remains after each step
        self.register_buffer("alphas", torch.cumprod(1 - torch.linspace(1e-4, 0.02, STEPS), dim=0))

    def forward(self, images: Tensor, steps: Tensor) -> Tensor:
        """Return images with less noise in evaluation mode, or the loss of the predicted noise in training mode.

        Parameters
        ----------
        images : (B, 3, H, W) float: noisy images in evaluation mode, clean ones in training mode
        steps : (B,) int64, time step of each image; the higher, the more noise
        """
        share = self.alphas[steps][:, None, None, None]
        if not self.training:
            noise = self.noise(images, steps)
            clean = ((images - (1 - share).sqrt() * noise) / share.sqrt()).clamp(-1, 1)
            # as far back as a sampler of twenty steps
            earlier = self.alphas[(steps - STEPS // 20).clamp(min=0)][:, None, None, None]
            return earlier.sqrt() * clean + (1 - earlier).sqrt() * noise
        noise = torch.randn_like(images)
        return functional.mse_loss(self.noise(share.sqrt() * images + (1 - share).sqrt() * noise, steps), noise)

    def noise(self, images: Tensor, steps: Tensor) -> Tensor:
        """Return the noise that the network predicts in noisy images; both are (B, 3, H, W) float.

        steps : (B,) int64, time step of each image
        """
        time = self.time(step_embedding(steps, self.width))
        x = self.first(images)
        passed = [x]
        for layer in self.down:
            x = layer(x, time) if isinstance(layer, Stage) else layer(x)
            passed.append(x)
        for layer in self.middle:
            x = layer(x, time)
        for layer in self.up:
            if isinstance(layer, Stage):
                x = layer(torch.cat([x, passed.pop()], dim=1), time)
            else:
                x = layer(functional.interpolate(x, scale_factor=2.0, mode="nearest"))
        return self.last(functional.silu(self.norm(x)))  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW, the usual optimizer of diffusion models."""
        return torch.optim.AdamW(self.parameters(), lr=LEARNING_RATE)


def step_embedding(steps: Tensor, width: int) -> Tensor:
    """Return the sines and cosines of time steps at decreasing frequencies, (B, width) float.

    The wavelengths range from 2 pi to about 20,000 pi steps.

    Parameters
    ----------
    steps : (B,) int64
    width : number of features, half of them sines

    Source: Vaswani et al. 2017, section 3.5.
    """
    half = width // 2
    rates = torch.exp(-math.log(10_000) * torch.arange(half, device=steps.device) / half)
    angles = steps[:, None].float() * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def unet(batch_size: int = 2, input_size: tuple[int, int] = (32, 32)) -> tuple[UNet, dict[str, Any]]:
    """Return the model with random weights, and arguments for it by name: images and their time steps, both random.

    Parameters
    ----------
    batch_size : number of images
    input_size : height and width of the images in pixels, multiples of 8
    """
    images = torch.randn(batch_size, 3, *input_size)
    return UNet(), {"images": images, "steps": torch.randint(0, STEPS, (batch_size,))}
