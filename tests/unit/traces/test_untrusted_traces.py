"""Untrusted traces and sample folders: consumers raise only `UserError` and print no control sequences."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fuzz.consumers import CONSUMERS, consume

from opgrip.errors import UserError
from opgrip.traces.io.sample_folder import open_sample

ESCAPE, TURN, SURROGATE = "\x1b[31m", "\u202e", "\ud800"
STRANGE = f"a{ESCAPE}{TURN}{SURROGATE}\x07"
HUGE = {"shape": [2**62] * 2, "stride": [2**62, 1], "dtype": "complex128", "device": "cpu", "offset": 2**62}

HEADER: dict[str, Any] = {"type": "header", "format": "opgrip-trace", "version": "1.3"}
TENSOR = {"tensor": {"shape": [2], "stride": [1], "dtype": "float32", "device": "cpu"}}
SIGNATURE: dict[str, Any] = {
    "type": "signature",
    "id": 0,
    "kind": "operator",
    "op": "aten.relu.default",
    "args": [TENSOR],
}
ON_DEVICE = SIGNATURE | {"args": [{"tensor": TENSOR["tensor"] | {"device": "cuda:99"}}]}
KERNELS = {"type": "kernels", "signature": 0, "names": [STRANGE], "launches": [1], "device_ns": [9]}
SCOPE = {"type": "scope", "id": 0, "module": "m", "module_type": "M", "phase": "forward", "function": "f", "file": "a"}
CALLS: dict[str, Any] = {
    "type": "calls",
    "thread": 0,
    "start_ns": 0,
    "signature": [0] * 3,
    "scope": [0] * 3,
    "after_ns": [0, 9, 9],
    "duration_ns": [5] * 3,
    "tensors": [1] * 3,
    "newest": -1,
    "storages": [1, 0, 0],
}
END: dict[str, Any] = {"type": "end", "calls": 3, "signatures": 1, "duration_ns": 30, "dropped": []}
PLACED = {"type": "observed", "signature": 0, "values": [None], "outputs": TENSOR, "since_ns": 0}
ENTERED = {"type": "entered", "thread": 0, "start_ns": 99, "scope": 0, "signature": 9}
LOST = [{"op": STRANGE, "reason": STRANGE, "count": 1}]

TRACES: dict[str, list[dict[str, Any]]] = {
    "header of other types": [
        HEADER | {"model": {"name": [1]}, "processes": [1], "devices": [1], "command": {"a": 1}, "page_size": "x"},
        *(SIGNATURE, SCOPE, CALLS, END),
    ],




    "texts of a header": [
        HEADER | {"devices": {"cpu": [STRANGE]}, "command": [STRANGE], "model": {"name": STRANGE}},
        *(SIGNATURE, SCOPE, CALLS, END),
    ],
    "texts of a signature": [
        HEADER,
        SIGNATURE | {"op": STRANGE, "args": [STRANGE, {"opaque": STRANGE}], "kwargs": {STRANGE: STRANGE}},
        SCOPE | {"module": STRANGE, "function": STRANGE, "file": STRANGE},
        *({"type": "thread", "id": 0, "name": STRANGE}, {"type": STRANGE}, CALLS, END),
    ],
    "texts of what was lost": [
        *(HEADER, SIGNATURE | {"raised": STRANGE}, SCOPE, CALLS),
        ENTERED | {"opened": {**SIGNATURE, "op": STRANGE}},
        END | {"stopped": STRANGE, "dropped": LOST, "without_values": LOST, "passed_by": LOST},
    ],
    "huge numbers": [
        *(HEADER, SIGNATURE | {"args": [{"tensor": HUGE}, 10**4000], "outputs": {"tensor": HUGE}}, SCOPE),
        *(CALLS | {"start_ns": 2**61, "duration_ns": [2**61, 2**61 + 9, 0]}, END | {"calls": -(2**63)}),
    ],
    "calls long before and after all others": [
        *(HEADER, SIGNATURE, SCOPE, CALLS | {"start_ns": -(2**62), "after_ns": [0, 2**62, 2**62 - 5]}, END),
    ],
    "huge numbers of accelerators": [
        HEADER | {"accelerator": {"devices": {"cuda:0": {"memory_bytes": 10**400, "power_limit_w": 10**400}}}},
        *(SIGNATURE, SCOPE, CALLS, END | {"accelerator": {"devices": {"cuda:0": {"max_sm_mhz": -(10**400)}}}}),
    ],
    "an accelerator of other types": [
        HEADER | {"accelerator": {"devices": [1], "libraries": 5, "settings": {"": [STRANGE, [None]], "_bytes": True}}},
        *(SIGNATURE, SCOPE, CALLS, END | {"accelerator": {"devices": {STRANGE: {STRANGE: [STRANGE]}}}}),
    ],

    "places whose calls have no tensors": [
        *(HEADER, SIGNATURE, SCOPE, PLACED, PLACED | {"since_ns": 9}),
        *(CALLS | {"tensors": [1, 0, 0], "storages": [0], "duration_ns": [5, 900, 5]}, END),
    ],

    "places of what the trace lacks": [
        *(HEADER, SIGNATURE, SCOPE, PLACED | {"signature": 7}, PLACED | {"values": [7]}),
        *(PLACED | {"values": [None, 1]}, PLACED | {"since_ns": 2**63 - 1}, CALLS, END),
    ],
    "kernels": [
        *(HEADER, ON_DEVICE, SCOPE, CALLS | {"device_ns": [1, -(2**63), 2**63 - 1], "streams": [-1, 2**63 - 1, 0]}),
        KERNELS,
        KERNELS | {"signature": -5, "launches": [2**63 - 1], "device_ns": [2**63 - 1]},
        {"type": "device_times", "thread": 0, "first": 2**63 - 1, "device_ns": [1]},
        {"type": "device_times", "thread": -1, "first": 0, "device_ns": [2**63 - 1] * 9},
        END,
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", TRACES)
@pytest.mark.slow
def test_hostile_trace_is_read_or_refused_by_all_consumers(tmp_path: Path, name: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in TRACES[name]), encoding="utf-8")
    read_by_all(path)


@pytest.mark.parametrize("number", ["NaN", "1e999", "-Infinity"])
@pytest.mark.parametrize(
    "line", [HEADER | {"started_unix_ns": "X"}, {"type": "context", "id": 0, "settings": {"a": "X"}}]
)
def test_numbers_that_no_file_can_hold_are_refused(tmp_path: Path, line: dict[str, Any], number: str) -> None:
    path = tmp_path / "t.jsonl"
    lines = [line] if line["type"] == "header" else [HEADER, line]
    text = "".join(json.dumps(item) + "\n" for item in [*lines, SIGNATURE, SCOPE, CALLS, END])
    path.write_text(text.replace('"X"', number), encoding="utf-8")
    read_by_all(path, lambda consumer: "merge" in consumer.__name__ or "info" in consumer.__name__)


def read_by_all(path: Path, chosen: Callable[[Any], bool] = lambda consumer: True) -> None:
    for consumer in CONSUMERS:
        if chosen(consumer):
            consume(path, consumer)


GOOD = {"name": "s", "entry": "f", "file": "code.py", "classes": {}, "source": {"module": "m", "qualname": "f"}}


def written(folder: Path, text: str) -> Path:
    (folder / "code.py").write_text("class A:\n    pass\n\ndef f(x):\n    return x\n")
    (folder / "code.txt").write_text("def f(x):\n    return x\n")
    (folder / "sample.json").write_text(text)
    return folder


def test_classes_are_named_as_in_the_calls(tmp_path: Path) -> None:
    sample = open_sample(written(tmp_path, json.dumps(GOOD | {"classes": {"m:A": "A"}})))
    assert sample.function(3) == 3
    assert sample.classes["m:A"] is sample.classes["A"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"file": "code.txt"}, "file as the name of a .py file"),
        ({"file": "/etc/code.py"}, "file as the name of a .py file"),
        ({"file": "../code.py"}, "file as the name of a .py file"),
        ({"file": "none.py"}, "FileNotFoundError"),
        ({"classes": []}, "classes as texts"),
        ({"classes": {"m:A": "Nope"}}, "has no attribute 'Nope'"),
        ({"entry": None}, "entry as a text"),
        ({"entry": "f.g.h"}, "AttributeError"),
        ({"source": []}, "source as an object"),
        ({"source": {}}, "KeyError"),
    ],
)
def test_field_of_another_type_is_reported_in_one_line(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError) as caught:
        open_sample(written(tmp_path, json.dumps(GOOD | changes)))
    assert message in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("text", ["[" * 200_000, "[]", "5", ""])
def test_file_that_is_not_a_sample_is_reported_in_one_line(tmp_path: Path, text: str) -> None:
    with pytest.raises(UserError, match="is not a sample"):
        open_sample(written(tmp_path, text))


def test_huge_sample_file_is_not_read(tmp_path: Path) -> None:
    written(tmp_path, json.dumps(GOOD))
    with (tmp_path / "sample.json").open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(UserError, match="is larger than 1 MB"):
        open_sample(tmp_path)
