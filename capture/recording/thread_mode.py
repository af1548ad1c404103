"""What the rest of a capture knows of the mode that records a thread."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

from opgrip.capture.program.places import Place
from opgrip.capture.signatures.predictions import Node
from opgrip.capture.timing.device_time import DeviceTimer
from opgrip.capture.timing.own_work import OwnWork
from opgrip.capture.timing.page_faults import FaultCounter
from opgrip.capture.torch_compat.compiler_private import OrderlyMode


class ThreadMode(OrderlyMode):
    """Records the calls of one thread.

    Attributes
    ----------
    number : of the thread's mode; a thread's ident goes to another thread when it ends
    idents : numbers that an accelerator's records may name the thread by
    place : where the thread is; hooks change it by `enter` and `leave`
    rows : of each call: pair, start and end in ns, sequence number of autograd, negative in a backward pass, and the
        storages of its tensors, those that it took before those that it gave. A call is added in one go, which nothing
        can come between
    first_sequence : sequence number of autograd before the first call
    idle : calls are not recorded
    epochs : of the recorder's tables, the first and the last one whose numbers this thread may use; no last one while
        it looks a call up
    device : times of the calls on an accelerator
    faults : page faults of the calls that may get much memory
    own_work : what the capture did between calls beside what the fast way of recording one takes
    ended : whether the thread has ended, as far as that is told
    """

    number: int
    idents: tuple[int, ...]
    thread_name: str
    place: Place
    rows: list[int]
    first_sequence: int
    idle: bool
    epochs: tuple[int, int | None]
    device: DeviceTimer
    faults: FaultCounter
    own_work: OwnWork
    ended = False

    @abstractmethod
    def begin(self) -> None:
        """Begin with empty tables where the program is."""

    @abstractmethod
    def call(
        self,
        name: str,
        kind: str,
        run: Callable[[], Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        shown: Callable[[Any], Any] | None = None,
    ) -> Any:
        """Record and run a function that the dispatcher does not see; what it calls in turn is inside it.

        Parameters
        ----------
        run : calls the function
        args, kwargs : of the function, for the record alone
        shown : gives the result for the record; None where it is recorded as it is
        """

    @abstractmethod
    def running(self, last_start: int, last_end: int) -> list[tuple[int, Node]]:
        """Start in ns and node of the calls that the thread is in, outermost first.

        Parameters
        ----------
        last_start, last_end : of the last call that was taken from `rows`
        """

    @abstractmethod
    def enter(self, token: object, place: Place, frame: FrameType | None = None) -> None:
        """Go to a place, until `leave` is called with the same token.

        Parameters
        ----------
        frame : leaves the place when it ends, where nothing else tells that
        """

    @abstractmethod
    def leave(self, token: object) -> None:
        """Go back to where the thread was before it entered with this token, and thereby leave all places within."""

    @abstractmethod
    def leave_to(self, depth: int) -> None:
        """Leave all places that were entered since `depth` was so; does nothing where they have been left."""

    @abstractmethod
    def set_autocast(self, autocast: str) -> None:
        """Take note of what autocast is on for in this thread."""

    @abstractmethod
    def look_at_settings(self) -> None:
        """Notice that settings of torch were changed, which the scopes of calls to come refer to."""

    @abstractmethod
    def depth(self) -> int:
        """How many places, of modules and functions, the thread has entered and not left."""

    @abstractmethod
    def look_at(self, signature: int) -> None:
        """Look at the values of the next call of a signature that is made from a point where one was."""

    @abstractmethod
    def settle(self) -> None:
        """Notice that a backward pass, or a step that failed, is over."""
