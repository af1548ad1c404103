"""Functions of mmdet and mmseg gripped by pattern: they run and return the recorded results without these packages."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from openmmlab_models import FASTER_RCNN, NARROW
from optional import optional
from programs import SUPPORT_PATH, run_python, succeed

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
