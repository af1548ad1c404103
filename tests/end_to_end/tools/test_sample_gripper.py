"""`grip` as users write it: their program behaves the same, and the sample runs without the project."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import gripping
import pytest
import torch
from openmmlab_models import FASTER_RCNN, NARROW
from optional import optional
from programs import ROOT, SUPPORT_PATH, refusal, run_command, run_python, succeed

from opgrip.tools.sample_gripper import grip
from opgrip.traces import UserError, load

HEADER = "import torch\nfrom opgrip.tools.sample_gripper import grip\n"


def run_program(text: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(text)
    return run_python("program.py", *arguments, cwd=folder)


def run_samples(folder: Path) -> int:
    """Run all tests of a folder of samples in a separate process, and return the number of passed tests."""
    # do not use the project's own pytest options
    options = ("-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", folder)
    done = run_python("-m", "pytest", *options, folder, cwd=folder, status=0)
    return int(done.stdout.strip().splitlines()[-1].split()[0])


def about(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "sample.json").read_text())
    return found


MANY = ", ".join(f"t{place}" for place in range(30))

DECORATED = f"""\
{HEADER}
SCALE = 2.0


def area(boxes):
    return (boxes[:, 2:] - boxes[:, :2]).prod(dim=1)


@grip
def bare(boxes, others):
    '''Two tensors, and a helper.'''
    if boxes.shape[0] > 2:
        boxes = boxes * SCALE
    return area(boxes) / area(others).clamp(min=1)


@grip(calls=1, tags=["Customized"], name="sums", to="elsewhere")
def many({MANY}):
    return torch.stack([{MANY}]).sum(dim=0)


class Base(torch.nn.Module):
    def forward(self, boxes):
        return boxes + 1


@grip(entry="forward")
class Head(Base):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(4, 2)

    def forward(self, boxes):
        return self.fc(super().forward(boxes))


class Coder:
    @grip
    @staticmethod
    def halved(boxes):
        return boxes if boxes.max() < 1 else Coder.halved(boxes / 2)


shrunk = grip(lambda boxes: boxes - 1)

torch.manual_seed(0)
head = Head()
for rows in (2, 3, 3, 2):
    boxes = torch.rand(rows, 4)
    print(bare(boxes, boxes + 1).tolist(), head(boxes).tolist(), Coder.halved(boxes * 3).tolist(), shrunk(boxes).sum())
    print(many(*[boxes] * 30).tolist())
print(torch.rand(1))
"""


@pytest.mark.slow
def test_decorated_functions_leave_samples_that_run_unedited(tmp_path: Path) -> None:
    done = run_program(DECORATED, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = DECORATED.replace("= grip(lambda", "= (lambda").splitlines()
    plain = "\n".join(line for line in lines if "@grip" not in line and "import grip" not in line)
    (tmp_path / "plain").mkdir()
    assert run_program(plain, tmp_path / "plain").stdout == done.stdout
    samples = tmp_path / "grips"
    assert {path.name for path in samples.iterdir()} == {"bare", "Head_forward", "Coder_halved", "shrunk"}
    assert about(samples / "bare")["calls"][0]["operators"] > 0
    assert about(tmp_path / "elsewhere" / "sums")["tags"] == ["BuiltInDataStructure", "Customized", "Reduce"]
    # in a recursion, inner calls are separate calls
    assert run_samples(samples) >= 7
    assert run_samples(tmp_path / "elsewhere") == 1
    before = {path: path.read_bytes() for path in samples.rglob("*.*")}
    assert run_program(DECORATED, tmp_path).returncode == 0
    assert {path: path.read_bytes() for path in samples.rglob("*.*") if "__pycache__" not in path.parts} == {
        path: data for path, data in before.items() if "__pycache__" not in path.parts
    }


REFUSED = f"""\
{HEADER}
import asyncio


@grip
def streamed(boxes):
    yield boxes


@grip
async def awaited(boxes):
    return boxes


@grip
def given_on(boxes):
    return iter([boxes])


@grip
def never():
    pass


print(len(list(streamed(1))), asyncio.run(awaited(2)), len(list(given_on(3))))
"""


def test_functions_that_cannot_be_gripped_are_reported_and_run(tmp_path: Path) -> None:
    done = run_program(REFUSED, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "1 2 1\n"
    warnings = [line.partition("RuntimeWarning: ")[2] for line in done.stderr.splitlines() if "Warning" in line]
    assert warnings == [
        "streamed is not gripped: it is a generator: a call returns before the work is done",
        "awaited is not gripped: it is asynchronous: a call returns before the work is done",
        "given_on was not gripped: it takes or returns an object of type builtins.list_iterator",
    ]
    assert not (tmp_path / "grips").exists()


@pytest.mark.slow
def test_failing_program_leaves_its_samples(tmp_path: Path) -> None:
    text = f"{HEADER}\n\n@grip\ndef f(boxes):\n    return boxes + 1\n\n\nf(torch.ones(2))\nraise KeyError('over')\n"
    done = run_program(text, tmp_path)
    assert done.returncode == 1
    assert "KeyError: 'over'" in done.stderr
    assert (tmp_path / "grips" / "f" / "f.py").exists()


@pytest.mark.slow
def test_changed_function_gets_another_sample_name(tmp_path: Path) -> None:
    text = f"{HEADER}\n\n@grip\ndef f(boxes):\n    return boxes + 1\n\n\nf(torch.ones(2))\n"
    assert run_program(text, tmp_path).returncode == 0
    assert run_program(text.replace("+ 1", "+ 2"), tmp_path).returncode == 0
    assert {path.name for path in (tmp_path / "grips").iterdir()} == {"f", "f_2"}
    assert "boxes + 1" in (tmp_path / "grips" / "f" / "f.py").read_text()


def test_functions_are_gripped_by_name_in_a_block(tmp_path: Path) -> None:
    with grip.this("gripping:kept", "gripping:Coder.decode", calls=2, to=tmp_path) as gripped:
        for rows in (2, 3, 4):
            gripping.kept(torch.ones(rows, 4), torch.ones(rows), 0.5)
            gripping.Coder().decode(torch.ones(rows, 4))
    assert {path.name for path in gripped.written} == {"kept", "Coder_decode"}
    assert gripped.refused == {}
    assert not hasattr(gripping.kept, "__wrapped__")
    assert len(load(tmp_path / "kept" / "calls.jsonl").signatures) == 2
    assert {"InputAware", "DataDependentShape", "IfElseBranch"} <= set(about(tmp_path / "kept")["tags"])


def test_functions_are_gripped_by_name_until_the_program_ends(tmp_path: Path) -> None:
    text = f"{HEADER}import sys\nsys.path.insert(0, {str(ROOT / 'tests/support/models')!r})\nimport gripping\n"
    text += "grip.this('gripping:scaled', by_reference=True)\nimport os\nos.chdir('/')\n"
    text += "gripping.scaled(torch.ones(2))\n"
    done = run_program(text, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    folder = tmp_path / "grips" / "scaled"
    assert about(folder)["by_reference"]
    assert "def scaled" not in (folder / "scaled.py").read_text()


@pytest.mark.parametrize(
    ("use", "problem"),
    [
        (lambda: grip.this("delta2bbox"), "is not a pattern for functions"),
        (lambda: grip(class_entry="go"), "no parameter class_entry: write entry="),  # type: ignore[call-overload]
        # type: ignore[call-overload]
        (lambda: grip(calls=0), "0 calls are too few for a sample"),
        (lambda: grip(tags=["Fast"]), "unknown tag 'Fast'"),
        (lambda: grip(name="no name"), "is not a valid sample name"),
        (lambda: grip(entry="go")(gripping.Coder), "Coder has no method go"),
    ],
)
def test_wrong_use_of_grip_is_an_error(use: Any, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        use()


SCRIPT = """\
import sys
import torch


def scale(boxes, by=2.0):
    return (boxes * by).relu()


class Head(torch.nn.Module):
    def forward(self, boxes):
        def moved(boxes):
            return boxes + 1

        return scale(moved(boxes))


print(sys.argv, __name__)
for rows in (2, 3):
    Head()(torch.ones(rows, 4))
sys.exit(int(sys.argv[2]))
"""


@pytest.mark.slow
def test_grip_verb_grips_functions_of_a_script(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    names = ("scale", "Head.forward", "Head.forward.moved")
    flags = [word for name in names for word in ("--function", name)]
    words = ("script.py", *flags, "--to", "out", "--", "--status", "0")
    done = succeed("opgrip", "grip", *words, cwd=tmp_path, fresh=True)
    assert done.stdout == "['script.py', '--status', '0'] __main__\n"
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"scale", "Head_forward", "moved"}
    assert run_samples(tmp_path / "out") == 6
    assert len(done.stderr.splitlines()) == 3


def test_grip_verb_keeps_the_exit_status_and_reports_missing_functions(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run_command("opgrip", "grip", "script.py", "--function", "no_such", "--", "--status", "3", cwd=tmp_path)
    assert done.returncode == 3
    assert "__main__:no_such was not gripped: it matches no function" in done.stderr
    done = run_command("opgrip", "grip", "script.py", "--function", "no_such", "--", "--status", "0", cwd=tmp_path)
    assert done.returncode == 2
    error = refusal("opgrip", "grip", "missing.py", "--function", "f", cwd=tmp_path)
    assert error == "opgrip grip: error: missing.py does not exist: name a script, or -m and a module\n"


@pytest.mark.slow
def test_opcapture_grips_script_functions_into_trace_and_folder(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    succeed("opcapture", "--grip", "__main__:scale", "-o", "t.jsonl", "--", "script.py", "--status", "0", cwd=tmp_path)
    trace = load(tmp_path / "t.jsonl", partial=False)
    assert trace.calls["op"].tolist().count("__main__:scale") == 2
    assert trace.own_calls["op"].tolist() == [*["aten.ones.default", "aten.add.Tensor"], *_SCALED] * 2
    assert (tmp_path / "grips" / "scale" / "scale.py").exists()


_SCALED = ["aten.mul.Tensor", "aten.relu.default"]

COUNT = 32

GRIPS = """\
import sys
import warnings
from grip_zoo import ZOO, found
from opgrip.tools.sample_gripper import grip
import torch

chosen = {one.path: one for one in ZOO}
paths, count = list(chosen), int(sys.argv[1])
chosen = [chosen[paths[place * len(paths) // count]] for place in range(count)]
for one in chosen:
    found(one.path)
gripping = grip.this(*(one.path for one in chosen))
for one in chosen:
    torch.manual_seed(1)
    args = one.arguments()
    function, owner, entry = found(one.path)
    name = entry.rpartition(".")[2]
    if owner is None:
        function(*args, **one.keywords)
    else:
        target = getattr(owner, name)
        target(*(args[1:] if getattr(target, "__self__", None) is owner else args), **one.keywords)
gripping.close()
print({str(folder.name) for folder in gripping.written}, gripping.refused, file=sys.stderr)
"""

BLOCKS = """\
import sys

for name in ("mmdet", "mmseg", "mmengine", "mmcv"):
    sys.modules[name] = None
"""


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_samples_gripped_by_pattern_run_without_their_project(tmp_path: Path) -> None:
    optional("mmdet")
    optional("mmseg")
    (tmp_path / "grips.py").write_text(GRIPS)
    (tmp_path / "blocks.py").write_text(BLOCKS)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), SUPPORT_PATH])}
    gripped = run_python("grips.py", COUNT, cwd=tmp_path, env=environment, status=0)
    folders = sorted(path.parent for path in tmp_path.glob("grips/*/sample.json"))
    origins = {json.loads((folder / "sample.json").read_text())["source"]["project"] for folder in folders}
    assert len(folders) >= 30, gripped.stderr[-3000:]
    assert origins == {"mmdet", "mmsegmentation"}
    options = ("-q", "-p", "blocks", "-p", "no:cacheprovider", "-c", os.devnull)
    ran = run_python("-m", "pytest", *options, "grips", cwd=tmp_path, env=environment, status=0)
    assert int(ran.stdout.strip().splitlines()[-1].split()[0]) >= 30


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_samples_gripped_from_a_training_step_repeat_their_results(tmp_path: Path) -> None:
    optional("mmdet")
    narrow = ("--cfg-options", *NARROW[FASTER_RCNN])
    step = ("--model", FASTER_RCNN, "--run", "train", "--input-size", "160x160")
    patterns = ("mmdet.models.dense_heads.*:*", "mmdet.models.roi_heads.*:*", "mmdet.models.backbones.*:ResNet.forward")
    grips = [word for pattern in patterns for word in ("--grip", pattern)]
    folder = tmp_path / "samples"
    done = succeed("opcapture", *step, *grips, "--grip-to", folder, "-o", tmp_path / "step.jsonl", *narrow)
    assert "was not gripped" not in done.stderr
    words = ("-q", "-p", "no:cacheprovider", "-c", os.devnull, str(folder))
    ran = run_python("-m", "pytest", *words, status=0)
    assert int(ran.stdout.strip().splitlines()[-1].split()[0]) >= 25
