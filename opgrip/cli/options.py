"""Options, each declared once as a field, for the command line and for keywords of Python calls."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from opgrip.cli.command import add_help_all, did_you_mean, not_negative, positive
from opgrip.errors import UserError

T = TypeVar("T")
OPTION = "option"
# Roles of a replay option.
#
# IDENTITY: changes what a row measures, and is shown in a column of the row. RUN: changes the meaning of all rows, and
# is recorded in the header. CASES: selects cases. EFFORT: limits runs, time and memory. OUTPUT: changes only the
# report.
IDENTITY, RUN, CASES, EFFORT, OUTPUT = "identity", "run", "cases", "effort", "output"
# placeholders of option values in the help text, by the function that parses the value
METAVARS: dict[Callable[[str], Any], str] = {Path: "FILE", positive: "N", not_negative: "N"}
_titles: dict[type, str] = {}


@dataclass(frozen=True, slots=True)
class Option:
    """Declaration of one command-line option, stored in the metadata of a dataclass field.

    help : help text, in which `%(default)s` is replaced by the default; or a function that returns it
    word : name of the option without `--` and with `_` in place of `-`; None if it is the field's name
    parse : returns the value from its text; None to keep the text
    repeated : True if the option can be given several times; the value is then a tuple
    several : True if several values can follow the option; the value is then a tuple
    role : effect on the results of a replay, a constant of this module such as `CASES`
    only : names of the inputs that the option applies to, such as `traces`; empty if it applies to all inputs
    """

    help: str | Callable[[], str]
    word: str | None = None
    short: str | None = None
    parse: Callable[[str], Any] | None = None
    metavar: str | None = None
    choices: Sequence[str] | None = None
    repeated: bool = False
    several: bool = False
    role: str = ""
    column: str = ""
    only: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    common: bool = False


def option(default: Any, help: str | Callable[[], str], **others: Any) -> Any:
    if (placeholder := METAVARS.get(others.get("parse", str))) is not None:
        others.setdefault("metavar", placeholder)
    return field(default=default, metadata={OPTION: Option(help, **others)})


def options_in(declared: type) -> Iterator[tuple[str, str, Any, Option]]:
    for item in fields(declared):
        about = item.metadata.get(OPTION)
        if about is not None:
            yield item.name, about.word or item.name, item.default, about


def words_in(*declared: type) -> list[str]:
    return [word for group in declared for _, word, _, _ in options_in(group)]


def titled(title: str) -> Callable[[type[T]], type[T]]:
    """Return a decorator that sets the title under which the help lists the options of a dataclass."""

    def entitle(declared: type[T]) -> type[T]:
        _titles[declared] = title
        return declared

    return entitle


def title_of(declared: type) -> str:
    return _titles.get(declared, "others")


def add_all_options(parser: argparse.ArgumentParser, declared: Iterable[type]) -> None:
    declared = list(declared)
    add_help_all(parser, [word for group in declared for _, word, _, about in options_in(group) if not about.common])
    groups: dict[str, argparse._ArgumentGroup] = {}
    for group in declared:
        title = title_of(group)
        if any(options_in(group)):
            if title not in groups:
                groups[title] = parser.add_argument_group(title)
            add_options(groups[title], group)


def add_options(group: argparse._ActionsContainer, declared: type) -> None:
    for _, word, default, about in options_in(declared):
        flags = [*([about.short] if about.short else []), flag_of(word)]
        help_text = about.help if isinstance(about.help, str) else about.help()
        if default is False:
            group.add_argument(*flags, action="store_true", help=help_text)
            continue
        settings = {"type": about.parse, "metavar": about.metavar, "choices": about.choices}
        extra: dict[str, Any] = {name: value for name, value in settings.items() if value is not None}
        if about.repeated:
            extra["action"] = Repeated
        if about.several:
            extra |= {"action": Following, "nargs": "+"}
        group.add_argument(*flags, default=default, help=help_text, **extra)


def from_arguments(declared: type[T], args: argparse.Namespace) -> T:
    defaults = {word: default for _, word, default, _ in options_in(declared)}
    for _, word, default, about in options_in(declared):
        if about.needs and getattr(args, word) != default:
            needed = [flag.split()[0].removeprefix("--").replace("-", "_") for flag in about.needs]
            # options of other classes have a default that is false
            if all(getattr(args, name, None) in (defaults.get(name), None, False, ()) for name in needed):
                raise UserError(f"{flag_of(word)} needs {about.needs[0]}")
    return declared(**{name: getattr(args, word) for name, word, _, _ in options_in(declared)})


def all_from_arguments(declared: Iterable[type], args: argparse.Namespace) -> dict[type, Any]:
    return {group: from_arguments(group, args) for group in declared}


def flag_of(word: str) -> str:
    return f"--{word.replace('_', '-')}"


def refuse_options(options: Mapping[type, object], purposes: Sequence[str], hint: str) -> None:
    """Raise `UserError` if an option is set that does not apply to the command's inputs."""
    for declared, values in options.items():
        for name, word, default, about in options_in(declared):
            purpose = next((purpose for purpose in about.only if purpose in purposes), None)
            if purpose is not None and getattr(values, name) != default:
                raise UserError(f"{flag_of(word)} is for {purpose}", hint)


class Repeated(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, args: argparse.Namespace, value: Any, flag: Any = None) -> None:
        setattr(args, self.dest, (*getattr(args, self.dest), value))


class Following(Repeated):
    def __call__(self, parser: argparse.ArgumentParser, args: argparse.Namespace, value: Any, flag: Any = None) -> None:
        setattr(args, self.dest, tuple(value))


OF_COMMANDS = ("help", "help_all", "version", "debug")  # options that are not keywords of Python calls


def arguments_of(
    parser: argparse.ArgumentParser,
    words: Sequence[str],
    keywords: Mapping[str, Any],
    excluded: Collection[str] = (),
    only: Collection[str] | None = None,
) -> argparse.Namespace:
    """Return the parsed command-line arguments that have the same effect as keywords of a Python call.

    words : command-line arguments to parse in addition to the keywords
    keywords : values by option name, with `_` in place of `-`; None selects the default
    excluded : names of options that are not keywords
    """
    args = parser.parse_args(words)
    others = {*OF_COMMANDS, *excluded}
    options = {
        action.dest: action
        for action in parser._actions
        if action.option_strings and action.dest not in others and (only is None or action.dest in only)
    }
    for name, value in keywords.items():
        if name not in options:
            elsewhere = only is not None and any(name == action.dest for action in parser._actions)
            hint = "it is an option of replay() only" if elsewhere else did_you_mean(name, options, form="{!r}")
            raise TypeError(f"got an unexpected keyword argument {name!r}{f': {hint}' if hint else ''}")
        if value is not None:
            setattr(args, name, _value(options[name], value))
    return args


def _value(option: argparse.Action, value: Any) -> Any:
    if option.nargs == 0:
        if not isinstance(value, bool):
            raise UserError(f"{option.dest}={value!r} is neither True nor False")
        return value
    several = isinstance(value, Sequence) and not isinstance(value, str)
    parts = list(map(_text, value)) if several else [_text(value)]
    if isinstance(option, Repeated):
        return tuple(_parse(option, part) for part in parts)
    return _parse(option, ",".join(parts))


def _text(value: Any) -> str:
    import torch

    if isinstance(value, Mapping):
        return json.dumps(value, default=_named)
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else str(value)


def _named(value: Any) -> str:
    import torch

    if isinstance(value, torch.dtype | torch.device | torch.layout | torch.memory_format):
        return _text(value).removeprefix("torch.")
    hint = "give the tensor's shape as a tuple, or call benchmark() with it" if isinstance(value, torch.Tensor) else ""
    raise UserError(f"an argument cannot be a {type(value).__name__}", hint)


def _parse(option: argparse.Action, text: str) -> Any:
    parse: Any = option.type or str
    try:
        value = parse(text)
    except argparse.ArgumentTypeError as error:
        raise UserError(f"{option.dest}: {error}") from error
    if option.choices is not None and value not in option.choices:
        raise UserError(f"invalid choice {option.dest}={value!r}", f"choose from {', '.join(map(str, option.choices))}")
    return value
