"""The built-in detector predicts and learns."""

from __future__ import annotations

import torch

from opgrip.samples.models.faster_rcnn import faster_rcnn


def test_it_detects_something_at_random_weights() -> None:
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


def test_every_parameter_learns_and_the_loss_falls() -> None:
    torch.manual_seed(0)
    model, inputs = faster_rcnn(batch_size=2, input_size=(128, 128), run="train")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        values = model(**inputs)
        assert set(values) == {"rpn_cls", "rpn_box", "roi_cls", "roi_box"}
        loss = sum(values.values())
        loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]
