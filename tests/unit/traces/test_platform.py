"""The machine's memory, precisions, private names of torch, and short messages for errors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from opgrip.errors import UserError, cause_of, one_line, shortened
from opgrip.platform import machine
from opgrip.platform.machine import check_device
from opgrip.platform.precisions import allows_tf32, read_precision, set_precision
from opgrip.platform.private_apis import FOUND, PrivatePlaces

MB = 1 << 20


def container(folder: Path, most: str, used: int, idle_files: int) -> None:
    (folder / "memory.max").write_text(f"{most}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon {used - idle_files}\ninactive_file {idle_files}\nactive_file 7\n")


def test_file_cache_of_a_container_counts_as_free_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    container(tmp_path, str(100 * MB), used=90 * MB, idle_files=60 * MB)
    assert machine.free_memory("cpu") == 70 * MB


@pytest.mark.skipif(read_precision("cuda.matmul") is None, reason="torch has one precision for all places")
def test_old_and_new_settings_determine_tf32() -> None:
    assert not allows_tf32("cuda.matmul")
    before = read_precision("cuda.matmul")
    try:
        torch.set_float32_matmul_precision("high")
        assert allows_tf32("cuda.matmul")
        torch.set_float32_matmul_precision("highest")
        assert not allows_tf32("cuda.matmul")
        set_precision("cuda.matmul", "tf32")
        assert allows_tf32("cuda.matmul")
    finally:
        set_precision("cuda.matmul", before)


def test_existing_private_names_are_used_and_missing_ones_replaced() -> None:
    import torch

    places = PrivatePlaces()
    assert places.take("torch.UntypedStorage", None, "nothing") is torch.UntypedStorage
    assert places.take("torch._C._no_such_thing.at_all", 7, "seven") == 7
    assert places.take_later("torch._C._no_such_thing", 8, "eight")() == 8
    assert places.take_later("torch._no_such_module.thing", 9, "nine")() == 9
    assert places.report() == {
        "torch.UntypedStorage": FOUND,
        "torch._C._no_such_thing.at_all": "seven",
        "torch._C._no_such_thing": "eight",
        "torch._no_such_module.thing": "nine",
    }


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        (
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
            "allocate 4503599627370496 bytes. Error code 12 (Cannot allocate memory)",
            "out of memory: 5 PB were requested",
        ),
        (
            "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139.72 GiB of which 3.01 "
            "GiB is free. Including non-PyTorch memory, this process has 1 GiB memory in use.",
            "out of memory: 20.00 GiB were requested, and 3.01 GiB of 139.72 GiB on the GPU are free",
        ),
        (
            "The NVIDIA driver on your system is too old (found version 12020). Please update your GPU driver ...",
            "the NVIDIA driver is too old for this torch: it supports CUDA 12.2",
        ),
        (
            "Could not run 'aten::nms' with arguments from the 'MPS' backend. This could be because ...",
            "aten::nms has no kernel for MPS",
        ),
        (
            f"not {torch.ones(2, 2, dtype=torch.half)}, {torch.tensor(3.0)!r} or {np.ones(3)!r}: give the tensor(s)",
            "RuntimeError: not tensor(...), tensor(...) or array(...): give the tensor(s)",
        ),
        ("mat1 and mat2\nshapes " + "x" * 500, "RuntimeError: mat1 and mat2 shapes " + "x" * 500),
    ],
)
def test_common_errors_are_shortened_and_others_kept(message: str, cause: str) -> None:
    assert cause_of(RuntimeError(message)) == cause


def test_shortened_text_ends_with_a_whole_word() -> None:
    assert shortened("three words here", 13) == "three ..."
    assert shortened("three words here", 16) == "three words here"
    assert one_line(ValueError("many words " * 30), 40).endswith("words ...")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("foo", "'foo' is not a device known to torch: name one such as cpu, cuda or cuda:1"),
        ("cuda:256", "'cuda:256' is not a device known to torch: "),
        ("mtia", "no MTIA device here: "),
    ],
)
def test_missing_device_is_one_clear_line(name: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        check_device(name)
    assert str(caught.value).startswith(message)
    assert len(str(caught.value)) < 200
