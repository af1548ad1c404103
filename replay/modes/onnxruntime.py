"""The modes `onnxruntime` and `tensorrt`: ONNX Runtime, alone or with TensorRT, runs calls that torch exports."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from opgrip.errors import one_line
from opgrip.replay.modes import Program, RunOutputs, Task, mode
from opgrip.replay.operators.admission import Unsupported

if TYPE_CHECKING:
    import torch

    from opgrip.replay.modes.conversions.runtimes import TensorCall
    from opgrip.replay.operators.memory import Arguments

MODEL = "model.onnx"
ALIGNMENT = 1  # alignment of data in bytes that ONNX Runtime needs
CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"

Provider = tuple[str, dict[str, str]]  # name of a provider, and its options


@mode("onnxruntime", needs=("onnxruntime", "onnx", "onnxscript"), extra="onnx", devices=("cpu", "cuda"), in_torch=False)
def with_onnxruntime(task: Task) -> Program:
    import torch

    if torch.device(task.device).type == "cpu":
        return run_by(task, lambda _: [(CPU, {})])
    check_provider(CUDA, "onnxruntime-gpu")
    return run_by(task, lambda operators: [cuda_provider(task.device, operators), (CPU, {})])


def check_provider(name: str, package: str) -> None:
    import onnxruntime

    if name not in onnxruntime.get_available_providers():
        raise Unsupported(f"this onnxruntime has no {name}: install {package}")


def cuda_provider(device: str, operators: Iterable[str]) -> Provider:
    """Return ONNX Runtime's CUDA provider and its options, with torch's settings for TF32 and cuDNN's search."""
    import torch

    from opgrip.replay.modes.conversions.runtimes import device_index
    from opgrip.replay.operators.contexts import must_use_float32

    options = {
        "device_id": str(device_index(device)),
        "use_tf32": "0" if must_use_float32(operators) else "1",
        "cudnn_conv_algo_search": "EXHAUSTIVE" if torch.backends.cudnn.benchmark else "HEURISTIC",
    }
    return CUDA, options


def run_by(task: Task, providers_of: Callable[[Iterable[str]], Sequence[Provider]]) -> Program:
    import onnxruntime
    import torch

    from opgrip.replay.modes.conversions.runtimes import exported

    program, call = exported(task)
    model = _stored_model(task, program)
    targets = [node.target for node in program.graph.nodes]
    providers = providers_of([str(item.overloadpacket) for item in targets if isinstance(item, torch._ops.OpOverload)])
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = task.threads
    options.log_severity_level = 4
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    session = onnxruntime.InferenceSession(model, options, providers=list(providers))
    lacking = [name for name, _ in providers if name not in session.get_providers()]
    if lacking:
        raise Unsupported(
            f"ONNX Runtime cannot load its {lacking[0]}: libraries that it needs are missing or have the wrong version"
        )
    return _bound(session, call, task, _nodes_elsewhere(session, providers[0][0]))


def _nodes_elsewhere(session: Any, provider: str) -> str:
    if not hasattr(session, "get_provider_graph_assignment_info"):
        return ""
    parts = [(part.ep_name, part.get_nodes()) for part in session.get_provider_graph_assignment_info()]
    count = sum(len(nodes) for _, nodes in parts)
    elsewhere: dict[str, list[str]] = {}
    for name, nodes in parts:
        if name != provider:
            elsewhere.setdefault(name.removesuffix("ExecutionProvider"), []).extend(node.op_type for node in nodes)
    return "; ".join(
        f"{len(types)} of {count} nodes on {name}: {', '.join(dict.fromkeys(types))}"
        for name, types in elsewhere.items()
    )


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


def _bound(session: Any, call: TensorCall, task: Task, note: str) -> Program:
    import torch
    from onnx import TensorProto
    from torch.utils.weak import WeakIdKeyDictionary

    from opgrip.replay.modes.conversions.runtimes import copied_in_runs, device_index, plain

    # in the call's order, because the exporter may rename an input that is also a result
    names = [(item.name, item.type.removeprefix("tensor(").removesuffix(")")) for item in session.get_inputs()]
    model_inputs = [(name, TensorProto.DataType.Value(dtype.upper())) for name, dtype in names]
    model_outputs = [(item.name, item.type == "tensor(bool)") for item in session.get_outputs()]
    kind, index = torch.device(task.device).type, device_index(task.device)
    in_runs, copies = copied_in_runs(task, ALIGNMENT)
    weights: Any = WeakIdKeyDictionary()

    def bind(binding: Any, place: int, tensor: torch.Tensor) -> torch.Tensor:
        name, element = model_inputs[place]
        binding.bind_input(name, kind, index, element, tuple(tensor.shape), tensor.data_ptr())
        return tensor

    def prepared(tensor: torch.Tensor) -> torch.Tensor:
        # a weight that is copied again before each run would be in the cache
        if tensor not in weights:
            weights[tensor] = plain(tensor, ALIGNMENT)
        copy: torch.Tensor = weights[tensor]
        return copy

    def enter(arguments: Arguments) -> Arguments:
        binding = session.io_binding()
        bound, late = [], []
        for place, tensor in enumerate(call.enter(arguments)[0]):
            if place in in_runs:
                late.append((place, tensor))
            elif place in task.weights:
                bound.append(bind(binding, place, prepared(tensor)))
            else:
                bound.append(bind(binding, place, plain(tensor, ALIGNMENT)))
        for name, _ in model_outputs:
            binding.bind_output(name, kind, index)
        if kind != "cpu":
            # the session reads the inputs on its own stream, which does not wait for torch's
            torch.accelerator.synchronize(torch.device(task.device))
        return (binding, bound, late), {}

    def function(binding: Any, _: Any, late: Sequence[tuple[int, torch.Tensor]]) -> Any:
        copied = [bind(binding, place, plain(tensor, ALIGNMENT)) for place, tensor in late]
        if copied and kind != "cpu":
            torch.accelerator.synchronize(torch.device(task.device))
        session.run_with_iobinding(binding)
        return binding

    def leave(binding: Any) -> RunOutputs:
        values = zip(binding.get_outputs(), model_outputs, strict=True)
        return call.leave([_tensor(value, is_bool) for value, (_, is_bool) in values])

    note = "; ".join(filter(None, (note, copies)))
    return Program(function, enter, leave, enters_each_run=True, note=note)


def _tensor(value: Any, is_bool: bool) -> torch.Tensor:
    import torch

    tensor = torch.utils.dlpack.from_dlpack(value._ortvalue.to_dlpack())
    return tensor.view(torch.bool) if is_bool and tensor.dtype is torch.uint8 else tensor


TENSORRT = "TensorrtExecutionProvider"


@mode(
    "tensorrt",
    needs=("onnxruntime", "onnx", "onnxscript"),
    extra="onnx",
    devices=("cuda",),
    in_torch=False,
    autotunes=True,
)
def with_tensorrt(task: Task) -> Program:
    from opgrip.replay.modes.conversions.runtimes import device_index

    check_provider(TENSORRT, "onnxruntime-gpu and tensorrt")

    def providers(operators: Iterable[str]) -> list[Provider]:
        options = {"device_id": str(device_index(task.device))}
        if task.store is not None:
            options |= {"trt_engine_cache_enable": "1", "trt_engine_cache_path": str(task.store)}
        return [(TENSORRT, options), cuda_provider(task.device, operators), (CPU, {})]

    return run_by(task, providers)
