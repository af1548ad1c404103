"""Options of the pytest plug-in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

CASE, OPERATOR = "case", "operator"
STORE = ".opgrip"
"""default folder of baselines in pytest's root"""


def add_options(parser: pytest.Parser) -> None:
    """Declare the options."""
    group = parser.getgroup("opgrip", "benchmarks of operators (opgrip)")
    group.addoption("--opgrip-traces", action="store_true", help="collect trace files as tests")
    group.addoption(
        "--opgrip-by", choices=(CASE, OPERATOR), default=CASE, help="unit that becomes a test (default: %(default)s)"
    )
    group.addoption(
        "--opgrip-options",
        default="",
        metavar="OPTIONS",
        help="options of opreplay, such as --opgrip-options='--repeats 5 --top 20'",
    )
    group.addoption("--opgrip-save", metavar="NAME", help="save the results as a baseline with this name")
    group.addoption("--opgrip-compare", metavar="NAME|FILE", help="compare with a baseline, or a file of opreplay")
    group.addoption(
        "--opgrip-compare-fail",
        action="append",
        default=[],
        metavar="CONDITION",
        help="fail tests that do not pass this gate: slower<=5%%, total<=5%%, op<=5%%, failed<=0, changed<=0, "
        "missing<=0; can be repeated",
    )
    group.addoption("--opgrip-only", action="store_true", help="skip tests that measure nothing")
    group.addoption("--opgrip-skip", action="store_true", help="skip tests that measure")
    group.addoption("--opgrip-store", metavar="DIR", help=f"folder of baselines (default: {STORE} in pytest's root)")


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a pytest run.

    Attributes
    ----------
    save, compare : baseline files to write and to compare with; None for none
    conditions : gates in the syntax of `opgrip compare`
    """

    save: Path | None
    compare: Path | None
    conditions: tuple[str, ...]


def read_options(config: pytest.Config) -> Options:
    """Return the options; raise `pytest.UsageError` if they contradict each other."""
    save, compare = config.getoption("--opgrip-save"), config.getoption("--opgrip-compare")
    store = config.getoption("--opgrip-store")
    folder = config.rootpath / STORE if store is None else Path(store).absolute()
    conditions = tuple(config.getoption("--opgrip-compare-fail"))
    if config.getoption("--opgrip-only") and config.getoption("--opgrip-skip"):
        raise pytest.UsageError("--opgrip-only and --opgrip-skip exclude all tests: use one of them")
    if conditions and compare is None:
        raise pytest.UsageError("--opgrip-compare-fail requires a baseline: add --opgrip-compare NAME")
    return Options(
        None if save is None else folder / f"{_checked(save)}.json",
        None if compare is None else _find(compare, folder),
        conditions,
    )


def _checked(name: str) -> str:
    if not name or Path(name).name != name:
        raise pytest.UsageError(f"{name!r} is not a name of a baseline: set the folder with --opgrip-store")
    return name


def _find(name: str, folder: Path) -> Path:
    """Return the file of a baseline; raise `pytest.UsageError` if it does not exist."""
    if Path(name).is_file():
        return Path(name).absolute()
    path = folder / f"{name}.json"
    if path.is_file():
        return path
    raise pytest.UsageError(f"{name} is neither a file nor a baseline in {folder}: save one with --opgrip-save {name}")
