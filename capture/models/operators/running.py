"""Run the samples of operators: select them, try each without a capture, and run it again if it is new."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, zip_longest
from typing import Any

import torch
from torch import nn

from opgrip.capture.models.operators.coverage import Coverage
from opgrip.capture.models.operators.registered import Arguments, Entry
from opgrip.capture.models.operators.shapes import seeded
from opgrip.capture.signatures.signatures import call_key
from opgrip.capture.torch_compat.compiler_private import OrderlyMode
from opgrip.capture.torch_compat.torch_private import without_functions, without_modes
from opgrip.traces.schema.arguments import leaves
from opgrip.traces.schema.tensor_specs import plain_name

NO_DERIVATIVE = re.compile(r"derivative for .* is not implemented")
"""How torch says that an operator is not differentiable."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of a sample call that ran.

    Attributes
    ----------
    calls : keys of the operator calls that it made, each of a signature
    operators : of these
    backward : why its gradients could not be had, empty where they could; None where it has none
    """

    calls: frozenset[Hashable]
    operators: frozenset[Any]
    backward: str | None


class Probe(OrderlyMode):
    """Notes which operators run, and keeps their calls from the modes around it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: set[Hashable] = set()
        self.operators: set[Any] = set()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Note and run one operator."""
        with without_modes(), without_functions():
            self.calls.add(hash(call_key(func, args, kwargs or {})))
            self.operators.add(func)
            return func(*args, **(kwargs or {}))


def try_call(function: Callable[..., Any], arguments: Arguments, with_gradients: bool) -> Trial:
    """Run a call, and its gradients; raises what the call does."""
    probe = Probe()
    with probe:
        result = function(*arguments[0], **arguments[1])
    backward = None
    if with_gradients:
        try:
            with probe:
                backward = None if run_backward(result, arguments) is None else ""
        except Exception as error:
            # an operator without a derivative has none to record
            backward = None if NO_DERIVATIVE.search(str(error)) else f"{type(error).__name__}: {error}"
    return Trial(frozenset(probe.calls), frozenset(probe.operators), backward)


def run_backward(result: Any, arguments: Arguments) -> Any:
    """The gradients of a call's results; None where it has none."""
    outputs = [item for item in tensors_in(result) if item.requires_grad]
    inputs = [item for item in tensors_in(list(arguments)) if item.requires_grad]
    if not outputs or not inputs:
        return None
    with without_modes(), without_functions():
        ones = [torch.ones_like(output) for output in outputs]
    return torch.autograd.grad(outputs, inputs, ones, allow_unused=True)


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors in a tree of arguments or results."""
    return (leaf for leaf in leaves(tree) if isinstance(leaf, torch.Tensor))


def spread(samples: Iterable[Arguments]) -> Iterator[Arguments]:
    """Samples in an order whose beginning has all ways to call the operator; single and no elements come last."""
    groups: dict[Hashable, list[Arguments]] = {}
    single: dict[Hashable, list[Arguments]] = {}
    empty: dict[Hashable, list[Arguments]] = {}
    for sample in samples:
        kind = empty if _has_empty(sample) else groups if has_sizes(sample) else single
        kind.setdefault(_form(sample), []).append(sample)
    for table in (groups, single, empty):
        for round_ in zip_longest(*table.values()):
            yield from (sample for sample in round_ if sample is not None)


def _form(sample: Arguments) -> Hashable:
    """What overload a sample calls, as far as its arguments' types tell."""
    args, kwargs = sample
    return (*map(_kind, args), *((name, _kind(value)) for name, value in sorted(kwargs.items())))


def _kind(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return ("tensor", value.dim() == 0, value.dtype, value.layout)
    if isinstance(value, list | tuple):
        return (type(value).__name__, frozenset(map(_kind, value)))
    return value if isinstance(value, bool | str) else type(value).__name__


def has_sizes(sample: Arguments) -> bool:
    """Whether a tensor of a sample has more than one element."""
    return any(isinstance(leaf, torch.Tensor) and leaf.numel() > 1 for leaf in leaves(list(sample)))


def _has_empty(sample: Arguments) -> bool:
    return any(isinstance(leaf, torch.Tensor) and leaf.numel() == 0 for leaf in leaves(list(sample)))


TRIALS = 3
"""Samples that are tried for each that is to be run, before a dtype is given up."""

Resize = Callable[[Entry, Arguments], Iterator[Arguments]]
"""Gives what a sample is replaced by, in the order in which to try them."""


class SampleScope(nn.Module):
    """Stands for an operator among the modules of a trace, so that its calls are found by its name."""

    def forward(self, run: Callable[[], Any]) -> Any:
        """Run a sample."""
        return run()


@dataclass(slots=True)
class SampleRunner:
    """Runs the samples of entries.

    Attributes
    ----------
    most : samples of an entry and dtype that are run; 0 for all
    resize : gives samples other shapes; None to leave them
    calls : keys of the operator calls that are in the trace by now
    """

    device: str
    seed: int
    most: int
    coverage: Coverage
    resize: Resize | None = None
    calls: set[Hashable] = field(default_factory=set)

    def run(self, entry: Entry, scope: nn.Module) -> None:
        """Run an entry's samples, of all dtypes; what fails is counted, and ends nothing."""
        self.coverage.entries += 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                dtypes, differentiable = entry.dtypes(self.device), entry.differentiable(self.device)
            except Exception as error:
                self.coverage.fail(entry.name, "", error)
                return
            for dtype in dtypes:
                with seeded(self.seed, entry.name, dtype):
                    self._run_dtype(entry, dtype, dtype in differentiable, scope)

    def operators_of(self, entries: Iterable[Entry]) -> set[Any]:
        """The operators that the first samples of entries call, of the first dtype that each takes."""
        operators: set[Any] = set()
        for entry in entries:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with suppress(Exception):
                    dtype = entry.dtypes(self.device)[0]
                    with_gradients = dtype in entry.differentiable(self.device)
                    with seeded(self.seed, entry.name, dtype):
                        samples = spread(entry.samples(self.device, dtype, with_gradients))
                        for sample in islice(samples, TRIALS):
                            operators |= try_call(entry.function, sample, with_gradients).operators
        return operators

    def _run_dtype(self, entry: Entry, dtype: torch.dtype, with_gradients: bool, scope: nn.Module) -> None:
        named = plain_name(dtype)
        try:
            with without_modes(), without_functions():
                samples = list(spread(entry.samples(self.device, dtype, with_gradients)))
            if self.resize is not None:
                samples = [sample for sample in samples if has_sizes(sample)] or samples
        except Exception as error:
            self.coverage.fail(entry.name, named, error)
            return
        ran = 0
        for sample in samples if not self.most else islice(samples, TRIALS * self.most):
            ran += self._run_sample(entry, sample, named, with_gradients, scope)
            if self.most and ran == self.most:
                break
        if entry.in_place is not None:
            self._run_in_place(entry, entry.in_place, dtype, scope)

    def _run_sample(self, entry: Entry, sample: Arguments, dtype: str, with_gradients: bool, scope: nn.Module) -> bool:
        """Run a sample, in other shapes where these are asked for; whether it brought something new."""
        with without_modes(), without_functions():
            tries = [sample] if self.resize is None else [*self.resize(entry, sample), sample]
        for arguments in tries:
            is_new = self._try_call(entry, entry.function, arguments, dtype, with_gradients, scope)
            if not isinstance(is_new, Exception):
                return is_new
        assert isinstance(is_new, Exception), "the loop ran"
        self.coverage.fail(entry.name, dtype, is_new)
        return False

    def _run_in_place(self, entry: Entry, function: Callable[..., Any], dtype: torch.dtype, scope: nn.Module) -> None:
        """Run the variant that writes into its first argument, on the first samples that it takes."""
        with without_modes(), without_functions():
            samples = list(islice(spread(entry.samples(self.device, dtype, False)), TRIALS))
        for sample in samples:
            # many cannot hold what the sample gives
            if self._try_call(entry, function, sample, plain_name(dtype), False, scope) is True:
                return

    def _try_call(
        self,
        entry: Entry,
        function: Callable[..., Any],
        arguments: Arguments,
        dtype: str,
        with_gradients: bool,
        scope: nn.Module,
    ) -> bool | Exception:
        """Run a call where a trial of it runs and calls something new; whether it did, or why it does not run."""
        try:
            trial = try_call(function, arguments, with_gradients)
        except Exception as error:
            return error
        if trial.calls <= self.calls:
            return False
        scope(partial(_run, function, arguments, trial.backward == ""))
        self.calls |= trial.calls
        self.coverage.samples += 1
        self.coverage.operators |= trial.operators
        if trial.backward:
            self.coverage.fail(entry.name, dtype, f"backward: {trial.backward}")
        return True


def _run(function: Callable[..., Any], arguments: Arguments, with_gradients: bool) -> None:
    result = function(*arguments[0], **arguments[1])
    if with_gradients:
        run_backward(result, arguments)
