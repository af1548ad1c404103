"""The mode `tensorrt`: the model of `onnxruntime`, run by NVIDIA's TensorRT as far as that can."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from opgrip.replay.modes.mode import Program, Task, mode
from opgrip.replay.modes.onnxruntime import CPU, Provider, check_provider, cuda_provider, run_by

if TYPE_CHECKING:
    pass


TENSORRT = "TensorrtExecutionProvider"


def with_tensorrt(task: Task) -> Program:
    """Run the call by TensorRT; the engine is kept in the task's store, because building it is slow."""
    from opgrip.replay.modes.conversions.jax_runtime import device_index

    check_provider(TENSORRT, "onnxruntime-gpu and tensorrt")

    def providers(operators: Iterable[str]) -> list[Provider]:
        options = {"device_id": str(device_index(task.device))}
        if task.store is not None:
            options |= {"trt_engine_cache_enable": "1", "trt_engine_cache_path": str(task.store)}
        return [(TENSORRT, options), cuda_provider(task.device, operators), (CPU, {})]

    return run_by(task, providers)


@mode(
    "tensorrt",
    needs=("onnxruntime", "onnx", "onnxscript"),
    extra="onnx",
    devices=("cuda",),
    in_torch=False,
    autotunes=True,
)
def make(task: Task) -> Program:
    return with_tensorrt(task)
