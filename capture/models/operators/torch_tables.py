"""torch's tables of operators, foreach functions and optimizers, by which it tests itself and which it keeps to itself.

Tried with torch 2.13; in older versions the same places held. A place that a version lacks is an empty table.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from opgrip.capture.models.operators.categories import FOREACH, OPTIMIZER, categories_of
from opgrip.capture.models.operators.entry import Arguments, Entry
from opgrip.cli.extras import needed
from opgrip.platform.private_apis import PrivatePlaces

EXTRA = "opinfo"
PARAMETER_SHAPES = ((4, 5), (7, 3), (2, 2))
"""Of what optimizers step: of two dimensions, as one of them takes no others."""
OPTIMIZED = (torch.float32, torch.bfloat16, torch.float64)
STEPS = 2
"""Of an optimizer: the first makes its state."""
MOST_SAMPLES = 200
"""Of an operator and a dtype that are drawn."""

_places = PrivatePlaces()
_INVOCATIONS = "torch.testing._internal.common_methods_invocations"
_OPTIMIZERS = "torch.testing._internal.common_optimizers"
_NO_SAMPLES = "its operators have the samples that their schemas allow"

_operators = _places.take_later(f"{_INVOCATIONS}.op_db", (), _NO_SAMPLES)
_foreach_tables = [
    _places.take_later(f"{_INVOCATIONS}.foreach_{kind}_op_db", (), "the foreach functions of this kind are left out")
    for kind in ("unary", "binary", "pointwise", "reduce", "other")
]
_optimizers = _places.take_later(f"{_OPTIMIZERS}.optim_db", (), "optimizers are left out")
_optimizer_inputs = _places.take_later(
    f"{_OPTIMIZERS}._get_optim_inputs_including_global_cliquey_kwargs", None, "optimizers are left out"
)
_settings_are_locked = _places.take(
    "torch.backends.flags_frozen", None, "nothing: this torch has no lock that the tables turn"
)
_LOCK = "__allow_nonbracketed_mutation_flag"


def private_places() -> dict[str, str]:
    """For each private place of torch that is used here `found`, or what is done instead where this torch lacks it."""
    return _places.report()


def table_entries() -> Iterator[Entry]:
    """All operators of torch's tables.

    Raises
    ------
    UserError : where a package is missing that torch imports the tables with
    """
    needed("expecttest", EXTRA)
    with _unchanged_process():
        operators = _operators()
        foreach = [item for table in _foreach_tables for item in table()]
        optimizers = _optimizers() if _optimizer_inputs() is not None else ()
    yield from (_operator_entry(item, categories_of(item)) for item in operators)
    yield from (_operator_entry(item, frozenset({FOREACH})) for item in foreach)
    yield from map(_optimizer_entry, optimizers)


@contextmanager
def _unchanged_process() -> Iterator[None]:
    """Take back what importing torch's tests does: older ones read the command line, all lock torch's settings."""
    argv, sys.argv = sys.argv, sys.argv[:1]
    lock = getattr(_settings_are_locked, "__globals__", None)
    was_open = True if lock is None else lock.get(_LOCK, True)
    try:
        yield
    finally:
        sys.argv = argv
        if lock is not None:
            # torch.backends is an object around its module, which this is a variable of
            lock[_LOCK] = was_open


def _operator_entry(info: Any, categories: frozenset[str]) -> Entry:
    variant = getattr(info, "variant_test_name", "")
    return Entry(
        name=f"{info.name}.{variant}" if variant else info.name,
        categories=categories,
        function=info.op or info.inplace_variant,
        in_place=info.inplace_variant if info.op else None,
        dtypes=lambda device: _in_order(info.supported_dtypes(torch.device(device).type)),
        differentiable=lambda device: frozenset(info.supported_backward_dtypes(torch.device(device).type)),
        samples=partial(_samples, info),
    )


def _in_order(dtypes: Any) -> tuple[torch.dtype, ...]:
    # float32 first: what fails there fails everywhere
    return tuple(sorted(dtypes, key=lambda dtype: (dtype is not torch.float32, str(dtype))))


def _samples(info: Any, device: str, dtype: torch.dtype, wants_grad: bool) -> Iterator[Arguments]:
    # the table's own method draws each sample from the same seed
    for count, sample in enumerate(info.sample_inputs_func(info, device, dtype, wants_grad)):
        if count == MOST_SAMPLES:
            return
        yield (sample.input, *sample.args), dict(sample.kwargs)


def _optimizer_entry(info: Any) -> Entry:
    return Entry(
        name=f"optim.{info.optim_cls.__name__}",
        categories=frozenset({OPTIMIZER}),
        function=partial(_optimize, info.optim_cls),
        dtypes=lambda device: OPTIMIZED,
        differentiable=lambda device: frozenset(),
        samples=partial(_optimizer_samples, info),
    )


def _optimizer_samples(info: Any, device: str, dtype: torch.dtype, wants_grad: bool) -> Iterator[Arguments]:
    """Parameters with gradients, and what the optimizer is made with."""
    for inputs in _optimizer_inputs()(device, dtype, info):
        if inputs.kwargs.get("differentiable"):
            # its parameters would be no leaves
            continue
        parameters = []
        for shape in PARAMETER_SHAPES:
            parameter = torch.nn.Parameter(torch.randn(shape, device=device).to(dtype))
            gradient = torch.randn(shape, device=device).to(dtype)
            parameter.grad = gradient.to_sparse() if info.only_supports_sparse_grads else gradient
            parameters.append(parameter)
        yield (parameters,), dict(inputs.kwargs)


def _optimize(make: Callable[..., Any], parameters: list[torch.nn.Parameter], **settings: Any) -> None:
    optimizer = make(parameters, **settings)
    for _ in range(STEPS):
        # some call it again and again
        optimizer.step(*([lambda: random.random()] if make is torch.optim.LBFGS else []))
