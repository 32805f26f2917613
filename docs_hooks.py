"""Hooks of `make docs`: rank pages in the search, and put the studio into the site if it is built.

A page marks the place with two comments. Between them is a picture that links to the page of the
studio. It stays where the studio is not built, and where the page is read as plain Markdown:

    <!-- studio -->
    [![The studio](studio/light.png)](studio.md)
    <!-- /studio -->
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

BUILT = Path(__file__).parent / "src" / "penstock" / "studio" / "built"
ADDRESS = "studio/app/"  # in the site
ERRORS_BOOST = 0.2  # of pages with error messages; other pages have 1

_PLACE = re.compile(r"<!-- studio -->\n.*?<!-- /studio -->", re.DOTALL)
_FRAME = """<figure class="studio" markdown="0">
<iframe src="{address}?embed" title="The studio" loading="lazy"></iframe>
<figcaption>This is the <a href="{address}">studio</a>. It loads Python (14 MB, from this site)
when you use it.</figcaption>
</figure>"""


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Replace the picture of the studio by the studio itself, and rank the page in the search."""
    # The headings of these pages are error messages, which contain most words that users search.
    if page.file.src_uri.startswith("restrictions/"):
        page.meta["search"] = {"boost": ERRORS_BOOST}
    if not is_built():
        return markdown
    return _PLACE.sub(_FRAME.format(address=get_relative_url(ADDRESS, page.url)), markdown)


def on_post_build(*, config: MkDocsConfig, **_: Any) -> None:
    """Copy the studio into the site."""
    if is_built():
        shutil.copytree(BUILT, Path(config.site_dir) / ADDRESS, dirs_exist_ok=True)


def is_built() -> bool:
    """Return whether there is a studio to copy."""
    return (BUILT / "pyodide").is_dir()
