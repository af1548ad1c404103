"""Run docs/notebook.ipynb in a new kernel of this environment, in an empty folder, and keep the outputs.

python docs/run_notebook.py      # writes docs/notebook.ipynb, or the file given as argument
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
"""time limit of a cell"""
FACTS = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
"""notebook metadata, without the version of Python"""


def main() -> None:
    """Write the notebook with its outputs."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else NOTEBOOK
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    with TemporaryDirectory() as folder:
        # leave out the user's kernel start-up files
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
    """Remove machine-specific and temporary data: folders, versions, cell times."""
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
