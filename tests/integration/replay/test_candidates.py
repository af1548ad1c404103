"""Candidates: implementations of operators judged on the calls of a trace."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib import import_module
from io import StringIO
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from busy import compared_times
from judge_candidates import EXAMPLES, Example
from optional import needs
from programs import ROOT, run_command
from torch import Tensor

from opgrip import Capture, UserError, judge
from opgrip.platform.peaks import Level, Peaks
from opgrip.replay import replay
from opgrip.replay.analyses.candidates import held_to_limits, print_judgement
from opgrip.replay.command.run_requests import request_with
from opgrip.replay.reports.comparison.comparison import exit_status, hold_candidates, parse_candidate_gate
from opgrip.replay.results.judgement import CandidateColumns, judge_rows, judged_steps, mean_saving
from opgrip.replay.results.origins import OriginColumns
from opgrip.replay.results.paired_ratio import PairedColumns
from opgrip.replay.results.results import Result
from opgrip.replay.run.workload import load_workload
from opgrip.replay.timing.stopwatch import Stopwatch

SOFTMAX, ADD_, TRANSPOSE, OUT = "aten._softmax.default", "aten.add_.Tensor", "aten.t.default", "aten.mul.out"
DROPOUT = "aten.native_dropout.default"
SCHEMA = json.loads((ROOT / "replay" / "schema.json").read_text(encoding="utf-8"))
SIGNATURES = 40
SLOW_ROWS = 584  # rows of the signature that the planted candidate delays
OPERATOR = torch.ops.aten._softmax.default
KERNELS = """\
from time import perf_counter

import torch


def softmax(x, dim, half_to_float):
    exponentials = (x - x.amax(dim, keepdim=True)).exp()
    return (exponentials / exponentials.sum(dim, keepdim=True)).contiguous()


def doubled(x, dim, half_to_float):
    return 2 * softmax(x, dim, half_to_float)


def delayed(x, dim, half_to_float):
    until = perf_counter() + 0.25
    while perf_counter() < until:
        pass
    return softmax(x, dim, half_to_float)
"""


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a trace with 39 softmaxes of contiguous inputs, one of a transposed input, and other operators."""
    path = tmp_path_factory.mktemp("candidates") / "step.jsonl"
    with Capture(path):
        for rows in range(SIGNATURES - 1):
            torch.softmax(torch.randn(16 * rows + 16, 64), -1)
        torch.softmax(torch.randn(64, 50).t(), -1)
        torch.randn(8, 8).add_(torch.randn(8, 8))
        torch.randn(4, 6).t()
        torch.mul(torch.randn(3), torch.randn(3), out=torch.empty(3))
        torch.softmax(torch.tensor([[torch.inf, torch.nan, 1.0], [0.0, -torch.inf, 2.0]]), -1)
        torch.softmax(torch.empty(0, 5), -1)
    return path


def verdicts_of(trace: Path, candidate: Callable[..., Any], op: str = SOFTMAX) -> dict[str, tuple[str, str | None]]:
    """Return verdict and reason of each signature, by shapes, after as few runs as possible."""
    frame = judge({op: candidate}, trace, iterations=2).frame
    return {row.shapes: (row.verdict, row.error) for row in frame.itertuples()}


@pytest.mark.alone
@pytest.mark.timeout(300)
@pytest.mark.slow
def test_signature_that_a_candidate_slows_down_by_a_fifth_is_named(tmp_path: Path) -> None:
    with Capture(tmp_path / "step.jsonl"):
        for rows in range(1, SIGNATURES + 1):
            torch.softmax(torch.randn(512 + 8 * rows, 512), -1)

    # a function in Python costs about 1 us with cold caches, under 1 % of the shortest call
    def delayed(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
        if x.shape[0] != SLOW_ROWS:
            return OPERATOR(x, dim, half_to_float)
        began = perf_counter_ns()
        result = OPERATOR(x, dim, half_to_float)
        until = began + 1.2 * (perf_counter_ns() - began)
        while perf_counter_ns() < until:
            pass
        return result

    frame = judge({SOFTMAX: delayed}, tmp_path / "step.jsonl", threads=1, budget=1.0, precision=0.01).frame
    with compared_times():
        slower = frame[frame["verdict"] == "slower"]
        assert slower["shapes"].tolist() == [f"float32[{SLOW_ROWS},512] -1 False"]


@pytest.mark.slow
def test_error_of_a_hundredth_in_the_only_noncontiguous_input_is_named(trace: Path) -> None:
    def off(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
        result = OPERATOR(x, dim, half_to_float)
        return result if x.is_contiguous() else result + 1e-2

    wrong = {shapes for shapes, (verdict, _) in verdicts_of(trace, off).items() if verdict == "wrong"}
    assert wrong == {"float32[50,64] -1 False"}


@pytest.mark.alone
@pytest.mark.timeout(300)
@pytest.mark.slow
def test_operator_as_its_own_candidate_is_never_slower_or_faster(trace: Path) -> None:
    results = judge({SOFTMAX: OPERATOR, TRANSPOSE: torch.ops.aten.t.default}, trace)
    with compared_times():
        assert set(results.frame["verdict"]) <= {"equal", "undecided"}
    assert results.is_right


def writes_input(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    result = OPERATOR(x, dim, half_to_float)
    x.zero_()
    return result


def other_strides(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return OPERATOR(x, dim, half_to_float).t().contiguous().t()


def other_dtype(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return OPERATOR(x, dim, half_to_float).double()


def fails_if_empty(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return OPERATOR(x, dim, half_to_float) / (0 if x.numel() == 0 else 1) if x.numel() else x[0, 0]


def without_nan(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return OPERATOR(x, dim, half_to_float).nan_to_num()


def unsteady(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    unsteady.calls = getattr(unsteady, "calls", 0) + 1  # type: ignore[attr-defined]
    return OPERATOR(x, dim, half_to_float) * (1 + 1e-7 * (unsteady.calls % 3))  # type: ignore[attr-defined]


def keeping(
    key: Callable[[Tensor], Any], copies: bool = True, operator: Callable[..., Tensor] = OPERATOR
) -> Callable[..., Tensor]:
    """Return an operator that computes one result for each key of an input, and returns it or copies of it."""
    results: dict[Any, Tensor] = {}

    def kept(x: Tensor, *others: Any) -> Tensor:
        if key(x) not in results:
            results[key(x)] = operator(x, *others)
        return results[key(x)].clone() if copies else results[key(x)]

    return kept


def in_buffers(count: int) -> Callable[[Tensor, int, bool], Tensor]:
    buffers: dict[torch.Size, list[Tensor]] = {}

    def softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
        own = buffers.setdefault(x.shape, [torch.empty_like(x) for _ in range(count)])
        own.append(own.pop(0))
        return torch.softmax(x, dim, out=own[0])

    return softmax


@cache
def mask_of(shape: torch.Size) -> Tensor:
    return torch.rand(shape) > 0.5


def dropout_with_one_mask(x: Tensor, p: float, train: bool) -> tuple[Tensor, Tensor]:
    mask = mask_of(x.shape)
    return 2 * x * mask, mask.clone()


def wrong_when_timed(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a candidate that is right when it is checked, and wrong when it is timed."""

    def candidate(*args: Any) -> Tensor:
        result, frame = function(*args), sys._getframe()
        while frame is not None and frame.f_code is not Stopwatch.time.__code__:
            frame = frame.f_back  # type: ignore[assignment]
        return result if frame is None else result.neg_()

    return candidate


AGAIN, TIMED = "output 0 is in the memory of an earlier result", "in a timed run: output 0: "
LARGE, NAN, EMPTY = "float32[624,64] -1 False", "float32[2,3] -1 False", "float32[0,5] -1 False"


@pytest.mark.parametrize(
    ("candidate", "op", "shapes", "verdict", "reason"),
    [
        (writes_input, SOFTMAX, LARGE, "wrong", "writes into argument 0"),
        pytest.param(
            other_strides,
            SOFTMAX,
            LARGE,
            "wrong",
            "output 0 has the strides (1, 624), not (64, 1)",
            marks=pytest.mark.slow,
        ),
        pytest.param(other_dtype, SOFTMAX, LARGE, "wrong", "output 0 is float64, not float32", marks=pytest.mark.slow),
        pytest.param(fails_if_empty, SOFTMAX, EMPTY, "failed", "index 0 is out of bounds", marks=pytest.mark.slow),
        pytest.param(without_nan, SOFTMAX, NAN, "wrong", "elements differ, by inf", marks=pytest.mark.slow),
        pytest.param(
            unsteady,
            SOFTMAX,
            LARGE,
            "wrong",
            "output 0 differs between two runs on the same arguments",
            marks=pytest.mark.slow,
        ),
        (
            torch.Tensor.add,
            ADD_,
            "float32[8,8] float32[8,8]",
            "wrong",
            "is a copy, but the operator's output shares memory",
        ),
        (lambda x: x.t().clone(), TRANSPOSE, "float32[4,6]", "wrong", "output 0 is a copy"),
        (lambda x, y, out: torch.mul(x, y), OUT, None, "wrong", "argument 2"),
    ],
)
def test_broken_candidates_are_named_with_the_reason(
    trace: Path, candidate: Callable[..., Any], op: str, shapes: str | None, verdict: str, reason: str
) -> None:
    verdicts = verdicts_of(trace, candidate, op)
    found, error = verdicts[shapes] if shapes is not None else next(iter(verdicts.values()))
    assert (found, reason in str(error)) == (verdict, True), error


@pytest.fixture(scope="module")
def short_calls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("candidates") / "calls.jsonl"
    with Capture(path):
        torch.softmax(torch.randn(16, 64), -1)
        torch.native_dropout(torch.ones(16, 64), 0.5, True)
        torch.randn(8, 8).add_(torch.randn(8, 8))
        torch.randn(3, 1).squeeze_(1)
        torch.argmax(torch.randn(40), 0)
        torch.bucketize(torch.tensor([0.5, 2.5]), torch.arange(4.0))
    return path


@pytest.mark.parametrize(
    ("candidate", "op", "reason"),
    [
        (keeping(lambda x: x.shape), SOFTMAX, "elements differ"),
        (keeping(Tensor.data_ptr), SOFTMAX, "elements differ"),
        (keeping(id), SOFTMAX, "elements differ"),
        (keeping(lambda x: x.shape, operator=torch.argmax), "aten.argmax.default", "indices of elements"),
        (keeping(lambda x: (id(x), x._version), copies=False), SOFTMAX, AGAIN),
        (in_buffers(1), SOFTMAX, AGAIN),
        (in_buffers(4), SOFTMAX, AGAIN),
        (dropout_with_one_mask, DROPOUT, "random numbers of an earlier run"),
        (wrong_when_timed(OPERATOR), SOFTMAX, TIMED),
        (wrong_when_timed(Tensor.add_), ADD_, TIMED),
    ],
)
def test_earlier_results_and_wrong_results_of_timed_runs_are_wrong(
    short_calls: Path, candidate: Callable[..., Any], op: str, reason: str
) -> None:
    ((verdict, error),) = verdicts_of(short_calls, candidate, op).values()
    assert (verdict, reason in str(error)) == ("wrong", True), error


@pytest.mark.parametrize(
    ("candidate", "op"),
    [
        (Tensor.squeeze_, "aten.squeeze_.dim"),
        (torch.argmax, "aten.argmax.default"),
        (lambda x, edges: (x[:, None] > edges).sum(1), "aten.bucketize.Tensor"),
    ],
)
def test_operators_of_shapes_and_orders_are_judged(short_calls: Path, candidate: Callable[..., Any], op: str) -> None:
    ((_, error),) = verdicts_of(short_calls, candidate, op).values()
    assert error is None


class NegatedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        ctx.dim = dim
        result = OPERATOR(x, dim, False)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (result,) = ctx.saved_tensors
        return -torch.ops.aten._softmax_backward_data(gradients[0], result, ctx.dim, result.dtype), None


def in_numpy(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    exponentials = np.exp(x.numpy() - x.numpy().max(dim, keepdims=True))
    return torch.from_numpy(exponentials / exponentials.sum(dim, keepdims=True))


@pytest.mark.parametrize(
    ("candidate", "status", "reason"),
    [
        (OPERATOR, "ok", None),
        (lambda x, dim, half: NegatedGradient.apply(x, dim), "wrong", "output 0: "),
        (lambda x, dim, half: OPERATOR(x.detach(), dim, half), "skipped", "its results have no gradient"),
        (in_numpy, "skipped", "Can't call numpy() on Tensor that requires grad"),
    ],
)
def test_gradients_are_judged_if_the_trace_has_them(
    tmp_path: Path, candidate: Callable[..., Any], status: str, reason: str | None
) -> None:
    with Capture(tmp_path / "train.jsonl"):
        torch.softmax(torch.randn(16, 64, requires_grad=True), -1).square().sum().backward()
        torch.softmax(torch.randn(8, 64), -1)
    verdict = judge({SOFTMAX: candidate}, tmp_path / "train.jsonl", iterations=2)
    found = {(row.direction, row.case): row for row in verdict.results if row.mode == "candidate"}
    assert [row.status in ("ok", "contended") for (direction, _), row in found.items() if direction == "forward"] == [
        True
    ] * 2
    (gradients,) = (row for (direction, _), row in found.items() if direction == "backward")
    assert (gradients.status.replace("contended", "ok"), (reason or "") in str(gradients.error)) == (status, True)
    assert verdict.is_right == (status != "wrong")
    if status == "skipped":
        assert "gradients of 1 signature are not judged: " in str(verdict)
    if status == "wrong":
        assert "gradients wrong on 1 of 1 signature; " in str(verdict)


def test_results_without_gradient_get_none_from_a_candidate(tmp_path: Path) -> None:
    def layer_norm(x: Tensor, shape: Any, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, ...]:
        mean = x.mean(-1, keepdim=True)
        scale = (x.var(-1, unbiased=False, keepdim=True) + eps).rsqrt()
        return (x - mean) * scale * weight + bias, mean, scale

    with Capture(tmp_path / "train.jsonl"):
        torch.nn.LayerNorm(64)(torch.randn(16, 64, requires_grad=True)).square().sum().backward()
    verdict = judge({"aten.native_layer_norm.default": layer_norm}, tmp_path / "train.jsonl", iterations=2)
    assert [row.direction for row in verdict.results if row.mode == "candidate"] == ["forward", "backward"]
    assert verdict.is_right


def test_command_judges_a_function_of_a_file(trace: Path, tmp_path: Path) -> None:
    (tmp_path / "kernels.py").write_text(KERNELS, encoding="utf-8")
    words = ["opreplay", str(trace), "--candidate", f"{SOFTMAX}=kernels.py:softmax", "--iterations", "2"]
    done = run_command(*words, "-o", "rows.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "slower on" in done.stdout.splitlines()[-1]
    assert f"of {SIGNATURES + 2} signatures" in done.stdout.splitlines()[-1]
    rows = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))
    assert rows["settings"]["candidate"].endswith("kernels.py:softmax")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--candidate", f"{SOFTMAX}=absent.py:softmax"], "absent.py cannot be read"),
        (["--candidate", f"{SOFTMAX}=kernels.py:softmx"], "has no function softmx: did you mean softmax?"),
        (["--candidate", f"{SOFTMAX}=kernels.py:softmax", "--op", "aten.*"], "leave --op out"),
        (
            ["--candidate", "aten._softmax=kernels.py:softmax"],
            "no op matches --candidate aten._softmax: the trace has ",
        ),
        (["--candidate", "_softmax=kernels.py:softmax"], f"name it in full: --candidate {SOFTMAX}=FILE.py:NAME"),
        (["--gate", "slower<=5%"], "--gate needs --candidate"),
        (["--candidate", f"{SOFTMAX}=kernels.py:softmax", "--gate", "op<=5%"], "is not a gate on candidates"),
    ],
)
def test_mistakes_are_reported_in_one_line(trace: Path, tmp_path: Path, words: list[str], message: str) -> None:
    (tmp_path / "kernels.py").write_text(KERNELS, encoding="utf-8")
    done = run_command("opreplay", trace, *words, "--top", "1", cwd=tmp_path)
    assert done.returncode
    assert message in done.stdout + done.stderr


@pytest.fixture(scope="module")
def transpose_row(trace: Path) -> Result:
    results = judge({TRANSPOSE: torch.ops.aten.t.default}, trace, iterations=2).results
    return next(row for row in results if row.added)


@pytest.mark.parametrize(
    ("text", "ratio", "interval", "verdict", "status"),
    [
        ("slower<=5%", 1.2, (1.15, 1.25), "slower", 1),
        ("slower<=5%", 1.2, (0.9, 1.6), "undecided", 3),
        ("slower<=5%", 1.0, (0.97, 1.03), "equal", 0),
        ("total<=5%", 1.2, (1.15, 1.25), "slower", 1),
    ],
)
def test_candidate_gate_decides_the_exit_status(
    transpose_row: Result, text: str, ratio: float, interval: tuple[float, float], verdict: str, status: int
) -> None:
    error = (interval[1] - interval[0]) / 2 * 0.5
    judged = replace(transpose_row, ratio_p50=ratio).adding(
        CandidateColumns(verdict, *interval, 0.5, 0.5 * (1 - ratio), error)
    )
    assert exit_status([hold_candidates(parse_candidate_gate(text), judged_steps([judged]))]) == status


@pytest.mark.parametrize(
    ("ratio", "error", "chance", "reason"),
    [
        (1.02, 0.05, 0.2, "the 95 % interval contains 1 and differences of over 5 %"),
        (1.2, 0.07, 1e-4, "a verdict needs a certainty of 99.9 %, and that interval, 0.952 to 1.512, contains 1"),
        (1.2, 0.02, 0.004, "is chance with a probability of 0.4 %, and a verdict needs less than 0.1 %"),
    ],
)
def test_undecided_verdicts_have_a_reason(
    transpose_row: Result, ratio: float, error: float, chance: float, reason: str
) -> None:
    row = replace(transpose_row, status="ok", ratio=ratio, ratio_p10=ratio, ratio_p50=ratio, ratio_p90=ratio)
    base = replace(row, mode="eager", ratio=None, added={})
    judged = judge_rows([base, row.adding(PairedColumns(error, chance))], "eager", None, "", {})
    columns, printed = CandidateColumns.of(judged[1]), StringIO()
    print_judgement(judged, printed)
    assert columns.verdict == "undecided"
    assert reason in str(columns.undecided_because)
    assert " ".join(f"undecided on case {row.case}: {columns.undecided_because}".split()) in " ".join(
        printed.getvalue().split()
    )


def test_time_below_the_limit_of_the_machine_is_doubtful(trace: Path, transpose_row: Result) -> None:
    ceilings = Peaks(("one",), "cpu", 1, (Level("memory", None, 1, {1: 1e-3}),), {}, 1.0, 0.5, "2.0", "")
    row = replace(transpose_row, status="ok", median_us=30.0, bytes_moved=100, note="")
    workload = load_workload(request_with(str(trace), candidate=[f"{TRANSPOSE}=math:sqrt"]))
    (held,) = held_to_limits([row], ceilings, workload)
    assert held.doubts == "impossible"
    assert held.note.startswith(
        "takes 30 us, but this machine needs 100 us: the candidate leaves work out, or the bytes"
    )
    assert held_to_limits([replace(row, median_us=90.0)], ceilings, workload)[0].doubts == ""


@pytest.mark.slow
def test_saving_is_the_sum_over_signatures(trace: Path) -> None:
    verdict = judge({SOFTMAX: OPERATOR}, trace, iterations=5)
    frame = verdict.frame
    timed = frame[frame["ratio_low"].notna()]
    expected = (timed["step_share"] * (1 - timed["ratio_p50"])).sum()
    assert verdict.step_saving == pytest.approx(expected)
    assert 0 < frame["step_share"].sum() < 1


def test_savings_are_divided_by_label_and_by_phase(tmp_path: Path) -> None:
    with Capture(tmp_path / "serve.jsonl"):
        for label, rows in (("prefill", 64), *[("decode", 1)] * 3):
            with torch.profiler.record_function(label):
                torch.softmax(torch.randn(rows, 64, requires_grad=True), -1).sum().backward()
    verdict = judge({SOFTMAX: OPERATOR}, tmp_path / "serve.jsonl", iterations=5)
    (step,) = verdict.steps
    uses = [json.loads(text) for text in verdict.frame["labels"].dropna()]
    assert sorted((label, calls) for use in uses for label, (calls, _) in use.items()) == [
        ("decode", 3),
        ("prefill", 1),
    ]
    assert all(0 < part.share < 1 for part in (*step.labels.values(), *step.phases.values()))
    assert step.phases["forward"].saving == pytest.approx(step.saving)
    assert "within decode" in str(verdict)


def test_mean_over_traces_counts_each_model_alike(trace: Path) -> None:
    results = judge({TRANSPOSE: torch.ops.aten.t.default}, trace, iterations=2).results
    judged = next(item for item in results if item.mode == "candidate")
    rows = [
        replace(judged, trace=name)
        .adding(CandidateColumns("faster", 0.4, 0.6, 0.2, saving, 0.03))
        .adding(OriginColumns(model=model))
        for name, model, saving in (("a", "one", 0.1), ("b", "one", 0.2), ("c", "two", 0.05))
    ]
    mean = mean_saving(judged_steps(rows))
    assert mean is not None
    assert (mean.models, mean.traces, mean.saving) == (2, 3, pytest.approx(0.1))
    assert mean.error == pytest.approx((2 * 0.015**2 + 0.03**2) ** 0.5 / 2)


@pytest.mark.slow
def test_results_follow_the_schema(trace: Path, tmp_path: Path) -> None:
    with Capture(tmp_path / "serve.jsonl"), torch.profiler.record_function("decode"):
        torch.softmax(torch.randn(8, 64), -1)
    for target in (tmp_path / "serve.jsonl", [trace, tmp_path / "serve.jsonl"]):
        judge({SOFTMAX: without_nan}, target, iterations=2).results.save(tmp_path / "rows.json", force=True)
        written = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))
        jsonschema.Draft202012Validator(SCHEMA).validate(written)
        assert {"version", "mean", "steps"} == written["judgement"].keys()
        assert written["trace_hash"]
        assert written["environment"]["versions"]["torch"]
        assert all(row["key"] for row in written["results"])


def test_shipped_schema_of_results_equals_the_generated_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs")
    assert import_module("results_schema").results_schema() == SCHEMA, "write it with: python docs/results_schema.py"
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.slow
def test_folder_in_layout_of_backendbench_is_judged(trace: Path, tmp_path: Path) -> None:
    for name, body in {
        "_softmax": "x.softmax(d)",
        "t__default": "x.t().clone()",
        "absent": "x",
    }.items():
        (tmp_path / "kernels" / name).mkdir(parents=True)
        source = f"def {name}_kernel_impl(x, d=-1, half=False):\n    return {body}\n"
        (tmp_path / "kernels" / name / f"{name}_implementation_v1.py").write_text(source, encoding="utf-8")
    results = replay(trace, candidates=str(tmp_path / "kernels"), iterations=2)
    verdicts = [(row.op, CandidateColumns.of(row).verdict) for row in results if row.mode == "candidate"]
    assert len(verdicts) == SIGNATURES + 4
    assert {op for op, verdict in verdicts if verdict == "wrong"} == {TRANSPOSE}


def test_sample_is_judged(tmp_path: Path) -> None:
    source = "def negated(*args, **kwargs):\n    return -delta2bbox(*args, **kwargs)\n"
    (tmp_path / "mine.py").write_text(
        f"from opgrip.samples.coders.delta2bbox import delta2bbox\n\n\n{source}", encoding="utf-8"
    )
    verdict = judge({"sample:delta2bbox": f"{tmp_path / 'mine.py'}:negated"}, "sample:delta2bbox", iterations=2)
    assert set(verdict.frame["verdict"]) == {"wrong"}
    assert verdict.step_saving is None


# packages and programs that an example needs, by its file
NEEDED = {"in_triton.py": ("triton",), "in_cpp.py": ("c++", "ninja")}


@pytest.mark.timeout(600)
@pytest.mark.slow
@pytest.mark.parametrize(
    "example",
    [
        pytest.param(item, marks=needs(*NEEDED.get(item.source.partition(":")[0], ())), id=item.source)
        for item in EXAMPLES
    ],
)
def test_example_is_right(example: Example, tmp_path: Path) -> None:
    layers = [torch.nn.Linear(32, 64, bias=False), torch.nn.LayerNorm(64), torch.nn.GELU(), torch.nn.SiLU()]
    layers += [
        torch.nn.Sigmoid(),
        torch.nn.Softmax(-1),
        torch.nn.Linear(64, 64, bias=False),
        torch.nn.ReLU(inplace=True),
    ]
    with Capture(tmp_path / "step.jsonl"):
        torch.nn.Sequential(*layers)(torch.randn(8, 32)).square().sum().backward()
    verdict = judge(example.candidate, tmp_path / "step.jsonl", iterations=2, timeout=500)
    assert verdict.is_right, str(verdict)
    directions = {row.direction for row in verdict.results if row.mode == "candidate" and row.status != "skipped"}
    assert directions == ({"forward", "backward"} if example.has_gradient else {"forward"})


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_saving_is_confirmed_by_a_replay_of_the_whole_step(tmp_path: Path) -> None:
    with Capture(tmp_path / "step.jsonl"):
        for _ in range(3):
            torch.softmax(torch.randn(64, 64), -1)
    (tmp_path / "kernels.py").write_text(KERNELS, encoding="utf-8")
    candidate = f"{SOFTMAX}={tmp_path / 'kernels.py'}:delayed"
    results = replay(tmp_path / "step.jsonl", candidate=[candidate], confirm=True, iterations=2)
    confirmation = results.header["confirmation"]
    assert confirmation["calls"] == 3
    # a call takes a quarter of a second instead of microseconds
    assert confirmation["saving"] < -1
    assert confirmation["error"] > 0
    assert confirmation["own_saving"] == pytest.approx(confirmation["saving"], rel=0.1)
    assert 0 < confirmation["share"] < 1
    assert confirmation["passes"] == 2
    assert confirmation["estimated"] == pytest.approx(judged_steps(results)[0].saving)
    assert confirmation["estimated_here"] < -1


def test_functions_of_this_process_cannot_be_confirmed(trace: Path) -> None:
    with pytest.raises(UserError, match="name them by file and function"):
        judge({SOFTMAX: OPERATOR}, trace, confirm=True)
