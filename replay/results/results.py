"""Result rows of a replay: one row for each variant (run configuration) of a case."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from opgrip.cli.command import counted
from opgrip.replay.cases.call_sites import CallSite, from_text
from opgrip.replay.cases.selection import FORWARD, PROGRAM
from opgrip.replay.inputs.input_options import RECORDED
from opgrip.replay.results.columns import Columns, column, columns_in

if TYPE_CHECKING:
    from opgrip.traces.schema.records import Signature

OK, WRONG, UNSUPPORTED, FAILED, TIMEOUT, SKIPPED = "ok", "wrong", "unsupported", "failed", "timeout", "skipped"
CONTENDED = "contended"  # status of a row that ran only while other processes used the cores; its time is ignored
RAN = (OK, CONTENDED)  # statuses of rows that ran, and whose results are correct or unchecked
STATUSES = (OK, WRONG, UNSUPPORTED, FAILED, TIMEOUT, SKIPPED, CONTENDED)

NOISY = 0.25  # interquartile range, as a share of the median, above which a row is noisy
SLOWED = 0.5  # share of runs on a slowed processor above which a row's median is doubtful
LAUNCH_BOUND = "launch-bound"  # doubt about a device time: the device waited for the host during the measurement
IMPOSSIBLE = "impossible"  # doubt about a candidate's time: the machine needs longer
DIFFERS = "differs"  # start of a doubt, before the likely reason: the time is far from that in the program
# factor between the ratio of medians and the median ratio of paired runs above which a speed-up is doubtful
DISAGREEMENT = 1.1
# maximum plausible ratio; a row with a larger ratio, or a smaller one than its inverse, has no speed-up
UTMOST_RATIO = 1e100
SETTINGS = "settings"  # header field with the options whose role is `RUN`, by name, as text
UNUSUAL = "unusual"  # header field that earlier versions wrote instead of `SETTINGS`: a list of options as text
# columns that describe how a case was run, which includes all options with the role `IDENTITY`
VARIANT_COLUMNS = (
    *("mode", "direction", "values", "dtype", "threads", "batch_scale", "streams", "cache", "method", "tune"),
    "device",
)
MODE_COLUMNS = ("mode", "tune")  # columns of `VARIANT_COLUMNS` that belong to a mode


@dataclass(frozen=True, slots=True)
class Result:
    """One row of results: the measurement of one variant of a case, or the reason why there is none."""

    case: int = column("number of the signature in the trace", default=MISSING)
    op: str = column("name of the operator, sample, module or function", default=MISSING)
    shapes: str = column("dtypes and shapes of the arguments, in short form", default=MISSING)
    count: int = column("number of calls in the program", default=MISSING, heading="count", rank=4, form="{:,d}")
    share: float | None = column(
        "share of the captured time of all selected calls: `count` times `captured_us`, over the sum of all cases; "
        "share of the estimated work if no time was captured; empty for samples",
        "1",
        default=MISSING,
    )
    mode: str = column("mode in which the case was run", default=MISSING)
    device: str = column("device on which the case ran", default=MISSING)
    status: str = column(
        "`ok`, `wrong`, `unsupported`, `failed`, `timeout`, `skipped`, or `contended` (other processes used the "
        "cores in nearly all timed runs, so the time is not used)",
        default=MISSING,
    )
    captured_us: float | None = column(
        "median time of the calls in the program: device time if they have one, otherwise host time; empty if none was "
        "captured",
        "us",
        default=MISSING,
    )
    captured_total_us: float | None = column(
        "sum of the times of all calls in the program; empty if none was captured", "us", default=MISSING
    )
    captured_host_us: float | None = column(
        "median host time of the calls in the program, if `captured_us` is a device time",
        "us",
        "captured host us",
        rank=4,
    )
    captured_spread: float | None = column(
        "interquartile range of the calls' times in the program, divided by their median; empty for one call, and for "
        "estimated parts of a graph's launches"
    )
    perturbed: int = column(
        "number of calls, out of `count`, that the capture's own work, slow memory or other processes disturbed; they "
        "count with the median of the others",
        default=0,
    )
    values: str = column("how tensor values were generated: `recorded`, `random`, `zeros`", default=RECORDED)
    key: str = column(
        "hash of operator, shapes, dtypes and settings, which is the same for equal cases of all traces", default=""
    )
    trace: str = column("name of the case's trace, if several traces were replayed; otherwise empty", default="")
    module: str = column(
        "path of the module that made the calls; a pattern such as `layers.*.linear1` if there are several; empty "
        "outside of modules",
        default="",
    )
    phase: str = column("phase of the calls: `forward`, `backward`, `optimizer`, or several of these", default="")
    call_sites: str = column(
        "JSON: number of calls and sum of their captured times in us, by phase, source line and module",
        default="",
        hidden=True,
    )
    direction: str = column("`forward`, or `backward` for a row with `--backward`", default=FORWARD)
    dtype: str = column("dtype to which `--dtype` cast tensors of the call; empty if it changed none", default="")
    tune: str = column("number of programs that `--tune` tried, and the `--tuner`; empty without `--tune`", default="")
    threads: int | None = column("threads per operator; empty if the same as in the program", heading="threads", rank=0)
    batch_scale: int = column(
        "factor by which the recorded batch size was multiplied", default=1, heading="batch", rank=0, form="x{}"
    )
    streams: int = column("number of cases that ran at the same time", default=1, heading="streams", rank=0)
    note: str = column("remark on how the case was run, such as another operator in its place", default="")
    first_ms: float | None = column(
        "duration of the first run, including tracing, compiling and loading", "ms", "first ms", rank=6
    )
    enter_us: float | None = column(
        "with modes of torch.compile: time of a call whose compiled graphs return at once, which is dynamo's wrapper, "
        "guards and bytecode; part of each run's time",
        "us",
    )
    median_us: float | None = column("median of the timed runs", "us", "replayed us", rank=0)
    p10_us: float | None = column(
        "10th percentile of the timed runs; empty for fewer than 5 `runs`", "us", "p10", rank=5
    )
    p90_us: float | None = column(
        "90th percentile of the timed runs; empty for fewer than 5 `runs`", "us", "p90", rank=5
    )
    mean_us: float | None = column("mean of the timed runs", "us", "mean", rank=9)
    samples: int = column("number of timed runs", default=0, heading="runs", rank=8, form="{:,d}")
    runs: int | None = column(
        "effective number of timed runs: (sum of their weights)^2 over the sum of the squared weights, rounded down"
    )
    times_us: list[float] | None = column(
        "time of each timed run, in order, repeat by repeat; in .csv a JSON list", "us", several=True
    )
    weights: list[float] | None = column(
        "weight of each timed run: the share of the program's calls that it represents; empty if all are equal",
        "1",
        several=True,
    )
    kinds: list[int] | None = column("kind of each timed run, by input values and memory state", several=True)
    repeats: list[int] | None = column("number of timed runs of each repeat, with `--repeats`", several=True)
    spread: float | None = column("interquartile range of the timed runs, divided by their median")
    stopped: str | None = column(
        "why timing stopped: `precision` (the spread was small enough), `settled` (the spread no longer changed), "
        "`budget` (the time was spent), `most` (100 runs, or 20 if the work before a run takes ten times longer), "
        "`iterations` (the requested number of runs), `contended` (other processes used the cores)"
    )
    dropped: int = column(
        "number of runs that were repeated because the processor was slowed down or used by others, or the GPU's clock "
        "was throttled",
        default=0,
    )
    slowed: float | None = column(
        "share of the timed runs that were made while the processor was slowed down or used by others, or the GPU's "
        "clock was throttled"
    )
    noisy: bool | None = column("True if `spread` is above 0.25, so that the median is doubtful")
    method: str | None = column(
        "how the runs were timed: `discrete`, `continuous`, `events`, `graph`, or `sequence` (in the whole step)"
    )
    cache: str | None = column("state of the caches before a run: `program`, `warm`, `cold`")
    clock_mhz: float | None = column(
        "mean clock of a GPU's multiprocessors during timing, or during `--energy`, if NVML reports it", "MHz"
    )
    throttled: str | None = column("why the clock was not higher; empty if nothing limited it")
    memory_gb_per_s: float | None = column(
        "rate at which one thread read 8 MiB of memory between the timed runs, on a CPU; `opgrip compare` widens "
        "intervals if it changed",
        "GB/s",
    )
    ratio: float | None = column(
        "`median_us` divided by that of the row it is compared with: the reference mode, or for rows of that mode the "
        "first of several values, threads or cache states; empty for the first row"
    )
    speed_up: float | None = column("1 divided by `ratio`: speed relative to the row it is compared with")
    ratio_p10: float | None = column(
        "10th percentile of the ratios of paired runs, one of this row and one of the row it is compared with, after "
        "removing the effects of their order and memory"
    )
    ratio_p50: float | None = column(
        "trimmed mean of the ratios of paired runs; tables mark the speed-up with ~ if it differs from `ratio` by over "
        "10 %"
    )
    ratio_p90: float | None = column("90th percentile of the ratios of paired runs")
    overlap: float | None = column(
        "time of concurrent cases if run one after the other, divided by their concurrent time"
    )
    max_abs: float | None = column(
        "largest difference from the reference's results, over all outputs and input sets; in a `wrong` row, over the "
        "elements outside the tolerance; inf if only one of both is finite; empty if results are not numbers",
        unbounded=True,
    )
    max_rel: float | None = column(
        "largest difference divided by the reference's element; inf if that is zero and the difference is outside the "
        "tolerance",
        unbounded=True,
    )
    faithful: bool | None = column(
        "True if the outputs have the recorded shapes and dtypes; empty if these are unknown"
    )
    flops: int | None = column("number of floating-point operations of one call, if a formula is known")
    bytes_in: int | None = column("size of all tensors that a call takes", "bytes")
    bytes_out: int | None = column("size of all tensors that a call returns", "bytes")
    allocated_bytes: int | None = column("memory that one call allocates", "bytes")
    peak_bytes: int | None = column("maximum memory that one call uses at a time", "bytes", "peak MB", rank=9)
    reserved_bytes: int | None = column(
        "maximum memory of an accelerator that torch's allocator reserves for one call, starting without free blocks",
        "bytes",
    )
    bytes_moved: int | None = column("minimum number of bytes that one call must read and write", "bytes")
    gflop_per_s: float | None = column("`flops` divided by the median time", "GFLOP/s", "GFLOP/s", rank=8)
    gb_per_s: float | None = column("`bytes_moved` divided by the median time", "GB/s", "GB/s", rank=8)
    math_dtype: str | None = column("dtype of the arithmetic, such as `float32`")
    operators: int | None = column("number of operators that one call dispatches in torch; empty if not counted")
    doubts: str = column(
        "why an `ok` row is doubtful: `unfaithful`, `noisy`, `slowed`, `launch-bound`, `impossible` (faster than this "
        "machine), or `differs (REASON)` if it has at least 2 % of the time and took over 1.5 times longer or shorter "
        "than in the program; tables show it after the status",
        default="",
    )
    error: str | None = column("reason for a status that is not ok, in one line")
    detail: str | None = column("complete error, with `--debug`")
    added: dict[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        doubts = {
            "unfaithful": self.faithful is False,
            "noisy": self.noisy,
            "slowed": self.is_slowed,
            **{word: True for word in self.doubts.split(", ") if word.startswith((LAUNCH_BOUND, IMPOSSIBLE, DIFFERS))},
        }
        words = (word for word, is_so in doubts.items() if is_so and self.status == OK)
        object.__setattr__(self, "doubts", ", ".join(words))
        is_usual = self.ratio is not None and 1 / UTMOST_RATIO < self.ratio < UTMOST_RATIO
        object.__setattr__(self, "speed_up", 1 / self.ratio if is_usual and self.ratio else None)

    @classmethod
    def from_plain(cls, cells: Mapping[str, Any]) -> Result:
        core = {name: cell for name, cell in cells.items() if name in CORE}
        added = {name: cell for name, cell in cells.items() if name not in CORE and cell is not None}
        return cls(**core, added=added)

    def to_plain(self) -> dict[str, Any]:
        return {**{name: getattr(self, name) for name in CORE}, **self.added}

    def identity_without(self, *columns: str) -> tuple[object, ...]:
        """Return a key that is equal for the same case and variant in different runs, without the case number."""
        what = self.key or f"{self.op} {self.shapes}"
        ignored = {*columns, *(MODE_COLUMNS if "mode" in columns else ())}
        trace = () if "trace" in ignored else (self.trace,)
        # equal devices have different indices
        cells = {name: getattr(self, name) for name in VARIANT_COLUMNS} | {"device": self.device.partition(":")[0]}
        return (what, *trace, *(cell for name, cell in cells.items() if name not in ignored))

    @property
    def case_of_trace(self) -> tuple[str, int]:
        """Key of the case within a run; case numbers are unique only within a trace."""
        return self.trace, self.case

    @property
    def variant(self) -> str:
        """Settings of the variant that differ from the default, except the mode; such as `backward, 2 threads`."""
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
        if not self.captured_us:
            return False
        return self.captured_spread is None or self.captured_spread > NOISY or self.perturbed >= self.count

    @property
    def is_slowed(self) -> bool:
        return self.slowed is not None and self.slowed > SLOWED

    @property
    def is_speed_up_doubtful(self) -> bool:
        if self.ratio is None or not self.ratio_p50 or self.speed_up is None:
            return False
        return not 1 / DISAGREEMENT <= self.ratio_p50 / self.ratio <= DISAGREEMENT

    @property
    def differs(self) -> bool:
        return DIFFERS in self.doubts

    @property
    def marked_status(self) -> str:
        return f"{self.status}, {self.doubts}" if self.doubts else self.status

    @property
    def sites(self) -> Sequence[CallSite]:
        """Call sites of the row; if `call_sites` is empty, one site with the row's module and phase."""
        recorded_sites = from_text(self.call_sites)
        total_us = self.captured_total_us or 0.0
        return recorded_sites or (CallSite(self.module, self.phase, "", max(self.count, 1), total_us),)

    def adding(self, part: Columns) -> Result:
        return replace(self, added={**self.added, **asdict(part)})


class Row(SimpleNamespace):
    """A row that is being filled in place: its attributes are the fields of `Result`."""

    added: dict[str, Any]

    @classmethod
    def of(cls, result: Result) -> Row:
        return cls(**{item.name: getattr(result, item.name) for item in fields(result)})

    def add(self, part: Columns) -> None:
        self.added = {**self.added, **asdict(part)}

    def freeze(self) -> Result:
        return Result(**vars(self))


CORE = tuple(about.name for about in columns_in(Result))  # names of the columns that every row has


def summarize(results: list[Result]) -> str:
    counts: dict[str, int] = {}
    for result in results:
        counts[result.status] = counts.get(result.status, 0) + 1
    parts = [f"{count:,} {status}" for status, count in sorted(counts.items(), key=lambda item: item[0] != OK)]
    cases = len({result.case_of_trace for result in results})
    rows = "" if cases == len(results) else f" in {counted(len(results), 'row')}"
    return f"{counted(cases, 'case')}{rows}: {', '.join(parts)}"


def rate_of(amount: int | None, time_us: float) -> float | None:
    return amount / time_us / 1e3 if amount and time_us > 0 else None


def not_run(results: Iterable[Result]) -> set[int]:
    """Return the numbers of the cases without any row that is ok or contended."""
    rows = list(results)
    return {row.case for row in rows} - {row.case for row in rows if row.status in RAN}


def describe_shapes(signature: Signature) -> str:
    """Return the dtypes and shapes of a call's arguments as short text, such as `float32[64,256] [1,1] False dim=0`."""
    from opgrip.traces.schema.operator_arguments import is_launch, launch_facts

    kwargs = launch_facts(signature) if is_launch(signature) else signature.kwargs
    named = (f"{name}={_describe(value)}" for name, value in kwargs.items())
    return " ".join([*map(_describe, signature.args), *named])


def same_outputs(
    recorded: Any, outputs: Sequence[Any], dtypes: bool = True, unused: Collection[int] = ()
) -> bool | None:
    """Return True if the outputs have the recorded shapes and, with `dtypes`, dtypes; None if the recorded ones are
    unknown.
    """
    import torch

    from opgrip.traces.schema.arguments import Opaque, TensorSpec, leaves
    from opgrip.traces.schema.tensor_specs import shape_of

    expected_leaves = list(leaves(recorded))
    if any(isinstance(leaf, Opaque) for leaf in expected_leaves):
        return None
    if len(outputs) == len(expected_leaves):
        outputs, expected_leaves = (
            [leaf for index, leaf in enumerate(tree) if index not in unused] for tree in (outputs, expected_leaves)
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
