"""Larger batches: what a trace of a small batch says of a larger one is what a trace of that says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from opgrip.capture import Capture
from opgrip.replay.arguments.inputs import device_map
from opgrip.replay.cases import make_cases
from opgrip.replay.operators import Unsupported
from opgrip.replay.replay import replay
from opgrip.replay.settings import Settings
from opgrip.replay.sweeps.batch import Batches, scaled
from opgrip.replay.sweeps.growth import grown_steps
from opgrip.replay.timing.samples import Effort
from opgrip.traces import Trace, load
from opgrip.traces.arguments import TensorSpec, leaves

SHIPPED = Path(__file__).parents[2] / "traces" / "faster_rcnn.jsonl"


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.block, self.groups = nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.pool, self.head = nn.MaxPool2d(2), nn.Linear(8 * 5 * 5, 7)

    def forward(self, images: Tensor) -> Tensor:
        x = self.norm(self.stem(images)).relu_()
        x = self.pool(x + self.groups(self.block(x)))
        return self.head(x.flatten(1))


class Block(nn.Module):
    """A block of a transformer, with heads of its own and with torch's, and a class token."""

    def __init__(self, width: int = 15, heads: int = 3) -> None:
        super().__init__()
        self.heads = heads
        self.words, self.places = nn.Embedding(30, width), nn.Parameter(torch.randn(1, 6, width))
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.other = nn.MultiheadAttention(width, heads, batch_first=True)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        batch, _, width = x.shape
        x = torch.cat([self.token.expand(batch, -1, -1), x], dim=1) + self.places
        q, k, v = (
            part.view(batch, 6, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm(x)).chunk(3, dim=-1)
        )
        weights = (q @ k.transpose(-2, -1) / 2).softmax(-1)
        x = x + self.out((weights @ v + scaled_dot_product_attention(q, k, v)).transpose(1, 2).reshape(batch, 6, width))
        return (x + self.other(x, x, x, need_weights=False)[0])[:, 0]


def images(batch: int) -> Tensor:
    return torch.randn(batch, 3, 10, 10)


def words(batch: int) -> Tensor:
    return torch.randint(0, 30, (batch, 5))


def trained(model: nn.Module, data: Tensor, labels: Tensor) -> Callable[[], object]:
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(model(data), labels).backward()
        optimizer.step()

    return step


def predicted(model: nn.Module, data: Tensor, labels: Tensor) -> Callable[[], object]:
    model.eval()

    def step() -> None:
        with torch.no_grad():
            model(data)

    return step


def captured(folder: Path, program: Callable[[], object]) -> Trace:
    with Capture(folder / "t.jsonl"):
        program()
    return load(folder / "t.jsonl")


def described(signature: Any) -> str:
    """A call's tensors and numbers; strides of dimensions of one element mean nothing."""

    def told(leaf: object) -> object:
        if not isinstance(leaf, TensorSpec):
            return leaf
        steps = [step for step, size in zip(leaf.stride or (), leaf.shape, strict=True) if size > 1]
        return leaf.shape, tuple(steps), leaf.offset, leaf.dtype

    return f"{signature.op} {[told(leaf) for leaf in leaves([signature.args, signature.kwargs])]}"


def calls_of(trace: Trace) -> Counter[str]:
    counts: Counter[str] = Counter()
    for case in make_cases(trace):
        counts[described(case.signature)] += case.count
    return counts


def calls_scaled(trace: Trace, factor: int, batch: int | None = None) -> Counter[str]:
    batches = Batches(trace, batch)
    counts: Counter[str] = Counter()
    for case in make_cases(trace):
        counts[described(scaled(case, factor, batches).signature)] += case.count
    return counts


@pytest.mark.parametrize("way", [trained, predicted])
@pytest.mark.parametrize(("model", "data"), [(ConvNet, images), (Block, words)])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_scaled_batch_has_the_calls_of_a_larger_one(
    tmp_path: Path, model: type[nn.Module], data: Any, way: Any, layout: torch.memory_format
) -> None:
    traces = []
    for batch in (2, 4):
        torch.manual_seed(0)
        tensor = data(batch)
        if tensor.dim() == 4:
            tensor = tensor.to(memory_format=layout)
        program = way(model(), tensor, torch.zeros(batch, dtype=torch.int64))
        (tmp_path / str(batch)).mkdir()
        traces.append(captured(tmp_path / str(batch), program))
    got, wanted = calls_scaled(traces[0], 2), calls_of(traces[1])
    assert got - wanted == wanted - got == Counter()
