"""Gripped calls: the same after writing and reading their folder, and around their operators in a trace."""

from __future__ import annotations

import json
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gripping
import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from programs import ROOT, refusal, run_command, run_python

from opgrip.capture import Capture, Schedule
from opgrip.capture.grip import sample_folder
from opgrip.capture.grip.gripped import Gripped, GrippedCall
from opgrip.capture.grip.gripping import Grips
from opgrip.capture.grip.objects import alike, take
from opgrip.capture.grip.patterns import parse_pattern
from opgrip.capture.grip.sample_folder import Sketch, as_it_ran, difference, recorded_calls, write_calls
from opgrip.replay.cases.cases import Selection, make_cases
from opgrip.replay.cases.selection import FUNCTION as UNIT_FUNCTION
from opgrip.replay.cases.subgraphs import make_units
from opgrip.replay.operators.lookup import Unsupported, find_operator
from opgrip.traces import Trace, UserError, load
from opgrip.traces.analysis.dataflow import make_graph
from opgrip.traces.schema.arguments import Opaque, TensorSpec
from opgrip.traces.schema.python_objects import ModuleSpec, ObjectSpec
from opgrip.traces.schema.records import FUNCTION

CLASSES = vars(gripping)


def kept(*args: Any, results: Any = None, **kwargs: Any) -> Gripped:
    call = GrippedCall(args, kwargs, results, None, None, 0, 0, 1)
    return Gripped(gripping.scaled, None, "scaled", "scaled", frozenset(), (call,))


def again(gripped: Gripped, folder: Path, classes: Mapping[str, Any] = CLASSES) -> GrippedCall:
    write_calls(folder, gripped)
    (call,) = recorded_calls(folder, classes)
    return call


def test_recorded_calls_repeat_with_equal_results(tmp_path: Path) -> None:
    head = gripping.Head().eval()
    names = ("Head.forward", "noisy", "filled", "kept", "Coder.made")
    with Grips([parse_pattern(f"gripping:{name}") for name in names], to=tmp_path) as grips:
        head(torch.rand(2, 4))
        gripping.noisy(torch.rand(3).requires_grad_())
        with torch.no_grad():
            gripping.filled(torch.rand(2, 2).t()[1:], [torch.ones(2)])
        gripping.kept(torch.rand(4, 4), torch.rand(4), 0.5)
        gripping.Coder.made(2.0)
    for function in grips.functions:
        gripped = function.gripped()
        folder = tmp_path / gripped.name
        folder.mkdir()
        write_calls(folder, gripped)
        (call,) = recorded_calls(folder, CLASSES)
        (before,) = gripped.calls
        assert (call.operators, call.operator_ns, call.settings) == (
            before.operators,
            before.operator_ns,
            before.settings,
        )
        with as_it_ran(call):
            results = function.function(*call.args, **call.kwargs)
        assert difference(call.results, results) is None
        if call.after is not None:
            assert difference(call.after, (call.args, call.kwargs)) is None


def test_sample_calls_are_a_trace_with_full_values(tmp_path: Path) -> None:
    write_calls(tmp_path, kept(torch.arange(200.0), results=torch.ones(100, 3)))
    trace = load(tmp_path / "calls.jsonl", partial=False)
    (signature,) = trace.signatures
    assert (signature.kind, signature.op) == ("function", "scaled")
    assert trace.tensor_files == (tmp_path / "calls.safetensors",)
    assert {signature.args[0].values, signature.outputs.values} == set(trace.tensors)
    assert trace.own_calls.empty
    schema = jsonschema.Draft202012Validator(json.loads((ROOT / "traces" / "schema.json").read_text()))
    for line in (tmp_path / "calls.jsonl").read_text().splitlines():
        schema.validate(json.loads(line))


def test_tensors_beyond_the_limit_are_kept_as_value_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_folder, "WHOLE_BYTES", 100)
    call = again(kept(torch.rand(1000, 4), results=torch.ones(3)), tmp_path)
    assert call.args[0].shape == (1000, 4)
    assert 0 <= float(call.args[0].min()) <= float(call.args[0].max()) <= 1
    assert isinstance(call.results, Sketch)
    assert difference(call.results, torch.zeros(3)) is None
    assert difference(call.results, torch.zeros(4)) == "the result is float32[4], not float32[3]"


@pytest.mark.parametrize(
    "tensor",
    [
        torch.rand(3, 4).t(),
        torch.rand(4).expand(3, 4),
        torch.arange(10).unfold(0, 4, 2),
        torch.empty(0, 4),
        torch.tensor(3),
        torch.rand(2, 2).to(torch.bfloat16),
        torch.rand(2, 2).to(torch.float8_e4m3fn),
        torch.rand(2, dtype=torch.complex64),
        torch.tensor([float("nan"), -0.0, float("inf")]),
        torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.rand(2, 3).requires_grad_(),
    ],
    ids=lambda tensor: f"{tensor.dtype}{list(tensor.shape)}",
)
def test_tensors_are_restored_bit_for_bit_in_the_same_layout(tmp_path: Path, tensor: torch.Tensor) -> None:
    (back,) = again(kept(tensor), tmp_path).args
    assert (back.shape, back.stride(), back.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
    assert back.requires_grad == tensor.requires_grad
    assert alike(back, tensor)


def test_memory_shared_by_arguments_is_shared_again(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    whole, part = again(kept(base, base.t()[2]), tmp_path).args
    whole[0, 2] = 99
    assert part[0] == 99


def test_numpy_arrays_are_restored_with_strides_and_shared_memory(tmp_path: Path) -> None:
    table = np.arange(12, dtype=np.int16).reshape(3, 4)
    given = (table, table[1:, ::2], table[::-1], np.empty((0, 2)), np.array(1.5), np.ones(3, order="F")[None])
    back = again(kept(*given), tmp_path).args
    assert [(item.dtype, item.tolist()) for item in back] == [(item.dtype, item.tolist()) for item in given]
    back[0][1, 0] = 99
    assert back[1][0, 0] == 99


scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.binary(max_size=5), st.just(...)
)
values = st.recursive(
    st.one_of(
        scalars,
        st.builds(slice, st.none() | st.integers(-9, 9), st.none() | st.integers(-9, 9)),
        st.builds(range, st.integers(-9, 9)),
        st.sets(st.text(max_size=3) | st.integers()),
        st.frozensets(st.floats(allow_nan=False)),
        st.sampled_from(gripping.Corner),
        st.sampled_from([np.float32(1.5), np.bool_(True), np.int8(-3), np.complex64(1j)]),
        st.integers(0, 3).map(lambda size: torch.arange(size)),
        st.integers(0, 3).map(lambda size: np.arange(size)),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3) | st.integers() | st.tuples(st.integers()), inner, max_size=3),
        st.builds(gripping.Sizes, inner, inner),
        st.builds(gripping.Boxes, inner, inner),
        inner.map(lambda item: [item, item]),
    ),
    max_leaves=8,
)


@given(values)
def test_any_supported_value_is_restored(tmp_path_factory: pytest.TempPathFactory, value: Any) -> None:
    folder = tmp_path_factory.mktemp("calls")
    (back,) = again(kept(value), folder).args
    assert alike(take(back).tree, take(value).tree)


@pytest.mark.parametrize(
    ("got", "reason"),
    [
        ((torch.ones(2), {"a": 1.0}), None),
        ((torch.ones(2) + 1e-9, {"a": 1.0}), None),
        ((torch.ones(2) + 1e-2, {"a": 1.0}), "the result[0]: Tensor-likes are not close"),
        ((torch.ones(2, dtype=torch.float64), {"a": 1.0}), "the result[0] is float64[2], not float32[2]"),
        ((torch.ones(2), {"a": 1}), "the result[1]['a'] is 1, not 1.0"),
        ((torch.ones(2), {"b": 1.0}), "the result[1] is {'b': 1.0}, not {'a': 1.0}"),
        ([torch.ones(2), {"a": 1.0}], "the result is [tensor([1., 1.]), {'a': 1.0}], not (tensor([1., 1.])"),
    ],
)
def test_first_difference_of_results_is_reported(got: Any, reason: str | None) -> None:
    found = difference((torch.ones(2), {"a": 1.0}), got)
    assert found == reason or (found is not None and reason is not None and found.startswith(reason))


def test_objects_are_compared_by_their_fields() -> None:
    one, other = gripping.Coder(), gripping.Coder()
    assert difference(one, other) is None
    del other.lock
    assert difference(one, other) is None
    other.calls = 2
    assert difference([one], [other]) == "the result[0].calls is 2, not 0"
    assert difference(one, gripping.Slotted()) == "the result is a Slotted, not a Coder"
    assert difference(np.ones(2), np.zeros(2)).startswith("the result: Tensor-likes")  # type: ignore[union-attr]
    assert difference(float("nan"), float("nan")) is None


def test_missing_class_is_an_error_that_names_it(tmp_path: Path) -> None:
    write_calls(tmp_path, kept(gripping.Sizes(1, 2)))
    with pytest.raises(UserError, match="the class or function Sizes of gripping was not provided"):
        recorded_calls(tmp_path, {})


def test_names_in_a_trace_are_never_imported(tmp_path: Path) -> None:
    write_calls(tmp_path, kept(gripping.Sizes(1, 2)))
    trace = tmp_path / "calls.jsonl"
    trace.write_text(trace.read_text().replace("gripping:Sizes", "antigravity:Sizes"))
    code = (
        "import sys\nfrom opgrip.capture.grip.sample_folder import recorded_calls\n"
        f"from opgrip.traces import UserError\nfrom pathlib import Path\n"
        f"try: recorded_calls(Path({str(tmp_path)!r}), {{}})\n"
        "except UserError: print('antigravity' in sys.modules)"
    )
    done = run_python("-c", code)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("name", ["torch:load", "mine:os.system", "mine:os", "mine:Coder.__init__.__globals__"])
def test_trace_cannot_name_objects_reached_through_a_module(tmp_path: Path, name: str) -> None:
    write_calls(tmp_path, kept(gripping.Corner.TOP))
    trace = tmp_path / "calls.jsonl"
    trace.write_text(trace.read_text().replace("gripping:Corner.TOP", name))
    namespace = {"torch": torch, "os": types.ModuleType("os"), "Coder": gripping.Coder}
    with pytest.raises(UserError, match="was not provided"):
        recorded_calls(tmp_path, namespace)


def test_code_of_recorded_classes_does_not_run(tmp_path: Path) -> None:
    class Loud:
        def __new__(cls, *ignored: Any) -> Loud:
            raise AssertionError

        def __setattr__(self, name: str, value: Any) -> None:
            raise AssertionError

        def __getattribute__(self, name: str) -> Any:
            raise AssertionError

    loud = object.__new__(Loud)
    object.__setattr__(loud, "x", 1)
    assert take(loud).tree == ObjectSpec(f"{__name__}:{Loud.__qualname__}", {"x": 1})
    (back,) = again(kept(loud), tmp_path, {"Loud": Loud}).args
    assert object.__getattribute__(back, "__dict__") == {"x": 1}


def step() -> list[Any]:
    torch.manual_seed(0)
    head = gripping.Head()
    boxes = torch.rand(6, 4)
    loss = head(boxes).sum() + gripping.halved(boxes, 2).sum() + gripping.noisy(boxes).sum()
    loss.backward()
    found: list[torch.Tensor] = []
    gripping.filled(boxes, found)
    with pytest.raises(KeyError):
        gripping.failing(boxes)
    return [loss.item(), head.fc.weight.grad.tolist(), found[0].item(), torch.rand(1).item()]


def captured(path: Path, *grip: str) -> tuple[Trace, list[Any]]:
    with Capture(path, grip=grip, force=True):
        result = step()
    return load(path, partial=False), result


def rows(trace: Trace) -> list[tuple[str, str]]:
    own = trace.own_calls
    return list(zip(own["op"].astype(str), own["phase"].astype(str), strict=True))


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trace, Trace]:
    folder = tmp_path_factory.mktemp("traces")
    plain, expected = captured(folder / "plain.jsonl")
    gripped, result = captured(folder / "gripped.jsonl", "gripping:*")
    assert result == expected
    return plain, gripped


@pytest.mark.filterwarnings("ignore:.* was not gripped:RuntimeWarning")
def test_gripping_neither_loses_nor_adds_operators(traces: tuple[Trace, Trace]) -> None:
    plain, gripped = traces
    assert rows(gripped) == rows(plain)
    assert gripped.end is not None
    assert gripped.end.dropped == []


@pytest.mark.filterwarnings("ignore:.* was not gripped:RuntimeWarning")
def test_gripped_functions_are_calls_with_their_operators_inside(traces: tuple[Trace, Trace]) -> None:
    _, trace = traces
    functions = trace.calls[trace.calls["kind"] == FUNCTION]
    assert functions["op"].astype(str).value_counts().to_dict() == {
        "gripping:halved": 3,
        "gripping:Head.forward": 1,
        "gripping:noisy": 1,
        "gripping:filled": 1,
        "gripping:failing": 1,
    }
    inside = trace.calls[trace.calls["inside"] == "gripping:noisy"]
    assert inside["op"].tolist() == ["aten.rand_like.default", "aten.add.Tensor"]
    assert inside["gripped"].all()
    assert not trace.calls[trace.calls["inside"].isna()]["gripped"].any()
    (call,) = functions[functions["op"] == "gripping:noisy"].itertuples()
    assert call.duration_ns > inside["duration_ns"].sum()


@pytest.mark.filterwarnings("ignore:.* was not gripped:RuntimeWarning")
def test_gripped_function_has_its_arguments_results_and_errors(traces: tuple[Trace, Trace]) -> None:
    _, trace = traces
    signatures = {signature.op: signature for signature in trace.signatures if signature.kind == FUNCTION}
    head = signatures["gripping:Head.forward"].args[0]
    assert isinstance(head, ModuleSpec)
    assert head.cls == "gripping:Head"
    weight = head.modules["fc"].parameters["weight"].content
    assert isinstance(weight, TensorSpec)
    assert weight.values in trace.values
    assert isinstance(head.fields["coder"].value, ObjectSpec)
    assert head.fields["coder"].value.fields["lock"] == Opaque("_thread.lock")
    assert signatures["gripping:failing"].raised == "KeyError: 'no boxes'"
    assert signatures["gripping:noisy"].outputs.shape == (6, 4)


@pytest.mark.filterwarnings("ignore:.* was not gripped:RuntimeWarning")
def test_gripped_functions_do_not_change_replay_and_graph(traces: tuple[Trace, Trace]) -> None:
    plain, gripped = traces
    cases = [sorted((case.op, case.count) for case in make_cases(trace)) for trace in traces]
    assert cases[0] == cases[1]
    assert len(make_graph(gripped).steps) == len(make_graph(plain).steps)
    units = [{(case.op, case.count) for case in make_units(trace, Selection(), UNIT_FUNCTION)} for trace in traces]
    assert units[0] == units[1]
    assert set(gripped.summary()["op"]) == set(plain.summary()["op"])
    function = next(signature for signature in gripped.signatures if signature.kind == FUNCTION)
    with pytest.raises(Unsupported, match="the operators that this function ran"):
        find_operator(function)


@pytest.mark.filterwarnings("ignore:.* was not gripped:RuntimeWarning")
def test_every_record_of_gripped_calls_conforms_to_the_schema(tmp_path: Path) -> None:
    with Capture(tmp_path / "t.jsonl", grip=["gripping:*"]):
        gripping.summed(
            gripping.Boxes(torch.ones(2)),
            gripping.Sizes(1, 2),
            gripping.Corner.TOP,
            np.ones(2),
            np.float32(1),
            of=[{"k": slice(0, 1), (1, 2): ..., 3: frozenset({1})}, range(3), b"bytes", {1.5}, torch.relu],
        )
        gripping.Head()(torch.ones(1, 4))
    schema = jsonschema.Draft202012Validator(json.loads((ROOT / "traces" / "schema.json").read_text()))
    records = list(map(json.loads, (tmp_path / "t.jsonl").read_text().splitlines()))
    assert [error.message for record in records for error in schema.iter_errors(record)] == []


@pytest.mark.filterwarnings("ignore:.* was not gripped:RuntimeWarning")
def test_functions_are_gripped_only_in_recorded_steps(tmp_path: Path) -> None:
    with Capture(tmp_path / "t.jsonl", grip=["gripping:scaled"], schedule=Schedule(skip=1, active=1, repeat=2)) as it:
        for rows in range(1, 6):
            gripping.scaled(torch.ones(rows))
            it.step()
    trace = load(tmp_path / "t.jsonl")
    shapes = [item.args[0].shape for item in trace.signatures if item.kind == FUNCTION]
    assert shapes == [(2,), (3,)]


@pytest.mark.filterwarnings("ignore:.* was not gripped:RuntimeWarning")
def test_invalid_grip_pattern_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a pattern for functions"):
        Capture(tmp_path / "t.jsonl", grip=["delta2bbox"])
    assert "--grip-to needs --grip" in refusal("opcapture", "--grip-to", "x", "-o", tmp_path / "t.jsonl")


@pytest.mark.filterwarnings("ignore:.* was not gripped:RuntimeWarning")
def test_trace_info_reports_gripped_functions(tmp_path: Path) -> None:
    captured(tmp_path / "t.jsonl", "gripping:*")
    done = run_command("opgrip", "trace", "info", tmp_path / "t.jsonl")
    trace = load(tmp_path / "t.jsonl")
    assert f"calls       {len(trace.own_calls):,}\n" in done.stdout
    below = int(trace.calls["gripped"].sum())
    assert f"gripped     7 calls of 5 functions, {below} calls below them" in done.stdout
