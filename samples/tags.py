"""The properties that make a function hard for a compiler, as tags of samples: the tags of LongTail-Bench, and three
more.
"""

from __future__ import annotations

from enum import Enum


class Tag(Enum):
    """A property of a function's source or of the operators it calls.

    Attributes
    ----------
    meaning : description, one sentence
    """

    meaning: str

    FOR_LOOP = "ForLoop", "a loop or comprehension in Python"
    IF_ELSE = "IfElseBranch", "an if, a conditional expression or a match"
    INPUT_AWARE = "InputAware", "Python reads a tensor's values: item, tolist, bool of a tensor"
    DATA_DEPENDENT_SHAPE = "DataDependentShape", "a result's shape depends on values: nonzero, a mask as index, unique"
    ADVANCED_INDEXING = "AdvancedIndexing", "tensors as indices: x[indices], gather, index_put, scatter"
    IN_PLACE = "InPlace", "an operator writes into one of its arguments"
    REDUCE = "Reduce", "a sum, mean, maximum, product, norm, any, all, or argmax"
    BROADCAST = "Broadcast", "an operator on tensors of different shapes, none of them a scalar"
    VIEW = "ViewAttribute", "views: reshape, permute, expand, slices"
    CONTAINERS = "BuiltInDataStructure", "lists, tuples, sets or dicts of tensors as arguments, results or variables"
    CUSTOMIZED = "Customized", "objects of classes defined outside Python and torch"
    THIRD_PARTY = "ThirdPartyCodes", "functions of other packages, including NumPy"
    RANDOM = "Random", "it draws from torch's random number generator"

    def __new__(cls, word: str, meaning: str) -> Tag:
        tag = object.__new__(cls)
        tag._value_ = word
        tag.meaning = meaning
        return tag


def tag_of(word: str) -> Tag:
    """Return the tag named `word`, ignoring case.

    Raises
    ------
    ValueError : if the tag is unknown
    """
    for tag in Tag:
        if tag.value.lower() == word.lower():
            return tag
    raise ValueError(f"unknown tag {word!r}")
