"""The built-in models of other kinds than detectors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from opgrip.capture.models.factory import program_of
from opgrip.samples.models.dlrm import DLRM
from opgrip.samples.models.gan import gan
from opgrip.samples.models.unet import UNet


def small_dlrm() -> tuple[nn.Module, Any]:
    categories = [torch.tensor([0, 1, 2]), torch.tensor([3, 3])]
    inputs = {"dense": torch.randn(2, 13), "categories": categories, "offsets": [torch.tensor([0, 1])] * 2}
    return DLRM((10, 5), 8, (16, 8), (16, 1)), {**inputs, "clicks": torch.tensor([0.0, 1.0])}


def small_unet() -> tuple[nn.Module, Any]:
    return UNet(32, (1, 2), blocks=1), {"images": torch.randn(2, 3, 16, 16), "steps": torch.tensor([0, 999])}


@pytest.mark.parametrize("factory", [small_dlrm, small_unet, lambda: gan(2, "train")])
def test_a_built_in_model_learns_with_its_own_optimizers(factory: Any) -> None:
    torch.manual_seed(0)
    model, inputs = factory()
    program = program_of(model, inputs, "train", "model")
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    loss = program.step(program.inputs())
    assert loss.isfinite()
    same = [name for name, value in model.named_parameters() if torch.equal(value, before[name])]
    assert not same


def test_only_the_rows_that_were_read_learn() -> None:
    model, inputs = small_dlrm()
    before = model.tables[0].weight.detach().clone()  # type: ignore[index,union-attr]
    program_of(model, inputs, "train", "dlrm").step(inputs)
    changed = (model.tables[0].weight != before).any(dim=1)  # type: ignore[index,union-attr]
    assert changed.nonzero().flatten().tolist() == [0, 1, 2]


def test_a_denoised_image_is_as_large_as_the_noisy_one() -> None:
    model, inputs = small_unet()
    assert program_of(model, inputs, "predict", "unet").step(inputs).shape == inputs["images"].shape
