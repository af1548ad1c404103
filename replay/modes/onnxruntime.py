"""The mode `onnxruntime`: the call as an ONNX model, run by ONNX Runtime."""

from __future__ import annotations

from opgrip.replay.modes.mode import Program, Task, mode


@mode("onnxruntime", needs=("onnxruntime", "onnx", "onnxscript"), extra="onnx", devices=("cpu", "cuda"), in_torch=False)
def make(task: Task) -> Program:
    """The call as an ONNX model on the provider of its device; the model is kept in the task's store."""
    from opgrip.replay.modes.conversions.onnx_sessions import with_onnxruntime

    return with_onnxruntime(task)
