"""Detection of other work on the machine that may have changed the result of a comparison of times."""

from collections.abc import Iterator
from contextlib import contextmanager

from forks import used_s
from others import Usage


class TimesDisagree(AssertionError):
    """Error for a comparison of times that failed, possibly because of other work on the machine."""


@contextmanager
def compared_times() -> Iterator[None]:
    """Raise `TimesDisagree` in place of each `AssertionError` of the block, whose assertions may only compare times."""
    try:
        yield
    except AssertionError as error:
        raise TimesDisagree(str(error)) from error


def usage_now() -> Usage:
    # forks are children of the fork server, not of this process
    return Usage.now(used_s())
