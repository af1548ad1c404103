"""Runs docs/notebook.ipynb anew in a kernel of this environment, in a fresh folder, and keeps what its cells show.

python docs/run_notebook.py      # writes docs/notebook.ipynb; another file where one is named
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).with_name("notebook.ipynb")
SECONDS = 600
"""That a cell may take."""
FACTS = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
"""Of the notebook, how it is run; not by which version of Python."""


def main() -> None:
    """Write the notebook with its outputs."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else NOTEBOOK
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    with TemporaryDirectory() as folder:
        # what this user's kernels start with is no part of it
        os.environ.update(IPYTHONDIR=f"{folder}/ipython", JUPYTER_CONFIG_DIR=f"{folder}/jupyter", OPGRIP_STORE="")
        work = Path(folder) / "work"
        work.mkdir()
        client = NotebookClient(
            notebook, timeout=SECONDS, kernel_name="python3", resources={"metadata": {"path": str(work)}}
        )
        client.execute()
        places = {str(Path(folder).resolve()), folder, str(Path.home()), str(NOTEBOOK.parents[1]), sys.prefix}
    clean(notebook, places)
    nbformat.validate(notebook)
    nbformat.write(notebook, path)


def clean(notebook: Any, places: set[str]) -> None:
    """Take out what is of this machine and this hour: folders, versions, times of cells."""
    notebook.metadata = nbformat.from_dict(FACTS)
    pattern = re.compile("|".join(re.escape(place) + "/?" for place in sorted(places, key=len, reverse=True)))
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
        cell.metadata = nbformat.NotebookNode()
        for output in cell.get("outputs", ()):
            if "text" in output:
                output.text = pattern.sub("", output.text)
            for kind, data in output.get("data", {}).items():
                if isinstance(data, str) and not kind.startswith("image/"):
                    output.data[kind] = pattern.sub("", data)


if __name__ == "__main__":
    main()
