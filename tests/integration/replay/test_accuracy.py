"""Tests of accuracy replays: planted faults are named within few replays, and equal runs differ in nothing."""

from __future__ import annotations

import runpy
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from math import log2
from pathlib import Path

import pytest
import torch
from programs import captured, succeed
from torch import Tensor, nn

from opgrip.capture import Capture
from opgrip.replay.inputs.inputs import device_map
from opgrip.replay.modes.candidate import CandidateOptions, candidate_of
from opgrip.replay.reports.accuracy_report import print_accuracy
from opgrip.replay.sequences.accuracy.judge import AccuracyResult, CallError, judge_step
from opgrip.replay.sequences.call_timers import SequenceSettings
from opgrip.traces import Trace, load

SETTINGS = SequenceSettings(device_map("cpu", None), "cpu")
OFF = 1.001


class MaskHead(nn.Module):
    def forward(self, features: Tensor) -> Tensor:
        return features.clamp(-3, 3).exp().mean((2, 3))


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Conv2d(3, 8, 3, stride=4, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.box = nn.Conv2d(8, 4, 1)
        self.score = nn.Conv2d(8, 1, 1)
        self.mask = MaskHead()
        self.dropout = nn.Dropout(0.1)

    def forward(self, images: Tensor) -> Tensor:
        features = torch.relu(self.norm(self.backbone(images)))
        scores = self.score(features).flatten(1).sigmoid()
        # the deltas are not contiguous
        boxes = self.box(features).flatten(2).transpose(1, 2).exp()
        best = scores.topk(16).indices
        chosen = boxes.gather(1, best[..., None].expand(-1, -1, 4))
        return chosen.sum() + self.dropout(self.mask(features)).sum() + scores.mean()


@pytest.fixture(scope="module")
def detector(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    torch.manual_seed(0)
    model = Detector()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images, path = torch.rand(2, 3, 64, 64), tmp_path_factory.mktemp("step") / "step.jsonl"
    with Capture(path, model=model):
        model(images).backward()
        optimizer.step()
    return load(path)


def judged(trace: Trace, **candidates: Callable[..., Tensor]) -> AccuracyResult:
    own = tuple(candidate_of(f"aten.{name}.default", function) for name, function in candidates.items())
    return judge_step(trace, replace(SETTINGS, mode="candidate", candidates=CandidateOptions(candidate=own)))


def printed(result: AccuracyResult) -> list[str]:
    file = StringIO()
    print_accuracy(result, 10, file, "step.jsonl", lambda op: "")
    return file.getvalue().splitlines()


def named(result: AccuracyResult) -> list[CallError]:
    assert result.attribution is not None
    by_index = {call.index: call for call in result.calls}
    return [by_index[index] for index in result.attribution.calls]


def replays(result: AccuracyResult) -> int:
    """Return the number of replays after the first."""
    return result.passes - 1


def test_equal_candidate_differs_nowhere(detector: Trace) -> None:
    result = judged(detector, exp=lambda x: torch.exp(x))
    assert result.in_program == 2
    assert not any(call.local or call.accumulated or call.is_lost for call in result.calls)
    assert not any(item.relative for item in result.results)
    assert (result.passes, result.attribution, result.first_beyond) == (1, None, None)


def test_operator_that_is_off_is_named_with_its_module(detector: Trace) -> None:
    result = judged(detector, exp=lambda x: torch.exp(x) * (OFF if x.dim() == 4 else 1))
    (call,) = named(result)
    assert (call.op, call.module) == ("aten.exp.default", "mask")
    assert call.is_local
    assert call.local == pytest.approx(1e-3, rel=0.1)
    assert result.first_beyond is not None
    assert result.first_beyond.index == call.index
    assert replays(result) <= 2 * log2(len(result.calls))
    *_, command, last = printed(result)
    assert command == f"opgrip trace export-case step.jsonl {call.signature} -o case{call.signature}.py"
    assert last == "1 call of aten.exp.default (mask) explains 100 % of the results' error"


def test_fault_for_inputs_that_are_not_contiguous(detector: Trace) -> None:
    result = judged(detector, exp=lambda x: torch.exp(x) * (1 if x.is_contiguous() else OFF))
    (call,) = named(result)
    assert call.module == ""
    assert call.op == "aten.exp.default"
    assert [other.index for other in result.calls if other.is_local] == [call.index]
    assert replays(result) <= 2 * log2(len(result.calls))


def test_nan_in_one_call_is_the_first_and_explains_the_error(detector: Trace) -> None:
    def exp(x: Tensor) -> Tensor:
        result = torch.exp(x)
        if x.dim() == 4:
            result[0, 0, 0, 0] = torch.nan
        return result

    result = judged(detector, exp=exp)
    (call,) = named(result)
    assert result.first_lost is not None
    assert result.first_lost.index == call.index
    assert (call.module, call.is_local) == ("mask", True)
    assert any("first NaN or infinity" in line for line in printed(result))


def test_faults_that_cancel_each_other_are_both_named(tmp_path: Path) -> None:
    x = torch.rand(64) + 0.5
    trace = captured(tmp_path, lambda: (x.sinh() * x.cosh()).sqrt().sum())
    result = judged(trace, sinh=lambda x: x.sinh() * OFF, cosh=lambda x: x.cosh() / OFF)
    assert {call.op for call in named(result)} == {"aten.sinh.default", "aten.cosh.default"}
    assert replays(result) <= 2 * 2 * log2(len(result.calls))
    assert "cancel each other" in printed(result)[-1]


def test_two_faults_explain_the_error_together(tmp_path: Path) -> None:
    x = torch.rand(64) + 0.5

    def program() -> Tensor:
        return x.sinh().sum() + x.tan().mul(0.1).cosh().sum() + x.log1p().sum()

    result = judged(captured(tmp_path, program), sinh=lambda x: x.sinh() * OFF, cosh=lambda x: x.cosh() * OFF)
    assert {call.op for call in named(result)} == {"aten.sinh.default", "aten.cosh.default"}


def test_in_place_operators_and_views_pass_errors_on(tmp_path: Path) -> None:
    x, total = torch.rand(8, 8) + 0.5, torch.zeros(4, 8)

    def program() -> Tensor:
        y = x.sinh()
        y.t()[2:6].mul_(2)
        total.add_(y[:4])
        total[1].copy_(y[0])
        torch._foreach_mul_([total, y], 3.0)
        return torch.cat([total.view(8, 4), y.as_strided((8, 4), (8, 2))]).contiguous()

    result = judged(captured(tmp_path, program), sinh=lambda x: x.sinh() * OFF)
    # the program is linear
    errors = [item.relative for item in result.results if item.relative]
    assert errors
    assert errors == pytest.approx([1e-3] * len(errors), rel=1e-2)
    magnified = [call.magnification for call in result.calls if call.magnification]
    assert magnified == pytest.approx([1.0] * len(magnified), rel=0.6)


def test_rounding_to_bfloat16_is_noise(detector: Trace) -> None:
    result = judge_step(detector, SETTINGS, torch.bfloat16)
    assert result.variant == "bfloat16"
    assert len([call for call in result.calls if call.units]) > 10
    assert not any(call.is_local for call in result.calls)
    assert result.first_beyond is None
    assert max(item.relative for item in result.results) > 1e-4
    # both runs draw the same numbers
    assert not any(call.local for call in result.calls if call.op.startswith(("aten.bernoulli", "aten.native_dropout")))


def test_operator_that_is_inexact_in_half_precision_leaves_the_noise(tmp_path: Path) -> None:
    x = torch.rand(4096)
    trace = captured(tmp_path, lambda: (x * 2).sqrt().cosh())
    own = CandidateOptions(candidate=(candidate_of("aten.sqrt.default", lambda x: x.sqrt() * 1.2),))
    result = judge_step(trace, replace(SETTINGS, mode="candidate", candidates=own), torch.bfloat16)
    assert [call.op for call in result.calls if call.is_local] == ["aten.sqrt.default"]


def test_magnification_of_a_difference_of_close_numbers(tmp_path: Path) -> None:
    x = 1 + 1e-3 * torch.rand(64)
    trace = captured(tmp_path, lambda: x.sub(1.0).exp())
    result = judge_step(trace, SETTINGS)
    assert result.variant == ""
    assert result.attribution is None
    by_op = {call.op.split(".")[1]: call.magnification for call in result.calls}
    assert by_op["sub"] is not None
    assert by_op["sub"] > 100
    assert by_op["exp"] is not None
    assert by_op["exp"] < 0.1
    assert "changed in their last place" in printed(result)[0]


def test_other_number_of_results_continues_with_the_references(tmp_path: Path) -> None:
    x = torch.rand(64)
    trace = captured(tmp_path, lambda: x.sinh().sub(0.5).relu().nonzero().double().cosh())
    result = judged(trace, sinh=lambda x: x.sinh() + 0.2)
    (rejoined,) = (call for call in result.calls if call.rejoined)
    assert rejoined.op == "aten.nonzero.default"
    assert "shape" in rejoined.rejoined


def test_memory_stays_within_the_limit(tmp_path: Path) -> None:
    x = torch.rand(1 << 16)
    trace = captured(tmp_path, lambda: x.sinh().cosh().sqrt())
    own = CandidateOptions(candidate=(candidate_of("aten.sinh.default", lambda x: x.sinh() * OFF),))
    limited = replace(SETTINGS, mode="candidate", candidates=own, room_bytes=4 * x.nbytes)
    result = judge_step(trace, limited)
    assert any("more memory than is available" in call.rejoined for call in result.calls)
    assert not any(call.rejoined for call in judge_step(trace, replace(limited, room_bytes=50 * x.nbytes)).calls)


def test_command_prints_how_to_reproduce_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    x = torch.rand(8, 8)
    captured(tmp_path, lambda: x.sinh().sum(), "step.jsonl")
    (tmp_path / "kernels.py").write_text("def sinh(x):\n    return x.sinh() * 1.001\n")
    words = ("step.jsonl", "--sequence", "--accuracy", "--candidate", "aten.sinh.default=kernels.py:sinh")
    *_, command, last = succeed("opreplay", *words, cwd=tmp_path).stdout.splitlines()
    assert last == "1 call of aten.sinh.default explains 100 % of the results' error"
    succeed(*shlex.split(command), cwd=tmp_path)
    (script,) = tmp_path.glob("case*.py")
    monkeypatch.setattr(sys, "argv", [str(script), "--repeats", "1"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(script), run_name="__main__")
    assert "Greatest relative difference: 0.00" in capsys.readouterr().out
