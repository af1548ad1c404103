"""Tests of batch scaling: a scaled trace of a small batch equals a trace of the larger batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import captured
from settings import rows_of, settings_of
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from opgrip.replay.batch_scale.batch_scale import BatchScale, scaled
from opgrip.replay.batch_scale.growth import grown_steps
from opgrip.replay.cases.cases import make_cases
from opgrip.replay.operators.lookup import Unsupported
from opgrip.traces import Trace, load
from opgrip.traces.schema.arguments import TensorSpec, leaves

SHIPPED = Path(__file__).parents[3] / "traces" / "faster_rcnn.jsonl"


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


def calls_scaled(trace: Trace, factor: int) -> Counter[str]:
    batches = BatchScale(trace)
    counts: Counter[str] = Counter()
    for case in make_cases(trace):
        counts[described(scaled(case, factor, batches).signature)] += case.count
    return counts


@pytest.mark.parametrize("way", [trained, predicted])
@pytest.mark.parametrize(
    ("model", "data", "layout"),
    [
        (ConvNet, images, torch.contiguous_format),
        (ConvNet, images, torch.channels_last),
        (Block, words, torch.contiguous_format),
    ],
)
def test_scaled_batch_has_the_calls_of_a_larger_one(
    tmp_path: Path, model: type[nn.Module], data: Any, way: Any, layout: torch.memory_format
) -> None:
    traces = []
    for batch in (2, 4):
        torch.manual_seed(0)
        tensor = data(batch).to(memory_format=layout)
        program = way(model(), tensor, torch.zeros(batch, dtype=torch.int64))
        (tmp_path / str(batch)).mkdir()
        traces.append(captured(tmp_path / str(batch), program))
    got, wanted = calls_scaled(traces[0], 2), calls_of(traces[1])
    assert got - wanted == wanted - got == Counter()


def test_part_of_the_calls_of_a_signature_scales_as_all_of_them(tmp_path: Path) -> None:
    trace = captured(tmp_path, predicted(ConvNet(), images(2), torch.zeros(2, dtype=torch.int64)))
    batches = BatchScale(trace)
    for case in make_cases(trace):
        part = replace(case, signature=replace(case.signature, number=10_000), part_of=case.number)
        assert described(scaled(part, 2, batches).signature) == described(scaled(case, 2, batches).signature)


@pytest.mark.parametrize("length", [4, 2])
def test_batch_is_followed_into_a_flattened_dimension(tmp_path: Path, length: int) -> None:
    # different widths, so that the two have no signature in common
    linear, other, x = nn.Linear(5, 3), nn.Linear(5, 4), torch.randn(2, length, 5)

    def program(x: Tensor) -> Tensor:
        batch = x.shape[0]
        outer = linear(x.reshape(-1, 5)).view(batch, length, 3)
        inner = other(x.transpose(0, 1).reshape(-1, 5)).view(length, batch, 4)
        return (outer + inner.transpose(0, 1).sum(2, keepdim=True)).view(batch, -1, 1)

    (tmp_path / "large").mkdir()
    small = captured(tmp_path, lambda: program(x))
    large = captured(tmp_path / "large", lambda: program(x.repeat(3, 1, 1)))
    (tmp_path / "large" / "t.jsonl").unlink()
    wanted = calls_of(large)
    del wanted[next(op for op in wanted if op.startswith("aten.repeat"))]
    assert calls_scaled(small, 3) == wanted


def test_sizes_computed_from_the_batch_scale_with_it(tmp_path: Path) -> None:
    cell, table = nn.LSTMCell(5, 6), nn.Linear(6, 2)

    def program(batch: int) -> Callable[[], object]:
        x = torch.randn(batch, 4, 5)

        def run() -> Tensor:
            state = torch.zeros(batch, 6), x.new_zeros([batch, 6])
            for step in range(4):
                state = cell(x[:, step], state)
            mean = table(state[0]) - torch.full([3], 2.0).mean()
            return mean.expand(7, batch, 2)

        return run

    (tmp_path / "large").mkdir()
    small, large = captured(tmp_path, program(2)), captured(tmp_path / "large", program(10))
    assert calls_scaled(small, 5) == calls_of(large)


@pytest.mark.parametrize("way", [list, lambda x: [x[place] for place in range(len(x))]])
def test_calls_per_batch_element_keep_their_size_and_stacking_grows(tmp_path: Path, way: Any) -> None:
    conv = nn.Conv2d(3, 4, 1)

    def program() -> Tensor:
        features = conv(torch.ones(2, 3, 5, 5))
        return torch.stack([one.flatten(1).softmax(0) for one in way(features)]).relu()

    trace = captured(tmp_path, program)
    batches = BatchScale(trace)
    cases = {case.op: (case, scaled(case, 4, batches)) for case in make_cases(trace)}
    case, same = cases["aten._softmax.default"]
    assert same is case
    _, stacked = cases["aten.stack.default"]
    assert len(stacked.signature.args[0]) == 8
    assert stacked.signature.outputs.shape == (8, 4, 25)
    assert cases["aten.relu.default"][1].signature.args[0].shape == (8, 4, 25)


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


def test_unscalable_call_does_not_affect_calls_before_it(tmp_path: Path) -> None:
    conv = nn.Conv2d(3, 4, 1)

    def program() -> None:
        features = conv(torch.ones(2, 3, 5, 5)).relu()
        for _ in range(3):
            features = features.index_put((features > 0,), torch.tensor(1.0)).where(features.nonzero().sum() > 9, 2.0)
            features.relu()

    trace = captured(tmp_path, program)
    (case,) = (case for case in make_cases(trace) if case.op == "aten.relu.default")
    assert scaled(case, 2, BatchScale(trace)).signature.args[0].shape == (4, 4, 5, 5)


def test_batch_of_a_trace_without_a_network_is_unknown(tmp_path: Path) -> None:
    trace = captured(tmp_path, lambda: torch.ones(2, 3).sin())
    with pytest.raises(Unsupported, match="batch size of the trace is unknown"):
        scaled(make_cases(trace)[0], 2, BatchScale(trace))


def test_scaled_case_returns_the_expected_shapes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    trace = captured(tmp_path, trained(ConvNet(), images(2), torch.zeros(2, dtype=torch.int64)))
    batches = BatchScale(trace)
    cases = [scaled(case, 3, batches) for case in make_cases(trace) if case.op.startswith("aten")]
    settings = settings_of(warmup=0, iterations=1, cache="warm")
    for row in rows_of(cases, settings):
        assert (row.status, row.error, row.faithful) in (("ok", None, True), ("ok", None, None)), row.op


def test_shipped_detector_scales_except_for_calls_after_its_proposals() -> None:
    trace = load(SHIPPED)
    batches = BatchScale(trace)
    assert batches.batch == 1
    cases, known = make_cases(trace), 0
    for case in cases:
        try:
            changed = scaled(case, 4, batches)
        except Unsupported:
            continue
        known += 1
        if case.op in ("aten.convolution.default", "aten.native_batch_norm.default", "aten.relu_.default"):
            before, after = case.signature.args[0].shape, changed.signature.args[0].shape
            assert after == (before[0] * 4, *before[1:])
    print(f"{known} of {len(cases)} signatures are known")
    assert known >= 0.8 * len(cases)


@pytest.mark.parametrize(
    ("shape", "stride", "grows", "steps"),
    [
        ((2, 3, 4), (12, 4, 1), [0], ()),
        ((3, 2, 4), (8, 4, 1), [1], (0,)),
        ((3, 2, 4), (4, 12, 1), [1], ()),
        ((2, 3, 4, 5), (60, 1, 15, 3), [0], ()),
        ((3, 1, 4), (4, 4, 1), [1], (0,)),
        ((1, 3, 4), (12, 4, 1), [0], ()),
        ((1, 1, 4), (4, 4, 1), [0], ()),
        ((3, 2, 4), (0, 4, 1), [1], ()),
        ((3, 2), (1, 3), [1], ()),
        ((3, 2), (2, 1), [1], (0,)),
    ],
)
def test_strides_across_the_batch_grow(
    shape: tuple[int, ...], stride: tuple[int, ...], grows: list[int], steps: tuple[int, ...]
) -> None:
    assert grown_steps(shape, stride, grows) == steps
