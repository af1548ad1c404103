"""Tests of batch scaling: a scaled trace of a small batch equals a trace of the larger batch."""

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import captured
from settings import rows_of, settings_of
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from opgrip.replay import replay
from opgrip.replay.cases.batch_scale import BatchScale, scaled
from opgrip.replay.cases.cases import make_cases
from opgrip.replay.operators.lookup import Unsupported
from opgrip.traces import Trace
from opgrip.traces.schema.arguments import TensorSpec, leaves


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
    """Transformer block with its own attention and torch's, and a class token."""

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


def described(signature: Any) -> str:
    """Return a call's tensors and numbers, ignoring strides of dimensions of size 1."""

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


def calls_scaled(trace: Trace, factor: int) -> tuple[Counter[str], int]:
    batches = BatchScale(trace)
    counts: Counter[str] = Counter()
    unsupported = 0
    for case in make_cases(trace):
        unsupported += case.count
        with suppress(Unsupported):
            counts[described(scaled(case, factor, batches).signature)] += case.count
            unsupported -= case.count
    return counts, unsupported


@pytest.mark.parametrize("way", [trained, predicted])
@pytest.mark.parametrize(
    ("model", "data", "layout", "known"),
    [
        (ConvNet, images, torch.contiguous_format, 0.95),
        (ConvNet, images, torch.channels_last, 0.95),
        # `nn.MultiheadAttention` moves the batch to the second dimension
        pytest.param(Block, words, torch.contiguous_format, 0.5, marks=pytest.mark.slow),
    ],
)
def test_scaled_batch_has_the_calls_of_a_larger_one(
    tmp_path: Path, model: type[nn.Module], data: Any, way: Any, layout: torch.memory_format, known: float
) -> None:
    traces = []
    for batch in (2, 4):
        torch.manual_seed(0)
        tensor = data(batch).to(memory_format=layout)
        program = way(model(), tensor, torch.zeros(batch, dtype=torch.int64))
        (tmp_path / str(batch)).mkdir()
        traces.append(captured(tmp_path / str(batch), program))
    (got, unsupported), wanted = calls_scaled(traces[0], 2), calls_of(traces[1])
    assert got - wanted == Counter()
    assert sum((wanted - got).values()) == unsupported <= (1 - known) * sum(wanted.values())


@pytest.mark.parametrize("way", [list, lambda x: [x[place] for place in range(len(x))]])
def test_calls_per_batch_element_keep_their_size_and_stacking_is_unsupported(tmp_path: Path, way: Any) -> None:
    conv = nn.Conv2d(3, 4, 1)

    def program() -> Tensor:
        features = conv(torch.ones(2, 3, 5, 5))
        return torch.stack([one.flatten(1).softmax(0) for one in way(features)]).relu()

    trace = captured(tmp_path, program)
    batches = BatchScale(trace)
    cases = {case.op: case for case in make_cases(trace)}
    assert scaled(cases["aten._softmax.default"], 4, batches) is cases["aten._softmax.default"]
    for op in ("aten.stack.default", "aten.relu.default"):
        with pytest.raises(Unsupported, match="lists of tensors are not scaled"):
            scaled(cases[op], 4, batches)


def test_data_dependent_shapes_and_their_consumers_are_not_scaled(tmp_path: Path) -> None:
    conv = nn.Conv2d(3, 4, 1)

    def program() -> None:
        features = conv(torch.ones(2, 3, 5, 5))
        chosen = features[features > 0]
        chosen.exp()
        conv.weight.abs()

    trace = captured(tmp_path, program)
    batches = BatchScale(trace)
    cases = {case.op: case for case in make_cases(trace)}
    with pytest.raises(Unsupported, match="depend on values"):
        scaled(cases["aten.index.Tensor"], 2, batches)
    with pytest.raises(Unsupported, match=r"aten\.index\.Tensor"):
        scaled(cases["aten.exp.default"], 2, batches)
    assert scaled(cases["aten.abs.default"], 2, batches) is cases["aten.abs.default"]


def test_each_step_has_a_batch_and_calls_without_one_are_unsupported(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 5)).eval()
    steps = [torch.randn(2, 8) for _ in range(3)]
    captured(tmp_path, lambda: [model(data) for data in steps])
    results = replay(tmp_path / "t.jsonl", batch_scale=[1, 4], iterations=1, warmup=0)
    larger = {row.op: (row.status, row.shapes, row.error) for row in results if row.batch_scale == 4}
    assert larger["aten.relu.default"][:2] == ("ok", "float32[8,6]")
    assert {status for status, *_ in larger.values()} == {"ok", "unsupported"}
    assert larger["aten.t.default"][::2] == ("unsupported", "none of its sizes is known to grow with the batch")


def test_batch_of_a_trace_without_a_network_is_unknown(tmp_path: Path) -> None:
    trace = captured(tmp_path, lambda: torch.ones(2, 3).sin())
    with pytest.raises(Unsupported, match="batch size of the trace is unknown"):
        scaled(make_cases(trace)[0], 2, BatchScale(trace))


def test_scaled_case_returns_the_expected_shapes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    trace = captured(tmp_path, trained(ConvNet(), images(2), torch.zeros(2, dtype=torch.int64)))
    batches = BatchScale(trace)
    cases = []
    for case in make_cases(trace):
        with suppress(Unsupported):
            cases.append(scaled(case, 3, batches))
    settings = settings_of(warmup=0, iterations=1, cache="warm")
    for row in rows_of(cases, settings):
        assert (row.status, row.error, row.faithful) in (("ok", None, True), ("ok", None, None)), row.op
