"""Packages that only some uses need, which extras of this one bring."""

from __future__ import annotations

import importlib
from typing import Any

from opgrip.errors import UserError


class MissingPackageError(UserError):
    """A package that is not installed."""


def needed(module: str, extra: str) -> Any:
    """A module of such a package.

    Raises
    ------
    MissingPackageError : where it is not installed, saying which extra brings it
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        raise MissingPackageError(f"{package} is not installed", f"pip install 'opgrip[{extra}]'") from error
