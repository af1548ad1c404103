"""Prediction of a thread's next call from the order of its earlier calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from opgrip.capture.program.places import Location
from opgrip.capture.torch_compat.torch_private import Check, arguments_check, can_test, is_composite, keywords_check
from opgrip.errors import raise_if_from_program

HISTORY = 6  # number of preceding calls, by family, by which nodes are distinguished
CANDIDATES = 3  # number of signatures of an operator that are tried before the key is computed
MOST_NODES = 100_000  # maximum number of nodes per thread
# number of calls of a signature after the first one before it gets a test, which costs as much as several lookups by
# key
SIGHTINGS = 3
SUCCESSORS = 4  # number of nodes that are tried after the last one, before the operator's recent signatures
# values in place of `SIGHTINGS`: for warm-up steps under the capture, and for signatures that get no test
LEARNT, NEVER = 1, 1 << 62
# maximum number of tests per signature; several are needed because a test fails if the dispatcher's state differs
MOST_TESTS = 3

# location, (gradient mode, inference mode), history, signature number
Point = tuple[Location, tuple[bool, bool], tuple[int, ...], int]
NO_MODES = (False, False)

# positions of a call's tensors: anywhere; first argument; first two arguments; some arguments; in a list that is the
# first argument
CAREFUL, ONE, TWO, SEVERAL, LISTED = range(5)


def sharing(storages: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return, for each storage, the index in `storages` at which it occurs first; None if all differ."""
    return None if len(set(storages)) == len(storages) else tuple(map(storages.index, storages))


def never(*ignored: object) -> bool:
    return False


class Recognizer:
    """A signature of an operator, and compiled tests that recognize its calls.

    alias : index of the input tensor that shares memory with the single result, or -1 if no such tensor is known
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
        try:
            return self.check_both(args, kwargs) if kwargs else self.check(args)
        except RuntimeError as error:
            raise_if_from_program(error)
            # the test reads strides, which a nested tensor does not have
            return False


class CallNode(Recognizer):
    """A signature at one call site."""

    __slots__ = ("after", "grad", "history", "pair", "scope", "successors", "turns")

    def __init__(
        self,
        entry: Recognizer,
        history: tuple[int, ...],
        scope: int,
        pair: int,
        after: CallNode | None,
        grad: bool = False,
    ) -> None:
        for name in Recognizer.__slots__:
            setattr(self, name, getattr(entry, name))
        self.history = history
        self.scope = scope
        self.pair = pair
        self.grad = grad
        self.after = after or self
        self.successors: tuple[CallNode, ...] = ()
        self.turns: dict[Location, CallNode] = {}


class CallPredictor:
    """Predicts the next call of one thread, to find its signature faster than by its key."""

    def __init__(self) -> None:
        self.nowhere = CallNode(Recognizer(-1, None), (), -1, -1, None)
        self._recent: dict[int, list[Recognizer]] = {}
        self._entries: dict[int, Recognizer] = {}
        self._sightings: Counter[int] = Counter()
        self._tests: Counter[int] = Counter()
        self._nodes: dict[Point, CallNode] = {}
        self._newest_alike: dict[Point, CallNode] = {}

    def start_of(self, place: Location, last: CallNode, before: Location) -> CallNode:
        start = last.turns.get(place)
        if start is None:
            history = (-1, id(before), *last.history[-2:])
            start = self._nodes.get((place, NO_MODES, history, -1))
            if start is None:
                start = CallNode(self.nowhere, history, -1, -1, self.nowhere)
                self._keep((place, NO_MODES, history, -1), start)
            last.turns[place] = start
        return start

    def successor(
        self, last: CallNode, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], pattern: tuple[int, ...] | None
    ) -> CallNode | None:
        grad = torch.is_grad_enabled()
        for node in last.successors:
            if node.func is func and node.grad is grad and node.sharing == pattern and node.holds(args, kwargs):
                last.after = node
                return node
        return None

    def recent(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], pattern: tuple[int, ...] | None
    ) -> Recognizer | None:
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
        entry = self._entries.get(number)
        if entry is None:
            entry = self._entries[number] = Recognizer(number, func, sharing(storages), family)
        self._sightings[number] += 1
        if self._sightings[number] < sightings:
            return entry
        if not entry.holds(args, kwargs) and self._tests[number] < MOST_TESTS and can_test():
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
        last: CallNode,
        place: Location,
        entry: Recognizer,
        modes: tuple[bool, bool],
        point: Callable[[], tuple[int, int]],
    ) -> CallNode:
        key = place, modes, last.history, entry.number
        node = self._nodes.get(key)
        if node is None or node.check is not entry.check or node.check_both is not entry.check_both:
            stale_node = node
            scope, pair = point() if stale_node is None else (stale_node.scope, stale_node.pair)
            history = (*last.history, entry.family)[-HISTORY:]
            node = CallNode(entry, history, scope, pair, self.nowhere, modes[0])
            newest, where = self._newest_alike, (place, modes, last.history, entry.family)
            alike = newest.get(where)
            if alike is not None:
                node.after, node.successors = alike.after, alike.successors
            if alike is not None or len(newest) < MOST_NODES:
                newest[where] = node
            if entry.number in self._entries:
                # the signature occurred before, so it will probably recur
                self._keep(key, node)
        last.after = node
        if node not in last.successors:
            last.successors = (node, *last.successors[: SUCCESSORS - 1])
        return node

    def nodes_of(self, number: int) -> list[CallNode]:
        # copy the list in one step, because the thread that owns it may extend it
        return [node for node in list(self._nodes.values()) if node.number == number]

    def forget_nodes(self) -> None:
        self.nowhere = CallNode(Recognizer(-1, None), (), -1, -1, None)
        self._nodes.clear()
        self._newest_alike.clear()

    def _keep(self, key: Point, node: CallNode) -> None:
        if len(self._nodes) < MOST_NODES:
            self._nodes[key] = node


def add_tests(entry: Recognizer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    schema = getattr(entry.func, "_schema", None)
    # whether the operator never accepts floats in a list of integers
    typed = schema is not None and all("Scalar[]" not in str(argument.type) for argument in schema.arguments)
    check = arguments_check(args, typed)
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
    lists = [
        place
        for place, value in enumerate(args)
        if isinstance(value, list | tuple) and any(isinstance(item, torch.Tensor | list | tuple) for item in value)
    ]
    if lists == [0] and not places and all(isinstance(item, torch.Tensor) for item in args[0]):
        entry.layout = LISTED
    elif not lists:
        layout = {(0,): ONE, (0, 1): TWO}.get(places, SEVERAL)
        # nothing can interrupt between these assignments
        entry.places, entry.layout = places, layout
    if entry.layout in (ONE, TWO, SEVERAL):
        entry.alias = _alias(entry.func, places)


def _alias(func: Any, places: tuple[int, ...]) -> int:
    schema = getattr(func, "_schema", None)
    if schema is None or len(schema.returns) != 1 or schema.returns[0].alias_info is None:
        return -1
    if is_composite(func) or func.name().startswith("aten::set_"):
        # for example aten.to, which may or may not return its argument; aten.set_ gives its argument other memory
        return -1
    alias_set = schema.returns[0].alias_info.before_set
    for index, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.before_set == alias_set and index in places:
            return places.index(index)
    return -1
