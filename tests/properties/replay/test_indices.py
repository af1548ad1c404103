"""Properties of generated indices: random ones become valid, and valid ones stay unchanged."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from opgrip.replay.inputs.layouts import distinct_in_rows, distinct_places, fitting_lengths

anything = st.integers(-(2**40), 2**40)


@st.composite
def rows(draw: st.DrawFn) -> tuple[torch.Tensor, int, int]:
    """Draw lengths of any value, their upper limit and their required sum."""
    batch, count, most = draw(st.integers(1, 3)), draw(st.integers(1, 8)), draw(st.integers(0, 9))
    drawn = draw(st.lists(anything | st.integers(0, most), min_size=batch * count, max_size=batch * count))
    return torch.tensor(drawn).reshape(batch, count), most, draw(st.integers(0, count * most))


@given(rows())
def test_fitted_lengths_are_valid_and_have_the_requested_sum(case: tuple[torch.Tensor, int, int]) -> None:
    drawn, most, total = case
    lengths = fitting_lengths(drawn, most, total)
    assert lengths.shape == drawn.shape
    assert bool(((lengths >= 0) & (lengths <= most)).all())
    assert set(lengths.sum(-1).tolist()) == {total}


@given(rows())
def test_valid_lengths_are_unchanged(case: tuple[torch.Tensor, int, int]) -> None:
    drawn, most, total = case
    lengths = fitting_lengths(drawn, most, total)
    assert torch.equal(fitting_lengths(lengths, most, total), lengths)


def test_lengths_are_valid_beyond_the_precision_of_floats() -> None:
    most = (1 << 59) // 3
    lengths = fitting_lengths(torch.tensor([0, most, 1]), most, 2 * most + 7)
    assert int(lengths.sum()) == 2 * most + 7
    assert int(lengths.max()) <= most


@given(rows(), st.randoms(use_true_random=False))
def test_columns_ascend_in_each_row_without_duplicates(case: tuple[torch.Tensor, int, int], random: object) -> None:
    drawn, most, total = case
    lengths = fitting_lengths(drawn, most, total).reshape(-1)
    values = [random.randrange(-20, 20) for _ in range(int(lengths.sum()))]  # type: ignore[attr-defined]
    columns = distinct_in_rows(torch.tensor(values, dtype=torch.int64), lengths, most)
    for row in columns.split(lengths.tolist()):
        assert row.tolist() == sorted(set(row.tolist()))
        assert all(0 <= column < most for column in row.tolist())
    assert torch.equal(distinct_in_rows(columns, lengths, most), columns)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.data())
def test_places_ascend_without_duplicates(sizes: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(0, torch.Size(sizes).numel()))
    drawn = torch.stack(
        [torch.tensor(data.draw(st.lists(st.integers(0, size - 1), min_size=count, max_size=count))) for size in sizes]
    ).long()
    places = [tuple(place) for place in distinct_places(drawn, tuple(sizes)).t().tolist()]
    assert len(places) == count
    assert places == sorted(set(places))
    assert all(0 <= index < size for place in places for index, size in zip(place, sizes, strict=True))
