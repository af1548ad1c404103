"""The folder of a sample: a Python function that runs on its own, with the arguments of recorded calls."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from itertools import count
from pathlib import Path
from typing import Any

from opgrip.cli.output_files import read_input
from opgrip.errors import FormatError, UserError, one_line

SAMPLE, CALLS = "sample.json", "calls.jsonl"
OPENED = "opgrip_sample_"  # start of the names of samples' modules, which could be those of installed packages
MOST_BYTES = 1 << 20  # maximum number of bytes of `sample.json`, which has only a few lines


@dataclass(frozen=True, slots=True)
class OpenSample:
    """A sample whose code is loaded.

    function : takes the recorded arguments; for a method, the first argument is the object or class
    """

    folder: Path
    name: str
    function: Callable[..., Any]
    classes: Mapping[str, Any]
    origin: str = ""
    tags: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class SampleFolder:
    """The content of a sample's `sample.json`.

    entry : qualified name of the function in `file`, such as `Coder.decode`
    classes : for each class in the recorded calls, as `module:qualname`, its name in `file`
    origin : `module:qualname` of the original function, by which traces name its calls
    """

    folder: Path
    name: str
    entry: str
    file: str
    classes: Mapping[str, str]
    origin: str
    tags: frozenset[str]


def open_sample(folder: Path) -> OpenSample:
    """Load the code of a sample. This executes the code, so the folder must be trusted."""
    about = read_sample(folder)
    spec = spec_from_file_location(OPENED + about.name, folder / about.file)
    assert spec is not None, "it is a .py file"
    assert spec.loader is not None, "it is a .py file"
    module = module_from_spec(spec)
    # dataclasses look up their module in `sys.modules`
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
        thing: Any = module
        for part in about.entry.split("."):
            thing = inspect.getattr_static(thing, part)
        classes = {full: getattr(module, short) for full, short in about.classes.items()}
    except Exception as error:
        raise UserError(f"the code of the sample {about.name} cannot be loaded", one_line(error)) from error
    if isinstance(thing, property):
        thing = thing.fget
    function = getattr(thing, "__func__", thing)
    return OpenSample(folder, about.name, function, vars(module) | classes, about.origin, about.tags)


def read_sample(folder: Path) -> SampleFolder:
    try:
        about = json.loads(read_input(folder / SAMPLE, MOST_BYTES, "grip it again"))
        _check("an object", isinstance(about, dict))
        for key in ("name", "entry", "file"):
            _check(f"{key} as a text", isinstance(about[key], str))
        file_name = about["file"]
        is_own = file_name.endswith(".py") and not {"/", "\0"} & set(file_name)
        _check("file as the name of a .py file in the same folder", is_own)
        classes = about["classes"]
        are_texts = isinstance(classes, dict) and all(isinstance(text, str) for text in classes.values())
        _check("classes as texts by name", are_texts)
        _check("source as an object", isinstance(about["source"], dict))
        origin = ":".join(str(about["source"][key]) for key in ("module", "qualname"))
        tags = frozenset(map(str, about.get("tags", ())))
        return SampleFolder(folder, about["name"], about["entry"], file_name, classes, origin, tags)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{folder} is not a sample", one_line(error)) from error


def _check(form: str, holds: bool) -> None:
    if not holds:
        raise FormatError(f"{SAMPLE}: expected {form}")


_TEST = '''"""Runs {name} on the recorded arguments, and compares its results with the recorded ones."""

from pathlib import Path

import pytest
from opgrip.tools.sample_gripper import RecordedSample

SAMPLE = RecordedSample(Path(__file__).parent)


@pytest.mark.parametrize("call", SAMPLE.calls)
def test_{name}_gives_what_was_recorded(call):
    assert SAMPLE.difference(call) is None
'''


def give_free_name(part: Path, to: Path, sample_name: str, text: str, about: dict[str, Any]) -> Path:
    """Complete the folder `part`, which has a sample's calls, and give it the sample's name or a numbered one in `to`.

    text, about : source of the sample's module, and fields of its `sample.json`
    """
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


def _calls(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / CALLS).read_text(encoding="utf-8").splitlines()
    records = [record for record in map(json.loads, lines) if record.get("type") not in ("header", "calls", "end")]
    return [{key: value for key, value in record.items() if not key.endswith("_ns")} for record in records]
