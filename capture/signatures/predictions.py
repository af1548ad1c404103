"""Recognizes a call by what followed last time, since programs repeat themselves.

Building a call's key costs more than all else that a capture does. So a call is first held against the one that came
next when the thread was last at this point: the same operator, and a compiled test of its arguments says whether they
are the same. Only where that fails is the key built and looked up.

A point is a `CallPoint`: a signature in a place, after the same few signatures. It is made where it is first met, and
then also tells the source line of the call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from opgrip.capture.program.places import Location
from opgrip.capture.torch_compat.torch_private import Check, arguments_check, keywords_check

HISTORY = 6
"""Calls that tell one point of a program from another, by their signatures' families."""
CANDIDATES = 3
"""Signatures of an operator that are tried before the key is built."""
MOST_NODES = 100_000
"""Nodes kept for a thread; beyond these, points are not remembered."""
SIGHTINGS = 3
"""Calls of a signature after its first before a test is made for it, which costs as much as several lookups by key."""
SUCCESSORS = 4
"""Nodes after one that are tried before those of the operator are."""
LEARNT, NEVER = 1, 1 << 62
"""The same in steps in which the capture learns, that those after them need none; and where there is to be none."""
MOST_TESTS = 3
"""Tests made for one signature: one may fail under another state of the dispatcher."""

Point = tuple[Location, tuple[bool, bool], tuple[int, ...], int]
"""Location, whether gradients and inference mode are on, history, signature."""
NO_MODES = (False, False)

CAREFUL, ONE, TWO, SEVERAL, LISTED = range(5)
"""Where a call's tensors are: anywhere; the first argument; the first two; some arguments; in a list, the first one."""


def sharing(storages: tuple[int, ...]) -> tuple[int, ...] | None:
    """For each storage the place of its first mention; None where each is mentioned once."""
    return None if len(set(storages)) == len(storages) else tuple(map(storages.index, storages))


def never(*ignored: object) -> bool:
    """A test that fails."""
    return False


class Recognizer:
    """A signature, and how to recognize its calls.

    Attributes
    ----------
    family : number of the first signature of the operator on such tensors, with whatever numbers: an optimizer whose
        step counts in one has a new signature in each step, and goes on as ever behind it
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
        """Whether the tests say that a call is one of the signature's."""
        return self.check_both(args, kwargs) if kwargs else self.check(args)


class CallPoint(Recognizer):
    """An entry at a point of the program.

    Attributes
    ----------
    after : the node that followed last time
    successors : the last few that did, the last one first
    history : the families of the last signatures, this one's included
    grad : whether gradients are on
    turns : the nodes to go on from where the program goes to another place
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
    """The entries and nodes of one thread."""

    def __init__(self) -> None:
        self.nowhere = CallPoint(Recognizer(-1, None), (), -1, -1, None)
        self._recent: dict[int, list[Recognizer]] = {}
        self._entries: dict[int, Recognizer] = {}
        self._sightings: Counter[int] = Counter()
        self._tests: Counter[int] = Counter()
        self._nodes: dict[Point, CallPoint] = {}
        self._newest_alike: dict[Point, CallPoint] = {}

    def start_of(self, place: Location, last: CallPoint, before: Location) -> CallPoint:
        """The node that predicts what comes first after the program has come to another place.

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
        """The node of a call, where it is among those that came after the last one.

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
        """The entry of a call, where it is among the operator's last ones."""
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
        """The entry of a signature that was met before, with a test that holds for these arguments.

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
        """The node that an entry is at after another one.

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
        """Expect after a new node what came after the last one of its family here."""
        kin = self._newest_alike.get(point)
        if kin is not None:
            node.after, node.successors = kin.after, kin.successors
        if kin is not None or len(self._newest_alike) < MOST_NODES:
            self._newest_alike[point] = node

    def nodes_of(self, number: int) -> list[CallPoint]:
        """The nodes of a signature."""
        # a copy, made in one go: the thread that owns them may add to them meanwhile
        return [node for node in list(self._nodes.values()) if node.number == number]

    def forget_nodes(self) -> None:
        """Begin anew with all points, whose scopes may be others now."""
        self.nowhere = CallPoint(Recognizer(-1, None), (), -1, -1, None)
        self._nodes.clear()
        self._newest_alike.clear()

    def _keep(self, key: Point, node: CallPoint) -> None:
        if len(self._nodes) < MOST_NODES:
            self._nodes[key] = node


def add_tests(entry: Recognizer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Give an entry the tests that hold for these arguments, and the layout of its tensors."""
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
    """Whether what an operator takes as a list of whole numbers holds nothing else that is equal to one."""
    schema = getattr(func, "_schema", None)
    return schema is not None and all("Scalar[]" not in str(argument.type) for argument in schema.arguments)


def _has_tensors(values: Sequence[Any]) -> bool:
    return any(isinstance(item, torch.Tensor | list | tuple) for item in values)


def _alias(func: Any, places: tuple[int, ...]) -> int:
    """Which of the tensor arguments an operator's single result always shares memory with; -1 for none."""
    schema = getattr(func, "_schema", None)
    if schema is None or len(schema.returns) != 1 or schema.returns[0].alias_info is None:
        return -1
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        # such as aten.to, which may return its argument and may not
        return -1
    alias_set = schema.returns[0].alias_info.before_set
    for index, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.before_set == alias_set and index in places:
            return places.index(index)
    return -1
