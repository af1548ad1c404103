"""Comparison of implementations of one function."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

Function = Callable[..., Any]


def leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, list | tuple):
        for item in tree:
            yield from leaves(item)
    else:
        yield tree


def compare(met: Any, expected: Any, rtol: float = 1e-5, atol: float = 1e-5, dtypes: bool = False) -> None:
    """Assert that two nested results are equal within the tolerances `rtol` and `atol`; arrays count as tensors."""
    left, right = list(leaves(met)), list(leaves(expected))
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        if isinstance(other, Tensor | np.ndarray):
            one, other = torch.as_tensor(one), torch.as_tensor(other)
            assert (one.dtype.is_floating_point, one.dtype == torch.bool) == (
                other.dtype.is_floating_point,
                other.dtype == torch.bool,
            )
            assert one.shape == other.shape
            torch.testing.assert_close(one, other, rtol=rtol, atol=atol, equal_nan=True, check_dtype=dtypes)
        else:
            assert one == other


def gradients(results: Any, arguments: Any) -> list[Tensor | None]:
    """Return gradients of the sum of all floating-point results with respect to the arguments that require one."""
    asked = [leaf for leaf in leaves(arguments) if isinstance(leaf, Tensor) and leaf.requires_grad]
    total = [leaf.sum() for leaf in leaves(results) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not asked or not total:
        return []
    return list(torch.autograd.grad(torch.stack(total).sum(), asked, allow_unused=True))


def compare_with(
    original: Callable[..., Any],
    ours: Callable[..., Any],
    make: Callable[[], tuple[Any, ...]],
    rtol: float,
    atol: float,
) -> None:
    """Assert that two torch functions have equal results and gradients, within the tolerances `rtol` and `atol`."""
    arguments = make(), make()
    torch.manual_seed(0)
    expected = original(*arguments[0])
    torch.manual_seed(0)
    met = ours(*arguments[1])
    compare(met, expected, rtol, atol)
    compare(gradients(met, arguments[1]), gradients(expected, arguments[0]), rtol, atol)


def jax_results(function: Function, arguments: tuple[Any, ...]) -> Any:
    import jax

    # 64-bit integers, as in torch
    with jax.enable_x64(True):
        results = function(*_mapped(arguments, lambda tensor: jax.numpy.asarray(tensor.detach().numpy())))
        return _mapped(results, lambda array: torch.from_numpy(np.array(array)))


def _mapped(tree: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(tree, dict):
        return {key: _mapped(item, change) for key, item in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_mapped(item, change) for item in tree)
    return change(tree) if hasattr(tree, "shape") else tree
