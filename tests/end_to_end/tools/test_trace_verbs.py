"""The verbs of opgrip, run as a user runs them, also with files of other tools that were converted in part."""

import argparse
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from example_trace import RECORDS, write
from programs import SHIPPED_TRACES, refusal, run_command, succeed, train_tiny_net

from opgrip.replay.cases.cases import make_cases
from opgrip.samples import samples
from opgrip.tools.opgrip import make_parser
from opgrip.tools.verbs import verbs
from opgrip.tools.verbs.trace_options import span, steps
from opgrip.traces import load
from opgrip.traces.analysis.timeline import timeline_lines
from opgrip.traces.schema.records import Calls, End, Record, Scope, Signature


def test_all_verbs_are_listed_on_one_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = make_parser().format_help().splitlines()
    assert len(lines) < 24
    assert max(map(len, lines)) <= 80
    words = {word.strip(",") for line in lines for word in line.split()}
    assert {name.split()[-1] for name in verbs.names()} <= words
    assert {name.split()[0] for name in verbs.names()} <= words


def test_validate_prints_findings_and_sets_the_exit_status(tiny_trace: Path, tmp_path: Path) -> None:
    lines = tiny_trace.read_bytes().splitlines(keepends=True)
    (tmp_path / "bad.jsonl").write_bytes(b"".join([*lines[:5], b"{}\n", *lines[6:]]))
    done = run_command(
        "opgrip", "trace", "validate", tiny_trace, "bad.jsonl", "-o", "f.json", "--top", "1", cwd=tmp_path
    )
    assert done.returncode == 1
    assert "bad.jsonl: record 6: form: a line is not a JSON object with a `type`" in done.stdout
    assert "no findings\n" in done.stdout
    first, second = json.loads((tmp_path / "f.json").read_text())
    assert first["findings"] == []
    assert second["findings"][0] == {
        "record": 6,
        "kind": "form",
        "message": "a line is not a JSON object with a `type`",
    }


def test_trim_writes_a_part_and_reports_missing_producers(tiny_trace: Path, tmp_path: Path) -> None:
    words = ("opgrip", "trace", "trim", tiny_trace, "-o", tmp_path / "part.jsonl", "--phase", "backward")
    done = succeed(*words)
    assert ", a kept call reads the result of a removed call" in done.stderr
    assert run_command("opgrip", "trace", "validate", tmp_path / "part.jsonl").returncode == 0
    assert "exists" in refusal(*words)
    whole = run_command(*words, "--with-producers", "-f")
    assert "produce inputs for the others" in whole.stderr
    assert "removed" not in whole.stderr


@pytest.mark.parametrize(
    ("text", "expected"), [("1", (1, 2)), ("0:2", (0, 2)), ("2:", (2, None)), (":3", (0, 3)), (":", (0, None))]
)
def test_steps_option_takes_a_step_or_a_range(text: str, expected: tuple[int, int | None]) -> None:
    assert steps(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1.5s:2s", (1_500_000_000, 2_000_000_000)),
        ("100ms:", (100_000_000, None)),
        (":20us", (0, 20_000)),
        ("1:2", (10**9, 2 * 10**9)),
        ("3ns:4ns", (3, 4)),
    ],
)
def test_time_range_option_takes_units(text: str, expected: tuple[int, int | None]) -> None:
    assert span(text) == expected


@pytest.mark.parametrize("text", ["x", "2:1", "1:1", "-1", "1:2:3", "٣"])
def test_invalid_range_is_refused(text: str) -> None:
    for read in (steps, span):
        with pytest.raises(argparse.ArgumentTypeError):
            read(text)


MANY = {
    "torch.mm": {
        "input_iterator": "RangeConfigIterator",
        "input_data_generator": "PyTorch:DefaultDataGenerator",
        "config": [
            {
                "input": [
                    {
                        "args": [
                            {"type": "tensor", "dtype": "float", "shape": [[1, 1000, 1], 8], "__range__": ["shape"]},
                            {"type": "tensor", "dtype": "float", "shape": [8, [1, 1000, 1]], "__range__": ["shape"]},
                        ]
                    }
                ]
            }
        ],
    }
}


def test_part_of_a_million_cases_is_shown_listed_and_exported(tmp_path: Path) -> None:
    (tmp_path / "many.json").write_text(json.dumps(MANY))
    assert "represents 1,000,000 cases" in refusal("opgrip", "trace", "info", "many.json", cwd=tmp_path)
    sampled = run_command("opgrip", "trace", "info", "many.json", "--sample", "5", cwd=tmp_path)
    assert "5 of 1 operator" in sampled.stdout, sampled.stderr
    last = ("many.json", "--start", "999999")
    shown = run_command("opgrip", "trace", "info", *last, cwd=tmp_path)
    assert "1 of 1 operator" in shown.stdout, shown.stderr
    succeed("opgrip", "trace", "export-case", *last, "999999", "-o", "case.py", cwd=tmp_path)
    assert "1000" in (tmp_path / "case.py").read_text()


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
    assert report["hashed_names"] > 3
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


@pytest.fixture(scope="module")
def events(detector_trace: Path) -> list[dict[str, Any]]:
    return json.loads(run_command("opgrip", "trace", "timeline", detector_trace).stdout)["traceEvents"]


def test_every_call_is_an_event_with_its_duration(detector_trace: Path, events: list[dict[str, Any]]) -> None:
    calls = load(detector_trace).calls
    met = [event for event in events if event.get("cat") == "operator"]
    assert [event["name"] for event in met] == calls["op"].astype(str).tolist()
    assert sum(event["dur"] for event in met) == pytest.approx(calls["duration_ns"].sum() / 1e3)


def test_track_slices_nest_and_modules_contain_their_calls(events: list[dict[str, Any]]) -> None:
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(event)
    for track in tracks.values():
        ends: list[float] = []
        for event in sorted(track, key=lambda event: (event["ts"], -event["dur"])):
            while ends and ends[-1] <= event["ts"] + 1e-6:
                ends.pop()
            end = event["ts"] + event["dur"]
            assert not ends or end <= ends[-1] + 1e-3
            ends.append(end)
    modules = {event["name"] for event in events if event.get("cat") == "module"}
    assert {"backbone", "backbone.conv1", "rpn", "roi_head"} <= modules
    assert {event["name"] for event in events if event.get("cat") == "phase"} == {"forward"}


def test_info_shows_the_contents_of_a_trace(detector_trace: Path) -> None:
    done = succeed("opgrip", "trace", "info", detector_trace)
    assert done.stderr == ""
    assert "\x1b" not in done.stdout
    trace = load(detector_trace)
    shown = dict(line.split(maxsplit=1) for line in done.stdout.splitlines()[:10])
    assert shown["model"] == "faster_rcnn, FasterRCNN, builtin:faster_rcnn"
    assert shown["calls"] == f"{len(trace.calls):,}"
    assert shown["signatures"].startswith(f"{len(trace.signatures):,} of ")
    assert shown["dropped"] == "nothing"
    assert trace.summary()["op"][0] in done.stdout
    assert trace.summary(["module", "phase"])["module"][0] in done.stdout


def test_info_shows_dropped_raised_and_nested_calls(tmp_path: Path) -> None:
    done = run_command("opgrip", "trace", "info", write(tmp_path / "t.jsonl"))
    assert "dropped     2 aten.x: ValueError: no" in done.stdout
    assert "raised      mmcv._ext:nms: ValueError: no" in done.stdout
    assert "calls       4, 2 of them inside extension functions" in done.stdout


def test_info_of_a_cut_trace_needs_partial(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", RECORDS[:-1])
    error = refusal("opgrip", "trace", "info", path)
    assert error.startswith("opgrip trace info: error: ")
    done = succeed("opgrip", "trace", "info", path, "--partial")
    assert "incomplete" in done.stdout


def test_info_groups_by_function_and_line(detector_trace: Path) -> None:
    done = succeed("opgrip", "trace", "info", detector_trace, "--by", "function", "--by", "line", "--top", "3")
    assert "functions by share of time" in done.stdout
    assert "lines by share of time" in done.stdout
    assert "opgrip/samples/" in done.stdout


def test_samples_are_listed_one_per_line_and_filtered() -> None:
    lines = run_command("opgrip", "samples", "list").stdout.splitlines()
    assert [line.split("\t")[0] for line in lines] == list(samples())
    views = run_command("opgrip", "samples", "list", "--tag", "viewattribute", "--source", "MMDetection").stdout
    assert 0 < len(views.splitlines()) < len(lines) or len(lines) == 1
    assert all("ViewAttribute" in line and "MMDetection" in line for line in views.splitlines())


def test_sample_is_shown_with_its_inputs_and_source() -> None:
    shown = run_command("opgrip", "samples", "show", "bbox2delta").stdout
    assert "float32[128,4], float32[128,4]" in shown
    assert "https://github.com/open-mmlab/" in shown
    assert "def bbox2delta(" in shown


@pytest.mark.parametrize("words", [(), ("trace",)])
def test_command_without_a_verb_prints_its_help(words: tuple[str, ...]) -> None:
    error = refusal("opgrip", *words)
    assert error.startswith("usage: opgrip")
    assert "export-case" in error


def test_deep_modules_with_long_names_keep_the_timeline_small(tmp_path: Path) -> None:
    deep = [".".join([word] * 8000) for word in ("a", "b")]
    scopes: list[Record] = [Scope(number, name, "Net", "forward") for number, name in enumerate(deep)]
    signature = Signature(0, "operator", "aten.add.Tensor", (), {})
    calls = Calls(0, [0] * 100, [0, 1] * 50, list(range(0, 1000, 10)), [5] * 100)
    path = write(tmp_path / "t.jsonl", [*scopes, signature, calls, End(100, 1, 1000)])
    assert sum(map(len, timeline_lines(load(path)))) < 4 << 20


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (("trace", "info", "--json"), '{"op":"aten.mm.default","calls":3,"signatures":1,"share":1.0}'),
        (("longtail",), "saves an unknown time, because there are no recorded times"),
        (("trace", "timeline"), "ops.txt has no times"),
        (("trace", "diff", "ops.txt"), "100.0%           -   aten.mm.default"),
        (("corpus",), "3            1    -"),
        (("candidate", "init", "aten.mm.default"), "-       3           -  float32[8,8], float32[8,8]"),
    ],
)
def test_unknown_times_are_not_printed_as_zero(words: tuple[str, ...], shown: str, tmp_path: Path) -> None:
    line = "Operator: aten.mm.default\ncnt: {}, ((T([8, 8], f32), T([8, 8], f32)), {{}})\n"
    (tmp_path / "ops.txt").write_text(line.format(3))
    if "diff" in words:
        (tmp_path / "other.txt").write_text(line.format(4))
    output = ("-o", "c.py") if words[0] == "candidate" else ()
    done = run_command("opgrip", *words, "other.txt" if "diff" in words else "ops.txt", *output, cwd=tmp_path)
    text = (tmp_path / "c.py").read_text() if output else done.stdout + done.stderr
    assert shown in text, text
    assert not re.search(r"\b0\.00? ?(ms|us|MB|%)", text)


# A file of DLOP-Bench, the table of `abs`, with a valid and an invalid row.
GOOD_ROW_AND_BAD = '{"input": [[4], ["x"]]}'


def test_replay_reports_calls_of_a_file_that_it_leaves_out(tmp_path: Path) -> None:
    (tmp_path / "abs.json").write_text(GOOD_ROW_AND_BAD)
    done = succeed("opreplay", "abs.json", "--iterations", "1", cwd=tmp_path)
    (line,) = [line for line in done.stderr.splitlines() if "be converted" in line]
    assert "1 call of the file could not be converted: 1 abs: " in line


@pytest.mark.parametrize("words", [(), ("--sequence",), ("--unit", "module")])
def test_file_without_convertible_calls_reports_the_reason(words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "mhaf.json").write_text('{"query": [[4, 2, 8]]}')
    done = run_command("opreplay", "mhaf.json", *words, cwd=tmp_path)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2
    assert "1 mhaf: TypeError: multi_head" in line


def test_shares_of_a_file_without_times_are_shares_of_calls(tmp_path: Path) -> None:
    (tmp_path / "abs.json").write_text(GOOD_ROW_AND_BAD)
    shown = run_command("opgrip", "trace", "info", "abs.json", cwd=tmp_path).stdout
    assert "operators by share of calls" in shown
    assert "median x calls us" not in shown
    assert "measured us" not in shown
    assert "median x calls us" in run_command("opgrip", "trace", "info", SHIPPED_TRACES[0]).stdout


def test_cases_of_a_file_without_times_are_sorted_by_work(tmp_path: Path) -> None:
    calls = {"view": "T([9, 9], f32), [81]", "relu": "T([9, 9], f32)", "mm": "T([256, 256], f32), T([256, 256], f32)"}
    text = "".join(f"Operator: aten.{op}.default\ncnt: 3, (({args},), {{}})\n" for op, args in calls.items())
    (tmp_path / "calls.txt").write_text(text)
    cases = make_cases(load(tmp_path / "calls.txt"))
    assert [case.op.split(".")[1] for case in cases] == ["mm", "relu", "view"]
    assert sum(case.share for case in cases) == pytest.approx(1)
