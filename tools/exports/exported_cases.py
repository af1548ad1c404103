"""Scripts, which need only torch, that run a call, the recorded operators of a module, or a gripped sample."""

from __future__ import annotations

import ast
import keyword
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from opgrip.cli.command import counted
from opgrip.errors import UserError
from opgrip.replay.cases.call_sites import module_of
from opgrip.replay.cases.cases import Case, make_cases
from opgrip.replay.cases.selection import MODULE, Selection
from opgrip.replay.cases.subgraph_calls import Links, Outside, ResultOf, is_setting
from opgrip.replay.cases.subgraphs import SubgraphOperator, make_units, paths_of
from opgrip.replay.inputs.filling import drawn_values, with_defaults
from opgrip.replay.operators.lookup import Unsupported, find_operator
from opgrip.traces import Trace, load
from opgrip.traces.io.sample_folder import CALLS, SampleFolder
from opgrip.traces.schema.arguments import Opaque, TensorSpec, tensors
from opgrip.traces.schema.python_objects import (
    ArraySpec,
    ModuleSpec,
    NamedSpec,
    ObjectSpec,
    SameSpec,
    SharedSpec,
    children,
)
from opgrip.traces.schema.records import FUNCTION, Signature
from opgrip.traces.scripts.literals import Literals, plain, plain_tuple, sizes
from opgrip.traces.scripts.script import ScriptFunction, operator_source, registered_operator, script_of
from opgrip.traces.scripts.templates import FUNCTIONS, OBJECTS, RESERVED

PHASES = ("forward", "backward", "optimizer")


def export_case(trace: Trace, number: int, mode: str = "eager") -> str:
    """Return the source of a script that runs one call of a trace.

    number : number of the call's signature in the trace
    """
    case = next((case for case in make_cases(trace) if case.trace_number == number), None)
    if case is None:
        raise UserError(f"the trace has no signature {number}", "opreplay --list lists the cases")
    return source_of(trace, case, mode)


def source_of(trace: Trace, case: Case, mode: str = "eager") -> str:
    signature = next(item for item in trace.signatures if item.number == case.trace_number)
    _check_may_run(signature)
    signature, values = with_defaults(signature, trace.values)
    return script_of(signature, values, case.context, list(_facts(trace, case)), mode=mode)


def _check_may_run(signature: Signature) -> None:
    try:
        find_operator(signature, extensions=())
    except Unsupported as error:
        raise UserError(f"{signature.op} cannot be written to a script", str(error)) from error


def _facts(trace: Trace, case: Case) -> list[str]:
    model = trace.header.get("model")
    name = model.get("name") if isinstance(model, dict) else None
    origin = f" of {name}" if isinstance(name, str) else ""
    took = f", {case.captured_us:,.1f} us each (median)" if case.captured_us else ""
    module = module_of(case.call_sites)
    where = f" in {module}" if module else ""
    torch = trace.header.get("torch")
    what = f"signature {case.trace_number}" if case.operator is None else case.op
    return [
        f"{what}{origin}: {counted(case.count, 'call')}{where}, {case.phase}{took}",
        *([f"captured with torch {torch}"] if isinstance(torch, str) else []),
    ]


def export_unit(trace: Trace, name: str, unit: str, mode: str) -> tuple[str, str]:
    """Return a description of a module or function, and the source of a script that runs its recorded operators.

    name : path of a module, or `file:function`, followed by the phase unless it is forward
    """
    words = name.split() or [""]
    phase = words[-1] if words[-1] in PHASES else PHASES[0]
    name = words[0]
    selection = Selection(unit=unit, module=(name,)) if unit == MODULE else Selection(unit=unit, op=(name,))
    units = [case for case in make_units(trace, selection, unit) if case.phase == phase]
    if not units:
        raise UserError(f"{name} has no calls in the phase {phase}", f"name another one: {', '.join(PHASES)}")
    case = units[0]
    assert isinstance(case.operator, SubgraphOperator)
    function = _function_of(case.operator.links)
    of_several = f", the longest of {len(units)} kinds of calls" if len(units) > 1 else ""
    what = f"{case.op}, from its {counted(len(case.operator.links.calls), 'recorded operator')}{of_several},"
    return what, script_of(case.signature, trace.values, case.context, _facts(trace, case), function, mode)


def _function_of(links: Links) -> ScriptFunction:
    settings = {leaf: f"s{place}" for place, leaf in enumerate(links.settings)}
    return ScriptFunction(
        "The recorded operators of a module or function, as one function.",
        f"\n\n{recorded_source(links, 'OPERATOR', settings, [*settings.values()])}",
        links.mutates,
        any(call.varies for call in links.calls),
    )


def recorded_source(links: Links, name: str, settings: Mapping[Any, str], others: Sequence[str] = ()) -> str:
    """Return the source of a function that makes the recorded calls of a subgraph.

    settings : source of each device, dtype and generator among the arguments
    """
    if links.reason is not None:
        raise UserError("these calls cannot run as one function", links.reason)
    names = [f"x{place}" for place in range(len(links.outside))]
    lines = [f"    {line}" for line in _calls(links, settings)]
    results = plain_tuple([_source_of_tensor(output, links) for output in links.outputs])
    docstring = '    """Return what the recorded operators return, in their order."""'
    return "\n".join([f"def {name}({', '.join([*names, *others])}):", docstring, *lines, f"    return {results}"])


def _calls(links: Links, settings: Mapping[Any, str]) -> Iterator[str]:
    for index, (call, sources) in enumerate(zip(links.calls, links.sources, strict=True)):
        signature, rest = call.signature, iter(sources)
        registered_operator(signature)
        _check_may_run(signature)
        # names become code, and a trace may be untrusted
        for name in signature.kwargs:
            if not (name.isascii() and name.isidentifier()) or keyword.iskeyword(name):
                raise UserError(f"{name!r} cannot be the name of an argument in Python", "choose another case")
        writer = _CallLiterals(lambda _, rest=rest: _source_of_tensor(next(rest), links), settings)  # type: ignore[misc]
        positional = [writer.of(value) for value in signature.args]
        named = [f"{name}={writer.of(value)}" for name, value in signature.kwargs.items()]
        yield f"r{index} = {operator_source(signature.op)}({', '.join([*positional, *named])})"


class _CallLiterals(Literals):
    def __init__(self, tensor: Callable[[TensorSpec], str], settings: Mapping[Any, str]) -> None:
        super().__init__(tensor, "")
        self._settings = settings

    def of(self, value: Any) -> str:
        return self._settings[value] if is_setting(value) else super().of(value)


def _source_of_tensor(source: Any, links: Links) -> str:
    if isinstance(source, Outside):
        return f"x{source.place}"
    if isinstance(source, ResultOf):
        path = paths_of(links.calls[source.call].signature.outputs)[source.place]
        return f"r{source.call}{''.join(f'[{plain(key)}]' for key in path)}"
    spec = source.spec
    return (
        f"{_source_of_tensor(source.base, links)}.as_strided({sizes(spec.shape)}, {sizes(spec.stride)}, {spec.offset})"
    )


def export_sample(sample: SampleFolder, number: int, mode: str) -> tuple[str, str]:
    trace = load(sample.folder / CALLS, partial=False, unbounded=True)
    calls = [signature for signature in trace.signatures if signature.kind == FUNCTION]
    if number >= len(calls):
        raise UserError(
            f"{sample.folder} has {counted(len(calls), 'call')}, and none numbered {number}", "count from 0"
        )
    text = (sample.folder / sample.file).read_text(encoding="utf-8")
    source = _without_head(text, sample.name)
    title = f"Call {number} of {sample.name}, from its source."
    function = ScriptFunction(
        title,
        f"\n{source}\n\n\nOPERATOR = getattr({sample.entry}, '__func__', {sample.entry})",
        mutates=False,
        is_dynamic=True,
        preamble=f'"""{title} This script only needs torch."""\n\nfrom __future__ import annotations\n',
        helpers=[OBJECTS.rstrip()],
    )
    writer = partial(_SampleLiterals, names=sample.classes)
    facts = [f"{sample.origin}, extracted with its classes and helpers"]
    script = script_of(calls[number], drawn_values(trace), {}, facts, function, mode, writer)
    return f"call {number} of {sample.origin}, from its source,", script


def _without_head(text: str, name: str) -> str:
    tree = ast.parse(text)
    lines = text.splitlines()
    for statement in tree.body:
        is_docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if is_docstring or (isinstance(statement, ast.ImportFrom) and statement.module == "__future__"):
            for line in range(statement.lineno - 1, statement.end_lineno or statement.lineno):
                lines[line] = ""
        elif isinstance(statement, ast.FunctionDef | ast.ClassDef) and statement.name in {*RESERVED, *FUNCTIONS}:
            raise UserError(f"{name} defines {statement.name}, a name that the script uses", "run it with opreplay")
    modules = {
        module.partition(".")[0]
        for node in ast.walk(tree)
        for module in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    if others := sorted(modules - {"torch"} - sys.stdlib_module_names):
        raise UserError(f"{name} needs {', '.join(others)}", "run it with opreplay, or export its recorded operators")
    return "\n".join(lines).strip()


class _SampleLiterals(Literals):
    def __init__(self, tensor: Callable[[TensorSpec], str], main_device: str, names: Mapping[str, str]) -> None:
        super().__init__(tensor, main_device)
        self._names = names

    def of(self, value: Any) -> str:
        match value:
            case ObjectSpec(cls, fields, content):
                parts = [self._name(cls), self._fields(fields), *([] if content is None else [self.of(content)])]
                return f"make_object({', '.join(parts)})"
            case ModuleSpec(cls, parameters, buffers, modules, fields):
                groups = map(self._fields, (parameters, buffers, modules, fields))
                return f"make_module({', '.join([self._name(cls), *groups])})"
            case ArraySpec(tensor):
                return f"{self.of(tensor)}.numpy()"
            case NamedSpec(name):
                return self._name(name)
            case SharedSpec(number, inner):
                return f"keep({number}, {self.of(inner)})"
            case SameSpec(number):
                return f"SHARED[{number}]"
            case set() | frozenset():
                return f"{type(value).__name__}([{', '.join(sorted(map(self.of, value)))}])"
        return super().of(value)

    def _fields(self, fields: Mapping[str, Any]) -> str:
        parts = []
        for name, value in fields.items():
            if self._is_possible(value):
                parts.append(f"{plain(name)}: {self.of(value)}")
            else:
                # its tensors are made as well, and numbered
                for spec in tensors(value):
                    self._tensor(spec)
        return f"{{{', '.join(parts)}}}"

    def _is_possible(self, value: Any) -> bool:
        match value:
            case ObjectSpec(name) | ModuleSpec(name) | NamedSpec(name):
                if self._find(name) is None:
                    return False
            case Opaque():
                return False
        return all(map(self._is_possible, children(value) or ()))

    def _name(self, name: str) -> str:
        expression = self._find(name)
        if expression is None:
            raise UserError(f"{name} is not part of the sample", "run it with opreplay")
        return expression

    def _find(self, name: str) -> str | None:
        module, _, qualname = name.partition(":")
        if name in self._names:
            return self._names[name]
        if not all(part.isidentifier() for part in (*module.split("."), *qualname.split("."))):
            return None
        if module == "builtins":
            return qualname
        return f"{module}.{qualname}" if module.partition(".")[0] in ("torch", "collections") else None
