"""Arguments are made again as they were recorded, and stay so from run to run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opgrip.capture.signatures import describe_call
from opgrip.replay.inputs import Inputs, device_map
from opgrip.replay.operators import Unsupported
from opgrip.traces import values
from opgrip.traces.arguments import GeneratorSpec, Opaque
from opgrip.traces.values import ValueModel

HERE = device_map("cpu", None)


def described(*args: Any) -> tuple[tuple[Any, ...], dict[int, ValueModel]]:
    """A call's arguments as a trace holds them, and their value models."""
    models: dict[int, ValueModel] = {}

    def fit(tensor: torch.Tensor) -> int | None:
        model = values.fit(tensor)
        if model is None:
            return None
        models[len(models)] = model
        return len(models) - 1

    return describe_call(args, {}, fit)[0], models


def made(*args: Any) -> tuple[Any, ...]:
    specs, models = described(*args)
    return Inputs(specs, {}, models, HERE, seed=0).make()[0]


@st.composite
def layouts(draw: st.DrawFn) -> torch.Tensor:
    """A view of some memory: permuted, stepped, cut out, expanded or of overlapping windows."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8]
    dtype = draw(st.sampled_from(dtypes))
    tensor = torch.randint(0, 5, [size * 2 for size in shape]).to(dtype)
    for dimension in range(len(shape)):
        start, step = draw(st.integers(0, 1)), draw(st.integers(1, 2))
        tensor = tensor[(slice(None),) * dimension + (slice(start, None, step),)]
    tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
    if draw(st.booleans()):
        tensor = tensor[..., :1].expand(*tensor.shape[:-1], 7)
    if draw(st.booleans()):
        tensor = tensor.unfold(0, 1, 1)
    return tensor


@given(layouts())
@settings(max_examples=200, deadline=None)
def test_a_tensor_has_its_recorded_layout_again(tensor: torch.Tensor) -> None:
    (again,) = made(tensor)
    assert again.shape == tensor.shape
    assert again.stride() == tensor.stride()
    assert again.storage_offset() == tensor.storage_offset()
    assert again.dtype == tensor.dtype
    if tensor.numel() <= 64 and 0 not in tensor.stride():
        assert torch.equal(again, tensor)


def test_windows_that_overlap_are_filled() -> None:
    (again,) = made(torch.arange(100.0).unfold(0, 9, 1))
    assert again.stride() == (1, 1)
    assert bool(again.isfinite().all())


def test_arguments_that_shared_memory_share_it_again() -> None:
    base = torch.zeros(4, 6)
    whole, row, other = made(base, base[1:2, 2:], torch.zeros(3))
    row.fill_(7)
    assert whole[1, 2:].tolist() == [7] * 4
    assert float(whole.sum()) == 28
    assert float(other.sum()) == 0


def test_requires_grad_conj_and_neg_are_kept() -> None:
    complex_values = torch.randn(3, dtype=torch.complex64)
    weight, conjugate, negated = made(
        torch.randn(3, requires_grad=True), complex_values.conj(), complex_values.conj().imag
    )
    assert weight.requires_grad
    assert conjugate.is_conj()
    assert negated.is_neg()


def test_the_same_seed_draws_the_same_values() -> None:
    specs, models = described(torch.randn(500))
    draws = [Inputs(specs, {}, models, HERE, seed=seed).make()[0][0] for seed in (0, 0, 1)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


@pytest.mark.parametrize(
    "mutate",
    [
        lambda tensor: tensor.mul_(3),
        lambda tensor: tensor.t_().zero_(),
        lambda tensor: tensor.resize_(0),
        lambda tensor: tensor.resize_(50, 50),
        lambda tensor: tensor.set_(torch.ones(7)),
    ],
)
def test_whatever_an_operator_does_to_its_arguments_is_undone(mutate: Any) -> None:
    specs, models = described(torch.randn(5, 6).t())
    inputs = Inputs(specs, {}, models, HERE, seed=0)
    inputs.keep()
    before = inputs.make()[0][0].clone()
    mutate(inputs.make()[0][0])
    inputs.restore()
    (after,) = inputs.make()[0]
    assert torch.equal(after, before)
    assert after.stride() == (1, 6)


def test_nested_arguments_and_generators_are_made() -> None:
    args = ([torch.ones(2), None], (1, {"a": torch.zeros(1)}), GeneratorSpec("cpu", 9), torch.device("cpu"))
    specs, models = described(*args[:2])
    nested, pair, generator, device = Inputs((*specs, *args[2:]), {}, models, HERE, seed=0).make()[0]
    assert nested[0].tolist() == [1, 1]
    assert nested[1] is None
    assert isinstance(pair, tuple)
    assert pair[1]["a"].tolist() == [0]
    assert generator.initial_seed() == 9
    assert device == torch.device("cpu")


def test_devices_are_mapped_as_asked() -> None:
    to_cpu, to_other = device_map("cuda:0", "cpu"), device_map("cuda:0", "cuda:1")
    assert (to_cpu("cuda:0"), to_cpu("cpu")) == ("cpu", "cpu")
    assert (to_other("cuda:0"), to_other("cpu")) == ("cuda:1", "cpu")
    assert device_map("cpu", "meta")("cpu") == "meta"


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(
    ("argument", "told"),
    [
        (lambda: torch.eye(3).to_sparse(), "layout sparse_coo"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 1, 0, torch.quint8), "dtype quint8"),
        (object, "type builtins.object"),
    ],
)
def test_what_cannot_be_made_is_said(argument: Any, told: str) -> None:
    specs, models = described(argument())
    with pytest.raises(Unsupported, match=told):
        Inputs(specs, {}, models, HERE, seed=0)


def test_opaque_arguments_are_found_in_the_depths() -> None:
    with pytest.raises(Unsupported, match=r"type a\.B"):
        Inputs(([{"x": Opaque("a.B")}],), {}, {}, HERE, seed=0)
