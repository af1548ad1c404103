"""What is the user's to mend, and what is wrong with a record."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from opgrip.hook_errors import raise_if_from_program

SWITCHES = ("append", "force", "partial", "resume")
"""Flags that take no value, as far as messages advise them."""


class UserError(Exception):
    """What is wrong, and what to do about it: commands print it as one line and exit with status 2.

    Parameters
    ----------
    problem : what is wrong, naming the file, option or package
    hint : what to do, or an empty string where the problem says it all
    """

    def __init__(self, problem: str, hint: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.hint = hint

    def __str__(self) -> str:
        text = f"{self.problem}: {self.hint}" if self.hint else self.problem
        return " ".join(text.split())


class NothingSelectedError(UserError):
    """A selection that leaves nothing of a trace, which is normal for some of several traces."""


class MissingFileError(UserError, FileNotFoundError):
    """A file that is not there."""


class ExistingFileError(UserError, FileExistsError):
    """A file that is there, and was not to be replaced."""


@contextmanager
def in_words_of_python() -> Iterator[None]:
    """Let errors name keywords of a call in place of a command's flags."""
    try:
        yield
    except UserError as error:
        error.problem, error.hint = map(_with_keywords, (error.problem, error.hint))
        raise


def _with_keywords(text: str) -> str:
    # what a shell needs quotes for
    text = re.sub(r"(--[a-z][a-z-]*) '(\{.*?\})'", r"\1\2", text)
    return re.sub(r"--([a-z][a-z-]*)", lambda flag: _keyword(flag[1].replace("-", "_")), text)


def _keyword(word: str) -> str:
    return f"{word}=True" if word in SWITCHES else f"{word}="


class FormatError(ValueError):
    """A record that does not have the form that the format asks for."""


def one_line(error: BaseException, most: int = 200) -> str:
    """An error's class and message on one line, the message cut after a word where it has more characters."""
    try:
        text = shortened(" ".join(str(error).split()), most)
    except Exception as fault:
        raise_if_from_program(fault)
        text = "its message cannot be had"
    return f"{type(error).__name__}: {text}"


def shortened(text: str, most: int) -> str:
    """A text of at most so many characters: whole words of it, and `...` where it goes on."""
    if len(text) <= most:
        return text
    start = text[: most - 3]
    return f"{start.rpartition(' ')[0] or start} ..."
