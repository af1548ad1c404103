"""The Python function that captures a model, and mistakes that new users make with `opcapture` and `Capture`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from programs import TinyNet, refusal, succeed

from opgrip.capture import Capture, Schedule, capture
from opgrip.replay import replay
from opgrip.traces import UserError, load

NETS = "from torch import nn, ones\ndef small(): return nn.Linear(2, 2), ones(1, 2)\n"
SCRIPT = "import torch, json\ntorch.ones(3)\n"
X = torch.ones(3)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "nets.py").write_text(NETS, encoding="utf-8")
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    torch.save({"args": Path("x")}, tmp_path / "objects.pth")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "train.py --epochs 1",
            "unexpected argument: 'train.py': put a script after --, as in opcapture -- train.py: see",
        ),
        ("--bach-size 2", "unknown option --bach-size: did you mean --batch-size?"),
        ("-- python train.py", "opcapture starts python itself: name the script without python"),
        ("-m train", "no model 'train': for a config, name the file train.py; for a factory, train.py:NAME"),
        (
            "-m train.py",
            "train.py is not a config of a model: it does not set `model`; run a script with: opcapture -- train.py",
        ),
        ("-m faster_rcnn", "no model 'faster_rcnn': did you mean builtin:faster_rcnn?"),
        ("-m nets.py:smal", "no factory 'smal' in nets.py: did you mean small?"),
        (
            "-m nets.py:small --checkpoint object.pth",
            "the file of weights object.pth does not exist: did you mean objects.pth?",
        ),
        ("-m nets.py:small --checkpoint objects.pth", "objects.pth is not a file of weights: it contains pathlib."),
        (
            "-m nets.py:small -o t.txt",
            "t.txt is not a valid name of a trace file: choose a name that ends in .jsonl, .jsonl.gz, .jsonl.zst",
        ),
        ("--input-size 20x", "argument --input-size: '20x' is not a size such as 800x1333"),
        ("--batch-size 999999999", "builtin:faster_rcnn failed: out of memory: "),
    ],
)
def test_usage_error_suggests_what_was_meant(folder: Path, words: str, message: str) -> None:
    before = {path.name for path in folder.iterdir()}
    error = refusal("opcapture", *words.split(), cwd=folder)
    assert error.splitlines()[-1].startswith(f"opcapture: error: {message}")
    assert {path.name for path in folder.iterdir()} - {"__pycache__"} == before


def test_extension_that_was_not_recorded_is_reported(folder: Path) -> None:
    words = ("--extension", "no_such_extension", "--extension", "json", "-o", "t.jsonl", "--", "train.py")
    done = succeed("opcapture", *words, cwd=folder)
    assert "opcapture: the extension no_such_extension was not recorded: the program did not load it\n" in done.stderr
    assert "opcapture: the extension json was not recorded: it has no compiled functions\n" in done.stderr
    assert "Warning" not in done.stderr


def test_schedule_that_is_never_reached_is_reported(tmp_path: Path) -> None:
    message = "no step was recorded: the program made 2 steps, and the schedule records none of them"
    with (
        pytest.warns(RuntimeWarning, match=message),
        Capture(tmp_path / "t.jsonl", schedule=Schedule(skip=5)) as watched,
    ):
        for _ in range(2):
            X.sin()
            watched.step()


@pytest.mark.parametrize("skip", [0, 1])
def test_schedule_without_step_calls_is_reported(tmp_path: Path, skip: int) -> None:
    schedule = Schedule(skip=skip, repeat=1)
    with (
        pytest.warns(RuntimeWarning, match=r"step\(\) was never called: for the schedule, the whole program was one"),
        Capture(tmp_path / "t.jsonl", schedule=schedule),
    ):
        X.sin()
    assert len(load(tmp_path / "t.jsonl").calls) == 1 - skip


def test_existing_file_is_a_file_exists_error(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").touch()
    with pytest.raises(FileExistsError, match="replace it with force=True") as caught:
        capture(TinyNet(), tmp_path / "t.jsonl", X)
    assert isinstance(caught.value, UserError)
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "nothere.jsonl")


def test_capture_of_a_non_module_is_a_type_error(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"model is a str, not a torch.nn.Module: opgrip.capture.capture builds models"):
        Capture(tmp_path / "t.jsonl", model="net")  # type: ignore[arg-type]


INPUTS = (torch.ones(2, 3, 8, 8), torch.zeros(2, 6, dtype=torch.long))


def test_module_is_captured_and_its_trace_replayed(tmp_path: Path) -> None:
    model = TinyNet()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trace = capture(model, tmp_path / "t.jsonl", INPUTS, steps=2)
    assert trace.header["model"]["name"] == "tinynet"
    assert trace.header["steps"] == 2
    assert set(trace.calls["phase"]) == {"forward"}
    assert set(trace.calls["module"]) >= {"features.0", "head"}
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(row.status == "ok" for row in replay(tmp_path / "t.jsonl", top=2, iterations=1))


def test_frozen_layer_stays_frozen(tmp_path: Path) -> None:
    model = TinyNet()
    model.features[0].eval()
    capture(model, tmp_path / "t.jsonl", INPUTS)
    assert model.training
    assert not model.features[0].training
    assert all(module.training for module in model.features[1:])


def test_training_step_of_a_module_has_three_phases(tmp_path: Path) -> None:
    trace = capture(TinyNet(), tmp_path / "t.jsonl", dict(zip(("images", "words"), INPUTS, strict=True)), run="loss")
    assert set(trace.calls["phase"]) == {"forward"}
    trace = capture(TinyNet(), tmp_path / "train.jsonl", INPUTS, run="train")
    assert set(trace.calls["phase"]) == {"forward", "backward", "optimizer"}


def test_invalid_arguments_are_reported_in_python_terms(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    with pytest.raises(UserError, match="a module needs inputs"):
        capture(TinyNet(), path)
    with pytest.raises(UserError, match="batch_size= cannot be used with a module"):
        capture(TinyNet(), path, INPUTS, batch_size=3)
    with pytest.raises(TypeError, match="unexpected keyword argument 'step': did you mean 'steps'"):
        capture(TinyNet(), path, INPUTS, step=3)
    with pytest.raises(UserError, match="tinynet fails while it runs a step"):
        capture(TinyNet(), path, INPUTS[:1])
    assert not path.exists()
    path.write_text("mine")
    with pytest.raises(FileExistsError, match="force="):
        capture(TinyNet(), path, INPUTS)
    assert path.read_text() == "mine"
    with pytest.raises(UserError, match="no parameters to train: choose run="):
        capture(torch.nn.Softmax(dim=0), tmp_path / "other.jsonl", torch.ones(3), run="train")


def test_functions_and_extensions_are_given_as_a_list_or_a_string(tmp_path: Path) -> None:
    names = ["programs:TinyNet.forward", "torch.nn.modules.linear:Linear.forward"]
    for grip in (names, names[0]):
        options = {"grip": grip, "grip_to": tmp_path / "samples", "extension": ["math"], "force": True}
        trace = capture(TinyNet(), tmp_path / "t.jsonl", INPUTS, **options)
        gripped = {item.op for item in trace.signatures if item.kind == "function"}
        assert len(gripped) == (2 if grip is names else 1)
