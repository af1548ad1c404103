"""What a sample is, and the table of those that ship."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from inspect import getdoc
from typing import Any, ParamSpec, TypeVar

from opgrip.samples.draw import Draw
from opgrip.samples.tags import Tag, tag_of

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Maker = Callable[..., tuple[Any, ...]]
"""Makes a sample's positional arguments of a `Draw` and the sizes of a configuration."""

JAX = "_jax"
"""Ends the name of the module that holds a sample's JAX implementation, beside that of the torch one."""


@dataclass(frozen=True, eq=False)
class Sample:
    """A long-tail function that stands on its own.

    Attributes
    ----------
    function : in plain torch
    inputs : makes its arguments
    configurations : keyword arguments of `inputs`, by the model and run that call it so, a small one first
    tags : what makes it hard for a compiler
    project : that it comes from, as in `MMDetection`, or the paper
    url : of its source there, or of the paper
    rtol, atol : within which another implementation's float32 results have to be
    random : whether its results depend on torch's random number generator
    """

    function: Callable[..., Any]
    inputs: Maker
    configurations: Mapping[str, Mapping[str, Any]]
    tags: frozenset[Tag]
    project: str
    url: str
    rtol: float = 1e-5
    atol: float = 1e-5
    random: bool = False

    @property
    def name(self) -> str:
        """That of the function."""
        return self.function.__name__

    @property
    def family(self) -> str:
        """The folder that it is in: `losses`."""
        return self.function.__module__.split(".")[-2]

    @property
    def summary(self) -> str:
        """The first line of its docstring."""
        return (getdoc(self.function) or "").partition("\n")[0]

    def arguments(self, configuration: str | None = None, seed: int = 0) -> tuple[Any, ...]:
        """Arguments on the CPU, the same for the same seed.

        Parameters
        ----------
        configuration : None for the first
        """
        name = next(iter(self.configurations)) if configuration is None else configuration
        return self.inputs(Draw(seed), **self.configurations[name])

    def has_jax(self) -> bool:
        """Whether there is a JAX implementation, which may need JAX to be installed."""
        return find_spec(self.function.__module__ + JAX) is not None

    def jax(self) -> Callable[..., Any]:
        """Its JAX implementation, which takes `jax.Array` where the torch one takes a tensor.

        Raises
        ------
        ImportError : where JAX is not installed
        """
        function: Callable[..., Any] = getattr(import_module(self.function.__module__ + JAX), self.name)
        return function


_SAMPLES: dict[str, Sample] = {}


def sample(
    inputs: Maker,
    configurations: Mapping[str, Mapping[str, Any]],
    *,
    tags: Sequence[str],
    project: str,
    url: str,
    rtol: float = 1e-5,
    atol: float = 1e-5,
    random: bool = False,
) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Enter the decorated function, which stays as it is, into the table of samples; see `Sample`.

    Raises
    ------
    ValueError : where two samples have one name, or a tag is not one of `Tag`
    """

    def enter(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        entry = Sample(function, inputs, configurations, frozenset(map(tag_of, tags)), project, url, rtol, atol, random)
        first_entry = _SAMPLES.setdefault(entry.name, entry)
        if first_entry.function.__module__ != function.__module__:
            raise ValueError(
                f"two samples are named {entry.name}, in {first_entry.function.__module__} and {function.__module__}"
            )
        return function

    return enter


@cache
def samples() -> Mapping[str, Sample]:
    """All samples that ship, by name."""
    package = __name__.rpartition(".")[0]
    for module_info in pkgutil.walk_packages(import_module(package).__path__, package + "."):
        if not module_info.name.startswith(f"{package}.models") and not module_info.name.endswith(JAX):
            import_module(module_info.name)
    return dict(sorted(_SAMPLES.items()))
