"""Tests of the zoo: its manifest, and the files that it refers to."""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path

import pytest
from programs import ROOT, SHIPPED_TRACES, succeed
from project_files import pyproject

from opgrip.capture.command.capture_options import make_parser
from opgrip.errors import MissingFileError, UserError
from opgrip.traces import load
from opgrip.traces.analysis.differences import compare_traces
from opgrip.traces.zoo import ZooTrace, read_manifest, select, zoo_file
from opgrip.traces.zoo.manifest import MODELS, SUFFIX
from opgrip.zoo.making import command_of, count_distinct, pack, record_of, write_manifest

TRACES = read_manifest()


MADE = [trace for trace in TRACES if trace.recording is not None]


MOST_BYTES = 25_000_000  # limit of the size of all files together


def names_of(traces: list[ZooTrace]) -> list[str]:
    return [trace.name for trace in traces]


def test_manifest_survives_reading_and_writing(tmp_path: Path) -> None:
    write_manifest(TRACES, tmp_path / "zoo.json")
    assert read_manifest(tmp_path / "zoo.json") == TRACES
    assert (tmp_path / "zoo.json").read_bytes() == (ROOT / "traces" / "zoo.json").read_bytes()


def test_names_are_unique_and_a_model_has_one_library_and_family() -> None:
    assert len(set(names_of(TRACES))) == len(TRACES)
    about = {(trace.model, trace.library, trace.family) for trace in TRACES}
    assert len(about) == len({trace.model for trace in TRACES})


def test_traces_are_selected_by_name_model_library_and_family() -> None:
    trace = next(trace for trace in TRACES if trace.library == "mmdet" and trace.run == "train")
    assert names_of(select([trace.name], TRACES)) == [trace.name]
    assert trace.name in names_of(select([trace.model], TRACES))
    assert {item.library for item in select(["mmdet"], TRACES)} == {"mmdet"}
    assert {item.family for item in select([trace.family], TRACES)} == {trace.family}
    assert {item.run for item in select(["*.train"], TRACES)} == {"train"}
    assert select([], TRACES) == TRACES


def test_pattern_without_a_match_gets_a_suggestion() -> None:
    with pytest.raises(UserError, match=r"no trace of the zoo matches 'mmdt': did you mean mmdet\?"):
        select(["mmdt"], TRACES)
    with pytest.raises(UserError, match=r"no trace of the zoo matches 'bert': did you mean 'bert\*'\?"):
        select(["bert"], TRACES)


def test_recipes_are_arguments_of_opcapture_without_an_output() -> None:
    parser = make_parser()
    for trace in TRACES:
        args = parser.parse_args(list(trace.arguments))
        assert (args.output, args.audit) == (None, False), trace.name
        assert trace.run == "-".join(filter(None, (args.run, args.autocast))), trace.name
        assert trace.inputs, trace.name


def test_files_are_those_that_the_manifest_describes() -> None:
    described = {trace.name: (trace.recording.size_bytes, trace.recording.sha256) for trace in MADE if trace.recording}
    data = {trace.name: zoo_file(trace).read_bytes() for trace in MADE}
    assert {name: (len(text), sha256(text).hexdigest()) for name, text in data.items()} == described


def test_files_are_those_of_the_manifest_and_together_small() -> None:
    assert {path.name for path in MODELS.glob(f"*{SUFFIX}")} == {f"{trace.name}{SUFFIX}" for trace in MADE}
    assert sum(path.stat().st_size for path in MODELS.glob(f"*{SUFFIX}")) <= MOST_BYTES


def test_wheel_names_existing_files() -> None:
    files = pyproject()["tool"]["setuptools"]["package-data"]["opgrip.traces.zoo"]
    assert files
    assert [name for name in files if not (ROOT / "traces" / "zoo" / name).is_file()] == []


def counts_on_the_page() -> dict[str, int]:
    text = (ROOT / "docs" / "zoo.md").read_text()
    line = re.search(
        r"^Over all of them \((?P<traces>\S+) traces\) there are \*\*(?P<operators>\S+) operators\*\*, "
        r"(?P<extension_functions>\S+) of them functions of extensions \(mmcv's\), "
        r"and \*\*(?P<longtail>\S+) long-tail functions\*\* that ",
        text,
        re.MULTILINE,
    )
    assert line is not None
    return {name: int(number.replace(",", "")) for name, number in line.groupdict().items()}


def test_zoo_has_the_required_size() -> None:
    counts = counts_on_the_page()
    assert counts["traces"] == len(MADE)
    assert counts["operators"] >= 300
    assert counts["longtail"] >= 250
    assert len({trace.model for trace in MADE}) >= 40


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_page_of_the_zoo_has_the_current_counts() -> None:
    assert asdict(count_distinct(TRACES)) == counts_on_the_page()


# the page's counts need all traces, so each of them is read
@pytest.mark.slow
@pytest.mark.parametrize("trace", MADE[::8], ids=names_of(MADE[::8]))
def test_trace_is_valid_and_equals_its_manifest_entry(trace: ZooTrace) -> None:
    succeed("opgrip", "trace", "validate", f"zoo:{trace.name}")
    assert trace.recording is not None
    held = record_of(zoo_file(trace), trace, trace.recording.step_ms)
    assert replace(held, versions=trace.recording.versions) == trace.recording
    assert load(f"zoo:{trace.name}").header["command"] == ["opcapture", *trace.arguments]


def test_trace_loads_by_its_name() -> None:
    trace = MADE[0]
    assert trace.recording is not None
    assert len(load(f"zoo:{trace.name}").own_calls) == trace.recording.calls


def test_trace_that_is_not_installed_names_its_package() -> None:
    with pytest.raises(MissingFileError, match=r"absent\.predict of the zoo is not installed: .* opgrip-zoo"):
        zoo_file(replace(TRACES[0], model="absent", run="predict"))


@pytest.mark.slow
def test_packed_trace_has_equal_calls_and_values_and_its_recipe(tmp_path: Path) -> None:
    path = SHIPPED_TRACES[0]
    trace = ZooTrace("m", "predict", "mmdet", "two-stage", ["--model", "m.py"])
    packed = pack(path, trace, tmp_path / "m.predict.jsonl.zst")
    assert command_of(packed) == ["opcapture", "--model", "m.py"]
    difference = compare_traces(load(path), load(packed), ("plain", "packed"))
    assert difference.changed == []
    assert [name for name, *_ in difference.facts] == ["command"]
    assert packed.stat().st_size < path.stat().st_size / 6
