"""The mode `onnxruntime`: torch.onnx's exporter of exported programs, run by ONNX Runtime."""

from __future__ import annotations

import contextlib
import io
import logging
from typing import TYPE_CHECKING, Any

from opgrip.replay.modes.mode import Program, Results, Task, mode
from opgrip.replay.operators.admission import Unsupported
from opgrip.traces.errors import one_line

if TYPE_CHECKING:
    import torch

    from opgrip.replay.modes.conversions.graphs import TensorCall
    from opgrip.replay.operators.calling import Arguments

MODEL = "model.onnx"
PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}


@mode("onnxruntime", needs=("onnxruntime", "onnx", "onnxscript"), extra="onnx", in_torch=False)
def with_onnxruntime(task: Task) -> Program:
    """The call as an ONNX model on the provider of its device; the model is kept in the task's store.

    Inputs are bound where they lie, anew for each run: a binding keeps its results and writes the next ones over them.
    So what the runtime allocates for them is in the time, as it is in eager's.
    """
    import onnxruntime
    import torch

    from opgrip.replay.modes.conversions.graphs import exported

    kind = torch.device(task.device).type
    if PROVIDERS[kind] not in onnxruntime.get_available_providers():
        raise Unsupported(f"this onnxruntime has no {PROVIDERS[kind]}: install onnxruntime-gpu")
    program, call = exported(task)
    model = _stored_model(task, program)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = task.threads
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model, options, providers=[PROVIDERS[kind]])
    return _bound(session, call, task.device)


def _stored_model(task: Task, program: torch.export.ExportedProgram) -> bytes:
    stored = None if task.store is None else task.store / MODEL
    if stored is not None and stored.exists():
        return stored.read_bytes()
    model = _model(program)
    if stored is not None:
        whole = stored.with_suffix(".partial")
        whole.write_bytes(model)
        whole.replace(stored)
    return model


def _model(program: torch.export.ExportedProgram) -> bytes:
    import torch

    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            onnx_program = torch.onnx.export(program, dynamo=True, verbose=False)
    except torch.onnx.OnnxExporterError as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise Unsupported(one_line(cause, 300)) from error
    assert onnx_program is not None
    return bytes(onnx_program.model_proto.SerializeToString())


def _bound(session: Any, call: TensorCall, device: str) -> Program:
    # in the call's order; the exporter may give an input another name, where it is a result too
    import torch

    model_inputs = [(item.name, _element_type(item.type)) for item in session.get_inputs()]
    model_outputs = [(item.name, item.type == "tensor(bool)") for item in session.get_outputs()]
    kind, index = torch.device(device).type, torch.device(device).index or 0

    def enter(arguments: Arguments) -> Arguments:
        binding = session.io_binding()
        bound_tensors = []
        for (name, element), tensor in zip(model_inputs, call.enter(arguments)[0], strict=True):
            plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
            bound_tensors.append(plain)
            binding.bind_input(name, kind, index, element, tuple(plain.shape), plain.data_ptr())
        for name, _ in model_outputs:
            binding.bind_output(name, kind, index)
        return (binding, bound_tensors), {}

    def function(binding: Any, _: Any) -> Any:
        session.run_with_iobinding(binding)
        return binding

    def leave(binding: Any) -> Results:
        values = zip(binding.get_outputs(), model_outputs, strict=True)
        return call.leave([_tensor(value, is_bool) for value, (_, is_bool) in values])

    return Program(function, enter, leave, enters_each_run=True)


def _element_type(type_name: str) -> int:
    """Number of an element type in ONNX of what the runtime calls it: `tensor(float)`."""
    import onnx

    name = type_name.removeprefix("tensor(").removesuffix(")").upper()
    return int(getattr(onnx.TensorProto, name))


def _tensor(value: Any, is_bool: bool) -> torch.Tensor:
    import torch

    tensor = torch.utils.dlpack.from_dlpack(value._ortvalue.to_dlpack())
    return tensor.view(torch.bool) if is_bool and tensor.dtype is torch.uint8 else tensor
