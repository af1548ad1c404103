"""Parser of call blocks into columns, compared with Python's JSON parser on any line."""

from __future__ import annotations

import json
from contextlib import suppress
from itertools import accumulate
from time import process_time

from hypothesis import given
from hypothesis import strategies as st

from opgrip.traces.codec.call_blocks import block_of, parse_block, perturbed_flags, record_of
from opgrip.traces.codec.record_forms import from_json
from opgrip.traces.io.writer import encode_line
from opgrip.traces.schema.arguments import FormatError
from opgrip.traces.schema.records import NO_STORAGE, Calls


def runs_of(calls: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(0, calls - 1), st.integers(0, 2 * calls) | st.just(10**30))


@st.composite
def records(draw: st.DrawFn) -> Calls:
    calls = draw(st.integers(1, 12))

    def column(values: st.SearchStrategy[int]) -> list[int]:
        return draw(st.lists(values, min_size=calls, max_size=calls))

    small = st.integers(0, 3)
    tensors = column(small) if draw(st.booleans()) else []
    storages = st.just(NO_STORAGE) | st.integers(0, 5) | st.integers(0, 10**12)
    places = st.lists(st.tuples(st.integers(0, calls - 1), st.integers(0, 20)), max_size=3)
    return Calls(
        *(draw(small), column(small), column(st.integers(0, 300)), list(accumulate(column(st.integers(-9, 10**9))))),
        *(column(st.integers(0, 10**12)), tensors),
        draw(st.lists(storages, min_size=sum(tensors), max_size=sum(tensors))),
        newest=draw(st.integers(-1, 10**13)),
        device_ns=draw(st.just([]) | st.lists(st.integers(-1, 9), min_size=calls, max_size=calls)),
        page_faults=draw(places),
        streams=draw(st.just([]) | st.lists(st.integers(1, 9), min_size=calls, max_size=calls)),
        perturbed=draw(places),
        slow_memory=draw(places),
    )


@given(records())
def test_captured_block_is_parsed_directly(record: Calls) -> None:
    line = encode_line(record)[:-1]
    block = parse_block(line)
    assert block is not None
    assert record_of(block) == from_json(json.loads(line)) == record
    assert record_of(block_of(record)) == record


CHANGES = [
    b"",
    b"0",
    b"]",
    b'"',
    b"1e3",
    b" ",
    b"9" * 17,
    b"0",
    b"-0",
    b",,",
    b"\xff",
]


@given(records(), st.data())
def test_changed_block_is_parsed_like_json_or_left_to_json(record: Calls, data: st.DataObject) -> None:
    line = encode_line(record)[:-1]
    place = data.draw(st.integers(0, len(line)))
    end = place + data.draw(st.integers(0, 3))
    changed = line[:place] + data.draw(st.sampled_from(CHANGES)) + line[end:]
    block = parse_block(changed)
    if block is not None:
        assert record_of(block) == from_json(json.loads(changed))


def test_invalid_json_is_not_parsed() -> None:
    line = encode_line(Calls(0, [1, 2], [3, 4], [5, 6], [7, 8], [1, 0], [9]))[:-1]
    assert parse_block(line) is not None
    refused = [
        (b'"duration_ns":[7,8]', b'"duration_ns":[7,-8]'),
        (b'"duration_ns":[7,8]', b'"duration_ns":[7]'),
        (b'"tensors":[1,0]', b'"tensors":[2,0]'),
        (b'"tensors":[1,0],"newest":-1,"storages":[10]', b'"newest":-1,"storages":0'),
        (b'"start_ns":5', b'"start_ns":4611686018427387904'),
        (b'"thread":0', b'"thread":9223372036854775808'),
        (b'"newest":-1', b'"newest":-1,"perturbed":[[2,1]]'),
    ]
    assert parse_block(line.replace(b'"calls",', b'"calls",0')) is None
    for before, after in refused:
        assert before in line
        changed = line.replace(before, after)
        assert parse_block(changed) is None
        with suppress(FormatError):
            raise AssertionError(from_json(json.loads(changed)))


def test_overflowing_tensor_counts_are_refused() -> None:
    count, each = 1846, 9998 * 10**12
    tensors = [each] * (count - 1)
    tensors.append(2**64 + 1 - sum(tensors))
    ones = [1] * count
    line = encode_line(Calls(0, ones, ones, ones, ones, tensors, [9]))[:-1]
    assert 0 <= tensors[-1] < 10**16
    assert parse_block(line) is None


@given(st.integers(1, 30).flatmap(lambda calls: st.tuples(st.just(calls), st.lists(runs_of(calls), max_size=8))))
def test_overlapping_perturbed_runs_mark_the_right_calls(block: tuple[int, list[tuple[int, int]]]) -> None:
    calls, runs = block
    expected = [any(place <= call < place + count for place, count in runs) for call in range(calls)]
    assert perturbed_flags(runs, calls).tolist() == expected


def test_hundred_thousand_overlapping_runs_are_cheap() -> None:
    calls = 100_000
    began = process_time()
    assert perturbed_flags([(0, 10**15)] * calls, calls).all()
    assert process_time() - began < 2
