"""Tests of step replay: memory flows as recorded, calls that cannot take part are reported, and no memory stays."""

import gc
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from io import StringIO
from itertools import chain
from pathlib import Path
from threading import Thread as PythonThread
from typing import Any

import pytest
import torch
from example_trace import write
from hypothesis import given
from hypothesis import strategies as st
from programs import captured
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from opgrip.capture import Capture
from opgrip.capture.models import load_program
from opgrip.capture.models.sources import ModelOptions
from opgrip.errors import UserError
from opgrip.replay.cases.cases import make_cases
from opgrip.replay.cases.flow import make_flow
from opgrip.replay.inputs.inputs import device_map
from opgrip.replay.operators.lookup import CHECKED_ON_CPU, DIVIDE, NO_INDICES, takes_any_numbers
from opgrip.replay.reports.step_report import print_sequence
from opgrip.replay.results.results import FAILED, OK, SKIPPED, UNSUPPORTED
from opgrip.replay.run.request import RunRequest
from opgrip.replay.run.workload import workload_for
from opgrip.replay.sequences import step_passes
from opgrip.replay.sequences.call_timers import SequenceSettings
from opgrip.replay.sequences.dry_run import OTHER_SHAPES, DryRun
from opgrip.replay.sequences.step_memory import StepMemory
from opgrip.replay.sequences.step_options import rows_of, totals_of
from opgrip.replay.sequences.step_replay import SequenceResult, replay_sequence
from opgrip.traces import Trace, load
from opgrip.traces.schema.arguments import TensorSpec
from opgrip.traces.schema.records import OPERATOR, Calls, Record, Scope, Signature, Thread, Values
from opgrip.traces.values.exact import Exact
from opgrip.traces.values.floats import Floats

SETTINGS = SequenceSettings(device_map("cpu", None), "cpu", repeats=3)

ROOM = 1 << 32


def after_dry_run(trace: Trace) -> DryRun:
    flow = make_flow(trace)
    memory = StepMemory(flow.needs, flow.outside, trace.values, SETTINGS.place, 0, ROOM)
    dry_run = DryRun(flow, memory, trace.values, SETTINGS)
    dry_run.settle(dry_run.begin)
    return dry_run


def floats(storage: torch.UntypedStorage) -> list[float]:
    return torch.empty(0).set_(storage).tolist()


def refilled(dry_run: DryRun) -> dict[str, set[int]]:
    pairs = zip(dry_run.flow.calls, dry_run.plans, strict=True)
    return {call.op: part.refilled for call, part in pairs if part.refilled}


def numbers_of(trace: Trace, op: str) -> set[int]:
    return {signature.number for signature in trace.signatures if signature.op == op}


def told(result: SequenceResult) -> dict[str, str]:
    return {item.op: f"{item.status}: {item.reason}" for item in result.not_replayed}


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
            *(nn.Dropout(0.1), nn.Linear(32, 7)),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.body(images)


def train_conv_net(optimizer: Callable[..., torch.optim.Optimizer]) -> Callable[[], None]:
    torch.manual_seed(0)
    model, images, labels = ConvNet(), torch.randn(4, 3, 32, 32), torch.randint(0, 7, (4,))
    updater = optimizer(model.parameters())

    def step() -> None:
        updater.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        updater.step()

    # the first step creates the optimizer's state
    step()
    return step


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    ],
)
def test_training_step_flows_completely_with_the_recorded_memory(tmp_path: Path, optimizer: Any) -> None:
    trace = captured(tmp_path, train_conv_net(optimizer))
    result = replay_sequence(trace, SETTINGS)
    assert not told(result)
    assert (result.substituted, result.redrawn) == (0, 0)
    assert result.replayed + result.unsupported == result.calls == len(trace.own_calls)
    assert result.captured_peak_bytes > 100_000
    assert result.replayed_peak_bytes == pytest.approx(result.captured_peak_bytes, rel=0.03)


def test_values_flow_to_the_final_values_of_the_program(tmp_path: Path) -> None:
    torch.manual_seed(0)
    # small enough that the trace holds their values; all shapes differ, since equal ones would share a value model
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, foreach=False)
    images = torch.randn(6, 4)

    def steps() -> None:
        for _ in range(3):
            optimizer.zero_grad()
            model(images).square().mean().backward()
            optimizer.step()

    trace = captured(tmp_path, steps)
    dry_run = after_dry_run(trace)
    assert not any(part.refilled for part in dry_run.plans)
    final = [floats(dry_run.memory.live[number]) for number in dry_run.flow.outside]
    for parameter in model.parameters():
        assert parameter.flatten().tolist() in final


def test_every_pass_starts_with_the_same_values(tmp_path: Path) -> None:
    x = torch.full((3,), 1.0)
    dry_run = after_dry_run(captured(tmp_path, lambda: x.mul_(2)))
    (number,) = dry_run.flow.outside
    assert floats(dry_run.memory.live[number]) == [2.0] * 3
    dry_run.begin()
    assert floats(dry_run.memory.live[number]) == [1.0] * 3


def test_views_and_in_place_writes_reach_their_memory(tmp_path: Path) -> None:
    x, out = torch.zeros(8), torch.zeros(4)

    def program() -> None:
        x.view(2, 4)[1].add_(3)
        x[1:3].copy_(x[5:7])
        torch.add(x[:4], x[4:], out=out)

    dry_run = after_dry_run(captured(tmp_path, program))
    final = [floats(dry_run.memory.live[number]) for number in dry_run.flow.outside]
    assert [0.0, 3.0, 3.0, 0.0, 3.0, 3.0, 3.0, 3.0] in final
    assert [3.0, 6.0, 6.0, 3.0] in final


def test_memory_is_freed_after_its_last_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(1000)

    def program() -> None:
        y = x
        for _ in range(30):
            y = y + 1

    trace = captured(tmp_path, program)
    seen: list[StorageWeakRef] = []
    alive: list[int] = []
    give = StepMemory.give

    def watched(self: StepMemory, number: int, storage: torch.UntypedStorage) -> None:
        seen.append(StorageWeakRef(storage))
        give(self, number, storage)
        alive.append(sum(not ref.expired() for ref in seen))

    monkeypatch.setattr(StepMemory, "give", watched)
    result = replay_sequence(trace, SETTINGS)
    assert len(seen) > 30
    # results of a call and of the call before it
    assert max(alive) == 2
    assert result.replayed_peak_bytes == result.captured_peak_bytes == 2 * 4000
    gc.collect()
    assert all(ref.expired() for ref in seen)


def test_data_dependent_values_are_drawn_or_substituted_and_reported(tmp_path: Path) -> None:
    # a seed that replays do not use
    torch.manual_seed(1234)

    def program() -> None:
        x = torch.randn(3000)
        chosen = x[x > 1.5]
        chosen.sort().values.cumsum(0)
        torch.randint(0, 3000, (3000,)).unique().float().sqrt()
        # value models do not show which rows are equal
        torch.randint(0, 10, (500, 3)).unique(dim=0).float().sqrt()

    trace = captured(tmp_path, program)
    result = replay_sequence(trace, SETTINGS)
    # the mask, and numbers with as many distinct values; calls that take the substitutes use them unchanged
    assert refilled(after_dry_run(trace)) == {"aten.index.Tensor": {1}, "aten._unique2.default": {0}}
    assert result.redrawn == 2
    assert told(result) == {"aten.unique_dim.default": f"substituted: {OTHER_SHAPES}"}
    assert (result.substituted, result.unsupported) == (1, 0)
    # it ran in spite of the substitute
    (unique,) = (item for item in result.signatures if item.substituted)
    assert unique.signature in numbers_of(trace, "aten.unique_dim.default")
    assert unique.status == OK
    assert unique.median_us is not None
    assert unique.median_us > 0


def test_calls_that_cannot_run_are_counted_and_their_results_replaced(tmp_path: Path) -> None:
    x = torch.ones(100)

    def program() -> None:
        y = x.to_mkldnn().to_dense()
        with pytest.raises(RuntimeError):
            torch.mm(x, x)
        y.sqrt()

    result = replay_sequence(captured(tmp_path, program), SETTINGS)
    assert "an argument has the layout _mkldnn" in told(result)["aten._to_dense.default"]
    assert "it raised when it was captured" in told(result)["aten.mm.default"]
    assert (result.unsupported, result.substituted, result.replayed) == (2, 0, result.calls - 2)
    assert 0 < result.unsupported_ms < result.captured_ms


def test_unchecked_indices_remain_in_the_recorded_range(tmp_path: Path) -> None:
    grad = torch.randn(100, 4)

    def program() -> None:
        indices = torch.full((100,), 10**12)
        # write past the dispatcher
        indices.numpy()[:] = 7
        torch.ops.aten.embedding_dense_backward(grad, indices, 10, -1, True)

    dry_run = after_dry_run(captured(tmp_path, program))
    assert refilled(dry_run) == {"aten.embedding_dense_backward.default": {1}}


@pytest.mark.parametrize(
    "values",
    [
        torch.ones(100),
        torch.arange(3.0),
        torch.linspace(0, 9, 100).view(10, 10).softmax(-1),
    ],
)
def test_diverged_floats_are_drawn_again(tmp_path: Path, values: torch.Tensor) -> None:
    def program() -> None:
        x = torch.full(values.shape, float("nan"))
        x.numpy()[:] = values
        (x * 2).exp()

    dry_run = after_dry_run(captured(tmp_path, program))
    assert refilled(dry_run) == {"aten.mul.Tensor": {0}}


def test_recorded_non_finite_floats_flow(tmp_path: Path) -> None:
    x = torch.tensor([1.0, float("nan"), 2.0])
    assert refilled(after_dry_run(captured(tmp_path, lambda: (x * 2).exp()))) == {}


ROW = torch.ones(1, 5)

CALLS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "index": lambda x, i: torch.ops.aten.index(x, [i]),
    "index_put": lambda x, i: torch.ops.aten.index_put(x, [i], ROW[0]),
    "index_put_": lambda x, i: torch.ops.aten.index_put_(x, [i], ROW[0]),
    "_index_put_impl_": lambda x, i: torch.ops.aten._index_put_impl_(x, [i], ROW[0], False, True),
    "index_select": lambda x, i: torch.ops.aten.index_select(x, 0, i),
    "index_add": lambda x, i: torch.ops.aten.index_add(x, 0, i, ROW),
    "index_add_": lambda x, i: torch.ops.aten.index_add_(x, 0, i, ROW),
    "index_copy": lambda x, i: torch.ops.aten.index_copy(x, 0, i, ROW),
    "index_copy_": lambda x, i: torch.ops.aten.index_copy_(x, 0, i, ROW),
    "index_fill": lambda x, i: torch.ops.aten.index_fill(x, 0, i, 1.0),
    "index_fill_": lambda x, i: torch.ops.aten.index_fill_(x, 0, i, 1.0),
    "gather": lambda x, i: torch.ops.aten.gather(x, 0, i[:, None]),
    "take": lambda x, i: torch.ops.aten.take(x, i),
    "embedding": lambda x, i: torch.ops.aten.embedding(x, i),
    "scatter": lambda x, i: torch.ops.aten.scatter(x, 0, i[:, None], ROW),
    "scatter_": lambda x, i: torch.ops.aten.scatter_(x, 0, i[:, None], ROW),
    "scatter_add": lambda x, i: torch.ops.aten.scatter_add(x, 0, i[:, None], ROW),
    "scatter_add_": lambda x, i: torch.ops.aten.scatter_add_(x, 0, i[:, None], ROW),
    "nll_loss_forward": lambda x, i: torch.ops.aten.nll_loss_forward(ROW, i, None, 1, -100),
}


@pytest.mark.parametrize("name", sorted(CHECKED_ON_CPU))
@pytest.mark.parametrize("index", [-(1 << 40), (1 << 63) - 1])
def test_operators_listed_as_checking_indices_check_them(name: str, index: int) -> None:
    CALLS[name](torch.ones(5, 5), torch.tensor([0]))
    with pytest.raises((IndexError, RuntimeError)):
        CALLS[name](torch.ones(5, 5), torch.tensor([index]))


def test_calls_inside_an_extension_function_do_not_run_twice(tmp_path: Path) -> None:
    result = replay_sequence(load(write(tmp_path / "t.jsonl")), SETTINGS)
    assert result.calls == 2
    assert told(result)["mmcv._ext:nms"].startswith("unsupported: it raised when it was captured")


def test_random_state_and_settings_are_restored(tmp_path: Path) -> None:
    def program() -> None:
        with torch.inference_mode():
            torch.rand(100).bernoulli_().sum()
        torch.dropout(torch.ones(50), 0.5, True)

    trace = captured(tmp_path, program)
    before = torch.get_rng_state()
    result = replay_sequence(trace, SETTINGS)
    assert result.replayed == result.calls
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
    assert gc.isenabled()


def test_calls_of_several_threads_are_one_sequence(tmp_path: Path) -> None:
    x = torch.ones(50)

    def program() -> None:
        made: list[torch.Tensor] = []
        other = PythonThread(target=lambda: made.append(x.exp()))
        other.start()
        other.join()
        made[0].log()

    trace = captured(tmp_path, program)
    assert trace.calls["thread"].nunique() == 2
    result = replay_sequence(trace, SETTINGS)
    assert result.replayed == result.calls == 2


def test_cut_trace_replays_up_to_the_cut(tmp_path: Path, tiny_trace: Path) -> None:
    lines = tiny_trace.read_bytes().splitlines(keepends=True)
    last = max(index for index, line in enumerate(lines) if b'"type":"calls"' in line)
    cut = tmp_path / "cut.jsonl"
    cut.write_bytes(b"".join(lines[: last + 1]))
    trace = load(cut)
    assert trace.missing
    result = replay_sequence(trace, SETTINGS)
    assert result.calls == len(trace.own_calls)
    assert result.substituted == 0


def test_times_of_signatures_add_up(tiny_trace: Path) -> None:
    trace = load(tiny_trace)
    result = replay_sequence(trace, replace(SETTINGS, repeats=1))
    assert result.repeats == len(result.replayed_wall_ms) == 1
    assert sum(item.samples for item in result.signatures) == result.calls - result.unsupported
    totals_us = [item.samples * (item.mean_us or 0) for item in result.signatures]
    assert sum(totals_us) == pytest.approx(result.replayed_ms[0] * 1e3)
    assert 0 < result.captured_critical_ms < result.captured_ms
    assert 0 < result.replayed_critical_ms < result.replayed_ms[0]
    assert result.replayed_wall_ms[0] > result.replayed_ms[0]
    assert result.captured_wall_ms >= result.captured_ms
    assert result.replayed_quantile_ms(0.1) <= result.replayed_quantile_ms(0.9)


def test_trace_without_calls_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="contains no calls"):
        replay_sequence(load(write(tmp_path / "t.jsonl", [])), SETTINGS)


HUGE = 1 << 62


def hostile(folder: Path, signature: Signature, storages: list[int], values: list[Values] = []) -> SequenceResult:  # noqa: B006
    spec = TensorSpec((8,), (1,), torch.float32, "cpu")
    fine = Signature(1, "operator", "aten.sin.default", (spec,), {}, spec)
    records: list[Record] = [*values, signature, fine, Scope(0, "", "", "forward"), Thread(0, "MainThread")]
    counts = [2, len(storages), 2]
    flows = list(chain([0, 1], storages, [1, 2]))
    records.append(Calls(0, [1, signature.number, 1], [0] * 3, [0, 10, 20], [5] * 3, counts, flows))
    result = replay_sequence(load(write(folder / "t.jsonl", records)), SETTINGS)
    assert result.replayed + result.substituted + result.unsupported == result.calls == 3
    assert next(item for item in result.signatures if item.signature == fine.number).count == 2
    return result


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (TensorSpec((1 << 50,), (1,), torch.float32, "cpu"), "more memory than is available"),
        (TensorSpec((HUGE, HUGE), (HUGE, 1), torch.float32, "cpu"), "more memory than is available"),
        (TensorSpec((8,), (1,), torch.float32, "cpu", offset=HUGE), "more memory than is available"),
        (TensorSpec((8,), (1,), torch.float32, "nowhere:7"), ""),
        (TensorSpec((8,), (1,), torch.float32, "meta"), "meta"),
        (TensorSpec((8,), None, torch.float32, "cpu", torch.sparse_coo), "layout"),
    ],
)
@pytest.mark.parametrize("storages", [[0, 3], [HUGE, HUGE + 1], [-5, -7], [], [0, 1, 2, 3, 4]])
def test_invalid_call_of_an_untrusted_trace_has_a_reason(
    tmp_path: Path, spec: TensorSpec, reason: str, storages: list[int]
) -> None:
    result = hostile(tmp_path, Signature(0, "operator", "aten.cos.default", (spec,), {}, spec), storages)
    assert reason in told(result).get("aten.cos.default", "")


def test_integers_are_unrestricted_only_if_they_are_not_indices() -> None:
    aten = torch.ops.aten
    assert all(takes_any_numbers(op, "cuda:0") for op in (aten.add.Tensor, aten.view.default, aten.cat.default))
    assert takes_any_numbers(aten.index.Tensor, "cpu")
    for op in (
        aten.index.Tensor,
        aten.div.Tensor_mode,
        aten.embedding_dense_backward.default,
        aten._unsafe_index.Tensor,
    ):
        assert not takes_any_numbers(op, "cuda:0")
    assert not takes_any_numbers(len, "cpu")
    assert all(hasattr(aten, name) for name in CHECKED_ON_CPU | NO_INDICES | DIVIDE if name != "contiguous")


def test_inner_calls_of_an_untrusted_call_are_checked(tmp_path: Path) -> None:
    weight = TensorSpec((64, 4), (4, 1), torch.float32, "cpu")
    norm = TensorSpec((1,), (1,), torch.float32, "cpu")
    signature = Signature(0, "operator", "aten._weight_norm.default", (weight, norm), {}, weight)
    result = hostile(tmp_path, signature, [3, 4, 5])
    assert "its sizes do not match: g has 1 instead of 64" in told(result)["aten._weight_norm.default"]


@given(
    st.lists(st.integers(-3, 6) | st.integers(-HUGE, HUGE), max_size=6),
    st.lists(st.integers(0, 40), max_size=3),
    st.integers(0, 9),
)
def test_arbitrary_numbers_of_an_untrusted_trace_raise_only_user_errors(
    tmp_path_factory: pytest.TempPathFactory, storages: list[int], shape: list[int], offset: int
) -> None:
    stride = tuple(reversed(range(1, len(shape) + 1)))
    spec = TensorSpec(tuple(shape), stride, torch.int64, "cpu", offset=offset, values=5)
    signature = Signature(0, "operator", "aten.add_.Tensor", (spec, spec), {}, spec)
    # storages whose differences are not 64-bit integers make the record unreadable
    with suppress(UserError):
        hostile(tmp_path_factory.mktemp("hostile"), signature, storages, [Values(5, Exact([1, HUGE]))])


@pytest.mark.slow
@pytest.mark.parametrize("run", ["predict", "train"])
def test_builtin_detector_replays_at_full_size(tmp_path: Path, run: str) -> None:
    program = load_program("builtin:faster_rcnn", ModelOptions(run=run))
    trace = captured(tmp_path, lambda: program.step(program.inputs()), model=program.model)
    result = replay_sequence(trace, replace(SETTINGS, repeats=1))
    assert result.replayed > 0.95 * result.calls
    assert result.replayed_peak_bytes == pytest.approx(result.captured_peak_bytes, rel=0.05)


MB = 1 << 20

FEW = TensorSpec((8,), (1,), torch.float32, "cpu")

UNMADE = TensorSpec((1 << 50,), (1,), torch.float32, "cpu")


def trace_of(path: Path, *calls: tuple[Signature, int, int], values: list[Record] = []) -> Trace:  # noqa: B006
    count = len(calls)
    signatures = {call[0].number: call[0] for call in calls}
    block = Calls(
        *(0, [call[0].number for call in calls], [0] * count, [10 * place for place in range(count)], [5] * count),
        *([2] * count, [number for call in calls for number in call[1:]]),
    )
    records = [*values, *signatures.values(), Scope(0, "", "", "forward"), Thread(0, "MainThread"), block]
    return load(write(path, records))


@pytest.mark.parametrize(
    ("spec", "values", "reason"),
    [
        (UNMADE, [], f"it needs {1 << 52} bytes, more memory than is available"),
        (
            replace(FEW, values=7),
            [Values(7, Floats(1e308, 1e308, 1e308, 1e308, 0.0, 0.0, 0.0, 0.0))],
            "value cannot be converted to type float",
        ),
    ],
)
def test_missing_results_lose_only_the_calls_that_take_them(
    tmp_path: Path, spec: TensorSpec, values: list[Record], reason: str
) -> None:
    cos = Signature(0, OPERATOR, "aten.cos.default", (FEW,), {}, spec, raised="RuntimeError: planted")
    exp = Signature(1, OPERATOR, "aten.exp.default", (spec,), {}, FEW)
    tan = Signature(2, OPERATOR, "aten.tan.default", (FEW,), {}, FEW)
    calls = [(tan, 0, 1), (cos, 0, 2), (exp, 2, 3), (tan, 3, 4)]
    trace = trace_of(tmp_path / "t.jsonl", *calls, values=values)
    result = replay_sequence(trace, SETTINGS)
    assert (result.replayed, result.unsupported, result.repeats) == (2, 2, 3)
    assert reason in told(result)["aten.exp.default"]
    rows = {row.op: row for row in rows_of(result, make_cases(trace), workload_for(RunRequest(), trace))}
    assert [rows[f"aten.{name}.default"].status for name in ("cos", "exp", "tan")] == [SKIPPED, UNSUPPORTED, OK]
    assert rows["aten.tan.default"].median_us


def test_more_memory_never_replays_fewer_calls(tmp_path: Path) -> None:
    x = torch.ones(MB // 4)
    with Capture(tmp_path / "t.jsonl"):
        for _ in range(5):
            x.cumsum(0).add_(1).sin()
    trace = load(tmp_path / "t.jsonl")
    results = [replay_sequence(trace, replace(SETTINGS, room_bytes=room * MB)) for room in (1, 2, 3, 4, 5)]
    replayed = [result.replayed for result in results]
    assert replayed == sorted(replayed)
    assert (replayed[0], replayed[-1]) == (0, 15)
    assert {result.repeats for result in results} == {3}


def test_step_without_a_complete_pass_has_no_ok_rows_and_a_reason(
    tiny_trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = step_passes.run_call

    def failing(dry_run: DryRun, call: Any, part: Any, watch: Any) -> None:
        if call.op == "aten.relu_.default":
            raise RuntimeError("planted")
        run(dry_run, call, part, watch)

    monkeypatch.setattr(step_passes, "run_call", failing)
    trace = load(tiny_trace)
    result = replay_sequence(trace, SETTINGS)
    reason = "all 20 passes failed, the last one in aten.relu_.default: RuntimeError: planted"
    assert (result.repeats, result.failure) == (0, reason)
    assert totals_of(result)["replayed_ms"] is None
    rows = rows_of(result, make_cases(trace), workload_for(RunRequest(), trace))
    assert {row.status for row in rows} <= {FAILED, UNSUPPORTED}
    assert {row.error for row in rows if row.status == FAILED and "relu" not in row.op} == {reason}
    shown = StringIO()
    print_sequence(result, rows, 3, shown)
    assert f"nothing was measured: {reason}" in shown.getvalue()
    assert "nan" not in shown.getvalue()
