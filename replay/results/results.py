"""Result rows of a replay: one row for each variant of a case."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from opgrip.cli.command import counted
from opgrip.replay.cases.call_sites import CallSite, from_text
from opgrip.replay.cases.selection import FORWARD
from opgrip.replay.inputs.input_options import RECORDED
from opgrip.replay.results.columns import Columns, column, columns_in
from opgrip.replay.timing.timing_options import PROGRAM

if TYPE_CHECKING:
    from opgrip.traces.schema.records import Signature

OK, WRONG, UNSUPPORTED, FAILED, TIMEOUT, SKIPPED = "ok", "wrong", "unsupported", "failed", "timeout", "skipped"
CONTENDED = "contended"
"""status of a row that ran only while other processes used the cores; its time is ignored"""
RAN = (OK, CONTENDED)
"""statuses of rows that ran with correct results, as far as these were checked"""
STATUSES = (OK, WRONG, UNSUPPORTED, FAILED, TIMEOUT, SKIPPED, CONTENDED)

NOISY = 0.25
"""share of the median that the interquartile range may reach before a row is noisy"""
SLOWED = 0.5
"""share of runs on a slowed processor above which a median is doubtful"""
LAUNCH_BOUND = "launch-bound"
"""doubt about a time by a device's clock for which the device waited for the host"""
DISAGREEMENT = 1.1
"""factor between the ratio of medians and the median ratio of paired runs above which a speed-up is doubtful"""
UTMOST_RATIO = 1e100
"""ratio above which, or below whose inverse, a row has no speed-up"""
SETTINGS = "settings"
"""header field with the given options whose role is `RUN`, by name, as text"""
UNUSUAL = "unusual"
"""field that earlier versions wrote instead of `SETTINGS`: a list of such options as text"""
VARIANT_COLUMNS = (
    *("mode", "direction", "values", "dtype", "threads", "batch_scale", "streams", "cache", "method", "tune"),
    "device",
)
"""columns that describe how a case was run, as options of the role `IDENTITY` do"""
MODE_COLUMNS = ("mode", "tune")
"""columns of `VARIANT_COLUMNS` that belong to a mode"""


@dataclass(frozen=True, slots=True)
class Result:
    """The measurement of one variant of a case, or why there is none.

    added : values that analyses have added, by column name; see `Columns`
    """

    case: int = column("the signature's number in the trace", default=MISSING)
    op: str = column("the operator, the unit or the sample", default=MISSING)
    shapes: str = column("of the arguments, in short", default=MISSING)
    count: int = column("calls in the program", default=MISSING)
    share: float = column(
        "of all selected calls' time, where every call counts with its case's median, `captured_us`",
        "1",
        default=MISSING,
    )
    mode: str = column("how it was run", default=MISSING)
    device: str = column("where it ran", default=MISSING)
    status: str = column(
        "`ok`, `wrong`, `unsupported`, `failed`, `timeout`, `skipped`, or `contended`: other processes used the cores "
        "in all timed runs, so that its time counts nowhere",
        default=MISSING,
    )
    captured_us: float = column(
        "median time in the program: of the device where the calls worked on one, else of the host",
        "us",
        default=MISSING,
    )
    captured_total_us: float = column("the sum over its calls there", "us", default=MISSING)
    captured_host_us: float | None = column("median duration on the host, where `captured_us` is of a device", "us")
    captured_spread: float | None = column(
        "interquartile range of the calls' times in the program, as a share of their median; empty for one call"
    )
    perturbed: int = column(
        "of `count`, the calls that the capture's own work, slow memory or other processes disturbed: they count as "
        "the others, unless all were disturbed",
        default=0,
    )
    values: str = column("how tensors' values were drawn: `recorded`, `random`, `zeros`", default=RECORDED)
    key: str = column(
        "of the case in any trace: a hash of what is called, and of arguments' shapes and dtypes", default=""
    )
    trace: str = column("name of the case's trace, if several traces were replayed; else empty", default="")
    module: str = column(
        "the path of the module that made its calls; if several did, a pattern such as `layers.*.linear1`, and "
        "`call_sites` has the calls of each; empty outside of all",
        default="",
    )
    phase: str = column("of its calls: `forward`, `backward`, `optimizer`, or several of them", default="")
    call_sites: str = column(
        "where its calls were made, as JSON: by phase, source line and module, the number of calls and the sum of "
        "their times in the program in us",
        default="",
        hidden=True,
    )
    direction: str = column("`forward`, or `backward` for the gradients of a call", default=FORWARD)
    dtype: str = column("that `--dtype` cast tensors of the call to; empty where it changed none", default="")
    tune: str = column("programs that a compiler tried by `--tune`, and its `--tuner`; empty for none", default="")
    threads: int | None = column("of an operator; empty for as many as in the program")
    batch_scale: int = column("times the recorded batch", default=1)
    streams: int = column("cases that ran at once", default=1)
    note: str = column("in a word, how the mode made it ready", default="")
    first_ms: float | None = column("the first call: tracing, compiling and loading included", "ms")
    median_us: float | None = column("of the timed runs", "us")
    p10_us: float | None = column("the tenth percentile of them; empty for fewer than 5 `runs`", "us")
    p90_us: float | None = column("the ninetieth", "us")
    mean_us: float | None = column("mean of them, which a few slow ones raise", "us")
    samples: int = column("timed runs", default=0)
    runs: int | None = column(
        "effective number of timed runs: (sum of their weights)^2 over the sum of the squared weights, rounded down"
    )
    times_us: list[float] | None = column(
        "of each timed run, in their order, repeat by repeat; in .csv as JSON writes a list", "us", several=True
    )
    weights: list[float] | None = column(
        "share of the program's calls per value, if unequal; quantiles are weighted by it", "1", several=True
    )
    repeats: list[int] | None = column("how many of the runs each repeat made, with `--repeats`", several=True)
    spread: float | None = column("interquartile range of the runs, as a share of their median")
    stopped: str | None = column(
        "why there were no more runs: `precision`, `settled`, `budget`, `most`, `iterations`, `contended`"
    )
    dropped: int = column("runs that were not kept, the processor being slowed down or taken meanwhile", default=0)
    slowed: float | None = column("share of the timed runs that were kept although it was, there being no others")
    noisy: bool | None = column("whether the spread is so large that the median is doubtful: above 0.25")
    method: str | None = column(
        "how the runs were timed: `discrete`, `continuous`, `events`, `graph`; `sequence`: in the whole step"
    )
    cache: str | None = column("what the caches held: `program`, `warm`, `cold`")
    clock_mhz: float | None = column(
        "mean clock of a GPU's multiprocessors during timing, or during `--energy`, if NVML reports it", "MHz"
    )
    throttled: str | None = column("why that was not higher; empty where nothing held it down")
    memory_gb_per_s: float | None = column(
        "rate at which one thread read 8 MiB of memory between the timed runs: `opgrip compare` widens intervals if it "
        "changed; CPU only",
        "GB/s",
    )
    ratio: float | None = column(
        "`median_us` over that of the row it is compared with: of the reference mode; in rows of that mode, of the "
        "first values, then of the first threads, then of the first cache; empty in the first"
    )
    speed_up: float | None = column("1 over `ratio`: how many times as fast as the row it is compared with")
    ratio_p10: float | None = column("of paired runs, one of each row: the tenth percentile of their ratios")
    ratio_p50: float | None = column("their median; if it is over 10 % from `ratio`, tables mark the speed-up with ~")
    ratio_p90: float | None = column("their ninetieth percentile")
    overlap: float | None = column("of cases that ran at once, their time one after another over their time at once")
    max_abs: float | None = column(
        "largest difference from the reference's results, over all outputs and sets of inputs; in a `wrong` row, over "
        "the elements that differ beyond the tolerance; inf where only one of both is finite; empty if nothing can be "
        "subtracted",
        unbounded=True,
    )
    max_rel: float | None = column(
        "the same as a share of the reference's element; inf if that is zero and the difference beyond tolerance",
        unbounded=True,
    )
    faithful: bool | None = column("whether the outputs have the recorded shapes and dtypes; empty where not known")
    flops: int | None = column("floating-point operations of one call, if a formula is known")
    bytes_in: int | None = column("of all tensors that a call takes", "bytes")
    bytes_out: int | None = column("of all tensors that it gives", "bytes")
    allocated_bytes: int | None = column("memory that one call allocates", "bytes")
    peak_bytes: int | None = column("the most that it holds of it at once", "bytes")
    reserved_bytes: int | None = column(
        "the most that torch's allocator takes of an accelerator's memory for it, having given back what it held free",
        "bytes",
    )
    bytes_moved: int | None = column("that one call has to read and write at least", "bytes")
    gflop_per_s: float | None = column("`flops` in the median time", "GFLOP/s")
    gb_per_s: float | None = column("`bytes_moved` in the median time", "GB/s")
    math_dtype: str | None = column("what it computes in")
    operators: int | None = column("operators that one call dispatches in torch; empty if not counted")
    doubts: str = column(
        "what makes an `ok` row doubtful: `unfaithful`, `noisy`, `slowed`, `launch-bound`; tables show it behind the "
        "status",
        default="",
    )
    error: str | None = column("the reason of a status that is not ok, in one line")
    detail: str | None = column("all of the error, with `--debug`")
    added: dict[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        """Derive `doubts` and `speed_up` from the other columns; only `LAUNCH_BOUND` is found out while timing."""
        doubts = {
            "unfaithful": self.faithful is False,
            "noisy": self.noisy,
            "slowed": self.is_slowed,
            LAUNCH_BOUND: LAUNCH_BOUND in self.doubts.split(", "),
        }
        words = (word for word, is_so in doubts.items() if is_so and self.status == OK)
        object.__setattr__(self, "doubts", ", ".join(words))
        is_usual = self.ratio is not None and 1 / UTMOST_RATIO < self.ratio < UTMOST_RATIO
        object.__setattr__(self, "speed_up", 1 / self.ratio if is_usual and self.ratio else None)

    @classmethod
    def from_plain(cls, cells: Mapping[str, Any]) -> Result:
        """Return the row with these cells, by column name; cells of added columns are included."""
        core = {name: cell for name, cell in cells.items() if name in CORE}
        added = {name: cell for name, cell in cells.items() if name not in CORE and cell is not None}
        return cls(**core, added=added)

    def to_plain(self) -> dict[str, Any]:
        """Return the cells by column name: the core columns, then the added ones."""
        return {**{name: getattr(self, name) for name in CORE}, **self.added}

    @property
    def identity(self) -> tuple[object, ...]:
        """Key that joins this row with rows of other runs: the case (but not its number) and how it was run."""
        return self.identity_without()

    def identity_without(self, *columns: str) -> tuple[object, ...]:
        """Return the key without some columns, to join rows that differ in them, such as the trace or mode."""
        what = self.key or f"{self.op} {self.shapes}"
        apart = {*columns, *(MODE_COLUMNS if "mode" in columns else ())}
        trace = () if "trace" in apart else (self.trace,)
        return (what, *trace, *(self._variant_cell(name) for name in VARIANT_COLUMNS if name not in apart))

    def _variant_cell(self, name: str) -> object:
        """Return the cell of a column, of the device only its kind: equal devices have different indices."""
        return self.device.partition(":")[0] if name == "device" else getattr(self, name)

    @property
    def case_of_trace(self) -> tuple[str, int]:
        """Key of the case within a run; case numbers are unique only within a trace."""
        return self.trace, self.case

    @property
    def variant(self) -> str:
        """How the case was run apart from its mode, if this differs from the defaults: `backward, 2 threads`."""
        words = {
            self.direction: self.direction != FORWARD,
            f"{self.values} values": self.values != RECORDED,
            self.dtype: bool(self.dtype),
            f"tune {self.tune}": bool(self.tune),
            counted(self.threads or 0, "thread"): self.threads is not None,
            f"batch x{self.batch_scale}": self.batch_scale != 1,
            f"{self.streams} streams": self.streams != 1,
            f"{self.cache} cache": self.cache not in (None, PROGRAM),
        }
        return ", ".join(word for word, is_so in words.items() if is_so)

    @property
    def is_captured_doubtful(self) -> bool:
        """True if the captured time is from one call, from calls that vary widely, or only from perturbed calls."""
        if not self.captured_us:
            return False
        return self.captured_spread is None or self.captured_spread > NOISY or self.perturbed >= self.count

    @property
    def is_slowed(self) -> bool:
        """True if most runs were on a processor that was slowed down or taken away."""
        return self.slowed is not None and self.slowed > SLOWED

    @property
    def is_speed_up_doubtful(self) -> bool:
        """True if the ratio of paired runs and the ratio of medians differ by more than the factor `DISAGREEMENT`."""
        if self.ratio is None or not self.ratio_p50 or self.speed_up is None:
            return False
        return not 1 / DISAGREEMENT <= self.ratio_p50 / self.ratio <= DISAGREEMENT

    @property
    def marked_status(self) -> str:
        """Status as tables show it: `ok` is followed by the reasons that make its time doubtful."""
        return f"{self.status}, {self.doubts}" if self.doubts else self.status

    @property
    def sites(self) -> Sequence[CallSite]:
        """Call sites of the row; without `call_sites`, one site with the row's module and phase."""
        known = from_text(self.call_sites)
        return known or (CallSite(self.module, self.phase, "", max(self.count, 1), self.captured_total_us),)

    def adding(self, part: Columns) -> Result:
        """Return the row with the columns that an analysis adds."""
        return replace(self, added={**self.added, **asdict(part)})


CORE = tuple(about.name for about in columns_in(Result))
"""names of the columns that every row has"""


def summarize(results: list[Result]) -> str:
    """Return one line with the number of rows by status."""
    counts: dict[str, int] = {}
    for result in results:
        counts[result.status] = counts.get(result.status, 0) + 1
    parts = [f"{count:,} {status}" for status, count in sorted(counts.items(), key=lambda item: item[0] != OK)]
    cases = len({result.case_of_trace for result in results})
    rows = "" if cases == len(results) else f" in {counted(len(results), 'row')}"
    return f"{counted(cases, 'case')}{rows}: {', '.join(parts)}"


def rate_of(amount: int | None, time_us: float) -> float | None:
    """Return the rate in billions per second, or None if the amount is unknown or zero."""
    return amount / time_us / 1e3 if amount and time_us > 0 else None


def not_run(results: Iterable[Result]) -> set[int]:
    """Return the numbers of the cases of which no row ran."""
    rows = list(results)
    return {row.case for row in rows} - {row.case for row in rows if row.status in RAN}


def describe_shapes(signature: Signature) -> str:
    """Return the dtypes and shapes of a call's arguments in short: `float32[64,256] [1,1] False dim=0`."""
    from opgrip.traces.schema.operator_arguments import is_launch, launch_facts

    kwargs = launch_facts(signature) if is_launch(signature) else signature.kwargs
    named = (f"{name}={_describe(value)}" for name, value in kwargs.items())
    return " ".join([*map(_describe, signature.args), *named])


def same_outputs(
    recorded: Any, outputs: Sequence[Any], dtypes: bool = True, unused: Collection[int] = ()
) -> bool | None:
    """Return True if the output tensors have the recorded shapes and dtypes, or None if these are unknown.

    dtypes : False to compare only shapes
    unused : indices of outputs that are not compared
    """
    import torch

    from opgrip.traces.schema.arguments import Opaque, TensorSpec, leaves
    from opgrip.traces.schema.tensor_specs import shape_of

    expected_leaves = list(leaves(recorded))
    if any(isinstance(leaf, Opaque) for leaf in expected_leaves):
        return None
    if len(outputs) == len(expected_leaves):
        outputs, expected_leaves = (
            [leaf for place, leaf in enumerate(tree) if place not in unused] for tree in (outputs, expected_leaves)
        )
    specs = (leaf for leaf in expected_leaves if isinstance(leaf, TensorSpec))
    expected = [(spec.shape, spec.dtype if dtypes else None) for spec in specs]
    actual = (tensor for tensor in outputs if isinstance(tensor, torch.Tensor))
    return expected == [(shape_of(tensor), tensor.dtype if dtypes else None) for tensor in actual]


def _describe(value: object) -> str:
    from opgrip.traces.schema.arguments import Opaque, TensorSpec
    from opgrip.traces.schema.python_objects import PACKED_BY, ObjectSpec
    from opgrip.traces.schema.tensor_specs import tensor_outline

    if isinstance(value, ObjectSpec):
        return f"{value.cls.removeprefix(PACKED_BY)}{_describe(value.content)}"
    if isinstance(value, TensorSpec):
        return tensor_outline(value.dtype, value.shape)
    if isinstance(value, Opaque):
        return value.type_name
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_describe, value))}]"
    return _short(value)


def _short(value: object) -> str:
    from opgrip.traces.schema.tensor_specs import plain_name

    text = plain_name(value)
    # the text has a memory address, or lists everything that the object contains
    return type(value).__name__ if " at 0x" in text or "\n" in text or isinstance(value, Mapping) else text
