"""Properties of every shipped sample."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from implementations import compare, gradients, jax_results
from optional import optional

from opgrip.capture.grip.gripped import Running
from opgrip.capture.grip.sample_folder import source_tags
from opgrip.samples import Sample, samples

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


@pytest.mark.parametrize("sample", [pytest.param(sample, id=sample.name) for sample in SAMPLES if sample.has_jax()])
def test_jax_returns_the_same_results(sample: Sample) -> None:
    optional("jax")
    arguments = sample.arguments()
    met = jax_results(sample.jax(), sample.arguments())
    compare(met, run(sample, arguments), sample.rtol, sample.atol, dtypes=True)
