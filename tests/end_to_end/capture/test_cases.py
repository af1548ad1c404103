"""Tests of opcapture with programs written after public bug reports, which are not part of this project."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from programs import ROOT, run_python, succeed

PROGRAMS = ROOT.parent / "shared" / "cases" / "programs"
NAMES = ("p07*", "p09*", "p13*", "p15*", "p17*", "p19*", "p25*", "p27*", "p34*", "q07*")
MODES = {
    "plain": "",
    "full": "--values full",
    "last": "--last 100",
    "private": "--private",
    "ahead": "--write-ahead",
    "opaque": "--compiled opaque",
}

pytestmark = [
    pytest.mark.skipif(not PROGRAMS.is_dir(), reason="the programs are not next to this checkout"),
    pytest.mark.slow,
]


@pytest.mark.parametrize(
    ("name", "mode"),
    # the programs of p09* start others, and take 22 s; q07* replays 700 cases
    [(name, mode) for name in NAMES for mode in MODES if name not in ("p09*", "q07*") or mode in ("plain", "full")],
)
def test_program_runs_as_without_a_capture_and_each_call_replays(tmp_path: Path, name: str, mode: str) -> None:
    (program,) = PROGRAMS.glob(f"{name}.py")
    expected = run_python(program, cwd=tmp_path)
    trace, results = tmp_path / "t.jsonl", tmp_path / "r.json"
    done = succeed("opcapture", *MODES[mode].split(), "-o", trace, "--", program, cwd=tmp_path)
    # the prints of ranks mix
    assert (sorted(done.stdout), done.returncode) == (sorted(expected.stdout), expected.returncode)
    if mode == "last":
        # nothing happened to the program that would make it write its last calls
        return
    traces = sorted(tmp_path.glob("t*.jsonl"))
    assert len(traces) == (2 if name == "p09*" else 1)
    rows = []
    for trace in traces:
        succeed("opgrip", "trace", "validate", trace)
        succeed("opreplay", trace, "--iterations", "1", "--warmup", "0", "-f", "-o", results, cwd=tmp_path)
        rows += json.loads(results.read_text())["results"]
    bad = [(row["op"], row["status"], row["error"]) for row in rows if row["status"] not in ("ok", "skipped")]
    assert all(status == "unsupported" and error for _, status, error in bad), bad
    assert not [op for op, _, error in bad if "meta" in error or "not a plain tensor" in error or "torage" in error]
