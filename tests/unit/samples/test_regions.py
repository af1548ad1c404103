"""Pooling, detections and losses of the second stage, compared with a calculation by hand."""

from __future__ import annotations

from math import exp, log

import pytest
import torch

from opgrip.samples.boxes.roi_align import roi_align
from opgrip.samples.models.regions import RegionHead, RegionPooler

STRIDES = (4, 8, 16, 32)


@pytest.fixture
def levels() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 4, 256 // stride, 256 // stride, generator=generator) for stride in STRIDES]


@pytest.fixture
def head() -> RegionHead:
    """Return a head with the same output for every region: probably class 1, and half a unit to the right."""
    head = RegionHead(width=4, strides=STRIDES, classes=2, hidden=8)
    for parameter in head.parameters():
        torch.nn.init.zeros_(parameter)
    with torch.no_grad():
        head.classifier.bias.copy_(torch.tensor([0.0, 5.0, 0.0]))
        # class 0 moves boxes far away, which shows if its deltas are used for class 1
        head.regressor.bias.copy_(torch.tensor([9.0, 0, 0, 0, 0.5, 0, 0, 0]))
    return head


def test_each_box_is_pooled_from_its_image_and_level(levels: list[torch.Tensor]) -> None:
    large, small, middle = [5.0, 5, 240, 245], [10.0, 20, 40, 44], [30.0, 8, 150, 160]
    pooled = RegionPooler(STRIDES)(levels, [torch.tensor([large, small]), torch.tensor([middle])])
    for row, (box, image, level) in enumerate([(large, 0, 2), (small, 0, 0), (middle, 1, 1)]):
        alone = roi_align(levels[level], torch.tensor([[image, *box]]), 7, 1 / STRIDES[level])
        torch.testing.assert_close(pooled[row], alone[0])


def test_detections_have_the_class_and_its_deltas(head: RegionHead, levels: list[torch.Tensor]) -> None:
    proposals = [torch.tensor([[10.0, 10, 50, 30]]), torch.tensor([[220.0, 100, 255, 140]])]
    first, second = head(levels, proposals, (256, 256))
    assert (first["labels"].tolist(), second["labels"].tolist()) == ([1], [1])
    assert first["scores"].tolist() == pytest.approx([exp(5) / (exp(5) + 2)])
    # half a unit is 0.05 of the width, and images end at 256
    torch.testing.assert_close(first["boxes"], torch.tensor([[12.0, 10, 52, 30]]))
    torch.testing.assert_close(second["boxes"], torch.tensor([[221.75, 100, 256, 140]]))


def test_region_losses_equal_a_manual_calculation(head: RegionHead, levels: list[torch.Tensor]) -> None:
    proposals = [torch.tensor([[4.0, 0, 44, 40], [160, 160, 190, 190]])] * 2
    targets = [{"boxes": torch.tensor([[0.0, 0, 40, 40]]), "labels": torch.tensor([1])}] * 2
    losses = head(levels, proposals, (256, 256), targets)
    # in each image, the shifted proposal and the ground truth itself are of class 1, and the far proposal is background
    spread = log(exp(5) + 2)
    assert losses["roi_cls"].item() == pytest.approx((2 * (spread - 5) + spread) / 3, rel=1e-4)
    # a tenth of the width to the left is one unit: 1.5 from the prediction; the ground truth is 0.5 from it
    assert losses["roi_box"].item() == pytest.approx((1.0 + 0.125) / 3)
