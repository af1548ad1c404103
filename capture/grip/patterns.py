"""Which functions are gripped: `module.glob:qualname.glob`, and where they are found."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import CodeType, FunctionType, ModuleType
from typing import Any, cast

from opgrip.errors import UserError

LOCALS = "<locals>"


@dataclass(frozen=True, slots=True)
class Pattern:
    """Names of functions, as shells match file names.

    Attributes
    ----------
    module : of names of modules that define functions, or of packages that give those of their own modules on
    qualname : of qualified names in them: `delta2bbox`, `Coder.decode`, `make.<locals>.inner`
    """

    module: str
    qualname: str

    def __str__(self) -> str:
        return f"{self.module}:{self.qualname}"

    def matches_module(self, name: str) -> bool:
        """Whether a module of that name may hold what is meant."""
        return fnmatchcase(name, self.module)

    def matches(self, qualname: str) -> bool:
        """Whether a function of that name is meant.

        Methods with two underscores before and after, and functions inside functions, are only where the pattern
        says so.
        """
        last, pattern_last = qualname.rpartition(".")[2], self.qualname.rpartition(".")[2]
        if last.startswith("__") and last.endswith("__") and not pattern_last.startswith("__"):
            return False
        if LOCALS in qualname and LOCALS not in self.qualname:
            return qualname.replace(f".{LOCALS}", "") == self.qualname
        return fnmatchcase(qualname, self.qualname)


def parse_pattern(text: str) -> Pattern:
    """The pattern that a user wrote.

    Raises
    ------
    UserError : for what is none
    """
    module, colon, qualname = text.partition(":")
    if not (module and colon and qualname) or ":" in qualname:
        raise UserError(f"{text!r} names no functions", "write module:function, such as 'mmdet.models.*:delta2bbox'")
    return Pattern(module, qualname)


@dataclass(frozen=True, slots=True)
class Target:
    """A function that a pattern means.

    Attributes
    ----------
    owner : the class that it was found in, None outside of classes
    qualname : what it is called where it was found
    inside : of a function that is made anew whenever another one runs, that one
    inherited : the class has it from another one
    """

    function: FunctionType
    owner: type | None
    qualname: str
    inside: Any = None
    inherited: bool = False


def find_targets(module: ModuleType, patterns: Sequence[Pattern]) -> Iterator[Target]:
    """The functions of a loaded module that the patterns mean.

    Of functions inside others, `function` is the one around them.
    """
    module_patterns = [pattern for pattern in patterns if pattern.matches_module(module.__name__)]
    if module_patterns:
        yield from _in_namespace(vars(module), module.__name__, module_patterns, None, "", set())


def _in_namespace(
    namespace: Any, module: str, patterns: Sequence[Pattern], owner: type | None, prefix: str, visited_ids: set[int]
) -> Iterator[Target]:
    for name, value in list(namespace.items()):
        function = plain_function(value)
        if function is not None and _belongs(function, module):
            qualname = f"{prefix}{name}"
            if any(pattern.matches(qualname) for pattern in patterns):
                yield Target(function, owner, qualname)
            yield from _find_nested(function, qualname, owner, patterns)
        elif issubclass(type(value), type) and _belongs(value, module) and id(value) not in visited_ids:
            visited_ids.add(id(value))
            inner = f"{prefix}{name}."
            yield from _in_namespace(vars(value), value.__module__, patterns, value, inner, visited_ids)
            yield from _find_inherited(value, inner, patterns)


def _find_inherited(cls: type, prefix: str, patterns: Sequence[Pattern]) -> Iterator[Target]:
    """The methods that a pattern names as a class's, and that it has from another class."""
    for pattern in patterns:
        # not where it has a wildcard: then the class that has the method matches too, or should not
        name = pattern.qualname.rpartition(".")[2]
        if pattern.qualname == prefix + name and name not in vars(cls):
            function = plain_function(inspect.getattr_static(cls, name, None))
            if function is not None:
                yield Target(function, cls, pattern.qualname, inherited=True)


def _find_nested(
    function: FunctionType, qualname: str, owner: type | None, patterns: Sequence[Pattern]
) -> Iterator[Target]:
    around = cast(Any, inspect.unwrap(function))
    if not isinstance(around, FunctionType):
        return
    for inner in nested_names(around.__code__, qualname):
        if any(pattern.matches(inner) for pattern in patterns):
            yield Target(around, owner, inner, inside=around)


def nested_names(code: CodeType, qualname: str) -> Iterator[str]:
    """The qualified names of the functions that a function makes when it runs."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType) and not constant.co_name.startswith("<"):
            inner = f"{qualname}.{LOCALS}.{constant.co_name}"
            yield inner
            yield from nested_names(constant, inner)


def plain_function(value: Any) -> FunctionType | None:
    """The Python function that a name of a module or class stands for; None where it is something else."""
    # not isinstance, which asks some values what they say they are
    if type(value) in (staticmethod, classmethod):
        value = value.__func__
    return value if type(value) is FunctionType else None


def _belongs(value: Any, module: str) -> bool:
    """Whether a module defines it, or is the package that gives it on from below."""
    home = getattr(value, "__module__", None)
    return isinstance(home, str) and (home == module or home.startswith(f"{module}."))


def refusal(function: Any) -> str | None:
    """Why a function's calls cannot be kept; None where they can."""
    if isinstance(function, type):
        return "it is a class: name the method with entry="
    if not isinstance(function, FunctionType):
        return f"it is a {type(function).__qualname__}, not a Python function"
    plain = inspect.unwrap(function)
    if inspect.isasyncgenfunction(plain) or inspect.iscoroutinefunction(plain):
        return "it is asynchronous: a call of it gives what has yet to run"
    if inspect.isgeneratorfunction(plain):
        return "it is a generator: a call of it gives what has yet to run"
    return None
