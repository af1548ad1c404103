"""What becomes of a call in a larger batch, and what else would have to grow that it can be one of that."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from opgrip.replay.batch_scale.argument_choices import LISTED, NOTHING, Choice, choices, in_order
from opgrip.replay.batch_scale.growth import PLAIN, Growth, growth_of
from opgrip.replay.batch_scale.trials import Contradiction, outcome
from opgrip.traces.schema.arguments import TensorSpec, tensors
from opgrip.traces.schema.records import Signature

FEW, MOST_TRIED = 12, 40
"""Dimensions of arguments that are tried two at a time, and at all, where a call lacks one that grows."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of a call in a larger batch.

    Attributes
    ----------
    gives : growth of each result
    asks : growth that arguments ought to have that have none, by their places among the tensors
    """

    takes: tuple[Growth, ...]
    choice: Choice
    gives: tuple[Growth, ...]
    asks: tuple[tuple[int, Growth], ...] = ()

    @property
    def lost(self) -> str | None:
        """Why it is not known, None where it is."""
        return next((growth.lost for growth in (*self.takes, *self.gives) if growth.lost is not None), None)


class Judge:
    """Tells what becomes of calls; what it has told once it knows.

    Attributes
    ----------
    batch : the recorded size of the batch
    chosen : by the number of a signature that takes nothing of the batch, what it is given that is
    """

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.chosen: dict[int, Choice] = {}
        self._choices: dict[int, list[Choice]] = {}
        self._verdict_cache: dict[Any, Verdict] = {}

    def judge(self, signature: Signature, growths: tuple[Growth, ...]) -> Verdict:
        """What becomes of a call whose arguments grow like that."""
        chosen = self.chosen.get(signature.number)
        if signature.op in LISTED and [growth.item for growth in growths] == list(range(self.batch)):
            chosen = Choice(listed=True)
        key = (signature.number, growths, chosen)
        if key not in self._verdict_cache:
            self._verdict_cache[key] = self._find_verdict(signature, growths, chosen)
        return self._verdict_cache[key]

    def own(self, signature: Signature) -> list[Choice]:
        """What a call that takes nothing of the batch may be given that is."""
        own_choices = self._choices.get(signature.number)
        if own_choices is None:
            own_choices = []
            for choice in choices(signature, self.batch):
                try:
                    grows = any(map(len, self.sizes(signature, choice)))
                except Contradiction:
                    continue
                own_choices += [choice] if grows else []
            self._choices[signature.number] = own_choices
        return own_choices

    def sizes(self, signature: Signature, choice: Choice) -> list[tuple[int, ...]]:
        """Which sizes of each result grow by a choice alone."""
        plain = (PLAIN,) * len(tensors_of(signature))
        return [growth.sizes for growth in outcome(signature, plain, choice, self.batch)]

    def _find_verdict(self, signature: Signature, growths: tuple[Growth, ...], chosen: Choice | None) -> Verdict:
        result_count = len(list(tensors(signature.outputs)))
        lost = next((growth.lost for growth in growths if growth.lost is not None), None)
        if lost is not None:
            return Verdict(growths, NOTHING, (Growth(lost=lost),) * max(result_count, 1))
        if chosen is None and not any(growth.any for growth in growths):
            items = {growth.item for growth in growths if growth.item is not None}
            return Verdict(growths, NOTHING, (Growth(item=items.pop() if len(items) == 1 else None),) * result_count)
        candidates = choices(signature, self.batch)
        likely = [*in_order(signature, growths, candidates, self.batch)] if chosen is None else [chosen, *candidates]
        try:
            return self._tested(signature, growths, likely)
        except Contradiction as contradiction:
            lost = f"how {signature.op} grows with the batch is not known: {contradiction}"
            asks = self._missing(signature, growths, candidates)
            return Verdict(growths, NOTHING, (Growth(lost=lost),) * max(result_count, 1), asks)

    def _tested(self, signature: Signature, growths: tuple[Growth, ...], candidates: Sequence[Choice]) -> Verdict:
        first, *others = candidates
        try:
            return Verdict(growths, first, outcome(signature, growths, first, self.batch))
        except Contradiction:
            for choice in others:
                with suppress(Contradiction):
                    return Verdict(growths, choice, outcome(signature, growths, choice, self.batch))
            raise

    def _missing(
        self, signature: Signature, growths: tuple[Growth, ...], candidates: Sequence[Choice]
    ) -> tuple[tuple[int, Growth], ...]:
        """Which arguments that do not grow ought to, that the call be one of a larger batch."""
        specs = tensors_of(signature)
        open_to = [
            (place, growth_of(spec, [at]))
            for place, spec in enumerate(specs)
            for at, size in enumerate(spec.shape)
            if not growths[place].any and size and size % self.batch == 0
        ]
        for count in (1, 2) if len(open_to) <= FEW else (1,):
            for asks in combinations(open_to[:MOST_TRIED], count):
                if len({place for place, _ in asks}) == count:
                    try:
                        self._tested(signature, with_asked(growths, asks), [NOTHING, *candidates])
                    except Contradiction:
                        continue
                    return asks
        return ()


def tensors_of(signature: Signature) -> list[TensorSpec]:
    """The tensors that a call takes."""
    return list(tensors([signature.args, signature.kwargs]))


def with_asked(growths: tuple[Growth, ...], asks: Sequence[tuple[int, Growth]]) -> tuple[Growth, ...]:
    """The growths, with those in their places that were asked for."""
    changed = dict(asks)
    return tuple(changed.get(place, growth) for place, growth in enumerate(growths))
