"""Later calls of a signature: predicted ones, and values and results that determine a call's cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from opgrip.capture import Capture, Schedule
from opgrip.capture.recording.observations import ANY, SiteKey, SiteTimes
from opgrip.capture.signatures import fitting, predictions
from opgrip.capture.torch_compat.torch_private import arguments_check
from opgrip.replay.cases.cases import make_cases
from opgrip.replay.inputs.inputs import Inputs, device_map
from opgrip.traces import Trace, load
from opgrip.traces.values.floats import Floats


def rows_of(trace: Trace, op: str) -> list[int]:
    """Return the number of result rows in an operator's signature and in each of its observed calls."""
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


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
