"""Writer of a sample's folder: its module, which is checked to run without the program, its calls, and its tags."""

from __future__ import annotations

import ast
import builtins
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from opgrip.capture.grip.gripped import Gripped
from opgrip.capture.grip.source.free_names import COMPREHENSIONS, bound_by, names_of
from opgrip.capture.grip.source.imports import (
    IMPORTED,
    Import,
    distribution_of,
    file_within,
    is_imported,
    is_of_python,
    render,
    top_level,
)
from opgrip.capture.grip.source.items import ClassItem, ImportItem, pieces_of, reachable
from opgrip.capture.grip.source.live_names import Everything, named_in
from opgrip.capture.grip.source.module import (
    ModuleText,
    Requirements,
    lay_out,
    objects_of,
    owner_of,
    take,
)
from opgrip.capture.grip.source.source_files import find_definition, first_line
from opgrip.errors import UserError
from opgrip.traces.io.sample_folder import SAMPLE

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
    """Raise `UserError` if a module uses names that it neither defines nor imports.

    allowed : names that the original code does not bind either
    """
    tree = ast.parse(text)
    defined_names = {*vars(builtins), *allowed, "__file__"}
    for statement in tree.body:
        defined_names |= bound_by(statement)
    lost = sorted({use.name for statement in tree.body for use in names_of(statement).uses} - defined_names)
    if lost:
        raise UserError(f"the sample would lack {', '.join(lost)}", "this is a bug of opgrip: please report it")


def check_import(path: Path, entry: str, blocked: Iterable[str]) -> None:
    """Raise `UserError` if a new Python process without the packages `blocked` cannot import a sample's module.

    entry : name that the module must define, such as `Coder.decode`
    """
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
    """Return the text of a sample's module that imports the function, and the classes and functions among its
    arguments.

    origin : description of the function's origin, for the docstring
    """
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

_TEST = '''"""Runs {name} on the recorded arguments, and compares its results with the recorded ones."""

from pathlib import Path

import pytest
from opgrip.tools.sample_gripper import RecordedSample

SAMPLE = RecordedSample(Path(__file__).parent)


@pytest.mark.parametrize("call", SAMPLE.calls)
def test_{name}_gives_what_was_recorded(call):
    assert SAMPLE.difference(call) is None
'''


def write_folder(gripped: Gripped, to: Path, write_calls: Callable[[Path], None]) -> Path:
    """Write a sample into a new folder and return the folder.

    An existing folder with the same content is kept; if its content differs, the sample gets a new name such as
    `delta2bbox_2`.

    to : folder in which the sample's folder is created
    write_calls : function that writes the recorded calls into a folder
    """
    source, dropped = _source(gripped)
    module_text, tags = _module(gripped, _origin(source))
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
            check_import(module, module_text.entry, _list_blocked_packages(module_text, dropped))
        write_calls(part)
        module.unlink()
        return _move_to_free_name(part, to, gripped.name, module_text.text, about)
    except OSError as error:
        raise UserError(f"{to} cannot be written", str(error)) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _module(gripped: Gripped, origin: str) -> tuple[ModuleText, frozenset[str]]:
    if gripped.by_reference:
        return reference_text(gripped, origin), source_tags(gripped.function)
    requirements = take(gripped)
    return lay_out(gripped, requirements, origin), tags_of(requirements)


def _list_blocked_packages(module_text: ModuleText, own: str) -> set[str]:
    # a compiled module of one of the packages needs the package
    compiled = module_text.imports - IMPORTED
    return {own} - compiled if compiled else set(module_text.projects)


def _move_to_free_name(part: Path, to: Path, sample_name: str, text: str, about: dict[str, Any]) -> Path:
    for number in count(1):
        name = sample_name if number == 1 else f"{sample_name}_{number}"
        folder = to / name
        if _holds(folder, text, part):
            return folder
        if folder.exists():
            continue
        files = {
            f"{name}.py": text,
            f"test_{name}.py": _TEST.format(name=name),
            SAMPLE: json.dumps({"name": name, "file": f"{name}.py"} | about, indent=2) + "\n",
        }
        for file, content in files.items():
            (part / file).write_text(content, encoding="utf-8")
        try:
            part.rename(folder)
        except OSError:
            # another process took the name first
            if not folder.exists():
                raise
            for file in files:
                (part / file).unlink()
            continue
        return folder
    raise AssertionError


def _holds(folder: Path, text: str, part: Path) -> bool:
    try:
        about = json.loads((folder / SAMPLE).read_text(encoding="utf-8"))
        if (folder / about["file"]).read_text(encoding="utf-8") != text:
            return False
        return _calls(folder) == _calls(part)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _calls(folder: Path) -> list[Any]:
    records = []
    for path in sorted(folder.glob("calls.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            if record.get("type") not in ("header", "calls", "end"):
                records.append({key: value for key, value in record.items() if not key.endswith("_ns")})
    return records


def _source(gripped: Gripped) -> tuple[dict[str, Any], str]:
    definition = find_definition(gripped.function.func if isinstance(gripped.function, partial) else gripped.function)
    module = definition.function.__module__ or "__main__"
    project = distribution_of(module)
    lines = definition.file.lines[first_line(definition.node) - 1 : definition.node.end_lineno]
    source = {
        "project": project[0] if project is not None else top_level(module),
        "version": project[1] if project is not None else None,
        "module": module,
        "qualname": definition.function.__qualname__,
        "file": file_within(module, definition.file.name),
        "line": first_line(definition.node),
        "sha256": hashlib.sha256("".join(lines).encode()).hexdigest(),
    }
    return source, top_level(module)


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
    """Return the tags of a sample, such as `ForLoop`, that follow from the source of a function and its helpers.

    If the source of a helper is missing, only the function's own source counts; without that, the result is empty.
    """
    name = getattr(function, "__qualname__", "function")
    try:
        return tags_of(take(Gripped(function, None, name.rpartition(".")[2], "function", frozenset(), ())))
    except UserError:
        pass
    try:
        return frozenset(_tags_of_node(find_definition(function).node))
    except UserError:
        return frozenset()


def tags_of(requirements: Requirements) -> frozenset[str]:
    """Return the tags, such as `ForLoop`, that follow from the source of everything that a function certainly needs."""
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
