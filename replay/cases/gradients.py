"""Which arguments of a call require gradients, where its source does not say it or the operator takes none."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from opgrip.replay.cases.cases import Case
from opgrip.traces.schema.arguments import TensorSpec, map_leaves
from opgrip.traces.schema.mutated_arguments import schema_of
from opgrip.traces.schema.records import Signature

_REFUSED = re.compile(
    r"not differentiable with respect to argument '(\w+)'|the derivative for '(\w+)' is not implemented"
)
"""How torch refuses an argument that requires a gradient: in this version, and in earlier ones."""


def require_gradients(signature: Signature) -> Signature:
    """Return a call whose floating-point and complex tensors require gradients."""
    args, kwargs = map_leaves(_requiring, (signature.args, signature.kwargs))
    return replace(signature, args=args, kwargs=kwargs)


def refused_argument(error: BaseException) -> str | None:
    """Return the name of the argument that an operator takes no gradient of, or None for any other error."""
    match = _REFUSED.search(str(error))
    return None if match is None else match[1] or match[2]


def with_gradients(case: Case, is_unsaid: bool, refused: Collection[str]) -> Case:
    """Return a case whose arguments require the gradients that its calls can have.

    Parameters
    ----------
    is_unsaid : the source does not say which tensors require gradients, so that all of floating point do
    refused : names of arguments that the operator takes no gradient of
    """
    if not is_unsaid and not refused:
        return case

    def changed(signature: Signature) -> Signature:
        return _without(require_gradients(signature) if is_unsaid else signature, refused)

    return replace(case, signature=changed(case.signature), variants=[changed(item) for item in case.variants])


def _without(signature: Signature, refused: Collection[str]) -> Signature:
    """Return a call without gradients of some of its operator's arguments."""
    schema = schema_of(signature) if refused else None
    if schema is None:
        return signature
    names = [argument.name for argument in schema.arguments]
    args = [
        map_leaves(_released, value) if name in refused else value
        for name, value in zip(names, signature.args, strict=False)
    ]
    kwargs = {
        name: map_leaves(_released, value) if name in refused else value for name, value in signature.kwargs.items()
    }
    return replace(signature, args=tuple(args), kwargs=kwargs)


def _requiring(leaf: Any) -> Any:
    if isinstance(leaf, TensorSpec) and (leaf.dtype.is_floating_point or leaf.dtype.is_complex):
        return replace(leaf, requires_grad=True)
    return leaf


def _released(leaf: Any) -> Any:
    return replace(leaf, requires_grad=False) if isinstance(leaf, TensorSpec) else leaf
