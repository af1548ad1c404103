"""Samples under opreplay, run as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from optional import optional
from programs import run_command

from opgrip.replay.reports.cells import load_results
from opgrip.samples import samples


def rows_of(output: Path, *words: str) -> pd.DataFrame:
    done = run_command("opreplay", *words, "-o", output)
    assert done.returncode == 0, done.stderr
    return load_results(output)


def test_a_sample_runs_in_each_configuration(tmp_path: Path) -> None:
    rows = rows_of(tmp_path / "rows.json", "samples/bbox2delta", "--mode", "jit,compile:aot_eager")
    assert len(rows) == 3 * len(samples()["bbox2delta"].configurations)
    assert set(rows["op"]) == {"bbox2delta"}
    assert set(rows["status"]) == {"ok"}
    assert set(rows["cache"]) == {"warm"}


def test_its_jax_implementation_is_a_mode(tmp_path: Path) -> None:
    optional("jax")
    rows = rows_of(tmp_path / "rows.json", "samples/bbox2delta", "--mode", "jax")
    assert rows[rows["mode"] == "jax"]["status"].tolist() == ["ok"] * 2


def test_calls_of_a_trace_have_no_jax_implementation(detector_trace: Path, tmp_path: Path) -> None:
    optional("jax")
    rows = rows_of(tmp_path / "rows.json", str(detector_trace), "--top", "1", "--mode", "jax")
    assert rows["status"].tolist() == ["ok", "unsupported"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("samples/xyzzy", "there is no sample 'xyzzy': opgrip samples list shows all"),
        ("samples --tag Fast", "there is no tag 'Fast': there are ForLoop, "),
        ("samples --op no_such", "samples holds no sample of these names and tags: "),
        ("samples --module x", "--module is for traces: "),
        ("samples --cache program", "samples stand in no program that --cache program could follow: "),
        ("some.jsonl --tag Reduce", "--tag is for samples: "),
    ],
)
def test_what_does_not_go_together_is_one_line(words: str, told: str) -> None:
    done = run_command("opreplay", *words.split())
    assert done.returncode == 2
    assert done.stderr.startswith(f"opreplay: error: {told}")
    assert done.stderr.count("\n") == 1


def test_an_interrupted_replay_of_samples_can_be_taken_up(tmp_path: Path) -> None:
    output = tmp_path / "rows.json"
    rows_of(output, "samples/bbox2delta")
    done = run_command("opreplay", "samples/bbox2delta", "-o", output, "--resume")
    assert "is whole" in done.stderr


def test_a_sample_whose_calls_are_an_ordinary_trace_is_told_in_one_line(tmp_path: Path, tiny_trace: Path) -> None:
    folder = tmp_path / "x"
    folder.mkdir()
    (folder / "code.py").write_text("def f(x):\n    return x\n", encoding="utf-8")
    about = {"name": "x", "entry": "f", "file": "code.py", "classes": {}, "source": {"module": "m", "qualname": "f"}}
    (folder / "sample.json").write_text(json.dumps(about), encoding="utf-8")
    (folder / "calls.jsonl").write_bytes(tiny_trace.read_bytes())
    done = run_command("opreplay", "x", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("opreplay: error: x holds no sample")
