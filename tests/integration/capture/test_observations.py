"""Later calls of a signature: predicted and observed ones, and calls that were disturbed, whose time is not used."""

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from example_trace import write
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import succeed

from opgrip.capture import Capture, Schedule
from opgrip.capture.command.opcapture import closing_lines
from opgrip.capture.recording.observations import ANY, SiteKey, SiteTimes
from opgrip.capture.signatures import fitting, predictions
from opgrip.capture.timing.page_faults import PERTURBING_NS, CountedCall, OwnWork, SlowMemory
from opgrip.capture.torch_compat.torch_private import arguments_check
from opgrip.capture.writing import flusher as flushing
from opgrip.platform import contention
from opgrip.platform.contention import TICK_NS, usual_fault_ns
from opgrip.replay.cases.cases import make_cases
from opgrip.replay.inputs.inputs import Inputs, device_map
from opgrip.traces import Trace, load
from opgrip.traces.schema.arguments import TensorSpec
from opgrip.traces.schema.records import Calls, End, Scope, Signature, Thread
from opgrip.traces.values.floats import Floats


def rows_of(trace: Trace, op: str) -> list[int]:
    (signature,) = [item for item in trace.signatures if item.op == op]
    outputs = [signature.outputs, *(item.outputs for item in trace.observed.get(signature.number, []))]
    return [output.shape[0] for output in outputs]


def test_calls_with_other_counts_are_observed_early_and_late(tmp_path: Path) -> None:
    masks = [torch.arange(1000) < count for count in range(1, 401)]
    with Capture(tmp_path / "t.jsonl") as watched:
        for place, mask in enumerate(masks):
            mask.nonzero()
            if place % 50 == 49:
                assert watched._flusher is not None
                watched._flusher.flush()
    trace = load(tmp_path / "t.jsonl", partial=False)
    found = rows_of(trace, "aten.nonzero.default")
    assert found[:4] == [1, 2, 4, 8]
    assert len(found) > 5
    assert found[4] > 32
    assert len(trace.calls) == 400
    assert watched.dropped == 0


def test_replay_runs_all_observed_values(tmp_path: Path) -> None:
    with Capture(tmp_path / "t.jsonl"):
        for count in (100, 900, 300, 500):
            (torch.arange(1000) < count).nonzero()
    (case,) = [case for case in make_cases(load(tmp_path / "t.jsonl")) if case.op == "aten.nonzero.default"]
    found = []
    for signature in (case.signature, *case.input_sets):
        args, _ = Inputs(signature.args, {}, case.values, device_map("cpu", None), 0).make()
        found.append((args[0].nonzero().shape[0], signature.outputs.shape[0]))
    assert found == [(100, 100), (900, 900), (500, 500)]


class Mark:
    """Device event that is complete at the third query."""

    def __init__(self) -> None:
        self.asked = 0

    def query(self) -> bool:
        self.asked += 1
        return self.asked > 2

    def wait(self, stream: object) -> None:
        pass


def test_values_on_a_device_are_fitted_after_their_transfer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # without a GPU: the tensors' device and its events are stand-ins
    monkeypatch.setattr("opgrip.capture.signatures.fitting.is_deferred", lambda tensor: True)
    monkeypatch.setattr(fitting, "record_on", lambda device: Mark())
    monkeypatch.setattr(fitting, "is_capturing", lambda kind: False)
    monkeypatch.setattr(fitting, "new_stream", lambda device: None)
    for name in ("on_device", "in_stream"):
        monkeypatch.setattr(fitting, name, nullcontext)
    mask = torch.arange(5000) % 7 == 0
    with Capture(tmp_path / "t.jsonl") as watched:
        mask.nonzero()
        assert watched._flusher is not None
        for _ in range(4):
            watched._flusher.flush()
        torch.arange(70, 300).sin()
    trace = load(tmp_path / "t.jsonl", partial=False)
    (nonzero,) = [signature for signature in trace.signatures if signature.op == "aten.nonzero.default"]
    assert trace.values[nonzero.args[0].values].true == int(mask.sum())  # type: ignore[attr-defined]


def test_values_are_distinguished_by_scalar_arguments(tmp_path: Path) -> None:
    x = torch.randn(1000, 4)
    with Capture(tmp_path / "t.jsonl"):
        x.index_select(0, torch.tensor([900, 950, 999]))
        x.index_select(1, torch.tensor([0, 1, 3]))
        x[torch.tensor([5, 6, 7])]
        x[:, torch.tensor([1, 2, 3])]
    cases = make_cases(load(tmp_path / "t.jsonl"))
    found = []
    for case in cases:
        if "index" in case.op:
            args, _ = Inputs(case.signature.args, {}, case.values, device_map("cpu", None), 0).make()
            index = args[-1][-1] if isinstance(args[-1], list) else args[-1]
            found.append(sorted(index.tolist()))
    assert sorted(found) == [[0, 1, 3], [1, 2, 3], [5, 6, 7], [900, 950, 999]]


BASE = torch.arange(24.0).reshape(4, 6)
OTHER = torch.arange(24.0).reshape(4, 6)

CALLS: dict[str, Callable[[], Any]] = {
    "integer": lambda: BASE * 2,
    "float": lambda: BASE * 2.0,
    "bool": lambda: BASE * True,
    "zero": lambda: BASE.clamp(min=0.0),
    "minus zero": lambda: BASE.clamp(min=-0.0),
    "nan": lambda: BASE.clamp(min=float("nan")),
    "left": lambda: BASE[:, :2] + OTHER[:, :2],
    "right": lambda: BASE[:, 2:4] + OTHER[:, :2],
    "itself": lambda: BASE[:, :2] + BASE[:, :2],
    "its other half": lambda: BASE[:, :2] + BASE[:, 2:4],
    "list": lambda: torch.cat([BASE, OTHER]),
    "list of one storage": lambda: torch.cat([BASE, BASE]),
    "three": lambda: torch.addmm(OTHER[0], BASE[:, :4], OTHER),
    "keyword": lambda: torch.sum(BASE, dim=0, dtype=torch.float64),
    "other keyword": lambda: torch.sum(BASE, dim=0, dtype=torch.float32),
    "in place": lambda: OTHER.add_(0.0),
    "scalars": lambda: torch._foreach_add([BASE, OTHER], [1, 2.0]),
    "other scalars": lambda: torch._foreach_add([BASE, OTHER], [1.0, 2.0]),
    "conjugate": lambda: BASE.to(torch.complex64).conj() * 2,
    "no conjugate": lambda: BASE.to(torch.complex64) * 2,
    "gradients": lambda: BASE.detach().requires_grad_() * 2,
    "inference": lambda: torch.inference_mode()(lambda: BASE * 2)(),
}


def recorded(path: Path, names: list[str]) -> list[tuple[str, str]]:
    with Capture(path, force=True):
        for name in names:
            CALLS[name]()
    trace = load(path, partial=False)
    assert not trace.end.dropped  # type: ignore[union-attr]
    by_number = {item.number: repr((item.args, item.kwargs, item.outputs)) for item in trace.signatures}
    return [(row.op, by_number[row.signature]) for row in trace.calls.itertuples()]


@settings(max_examples=12)
@given(names=st.lists(st.sampled_from(sorted(CALLS)), min_size=1, max_size=6))
def test_predicted_calls_have_the_same_signatures_as_examined_ones(
    names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = names * 24
    foreseen = recorded(tmp_path / "t.jsonl", program)
    with monkeypatch.context() as patch:
        patch.setattr(predictions, "arguments_check", lambda args, typed_lists: None)
        assert recorded(tmp_path / "t.jsonl", program) == foreseen


def test_arguments_check_keeps_no_tensor_alive() -> None:
    import weakref

    x = torch.ones(3)
    check = arguments_check((x, 1, [x]))
    assert check is not None
    alive = weakref.ref(x)
    del x
    assert alive() is None


@pytest.mark.parametrize("other", [(1, True), (1, 1.0), (0.0, -0.0), ([1, 2], [1, True]), (None, 0), ((1,), [1])])
def test_arguments_check_distinguishes_values_that_compare_equal(other: tuple[Any, Any]) -> None:
    this, that = other
    check = arguments_check((this,))
    assert check is not None
    assert check((this,))
    assert not check((that,))


DENORMAL = 1e-41  # denormal number, whose square root takes many times as long as that of others


@pytest.fixture
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def note(times: SiteTimes, *calls: tuple[int, int, int, int]) -> set[tuple[int, SiteKey]]:
    """Pass (signature, scope, memory, time in us) of calls to `times`, and return the keys to look at."""
    signatures, scopes, memory, durations = np.array(calls).T
    return set(times.note(signatures, scopes, memory, durations * 1000))


@pytest.mark.parametrize(
    ("steps", "observed"),
    [
        # memory that recurs, one of several times as slow
        ([[(0, 0, memory, 200 if memory == 7 else 40) for memory in (5, 6, 7, 8)]] * 3, {(0, (0, 5)), (0, (0, 7))}),
        ([[(0, 0, memory, 40 + memory) for memory in (5, 6, 7, 8)]] * 3, set()),
        ([[(1, scope, 3, 10 * scope) for scope in (1, 2)]] * 3, set()),
        # scopes, if memory is not used again
        (
            [[(0, scope, 100 + 10 * step + scope, 50 * scope**2) for scope in (1, 2)] for step in range(3)],
            {(0, (1, ANY)), (0, (2, ANY))},
        ),
        (
            [
                [(0, scope, 1000 * step + scope, 400 if scope >= 20 else 40) for scope in range(24)]
                for step in range(20)
            ],
            {(0, (0, ANY)), (0, (20, ANY))},
        ),
    ],
)
def test_sites_that_recur_with_different_times_are_observed_once(
    steps: list[list[tuple[int, int, int, int]]], observed: set[tuple[int, SiteKey]]
) -> None:
    times = SiteTimes()
    assert note(times, *steps[0]) == set()
    assert note(times, *steps[1]) == observed
    assert all(note(times, *step) == set() for step in steps[2:])


@pytest.mark.parametrize("parameters", [36, 300])
def test_slow_parameters_among_many_of_one_shape_are_observed(parameters: int) -> None:
    times = SiteTimes()
    step = [(0, 0, memory, 400 if memory >= parameters - 5 else 40) for memory in range(parameters)]
    note(times, *step)
    fast, slow = sorted(note(times, *step), key=lambda item: item[1])
    assert fast[1][1] < parameters - 5 <= slow[1][1]
    assert note(times, *step) == set()


@pytest.mark.usefixtures("_one_thread")
def test_optimizer_states_of_one_shape_are_observed_if_times_differ(tmp_path: Path) -> None:
    tiny = torch.full((512, 128), DENORMAL)
    tensors = [torch.rand(512, 128), tiny, *(torch.rand(512, 128) for _ in range(3))]
    # NumPy changes them, without a call of torch
    arrays = [tensors[0].numpy(), tensors[2].numpy()]
    schedule = Schedule(warmup=3, active=4)
    with Capture(tmp_path / "t.jsonl", schedule=schedule) as watched:
        for _ in range(7):
            for tensor in tensors:
                tensor.sqrt()
            watched.step()
            # change the values, so that a later look finds values new to the trace
            for array in arrays:
                array[:] *= 1.5
    trace = load(tmp_path / "t.jsonl", partial=False)
    (observed,) = trace.observed.values()
    calls = trace.calls
    memory = {}
    for item in observed:
        assert item.since_ns is not None
        (values,) = item.values
        assert values is not None
        call = calls[calls["start_ns"] >= item.since_ns].iloc[0]
        model = trace.values[values]
        memory[int(trace.storages[call["first_storage"]])] = isinstance(model, Floats) and model.denormals == 0
    own = [int(trace.storages[first]) for first in calls["first_storage"].head(len(tensors))]
    assert memory.pop(own[1]) is False
    assert memory
    assert all(memory.values())


RESULT_PAGES = 4 * (1 << 20) // 4096  # pages of a result of four megabytes

KEPT_AND_GIVEN_BACK = """
import ctypes
import torch

allocator = ctypes.CDLL("libc.so.6")
large = torch.ones(1 << 20)
# M_MMAP_THRESHOLD and M_TRIM_THRESHOLD: glibc keeps what is freed
allocator.mallopt(-3, 32 << 20)
allocator.mallopt(-1, 1 << 30)
torch.ones(1 << 22)
for _ in range(40):
    torch.ops.aten.cos(large)
for _ in range(40):
    allocator.malloc_trim(0)
    torch.ops.aten.sin(large)
"""


def test_page_faults_distinguish_new_from_reused_memory(tmp_path: Path) -> None:
    # a separate program, because results get huge pages in a process in which NumPy has had large arrays
    (tmp_path / "program.py").write_text(KEPT_AND_GIVEN_BACK)
    succeed("opcapture", "-o", "t.jsonl", "--", "program.py", cwd=tmp_path)
    calls = load(tmp_path / "t.jsonl").calls
    faults = {op: calls[calls["op"] == f"aten.{op}.default"]["page_faults"] for op in ("cos", "sin")}
    assert (faults["sin"] > 0.9 * RESULT_PAGES).mean() > 0.9
    # the block moves a little with each call, so a few calls get new pages anyway
    assert (faults["cos"] < 0.1 * RESULT_PAGES).any()


def test_small_calls_and_views_have_no_page_faults(tmp_path: Path) -> None:
    large, small = torch.ones(1 << 20), torch.ones(8)
    with Capture(tmp_path / "t.jsonl") as watched:
        for _ in range(20):
            small.sin()
            large.view(1 << 10, 1 << 10)
    calls = load(tmp_path / "t.jsonl").calls
    assert (watched.calls, watched.dropped) == (40, 0)
    assert (calls["page_faults"] == 0).all()


USUAL_NS, SLOW_NS = 2_000, 12_000
PAGES, WORK_NS = 3_000, 4_000_000  # page faults of a call that creates 12 MB, and its remaining time


def counted(cost_ns: float, calls: int, work_ns: int = WORK_NS, pages: int = PAGES) -> dict[int, CountedCall]:
    """Return calls whose page faults have the given cost, as counted by a kernel that samples every 4 ms."""
    wanted = [place * pages * cost_ns for place in range(calls + 1)]
    ticks = [int(time // TICK_NS) for time in wanted]
    durations = [int(pages * cost_ns + work_ns)] * calls
    starts = [0, *accumulate(durations)]
    return {
        place: CountedCall(pages, starts[place], durations[place], (after - before) * TICK_NS, durations[place])
        for place, (before, after) in enumerate(pairwise(ticks))
    }


@given(calls=st.integers(2, 40), cost_ns=st.floats(2.5 * USUAL_NS, 100 * USUAL_NS), threads=st.integers(1, 64))
def test_excess_time_of_slow_page_faults_is_estimated(calls: int, cost_ns: float, threads: int) -> None:
    found = SlowMemory(USUAL_NS).slow_calls(counted(cost_ns, calls), [0] * calls)
    expected = PAGES * (cost_ns - USUAL_NS)
    if expected * calls < 15 * TICK_NS:
        # the number of ticks is too small for an estimate
        return
    assert [place for place, _ in found] == [*range(calls)]
    assert sum(excess for _, excess in found) == pytest.approx(expected * calls, rel=0.15)


@given(
    calls=st.integers(1, 1000),
    pages=st.integers(1, 5000),
    work_ns=st.integers(0, 10**9),
    cost_ns=st.floats(0, 1.5 * USUAL_NS),
)
def test_calls_with_fast_page_faults_are_not_marked(calls: int, pages: int, work_ns: int, cost_ns: float) -> None:
    memory = SlowMemory(USUAL_NS)
    assert memory.slow_calls(counted(cost_ns, calls, work_ns, pages), [0] * calls) == []
    assert memory.excess_ns == 0
    assert SlowMemory(None).slow_calls(counted(50 * SLOW_NS, calls), [0] * calls) == []


def trace_with(path: Path, slow: list[int], calls: int = 4) -> Path:
    spec = TensorSpec((8, 8), (8, 1), torch.float32, "cpu")
    excess = 9_000_000
    durations = [1_000_000 + excess * (place in slow) for place in range(calls)]
    block = Calls(
        *(0, [0] * calls, [0] * calls, [place * 20_000_000 for place in range(calls)], durations),
        *([2] * calls, [*range(2 * calls)], -1),
        page_faults=[(place, 3000) for place in range(calls)],
        perturbed=[(place, 1) for place in slow],
        slow_memory=[(place, excess) for place in slow],
    )
    signature = Signature(0, "operator", "aten.sin.default", (spec,), {}, spec)
    return write(path, [signature, Scope(0, "", "", "forward"), Thread(0, "MainThread"), block, End(calls, 1, 10**9)])


@pytest.mark.parametrize(("slow", "is_marked"), [([], False), ([0, 2], False), ([0, 1, 2, 3], True)])
def test_medians_and_shares_exclude_slow_memory(slow: list[int], is_marked: bool, tmp_path: Path) -> None:
    trace = load(trace_with(tmp_path / "t.jsonl", slow))
    assert trace.calls["time_ns"].tolist() == trace.distinct_calls["time_ns"].tolist() == [1_000_000] * 4
    assert trace.summary()["time_us"].tolist() == [4_000]
    (case,) = make_cases(trace)
    assert case.captured_us == 1_000
    assert (case.perturbed >= case.count) == is_marked


def test_capture_on_slow_memory_reports_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # below any real cost of a page fault
    monkeypatch.setattr("opgrip.capture.recording.recorder.usual_fault_ns", lambda: 20.0)
    with Capture(tmp_path / "t.jsonl") as capture:
        for _ in range(20):
            # larger than blocks that the C library keeps
            torch.zeros(12 << 20)
    assert any(line.startswith("the machine was slow to provide memory") for line in closing_lines(capture))
    calls = load(tmp_path / "t.jsonl").calls
    slow = calls["slow_memory_ns"] > 0
    assert slow.any()
    assert calls["perturbed"][slow].all()


class Busy:
    def __init__(self, ignored: int) -> None:
        assert ignored

    def is_contended(self) -> bool:
        return True

    def close(self) -> None:
        pass


def test_capture_on_a_busy_machine_reports_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flushing, "Contention", Busy)
    monkeypatch.setattr("opgrip.capture.writing.blocks.INTERRUPTED_NS", 1)
    with Capture(tmp_path / "t.jsonl") as capture:
        torch.ones(4) + 1
    assert any(line.startswith("the machine was busy in 100% of the") for line in closing_lines(capture))
    trace = load(tmp_path / "t.jsonl")
    assert trace.end is not None
    assert trace.end.contended == 1
    assert trace.calls["perturbed"].all()


def test_usual_page_fault_cost_is_plausible() -> None:
    if contention._has_huge_pages():
        pytest.skip("this system provides huge pages unasked")
    usual = usual_fault_ns()
    assert usual is not None
    assert 10 < usual < 1_000_000


SLOW_S = 0.03


@pytest.fixture
def slow_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    fit = fitting.fit_argument

    def slow(*args: Any) -> Any:
        time.sleep(SLOW_S)
        return fit(*args)

    monkeypatch.setattr(fitting, "fit_argument", slow)


@pytest.mark.usefixtures("slow_looks")
def test_only_calls_right_after_an_observation_are_perturbed(tmp_path: Path) -> None:
    x = torch.randn(1000)
    with Capture(tmp_path / "t.jsonl"):
        for _ in range(40):
            x.sin()
    calls = load(tmp_path / "t.jsonl").calls
    marks = calls[calls["op"] == "aten.sin.default"]["perturbed"].astype(bool).tolist()
    assert marks[0]
    assert not any(marks[-10:])


@pytest.mark.usefixtures("slow_looks")
def test_perturbed_times_are_used_if_a_signature_has_no_others(tmp_path: Path) -> None:
    x = torch.randn(1000)
    with Capture(tmp_path / "t.jsonl"):
        x.cos()
        x.sin()
    calls = load(tmp_path / "t.jsonl").calls
    assert len(calls) == 2
    assert calls["perturbed"].all()
    assert (calls["time_ns"] == calls["duration_ns"]).all()


@pytest.mark.usefixtures("slow_looks")
def test_no_call_is_perturbed_after_warmup_steps(tmp_path: Path) -> None:
    x, y = torch.randn(1000), torch.randn(2000)

    def step() -> None:
        for value in (x, y, x):
            value.sin().cos()

    schedule = Schedule(warmup=4, active=3)
    with Capture(tmp_path / "t.jsonl", schedule=schedule) as watched:
        (y + 1).tan()
        for _ in range(7):
            step()
            watched.step()
    trace = load(tmp_path / "t.jsonl", partial=False)
    assert len(trace.own_calls) == 3 * 6
    assert watched.calls == 3 * 6
    assert not trace.calls["perturbed"].any()
    # signatures that only warm-up steps have met are not in the trace
    assert {signature.op for signature in trace.signatures} == {"aten.sin.default", "aten.cos.default"}
    assert watched.signatures == len(trace.signatures) == 4
    assert trace.end is not None
    assert trace.end.signatures == 4


def test_recorded_step_has_values_observed_in_warmup(tmp_path: Path) -> None:
    x = torch.randn(1000) * 7 + 100
    with Capture(tmp_path / "t.jsonl", schedule=Schedule(warmup=1)) as watched:
        for _ in range(2):
            x.sin()
            watched.step()
    trace = load(tmp_path / "t.jsonl", partial=False)
    (signature,) = trace.signatures
    assert 90 < trace.values[signature.args[0].values].mean < 110  # type: ignore[attr-defined, index]


def test_own_work_marks_the_following_and_the_enclosing_call() -> None:
    work = OwnWork()
    work._intervals = [100, 100 + PERTURBING_NS, 200_000, 200_010, 300_000, 300_000 + PERTURBING_NS]
    starts = np.array([0, 100 + PERTURBING_NS, 250_000, 290_000])
    ends = np.array([50, 150_000, 260_000, 400_000])
    assert work.take(starts, ends) == [(1, 1), (3, 1)]
