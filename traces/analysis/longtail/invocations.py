"""How often functions were called, as far as the lines of their operators tell."""

from __future__ import annotations

from dataclasses import dataclass

from opgrip.traces.analysis.longtail.calls import BACKWARD, Function, MadeCall, function_of


@dataclass(slots=True)
class _Open:
    """A call of a function that goes on.

    Attributes
    ----------
    line, op : of its first operator
    moved : whether its last operator was on another line
    last : place of its last operator among those of the thread
    """

    line: int
    op: str
    moved: bool
    last: int


class Invocations:
    """By function, how often one thread called it.

    A trace holds operators, not calls of Python functions. A new call of a function is taken to begin where its first
    operator comes again: the same operator on the same line, after one on another line or after other functions' calls.
    So does one where a line before the first comes, after other functions' calls. A loop around the whole body thus
    counts its rounds. Backward passes begin no call; a function that has nothing else counts as called once.
    """

    def __init__(self) -> None:
        self.counts: dict[Function, int] = {}
        self._opened: dict[tuple[Function, str], _Open] = {}
        self._index = -1

    def note(self, call: MadeCall) -> None:
        """Take note of the thread's next call."""
        self._index += 1
        if call.place is None:
            return
        function = function_of(call)
        self.counts.setdefault(function, 0)
        if call.place.phase == BACKWARD:
            return
        open_call = self._opened.get((function, call.module))
        if open_call is None or _begins(open_call, call, self._index):
            self.counts[function] += 1
            self._opened[function, call.module] = _Open(call.line, call.operation.op, False, self._index)
        else:
            open_call.moved = call.line != open_call.line
            open_call.last = self._index


def _begins(open_call: _Open, call: MadeCall, index: int) -> bool:
    came_back = index != open_call.last + 1
    if call.line == open_call.line and call.operation.op == open_call.op:
        return open_call.moved or came_back
    return came_back and call.line < open_call.line
