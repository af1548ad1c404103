"""The modes of torch itself: eager, `torch.compile` in several forms, AOTInductor and TorchScript."""

from __future__ import annotations

import copy
import itertools
import tempfile
import warnings
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from types import BuiltinFunctionType, FunctionType
from typing import TYPE_CHECKING, Any

from opgrip.errors import one_line
from opgrip.replay.modes import Program, Task, mode
from opgrip.replay.operators.admission import Unsupported

if TYPE_CHECKING:
    import torch

    from opgrip.replay.operators.memory import Arguments, Function

# number of runs after the first one, because inductor records a CUDA graph in one run and replays it in the next
RECORDING = 2
GRAPH = "__compiled_fn"  # start of the names that dynamo gives to compiled graphs
ENTERED = 100  # number of calls of which the median is the time of entering a compiled function

_numbers = itertools.count()
_of_any_shape: dict[object, tuple[Function, dict[str, Any]]] = {}


def _backends() -> Collection[str]:
    from opgrip.replay.operators.torch_private import dynamo_backends

    return dynamo_backends()


@mode("compile", differentiable=True, argument="backend", arguments=_backends)
def with_static_shapes(task: Task) -> Program:
    return _compiled(task, dynamic=False, backend=task.argument or "inductor")


@mode("compile-dynamic", differentiable=True)
def with_dynamic_shapes(task: Task) -> Program:
    return _compiled(task, dynamic=True)


@mode("compile-max", differentiable=True, autotunes=True)
def with_autotuning(task: Task) -> Program:
    """Compile the call with the fastest of several kernels, without the CUDA graphs of torch's `max-autotune`."""
    return _compiled(task, dynamic=False, mode="max-autotune-no-cudagraphs")


@mode("reduce-overhead", differentiable=True, in_graphs=True)
def with_graphs(task: Task) -> Program:
    if not task.device.startswith("cuda"):
        raise Unsupported(f"it needs CUDA graphs, which {task.device} does not support: use compile")
    import torch

    from opgrip.replay.operators.torch_private import graphs_skipped

    before = graphs_skipped()
    program = _compiled(task, dynamic=False, mode="reduce-overhead")

    def enter(arguments: Arguments) -> Arguments:
        # otherwise a forward whose backward never ran keeps its memory, and the next run uses no graph
        torch.compiler.cudagraph_mark_step_begin()
        return arguments

    for _ in range(RECORDING):
        enter((task.args, task.kwargs))
        program.function(*task.args, **task.kwargs)
    skipped = graphs_skipped() > before
    note = ", ".join(filter(None, (program.note, "no CUDA graph" if skipped else "")))
    return Program(program.function, enter, in_place=True, enters_each_run=True, note=note)


def _compiled(task: Task, dynamic: bool, **options: Any) -> Program:

    from opgrip.replay.operators.torch_private import compile_in_this_process, graphs_compiled

    kind = _kind(task) if dynamic else None
    shared_program = _of_any_shape.get(kind) if kind is not None else None
    compile_in_this_process()
    before = graphs_compiled()
    compiled, own_globals = shared_program or _compile(task.function, dynamic=dynamic, **options)
    compiled(*task.args, **task.kwargs)
    graphs = graphs_compiled() - before
    if shared_program is None and not graphs:
        raise Unsupported("dynamo compiled no part of it")
    if kind is not None:
        _of_any_shape[kind] = compiled, own_globals
    # results that are kept would prevent CUDA graphs
    in_graphs = options.get("mode") == "reduce-overhead" or options.get("backend") == "cudagraphs"
    enter_us = None if in_graphs else _enter_us(partial(compiled, *task.args, **task.kwargs), own_globals)
    note = "shared program" if not graphs else "" if graphs == 1 else f"{graphs} graphs"
    return Program(compiled, note=note, enter_us=enter_us)


def _compile(function: Function, **options: Any) -> tuple[Function, dict[str, Any]]:
    import torch

    own = _own_code(function)
    code: Any = own if isinstance(own, FunctionType) else type(own).forward  # type: ignore[attr-defined]
    return torch.compile(own, **options), code.__globals__


def _enter_us(call: Callable[[], Any], own_globals: dict[str, Any]) -> float | None:
    graphs = {name: graph for name, graph in own_globals.items() if name.startswith(GRAPH)}
    results: dict[str, Any] = {}

    def recording(name: str, graph: Function) -> Function:
        def run(*args: Any) -> Any:
            results[name] = graph(*args)
            return results[name]

        return run

    try:
        own_globals.update({name: recording(name, graph) for name, graph in graphs.items()})
        call()
        own_globals.update({name: partial(_constant, kept) for name, kept in results.items()})
        call()
        times_ns = []
        for _ in range(ENTERED if results else 0):
            began = perf_counter_ns()
            call()
            times_ns.append(perf_counter_ns() - began)
        return median(times_ns) / 1e3 if times_ns else None
    finally:
        own_globals.update(graphs)


def _constant(result: Any, *_: Any) -> Any:
    return result


def _own_code(function: Function) -> Function:
    import torch

    number = next(_numbers)
    if isinstance(function, FunctionType):
        return _twin(function, number)
    if isinstance(function, torch.nn.Module):
        return function

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    assert isinstance(call, FunctionType)
    return _twin(call, number)


def _twin(function: FunctionType, number: int) -> FunctionType:
    code = function.__code__.replace(co_name=f"{function.__code__.co_name}_{number}")
    twin = FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)
    twin.__kwdefaults__ = copy.copy(function.__kwdefaults__)
    return twin


def _kind(task: Task) -> object:
    import torch

    from opgrip.traces.schema.arguments import leaves

    described: list[tuple[object, ...]] = []
    for leaf in leaves([task.args, task.kwargs]):
        if isinstance(leaf, torch.Tensor):
            described.append((leaf.dtype, leaf.dim(), str(leaf.device), leaf.requires_grad))
        else:
            described.append((type(leaf), leaf if isinstance(leaf, str | bool | None) else str(type(leaf))))
    return task.function, task.threads, tuple(described)


@mode("eager", differentiable=True, ahead=False)
def run_as_called(task: Task) -> Program:
    return Program(task.function)


@mode("cpu", differentiable=True, ahead=False)
def run_on_cpu(task: Task) -> Program:
    from torch import Tensor, device

    from opgrip.traces.schema.arguments import map_leaves

    def call(*args: Any, **kwargs: Any) -> Any:
        pairs: dict[int, tuple[Tensor, Tensor, int]] = {}

        def to_cpu(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return device("cpu") if isinstance(leaf, device) else leaf
            if id(leaf) not in pairs:
                copied = leaf.cpu()
                pairs[id(leaf)] = leaf, copied, copied._version
            return pairs[id(leaf)][1]

        own_args, own_kwargs = map_leaves(to_cpu, (args, kwargs))
        result = task.function(*own_args, **own_kwargs)
        for tensor, copied, version in pairs.values():
            if copied._version != version:
                tensor.copy_(copied)
        originals = {id(copied): tensor for tensor, copied, _ in pairs.values()}

        def back(leaf: Any) -> Any:
            return originals.get(id(leaf), leaf.to(task.device)) if isinstance(leaf, Tensor) else leaf

        return map_leaves(back, result)

    return Program(task.function if task.device == "cpu" else call)


PACKAGE = "model.pt2"


@mode("aot")
def with_aotinductor(task: Task) -> Program:
    from opgrip.replay.modes.conversions.runtimes import exported
    from opgrip.replay.operators.torch_private import packaged

    program, call = exported(task, in_place=True)
    with tempfile.TemporaryDirectory() as nowhere:
        package = (task.store or Path(nowhere)) / PACKAGE
        must_compile = not package.exists()
        run = packaged(program, str(package), make=must_compile)

    def function(*tensors: torch.Tensor) -> Any:
        return run(list(tensors))

    return Program(function, call.enter, call.leave, in_place=task.mutates, note="" if must_compile else "loaded")


# parts of the tracer's warnings that values of this run become constants; it also warns of sizes, which are integers
FROZEN = ("to a Python boolean", "to a Python float", "to a Python list", "to a NumPy array")
RUNS = 2  # number of runs before timing: the first is profiled by TorchScript, the second compiles


@mode("jit", differentiable=True, ahead=False)
def with_torchscript(task: Task) -> Program:
    import torch

    from opgrip.replay.modes.conversions.runtimes import TensorCall

    if _calls_extension(task.function):
        raise Unsupported(
            "TorchScript cannot record a function of an extension, and would return its first results in every run"
        )
    refused = ""
    if isinstance(task.function, FunctionType):
        try:
            with _quiet():
                scripted = torch.jit.script(task.function)
            for _ in range(RUNS):
                scripted(*_copied(task.args), **_copied(task.kwargs))
            return Program(scripted, note="scripted")
        except Exception as error:
            refused = f"; it cannot be scripted: {one_line(error, 150)}"
    call = TensorCall(task, in_place=True)
    args, _ = call.enter((task.args, task.kwargs))
    if not args:
        raise Unsupported("none of its arguments is or contains a tensor")
    with _quiet(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        traced = torch.jit.trace(call, args, check_trace=False)
    warned = " ".join(str(warning.message) for warning in caught)
    if any(words in warned for words in FROZEN):
        raise Unsupported(f"a TorchScript trace would be valid only for these values{refused}")
    for _ in range(RUNS):
        traced(*_copied(args))
    return Program(traced, call.enter, call.leave, in_place=task.mutates, note="traced")


def _calls_extension(function: Any) -> bool:
    import torch

    if isinstance(function, torch.fx.GraphModule):
        return any(_calls_extension(node.target) for node in function.graph.nodes if node.op == "call_function")
    if not isinstance(function, BuiltinFunctionType):
        return False
    return (function.__module__ or "builtins").split(".")[0] not in ("torch", "_operator", "builtins", "math")


def _copied(tree: Any) -> Any:
    import torch

    from opgrip.traces.schema.arguments import map_leaves

    return map_leaves(lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf, tree)


class _quiet(warnings.catch_warnings):
    def __enter__(self) -> None:
        super().__enter__()
        warnings.simplefilter("ignore", DeprecationWarning)
