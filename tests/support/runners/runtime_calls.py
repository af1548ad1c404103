"""Calls that every mode must support, and a run of one call under a mode."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from programs import run_python
from torch import Tensor

from opgrip.replay.modes import RunOutputs, Task, find_mode
from opgrip.replay.run.programs import run_program


def attention(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    weights = (query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5).softmax(-1)
    return weights @ value, weights.argmax(-1)


def decode(anchors: Tensor, deltas: Tensor) -> Tensor:
    sizes = anchors[:, 2:] - anchors[:, :2]
    centers = anchors[:, :2] + 0.5 * sizes + deltas[:, :2] * sizes
    half = 0.5 * sizes * deltas[:, 2:].clamp(max=4.0).exp()
    return torch.cat([centers - half, centers + half], dim=1)


aten = torch.ops.aten
CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "an operator": (aten.add.Tensor, (torch.randn(3, 4), torch.randn(4))),
    "boxes from deltas": (decode, (torch.rand(5, 4), torch.rand(5, 4))),
    "attention": (attention, tuple(torch.randn(3, 2, 5, 4))),
    "a tensor that the function makes": (lambda x: x + torch.arange(3), (torch.ones(3, dtype=torch.int64),)),
    "integers of 64 bits": (aten.mul.Tensor, (torch.arange(4) + 2**40, torch.arange(4))),
    "a float added to integers": (aten.add.Scalar, (torch.arange(4), 0.5)),
    "floats of 64 bits": (aten.mul.Scalar, (torch.randn(4, dtype=torch.float64), 3)),
    "floats of 16 bits": (aten.add.Scalar, (torch.randn(4).bfloat16(), 1.5)),
    "booleans": (aten.logical_not.default, (torch.tensor([True, False]),)),
    "an argument as it came": (lambda x: (x, x + 1), (torch.randn(3),)),
    "no elements": (aten.exp.default, (torch.zeros(0, 4),)),
    "a conjugate view": (aten.abs.default, (torch.randn(3, dtype=torch.complex64).conj(),)),
    "a transposed argument": (aten.relu.default, (torch.randn(3, 4).t(),)),
    "an argument that asks for gradients": (aten.relu.default, (torch.randn(3, requires_grad=True),)),
    "an argument that begins anywhere in memory": (aten.exp.default, (torch.randn(65)[1:],)),
    "several results": (aten.topk.default, (torch.randperm(9).float(), 3)),
}


def run(name: str, function: Callable[..., Any], *args: Any, **about: Any) -> RunOutputs:
    """Return the results of the call `function(*args)` under the mode `name`; `about` has further fields of `Task`."""
    mode, argument = find_mode(name)
    example = tuple(arg.clone() if about.get("mutates") else arg for arg in args)
    program = mode.make(Task(function, example, {}, argument=argument, **about))
    _, results = run_program(program, (args, {}), about.get("mutates", False))
    return results


def run_script(folder: Path, text: str) -> None:
    """Run a program in a separate process, since runtimes are set up once per process."""
    script = folder / "script.py"
    script.write_text(text)
    run_python(script, status=0)
