"""Small models run bit for bit as without a capture, also if they or the capture fail or are interrupted."""

import ctypes
import os
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import async_exceptions
import pytest
import threads_at_once
import torch
from async_exceptions import MODES
from optional import needs, slow_except
from programs import flat_tensors
from small_models import SMALL_PROGRAMS, TRANSFORMERS_PROGRAMS, SmallProgram
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from versions import Counting

from opgrip.capture import Capture
from opgrip.capture.program.places import ModulePaths
from opgrip.capture.recording.recorder import SignatureTable
from opgrip.capture.recording.scope_table import ScopeTable
from opgrip.capture.recording.storages import StorageNumbers
from opgrip.capture.recording.thread_mode import ThreadMode
from opgrip.capture.signatures import predictions
from opgrip.capture.writing.flusher import Flusher
from opgrip.errors import is_from_program
from opgrip.traces import Trace, load
from opgrip.traces.analysis.validation import validate

STEPS = 3  # steps per run: the first one meets each call, the others predict it
RUNS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "train": nullcontext,
    "predict without gradients": torch.no_grad,
    "predict in inference mode": torch.inference_mode,
}
# programs and runs of the quick tests
QUICK = {
    *((name, "train") for name in ("gan", "reentrant checkpointing", "gradient penalty", "per-sample gradients")),
    *((name, "predict in inference mode") for name in ("transformer encoder", "activation checkpointing")),
}

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning"),
]


def slow_unless_quick(name: str, run: str) -> list[pytest.MarkDecorator]:
    return [] if (name, run) in QUICK else [pytest.mark.slow]


Watch = Callable[[nn.Module], AbstractContextManager[Any]]
Observed = dict[str, Any]


@dataclass(frozen=True)
class Run:
    plain: Observed
    captured: Observed
    counts: Counter[str]
    capture: Capture
    trace: Trace


def without_capture(model: nn.Module) -> AbstractContextManager[Any]:
    return nullcontext()


def observe(build: Callable[[], SmallProgram], run: str, watch: Watch) -> Observed:
    """Build the program, run its steps inside `watch`, and return everything that the program can observe."""
    torch.manual_seed(0)
    program = build()
    training = run == "train"
    program.model.train(training)
    step = program.train if training else program.predict
    torch.manual_seed(1)
    random.seed(1)
    with watch(program.model), RUNS[run]():
        outputs = [step() for _ in range(STEPS)]
    return dict(facts(program, outputs))


def facts(program: SmallProgram, outputs: Any) -> Iterator[tuple[str, Any]]:
    yield "outputs", [as_seen(tensor) for tensor in flat_tensors(outputs)]
    for name, parameter in program.model.named_parameters():
        yield f"parameter {name}", as_seen(parameter)
        yield f"gradient of {name}", None if parameter.grad is None else as_seen(parameter.grad)
    for name, buffer in program.model.named_buffers():
        yield f"buffer {name}", as_seen(buffer)
    for number, optimizer in enumerate(program.optimizers):
        state = optimizer.state_dict()["state"]
        yield f"optimizer {number}", [as_seen(tensor) for tensor in flat_tensors(state)]
    yield "random numbers of torch", as_seen(torch.get_rng_state())
    yield "random numbers of Python", random.getstate()


def as_seen(tensor: Tensor) -> tuple[Any, ...]:
    """Return everything observable of a tensor, with numbers as bits: nan equals itself, and 0.0 is not -0.0."""
    bits = tensor.detach().clone().reshape(-1).contiguous().view(torch.uint8)
    made_by = type(tensor.grad_fn).__name__
    return (
        type(tensor),
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.requires_grad,
        made_by,
        bits.numpy().tobytes(),
    )


def differences(plain: Observed, captured: Observed) -> list[str]:
    assert plain.keys() == captured.keys()
    return [name for name, fact in plain.items() if captured[name] != fact]


def run_of(build: Callable[[], SmallProgram], run: str, path: Path) -> Run:
    counting, captures = Counting(), []

    def capture(model: nn.Module) -> Capture:
        captures.append(Capture(path, model=model))
        return captures[-1]

    plain = observe(build, run, without_capture)
    observe(build, run, lambda model: counting)
    captured = observe(build, run, capture)
    return Run(plain, captured, counting.counts, captures[0], load(path, partial=False))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    # with more threads, the gradients of the detector's indexing differ from run to run, also without a capture
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(
    scope="module",
    params=[
        *(
            pytest.param((build, run), id=f"{name}, {run}", marks=slow_unless_quick(name, run))
            for name, build in SMALL_PROGRAMS.items()
            for run in RUNS
        ),
        *(
            pytest.param(
                (build, run), id=f"{name}, {run}", marks=[needs("transformers"), *slow_unless_quick(name, run)]
            )
            for name, build in TRANSFORMERS_PROGRAMS.items()
            for run in RUNS
        ),
    ],
)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    build, mode = request.param
    return run_of(build, mode, tmp_path_factory.mktemp("undisturbed") / "t.jsonl")


def test_program_results_are_bit_for_bit_identical(run: Run) -> None:
    assert run.plain["outputs"]
    assert differences(run.plain, run.captured) == []


def test_trace_is_complete_and_nothing_was_dropped(run: Run) -> None:
    assert run.capture.failure is None
    assert run.capture.dropped == 0
    assert run.trace.missing is None
    assert run.trace.end is not None
    assert not run.trace.end.dropped


def test_operator_counts_equal_those_of_an_independent_mode(run: Run) -> None:
    kinds = {signature.number: signature.kind for signature in run.trace.signatures}
    operators = run.trace.calls[run.trace.calls["signature"].map(kinds) == "operator"]
    assert Counter(operators["op"].astype(str)) == run.counts


class Broken(Exception):
    """Error with arguments that are not in its message."""

    def __str__(self) -> str:
        return "broken"


class RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, error: BaseException) -> Tensor:
        ctx.error = error
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        torch.ones(3).sin()
        raise ctx.error


class Raising(nn.Module):
    """Module that raises an error at a chosen place."""

    def __init__(self, where: str, error: BaseException) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.where = where
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        if self.where == "forward":
            raise self.error
        if self.where == "operator":
            return y @ torch.ones(5)
        if self.where == "backward":
            return RaisesInBackward.apply(y, self.error)
        y.register_hook(self._raise)
        return y

    def _raise(self, gradient: Tensor) -> Tensor:
        raise self.error


def error_of(where: str, error: BaseException, watch: Watch) -> BaseException:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), Raising(where, error))
    try:
        with watch(model):
            model(torch.ones(2, 3)).sum().backward()
    except BaseException as reached:
        return reached
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize("error", [Broken("a", 3, None), KeyboardInterrupt(7), StopIteration([1])], ids=repr)
@pytest.mark.parametrize("where", ["forward", "backward", "gradient hook"])
def test_program_error_reaches_it_unchanged(tmp_path: Path, where: str, error: BaseException) -> None:
    capture = Capture(tmp_path / "t.jsonl")
    plain = error_of(where, error, without_capture)
    expected = type(plain), str(plain), plain.args, plain.__cause__, plain.__context__
    captured = error_of(where, error, lambda model: capture)
    assert plain is error
    assert captured is error
    assert (type(captured), str(captured), captured.args, captured.__cause__, captured.__context__) == expected
    assert capture.dropped == 0
    assert load(tmp_path / "t.jsonl", partial=False).missing is None


class Stepping(nn.Module):
    """Module whose forward makes an optimizer step and fails."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.inner.parameters(), lr=0.1)

    def forward(self) -> None:
        self.optimizer.step(self._fail)

    def _fail(self) -> float:
        raise Broken


@pytest.mark.timeout(10)
def test_program_continues_after_an_optimizer_failed_in_a_module(tmp_path: Path) -> None:
    model = Stepping()
    with Capture(tmp_path / "t.jsonl", model=model) as capture:
        with pytest.raises(Broken):
            model()
        model.inner(torch.ones(1, 2))
    assert capture.dropped == 0


def test_fake_tensors_work_in_a_capture(tmp_path: Path) -> None:
    with Capture(tmp_path / "t.jsonl"), FakeTensorMode():
        made = nn.Linear(4, 2)(torch.ones(3, 4))
    assert made.shape == (3, 2)


def resize_memory() -> list[Tensor]:
    """Free and reallocate storages, as FSDP does, and let outputs grow, each after use in a computation."""
    weight = nn.Parameter(torch.full((100, 100), 0.5))
    weight.data.mul_(2)
    flags = torch.ones(90, 90) > 0
    flags.sum()
    places = torch.arange(10_000)
    picked = torch.ones(10_000, 2)[places]
    for tensor in (weight.data, flags, places, picked):
        size = tensor.untyped_storage().nbytes()
        tensor.untyped_storage().resize_(0)
        tensor.detach()
        torch.empty_like(tensor)
        tensor.untyped_storage().resize_(size)
        tensor.fill_(1)
    grown = torch.zeros(2)
    grown.add_(1).resize_(50).fill_(3)
    output = torch.empty(0)
    for size in (300, 10_000, 20_000):
        torch.add(torch.ones(size), 1, out=output.resize_(0))
    return [weight.data, flags, places, picked, grown, output]


@pytest.mark.parametrize("values", ["sketch", "full"])
def test_memory_is_freed_and_resized_as_without_a_capture(tmp_path: Path, values: Any) -> None:
    plain = [as_seen(tensor) for tensor in resize_memory()]
    with Capture(tmp_path / "t.jsonl", values=values) as capture:
        captured = [as_seen(tensor) for tensor in resize_memory()]
    assert captured == plain
    assert capture.dropped == 0


# skip `_keep`, which has its own guard; its callees are replaced instead
HOOKS = [
    (ThreadMode, "_find"),
    (ThreadMode, "_match_storages"),
    (ThreadMode, "enter"),
    (SignatureTable, "number"),
    (ScopeTable, "point"),
    (ScopeTable, "pair"),
    (SignatureTable, "close"),
    (StorageNumbers, "number"),
    (ModulePaths, "called"),
]
FAULTS = [(hook, every) for hook in range(len(HOOKS)) for every in (1, 3)]


@pytest.mark.parametrize(
    "fault",
    slow_except([(hook, every) for hook, every in FAULTS if hook % 4 == 2 * (every == 3)], FAULTS),
    ids=[
        f"{HOOKS[hook][0].__name__}.{HOOKS[hook][1]}, {'always' if every == 1 else 'every third time'}"
        for hook, every in FAULTS
    ],
)
def test_hook_error_is_counted_and_invisible_to_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: tuple[int, int]
) -> None:
    place, every = fault
    owner, hook = HOOKS[place]
    original, calls, captures = getattr(owner, hook), count(1), []

    def faulty(*args: Any, **kwargs: Any) -> Any:
        if next(calls) % every == 0:
            raise OSError("planted")
        return original(*args, **kwargs)

    def capture(model: nn.Module) -> Capture:
        captures.append(Capture(tmp_path / "t.jsonl", model=model))
        return captures[-1]

    plain = observe(SMALL_PROGRAMS["u-net"], "train", without_capture)
    monkeypatch.setattr(owner, hook, faulty)
    # low enough that three steps of a program reach the prediction of calls
    monkeypatch.setattr(predictions, "SIGHTINGS", 2)
    captured = observe(SMALL_PROGRAMS["u-net"], "train", capture)
    assert differences(plain, captured) == []
    assert captures[0].failure is None
    assert captures[0].dropped > 0
    end = load(tmp_path / "t.jsonl", partial=False).end
    assert end is not None
    assert {item.reason for item in end.dropped} == {"OSError: planted"}


PROGRAMS = Path(__file__).resolve().parents[4] / "shared/cases/programs"
OPTIONS = {"plain": (), "last 100": ("--last", "100")}
slowly = [pytest.param(mode, marks=[] if mode == "plain" else pytest.mark.slow) for mode in MODES]


@pytest.fixture(autouse=True)
def usual_switch_interval() -> Any:
    interval = sys.getswitchinterval()
    yield
    sys.setswitchinterval(interval)


@pytest.mark.parametrize("mode", slowly)
def test_each_asynchronous_exception_is_raised_exactly_once(tmp_path: Path, mode: str) -> None:
    assert async_exceptions.check(mode, 45, 1, tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("mode", [item for item in slowly if item.values[0] != "last 100"])
def test_concurrent_threads_with_new_signatures_leave_a_valid_trace(tmp_path: Path, mode: str) -> None:
    sys.setswitchinterval(threads_at_once.SWITCH_S)
    assert [item for number in range(2) for item in threads_at_once.check(mode, number, tmp_path)] == []


def raise_with_arguments(signum: int, frame: FrameType | None) -> None:
    raise RuntimeError("from a handler")


def raise_without_arguments(signum: int, frame: FrameType | None) -> None:
    del signum, frame
    raise RuntimeError("from a handler")


def is_programs(run: Callable[[], object]) -> list[bool]:
    """Run a function and return whether its exception is the program's; empty if it raises none."""
    answers: list[bool] = []
    try:
        run()
    except Exception as error:
        answers.append(is_from_program(error))
    return answers


@pytest.mark.parametrize("handler", [raise_with_arguments, raise_without_arguments, lambda *_: int("x")])
def test_exception_of_a_signal_handler_belongs_to_the_program(handler: Callable[..., None]) -> None:
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        assert is_programs(lambda: signal.raise_signal(signal.SIGUSR1)) == [True]
    finally:
        signal.signal(signal.SIGUSR1, before)


class TakesSeconds(Exception):
    def __init__(self, seconds: float) -> None:
        super().__init__(f"{seconds} s are over")


@pytest.mark.parametrize("kind", [RuntimeError, RuntimeError("no class"), TakesSeconds])
def test_error_from_raising_an_asynchronous_exception_belongs_to_the_program(kind: object) -> None:
    set_error, ident = ctypes.pythonapi.PyThreadState_SetAsyncExc, ctypes.c_ulong(threading.get_ident())
    assert is_programs(lambda: set_error(ident, ctypes.py_object(kind))) == [True]


def raise_itself() -> None:
    raise RuntimeError


INTERRUPTIONS: list[Callable[[], object]] = [
    lambda: int("x"),
    lambda: {}[1],
    lambda: next(iter(())),
    lambda: torch.ones(2) @ torch.ones(3),
    lambda: torch.ones(2).to_sparse().untyped_storage(),
    raise_itself,
    lambda: raise_itself(1),  # type: ignore[call-arg]
]


@pytest.mark.parametrize("fault", INTERRUPTIONS)
def test_exception_of_called_code_is_a_hook_error(fault: Callable[[], object]) -> None:
    assert is_programs(fault) == [False]


def test_interrupt_while_closing_leaves_a_complete_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finish = Flusher.finish

    def interrupting(flusher: Flusher) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        finish(flusher)

    monkeypatch.setattr(Flusher, "finish", interrupting)
    with pytest.raises(KeyboardInterrupt), Capture(tmp_path / "t.jsonl"):
        torch.ones(2).sin()
    trace = load(tmp_path / "t.jsonl", partial=False)
    assert trace.missing is None
    assert len(trace.calls) == 2


@pytest.mark.parametrize("number", [0, *(pytest.param(number, marks=pytest.mark.slow) for number in range(1, 35))])
@pytest.mark.parametrize("way", ["signal", "thread"])
@pytest.mark.timeout(60)
def test_capture_closes_while_many_threads_run(tmp_path: Path, way: str, number: int) -> None:
    sys.setswitchinterval(1e-4)
    capture, over = Capture(tmp_path / "t.jsonl"), threading.Event()
    stop = lambda: (capture.close(), over.set()) if way == "thread" else os.kill(os.getpid(), signal.SIGUSR1)  # noqa: E731

    def call(first: int) -> None:
        for size in range(first, first + 40):
            torch.ones(size).sin()

    before = signal.signal(signal.SIGUSR1, lambda *_: (capture.close(), over.set()))
    try:
        with capture:
            threads = [threading.Thread(target=call, args=(100 * item,)) for item in range(50)]
            for thread in threads:
                thread.start()
            threading.Timer(0.01 * (number % 10), stop).start()
            size = 10_000
            while not over.is_set():
                size += 1
                torch.ones(size)
        for thread in threads:
            thread.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert validate(tmp_path / "t.jsonl").findings == []
    assert load(tmp_path / "t.jsonl", partial=False).missing is None


def test_signal_handler_does_not_wait_for_a_lock_of_the_same_thread(tmp_path: Path) -> None:
    with Capture(tmp_path / "t.jsonl") as capture:
        torch.ones(2).sin()
        with capture._recorder.pending.lock:
            # as a handler that interrupts the description of a call
            capture.close()
    assert not is_in_torch_dispatch_mode()
    assert len(load(tmp_path / "t.jsonl", partial=False).calls) == 2


def run_program(name: str, mode: str, folder: Path) -> tuple[int, str]:
    """Run a corpus program under `opcapture`; return its exit status and output."""
    command = [str(Path(sys.executable).with_name("opcapture")), "-o", "t.jsonl", "--force", *OPTIONS[mode]]
    done = subprocess.run(
        [*command, "--", str(PROGRAMS / name)], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    return done.returncode, done.stdout


@pytest.mark.skipif(not PROGRAMS.is_dir(), reason="the programs of the field are not there")
@pytest.mark.slow
@pytest.mark.parametrize("mode", OPTIONS)
@pytest.mark.parametrize("name", ["p31_threads.py", "p32_signals.py"])
def test_programs_with_threads_and_signals_run_unchanged(tmp_path: Path, name: str, mode: str) -> None:
    command = [sys.executable, str(PROGRAMS / name)]
    plain = [subprocess.run(command, capture_output=True, text=True, check=False) for _ in range(3)]
    # torch's own threads abort many runs of p31 at exit, without a capture too
    assert {done.returncode for done in plain} <= {0, -signal.SIGABRT}
    for _ in range(3):
        status, output = run_program(name, mode, tmp_path)
        assert status in {0, *(done.returncode for done in plain)}
        assert output == plain[0].stdout
        if (tmp_path / "t.jsonl").exists():
            assert validate(tmp_path / "t.jsonl").findings == []
