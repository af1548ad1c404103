"""Built-in models other than detectors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from opgrip.capture.models.factory import program_of
from opgrip.samples.models.dlrm import DLRM
from opgrip.samples.models.gan import gan
from opgrip.samples.models.gat import GAT, softmax_by
from opgrip.samples.models.sac import SAC, sac
from opgrip.samples.models.speech import SpeechRecognizer, read
from opgrip.samples.models.unet import UNet
from opgrip.samples.models.unet3d import UNet3D


def small_dlrm() -> tuple[nn.Module, Any]:
    categories = [torch.tensor([0, 1, 2]), torch.tensor([3, 3])]
    inputs = {"dense": torch.randn(2, 13), "categories": categories, "offsets": [torch.tensor([0, 1])] * 2}
    return DLRM((10, 5), 8, (16, 8), (16, 1)), {**inputs, "clicks": torch.tensor([0.0, 1.0])}


def small_unet() -> tuple[nn.Module, Any]:
    return UNet(32, (1, 2), blocks=1), {"images": torch.randn(2, 3, 16, 16), "steps": torch.tensor([0, 999])}


def small_speech() -> tuple[nn.Module, Any]:
    inputs = {"sounds": torch.randn(2, 6400), "lengths": torch.tensor([6400, 4800])}
    texts = {"texts": torch.randint(1, 29, (2, 3)), "text_lengths": torch.tensor([3, 2])}
    return SpeechRecognizer(16, 1), inputs | texts


def small_gat() -> tuple[nn.Module, Any]:
    x, edges = torch.randn(5, 4), torch.tensor([[0, 1, 3, 3], [1, 0, 4, 4]])
    graph = torch.tensor([0, 0, 1, 1, 1])
    return GAT(4, 3, 2, 6), {"x": x, "edges": edges, "graph": graph, "labels": torch.tensor([1, 5, -1, 0, -1])}


def small_unet3d() -> tuple[nn.Module, Any]:
    size = (1, 8, 8, 8)
    return UNet3D((4, 6), 8), {"volume": torch.randn(size).unsqueeze(1), "labels": torch.randint(0, 4, size)}


def small_sac() -> tuple[nn.Module, Any]:
    return SAC(width=8), sac(4, "train")[1]


@pytest.mark.parametrize(
    ("factory", "resting"),
    [
        *((factory, ()) for factory in (small_dlrm, small_unet, lambda: gan(2, "train"), small_speech, small_unet3d)),
        # graph indices do not depend on the nodes' labels
        (small_gat, ("graphs.",)),
        # initially they equal the networks that they follow
        (small_sac, ("followers.",)),
    ],
)
def test_builtin_model_trains_with_its_own_optimizers(factory: Any, resting: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    model, inputs = factory()
    program = program_of(model, inputs, "train", "model")
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    loss = program.step(program.inputs())
    assert loss.isfinite()
    same = [name for name, value in model.named_parameters() if torch.equal(value, before[name])]
    assert same == [name for name in before if name.startswith(resting)]


def test_only_embedding_rows_that_were_read_are_trained() -> None:
    model, inputs = small_dlrm()
    before = model.tables[0].weight.detach().clone()  # type: ignore[index,union-attr]
    program_of(model, inputs, "train", "dlrm").step(inputs)
    changed = (model.tables[0].weight != before).any(dim=1)  # type: ignore[index,union-attr]
    assert changed.nonzero().flatten().tolist() == [0, 1, 2]


def test_denoised_image_has_the_size_of_the_noisy_one() -> None:
    model, inputs = small_unet()
    assert program_of(model, inputs, "predict", "unet").step(inputs).shape == inputs["images"].shape


def test_volume_larger_than_a_window_has_a_class_everywhere() -> None:
    model, _ = small_unet3d()
    volume = torch.randn(1, 1, 11, 6, 8)
    classes = program_of(model, {"volume": volume}, "predict", "unet3d").step({"volume": volume})
    assert classes.shape == (1, 11, 6, 8)
    assert 0 <= int(classes.min()) <= int(classes.max()) < 4


def test_adjacent_equal_letters_are_read_once() -> None:
    frames = torch.tensor([[3, 3, 0, 3, 5, 5, 7]])
    scores = torch.nn.functional.one_hot(frames.T, 29).float()
    (letters,) = read(scores, torch.tensor([6]))
    assert letters.tolist() == [3, 3, 5]


def test_grouped_softmax_equals_the_softmax_of_each_group() -> None:
    scores = torch.randn(5, 2)
    group = torch.tensor([2, 0, 2, 0, 2])
    result = softmax_by(scores, group, 3)
    for each in (0, 2):
        torch.testing.assert_close(result[group == each], scores[group == each].softmax(0))
