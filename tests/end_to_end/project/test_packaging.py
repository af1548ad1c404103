"""Consistency of the project's own files."""

from __future__ import annotations

from itertools import chain

import pytest
from optional import EVERYBODY
from programs import ROOT, run_python
from project_files import PACKAGES, pyproject

import opgrip


def test_every_top_level_package_is_linked_from_the_import_package() -> None:
    for package in PACKAGES:
        link = ROOT / "opgrip" / package
        assert link.is_symlink()
        assert link.resolve() == ROOT / package


def test_public_names_are_loaded_on_first_use() -> None:
    code = "import sys, opgrip; print('torch' in sys.modules, opgrip.__version__)"
    done = run_python("-c", code, fresh=True)
    assert done.stdout.split() == ["False", pyproject()["project"]["version"]]
    for name in opgrip.__all__:
        assert getattr(opgrip, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'no_such'"):
        opgrip.no_such  # noqa: B018


def test_oldest_constraints_equal_the_lower_bounds() -> None:
    project = pyproject()["project"]
    requirements = [*project["dependencies"], *chain(*(project["optional-dependencies"][extra] for extra in EVERYBODY))]
    bounds = dict(text.split(">=") for text in requirements if ">=" in text)
    lines = (ROOT / "constraints-oldest.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert bounds.keys() == pins.keys()
    # a bound of 1.11 allows any 1.11.x
    assert [name for name, bound in bounds.items() if not f"{pins[name]}.".startswith(f"{bound}.")] == []
