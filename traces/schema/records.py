"""The types of the records in a trace, one record for each line of its file."""

from __future__ import annotations

import re
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
    def draw(self, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        """Return new values on the generator's device."""


class ValueModel(Drawable, Protocol):
    """A value model: a frozen dataclass that keeps enough of a tensor's values to draw similar ones.

    Its fields are plain values that JSON and `encode` can represent. A field that was added in a later version has a
    default, because older traces lack it.

    priority : kinds of models are tried in ascending order; the first whose `fit` returns a model is used
    """

    priority: ClassVar[int]
    __dataclass_fields__: ClassVar[dict[str, Any]]

    @classmethod
    def fit(cls, tensor: torch.Tensor) -> ValueModel | None:
        """Return the value model of this tensor's values, or None if this kind of model does not suit them."""

    def check(self) -> None:
        """Raise `FormatError` if a field is invalid, for example in a damaged file."""


FORMAT = "opgrip-trace"
MAJOR, MINOR = 1, 6

OPERATOR = "operator"
EXTENSION = "extension"
COMPILED = "compiled"
FUNCTION = "function"
KINDS = (OPERATOR, EXTENSION, COMPILED, FUNCTION)
PHASES = ("forward", "backward", "optimizer")  # names of the phases of a step

# prefix of operators that take functions as arguments; their calls have the kind `function`
HIGHER_ORDER = "torch.ops.higher_order:"


# reasons why calls compute nothing
ON_META, ON_FAKE, IN_GRAPH = "on meta tensors", "on fake tensors", "on constants in graphs of TorchScript"
# reasons why a capture has no calls, the first two in an unknown number, or no values
UNSEEN_THREAD = "operators of a thread that started before the recording are not seen"
UNSEEN_RPC = "run by threads of C++, where they cannot be counted"
TRACED = "a capture would change the traced graph"
TRIED = "launched by Triton's autotuner, to try a configuration"
NO_SPACE = "no space for a copy of its values on the device"
NO_COPIES_IN_GRAPHS = "called only while a graph was captured"
OWN_REASONS = frozenset(
    (ON_META, ON_FAKE, IN_GRAPH, UNSEEN_THREAD, UNSEEN_RPC, TRACED, TRIED, NO_SPACE, NO_COPIES_IN_GRAPHS)
)

NO_STORAGE = -1  # storage number of a tensor without a storage


@dataclass(frozen=True, slots=True)
class Header:
    """The first record of a trace: versions of opgrip and of the format, the recorded model, the machine and the
    time.
    """

    fields: Annotated[dict[str, Any], table(HEADER_FIELDS)]


@dataclass(frozen=True, slots=True)
class Signature:
    """Everything needed to replay a call.

    number : number by which calls refer to this signature
    kind : `operator` for the dispatcher's operators, `extension` for a function of an extension module or a Triton
        kernel, `compiled` for a region compiled by torch.compile, `function` for a gripped function (a Python function
        recorded with `opcapture --grip`) or an operator that takes functions
    op : name of the operator, such as `aten.addmm.default`; `module:name` for an extension function, a Triton kernel or
        a gripped function, such as `mmcv._ext:nms`; the sample's name in the trace of a sample
    args, kwargs : arguments, in which each tensor is a `TensorSpec`
    outputs : result of the first call, in the same form; `Opaque` if it is not known
    raised : error that ended the first call, in one line; None if it returned
    registered_by : module or file of the program that registered the operator or defines the kernel; it is imported
        only if the user names it
    """

    number: Public[Count] = field(metadata=ID)
    kind: Annotated[str, Meta(pattern=f"^({'|'.join(KINDS)})\\Z"), public("kind")]
    op: Annotated[Name, hashed("operator")]
    args: Annotated[tuple[Argument, ...], NESTED]
    kwargs: Annotated[dict[Name, Argument], NESTED] = field(default_factory=dict)
    outputs: Annotated[Argument, NESTED] = field(default=Opaque("not recorded"), metadata=ALWAYS)
    raised: Annotated[Name | None, hashed("error")] = None
    registered_by: Annotated[Name | None, DROPPED] = None


@dataclass(frozen=True, slots=True)
class Observed:
    """Values and results of a later call of a signature, recorded if values determine the time or the results.

    signature : number of the signature
    values : numbers of the value models of the tensors in the call's arguments, in order
    outputs : result of the call, in the form of a signature's outputs
    since_ns : if given, the record is about the first call of the signature that starts after this time (since the
        capture began) and whose first tensor is in `storage`
    """

    signature: Public[Int64]
    values: Annotated[list[Int64 | None], NESTED]
    outputs: Annotated[Argument, NESTED]
    since_ns: Public[Int64 | None] = None
    storage: Public[Int64 | None] = None


@dataclass(frozen=True, slots=True)
class Scope:
    """The origin of calls: module, function, source line, phase and settings.

    module : path of the innermost running module from the root module, whose path is empty
    module_type : class name of that module; empty outside of all modules
    inside : function that made the call instead of the program itself, such as an extension function or a compiled
        region
    gripped : True if `inside` is a gripped function or an operator that takes functions, whose inner calls are recorded
        as calls of the program
    function, file, line : innermost frame of the program outside of torch; empty if there is none
    callers : outer frames, innermost first, each as `file:line function`
    context : number of the `context` record with the settings that the calls ran under
    forward : for calls in a backward pass, number of the scope of the forward calls that caused them
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
    """Effects of a function call in the trace of a sample: the operators that it ran, and its arguments after the call.

    signature : number of the call's signature
    operators : number of operators that the call ran
    operator_ns : total time of these operators
    after : positional and named arguments after the call, if the call wrote into them
    random_state : state of torch's CPU generator before the call, (N,) uint8, if the call drew from it
    """

    signature: Public[Int64]
    operators: Public[Int64]
    operator_ns: Public[Count]
    after: Annotated[Argument, NESTED] = None
    random_state: Annotated[Argument, DROPPED] = None


@dataclass(frozen=True, slots=True)
class Context:
    """Torch settings that change how operators run, such as gradient mode, autocast and the number of threads.

    number : number by which scopes refer to these settings
    """

    number: Public[Count] = field(metadata=ID)
    settings: Annotated[dict[str, bool | int | float | str | None], table(CONTEXT_SETTINGS)]


@dataclass(frozen=True, slots=True)
class Values:
    """A value model, with the number by which tensors refer to it.

    tensor : key of the full values in the file next to the trace; None if they were not kept
    """

    number: Annotated[Count, NESTED] = field(metadata=ID)
    model: Annotated[ValueModel, NESTED]
    tensor: Annotated[TensorKey | None, DROPPED] = None


@dataclass(frozen=True, slots=True)
class Thread:
    """A thread that made calls.

    number : number by which calls refer to the thread
    process : number of its process in a trace merged from several processes
    """

    number: Public[Count] = field(metadata=ID)
    name: Annotated[Name, hashed("thread")]
    process: Public[Int64 | None] = None


@dataclass(frozen=True, slots=True)
class Calls:
    """A block of calls of one thread, in the order in which they ended.

    thread : number of the thread
    signature, scope : numbers of the signature and the scope, one per call
    start_ns : start time relative to the start of the capture, one per call
    duration_ns : duration, one per call
    tensors : number of tensors in the arguments and results, one per call
    storages : storages of these tensors: for each call the storages of its arguments in order, then the storages of its
        results. Equal numbers mean the same memory in the whole trace.
    newest : largest storage number in earlier blocks, to which the written numbers are relative
    device_ns : time for which each call kept an accelerator busy, -1 for a call that ran only on the host; empty if no
        call used an accelerator
    page_faults : (position in this block, pages that the system mapped) of the calls that got new pages
    streams : torch's number of the accelerator stream that each call used; empty if all used the default stream, 0
    perturbed : (position in this block, number of consecutive calls) of calls whose times other work may have changed,
        such as the capture's own work, slow page faults or other processes
    slow_memory : (position in this block, ns) of calls whose page faults took much longer than usual on the machine,
        with an estimate of the excess; these calls are perturbed, too
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


if TYPE_CHECKING:
    OpenedSignature: TypeAlias = Signature
else:

    class OpenedSignature(metaclass=AnyValue):
        pass


@dataclass(frozen=True, slots=True)
class Entered:
    """A call that had not ended when this record was written. If it ended later, it is also among the trace's calls.

    thread, scope : numbers of the thread and the scope
    start_ns : start time relative to the start of the capture
    signature : number of the call's signature
    opened : known part of the signature if no call of the signature had ended
    """

    thread: Public[Int64]
    start_ns: Public[Int64]
    scope: Public[Int64]
    signature: Public[Int64]
    opened: Annotated[OpenedSignature | None, NESTED] = None


@dataclass(frozen=True, slots=True)
class Dropped:
    """A group of calls with the same operator that could not be recorded for the same reason, and their number."""

    op: Annotated[Name, hashed("operator")]
    reason: Annotated[Name, hashed("reason")]
    count: Public[Int64]


def listed(counts: Counter[tuple[str, str]]) -> list[Dropped]:
    return [Dropped(op, reason, count) for (op, reason), count in sorted(counts.items())]


@dataclass(frozen=True, slots=True)
class End:
    """The last record: totals, and how much was not recorded.

    duration_ns : duration of the whole capture
    dropped : calls that are not in the trace; their count is 0 if it is unknown
    passed_by : calls that are not in the trace, although the calls made inside them are
    without_values : recorded tensors without a value model, by operator and reason
    stopped : limit at which the recording ended while the program continued
    devices : names of the accelerators that the program used
    accelerator : properties of these accelerators, libraries and their settings
    before : in a trace of only the last calls, number of calls before them
    thinned : number of `steps` that a capture left out to stay within its budget; older versions also left out `values`
        of signatures and `scopes` of modules
    contended : share of the recorded time in intervals in which other processes probably slowed the program
    step_starts_ns : start of each recorded step since the start of the capture
    without_work : calls on meta or fake tensors, which compute nothing and are not in the trace
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
    without_work: Annotated[list[Dropped], NESTED] = field(default_factory=list)


_LAUNCH = re.compile(r"torch\.\w{1,32}:\w{0,32}Graph\.replay")


def is_graph_launch(op: str) -> bool:
    return _LAUNCH.fullmatch(op) is not None


@dataclass(frozen=True, slots=True)
class DeviceTimes:
    """Record of device times that became known only after the calls were written.

    thread : number of the thread that made the calls
    first : index of the first of these calls among all calls of the thread, in the order of the trace
    device_ns : time for which the call `first` and each following one kept an accelerator busy, -1 for a call that ran
        only on the host
    """

    thread: Public[Int64]
    first: Public[Count]
    device_ns: Public[list[Int64]]


@dataclass(frozen=True, slots=True)
class Kernels:
    """Record of the kernels, copies and fills that the calls of a signature ran on an accelerator.

    A signature can have several such records, which add up.

    signature : number of the signature
    launches, device_ns : number of launches and total time for each name
    """

    signature: Public[Int64]
    names: Annotated[list[Name], hashed("kernel")]
    launches: Public[list[Count]]
    device_ns: Public[list[Count]]


@dataclass(frozen=True, slots=True)
class Wait:
    """Record that one stream of an accelerator waits for work of another stream.

    at_ns : time at which the wait began, since the start of the capture
    device, stream : device and torch's number of the stream that waits
    on_device, on_stream : device and number of the stream whose work it waits for
    until_ns : the stream waits for the work that was submitted to the other stream before this time
    """

    at_ns: Public[Int64]
    device: Public[Name]
    stream: Public[Int64]
    on_device: Public[Name]
    on_stream: Public[Int64]
    until_ns: Public[Int64]


@dataclass(frozen=True, slots=True)
class Graph:
    """Record of the calls that each launch of a CUDA or HIP graph runs again; they are known from the graph's capture.

    Each launch is a call, in the blocks of calls, of a signature that only this graph has.

    signature : number of the signature of the graph's launches
    calls, scope : numbers of the signature and scope of each call in the graph, in start order
    tensors : number of tensors in the arguments and results, one per call
    storages : storages of these tensors, call after call, with the same numbers as in `Calls`
    captured : False if the graph was captured before the recording began, so that its calls are not known
    """

    signature: Public[Count]
    calls: Public[list[Count]] = field(default_factory=list)
    scope: Public[list[Count]] = field(default_factory=list)
    tensors: Public[list[Count]] = field(default_factory=list)
    storages: Public[list[Int64]] = field(default_factory=list)
    captured: Public[bool] = True


@dataclass(frozen=True, slots=True)
class GraphTimes:
    """Record of the time of the kernels of each call in a graph, summed over launches. Several records add up.

    signature : number of the signature of the graph's launches
    device_ns : time of each call, in the order of the graph
    """

    signature: Public[Count]
    device_ns: Public[list[Count]]


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
    | Graph
    | GraphTimes
    | Wait
    | Entered
    | End
)
