"""`opgrip trace redact`, as a user runs it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from programs import refusal, run_command, succeed, train_tiny_net

from opgrip.traces import load


def test_redact_writes_the_trace_and_reports_what_remains(tiny_trace: Path, tmp_path: Path) -> None:
    command = ("opgrip", "trace", "redact", tiny_trace, "-o", tmp_path / "r.jsonl.gz")
    done = run_command(*command, "--report", tmp_path / "left.json")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "what is left" in done.stderr
    assert "operators and extensions that everybody can install" in done.stderr
    report = json.loads((tmp_path / "left.json").read_text())
    left = {(row["kind"], row["value"]) for row in report["left"]}
    assert ("operator", "aten.convolution.default") in left
    assert ("module_type", "Conv2d") in left
    assert report["salted_names"] > 3
    assert not {value for _, value in left if "TinyNet" in value}
    assert len(load(tmp_path / "r.jsonl.gz").calls) == len(load(tiny_trace).calls)
    assert "exists" in refusal(*command)


def test_redact_leaves_out_full_values_of_a_trace(tmp_path: Path) -> None:
    train_tiny_net(tmp_path / "t.jsonl", values="full")
    done = succeed("opgrip", "trace", "redact", "t.jsonl", "-o", "r.jsonl", cwd=tmp_path)
    assert "t.values.safetensors contains the values and is not copied" in done.stderr
    assert load(tmp_path / "r.jsonl").tensor_files == ()
    forms = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert "tensor" not in {name for form in forms if form["type"] == "values" for name in form}


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("-o", "t.jsonl", "-f"), "t.jsonl is both the trace and the output"),
        (("-o", "r.jsonl", "--report", "t.jsonl", "-f"), "t.jsonl is both the trace and the report"),
        (("-o", "r.jsonl", "--salt-file", "r.jsonl", "-f"), "r.jsonl is both the output and the salt"),
        (("-o", "r.jsonl", "--keep", "names"), "--keep names: unknown kind of content"),
        (("-o", "r.jsonl", "--salt-file", os.devnull), "contains no salt"),
    ],
)
def test_usage_errors_are_reported_in_one_line(
    tiny_trace: Path, tmp_path: Path, words: tuple[str, ...], problem: str
) -> None:
    (tmp_path / "t.jsonl").write_bytes(tiny_trace.read_bytes())
    error = refusal("opgrip", "trace", "redact", "t.jsonl", *words, cwd=tmp_path, in_one_line=True)
    assert problem in error
    assert [path.name for path in tmp_path.iterdir()] == ["t.jsonl"]


def test_info_reports_that_a_trace_is_redacted(tiny_trace: Path, tmp_path: Path) -> None:
    for name, options in (("a", ()), ("b", ("--keep", "modules,labels", "--hide-operators"))):
        run_command("opgrip", "trace", "redact", tiny_trace, "-o", f"{name}.jsonl", *options, cwd=tmp_path)
    infos = [run_command("opgrip", "trace", "info", f"{name}.jsonl", cwd=tmp_path).stdout for name in "ab"]
    assert "redacted    names, paths, texts and values were replaced\n" in infos[0]
    assert "were replaced, except labels, modules; custom operators are renamed" in " ".join(infos[1].split())
    assert "redacted" not in run_command("opgrip", "trace", "info", tiny_trace).stdout


def test_redacted_trace_of_another_tool_remains_without_times(tmp_path: Path) -> None:
    observer = torch.profiler.ExecutionTraceObserver().register_callback(str(tmp_path / "nodes.json"))
    observer.start()
    torch.randn(3).relu()
    observer.stop()
    observer.unregister_callback()
    succeed("opgrip", "trace", "redact", "nodes.json", "-o", "r.jsonl", cwd=tmp_path)
    header = load(tmp_path / "r.jsonl").header
    assert (header["timed"], header["converted_from"]) == (False, "execution_trace")
    assert "share of calls" in run_command("opgrip", "trace", "info", "r.jsonl", cwd=tmp_path).stdout
