"""The tensors that the calls of a signature take and give."""

from __future__ import annotations

from dataclasses import dataclass

from opgrip.traces.schema.arguments import Opaque, TensorSpec, leaves, tensors
from opgrip.traces.schema.records import NO_STORAGE, Signature


@dataclass(frozen=True, slots=True)
class Interface:
    """The tensors of a signature.

    Attributes
    ----------
    takes : those of its arguments, in their order; `gives` those of its first call's results
    opaque : whether some of its arguments are of a kind that a trace cannot hold
    """

    takes: tuple[TensorSpec, ...]
    gives: tuple[TensorSpec, ...]
    opaque: bool = False

    def memory_of(self, mentioned: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of the memory that a call mentions, that of each tensor that it takes, and that of those that it gives."""
        argument_count = len(self.takes)
        takes = mentioned[:argument_count] + (NO_STORAGE,) * (argument_count - len(mentioned))
        gives = mentioned[argument_count:]
        if self.opaque:
            # arguments that a trace cannot hold have numbers too
            gives = gives[max(0, len(gives) - len(self.gives)) :]
        return takes, gives


def interface_of(signature: Signature) -> Interface:
    """The tensors of a signature."""
    results = tuple(leaf for leaf in leaves(signature.outputs) if isinstance(leaf, TensorSpec))
    arguments = [signature.args, signature.kwargs]
    return Interface(tuple(tensors(arguments)), results, any(isinstance(leaf, Opaque) for leaf in leaves(arguments)))
