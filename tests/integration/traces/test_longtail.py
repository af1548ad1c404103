"""Long-tail functions in traces of programs whose functions are known, and the commands that list them."""

import csv
from pathlib import Path

import pytest
import torch
from example_trace import write
from programs import SHIPPED_TRACES, captured, run_command, succeed
from torch import Tensor, nn

from opgrip.errors import UserError
from opgrip.platform.peaks import bandwidth
from opgrip.traces import Trace, load
from opgrip.traces.analysis.longtail import LongTail, LongTailFunction, bandwidth_of, find_longtail
from opgrip.traces.schema.arguments import TensorSpec
from opgrip.traces.schema.records import Calls, End, Scope, Signature

SPEED = 1e10


def centers(boxes: Tensor) -> Tensor:
    middle = (boxes[:, :2] + boxes[:, 2:]) * 0.5
    size = boxes[:, 2:] - boxes[:, :2]
    return torch.cat([middle, size], dim=1)


def middling(first: Tensor, second: Tensor) -> Tensor:
    difference = (first - second).abs()
    larger = difference * 2
    return larger + 1


def doubled(numbers: Tensor) -> Tensor:
    return numbers * 2


def penalty(weight: Tensor, other: Tensor) -> Tensor:
    return (weight - other).abs().sum()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        images = self.conv(images)
        images = images.relu()
        return images + 1


def find(*traces: Trace) -> LongTail:
    return find_longtail(traces, lambda trace: SPEED)


def by_name(found: LongTail) -> dict[str, LongTailFunction]:
    return {item.name: item for item in found.functions}


def test_operators_and_calls_of_a_function_are_counted(tmp_path: Path) -> None:
    boxes = torch.rand(8, 4)

    def program() -> None:
        for _ in range(3):
            doubled(centers(boxes))
            centers(centers(boxes))

    # torch.stack is one operator or five, depending on the version of torch
    each = len(captured(tmp_path, lambda: centers(boxes), "one.jsonl").calls)
    found = by_name(find(captured(tmp_path, program)))
    item = found["centers"]
    assert each in (8, 12)
    assert (item.calls, item.launches, item.backward_launches) == (9, 9 * each, 0)
    assert item.pattern.endswith("test_longtail:centers")
    assert "doubled" not in found


def test_waiting_for_other_processes_is_not_longtail(tmp_path: Path) -> None:
    vector = TensorSpec((4,), (1,), torch.float32, "cpu")
    scope = Scope(0, "", "", "forward", function="wait_for_all", file="/a/waits.py", line=3)
    names = ("aten.mul.Tensor", "_c10d_functional.wait_tensor.default")
    signatures = [Signature(place, "operator", name, (vector,), {}, vector) for place, name in enumerate(names)]
    order = [0, 0, 1, 0, 0] * 4
    starts = [1_000_000 * place for place in range(len(order))]
    durations = [900_000 if number else 1000 for number in order]
    calls = Calls(0, order, [0] * len(order), starts, durations)
    path = write(tmp_path / "t.jsonl", [scope, *signatures, calls, End(len(order), 2, 20_000_000)])
    item = by_name(find(load(path)))["wait_for_all"]
    assert item.operator_ns == 16 * 1000


def test_functions_of_one_dense_kernel_are_not_longtail(tmp_path: Path) -> None:
    block, images = Block(), torch.rand(2, 16, 64, 64)
    trace = captured(tmp_path, lambda: [block(images) for _ in range(4)])
    assert "Block.forward" not in by_name(find(trace))


def test_bytes_are_those_of_inputs_and_outputs(tmp_path: Path) -> None:
    first, second = torch.rand(1000), torch.rand(1000)
    found = find(captured(tmp_path, lambda: doubled(middling(first, second))))
    item = by_name(found)["middling"]
    assert item.bytes == 3 * 4000
    assert item.fused_ns == pytest.approx(3 * 4000 / SPEED * 1e9)
    assert item.saving_ns == max(0, item.wall_ns - item.fused_ns)


def test_bytes_of_a_view_are_those_of_its_elements(tmp_path: Path) -> None:
    numbers = torch.rand(1000, 10)
    found = find(captured(tmp_path, lambda: middling(numbers[:, 0], numbers[:, 1])))
    assert by_name(found)["middling"].bytes == 3 * 4000


def test_backward_calls_belong_to_the_function_of_their_forward_call(tmp_path: Path) -> None:
    weight, other = torch.rand(50, requires_grad=True), torch.rand(50)

    def program() -> None:
        for _ in range(2):
            penalty(weight, other).backward()

    item = by_name(find(captured(tmp_path, program)))["penalty"]
    assert (item.calls, item.launches) == (2, 2 * 3)
    assert item.backward_launches >= 2 * 3
    assert 0 < item.backward_ns < item.wall_ns


def test_traces_of_a_set_are_added_up(tmp_path: Path) -> None:
    one = captured(tmp_path, lambda: centers(torch.rand(8, 4)))
    two = captured(tmp_path, lambda: [centers(torch.rand(9, 4)) for _ in range(2)], "u.jsonl")
    alone, both = by_name(find(one))["centers"], by_name(find(one, two))["centers"]
    assert (both.calls, both.traces) == (3, 2)
    assert both.bytes == alone.bytes + by_name(find(two))["centers"].bytes


def test_shipped_detector_has_its_box_code_first() -> None:
    trace = next(load(path) for path in SHIPPED_TRACES if path.name == "faster_rcnn.jsonl")
    names = [item.name for item in find(trace).functions]
    assert {"delta2bbox", "AnchorGenerator.single_level_grid_priors"} <= set(names[:5])
    assert not any("Bottleneck" in name or name == "RoIAlignFunction.forward" for name in names)


def test_bandwidth_is_measured_once_and_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPGRIP_CACHE", str(tmp_path))
    speed = bandwidth()
    assert 1e8 < speed < 1e14
    assert bandwidth() == speed
    (tmp_path / "measured.json").write_text('{"bandwidth": "fast"}')
    assert bandwidth() > 0


def test_bandwidth_of_a_missing_device_is_not_guessed(tmp_path: Path) -> None:
    trace = captured(tmp_path, lambda: torch.ones(3) + 1)
    text = (tmp_path / "t.jsonl").read_text().replace('"device":"cpu"', '"device":"cuda:7"')
    (tmp_path / "t.jsonl").write_text(text)
    assert bandwidth_of(trace) > 0
    with pytest.raises(UserError, match="--bandwidth"):
        bandwidth_of(load(tmp_path / "t.jsonl"))


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
