"""The backward of one call: the gradients alone, of a graph that is made anew for every run, outside of its time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from opgrip.replay.modes import Program, Task
from opgrip.replay.modes.conversions.graphs import TensorCall
from opgrip.replay.operators.lookup import Operator, Unsupported
from opgrip.replay.operators.memory import Arguments, Function, tensors_in
from opgrip.replay.operators.torch_private import traced_backward
from opgrip.replay.programs.programs import run_program
from opgrip.traces.schema.arguments import leaves


def check_gradients(operator: Operator, arguments: Arguments) -> None:
    """Raise `Unsupported` where a call has no gradients."""
    if operator.mutates:
        raise Unsupported("a call that writes into its arguments has no backward of its own")
    args, kwargs = arguments
    if not _wanting(arguments):
        raise Unsupported(_why_none_wants(arguments))
    results = _with_graph(operator.function(*args, **kwargs))
    if not results:
        raise Unsupported("not differentiable: its results have no gradient")
    if any("NotImplemented" in result.grad_fn.name() for result in results if result.grad_fn is not None):
        raise Unsupported("not differentiable: no derivative of it is implemented")


def _why_none_wants(arguments: Arguments) -> str:
    """Return why no argument wants a gradient."""
    if any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors_in(list(arguments))):
        return "none of its arguments required a gradient"
    return "not differentiable: none of its arguments is a floating-point tensor"


def with_backward(program: Program) -> Function:
    """A function that runs a program forward and gives the gradients of the arguments that want one."""
    enter = graph_of(program)

    def call(*args: Any, **kwargs: Any) -> Any:
        return gradients(*enter((args, kwargs))[0])

    return call


def graph_of(program: Program) -> Callable[[Arguments], Arguments]:
    """What makes of a call's arguments those of `gradients`: it runs the program forward."""

    def enter(arguments: Arguments) -> Arguments:
        _, results = run_program(program, arguments, mutates=False)
        outputs = _with_graph(results.outputs)
        return (outputs, _wanting(arguments), [_incoming(output) for output in outputs]), {}

    return enter


def gradients(outputs: list[torch.Tensor], wanting: list[torch.Tensor], grad_outputs: list[torch.Tensor]) -> Any:
    """The gradients of the tensors that want one; None for those that have none."""
    return torch.autograd.grad(outputs, wanting, grad_outputs, allow_unused=True)


def gradient_graph(operator: Operator, arguments: Arguments) -> tuple[Function, tuple[Any, ...]]:
    """The gradients of a call as a graph of operators without autograd, and what it takes: saved tensors, and ones.

    Raises
    ------
    Unsupported : where AOTAutograd makes no such graph
    """
    call = TensorCall(Task(operator.function, *arguments))

    def backward(results: Any) -> Any:
        outputs = _with_graph(results)
        return gradients(outputs, _wanting(arguments), [_incoming(output) for output in outputs])

    graph_call = traced_backward(call.forward, tensors_in(list(arguments)), backward)
    if graph_call is None:
        raise Unsupported("AOTAutograd makes no graph of its gradients")
    graph, args = graph_call
    return graph, tuple(arg.detach() if isinstance(arg, torch.Tensor) else arg for arg in args)


def _wanting(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def _with_graph(outputs: Any) -> list[torch.Tensor]:
    return [leaf for leaf in leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None]


def _incoming(output: torch.Tensor) -> torch.Tensor:
    """Return the gradient that comes into a result: powers of two that vary along each dimension.

    Of ones, the gradients of softmax and of norms are zero whatever computes them. Powers of two add up exactly, in any
    order, as ones do.
    """
    gradient = torch.ones_like(output)
    if output.layout is torch.strided and not output.is_nested:
        for dim in range(gradient.dim()):
            gradient.movedim(dim, -1)[..., ::2].mul_(0.5)
    return gradient
