"""What makes a long-tail function hard for a compiler: the words of LongTail-Bench, and three of ours."""

from __future__ import annotations

from enum import Enum


class Tag(Enum):
    """A property of a function's source or of what a call of it runs."""

    FOR_LOOP = "ForLoop"
    """A loop or comprehension in Python."""
    IF_ELSE = "IfElseBranch"
    """An `if`, a conditional expression or a `match`."""
    INPUT_AWARE = "InputAware"
    """Python reads a tensor's values: `item`, `tolist`, `bool` of a tensor."""
    DATA_DEPENDENT_SHAPE = "DataDependentShape"
    """A result's shape depends on values: `nonzero`, a mask as index, `unique`."""
    ADVANCED_INDEXING = "AdvancedIndexing"
    """Tensors as indices: `x[indices]`, `gather`, `index_put`, `scatter`."""
    IN_PLACE = "InPlace"
    """An operator writes into one of its arguments."""
    REDUCE = "Reduce"
    """A sum, mean, maximum, product, norm, any, all, or index of the largest, over a dimension or all."""
    BROADCAST = "Broadcast"
    """An operator on tensors of unlike shapes, neither of which is a scalar."""
    VIEW = "ViewAttribute"
    """Views: `reshape`, `permute`, `expand`, slices."""
    CONTAINERS = "BuiltInDataStructure"
    """Lists, tuples, sets or dicts of tensors as arguments, results or on the way."""
    CUSTOMIZED = "Customized"
    """Objects of classes that are neither Python's nor torch's."""
    THIRD_PARTY = "ThirdPartyCodes"
    """Functions of other packages, numpy's among them."""
    RANDOM = "Random"
    """It draws from torch's random number generator."""
