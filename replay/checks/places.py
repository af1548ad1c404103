"""Which of a mode's results stands for which of the reference's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from opgrip.replay.modes.mode import Results


@dataclass(frozen=True, slots=True)
class Place:
    """Where among a call's results one stands: which of its outputs, or of its written arguments."""

    kind: Literal["output", "argument"]
    number: int

    def of(self, results: Results) -> Any:
        """What stands there; None where nothing does."""
        leaves = results.outputs if self.kind == "output" else results.arguments
        return leaves[self.number] if self.number < len(leaves) else None

    def __str__(self) -> str:
        return f"{self.kind} {self.number}"


class Unpaired(Exception):
    """Results that cannot be held against the reference's one by one, by the reason."""


def paired(actual: Results, reference: Results) -> list[tuple[Place, Any]]:
    """Each of a mode's results with its place among the reference's.

    A mode that gives tensors only is held against the reference's tensors.

    Raises
    ------
    Unpaired : where one of them has more than the other
    """
    if len(actual.outputs) == len(reference.outputs):
        outputs = list(range(len(reference.outputs)))
        ours: Sequence[Any] = actual.outputs
    else:
        outputs = [number for number, leaf in enumerate(reference.outputs) if isinstance(leaf, Tensor)]
        ours = [leaf for leaf in actual.outputs if isinstance(leaf, Tensor)]
        if len(ours) != len(outputs):
            raise Unpaired(f"{len(ours)} tensors as outputs, not {len(outputs)}")
    if len(actual.arguments) != len(reference.arguments):
        raise Unpaired(f"{len(actual.arguments)} written arguments, not {len(reference.arguments)}")
    pairs = [(Place("output", number), leaf) for number, leaf in zip(outputs, ours, strict=True)]
    return pairs + [(Place("argument", number), leaf) for number, leaf in enumerate(actual.arguments)]


def within(shape: Sequence[Any], run_shapes: Sequence[Sequence[Any]], *, beyond: bool = False) -> bool:
    """Whether a shape is one that runs may give, which gave others than each other.

    Parameters
    ----------
    run_shapes : shapes that runs gave
    beyond : whether sizes may be outside of those seen, in the dimensions that they vary in
    """
    if any(len(other) != len(shape) for other in run_shapes):
        return len(set(map(len, run_shapes))) > 1 and len(shape) in set(map(len, run_shapes))
    if not all(isinstance(size, int) for one in (shape, *run_shapes) for size in one):
        return False
    ranges = [(min(sizes), max(sizes)) for sizes in zip(*run_shapes, strict=True)]
    if all(least == most for least, most in ranges):
        return False
    return all(
        least <= size <= most or (beyond and least < most) for size, (least, most) in zip(shape, ranges, strict=True)
    )
