"""Tests that the commands in the documents work when typed in order in an empty folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from pasted import commands_in, has_valid_options, prepare_folder, run_pasted, why_not
from programs import ROOT

DOCUMENTS = [
    name
    for name in ("README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
    if commands_in((ROOT / name).read_text(encoding="utf-8"))
]
MEASURES = ("docs/ci.md",)  # documents whose commands fail if other processes use the cores


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache folder for measurements of the machine, shared by all documents."""
    folder = tmp_path_factory.getbasetemp()
    return (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "pasted-cache"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.alone if name in MEASURES else ()) for name in DOCUMENTS]
)
def test_commands_of_a_document_run_in_order(name: str, tmp_path: Path, cache: Path, detector_trace: Path) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    prepare_folder(tmp_path, name, text, detector_trace)
    problems, passed_over = [], []
    for pasted in commands_in(text):
        reason = why_not(name, pasted)
        if reason is not None:
            passed_over.append(f"line {pasted.line}: {reason}")
        elif problem := run_pasted(pasted, tmp_path, cache):
            problems.append(problem)
    assert not problems, "\n\n".join(problems)
    if len(passed_over) == len(commands_in(text)):
        pytest.skip("; ".join(passed_over))


@pytest.mark.parametrize("name", DOCUMENTS)
def test_commands_of_a_document_have_existing_options(name: str) -> None:
    commands = commands_in((ROOT / name).read_text(encoding="utf-8"))
    assert [pasted.command for pasted in commands if not has_valid_options(pasted)] == []


def test_first_readme_commands_run(tmp_path: Path, cache: Path, detector_trace: Path) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    prepare_folder(tmp_path, "README.md", text, detector_trace)
    commands = [pasted for pasted in commands_in(text) if pasted.command.startswith("opcapture -o")]
    assert commands
    assert [run_pasted(pasted, tmp_path, cache) for pasted in commands] == [""] * len(commands)
