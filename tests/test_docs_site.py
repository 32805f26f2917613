"""Readers find their way: navigation, three clicks from the front page, and words of a search.

These tests read the Markdown files. `make docs` builds the site, and fails on dead links.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

pytest.importorskip("mkdocs", reason="the pages of the docs are made with mkdocs")

import docs_hooks
import yaml  # type: ignore[import-untyped]
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.pages import Page

from tests.test_docs import DOCS, blocks_of

PAGES = {str(page.relative_to(DOCS)): page.read_text() for page in sorted(DOCS.rglob("*.md"))}
CONFIG = yaml.safe_load((DOCS.parent / "mkdocs.yml").read_text())
NAVIGATION = (DOCS.parent / "mkdocs.yml").read_text().split("\nnav:\n")[1]
SEARCH = next(plugin["search"] for plugin in CONFIG["plugins"] if "search" in plugin)
SEPARATOR = SEARCH["separator"]  # of words in the search
COLUMNS = 84  # of code, in the column of a page


def links_of(page: str) -> Iterator[str]:
    """Yield the pages, and the sections `page#heading`, that the text of a page links to."""
    for target, anchor in re.findall(r"\]\(([^)#:\s]*\.md)?(#[\w-]+)?\)", PAGES[page]):
        path = (DOCS / page).parent / target if target else DOCS / page
        name = str(path.resolve().relative_to(DOCS.resolve()))
        if name in PAGES:
            yield name
            yield name + anchor


def within_clicks(start: str, clicks: int) -> set[str]:
    """Return the pages and sections that links lead to from a page, without the navigation."""
    found = {start}
    for _ in range(clicks):
        pages = {target.partition("#")[0] for target in found}
        found |= {target for page in pages for target in links_of(page)}
    return found


# ---- three clicks -------------------------------------------------------------------------

# What a reader looks for: the page or section that answers, and words that stand there.
ANSWERS = {
    "how to install": ("install.md", ("pip install", "2.10 or newer")),
    "how to pipeline a Hugging Face model": ("hugging-face.md", ("AutoModel", "Pipe(model")),
    "which schedule to take": ("which-schedule.md", ("Start with `1f1b`", "little memory")),
    "what to do when memory runs out": (
        "recipes/out-of-memory.md",
        ("CUDA out of memory", "More chunks", "Recomputation"),
    ),
    "how to resume a run on fewer GPUs": ("recipes/resume.md", ("pipe.load(", "fewer GPUs")),
    "every argument of Pipe": ("reference/pipe.md", ("::: penstock.Pipe",)),
}


@pytest.mark.parametrize("question", ANSWERS)
def test_docs_answer_is_within_three_clicks_of_the_front_page(question: str) -> None:
    page, words = ANSWERS[question]
    assert page in within_clicks("index.md", 3)
    assert page in NAVIGATION
    assert all(word in PAGES[page] for word in words)


def test_docs_install_command_is_at_the_top_of_the_front_page() -> None:
    first_screen = PAGES["index.md"].splitlines()[:20]
    assert any("pip install" in line for line in first_screen)


def test_docs_navigation_has_every_page_in_five_groups() -> None:
    assert re.findall(r"^  - (\w+):$", NAVIGATION, re.MULTILINE) == [
        "Start",
        "Use",
        "Check",
        "Reference",
        "Inside",
    ]
    assert sorted(re.findall(r"([\w/-]+\.md)", NAVIGATION)) == sorted(PAGES)


LONGEST = 150  # lines of a page with error messages: two or three screens


def test_docs_pages_of_error_messages_are_short() -> None:
    pages = {page: text for page, text in PAGES.items() if page.startswith("restrictions/")}
    assert len(pages) >= 20
    assert {page: n for page, text in pages.items() if (n := text.count("\n")) > LONGEST} == {}
    assert set(pages) <= within_clicks("restrictions.md", 1)


# ---- search -------------------------------------------------------------------------------

# Words that users type into the search, each with a page that should turn up.
SEARCHED = {
    "accumulation": "recipes/index.md",
    "accumulate gradients": "recipes/training.md",
    "activation checkpointing": "glossary.md",
    "adapters": "hugging-face.md",
    "autocast": "guide/training.md",
    "balance": "guide/cutting.md",
    "batchnorm": "guide/layers.md",
    "bubble": "glossary.md",
    "checkpoint": "checkpoints.md",
    "clip": "recipes/training.md",
    "compile": "guide/layers.md",
    "cuda graph": "graph.md",
    "data parallel": "glossary.md",
    "ddp": "guide/wrapping.md",
    "deadlock": "how-it-works.md",
    "debug": "guide/looking.md",
    "device_map": "recipes/device-map.md",
    "dropout": "guide/layers.md",
    "ema": "recipes/training.md",
    "error": "restrictions.md",
    "fairscale": "compatibility.md",
    "fsdp": "recipes/training.md",
    "generate": "recipes/generation.md",
    "gpipe": "which-schedule.md",
    "gradient checkpointing": "glossary.md",
    "hang": "processes/failures.md",
    "inference": "guide/training.md",
    "install": "install.md",
    "interleaved": "which-schedule.md",
    "jupyter": "recipes/notebooks.md",
    "learning-rate": "recipes/training.md",
    "logging": "recipes/index.md",
    "lora": "hugging-face.md",
    "micro-batch": "guide/inputs.md",
    "mixed precision": "recipes/training.md",
    "multi-node": "processes/hosts.md",
    "nccl": "processes.md",
    "notebook": "recipes/notebooks.md",
    "oom": "recipes/out-of-memory.md",
    "out of memory": "recipes/out-of-memory.md",
    "perfetto": "guide/looking.md",
    "preempted": "processes/failures.md",
    "profile": "guide/looking.md",
    "progress bar": "recipes/logging.md",
    "recomputation": "guide/schedules.md",
    "resume": "recipes/resume.md",
    "safetensors": "checkpoints.md",
    "slurm": "processes/hosts.md",
    "scheduler": "recipes/training.md",
    "tensorboard": "recipes/logging.md",
    "tied weights": "guide/layers.md",
    "tqdm": "recipes/logging.md",
    "torchgpipe": "compatibility.md",
    "torchrun": "processes.md",
    "transformers": "hugging-face.md",
    "u-net": "your-model.md",
    "wandb": "recipes/training.md",
    "zero bubble": "glossary.md",
}


@pytest.mark.parametrize("words", SEARCHED)
def test_docs_search_finds_a_page_for_words_that_users_type(words: str) -> None:
    """The search splits a page into words, and finds those that begin like the typed ones."""
    text = re.sub(r"[`*|#]", " ", PAGES[SEARCHED[words]]).lower()
    found = re.split(SEPARATOR, text)
    for word in re.split(SEPARATOR, words):
        assert any(token.startswith(word) for token in found), word


def test_docs_search_words_are_forty_or_more() -> None:
    assert len(SEARCHED) >= 40


# ---- the studio in a page ----------------------------------------------------------------


def test_docs_show_the_studio_where_it_is_built_and_its_picture_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = PAGES["which-schedule.md"]
    file = SimpleNamespace(src_uri="which-schedule.md")
    page = cast(Page, SimpleNamespace(url="which-schedule/", file=file))
    monkeypatch.setattr(docs_hooks, "BUILT", tmp_path / "built")
    assert docs_hooks.on_page_markdown(source, page=page) == source
    (tmp_path / "built" / "pyodide").mkdir(parents=True)
    (tmp_path / "built" / "index.html").write_text("the studio")
    with_studio = docs_hooks.on_page_markdown(source, page=page)
    assert '<iframe src="../studio/app/?embed"' in with_studio
    assert "studio/light.png" not in with_studio
    site = cast(MkDocsConfig, SimpleNamespace(site_dir=str(tmp_path / "site")))
    docs_hooks.on_post_build(config=site)
    assert (tmp_path / "site" / "studio" / "app" / "index.html").read_text() == "the studio"


# ---- code on the pages --------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_docs_code_is_not_cut_off_at_the_edge(page: str) -> None:
    """Code and commands have at most 84 columns. Output is as wide as it is printed."""
    for block in blocks_of(Path(DOCS / page)):
        if block.language in ("python", "py", "bash"):
            wide = [line for line in block.text.splitlines() if len(line) > COLUMNS]
            assert wide == []
