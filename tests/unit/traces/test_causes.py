"""Short messages for errors that torch raises."""

from __future__ import annotations

import pytest
import torch

from opgrip.errors import UserError, cause_of, one_line, shortened
from opgrip.platform.machine import check_device


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        (
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
            "allocate 4503599627370496 bytes. Error code 12 (Cannot allocate memory)",
            "out of memory: 5 PB were asked for",
        ),
        (
            "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139.72 GiB of which 3.01 "
            "GiB is free. Including non-PyTorch memory, this process has 1 GiB memory in use.",
            "out of memory: 20.00 GiB were asked for, and 3.01 GiB of 139.72 GiB on the GPU are free",
        ),
        (
            "The NVIDIA driver on your system is too old (found version 12020). Please update your GPU driver ...",
            "the NVIDIA driver is too old for this torch: it knows CUDA 12.2",
        ),
        ("Torch not compiled with CUDA enabled", "this torch is built without CUDA"),
        (
            "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported",
            "CUDA error: device-side assert triggered",
        ),
        (
            "Could not run 'aten::nms' with arguments from the 'MPS' backend. This could be because ...",
            "aten::nms has no kernel for MPS",
        ),
        ("mat1 and mat2\nshapes " + "x" * 500, "RuntimeError: mat1 and mat2 shapes " + "x" * 500),
    ],
)
def test_common_errors_are_shortened_and_others_kept(message: str, cause: str) -> None:
    assert cause_of(RuntimeError(message)) == cause


def test_real_out_of_memory_error_names_the_requested_size() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50)
    assert cause_of(caught.value).startswith("out of memory: ")
    assert cause_of(caught.value).endswith(" were asked for")


def test_shortened_text_ends_with_a_whole_word() -> None:
    assert shortened("three words here", 13) == "three ..."
    assert shortened("three words here", 16) == "three words here"
    assert one_line(ValueError("many words " * 30), 40).endswith("words ...")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("foo", "'foo' is not a device known to torch: name one such as cpu, cuda or cuda:1"),
        ("cuda:x", "'cuda:x' is not a device known to torch: "),
        ("cuda:256", "'cuda:256' is not a device known to torch: "),
        ("mtia", "no MTIA device here: "),
    ],
)
def test_missing_device_is_one_clear_line(name: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        check_device(name)
    assert str(caught.value).startswith(message)
    assert len(str(caught.value)) < 200
