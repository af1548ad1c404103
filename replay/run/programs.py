"""Programs that run a call in a mode, gradients of calls, and the folder that keeps compiled programs."""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from opgrip.errors import cause_of
from opgrip.replay.cases.selection import Variant
from opgrip.replay.cases.subgraphs import SubgraphOperator, load_module
from opgrip.replay.modes import Program, RunOutputs, Task, Tuning, find_mode, runs_graphs
from opgrip.replay.modes.candidate import CandidateOptions
from opgrip.replay.modes.conversions.runtimes import TensorCall
from opgrip.replay.operators.lookup import Operator, Unsupported
from opgrip.replay.operators.memory import Arguments, Function, is_out_of_memory, tensors_in
from opgrip.replay.operators.torch_private import traced_backward
from opgrip.traces.schema.arguments import leaves

PARTIAL = ".partial-"  # prefix of folders that are not complete, followed by the process id


def make_program(
    operator: Operator,
    examples: Sequence[Arguments],
    variant: Variant,
    key: str | None,
    grad: bool,
    op: str = "",
    weights: Collection[int] = (),
    *,
    device: str,
    store: str | None,
    tuning: Tuning,
    candidates: CandidateOptions,
    by_device: bool,
) -> Program:
    """Return the program that runs a call in the mode of a variant.

    examples : arguments of this call and of other calls of the signature; the mode may write into them
    key : key under which `store` keeps the compiled program; None to keep nothing
    """
    mode, argument = find_mode(variant.mode)
    kind = torch.device(device).type
    if mode.devices and kind not in mode.devices:
        raise Unsupported(f"{variant.mode} runs on {', '.join(mode.devices)}, not on {kind}")
    if runs_graphs(variant.mode) and variant.point.streams > 1:
        raise Unsupported(f"{variant.mode} replays CUDA graphs in one thread: remove --streams")
    if by_device and not mode.in_torch:
        raise Unsupported(
            f"{variant.mode} does not run on torch's streams, so the device's clock cannot time it: "
            "use --exec-mode discrete"
        )
    (args, kwargs), *others = examples
    # an untrusted candidate must not be imported here
    candidate = None if candidates.untrusted else candidates.find(op)
    load = None if candidate is None else candidate.load
    if load is not None and isinstance(operator, SubgraphOperator):
        load = functools.partial(load_module, load, operator, args)
    with _stored(store, key) as folder:
        task = Task(
            function=operator.function,
            args=args,
            kwargs=kwargs,
            others=others,
            mutates=operator.mutates,
            weights=weights,
            grad=grad,
            device=device,
            threads=torch.get_num_threads(),
            argument=argument,
            store=folder,
            tuning=tuning.of(variant.mode),
            candidate=load,
        )
        try:
            return mode.make(task)
        except Unsupported:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise Unsupported(cause_of(error)) from error


def run_program(program: Program, arguments: Arguments, mutates: bool) -> tuple[Any, RunOutputs]:
    args, kwargs = arguments if program.enter is None else program.enter(arguments)
    raw_result = program.function(*args, **kwargs)
    if program.leave is not None:
        return raw_result, program.leave(raw_result)
    return raw_result, RunOutputs.of(raw_result, arguments, mutates)


NO_GRADIENT = "not differentiable: its results have no gradient"


def as_call(program: Program, mutates: bool) -> Function:
    def call(*args: Any, **kwargs: Any) -> Any:
        _, results = run_program(program, (args, kwargs), mutates)
        if mutates and program.leave is not None:
            for tensor, written in zip(tensors_in([args, kwargs]), results.arguments, strict=True):
                tensor.copy_(written)
        return list(results.outputs)

    return call


@contextmanager
def _stored(store: str | None, key: str | None) -> Iterator[Path | None]:
    if store is None or key is None:
        yield None
        return
    folder = Path(store) / key[:2] / key
    if folder.is_dir():
        yield folder
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{PARTIAL}{os.getpid()}-", dir=folder.parent))
    try:
        yield partial
        if any(partial.iterdir()):
            with suppress(OSError):
                partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def remove_partial(store: str | None) -> None:
    for partial in () if store is None else Path(store).glob(f"*/{PARTIAL}*"):
        pid = int(partial.name.removeprefix(PARTIAL).split("-")[0])
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            shutil.rmtree(partial, ignore_errors=True)
        except PermissionError:
            pass


def differentiable_results(operator: Operator, arguments: Arguments) -> list[int]:
    """Run a call, and return the indices of its results that have a gradient."""
    if operator.mutates:
        raise Unsupported("a call that writes into its arguments has no separate backward")
    args, kwargs = arguments
    if not _wanting(arguments):
        has_floats = any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors_in(list(arguments)))
        if has_floats:
            raise Unsupported("no argument required a gradient")
        raise Unsupported("not differentiable: it has no floating-point tensor argument")
    results = {
        place: leaf.grad_fn
        for place, leaf in enumerate(leaves(operator.function(*args, **kwargs)))
        if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None
    }
    if not results:
        raise Unsupported(NO_GRADIENT)
    if any("NotImplemented" in function.name() for function in results.values()):
        raise Unsupported("not differentiable: no derivative of it is implemented")
    return list(results)


def with_backward(program: Program, places: Sequence[int]) -> Function:
    enter = graph_of(program, places)

    def call(*args: Any, **kwargs: Any) -> Any:
        return gradients(*enter((args, kwargs))[0])

    return call


def graph_of(program: Program, places: Sequence[int]) -> Callable[[Arguments], Arguments]:
    def enter(arguments: Arguments) -> Arguments:
        _, results = run_program(program, arguments, mutates=False)
        outputs = [results.outputs[place] for place in places if place < len(results.outputs)]
        if len(_with_graph(outputs)) < len(places):
            raise Unsupported(NO_GRADIENT)
        return (outputs, _wanting(arguments), [_incoming(output) for output in outputs]), {}

    return enter


def gradients(outputs: list[torch.Tensor], wanting: list[torch.Tensor], grad_outputs: list[torch.Tensor]) -> Any:
    return torch.autograd.grad(outputs, wanting, grad_outputs, allow_unused=True)


def gradient_graph(operator: Operator, arguments: Arguments) -> tuple[Function, tuple[Any, ...]]:
    """Return the backward of a call as a graph, and the graph's arguments: saved tensors and incoming gradients."""
    call = TensorCall(Task(operator.function, *arguments))

    def backward(results: Any) -> Any:
        outputs = _with_graph(results)
        return gradients(outputs, _wanting(arguments), [_incoming(output) for output in outputs])

    graph_call = traced_backward(call.forward, tensors_in(list(arguments)), backward)
    if graph_call is None:
        raise Unsupported("AOTAutograd cannot make a graph of its gradients")
    graph, args = graph_call
    return graph, tuple(arg.detach() if isinstance(arg, torch.Tensor) else arg for arg in args)


def _wanting(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def _with_graph(outputs: Any) -> list[torch.Tensor]:
    return [leaf for leaf in leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None]


def _incoming(output: torch.Tensor) -> torch.Tensor:
    gradient = torch.ones_like(output)
    if output.layout is torch.strided and not output.is_nested:
        for dim in range(gradient.dim()):
            gradient.movedim(dim, -1)[..., ::2].mul_(0.5)
    return gradient
