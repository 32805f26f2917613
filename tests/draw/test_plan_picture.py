from __future__ import annotations

from pathlib import Path

import pytest
from tests.planning.problems import even_profile

from penstock import draw
from penstock.errors import ArgumentError
from penstock.planning import search_plan


def test_picture_of_a_plan_shows_cut_timeline_and_memory(tmp_path: Path) -> None:
    plan = search_plan(even_profile(memory=3000), chunks=[4], solver_seconds=0)
    draw.plan(plan, tmp_path / "plan.svg")
    picture = (tmp_path / "plan.svg").read_text()
    for words in ("recompute nothing", "above: rank", "input gradient", "and the cap"):
        assert words in picture


def test_picture_of_a_plan_in_an_unknown_format_is_refused(tmp_path: Path) -> None:
    plan = search_plan(even_profile(), chunks=[4], solver_seconds=0)
    with pytest.raises(ArgumentError, match=r"must end in .svg or .png"):
        draw.plan(plan, tmp_path / "plan.gif")
