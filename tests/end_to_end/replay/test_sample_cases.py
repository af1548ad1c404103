"""Samples under opreplay, run as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from optional import optional
from programs import refusal, run_command, run_python, succeed

from opgrip.replay import Results
from opgrip.replay.cases.sources.samples import sample_cases
from opgrip.samples import samples

FAST = ("--iterations", "1", "--warmup", "0")


def rows_of(output: Path, *words: str, status: int = 0) -> pd.DataFrame:
    done = run_command("opreplay", *words, "-o", output)
    assert done.returncode == status, done.stderr
    return Results.load(output).frame


@pytest.mark.slow
def test_sample_runs_in_each_configuration(tmp_path: Path) -> None:
    rows = rows_of(tmp_path / "rows.json", "sample:bbox2delta", *FAST, "--mode", "jit")
    assert len(rows) == 2 * len(samples()["bbox2delta"].configurations)
    assert set(rows["op"]) == {"bbox2delta"}
    assert set(rows["status"]) == {"ok"}
    assert set(rows["cache"]) == {"warm"}
    words = ("sample:bbox2delta", *FAST, "--mode", "jit", "-o", tmp_path / "rows.json", "--resume")
    assert "is complete" in run_command("opreplay", *words).stderr


def test_jax_implementation_of_a_sample_is_a_mode(tmp_path: Path) -> None:
    optional("jax")
    rows = rows_of(tmp_path / "rows.json", "sample:bbox2delta", "--mode", "jax")
    assert rows[rows["mode"] == "jax"]["status"].tolist() == ["ok"] * 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("samples/xyzzy", "unknown sample 'xyzzy': opgrip samples list shows all"),
        ("sample:nosuch", "unknown sample 'nosuch': opgrip samples list shows all"),
        ("sample:bbox2dlta", "unknown sample 'bbox2dlta': did you mean bbox2delta"),
        ("samples --tag Fast", "unknown tag 'Fast': choose from ForLoop, "),
        ("samples --op no_such", "no sample matches --op no_such: similar names in samples are "),
        ("samples --module x", "--module is for traces: "),
        ("samples --cache program", "--cache program needs a trace of a program, which samples is not: "),
        ("some.jsonl --tag Reduce", "--tag is for samples: "),
    ],
)
def test_incompatible_sample_options_are_reported_in_one_line(words: str, message: str) -> None:
    error = refusal("opreplay", *words.split(), in_one_line=True)
    assert error.startswith(f"opreplay: error: {message}")


@pytest.fixture(scope="module")
def folder_of_samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a folder with a gripped function of the same name as a shipped sample."""
    folder = tmp_path_factory.mktemp("gripped")
    text = (
        "import torch\nfrom opgrip import grip\n\n\n@grip(to='samples')\ndef nms(boxes):\n    return boxes.sin()\n\n\n"
    )
    (folder / "uses.py").write_text(f"{text}nms(torch.ones(3))\n")
    run_python("uses.py", cwd=folder, status=0)
    return folder


@pytest.mark.slow
def test_shipped_sample_has_a_name_that_no_folder_hides(folder_of_samples: Path) -> None:
    shipped = succeed("opreplay", "sample:nms", *FAST, "-o", "shipped.json", cwd=folder_of_samples)
    assert "folder" not in shipped.stderr
    assert len(Results.load(folder_of_samples / "shipped.json")) == len(samples()["nms"].configurations)


@pytest.mark.slow
def test_folder_that_hides_a_shipped_sample_is_reported(folder_of_samples: Path) -> None:
    local = succeed("opreplay", "samples/nms", *FAST, "-o", "local.json", cwd=folder_of_samples)
    notice = "opreplay: samples/nms is read as the local folder; the shipped sample of that name is sample:nms\n"
    assert notice in local.stderr
    assert len(Results.load(folder_of_samples / "local.json")) == 1


@pytest.mark.slow
def test_samples_means_shipped_samples_plus_those_of_the_folder(
    folder_of_samples: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder_of_samples)
    with pytest.warns(UserWarning, match="contains 1 sample, which run in addition"):
        cases = sample_cases("samples", ["nms"])
    assert len(cases) == len(samples()["nms"].configurations) + 1


def test_folder_with_an_ordinary_trace_is_refused_as_a_sample(tmp_path: Path, tiny_trace: Path) -> None:
    folder = tmp_path / "x"
    folder.mkdir()
    (folder / "code.py").write_text("def f(x):\n    return x\n", encoding="utf-8")
    about = {"name": "x", "entry": "f", "file": "code.py", "classes": {}, "source": {"module": "m", "qualname": "f"}}
    (folder / "sample.json").write_text(json.dumps(about), encoding="utf-8")
    (folder / "calls.jsonl").write_bytes(tiny_trace.read_bytes())
    error = refusal("opreplay", "x", cwd=tmp_path, in_one_line=True)
    hint = "name a folder that opgrip grip wrote, or replay x/calls.jsonl as a trace"
    assert error == f"opreplay: error: x contains no sample with recorded calls: {hint}\n"
