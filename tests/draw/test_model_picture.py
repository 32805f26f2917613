"""A cut model as a picture: what is in it, and that nothing meets in the air."""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from penstock import draw
from penstock.draw.model_picture import MAX_ARCS, assign_arc_levels, build_arcs
from penstock.errors import ArgumentError, MissingExtra
from penstock.model_summary import (
    ComputeSeconds,
    ModelSummary,
    SharedParameter,
    Transfer,
    UnitSummary,
)


def outlined(
    counts: Sequence[int] = (2, 1, 2), flows: Sequence[Transfer] = (), **more: Any
) -> ModelSummary:
    stages = [stage for stage, count in enumerate(counts) for _ in range(count)]
    pieces = tuple(UnitSummary(f"unit.{n}", stage, 10, 40) for n, stage in enumerate(stages))
    given: dict[str, Any] = {"units": pieces, "shared_parameters": ()} | more
    sizes = tuple(count * 40 for count in counts)
    return ModelSummary(
        "Net",
        transfers=tuple(flows),
        stage_parameter_counts=tuple(count * 10 for count in counts),
        stage_parameter_bytes=sizes,
        **given,
    )


def words_of(path: Path) -> list[str]:
    return [
        "".join(node.itertext()).strip()
        for node in ElementTree.parse(path).iter()
        if node.tag.endswith("}text")
    ]


def test_a_picture_names_units_stages_and_what_crosses(tmp_path: Path) -> None:
    flows = [
        Transfer("unit.1", 0, 1, 1, 2, 512),
        Transfer("unit.2", 1, 2, 2, 3, 512),
        Transfer("unit.0", 0, 2, 0, 4, 4096),
    ]
    shared = (SharedParameter(("unit.0.weight", "unit.4.weight"), (0, 2), 10, 40),)
    draw.chain(outlined(flows=flows, shared_parameters=shared), tmp_path / "cut.svg")
    words = words_of(tmp_path / "cut.svg")
    assert {"stage 0", "stage 1", "stage 2"} <= set(words)
    assert {f"unit.{n}" for n in range(5)} <= set(words)
    assert {"unit.1, 512 B", "unit.2, 512 B", "unit.0, 4.1 KB"} <= set(words)
    assert "shared: unit.0.weight" in words
    assert "Net in 3 stages" in words


def test_measured_units_are_stacked(tmp_path: Path) -> None:
    pieces = tuple(
        UnitSummary(f"u{n}", n // 2, 1, 4, ComputeSeconds(1e-3, 2e-3, 3e-3), 8) for n in range(4)
    )
    draw.chain(outlined((2, 2), units=pieces), tmp_path / "cut.svg", title="Mine")
    words = words_of(tmp_path / "cut.svg")
    assert {"forward", "input gradient", "weight gradient", "Mine", "12 ms"} <= set(words)


def test_the_same_cut_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one.svg", "two.svg"):
        draw.chain(outlined(), tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


@pytest.mark.parametrize("units", [1, 40, 100, 400])
def test_any_number_of_units_fits_on_a_page(units: int, tmp_path: Path) -> None:
    draw.chain(outlined((units,)), tmp_path / "cut.svg")
    width = float(str(ElementTree.parse(tmp_path / "cut.svg").getroot().get("width"))[:-2])
    assert 72 * 5 <= width <= 72 * 21


def test_no_two_arcs_of_a_lane_meet() -> None:
    reach = [(0.0, 4.0), (1.0, 2.0), (2.0, 3.0), (1.5, 2.5), (5.0, 6.0)]
    lanes = assign_arc_levels(reach)
    for lane in set(lanes):
        mine = sorted(span for span, at in zip(reach, lanes, strict=True) if at == lane)
        assert all(a[1] <= b[0] for a, b in pairwise(mine))
    assert lanes[0] == max(lanes)  # what goes farthest runs highest


def test_many_values_are_one_arc_for_each_two_stages() -> None:
    flows = [Transfer(f"v{n}", 0, 1, n, 20 + n, 100) for n in range(MAX_ARCS + 1)]
    (arc,) = build_arcs(outlined((20, 20), flows))
    assert arc.label == f"{MAX_ARCS + 1} values, {0.1 * (MAX_ARCS + 1):.3g} KB"


def test_a_value_of_unknown_size_has_a_name_alone() -> None:
    (arc,) = build_arcs(outlined(flows=[Transfer("unit.1", 0, 1, 1, 2)]))
    assert arc.label == "unit.1"


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"the file name must end in \.svg or"):
        draw.chain(outlined(), tmp_path / "cut.pdf")


def test_without_matplotlib_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    imported = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return imported(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtra, match="matplotlib"):
        draw.chain(outlined(), tmp_path / "cut.svg")
