"""A sample's folder: the module, its check in a process without the program, the recorded calls, and the tags."""

from __future__ import annotations

import ast
import builtins
import hashlib
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, cached_property, partial
from importlib.metadata import packages_distributions, version
from itertools import count
from pathlib import Path
from typing import Any

import torch

from opgrip.capture.grip.gripped import Gripped, GrippedCall
from opgrip.capture.grip.objects import isolate_from_program, take
from opgrip.capture.grip.source.free_names import COMPREHENSIONS, bound_by, names_of
from opgrip.capture.grip.source.items import ClassItem, ImportItem, pieces_of, reachable
from opgrip.capture.grip.source.live_objects import (
    IMPORTED,
    Everything,
    Import,
    find_definition,
    first_line,
    is_imported,
    is_of_python,
    named_in,
    top_level,
)
from opgrip.capture.grip.source.module import (
    ModuleText,
    Requirements,
    lay_out,
    objects_of,
    owner_of,
    render,
    requirements_of,
)
from opgrip.capture.program.environment import describe_environment
from opgrip.capture.signatures.fitting import Fitter
from opgrip.capture.signatures.full_values import FullValues
from opgrip.capture.signatures.signatures import describe_call
from opgrip.errors import UserError, one_line
from opgrip.traces import Trace, load
from opgrip.traces.io.sample_folder import CALLS, give_free_name, open_sample
from opgrip.traces.io.tensor_file import HEADER_FIELD
from opgrip.traces.io.writer import TraceWriter
from opgrip.traces.schema.arguments import DTYPES, Opaque, TensorSpec, tensors
from opgrip.traces.schema.python_objects import (
    ArraySpec,
    ModuleSpec,
    ObjectSpec,
    ScalarSpec,
    SharedSpec,
    children,
    outline,
)
from opgrip.traces.schema.records import (
    FUNCTION,
    Calls,
    Context,
    Effects,
    End,
    Header,
    Record,
    Scope,
    Signature,
    Thread,
    listed,
)
from opgrip.traces.table.live_calls import LiveArguments

_SECONDS = 300

_PROGRAM = """
import sys

# the sample in the same folder could have the name of a module of Python
sys.path[:] = [place for place in sys.path if place]
import importlib.abc
import importlib.util

path, entry, *blocked = sys.argv[1:]


class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"a sample cannot import {name}, which belongs to the program")


sys.meta_path.insert(0, Blocked())
spec = importlib.util.spec_from_file_location("sample", path)
module = importlib.util.module_from_spec(spec)
# dataclasses look their module up
sys.modules["sample"] = module
spec.loader.exec_module(module)
thing = module
for name in entry.split("."):
    thing = getattr(thing, name)
"""


def check_names(text: str, allowed: Iterable[str]) -> None:
    """Raise `UserError` if the source of a module uses names that it neither defines nor imports."""
    tree = ast.parse(text)
    defined_names = {*vars(builtins), *allowed, "__file__"}
    for statement in tree.body:
        defined_names |= bound_by(statement)
    lost = sorted({use.name for statement in tree.body for use in names_of(statement).uses} - defined_names)
    if lost:
        raise UserError(f"the sample would lack {', '.join(lost)}", "this is a bug of opgrip: please report it")


def check_import(path: Path, entry: str, blocked: Iterable[str]) -> None:
    """Raise `UserError` if a new Python process without the packages `blocked` cannot import a sample's module."""
    names = sorted(set(blocked) - {"__main__"})
    command = [sys.executable, "-c", _PROGRAM, str(path), entry, *names]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, env=environment, cwd=path.parent
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"{path.name} could not be tried in a new Python process", str(error)) from error
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"])[-1]
        raise UserError(f"{path.name} does not run without its project", reason)


def reference_text(gripped: Gripped, origin: str) -> ModuleText:
    owner = owner_of(gripped)
    target = owner if owner is not None else gripped.function
    first = _import_of(target, gripped.entry)
    entry = first.name if owner is None else f"{first.name}.{gripped.entry.rpartition('.')[2]}"
    classes = {
        f"{thing.__module__}:{thing.__qualname__}": thing
        for thing in named_in(objects_of(gripped), Everything())
        if thing is not target and not is_imported(thing.__module__ or "")
    }
    imports = {name: _import_of(thing, name) for name, thing in classes.items()}
    names = [first.name, *dict.fromkeys(one.name for one in imports.values())]
    if len(names) < 1 + len(imports):
        raise UserError(
            f"{gripped.entry} takes objects of two classes with the same name", "grip it without by_reference"
        )
    exported = ", ".join(f'"{name}"' for name in sorted(names))
    text = f'"""{entry} of {origin}, which must be installed."""\n\n{render([first, *imports.values()])}\n\n'
    return ModuleText(
        f"{text}__all__ = [{exported}]\n",
        entry,
        {name: one.name for name, one in imports.items()},
        frozenset(),
        frozenset(top_level(one.module) for one in (first, *imports.values())),
        frozenset(),
    )


def _import_of(thing: Any, what: str) -> Import:
    module, qualname = str(thing.__module__), str(thing.__qualname__)
    if module == "__main__" or "." in qualname:
        raise UserError(f"{what} cannot be imported by its name", "grip it without by_reference")
    live = getattr(sys.modules.get(module), qualname, None)
    if getattr(live, "__qualname__", None) != qualname:
        raise UserError(f"{module} has no {qualname}", "grip it without by_reference")
    return Import(module, qualname, qualname)


_parts = count()


def write_folder(gripped: Gripped, to: Path) -> Path:
    source, dropped = _source(gripped)
    origin = _origin(source)
    if gripped.by_reference:
        module_text, tags = reference_text(gripped, origin), source_tags(gripped.function)
    else:
        requirements = requirements_of(gripped)
        module_text, tags = lay_out(gripped, requirements, origin), tags_of(requirements)
    about = {
        "entry": module_text.entry,
        "tags": sorted(gripped.tags | tags),
        "source": source,
        "by_reference": gripped.by_reference,
        "imports": sorted(module_text.imports),
        "classes": module_text.classes,
        "left_out": module_text.left_out,
        "calls": [
            {"operators": call.operators, "operator_ns": call.operator_ns, "duration_ns": call.duration_ns}
            for call in gripped.calls
        ],
    }
    part = to / f".{gripped.name}.part{os.getpid()}-{next(_parts)}"
    try:
        part.mkdir(parents=True)
        module = part / f"{gripped.name}.py"
        module.write_text(module_text.text, encoding="utf-8")
        if not gripped.by_reference:
            check_names(module_text.text, module_text.absent)
            # a compiled module of one of the packages needs the package
            compiled = module_text.imports - IMPORTED
            blocked = {dropped} - compiled if compiled else set(module_text.projects)
            check_import(module, module_text.entry, blocked)
        write_calls(part, gripped)
        module.unlink()
        return give_free_name(part, to, gripped.name, module_text.text, about)
    except OSError as error:
        raise UserError(f"{to} cannot be written", str(error)) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _source(gripped: Gripped) -> tuple[dict[str, Any], str]:
    definition = find_definition(gripped.function.func if isinstance(gripped.function, partial) else gripped.function)
    module = definition.function.__module__ or "__main__"
    project = _distribution_of(module)
    lines = definition.file.lines[first_line(definition.node) - 1 : definition.node.end_lineno]
    source = {
        "project": project[0] if project is not None else top_level(module),
        "version": project[1] if project is not None else None,
        "module": module,
        "qualname": definition.function.__qualname__,
        "file": _file_within(module, definition.file.name),
        "line": first_line(definition.node),
        "sha256": hashlib.sha256("".join(lines).encode()).hexdigest(),
    }
    return source, top_level(module)


@cache
def _distribution_of(module: str) -> tuple[str, str] | None:
    names = packages_distributions().get(top_level(module), ())
    return next(((name, version(name)) for name in names), None)


def _file_within(module: str, file: str) -> str:
    path, depth = Path(file), module.count(".")
    if path.name == "__init__.py":
        depth += 1
    return "/".join(path.parts[-1 - depth :])


def _origin(source: dict[str, Any]) -> str:
    version = f" {source['version']}" if source["version"] else ""
    project = f"{source['project']}{version} " if source["project"] != "__main__" else ""
    return f"{project}({source['file']}, line {source['line']})"


FOR_LOOP, IF_ELSE, CONTAINERS = "ForLoop", "IfElseBranch", "BuiltInDataStructure"
CUSTOMIZED, THIRD_PARTY = "Customized", "ThirdPartyCodes"

_OF_TORCH = ("torch", "functorch", "torchgen")
# functions and methods that create or fill containers
_MAKERS = ("list", "dict", "set", "tuple", "zip", "append", "extend")


def source_tags(function: Callable[..., Any]) -> frozenset[str]:
    name = getattr(function, "__qualname__", "function")
    try:
        return tags_of(requirements_of(Gripped(function, None, name.rpartition(".")[2], "function", frozenset(), ())))
    except UserError:
        pass
    try:
        return frozenset(_tags_of_node(find_definition(function).node))
    except UserError:
        return frozenset()


def tags_of(requirements: Requirements) -> frozenset[str]:
    # excludes `may_need`: code that may never be called
    uncertain = {needed for item in requirements.items for needed in item.may_need}
    certain = set(reachable(requirements.root, uncertain))
    needed = [item for item in requirements.items if item in certain]
    tags = {tag for item in needed for piece in pieces_of(item) for tag in _tags_of_node(piece.node)}
    if any(isinstance(item, ClassItem) for item in needed):
        tags.add(CUSTOMIZED)
    modules = {item.statement.module for item in needed if isinstance(item, ImportItem)}
    if any(top_level(module) not in _OF_TORCH and not is_of_python(module) for module in modules):
        tags.add(THIRD_PARTY)
    return frozenset(tags)


def _tags_of_node(node: ast.AST) -> Iterator[str]:
    for part in _code_in(node):
        if isinstance(part, (ast.For, ast.AsyncFor, ast.While, *COMPREHENSIONS)):
            yield FOR_LOOP
        if isinstance(part, ast.If | ast.IfExp | ast.Match):
            yield IF_ELSE
        if _is_container(part):
            yield CONTAINERS


def _code_in(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _code_in(child)


def _is_container(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        called = node.func
        return getattr(called, "id", getattr(called, "attr", "")) in _MAKERS and bool(node.args)
    if isinstance(node, ast.Return):
        return isinstance(node.value, ast.Tuple)
    if isinstance(node, ast.List | ast.Set):
        return isinstance(getattr(node, "ctx", ast.Load()), ast.Load) and not all(map(_is_literal, node.elts))
    if isinstance(node, ast.Dict):
        return not all(map(_is_literal, node.values))
    return isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp)


def _is_literal(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) or (isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant))


@dataclass(frozen=True, slots=True)
class Sketch:
    tree: Any


def difference(expected: Any, got: Any) -> str | None:
    with isolate_from_program():
        tree = expected.tree if isinstance(expected, Sketch) else take(expected).tree
        return _difference(tree, take(got).tree, "the result", not isinstance(expected, Sketch))


def _difference(expected: Any, got: Any, where: str, values: bool) -> str | None:
    if isinstance(expected, TensorSpec | torch.Tensor) and isinstance(got, torch.Tensor):
        return _of_tensors(expected, got, where)
    if type(expected) is type(got) and type(expected) in _NUMBERS and not values:
        return None
    if type(expected) is not type(got):
        return f"{where} is {_short(got)}, not {_short(expected)}"
    if isinstance(expected, float | complex):
        return None if _close(expected, got) else f"{where} is {got!r}, not {expected!r}"
    if isinstance(expected, ScalarSpec) and expected.dtype == got.dtype:
        return None if _close(expected.value, got.value) else f"{where} is {got.value!r}, not {expected.value!r}"
    if isinstance(expected, set | frozenset):
        return None if expected == got else f"{where} is {_short(got)}, not {_short(expected)}"
    inner, its = _inner(expected), _inner(got)
    if inner is None or its is None:
        return None if repr(expected) == repr(got) else f"{where} is {_short(got)}, not {_short(expected)}"
    if inner.keys() != its.keys() or _outline(expected) != _outline(got):
        return f"{where} is {_short(got)}, not {_short(expected)}"
    for name, item in inner.items():
        place = where if name == "" else f"{where}{name}"
        if (inner_difference := _difference(item, its[name], place, values)) is not None:
            return inner_difference
    return None


_NUMBERS = (bool, int, float, complex, ScalarSpec)


def _inner(value: Any) -> dict[str, Any] | None:
    match value:
        case dict():
            return {f"[{key!r}]": item for key, item in value.items()}
        case list() | tuple():
            return {f"[{place}]": item for place, item in enumerate(value)}
        case ObjectSpec(_, fields, content):
            held = {f".{name}": item for name, item in fields.items() if not isinstance(item, Opaque)}
            return held if content is None else held | {"": content}
        case ModuleSpec():
            groups = (value.parameters, value.buffers, value.modules, value.fields)
            named = {f".{name}": item for group in groups for name, item in group.items()}
            return {name: item for name, item in named.items() if not isinstance(item, Opaque)}
    inside = children(value)
    return None if inside is None else {"": inside[0]}


def _outline(value: Any) -> Sequence[object]:
    # only the class: fields are compared by their contents
    return outline(value)[:1]


def _of_tensors(expected: TensorSpec | torch.Tensor, got: torch.Tensor, where: str) -> str | None:
    forms = [(tuple(item.shape), item.dtype) for item in (expected, got)]
    if forms[0] != forms[1]:
        return f"{where} is {_short(got)}, not {_short(expected)}"
    if isinstance(expected, TensorSpec):
        return None
    try:
        torch.testing.assert_close(got.cpu(), expected.cpu(), equal_nan=True)
    except AssertionError as error:
        return f"{where}: {' '.join(str(error).split())}"
    return None


def _close(expected: complex, got: complex) -> bool:
    if expected == got or repr(expected) == repr(got):
        return True
    if isinstance(expected, bool | int) or isinstance(got, bool | int):
        return False
    return not math.isnan(abs(expected)) and abs(expected - got) <= 1e-6 + 1.3e-6 * abs(expected)


def _short(value: Any) -> str:
    if isinstance(value, TensorSpec | torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, ArraySpec):
        return f"an array of {_short(value.tensor)}"
    if isinstance(value, ObjectSpec | ModuleSpec):
        return f"a {value.cls.partition(':')[2]}"
    if isinstance(value, SharedSpec):
        return _short(value.value)
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


VALUES = "calls.safetensors"

# maximum number of bytes of full values in one sample; further calls keep only value models and metadata of results
WHOLE_BYTES = 64 << 20


def write_calls(folder: Path, gripped: Gripped) -> None:
    full = FullValues(folder / VALUES, most_bytes=WHOLE_BYTES)
    records: list[Record] = [Thread(0, "MainThread")]
    writing = _Writing(records.append, full)
    for number, call in enumerate(gripped.calls):
        records += writing.records(number, gripped.name, call)
    lost = listed(writing.fitter.without_values)
    end = End(len(gripped.calls), len(gripped.calls), writing.start_ns, without_values=lost)
    fields = {"command": [], "sample": gripped.name, "function": gripped.entry, HEADER_FIELD: VALUES}
    full.finish()
    if full.failure is not None:
        raise UserError(f"{folder / VALUES} could not be written", one_line(full.failure)) from full.failure
    with TraceWriter(folder / CALLS, Header(describe_environment() | fields)) as writer:
        for record in (*records, end):
            writer.write(record)


class _Writing:
    def __init__(self, pend: Callable[[Record], None], full: FullValues) -> None:
        self.fitter = Fitter(pend, count().__next__, full=full)
        self.start_ns = 0
        self._contexts: list[dict[str, Any]] = []

    def records(self, number: int, name: str, call: GrippedCall) -> Iterator[Record]:
        # the random state comes first, because the values of the rest may exhaust the limit
        state = None if call.random_state is None else self._describe(call.random_state)
        args, kwargs = self._describe((call.args, call.kwargs))
        yield Signature(number, FUNCTION, name, args, kwargs, self._describe(call.results))
        after = None if call.after is None else self._describe(call.after)
        yield Effects(number, call.operators, call.operator_ns, after, state)
        if call.settings not in self._contexts:
            self._contexts.append(call.settings)
            context = len(self._contexts) - 1
            yield Context(context, call.settings)
            yield Scope(context, "", "", "forward", context=context)
        scope = self._contexts.index(call.settings)
        yield Calls(0, [number], [scope], [self.start_ns], [call.duration_ns])
        self.start_ns += call.duration_ns

    def _describe(self, value: Any) -> Any:
        tree = take(value).tree
        (described,), _ = describe_call((tree,), {}, lambda place: self._fit)
        return described

    def _fit(self, tensor: torch.Tensor) -> int | None:
        with isolate_from_program():
            return self.fitter.fit(FUNCTION, "", tensor.detach().cpu())


def recorded_calls(folder: Path, classes: Mapping[str, Any]) -> list[GrippedCall]:
    """Return the calls that `write_calls` wrote into a folder, without importing anything that the files name.

    classes : classes and functions of the arguments by name, such as the namespace of the sample's module
    """
    trace = load(folder / CALLS, partial=False, unbounded=True)
    reading = _Reading(trace, classes)
    return [reading.call(signature) for signature in trace.signatures]


class _Reading:
    def __init__(self, trace: Trace, classes: Mapping[str, Any]) -> None:
        self._trace = trace
        self._live = LiveArguments(trace, classes)
        calls = trace.calls.drop_duplicates("signature").set_index("signature")
        self._duration = calls["duration_ns"].to_dict()
        context_of = {scope.number: scope.context for scope in trace.scopes}
        self._context = {number: context_of.get(scope) for number, scope in calls["scope"].to_dict().items()}

    def call(self, signature: Signature) -> GrippedCall:
        number = signature.number
        effects = self._trace.effects.get(number, Effects(number, 0, 0))
        arguments = (signature.args, signature.kwargs)
        whole = self._is_whole([arguments, signature.outputs, effects.after])
        args, kwargs = self._live.make(arguments)
        return GrippedCall(
            args,
            kwargs,
            self._live.make(signature.outputs) if whole else Sketch(signature.outputs),
            self._live.make(effects.after) if whole else None,
            self._live.make(effects.random_state) if self._is_whole(effects.random_state) else None,
            effects.operators,
            effects.operator_ns,
            self._duration.get(number, 0),
            self._trace.contexts.get(self._context.get(number) or 0, {}),
        )

    def _is_whole(self, tree: Any) -> bool:
        return all(map(self._live.is_whole, tensors(tree)))


@contextmanager
def as_it_ran(call: GrippedCall) -> Iterator[None]:
    """Run the block with a recorded call's random state, default dtype, autocast, gradient mode and inference mode."""
    settings = call.settings
    with ExitStack() as stack:
        if call.random_state is not None:
            stack.enter_context(torch.random.fork_rng(devices=[]))
            torch.set_rng_state(call.random_state)
        dtype = DTYPES.get(str(settings.get("default_dtype")))
        if dtype is not None and dtype is not torch.get_default_dtype():
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(dtype)
        for device, _, name in (item.partition(":") for item in str(settings.get("autocast") or "").split(",") if item):
            stack.enter_context(torch.autocast(device, DTYPES.get(name)))
        if settings.get("inference") is True:
            stack.enter_context(torch.inference_mode())
        stack.enter_context(torch.set_grad_enabled(settings.get("grad") is not False))
        yield


class RecordedSample:
    """A sample written by `grip`; the constructor runs its code."""

    def __init__(self, folder: str | Path) -> None:
        self._opened = open_sample(Path(folder))

    @cached_property
    def calls(self) -> list[GrippedCall]:
        return recorded_calls(self._opened.folder, self._opened.classes)

    def difference(self, call: GrippedCall) -> str | None:
        with as_it_ran(call):
            results = self._opened.function(*call.args, **call.kwargs)
        line = difference(call.results, results)
        if line is None and call.after is not None:
            line = difference(call.after, (call.args, call.kwargs))
        return line
