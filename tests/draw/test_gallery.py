from __future__ import annotations

from pathlib import Path

from penstock import schedules
from penstock.draw import exhibits, write_gallery

COMMITTED = Path(__file__).parents[2] / "docs" / "gallery"


def test_gallery_in_the_docs_is_up_to_date(tmp_path: Path) -> None:
    shown = list(exhibits())
    assert [exhibit.name for exhibit in shown] == [*schedules.FAMILIES, "fit"]
    write_gallery(tmp_path, shown)
    assert {path.name for path in tmp_path.iterdir()} == {p.name for p in COMMITTED.iterdir()}
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (COMMITTED / path.name).read_bytes(), path.name
