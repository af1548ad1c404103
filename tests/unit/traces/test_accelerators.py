"""Accelerator facts in a trace, with stand-ins for CUDA and NVML: no GPU is needed."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from nvml import UUID, Nvml, properties_of

from opgrip.traces.schema.arguments import TensorSpec
from opgrip.traces.schema.records import OPERATOR, Signature
from opgrip.traces.table.accelerators import describe_accelerators, device_of, facts_in_words, merge_facts

H200 = SimpleNamespace(
    uuid=UUID, name="NVIDIA H200", total_memory=150 << 30, L2_cache_size=50 << 20, multi_processor_count=132
)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    nvml = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: H200)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    return nvml


def test_gpu_is_described_by_torch_and_nvml(gpu: Nvml) -> None:
    facts = describe_accelerators(["cuda:0"])
    assert facts["devices"]["cuda:0"] == {
        "name": "NVIDIA H200",
        "capability": "9.0",
        "multiprocessors": 132,
        "memory_bytes": 150 << 30,
        "l2_bytes": 50 << 20,
        "power_limit_w": 700.0,
        "max_sm_mhz": 1980.0,
        "max_memory_mhz": 3201.0,
        "ecc": True,
        "mig": False,
    }
    versions = {"driver": "550.54.15", "driver_cuda": "12.4", "cuda": "12.8", "cudnn": "9.10.2", "nccl": "2.27.3"}
    assert facts["libraries"] == versions
    assert facts["settings"]["allocator"] == "native"
    assert gpu.closed


def test_settings_are_read_at_the_time_of_the_call(gpu: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "allow_bf16_reduced_precision_reduction"
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    before = describe_accelerators(["cuda:0"])["settings"]
    assert before["environment"] == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert set(before["attention"]) >= {"flash", "math"}
    assert before[name] is True
    assert before["fp32_precision"]["cudnn.conv"] == "tf32"
    torch.backends.cuda.enable_flash_sdp(False)
    setattr(torch.backends.cuda.matmul, name, False)
    native = getattr(torch.backends, "python_native", None)
    try:
        with nullcontext() if native is None else native.triton.disabled():
            after = describe_accelerators(["cuda:0"])["settings"]
    finally:
        torch.backends.cuda.enable_flash_sdp(True)
        setattr(torch.backends.cuda.matmul, name, True)
    assert "flash" not in after["attention"]
    assert after[name] is False
    assert [facts.get("triton_kernels") for facts in (before, after)] == (
        [None] * 2 if native is None else [True, False]
    )


def test_unavailable_facts_are_left_out(gpu: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", refuse)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties_of)
    facts = describe_accelerators(["cuda:0"])
    assert facts["devices"] == {"cuda:0": {}}
    assert "driver_cuda" not in facts["libraries"]


@pytest.mark.parametrize(
    "strange",
    [None, [], "x", {"devices": 3}, {"devices": {"cuda:0": []}}, {"libraries": [1], "settings": {"a_bytes": {}}}],
)
def test_untrusted_facts_are_printed_as_lines(strange: object) -> None:
    assert all(isinstance(text, str) for _, text in facts_in_words(strange))


def test_facts_of_two_ranks_are_merged() -> None:
    first = {"devices": {"cuda:0": {"name": "A"}}, "libraries": {"cuda": "12.4"}}
    second = {"devices": {"cuda:1": {"name": "B"}}, "libraries": {"cuda": "12.8"}}
    joined = merge_facts(first, second)
    assert joined == {"devices": {"cuda:0": {"name": "A"}, "cuda:1": {"name": "B"}}, "libraries": {"cuda": "12.8"}}


def test_call_is_on_the_first_accelerator_among_its_tensors() -> None:
    def spec(device: str) -> TensorSpec:
        return TensorSpec((2,), (1,), torch.float32, device)

    def call(args: tuple[object, ...], outputs: object = None) -> Signature:
        return Signature(0, OPERATOR, "aten.x", args, {}, outputs)

    assert device_of(call((spec("cpu"), [spec("cuda:1"), spec("cuda:0")]))) == "cuda:1"
    assert device_of(call((3,), spec("xpu:0"))) == "xpu:0"
    assert device_of(call((spec("meta"),), spec("meta"))) == "meta"
    assert device_of(call((3,))) == "cpu"
