"""The command line of a fresh Python that runs one of our modules."""

from __future__ import annotations

import os
import sys

# `python -m` would import from the folder that it is started in, where a stranger's files may lie
_START = (
    f"import sys; sys.path[:] = sys.argv.pop(1).split({os.pathsep!r}); import runpy; "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


def own_python(module: str, *args: str) -> list[str]:
    """A command that runs a module as `python -m` does, and finds modules where this process finds them.

    Parameters
    ----------
    args : what the module gets as `sys.argv[1:]`
    """
    return [sys.executable, "-c", _START, os.pathsep.join(sys.path), module, *args]
