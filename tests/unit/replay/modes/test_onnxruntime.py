"""ONNX Runtime's providers for a GPU. No GPU is needed: the tests check the requested providers, not their work."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from optional import needs_mode
from runtime_calls import run

from opgrip.platform.precisions import read_precision, set_precision
from opgrip.replay.modes import Task
from opgrip.replay.modes.conversions.runtimes import TensorCall
from opgrip.replay.modes.onnxruntime import CPU, CUDA, _bound, cuda_provider, run_by
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


def test_session_searches_convolution_algorithms_as_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cuda_provider("cuda:0", [])[1]["cudnn_conv_algo_search"] == "HEURISTIC"
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    assert cuda_provider("cuda:0", [])[1]["cudnn_conv_algo_search"] == "EXHAUSTIVE"


@installed
@pytest.mark.filterwarnings("ignore:Specified provider")
def test_session_that_falls_back_to_the_cpu_is_unsupported() -> None:
    task = Task(torch.ops.aten.relu.default, (torch.randn(3),), {})
    with pytest.raises(Unsupported, match=f"^ONNX Runtime cannot load its {CUDA}: "):
        run_by(task, lambda operators: [cuda_provider("cuda:0", operators), (CPU, {})])


@installed
def test_nodes_that_run_on_the_cpu_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a stand-in for the providers of a session with CUDA; ONNX Runtime itself reports where each node runs."""
    import onnxruntime

    monkeypatch.setattr(onnxruntime.InferenceSession, "get_providers", lambda self: [CUDA, CPU])
    task = Task(lambda x: x.relu() @ x, (torch.randn(3, 3),), {})
    if not hasattr(onnxruntime.InferenceSession, "get_provider_graph_assignment_info"):
        pytest.skip("this onnxruntime does not report it")
    providers = [(CUDA, {}), (CPU, {})]
    with pytest.warns(UserWarning, match="not in available provider names"):
        assert run_by(task, lambda _: providers).note == "2 of 2 nodes on CPU: Relu, MatMul"
    assert not run_by(task, lambda _: providers[1:]).note


def test_device_is_synchronized_before_a_session_reads_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Session:
        """Session with one input and one output, which logs the order of operations."""

        def get_inputs(self) -> list[Any]:
            return []

        def get_outputs(self) -> list[Any]:
            return []

        def io_binding(self) -> Session:
            return self

        def run_with_iobinding(self, binding: Session) -> None:
            done.append("run")

    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: done.append(str(device)))
    call = TensorCall(Task(lambda: None, (), {}))
    for device in ("cuda:1", "cpu"):
        program = _bound(Session(), call, device, "")
        assert program.enter is not None
        program.function(*program.enter(((), {}))[0])
    assert done == ["cuda:1", "run", "run"]


@installed
def test_missing_tensorrt_reports_what_to_install() -> None:
    message = "^this onnxruntime has no TensorrtExecutionProvider: install onnxruntime-gpu and tensorrt$"
    with pytest.raises(Unsupported, match=message):
        run("tensorrt", torch.relu, torch.ones(3), device="cuda:0")
    with pytest.raises(Unsupported, match=f"^this onnxruntime has no {CUDA}: install onnxruntime-gpu$"):
        run("onnxruntime", torch.relu, torch.ones(3), device="cuda:0")
