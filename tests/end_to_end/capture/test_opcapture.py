"""The command `opcapture`, run as a user runs it."""

import json
import os
import pickle
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from programs import ROOT, receive_ctrl_c, refusal, run_command, run_python, succeed, wait_for

from opgrip.traces import load

FACTORY = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 2)
    def forward(self, x):
        print("chatty")
        return {"loss": self.fc(x).sum(), "logits": self.fc(x).detach()}

def good(batch_size=3):
    return Net(), torch.ones(batch_size, 4)

def sized(input_size=(8, 8)):
    return nn.Conv2d(3, 1, 1), (torch.ones(1, 3, *input_size),)

def failing():
    raise ValueError("no weights\\nat all")

def lossless():
    return nn.GRU(4, 2), torch.ones(5, 4)

def strange():
    return 42

def broken_step():
    return nn.Linear(4, 2), torch.ones(5)

def grows():
    class Grows(nn.Module):
        def forward(self, x):
            return x.resize_(len(x) + 1)
    return Grows(), torch.ones(3)

def hangs():
    class Slow(nn.Module):
        def forward(self, x):
            import time
            for _ in range(100000):
                x = x + 1
                time.sleep(0.001)
    return Slow(), torch.ones(3)
"""
RAISING = 1 + FACTORY.splitlines().index('    raise ValueError("no weights\\nat all")')
BROKEN = ("--model", "nets.py:broken_step")


class Evil:
    """Object whose unpickling creates a file."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch owned",)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "nets.py").write_text(FACTORY, encoding="utf-8")
    (tmp_path / "train.py").write_text("import torch, json\ntorch.ones(3)\n", encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("name", ["nets.py:good", "nets:good"])
def test_factory_is_found_in_a_file_or_a_module(folder: Path, name: str) -> None:
    done = succeed("opcapture", "--model", name, "--steps", "3", "--run", "train", cwd=folder)
    assert done.stdout == ""
    (path,) = folder.glob("*.jsonl")
    assert load(path).calls["op"].value_counts()["aten.addmm.default"] == 6


def test_input_size_is_passed_to_the_factory(folder: Path) -> None:
    succeed("opcapture", "--model", "nets.py:sized", "--input-size", "5x7", "-o", "t.jsonl.gz", cwd=folder)
    (signature,) = (item for item in load(folder / "t.jsonl.gz").signatures if "convolution" in item.op)
    assert signature.args[0].shape == (1, 3, 5, 7)


def test_factory_that_returns_only_a_module_gets_images(folder: Path) -> None:
    (folder / "library.py").write_text(
        "import torch\n\n\ndef net(*, weights=None):\n    return torch.nn.Conv2d(3, 4, 3)\n"
    )
    words = ("--model", "library:net", "-o", "t.jsonl")
    error = refusal("opcapture", *words, cwd=folder)
    assert "library:net returned Conv2d: it must return a module and its inputs, or name the size of images" in error
    succeed("opcapture", *words, "--input-size", "6x8", "--batch-size", "2", cwd=folder)
    (signature,) = (item for item in load(folder / "t.jsonl").signatures if "convolution" in item.op)
    assert signature.args[0].shape == (2, 3, 6, 8)


def test_existing_trace_is_refused_before_the_warmup(folder: Path) -> None:
    (folder / "good.jsonl").touch()
    lines = refusal("opcapture", "--model", "nets.py:good", cwd=folder).splitlines()
    assert lines[1:] == ["opcapture: error: good.jsonl exists: choose another name, or replace it with --force"]
    assert "warm-up" not in lines[0]


def test_trace_is_written_to_standard_output(folder: Path) -> None:
    done = succeed("opcapture", "--model", "nets.py:good", "-o", "-", cwd=folder)
    assert [json.loads(line)["type"] for line in done.stdout.splitlines()][:: len(done.stdout.splitlines()) - 1] == [
        "header",
        "end",
    ]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--model", "resnet51"], "no model 'resnet51'"),
        (["--model", "builtin:yolo"], "no built-in model 'yolo': choose builtin:dlrm, builtin:faster_rcnn"),
        (["--model", "nets.py:absent"], "no factory 'absent' in nets.py"),
        (["--model", "no_such_package.x:good"], "no_such_package.x cannot be imported"),
        (["--model", "nets.py:strange"], "returned int: it must return a module and its inputs"),
        (["--model", "nets.py:failing"], f"nets.py:failing failed at nets.py:{RAISING}: ValueError: no weights at all"),
        (["--model", "nets.py:broken_step"], "broken_step fails while it runs a step: RuntimeError"),
        ([*BROKEN, "--warmup", "0", "--force", "-o", "existing.jsonl"], "broken_step fails while it runs a step"),
        (["--model", "nets.py:lossless", "--run", "train"], "the model returned no loss"),
        (["--model", "nets.py:good", "--input-size", "32"], "--input-size does not apply to nets.py:good"),
        (["--model", "nets.py:good", "--device", "warp:0"], "'warp:0' is not a device known to torch"),
        (["--model", "nets.py:good", "--device", "cuda"], "no CUDA device here"),
        (["--model", "nets.py:good", "-o", "existing.jsonl"], "existing.jsonl exists"),
        (["--model", "nets.py:good", "-o", "no/such/t.jsonl"], "the folder no/such does not exist"),
        (["--run", "fly"], "argument --run: invalid choice 'fly': choose from predict, loss, train"),
        (["--steps", "0"], "'0' is not an integer of at least 1"),
        (["--warmup", str(10**21)], "argument --warmup: '1000000000000000000000' is too large"),
        (["--seed", "9" * 30], "is not a 64-bit integer"),
        (["--model", "builtins:dict"], "builtins:dict returned dict"),
        (["--model", "nets.py:good", "--checkpoint", "evil.pth"], "evil.pth is not a file of weights"),
        (["--model", "nets.py:good", "--checkpoint", "weights.pth"], "does not fit Net"),
        (["--run", "generate"], "--run generate does not apply to builtin:faster_rcnn"),
        (["--new-tokens", "3"], "--new-tokens does not apply to builtin:faster_rcnn"),
        (["train.py", "--epochs", "1"], "'train.py': put a script after --, as in opcapture -- train.py: see"),
        (["--bach-size", "2"], "unknown option --bach-size: did you mean --batch-size?"),
        (["--", "python", "train.py"], "opcapture starts python itself: name the script without python"),
        (["-m", "train"], "no model 'train': for a config, name the file train.py; for a factory, train.py:NAME"),
        (["-m", "train.py"], "train.py is not a config of a model: it does not set `model`; run a script with: "),
        (["-m", "faster_rcnn"], "no model 'faster_rcnn': did you mean builtin:faster_rcnn?"),
        (["-m", "nets.py:goo"], "no factory 'goo' in nets.py: did you mean good?"),
        (["-m", "nets.py:good", "--checkpoint", "object.pth"], "object.pth does not exist: did you mean objects.pth?"),
        (["-m", "nets.py:good", "--checkpoint", "objects.pth"], "is not a file of weights: it contains pathlib."),
        (["-m", "nets.py:good", "-o", "t.txt"], "t.txt is not a valid name of a trace file: choose a name that ends"),
        (["--input-size", "20x"], "argument --input-size: '20x' is not a size such as 800x1333"),
        (["--batch-size", "999999999"], "builtin:faster_rcnn failed: out of memory: "),
    ],
)
def test_usage_error_is_reported_in_one_line_and_leaves_no_file(folder: Path, args: list[str], message: str) -> None:
    (folder / "existing.jsonl").write_text("precious", encoding="utf-8")
    (folder / "evil.pth").write_bytes(pickle.dumps(Evil()))
    torch.save({"other": torch.ones(2)}, folder / "weights.pth")
    torch.save({"args": Path("x")}, folder / "objects.pth")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    done = run_command("opcapture", *args, cwd=folder)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    last = done.stderr.splitlines()[-1]
    assert last.startswith("opcapture: error: ")
    assert message in last
    assert "Traceback" not in done.stderr
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_output_that_is_not_a_regular_file_is_never_replaced(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    error = refusal("opcapture", "--model", "nets.py:good", "--force", "-o", "pipe", cwd=folder)
    assert "pipe is not a regular file" in error
    assert (folder / "pipe").is_fifo()


def test_step_that_changes_its_inputs_gets_new_copies(folder: Path) -> None:
    args = ("--model", "nets.py:grows", "--steps", "3", "-o", "t.jsonl")
    assert run_command("opcapture", *args, cwd=folder).returncode == 0
    assert len(load(folder / "t.jsonl").signatures) == 1


def test_debug_shows_the_traceback(folder: Path) -> None:
    error = refusal("opcapture", "--model", "nets.py:failing", "--debug", cwd=folder)
    assert "Traceback" in error
    assert "in failing" in error


@pytest.mark.slow
def test_ctrl_c_closes_the_trace_and_exits_with_130(folder: Path) -> None:
    program = Path(sys.executable).parent / "opcapture"
    command = [str(program), "--model", "nets.py:hangs", "--warmup", "0", "-o", "t.jsonl"]
    process = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True, preexec_fn=receive_ctrl_c)
    wait_for(lambda: any(part.stat().st_size > 2000 for part in folder.glob("t.part*")), process)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "Traceback" not in stderr
    calls = len(load(folder / "t.jsonl", partial=False).calls)
    lines = [line for line in stderr.splitlines() if "the machine was busy" not in line]
    assert lines[-2].startswith(f"opcapture: {calls:,} calls of ")
    assert lines[-2].endswith(" kB, to t.jsonl (interrupted)")
    assert lines[-1] == "opcapture: run them again with: opreplay t.jsonl"


def test_help_shows_examples_and_builtin_models() -> None:
    done = succeed("opcapture", "--help")
    assert "opcapture --model faster-rcnn_r50_fpn_1x_coco.py" in done.stdout
    models = {path.stem for path in (ROOT / "samples" / "models").glob("*.py")}
    named = set(re.findall(r"builtin:(\w+)", done.stdout))
    assert named == models - {"__init__", "proposals", "pyramid", "regions"}


# Command with a small limit of file size, which simulates a full disk.
FULL = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (8000, resource.RLIM_INFINITY))
from opgrip.capture.start import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("words", [["--", "script.py"], ["--model", "nets.py:good", "--steps", "300"]])
def test_full_disk_keeps_and_names_the_partial_trace(folder: Path, words: list[str]) -> None:
    (folder / "script.py").write_text("import torch\nfor size in range(300):\n    torch.ones(size)\n", encoding="utf-8")
    done = run_python("-c", FULL, "-o", "t.jsonl", *words, cwd=folder)
    assert done.returncode == 2
    (part,) = folder.glob("*.part*")
    message = (
        f"t.jsonl could not be written: file too large; {part.name} contains what was written: read it with --partial"
    )
    assert done.stderr.splitlines()[-1] == f"opcapture: error: {message}"
    assert load(part).missing


def test_extension_that_was_not_recorded_is_reported(folder: Path) -> None:
    words = ("--extension", "no_such_extension", "--extension", "json", "-o", "t.jsonl", "--", "train.py")
    done = succeed("opcapture", *words, cwd=folder)
    assert "opcapture: the extension no_such_extension was not recorded: the program did not load it\n" in done.stderr
    assert "opcapture: the extension json was not recorded: it has no compiled functions\n" in done.stderr
    assert "Warning" not in done.stderr
