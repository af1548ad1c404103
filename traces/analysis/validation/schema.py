"""Records held against the JSON Schema of the format, where a package that reads such is installed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from opgrip.errors import shortened

NOT_INSTALLED = "not held against the JSON Schema, for which jsonschema is needed: pip install 'opgrip[schema]'"
COLUMN = 32
"""Numbers of a column of calls that are held against the schema: those of all are checked where they are read."""
MOST_ERRORS = 3
"""Of one record."""


class Schema:
    """The schema of each type of record."""

    def __init__(self) -> None:
        self._validators: dict[str, Any] = {}
        self.is_available = find_spec("jsonschema") is not None
        if self.is_available:
            from jsonschema import Draft202012Validator

            schema = json.loads((Path(__file__).parents[2] / "schema.json").read_text(encoding="utf-8"))
            names = [branch["$ref"].rpartition("/")[2] for branch in schema["oneOf"]]
            self._validators = {
                name: Draft202012Validator({**schema["$defs"][name], "$defs": schema["$defs"]}) for name in names
            }

    def errors(self, form: Mapping[str, Any]) -> Iterator[str]:
        """What is wrong with a record, the place in it first; nothing for types that the schema does not know."""
        validator = self._validators.get(form["type"])
        if validator is None:
            return
        errors = validator.iter_errors(_in_short(form) if form["type"] == "calls" else form)
        for _, error in zip(range(MOST_ERRORS), errors, strict=False):
            place = "".join(f"[{part!r}]" if isinstance(part, int) else f".{part}" for part in error.absolute_path)
            yield f"{place.removeprefix('.') or 'the record'}: {shortened(error.message, 160)}"


def _in_short(form: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value[:COLUMN] if isinstance(value, list) else value for name, value in form.items()}
