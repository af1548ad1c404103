"""Operators' schemas as text, `aten::add.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor`.

The text of a third party's file is parsed here and never handed to torch's parser.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

MOST_CHARACTERS = 1 << 14
"""Most characters of a schema; the longest of torch's has less than two thousand."""
NAME = re.compile(r"([A-Za-z_]\w*)::([A-Za-z_]\w*)(?:\.([A-Za-z_]\w*))?")


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of an operator.

    Attributes
    ----------
    type : without its alias and length, `Tensor?`, `ScalarType`, `SymInt[]`
    declared_type : as the text has it, `Tensor(a!)`, `int[2]`
    is_named : whether it is given by its name only
    """

    name: str
    type: str
    declared_type: str
    is_named: bool


@dataclass(frozen=True, slots=True)
class SchemaText:
    """A parsed schema.

    Attributes
    ----------
    name : with its overload, `aten::add.Tensor`
    returns : the text after the arrow
    are_aliases : for each result, whether it is memory of an argument
    """

    name: str
    parameters: tuple[Parameter, ...]
    returns: str
    are_aliases: tuple[bool, ...]

    @property
    def op(self) -> str:
        """Name of the operator in a trace, `aten.add.Tensor`."""
        namespace, _, rest = self.name.partition("::")
        packet, _, overload = rest.partition(".")
        return f"{namespace}.{packet}.{overload or 'default'}"

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters."""
        return tuple(parameter.name for parameter in self.parameters)

    def text(self, plain_type: Callable[[str], str]) -> str:
        """Return the schema without defaults and without the mark of parameters given by name only.

        Parameters
        ----------
        plain_type : returns the text of a type
        """
        parameters = [f"{plain_type(parameter.declared_type)} {parameter.name}" for parameter in self.parameters]
        return f"{self.name}({', '.join(parameters)}) -> {plain_type(self.returns)}"


def parse_schema(text: str) -> SchemaText | None:
    """Return the parsed schema, or None if the text is not a schema."""
    return _parse(text) if len(text) <= MOST_CHARACTERS else None


@lru_cache(maxsize=2048)
def _parse(text: str) -> SchemaText | None:
    head, _, rest = text.partition("(")
    name = NAME.fullmatch(head.strip())
    end = _closing(rest)
    if name is None or end is None:
        return None
    parameters: list[Parameter] = []
    is_named = False
    for piece in pieces(rest[:end]):
        if piece == "*":
            is_named = True
            continue
        kind, _, word = " ".join(piece.partition("=")[0].split()).rpartition(" ")
        if not word.isidentifier() or not kind:
            return None
        parameters.append(Parameter(word, _without_alias(kind), kind, is_named))
    returns = rest[end + 1 :].strip().removeprefix("->").strip()
    results = returns
    if results.startswith("(") and _closing(results[1:]) == len(results) - 2:
        results = results[1:-1]
    return SchemaText(head.strip(), tuple(parameters), returns, tuple("(" in kind for kind in pieces(results)))


def pieces(text: str) -> Iterator[str]:
    """Yield the parts between commas that are in no brackets and no quotes, without surrounding spaces."""
    depth, start, quote = 0, 0, ""
    for place, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character in "([<":
            depth += 1
        elif character in ")]>" and text[place - 1] != "-":
            depth -= 1
        elif character == "," and not depth:
            yield text[start:place].strip()
            start = place + 1
    if last := text[start:].strip():
        yield last


def _closing(text: str) -> int | None:
    """Return the position of the bracket that closes one opened before the text; None if there is none."""
    depth, quote = 0, ""
    for place, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        else:
            depth += (character == "(") - (character == ")")
            if depth < 0:
                return place
    return None


def _without_alias(kind: str) -> str:
    # Tensor(a!), Tensor(a -> *)[], Tensor(a|b)
    return re.sub(r"\([^()]*\)", "", re.sub(r"\[\d+\]", "[]", kind)).strip()
