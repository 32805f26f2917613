"""`penstock saved`: list the checkpoints of a folder, and verify or repair them."""

from __future__ import annotations

from pathlib import Path

from penstock.checkpoint.directory import SaveEntry
from penstock.checkpoint.manifest import MANIFEST_FILE
from penstock.checkpoint.repair import examine_folder, repair_folder
from penstock.errors import ArgumentError
from penstock.text_format import format_bytes, make_printable


def run(folder: Path, verify: bool, repair: bool) -> bool:
    """Print the saves of a folder. Return whether one can be loaded, and no damage was found."""
    if not folder.is_dir():
        raise ArgumentError(f"'{folder}' is not a folder. Pass one that pipe.save writes to.")
    if (folder / MANIFEST_FILE).exists():
        raise ArgumentError(f"'{folder}' is one checkpoint. Pass its folder, '{folder.parent}'.")
    if repair:
        for sentence in repair_folder(folder):
            print(make_printable(sentence))
    reports = examine_folder(folder, verify or repair)
    loadable = [entry for entry, problems in reports if entry.is_loadable and not problems]
    for entry, problems in reports:
        is_newest = bool(loadable) and entry is loadable[-1]
        state = "damaged" if problems and entry.state == "whole" else entry.state
        print(make_printable(_describe(entry, state, is_newest)))
        for problem in problems:
            print(make_printable(f"  {problem}"))
    if not loadable:
        print("no checkpoint that can be loaded")
    return bool(loadable) and not any(problems for _, problems in reports)


def _describe(entry: SaveEntry, state: str, is_newest: bool) -> str:
    cells = [f"{entry.path.name:12}", f"{state:10}"]
    if entry.manifest is not None:
        size, step = format_bytes(entry.manifest.size), entry.manifest.step
        cells += [f"{size:>8}", entry.manifest.saved_at, f"by {entry.manifest.writer}"]
        cells += [] if step is None else [f"step {step}"]
    return "  ".join([*cells, *(["newest"] if is_newest else [])]).rstrip()
