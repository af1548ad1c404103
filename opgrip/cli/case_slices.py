"""Selecting a part of many numbered cases."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from opgrip.cli.command import not_negative, positive, seed
from opgrip.cli.options import CASES, option, titled
from opgrip.errors import UserError

INDEXED = 1 << 62
"""number of cases from which on a range is too long for `random.sample`"""


@titled("cases")
@dataclass(frozen=True, slots=True)
class Cut:
    """Selection of cases of a table, or of a file that describes more cases than it holds."""

    start: int = option(
        0,
        "skip the cases before number N (counted from 0) of a table or configuration file",
        parse=not_negative,
        metavar="N",
        only=("single cases",),
        role=CASES,
    )
    stop: int | None = option(
        None,
        "stop before case number N",
        parse=positive,
        metavar="N",
        only=("single cases",),
        role=CASES,
    )
    sample: int | None = option(
        None,
        "run N of the cases, chosen at random",
        parse=positive,
        metavar="N",
        only=("single cases",),
        role=CASES,
    )
    sample_seed: int = option(
        0,
        "random seed for --sample (default: %(default)s)",
        parse=seed,
        metavar="N",
        only=("single cases",),
        role=CASES,
    )

    @property
    def takes_all(self) -> bool:
        """Return True if all cases are selected."""
        return not self.start and self.stop is None and self.sample is None

    def size(self, count: int) -> int:
        """Return the number of selected cases out of `count`."""
        size = max(0, min(count, count if self.stop is None else self.stop) - self.start)
        return size if self.sample is None else min(size, self.sample)

    def places(self, count: int) -> Sequence[int]:
        """Return the numbers of the selected cases in ascending order.

        Raises
        ------
        UserError : if the selection of a non-empty table is empty
        """
        stop = min(count, count if self.stop is None else self.stop)
        if count and stop <= self.start:
            end = "" if self.stop is None else f" to --stop {self.stop}"
            raise UserError(
                f"no case is left from --start {self.start}{end}", f"there are {count:,}, the first being case 0"
            )
        places = range(self.start, stop)
        if self.sample is None or self.sample >= stop - self.start:
            return places
        chance = random.Random(self.sample_seed)
        if stop - self.start < INDEXED:
            return sorted(chance.sample(places, self.sample))
        drawn: set[int] = set()
        while len(drawn) < self.sample:
            drawn.add(chance.randrange(self.start, stop))
        return sorted(drawn)
