"""Texts of operators' schemas, `aten::mul.Tensor(Tensor self, Tensor other) -> Tensor`, as plain data."""

from __future__ import annotations

import re
from dataclasses import dataclass

LENGTH = 1 << 13
"""Characters of a text."""
TEXT = re.compile(r"\s*([A-Za-z]\w*::[A-Za-z_]\w*)(?:\.(\w+))?\s*\((.*)\)\s*->(.*)", re.DOTALL)
PARAMETER = re.compile(r"(.+?)\s+(\w+)\s*(?:=.*)?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class SchemaText:
    """What a schema's text says.

    Attributes
    ----------
    name : with its overload, `aten::add.Tensor`
    types, names : of the parameters
    returns : the text behind the arrow
    """

    name: str
    types: tuple[str, ...]
    names: tuple[str, ...]
    returns: str

    def __str__(self) -> str:
        """The text without defaults and without the mark of what is given by name alone."""
        parameters = ", ".join(f"{kind} {name}" for kind, name in zip(self.types, self.names, strict=True))
        return f"{self.name}({parameters}) -> {self.returns}"


def parse_schema(text: str) -> SchemaText:
    """What a text says; it is looked at and looked up, and nothing is made of it.

    Raises
    ------
    ValueError : where it is none
    """
    match = TEXT.fullmatch(text) if len(text) <= LENGTH else None
    if match is None:
        raise ValueError("a schema that cannot be read")
    parameters = [PARAMETER.fullmatch(part) for part in _parts(match[3]) if part != "*"]
    types, names = [], []
    for parameter in parameters:
        if parameter is None:
            raise ValueError("a schema that cannot be read")
        types.append(parameter[1])
        names.append(parameter[2])
    name = f"{match[1]}.{match[2]}" if match[2] else match[1]
    return SchemaText(name, tuple(types), tuple(names), match[4].strip())


def _parts(text: str) -> list[str]:
    """What stands between the commas that are in no brackets and no quotes."""
    parts, depth, start, quote = [], 0, 0, ""
    for place, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character in "([":
            depth += 1
        elif character in ")]":
            depth -= 1
        elif character == "," and not depth:
            parts.append(text[start:place].strip())
            start = place + 1
    last = text[start:].strip()
    return [*parts, last] if last else parts
