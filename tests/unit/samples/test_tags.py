"""Tags of the shipped samples, compared with the tags that the gripper assigns."""

from __future__ import annotations

import pytest
import torch

from opgrip.capture.grip.running import Running
from opgrip.capture.grip.source.folder import source_tags
from opgrip.samples import Sample, samples

OF_SOURCE = {"ForLoop", "IfElseBranch"}


@pytest.mark.parametrize("sample", [pytest.param(sample, id=sample.name) for sample in samples().values()])
def test_tags_are_what_source_and_run_show(sample: Sample) -> None:
    declared = {tag.value for tag in sample.tags}
    ran: set[str] = set()
    for configuration in sample.configurations:
        arguments = sample.arguments(configuration)
        torch.manual_seed(0)
        with Running() as running:
            sample.function(*arguments)
        ran |= running.tags
    # more may be declared: tolist, for example, reads values without an operator
    assert ran <= declared
    assert source_tags(sample.function) & OF_SOURCE == declared & OF_SOURCE
