"""Runs of the reference: what they give, and under which seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from opgrip.replay.modes.mode import Results
from opgrip.replay.operators.calling import Arguments
from opgrip.replay.operators.devices import module_of
from opgrip.traces.schema.arguments import leaves


def observe(function: Callable[..., Any], arguments: Arguments, mutates: bool) -> Results:
    """What a call gives, as copies that nothing that runs later writes into.

    Parameters
    ----------
    mutates : whether it may write into its arguments, which are then kept too
    """
    args, kwargs = arguments
    outputs = [_copy_leaf(leaf) for leaf in leaves(function(*args, **kwargs))]
    return Results(outputs, [_copy_leaf(tensor) for tensor in tensors_of(arguments)] if mutates else [])


def tensors_of(arguments: Arguments) -> list[Tensor]:
    """The tensors among a call's arguments, in order."""
    return [leaf for leaf in leaves(list(arguments)) if isinstance(leaf, Tensor)]


def run_seeded(function: Callable[..., Any], arguments: Arguments, mutates: bool, seed: int) -> Results:
    """What a call gives when all random numbers start from a seed; the program's own generators stay as they were."""
    with _seeded(arguments, seed):
        return observe(function, arguments, mutates)


def _copy_leaf(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


@contextmanager
def _seeded(arguments: Arguments, seed: int) -> Iterator[None]:
    used = {tensor.device for tensor in tensors_of(arguments) if tensor.device.type != "cpu"}
    kinds = {device.type for device in used}
    if torch.cuda.is_initialized():
        kinds.add("cuda")
    for leaf in leaves(list(arguments)):
        if isinstance(leaf, torch.Generator):
            leaf.manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        devices = [f"{kind}:{index}" for kind in kinds for index in range(getattr(torch, kind).device_count())]
        states = {device: module_of(device).get_rng_state(device) for device in devices}
        try:
            # not torch.manual_seed, which would seed accelerators that are not used here
            torch.default_generator.manual_seed(seed)
            for kind in kinds:
                getattr(torch, kind).manual_seed_all(seed)
            yield
        finally:
            for device, state in states.items():
                module_of(device).set_rng_state(state, device)
