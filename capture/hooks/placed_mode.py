"""A thread's mode that knows where the thread is: in which modules and functions, in a backward pass or not."""

from __future__ import annotations

from types import FrameType
from typing import Any

from opgrip.capture.program.contexts import describe_autocast
from opgrip.capture.program.places import BACKWARD, FORWARD, Place, is_running
from opgrip.capture.recording.recorder import Recorder
from opgrip.capture.recording.thread_mode import ThreadMode
from opgrip.capture.signatures.predictions import Node, Predictions
from opgrip.capture.torch_compat.torch_private import NO_SEQUENCE, current_autograd_node

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
        # what interrupts this is mended by `leave_to`, or by the frame's end
        if frame is not None:
            self._frames.append((token, frame))
        self._outer.append((token, self.place))
        self._go(place)

    def leave(self, token: object) -> None:
        outer = self._outer
        depth = len(outer) - 1
        if depth < 0 or outer[depth][0] is not token:
            depth = next((depth for depth in range(depth, -1, -1) if outer[depth][0] is token), -1)
            if depth < 0:
                return
        self.leave_to(depth)

    def leave_to(self, depth: int) -> None:
        outer = self._outer
        if len(outer) > depth:
            left = outer[depth:] if self._frames else ()
            self._go(outer[depth][1], depth)
            for token, _ in left:
                self._forget_frame(token)

    def depth(self) -> int:
        return len(self._outer)

    def set_autocast(self, autocast: str) -> None:
        self._go(self.recorder.places.autocast(self.place, autocast))

    def settle(self) -> None:
        if self._in_backward and current_autograd_node() is None:
            self._leave_backward()
        while self._frames and not is_running(self._frames[-1][1]):
            token = self._frames[-1][0]
            self.leave(token)
            self._forget_frame(token)

    def _forget_frame(self, token: object) -> None:
        self._frames = [entry for entry in self._frames if entry[0] is not token]

    def _go(self, place: Place, depth: int | None = None, in_backward: bool | None = None) -> None:
        """Go to a place; leave all that was entered beyond a depth."""
        # no call stands between these, so that no exception of the program can: the thread is in the one place or in
        # the other, and nothing is foreseen
        before, self.place = self.place, place
        last, self.last = self.last, self.predictions.nowhere
        if depth is not None:
            del self._outer[depth:]
        if in_backward is not None:
            self._in_backward = in_backward
        self.last = self.predictions.start_of(place, last, before)

    def _enter_backward(self, autograd_node: Any) -> int:
        if not self._in_backward:
            self._before_backward = self.place.phase
            self._go(self.recorder.places.phase(self.place, BACKWARD), in_backward=True)
        number = autograd_node._sequence_nr()
        return UNPAIRED if number == NO_SEQUENCE else -1 - int(number)

    def _leave_backward(self) -> None:
        self._go(self.recorder.places.phase(self.place, self._before_backward), in_backward=False)
