"""Groups of rows that times are added up or drawn by; a row counts to several modules if several made its calls."""

from __future__ import annotations

from collections.abc import Callable

from opgrip.replay.cases.families import family_of
from opgrip.replay.results.results import Result

OUTSIDE = "(outside)"
"""Name of calls outside all modules."""
SITES: tuple[str, ...] = ("module", "phase", "line")
"""Groups that belong to calls: the calls of one row can be in several."""
GROUPS: dict[str, Callable[[Result], str]] = {
    "op": lambda row: row.op,
    "family": lambda row: family_of(row.op),
    "mode": lambda row: row.mode,
}
"""Groups that belong to rows, by name."""


def shares_by(row: Result, by: str) -> dict[str, float]:
    """Return the groups of a row's calls and the share of the calls in each; the shares sum to 1.

    Modules and lines of different traces are different groups.

    Parameters
    ----------
    by : a name in `GROUPS` or `SITES`
    """
    if by in GROUPS:
        return {GROUPS[by](row): 1.0}
    sites = row.sites
    calls = sum(site.count for site in sites)
    before = f"{row.trace}: " if row.trace and by != "phase" else ""
    shares: dict[str, float] = {}
    for site in sites:
        name = f"{before}{getattr(site, by) or OUTSIDE}"
        shares[name] = shares.get(name, 0.0) + site.count / calls
    return shares
