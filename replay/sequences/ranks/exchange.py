"""The collectives of one rank while they run: when it came to each, when each was done, and how long it was held up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from time import perf_counter_ns
from typing import Any

import torch
from torch import distributed

from opgrip.errors import one_line
from opgrip.replay.operators.lookup import Unsupported
from opgrip.replay.sequences.ranks.control import RankEndedError
from opgrip.replay.sequences.ranks.running import Started, Work


class Exchange:
    """Starts and waits for the collectives of a pass.

    Parameters
    ----------
    waits : by the place of a call, the collectives that have to be done before it
    synchronize : waits for the accelerator
    on_device : whether there is one: there each collective is waited for at once, so that its time is its own

    Attributes
    ----------
    arrived_ns, done_ns, held_ns : by the place of a collective, when it was started and done, and how long this thread
        was held up by it
    """

    def __init__(self, waits: Mapping[int, Sequence[int]], synchronize: Callable[[], object], on_device: bool) -> None:
        self._waits, self._synchronize, self._on_device = waits, synchronize, on_device
        self._works: dict[int, list[Work]] = {}
        self._notes: dict[int, list[int]] = {}
        self.arrived_ns: dict[int, int] = {}
        self.done_ns: dict[int, int] = {}
        self.held_ns: dict[int, int] = {}

    def begin(self) -> None:
        """Begin a pass."""
        self.finish()
        self.arrived_ns, self.done_ns, self.held_ns = {}, {}, {}

    def before(self, place: int) -> None:
        """Wait for the collectives whose memory a call takes."""
        for other in self._waits.get(place, ()):
            self._wait(other)

    def start(
        self, place: int, starter: Callable[..., Started], arguments: Sequence[Any], is_async: bool
    ) -> list[torch.Tensor]:
        """Start the collective at a place, and give its results, which may not be there yet.

        Raises
        ------
        RankEndedError : where another rank has ended
        Unsupported : where the group's backend cannot run it, which all its ranks find
        """
        self._synchronize()
        start = perf_counter_ns()
        try:
            results, works = starter(*arguments)
        except distributed.DistError as error:
            raise RankEndedError(one_line(error)) from error
        except (RuntimeError, ValueError, TypeError) as error:
            raise Unsupported(one_line(error)) from error
        self.arrived_ns[place] = start
        self._works[place] = [work for work in works if work is not None]
        self.held_ns[place] = perf_counter_ns() - start
        if is_async and not self._on_device:
            self._note_ends(place)
        else:
            self._wait(place)
        return results

    def finish(self) -> None:
        """Wait for all that has been started."""
        for place in list(self._works):
            self._wait(place)

    def _note_ends(self, place: int) -> None:
        """Let the end be noted when it comes, as the program may come to wait for it later."""
        notes: list[int] = []
        # gloo's messages from rank to rank have none: they are done when they are waited for
        with suppress(RuntimeError):
            for work in self._works[place]:
                work.get_future().add_done_callback(lambda _: notes.append(perf_counter_ns()))
        self._notes[place] = notes

    def _wait(self, place: int) -> None:
        works = self._works.pop(place, None)
        if works is None:
            return
        start = perf_counter_ns()
        try:
            for work in works:
                work.wait()
            self._synchronize()
        except RuntimeError as error:
            raise RankEndedError(one_line(error)) from error
        end = perf_counter_ns()
        self.held_ns[place] += end - start
        notes = self._notes.pop(place, [])
        # a note that comes after this thread went on is late
        self.done_ns[place] = min(end, max(notes)) if len(notes) == len(works) > 0 else end
