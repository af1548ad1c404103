"""What a page brings with it: the libraries that draw and list, and its own scripts and styles."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from pathlib import Path
from types import ModuleType

from opgrip.cli.extras import needed
from opgrip.errors import UserError

SCRIPTS = ("base.js", "charts.js", "tables.js", "views.js", "launches.js", "corpus.js", "case.js", "main.js")
"""The page's own, in the order in which they run."""


@cache
def plotly() -> str:
    """The script of Plotly, which draws."""
    return _file(needed("plotly", "report"), "package_data/plotly.min.js")


@cache
def tables() -> tuple[str, str]:
    """Module and style sheet of DataTables, as itables brings them."""
    package = needed("itables", "report")
    return _file(package, "html/dt_bundle.js"), _file(package, "html/dt_bundle.css")


@cache
def own(name: str) -> str:
    """A file of this package."""
    return (files(__package__) / "static" / name).read_text(encoding="utf-8")


def own_script() -> str:
    """The page's own scripts as one, whose names nothing else sees."""
    return '(() => {\n"use strict";\n' + "\n".join(map(own, SCRIPTS)) + "\n})();"


def _file(package: ModuleType, name: str) -> str:
    path = Path(str(package.__file__)).parent / name
    if not path.is_file():
        raise UserError(f"{package.__name__} has no {name}", "pip install --upgrade 'opgrip[report]'")
    return path.read_text(encoding="utf-8")
