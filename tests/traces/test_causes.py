"""What is said of errors of torch."""

from __future__ import annotations

import pytest
import torch

from opgrip.traces.causes import cause_of
from opgrip.traces.devices import check_device
from opgrip.traces.errors import UserError

DRIVER = (
    "The NVIDIA driver on your system is too old (found version 12020). Please update your GPU driver by downloading "
    "and installing a new version"
)


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
                "you tried to allocate 78643199213568 bytes. Error code 12 (Cannot allocate memory)"
            ),
            "this machine has not enough memory for 78,643.2 GB more",
        ),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 8"),
            "the GPU has not enough memory for 20.00 GiB more",
        ),
        (MemoryError(), "this machine has not enough memory"),
        (RuntimeError(DRIVER), "the NVIDIA driver, of CUDA 12.2, is too old for this torch"),
        (AssertionError("Torch not compiled with CUDA enabled"), "this torch was built without CUDA"),
        (ValueError("no weights\nat all"), "ValueError: no weights at all"),
        (ValueError("w" * 5000), f"ValueError: {'w' * 5000}"),
        (KeyError(), "KeyError"),
    ],
)
def test_common_causes_are_told_in_few_words_and_others_whole(error: BaseException, cause: str) -> None:
    assert cause_of(error) == cause


def test_too_little_memory_of_this_torch_is_one() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 55)
    assert cause_of(caught.value).startswith("this machine has not enough memory for ")


def test_a_device_that_torch_does_not_know_is_told_with_those_that_it_does() -> None:
    with pytest.raises(UserError, match=r"no device 'warp:0' here \(torch knows cpu, cuda, .*\): choose another"):
        check_device("warp:0")
