"""Operators' schemas as text, `aten::add.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

MOST_CHARACTERS = 1 << 14
"""Of a schema; the longest of torch's has less than two thousand."""
NAME = re.compile(r"([A-Za-z_]\w*)::([A-Za-z_]\w*)(?:\.([A-Za-z_]\w*))?")


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of an operator.

    Attributes
    ----------
    type : without its alias, `Tensor?`, `ScalarType`, `SymInt[]`
    is_named : whether it is given by its name alone
    """

    name: str
    type: str
    is_named: bool


@dataclass(frozen=True, slots=True)
class SchemaText:
    """What a schema's text says.

    Attributes
    ----------
    op : the operator's name in a trace, `aten.add.Tensor`
    are_aliases : of each result, whether it is memory of an argument
    """

    op: str
    parameters: tuple[Parameter, ...]
    are_aliases: tuple[bool, ...]


def parse_schema(text: str) -> SchemaText | None:
    """What a schema says; None for a text that is none."""
    return _parse(text) if len(text) <= MOST_CHARACTERS else None


@lru_cache(maxsize=2048)
def _parse(text: str) -> SchemaText | None:
    head, _, rest = text.partition("(")
    name = NAME.fullmatch(head)
    end = _closing(rest)
    if name is None or end is None:
        return None
    namespace, packet, overload = name.groups()
    parameters: list[Parameter] = []
    is_named = False
    for piece in pieces(rest[:end]):
        if piece == "*":
            is_named = True
            continue
        kind, _, word = piece.partition("=")[0].strip().rpartition(" ")
        if not word.isidentifier() or not kind:
            return None
        parameters.append(Parameter(word, _without_alias(kind), is_named))
    results = rest[end + 1 :].strip().removeprefix("->").strip()
    if results.startswith("(") and _closing(results[1:]) == len(results) - 2:
        results = results[1:-1]
    op = f"{namespace}.{packet}.{overload or 'default'}"
    return SchemaText(op, tuple(parameters), tuple("(" in kind for kind in pieces(results)))


def pieces(text: str) -> Iterator[str]:
    """What stands between the commas of a text that are in no brackets, without spaces around."""
    depth = start = 0
    for place, character in enumerate(text):
        if character in "([<":
            depth += 1
        elif character in ")]>" and text[place - 1] != "-":
            depth -= 1
        elif character == "," and not depth:
            yield text[start:place].strip()
            start = place + 1
    if last := text[start:].strip():
        yield last


def _closing(text: str) -> int | None:
    """The place of the bracket that ends what stands at the start of a text."""
    depth = 0
    for place, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth < 0:
            return place
    return None


def _without_alias(kind: str) -> str:
    # Tensor(a!), Tensor(a -> *)[], Tensor(a|b)
    return re.sub(r"\([^()]*\)", "", re.sub(r"\[\d+\]", "[]", kind)).strip()
