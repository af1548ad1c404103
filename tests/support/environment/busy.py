"""Other work on the machine: whether it could have turned a comparison of times."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from forks import used_s
from others import Usage


class TimesDisagree(AssertionError):
    """Times are not as they should be to each other, unless other work turned them."""


@contextmanager
def compared_times() -> Iterator[None]:
    """What is asserted here compares times, and nothing else."""
    try:
        yield
    except AssertionError as error:
        raise TimesDisagree(str(error)) from error


def usage_now() -> Usage:
    """What processors did so far; a fork is no child of this process, and is waited for by another."""
    return Usage.now(used_s())
