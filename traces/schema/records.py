"""The records of a trace, as Python values."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol, TypeAlias

import torch
from msgspec import Meta

from opgrip.traces.schema.arguments import Opaque
from opgrip.traces.schema.json_values import ALWAYS, ID, AnyValue, Argument, Count, Int64, Name, Share, TensorKey
from opgrip.traces.schema.privacy import (
    ACCELERATOR,
    CONTEXT_SETTINGS,
    DEVICE_NAMES,
    DROPPED,
    HEADER_FIELDS,
    NESTED,
    THINNED_COUNTS,
    Public,
    hashed,
    public,
    table,
)


class Drawable(Protocol):
    """What values can be drawn from."""

    def draw(self, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        """New values on the generator's device, contiguous but where dimensions are expanded.

        Of any shape and dtype, in memory that these bound.
        """


class ValueModel(Drawable, Protocol):
    """A frozen dataclass whose fields are plain values, as JSON and `encode` know them.

    A field that came later has a default: older traces do not have it, and newer ones leave it out where it is that.

    Attributes
    ----------
    priority : models are tried in rising order; the first whose `fit` gives one is kept
    """

    priority: ClassVar[int]
    __dataclass_fields__: ClassVar[dict[str, Any]]

    @classmethod
    def fit(cls, tensor: torch.Tensor) -> ValueModel | None:
        """The model of this tensor's values; None where this kind of model is not for them.

        Draws no random numbers and leaves the tensor, which is not empty, as it is.
        """

    def check(self) -> None:
        """Raise `FormatError` where the fields, which may come from a stranger's file, cannot be drawn from."""


FORMAT = "opgrip-trace"
MAJOR, MINOR = 1, 5

OPERATOR = "operator"
EXTENSION = "extension"
COMPILED = "compiled"
FUNCTION = "function"
KINDS = (OPERATOR, EXTENSION, COMPILED, FUNCTION)
PHASES = ("forward", "backward", "optimizer")
"""Of a step, as captures name them."""

HIGHER_ORDER = "torch.ops.higher_order:"
"""What the names of operators that take functions begin with: their calls are those of a `function`."""

NO_STORAGE = -1
"""Number of the storage of a tensor that has none of its own."""


@dataclass(frozen=True, slots=True)
class Header:
    """The first record: what wrote the trace, of what, where and when."""

    fields: Annotated[dict[str, Any], table(HEADER_FIELDS)]


@dataclass(frozen=True, slots=True)
class Signature:
    """All that replaying a call needs.

    Attributes
    ----------
    number : what calls refer to it by
    kind : `operator` for the dispatcher's, `extension` for a function of an extension module or a Triton kernel,
        `compiled` for a region that torch.compile made, `function` for a gripped function or an operator that takes
        functions
    op : `aten.addmm.default`; `mmcv._ext:nms` for an extension's function, and so for a Triton kernel and a gripped
        function; in a sample its name
    args, kwargs : trees of values and `TensorSpec`
    outputs : what the first call returned, in the same form; `Opaque` where that is not known
    raised : the error that the first call ended in, in one line; None where it returned
    """

    number: Public[Count] = field(metadata=ID)
    kind: Annotated[str, Meta(pattern=f"^({'|'.join(KINDS)})\\Z"), public("kind")]
    op: Annotated[Name, hashed("operator")]
    args: Annotated[tuple[Argument, ...], NESTED]
    kwargs: Annotated[dict[Name, Argument], NESTED] = field(default_factory=dict)
    outputs: Annotated[Argument, NESTED] = field(default=Opaque("not recorded"), metadata=ALWAYS)
    raised: Annotated[Name | None, hashed("error")] = None


@dataclass(frozen=True, slots=True)
class Observed:
    """What another call of a signature met than its first, where values decide what a call costs or gives.

    Where calls of a signature take other times in some places of the program than in others, a call in each of these.

    Attributes
    ----------
    signature : its number
    values : numbers of the value models of what the call took, in the order of the signature's tensors; None where
        there is none
    outputs : what the call returned, in a signature's form
    since_ns : of a call that stands for its place: it is the signature's first to begin after this, counted from the
        start of the capture
    storage : of such a call, the memory of the first tensor that it took, as `Calls` has it: it is the first of those
        in this memory, as another thread may have called meanwhile; None where it took no tensor
    """

    signature: Public[Int64]
    values: Annotated[list[Int64 | None], NESTED]
    outputs: Annotated[Argument, NESTED]
    since_ns: Public[Int64 | None] = None
    storage: Public[Int64 | None] = None


@dataclass(frozen=True, slots=True)
class Scope:
    """Where calls came from.

    Attributes
    ----------
    module : path of the innermost running module from its root, which is itself the empty path
    module_type : name of that module's class; empty outside all modules
    phase : `forward`, `backward` or `optimizer`
    inside : what made the call where the program did not: an extension function, a Triton kernel, an operator that
        launches one, a gripped function, an operator that takes functions, a compiled region
    gripped : whether `inside` is a gripped function, or an operator that takes functions: what it calls is recorded,
        and stands for itself too
    function, file, line : the innermost frame of the program, torch's own passed over; empty where there is none
    callers : the frames around it, from the inside, each as `file:line function`
    context : number of the settings that the calls ran under
    forward : number of the scope of the forward calls that caused these calls of a backward pass
    """

    number: Public[Count] = field(metadata=ID)
    module: Annotated[Name, hashed("module")]
    module_type: Annotated[Name, hashed("class")]
    phase: Annotated[Name, public("phase")]
    inside: Annotated[Name | None, hashed("operator")] = None
    function: Annotated[Name, hashed("function")] = ""
    file: Annotated[Name, hashed("file")] = ""
    line: Annotated[Int64, hashed("line")] = 0
    callers: Annotated[tuple[Name, ...], hashed("caller")] = ()
    context: Public[Int64 | None] = None
    forward: Public[Int64 | None] = None
    gripped: Public[bool] = False


@dataclass(frozen=True, slots=True)
class Effects:
    """What is known of a gripped call beyond its arguments and results, in the trace of a sample.

    Attributes
    ----------
    signature : the call's
    operators : how many it launched
    operator_ns : their time
    after : positional and named arguments after the call, where it wrote into them
    random_state : torch's CPU generator before the call, (N,) uint8, where the call drew from it
    """

    signature: Public[Int64]
    operators: Public[Int64]
    operator_ns: Public[Count]
    after: Annotated[Argument, NESTED] = None
    random_state: Annotated[Argument, DROPPED] = None


@dataclass(frozen=True, slots=True)
class Context:
    """Settings that change how operators run: gradient and inference mode, autocast, threads and the like."""

    number: Public[Count] = field(metadata=ID)
    settings: Annotated[dict[str, bool | int | float | str | None], table(CONTEXT_SETTINGS)]


@dataclass(frozen=True, slots=True)
class Values:
    """A value model under the number that tensors refer to it by.

    Attributes
    ----------
    tensor : key of the values themselves in the file beside the trace, None where they were not kept
    """

    number: Annotated[Count, NESTED] = field(metadata=ID)
    model: Annotated[ValueModel, NESTED]
    tensor: Annotated[TensorKey | None, DROPPED] = None


@dataclass(frozen=True, slots=True)
class Thread:
    """A thread that made calls.

    Attributes
    ----------
    process : number of its process, in a trace that was merged from those of several; None in others
    """

    number: Public[Count] = field(metadata=ID)
    name: Annotated[Name, hashed("thread")]
    process: Public[Int64 | None] = None


@dataclass(frozen=True, slots=True)
class Calls:
    """Calls of one thread, in the order in which they ended.

    Attributes
    ----------
    signature, scope : numbers, one a call
    start_ns : since the start of the capture, one a call
    duration_ns : one a call
    tensors : how many tensors a call took and gave, one a call
    storages : the memory that these tensors live in, `sum(tensors)` numbers: of each call those of its arguments, in
        their order, then those of its results. A number stands for the same memory in the whole trace.
    newest : the largest number of a storage in the blocks before; numbers are written by their distance to it
    device_ns : how long each call kept an accelerator busy, -1 for one that ran on the host alone; empty where none did
    page_faults : (place in this block, pages that the system gave) of the calls that got fresh memory
    streams : torch's number of the stream of its accelerator that each call gave work to; empty where that is 0, the
        default one, for all
    perturbed : (place in this block, how many calls from there on) of the calls that ran right after, or around, so
        much of the capture's own work that they found other caches and memory, that met slow memory, or that may have
        been interrupted because other processes used the processors
    slow_memory : (place in this block, ns) of the calls whose page faults took much longer than is usual on the
        machine, and an estimate of how much longer; they are among those that are perturbed
    """

    thread: Public[Int64]
    signature: Public[list[Int64]]
    scope: Public[list[Int64]]
    start_ns: Public[list[Int64]]
    duration_ns: Public[list[Int64]]
    tensors: Public[list[Int64]] = field(default_factory=list)
    storages: Public[list[Int64]] = field(default_factory=list)
    newest: Public[Int64] = -1
    device_ns: Public[list[Int64]] = field(default_factory=list)
    page_faults: Public[list[tuple[Count, Count]]] = field(default_factory=list)
    streams: Public[list[Int64]] = field(default_factory=list)
    perturbed: Public[list[tuple[Count, Count]]] = field(default_factory=list)
    slow_memory: Public[list[tuple[Count, Count]]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class DeviceTimes:
    """How long calls kept an accelerator busy, where that was known only after they were written.

    Attributes
    ----------
    first : place of the first call among those of its thread, in the order in which the trace has them
    device_ns : of this call and those that follow it, as `Calls` has it
    """

    thread: Public[Int64]
    first: Public[Count]
    device_ns: Public[list[Int64]]


@dataclass(frozen=True, slots=True)
class Kernels:
    """What the calls of a signature ran on an accelerator: kernels, copies and fills. Several records of one add up.

    Attributes
    ----------
    names : as the accelerator's driver has them
    launches, device_ns : how often each ran, and for how long in all
    """

    signature: Public[Int64]
    names: Annotated[list[Name], hashed("kernel")]
    launches: Public[list[Count]]
    device_ns: Public[list[Count]]


if TYPE_CHECKING:
    OpenedSignature: TypeAlias = Signature
else:

    class OpenedSignature(metaclass=AnyValue):
        """A signature within a record: keys of dataclasses are renamed one object at a time."""


@dataclass(frozen=True, slots=True)
class Entered:
    """A call that had not ended when this was written. If it did end, the trace also has it among its calls.

    Attributes
    ----------
    start_ns : since the start of the capture
    signature : number of its signature, which the trace holds where a call of it has ended before
    opened : what was known of the signature, where none had
    """

    thread: Public[Int64]
    start_ns: Public[Int64]
    scope: Public[Int64]
    signature: Public[Int64]
    opened: Annotated[OpenedSignature | None, NESTED] = None


@dataclass(frozen=True, slots=True)
class Dropped:
    """What could not be recorded, by operator and reason."""

    op: Annotated[Name, hashed("operator")]
    reason: Annotated[Name, hashed("reason")]
    count: Public[Int64]


def listed(counts: Counter[tuple[str, str]]) -> list[Dropped]:
    """Counts by operator and reason as the last record holds them."""
    return [Dropped(op, reason, count) for (op, reason), count in sorted(counts.items())]


THINNED = ("values", "scopes", "steps")
"""What a capture leaves out to keep within its budget, in this order."""


@dataclass(frozen=True, slots=True)
class End:
    """The last record: totals, and what was not recorded.

    Attributes
    ----------
    duration_ns : of the whole capture
    dropped : calls that are not in the trace
    passed_by : calls that are in the trace as those that they were made of
    stopped : the limit that ended the recording while the program went on; None where none did
    without_values : tensors that are, without a value model
    devices : names of the accelerators that the program had started by then
    accelerator : of these the properties, the libraries and their settings, as `describe_accelerators` gives them
    before : of a trace that has the last calls alone, how many there were before these; None in others
    thinned : how often a capture left out what, to keep within its budget: `values` of signatures, `scopes` of modules,
        whole `steps`
    contended : share of the recorded time in which other processes used the processors that the program waited for
    step_starts_ns : when each recorded step began, since the start of the capture, where the program or its optimizer
        showed that and the header does not say how many steps there are
    """

    calls: Public[Int64]
    signatures: Public[Int64]
    duration_ns: Public[Count]
    dropped: Annotated[list[Dropped], NESTED] = field(default_factory=list, metadata=ALWAYS)
    passed_by: Annotated[list[Dropped], NESTED] = field(default_factory=list, metadata=ALWAYS)
    without_values: Annotated[list[Dropped], NESTED] = field(default_factory=list, metadata=ALWAYS)
    stopped: Annotated[Name | None, hashed("limit")] = None
    devices: Annotated[dict[Name, Name], table(DEVICE_NAMES)] = field(default_factory=dict)
    accelerator: Annotated[dict[Name, Any], table(ACCELERATOR)] = field(default_factory=dict)
    before: Public[Int64 | None] = None
    thinned: Annotated[dict[Name, Int64], table(THINNED_COUNTS)] = field(default_factory=dict)
    contended: Public[Share] = 0.0
    step_starts_ns: Public[list[Count]] = field(default_factory=list)


Record: TypeAlias = (
    Header
    | Signature
    | Observed
    | Effects
    | Scope
    | Context
    | Values
    | Thread
    | Calls
    | DeviceTimes
    | Kernels
    | Entered
    | End
)
