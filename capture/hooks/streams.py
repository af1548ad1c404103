"""The program's use of accelerator streams: which stream a call uses, and which stream waits for which.

The stream of each call is recorded only after the program has made another stream current. Waits of `torch.Stream` and
`torch.Event`, and a `torch.Stream` as a context, are not seen: these classes are in C, and their methods cannot be
replaced.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any
from weakref import WeakKeyDictionary

import torch

from opgrip.capture.program.accelerators import accelerators, current_stream, is_own_stream, is_started, with_index
from opgrip.capture.program.patches import Patches
from opgrip.capture.recording.recorder import Recorder
from opgrip.errors import raise_if_from_program
from opgrip.traces.schema.accelerator_records import Wait

# function that records the effect of a function of torch, such as a wait, from that function's result and arguments
Note = Callable[..., None]


class StreamWatch:
    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._patches = Patches()
        self._inside = threading.local()
        self._marks: WeakKeyDictionary[Any, tuple[str, int, int]] = WeakKeyDictionary()

    def __enter__(self) -> StreamWatch:
        self._patches.replace(torch.accelerator, "set_stream", functools.partial(self._noting, self._changed))
        for kind in accelerators():
            module = getattr(torch, kind, None)
            if module is None or not hasattr(module, "set_stream"):
                continue
            self._patches.replace(module, "set_stream", functools.partial(self._noting, self._changed))
            methods_by_class: tuple[tuple[str, dict[str, Note]], ...] = (
                ("Stream", {"record_event": self._marked, "wait_event": self._waited, "wait_stream": self._joined}),
                ("Event", {"record": self._recorded, "wait": self._waited_in}),
            )
            for name, methods in methods_by_class:
                owner = getattr(module, name, None)
                for method, note in methods.items() if isinstance(owner, type) else ():
                    self._patches.replace(owner, method, functools.partial(self._noting, note))
            if is_started(kind):
                self._changed(None, current_stream(with_index(torch.device(kind))))
        return self

    def __exit__(self, *ignored: object) -> None:
        self._patches.undo()

    def _noting(self, note: Note, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            # calls that one wrapped function makes of another are not noted
            if getattr(self._inside, "active", False):
                return original(*args, **kwargs)
            self._inside.active = True
            try:
                result = original(*args, **kwargs)
            finally:
                self._inside.active = False
            try:
                if not is_own_stream():
                    note(result, *args, **kwargs)
            except Exception as error:
                raise_if_from_program(error)
            return result

        return call

    def _changed(self, result: Any, stream: Any) -> None:
        if stream is not None and stream.stream_id != 0 and not self._recorder.uses_streams:
            self._recorder.use_streams()

    def _marked(self, event: Any, stream: Any, *ignored: Any, **others: Any) -> None:
        self._marks[event] = (*_name(stream), perf_counter_ns())

    def _recorded(self, result: Any, event: Any, stream: Any = None) -> None:
        self._marked(event, _here(event) if stream is None else stream)

    def _waited(self, result: Any, stream: Any, event: Any) -> None:
        mark = self._marks.get(event)
        if mark is not None:
            self._add(stream, *mark)

    def _waited_in(self, result: Any, event: Any, stream: Any = None) -> None:
        self._waited(None, _here(event) if stream is None else stream, event)

    def _joined(self, result: Any, stream: Any, other: Any) -> None:
        self._add(stream, *_name(other), perf_counter_ns())

    def _add(self, stream: Any, on_device: str, on_stream: int, until_ns: int) -> None:
        device, number = _name(stream)
        recorder = self._recorder
        if (device, number) != (on_device, on_stream) and not recorder.threads.idle:
            at_ns = perf_counter_ns() - recorder.started_ns
            recorder.pending.add(Wait(at_ns, device, number, on_device, on_stream, until_ns - recorder.started_ns))


def _name(stream: Any) -> tuple[str, int]:
    return str(stream.device), int(stream.stream_id)


def _here(event: Any) -> Any:
    return current_stream(with_index(torch.device(event.device.type)))
