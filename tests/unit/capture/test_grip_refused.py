"""Errors for functions that cannot be extracted, with the reason."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from extracted_source import extract

from opgrip.errors import UserError


def test_function_without_source_is_refused() -> None:
    scope: dict[str, Any] = {}
    # use another file name: Python 3.13 has the text of `python -c` under <string>
    exec(compile("def made(x):\n    return x\n", "<made>", "exec"), scope)
    with pytest.raises(UserError, match="no source was found for made"):
        extract(scope["made"])
    with pytest.raises(UserError, match="relu"):
        extract(torch.relu)


def test_function_that_executes_text_is_refused(project: Callable[..., ModuleType]) -> None:
    main = project(
        """
        def run(x):
            exec("y = x")
        """
    )
    with pytest.raises(UserError, match="exec"):
        extract(main.run)


def test_singledispatch_is_refused(project: Callable[..., ModuleType]) -> None:
    main = project(
        """
        import functools

        @functools.singledispatch
        def area(x):
            return 0

        @area.register
        def _(x: int):
            return x
        """
    )
    with pytest.raises(UserError, match="singledispatch"):
        extract(main.area)


def test_source_changed_after_import_is_refused(project: Callable[..., ModuleType]) -> None:
    main = project(
        """
        import torch

        def run(x):
            return torch.relu(x)
        """
    )
    path = Path(str(main.__file__))
    path.write_text(path.read_text().replace("torch.relu", "torch.sigmoid"))
    linecache.checkcache(str(path))
    with pytest.raises(UserError, match="changed since it was imported"):
        extract(main.run)
