"""Writes the folder of a sample."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from opgrip.capture.grip.gripped import Gripped
from opgrip.capture.grip.source.decorators import find_definition
from opgrip.capture.grip.source.files import first_line
from opgrip.capture.grip.source.module import ModuleText, lay_out, take
from opgrip.capture.grip.source.packages import IMPORTED, distribution_of, file_within, top_level
from opgrip.capture.grip.source.proof import check_import, check_names
from opgrip.capture.grip.source.reference import reference_text
from opgrip.capture.grip.source.tags import source_tags, tags_of
from opgrip.errors import UserError
from opgrip.traces.io.sample_folder import SAMPLE

_parts = count()

_TEST = '''"""Runs {name} on the arguments that were recorded, and compares what it gives with what was recorded."""

from pathlib import Path

import pytest
from opgrip.tools.sample_gripper import RecordedSample

SAMPLE = RecordedSample(Path(__file__).parent)


@pytest.mark.parametrize("call", SAMPLE.calls)
def test_{name}_gives_what_was_recorded(call):
    assert SAMPLE.difference(call) is None
'''


def write_folder(gripped: Gripped, to: Path, write_calls: Callable[[Path], None]) -> Path:
    """Write a sample that stands alone into a folder of its own, and give that.

    Nothing is overwritten: where there is a folder of its name, it is left as it is if it holds the same, and another
    name is taken if not: `delta2bbox_2`.

    Parameters
    ----------
    to : the folder of samples
    write_calls : writes the recorded calls into a folder

    Raises
    ------
    UserError : where the function cannot be taken out, with the reason, or the folder cannot be written
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
    """The packages that the sample has to do without: all whose source it took in.

    Where it imports something compiled of one of them, that needs others of them: then its own project alone.
    """
    compiled = module_text.imports - IMPORTED
    return {own} - compiled if compiled else set(module_text.projects)


def _move_to_free_name(part: Path, to: Path, sample_name: str, text: str, about: dict[str, Any]) -> Path:
    """Give a folder the first name that is free, unless one of these has the same in it already."""
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
            # another process was faster
            if not folder.exists():
                raise
            for file in files:
                (part / file).unlink()
            continue
        return folder
    raise AssertionError


def _holds(folder: Path, text: str, part: Path) -> bool:
    """Whether a folder has a sample of that text with the same calls."""
    try:
        about = json.loads((folder / SAMPLE).read_text(encoding="utf-8"))
        if (folder / about["file"]).read_text(encoding="utf-8") != text:
            return False
        return _calls(folder) == _calls(part)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _calls(folder: Path) -> list[Any]:
    """What the recorded calls of a folder were, without when they ran and how long."""
    records = []
    for path in sorted(folder.glob("calls.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            if record.get("type") not in ("header", "calls", "end"):
                records.append({key: value for key, value in record.items() if not key.endswith("_ns")})
    return records


def _source(gripped: Gripped) -> tuple[dict[str, Any], str]:
    """Where a function comes from, and its top-level package."""
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
