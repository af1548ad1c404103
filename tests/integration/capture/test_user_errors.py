"""Tests of mistakes that new users make with `opcapture` and `Capture`, and of the resulting messages."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest
import torch
from programs import TinyNet, refusal, run_command, run_python, succeed

from opgrip.capture import Capture, Schedule, capture
from opgrip.capture.program.environment import describe_environment
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
        ("-- python3.12 -m x", "opcapture starts python3.12 itself: name the script without python3.12"),
        ("-m train", "no model 'train': for a config, name the file train.py; for a factory, train.py:NAME"),
        (
            "-m train.py",
            "train.py is not a config of a model: it does not set `model`; run a script with: opcapture -- train.py",
        ),
        ("-m opinfo", "no model 'opinfo': opinfo:all has all operators"),
        ("-m faster_rcnn", "no model 'faster_rcnn': did you mean builtin:faster_rcnn?"),
        ("-m builtin:faster-rcnn", "no built-in model 'faster-rcnn': did you mean builtin:faster_rcnn?"),
        ("-m nets.py:smal", "no factory 'smal' in nets.py: did you mean small?"),
        ("-m net.py:small", "no file net.py: did you mean nets.py"),
        (
            "-m nets.py:small --checkpoint object.pth",
            "the file of weights object.pth does not exist: did you mean objects.pth?",
        ),
        (
            "-m nets.py:small --checkpoint nets.py",
            "nets.py is not a file of weights: save a state_dict with torch.save",
        ),
        ("-m nets.py:small --checkpoint objects.pth", "objects.pth is not a file of weights: it contains pathlib."),
        (
            "-m nets.py:small -o t.txt",
            "t.txt is not a valid name of a trace file: end it in .jsonl, .jsonl.gz, .jsonl.zst",
        ),
        ("-o t.gz -- train.py", "t.gz is not a valid name of a trace file: end it in .jsonl, .jsonl.gz, .jsonl.zst"),
        ("--input-size 20x", "argument --input-size: '20x' is not a size such as 800x1333"),
        ("--batch-size 999999999", "builtin:faster_rcnn failed: out of memory: "),
    ],
)
def test_usage_error_suggests_what_was_meant(folder: Path, words: str, message: str) -> None:
    before = {path.name for path in folder.iterdir()}
    error = refusal("opcapture", *words.split(), cwd=folder)
    assert error.splitlines()[-1].startswith(f"opcapture: error: {message}")
    assert {path.name for path in folder.iterdir()} - {"__pycache__"} == before


def test_config_without_its_suffix_is_suggested_with_it(folder: Path) -> None:
    configs = folder / "package" / ".mim" / "configs"
    configs.mkdir(parents=True)
    for name in ("retinanet_1x_coco.py", "retinanet_2x_coco.py"):
        (configs / name).write_text("model = {}", encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": str(folder)}
    done = run_command("opcapture", "-m", "retinanet_1x_coco", cwd=folder, env=env)
    assert done.stderr.splitlines()[-1] == (
        "opcapture: error: no model 'retinanet_1x_coco': did you mean retinanet_1x_coco.py?"
    )


def test_extension_that_was_not_recorded_is_reported(folder: Path) -> None:
    words = ("--extension", "no_such_extension", "--extension", "json", "-o", "t.jsonl", "--", "train.py")
    done = succeed("opcapture", *words, cwd=folder)
    assert "opcapture: the extension no_such_extension was not recorded: the program did not load it\n" in done.stderr
    assert "opcapture: the extension json was not recorded: it has no function outside of Python\n" in done.stderr
    assert "Warning" not in done.stderr


def test_recorded_extension_causes_no_warning(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Capture(tmp_path / "t.jsonl", extensions=["math", "mmcv._ext"]):
            X.sin()
    assert caught == []


def test_schedule_that_is_never_reached_is_reported(tmp_path: Path) -> None:
    message = "no step was recorded: the program made 2, and the schedule begins after them"
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


def test_completed_schedule_causes_no_warning(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Capture(tmp_path / "t.jsonl", schedule=Schedule(skip=1, repeat=1)) as watched:
            for _ in range(3):
                X.sin()
                watched.step()


def test_existing_file_is_a_file_exists_error(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").touch()
    with pytest.raises(FileExistsError, match="replace it with force=True") as caught:
        capture(TinyNet(), tmp_path / "t.jsonl", X)
    assert isinstance(caught.value, UserError)
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "nothere.jsonl")


def test_capture_of_a_non_module_is_a_type_error(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"model is a str, not a torch.nn.Module: opgrip.capture.capture builds one"):
        Capture(tmp_path / "t.jsonl", model="net")  # type: ignore[arg-type]


def test_old_driver_warning_is_hidden_from_programs_without_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def warn() -> bool:
        warnings.warn("CUDA initialization: The NVIDIA driver on your system is too old", stacklevel=2)
        return True

    def fail() -> int:
        raise RuntimeError("no driver")

    monkeypatch.setattr(torch.cuda, "is_available", warn)
    monkeypatch.setattr(torch.cuda, "device_count", fail)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(describe_environment()["devices"]) == ["cpu"]


@pytest.mark.slow
def test_capture_runs_with_warnings_as_errors(folder: Path) -> None:
    (folder / "uses.py").write_text(
        "import torch\nfrom opgrip import Capture\nwith Capture('t.jsonl'): torch.ones(3)\n", encoding="utf-8"
    )
    done = run_python("uses.py", cwd=folder, env={**os.environ, "PYTHONWARNINGS": "error::UserWarning"}, fresh=True)
    assert (done.returncode, done.stderr) == (0, "")
