"""`opgrip longtail` and `opcapture --find-longtail`, run as a user runs them."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from programs import run_command, succeed

from opgrip.traces import load


@pytest.mark.slow
def test_each_function_is_a_line_with_the_command_that_grips_it(detector_trace: Path, tmp_path: Path) -> None:
    done = succeed("opgrip", "longtail", detector_trace, "--bandwidth", "10", "-o", tmp_path / "rows.csv")
    assert "\x1b" not in done.stdout
    total, heads, _, *lines = filter(None, done.stdout.splitlines())
    assert total.endswith(" 10.0 GB/s")
    assert "ops/call" in heads
    rows = list(csv.DictReader((tmp_path / "rows.csv").open()))
    assert done.stderr == f"opgrip longtail: wrote {len(rows)} functions to {tmp_path / 'rows.csv'}\n"
    assert len(lines) == min(len(rows), 30) >= 10
    for line, row in zip(lines, rows, strict=False):
        assert row["name"] in line
        assert line.endswith(f"--grip {row['pattern']}")
    overlaps = next(row for row in rows if row["name"] == "bbox_overlaps")
    assert overlaps["pattern"] == "opgrip.samples.boxes.bbox_overlaps:bbox_overlaps"
    # the program that the trace names is not repeated in a command
    assert all(line.split("opcapture ")[1].startswith("... --grip ") for line in lines)


def test_opcapture_prints_the_longtail_table_of_its_trace(tmp_path: Path) -> None:
    (tmp_path / "small.py").write_text(MODEL)
    done = succeed("opcapture", "--model", "small.py:make", "-o", "t.jsonl", "--find-longtail", cwd=tmp_path)
    total, _, _, line = filter(None, done.stdout.splitlines())
    assert total.startswith("1 long-tail function in 1 trace of ")
    assert line.endswith("opcapture ... --grip small:shifted")
    assert load(tmp_path / "t.jsonl").header["steps"] == 3


TRAINING = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter((torch.rand(8, 8) * 2 - 1).sin())

    def forward(self, rows):
        scaled = halves(rows @ self.weight)
        return (halves(scaled + 1) - scaled).abs().mean()

def halves(rows):
    low = rows[:, :4] * 0.5
    return torch.cat([low, rows[:, 4:] - low], 1)

class RowsDataset(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, place):
        return (torch.rand(8) * 3 - 1).abs()

def train():
    losses = [torch.zeros(()) + 1]
    net = Net()
    for rows in torch.utils.data.DataLoader(RowsDataset(), batch_size=4):
        for _ in range(3):
            loss = net(rows)
            loss.backward()
        losses.append(loss.detach() * 2 + 1)
    return torch.stack(losses).sum() / 2 - 1

train()
"""


def test_functions_not_worth_gripping_are_not_recommended(tmp_path: Path) -> None:
    (tmp_path / "training.py").write_text(TRAINING, encoding="utf-8")
    done = succeed("opcapture", "--find-longtail", "-o", "t.jsonl", "--", "training.py", cwd=tmp_path)
    assert "opcapture ... --grip __main__:halves" in done.stderr
    (omitted,) = [line for line in done.stderr.splitlines() if line.startswith("left out")]
    for name in ("Net.__init__ (builds the model)", "Net.forward (the program", "RowsDataset.__getitem__ (loads data)"):
        assert f"__main__:{name}" in omitted
    assert "__main__:train (the program or a step)" in omitted
    assert done.stderr.count("--grip") == 1


def test_longtail_table_of_a_script_goes_to_standard_error(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run_command("opcapture", "--find-longtail", "--", "script.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "done\n")
    assert done.stderr.rstrip().endswith("opcapture ... --grip __main__:shifted")
    assert run_command("opcapture", "--find-longtail", "-o", "-").returncode == 2


MODEL = """
import torch
from torch import nn

def shifted(numbers):
    scaled = numbers * 2
    moved = scaled + 1
    return moved.clamp(min=0)

class Net(nn.Module):
    def forward(self, numbers):
        return shifted(numbers)

def make():
    return Net(), (torch.rand(100),)
"""
SCRIPT = """
import torch

def shifted(numbers):
    scaled = numbers * 2
    moved = scaled + 1
    return moved.clamp(min=0)

for _ in range(4):
    shifted(torch.rand(100))
print("done")
"""
