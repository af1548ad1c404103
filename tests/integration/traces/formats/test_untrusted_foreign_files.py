"""Real and mutated files of other tools: they are read, or refused in one line."""

import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
from execution_traces import node
from foreign_data import CASES, needs_cases
from programs import ROOT, run_command

from opgrip.errors import UserError
from opgrip.traces import TraceReader, load
from opgrip.traces.formats.execution_trace.files import message_classes
from opgrip.traces.formats.protobuf_files import with_length
from opgrip.traces.io.foreign_files import format_of

sys.path.insert(0, str(ROOT / "tests/support/fuzz"))

from foreign_seeds import ForeignSeed, readable_formats, seeds_of
from mutations import foreign_mutant

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


FILES = CASES / "files"

REFUSED = {
    "malformed/11_utf16.json": "text in UTF-16",
    "malformed/23_git_lfs_pointer.json": "a git LFS pointer",
    "malformed/25_deep.json": "it is nested too deeply",
    "mluops/nms__case_0.prototxt": "a prototxt",
    "npukernelbench/npukernelbench_level0_18_ne_scalar.json": "JSON lines with the members id, name",
    "nvbench/test_ref.json": "a result of nvbench",
    "tracelens/mi210_gpu_only_trace_gpu_only_trace.json.gz": "contains no operators",
}
# numbers of calls, and of calls and events that are counted as not convertible
READ = {
    "chakra/small_chakra.0.json": (0, 3),
    "hta/rank_non_gpu__rank_non_gpu.json.gz": (286, 810),
    "malformed/01_unescaped_quotes.json": (0, 2),
    "malformed/07_ends_with_comma.json": (1, 1),
    "malformed/13_cut.json.gz": (1, 1),
    "malformed/15_negative_and_huge_times.json": (0, 2),
    "malformed/17_lists_cut_by_profiler.json": (0, 2),
    "param/pt2_et.json": (10, 0),
}


@needs_cases
@pytest.mark.parametrize("name", REFUSED)
def test_refused_file_is_named_in_one_line(name: str) -> None:
    for path in FILES.glob(name):
        with pytest.raises(UserError, match=REFUSED[name]) as caught:
            load(path)
        assert "\n" not in str(caught.value)


@needs_cases
@pytest.mark.parametrize("name", READ)
def test_readable_part_of_a_file_is_read(name: str) -> None:
    for path in FILES.glob(name):
        trace = load(path, partial=True)
        assert trace.end is not None
        assert (trace.call_count, sum(item.count for item in trace.end.dropped)) == READ[name]


@needs_cases
@pytest.mark.slow
@pytest.mark.parametrize(
    "path", sorted(path for path in FILES.glob("*/*") if path.is_file()), ids=lambda path: str(path.relative_to(FILES))
)
def test_no_file_fails_a_row_or_causes_a_traceback(path: Path, tmp_path: Path) -> None:
    words = (path, "--device", "cpu", "--partial", "--op", "aten.*", "--top", "4")
    done = run_command("opreplay", *words, "--iterations", "1", "--warmup", "0", "-o", tmp_path / "rows.csv")
    assert "Traceback" not in done.stderr
    # operators of an accelerator may have no kernel here
    assert done.returncode in (0, 2) or "no case ran" in done.stderr
    if done.returncode != 2:
        assert ",failed," not in (tmp_path / "rows.csv").read_text(encoding="utf-8")
