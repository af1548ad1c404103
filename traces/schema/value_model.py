"""What a value model is: enough of a tensor's values to draw others that an operator treats the same."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import torch


class Drawable(Protocol):
    """What values can be drawn from."""

    def draw(self, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        """New values on the generator's device, contiguous but where dimensions are expanded.

        Of any shape and dtype, in memory that these bound.
        """


class ValueModel(Drawable, Protocol):
    """A frozen dataclass whose fields are plain values, as JSON and `encode` know them.

    A field that came later has a default: older traces do not have it, and newer ones leave it out where it is that.

    Attributes
    ----------
    priority : models are tried in rising order; the first whose `fit` gives one is kept
    """

    priority: ClassVar[int]
    __dataclass_fields__: ClassVar[dict[str, Any]]

    @classmethod
    def fit(cls, tensor: torch.Tensor) -> ValueModel | None:
        """The model of this tensor's values; None where this kind of model is not for them.

        Draws no random numbers and leaves the tensor, which is not empty, as it is.
        """

    def check(self) -> None:
        """Raise `FormatError` where the fields, which may come from a stranger's file, cannot be drawn from."""
