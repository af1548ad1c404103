"""Value models of integers: drawn values index, collide and sort like the recorded ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from redrawn import drawn, fitted, seeded

from opgrip.traces.values import fit
from opgrip.traces.values.integers import Integers
from opgrip.traces.values.order import Permutation
from opgrip.traces.values.progression import Offsets, Progression

TOP = torch.iinfo(torch.int64).max


@given(st.integers(66, 5000), st.integers(-1000, 1000), st.integers(2, 100_000), st.floats(0.2, 4), st.integers(0, 9))
@settings(deadline=None, max_examples=30)
def test_fit_of_drawn_integers_equals_the_model(count: int, low: int, width: int, bend: float, seed: int) -> None:
    tensor = (torch.rand(count, generator=seeded(seed)).double().pow(bend) * width).long() + low
    # neither constant nor sorted
    tensor[0], tensor[1], tensor[2] = low + 1, low, low + 1
    model = fitted(tensor, Integers)
    values = drawn(model, tensor)
    again = fit(values)
    assert isinstance(again, Integers)
    assert again.distinct == model.distinct
    assert torch.equal(torch.stack(values.aminmax()), torch.stack(tensor.aminmax()))
    # other values of equal frequency may be kept last; single negative values are kept only if there are few others
    counts = sorted(count for value, count in model.frequent if value and (value > 0 or count > 1))
    counts_again = sorted(count for value, count in again.frequent if value and (value > 0 or count > 1))
    assert counts_again == pytest.approx(counts, abs=1)
    for value, count in model.frequent:
        assert int((values == value).sum()) == count


def test_tail_of_a_skewed_tensor_stays_skewed() -> None:
    tensor = torch.rand(200_000, generator=seeded(0)).double().pow(-1.5).long() % 100_003
    model = fitted(tensor, Integers)
    assert model.zipf > 0.5
    again = fitted(drawn(model, tensor), Integers)
    assert again.zipf == pytest.approx(model.zipf, abs=0.35)
    assert int(drawn(model, tensor).bincount().max()) == int(tensor.bincount().max())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.uint16, torch.uint32])
def test_integers_of_every_width_are_fitted_and_drawn(dtype: torch.dtype) -> None:
    tensor = torch.randint(0, 100, (3000,), generator=seeded(0)).to(dtype)
    again = drawn(fitted(tensor, Integers), tensor)
    assert int(again.long().max()) == 99
    assert len(again.long().unique()) == 100


def test_integers_over_the_full_range_are_drawn() -> None:
    tensor = torch.randint(-TOP, TOP, (500,), generator=seeded(0))
    tensor[3], tensor[5] = -TOP - 1, TOP
    again = drawn(fitted(tensor, Integers), tensor)
    assert (int(again.min()), int(again.max())) == (-TOP - 1, TOP)
    assert len(again.unique()) == 500


def test_rare_zeros_are_counted() -> None:
    tensor = torch.randint(-5000, 5000, (20_000,), generator=seeded(0))
    for zeros in (0, 1, 5):
        tensor[tensor == 0] = 7
        tensor[100 : 100 + zeros] = 0
        assert int((drawn(fitted(tensor, Integers), tensor) == 0).sum()) == zeros


@pytest.mark.parametrize("is_old", [False, True])
def test_single_ignore_index_is_the_only_negative_value(is_old: bool) -> None:
    labels = torch.randperm(31_900, generator=seeded(0))[:129]
    labels[5] = -100
    model = fitted(labels, Integers)
    if is_old:
        model = replace(model, frequent=[[0, 0]], low=-100, others=129)
    for seed in range(10):
        again = model.draw((129,), torch.int64, seeded(seed))
        assert again[again < 0].tolist() == [-100]
        assert len(again.unique()) == 129


def test_integers_have_the_given_total() -> None:
    tensor = torch.randint(0, 1000, (3000,), generator=seeded(0))
    model = Integers([[0, 100]], 1, 999, 2900, False, 800, total=int(tensor.sum()))
    again = drawn(model, tensor)
    assert int(again.sum()) == int(tensor.sum())
    assert (int(again.min()), int(again.max())) == (0, 999)


@given(
    st.integers(-1000, 1000),
    st.integers(-50, 50).filter(bool),
    st.integers(1, 40),
    st.integers(2, 200),
    st.integers(66, 3000),
)
@settings(deadline=None, max_examples=30)
def test_progression_is_kept_exactly(start: int, step: int, repeats: int, period: int, count: int) -> None:
    tensor = start + step * (torch.arange(count) // repeats % period)
    if count <= repeats:
        return
    for values in (tensor, tensor.float(), tensor.double() / 4):
        assert torch.equal(drawn(fitted(values, Progression), values), values)


def test_long_progressions_are_found_by_some_of_their_elements() -> None:
    y, x = torch.meshgrid(torch.arange(700), torch.arange(1100), indexing="ij")
    for tensor in (y, x, y.T, x.T, torch.arange(900_000) * 3 - 7, y.reshape(-1).to(torch.uint16), y.repeat(2, 1) / 8):
        assert torch.equal(drawn(fitted(tensor, Progression), tensor), tensor)


def test_tensor_that_only_starts_like_a_progression_gets_another_model() -> None:
    zeros = torch.zeros(1 << 19)
    zeros[1 << 18 :] = torch.rand(1 << 18)
    ramp = torch.arange(1 << 19)
    ramp[1 << 18 :] += 1
    for tensor in (zeros, zeros.flip(0), ramp, torch.arange(1 << 19) // 100_000 % 3 * 2 % 3):
        assert Progression.fit(tensor) is None


def test_largest_integers_can_be_drawn() -> None:
    for tensor in (torch.arange(TOP - 99, TOP), torch.full((100,), TOP), torch.tensor([*range(99), TOP])):
        model = fit(tensor)
        assert model is not None
        assert int(drawn(model, tensor).max()) == int(tensor.max())


@given(st.integers(66, 3000), st.integers(-100, 100), st.integers(0, 9))
@settings(deadline=None, max_examples=30)
def test_permutation_stays_a_permutation(count: int, low: int, seed: int) -> None:
    tensor = torch.randperm(count, generator=seeded(seed + 2)) + low
    again = drawn(fitted(tensor, Permutation), tensor)
    assert torch.equal(again.sort().values, torch.arange(count) + low)
    assert not torch.equal(again, tensor)
    shorter, longer = (Permutation(low, low + count - 1).draw((size,), torch.int64, seeded(0)) for size in (9, 7000))
    assert len(shorter.unique()) == 9
    assert len(longer.unique()) == count


@given(
    st.lists(st.integers(0, 10), min_size=66, max_size=900).filter(lambda lengths: len({*lengths[1:-1]}) > 1),
    st.integers(-99, 99),
)
@settings(deadline=None, max_examples=30)
def test_offsets_keep_their_ends_and_lengths(lengths: list[int], first: int) -> None:
    tensor = torch.tensor([first, *lengths]).cumsum(0)
    if type(fit(tensor)) is Progression:
        return
    again = drawn(fitted(tensor, Offsets), tensor)
    assert (int(again[0]), int(again[-1])) == (int(tensor[0]), int(tensor[-1]))
    assert torch.equal(again.diff().sort().values, tensor.diff().sort().values)


def order_kinds(count: int) -> dict[str, torch.Tensor]:
    values = torch.randint(0, 5000, (count,), generator=seeded(0))
    walk = torch.randint(-3, 4, (count,), generator=seeded(1)).cumsum(0)
    return {
        "descending": values.sort(descending=True).values,
        "ascending runs": values.reshape(8, -1).sort(dim=-1).values.reshape(-1),
        "ascending rows": values.reshape(8, -1).sort(dim=-1).values,
        "descending rows": values.reshape(8, -1).sort(dim=-1, descending=True).values,
        "blocks": (values[: count // 8] // 9).repeat_interleave(8),
        "near": walk,
        "shuffled": values,
        "few": values % 3,
    }


@pytest.mark.parametrize("kind", order_kinds(80))
def test_order_of_integers_is_kept(kind: str) -> None:
    tensor = order_kinds(8000)[kind]
    model = fitted(tensor, Integers)
    again = fit(drawn(model, tensor))
    assert isinstance(again, Integers)
    assert again.rises == pytest.approx(model.rises, abs=0.03)
    assert again.falls == pytest.approx(model.falls, abs=0.03)
    assert model.step is not None
    # a drawn walk may have larger steps than the recorded one of the same values
    assert again.step == pytest.approx(model.step, rel=1 if kind == "near" else 0.1)
    assert again.by_row == model.by_row
