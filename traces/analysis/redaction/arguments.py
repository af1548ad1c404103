"""Arguments of calls without what they tell of the program: its names, its texts, its numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from opgrip.traces.analysis.redaction.names import BACKENDS, NOT_RECORDED, REDUCTIONS, Names, is_public_type
from opgrip.traces.analysis.redaction.policy import SCALARS, Policy, coarse, coarse_float, coarse_int, rounded_up
from opgrip.traces.analysis.redaction.redacted_calls import CallFacts, argument_name, call_facts, is_value
from opgrip.traces.schema.arguments import GeneratorSpec, GroupSpec, Opaque, ReductionSpec, TensorSpec
from opgrip.traces.schema.operator_arguments import schema_arguments
from opgrip.traces.schema.python_objects import (
    ArraySpec,
    ModuleSpec,
    NamedSpec,
    ObjectSpec,
    SameSpec,
    ScalarSpec,
    SharedSpec,
)
from opgrip.traces.schema.records import FUNCTION, HIGHER_ORDER, OPERATOR, Signature
from opgrip.traces.schema.tensor_specs import PerChannel, PerTensor
from opgrip.traces.table.profiler_labels import ENTER

RANGES = ("aten.arange.", "aten.range.")
"""How the names of operators begin that make ranges, the last of which has its end too."""
STARTS, ENDS, STEP = "start", "end", "step"

Images: TypeAlias = dict[int | str, Any]


def range_images(signature: Signature) -> Images:
    """A range's numbers by their places in the call: from zero on, as many as there were, in coarse steps.

    Nothing for another call, and for one whose output is not known.
    """
    places: list[tuple[int | str, Any]] = [*enumerate(signature.args), *signature.kwargs.items()]
    numbers = {argument_name(signature.op, place)[0]: (place, value) for place, value in places}
    output, (_, step) = signature.outputs, numbers.get(STEP, (None, 1))
    is_range = signature.kind == OPERATOR and signature.op.startswith(RANGES)
    if not is_range or not isinstance(output, TensorSpec) or len(output.shape) != 1 or not _is_number(step):
        return {}
    step = coarse(step)
    count = output.shape[0] - signature.op.startswith(RANGES[1])
    images = {STARTS: 0, ENDS: step * count, STEP: step}
    # a float stays one: it decides the dtype
    return {
        place: float(images[name]) if isinstance(value, float) else images[name]
        for name, (place, value) in numbers.items()
        if name in images and _is_number(value)
    }


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


SMALL = 255
"""Whole numbers up to this that are sizes, dimensions or flags stay whatever the shapes are."""
SEEDS = ("seed", "philox_seed", "offset", "philox_offset")
"""Arguments that a random number generator begins from; 0 does as well."""
LOWS, HIGHS = ("low", "from"), ("high", "to")
"""Arguments that random whole numbers lie between: the low one is below the high one."""
SHAPING_FLOATS = ("scale_factors",)
"""Arguments whose floats decide the size of an output."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value stands in a call.

    Attributes
    ----------
    argument : the name of the argument
    is_value : its whole numbers are values, which decide no shape
    """

    op: str
    argument: str
    is_value: bool


class Arguments:
    """Redacts trees of arguments, but for the values of tensors, of which a tree has numbers alone."""

    def __init__(self, policy: Policy, names: Names) -> None:
        self._keeps_scalars = policy.keeps(SCALARS)
        self._names = names

    def of(self, signature: Signature, facts: CallFacts) -> Signature:
        """A signature with its arguments redacted; its whole numbers are added to the facts."""
        op = signature.op
        ranges = {} if self._keeps_scalars else range_images(signature)

        def redact(place: int | str, tree: Any) -> Any:
            if place in ranges:
                return ranges[place]
            name, kind = argument_name(op, place)
            return self.tree(tree, Place(op, name, is_value(op, signature.kind, kind)), facts)

        args = tuple(redact(place, tree) for place, tree in enumerate(signature.args))
        kwargs = {self._keyword(signature, name): redact(name, tree) for name, tree in signature.kwargs.items()}
        outputs = self.outputs(op, signature.outputs, facts)
        raised = None if signature.raised is None else self._names.error(signature.raised)
        return replace(
            signature,
            op=self._names.operator(op, signature.kind),
            args=args,
            kwargs=kwargs,
            outputs=outputs,
            raised=raised,
        )

    def outputs(self, op: str, outputs: Any, facts: CallFacts) -> Any:
        """What a call returned."""
        # numbers that a call returns come from values, and no replay needs them
        return self.tree(outputs, Place(op, "outputs", True), call_facts(facts.sizes, facts.extent))

    def tree(self, value: Any, place: Place, facts: CallFacts) -> Any:
        """A tree of arguments."""

        def inner(item: Any) -> Any:
            return self.tree(item, place, facts)

        redact = _LEAVES.get(type(value))
        if redact is not None:
            return redact(self, value, place, facts)
        match value:
            case list():
                return [inner(item) for item in value]
            case tuple():
                return tuple(inner(item) for item in value)
            case dict():
                return self._items(value, inner)
            case set() | frozenset():
                return type(value)(inner(item) for item in value)
            case ObjectSpec(cls, fields, content):
                name = self._names.object_name(cls)
                return ObjectSpec(name, self._fields(fields, inner), None if content is None else inner(content))
            case ModuleSpec(cls):
                groups = (value.parameters, value.buffers, value.modules, value.fields)
                return ModuleSpec(self._names.object_name(cls), *(self._fields(group, inner) for group in groups))
            case ArraySpec(tensor):
                return ArraySpec(inner(tensor))
            case SharedSpec(number, shared):
                return SharedSpec(number, inner(shared))
        # what a later version adds
        return Opaque(NOT_RECORDED)

    def whole(self, value: int, place: Place, facts: CallFacts) -> int:
        """A whole number."""
        if self._keeps_scalars:
            return value
        if place.argument in SEEDS:
            image = 0
        elif place.is_value:
            image = facts.pinned.get(value, coarse_int(value))
        elif abs(value) <= max(SMALL, facts.extent):
            image = value
        elif place.argument in LOWS:
            image = coarse_int(value) if value > 0 else rounded_up(value)
        elif place.argument in HIGHS:
            image = rounded_up(value) if value > 0 else coarse_int(value)
        else:
            # beyond all that a shape holds: a limit, as the end of a slice, that must stay beyond
            image = rounded_up(value)
        facts.pinned.setdefault(value, image)
        return image

    def floating(self, value: float, place: Place) -> float:
        """A float."""
        # a function of the program may call anything so
        shapes = place.argument in SHAPING_FLOATS and bool(schema_arguments(place.op))
        return value if self._keeps_scalars or shapes else coarse_float(value)

    def text(self, value: str, place: Place) -> str:
        """A string."""
        if place.op.startswith(ENTER):
            return self._names.label(value)
        if self._keeps_scalars:
            return value
        return self._names.equation(value) if place.op.startswith("aten.einsum") else self._names.text(value)

    def group(self, value: GroupSpec) -> GroupSpec:
        """A group of processes, its name hashed and its ranks as they are."""
        backend = value.backend if value.backend in BACKENDS else self._names.word(value.backend)
        return replace(value, name=self._names.text(value.name), backend=backend)

    def opaque(self, value: Opaque) -> Opaque:
        """The type of what a trace cannot hold; what it could not be recorded for is an error's message."""
        name = value.type_name
        return value if is_public_type(name) else Opaque(self._names.error(name))

    def named(self, value: NamedSpec) -> NamedSpec:
        """A class, a function or a member of an enumeration."""
        return NamedSpec(self._names.object_name(value.name))

    def tensor(self, spec: TensorSpec) -> TensorSpec:
        """A tensor's metadata."""
        made_of = spec.made_of
        match made_of:
            case PerTensor(scale, zero_point):
                made_of = PerTensor(coarse_float(scale), coarse_int(zero_point))
            case PerChannel(scales, zero_points, axis):
                zeros: Any = tuple(
                    coarse_int(zero) if isinstance(zero, int) else coarse_float(zero) for zero in zero_points
                )
                made_of = PerChannel(tuple(map(coarse_float, scales)), zeros, axis)
        cls = None if spec.cls is None else self._names.class_name(spec.cls)
        return replace(spec, cls=cls, made_of=made_of, device=self._names.device(spec.device))

    def _keyword(self, signature: Signature, name: str) -> str:
        is_own = signature.kind == FUNCTION and not signature.op.startswith(HIGHER_ORDER)
        parameters = dict(schema_arguments(signature.op))
        is_strange = bool(parameters) and name not in parameters
        return self._names.word(name) if is_own or is_strange or self._names.hides(signature.op) else name

    def _fields(self, fields: Mapping[str, Any], inner: Callable[[Any], Any]) -> dict[str, Any]:
        return {self._names.function(name): inner(item) for name, item in fields.items()}

    def _items(self, items: Mapping[Any, Any], inner: Callable[[Any], Any]) -> dict[Any, Any]:
        redacted: dict[Any, Any] = {}
        for key, item in items.items():
            image = self._names.word(key) if isinstance(key, str) else inner(key)
            # two numbers that are alike when coarse
            redacted[self._names.word(repr(key)) if image in redacted else image] = inner(item)
        return redacted


def _range(arguments: Arguments, value: range, place: Place, facts: CallFacts) -> range:
    parts = [arguments.whole(part, place, facts) for part in (value.start, value.stop, value.step)]
    return range(parts[0], parts[1], parts[2] or 1)


def _slice(arguments: Arguments, value: slice, place: Place, facts: CallFacts) -> slice:
    parts = (value.start, value.stop, value.step)
    return slice(*(None if part is None else arguments.whole(part, place, facts) for part in parts))


def _same(arguments: Arguments, value: Any, place: Place, facts: CallFacts) -> Any:
    return value


def _scalar(arguments: Arguments, value: ScalarSpec, place: Place, facts: CallFacts) -> ScalarSpec:
    return replace(value, value=arguments.tree(value.value, replace(place, is_value=True), facts))


_Leaf: TypeAlias = Callable[[Arguments, Any, Place, CallFacts], Any]

_LEAVES: dict[type, _Leaf] = {
    **dict.fromkeys(
        (
            type(None),
            bool,
            torch.Size,
            torch.dtype,
            torch.device,
            torch.layout,
            torch.memory_format,
            SameSpec,
            type(...),
        ),
        _same,
    ),
    int: Arguments.whole,
    float: lambda arguments, value, place, facts: arguments.floating(value, place),
    complex: lambda arguments, value, place, facts: complex(
        arguments.floating(value.real, place), arguments.floating(value.imag, place)
    ),
    str: lambda arguments, value, place, facts: arguments.text(value, place),
    bytes: lambda arguments, value, place, facts: bytes(len(value)),
    range: _range,
    slice: _slice,
    TensorSpec: lambda arguments, value, place, facts: arguments.tensor(value),
    GeneratorSpec: lambda arguments, value, place, facts: GeneratorSpec(arguments._names.device(value.device), 0),
    GroupSpec: lambda arguments, value, place, facts: arguments.group(value),
    ReductionSpec: lambda arguments, value, place, facts: (
        value if value.name in REDUCTIONS else ReductionSpec(arguments.text(value.name, place))
    ),
    Opaque: lambda arguments, value, place, facts: arguments.opaque(value),
    NamedSpec: lambda arguments, value, place, facts: arguments.named(value),
    ScalarSpec: _scalar,
}
