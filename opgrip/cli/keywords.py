"""Options as keywords of a Python call: the same as on the command line, by the same declarations."""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from opgrip.cli.options import Repeated
from opgrip.cli.suggestions import did_you_mean
from opgrip.errors import UserError

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
