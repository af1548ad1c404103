"""The verbs on the zoo, and how its traces are made."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from optional import optional
from programs import refusal, run_command, succeed

from opgrip.errors import UserError
from opgrip.tools.opgrip import main
from opgrip.traces import load
from opgrip.traces.zoo import ZooTrace, read_manifest
from opgrip.traces.zoo.manifest import SUFFIX
from opgrip.zoo import making as zoo

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


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[ZooTrace, Path]:
    folder = tmp_path_factory.mktemp("models")
    return zoo.make_trace(DETECTOR, folder), folder


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
def test_made_trace_has_its_figures_in_the_manifest(made: tuple[ZooTrace, Path]) -> None:
    trace, folder = made
    held, content = trace.recording, load(folder / f"small.predict{SUFFIX}")
    assert held is not None
    assert (held.calls, held.steps) == (len(content.own_calls), 1)
    assert held.signatures == len(content.signatures)
    assert held.size_bytes == (folder / f"small.predict{SUFFIX}").stat().st_size
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
