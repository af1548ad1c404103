"""Recognizes a call by what followed last time, since programs repeat themselves.

Building a call's key (`call_key`) costs more than all else that a capture does for a call. So a thread remembers which
call followed which, and checks a call first against the prediction.

Promise: a prediction never changes what is recorded. A call is taken for a known signature only if a compiled test says
that its arguments have exactly the metadata and scalars of that signature; the test may fail for equal arguments, never
pass for different ones. Memory that arguments share is compared apart (`sharing`). If no test passes, the key decides.

How a call is found, each step dearer than the one before it:

1. `CallPoint.after`: the point that followed the last one most recently. Same operator, same grad mode, test passes:
   this is what the fast path in `hooks/dispatch.py` does by itself.
2. `successor`: the last `SUCCESSORS` points that followed the last one, such as those of the two branches of an `if`.
3. `recent`: the last `CANDIDATES` signatures of the operator, whatever came before.
4. `entry`: the signature is looked up by its key. From its third lookup on, it gets a test (`add_tests`).

A `CallPoint` is a signature at a place of the program after the same few signatures (`HISTORY`): this tells calls of
one line in a loop apart. It is made when the program first gets there, which also finds the source line of the call.
The history has *families* in place of signatures: an optimizer that passes its step as a number has a new signature in
each step, and goes on behind it as it did behind the last one. Whenever the program goes to another place (a module, a
backward pass), prediction starts from a point for that turn (`start_of`).

The tests are those of torch's compiler, guards, which `torch_compat/torch_private.py` builds. A torch without them has
no tests; then every call is looked up by its key.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from opgrip.capture.program.places import Location
from opgrip.capture.torch_compat.torch_private import Check, arguments_check, is_composite, keywords_check

HISTORY = 6
"""Number of preceding calls that distinguish points of a program, by their signatures' families."""
CANDIDATES = 3
"""Number of signatures of an operator that are tried before the key is built."""
MOST_NODES = 100_000
"""Number of points that are remembered for a thread."""
SIGHTINGS = 3
"""Calls of a signature after its first before a test is made for it, which costs as much as several lookups by key."""
SUCCESSORS = 4
"""Number of points after one that are tried before the signatures of the operator."""
LEARNT, NEVER = 1, 1 << 62
"""`SIGHTINGS` in steps that only teach the capture, and for signatures that get no test."""
MOST_TESTS = 3
"""Number of tests made for one signature: one may fail under another state of the dispatcher."""

Point = tuple[Location, tuple[bool, bool], tuple[int, ...], int]
"""Location, whether gradients and inference mode are on, history, signature."""
NO_MODES = (False, False)

CAREFUL, ONE, TWO, SEVERAL, LISTED = range(5)
"""Layouts, where a call's tensors are: anywhere; in the first argument; the first two; some; in a list, the first."""


def sharing(storages: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return for each storage the index of its first occurrence; None if all differ."""
    return None if len(set(storages)) == len(storages) else tuple(map(storages.index, storages))


def never(*ignored: object) -> bool:
    """Fail as a test."""
    return False


class Recognizer:
    """A signature and how to recognize its calls.

    Attributes
    ----------
    family : number of the first signature of the operator on such tensors, with whatever scalars
    check : of the arguments of a call without keyword arguments
    check_both : of the arguments and keyword arguments of a call with both
    layout : where its tensors are, and `places`, the indices of the arguments that they are
    alias : which of its tensors the single tensor that it returns shares memory with; -1 for memory of its own
    sharing : which of its tensors share memory, as `sharing` gives it
    timed : whether `op` also times the operator on its device, or counts its page faults
    """

    __slots__ = (
        *("alias", "check", "check_both", "family", "func", "layout", "number", "op", "places", "sharing", "timed"),
    )

    def __init__(self, number: int, func: Any, sharing: tuple[int, ...] | None = None, family: int = -1) -> None:
        self.number = number
        self.family = family
        self.func = func
        self.op: Callable[..., Any] = getattr(func, "_op", func)
        self.check: Check = never
        self.check_both: Callable[[Any, Any], bool] = never
        self.timed = False
        self.layout = CAREFUL
        self.places: tuple[int, ...] = ()
        self.alias = -1
        self.sharing = sharing

    def holds(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Return True if the tests recognize a call as one of the signature."""
        return self.check_both(args, kwargs) if kwargs else self.check(args)


class CallPoint(Recognizer):
    """A signature at a point of the program.

    Attributes
    ----------
    after : the point that followed last time
    successors : the last few that did, the last one first
    history : the families of the last signatures, this one's included
    grad : whether gradients are on
    turns : the points to go on from when the program goes to another place
    scope : number of its scope
    pair : the number that its calls carry where they give one tensor
    """

    __slots__ = ("after", "grad", "history", "pair", "scope", "successors", "turns")

    def __init__(
        self,
        entry: Recognizer,
        history: tuple[int, ...],
        scope: int,
        pair: int,
        after: CallPoint | None,
        grad: bool = False,
    ) -> None:
        for name in Recognizer.__slots__:
            setattr(self, name, getattr(entry, name))
        self.history = history
        self.scope = scope
        self.pair = pair
        self.grad = grad
        self.after = after or self
        self.successors: tuple[CallPoint, ...] = ()
        self.turns: dict[Location, CallPoint] = {}


class CallPredictor:
    """The recognizers and points of one thread."""

    def __init__(self) -> None:
        self.nowhere = CallPoint(Recognizer(-1, None), (), -1, -1, None)
        self._recent: dict[int, list[Recognizer]] = {}
        self._entries: dict[int, Recognizer] = {}
        self._sightings: Counter[int] = Counter()
        self._tests: Counter[int] = Counter()
        self._nodes: dict[Point, CallPoint] = {}
        self._newest_alike: dict[Point, CallPoint] = {}

    def start_of(self, place: Location, last: CallPoint, before: Location) -> CallPoint:
        """Return the point that predicts what comes first after the program has gone to another place.

        Parameters
        ----------
        before : the place that it left
        """
        start = last.turns.get(place)
        if start is None:
            history = (-1, id(before), *last.history[-2:])
            start = self._nodes.get((place, NO_MODES, history, -1))
            if start is None:
                start = CallPoint(self.nowhere, history, -1, -1, self.nowhere)
                self._keep((place, NO_MODES, history, -1), start)
            last.turns[place] = start
        return start

    def successor(
        self,
        last: CallPoint,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        pattern: tuple[int, ...] | None,
    ) -> CallPoint | None:
        """Return the point of a call if it is among those that followed the last one.

        Parameters
        ----------
        pattern : how the call's tensors share memory, as `sharing` gives it
        """
        grad = torch.is_grad_enabled()
        for node in last.successors:
            if node.func is func and node.grad is grad and node.sharing == pattern and node.holds(args, kwargs):
                last.after = node
                return node
        return None

    def recent(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], pattern: tuple[int, ...] | None
    ) -> Recognizer | None:
        """Return the recognizer of a call if it is among the operator's last ones."""
        for entry in self._recent.get(id(func), ()):
            if entry.sharing == pattern and entry.holds(args, kwargs):
                return entry
        return None

    def entry(
        self,
        number: int,
        family: int,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        storages: tuple[int, ...],
        sightings: int = SIGHTINGS,
    ) -> Recognizer:
        """Return the recognizer of a known signature, with a test that passes for these arguments.

        Parameters
        ----------
        sightings : make a test from this call of the signature on
        """
        entry = self._entries.get(number)
        if entry is None:
            entry = self._entries[number] = Recognizer(number, func, sharing(storages), family)
        self._sightings[number] += 1
        if self._sightings[number] < sightings:
            return entry
        if not entry.holds(args, kwargs) and self._tests[number] < MOST_TESTS:
            self._tests[number] += 1
            add_tests(entry, args, kwargs)
        recent = self._recent.setdefault(id(func), [])
        if entry in recent:
            recent.remove(entry)
        recent.insert(0, entry)
        del recent[CANDIDATES:]
        return entry

    def node(
        self,
        last: CallPoint,
        place: Location,
        entry: Recognizer,
        modes: tuple[bool, bool],
        point: Callable[[], tuple[int, int]],
    ) -> CallPoint:
        """Return the point at which a recognized call follows another one.

        Parameters
        ----------
        modes : whether gradients are on, and inference mode
        point : gives scope and pair of a new one
        """
        key = place, modes, last.history, entry.number
        node = self._nodes.get(key)
        if node is None or node.check is not entry.check or node.check_both is not entry.check_both:
            stale_node = node
            scope, pair = point() if stale_node is None else (stale_node.scope, stale_node.pair)
            history = (*last.history, entry.family)[-HISTORY:]
            node = CallPoint(entry, history, scope, pair, self.nowhere, modes[0])
            self._follow_kin(node, (place, modes, last.history, entry.family))
            if entry.number in self._entries:
                # met before, so it may well come again
                self._keep(key, node)
        last.after = node
        if node not in last.successors:
            last.successors = (node, *last.successors[: SUCCESSORS - 1])
        return node

    def _follow_kin(self, node: CallPoint, point: Point) -> None:
        """Expect after a new point what followed the last one of its family here."""
        kin = self._newest_alike.get(point)
        if kin is not None:
            node.after, node.successors = kin.after, kin.successors
        if kin is not None or len(self._newest_alike) < MOST_NODES:
            self._newest_alike[point] = node

    def nodes_of(self, number: int) -> list[CallPoint]:
        """Return the points of a signature."""
        # a copy, made in one go: the thread that owns them may add to them meanwhile
        return [node for node in list(self._nodes.values()) if node.number == number]

    def forget_nodes(self) -> None:
        """Forget all points, whose scopes may be others now."""
        self.nowhere = CallPoint(Recognizer(-1, None), (), -1, -1, None)
        self._nodes.clear()
        self._newest_alike.clear()

    def _keep(self, key: Point, node: CallPoint) -> None:
        if len(self._nodes) < MOST_NODES:
            self._nodes[key] = node


def add_tests(entry: Recognizer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Give a recognizer the tests that pass for these arguments, and the layout of its tensors."""
    check = arguments_check(args, _has_typed_lists(entry.func))
    if check is None:
        return
    if kwargs:
        of_keywords = keywords_check(kwargs)
        if of_keywords is not None:
            entry.check_both = lambda args, kwargs: check(args) and of_keywords(kwargs)
    else:
        entry.check = check
    if any(isinstance(value, torch.Tensor | list | tuple) for value in kwargs.values()):
        return
    places = tuple(place for place, value in enumerate(args) if isinstance(value, torch.Tensor))
    lists = [place for place, value in enumerate(args) if isinstance(value, list | tuple) and _has_tensors(value)]
    if lists == [0] and not places and all(isinstance(item, torch.Tensor) for item in args[0]):
        entry.layout = LISTED
    elif not lists:
        layout = {(0,): ONE, (0, 1): TWO}.get(places, SEVERAL)
        # nothing can come between these
        entry.places, entry.layout = places, layout
    if entry.layout in (ONE, TWO, SEVERAL):
        entry.alias = _alias(entry.func, places)


def _has_typed_lists(func: Any) -> bool:
    """Return True if the operator's lists of integers cannot hold floats that are equal to integers."""
    schema = getattr(func, "_schema", None)
    return schema is not None and all("Scalar[]" not in str(argument.type) for argument in schema.arguments)


def _has_tensors(values: Sequence[Any]) -> bool:
    return any(isinstance(item, torch.Tensor | list | tuple) for item in values)


def _alias(func: Any, places: tuple[int, ...]) -> int:
    """Return which tensor argument an operator's single result always shares memory with; -1 for none."""
    schema = getattr(func, "_schema", None)
    if schema is None or len(schema.returns) != 1 or schema.returns[0].alias_info is None:
        return -1
    if is_composite(func):
        # such as aten.to, which may return its argument and may not
        return -1
    alias_set = schema.returns[0].alias_info.before_set
    for index, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.before_set == alias_set and index in places:
            return places.index(index)
    return -1
