"""`opgrip trace timeline`, run as a user runs it, with output that Perfetto can read."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from example_trace import write
from programs import refusal, run_command, succeed

from opgrip.traces import load
from opgrip.traces.analysis.timeline import timeline_lines
from opgrip.traces.schema.records import Calls, End, Record, Scope, Signature


def events_of(text: str) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(text)["traceEvents"]
    return events


@pytest.fixture(scope="module")
def events(detector_trace: Path) -> list[dict[str, Any]]:
    return events_of(run_command("opgrip", "trace", "timeline", detector_trace).stdout)


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


def test_timeline_is_written_to_a_gzip_file(detector_trace: Path, tmp_path: Path, events: list[dict[str, Any]]) -> None:
    output = tmp_path / "timeline.json.gz"
    succeed("opgrip", "trace", "timeline", detector_trace, "-o", output)
    assert len(events_of(gzip.decompress(output.read_bytes()).decode())) == len(events)
    assert "--force" in refusal("opgrip", "trace", "timeline", detector_trace, "-o", output)


def test_unknown_output_format_is_refused_in_one_line(detector_trace: Path, tmp_path: Path) -> None:
    done = run_command("opgrip", "trace", "timeline", detector_trace, "-o", tmp_path / "timeline.svg")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


def test_malformed_model_field_of_the_header_is_ignored(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl")
    header, *records = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text(json.dumps(json.loads(header) | {"model": ["net"]}) + "\n" + "".join(records), encoding="utf-8")
    done = succeed("opgrip", "trace", "timeline", path)
    assert '"name": "capture"' in done.stdout


def test_deep_modules_with_long_names_keep_the_timeline_small(tmp_path: Path) -> None:
    deep = [".".join([word] * 8000) for word in ("a", "b")]
    scopes: list[Record] = [Scope(number, name, "Net", "forward") for number, name in enumerate(deep)]
    signature = Signature(0, "operator", "aten.add.Tensor", (), {})
    calls = Calls(0, [0] * 100, [0, 1] * 50, list(range(0, 1000, 10)), [5] * 100)
    path = write(tmp_path / "t.jsonl", [*scopes, signature, calls, End(100, 1, 1000)])
    assert sum(map(len, timeline_lines(load(path)))) < 4 << 20
