"""Options of the verbs that work on runs of a store."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_store(parser: argparse.ArgumentParser) -> None:
    """Give a verb the store that it looks into."""
    parser.add_argument("--store", type=Path, metavar="DIR", help="where runs are (default: $OPGRIP_STORE, or results)")


def add_run(parser: argparse.ArgumentParser) -> None:
    """Give a verb the run that it works on, `which`, and its store."""
    names = "a file of opreplay, a run of the store or what its name begins or ends with, or latest"
    parser.add_argument("which", metavar="RUN", help=names)
    add_store(parser)
