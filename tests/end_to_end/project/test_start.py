"""Start of the commands, which is fast if they have nothing to run."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from importlib import metadata

import pytest
from programs import program_path, run_python, succeed

from opgrip.tools.verbs import verbs

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
