"""What makes a long-tail function hard for a compiler: the words of LongTail-Bench, and three of ours."""

from __future__ import annotations

from enum import Enum


class Tag(Enum):
    """A property of a function's source or of what a call of it runs.

    Attributes
    ----------
    meaning : in a sentence
    """

    meaning: str

    FOR_LOOP = "ForLoop", "a loop or comprehension in Python"
    IF_ELSE = "IfElseBranch", "an if, a conditional expression or a match"
    INPUT_AWARE = "InputAware", "Python reads a tensor's values: item, tolist, bool of a tensor"
    DATA_DEPENDENT_SHAPE = "DataDependentShape", "a result's shape depends on values: nonzero, a mask as index, unique"
    ADVANCED_INDEXING = "AdvancedIndexing", "tensors as indices: x[indices], gather, index_put, scatter"
    IN_PLACE = "InPlace", "an operator writes into one of its arguments"
    REDUCE = "Reduce", "a sum, mean, maximum, product, norm, any, all, or the place of the largest"
    BROADCAST = "Broadcast", "an operator on tensors of unlike shapes, neither of which is a scalar"
    VIEW = "ViewAttribute", "views: reshape, permute, expand, slices"
    CONTAINERS = "BuiltInDataStructure", "lists, tuples, sets or dicts of tensors as arguments, results or on the way"
    CUSTOMIZED = "Customized", "objects of classes that are neither Python's nor torch's"
    THIRD_PARTY = "ThirdPartyCodes", "functions of other packages, numpy's among them"
    RANDOM = "Random", "it draws from torch's random number generator"

    def __new__(cls, word: str, meaning: str) -> Tag:
        """A tag whose value is its word."""
        tag = object.__new__(cls)
        tag._value_ = word
        tag.meaning = meaning
        return tag


def tag_of(word: str) -> Tag:
    """The tag of a word, in whatever case.

    Raises
    ------
    ValueError : where there is none
    """
    for tag in Tag:
        if tag.value.lower() == word.lower():
            return tag
    raise ValueError(f"there is no tag {word!r}")
