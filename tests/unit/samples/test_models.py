"""Properties of every shipped sample; predictions and training of the built-in models."""

from math import exp, log
from typing import Any

import pytest
import torch
from implementations import compare, gradients, jax_results
from optional import optional
from torch import nn

from opgrip.capture.grip.gripped import Running
from opgrip.capture.grip.sample_folder import source_tags
from opgrip.capture.models.factory import program_of
from opgrip.samples import Sample, samples
from opgrip.samples.boxes.roi_align import roi_align
from opgrip.samples.models.dlrm import DLRM
from opgrip.samples.models.faster_rcnn import faster_rcnn
from opgrip.samples.models.gan import gan
from opgrip.samples.models.gat import GAT, softmax_by
from opgrip.samples.models.proposals import AnchorPredictions, ProposalLoss, ProposalSelector
from opgrip.samples.models.regions import RegionHead, RegionPooler
from opgrip.samples.models.sac import SAC, sac
from opgrip.samples.models.speech import SpeechRecognizer, read
from opgrip.samples.models.unet import UNet
from opgrip.samples.models.unet3d import UNet3D


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


def test_proposals_are_decoded_clipped_suppressed_and_sorted() -> None:
    # of three anchors of a level, the second overlaps the first by more than 0.7
    fine, coarse = (
        torch.tensor([[0.0, 0, 40, 40], [2, 2, 42, 42], [50, 60, 110, 120]]),
        torch.tensor([[0.0, 0, 41, 41]]),
    )
    deltas = torch.zeros(1, 4, 4)
    deltas[0, 2, 0] = 1 / 6  # ten pixels to the right
    predictions = AnchorPredictions(torch.tensor([[0.5, 0.4, 0.9, 0.7]]), deltas, [fine, coarse])
    (found,) = ProposalSelector()(predictions, (90, 100))
    torch.testing.assert_close(found, torch.tensor([[60.0, 60, 100, 90], [0, 0, 41, 41], [0, 0, 40, 40]]))


def test_anchor_losses_equal_a_manual_calculation() -> None:
    anchors = torch.tensor([[0.0, 0, 10, 10], [50, 50, 60, 60]])
    deltas = torch.zeros(2, 2, 4)
    deltas[0, 0, 0] = 0.5
    scores = torch.tensor([[2.0, -1.0], [2.0, -1.0]])
    # the second image is empty, so that both of its anchors are negatives
    truths = [torch.tensor([[0.0, 0, 10, 10]]), torch.zeros(0, 4)]
    losses = ProposalLoss()(AnchorPredictions(scores, deltas, [anchors]), truths)
    object_, nothing = (log(1 + exp(-2)) + log(1 + exp(-1))) / 2, (log(1 + exp(2)) + log(1 + exp(-1))) / 2
    assert float(losses["rpn_cls"]) == pytest.approx((object_ + nothing) / 2)
    assert float(losses["rpn_box"]) == pytest.approx((0.5 - 1 / 18) / 2 / 2)


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


SAMPLES = list(samples().values())
OF_SOURCE = {"ForLoop", "IfElseBranch"}
BY_NAME = [pytest.param(sample, id=sample.name) for sample in SAMPLES]


def run(sample: Sample, arguments: tuple[Any, ...]) -> Any:
    torch.manual_seed(0)
    return sample.function(*arguments)


def test_every_sample_is_described() -> None:
    for sample in SAMPLES:
        documentation = sample.function.__doc__ or ""
        assert sample.summary.endswith("."), sample.name
        assert "Source:" in documentation, sample.name
        assert "Parameters" in documentation, sample.name
        assert sample.project, sample.name
        assert sample.url.startswith("https://"), sample.name
        assert sample.function.__module__.rpartition(".")[2] == sample.name


@pytest.mark.parametrize(
    "part", [slice(1), pytest.param(slice(1, None), marks=pytest.mark.slow)], ids=["first", "others"]
)
@pytest.mark.parametrize("sample", BY_NAME)
def test_every_configuration_repeats_and_has_gradients_and_tags(sample: Sample, part: slice) -> None:
    declared = {tag.value for tag in sample.tags}
    ran: set[str] = set()
    for configuration in list(sample.configurations)[part]:
        arguments = sample.arguments(configuration)
        with Running() as running:
            first = run(sample, arguments)
        ran |= running.tags
        arguments = sample.arguments(configuration)
        again = run(sample, arguments)
        compare(again, first, 0, 0)
        for gradient in gradients(again, arguments):
            assert gradient is None or gradient.isfinite().all()
    # more may be declared: tolist, for example, reads values without an operator
    assert ran <= declared
    assert source_tags(sample.function) & OF_SOURCE == declared & OF_SOURCE


@pytest.mark.slow
@pytest.mark.parametrize("sample", [pytest.param(sample, id=sample.name) for sample in SAMPLES if sample.has_jax()])
def test_jax_returns_the_same_results(sample: Sample) -> None:
    optional("jax")
    arguments = sample.arguments()
    met = jax_results(sample.jax(), sample.arguments())
    compare(met, run(sample, arguments), sample.rtol, sample.atol, dtypes=True)
