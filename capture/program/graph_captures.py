"""When a program captures a CUDA graph: then no thread may ask a device anything, or the program's capture is lost.

`torch.cuda.graph` forbids it to all threads of the process (`capture_error_mode="global"`), the recording's own too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Condition
from types import TracebackType
from typing import Any

import torch

from opgrip.capture.program.accelerators import accelerators
from opgrip.capture.program.patches import Patches

CLASSES = ("CUDAGraph", "XPUGraph", "Graph")
"""What the modules of accelerators call theirs; each has `capture_begin` and `capture_end`."""


class GraphCaptures:
    """Lets the recording ask devices between the program's captures of graphs, and these begin between questions."""

    def __init__(self) -> None:
        self._patches = Patches()
        self.forget()

    def forget(self) -> None:
        """Begin with no capture and no question, as a forked process does, of whose threads this one alone is left."""
        self._changed = Condition()
        self._ongoing = self._questions = 0

    def __enter__(self) -> GraphCaptures:
        for kind in accelerators():
            for name in CLASSES:
                graph = getattr(getattr(torch, kind, None), name, None)
                if hasattr(graph, "capture_begin") and hasattr(graph, "capture_end"):
                    self._patches.replace(graph, "capture_begin", self._beginning)
                    self._patches.replace(graph, "capture_end", self._ending)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._patches.undo()

    @property
    def is_ongoing(self) -> bool:
        """Whether the program captures one now."""
        return self._ongoing > 0

    @contextmanager
    def question(self) -> Iterator[bool]:
        """A block in which devices may be asked, and no capture begins; yields False where one is under way."""
        with self._changed:
            may_ask = self._ongoing == 0
            self._questions += may_ask
        try:
            yield may_ask
        finally:
            with self._changed:
                self._questions -= may_ask
                self._changed.notify_all()

    def _beginning(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def capture_begin(*args: Any, **kwargs: Any) -> Any:
            with self._changed:
                self._changed.wait_for(lambda: not self._questions)
                self._ongoing += 1
            try:
                return original(*args, **kwargs)
            except BaseException:
                self._end()
                raise

        return capture_begin

    def _ending(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def capture_end(*args: Any, **kwargs: Any) -> Any:
            try:
                return original(*args, **kwargs)
            finally:
                self._end()

        return capture_end

    def _end(self) -> None:
        with self._changed:
            # one that began before this was watching is not counted
            self._ongoing = max(0, self._ongoing - 1)
