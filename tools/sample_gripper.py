"""`grip`, a decorator that records a function's calls as a sample that runs on its own."""

from __future__ import annotations

import atexit
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, overload

from opgrip.capture.grip.gripped import Keep
from opgrip.capture.grip.gripping import Grips
from opgrip.capture.grip.patterns import parse_pattern
from opgrip.capture.grip.sample_folder import RecordedSample
from opgrip.capture.program.capture_choices import CALLS, GRIPS
from opgrip.cli.command import did_you_mean
from opgrip.errors import UserError
from opgrip.samples.tags import Tag

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Gripper", "Gripping", "RecordedSample", "grip"]

Function = TypeVar("Function", bound=Callable[..., Any])

DLOP_ENTRY = "class_entry"  # name of `entry` in DLOP-Bench's grip


class GripOptions(TypedDict, total=False):
    calls: int
    per_signature: int
    tags: Iterable[str]
    name: str | None
    to: str | Path
    by_reference: bool


PARAMETERS = ("entry", *GripOptions.__annotations__)


class Gripping(Grips):
    """Functions that are gripped until `close`, the end of the block, or the end of the program."""

    _is_open = False

    def start(self) -> Gripping:
        super().__enter__()
        self._is_open = True
        atexit.register(self.close)
        return self

    def close(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        atexit.unregister(self.close)
        super().__exit__()
        self.finish()
        for name, reason in self.refused.items():
            warnings.warn(f"{name} was not gripped: {reason}", RuntimeWarning, stacklevel=3)

    def __enter__(self) -> Gripping:
        return self

    def __exit__(self, *ignored: object) -> None:
        self.close()


class Gripper:
    """The class of `grip`, which is called as a decorator and has the method `this`."""

    @overload
    def __call__(self, function: Function) -> Function: ...

    @overload
    def __call__(
        self, *, entry: str | None = None, **options: Unpack[GripOptions]
    ) -> Callable[[Function], Function]: ...

    def __call__(self, function: Any = None, *, entry: str | None = None, **options: Any) -> Any:
        """Decorate a function so that `calls` of its calls, or fewer when the program ends, are written as a sample.

        Parameters
        ----------
        entry : for a class, the method to grip
        calls, per_signature : number of calls to record (3), and how many of them may have the same signature (1)
        tags : words of `opgrip.samples.tags.Tag`, in addition to detected ones
        name : name of the sample; by default, the function's name
        to : folder of samples (`grips`)
        by_reference : True to write the function's import path instead of its code

        Raises
        ------
        UserError : if a parameter is invalid, or a class has no such method. A function that cannot be gripped causes
            a warning and stays unchanged.
        """
        if isinstance(function, str):
            raise UserError(f"grip({function!r}) does not decorate a function", f"write grip.this({function!r})")
        to, keep = _settings(**options)
        decorate = lambda value: _decorate(value, entry, keep, to)  # noqa: E731
        return decorate if function is None else decorate(function)

    def this(self, *patterns: str, **options: Unpack[GripOptions]) -> Gripping:
        """Grip functions by name in all modules, in a `with` block or until the program ends.

        Parameters that are not described here are the same as in `grip`.

        Parameters
        ----------
        patterns : `module:function` or `module:Class.method` with shell wildcards, for modules loaded now or later

        Raises
        ------
        UserError : if a pattern or parameter is invalid
        """
        if not patterns:
            raise UserError("grip.this() without a function pattern", "write grip.this('module:function')")
        to, keep = _settings(**options)
        return Gripping([parse_pattern(text) for text in patterns], keep, to).start()


grip = Gripper()


def _settings(
    calls: int = CALLS,
    per_signature: int = 1,
    tags: Iterable[str] = (),
    name: str | None = None,
    to: str | Path = GRIPS,
    by_reference: bool = False,
    **unknown: Any,
) -> tuple[Path, Keep]:
    if unknown:
        word = next(iter(unknown))
        otherwise = f"choose from {', '.join(PARAMETERS)}"
        hint = "write entry=" if word == DLOP_ENTRY else did_you_mean(word, PARAMETERS, otherwise, "{}=")
        raise UserError(f"grip() has no parameter {word}", hint)
    if (least := min(calls, per_signature)) < 1:
        raise UserError(f"{least} calls are too few for a sample", "use calls=1 and per_signature=1, or more")
    if name is not None and not name.isidentifier():
        raise UserError(f"{name!r} is not a valid sample name", "use letters, digits and _")
    tag_names = {tag.value for tag in Tag}
    if unknown_tags := sorted(set(tags) - tag_names):
        raise UserError(f"unknown tag {unknown_tags[0]!r}", f"choose from {', '.join(sorted(tag_names))}")
    return Path(to), Keep(calls, per_signature, name, frozenset(tags), by_reference)


def _decorate(value: Any, entry: str | None, keep: Keep, to: Path) -> Any:
    grips = Gripping(keep=keep, to=to)
    if entry is None:
        replacement = grips.grip(value)
    elif not isinstance(value, type):
        raise UserError(f"entry={entry!r} is only allowed for classes", "remove it for a function")
    else:
        replacement = _with_method(value, entry, grips)
    if grips.refused:
        for name, reason in grips.refused.items():
            warnings.warn(f"{name} is not gripped: {reason}", RuntimeWarning, stacklevel=4)
        return value
    grips.start()
    return replacement


def _with_method(owner: type, entry: str, grips: Grips) -> type:
    holder = next((cls for cls in owner.__mro__ if entry in vars(cls)), None)
    if holder is None:
        raise UserError(f"{owner.__qualname__} has no method {entry}", "name one with entry=")
    setattr(owner, entry, grips.grip(vars(holder)[entry], f"{owner.__qualname__}.{entry}", owner))
    return owner
