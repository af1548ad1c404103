"""Script that prints the results of torch.compile for functions, modules, nested modules and training steps."""

import json
from collections.abc import Callable

import torch
from torch import nn


def new_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Sequential(nn.Linear(8, 4), nn.ReLU()))


class Outer(nn.Module):
    """Module that calls a compiled module."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.head = compiled(new_net()), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.net(x))


def compiled(thing: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return torch.compile(thing, backend="aot_eager")


def function() -> None:
    step = compiled(lambda x: (x.sin() + 1).relu().sum())
    for _ in range(3):
        step(torch.ones(8))


def module() -> None:
    net = compiled(new_net())
    with torch.no_grad():
        for _ in range(3):
            net(torch.ones(5, 8))


def function_of_module() -> None:
    net = new_net()
    step = compiled(lambda x: net(x).sum() + 1)
    for _ in range(3):
        step(torch.ones(5, 8))


def module_in_module() -> None:
    net = Outer()
    for _ in range(3):
        net(torch.ones(5, 8))


def broken() -> None:
    net = new_net()

    def step(x: torch.Tensor) -> torch.Tensor:
        y = net(x)
        torch._dynamo.graph_break()
        return net(y.repeat(1, 2)).sum()

    for _ in range(2):
        compiled(step)(torch.ones(5, 8))


def other_shapes() -> None:
    net = compiled(new_net())
    for rows in (5, 6, 7):
        net(torch.ones(rows, 8))


def training() -> None:
    net = new_net()
    step, optimizer = compiled(net), torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        step(torch.ones(5, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


PROGRAMS = (function, module, function_of_module, module_in_module, broken, other_shapes, training)

if __name__ == "__main__":
    for program in PROGRAMS:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        program()
        counters = torch._dynamo.utils.counters
        counts = {name: dict(counters[name]) for name in ("stats", "frames", "graph_break")}
        print(program.__name__, json.dumps(counts, sort_keys=True))
