"""The tutorial: run its notebook, and rewrite it with the outputs of this machine.

`python -m tests.tutorial` runs `docs/tutorial.ipynb` and stores text, tables and pictures in it,
which `make docs` shows. Run it after a change of the notebook or of what it shows.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

NOTEBOOK = Path(__file__).parents[1] / "docs" / "tutorial.ipynb"
SECONDS = 300  # for one cell, on a machine that does much else


def read_notebook() -> Any:
    """Return the notebook as it is stored."""
    import nbformat

    return nbformat.read(NOTEBOOK, as_version=4)


def run_notebook(folder: Path) -> Any:
    """Return the notebook with the outputs of a run. Raise if a cell does."""
    from nbclient import NotebookClient

    notebook = read_notebook()
    resources = {"metadata": {"path": str(folder)}}
    # The kernel is a process of its own. It must find the same source and the same programs.
    paths = os.pathsep.join(filter(None, sys.path))
    with patch.dict(os.environ, PYTHONPATH=paths, IPYTHONDIR=str(folder), CI="1"):
        client = NotebookClient(
            notebook, timeout=SECONDS, kernel_name="python3", resources=resources
        )
        client.execute()
    return notebook


def main() -> None:
    """Run the notebook and store it with its outputs."""
    import nbformat

    with tempfile.TemporaryDirectory() as folder:
        notebook = run_notebook(Path(folder))
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # the times of each cell
        if cell.cell_type == "code":  # without warnings, which have the paths of this machine
            cell.outputs = [o for o in cell.outputs if o.get("name") != "stderr"]
    notebook.metadata.language_info = {"name": "python"}
    nbformat.write(notebook, NOTEBOOK)


if __name__ == "__main__":
    main()
