"""The picture of a model cut into stages: its labels, and the layout of its arcs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from penstock import draw
from penstock.draw.model_picture import MAX_ARCS, assign_arc_levels, build_arcs
from penstock.errors import ArgumentError
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


def test_model_picture_names_units_stages_and_transfers(tmp_path: Path) -> None:
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


def test_model_picture_stacks_the_measured_costs_of_units(tmp_path: Path) -> None:
    pieces = tuple(
        UnitSummary(f"u{n}", n // 2, 1, 4, ComputeSeconds(1e-3, 2e-3, 3e-3), 8) for n in range(4)
    )
    draw.chain(outlined((2, 2), units=pieces), tmp_path / "cut.svg", title="Mine")
    words = words_of(tmp_path / "cut.svg")
    assert {"forward", "input gradient", "weight gradient", "Mine", "12 ms"} <= set(words)


def test_model_picture_is_deterministic(tmp_path: Path) -> None:
    for name in ("one.svg", "two.svg"):
        draw.chain(outlined(), tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


@pytest.mark.parametrize("units", [1, 40, 100, 400])
def test_model_picture_fits_any_number_of_units_on_a_page(units: int, tmp_path: Path) -> None:
    draw.chain(outlined((units,)), tmp_path / "cut.svg")
    width = float(str(ElementTree.parse(tmp_path / "cut.svg").getroot().get("width"))[:-2])
    assert 72 * 5 <= width <= 72 * 21


def test_arcs_on_one_level_do_not_cross() -> None:
    reach = [(0.0, 4.0), (1.0, 2.0), (2.0, 3.0), (1.5, 2.5), (5.0, 6.0)]
    lanes = assign_arc_levels(reach)
    for lane in set(lanes):
        mine = sorted(span for span, at in zip(reach, lanes, strict=True) if at == lane)
        assert all(a[1] <= b[0] for a, b in pairwise(mine))
    assert lanes[0] == max(lanes)  # the longest arc is the highest


def test_many_transfers_are_drawn_as_one_arc_per_pair_of_stages() -> None:
    flows = [Transfer(f"v{n}", 0, 1, n, 20 + n, 100) for n in range(MAX_ARCS + 1)]
    (arc,) = build_arcs(outlined((20, 20), flows))
    assert arc.label == f"{MAX_ARCS + 1} values, {0.1 * (MAX_ARCS + 1):.3g} KB"


def test_arc_label_of_a_transfer_of_unknown_size() -> None:
    (arc,) = build_arcs(outlined(flows=[Transfer("unit.1", 0, 1, 1, 2)]))
    assert arc.label == "unit.1"


def test_model_picture_refuses_an_unknown_suffix(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"the file name must end in \.svg or"):
        draw.chain(outlined(), tmp_path / "cut.pdf")
