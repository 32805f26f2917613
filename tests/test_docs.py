"""The code blocks of the README and the docs run, and print what the pages quote.

python    runs, page by page, from top to bottom in one namespace
py        the same, in two processes that form a process group
output    after one of these: what it prints (rank 0), where `...` matches anything
console   `$ penstock ...` runs, and prints the lines below it
bash      its programs and make targets exist
text      is not checked
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import sys
import tomllib
from collections.abc import Iterator
from contextlib import chdir, redirect_stdout
from doctest import ELLIPSIS, OutputChecker
from io import StringIO
from itertools import pairwise
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple

import pytest
import torch

from penstock import cli, errors
from tests.distributed.ranks import ranks

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^(?P=indent)```$",
    re.DOTALL | re.MULTILINE,
)
SLOW = {"demo", "gallery"}  # commands with separate tests
# Folders whose error messages a user of a pipe may see.
FOLDERS = (
    "data_parallel",
    "stage",
    "device",
    "model",
    "model/traced",
    "runtime",
    "runtime/audit",
    "runtime/cuda_graph",
    "runtime/distributed",
    "runtime/distributed/failure",
    "checkpoint",
)


class Block(NamedTuple):
    """The text between two fences, and the line on which it starts."""

    language: str
    line: int
    text: str


def blocks_of(page: Path) -> list[Block]:
    whole = page.read_text()
    return [
        Block(found["language"], whole.count("\n", 0, found.start("text")), dedent(found["text"]))
        for found in FENCE.finditer(whole)
    ]


def with_blocks(*languages: str) -> pytest.MarkDecorator:
    """Parametrize a test over the pages that have blocks in these languages."""
    pages = [p for p in PAGES if any(block.language in languages for block in blocks_of(p))]
    return pytest.mark.parametrize("page", pages, ids=lambda page: str(page.relative_to(ROOT)))


def agrees(quoted: str, printed: str) -> bool:
    return OutputChecker().check_output(quoted.strip("\n"), printed.strip("\n"), ELLIPSIS)


@pytest.fixture(autouse=True)
def _isolated_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Provide an empty directory and a terminal of 80 columns; restore torch's settings after."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for variable in ("FORCE_COLOR", "TTY_COMPATIBLE", "GITHUB_ACTIONS"):
        monkeypatch.delenv(variable, raising=False)
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        yield
    torch.set_num_threads(threads)


# ---- python -------------------------------------------------------------------------------


def printed_by(page: Path, language: str) -> list[str]:
    """Run the blocks of a page in one namespace, and return what each of them prints."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    printed = []
    for block in (block for block in blocks_of(page) if block.language == language):
        with redirect_stdout(StringIO()) as out:
            exec(compile("\n" * block.line + block.text, str(page), "exec"), namespace)
        printed.append(out.getvalue())
    return printed


def check_quotes(page: Path, language: str, printed: list[str]) -> None:
    """Check that each block has printed the output quoted after it."""
    texts = iter(printed)
    for block, after in pairwise([*blocks_of(page), Block("", 0, "")]):
        text = next(texts) if block.language == language else ""
        if block.language == language and after.language == "output":
            assert agrees(after.text, text), f"{page.name}, line {after.line}:\n{text}"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # raised by dcp.load
@with_blocks("python")
def test_docs_python_blocks_print_what_is_quoted(page: Path, tmp_path: Path) -> None:
    """The picture next to a page must also be the one that the code of the page writes."""
    check_quotes(page, "python", printed_by(page, "python"))
    picture = page.with_suffix(".svg")
    if picture.exists():
        assert (tmp_path / picture.name).read_bytes() == picture.read_bytes(), picture.name


def printed_on_a_rank(folder: Path, page: Path) -> list[str]:
    with chdir(folder):
        return printed_by(page, "py")


@with_blocks("py")
def test_docs_py_blocks_run_on_two_ranks(page: Path, tmp_path: Path) -> None:
    first, _ = ranks(2).run(printed_on_a_rank, tmp_path, page)
    check_quotes(page, "py", first)


def test_docs_output_blocks_follow_code() -> None:
    for page in PAGES:
        languages = [block.language for block in blocks_of(page)]
        for before, language in zip(["", *languages], languages, strict=False):
            assert language != "output" or before in ("python", "py"), page


# ---- commands -----------------------------------------------------------------------------


class Command(NamedTuple):
    words: list[str]
    quoted: str  # the output quoted on the page; empty if there is none


def commands_of(block: Block) -> Iterator[Command]:
    """Yield the commands after a `$`, or each line of a bash block, without comments."""
    if block.language == "bash":
        lines = block.text.replace("\\\n", " ").splitlines()
        yield from (Command(shlex.split(line, comments=True), "") for line in lines)
        return
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        line, _, quoted = part.partition("\n")
        yield Command(shlex.split(line, comments=True), quoted)


@with_blocks("console")
def test_docs_commands_print_what_is_quoted(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = [block for block in blocks_of(page) if block.language == "console"]
    for words, quoted in (command for block in blocks for command in commands_of(block)):
        if words[0] != "penstock" or words[1] in SLOW:
            continue
        monkeypatch.setattr(sys, "argv", words)
        with redirect_stdout(StringIO()) as out, pytest.raises(SystemExit) as end:
            cli.main()
        assert end.value.code in ((0, None, 1) if quoted else (0, None)), words
        assert not quoted or agrees(quoted, out.getvalue()), out.getvalue()


@with_blocks("bash", "console")
def test_docs_programs_and_make_targets_exist(page: Path) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    known = {c.name or getattr(c.callback, "__name__", "") for c in cli.app.registered_commands}
    # The scripts of this package are not on the path where it is imported without being installed.
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    shown = [b for b in blocks_of(page) if b.language in ("bash", "console")]
    for words, _ in (command for block in shown for command in commands_of(block)):
        while words and re.fullmatch(r"\w+=.*", words[0]):
            words = words[1:]
        if not words:
            continue
        assert words[0] in (".", "cd", *scripts) or shutil.which(words[0], path=path), words
        if words[0] == "make":
            assert set(words[1:]) <= set(targets), words
        if words[0] == "penstock":
            assert words[1] in known, words
        files = [word for word in words if re.fullmatch(r"(examples|benchmarks)/\S+", word)]
        assert all((ROOT / file).exists() for file in files), words


# ---- links, pictures, restrictions, layout ------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_docs_links_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)[^)]*\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_docs_pictures_belong_to_pages_with_code() -> None:
    """The code of a page draws its picture."""
    pictures = sorted(DOCS.glob("*.svg"))
    assert pictures
    for picture in pictures:
        assert any(block.language == "python" for block in blocks_of(picture.with_suffix(".md")))


def errors_of(source: Path) -> Iterator[list[str]]:
    """Yield the literal pieces of the message of each error that a module raises."""
    ours = {name for name, kind in vars(errors).items() if isinstance(kind, type)}
    makers = {*ours, "CaptureError", "RuntimeError", "TypeError", "ValueError", "warn"}
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Call) and node.args:
            maker = getattr(node.func, "id", getattr(node.func, "attr", ""))
            message = node.args[0]
            if maker in makers and isinstance(message, ast.Constant | ast.JoinedStr):
                pieces = message.values if isinstance(message, ast.JoinedStr) else [message]
                literal = [str(p.value) for p in pieces if isinstance(p, ast.Constant)]
                if literal:  # otherwise it forwards the message of another error
                    yield literal


def test_docs_restrictions_list_every_error_message() -> None:
    source = ROOT / "src" / "penstock"
    names = ("pipe", "config", "microbatch", "schedules/registry")
    files = [source / f"{name}.py" for name in names]
    for folder in FOLDERS:
        files += sorted((source / folder).glob("*.py"))
    pages = sorted((DOCS / "restrictions").glob("*.md"))
    headings = re.sub(r"[`'\s]+", " ", "\n".join(page.read_text() for page in pages))
    missing = []
    for pieces in (pieces for file in files for pieces in errors_of(file)):
        long = next((p for p in pieces if len(p) >= 12), max(pieces, key=len))
        first = re.sub(r"[`'\s]+", " ", re.split(r"[:,(]", long.strip(" :,'"))[0]).strip()
        if first not in headings:
            missing.append(first)
    assert missing == []


def test_docs_layout_lists_every_folder_on_one_screen() -> None:
    text = (DOCS / "layout.md").read_text()
    assert len(text.splitlines()) <= 50
    source = ROOT / "src" / "penstock"
    folders = {f"{path.parent.relative_to(source)}/" for path in source.rglob("__init__.py")}
    modules = {path.name for path in source.glob("*.py")}
    table = [line.split("|") for line in text.splitlines() if line.startswith("| `")]
    listed = {name for row in table for name in re.findall(r"`([^`]+)`", row[1])}
    in_compat = {folder for folder in folders if folder.startswith("compat/")}
    assert listed == (folders | modules) - in_compat - {"./", "__init__.py"} | {"compat/"}
    for _, first, _, start, _ in table:
        folder = re.findall(r"`([^`]+)`", first)[0]
        for name in re.findall(r"`([^`]+)`", start):
            assert (source / folder / name).exists(), f"{folder}{name}"


def test_large_source_folders_have_a_readme_or_package_docstring() -> None:
    """A folder with more than five modules needs one of the two."""
    source = ROOT / "src" / "penstock"
    for package in (path.parent for path in source.rglob("__init__.py")):
        modules = [path for path in package.glob("*.py") if path.name != "__init__.py"]
        if len(modules) > 5 and package != source:
            docstring = ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""
            assert (package / "README.md").exists() or len(docstring.splitlines()) > 4, package
