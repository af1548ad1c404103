"""The traces that ship, which are named `trace:NAME` wherever a file of a trace can be."""

from __future__ import annotations

from pathlib import Path

from opgrip.traces.errors import MissingFileError
from opgrip.traces.suggestions import did_you_mean

PREFIX = "trace:"


def shipped_traces() -> dict[str, Path]:
    """Their files by their names."""
    files = sorted(Path(__file__).parent.glob("*.jsonl*"))
    return {file.name.partition(".")[0]: file for file in files}


def trace_file(path: str | Path) -> Path:
    """The file that a path, or the name of a trace that ships, stands for.

    Raises
    ------
    MissingFileError : where none of that name ships
    """
    text = str(path)
    if not text.startswith(PREFIX) or Path(path).exists():
        return Path(path)
    traces = shipped_traces()
    name = text.removeprefix(PREFIX)
    if name not in traces:
        raise MissingFileError(f"no trace {name!r} ships", did_you_mean(name, traces, f"there is {', '.join(traces)}"))
    return traces[name]


def hint_for_missing(path: Path) -> str:
    """What to say of a file that is not there: the trace that ships under its name, or of standard input."""
    if str(path) == "-":
        return ", and standard input is not read"
    name = path.name.partition(".")[0]
    return f", and {PREFIX}{name} is one that ships" if name in shipped_traces() else ""
