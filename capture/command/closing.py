"""What a command says of a capture that has ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from opgrip.capture.session.capture import Capture

MOST_NAMES = 4
"""Files, or operators, that are named; of more, how many they are."""


def closing_lines(capture: Capture, interrupted: bool = False) -> Iterator[str]:
    """Lines on what was recorded, where it is, what is missing, and what to do with it.

    Parameters
    ----------
    interrupted : whether the user ended the program
    """
    where = "stdout" if str(capture.path) == "-" else str(capture.path)
    if capture.keeps_last:
        yield from _dump_lines(capture)
    elif capture.calls or capture.dropped:
        ending = " (interrupted)" if interrupted else ""
        size = f"{capture.bytes_written / 1000:,.0f} kB"
        counts = f"{_count(capture.calls, 'call')} of {_count(capture.signatures, 'signature')}"
        yield f"{counts}, {size}, to {where}{ending}"
    elif interrupted:
        yield "interrupted before a call was recorded: there is no trace"
    else:
        yield "no operator was called: there is no trace, and nothing to replay"
    if capture.stopped:
        yield f"the recording ended at the limit of {capture.stopped}: what the program called after them is missing"
    if capture.dropped:
        advice = "" if capture.keeps_last and not capture.dumps else f"; `opgrip trace info {where}` says why"
        yield f"{_count(capture.dropped, 'call')} could not be recorded{advice}"
    yield from _values_lines(capture)
    if operators := capture.custom_operators:
        yield f"names of custom operators stay, for replays: {_first(operators)}; `opgrip trace redact` can hide them"
    yield from _child_lines(capture)
    for folder in capture.grips.written:
        yield f"a sample in {folder}: run it with pytest"
    yield from capture.notes()
    if capture.calls:
        yield from capture.doubts
    if capture.calls and where != "stdout":
        yield f"run them again with: opreplay {_shown(capture, capture.dumps[-1]) if capture.dumps else where}"


def _dump_lines(capture: Capture) -> Iterator[str]:
    for path in capture.dumps:
        yield f"the last calls before something happened, to {_shown(capture, path)}"
    if not capture.dumps:
        yield "nothing happened: the last calls were not written"


def _shown(capture: Capture, path: Path) -> Path:
    """The name of a file beside the capture's path, as that was given."""
    return Path(capture.path).with_name(path.name)


def _values_lines(capture: Capture) -> Iterator[str]:
    full = capture.full_values
    if full is not None and full.failure is None and capture.calls:
        size = f"{full.bytes_written / 1000:,.0f} kB"
        yield f"whole values of {full.tensors:,} tensors, {size}, to {full.path.name}: they can be private data"


def _child_lines(capture: Capture) -> Iterator[str]:
    children, old = capture.child_files, capture.old_child_files
    if old:
        yield f"of an earlier run, and removed by --force: {_names(old)}"
    if not children:
        return
    processes = "a process that it forked" if len(children) == 1 else f"{len(children)} processes that it forked"
    yield f"calls of {processes}, to {_names(children)}"
    if capture.calls:
        yield f"`opgrip trace merge` makes one trace of these and {Path(capture.path).name}"


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def _names(files: Sequence[Path]) -> str:
    return _first([file.name for file in files])


def _first(names: Sequence[str]) -> str:
    shown = ", ".join(names[:MOST_NAMES])
    return shown if len(names) <= MOST_NAMES else f"{shown} and {len(names) - MOST_NAMES} more"
