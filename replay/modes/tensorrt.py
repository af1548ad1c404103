"""The mode `tensorrt`: the model of `onnxruntime`, run by NVIDIA's TensorRT, and what that cannot run as there."""

from __future__ import annotations

from opgrip.replay.modes.mode import Program, Task, mode


@mode(
    "tensorrt",
    needs=("onnxruntime", "onnx", "onnxscript"),
    extra="onnx",
    devices=("cuda",),
    in_torch=False,
    autotunes=True,
)
def make(task: Task) -> Program:
    """The call as TensorRT's engine."""
    from opgrip.replay.modes.conversions.tensorrt_engines import with_tensorrt

    return with_tensorrt(task)
