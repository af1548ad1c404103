"""Projects made for a test."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from textwrap import dedent
from types import ModuleType

import pytest

_projects = count()


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ModuleType]]:
    """Makes a package of modules, by their text, and gives the first of them, imported."""
    made: list[str] = []

    def make(main: str, **others: str) -> ModuleType:
        name = f"gripped_project_{next(_projects)}"
        made.append(name)
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
        for module, text in {"main": main, **others}.items():
            (tmp_path / name / f"{module}.py").write_text(dedent(text))
        monkeypatch.syspath_prepend(tmp_path)
        return importlib.import_module(f"{name}.main")

    yield make
    for module in [known for known in sys.modules if known.partition(".")[0] in made]:
        del sys.modules[module]
