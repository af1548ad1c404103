"""The shipped notebook: it runs, has its output, and contains no details of the machine that it ran on."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest
from optional import needs
from programs import ROOT, run_python

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
