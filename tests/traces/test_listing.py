"""Records as lines."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from example_trace import write
from programs import program_path, run_command

from opgrip.traces import load, read
from opgrip.traces.analysis.listing import TYPES, Filter, list_records


def lines(path: Path, *, as_json: bool = False, **chosen: tuple[str, ...]) -> list[str]:
    return list(list_records(read(path), Filter(**chosen), as_json))


def test_every_record_and_every_call_has_a_line(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl")
    listed = lines(path)
    kinds = [line.split()[0] for line in listed]
    assert set(kinds) == {"call", *TYPES} - {"calls", "observed", "effects"}
    assert kinds.count("call") == 4
    assert any("#0 aten.mul.Tensor(float32[2,3], 2.5) -> float32[2,3]" in line for line in listed)
    assert any("raised ValueError: no" in line for line in listed)
    assert sum("stream 35" in line for line in listed) == 1


def test_types_operators_and_modules_filter(tiny_trace: Path) -> None:
    calls = load(tiny_trace).calls
    listed = lines(tiny_trace, types=("calls",), ops=("aten.convolution*",), modules=("features*",))
    own = calls[calls["op"].astype(str).str.startswith("aten.convolution") & (calls["module"] == "features.0")]
    assert len(listed) == len(own) > 0
    assert all("aten.convolution" in line and "features.0" in line for line in listed)
    signatures = lines(tiny_trace, types=("signature",), ops=("aten.convolution.default",))
    assert len(signatures) == 1
    assert {line.split()[0] for line in lines(tiny_trace, modules=("head",))} == {"scope", "call"}


def test_json_is_what_stands_in_the_file(tiny_trace: Path) -> None:
    expected = [json.loads(line) for line in tiny_trace.read_bytes().splitlines()]
    assert [json.loads(line) for line in lines(tiny_trace, as_json=True)] == expected
    calls = [json.loads(line) for line in lines(tiny_trace, as_json=True, types=("calls",), ops=("aten.embedding*",))]
    assert {call["op"] for call in calls} == {"aten.embedding.default", "aten.embedding_dense_backward.default"}
    assert {call["type"] for call in calls} == {"call"}


def test_a_reader_that_stops_early_ends_it_quietly(tiny_trace: Path) -> None:
    command = [program_path("opgrip"), "trace", "cat", str(tiny_trace)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline().startswith("header")
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait() == 0


def test_what_would_steer_a_terminal_is_shown(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", command=["\x1b[31m"])
    done = run_command("opgrip", "trace", "cat", path, "--type", "header")
    assert "\x1b" not in done.stdout
    assert r"\u001b[31m" in done.stdout


def test_a_cut_trace_is_printed_to_its_end_and_said_to_be_cut(tiny_trace: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.jsonl"
    cut.write_bytes(b"".join(tiny_trace.read_bytes().splitlines(keepends=True)[:20]))
    done = run_command("opgrip", "trace", "cat", cut)
    assert (done.returncode, len(done.stdout.splitlines())) == (2, 20)
    assert "is cut after record 20" in done.stderr
    assert run_command("opgrip", "trace", "cat", cut, "--partial").returncode == 0


@pytest.mark.parametrize("kind", ["nothing", "call"])
def test_a_type_that_is_none_is_refused(tiny_trace: Path, kind: str) -> None:
    assert run_command("opgrip", "trace", "cat", tiny_trace, "--type", kind).returncode == 2
