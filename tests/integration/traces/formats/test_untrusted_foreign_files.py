"""Tests of untrusted files of other tools: every registered reader raises only `UserError`."""

from __future__ import annotations

import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
from execution_traces import node
from programs import ROOT

from opgrip.errors import UserError
from opgrip.traces import TraceReader, load
from opgrip.traces.formats.execution_trace.files import message_classes
from opgrip.traces.formats.protobuf_files import with_length
from opgrip.traces.io.foreign_files import format_of

sys.path.insert(0, str(ROOT / "tests/support/fuzz"))

from foreign_mutations import foreign_mutant
from foreign_seeds import ForeignSeed, readable_formats, seeds_of

MUTANTS = 20


@pytest.fixture(scope="module")
def seeds(tiny_trace: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[ForeignSeed]]:
    folder = tmp_path_factory.mktemp("seeds")
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        return {name: seeds_of(name, folder, tiny_trace) for name in readable_formats()}


@pytest.mark.parametrize("name", readable_formats())
def test_seeds_are_files_of_their_format(name: str, seeds: dict[str, list[ForeignSeed]], tmp_path: Path) -> None:
    if not seeds[name] and name == "onnx":
        pytest.skip("onnx is not installed: make runtimes")
    assert seeds[name], f"the fuzzer has no file of {name}: add one to tests/support/fuzz/foreign_seeds.py"
    calls = 0
    for place, seed in enumerate(seeds[name]):
        path = seed.write(tmp_path / str(place))
        assert format_of(path) == name
        with suppress(UserError):
            calls += len(load(path).calls)
    assert calls


@pytest.mark.parametrize("name", readable_formats())
@pytest.mark.slow
def test_mutated_files_are_read_or_refused_in_one_line(
    name: str, seeds: dict[str, list[ForeignSeed]], tmp_path: Path
) -> None:
    random = Random(name)
    for place in range(MUTANTS if seeds[name] else 0):
        path = foreign_mutant(random.choice(seeds[name]), random).write(tmp_path / str(place))
        try:
            for _ in TraceReader(path, format_name=name):
                pass
        except UserError as error:
            assert "\n" not in str(error)  # noqa: PT017


NODE = json.dumps(node(3, 2, "aten::relu", "aten::relu(Tensor self) -> Tensor"))
NODES = '{"schema": "1.1.1", "pid": 1, "nodes": ['
EVENTS = '{"traceEvents": ['
ADD = '{"torch.add": {"'


def chakra(**fields: Any) -> bytes:
    metadata, message = (message_classes()[name] for name in ("GlobalMetadata", "Node"))
    return with_length(metadata(version="0.0.4").SerializeToString()) + (
        with_length(message(**fields).SerializeToString()) if fields else b""
    )


MALFORMED: list[tuple[str, str | bytes, str]] = [
    ("execution_trace", NODES + "[" * 100_000, "cannot be read"),
    ("execution_trace", NODES + '{"id": 1, "id": 1}]}', "cannot be read"),
    ("execution_trace", NODES + NODE.replace('"id": 3', '"id": 1' + "0" * 5000) + "]}", "cannot be read"),
    ("execution_trace", NODES + '{"id": 3, "name": "' + "a" * (17 << 20) + '"}]}', "cannot be read|is refused"),
    ("chakra", chakra(name="a")[:-1], "cannot be read"),
    ("chakra", chakra() + b"\xff" * 10, "cannot be read"),
    ("chakra", chakra() + with_length(b"\x12\x02\xff\xfe"), "cannot be read"),
    ("chakra", chakra(id=1 << 60), "cannot be read"),
    ("chakra", chakra(inputs={"values": "[" * 5000}), "cannot be read"),
    ("chakra", chakra(inputs={"values": "[__import__('os')]"}), "cannot be read"),
    ("chrome", EVENTS + '{"ph": "X", "na', "it is cut"),
    ("chrome", EVENTS + "[" * 100_000, "is nested too deeply"),
    ("chrome", EVENTS + '{"name": "' + "x" * (40 << 20) + '"}]}', "longer than 16 MB"),
    ("chrome", EVENTS + '{"ts": ' + "9" * 5000 + "}]}", "digits"),
    ("dlop", '{"size": [[1]], "size": [[2]]}', "cannot be read"),
    ("dlop", '{"size": [' + "[" * 500 + "]" * 500 + "]}", "cannot be read"),
    ("dlop", '{"size": [[1]]' + "".join(f', "c{number}": [1]' for number in range(300)) + "}", "is refused"),
    ("dlop", '{"size": [' + "1," * (2 << 20) + "1]}", "more than 4 MB"),
    ("param", ADD + 'input_iterator": "", "config": []}, "torch.add": {"config": []}}', "cannot be read"),
    ("param", ADD + 'input_iterator": ' + "[" * 3000 + "]" * 3000 + "}}", "cannot be read"),
    ("param", '{"op_info": {}, "op_name": "torch.add", "run_options": {"device": "../x"}}', "cannot be read"),
]


@pytest.mark.parametrize(("name", "content", "message"), MALFORMED, ids=[item[0] for item in MALFORMED])
def test_malformed_file_is_refused_in_one_line(name: str, content: str | bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(UserError, match=message) as caught:
        load(path, partial=False, reader=TraceReader(path, format_name=name))
    assert "\n" not in str(caught.value)
