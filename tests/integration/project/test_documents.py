"""Documents: their commands work when typed in order, the notebook runs, and the site builds."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from foreign_data import write_as
from optional import needs
from pasted import PROGRAMS, TRAIN, Pasted, commands_in, has_valid_options, prepare_folder, run_pasted, why_not
from programs import ROOT, run_command, run_python

from opgrip.replay.comparison.results_store import Store
from opgrip.traces import load

sys.path.insert(0, str(ROOT / "tests/support/fuzz"))

from foreign_seeds import BUILDERS

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


DOCUMENT = ROOT / "docs" / "coming-from.md"
GRAPH = """import torch


class GraphModule(torch.nn.Module):
    def forward(self, L_x_: torch.Tensor):
        return (torch.nn.functional.relu(L_x_),)
"""
SPAN = re.compile(r"`([^`]+)`")


def _commands() -> list[Pasted]:
    """Return the commands in the last column of each table."""
    commands = []
    for number, line in enumerate(DOCUMENT.read_text(encoding="utf-8").splitlines(), 1):
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        if line.startswith("| ") and len(cells) == 2 and cells[1] not in {"here", "---"}:
            spans = SPAN.findall(cells[1])
            commands += [Pasted(number, text) for text in spans if text.partition(" ")[0] in PROGRAMS]
    return commands


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create one file of each kind that the commands use."""
    path = tmp_path_factory.mktemp("coming-from")

    def run(*words: str) -> None:
        run_command(*words, cwd=path).check_returncode()

    (path / "train.py").write_text(TRAIN, encoding="utf-8")
    run("opcapture", "-o", "script.jsonl", "--", "train.py")
    trace = load(path / "script.jsonl")
    write_as("tritonbench", trace, path / "inputs.txt")
    write_as("execution_trace", trace, path / "et.json")
    write_as("backendbench", trace, path / "ops.parquet")
    columns = "id,source_neural_network,num_of_calls,parameters"
    parameters = "{'condition': [[8, 4]], 'tensor1': [[8, 4]], 'tensor2': [[8, 4]]}"
    (path / "where.csv").write_text(f'{columns}\n#0,yolact_r50_8x8_coco,12,"{parameters}"\n')
    for table in ("abs.json", "relu.json"):
        (path / table).write_text(json.dumps({"input_size": [[2, 3], [16, 8]]}), encoding="utf-8")
    tensors = [{"type": "tensor", "dtype": "float", "shape": [8, size]} for size in range(1, 6)]
    config = {"torch.add": {"config": [{"input": [{"args": [tensor, tensor], "kwargs": {}} for tensor in tensors]}]}}
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    run("opgrip", "trace", "convert", "script.jsonl", "dataset", "--to", "flashinfer")
    (path / "graph").mkdir()
    (path / "graph" / "model.py").write_text(GRAPH)
    (path / "graph" / "weight_meta.py").write_text(
        'class Program_weight_tensor_meta_L_x_:\n    name = "L_x_"\n    shape = [2, 3]\n'
        '    dtype = "torch.float32"\n    device = "cpu"\n    mean = 0.0\n    std = 1.0\n    data = None\n'
    )
    for name in ("aiter", "tritonparse", "flashinfer"):
        BUILDERS[name](path)
    for name in ("results.json", "again.json"):
        run("opreplay", "script.jsonl", "--iterations", "3", "--top", "3", "-o", name)
    return path


@pytest.mark.parametrize("command", _commands(), ids=lambda pasted: str(pasted.line))
def test_options_of_each_pasted_command_exist(command: Pasted) -> None:
    assert has_valid_options(command)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("command", _commands(), ids=lambda pasted: str(pasted.line))
def test_each_pasted_command_works(command: Pasted, folder: Path, tmp_path: Path) -> None:
    reason = why_not("docs/coming-from.md", command)
    if reason is not None:
        pytest.skip(reason)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    problem = run_pasted(command, tmp_path, tmp_path / "cache")
    assert not problem, problem
    if "--backward" in command.command:
        store = Store(tmp_path / ".runs")
        rows = [row for row in store.runs()[-1].load() if row.direction == "backward"]
        assert any(row.status == "ok" for row in rows), [row.error for row in rows]


NOTEBOOK = ROOT / "docs" / "notebook.ipynb"
PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n").decode()[:10]
OF_A_MACHINE = re.compile(r"(?<![\w.:/])/(?:tmp|home|root|work|usr|opt|var|Users)/")


def outputs_of(notebook: dict[str, Any]) -> list[tuple[str, str, dict[str, str]]]:
    """Return the cell, type and contents by kind of each output."""
    return [
        (cell["id"], output["output_type"], {kind: "".join(data) for kind, data in output.get("data", {}).items()})
        for cell in notebook["cells"]
        for output in cell.get("outputs", ())
    ]


def pictures_in(notebook: dict[str, Any]) -> list[str]:
    """Return the cells that show a plot, as an image or in HTML."""
    return [
        cell
        for cell, _, data in outputs_of(notebook)
        if data.get("image/png", "").startswith(PNG) or f"data:image/png;base64,{PNG}" in data.get("text/html", "")
    ]


def check(notebook: dict[str, Any]) -> None:
    codes = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["execution_count"] for cell in codes)
    # neither errors nor anything printed, such as warnings
    assert {kind for _, kind, _ in outputs_of(notebook)} == {"execute_result"}
    assert len(pictures_in(notebook)) >= 6
    for cell, _, data in outputs_of(notebook):
        output = " ".join(text for kind, text in data.items() if not kind.startswith("image/"))
        assert OF_A_MACHINE.findall(re.sub(r"base64,[\w+/=]*", "", output)) == [], cell


def test_shipped_notebook_has_run_and_shows_its_plots() -> None:
    check(json.loads(NOTEBOOK.read_text(encoding="utf-8")))
    assert NOTEBOOK.stat().st_size < 600_000


@pytest.mark.slow
@needs("nbclient", "nbformat", "ipykernel")
def test_notebook_runs_in_a_kernel(tmp_path: Path) -> None:
    run_python(ROOT / "docs" / "run_notebook.py", tmp_path / "n.ipynb", fresh=True, status=0)
    shipped, notebook = (json.loads(path.read_text(encoding="utf-8")) for path in (NOTEBOOK, tmp_path / "n.ipynb"))
    check(notebook)
    assert pictures_in(notebook) == pictures_in(shipped)
    for name in ("cell_type", "id", "source"):
        assert [cell[name] for cell in notebook["cells"]] == [cell[name] for cell in shipped["cells"]]


# addresses of what a browser loads to show a page
LOADED = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"?((?:https?:)?//[^\s\">]+)|<link\b[^>]*\bhref=\"?((?:https?:)?//[^\s\">]+)"
)


def test_every_page_is_in_the_navigation_once() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    pages = re.findall(r": (\S+\.md)$", navigation, re.MULTILINE)
    documents = [path.name for path in (*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md"))]
    assert sorted(pages) == sorted("index.md" if name == "README.md" else name for name in documents)
    parts = re.findall(r"^  - (.+):$", navigation, re.MULTILINE)
    assert parts == ["Tutorials", "How-to guides", "Reference", "Explanation"]


@pytest.mark.slow
@needs("mkdocs", "material", "mkdocstrings")
def test_site_builds_without_warnings_and_external_resources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    done = run_python("-m", "mkdocs", "build", "--strict", "-f", ROOT / "mkdocs.yml", "-d", tmp_path, fresh=True)
    assert done.returncode == 0, done.stderr
    pages = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.glob("*.html")}
    assert "records the operator calls" in pages["index.html"]
    assert 'href="modes.html"' in pages["index.html"]
    for name in (
        "capture.Capture",
        "replay.replay",
        "replay.Results",
        "replay.benchmark",
        "traces.load",
        "traces.Trace",
    ):
        assert f'id="opgrip.{name}"' in pages["python-api.html"]
    assert {name: found for name, page in pages.items() if (found := LOADED.findall(page))} == {}
    # files outside docs/ that pages link to
    for target in set(re.findall(r'href="?(repository/[^\s">#]+)', "".join(pages.values()))):
        assert os.path.getsize(tmp_path / target) > 0
    assert (tmp_path / "repository/traces/schema.json").read_bytes() == (ROOT / "traces/schema.json").read_bytes()
