"""Ranges in PARAM's operator configurations, and parts of the cases that they describe."""

from __future__ import annotations

import json
import random
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from param_configs import RANGES, entry, number, operator, ranged, read, shapes, tensor
from programs import run_command, succeed

from opgrip.cli.option_types import Cut
from opgrip.errors import UserError
from opgrip.traces import load
from opgrip.traces.formats.configurations.param import MOST_CASES

FAST = ("--iterations", "1", "--warmup", "0", "--device", "cpu")


def test_value_of_a_range_does_not_depend_on_other_cases(tmp_path: Path) -> None:
    argument = {"type": "int", "value_range": [100, 1 << 40]}
    operators = {"aten::add": operator(entry(ranged([1, 50, 1]), argument), input_iterator=RANGES)}
    values = [signature.args[1] for signature in read(tmp_path, operators).signatures]
    assert len(set(values)) == 50
    assert all(100 <= value <= 1 << 40 for value in values)
    assert [item.args[1] for item in read(tmp_path, operators, Cut(7, 9)).signatures] == values[7:9]


def test_ranges_are_combined_with_the_last_argument_fastest(tmp_path: Path) -> None:
    operators = {
        "aten::add": operator(
            entry(
                ranged([1, 2], 3, [4, 8, 2], dtype=["float", "double"]) | {"__range__": ["shape", "dtype"]},
                tensor(1),
                alpha=number([5, 7], __range__=["value"]),
            ),
            input_iterator=RANGES,
        )
    }
    trace = read(tmp_path, operators)
    cases = [(item.args[0].dtype, item.args[0].shape, item.kwargs["alpha"]) for item in trace.signatures]
    dtypes = (torch.float32, torch.float64)
    assert cases == [
        (dtype, (first, 3, last), alpha) for dtype, first, last, alpha in product(dtypes, (1, 2), (4, 6, 8), (5, 6, 7))
    ]


def test_sizes_are_copied_from_other_arguments_in_order(tmp_path: Path) -> None:
    first = ranged([1, 2], -1, -1, __copy__=[{"shape": [1, [1, 1]]}, {"shape": [2, [2, 2]]}])
    second = ranged(-1, [3, 4], 5, __copy__=[{"shape": [0, [0, 0]]}])
    third = tensor(-1, -1, 6, __copy__=[{"shape": [0, [0, 0]]}, {"shape": [1, [1, 2]]}])
    trace = read(tmp_path, {"torch.baddbmm": operator(entry(first, second, third), input_iterator=RANGES)})
    assert shapes(trace) == [[(b, n, 6), (b, n, 5), (b, 5, 6)] for b, n in product((1, 2), (3, 4))]


def test_each_entry_of_build_is_combined_with_all_of_input(tmp_path: Path) -> None:
    operators = {
        "torch.nn.Linear": operator(
            entry(ranged([1, 2], 8)),
            build=[entry(number(8), number([3, 4], __range__=["value"]))],
            build_iterator=RANGES,
            input_iterator=RANGES,
        )
    }
    trace = read(tmp_path, operators)
    products = [item for item in trace.signatures if item.op == "aten.addmm.default"]
    assert [[spec.shape for spec in item.args] for item in products] == [
        [(outer,), (rows, 8), (8, outer)] for outer, rows in product((3, 4), (1, 2))
    ]
    assert set(trace.calls["module"]) == {"torch.nn.Linear"}


def ten_million(step: int = 1) -> dict[str, Any]:
    first = ranged([1, 1000, step], [1, 100])
    second = ranged(-1, [1, 100], __copy__=[{"shape": [0, [0, 1]]}])
    return {"torch.mm": operator(entry(first, second), input_iterator=RANGES)}


def test_only_requested_cases_of_ten_million_are_generated(tmp_path: Path) -> None:
    assert shapes(read(tmp_path, ten_million(), Cut(9_999_998))) == [
        [(1000, 100), (100, 99)],
        [(1000, 100), (100, 100)],
    ]
    assert shapes(read(tmp_path, ten_million(), Cut(10_000, 10_001))) == [[(2, 1), (1, 1)]]
    sampled = read(tmp_path, ten_million(), Cut(sample=5, sample_seed=3))
    assert len(sampled.signatures) == 5
    assert sampled.header["cases"] == 10_000_000
    chance = random.Random(3)
    places = sorted(chance.sample(range(10_000_000), 5))
    assert [item[0][0] for item in shapes(sampled)] == [1 + place // 10_000 for place in places]
    assert [item.number for item in sampled.signatures] == places


def test_too_many_cases_are_refused_with_their_count_and_options(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(ten_million()))
    message = f"represents 10,000,000 cases, but at most {MOST_CASES:,} are read: .*--start and --stop.*--sample"
    with pytest.raises(UserError, match=message):
        load(tmp_path / "config.json")
    done = run_command("opgrip", "trace", "info", tmp_path / "config.json")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


def test_opreplay_and_convert_take_parts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(ten_million()))
    done = succeed("opreplay", "config.json", "--start", "9999999", *FAST, cwd=tmp_path)
    assert "float32[1000,100] float32[100,100]" in done.stdout
    assert "1 case: 1 ok" in done.stderr
    listed = run_command("opreplay", "config.json", "--sample", "4", "--sample-seed", "1", "--list", cwd=tmp_path)
    assert listed.stdout.endswith("4 cases\n")
    words = ("config.json", "part.jsonl", "--start", "5", "--stop", "8")
    succeed("opgrip", "trace", "convert", *words, cwd=tmp_path)
    assert shapes(load(tmp_path / "part.jsonl")) == [[(1, 1), (1, size)] for size in (6, 7, 8)]
    beyond = run_command("opreplay", "config.json", "--start", "10000000", cwd=tmp_path)
    assert beyond.stderr.endswith(
        "no case is left from --start 10000000: the file has 10,000,000 cases, numbered from 0\n"
    )
