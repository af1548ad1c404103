"""Find private operators of torch that stay within the memory of their arguments, whatever their arguments are.

    python tests/support/runners/audit_operators.py replay/operators/reviewed.json TRACE...

records calls of torch's own test inputs and of traces, also of composite operators, and repeats them in child processes
with invalid sizes, strides, indices and numbers. Pages before and after each argument cannot be accessed, and the C
library checks the rest of the memory. An operator of which a call ran is added to the file, and one that ended its
process by a wrong access is removed. Others stay: earlier reviews called them alone, with invalid arguments.
"""

import contextlib
import ctypes
import importlib
import json
import mmap
import os
import random
import resource
import signal
import sys
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from opgrip.replay.operators.admission import MMCV
from opgrip.replay.operators.agreement import check_agreement, checking_parts
from opgrip.replay.operators.agreement.indices import bound_indices
from opgrip.replay.operators.lookup import is_private, refusal

Call = tuple[tuple[Any, ...], dict[str, Any]]

MOST_CALLS = 4  # calls of each operator
MOST_CHANGES = 400  # changed calls of each operator
CALL_S = 2  # seconds after which a call is ended
MOST_BYTES = 6 << 30
LARGEST = 1 << 16  # elements of an argument
PAGE = mmap.PAGESIZE
INTEGERS = (-1, 0, 1, 7, 1 << 20, 1 << 31, 1 << 40, -(1 << 31))
FLOATS = (0.0, -1.0, 1e30, float("nan"), float("inf"))
WRONG_MEMORY = {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL}


class Recording(TorchDispatchMode):
    """Keeps calls of private operators with copies of their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[Any, dict[str, Call]] = defaultdict(dict)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.keep(function, args, kwargs or {})
        return function(*args, **(kwargs or {}))

    def keep(self, function: Any, args: Any, kwargs: Any) -> None:
        is_operator = not isinstance(function, BuiltinFunctionType)
        if (is_operator and (not is_private(function) or refusal(function, ["torch"]) is not None)) or (
            len(self.calls[function]) >= MOST_CALLS
        ):
            return
        leaves, form = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if all(tensor.device.type == "cpu" and tensor.numel() <= LARGEST for tensor in tensors):
            key = str([_about(leaf) for leaf in leaves])
            self.calls[function][key] = tree_unflatten([_copy(leaf) for leaf in leaves], form)


def _about(leaf: Any) -> str:
    return f"{leaf.dtype}{leaf.dim()}" if isinstance(leaf, torch.Tensor) else type(leaf).__name__


def _copy(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def apart(recording: Recording, run: Callable[[], None]) -> None:
    """Run a part of the recording in a fork, because torch crashes for some of its own inputs."""
    with tempfile.NamedTemporaryFile() as file:
        if not (pid := os.fork()):
            with contextlib.suppress(Exception):
                signal.alarm(60)
                with contextlib.suppress(Exception):
                    run()
                names = {str(function): list(calls.items()) for function, calls in recording.calls.items()}
                torch.save(names, file.name)
            os._exit(0)
        os.waitpid(pid, 0)
        with contextlib.suppress(Exception):
            for name, calls in torch.load(file.name, weights_only=False).items():
                namespace, packet, overload = name.split(".")
                function = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
                recording.calls[function] = dict(calls)


def record(recording: Recording, run: Callable[[], Any]) -> None:
    for mode in (contextlib.nullcontext, torch.inference_mode):
        with contextlib.suppress(Exception), mode(), recording:
            results = [item for item in tree_flatten(run())[0] if isinstance(item, torch.Tensor) and item.requires_grad]
            if results:
                torch.autograd.grad([item.abs().sum() for item in results], _leaves(results), allow_unused=True)


def _leaves(results: list[torch.Tensor]) -> list[torch.Tensor]:
    leaves, nodes, seen = [], [item.grad_fn for item in results], set()
    while nodes:
        node: Any = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            leaves += [node.variable] if hasattr(node, "variable") else []
            nodes += [parent for parent, _ in node.next_functions]
    return leaves


def record_torch(recording: Recording) -> None:
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_modules import module_db
    from torch.testing._internal.common_optimizers import optim_db

    for op in op_db:
        apart(recording, lambda op=op: _record_operator(recording, op))
    for info in module_db:
        apart(recording, lambda info=info: _record_module(recording, info))
    for info in optim_db:
        for options in ({}, {"foreach": True}, {"fused": True}, {"amsgrad": True, "fused": True}, {"momentum": 0.9}):
            run = partial(_step, info.optim_cls, options)
            apart(recording, lambda run=run: record(recording, run))


def _record_operator(recording: Recording, op: Any) -> None:
    for dtype in (torch.float32, torch.int64, torch.bool, torch.complex64):
        if dtype in op.dtypes:
            gradients = op.supports_autograd and dtype.is_floating_point
            for sample in islice(op.sample_inputs("cpu", dtype, requires_grad=gradients), 24):
                record(recording, partial(op.op, sample.input, *sample.args, **sample.kwargs))


def _record_module(recording: Recording, info: Any) -> None:
    for training in (True, False):
        options = {"device": "cpu", "dtype": torch.float32, "requires_grad": training, "training": training}
        for item in info.module_inputs_func(info, **options):
            module = info.module_cls(*item.constructor_input.args, **item.constructor_input.kwargs)
            given = item.forward_input
            if given is not None:
                record(recording, partial(module.train(training), *given.args, **given.kwargs))


def _step(kind: Any, options: dict[str, Any]) -> None:
    model = nn.Linear(3, 4)
    with torch.inference_mode(False), torch.enable_grad():
        model(torch.rand(2, 3)).sum().backward()
        optimizer = kind(model.parameters(), lr=0.1, **options)
        optimizer.step()
        optimizer.step()


def record_programs(recording: Recording) -> None:
    packed = nn.utils.rnn.pack_sequence([torch.rand(n, 3) for n in (4, 3, 1)])
    image, bags = torch.rand(2, 4, 6, 6, requires_grad=True), torch.arange(12) % 10
    linear = torch.ao.nn.quantized.dynamic.Linear
    quantized = torch.quantize_per_tensor(torch.rand(2, 4, 6, 6), 0.1, 3, torch.quint8)
    channels = torch.quantize_per_channel(torch.rand(4, 3), torch.rand(4), torch.zeros(4), 0, torch.qint8)
    programs: list[Callable[[], Any]] = [
        *(
            lambda kind=kind: kind(3, 4, num_layers=2, bidirectional=True)(packed)[0].data
            for kind in (nn.LSTM, nn.GRU, nn.RNN)
        ),
        lambda: nn.RNN(3, 4, nonlinearity="relu")(packed)[0].data,
        *(lambda kind=kind: kind(3, 4)(torch.rand(2, 3)) for kind in (nn.LSTMCell, nn.GRUCell, nn.RNNCell)),
        *(
            lambda mode=mode: nn.EmbeddingBag(10, 8, mode=mode)(bags, torch.tensor([0, 4, 9]))
            for mode in ("sum", "mean", "max")
        ),
        lambda: nn.EmbeddingBag(10, 8, sparse=True, mode="sum")(bags, torch.tensor([0, 4, 9])),
        lambda: nn.Embedding(10, 8, max_norm=1.0)(bags),
        lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()(torch.rand(2, 5, 8)),
        lambda: nn.MultiheadAttention(8, 2, batch_first=True).eval()(*[torch.rand(2, 5, 8)] * 3),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 3))(image),
        lambda: image.to_mkldnn().relu().to_dense(),
        lambda: torch._foreach_add([torch.rand(3)], [torch.rand(3)]),
        lambda: torch._amp_foreach_non_finite_check_and_unscale_([torch.rand(3)], torch.zeros(1), torch.ones(1)),
        lambda: torch._amp_update_scale_(torch.ones(1), torch.ones(1).int(), torch.zeros(1), 2.0, 0.5, 2000),
        lambda: linear(4, 3)(torch.rand(2, 4)),
        lambda: torch.ao.nn.quantized.dynamic.LSTM(4, 3)(torch.rand(5, 2, 4)),
        lambda: torch.ao.nn.quantized.Linear(6, 3)(quantized),
        lambda: torch.ao.nn.quantized.Conv2d(4, 3, 3)(quantized),
        lambda: torch.ao.nn.quantized.Embedding(10, 12)(bags),
        lambda: torch.ao.nn.quantized.EmbeddingBag(10, 12)(bags, torch.tensor([0, 4, 9])),
        lambda: torch.ao.nn.quantized.BatchNorm2d(4)(quantized),
        lambda: torch.ao.nn.quantized.FloatFunctional().add(image, image),
        lambda: torch.ao.nn.quantized.QFunctional().add(quantized, quantized),
        lambda: torch.ao.nn.quantized.QFunctional().mul_scalar(quantized, 2.0),
        lambda: torch.ao.nn.quantized.QFunctional().cat([quantized, quantized]),
        lambda: torch.ao.nn.quantized.QFunctional().add_relu(quantized, quantized),
        lambda: nn.functional.max_pool2d(quantized, 2),
        lambda: nn.functional.interpolate(quantized, scale_factor=2),
        lambda: (quantized.dequantize(), quantized.int_repr(), channels.dequantize(), channels.q_per_channel_scales()),
        lambda: quantized.relu() if hasattr(quantized, "relu") else None,
        lambda: torch.rand(4, 4).relu().to_sparse().coalesce().to_dense(),
        lambda: torch.sparse.mm(torch.eye(3).to_sparse_csr(), torch.rand(3, 2)),
        lambda: torch.sparse.softmax(torch.eye(3).to_sparse(), 1),
        lambda: torch.sparse.sum(torch.eye(3).to_sparse(), 1),
        lambda: nn.functional.grid_sample(image, torch.rand(2, 3, 3, 2)),
        lambda: torch.ao.quantization.MovingAverageMinMaxObserver()(torch.rand(3)),
        lambda: torch.ao.quantization.FusedMovingAvgObsFakeQuantize()(torch.rand(3, 4)),
        lambda: torch.ao.quantization.FakeQuantize()(torch.rand(3, 4)),
        lambda: torch._weight_int8pack_mm(
            torch.rand(4, 8).bfloat16(), torch.ones(3, 8).char(), torch.rand(3).bfloat16()
        ),
        lambda: torch._int_mm(torch.ones(32, 32).char(), torch.ones(32, 32).char()),
        lambda: torch._scaled_mm(
            torch.rand(16, 16).to(torch.float8_e4m3fn),
            torch.rand(16, 16).to(torch.float8_e4m3fn).t(),
            torch.ones(()),
            torch.ones(()),
        ),
        lambda: torch._assert_async(torch.ones(())),
        lambda: torch._to_cpu([torch.rand(3)]),
    ]
    for run in programs:
        apart(recording, lambda run=run: record(recording, run))


def record_mmcv(recording: Recording) -> None:
    try:
        extension = importlib.import_module(MMCV)
    except ImportError:
        return
    maps, rois, empty = torch.rand(2, 3, 8, 9), torch.tensor([[1, 0, 0, 5, 4], [0, 1, 1, 8, 7.0]]), torch.empty(0)
    region = {"aligned_height": 2, "aligned_width": 3, "spatial_scale": 0.5, "sampling_ratio": 2, "aligned": True}
    mask = {"num_": 2, "h_feature": 2, "w_feature": 3, "h_mask": 3, "w_mask": 5, "half_h_mask": 1, "half_w_mask": 2}
    plain = {"kW": 3, "kH": 2, "dW": 1, "dH": 2, "padW": 1, "padH": 0, "dilationW": 1, "dilationH": 2, "group": 1}
    plain |= {"deformable_group": 2, "im2col_step": 1}
    with_mask = {"kernel_h": 2, "kernel_w": 3, "stride_h": 2, "stride_w": 1, "pad_h": 0, "pad_w": 1, "dilation_h": 2}
    with_mask |= {"dilation_w": 1, "group": 1, "deformable_group": 2, "with_bias": True}
    images, weight, offset, output = (
        torch.rand(2, 4, 8, 9),
        torch.rand(5, 4, 2, 3),
        torch.rand(2, 24, 3, 9),
        (2, 5, 3, 9),
    )
    weights = torch.rand(2, 12, 3, 9)
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
        ("nms", (torch.rand(6, 4), torch.rand(6)), {"iou_threshold": 0.5, "offset": 0}),
        *(
            ("roi_align_forward", (maps, rois, *[torch.rand(2, 3, 2, 3)] * 3), {"pool_mode": n, **region})
            for n in (0, 1)
        ),
        *(
            (
                "roi_align_backward",
                (torch.rand(2, 3, 2, 3), rois, *[torch.rand(2, 3, 2, 3)] * 2, maps),
                {"pool_mode": n, **region},
            )
            for n in (0, 1)
        ),
        *(
            ("psamask_forward", (torch.rand(2, 15, 2, 3), torch.rand(2, 6, 2, 3)), {"psa_type": n, **mask})
            for n in (0, 1)
        ),
        *(
            ("psamask_backward", (torch.rand(2, 6, 2, 3), torch.rand(2, 15, 2, 3)), {"psa_type": n, **mask})
            for n in (0, 1)
        ),
        ("deform_conv_forward", (images, weight, offset, torch.rand(output), empty, empty), plain),
        ("deform_conv_backward_input", (images, offset, torch.rand(output), images, offset, weight, empty), plain),
        (
            "deform_conv_backward_parameters",
            (images, offset, torch.rand(output), weight, empty, empty),
            plain | {"scale": 1},
        ),
        (
            "modulated_deform_conv_forward",
            (images, weight, torch.rand(5), empty, offset, weights, torch.rand(output), empty),
            with_mask,
        ),
        (
            "modulated_deform_conv_backward",
            (
                images,
                weight,
                torch.rand(5),
                empty,
                offset,
                weights,
                empty,
                images,
                weight,
                torch.rand(5),
                offset,
                weights,
                torch.rand(output),
            ),
            with_mask,
        ),
    ]
    for name, args, kwargs in calls:
        recording.keep(getattr(extension, name), args, kwargs)


def add_outputs(recording: Recording) -> None:
    """Add calls of the overloads that write into given tensors, with the results of the recorded calls."""
    for function, calls in [*recording.calls.items()]:
        if isinstance(function, BuiltinFunctionType):
            continue
        packet, names = function.overloadpacket, [argument.name for argument in function._schema.arguments]
        for other in (getattr(packet, name) for name in packet.overloads()):
            outputs = [argument.name for argument in other._schema.arguments if argument.is_out]
            if outputs and names == [argument.name for argument in other._schema.arguments if not argument.is_out]:
                for args, kwargs in calls.values():
                    results = _results(function, args, kwargs)
                    if len(results) == len(outputs):
                        recording.keep(other, args, kwargs | dict(zip(outputs, results, strict=True)))


def _results(function: Any, args: Any, kwargs: Any) -> list[Any]:
    with tempfile.NamedTemporaryFile() as file:
        # in a fork, because torch crashes for some of its own inputs
        if not (pid := os.fork()):
            with contextlib.suppress(Exception):
                signal.alarm(CALL_S)
                leaves, form = tree_flatten((args, kwargs))
                args, kwargs = tree_unflatten([_copy(leaf) for leaf in leaves], form)
                results = function(*args, **kwargs)
                torch.save(
                    [*results]
                    if isinstance(results, tuple | list) and len(function._schema.returns) > 1
                    else [results],
                    file.name,
                )
            os._exit(0)
        os.waitpid(pid, 0)
        with contextlib.suppress(Exception):
            return torch.load(file.name, weights_only=False)
        return []


def name_of(function: Any) -> str:
    return f"{MMCV}:{function.__name__}" if isinstance(function, BuiltinFunctionType) else str(function)


def record_traces(recording: Recording, paths: list[str]) -> None:
    from opgrip.replay.cases.cases import make_cases
    from opgrip.replay.inputs.inputs import Inputs, device_map
    from opgrip.replay.operators.lookup import find_operator
    from opgrip.traces import load

    for path in paths:
        for case in make_cases(load(path, partial=True)):
            with contextlib.suppress(Exception):
                function: Any = find_operator(case.signature, ("torch",)).function
                args, kwargs = case.signature.args, case.signature.kwargs
                is_small = Inputs.bytes_needed(args, kwargs) < 16 * LARGEST
                if is_small and is_private(function) and len(recording.calls[function]) < MOST_CALLS:
                    recording.keep(function, *Inputs(args, kwargs, case.values, device_map("cpu", None), 0).make())


def guarded(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy between two pages that cannot be accessed; it ends where the second one begins."""
    if tensor.layout != torch.strided or tensor.is_quantized or type(tensor) is not torch.Tensor or tensor.is_nested:
        return tensor.clone()
    places = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    size = places * tensor.itemsize if tensor.numel() else 0
    pages = -(-size // PAGE) + 2
    memory = mmap.mmap(-1, pages * PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    last = (pages - 1) * PAGE
    if not size:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    bytes_ = torch.frombuffer(memory, dtype=torch.uint8, offset=last - size, count=size)
    copy = torch.empty(0, dtype=tensor.dtype).set_(bytes_.untyped_storage(), 0, tensor.shape, tensor.stride())
    if 0 not in tensor.stride():
        copy.copy_(tensor)
    else:
        torch.as_strided(copy, (places,), (1,)).copy_(torch.as_strided(tensor, (places,), (1,)))
    for page in (0, last):
        if ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + page), PAGE, 0):
            raise OSError("mprotect failed")
    _kept.append(memory)
    return copy


_kept: list[mmap.mmap] = []


def changed(leaf: Any) -> Iterator[Any]:
    if isinstance(leaf, torch.Tensor):
        yield from _changed_tensor(leaf) if leaf.layout == torch.strided and not leaf.is_quantized else ()
    elif isinstance(leaf, bool):
        yield not leaf
    elif isinstance(leaf, int):
        yield from INTEGERS
    elif isinstance(leaf, float):
        yield from FLOATS
    elif leaf is None:
        return
    yield None


def _changed_tensor(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    shape = list(tensor.shape)
    for dim, size in enumerate(shape):
        for other in {0, 1, size - 1, size + 1, 4 * size + 3} - {size, -1}:
            yield torch.ones([*shape[:dim], other, *shape[dim + 1 :]], dtype=tensor.dtype)
    yield tensor.reshape(-1)
    yield torch.ones([1] * len(shape), dtype=tensor.dtype)
    yield torch.ones((), dtype=tensor.dtype).expand(shape)
    yield torch.ones([*shape, 2], dtype=tensor.dtype)
    yield torch.ones([], dtype=tensor.dtype)
    yield tensor.transpose(0, -1) if shape else tensor
    for dtype in (torch.uint8, torch.int32, torch.int64, torch.float32, torch.float64):
        if dtype != tensor.dtype:
            yield tensor.to(dtype)
    if not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype != torch.bool:
        limits = torch.iinfo(tensor.dtype)
        for value in {-1, 0, limits.min, limits.max, min(1 << 30, limits.max), max(-(1 << 30), limits.min)}:
            yield torch.full_like(tensor, value)
        yield tensor.flip(-1) if shape else tensor
    elif tensor.is_floating_point():
        for value in FLOATS:
            yield torch.full_like(tensor, value)


def changes(call: Call, number: int) -> Iterator[Call]:
    leaves, form = tree_flatten(call, is_leaf=lambda item: item is None)
    yield call
    every = [(place, other) for place, leaf in enumerate(leaves) for other in changed(leaf)]
    draw = random.Random(number)
    draw.shuffle(every)
    for place, other in every:
        yield tree_unflatten([*leaves[:place], other, *leaves[place + 1 :]], form)
    yield from resized(leaves, form)
    # two at once
    for _ in range(len(every)):
        (one, other), (two, another) = draw.choice(every), draw.choice(every)
        both = [*leaves]
        both[one], both[two] = other, another
        yield tree_unflatten(both, form)


def resized(leaves: list[Any], form: Any) -> Iterator[Call]:
    """Yield calls in which a size is another one wherever it occurs, so that sizes agree."""
    for size in {size for leaf in leaves if isinstance(leaf, torch.Tensor) for size in leaf.shape}:
        for other in {0, 1, size + 1, 4 * size + 3} - {size}:
            yield tree_unflatten([_with_size(leaf, size, other) for leaf in leaves], form)


def _with_size(leaf: Any, size: int, other: int) -> Any:
    if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided and not leaf.is_quantized:
        shape = [other if item == size else item for item in leaf.shape]
        return leaf if shape == [*leaf.shape] else torch.ones(shape, dtype=leaf.dtype)
    return other if type(leaf) is int and leaf == size else leaf


def run_call(function: Any, call: Call) -> bool:
    args, kwargs = call
    _kept.clear()
    try:
        leaves, form = tree_flatten((args, kwargs))
        args, kwargs = tree_unflatten(
            [guarded(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], form
        )
        check_agreement(function, args, kwargs)
        bound_indices(function, args, kwargs)
        with torch.no_grad(), checking_parts(function):
            function(*args, **kwargs)
    except Exception:
        return False
    return True


def audit(function: Any, calls: list[Call]) -> tuple[int, str]:
    """Return the number of calls that ran, and the signal of a wrong access that ended a process, or nothing."""
    ran = start = 0
    for _ in range(40):
        reader, writer = os.pipe()
        if not (pid := os.fork()):
            os.close(reader)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(1, 2)
            resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            every = [item for number, call in enumerate(calls) for item in changes(call, number)]
            random.Random(0).shuffle(every)
            for place, call in enumerate([*calls, *every][:MOST_CHANGES]):
                if place >= start:
                    signal.alarm(CALL_S)
                    os.write(writer, b"+" if run_call(function, call) else b"-")
            os._exit(0)
        os.close(writer)
        with open(reader, "rb") as file:
            marks = file.read()
        _, status = os.waitpid(pid, 0)
        ran, start = ran + marks.count(b"+"), start + len(marks) + 1
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) in WRONG_MEMORY:
            return ran, signal.Signals(os.WTERMSIG(status)).name
        if not os.WIFSIGNALED(status):
            return ran, ""
    return ran, ""


def main(output: str, *traces: str) -> int:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if "MALLOC_CHECK_" not in os.environ:
        checked = {"MALLOC_CHECK_": "3", "LD_PRELOAD": "libc_malloc_debug.so.0", "OMP_NUM_THREADS": "1"}
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | checked)
    recording = Recording()
    record_programs(recording)
    record_mmcv(recording)
    record_torch(recording)
    add_outputs(recording)
    print(f"{len(recording.calls)} private operators were recorded from torch", flush=True)
    record_traces(recording, list(traces))
    print(f"{len(recording.calls)} private operators were recorded", flush=True)
    reviewed = set(json.loads(Path(output).read_text()))
    for function in sorted(recording.calls, key=name_of):
        ran, ended = audit(function, list(recording.calls[function].values()))
        if ended:
            print(f"{name_of(function)} ended its process: {ended}", flush=True)
            reviewed.discard(name_of(function))
        elif ran:
            reviewed.add(name_of(function))
    Path(output).write_text(json.dumps(sorted(reviewed), indent=0) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
