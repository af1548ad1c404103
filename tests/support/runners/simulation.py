"""Tests on the simulated accelerator, each in a separate fork, since a process keeps its device.

python tests/support/runners/simulation.py FILE TEST FIXTURES     # run one test of a file, with its fixtures as JSON
"""

import functools
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from programs import ROOT, SUPPORT_PATH, run_python

PACKAGE = ROOT / "tests/support/fakes/package"
sys.path += [str(PACKAGE), str(ROOT / "benchmarks")]


def environment(**variables: str) -> dict[str, str]:
    paths = [str(PACKAGE), SUPPORT_PATH, os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))} | variables


def on_simulator(**variables: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            build()
            values = json.dumps({name: (isinstance(value, Path), str(value)) for name, value in fixtures.items()})
            file = test.__code__.co_filename
            done = run_python(__file__, file, test.__name__, values, env=environment(**variables), timeout=100)
            assert done.returncode == 0, done.stdout + done.stderr

        # the first process builds the device, which takes a minute
        return pytest.mark.slow(run)

    return decorate


@functools.cache
def build() -> None:
    """Build the device once for all processes; skip the test if it cannot be built."""
    from sim_accelerator.extension import is_built, missing_tool

    if reason := missing_tool():
        pytest.skip(reason)
    if not is_built():
        done = run_python("-c", "from sim_accelerator.extension import build; build()", env=environment())
        assert done.returncode == 0, done.stderr


def main(file: str, test: str, fixtures: str) -> None:
    from sim_accelerator.registration import register

    register()
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    values = {name: Path(text) if is_path else text for name, (is_path, text) in json.loads(fixtures).items()}
    getattr(module, test).__wrapped__(**values)


if __name__ == "__main__":
    main(*sys.argv[1:])
