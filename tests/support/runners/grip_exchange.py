"""Runner of samples in a separate Python that cannot import the samples' original projects."""

import dataclasses
import inspect
import json
import sys
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch
from programs import run_python

from opgrip.capture.grip.gripped import Gripped
from opgrip.capture.grip.source.module import ModuleText

ELSEWHERE = ("torch", "numpy", "builtins", "collections", "types", "enum")


@dataclasses.dataclass(frozen=True)
class Named:
    """Class or function by its name, or object by its class and content."""

    name: str
    fields: dict[str, Any] | None = None
    content: Any = None


def packed(value: Any, seen: dict[int, Named] | None = None) -> Any:
    """Return a value with `Named` in place of each class and object of a project, so that it unpickles anywhere."""
    seen = {} if seen is None else seen
    if id(value) in seen:
        return seen[id(value)]
    if isinstance(value, type | FunctionType):
        return Named(value.__qualname__)
    if type(value) in (list, tuple):
        return type(value)(packed(one, seen) for one in value)
    if type(value) is dict:
        return {key: packed(one, seen) for key, one in value.items()}
    if isinstance(value, torch.nn.Module) or type(value).__module__.partition(".")[0] not in ELSEWHERE:
        if isinstance(value, Enum):
            return Named(type(value).__qualname__, None, value.name)
        content = tuple(value) if isinstance(value, tuple) else dict(value) if isinstance(value, dict) else None
        made = seen[id(value)] = Named(type(value).__qualname__, {}, packed(content, seen))
        assert made.fields is not None
        made.fields.update((name, packed(one, seen)) for name, one in getattr(value, "__dict__", {}).items())
        return made
    return value


def unpacked(value: Any, module: ModuleType, seen: dict[int, Any] | None = None) -> Any:
    seen = {} if seen is None else seen
    if id(value) in seen:
        return seen[id(value)]
    if type(value) in (list, tuple):
        return type(value)(unpacked(one, module, seen) for one in value)
    if type(value) is dict:
        return {key: unpacked(one, module, seen) for key, one in value.items()}
    if not isinstance(value, Named):
        return value
    known = getattr(module, value.name, None) or getattr(torch.nn, value.name, None)
    if value.fields is None:
        return known if value.content is None else known[value.content]  # type: ignore[index]
    if known is None:
        # the sample's code reads nothing of it
        return value
    assert isinstance(known, type)
    made = known.__new__(known) if value.content is None else known.__new__(known, value.content)
    seen[id(value)] = made
    if isinstance(made, dict):
        dict.update(made, unpacked(value.content, module, seen))
    fields = {name: unpacked(one, module, seen) for name, one in value.fields.items()}
    object.__setattr__(made, "__dict__", fields)
    return made


def differences(one: Any, other: Any, where: str = "result") -> list[str]:
    if isinstance(one, torch.Tensor):
        same = isinstance(other, torch.Tensor) and one.dtype == other.dtype and one.shape == other.shape
        return [] if same and torch.equal(one.nan_to_num(), other.nan_to_num()) else [f"{where}: {one} is not {other}"]
    if isinstance(one, Named) and isinstance(other, Named):
        found = [] if one.name == other.name else [f"{where}: {one.name} is not {other.name}"]
        return found + differences(one.fields, other.fields, where) + differences(one.content, other.content, where)
    if type(one) is not type(other):
        return [f"{where}: {type(one)} is not {type(other)}"]
    if isinstance(one, list | tuple):
        if len(one) != len(other):
            return [f"{where}: {len(one)} is not {len(other)} long"]
        return [
            text
            for index, pair in enumerate(zip(one, other, strict=True))
            for text in differences(*pair, f"{where}[{index}]")
        ]
    if isinstance(one, dict):
        if one.keys() != other.keys():
            return [f"{where}: {one.keys()} is not {other.keys()}"]
        return [text for key in one for text in differences(one[key], other[key], f"{where}.{key}")]
    same = one == other
    return (
        []
        if (same if isinstance(same, bool) else bool(same.all())) or one != one
        else [f"{where}: {one} is not {other}"]
    )


def write(folder: Path, gripped: Gripped, made: ModuleText) -> None:
    folder.mkdir(parents=True)
    (folder / "sample.py").write_text(made.text)
    calls = [
        (packed(call.args), packed(call.kwargs), packed(call.results), call.random_state) for call in gripped.calls
    ]
    torch.save((made.entry, calls), folder / "calls.pt")


def run_all(folders: Iterable[Path], blocked: Iterable[str]) -> dict[str, list[str]]:
    done = run_python(__file__, ",".join(blocked), *folders, status=0)
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


def run(folder: Path) -> list[str]:
    import importlib.util

    spec = importlib.util.spec_from_file_location(folder.name, folder / "sample.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[folder.name] = module
    try:
        spec.loader.exec_module(module)
        entry, calls = torch.load(folder / "calls.pt", weights_only=False)
        thing: Any = module
        for name in entry.split("."):
            thing = inspect.getattr_static(thing, name)
        function = getattr(thing, "__func__", thing)
        found = []
        for args, kwargs, results, state in calls:
            torch.set_rng_state(state if state is not None else torch.get_rng_state())
            got = function(*unpacked(args, module), **unpacked(kwargs, module))
            found += differences(packed(got), results)
        return found
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]


if __name__ == "__main__":
    sys.modules["grip_exchange"] = sys.modules["__main__"]
    for name in sys.argv[1].split(","):
        sys.modules[name] = None  # type: ignore[assignment]
    print(json.dumps({folder: run(Path(folder)) for folder in sys.argv[2:]}))
