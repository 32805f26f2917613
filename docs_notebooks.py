"""A hook of `make docs`: notebooks as pages.

A notebook is stored with its outputs. Its page has its cells as Markdown and code, and below each
cell what it has shown: text, tables and pictures. Navigation and links name the notebook itself.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files


class NotebookFile(File):
    """A notebook that is a page, as a Markdown file is one."""

    def is_documentation_page(self) -> bool:
        """Return True: it has a page of its own."""
        return True

    @property
    def content_string(self) -> str:
        """The notebook as Markdown."""
        assert self.abs_src_path is not None
        return notebook_as_markdown(json.loads(Path(self.abs_src_path).read_text(encoding="utf-8")))


def on_files(files: Files, config: Any) -> Files:
    """Make a page of each notebook. MkDocs calls this when it has listed the files of the docs."""
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        page = NotebookFile(
            file.src_uri, config.docs_dir, config.site_dir, config.use_directory_urls
        )
        files.remove(file)
        files.append(page)
    return files


def notebook_as_markdown(notebook: Mapping[str, Any]) -> str:
    """Return the cells of a notebook and their outputs as Markdown."""
    blocks: list[str] = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            blocks.append(source)
        elif cell["cell_type"] == "code":
            blocks.append(f"```python\n{source}\n```")
            blocks += (block for output in cell["outputs"] for block in _show(output))
    return "\n\n".join(blocks) + "\n"


def _show(output: Mapping[str, Any]) -> Iterator[str]:
    """Yield an output of a cell as Markdown, in the richest form that a page can show."""
    if output["output_type"] == "stream":
        yield f"```text\n{''.join(output['text']).rstrip()}\n```"
        return
    forms = {kind: "".join(text) for kind, text in output.get("data", {}).items()}
    if page := forms.get("text/html"):
        # An element without blank lines, which would end it for Markdown.
        lines = "\n".join(line for line in page.splitlines() if line.strip())
        yield f'<div class="notebook-output" data-search-exclude>\n{lines}\n</div>'
    elif picture := forms.get("image/svg+xml"):
        # As an image, so that styles and ids of one picture do not reach another.
        data = b64encode(picture.encode()).decode()
        yield f'<img class="notebook-output" alt="" src="data:image/svg+xml;base64,{data}">'
    elif data := forms.get("image/png"):
        compact = "".join(data.split())
        yield f'<img class="notebook-output" alt="" src="data:image/png;base64,{compact}">'
    elif text := forms.get("text/plain"):
        yield f"```text\n{text}\n```"
