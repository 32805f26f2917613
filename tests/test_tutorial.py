"""The tutorial: its notebook runs, has current outputs, and becomes a page of the docs."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.tutorial import NOTEBOOK, read_notebook, run_notebook

ROOT = Path(__file__).parents[1]


def forms_of(cell: Any) -> list[str]:
    """Return the forms in which a cell shows its results, without warnings and empty outputs."""
    shown = []
    for output in cell.outputs:
        if output.output_type in ("display_data", "execute_result"):
            shown += [kind for kind, content in output.data.items() if content]
    return sorted(shown)


def test_tutorial_notebook_runs_and_shows_what_is_stored(tmp_path: Path) -> None:
    for library in (
        "nbclient",
        "nbformat",
        "ipykernel",
        "matplotlib",
        "transformers",
        "accelerate",
    ):
        pytest.importorskip(library, reason=f"the tutorial runs with {library}")
    stored = [cell for cell in read_notebook().cells if cell.cell_type == "code"]
    found = [cell for cell in run_notebook(tmp_path).cells if cell.cell_type == "code"]
    for cell, expected in zip(found, stored, strict=True):
        assert forms_of(cell) == forms_of(expected), cell.source
    outputs = "\n".join(json.dumps(cell.outputs) for cell in found)
    [difference] = re.findall(r"largest difference between the two curves: ([\d.e+-]+)", outputs)
    assert float(difference) < 1e-4
    assert "Report(equal in all 2 runs" in outputs
    assert "PictureFigure" in outputs


def test_tutorial_is_stored_with_outputs_and_without_paths() -> None:
    text = NOTEBOOK.read_text(encoding="utf-8")
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 5
    assert not any(output["output_type"] == "error" for output in outputs)
    assert "site-packages" not in text
    assert len(text) < 1_000_000
    wide = [line for cell in cells for line in "".join(cell["source"]).splitlines()]
    assert max(map(len, wide)) <= 84  # as all code of the docs


def test_notebook_becomes_a_page_with_its_outputs() -> None:
    pytest.importorskip("mkdocs", reason="the pages of the docs are made with mkdocs")
    spec = importlib.util.spec_from_file_location("docs_notebooks", ROOT / "docs_notebooks.py")
    assert spec is not None
    assert spec.loader is not None
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    stored = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    page = hook.notebook_as_markdown(stored)
    assert page.startswith("# From data to plot\n")
    assert page.count("```python\n") == sum(c["cell_type"] == "code" for c in stored["cells"])
    assert "data:image/svg+xml;base64," in page
    assert "data:image/png;base64," in page
    assert "<div class='penstock'>" in page
    # Blank lines would end an HTML element for Markdown.
    for element in re.findall(r'<div class="notebook-output".*?\n</div>\n</div>', page, re.DOTALL):
        assert "\n\n" not in element
    for target in re.findall(r"\]\(([\w/-]+\.md)\)", page):
        assert (NOTEBOOK.parent / target).exists(), target
    assert "tutorial.ipynb" in (ROOT / "mkdocs.yml").read_text()
