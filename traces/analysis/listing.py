"""Records of a trace as lines for people."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from itertools import islice
from typing import Any

from opgrip.errors import shortened
from opgrip.traces.codec.call_blocks import perturbed_flags
from opgrip.traces.codec.record_forms import to_json
from opgrip.traces.schema.arguments import GeneratorSpec, Opaque, TensorSpec, leaves
from opgrip.traces.schema.python_objects import children
from opgrip.traces.schema.records import (
    Calls,
    Context,
    DeviceTimes,
    Effects,
    End,
    Entered,
    Header,
    Kernels,
    Observed,
    Record,
    Scope,
    Signature,
    Thread,
    Values,
)
from opgrip.traces.schema.torch_names import tensor_outline
from opgrip.traces.values import value_model_to_json

MOST = 400
"""Characters of a line's text."""
MOST_LEAVES = 60
"""Arguments of a call that are written one by one."""
TYPES: dict[str, type] = {
    "header": Header,
    "signature": Signature,
    "effects": Effects,
    "observed": Observed,
    "values": Values,
    "scope": Scope,
    "context": Context,
    "thread": Thread,
    "calls": Calls,
    "device_times": DeviceTimes,
    "kernels": Kernels,
    "entered": Entered,
    "end": End,
}
"""Records by the name of their type in the file."""
NAME_OF = {kind: name for name, kind in TYPES.items()}


@dataclass(frozen=True, slots=True)
class Filter:
    """Which records are listed.

    Attributes
    ----------
    types : names of types of records; empty for all
    ops, modules : patterns; with one of these, calls that match, and records of signatures and scopes that match
    """

    types: Sequence[str] = ()
    ops: Sequence[str] = ()
    modules: Sequence[str] = ()


@dataclass(slots=True)
class _Names:
    ops: dict[int, str] = field(default_factory=dict)
    scopes: dict[int, Scope] = field(default_factory=dict)

    def module_of(self, number: int) -> str:
        scope = self.scopes.get(number)
        if scope is None:
            return ""
        return self.scopes.get(scope.forward, scope).module if scope.forward is not None else scope.module


def list_records(records: Iterator[Record], chosen: Filter, as_json: bool = False) -> Iterator[str]:
    """A line for each record, and one for each call of a block; in memory that does not grow with the calls.

    Parameters
    ----------
    as_json : each record as it stands in the file; of blocks of calls that are filtered, a line a call
    """
    names = _Names()
    is_whole = not (chosen.ops or chosen.modules)
    for record in records:
        if isinstance(record, Signature):
            names.ops[record.number] = record.op
        elif isinstance(record, Scope):
            names.scopes[record.number] = record
        if chosen.types and NAME_OF[type(record)] not in chosen.types:
            continue
        if isinstance(record, Calls) and not (as_json and is_whole):
            yield from _calls(record, names, chosen, as_json)
        elif _is_chosen(record, names, chosen):
            yield _json(to_json(record)) if as_json else f"{NAME_OF[type(record)]:<12} {_LINES[type(record)](record)}"


def _is_chosen(record: Record, names: _Names, chosen: Filter) -> bool:
    if not chosen.ops and not chosen.modules:
        return True
    signature = record.number if isinstance(record, Signature) else getattr(record, "signature", None)
    scope = record.number if isinstance(record, Scope) else getattr(record, "scope", None)
    by_op = chosen.ops and isinstance(signature, int) and _matches(names.ops.get(signature, ""), chosen.ops)
    by_module = chosen.modules and isinstance(scope, int) and _matches(names.module_of(scope), chosen.modules)
    return bool(by_op or by_module)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)


def _calls(block: Calls, names: _Names, chosen: Filter, as_json: bool) -> Iterator[str]:
    pages, slow_ns, first = dict(block.page_faults), dict(block.slow_memory), 0
    perturbed = perturbed_flags(block.perturbed, len(block.scope))
    for place, (signature, scope) in enumerate(zip(block.signature, block.scope, strict=True)):
        count = block.tensors[place] if block.tensors else 0
        storages = block.storages[first : first + count]
        first += count
        op, module = names.ops.get(signature, "?"), names.module_of(scope)
        if not (_matches(op, chosen.ops) and _matches(module, chosen.modules)):
            continue
        facts: dict[str, Any] = {
            "thread": block.thread,
            "start_ns": block.start_ns[place],
            "duration_ns": block.duration_ns[place],
            "signature": signature,
            "op": op,
            "scope": scope,
            "module": module,
            "phase": names.scopes[scope].phase if scope in names.scopes else "?",
            "storages": storages,
        }
        if block.device_ns and block.device_ns[place] >= 0:
            facts["device_ns"] = block.device_ns[place]
        if any(block.streams):
            facts["stream"] = block.streams[place]
        facts |= {"page_faults": pages[place]} if place in pages else {}
        facts |= {"perturbed": True} if perturbed[place] else {}
        facts |= {"slow_memory_ns": slow_ns[place]} if place in slow_ns else {}
        yield _json({"type": "call", **facts}) if as_json else _call_line(facts)


def _call_line(facts: dict[str, Any]) -> str:
    times = f"{facts['start_ns'] / 1e3:>14,.1f} us {facts['duration_ns'] / 1e3:>11,.1f} us"
    extra = "".join(
        f"  {name.removesuffix('_ns')} {value / 1e3:,.1f} us" if name.endswith("_ns") else f"  {name} {value}"
        for name, value in facts.items()
        if name in ("device_ns", "stream", "page_faults", "perturbed", "slow_memory_ns")
    )
    where = f"{shortened(facts['module'], MOST) or '(root)'} {facts['phase']}"
    return f"{'call':<12} {times}  thread {facts['thread']}  {facts['op']} #{facts['signature']}  {where}{extra}"


def _json(form: dict[str, Any]) -> str:
    return json.dumps(form)


def outline(value: Any) -> str:
    """Arguments in short: `(float32[2,3], 1, [2, 2])`."""
    many = sum(1 for _ in islice(leaves(value), MOST_LEAVES + 1)) > MOST_LEAVES
    return shortened(_short(value) if not many else _first_leaves(value), MOST)


def _first_leaves(value: Any) -> str:
    return f"{', '.join(map(_short, islice(leaves(value), MOST_LEAVES)))}, ..."


def _short(value: Any) -> str:
    match value:
        case TensorSpec():
            return tensor_outline(value.dtype, value.shape)
        case Opaque(name):
            return f"<{name}>"
        case GeneratorSpec(device):
            return f"generator of {device}"
        case str():
            return repr(value)
        case list():
            return f"[{', '.join(map(_short, value))}]"
        case tuple():
            return f"({', '.join(map(_short, value))})"
        case dict():
            return f"{{{', '.join(f'{_short(key)}: {_short(item)}' for key, item in value.items())}}}"
    inner = children(value)
    return str(value) if inner is None else f"{type(value).__name__}({', '.join(map(_short, inner))})"


def call_outline(signature: Signature) -> str:
    """A signature in short: `aten.mul.Tensor(float32[2,3], 2.5)`."""
    words = [f"{name}={outline(value)}" for name, value in signature.kwargs.items()]
    return f"{signature.op}({shortened(', '.join([*map(outline, signature.args), *words]), MOST)})"


def _signature(record: Signature) -> str:
    kind = "" if record.kind == "operator" else f"{record.kind} "
    result = f"raised {record.raised}" if record.raised is not None else f"-> {outline(record.outputs)}"
    return f"#{record.number} {kind}{call_outline(record)} {result}"


def _scope(record: Scope) -> str:
    place = f" {record.file}:{record.line} in {record.function}" if record.function else ""
    inside = f" inside {record.inside}" if record.inside is not None else ""
    forward = f" forward #{record.forward}" if record.forward is not None else ""
    module = f"{record.module or '(root)'} {record.module_type}".strip()
    return f"#{record.number} {module} {record.phase}{inside}{forward}{place}"


def _values(record: Values) -> str:
    form = dict(value_model_to_json(record.model))
    kept = " whole values kept" if record.tensor is not None else ""
    return f"#{record.number} {form.pop('model')} {_facts(form)}{kept}"


def _facts(form: dict[str, Any]) -> str:
    return shortened(" ".join(f"{name} {json.dumps(value)}" for name, value in form.items()), MOST)


def _observed(record: Observed) -> str:
    since = "" if record.since_ns is None else f" since {record.since_ns / 1e3:,.1f} us"
    return f"of #{record.signature} values {record.values} -> {outline(record.outputs)}{since}"


def _entered(record: Entered) -> str:
    call = f"#{record.signature}" if record.opened is None else call_outline(record.opened)
    return f"{record.start_ns / 1e3:,.1f} us thread {record.thread} {call}"


def _plain(record: Any) -> str:
    facts = {item.name: getattr(record, item.name) for item in fields(record)}
    return _facts({name: value for name, value in to_json(record).items() if name != "type"} if facts else {})


_LINES: dict[type, Callable[[Any], str]] = {
    **dict.fromkeys(TYPES.values(), _plain),
    Signature: _signature,
    Scope: _scope,
    Values: _values,
    Observed: _observed,
    Entered: _entered,
}
