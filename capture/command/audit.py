"""Comparison of a trace with the operators that torch's profiler reports for the same steps."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from opgrip.capture.program.patches import Patches
from opgrip.traces.io.reader import read
from opgrip.traces.schema.records import OPERATOR, Calls, End, Signature


@dataclass(frozen=True, slots=True)
class CountDifference:
    op: str
    torch_calls: int
    trace_calls: int
    explained: str | None = None


def audit(trace: str | Path, steps: Callable[[], object]) -> list[CountDifference]:
    """Run `steps` under torch's profiler, and return the operators that `trace` and the profiler count differently."""
    trace_counts = count_calls(trace)
    names = {form_of(name) for name in trace_counts}
    # hide the profiler's messages
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")
    with profile(activities=[ProfilerActivity.CPU]) as session, _printing_marked():
        steps()
    torch_counts: Counter[str] = Counter()
    for event in session.events():
        if event.cpu_parent is None:
            torch_counts.update(_outermost(event, names))
    return differences(torch_counts, trace_counts)


def differences(torch_counts: Mapping[str, int], trace_counts: Mapping[str, int]) -> list[CountDifference]:
    differing = []
    for name in {form_of(name) for name in (*torch_counts, *trace_counts)}:
        forms = [form for form in {*torch_counts, *trace_counts} if form_of(form) == name]
        by_torch, in_trace = (sum(counts.get(form, 0) for form in forms) for counts in (torch_counts, trace_counts))
        if by_torch != in_trace:
            differing.append(CountDifference(name, by_torch, in_trace, explanation(name, by_torch, in_trace)))
        else:
            differing += [
                CountDifference(form, torch_counts.get(form, 0), trace_counts.get(form, 0), OTHER_FORM)
                for form in forms
                if torch_counts.get(form, 0) != trace_counts.get(form, 0)
            ]
    return sorted(differing, key=lambda item: (-abs(item.torch_calls - item.trace_calls), item.op))


def form_of(name: str) -> str:
    """Return the name under which an operator's variants are counted: `aten::add` for `aten::add_`."""
    if name.endswith("_") and not name.endswith("__"):
        name = name[:-1]
    return SAME.get(name, name)


def count_calls(trace: str | Path) -> Counter[str]:
    names: dict[int, str] = {}
    calls: Counter[int] = Counter()
    counts: Counter[str] = Counter()
    for record in read(trace):
        if isinstance(record, Signature) and record.kind == OPERATOR:
            names[record.number] = _dispatcher_name(record.op)
        elif isinstance(record, Calls):
            calls.update(record.signature)
        elif isinstance(record, End):
            for item in record.without_work:
                counts[_dispatcher_name(item.op)] += item.count
    for number, count in calls.items():
        if number in names:
            counts[names[number]] += count
    return counts


def _dispatcher_name(op: str) -> str:
    namespace, _, rest = op.partition(".")
    return f"{namespace}::{rest.partition('.')[0]}"


def explanation(name: str, torch_calls: int, trace_calls: int) -> str | None:
    if name.startswith("profiler::"):
        return "marks of record_function, which the profiler records in another form"
    if torch_calls < trace_calls:
        return NOT_TOLD.get(name)
    if name in NOT_DISPATCHED:
        return NOT_DISPATCHED[name]
    if _is_composite(name):
        return "a composite operator that called no other operator"
    return None


# operators that are counted under another name, because torch may call one in place of the other
SAME = {
    "aten::_reshape_alias": "aten::view",
    "aten::_index_put_impl": "aten::index_put",
    "aten::maximum": "aten::max",
    "aten::minimum": "aten::min",
    # the gradients of max, sort and index
    "aten::zeros": "aten::new_zeros",
}

OTHER_FORM = "same total: under a dispatch mode, autograd calls another variant of the operator"

PRINTING = "opgrip: a tensor is printed"

# operators with an overload that only calls another operator, each with that other operator
MADE_OF = {"aten::repeat_interleave": "aten::repeat_interleave", "aten::where": "aten::nonzero_numpy"}

# operators that do not always reach a dispatch mode, each with the reason
NOT_DISPATCHED = {
    "aten::empty": "torch.tensor() and similar functions allocate without the dispatcher",
    "aten::detach": "torch.tensor() detaches its result without the dispatcher",
    "aten::_local_scalar_dense": "torch.tensor() of a list of tensors reads each of them without the dispatcher",
}

# operators that only a dispatch mode sees, each with the reason
NOT_TOLD = {
    "aten::clone": "autograd copies the tensor that an in-place operator overwrites, below the operator",
    "aten::detach": "torch's own copies of a tensor's metadata are operators only under a dispatch mode",
    "aten::scalar_tensor": "autograd converts numbers to tensors only under a dispatch mode",
}


def _outermost(event: Any, names: Collection[str]) -> Iterator[str]:
    name = event.name
    if name == PRINTING:
        return
    if form_of(name) in names and not _is_made_of_others(event):
        yield name
    elif event.cpu_children:
        for child in event.cpu_children:
            yield from _outermost(child, names)
    elif "::" in name and torch._C._jit_get_schemas_for_operator(name):
        yield name


@contextmanager
def _printing_marked() -> Iterator[None]:
    patches = Patches()
    patches.replace(torch.Tensor, "__repr__", _marked)
    try:
        yield
    finally:
        patches.undo()


def _marked(function: Callable[..., str]) -> Callable[..., str]:
    def marked(*args: Any, **kwargs: Any) -> str:
        with record_function(PRINTING):
            return function(*args, **kwargs)

    return marked


def _is_made_of_others(event: Any) -> bool:
    below = {child.name for child in event.cpu_children}
    return MADE_OF.get(event.name) in below or {event.name, "aten::to"} <= below


def _is_composite(name: str) -> bool:
    overloads = torch._C._jit_get_schemas_for_operator(name)
    names = (f"{name}.{overload.overload_name}" if overload.overload_name else name for overload in overloads)
    kernels = [_has_composite_kernel(name) for name in names]
    return True in kernels and False not in kernels


def _has_composite_kernel(name: str) -> bool | None:
    try:
        return torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
    except RuntimeError:
        # used only by TorchScript
        return None
