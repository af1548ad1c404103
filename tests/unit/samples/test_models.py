"""Predictions and training of the built-in detector."""

from __future__ import annotations

import pytest
import torch

from opgrip.samples.models.faster_rcnn import faster_rcnn


def test_detector_with_random_weights_detects_objects() -> None:
    torch.manual_seed(0)
    model, inputs = faster_rcnn(batch_size=2, input_size=(128, 160))
    model.eval()
    with torch.no_grad():
        detections = model(**inputs)
    assert len(detections) == 2
    for found in detections:
        assert 0 < len(found["boxes"]) == len(found["scores"]) == len(found["labels"]) <= 100
        assert bool((found["boxes"][:, 2:] >= found["boxes"][:, :2]).all())
        assert float(found["boxes"][:, 0::2].max()) <= 160
        assert float(found["boxes"][:, 1::2].max()) <= 128
        assert bool((found["labels"] < 20).all())


def test_every_parameter_is_trained_and_the_loss_falls() -> None:
    torch.manual_seed(0)
    model, inputs = faster_rcnn(batch_size=1, input_size=(64, 64), run="train")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        values = model(**inputs)
        assert set(values) == {"rpn_cls", "rpn_box", "roi_cls", "roi_box"}
        loss = sum(values.values())
        loss.backward()
        # a loss multiplied by zero has gradients too: require that some are not zero
        assert all(bool(parameter.grad.any()) for parameter in model.parameters())
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize(
    ("loss", "parameter"),
    [
        ("rpn_cls", "rpn.objectness.weight"),
        ("rpn_box", "rpn.deltas.weight"),
        ("roi_cls", "roi_head.classifier.weight"),
        ("roi_box", "roi_head.regressor.weight"),
    ],
)
def test_each_loss_trains_its_own_part(loss: str, parameter: str) -> None:
    torch.manual_seed(0)
    model, inputs = faster_rcnn(batch_size=1, input_size=(96, 96), run="loss")
    model(**inputs)[loss].backward()
    assert bool(model.get_parameter(parameter).grad.any())
    assert bool(model.backbone.conv1.weight.grad.any())


def test_same_seed_gives_the_same_losses() -> None:
    losses = []
    for _ in range(2):
        torch.manual_seed(3)
        model, inputs = faster_rcnn(batch_size=1, input_size=(96, 96), run="loss")
        losses.append({name: float(value.detach()) for name, value in model(**inputs).items()})
    assert losses[0] == losses[1]


def test_training_inputs_have_objects_inside_the_image() -> None:
    assert set(faster_rcnn(run="predict", input_size=(64, 64))[1]) == {"images"}
    for run in ("loss", "train"):
        inputs = faster_rcnn(batch_size=3, input_size=(64, 200), run=run)[1]
        assert inputs["images"].shape == (3, 3, 64, 200)
        boxes = torch.cat([target["boxes"] for target in inputs["targets"]])
        assert bool((boxes[:, 2:] > boxes[:, :2]).all())
        assert float(boxes.min()) >= 0
        assert float(boxes[:, 2].max()) <= 200
        assert float(boxes[:, 3].max()) <= 64
        # objects are distributed along the image's longer side
        assert float(boxes[:, 2].max()) > 64
