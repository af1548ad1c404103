"""Public names of packages, imported when they are first used, so that commands start without torch.

::

    if TYPE_CHECKING:
        from opgrip.traces.table.trace import load as load

    __getattr__, __dir__ = lazy_names(__name__, {"load": "opgrip.traces.table.trace"})
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the functions `__getattr__` and `__dir__` of a package (PEP 562).

    Parameters
    ----------
    package : name of the package
    modules : full name of the module that defines each public name
    """

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(modules[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted({*vars(sys.modules[package]), *modules})
