"""Traces that ship with opgrip, which a user names `trace:NAME` or `zoo:NAME` instead of a file."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from glob import escape
from pathlib import Path

from opgrip.cli.command import did_you_mean
from opgrip.cli.output_files import ADDRESS, read_chunks
from opgrip.errors import MissingFileError
from opgrip.traces.zoo import PREFIX as ZOO_PREFIX
from opgrip.traces.zoo import read_manifest, zoo_file

PREFIX = "trace:"
# form of a name of `opcapture --model`, such as `opinfo:all` or `nets.py:net`
NAME_OF_MODEL = re.compile(r"[\w./-]+:[\w.-]+")


def shipped_traces() -> dict[str, Path]:
    files = sorted(Path(__file__).resolve().parents[1].glob("*.jsonl*"))
    return {file.name.partition(".")[0]: file for file in files}


def trace_file(path: str | Path) -> Path:
    """Return the file for a path, or for a name such as `trace:NAME`."""
    text = str(path)
    if not text.startswith((PREFIX, ZOO_PREFIX)) or Path(path).exists():
        return Path(path)
    if text.startswith(ZOO_PREFIX):
        name, zoo = text.removeprefix(ZOO_PREFIX), {trace.name: trace for trace in read_manifest()}
        if name not in zoo:
            raise MissingFileError(f"the zoo has no trace {name!r}", did_you_mean(name, zoo, "see opgrip zoo list"))
        return zoo_file(zoo[name])
    traces = shipped_traces()
    name = text.removeprefix(PREFIX)
    if name not in traces:
        raise MissingFileError(
            f"opgrip ships no trace {name!r}", did_you_mean(name, traces, f"choose from {', '.join(traces)}")
        )
    return traces[name]


def read_trace_chunks(path: Path) -> Iterator[bytes]:
    try:
        yield from read_chunks(path)
    except MissingFileError as error:
        if not ADDRESS.match(str(path)):
            error.hint += hint_for_missing(path)
        raise


def hint_for_missing(path: Path) -> str:
    if str(path) == "-":
        return ", and standard input is not read"
    if NAME_OF_MODEL.fullmatch(str(path)):
        model = f"a model is recorded first: opcapture --model {shlex.quote(str(path))}"
        return f"; {model}; names that are not files are trace:NAME, zoo:NAME and sample:NAME"
    stem, dot, suffixes = path.name.partition(".")
    if part := next(path.parent.glob(f"{escape(stem)}.part*{dot}{escape(suffixes)}"), None):
        return f", but {part} holds calls of a program that was killed: read it with --partial"
    if path.parent.is_dir() and (near := did_you_mean(path.name, os.listdir(path.parent))):
        return f": {near}"
    if stem in shipped_traces():
        return f", and {PREFIX}{stem} is one that ships"
    models = (trace.name for trace in read_manifest() if path.name in (trace.model, trace.name))
    first = next(models, None)
    return f", and {ZOO_PREFIX}{first} is one of the zoo" if first is not None else ""
