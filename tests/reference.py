"""The reference pages: which entries they have, and the page of the command line.

`python -m tests.reference` writes docs/reference/command-line.md from the command line itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from penstock import cli

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
COMMAND_LINE = FOLDER / "command-line.md"
ENTRY = re.compile(r"^::: (?P<name>[\w.]+)\n(?P<options>(?:    .*\n)*)", re.MULTILINE)
HEADING = """\
# Command line

Written by `python -m tests.reference` from the commands themselves. In a terminal,
`penstock COMMAND --help` prints the same. Commands on schedules do not need torch.

| exit status | meaning |
|---|---|
| 0 | done |
| 1 | the command ran, and its answer is no |
| 2 | a wrong option, argument, file or model |
| 130 | Ctrl-C |
"""


def entries() -> dict[str, list[str] | None]:
    """Return the names with an entry, each with its listed members, or None for all of them."""
    found: dict[str, list[str] | None] = {}
    for page in sorted(FOLDER.glob("*.md")):
        for entry in ENTRY.finditer(page.read_text()):
            listed = re.search(r"members: (.*)", entry["options"])
            names = None if listed is None else re.findall(r"[A-Za-z_]\w*", listed[1])
            found[entry["name"]] = [] if names == ["false"] else names
    return found


def commands() -> dict[str, Any]:
    """Return the commands by name."""
    group: Any = typer.main.get_command(cli.app)
    return dict(group.commands)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _rows(command: Any) -> Iterator[str]:
    for parameter in command.params:
        if getattr(parameter, "hidden", False) or parameter.name == "help":
            continue
        is_option = parameter.param_type_name == "option"
        spellings = [*parameter.opts, *parameter.secondary_opts]
        name = ", ".join(f"`{text if is_option else text.upper()}`" for text in spellings)
        default = parameter.default
        shown = "" if default in (None, False, "", ()) or callable(default) else f"`{default}`"
        yield f"| {name} | {_cell(parameter.help or '')} | {shown} |"


def command_line_page() -> str:
    """Return the text of the page: a section for each command, a row for each option."""
    sections = [HEADING]
    for name, command in commands().items():
        arguments = [p.name.upper() for p in command.params if p.param_type_name == "argument"]
        usage = " ".join(["penstock", name, *arguments, "[OPTIONS]"])
        rows = "\n".join(_rows(command))
        table = f"\n| | meaning | default |\n|---|---|---|\n{rows}\n" if rows else ""
        sections.append(f"## penstock {name}\n\n`{usage}`\n\n{command.help.strip()}\n{table}")
    return "\n".join(sections)


if __name__ == "__main__":
    COMMAND_LINE.write_text(command_line_page())
