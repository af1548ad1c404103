"""The zoo: its manifest and files, the verbs on it, and how its traces are made."""

import re
import sys
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path

import pytest
from optional import optional
from programs import ROOT, SHIPPED_TRACES, refusal, run_command, succeed
from project_files import pyproject

from opgrip.capture.command.capture_options import make_parser
from opgrip.errors import MissingFileError, UserError
from opgrip.tools.opgrip import main
from opgrip.traces import load
from opgrip.traces.analysis.differences import compare_traces
from opgrip.traces.zoo import ZooTrace, read_manifest, select, zoo_file
from opgrip.traces.zoo.manifest import MODELS, SUFFIX
from opgrip.zoo import making as zoo
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


SMALL = ("--model", "builtin:faster_rcnn", "--input-size", "96", "--batch-size", "1", "--steps", "1")
DETECTOR = ZooTrace("small", "predict", "opgrip", "two-stage", [*SMALL], "1 image of 96x96")
ENDS = """
import os, signal, time
from torch import nn, ones

def killed():
    os.kill(os.getpid(), signal.SIGKILL)

def hangs():
    time.sleep(600)

def fails():
    raise RuntimeError("no weights")

def other():
    return nn.Linear(2, 2), ones(1, 2)
"""


def bad(tmp_path: Path, name: str) -> ZooTrace:
    (tmp_path / "ends.py").write_text(ENDS)
    return ZooTrace(name, "predict", "opgrip", "none", ["--model", f"{tmp_path / 'ends.py'}:{name}", "--steps", "1"])


def test_zoo_traces_are_listed_one_per_line_and_filtered() -> None:
    header, *lines = run_command("opgrip", "zoo", "list").stdout.splitlines()
    assert header.split("\t")[0::8] == ["name", "installed"]
    assert {line.split("\t")[-1] for line in lines} == {"yes"}
    assert [line.split("\t")[0] for line in lines] == [trace.name for trace in read_manifest()]
    train = run_command("opgrip", "zoo", "list", "*.train").stdout.splitlines()[1:]
    assert {line.split("\t")[0].partition(".")[2] for line in train} == {"train"}
    refusal("opgrip", "zoo", "list", "no_such*", in_one_line=True)


def test_zoo_verbs_do_not_load_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["zoo", "list", "bert-base.predict"]) == 0
    assert main(["zoo", "show", "bert-base.predict"]) == 0


def test_zoo_show_prints_the_commands_that_make_and_replay_a_trace() -> None:
    shown = run_command("opgrip", "zoo", "show", "built-in_faster-rcnn.predict").stdout
    assert "made by     opcapture --model builtin:faster_rcnn" in shown
    assert "run it      opreplay zoo:built-in_faster-rcnn.predict" in shown


@pytest.mark.slow
def test_made_trace_has_its_figures_in_the_manifest(tmp_path: Path) -> None:
    held, content = zoo.make_trace(DETECTOR, tmp_path).recording, load(tmp_path / f"small.predict{SUFFIX}")
    assert held is not None
    assert (held.calls, held.steps) == (len(content.own_calls), 1)
    assert held.signatures == len(content.signatures)
    assert held.size_bytes == (tmp_path / f"small.predict{SUFFIX}").stat().st_size
    assert held.step_ms > 0
    assert held.longtail > 0
    assert {"torch", "opgrip"} <= held.versions.keys()
    # shipped traces do not contain the machine's paths
    assert content.header["command"] == ["opcapture", *SMALL]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "message"),
    [("killed", "ended by SIGKILL"), ("hangs", "took longer than 15 s"), ("fails", "no weights")],
)
def test_failing_model_loses_only_its_trace(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        zoo.make_trace(bad(tmp_path, name), tmp_path / "models", timeout_s=15)
    assert not list(tmp_path.glob("models/*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "package"), [("fast-scnn.predict", "mmseg"), ("centernet_r18-dcnv2.predict", "mmdet")]
)
def test_remade_shipped_trace_is_equal(name: str, package: str) -> None:
    optional(package)
    done = succeed("opgrip", "zoo", "make", "--check", name)
    assert f"{name}: 0 signatures differ" in done.stderr
