"""Tests of the flight recorder: the last calls of a program are written only when something happens to it."""

import errno
import io
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import IO

import pytest
import torch
from programs import run_command, run_python, train_tiny_net
from torch import nn

from opgrip.capture import Capture
from opgrip.capture.writing import flight_recorder
from opgrip.capture.writing.flight_recorder import FlightRecorder
from opgrip.traces import UserError, load
from opgrip.traces.analysis.merge import merge
from opgrip.traces.analysis.validation import validate
from opgrip.traces.formats.flight_ring import MAGIC
from opgrip.traces.io.reader import TraceReader, read_header
from opgrip.traces.schema.arguments import numbers_of
from opgrip.traces.schema.records import Signature, Values


def add_until_it_fails(calls: int) -> None:
    numbers = torch.ones(3)
    for _ in range(calls):
        numbers = numbers + 1
    raise RuntimeError("a step failed")


@pytest.mark.parametrize("write_ahead", [False, True])
def test_last_calls_before_an_error_are_a_complete_trace(tmp_path: Path, write_ahead: bool) -> None:
    path = tmp_path / "t.jsonl"
    with pytest.raises(RuntimeError), Capture(path, last=10, write_ahead=write_ahead) as capture:
        add_until_it_fails(100)
    trace = load(path, partial=False)
    assert len(trace.calls) == capture.calls == 10
    assert trace.header["flight"] == {"last": 10, "before": 91, "reason": "RuntimeError: a step failed"}
    assert trace.end is not None
    assert trace.end.before == 91
    # signatures of dropped calls are absent
    assert {signature.op for signature in trace.signatures} == {"aten.add.Tensor"}
    assert not validate(path).findings
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("write_ahead", [False, True])
def test_flight_recorder_writes_no_file_without_an_event(tmp_path: Path, write_ahead: bool) -> None:
    capture = train_tiny_net(tmp_path / "t.jsonl", last=10, write_ahead=write_ahead)
    assert not capture.dumps
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("write_ahead", [False, True])
def test_each_requested_dump_has_only_the_calls_since_the_previous_one(tmp_path: Path, write_ahead: bool) -> None:
    with Capture(tmp_path / "t.jsonl", last=100, write_ahead=write_ahead) as capture:
        numbers = torch.ones(3)
        first = capture.dump("first")
        numbers + 1
        second = capture.dump("second")
        assert capture.dump() is None
    assert [first, second] == capture.dumps == [tmp_path / "t.jsonl", tmp_path / "t.dump2.jsonl"]
    ops = [load(path, partial=False).calls["op"].tolist() for path in capture.dumps]
    assert ops == [["aten.ones.default"], ["aten.add.Tensor"]]
    assert [load(path).header["flight"]["before"] for path in capture.dumps] == [0, 1]
    assert not [finding for path in capture.dumps for finding in validate(path).findings]


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.inner(numbers + 1)


def test_handled_error_that_leaves_a_module_is_dumped_once(tmp_path: Path) -> None:
    model = Failing()
    with suppress(ValueError), Capture(tmp_path / "t.jsonl", last=100) as capture:
        try:
            model(torch.ones(3))
        except RuntimeError as error:
            assert [path.name for path in capture.dumps] == ["t.jsonl"]
            raise ValueError("on its way out") from error
    assert len(capture.dumps) == 1
    assert "mat1" in load(capture.dumps[0]).header["flight"]["reason"]


def test_number_of_dumps_is_limited(tmp_path: Path) -> None:
    model = Failing()
    with pytest.warns(RuntimeWarning, match="2 more events"), Capture(tmp_path / "t.jsonl", last=5) as capture:
        for _ in range(flight_recorder.MOST_DUMPS + 2):
            with suppress(RuntimeError):
                model(torch.ones(3))
    assert len(capture.dumps) == len(list(tmp_path.iterdir())) == flight_recorder.MOST_DUMPS


def test_fatal_error_is_dumped_beyond_the_limit_of_dumps(tmp_path: Path) -> None:
    model = Failing()
    before = signal.signal(signal.SIGHUP, lambda number, frame: None)
    raised, warned = pytest.raises(RuntimeError, match="mat1"), pytest.warns(RuntimeWarning, match="more event")
    with raised, warned, Capture(tmp_path / "t.jsonl", last=5) as capture:
        for _ in range(flight_recorder.MOST_DUMPS + 2):
            with suppress(RuntimeError):
                model(torch.ones(3))
        signal.raise_signal(signal.SIGHUP)
        model(torch.ones(3))
    signal.signal(signal.SIGHUP, before)
    assert len(capture.dumps) == flight_recorder.MOST_DUMPS + 1


def test_handled_signal_does_not_suppress_a_later_dump(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, lambda number, frame: None)
    try:
        with pytest.raises(SystemExit), Capture(tmp_path / "t.jsonl", last=5) as capture:
            torch.ones(3)
            signal.raise_signal(signal.SIGHUP)
            torch.ones(3)
            sys.exit("a fault")
    finally:
        signal.signal(signal.SIGHUP, before)
    assert [load(path).header["flight"]["reason"] for path in capture.dumps] == ["SIGHUP", "SystemExit: a fault"]


@pytest.mark.parametrize("code", [None, 0])
def test_successful_sys_exit_writes_no_dump(tmp_path: Path, code: int | None) -> None:
    with pytest.raises(SystemExit), Capture(tmp_path / "t.jsonl", last=5):
        torch.ones(3)
        sys.exit(code)
    assert not list(tmp_path.iterdir())


def test_tables_do_not_grow_if_every_step_has_new_signatures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_recorder, "MOST_OF_GENERATION", dict.fromkeys(flight_recorder.MOST_OF_GENERATION, 20))
    sizes = []
    with Capture(tmp_path / "t.jsonl", last=40) as capture:
        flight, recorder = capture._flusher, capture._recorder
        assert isinstance(flight, FlightRecorder)
        for step in range(30):
            for width in range(6 * step, 6 * step + 6):
                torch.ones(width).sum()
            flight.flush()
            sizes.append(max(len(recorder.signatures._numbers), len(flight.definitions._lines)))
        path = capture.dump()
    assert path is not None
    assert max(sizes[15:]) <= 2 * max(sizes[:15]) <= 400
    assert len(load(path, partial=False).calls) == 40


STOPPED = """
import signal, sys, torch
from opgrip.capture import Capture

def stop(number, frame):
    print("the program's own", flush=True)
    sys.exit(3)

with Capture("t.jsonl", last=20):
    if sys.argv[1] == "own":
        signal.signal(signal.SIGTERM, stop)
        assert signal.getsignal(signal.SIGTERM) is stop
    x = torch.ones(3)
    for _ in range(30):
        x + 1
    print("ready", flush=True)
    while True:
        x + 1
"""


def test_signal_is_dumped_before_the_handler_of_the_program_runs(tmp_path: Path) -> None:
    dumps: list[Path] = []
    before = signal.getsignal(signal.SIGTERM)
    try:
        with Capture(tmp_path / "t.jsonl", last=20) as capture:
            signal.signal(signal.SIGTERM, lambda number, frame: dumps.extend(capture.dumps))
            torch.ones(3)
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert dumps == [tmp_path / "t.jsonl"]
    assert load(dumps[0], partial=False).header["flight"]["reason"] == "SIGTERM"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("handler", "number", "status"),
    [
        ("none", signal.SIGTERM, -15),
        ("own", signal.SIGTERM, 3),
        ("none", signal.SIGINT, 1),
        ("none", signal.SIGQUIT, -3),
    ],
)
def test_fatal_signal_ends_the_program_unchanged_and_is_dumped(
    tmp_path: Path, handler: str, number: signal.Signals, status: int
) -> None:
    def heed() -> None:
        # signals may be ignored if the tests run in the background
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

    words = [sys.executable, "-c", STOPPED, handler]
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, text=True, preexec_fn=heed) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        rest = process.stdout.read()
    # torch's handling of an uncaught interrupt leads to either status
    assert process.returncode in {status, -2 if number == signal.SIGINT else status}
    assert rest == ("the program's own\n" if handler == "own" else "")
    trace = load(tmp_path / "t.jsonl", partial=False)
    assert len(trace.calls) == 20
    assert trace.header["flight"]["reason"] == number.name
    assert len(list(tmp_path.iterdir())) == 1


def test_signal_handlers_are_restored_after_the_block(tmp_path: Path) -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    replaced = signal.signal, signal.getsignal

    def own(number: int, frame: object) -> None:
        pass

    try:
        with Capture(tmp_path / "t.jsonl", last=5):
            assert signal.signal(signal.SIGTERM, own) == before[signal.SIGTERM]
            assert signal.signal(signal.SIGTERM, own) is own
        assert (signal.signal, signal.getsignal) == replaced
        assert signal.getsignal(signal.SIGTERM) is own
        assert signal.getsignal(signal.SIGHUP) == before[signal.SIGHUP]
    finally:
        signal.signal(signal.SIGTERM, before[signal.SIGTERM])


CRASHED = """
import os, signal, sys, torch
from opgrip.capture import Capture
with Capture("t.jsonl", last=10, write_ahead=sys.argv[2] == "ahead") as capture:
    x = torch.ones(3)
    for _ in range(50):
        x + 1
    capture._flusher.run_job(capture._flusher.flush)
    largest = max(os.path.getsize(name) for name in os.listdir())
    for _ in range(150):
        x + 1
    capture._flusher.run_job(capture._flusher.flush)
    assert sum(os.path.getsize(name) for name in os.listdir()) < 2 * largest
    os._exit(4) if sys.argv[1] == "exit" else os.kill(os.getpid(), int(sys.argv[1]))
"""


def test_ring_file_has_the_last_calls_at_any_time_if_written_ahead(tmp_path: Path) -> None:
    with Capture(tmp_path / "t.jsonl", last=10, write_ahead=True):
        numbers = torch.ones(3)
        for call in range(1, 60):
            numbers + 1
            (part,) = tmp_path.iterdir()
            if call % 7 == 0:
                trace = load(part)
                assert min(call, 10) <= len(trace.calls) <= 10
                assert trace.header["flight"]["before"] + len(trace.calls) + len(trace.unfinished) == call + 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "when"), [("exit", "ahead"), (signal.SIGSEGV.value, "ahead"), (signal.SIGKILL.value, "flushed")]
)
def test_ring_file_survives_a_crash_and_does_not_grow(tmp_path: Path, how: object, when: str) -> None:
    assert run_python("-c", CRASHED, how, when, cwd=tmp_path).returncode in {4, -9, -11, 128 + 9, 128 + 11}
    (part,) = tmp_path.iterdir()
    trace = load(part)
    assert trace.missing
    assert len(trace.calls) == 10
    # the last call may be unfinished
    assert trace.header["flight"]["before"] + len(trace.calls) + len(trace.unfinished) == 201


@pytest.mark.parametrize("damage", ["cut", "zeros", "sizes"])
def test_damaged_ring_file_is_reported(tmp_path: Path, damage: str) -> None:
    with Capture(tmp_path / "t.jsonl", last=10, write_ahead=True):
        for _ in range(20):
            torch.ones(3)
        (part,) = tmp_path.iterdir()
        data = bytearray(part.read_bytes())
    used = len(data.rstrip(b"\0"))
    if damage == "cut":
        del data[used // 2 :]
    elif damage == "zeros":
        data[used // 2 : used] = bytes(used - used // 2)
    else:
        data[72:80] = (1 << 50).to_bytes(8, "little")
    part.write_bytes(data)
    with suppress(UserError):
        assert load(part).missing


@pytest.mark.parametrize("write_ahead", [False, True])
def test_full_disk_loses_only_the_dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_ahead: bool) -> None:
    def write(lines: bytes) -> int:
        raise OSError(errno.ENOSPC, "no space left on device")

    def full_stream(file: IO[bytes], name: str) -> IO[bytes]:
        stream = io.BytesIO()
        stream.write = write  # type: ignore[method-assign]
        return stream

    capture = Capture(tmp_path / "t.jsonl", last=5, write_ahead=write_ahead)
    with pytest.warns(RuntimeWarning, match="no space left"), capture:
        monkeypatch.setattr("opgrip.traces.io.writer.compress_to", full_stream)
        numbers = torch.ones(3)
        for _ in range(30):
            numbers = numbers + 1
        assert capture.dump() is None
        monkeypatch.undo()
        # calls that could not be written are kept
        assert len(load(capture.dump() or "").calls) == 5
    assert torch.equal(numbers, torch.full((3,), 31.0))
    assert not list(tmp_path.glob("*.part*"))


def test_dump_is_refused_without_last_calls(tmp_path: Path) -> None:
    with Capture(tmp_path / "t.jsonl") as capture, pytest.raises(UserError, match="does not keep its last calls"):
        capture.dump()


@pytest.mark.slow
def test_opcapture_dumps_the_last_calls_of_a_failing_script(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("import torch\nx = torch.ones(3)\nfor _ in range(50):\n    x = x + 1\nx[7]\n")
    done = run_command("opcapture", "--last", 4, "--", "fails.py", cwd=tmp_path)
    assert done.returncode == 1
    assert "the last calls before an event, such as an error or a signal, to fails.jsonl" in done.stderr
    info = run_command("opgrip", "trace", "info", "fails.jsonl", cwd=tmp_path).stdout
    assert "the last 4 calls, written for IndexError" in info
    assert "forgotten   " in info


FORKED = """
import os, signal, sys, torch
from torch import nn
from opgrip.capture import Capture
with Capture("t.jsonl", last=10, write_ahead=sys.argv[1] == "ahead") as capture:
    x = torch.ones(3)
    x.neg()
    child = os.fork()
    if not child:
        for _ in range(30):
            x + 1
        if sys.argv[2] == "signal":
            signal.raise_signal(signal.SIGTERM)
        nn.Linear(2, 2)(x)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status))
    capture.dump("parent")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("write_ahead", "how", "status", "reason"),
    [("ahead", "signal", -15, "SIGTERM"), ("ring", "error", 1, "RuntimeError: mat1")],
)
def test_forked_process_keeps_separate_last_calls(
    tmp_path: Path, write_ahead: str, how: str, status: int, reason: str
) -> None:
    done = run_python("-c", FORKED, write_ahead, how, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"{status}\n"), done.stderr
    (child,) = tmp_path.glob("t.pid*.jsonl")
    trace = load(child, partial=False)
    assert len(trace.calls) == 10
    assert trace.header["flight"]["reason"].startswith(reason)
    assert "parent_pid" in trace.header
    parent = load(tmp_path / "t.jsonl", partial=False)
    assert parent.calls["op"].tolist() == ["aten.ones.default", "aten.neg.default"]
    assert len(list(tmp_path.iterdir())) == 2


def test_merge_adds_up_the_forgotten_calls_of_dumps(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with Capture(tmp_path / f"{name}.jsonl", last=5) as capture:
            for _ in range(9):
                torch.ones(3)
            capture.dump()
    merge([tmp_path / "a.jsonl", tmp_path / "b.jsonl"], tmp_path / "both.jsonl")
    end = load(tmp_path / "both.jsonl").end
    assert end is not None
    assert end.before == 8


@pytest.mark.parametrize("content", [b"", b"\1" * 64], ids=["nothing", "no chunk"])
def test_ring_file_without_header_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "last.ring"
    path.write_bytes(MAGIC + content)
    for use in (load, read_header):
        with pytest.raises(UserError, match=r"last\.ring is a damaged ring file: "):
            use(path)


CARD = 4111111111111111


class SecretNet(nn.Module):
    def forward(self, words: torch.Tensor) -> torch.Tensor:
        chosen = torch.arange(50.0)[words] + torch.tensor([CARD])
        with torch.profiler.record_function("SECRET-label"):
            return chosen.sum()


class SecretError(Exception):
    """Error whose name and message belong to the program."""


def check_redacted(path: Path) -> None:
    """Check that a file is complete and consistent, and reveals nothing about the program."""
    text = path.read_text()
    assert "secret" not in text.lower()
    assert str(CARD)[:6] not in text
    assert validate(path).findings == []
    records = list(TraceReader(path))
    assert not [record for record in records if isinstance(record, Values)]
    signatures = [record for record in records if isinstance(record, Signature)]
    assert {number for record in signatures for number in numbers_of((record.args, record.kwargs))} == {None}


@pytest.mark.parametrize("write_ahead", [pytest.param(False, marks=pytest.mark.slow), True])
def test_last_calls_of_a_private_capture_are_redacted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_ahead: bool
) -> None:
    monkeypatch.setattr(flight_recorder, "MOST_OF_GENERATION", dict.fromkeys(flight_recorder.MOST_OF_GENERATION, 20))
    model = SecretNet()
    capture = Capture(tmp_path / "t.jsonl", last=40, private=True, write_ahead=write_ahead, stack_depth=3)
    with pytest.raises(SecretError), capture:
        for size in range(1, 41):
            # each call has a new signature, with values similar to an earlier call's or new ones
            model(torch.tensor([7, size % 3, size] * size))
            assert capture._flusher is not None
            capture._flusher.flush()
            if size == 20:
                assert capture.dump("SECRET request") is not None
            for part in tmp_path.iterdir():
                assert b"secret" not in part.read_bytes().lower()
        assert capture._recorder.generations.current > 3
        assert not capture._recorder.lost.dropped
        raise SecretError("SECRET")
    assert capture.failure is None
    assert len(capture.dumps) == 2
    for path in capture.dumps:
        check_redacted(path)
    trace = load(capture.dumps[1], partial=False)
    assert len(trace.calls) == 40
    assert trace.end is not None
    assert trace.header["flight"]["before"] == trace.end.before > 0
    assert trace.header["redacted"]


def test_private_dump_names_only_signals_and_builtin_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="SECRET"), Capture(tmp_path / "t.jsonl", last=40, private=True) as capture:
        SecretNet()(torch.tensor([7, 3]))
        capture.dump("SIGTERM")
        SecretNet()(torch.tensor([7, 3]))
        raise ValueError("SECRET")
    reasons = [load(path).header["flight"]["reason"] for path in capture.dumps]
    assert reasons == ["SIGTERM", "ValueError"]
