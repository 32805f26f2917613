"""The picture of memory curves: its labels, and that drawing is deterministic."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from penstock import Cost, Timeline, draw, lower, schedules, simulate
from penstock.errors import ArgumentError

RANKS = 3


def forecast() -> Timeline:
    program = lower(schedules.one_f_one_b(RANKS, 4))
    return simulate(program, Cost((1.0,) * 3, (1.0,) * 3, (1.0,) * 3, (1e6, 2e6, 3e6)))


def measured() -> list[list[tuple[float, float]]]:
    return [[(1.0 + rank, 1.5e6), (5.0, 2.5e6 + rank)] for rank in range(RANKS)]


def words_of(path: Path) -> list[str]:
    found = (node for node in ElementTree.parse(path).iter() if node.tag.endswith("}text"))
    return ["".join(node.itertext()).strip() for node in found]


def test_memory_picture_labels_the_peaks_of_each_rank(tmp_path: Path) -> None:
    draw.memory(forecast(), measured(), tmp_path / "memory.svg", title="Mine")
    words = words_of(tmp_path / "memory.svg")
    assert {"Mine", "measured", "forecast", "peak", "rank"} <= set(words)
    assert words.count("2.5 MB") == RANKS
    assert {"3 MB", "4 MB"} <= set(words)


def test_memory_picture_is_deterministic_and_accepts_empty_curves(tmp_path: Path) -> None:
    for name in ("one.svg", "two.svg"):
        draw.memory(forecast(), measured(), tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    draw.memory(forecast(), [[]] * RANKS, tmp_path / "nothing.png")
    assert (tmp_path / "nothing.png").stat().st_size > 1000


def test_memory_picture_refuses_an_unknown_suffix(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"cannot draw into 'memory.gif'"):
        draw.memory(forecast(), measured(), tmp_path / "memory.gif")
