"""Tests of recordings that are kept only if they contain new signatures, and of daily counts of all calls."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from programs import run_command, succeed, wait_for
from services import on_demand, running
from torch.profiler import record_function

from opgrip.capture import Capture
from opgrip.capture.on_demand import seen
from opgrip.capture.on_demand.sampling import Sampler
from opgrip.capture.on_demand.seen import SeenSignatures
from opgrip.capture.on_demand.settings import AgentSettings
from opgrip.errors import UserError
from opgrip.traces import load
from opgrip.traces.analysis.difference_sides import load_side, read_day

DAY_S = 86_400.0
SERVER = """
import time, torch
net = torch.nn.Linear(4, 4).eval()
size = 3
print("ready", flush=True)
with torch.no_grad():
    while True:
        net(torch.ones(size, 4))
        time.sleep(0.01)
"""


@pytest.fixture
def go_to_day(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that sets the current day, counted from 1970-01-01."""
    return lambda number: monkeypatch.setattr(seen, "time", _Clock(number))


class _Clock:
    """Clock of one module."""

    strftime = staticmethod(time.strftime)

    def __init__(self, number: int) -> None:
        self.gmtime = lambda: time.gmtime(number * DAY_S)


def recording(path: Path, *sizes: int) -> Path:
    with Capture(path):
        for size in sizes:
            torch.ones(size).neg()
    return path


def test_known_signatures_persist_across_restarts_and_days(tmp_path: Path) -> None:
    service = SeenSignatures(tmp_path, "server")
    assert service.add(recording(tmp_path / "1.jsonl", 2, 3)) == 4
    assert service.add(recording(tmp_path / "2.jsonl", 3, 2, 2)) == 0
    assert service.add(recording(tmp_path / "3.jsonl", 2, 5)) == 2
    assert SeenSignatures(tmp_path, "server").add(recording(tmp_path / "4.jsonl", 5)) == 0
    assert SeenSignatures(tmp_path, "another").add(recording(tmp_path / "5.jsonl", 5)) == 2
    day = read_day(service.day_file())
    counts = [cases.count for cases in day.cases.values() if cases.op == "aten.neg.default"]
    assert sorted(counts) == [2, 2, 4]
    assert day.traces == 4


def test_service_with_a_similar_name_is_separate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    SeenSignatures(tmp_path, "server").add(recording(tmp_path / "1.jsonl", 2))
    monkeypatch.setattr(seen.socket, "gethostname", lambda: "web-2")
    SeenSignatures(tmp_path, "server").add(recording(tmp_path / "2.jsonl", 7))
    monkeypatch.setattr(seen.socket, "gethostname", lambda: "web")
    assert SeenSignatures(tmp_path, "server").add(recording(tmp_path / "3.jsonl", 7)) == 2


def test_unreadable_day_file_is_set_aside(
    tmp_path: Path, go_to_day: Callable[[int], None], capfd: pytest.CaptureFixture[str]
) -> None:
    service = SeenSignatures(tmp_path, "server")
    go_to_day(0)
    service.day_file().write_text("damaged", encoding="utf-8")
    assert service.add(recording(tmp_path / "1.jsonl", 2)) == 2
    assert service.add(recording(tmp_path / "2.jsonl", 2)) == 0
    (aside,) = tmp_path.glob("*.unread")
    assert aside.read_text() == "damaged"
    service.day_file().write_text("damaged", encoding="utf-8")
    go_to_day(1)
    assert service.add(recording(tmp_path / "3.jsonl", 2)) == 2
    assert service.add(recording(tmp_path / "4.jsonl", 2)) == 0
    assert capfd.readouterr().err.count("are not counted in the list of known signatures") == 1


def test_private_service_name_is_in_no_file_name(tmp_path: Path) -> None:
    options = {"private": True}
    agent = SimpleNamespace(
        settings=AgentSettings("server", str(tmp_path / "s-%n.jsonl"), new_only=True, options=options)
    )
    Sampler(agent)._keep_what_is_new(recording(tmp_path / "s-1.jsonl", 2))  # type: ignore[arg-type]
    assert sorted(path.name[:7] for path in tmp_path.iterdir()) == [".privat", "private", "s-1.jso"]


def test_day_file_counts_recorded_steps(tmp_path: Path) -> None:
    service = SeenSignatures(tmp_path, "server")
    for number in range(2):
        with Capture(tmp_path / f"{number}.jsonl", details={"on_demand": {"sampled": True}}):
            for step in range(3):
                with record_function(f"opgrip step {step}"):
                    torch.ones(2)
        service.add(tmp_path / f"{number}.jsonl")
    assert read_day(service.day_file()).steps == 6


def test_processes_of_a_service_share_one_day_file(tmp_path: Path) -> None:
    one, other = SeenSignatures(tmp_path, "server"), SeenSignatures(tmp_path, "server")
    one.add(recording(tmp_path / "1.jsonl", 2))
    assert other.add(recording(tmp_path / "2.jsonl", 2)) == 0
    other.add(recording(tmp_path / "3.jsonl", 4))
    assert one.add(recording(tmp_path / "4.jsonl", 4)) == 0
    assert len(list(tmp_path.glob("*.shapes.json"))) == 1
    assert read_day(one.day_file()).calls == 8


def test_days_are_compared(tmp_path: Path, go_to_day: Callable[[int], None]) -> None:
    service, files = SeenSignatures(tmp_path, "server"), []
    for day, sizes in enumerate([(200_000, 3), (200_000, 7)]):
        go_to_day(day)
        service.add(recording(tmp_path / f"{day}.jsonl", *sizes))
        files.append(service.day_file())
    assert [file.name[-22:] for file in files] == ["1970-01-01.shapes.json", "1970-01-02.shapes.json"]
    succeed("opgrip", "trace", "diff", *files, "--least", "0.0001%", "-o", tmp_path / "shifts.json")
    form = json.loads((tmp_path / "shifts.json").read_text(encoding="utf-8"))
    assert form["counts"]["came"] >= 1
    assert form["counts"]["went"] >= 1
    same = [row for row in form["signatures"] if row["counts"] == [1, 1]]
    assert any("200000" in row["call"] for row in same)
    # also together with a trace
    assert load_side([files[0], tmp_path / "1.jsonl"], False, False).calls == 8


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"opgrip_shapes": 2}',
        '{"opgrip_shapes": 1}',
        '{"opgrip_shapes": 1, "header": {}, "traces": 1, "steps": null, "signatures": [{"key": "a"}]}',
        '{"opgrip_shapes": 1, "header": 5, "traces": 1, "steps": null, "signatures": []}',
        '{"opgrip_shapes": 1, "header": {}, "traces": -1, "steps": null, "signatures": []}',
        "[" * 100_000,
    ],
    ids=range(8),
)
def test_file_that_is_not_a_day_file_is_refused_in_one_line(content: str, tmp_path: Path) -> None:
    path = tmp_path / "a.shapes.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match="was not written by --new-only") as raised:
        read_day(path)
    assert "\n" not in str(raised.value)


def test_recording_without_new_signatures_is_deleted(tmp_path: Path) -> None:
    agent = SimpleNamespace(settings=AgentSettings("server", str(tmp_path / "s-%n.jsonl"), new_only=True))
    sampler = Sampler(agent)  # type: ignore[arg-type]
    paths = [recording(tmp_path / f"s-{number}.jsonl", *sizes) for number, sizes in enumerate([(2,), (2,), (3,)])]
    for path in paths:
        sampler._keep_what_is_new(path)
    assert [path.exists() for path in paths] == [True, False, True]


@pytest.mark.slow
def test_service_keeps_new_recordings_and_counts_the_rest(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(SERVER, encoding="utf-8")
    options = ("--every", "0.2s", "--steps", "1", "--new-only", "-o", "e-%n.jsonl", "--", "server.py")
    days = lambda: list(tmp_path.glob("server-*.shapes.json"))  # noqa: E731
    with running(tmp_path, *on_demand(*options)) as process:
        wait_for(lambda: bool(days()) and read_day(days()[0]).traces >= 3, process)
    assert [path.name for path in sorted(tmp_path.glob("e-*.jsonl"))] == ["e-1.jsonl"]
    day = read_day(days()[0])
    assert day.calls == day.traces * len(load(tmp_path / "e-1.jsonl", partial=False).own_calls)


def test_new_only_is_refused_without_every(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("", encoding="utf-8")
    done = run_command("opcapture", "--on-demand", "--new-only", "--", "a.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--new-only needs --every" in done.stderr
