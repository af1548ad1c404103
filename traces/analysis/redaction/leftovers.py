"""What a redacted trace still says: every text and exact value in it, where it stands, and why it stays.

It is read from the records as they go out, and not from what made them: a text that nothing here explains stops the
redaction.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from opgrip.errors import UserError
from opgrip.traces.analysis.redaction.names import (
    ALPHABET,
    BACKENDS,
    DEVICE,
    EINSUM,
    FUNCTION_WORDS,
    LIMIT,
    MADE_UP,
    OPTIMIZER_LABEL,
    OWN_PLACES,
    OWN_PLACES_OF,
    REDUCTIONS,
    REGION,
    RUNS,
    SALTED,
    THREAD,
    is_public_exception,
    is_public_operator,
    is_public_text,
    is_public_type,
    is_word_of_python,
    torch_classes,
)
from opgrip.traces.analysis.redaction.policy import FILES, FUNCTIONS, LABELS, MODEL, MODULES, SCALARS, Policy
from opgrip.traces.codec.record_forms import to_json
from opgrip.traces.schema.arguments import DTYPES, LAYOUTS, MEMORY_FORMATS, Json
from opgrip.traces.schema.records import KINDS, PHASES, Calls, DeviceTimes, Record
from opgrip.traces.table.profiler_labels import STEP_LABEL
from opgrip.traces.values import value_models
from opgrip.traces.values.distribution import SHAPES

ASKED = "kept by --keep"
FORMAT = "the format"
MOST = 100_000
"""Distinct texts and numbers that are listed; of more, how many there are."""

_SEPARATORS = re.compile(r"[.:/ ,]+")
PUBLIC_OPERATOR = "operators and extensions that everybody can install"
CUSTOM_OPERATOR = "a custom operator, without which it does not replay"


@dataclass(frozen=True, slots=True)
class Left:
    """A text or number that stays.

    Attributes
    ----------
    field : of the record, `signature.args`
    kind : what it is: `operator`, `string`, `integer`, ...
    """

    field: str
    kind: str
    value: str
    why: str


@dataclass(slots=True)
class Leftovers:
    """Everything that stays in a trace, with how often it stands there.

    Attributes
    ----------
    salted : how many different salted names there are
    """

    policy: Policy
    counts: Counter[Left] = field(default_factory=Counter)
    others: int = 0
    _salted: set[str] = field(default_factory=set)

    @property
    def salted(self) -> int:
        """How many different salted names there are."""
        return len(self._salted)

    def see(self, record: Record) -> None:
        """Take note of a record that goes out.

        Raises
        ------
        UserError : for a text that is not salted, and has no reason to stay
        """
        if isinstance(record, Calls | DeviceTimes):
            return
        form = to_json(record)
        for path, leaf in _walk(form, form["type"]):
            if isinstance(leaf, str):
                self._text(path, leaf)
            elif path.startswith(("signature.args", "signature.kwargs")) and ".tensor" not in path:
                self._number(form["op"], path, leaf)
        if form["type"] == "values" and form["model"] == "exact":
            kept = "sizes and places in memory, or values in the order of others: see `values`"
            self._add(Left("values.data", "exact values", str(form["data"]), kept))

    def rows(self) -> Iterator[tuple[str, str, int, str]]:
        """Field, kind, how many different ones, and why, of all that stays."""
        groups: Counter[tuple[str, str, str]] = Counter((left.field, left.kind, left.why) for left in self.counts)
        for (name, kind, why), count in sorted(groups.items()):
            yield name, kind, count, why

    def as_json(self) -> dict[str, Any]:
        """What a report holds."""
        rows = [
            {"field": left.field, "kind": left.kind, "value": left.value, "why": left.why, "count": count}
            for left, count in sorted(
                self.counts.items(), key=lambda item: (item[0].field, item[0].kind, item[0].value)
            )
        ]
        return {"salted_names": self.salted, "left": rows, "not_listed": self.others}

    def _text(self, path: str, text: str) -> None:
        if not text:
            return
        words = [word for word in _SEPARATORS.split(text) if word]
        salted = [word for word in words if SALTED.fullmatch(word)]
        self._salted.update(salted)
        name = ".".join(path.split(".")[:2])
        if salted and all(SALTED.fullmatch(word) or word.isdigit() or word in _BESIDE_SALTED for word in words):
            return
        kind, why = self._reason(path, text)
        if why is None:
            raise UserError(f"{name} would still say {text[:40]!r}", "this is a fault of opgrip: please report it")
        self._add(Left(name, kind, text, why))

    def _reason(self, path: str, text: str) -> tuple[str, str | None]:
        """What a text is, and why it stays; None for no reason."""
        record, last = path.split(".")[0], path.rsplit(".", 1)[-1]
        if last in ("op", "inside"):
            return "operator", _reason_of_operator(text)
        if self.policy.keeps(_KEPT_BY.get(path, _KEPT_BY_NAME.get(last, ""))):
            return last, ASKED
        if path.endswith(".kwargs.name"):
            return "name of an argument", "operators whose names stay have these"
        if last in _WORDS:
            why, is_one = _WORDS[last]
            return last, why if is_one(text) else None
        if record in _RECORDS and not path.startswith("header.model"):
            return _RECORDS[record]
        if path.startswith(_TREES):
            if self.policy.keeps(SCALARS) or self.policy.keeps(LABELS):
                return "string", ASKED
            return "string", "a setting, device or type that torch knows" if _is_setting(text) else None
        words = [word for word in _SEPARATORS.split(text) if word]
        is_public = all(word in torch_classes() or word.isdigit() or is_word_of_python(word) for word in words)
        is_public = is_public or (record == "thread" and bool(THREAD.fullmatch(text))) or text in RUNS
        return last, "torch's and Python's own names" if is_public else None

    def _number(self, op: str, path: str, value: object) -> None:
        if value is None or isinstance(value, bool):
            return
        is_whole = isinstance(value, int)
        why = "a size, dimension, index or flag" if is_whole else "three bits of a float"
        if self.policy.keeps(SCALARS):
            why = ASKED
        kind = "integer" if is_whole else "float"
        self._add(Left(".".join(path.split(".")[:2]), kind, f"{op}: {value}", why))

    def _add(self, left: Left) -> None:
        if left in self.counts or len(self.counts) < MOST:
            self.counts[left] += 1
        else:
            self.others += 1


def _walk(form: Json, path: str) -> Iterator[tuple[str, Json]]:
    """All leaves with the names that lead to them; names that a program chooses are leaves too."""
    if isinstance(form, dict):
        for name, value in form.items():
            if path.endswith(_NAMED_BY_PROGRAMS):
                yield f"{path}.name", name
                yield from _walk(value, f"{path}.*")
            else:
                yield from _walk(value, f"{path}.{name}")
    elif isinstance(form, list):
        for item in form:
            yield from _walk(item, path)
    else:
        yield path, form


_NAMED_BY_PROGRAMS = (
    ".kwargs",
    ".fields",
    ".parameters",
    ".buffers",
    ".modules",
    ".devices",
    ".libraries",
    ".settings",
)
_BESIDE_SALTED = (
    frozenset(("py", "default", "run", "by", "torch", "compile", "__init__", "__call__"))
    | {word for phrase in OWN_PLACES_OF for word in phrase.split()}
    | FUNCTION_WORDS
    | MADE_UP
)
_TREES = ("signature.args", "signature.kwargs", "signature.outputs", "observed", "entered", "effects")


def _is_setting(text: str) -> bool:
    """Whether a string argument is on a list, a label of torch's or ours, or an equation whose letters are in order."""
    letters = "".join(dict.fromkeys(letter for letter in text if letter.isalpha()))
    is_equation = EINSUM.fullmatch(text) is not None and ALPHABET.startswith(letters)
    is_label = any(label.fullmatch(text) for label in (OPTIMIZER_LABEL, STEP_LABEL))
    return is_public_text(text) or is_equation or is_label


def _reason_of_operator(text: str) -> str:
    if is_public_operator(text):
        return PUBLIC_OPERATOR
    if text in OWN_PLACES or text.startswith(OWN_PLACES_OF):
        return "what a capture calls its own parts"
    return "kernels that torch.compile made" if text.startswith(REGION) else CUSTOM_OPERATOR


def _is_reason(text: str) -> bool:
    """Whether it is the kind of an error, or classes that ran something."""
    return is_public_exception(text) or all(
        word in torch_classes() for word in _SEPARATORS.split(text.removeprefix("run by "))
    )


def _is_any(text: str) -> bool:
    return True


_WORDS: dict[str, tuple[str, Callable[[str], bool]]] = {
    "type": (FORMAT, _is_any),
    "format": (FORMAT, _is_any),
    "version": (FORMAT, _is_any),
    "kind": (FORMAT, KINDS.__contains__),
    "phase": (FORMAT, PHASES.__contains__),
    "model": (FORMAT, lambda text: value_models.get(text) is not None),
    "shape": ("the shape of a distribution", SHAPES.__contains__),
    "dtype": ("torch's types", DTYPES.__contains__),
    "layout": ("torch's types", LAYOUTS.__contains__),
    "memory_format": ("torch's types", MEMORY_FORMATS.__contains__),
    "device": ("devices set the times", lambda text: DEVICE.fullmatch(text) is not None),
    "float": ("nan and infinities", ("nan", "inf", "-inf").__contains__),
    "opaque": ("types of Python and torch", is_public_type),
    "raised": ("kinds of errors of Python and torch", _is_reason),
    "reason": ("kinds of errors of Python and torch", _is_reason),
    "stopped": ("the limit that ended the recording", lambda text: LIMIT.fullmatch(text) is not None),
    "backend": ("backends of torch", BACKENDS.__contains__),
    "reduction": ("reductions of torch", REDUCTIONS.__contains__),
    "cls": ("classes of torch", torch_classes().__contains__),
    "bytes": ("zeros", lambda text: not text.strip("A=")),
}
"""By the last name of a field, why its texts stay, and which do."""
_RECORDS: dict[str, tuple[str, str | None]] = {
    "context": ("setting", "torch's settings set the times"),
    "kernels": ("kernel", "names of kernels of operators whose names stay"),
    "header": ("header", "versions, hardware and settings set the times"),
    "end": ("header", "versions, hardware and settings set the times"),
}
_KEPT_BY_NAME = {"cls": MODULES, "reason": MODULES, "class": FUNCTIONS, "named": FUNCTIONS, "name": FUNCTIONS}
_KEPT_BY = {
    "scope.module": MODULES,
    "scope.module_type": MODULES,
    "scope.function": FUNCTIONS,
    "scope.file": FILES,
    "scope.callers": FILES,
    "thread.name": LABELS,
    "header.model.name": MODEL,
    "header.model.class": MODEL,
}
