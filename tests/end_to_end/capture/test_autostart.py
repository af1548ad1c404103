"""Start-up file that records programs whose command line the user does not control."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from programs import wait_for
from services import SERVER, ask, environment, running

from opgrip.capture.on_demand.autostart import LINE
from opgrip.capture.on_demand.settings import settings_of
from opgrip.cli.command import counted
from opgrip.errors import UserError
from opgrip.traces import load

COUNT = """
import sys, time
before = set(sys.modules)
line = open(sys.argv[1]).read()
rounds = []
for _ in range(200):
    start = time.perf_counter(); exec(line); took = time.perf_counter() - start
    start = time.perf_counter(); import os as _; exec("x = 1"); rounds.append((took, time.perf_counter() - start))
print(sorted(set(sys.modules) - before), sorted(a for a, b in rounds)[100] < 20 * sorted(b for a, b in rounds)[100])
"""


@pytest.fixture
def site_folder(tmp_path: Path) -> Path:
    """Create a folder with the start-up file, which Python uses as a site folder."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "opgrip_autostart.pth").write_text(LINE, encoding="utf-8")
    return folder


def test_startup_line_imports_nothing_and_is_fast_without_the_variable(site_folder: Path) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("OPGRIP_")}
    done = subprocess.run(
        [sys.executable, "-c", COUNT, site_folder / "opgrip_autostart.pth"],
        capture_output=True,
        text=True,
        env=env,
        check=True,
    )
    assert done.stdout.split() == ["[]", "True"]


@pytest.mark.slow
def test_autostarted_program_accepts_capture_requests(site_folder: Path, tmp_path: Path) -> None:
    program = f"import site; site.addsitedir({str(site_folder)!r})\n" + SERVER
    (tmp_path / "server.py").write_text(program, encoding="utf-8")
    env = {"OPGRIP_CAPTURE": "auto-%n.jsonl"}
    with running(tmp_path, sys.executable, "server.py", env=env) as process:
        wait_for(lambda: any((tmp_path / "opgrip").glob("*.sock")), process)
        done = ask(tmp_path, "trigger", "server", "--steps", "2")
        assert done.stdout.split() == [str(tmp_path / "auto-1.jsonl")], done.stderr
    assert len(load(tmp_path / "auto-1.jsonl", partial=False).labels) == 2


STEPS = """
import site; site.addsitedir({folder!r})
import torch
net = torch.nn.Linear(2, 2).eval()
for _ in range({steps}):
    net(torch.ones(1, 2))
print("went on")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "recorded"), [(6, 2), (2, 1), (0, 0)])
def test_autostart_records_the_first_steps_of_a_process(
    site_folder: Path, tmp_path: Path, steps: int, recorded: int
) -> None:
    (tmp_path / "short.py").write_text(STEPS.format(folder=str(site_folder), steps=steps), encoding="utf-8")
    env = environment(tmp_path, {"OPGRIP_CAPTURE": "auto.jsonl", "OPGRIP_STEPS": "2"})
    command = [sys.executable, "short.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env, check=True, timeout=120)
    assert done.stdout == "went on\n"
    if recorded:
        assert f"opgrip: {counted(recorded, 'step')}, " in done.stderr
        assert len(load(tmp_path / "auto.jsonl", partial=False).labels) == recorded
    else:
        assert "opgrip: no trace was written: no step began before it was stopped: no module was called" in done.stderr
        assert not list(tmp_path.glob("*.jsonl"))


@pytest.mark.slow
def test_invalid_autostart_variables_do_not_stop_a_program(site_folder: Path, tmp_path: Path) -> None:
    program = f"import site; site.addsitedir({str(site_folder)!r})\nimport torch; print('went on')"
    for env in ({"OPGRIP_CAPTURE": "t.txt"}, {"OPGRIP_CAPTURE": "t.jsonl", "OPGRIP_STEPS": "many"}):
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=environment(tmp_path, env),
            check=True,
        )
        assert done.stdout == "went on\n"
        assert "opgrip: this process does not accept requests to record: " in done.stderr


@pytest.mark.slow
def test_autostart_is_switched_on_and_off(tmp_path: Path) -> None:
    # in a separate environment, without the packages of this one
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    code = "import sys; from opgrip.tools.opgrip import main; sys.exit(main(sys.argv[1:]))"
    packages = next(path for path in map(Path, sys.path) if path.name == "site-packages")
    (purelib,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (purelib / "here.pth").write_text(f"import site; site.addsitedir({str(packages)!r})\n", encoding="utf-8")

    def autostart(word: str) -> str:
        command = [tmp_path / "venv" / "bin" / "python", "-c", code, "autostart", word]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert autostart("status").startswith("autostart is off: ")
    assert str(purelib / "opgrip_autostart.pth") in autostart("on")
    assert (purelib / "opgrip_autostart.pth").read_text() == LINE
    assert autostart("status").startswith(f"autostart is on: {purelib}")
    assert autostart("off").startswith("opgrip autostart: removed ")
    assert not (purelib / "opgrip_autostart.pth").exists()


def test_autostart_settings_are_read_from_variables() -> None:
    settings = settings_of({"OPGRIP_CAPTURE": "a-%p.jsonl", "OPGRIP_SECONDS": "2"})
    assert (settings.seconds, settings.steps) == (2, None)
    assert not settings.at_start
    assert settings_of({"OPGRIP_CAPTURE": "a.jsonl", "OPGRIP_STEPS": "2"}).at_start
    assert not settings_of({"OPGRIP_CAPTURE": "a.jsonl", "OPGRIP_STEPS": "2", "OPGRIP_SIGNAL": "USR1"}).at_start
    assert Path(settings.output).is_absolute()
    with pytest.raises(UserError, match="KILL cannot be used"):
        settings_of({"OPGRIP_CAPTURE": "a.jsonl", "OPGRIP_SIGNAL": "KILL"})
