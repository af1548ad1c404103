"""Selection of gripped functions, recording of their calls, and unchanged behaviour of the program."""

import asyncio
import importlib
import random
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import gripping
import numpy as np
import pytest
import torch

from opgrip.capture.grip import gripping as grip_search
from opgrip.capture.grip import patterns
from opgrip.capture.grip.gripped import GrippedCall, GrippedFunction, Keep
from opgrip.capture.grip.gripping import Grips
from opgrip.capture.grip.patterns import loaded_modules, parse_pattern
from opgrip.traces import UserError


@pytest.fixture(autouse=True)
def unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Check that a test leaves all gripped functions unchanged, and write samples to a temporary folder."""
    monkeypatch.chdir(tmp_path)
    before = dict(vars(gripping))
    # a process that has collected all tests has thousands of modules, in which a search takes a third of a second
    others = {id(module) for module in sys.modules.values() if module is not gripping}
    for module in (patterns, grip_search):
        monkeypatch.setattr(
            module, "loaded_modules", lambda: [item for item in loaded_modules() if id(item) not in others]
        )
    yield
    assert dict(vars(gripping)) == before


def gripped(*names: str, **keep: Any) -> Grips:
    return Grips([parse_pattern(f"gripping:{name}") for name in names], Keep(**keep), to=Path("samples"))


def function_of(grips: Grips, entry: str) -> GrippedFunction:
    (function,) = (item for item in grips.functions if item.entry == entry)
    return function


def calls_of(grips: Grips, entry: str) -> list[GrippedCall]:
    return function_of(grips, entry).calls


def lost_of(grips: Grips, entry: str) -> list[str]:
    return list(function_of(grips, entry).lost)


def tags_of(grips: Grips, entry: str) -> frozenset[str]:
    return function_of(grips, entry).gripped().tags


def test_first_call_of_each_signature_is_kept() -> None:
    with gripped("scaled") as grips:
        for rows in (2, 2, 3, 2, 4, 5):
            gripping.scaled(torch.ones(rows, 4))
    assert [call.args[0].shape[0] for call in calls_of(grips, "scaled")] == [2, 3, 4]


def test_several_calls_of_a_signature_are_kept_on_request() -> None:
    with gripped("scaled", calls=4, per_signature=2) as grips:
        for rows, value in ((2, 1), (2, 2), (2, 3), (3, 4), (4, 5)):
            gripping.scaled(torch.full((rows, 4), float(value)))
    assert [float(call.args[0][0, 0]) for call in calls_of(grips, "scaled")] == [1, 2, 4, 5]


def test_other_scalars_are_another_signature() -> None:
    with gripped("scaled", calls=9) as grips:
        for by in (1, 1.0, True, 1):
            gripping.scaled(torch.ones(2), by=by)
    assert [repr(call.kwargs["by"]) for call in calls_of(grips, "scaled")] == ["1", "1.0", "True"]


def test_arguments_are_kept_as_before_the_call() -> None:
    boxes, found = torch.zeros(2, 3), [torch.ones(1)]
    with gripped("filled") as grips:
        gripping.filled(boxes, found)
    (call,) = calls_of(grips, "filled")
    assert call.args[0].tolist() == [[0, 0, 0], [0, 0, 0]]
    assert len(call.args[1]) == 1
    assert call.after is not None
    assert call.after[0][0].tolist() == boxes.tolist() == [[7, 7, 7], [0, 0, 0]]
    assert [float(item) for item in call.after[0][1]] == [1, 21]
    boxes.zero_()
    assert call.after[0][0].sum() == 21


def test_copies_keep_strides_gradients_and_shared_memory() -> None:
    base = torch.arange(24.0).reshape(4, 6).requires_grad_()
    moved = base.t()[1:]
    with gripped("kept") as grips:
        gripping.kept(moved, moved[:, 0], 3.0)
    boxes, scores, _ = calls_of(grips, "kept")[0].args
    assert boxes.stride() == moved.stride()
    assert boxes.requires_grad
    assert boxes.tolist() == moved.tolist()
    with torch.no_grad():
        boxes[0, 0] = 99
    assert scores[0] == 99
    assert base[0, 1] == 1


def test_objects_are_decomposed_and_rebuilt() -> None:
    head = gripping.Head()
    head.coder.calls = 5
    with gripped("Head.forward") as grips:
        head(torch.ones(1, 4))
    (call,) = calls_of(grips, "Head.forward")
    copy = call.args[0]
    assert type(copy) is gripping.Head
    assert copy is not head
    assert copy.fc.weight is not head.fc.weight
    assert isinstance(copy.fc.weight, torch.nn.Parameter)
    assert {name for name, _ in copy.named_parameters()} == {"fc.weight", "fc.bias"}
    assert copy.nothing is None
    assert copy.optional is None
    assert copy.coder.calls == 5
    assert copy.coder.me is copy.coder
    # a trace cannot hold a lock
    assert not hasattr(copy.coder, "lock")
    assert torch.equal(gripping.Head.forward(*call.args), call.results)


def test_many_kinds_of_arguments_are_kept() -> None:
    table = np.arange(6.0).reshape(2, 3)
    given = (gripping.Boxes(torch.ones(2)), gripping.Sizes(3, 4), gripping.Corner.TOP, table[:, ::2], np.float32(0.5))
    more = {"none": None, "text": "é", "slots": gripping.Slotted(), "set": {1, 2}, "slice": slice(1, 3), "all": ...}
    with gripped("summed") as grips:
        result = gripping.summed(*given, **more)
    (call,) = calls_of(grips, "summed")
    boxes, sizes, corner, copied_table, flag = call.args
    assert (type(boxes), type(sizes), corner) == (gripping.Boxes, gripping.Sizes, gripping.Corner.TOP)
    assert (type(flag), flag) == (np.float32, 0.5)
    assert (copied_table.tolist(), copied_table.strides) == (table[:, ::2].tolist(), table[:, ::2].strides)
    assert call.kwargs["slots"].deep == {"inside": [1, 2]}
    assert not hasattr(call.kwargs["slots"], "missing")
    assert {name: call.kwargs[name] for name in ("none", "text", "set", "slice", "all")} == {
        name: more[name] for name in ("none", "text", "set", "slice", "all")
    }
    again = gripping.summed(*call.args, **call.kwargs)
    assert again == result == call.results
    assert type(call.results[0]) is gripping.Sizes


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (threading.Lock(), "it takes or returns an object of type _thread.lock"),
        (iter([1]), "it takes or returns an object of type builtins.list_iterator"),
        (torch.ones(1).to_sparse(), "it takes or returns a sparse_coo tensor"),
        (np.array(["text"]), "it takes or returns a numpy array of type <U4"),
        (lambda: None, "it takes or returns an object of type builtins.function"),
    ],
    ids=["lock", "iterator", "sparse", "strings", "lambda"],
)
def test_unsupported_argument_loses_the_record_and_not_the_call(value: Any, reason: str) -> None:
    with gripped("scaled") as grips:
        assert gripping.scaled(torch.ones(1), by=2.0).tolist() == [2]
        try:
            expected: Any = torch.ones(1) * value
        except TypeError:
            with pytest.raises(TypeError):
                gripping.scaled(torch.ones(1), by=value)
        else:
            assert gripping.scaled(torch.ones(1), by=value).to_dense().tolist() == expected.to_dense().tolist()
    assert len(calls_of(grips, "scaled")) == 1
    assert lost_of(grips, "scaled") == [reason]


def test_call_that_raises_is_not_kept_and_raises_the_same() -> None:
    with gripped("failing") as grips, pytest.raises(KeyError, match="no boxes") as error:
        gripping.failing(torch.ones(1))
    assert error.traceback[-1].name == "failing"
    assert lost_of(grips, "failing") == ["KeyError: 'no boxes'"]


def test_gripping_does_not_change_random_numbers() -> None:
    def run() -> list[Any]:
        torch.manual_seed(1)
        np.random.seed(1)
        random.seed(1)
        drawn: list[Any] = [gripping.noisy(torch.ones(rows)).tolist() for rows in (2, 3, 2)]
        drawn += [gripping.drawn_by_numpy(torch.ones(2)).tolist(), random.random(), torch.rand(1).item()]
        return drawn

    expected = run()
    with gripped("noisy", "drawn_by_numpy") as grips:
        assert run() == expected
    first, second = calls_of(grips, "noisy")
    assert first.random_state is not None
    assert second.random_state is not None
    torch.set_rng_state(second.random_state)
    assert torch.equal(gripping.noisy(*second.args), second.results)
    assert "Random" in tags_of(grips, "noisy")
    assert lost_of(grips, "drawn_by_numpy") == ["it draws random numbers with a generator other than torch's"]


def test_torch_settings_are_kept() -> None:
    with gripped("scaled") as grips, torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        gripping.scaled(torch.ones(2, requires_grad=True))
    (call,) = calls_of(grips, "scaled")
    assert call.settings["grad"] is False
    assert call.settings["autocast"] == "cpu:bfloat16"
    assert call.args[0].requires_grad


def test_operators_are_counted_and_timed() -> None:
    with gripped("kept") as grips:
        gripping.kept(torch.ones(4, 4), torch.rand(4), 2.0)
        gripping.kept(torch.ones(5, 4), torch.ones(5), 0.5)
    first, second = calls_of(grips, "kept")
    assert (first.operators, second.operators) == (5, 6)
    assert 0 < first.operator_ns < first.duration_ns


def test_tags_describe_the_operators_that_ran() -> None:
    with gripped("kept", "filled", "scaled", "Coder.area") as grips:
        gripping.kept(torch.ones(4, 4), torch.ones(4), 0.5)
        gripping.filled(torch.ones(2, 2), [])
        gripping.scaled(torch.ones(2, 2), torch.ones(2))
        gripping.Coder.area(torch.ones(2, 4))
    assert tags_of(grips, "kept") == {"InputAware", "AdvancedIndexing", "DataDependentShape", "Reduce"}
    assert tags_of(grips, "filled") == {"InPlace", "Reduce", "ViewAttribute"}
    assert tags_of(grips, "scaled") == {"Broadcast"}
    assert tags_of(grips, "Coder.area") == {"Reduce", "ViewAttribute"}


def test_recursive_and_nested_calls_are_separate_calls() -> None:
    with gripped("halved", calls=9) as grips:
        gripping.halved(torch.ones(2), 2)
    calls = calls_of(grips, "halved")
    # the innermost call ended first
    assert [call.args[1] for call in calls] == [0, 1, 2]
    assert [call.operators for call in calls] == [0, 1, 2]


def test_methods_of_all_kinds_are_gripped() -> None:
    coder = gripping.Coder()
    with gripped("Coder.*") as grips:
        assert coder.decode(torch.ones(1), clip=1.0).tolist() == [1]
        assert gripping.Coder.area(torch.tensor([[0.0, 0, 2, 3]])).tolist() == [6]
        assert coder.area(torch.tensor([[0.0, 0, 2, 3.0]])).tolist() == [6]
        assert gripping.Coder.made(5.0).scale == 5
    assert {item.entry: item.owner for item in grips.functions} == {
        "Coder.decode": gripping.Coder,
        "Coder.area": gripping.Coder,
        "Coder.made": gripping.Coder,
    }
    (call,) = calls_of(grips, "Coder.decode")
    assert call.args[0].calls == 0
    assert call.after is not None
    assert call.after[0][0].calls == 1
    assert calls_of(grips, "Coder.made")[0].args == (gripping.Coder, 5.0)


@pytest.mark.parametrize("name", ["make_adder.add", "make_adder.<locals>.add", "*.<locals>.add"])
def test_nested_functions_are_gripped_when_they_are_created(name: str) -> None:
    code = gripping.make_adder.__code__
    with gripped(name) as grips:
        assert gripping.adds(torch.ones(1)).tolist() == [4]
        gripping.adds(torch.ones(2))
    assert gripping.make_adder.__code__ is code
    assert len(calls_of(grips, "make_adder.<locals>.add")) == 2
    (watched,) = {item.function.__qualname__ for item in grips.functions}
    assert watched == "make_adder.<locals>.add"


def other_names() -> ModuleType:
    module = ModuleType("other_names")
    module.alias = gripping.scaled  # type: ignore[attr-defined]

    class Holder:
        function = gripping.scaled
        static = staticmethod(gripping.scaled)

    module.Holder = Holder  # type: ignore[attr-defined]
    return module


def test_functions_are_gripped_under_all_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    module = other_names()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with gripped("scaled", calls=9) as grips:
        module.alias(torch.ones(1))
        module.Holder.static(torch.ones(2))
        module.Holder.function(torch.ones(3))
    assert len(calls_of(grips, "scaled")) == 3
    assert module.alias is gripping.scaled
    assert module.Holder.static is gripping.scaled
    assert vars(module.Holder)["function"] is gripping.scaled


def test_modules_that_are_loaded_later_are_gripped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "late_functions.py").write_text("SPEC = __spec__.loader\ndef late(boxes):\n    return boxes + 1\n")
    (tmp_path / "late_users.py").write_text("from late_functions import late as other, late\n")
    monkeypatch.syspath_prepend(tmp_path)
    with Grips([parse_pattern("late_*:late")], to=tmp_path) as grips:
        users = importlib.import_module("late_users")
        users.other(torch.ones(1))
        users.late(torch.ones(2))
    assert len(calls_of(grips, "late")) == 2
    assert not hasattr(users.other, "__wrapped__")
    functions = sys.modules.pop("late_functions")
    assert functions.SPEC is functions.__loader__
    del sys.modules["late_users"]


def test_generators_and_coroutines_are_refused_with_the_reason() -> None:
    with gripped("streamed", "awaited", "streamed_later") as grips:
        assert len(list(gripping.streamed(torch.ones(1)))) == 1
        assert asyncio.run(gripping.awaited(torch.ones(1))).tolist() == [1]
    assert grips.refused == {
        "streamed": "it is a generator: a call returns before the work is done",
        "awaited": "it is asynchronous: a call returns before the work is done",
        "streamed_later": "it is asynchronous: a call returns before the work is done",
    }


def test_compiled_and_traced_functions_are_not_disturbed() -> None:
    with gripped("scaled", "Coder.area") as grips:
        compiled = torch.compile(lambda boxes: gripping.scaled(boxes) + 1, backend="eager", fullgraph=True)
        assert compiled(torch.ones(1)).tolist() == [3]
        # to check it, torch would run the original function
        traced = torch.jit.trace(gripping.scaled, torch.ones(1), check_trace=False)
        assert traced(torch.ones(1)).tolist() == [2]
        scripted = torch.jit.script(gripping.scaled)
        assert scripted(torch.ones(1), 3.0).tolist() == [3]
        graph = torch.fx.symbolic_trace(lambda boxes: gripping.scaled(boxes))
        assert graph(torch.ones(1)).tolist() == [2]
        assert torch.func.vmap(gripping.scaled)(torch.ones(2, 2)).tolist() == [[2, 2], [2, 2]]
    assert calls_of(grips, "scaled") == []
    assert lost_of(grips, "scaled") == []


def test_threads_share_the_number_of_wanted_calls() -> None:
    with gripped("scaled", calls=4) as grips:
        threads = [
            threading.Thread(target=lambda rows=rows: gripping.scaled(torch.ones(rows))) for rows in range(1, 17)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(calls_of(grips, "scaled")) == 4


@pytest.mark.parametrize("text", ["delta2bbox", ":f", "module:", "a:b:c", ""])
def test_invalid_function_pattern_is_an_error(text: str) -> None:
    with pytest.raises(UserError, match="is not a pattern for functions"):
        parse_pattern(text)


def test_pattern_without_a_match_is_reported() -> None:
    with gripped("no_such_function") as grips:
        pass
    grips.finish()
    assert grips.refused == {"gripping:no_such_function": "it matches no function that the program loaded"}


def test_function_called_with_empty_tensors_only_is_reported() -> None:
    with gripped("scaled") as grips:
        for columns in (2, 4):
            gripping.scaled(torch.ones(0, columns))
    grips.finish()
    assert grips.refused == {"scaled": "its calls have only empty tensors"}
    assert not grips.written
