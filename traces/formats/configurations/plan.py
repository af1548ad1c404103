"""All cases of a file of operator configurations, numbered, none of them made before it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from opgrip.errors import one_line
from opgrip.traces.formats.configurations.generators import Generate, generators
from opgrip.traces.formats.configurations.iterators import Expand, iterators
from opgrip.traces.formats.configurations.value_choices import Chain, Choices, Listed, Product
from opgrip.traces.io.foreign_files import Losses

ITERATOR = "DefaultConfigIterator"
GENERATOR = "PyTorch:DefaultDataGenerator"
"""What counts where a file names none, or null."""


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of a `build` or `input` section without macros.

    Attributes
    ----------
    form : with `args` and `kwargs`; None for a `build` section that there is not
    weight : values that the section has for it, which bound what it costs to make its arguments
    repeats : how often the case is called
    """

    form: dict[str, Any] | None
    weight: int = 1
    repeats: int = 1


@dataclass(frozen=True, slots=True)
class Case:
    """One case of an operator, its arguments not yet made."""

    op: str
    build: Entry
    input: Entry
    build_generator: Generate
    input_generator: Generate


@contextmanager
def reasons() -> Iterator[None]:
    """What an iterator or generator raises of an entry that is not what it takes becomes a reason, a `ValueError`."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"an entry that cannot be read ({one_line(error)})") from error


class UnreadableCase(ValueError):
    """That a case cannot be computed, of which operator and why."""

    def __init__(self, op: str, reason: str) -> None:
        super().__init__(reason)
        self.op = op


class _Entries:
    """What an iterator expands one entry of a file into."""

    def __init__(self, form: Any, expand: Expand) -> None:
        if not isinstance(form, dict):
            raise ValueError("an entry that is no object")
        with reasons():
            self._choices = expand(form)
        self._weight = weight_of(form)
        self._repeats = _repeats_of(form)
        self.count = self._choices.count

    def at(self, index: int) -> Entry:
        with reasons():
            form = self._choices.at(index)
        return Entry(form, self._weight, self._repeats)


class _Operator:
    """The cases of an operator."""

    def __init__(self, op: str, pairs: Choices, build_generator: Generate, input_generator: Generate) -> None:
        self._op, self._pairs = op, pairs
        self._build_generator, self._input_generator = build_generator, input_generator
        self.count = pairs.count

    def at(self, index: int) -> Case:
        try:
            build, entry = self._pairs.at(index)
        except ValueError as error:
            raise UnreadableCase(self._op, str(error)) from error
        return Case(self._op, build, entry, self._build_generator, self._input_generator)


def plan_of(operators: Mapping[str, Any], losses: Losses) -> Choices:
    """The cases of all operators, in the order of the file: of each entry of `build` all of `input`.

    What cannot be expanded is counted in `losses`, with the reason.
    """
    return Chain([part for op, info in operators.items() for part in _made(op, losses, _cases_of, op, info, losses)])


def _made(op: str, losses: Losses, make: Callable[..., Choices], *args: Any) -> list[Choices]:
    """What a function makes of its arguments; nothing, and a reason counted, where it cannot."""
    try:
        return [make(*args)]
    except ValueError as error:
        losses.skip(op, str(error))
        return []


def _cases_of(op: str, info: Any, losses: Losses) -> Choices:
    if not isinstance(info, dict) or not isinstance(info.get("config"), list):
        raise ValueError("it has no list of configurations")
    build_iterator = _named(iterators.get, info, "build_iterator", ITERATOR)
    input_iterator = _named(iterators.get, info, "input_iterator", ITERATOR)
    build_generator = _named(generators.get, info, "build_data_generator", GENERATOR)
    input_generator = _named(generators.get, info, "input_data_generator", GENERATOR)

    def pairs_of(config: Any) -> Choices:
        if not isinstance(config, dict) or not isinstance(config.get("input"), list):
            raise ValueError("a configuration without an input section")
        build = config.get("build")
        builds = _expanded(op, build, build_iterator, losses) if build else Listed([Entry(None)])
        return Product([builds, _expanded(op, config["input"], input_iterator, losses)])

    pairs = [part for config in info["config"] for part in _made(op, losses, pairs_of, config)]
    return _Operator(op, Chain(pairs), build_generator, input_generator)


def _named(find: Any, info: dict[str, Any], key: str, default: str) -> Any:
    name = info.get(key) or default
    entry = find(name) if isinstance(name, str) else None
    if entry is None:
        raise ValueError(f"there is no {key} {str(name)[:60]}")
    return entry


def _expanded(op: str, section: Any, expand: Expand, losses: Losses) -> Choices:
    """All entries that a section stands for."""
    if not isinstance(section, list):
        raise ValueError("a section that is no list")
    return Chain([part for form in section for part in _made(op, losses, _Entries, form, expand)])


def _repeats_of(form: dict[str, Any]) -> int:
    repeats = form.get("count", 1)
    if type(repeats) is not int or repeats < 1:
        raise ValueError("a count that is none")
    return repeats


def weight_of(form: Any) -> int:
    """How many values there are in some JSON."""
    weight, level = 0, [form]
    while level:
        weight += len(level)
        level = [child for item in level for child in _children(item)]
    return weight


def _children(item: Any) -> Iterable[Any]:
    if isinstance(item, dict):
        return item.values()
    return item if isinstance(item, list) else ()
