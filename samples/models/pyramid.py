"""Small residual network with a feature pyramid."""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut, which adds the input to the result.

    Source: He et al. 2016, figure 2.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Return features (B, outputs, H / stride, W / stride) float, computed from features (B, inputs, H,
        W) float.
        """
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out)) + self.shortcut(x)
        return self.relu(out)  # type: ignore[no-any-return]


class Backbone(nn.Module):
    """Residual network with four stages of two blocks, with half as many channels as ResNet-18.

    channels : number of channels of each stage
    """

    def __init__(self, channels: Sequence[int] = (32, 64, 128, 256)) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, channels[0], 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(channels[0])
        self.relu = nn.ReLU(inplace=True)
        self.pool = nn.MaxPool2d(3, 2, 1)
        inputs = (channels[0], *channels[:-1])
        self.stages = nn.ModuleList(
            nn.Sequential(BasicBlock(before, after, 1 if index == 0 else 2), BasicBlock(after, after, 1))
            for index, (before, after) in enumerate(zip(inputs, channels, strict=True))
        )

    def forward(self, images: Tensor) -> list[Tensor]:
        """Return the features after each stage, with strides of 4, 8, 16 and 32 pixels.

        images : (B, 3, H, W) float
        """
        x = self.pool(self.relu(self.bn1(self.conv1(images))))
        outputs = []
        for stage in self.stages:
            x = stage(x)
            outputs.append(x)
        return outputs


class FeaturePyramid(nn.Module):
    """Computes one map of features for each stage of a backbone, combined with the coarser stages, and one more coarse
    map.

    Parameters
    ----------
    inputs : number of channels of each stage
    width : number of channels of each map

    Source: Lin et al. 2017, section 3.
    """

    def __init__(self, inputs: Sequence[int], width: int) -> None:
        super().__init__()
        self.lateral = nn.ModuleList(nn.Conv2d(channels, width, 1) for channels in inputs)
        self.smooth = nn.ModuleList(nn.Conv2d(width, width, 3, 1, 1) for _ in inputs)

    def forward(self, stages: list[Tensor]) -> list[Tensor]:
        """Return maps of `width` channels with the strides of the stages, and one with twice the last stride.

        stages : features after each stage, finest first
        """
        levels = [lateral(stage) for lateral, stage in zip(self.lateral, stages, strict=True)]
        for index in range(len(levels) - 1, 0, -1):
            size = levels[index - 1].shape[2:]
            levels[index - 1] = levels[index - 1] + functional.interpolate(levels[index], size=size, mode="nearest")
        smoothed = [smooth(level) for smooth, level in zip(self.smooth, levels, strict=True)]
        return [*smoothed, functional.max_pool2d(smoothed[-1], 1, 2)]
