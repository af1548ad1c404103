"""Tests of where calls come from: modules, functions and their qualified names, lines, phases, settings."""

import inspect
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch
from foreign_data import write_as
from programs import captured, succeed
from torch import nn
from torch.profiler import record_function

from opgrip.capture.program import places as qualified_names
from opgrip.capture.program.places import qualified_name
from opgrip.traces import Trace, load


def by_op(trace: Trace, *columns: str) -> dict[str, tuple[Any, ...]]:
    names = trace.calls["op"].astype(str)
    return dict(zip(names, trace.calls[list(columns)].itertuples(index=False, name=None), strict=True))


def line_of(function: Any, text: str) -> int:
    lines, start = inspect.getsourcelines(function)
    return start + next(place for place, line in enumerate(lines) if text in line)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).exp().sum()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = Head()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head.loss(x.sin())


def test_calls_have_the_line_of_the_program_that_made_them(tmp_path: Path) -> None:
    def program() -> None:
        x = torch.ones(3)
        nn.functional.gelu(x)

    trace = captured(tmp_path, program)
    gelu = by_op(trace, "function", "file", "line")["aten.gelu.default"]
    assert gelu[0].endswith("program")
    assert gelu[1].endswith("test_scopes.py")
    assert gelu[2] == line_of(program, "gelu")


def test_callers_are_recorded_up_to_the_stack_depth(tmp_path: Path) -> None:
    def inner() -> torch.Tensor:
        return torch.ones(3)

    def program() -> None:
        inner()

    trace = captured(tmp_path, program, stack_depth=3)
    (scope,) = trace.scopes
    assert len(scope.callers) == 2
    assert scope.callers[0].endswith("program")


def test_method_other_than_forward_belongs_to_its_module(tmp_path: Path) -> None:
    model = Model()
    trace = captured(tmp_path, lambda: model(torch.ones(2, 3)), model=model)
    modules = by_op(trace, "module")
    assert modules["aten.sin.default"] == ("",)
    assert modules["aten.exp.default"] == ("head",)
    assert modules["aten.addmm.default"] == ("head.linear",)


def test_backward_calls_have_the_scope_of_their_forward_call(tmp_path: Path) -> None:
    model = Model()

    def program() -> None:
        loss = model(torch.ones(2, 3))
        loss.backward()

    trace = captured(tmp_path, program, model=model)
    backward = trace.calls[trace.calls["phase"] == "backward"]
    found = {row.op: (row.module, row.line, row.own_module) for row in backward.itertuples()}
    assert found["aten.mm.default"] == ("head.linear", line_of(Head.loss, "exp"), "")
    assert found["aten.mul.Tensor"] == ("head", line_of(Head.loss, "exp"), "")
    origins = {scope.number: scope for scope in trace.scopes}
    paired = [scope for scope in trace.scopes if scope.forward is not None]
    assert paired
    assert all(origins[scope.forward].phase == "forward" for scope in paired if scope.forward is not None)


class Sharpness(torch.optim.SGD):
    """An optimizer that runs a closure, and a model of its own, before each of two steps of another one."""

    def __init__(self, parameters: Any, inner: torch.optim.Optimizer, model: nn.Module) -> None:
        super().__init__(parameters, lr=0.1)
        self.inner, self.model = inner, model

    @torch.no_grad()
    def step(self, closure: Any) -> None:  # type: ignore[override]
        for _ in range(2):
            with torch.enable_grad():
                closure()
                self.model(torch.ones(3, requires_grad=True)).sum().backward()
            self.inner.step(closure=closure)
            torch.ones(2).atan()


class Closure:
    def __init__(self, weight: nn.Parameter) -> None:
        self.weight = weight

    def __call__(self) -> torch.Tensor:
        self.weight.grad = None
        loss = self.weight.sinh().sum()
        loss.backward()
        return loss


@pytest.mark.parametrize("name", ["Adam", "LBFGS", "Sharpness"])
def test_only_calls_of_an_optimizer_itself_have_its_phase(tmp_path: Path, name: str) -> None:
    weight = nn.Parameter(torch.ones(3))
    closure = Closure(weight)
    if name == "Sharpness":
        optimizer: Any = Sharpness([weight], torch.optim.Adam([weight]), nn.Tanhshrink())
    else:
        optimizer = getattr(torch.optim, name)([weight])
    calls = captured(tmp_path, lambda: [optimizer.step(closure) for _ in range(2)]).calls
    phases = {op: {*rows["phase"]} for op, rows in calls.groupby("op", observed=True)}
    assert phases["aten.sinh.default"] == {"forward"}
    assert phases["aten.cosh.default"] == {"backward"}
    assert phases.get("aten.tanh.default", {"forward"}) == {"forward"}
    for op in {"LBFGS": ["neg"], "Adam": ["sqrt"], "Sharpness": ["sqrt", "atan"]}[name]:
        assert phases[f"aten.{op}.default"] == {"optimizer"}


def test_step_that_fails_in_its_closure_leaves_both_phases(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.ones(3))

    def closure() -> float:
        weight.sin().sum().backward()
        raise ValueError("no loss")

    def program() -> None:
        for _ in range(2):
            with pytest.raises(ValueError, match="no loss"):
                torch.optim.SGD([weight], lr=0.1).step(closure)
            torch.ones(2).atan()

    phase = by_op(captured(tmp_path, program), "phase")
    assert [phase[f"aten.{op}.default"][0] for op in ("sin", "cos", "atan")] == ["forward", "backward", "forward"]


def test_backward_passes_without_nodes_are_backward(tmp_path: Path) -> None:
    from torch.distributed import autograd

    autograd._init(0)
    weight = torch.ones(3, requires_grad=True)
    engine = torch.autograd.Variable._execution_engine
    weight.register_hook(lambda gradient: engine.queue_callback(lambda: torch.ones(2).atan()))

    def program() -> None:
        for _ in range(2):
            weight.sin().sum().backward()
            torch.ones(2).acos()
            with autograd.context() as number:
                autograd.backward(number, [weight.tan().sum()])
            torch.ones(2).acos()

    calls = captured(tmp_path, program).calls
    phases = {op: {*rows["phase"]} for op, rows in calls.groupby("op", observed=True)}
    assert phases["aten.acos.default"] == phases["aten.tan.default"] == {"forward"}
    # atan is called when the engine has run all nodes, pow by the distributed pass
    assert phases["aten.cos.default"] == phases["aten.atan.default"] == phases["aten.pow.Tensor_Scalar"] == {"backward"}


def test_backward_is_paired_in_the_thread_that_runs_it(tmp_path: Path) -> None:
    losses = []

    def forward() -> None:
        losses.append(torch.ones(3, requires_grad=True).sin().sum())

    def program() -> None:
        for target in (forward, lambda: losses[0].backward()):
            thread = threading.Thread(target=target)
            thread.start()
            thread.join()

    trace = captured(tmp_path, program)
    backward = trace.calls[(trace.calls["phase"] == "backward") & (trace.calls["op"] == "aten.cos.default")]
    assert backward["line"].tolist() == [line_of(forward, "sin")]


def test_settings_are_recorded_where_they_change(tmp_path: Path) -> None:
    x = torch.ones(4, 4)

    def program() -> None:
        x.sin()
        with torch.no_grad():
            x.cos()
        with torch.inference_mode():
            x.tan()
        with torch.autocast("cpu", torch.bfloat16):
            x @ x

    trace = captured(tmp_path, program)
    context_of = {scope.number: trace.contexts[scope.context] for scope in trace.scopes if scope.context is not None}
    settings = {row.op: context_of[row.scope] for row in trace.calls.itertuples()}
    assert settings["aten.sin.default"]["grad"]
    assert not settings["aten.cos.default"]["grad"]
    assert settings["aten.tan.default"]["inference"]
    assert settings["aten.mm.default"]["autocast"] == "cpu:bfloat16"
    assert settings["aten.sin.default"]["threads"] == torch.get_num_threads()


def test_settings_that_change_between_steps_are_recorded(tmp_path: Path) -> None:
    model, x = nn.ReLU(), torch.ones(3)

    def program() -> None:
        for deterministic in (False, True):
            torch.use_deterministic_algorithms(deterministic)
            for _ in range(10):
                model(x)
        torch.use_deterministic_algorithms(False)

    trace = captured(tmp_path, program)
    settings = {scope.number: trace.contexts[scope.context] for scope in trace.scopes if scope.context is not None}
    assert [settings[scope]["deterministic"] for scope in trace.calls["scope"]] == [False] * 10 + [True] * 10


def overlap_labels() -> None:
    x = torch.ones(3)
    for _ in range(2):
        first, second = record_function("first"), record_function("second")
        fast = torch._C._profiler._RecordFunctionFast("fast", [x])
        first.__enter__()
        second.__enter__()
        x.sin()
        first.__exit__(None, None, None)
        x.cos()
        with record_function("around"):
            fast.__enter__()
            second.__exit__(None, None, None)
            x.tan()
            fast.__exit__(None, None, None)
            x.atan()
    moved = record_function("moved")
    moved.__enter__()
    thread = threading.Thread(target=lambda: (x.acos(), moved.__exit__(None, None, None)))
    thread.start()
    thread.join()
    x.asin()
    # these two are never closed, and one has the name of an inner label
    moved.__enter__()
    first.__enter__()
    with record_function("moved"):
        x.exp()


def operators_by_label(trace: Trace) -> dict[str, str]:
    operators = {}
    for label in trace.labels.index:
        inside = trace.calls["op"][trace.within_labels(label.__eq__)]
        operators[label] = " ".join(op.split(".")[1] for op in inside if op.startswith("aten"))
    return operators


def test_overlapping_fast_and_moved_labels_contain_their_calls(tmp_path: Path) -> None:
    trace = captured(tmp_path, overlap_labels)
    assert trace.labels.to_dict() == {"first": 3, "moved": 3, "second": 2, "around": 2, "fast": 2}
    expected = {"around": "tan atan tan atan", "fast": "tan tan", "second": "sin cos sin cos", "moved": "exp"}
    assert operators_by_label(trace) == expected | {"first": "sin sin exp"}
    write_as("execution_trace", trace, tmp_path / "et.json")
    assert operators_by_label(load(tmp_path / "et.json")) == operators_by_label(trace)
    hidden = captured(tmp_path, overlap_labels, private=True)
    assert sorted(operators_by_label(hidden).values()) == sorted(operators_by_label(trace).values())
    assert "moved" not in (tmp_path / "t.jsonl").read_text(encoding="utf-8")


def test_method_lookup_keeps_no_local_variable_alive(tmp_path: Path) -> None:
    import weakref

    class Frees(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.sin()
            alive = weakref.ref(y)
            z = y.cos()
            del y
            assert alive() is None
            return z

    model = Frees()
    captured(tmp_path, lambda: [model(torch.ones(3)) for _ in range(3)])


def test_custom_autograd_function_is_not_confused_with_later_calls(tmp_path: Path) -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient.asinh()

    def program() -> None:
        y = Double.apply(torch.ones(3, requires_grad=True))
        torch.zeros(3)
        y.sin().sum().backward()

    calls = captured(tmp_path, program).calls
    found = {row.op: row.line for row in calls.itertuples() if row.phase == "backward"}
    assert found["aten.cos.default"] == line_of(program, "sin()")
    assert found["aten.asinh.default"] != line_of(program, "zeros")


def test_lines_of_similar_layers_are_distinguished(tmp_path: Path) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = self.q(x).view(2, 2, 2)
            k = self.k(x).view(2, 2, 2)
            return q + k

    model = Attention()
    calls = captured(tmp_path, lambda: [model(torch.ones(2, 4)) for _ in range(20)]).calls
    views = calls[calls["op"] == "aten.view.default"]["line"].value_counts().to_dict()
    assert views == {line_of(Attention.forward, "self.q(x)"): 20, line_of(Attention.forward, "self.k(x)"): 20}


MODEL = """
import torch
from torch import nn

def factory():
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1), torch.rand(1, 4, 8)
"""


def test_functions_of_opgrip_are_not_in_scopes(tmp_path: Path) -> None:
    text = MODEL + "\nif __name__ == '__main__':\n    net, rows = factory()\n    net(rows)\n"
    (tmp_path / "encoder.py").write_text(text, encoding="utf-8")
    succeed("opcapture", "-o", "t.jsonl", "--", "encoder.py", cwd=tmp_path)
    scopes = load(tmp_path / "t.jsonl").scopes
    assert {scope.function for scope in scopes} <= {"", "<module>", "factory", "deepcopy"}
    assert not any("opgrip" in scope.file or "bin/" in scope.file for scope in scopes)


def plain() -> None:
    pass


def outer() -> list[Callable[..., Any]]:
    class Inner:
        def method(self) -> Callable[[], None]:
            def deepest() -> None:
                pass

            return deepest

        @staticmethod
        def decorated() -> None:
            pass

    return [Inner.method, Inner().method(), Inner.decorated, lambda: None]


class WithForward:
    def forward(self) -> None:
        pass


def code_of(function: Callable[..., Any]) -> CodeType:
    code: CodeType = function.__code__  # type: ignore[attr-defined]
    return code


def test_qualified_name_equals_that_of_the_function() -> None:
    for function in (plain, outer, *outer(), WithForward.forward):
        assert qualified_name(code_of(function), globals()) == function.__qualname__


def test_qualified_name_is_read_from_the_source_if_code_lacks_it() -> None:
    names = qualified_names._names(__file__)
    for function in (plain, outer, *outer(), WithForward.forward):
        code = code_of(function)
        assert names[code.co_name, code.co_firstlineno] == function.__qualname__


def test_plain_name_is_used_without_a_source() -> None:
    scope: dict[str, Any] = {}
    exec(compile("class A:\n    def f(self): pass\n", "<nowhere>", "exec"), scope)
    expected = "A.f" if sys.version_info >= (3, 11) else "f"
    assert qualified_name(code_of(scope["A"].f), scope) == expected
