"""A thread's mode that knows where the thread is: in which modules and functions, in a backward pass or not."""

from __future__ import annotations

from types import FrameType
from typing import Any

from opgrip.capture.contexts import describe_autocast
from opgrip.capture.places import BACKWARD, FORWARD, Place, is_running
from opgrip.capture.predictions import Node, Predictions
from opgrip.capture.recorder import Recorder
from opgrip.capture.thread_mode import ThreadMode
from opgrip.capture.torch_private import NO_SEQUENCE, current_autograd_node

UNPAIRED = -(1 << 62)
"""Sequence number of a call that made no node, and of one in a backward pass whose node no forward call made."""


class PlacedMode(ThreadMode):
    """Follows where its thread is.

    Attributes
    ----------
    last : node of the operator call that was entered last, or where the calls of a place begin
    """

    last: Node
    predictions: Predictions

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder
        self.place = recorder.places.at(autocast=describe_autocast())
        self._in_backward = False
        self._before_backward = FORWARD
        self._outer: list[tuple[object, Place]] = []
        self._frames: list[tuple[object, FrameType]] = []

    def enter(self, token: object, place: Place, frame: FrameType | None = None) -> None:
        self._outer.append((token, self.place))
        if frame is not None:
            self._frames.append((token, frame))
        self._go(place)

    def leave(self, token: object) -> None:
        outer = self._outer
        if not outer or outer[-1][0] is not token:
            if all(entered is not token for entered, _ in outer):
                return
            while outer[-1][0] is not token:
                self._forget_frame(outer.pop()[0])
        place = outer.pop()[1]
        self._forget_frame(token)
        self._go(place)

    def depth(self) -> int:
        return len(self._outer)

    def set_autocast(self, autocast: str) -> None:
        self._go(self.recorder.places.autocast(self.place, autocast))

    def settle(self) -> None:
        if self._in_backward and current_autograd_node() is None:
            self._leave_backward()
        while self._frames and not is_running(self._frames[-1][1]):
            self.leave(self._frames.pop()[0])

    def _forget_frame(self, token: object) -> None:
        if self._frames and self._frames[-1][0] is token:
            self._frames.pop()

    def _go(self, place: Place) -> None:
        before, self.place = self.place, place
        self.last = self.predictions.start_of(place, self.last, before)

    def _enter_backward(self, autograd_node: Any) -> int:
        if not self._in_backward:
            self._in_backward, self._before_backward = True, self.place.phase
            self._go(self.recorder.places.phase(self.place, BACKWARD))
        number = autograd_node._sequence_nr()
        return UNPAIRED if number == NO_SEQUENCE else -1 - int(number)

    def _leave_backward(self) -> None:
        self._in_backward = False
        self._go(self.recorder.places.phase(self.place, self._before_backward))
