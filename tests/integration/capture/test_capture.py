"""The contents of a capture, its dataflow and audit, the program's independence from it, and mistakes of new users."""

import json
import os
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from openmmlab_models import NARROW
from optional import needs, optional, slow_except
from programs import TinyNet, captured, run_command, succeed, train_tiny_net
from small_models import SMALL_PROGRAMS, TRANSFORMERS_PROGRAMS, SmallProgram
from torch import nn

from opgrip.capture import Capture, Schedule, capture
from opgrip.capture.command.audit import CountDifference, audit
from opgrip.capture.models import load_program
from opgrip.capture.models.sources import ModelOptions
from opgrip.capture.signatures import fitting
from opgrip.replay import replay
from opgrip.traces import Trace, UserError, load, read
from opgrip.traces.analysis.dataflow import make_graph
from opgrip.traces.codec.call_blocks import decode_storages, encode_storages
from opgrip.traces.schema.arguments import GeneratorSpec, TensorSpec
from opgrip.traces.schema.records import NO_STORAGE


def ops(trace: Trace) -> list[str]:
    return trace.calls["op"].astype(str).tolist()


def test_calls_have_their_module_and_phase(tiny_trace: Path) -> None:
    calls = load(tiny_trace).calls
    places = {(row.op, row.module, row.phase) for row in calls.itertuples()}
    assert ("aten.convolution.default", "features.0", "forward") in places
    assert ("aten.embedding.default", "embedding", "forward") in places
    assert ("aten.addmm.default", "head", "forward") in places
    assert ("aten.mean.dim", "", "forward") in places
    assert {row.phase for row in calls.itertuples() if row.op == "aten.convolution_backward.default"} == {"backward"}
    assert {row.phase for row in calls.itertuples() if row.op == "aten.mul_.Tensor"} == {"optimizer"}
    assert set(calls["thread"]) == {"MainThread"}
    assert (calls["duration_ns"] > 0).all()
    assert calls["start_ns"].is_monotonic_increasing


def test_thousands_of_calls_share_a_signature(tmp_path: Path) -> None:
    x = torch.ones(3)
    trace = captured(tmp_path, lambda: [x + 1 for _ in range(5000)])
    assert len(trace.calls) == 5000
    assert len(trace.signatures) == 1


@pytest.mark.parametrize(
    ("first", "second"),
    [(1, 1.0), (1, True), (0.0, -0.0), (2.0, 3.0), (float("inf"), float("-inf")), (1.0, 1 + 0j)],
)
def test_scalars_that_python_compares_equal_have_distinct_signatures(tmp_path: Path, first: Any, second: Any) -> None:
    x = torch.ones(3)
    trace = captured(tmp_path, lambda: (x * first, x * second, x * first))
    scalars = [signature.args[1] for signature in trace.signatures]
    assert [repr(scalar) for scalar in scalars] == [repr(first), repr(second)]
    assert trace.calls["signature"].tolist() == [0, 1, 0]


def test_tensor_layout_is_recorded(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    trace = captured(tmp_path, lambda: torch.add(base.t()[1:], base.expand(1, 4, 6)[0].t()[1:]))
    add = next(signature for signature in trace.signatures if signature.op == "aten.add.Tensor")
    spec = replace(add.args[0], values=None)
    assert spec == TensorSpec((5, 4), (1, 6), torch.float32, "cpu", offset=1, storage=0)
    assert add.args[1].storage == 0


def test_generators_are_recorded_by_device_and_seed(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    trace = captured(tmp_path, lambda: torch.randn(3, generator=generator))
    assert GeneratorSpec("cpu", 5) in [*trace.signatures[0].args, *trace.signatures[0].kwargs.values()]


def test_call_that_raises_is_recorded_and_its_error_reaches_the_program(tmp_path: Path) -> None:
    x = torch.ones(3)

    def program() -> None:
        with pytest.raises(RuntimeError, match="must match"):
            torch.add(x, torch.ones(4))

    trace = captured(tmp_path, program)
    assert trace.signatures[-1].raised is not None
    assert "must match" in trace.signatures[-1].raised


def test_program_error_leaves_a_complete_trace(tmp_path: Path) -> None:
    x = torch.ones(3)
    with pytest.raises(ZeroDivisionError), Capture(tmp_path / "t.jsonl"):
        x + 1
        raise ZeroDivisionError
    trace = load(tmp_path / "t.jsonl", partial=False)
    assert ops(trace) == ["aten.add.Tensor"]


def test_hook_error_drops_only_the_record_and_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> Any:
        raise OSError("planted")

    monkeypatch.setattr(fitting, "describe_call", broken)
    x = torch.ones(3)
    with Capture(tmp_path / "t.jsonl") as watched:
        result = x + 1
    assert torch.equal(result, torch.full((3,), 2.0))
    assert watched.dropped == 1
    end = load(tmp_path / "t.jsonl").end
    assert end is not None
    assert [(item.op, item.reason, item.count) for item in end.dropped] == [("aten.add.Tensor", "OSError: planted", 1)]


def test_module_that_is_not_a_child_is_named_under_its_caller(tmp_path: Path) -> None:
    class Outer(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.ReLU()(x)

    trace = captured(tmp_path, lambda: Outer()(torch.ones(3)))
    assert {row.op: row.module for row in trace.calls.itertuples()}["aten.relu.default"] == "(ReLU)"


def test_scope_is_restored_after_a_module_failed(tmp_path: Path) -> None:
    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError

    x = torch.ones(3)

    def program() -> None:
        model = nn.Sequential(nn.ReLU(), Fails())
        with pytest.raises(ValueError):  # noqa: PT011
            model(x)
        x + 1

    trace = captured(tmp_path, program)
    assert [(row.op, row.module) for row in trace.calls.itertuples()] == [
        ("aten.relu.default", "0"),
        ("aten.add.Tensor", ""),
    ]


def test_extension_functions_are_recorded_as_calls(tmp_path: Path) -> None:
    # any module of builtin functions works here; the tests with mmcv use its real extension
    import math

    original = math.hypot
    trace = captured(tmp_path, lambda: math.hypot(3.0, 4.0), extensions=["math", "not_loaded"])
    (signature,) = trace.signatures
    assert (signature.kind, signature.op, signature.args) == ("extension", "math:hypot", (3.0, 4.0))
    assert signature.outputs == 5.0
    assert math.hypot is original


def test_extension_used_by_the_capture_itself_does_not_deadlock(tmp_path: Path) -> None:
    # the capture itself calls math.isfinite to fit values, and functions of struct and zlib to write
    watched = ["math", "zlib", "_struct"]
    trace = captured(tmp_path, lambda: torch.ones(100) * 2, extensions=watched)
    assert set(ops(trace)) == {"aten.ones.default", "aten.mul.Tensor"}


def test_two_captures_both_record_operators_and_extensions(tmp_path: Path) -> None:
    import cmath

    x = torch.ones(3)
    outer, inner = tmp_path / "outer.jsonl", tmp_path / "inner.jsonl"
    with Capture(outer, extensions=["cmath"]), Capture(inner, extensions=["cmath"]):
        x + 1
        cmath.phase(1j)
    for path in (outer, inner):
        assert ops(load(path)) == ["aten.add.Tensor", "cmath:phase"]


def test_compiled_function_is_recorded_as_its_eager_operators(tmp_path: Path) -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(lambda tensor: (tensor.sin() + 1).cos(), backend=backend)
    x = torch.randn(4)
    trace = captured(tmp_path, lambda: compiled(x))
    assert ops(trace) == ["aten.sin.default", "aten.add.Tensor", "aten.cos.default"]
    assert graphs == []
    assert trace.end is not None
    assert not trace.end.dropped


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_recorded_by_their_buffer(tmp_path: Path) -> None:
    parts = [torch.ones(2), torch.ones(3)]
    trace = captured(tmp_path, lambda: torch.nested.nested_tensor(parts) * 2)
    (mul,) = (signature for signature in trace.signatures if signature.op == "aten.mul.Tensor")
    assert (mul.args[0].shape, mul.args[0].made_of.buffer.shape) == ((2, 3), (5,))
    assert mul.outputs.made_of.sizes == mul.args[0].made_of.sizes == ((2,), (3,))
    assert trace.end is not None
    assert not trace.end.dropped


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensor_subclass_is_recorded_by_its_inner_calls(tmp_path: Path) -> None:
    parts = [torch.ones(2), torch.ones(3)]
    trace = captured(tmp_path, lambda: torch.nested.nested_tensor(parts, layout=torch.jagged) * 2)
    (mul,) = (signature for signature in trace.signatures if signature.op == "aten.mul.Tensor")
    assert mul.args[0].shape == (5,)
    assert trace.end is not None
    assert not trace.end.dropped
    assert ("aten.mul.Tensor", "run by NestedTensor") in [(item.op, item.reason) for item in trace.end.passed_by]


def test_reentered_capture_writes_another_trace(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("precious", encoding="utf-8")
    watched = Capture(path, values="full")
    for number in (2, 3):
        with pytest.warns(RuntimeWarning, match=f"t.jsonl exists: the trace is written to t.{number}.jsonl"), watched:
            torch.ones(100) + number
        assert watched.path == tmp_path / f"t.{number}.jsonl"
        assert load(watched.path, partial=False).signatures[1].args[1] == number
    assert path.read_text(encoding="utf-8") == "precious"
    (tmp_path / "t.values.safetensors").touch()
    with Capture(path, force=True):
        torch.ones(3)
    assert len(load(path).calls) == 1


def test_trace_name_may_contain_time_and_process(tmp_path: Path) -> None:
    with Capture(tmp_path / "t-%t-%p-100%.jsonl") as watched:
        torch.ones(3)
    assert re.fullmatch(rf"t-\d{{8}}T\d{{6}}-{os.getpid()}-100%\.jsonl", Path(watched.path).name)
    assert len(load(watched.path, partial=False).calls) == 1


def test_calls_are_written_while_the_program_idles(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    x = torch.ones(3)
    with Capture(path):
        x + 1
        deadline = time.monotonic() + 300
        while not any(path.parent.glob("t.part*")) or sum(1 for _ in read(next(path.parent.glob("t.part*")))) < 4:
            assert time.monotonic() < deadline, "nothing was flushed"


def storages(trace: Trace) -> list[list[int]]:
    return [
        trace.storages[row.first_storage : row.first_storage + row.tensors].tolist() for row in trace.calls.itertuples()
    ]


@given(st.lists(st.integers(NO_STORAGE, 5000)), st.integers(-1, 5000))
def test_storage_numbers_survive_encoding(numbers: list[int], newest: int) -> None:
    assert decode_storages(encode_storages(numbers, newest), newest) == numbers


def test_result_has_the_same_storage_as_a_later_argument(tmp_path: Path) -> None:
    x = torch.ones(3)
    sine, cosine, both = storages(captured(tmp_path, lambda: x.sin() + x.cos()))
    assert sine[0] == cosine[0]
    assert len({*sine, *cosine}) == 3
    assert both[:2] == [sine[1], cosine[1]]


def test_views_and_in_place_results_have_the_storage_of_their_base(tmp_path: Path) -> None:
    x = torch.ones(4)

    def program() -> None:
        x[:2].add_(1)
        x.view(2, 2).split(1)

    for call in storages(captured(tmp_path, program)):
        assert len(set(call)) == 1


def test_reused_address_is_another_storage(tmp_path: Path) -> None:
    addresses, x = [], torch.ones(1000)

    def program() -> None:
        for _ in range(50):
            y = x + 1
            addresses.append(y.untyped_storage().data_ptr())
            del y

    calls = storages(captured(tmp_path, program))
    # the allocator reused addresses
    assert len(set(addresses)) < 50
    assert len({call[-1] for call in calls}) == 50


def test_backward_calls_take_results_of_forward_calls(tmp_path: Path) -> None:
    def program() -> None:
        torch.ones(3, requires_grad=True).sin().exp().sum().backward()

    trace = captured(tmp_path, program)
    calls = list(zip(trace.calls["op"].astype(str), storages(trace), strict=True))
    ((_, result),) = (numbers for op, numbers in calls if op == "aten.exp.default")
    # the derivative of exp is its result, which the backward pass takes from a saved variable
    assert any(result in numbers for op, numbers in calls if op == "aten.mul.Tensor")


def test_graph_follows_results_and_writes(tmp_path: Path) -> None:
    def program() -> None:
        x = torch.ones(1000)  # 0
        y = x.sin()  # 1
        z = x.cos()  # 2
        y.add_(1)  # 3
        (y + z).sum()  # 4, 5

    graph = make_graph(captured(tmp_path, program))
    after = {number: step.after for number, step in graph.steps.items()}
    assert after == {0: [], 1: [0], 2: [0], 3: [1], 4: [2, 3], 5: [4]}
    assert graph.facts.critical_path[0] == 0
    assert graph.facts.critical_path[-1] == 5
    assert graph.facts.critical_ns == sum(graph.steps[number].time_ns for number in graph.facts.critical_path)
    assert graph.facts.peak_bytes == 3 * 4000
    assert graph.facts.peak_at == 2


def test_graph_sizes_memory_by_its_consumer_if_results_vary(tmp_path: Path) -> None:
    few, more = torch.arange(5000) > 4990, torch.arange(5000) > 4899

    def program() -> None:
        more.nonzero().add_(1)
        # a second call with the same signature
        few.nonzero().add_(1)

    graph = make_graph(captured(tmp_path, program))
    sizes = [storage.bytes for storage in graph.storages.values() if storage.made_by is not None]
    assert sizes == [100 * 8, 9 * 8]
    assert graph.facts.peak_bytes == 100 * 8


@pytest.mark.slow
def test_graph_verb_writes_json(tmp_path: Path) -> None:
    train_tiny_net(tmp_path / "t.jsonl")
    done = succeed("opgrip", "trace", "graph", tmp_path / "t.jsonl", "-o", tmp_path / "g.json")
    assert "critical path" in done.stdout
    graph = json.loads((tmp_path / "g.json").read_text(encoding="utf-8"))
    assert len(graph["calls"]) == len(load(tmp_path / "t.jsonl").own_calls)
    assert run_command("opgrip", "trace", "graph", tmp_path / "t.jsonl", "-o", tmp_path / "g.dot").returncode == 2


def test_freed_large_tensors_do_not_accumulate(tmp_path: Path) -> None:
    def resident_mb() -> float:
        return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * 4096 / 1e6

    x = torch.ones(3 << 20)
    x.add(1)
    before = resident_mb()
    with Capture(tmp_path / "t.jsonl"):
        for _ in range(30):
            x.add(1).mul(2)
    # 12 MB each; 60 of them would take 720 MB
    assert resident_mb() - before < 300


def audit_model(path: Path, source: str, options: ModelOptions) -> list[CountDifference]:
    def build() -> tuple[object, object]:
        torch.manual_seed(0)
        program = load_program(source, options)
        return program, program.inputs()

    program, inputs = build()
    with Capture(path, model=program.model):  # type: ignore[attr-defined]
        program.step(inputs)  # type: ignore[attr-defined]
    program, inputs = build()
    return audit(path, lambda: program.step(inputs))  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("run", ["predict", "train"])
def test_audit_explains_every_difference_of_the_builtin_detector(tmp_path: Path, run: str) -> None:
    options = ModelOptions(run=run, input_size=(64, 64), batch_size=1)
    found = audit_model(tmp_path / "t.jsonl", "builtin:faster_rcnn", options)
    assert found
    assert [item for item in found if item.explained is None] == []


@needs("mmdet")
@pytest.mark.slow
@pytest.mark.parametrize("run", ["predict", "train"])
@pytest.mark.parametrize("source", NARROW)
def test_audit_explains_every_difference_of_openmmlab_detectors(tmp_path: Path, source: str, run: str) -> None:
    options = ModelOptions(run=run, input_size=(64, 64), cfg_options=NARROW[source])
    found = audit_model(tmp_path / "t.jsonl", source, options)
    assert [item for item in found if item.explained is None] == []


SMALL = ("--input-size", "64", "--batch-size", "1")
# docs/capture.md explains these two, which the command cannot infer from the counts
APART = ("activation checkpointing", "per-sample gradients")
AUDITED_ABOVE = ("detector",)
AUDITED = sorted({*SMALL_PROGRAMS, *TRANSFORMERS_PROGRAMS} - {*APART, *AUDITED_ABOVE})


@pytest.mark.parametrize("run", ["train", pytest.param("predict", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name",
    slow_except(["foreach SGD", "fused AdamW", "mixed precision autoencoder", "transformer encoder", "u-net"], AUDITED),
)
def test_audit_explains_every_difference_of_small_models(tmp_path: Path, name: str, run: str) -> None:
    if name in TRANSFORMERS_PROGRAMS:
        optional("transformers")
    build = {**SMALL_PROGRAMS, **TRANSFORMERS_PROGRAMS}[name]

    def step(program: SmallProgram) -> None:
        program.model.train(run == "train")
        with torch.set_grad_enabled(run == "train"):
            getattr(program, run)()

    torch.manual_seed(0)
    with Capture(tmp_path / "t.jsonl", model=(program := build()).model):
        step(program)
    torch.manual_seed(0)
    again = build()
    found = audit(tmp_path / "t.jsonl", lambda: step(again))
    assert [item for item in found if item.explained is None] == []


def test_audit_names_operators_that_a_capture_misses(tmp_path: Path) -> None:
    x = torch.ones(3)
    with Capture(tmp_path / "t.jsonl"):
        x.sin()
    (missed,) = audit(tmp_path / "t.jsonl", lambda: (x.sin(), x.cos()))
    assert missed == CountDifference("aten::cos", 1, 0)


@pytest.mark.slow
def test_audit_command_prints_the_differences(tmp_path: Path) -> None:
    done = succeed("opcapture", "--audit", *SMALL, "-o", tmp_path / "t.jsonl")
    assert re.search(
        r"audit: aten::to: torch counts \d+, the trace 0: a composite operator that called no other", done.stderr
    )
    assert "without an explanation" in done.stderr.splitlines()[-1]
    assert ", 0 without" in done.stderr.splitlines()[-1]
    assert run_command("opcapture", "--audit", "-o", "-").returncode == 2


X = torch.ones(3)


def test_schedule_that_is_never_reached_is_reported(tmp_path: Path) -> None:
    message = "no step was recorded: the program made 2 steps, and the schedule records none of them"
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


def test_existing_file_is_a_file_exists_error(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").touch()
    with pytest.raises(FileExistsError, match="replace it with force=True") as caught:
        capture(TinyNet(), tmp_path / "t.jsonl", X)
    assert isinstance(caught.value, UserError)
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "nothere.jsonl")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"modle": None}, TypeError, r"^Capture\(\) has no parameter modle: did you mean model=\?$"),
        ({"model": "net"}, TypeError, "model is a str, not a torch.nn.Module: opgrip.capture.capture builds models"),
        ({"values": "all"}, UserError, "unknown values='all': choose sketch or full"),
        ({"device_time": "clocks"}, UserError, "choose auto, events or kernels"),
        *(
            ({"last": 5} | other, UserError, "")
            for other in ({"last": 0}, {"max_calls": 9}, {"values": "full"}, {"path": "-"})
        ),
    ],
)
def test_invalid_parameters_of_a_capture_are_refused(
    tmp_path: Path, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Capture(**{"path": tmp_path / "t.jsonl"} | options)


INPUTS = (torch.ones(2, 3, 8, 8), torch.zeros(2, 6, dtype=torch.long))


def test_module_is_captured_and_its_trace_replayed(tmp_path: Path) -> None:
    model = TinyNet()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trace = capture(model, tmp_path / "t.jsonl", INPUTS, steps=2)
    assert trace.header["model"]["name"] == "tinynet"
    assert trace.header["steps"] == 2
    assert set(trace.calls["phase"]) == {"forward"}
    assert set(trace.calls["module"]) >= {"features.0", "head"}
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(row.status == "ok" for row in replay(tmp_path / "t.jsonl", top=2, iterations=1))


def test_frozen_layer_stays_frozen(tmp_path: Path) -> None:
    model = TinyNet()
    model.features[0].eval()
    capture(model, tmp_path / "t.jsonl", INPUTS)
    assert model.training
    assert not model.features[0].training
    assert all(module.training for module in model.features[1:])


def test_training_step_of_a_module_has_three_phases(tmp_path: Path) -> None:
    trace = capture(TinyNet(), tmp_path / "t.jsonl", dict(zip(("images", "words"), INPUTS, strict=True)), run="loss")
    assert set(trace.calls["phase"]) == {"forward"}
    trace = capture(TinyNet(), tmp_path / "train.jsonl", INPUTS, run="train")
    assert set(trace.calls["phase"]) == {"forward", "backward", "optimizer"}


def test_invalid_arguments_are_reported_in_python_terms(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    with pytest.raises(UserError, match="a module needs inputs"):
        capture(TinyNet(), path)
    with pytest.raises(UserError, match="batch_size= cannot be used with a module"):
        capture(TinyNet(), path, INPUTS, batch_size=3)
    with pytest.raises(TypeError, match="unexpected keyword argument 'step': did you mean 'steps'"):
        capture(TinyNet(), path, INPUTS, step=3)
    with pytest.raises(UserError, match="tinynet fails while it runs a step"):
        capture(TinyNet(), path, INPUTS[:1])
    assert not path.exists()
    path.write_text("mine")
    with pytest.raises(FileExistsError, match="force="):
        capture(TinyNet(), path, INPUTS)
    assert path.read_text() == "mine"
    with pytest.raises(UserError, match="no parameters to train: choose run="):
        capture(torch.nn.Softmax(dim=0), tmp_path / "other.jsonl", torch.ones(3), run="train")


@pytest.mark.slow
def test_functions_and_extensions_are_given_as_a_list_or_a_string(tmp_path: Path) -> None:
    names = ["programs:TinyNet.forward", "torch.nn.modules.linear:Linear.forward"]
    for grip in (names, names[0]):
        options = {"grip": grip, "grip_to": tmp_path / "samples", "extension": ["math"], "force": True}
        trace = capture(TinyNet(), tmp_path / "t.jsonl", INPUTS, **options)
        gripped = {item.op for item in trace.signatures if item.kind == "function"}
        assert len(gripped) == (2 if grip is names else 1)
