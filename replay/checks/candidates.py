"""What is right for a candidate: a user's implementation of a function, compared with another one."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from torch import Tensor

from opgrip.replay.checks.plain import Place, paired
from opgrip.replay.checks.reference import Reference, is_changed
from opgrip.replay.checks.tolerances import Tolerance
from opgrip.replay.checks.verdicts import Verdict
from opgrip.replay.modes.mode import Results
from opgrip.traces.schema.arguments import leaves

WRITES = "writes into its arguments"
"""Note of a candidate that changes arguments which the reference leaves as they are."""

_PLAIN = (Tensor, bool, int, float, complex, str, type(None))


class CandidateReference(Reference):
    """What is right for a candidate.

    Its outputs decide. An argument that the reference writes decides too, unless the reference also returns it. One
    that only the candidate writes is reported in a note.
    """

    def _verdicts(self, actual: Results, tolerance: Tolerance) -> list[Verdict]:
        verdicts = super()._verdicts(actual, tolerance)
        before = self._first_arguments if actual.arguments else []
        changed = {place for place, tensor in enumerate(before) if is_changed(tensor, actual.arguments[place])}
        return [*verdicts, Verdict(notes=(WRITES,))] if changed - self._written else verdicts

    def _pairs(self, actual: Results, first: Results) -> list[tuple[Place, Any]]:
        outputs = paired(Results(actual.outputs), Results(first.outputs))
        ours = actual.arguments or (self._first_arguments if self._owed else [])
        return [*outputs, *((Place("argument", place), ours[place]) for place in sorted(self._owed))]

    @cached_property
    def _owed(self) -> set[int]:
        """Places of the arguments that the reference writes and does not return."""
        if not self._written:
            return set()
        args, kwargs = self._make_arguments()
        returned = {_memory(leaf) for leaf in leaves(self._function(*args, **kwargs)) if isinstance(leaf, Tensor)}
        tensors = [leaf for leaf in leaves([args, kwargs]) if isinstance(leaf, Tensor)]
        return {place for place in self._written if _memory(tensors[place]) not in returned}


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride()


def other_structure(ours: Any, reference: Any, where: str = "") -> str | None:
    """Return how what a candidate returned is built otherwise than what the reference returned; None if it is not."""
    own, right = _parts(ours), _parts(reference)
    if own is None and right is None and (ours is None) == (reference is None):
        return None
    if own is None or right is None or own.keys() != right.keys():
        return f"returns {_described(ours)}, where the reference returns {_described(reference)}{where}"
    reasons = (other_structure(own[key], right[key], f", in {key!r}{where}") for key in own)
    return next((reason for reason in reasons if reason is not None), None)


def not_comparable(results: Any) -> str | None:
    """Return the type of something that cannot be compared among results; None if all can be."""
    odd = (type(leaf).__name__ for leaf in leaves(results) if not isinstance(leaf, _PLAIN))
    return next(odd, None)


def in_order_of(results: Any, like: Any) -> Any:
    """Return results with the entries of dictionaries in the order of others of the same structure."""
    if isinstance(results, Mapping):
        return {key: in_order_of(results[key], like[key]) for key in like}
    if isinstance(results, list | tuple):
        return [in_order_of(*pair) for pair in zip(results, like, strict=True)]
    return results


def _parts(results: Any) -> dict[Any, Any] | None:
    """Return what stands in results by its place; None for a leaf."""
    if isinstance(results, dict):
        return results
    return dict(enumerate(results)) if isinstance(results, list | tuple) else None


def _described(results: Any) -> str:
    parts = _parts(results)
    if parts is None:
        if results is None:
            return "None"
        return "a tensor" if isinstance(results, Tensor) else f"a value of type {type(results).__name__}"
    names = f": {', '.join(map(repr, parts))}" if isinstance(results, dict) else ""
    return f"a {'dictionary' if isinstance(results, dict) else type(results).__name__} of {len(parts)}{names}"
