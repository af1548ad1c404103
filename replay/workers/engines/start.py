"""Starts the engine that a command line asks for."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

from opgrip.cli.options import from_arguments
from opgrip.replay.cases.ways import Points
from opgrip.replay.inputs.options import InputOptions
from opgrip.replay.workers.engines.engine import Engine, engines
from opgrip.replay.workers.engines.options import EngineOptions


@contextmanager
def start_engine(args: argparse.Namespace) -> Iterator[Engine]:
    """The engine, which ends with the block.

    Raises
    ------
    UserError : where it cannot be started, or options are not for it
    """
    options = from_arguments(EngineOptions, args)
    options.check(from_arguments(InputOptions, args).devices, from_arguments(Points, args).pin)
    start = engines.get(options.engine)
    assert start is not None, "one of its choices"
    with start(options) as engine:
        yield engine
