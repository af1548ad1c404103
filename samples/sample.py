"""Samples, their registration, and the random inputs they use."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from inspect import getdoc
from typing import Any, ParamSpec, TypeAlias, TypeVar

import torch
from torch import Tensor

from opgrip.samples.tags import Tag, tag_of

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Arguments: TypeAlias = tuple[Any, ...]
"""Positional arguments of a sample."""

Maker = Callable[..., Arguments]
"""Returns the arguments of a sample, given a `Draw` and the sizes of one configuration."""

JAX = "_jax"
"""Suffix of the module that holds the JAX implementation of a sample, in the same folder."""


class Draw:
    """Seeded source of random CPU tensors that resemble activations, boxes and labels of models.

    Parameters
    ----------
    seed : seed of a separate generator; torch's global generator is not used
    """

    def __init__(self, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, mean: float = 0.0, std: float = 1.0, grad: bool = False) -> Tensor:
        """Return normally distributed float32 values with this mean and standard deviation (`std`). In all methods,
        `grad` sets `requires_grad` of the result.
        """
        return (torch.randn(shape, generator=self.generator) * std + mean).requires_grad_(grad)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0, grad: bool = False) -> Tensor:
        """Return uniform float32 values in [low, high)."""
        return (torch.rand(shape, generator=self.generator) * (high - low) + low).requires_grad_(grad)

    def integers(self, *shape: int, low: int = 0, high: int) -> Tensor:
        """Return int64 values in [low, high), such as class labels."""
        return torch.randint(low, high, shape, generator=self.generator)

    def mask(self, *shape: int, share: float = 0.5) -> Tensor:
        """Return booleans that are True with probability `share`."""
        return torch.rand(shape, generator=self.generator) < share

    def permutation(self, count: int) -> Tensor:
        """Return the integers below `count` in random order."""
        return torch.randperm(count, generator=self.generator)

    def distribution(self, *shape: int, grad: bool = False) -> Tensor:
        """Return float32 probabilities that sum to 1 over the last dimension."""
        return torch.randn(shape, generator=self.generator).softmax(dim=-1).requires_grad_(grad)

    def boxes(
        self, count: int, size: tuple[float, float] = (800.0, 1333.0), smallest: float = 8.0, grad: bool = False
    ) -> Tensor:
        """Return random boxes in an image, (count, 4) float32, x1 y1 x2 y2 in pixels. Small boxes are the most
        frequent.

        Parameters
        ----------
        size : height and width of the image in pixels
        smallest : least width and height of a box; the largest is half of the image's
        """
        whole = torch.tensor([size[1], size[0]])
        extent = smallest * (whole / 2 / smallest) ** torch.rand(count, 2, generator=self.generator)
        corner = torch.rand(count, 2, generator=self.generator) * (whole - extent)
        return torch.cat([corner, corner + extent], dim=1).requires_grad_(grad)

    def near(self, boxes: Tensor, shift: float = 0.1, grad: bool = False) -> Tensor:
        """Return `boxes`, (N, 4) float, shifted and scaled at random, like the predictions of a detector.

        shift : standard deviation of the shift relative to the size of a box, and of the logarithm of the scale
        """
        extent = (boxes[:, 2:] - boxes[:, :2]).detach()
        noise = torch.randn(len(boxes), 4, generator=self.generator) * shift
        corner = boxes[:, :2].detach() + noise[:, :2] * extent
        return torch.cat([corner, corner + extent * noise[:, 2:].exp()], dim=1).requires_grad_(grad)


@dataclass(frozen=True, eq=False)
class Sample:
    """A long-tail function that runs without its model.

    Attributes
    ----------
    function : implementation in plain torch
    inputs : function that creates the arguments
    configurations : arguments of `inputs` after the `Draw`, by the model that runs with these sizes; the first one is
    small
    tags : properties that make the function hard for a compiler
    project : source project, such as `MMDetection`, or the paper
    url : address of the source or of the paper
    rtol, atol : tolerances for float32 results of other implementations
    random : True if the results depend on torch's random number generator
    """

    function: Callable[..., Any]
    inputs: Maker
    configurations: Mapping[str, tuple[Any, ...]]
    tags: frozenset[Tag]
    project: str
    url: str
    rtol: float = 1e-5
    atol: float = 1e-5
    random: bool = False

    @property
    def name(self) -> str:
        return self.function.__name__

    @property
    def family(self) -> str:
        """Return the name of the function's folder, such as `losses`."""
        return self.function.__module__.split(".")[-2]

    @property
    def summary(self) -> str:
        """Return the first line of the function's docstring."""
        return (getdoc(self.function) or "").partition("\n")[0]

    def arguments(self, configuration: str | None = None, seed: int = 0) -> tuple[Any, ...]:
        """Return arguments on the CPU; equal seeds give equal arguments.

        Parameters
        ----------
        configuration : name of a configuration, or None for the first
        seed : random seed of the values
        """
        name = next(iter(self.configurations)) if configuration is None else configuration
        return self.inputs(Draw(seed), *self.configurations[name])

    def has_jax(self) -> bool:
        """Return True if the sample has a JAX implementation, even if JAX is not installed."""
        return find_spec(self.function.__module__ + JAX) is not None

    def jax(self) -> Callable[..., Any]:
        """Return the JAX implementation, which takes a `jax.Array` for each tensor argument.

        Raises
        ------
        ImportError : if JAX is not installed
        """
        function: Callable[..., Any] = getattr(import_module(self.function.__module__ + JAX), self.name)
        return function


_SAMPLES: dict[str, Sample] = {}

PROJECTS = {
    "dbolya/yolact": "YOLACT",
    "DeepLink-org/DLOP-Bench": "DLOP-Bench",
    "facebookresearch/detr": "DETR",
    "facebookresearch/fairseq": "fairseq",
    "huggingface/transformers": "Transformers",
    "ModelTC/United-Perception": "United Perception",
    "open-mmlab/mmaction2": "MMAction2",
    "open-mmlab/mmclassification": "MMClassification",
    "open-mmlab/mmcv": "MMCV",
    "open-mmlab/mmdetection": "MMDetection",
    "open-mmlab/mmediting": "MMEditing",
    "open-mmlab/mmpose": "MMPose",
    "open-mmlab/mmsegmentation": "MMSegmentation",
    "OpenNMT/OpenNMT-py": "OpenNMT",
    "PaddlePaddle/PaddleRec": "PaddleRec",
    "pytorch/vision": "torchvision",
}
"""names of projects by their repository on GitHub"""


def sample(
    inputs: Maker,
    configurations: Mapping[str, tuple[Any, ...]],
    *,
    tags: str,
    url: str,
    project: str | None = None,
    rtol: float = 1e-5,
    atol: float = 1e-5,
    random: bool = False,
) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Register the decorated function as a `Sample` and return it unchanged.

    Parameters that are not described here are the attributes of `Sample`.

    Parameters
    ----------
    tags : values of `Tag`, separated by spaces
    project : needed if the address is not of a repository in `PROJECTS`

    Raises
    ------
    ValueError : if two samples have the same name, or a tag or the project is unknown
    """
    repository = "/".join(url.removeprefix("https://github.com/").split("/", 2)[:2])
    project = project or PROJECTS.get(repository)
    if project is None:
        raise ValueError(f"unknown project of {url}: pass project=")

    def enter(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        entry = Sample(
            function, inputs, configurations, frozenset(map(tag_of, tags.split())), project, url, rtol, atol, random
        )
        first_entry = _SAMPLES.setdefault(entry.name, entry)
        if first_entry.function.__module__ != function.__module__:
            raise ValueError(
                f"two samples are named {entry.name}, in {first_entry.function.__module__} and {function.__module__}"
            )
        return function

    return enter


@cache
def samples() -> Mapping[str, Sample]:
    """Return all samples of the package, by name."""
    package = __name__.rpartition(".")[0]
    for module_info in pkgutil.walk_packages(import_module(package).__path__, package + "."):
        if not module_info.name.startswith(f"{package}.models") and not module_info.name.endswith(JAX):
            import_module(module_info.name)
    return dict(sorted(_SAMPLES.items()))
