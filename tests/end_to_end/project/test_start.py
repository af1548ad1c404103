"""The commands' start and exit, the project's own files, its two wheels, and a package of plug-ins."""

import json
import os
import pty
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from forks import run_forked
from optional import EVERYBODY
from outside import FAILS, with_package
from programs import ROOT, program_path, receive_ctrl_c, run_command, run_python, succeed
from project_files import PACKAGES, pyproject

import opgrip
from opgrip.cli.plugins import MissingPackageError, install_command, needed
from opgrip.replay import Results
from opgrip.replay.cases.selection import PointOptions
from opgrip.tools.verbs import verbs
from opgrip.traces import load
from opgrip.traces.zoo import read_manifest

ENTRIES = {
    "opcapture": "opgrip.capture.start",
    "opreplay": "opgrip.replay.command.opreplay",
    "opgrip": "opgrip.tools.opgrip",
}
LOADED = """
import contextlib, importlib, io, json, sys
main = importlib.import_module(sys.argv[1]).main
loaded = []
for words in json.loads(sys.argv[2]):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            main(words)
        except SystemExit:
            loaded.append([words, sorted({"torch", "numpy", "pandas"} & sys.modules.keys())])
print(json.dumps(loaded))
"""


@pytest.mark.parametrize("command", ENTRIES)
def test_help_version_and_usage_errors_load_neither_torch_nor_pandas(command: str) -> None:
    lines = [["--help"], ["--version"], ["--nosuch"]]
    if command == "opgrip":
        lines += [[*name.split(), word] for name, _ in verbs.items() for word in ("--help", "--nosuch")]
    done = run_python("-c", LOADED, ENTRIES[command], json.dumps(lines), fresh=True, status=0)
    assert json.loads(done.stdout) == [[words, []] for words in lines]


@pytest.mark.slow
@pytest.mark.parametrize("command", [[program_path(name)] for name in ENTRIES] + [[sys.executable, "-m", "opgrip"]])
def test_every_command_prints_its_version(command: list[str]) -> None:
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stdout == f"opgrip {metadata.version('opgrip')}, torch {metadata.version('torch')}\n"


@pytest.mark.slow
def test_terminal_shows_that_torch_is_loading_and_then_clears_the_line() -> None:
    ours, theirs = pty.openpty()
    command = [program_path("opreplay"), "nothere.jsonl"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=theirs, stdin=subprocess.DEVNULL) as process:
        os.close(theirs)
        text = b""
        while b"\n" not in text:
            text += os.read(ours, 4096)
        process.wait()
    os.close(ours)
    line, _, rest = text.decode().partition("\r\x1b[K")
    assert line == "opreplay: loading torch ..."
    assert rest.startswith("opreplay: error: nothere.jsonl")


def test_public_names_are_functions_and_not_modules() -> None:
    import opgrip.replay.command.replay  # binds the module in its package

    assert {name: type(getattr(opgrip.replay, name)).__name__ for name in ("replay", "benchmark")} == {
        "replay": "function",
        "benchmark": "function",
    }
    assert callable(opgrip.capture.capture)
    with pytest.raises(TypeError, match=r"opgrip.replay is a package, .*from opgrip.replay import replay$"):
        opgrip.replay("step.jsonl")  # type: ignore[operator]
    with pytest.raises(TypeError, match=r"from opgrip.capture import capture$"):
        opgrip.capture(None)  # type: ignore[operator]
    assert {"Result", "Results"} <= set(dir(opgrip.replay))
    with pytest.raises(AttributeError, match="has no attribute 'nosuch'"):
        _ = opgrip.replay.nosuch  # type: ignore[attr-defined]


@pytest.mark.parametrize(("command", "rare"), [("opreplay", "--nsys-warmup"), ("opcapture", "--salt-file")])
def test_help_shows_common_options_and_help_all_shows_all(command: str, rare: str) -> None:
    shown, everything = (succeed(command, flag).stdout for flag in ("--help", "--help-all"))
    for part in ("--output", "--device", "--help-all", "examples:"):
        assert part in shown
        assert part in everything
    assert rare in everything
    assert rare not in shown
    assert sum(line.startswith("  -") for line in shown.splitlines()) <= 35


FAST = "--iterations 1 --warmup 0 --top 2"


@pytest.mark.slow
@pytest.mark.parametrize("command", [f"opreplay TRACE {FAST}", "opgrip trace info TRACE", "opgrip longtail TRACE"])
def test_closed_reader_causes_no_error(command: str, tiny_trace: Path) -> None:
    words = command.replace("TRACE", str(tiny_trace))
    line = f"set -o pipefail; {Path(program_path('opreplay')).parent}/{words} | true"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "Error" not in done.stderr


def test_full_device_is_reported_in_one_line() -> None:
    command = [program_path("opgrip"), "trace", "info", "trace:faster_rcnn"]
    with Path("/dev/full").open("w") as full:
        done = run_forked(command, terminal=full.fileno())
    assert done.returncode == 2
    assert done.stderr == "opgrip trace info: error: the output cannot be written: no space left on device\n"


@pytest.mark.slow
def test_interrupted_replay_prints_the_command_that_resumes_it(tmp_path: Path) -> None:
    words = ["trace:faster_rcnn", "--op", "aten.*", "--budget", "1", "-o", "a file.json"]
    command = [program_path("opreplay"), *words]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=receive_ctrl_c
    )
    assert process.stderr is not None
    assert "replaying" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    assert "cases; continue with: opreplay trace:faster_rcnn --op 'aten.*' --budget 1 -o 'a file.json' --resume" in err
    if "interrupted after 0 of" in err:
        assert out == ""


def test_more_threads_than_processors_are_reported(tiny_trace: Path) -> None:
    processors = len(os.sched_getaffinity(0))
    assert PointOptions(threads=(processors,)).notes == ()
    (note,) = PointOptions(threads=(1, processors + 1)).notes
    assert note.startswith(f"{processors + 1} threads would share ")
    done = run_command("opreplay", tiny_trace, *FAST.split(), "--threads", processors + 1)
    assert note in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["<&- >&- 2>&-", ">&-", "2>&-"])
def test_commands_work_with_closed_streams(tmp_path: Path, closed: str) -> None:
    (tmp_path / "one.py").write_text("import torch; print(torch.ones(3).sin().shape)", encoding="utf-8")
    programs = Path(program_path("opcapture")).parent
    lines = [
        f"{programs}/opcapture -- one.py {closed}",
        f"{programs}/opreplay one.jsonl {FAST} -o one.json {closed}",
        f"{programs}/opgrip trace info one.jsonl {closed}",
    ]
    done = subprocess.run(["bash", "-ec", "\n".join(lines)], cwd=tmp_path, timeout=300, check=False)
    assert done.returncode == 0
    assert (tmp_path / "one.json").stat().st_size


@pytest.mark.slow
def test_worker_processes_never_import_modules_of_the_current_folder(tmp_path: Path, tiny_trace: Path) -> None:
    for name in ("opgrip", "json", "runpy"):
        (tmp_path / f"{name}.py").write_text("open('planted', 'w')", encoding="utf-8")
    done = run_command("opreplay", tiny_trace, *FAST.split(), "--op", "*mm*", "--device", "meta", cwd=tmp_path)
    # no case with tensors runs on the device `meta`
    assert done.returncode == 1, done.stderr
    assert not (tmp_path / "planted").exists()


KILLS = int(os.environ.get("OPGRIP_KILLS", "3"))
LAST_S = 2.0  # Duration of calls that a killed capture may lack: one second, and another for a busy machine.

LOOP = """
import sys, time, torch
x = torch.ones(16)
with open(sys.argv[1], "w") as log:
    for number in range(10**9):
        x + number
        log.write(f"{number} {time.monotonic()}\\n")
        log.flush()
        time.sleep(0.001)
"""


@pytest.fixture
def randomness(request: pytest.FixtureRequest) -> random.Random:
    """Return random numbers that differ in each run; the output of a failed test names the seed."""
    seed = int(os.environ.get("OPGRIP_SEED", time.time_ns() % 10**6))
    print(f"OPGRIP_SEED={seed}")
    return random.Random(f"{seed} {request.node.name}")


def killed(command: list[Any], folder: Path, after_s: float) -> bool:
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        try:
            _, errors = process.communicate(timeout=after_s)
        except subprocess.TimeoutExpired:
            process.kill()
            return True
        assert process.returncode == 0, errors.decode()
    return False


@pytest.mark.slow
def test_killed_capture_lacks_at_most_its_last_second(tmp_path: Path, randomness: random.Random) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    for number in range(KILLS):
        folder = tmp_path / str(number)
        folder.mkdir()
        log = folder / "log"
        command = [program_path("opcapture"), "-o", "t.jsonl", "--", tmp_path / "loop.py", log]
        with subprocess.Popen(command, cwd=folder, stderr=subprocess.DEVNULL) as process:
            while not log.exists():
                assert process.poll() is None
                time.sleep(0.05)
            time.sleep(randomness.uniform(0, 3 * LAST_S))
            at = time.monotonic()
            process.kill()
        lines = [line.split() for line in log.read_text().splitlines() if line.count(" ") == 1]
        done = sum(float(when) < at - LAST_S for _, when in lines)
        parts = list(folder.glob("t*.jsonl"))
        additions = sum((load(part).calls["op"] == "aten.add.Tensor").sum() for part in parts)
        assert additions >= done, f"{len(lines)} iterations ran"


def rows_kept(folder: Path) -> dict[int, list[dict[str, Any]]]:
    journal = folder / "r.json.journal"
    if (folder / "r.json").exists():
        frame: pd.DataFrame = Results.load(folder / "r.json").frame
        return {int(case): rows.to_dict("records") for case, rows in frame.groupby("case")}
    lines = journal.read_text().splitlines(keepends=True)[1:] if journal.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return {rows[0]["case"]: rows for rows in records}


@pytest.mark.slow
def test_replay_killed_and_resumed_repeatedly_keeps_every_row(
    tmp_path: Path, randomness: random.Random, detector_trace: Path
) -> None:
    options = ["--iterations", "2", "--warmup", "0"]
    command = [program_path("opreplay"), detector_trace, *options, "-o", "r.json", "--resume"]
    medians: dict[int, list[float]] = {}
    kills = whole_runs = 0
    while kills < KILLS:
        kills += killed(command, tmp_path, randomness.uniform(1.5, 6))
        rows = rows_kept(tmp_path)
        assert set(medians) <= set(rows), f"{len(medians)} cases had been measured"
        new_medians = {case: [row["median_us"] for row in of_case] for case, of_case in rows.items()}
        assert all(new_medians[case] == times for case, times in medians.items())
        medians = new_medians
        if (tmp_path / "r.json").exists():
            whole_runs += 1
            assert not (tmp_path / "r.json.journal").exists()
            (tmp_path / "r.json").unlink()
            medians = {}
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    frame = Results.load(tmp_path / "r.json").frame
    assert frame["case"].is_unique
    assert all(frame.set_index("case").loc[case, "median_us"] in times for case, times in medians.items())


def test_every_top_level_package_is_linked_from_the_import_package() -> None:
    for package in PACKAGES:
        link = ROOT / "opgrip" / package
        assert link.is_symlink()
        assert link.resolve() == ROOT / package


def test_public_names_are_loaded_on_first_use() -> None:
    code = "import sys, opgrip; print('torch' in sys.modules, opgrip.__version__)"
    done = run_python("-c", code, fresh=True)
    assert done.stdout.split() == ["False", pyproject()["project"]["version"]]
    for name in opgrip.__all__:
        assert getattr(opgrip, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'no_such'"):
        opgrip.no_such  # noqa: B018


def test_oldest_constraints_equal_the_lower_bounds() -> None:
    project = pyproject()["project"]
    requirements = [*project["dependencies"], *chain(*(project["optional-dependencies"][extra] for extra in EVERYBODY))]
    bounds = dict(text.split(">=") for text in requirements if ">=" in text)
    lines = (ROOT / "constraints-oldest.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert bounds.keys() == pins.keys()
    # a bound of 1.11 allows any 1.11.x
    assert [name for name, bound in bounds.items() if not f"{pins[name]}.".startswith(f"{bound}.")] == []


def test_required_packages_are_installed_by_all_targets() -> None:
    extras = pyproject()["project"]["optional-dependencies"]
    dev = next(requirement for requirement in extras["dev"] if requirement.startswith("opgrip["))
    assert set(EVERYBODY) <= set(re.findall(r"\w+", dev))
    targets = re.findall(r"-e '\.\[([\w,]+)\]'", (ROOT / "Makefile").read_text())
    assert len(targets) > 1
    for installed in targets:
        assert "dev" in installed.split(",") or set(EVERYBODY) <= set(installed.split(","))


def test_missing_packages_are_installed_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    extras = pyproject()["project"]["optional-dependencies"]
    for extra in ("plot", "onnx", "gpu"):
        assert shlex.split(install_command(extra)) == ["pip", "install", *extras[extra]]
    assert set(shlex.split(install_command("tensorflow"))) >= {*extras["xla"], "absl-py"}
    assert install_command("no-such-extra") == ""
    monkeypatch.setattr("opgrip.cli.plugins.requires", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"^no_such is not installed: pip install no_such$"):
        needed("no_such.part", "plot")


TWICE = ("--iterations", "2", "--warmup", "0")
CALL = """
if __name__ == "__main__":
    from opgrip.replay import replay
    results = replay("powers:2", most_us=1, iterations=2, warmup=0)
    print(list(results.frame["op"]), (results.frame["over_us"] >= 0).all())
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    parts = dict.fromkeys(("opgrip.analyses", "opgrip.sources", "opgrip.reports"), "planted_parts")
    return with_package(tmp_path_factory.mktemp("parts"), {**parts, "opgrip.modes": "planted_modes"})


@pytest.mark.slow
def test_plugins_of_another_package_work_together(tmp_path: Path, environment: dict[str, str]) -> None:
    options = (*TWICE, "--mode", "planted-same", "--most-us", "1", "-o", tmp_path / "out.json")
    done = succeed("opreplay", "powers:3", *options, env=environment)
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["most_us"] == 1
    assert [(row["op"], row["mode"]) for row in document["results"]] == [
        (f"pow{number}", mode) for number in range(3) for mode in ("eager", "planted-same")
    ]
    assert all(row["over_us"] == max(0.0, row["median_us"] - 1) for row in document["results"])
    assert "over us" in done.stdout
    assert "of 6 rows are over the budget" in done.stdout


@pytest.mark.slow
def test_result_format_of_a_plugin_is_written(tmp_path: Path, environment: dict[str, str]) -> None:
    options = (*TWICE, "--top", "1", "--most-us", "5", "-o", tmp_path / "out.tally")
    succeed("opreplay", "powers:2", *options, env=environment)
    assert (tmp_path / "out.tally").read_text() == "powers:2 5 pow0\n"


def test_plugin_options_are_in_the_help_and_refused_without_effect(environment: dict[str, str]) -> None:
    shown = run_command("opreplay", "--help-all", env=environment).stdout
    assert "budgets:" in shown
    assert "--most-us US" in shown
    refused = run_command("opreplay", "powers:2", "--tag", "x", env=environment)
    assert (refused.returncode, refused.stderr) == (
        2,
        "opreplay: error: --tag is for samples: leave it out with powers\n",
    )


@pytest.mark.slow
def test_plugin_options_are_keywords_of_replay(tmp_path: Path, environment: dict[str, str]) -> None:
    script = tmp_path / "call.py"
    script.write_text(CALL)
    done = run_python(script, env=environment, fresh=True)
    assert (done.returncode, done.stdout) == (0, "['pow0', 'pow1'] True\n"), done.stderr


@pytest.mark.slow
def test_failing_analysis_loses_no_row(tmp_path: Path, environment: dict[str, str]) -> None:
    output = tmp_path / "out.json"
    options = (*TWICE, "-o", output)
    done = run_command("opreplay", "powers:3", *options, "--most-us", str(FAILS), env=environment)
    assert (done.returncode, output.exists()) == (2, False)
    assert "opreplay: error: no budget is so large: name another" in done.stderr
    again = succeed("opreplay", "powers:3", *options, "--resume", env=environment)
    assert "replaying 0 cases" in again.stderr
    assert len(json.loads(output.read_text())["results"]) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


MADE = [trace.name for trace in read_manifest() if trace.recording is not None]
OF_THE_TOOL = [
    Path(name).name.partition(".jsonl")[0]
    for name in pyproject()["tool"]["setuptools"]["package-data"]["opgrip.traces.zoo"]
    if name.startswith("models/")
]
# Trace of the README's first command, and the baseline times of the zoo's score.
DISTILLED, BASELINE = "traces/zoo_500.jsonl.gz", "traces/zoo/baseline.json.zst"
INSTALLED = """
from opgrip.traces import load
from opgrip.errors import MissingFileError
from opgrip.traces.zoo import read_manifest, zoo_file
for trace in read_manifest():
    try:
        print(trace.name, zoo_file(trace).parent.name)
    except MissingFileError:
        pass
assert len(load("zoo:built-in_faster-rcnn.predict").calls)
"""


def install(source: Path, folder: Path, *options: str) -> None:
    words = (
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
    )
    done = subprocess.run(
        [sys.executable, *words, "--target", folder, *options, source], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def traces_in(folder: Path) -> dict[str, str]:
    env = os.environ | {"PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", INSTALLED], cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return dict(line.split() for line in done.stdout.splitlines())


@pytest.mark.slow
def test_tool_wheel_has_a_few_traces_and_zoo_wheel_has_all(tmp_path: Path) -> None:
    sources, folder = tmp_path / "sources", tmp_path / "installed"
    unwanted = shutil.ignore_patterns(
        ".*", "build", "demo", "dist", "results", "*.egg-info", "__pycache__", "tests", "docs"
    )
    # build in a copy: setuptools leaves its copies in the folder
    shutil.copytree(ROOT, sources, ignore=unwanted)
    install(sources, folder)
    assert sorted(traces_in(folder)) == sorted(OF_THE_TOOL)
    for name in (DISTILLED, BASELINE):
        assert (folder / "opgrip" / name).read_bytes() == (ROOT / name).read_bytes()
    install(sources / "traces" / "zoo" / "models", folder)
    traces = traces_in(folder)
    assert sorted(traces) == sorted(MADE)
    assert {traces[name] for name in MADE if name not in OF_THE_TOOL} <= {"opgrip_zoo"}


def test_both_wheels_have_one_version_and_the_zoo_requires_opgrip() -> None:
    zoo = pyproject(ROOT / "traces" / "zoo" / "models")["project"]
    assert zoo["version"] == pyproject()["project"]["version"]
    assert zoo["dependencies"] == ["opgrip"]


@pytest.mark.slow
def test_files_of_pytest_that_pip_leaves_do_not_hide_an_editable_installation(tmp_path: Path) -> None:
    sources, folder = tmp_path / "sources", tmp_path / "installed"
    for name in ("opgrip", "src"):
        shutil.copytree(ROOT / name, sources / name, symlinks=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    install(sources, folder, "-e")
    # pytest compiles all modules of a package with a plug-in, and pip removes only files that it installed
    compiled = folder / "opgrip" / "__pycache__" / "__init__.cpython-311-pytest-9.2.0.pyc"
    compiled.parent.mkdir(parents=True)
    compiled.touch()
    code = f"import site; site.addsitedir({str(folder)!r}); import opgrip; print(opgrip.__file__)"
    done = subprocess.run([sys.executable, "-ISc", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == str(sources / "src" / "opgrip" / "__init__.py"), done.stderr
