"""Tests of subgraph cases: all calls of a module or function as one case, with the program's results."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from example_trace import SPEC, write
from programs import succeed, train_tiny_net
from settings import rows_of, settings_of
from torch import Tensor, nn

from opgrip.capture import Capture
from opgrip.errors import UserError
from opgrip.replay import Results
from opgrip.replay.cases.cases import Case, Selection
from opgrip.replay.cases.preceding_calls import make_places_of_subgraphs
from opgrip.replay.cases.selection import FUNCTION, MODULE
from opgrip.replay.cases.subgraphs import UNIT, make_units
from opgrip.replay.inputs.inputs import Inputs
from opgrip.replay.operators.lookup import Unsupported
from opgrip.replay.results.results import Result
from opgrip.replay.run.workload import Workload
from opgrip.traces import Trace, load
from opgrip.traces.schema.arguments import tensors
from opgrip.traces.schema.records import OPERATOR, Calls, Record, Scope, Signature, Thread

SETTINGS = settings_of(warmup=1, iterations=2)


class Residual(nn.Module):
    """Module whose layers all differ in signature, since a trace holds only the values of a signature's first call."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(4, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.conv2, self.bn2 = nn.Conv2d(6, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x
        return self.relu(out)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.qkv, self.proj = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        count, words, width = x.shape
        query, key, value = self.qkv(self.norm(x)).view(count, words, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        scores = (query @ key.transpose(-2, -1)) / 2.0
        scores = scores.masked_fill(torch.ones(words, words, dtype=torch.bool).triu(1), float("-inf"))
        mixed = scores.softmax(dim=-1) @ value
        return x + self.proj(mixed.transpose(1, 2).reshape(count, words, width))


class Writes(nn.Module):
    """Module that writes into views of a result, and reads the whole of it and other views."""

    def forward(self, x: Tensor) -> Tensor:
        made = x * 2
        made[:, :2] += 1
        row = made[1]
        made.t()[3].zero_()
        row.mul_(torch.arange(4.0))
        return made.t() + row[:3].sum()


class Named(nn.Module):
    """Model of one module followed by further operators."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x).sigmoid()


def captured(folder: Path, program: Callable[[], Any], **options: Any) -> Trace:
    with Capture(folder / "t.jsonl", values="full", force=True, **options):
        program()
    return load(folder / "t.jsonl", partial=False)


def arguments(case: Case, place: Callable[[str], str] = SETTINGS.place) -> tuple[Any, ...]:
    return Inputs(case.signature.args, {}, case.values, place, 0).make()[0]


def run(case: Case) -> tuple[Tensor, ...]:
    assert case.operator is not None
    outputs: tuple[Tensor, ...] = case.operator.function(*arguments(case))
    return outputs


def whole(trace: Trace, *modules: str) -> Case:
    (case,) = make_units(trace, Selection(module=modules), MODULE)
    return case


def rows(cases: Sequence[Case], settings: Workload = SETTINGS) -> dict[str, Result]:
    return {result.op: result for result in rows_of(cases, settings)}


def block_of(folder: Path, block: nn.Module, *shape: int) -> tuple[Case, Tensor]:
    torch.manual_seed(0)
    model, x = Named(block.eval()), torch.randn(shape)
    given: list[Tensor] = []
    block.register_forward_hook(lambda module, args, output: given.append(output.clone()))
    with torch.no_grad():
        trace = captured(folder, lambda: model(x), model=model)
    return whole(trace, "block"), given[0]


BLOCKS = [
    pytest.param(Residual, (2, 4, 5, 5), id="residual"),
    pytest.param(Attention, (2, 5, 8), id="attention"),
    pytest.param(Writes, (4, 4), id="writes into views"),
]


@pytest.mark.parametrize(("make", "shape"), BLOCKS)
def test_module_case_returns_the_outputs_of_the_module(
    tmp_path: Path, make: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    case, expected = block_of(tmp_path, make(), *shape)
    (output,) = run(case)
    assert torch.equal(output, expected)
    assert (case.op, case.signature.kind, case.count) == (f"block ({make.__name__})", UNIT, 1)
    assert case.phase == "forward"


@pytest.mark.parametrize(("make", "shape"), BLOCKS)
@pytest.mark.slow
def test_compilers_and_exporters_accept_a_unit(
    tmp_path: Path, make: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    case, expected = block_of(tmp_path, make(), *shape)
    assert case.operator is not None
    function, args = case.operator.function, arguments(case)
    settings = [item for item in args if not isinstance(item, Tensor)]
    tensors = tuple(item for item in args if isinstance(item, Tensor))
    call = Bound(function, settings)
    with torch.no_grad():
        assert torch.equal(torch.compile(function, backend="aot_eager", fullgraph=True)(*args)[0], expected)
        assert torch.equal(torch.export.export(call, tensors).module()(*tensors)[0], expected)
        assert torch.equal(torch.jit.trace(call, tensors, check_trace=False)(*tensors)[0], expected)


class Bound(nn.Module):
    """Module with settings after its tensor arguments."""

    def __init__(self, function: Callable[..., Any], settings: Sequence[Any]) -> None:
        super().__init__()
        self.function, self.settings = function, settings

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs: tuple[Tensor, ...] = self.function(*tensors, *self.settings)
        return outputs


def test_parameters_and_inputs_are_arguments_once_each(tmp_path: Path) -> None:
    case, _ = block_of(tmp_path, Residual(), 2, 4, 5, 5)
    # x, which is read twice, two kernels, and four tensors of each norm
    shapes = [(2, 4, 5, 5), (6, 4, 3, 3), (4, 6, 3, 3), *[(6,)] * 4, *[(4,)] * 4]
    assert sorted(spec.shape for spec in tensors(case.signature.args)) == sorted(shapes)
    assert [spec.shape for spec in case.signature.outputs] == [(2, 4, 5, 5)]
    assert case.operator is not None
    assert not case.operator.mutates


def test_outside_tensors_that_share_memory_share_it_again(tmp_path: Path) -> None:
    class Shared(nn.Module):
        def forward(self, both: tuple[Tensor, Tensor]) -> Tensor:
            left, right = both
            left.add_(1)
            return right * 3

    model, memory = Named(Shared()), torch.zeros(6)
    case = whole(captured(tmp_path, lambda: model((memory[:4], memory[2:])), model=model), "block")
    assert case.operator is not None
    assert case.operator.mutates
    left, right = arguments(case)
    # drawn with the values at the time of the read, after the write
    right.zero_()
    (output,) = case.operator.function(left, right)
    assert torch.equal(output, torch.tensor([3.0, 3.0, 0.0, 0.0]))
    assert left.untyped_storage()._cdata == right.untyped_storage()._cdata


def scaled(boxes: Tensor, factor: Tensor) -> Tensor:
    low, high = boxes.chunk(2, dim=1)
    low = low * factor
    return torch.cat([low, low + high], dim=1)


def clipped(boxes: Tensor) -> Tensor:
    return inner(boxes) + 1


def inner(boxes: Tensor) -> Tensor:
    return boxes.clamp(0, 1)


def test_function_in_a_loop_is_one_case_with_a_count(tmp_path: Path) -> None:
    boxes, factor = torch.rand(5, 4), torch.tensor(2.0)
    results = []

    def program() -> None:
        for _ in range(4):
            results.append(scaled(boxes, factor))
            boxes.neg()
        scaled(torch.rand(3, 4), factor)

    trace = captured(tmp_path, program)
    cases = make_units(trace, Selection(op=["*:scaled"]), FUNCTION)
    assert {(case.op, case.count) for case in cases} == {("test_subgraphs:scaled", 4), ("test_subgraphs:scaled", 1)}
    (often,) = (case for case in cases if case.count == 4)
    assert torch.equal(run(often)[0], results[0])


def test_inputs_of_a_unit_have_the_distances_of_the_program(tmp_path: Path) -> None:
    boxes, factor, other = torch.ones(1 << 18, 4), torch.tensor(2.0), torch.ones(1 << 22)

    def program() -> None:
        scaled(boxes, factor)
        other.neg()
        scaled(boxes, factor)
        factor.neg()
        scaled(boxes, factor)

    trace = captured(tmp_path, program)
    cases = make_units(trace, Selection(op=["*:scaled"]), FUNCTION)
    (places,) = make_places_of_subgraphs(trace, cases).places.values()
    _, late, soon = [max(filter(None, place.distances), default=0) for place in places]
    assert late >= 2 * other.nbytes
    assert soon <= 4 * boxes.nbytes


def test_captured_time_of_a_unit_is_the_sum_over_its_calls(tmp_path: Path) -> None:
    def program() -> None:
        for _ in range(3):
            scaled(torch.ones(5, 4), torch.tensor(2.0))
            torch.ones(2).neg()

    trace = captured(tmp_path, program)
    (case,) = make_units(trace, Selection(op=["*:scaled"]), FUNCTION)
    calls = trace.calls[trace.calls["function"] == "scaled"]
    assert case.captured_total_us == pytest.approx(calls["duration_ns"].sum() / 1e3)
    # calls that the capture perturbed count as the others do
    times = calls["time_ns"].to_numpy().reshape(3, -1).sum(axis=1)
    assert case.captured_us == pytest.approx(sorted(times)[1] / 1e3)
    assert case.share == 1


@pytest.mark.parametrize("unit", [MODULE, FUNCTION])
def test_unit_shares_add_up_to_the_whole_time(tiny_trace: Path, unit: str) -> None:
    trace = load(tiny_trace)
    cases = make_units(trace, Selection(), unit)
    # calls inside an extension function have their own rows
    own = trace.own_calls
    assert sum(case.captured_total_us for case in cases) == pytest.approx(own["duration_ns"].sum() / 1e3)
    assert sum(case.share for case in cases) == pytest.approx(1)
    assert [case.share for case in cases] == sorted((case.share for case in cases), reverse=True)
    assert sorted(case.number for case in cases) == list(range(len(cases)))
    assert make_units(trace, Selection(top=3), unit)[2].op == cases[2].op


def test_forward_backward_and_optimizer_are_separate_units(tmp_path: Path) -> None:
    train_tiny_net(tmp_path / "t.jsonl")
    cases = make_units(load(tmp_path / "t.jsonl"), Selection(), MODULE)
    names = {case.op: case.phase for case in cases}
    assert names["features.0 (Conv2d)"] == "forward"
    assert names["features.0 (Conv2d) backward"] == "backward"
    (backward,) = make_units(load(tmp_path / "t.jsonl"), Selection(op=["features.0 (Conv2d) backward"]), MODULE)
    assert (backward.phase, [site.module for site in backward.call_sites]) == ("backward", ["features.0"])
    assert {case.phase for case in cases} == {"forward", "backward", "optimizer"}


@pytest.mark.slow
def test_every_unit_of_a_training_step_runs(tiny_trace: Path) -> None:
    for unit in (MODULE, FUNCTION):
        for case in make_units(load(tiny_trace), Selection(), unit):
            (result,) = rows_of([case], SETTINGS)
            if "profiler" not in str(result.error):
                assert (result.status, result.error, result.faithful) == ("ok", None, True), result.op


def test_gradients_flow_through_a_unit(tmp_path: Path) -> None:
    # in training mode, its norms write into buffers from outside
    model = Named(Residual()).eval()
    trace = captured(tmp_path, lambda: model(torch.randn(2, 4, 5, 5)).sum().backward(), model=model)
    (case,) = (case for case in make_units(trace, Selection(module=["block"]), MODULE) if case.phase == "forward")
    forward, backward = rows_of([case], settings_of(warmup=1, iterations=2, backward=True))
    assert (forward.status, backward.direction, backward.status, backward.error) == ("ok", "backward", "ok", None)


def test_gradients_bypass_detached_results(tmp_path: Path) -> None:
    def partly(x: Tensor) -> Tensor:
        # autograd keeps the detached result of exp
        made = x.exp() * 1
        return made * made.detach()

    x = torch.rand(5, requires_grad=True)
    (expected,) = torch.autograd.grad(partly(x).sum(), x)
    (case,) = make_units(captured(tmp_path, lambda: partly(x)), Selection(op=["*.partly"]), FUNCTION)
    assert case.operator is not None
    (given,) = arguments(case)
    (output,) = case.operator.function(given)
    (found,) = torch.autograd.grad(output.sum(), given)
    assert torch.equal(found, expected)


def test_module_pattern_decides_whether_inner_modules_are_included(tmp_path: Path) -> None:
    model = nn.Sequential(Named(Residual()), Named(Residual()), nn.ReLU())
    trace = captured(tmp_path, lambda: model(torch.randn(2, 4, 5, 5)), model=model)
    children = {case.op for case in make_units(trace, Selection(module=["?"]), MODULE)}
    assert children == {"0 (Named)", "1 (Named)", "2 (ReLU)"}
    assert {case.op for case in make_units(trace, Selection(module=["*.block"]), MODULE)} == {
        "0.block (Residual)",
        "1.block (Residual)",
    }
    everything = {case.op for case in make_units(trace, Selection(), MODULE)}
    assert {"0 (Named)", "0.block (Residual)", "0.block.conv1 (Conv2d)", "0.block.relu (ReLU)"} <= everything
    assert {case.op for case in make_units(trace, Selection(op=["*.bn?"]), MODULE)} == {
        f"{index}.block.bn{place} (BatchNorm2d)" for index in (0, 1) for place in (1, 2)
    }


def test_function_pattern_decides_whether_callees_are_included(tmp_path: Path) -> None:
    trace = captured(tmp_path, lambda: clipped(torch.linspace(-2, 2, 9)), stack_depth=4)
    (case,) = make_units(trace, Selection(op=["*:clipped"]), FUNCTION)
    assert torch.equal(arguments(case)[0], torch.linspace(-2, 2, 9))
    assert torch.equal(run(case)[0], torch.linspace(-2, 2, 9).clamp(0, 1) + 1)
    assert {case.op for case in make_units(trace, Selection(op=["*:clipped", "*:inner"]), FUNCTION)} == {
        "test_subgraphs:clipped",
        "test_subgraphs:inner",
    }


def test_argument_names_of_an_untrusted_trace_are_not_executed(tmp_path: Path) -> None:
    hostile = {"alpha=1) or print('run'); str(x": 1}
    records: list[Record] = [
        Scope(0, "m", "M", "forward"),
        Signature(0, OPERATOR, "aten.add.Tensor", (SPEC, SPEC), hostile, SPEC),
        Thread(0, "MainThread"),
        Calls(0, [0], [0], [0], [1], [3], [0, 0, 1]),
    ]
    (result,) = rows_of(make_units(load(write(tmp_path / "t.jsonl", records)), Selection(), MODULE), SETTINGS)
    assert result.status == "unsupported"
    assert "cannot be the name of an argument" in str(result.error)


def test_device_and_dtype_of_the_replay_apply_inside_a_unit(tmp_path: Path) -> None:
    def filled(x: Tensor) -> Tensor:
        return x @ torch.full((4, 4), 0.5, dtype=torch.float32, device="cpu")

    trace = captured(tmp_path, lambda: filled(torch.ones(4, 4)))
    (case,) = make_units(trace, Selection(op=["*.filled"]), FUNCTION)
    assert case.operator is not None
    x, *settings = arguments(case)
    moved = [torch.device("meta") if isinstance(item, torch.device) else item for item in settings]
    assert case.operator.function(x.to("meta"), *moved)[0].device.type == "meta"
    (result,) = rows_of([case], settings_of(warmup=1, iterations=2, dtype="bfloat16"))
    assert (result.status, result.error) == ("ok", None)


def test_unit_that_cannot_run_fails_only_in_its_row(tmp_path: Path) -> None:
    def opaque(x: Tensor) -> None:
        torch.empty(0).set_(x.untyped_storage())

    def raising(x: Tensor) -> None:
        with pytest.raises(RuntimeError):
            torch.mm(x + 1, x)

    def fine(x: Tensor) -> None:
        x.cos().sin()

    def program() -> None:
        for function in (opaque, raising, fine):
            function(torch.ones(3))

    cases = make_units(captured(tmp_path, program), Selection(op=["*.opaque", "*.raising", "*.fine"]), FUNCTION)
    found = {name.rpartition(".")[2]: row for name, row in rows(cases).items()}
    assert found["fine"].status == "ok"
    assert found["opaque"].status == found["raising"].status == "unsupported"
    assert "aten.set_.source_Storage takes a storage, which a graph cannot hold" in str(found["opaque"].error)
    assert "aten.mm.default raised when it was captured" in str(found["raising"].error)
    (bad,) = (case for case in cases if case.op.endswith("raising"))
    assert bad.operator is not None
    with pytest.raises(Unsupported, match="raised"):
        bad.operator.function(torch.ones(3))


@pytest.mark.parametrize(
    ("unit", "selection", "message"),
    [
        (MODULE, Selection(module=["nowhere*"]), "no module matches --module nowhere"),
        (FUNCTION, Selection(op=["aten.add*"]), "no function matches --op aten.add"),
        (MODULE, Selection(op=["head"], module=["features*"]), "no call matches all of --op, --module and --phase"),
    ],
)
def test_patterns_without_a_match_are_reported(tiny_trace: Path, unit: str, selection: Selection, message: str) -> None:
    with pytest.raises(UserError) as caught:
        make_units(load(tiny_trace), selection, unit)
    assert message in f"{caught.value}: {caught.value.hint}"


def test_opreplay_replays_units(tiny_trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    few = ("--iterations", 1, "--warmup", 0, "--cache", "warm")
    succeed("opreplay", tiny_trace, "--unit", "module", "--module", "features.0", *few, "-o", path)
    assert set(Results.load(path).frame["op"]) == {"features.0 (Conv2d)", "features.0 (Conv2d) backward"}
