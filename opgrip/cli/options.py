"""Options, each declared once as a field: for the command line, and as keywords of Python calls.

::

    @dataclass(frozen=True, slots=True)
    class Effort:
        warmup: int = option(2, "runs before those that are timed", parse=not_negative, metavar="N")

From such a class come the flags of a command line, the keywords of a Python call, the table in the docs, and the object
that the work is given, which holds plain values alone.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from opgrip.cli.command import did_you_mean
from opgrip.errors import UserError

T = TypeVar("T")
OPTION = "option"
IDENTITY, RUN, CASES, EFFORT, OUTPUT = "identity", "run", "cases", "effort", "output"
"""Roles of an option of a replay: it changes what a row measures, and a column of the row says how; it changes what
all rows of a run mean, and the header says it; it selects cases; it bounds runs, time and memory; it changes only what
is reported."""
_titles: dict[type, str] = {}


@dataclass(frozen=True, slots=True)
class Option:
    """What a command line says of one field.

    Attributes
    ----------
    help : what it is for; `%(default)s` stands for its default. A function where it takes plug-ins to say
    word : its long name with `_` for `-`, where the field is called otherwise
    short : its one-letter flag
    parse : makes its value of a text; None to keep the text
    metavar : stands for its value in the help
    choices : all values that it has
    repeated : whether it can be given several times, which makes a tuple
    several : whether several values follow it, which makes a tuple
    role : what it does to the results of a replay, one of the roles above; empty for other commands
    column : of results, that says the value of an option whose role is IDENTITY, where the option is called otherwise
    only : what it is for, such as `traces`, where it says nothing of anything else
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


def option(default: Any, help: str | Callable[[], str], **others: Any) -> Any:
    """A field of a class of options; `others` as in `Option`. Where the default is False, the flag takes no value."""
    return field(default=default, metadata={OPTION: Option(help, **others)})


def options_in(declared: type) -> Iterator[tuple[str, str, Any, Option]]:
    """Field, word, default and option of each that a class declares."""
    for item in fields(declared):
        about = item.metadata.get(OPTION)
        if about is not None:
            yield item.name, about.word or item.name, item.default, about


def words_in(*declared: type) -> list[str]:
    """The options of some classes, by their long names with `_` for `-`."""
    return [word for group in declared for _, word, _, _ in options_in(group)]


def titled(title: str) -> Callable[[type[T]], type[T]]:
    """A decorator that says under which title the help shows the options of a class."""

    def entitle(declared: type[T]) -> type[T]:
        _titles[declared] = title
        return declared

    return entitle


def title_of(declared: type) -> str:
    """The title that the help shows a class's options under."""
    return _titles.get(declared, "others")


def add_all_options(parser: argparse.ArgumentParser, declared: Iterable[type]) -> None:
    """Add the options of classes to a parser, those of the same title in one group."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    for group in declared:
        title = title_of(group)
        if any(options_in(group)):
            if title not in groups:
                groups[title] = parser.add_argument_group(title)
            add_options(groups[title], group)


def add_options(group: argparse._ActionsContainer, declared: type) -> None:
    """Add the options of a class to a parser or a group of it."""
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
    """What a command line says of a class of options."""
    return declared(**{name: getattr(args, word) for name, word, _, _ in options_in(declared)})


def from_plain(declared: type[T], values: Mapping[str, Any]) -> T:
    """An object of what `dataclasses.asdict` made of it; lists, which JSON has for tuples, become tuples again."""
    return declared(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def flag_of(word: str) -> str:
    """How an option is written on a command line."""
    return f"--{word.replace('_', '-')}"


def refuse_options(args: argparse.Namespace, declared: Sequence[type], purposes: Sequence[str], hint: str) -> None:
    """Refuse what a command line sets that is for something else.

    Parameters
    ----------
    purposes : words of `Option.only` that there is nothing for
    hint : what to do

    Raises
    ------
    UserError : for the first such option
    """
    for group in declared:
        for _, word, default, about in options_in(group):
            purpose = next((purpose for purpose in about.only if purpose in purposes), None)
            if purpose is not None and getattr(args, word) != default:
                raise UserError(f"{flag_of(word)} is for {purpose}", hint)


class Repeated(argparse.Action):
    """An option that can be given several times."""

    def __call__(self, parser: argparse.ArgumentParser, args: argparse.Namespace, value: Any, flag: Any = None) -> None:
        """Add a value to those that were given before."""
        setattr(args, self.dest, (*getattr(args, self.dest), value))


class Following(Repeated):
    """An option that several values follow."""

    def __call__(self, parser: argparse.ArgumentParser, args: argparse.Namespace, value: Any, flag: Any = None) -> None:
        """Take the values in the place of those that were given before."""
        setattr(args, self.dest, tuple(value))


OF_COMMANDS = ("help", "version", "debug")
"""Options that say what a command prints."""


def arguments_of(
    parser: argparse.ArgumentParser,
    words: Sequence[str],
    keywords: Mapping[str, Any],
    excluded: Collection[str] = (),
    only: Collection[str] | None = None,
) -> argparse.Namespace:
    """What a command line with these options would give.

    Parameters
    ----------
    words : what the command line has besides
    keywords : options by their long names, with `_` for `-`: a number, a word, True, or several in a list or tuple;
        None for what is usual
    excluded : options that are no keywords
    only : those that are, where they are few; of the others, messages say that `replay()` has them

    Raises
    ------
    TypeError : for a keyword that is no option
    UserError : for a value that the option does not take
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
    """Return the name of a dtype, device or layout among arguments, as JSON has it."""
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
        raise UserError(f"{option.dest}={value!r} is no choice", f"there are {', '.join(map(str, option.choices))}")
    return value
