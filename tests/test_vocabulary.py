from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

import penstock
from penstock import vocabulary
from penstock.schedules.registry import find_schedule_name

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.parametrize(
    "words",
    [
        vocabulary.PACKAGE_NAMES,
        vocabulary.PIPE_ATTRIBUTES,
        vocabulary.PIPE_ARGUMENTS,
        vocabulary.STEP_ARGUMENTS,
    ],
    ids=["package", "attributes", "arguments", "step"],
)
def test_words_of_other_libraries_are_on_their_page(words: Mapping[str, str]) -> None:
    pages = ("coming-from.md", "compatibility.md", "mistakes.md")
    text = "\n".join((DOCS / page).read_text() for page in pages)
    assert [word for word in words if word not in text] == []


def test_words_of_other_libraries_are_not_names_of_ours() -> None:
    assert not set(vocabulary.PACKAGE_NAMES) & set(penstock.__all__)
    assert not [name for name in vocabulary.PIPE_ATTRIBUTES if hasattr(penstock.Pipe, name)]


@pytest.mark.parametrize("name", vocabulary.SCHEDULE_NAMES)
def test_other_name_of_a_schedule_is_suggested(name: str) -> None:
    with pytest.raises(penstock.ArgumentError, match=f"mean {vocabulary.SCHEDULE_NAMES[name]}"):
        penstock.schedules.make(find_schedule_name(name.upper()), ranks=2, chunks=2)


@pytest.mark.parametrize(
    ("pytorch", "ours"),
    {
        "GPipe": "gpipe",
        "1F1B": "1f1b",
        "Interleaved1F1B": "interleaved",
        "LoopedBFS": "looped-bfs",
        "InterleavedZeroBubble": "interleaved-zb",
        "ZBVZeroBubble": "zb-v",
        "DualPipeV": "dualpipe-v",
    }.items(),
)
def test_schedule_names_of_pytorch_in_any_case(pytorch: str, ours: str) -> None:
    for name in (pytorch, pytorch.lower(), pytorch.upper(), f"Schedule{pytorch}"):
        assert find_schedule_name(name) == ours


def test_import_of_a_word_of_another_library_says_what_to_write() -> None:
    with pytest.raises(ImportError, match=r"no PipelineStage\. .* Pipe\(model, stages=4"):
        from penstock import PipelineStage  # noqa: F401


def test_words_of_other_libraries_are_no_attributes_of_the_package() -> None:
    assert not hasattr(penstock, "PipelineStage")
    assert getattr(penstock, "ScheduleGPipe", None) is None
    with pytest.raises(AttributeError, match=r"no PipelineStage\. .* Pipe\(model, stages=4"):
        _ = penstock.PipelineStage
    with pytest.raises(ImportError, match=r"no PipelineStage\. .* Pipe\(model, stages=4"):
        from penstock import PipelineStage  # noqa: F401
