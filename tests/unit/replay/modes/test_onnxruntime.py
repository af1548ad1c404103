"""ONNX Runtime's providers for a GPU. No GPU is needed: the tests check the requested providers, not their work."""

from collections.abc import Iterator

import pytest
import torch
from optional import needs_mode
from runtime_calls import run

from opgrip.platform.precisions import read_precision, set_precision
from opgrip.replay.modes import Task
from opgrip.replay.modes.onnxruntime import CPU, CUDA, cuda_provider, run_by
from opgrip.replay.operators.contexts import may_use_tf32
from opgrip.replay.operators.lookup import Unsupported

PLACES = ("cuda.matmul", "cudnn.conv")
installed = needs_mode("onnxruntime")


@pytest.fixture
def precisions() -> Iterator[None]:
    before = {place: read_precision(place) for place in PLACES}
    if None in before.values():
        pytest.skip("torch has one precision for all places")
    yield
    for place, value in before.items():
        set_precision(place, value)


def test_session_uses_the_device_of_the_call() -> None:
    for device, index in {"cuda:0": "0", "cuda:3": "3"}.items():
        assert cuda_provider(device, [])[1]["device_id"] == index


def test_session_uses_tf32_as_torch_does(precisions: None) -> None:
    def uses_tf32(*operators: str) -> str:
        return cuda_provider("cuda:0", operators)[1]["use_tf32"]

    set_precision("cuda.matmul", "ieee")
    set_precision("cudnn.conv", "tf32")
    assert (uses_tf32("aten.mm"), uses_tf32("aten.conv2d"), uses_tf32("aten.conv2d", "aten.linear")) == ("0", "1", "0")
    set_precision("cuda.matmul", "tf32")
    assert (uses_tf32("aten.mm"), uses_tf32("aten.conv2d", "aten.linear")) == ("1", "1")
    set_precision("cudnn.conv", "ieee")
    assert (uses_tf32("aten.mm"), uses_tf32("aten.convolution")) == ("1", "0")


@pytest.mark.parametrize("name", ["baddbmm", "_addmm_activation", "_scaled_dot_product_efficient_attention", "linear"])
def test_tf32_operators_are_recognized_by_name(name: str, precisions: None) -> None:
    set_precision("cuda.matmul", "tf32")
    set_precision("cudnn.conv", "ieee")
    assert may_use_tf32([f"aten.{name}"])
    assert not may_use_tf32(["aten.lgamma", "aten.upsample_bilinear2d", "aten._convert_indices_from_coo_to_csr"])


@installed
@pytest.mark.filterwarnings("ignore:Specified provider")
def test_session_that_falls_back_to_the_cpu_is_unsupported() -> None:
    task = Task(torch.ops.aten.relu.default, (torch.randn(3),), {})
    with pytest.raises(Unsupported, match=f"^ONNX Runtime cannot load its {CUDA}: "):
        run_by(task, lambda operators: [cuda_provider("cuda:0", operators), (CPU, {})])


@installed
def test_missing_tensorrt_reports_what_to_install() -> None:
    message = "^this onnxruntime has no TensorrtExecutionProvider: install onnxruntime-gpu and tensorrt$"
    with pytest.raises(Unsupported, match=message):
        run("tensorrt", torch.relu, torch.ones(3), device="cuda:0")
    with pytest.raises(Unsupported, match=f"^this onnxruntime has no {CUDA}: install onnxruntime-gpu$"):
        run("onnxruntime", torch.relu, torch.ones(3), device="cuda:0")
