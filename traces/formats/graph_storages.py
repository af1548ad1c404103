"""Which values of a graph lie in the same memory, where a file has values by name and operators by their schemas.

While a call is put together, `TensorSpec.storage` of its tensors is a number of the whole graph; `split` makes of it
what a signature and a call hold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from opgrip.traces.formats.overloads import schemas_of
from opgrip.traces.schema.arguments import TensorSpec, map_leaves, tensors
from opgrip.traces.schema.records import NO_STORAGE


@dataclass(slots=True)
class Storages:
    """Numbers of memory by the names of a graph's values."""

    numbers: dict[str, int] = field(default_factory=dict)
    count: int = 0

    def of(self, name: str) -> int:
        """That of a value; a new one where it has none, as a graph's inputs."""
        if name not in self.numbers:
            self.numbers[name] = self.count
            self.count += 1
        return self.numbers[name]

    def give(self, name: str, shared: int | None) -> int:
        """That of a result: the memory that it shares, or its own."""
        if shared is None:
            self.numbers.pop(name, None)
            return self.of(name)
        self.numbers[name] = shared
        return shared


def aliases(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int | None]:
    """For each result of an operator, the memory of the argument that it is a view of, or that it is.

    Parameters
    ----------
    args, kwargs : trees of values and of `TensorSpec` whose `storage` is a number of the whole graph
    """
    schemas = schemas_of(op)
    if not schemas:
        return []
    (schema, *_) = schemas
    memory: dict[str, int] = {}
    for place, parameter in enumerate(schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(parameter.name)
        first = next(tensors(value), None)
        if first is not None and first.storage is not None:
            memory |= dict.fromkeys(_sets(parameter), first.storage)
    return [_memory_of(item, memory) for item in schema.returns]


def _memory_of(result: Any, memory: dict[str, int]) -> int | None:
    if result.alias_info is None:
        return None
    if not result.alias_info.before_set:
        # a list of views, whose set torch does not tell
        return next(iter(memory.values()), None)
    return next((memory[name] for name in _sets(result) if name in memory), None)


def _sets(argument: Any) -> Iterator[str]:
    """The names of the memory of an argument or result: `a` of `Tensor(a!)`."""
    if argument.alias_info is not None:
        yield from argument.alias_info.before_set


def split(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any
) -> tuple[tuple[Any, ...], dict[str, Any], Any, list[int]]:
    """Arguments and outputs as a signature holds them, and the storages of their tensors as a call does."""
    taken = [_number(spec) for spec in tensors([args, kwargs])]
    given = [_number(spec) for spec in tensors(outputs)]
    counts = Counter(number for number in taken if number != NO_STORAGE)
    shared = [number for number in counts if counts[number] > 1]
    groups = {number: place for place, number in enumerate(shared)}

    def grouped(leaf: Any) -> Any:
        if not isinstance(leaf, TensorSpec):
            return leaf
        return replace(leaf, storage=None if leaf.storage is None else groups.get(leaf.storage))

    def plain(leaf: Any) -> Any:
        return replace(leaf, storage=None) if isinstance(leaf, TensorSpec) else leaf

    return map_leaves(grouped, args), map_leaves(grouped, kwargs), map_leaves(plain, outputs), [*taken, *given]


def _number(spec: TensorSpec) -> int:
    return NO_STORAGE if spec.storage is None else spec.storage
