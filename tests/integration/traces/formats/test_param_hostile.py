"""Tests of malformed PARAM configurations, and of configurations made to cost the reader time or memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from param_configs import RANGES, entry, number, operator, ranged, reasons, tensor

from opgrip.errors import UserError
from opgrip.traces import TraceReader, load
from opgrip.traces.formats.configurations.param import MOST_BYTES, NAME

HUGE_LAYER = number(600_000), number(600_000)


@pytest.mark.parametrize(
    ("operators", "reason"),
    [
        ({"torch.nothing": operator(entry(tensor(4)))}, "not registered in torch"),
        ({"torch.load": operator(entry(number("/etc/passwd", "str")))}, "not registered in torch"),
        ({"torch.nn.DataParallel": operator(entry(tensor(4)), build=[entry(number(4))])}, ""),
        ({"torch.add": operator(entry(tensor(4), number([1, 4], __range__=["value"])))}, "expanded by RangeConfigIter"),
        ({"torch.add": operator(entry(tensor(-1, 4), number(1)))}, "is not a shape"),
        ({"torch.add": operator(entry(tensor(1 << 57, 4), number(1)))}, "larger than the address space"),
        ({"torch.add": operator(entry(tensor(*[1] * 99), number(1)))}, "not a list of sizes"),
        (
            {"torch.add": operator(entry(tensor(4, dtype="float17"), number(1)))},
            "unknown dtype: 'float17'",
        ),
        ({"torch.add": operator(entry(tensor(4), number(1 << 70)))}, "more than 64 bits"),
        ({"torch.add": operator(entry(tensor(4), {"type": "what"}))}, "unknown argument type: 'what'"),
        ({"torch.add": operator(entry(tensor(4), {"type": []}))}, "unknown argument type: []"),
        ({"torch.add": operator(entry(tensor(4), {"type": "int", "value_range": [4, 1]}))}, "not a range"),
        ({"torch.add": operator(entry(tensor(4)), input_iterator="Other")}, "unknown input_iterator: Other"),
        ({"torch.add": operator(entry(tensor(4)), input_data_generator=[1])}, "unknown input_data_generator"),
        ({"torch.add": operator(entry(ranged([1, 4, 0])), input_iterator=RANGES)}, "has the step 0"),
        ({"torch.add": operator(entry(ranged(["a", 4])), input_iterator=RANGES)}, "not a range of integers"),
        (
            {"torch.add": operator(entry(tensor(4, __copy__=[{"shape": [0, [7, 0]]}])), input_iterator=RANGES)},
            "__copy__",
        ),
        ({"torch.add": operator(entry(tensor(4, __copy__=[3])), input_iterator=RANGES)}, "__copy__"),
        ({"torch.add": operator(7)}, "an entry of a section is not a JSON object: 7"),
        (
            {"torch.add": operator(entry(tensor(4)), build=[entry(number("aten::add(", "str"))])},
            "the build section is not an operator schema",
        ),
        ({"torch.add": operator(entry(7))}, "an argument is not a JSON object: 7"),
        ({"torch.add": {"config": [{"output": []}]}}, "the `input` of a configuration is not a list"),
        ({"torch.add": {"config": 7}}, "its `config` is not a list"),
        ({"torch.add": 7}, "its `config` is not a list"),
        (
            {"torch.nn.Transformer": operator(entry(tensor(4, 4)), build=[entry(num_encoder_layers=number(10**12))])},
            "makes more than 20,000 calls",
        ),
        (
            # on the CPU, named explicitly, where its weight would take 1.4 TB
            {"torch.nn.Linear": operator(entry(tensor(2, 3)), build=[entry(*HUGE_LAYER, device=number("cpu", "str"))])},
            "reduction dim",
        ),
        (
            {"torch.tensor_split": operator(entry(input=tensor(3), sections=number(1 << 27)))},
            "100,000 pieces",
        ),
        ({"torch.combinations": operator(entry(input=tensor(3), r=number(1 << 27)))}, "100,000 pieces"),
        (
            {"torch.nn.LSTM": operator(entry(tensor(10**9, 1, 4)), build=[entry(number(4), number(4))])},
            "a dimension larger than",
        ),
        (
            {
                "torch.nn.Linear": operator(
                    entry(tensor(4)), build=[entry(number(1 << 40), number(1 << 40), device=number("cpu", "device"))]
                )
            },
            "",
        ),
    ],
)
def test_unreadable_operator_is_counted_with_the_reason(tmp_path: Path, operators: dict[str, Any], reason: str) -> None:
    both = {**operators, "torch.mul": operator(entry(tensor(4), tensor(4)))}
    (tmp_path / "config.json").write_text(json.dumps(both))
    trace = load(tmp_path / "config.json", reader=TraceReader(tmp_path / "config.json", format_name=NAME))
    assert set(trace.calls["op"]) == {"aten.mul.Tensor"}
    (told,) = reasons(trace)
    assert reason in told


def test_reading_allocates_nothing_on_a_named_device(tmp_path: Path) -> None:
    like = {"torch.zeros_like": operator(entry(input=tensor(1 << 45), device=number("cpu", "str")))}
    (tmp_path / "config.json").write_text(json.dumps(like))
    trace = load(tmp_path / "config.json", reader=TraceReader(tmp_path / "config.json", format_name=NAME))
    assert list(trace.calls["op"]) == ["aten.zeros_like.default"]


@pytest.mark.slow
def test_oversized_configurations_are_refused(tmp_path: Path) -> None:
    (tmp_path / "lists.json").write_text('{"op": {"config": [' + "[]," * (3 << 20) + "[]]}}")
    with pytest.raises(UserError, match="contains more than 4,194,304 values"):
        list(TraceReader(tmp_path / "lists.json", format_name=NAME))
    path = tmp_path / "config.json"
    items = number([number(1)] * 2000, "genericlist")
    heavy = {
        "aten::zeros": operator(
            entry(items, dtype=number("float", "dtype"), x=ranged([1, 9999])), input_iterator=RANGES
        )
    }
    path.write_text(json.dumps(heavy))
    with pytest.raises(UserError, match="more than 5,000,000 arguments"):
        load(path)
    path.write_text(json.dumps({"aten::add": operator(entry(tensor(1), number(1)) | {"count": 10**12})}))
    with pytest.raises(UserError, match="1,000,000 calls"):
        load(path)
    counted = entry(tensor(2, 2)) | {"count": 900_000}
    path.write_text(json.dumps({"torch.nn.Linear": operator(counted, build=[entry(number(2), number(2))])}))
    with pytest.raises(UserError, match="1,000,000 calls"):
        load(path)
    sizes = [[1, 1 << 62]] * 40
    path.write_text(json.dumps({"aten::add": operator(entry(ranged(*sizes)), input_iterator=RANGES)}))
    assert reasons(load(path)) == ["an entry has more than 2**200 combinations of values"]
    path.write_text(json.dumps({"input_iterator": " " * MOST_BYTES}))
    with pytest.raises(UserError, match="more than 64 MB"):
        load(path)
