"""Assertions that hold for every fault."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from penstock import saved
from tests.faults.course import resumed, unsplit
from tests.faults.throwaway import Fate

# seconds within which every rank must raise; on an idle machine it takes a tenth of a second
SOON = 10.0


def others(size: int, rank: int) -> list[int]:
    return [other for other in range(size) if other != rank]


def check_cause(
    fates: list[Fate], ranks: Iterable[int], kind: str, rank: int, within: float
) -> str:
    """Return the text of the RemoteError that all these ranks raised in time.

    Check that the errors are equal, that the processes failed, and that no thread was left.
    """
    began = max(fate.facts.get("fault", 0.0) for fate in fates)
    assert began
    texts = set()
    for survivor in ranks:
        fate = fates[survivor]
        assert fate.facts.get("error") == "RemoteError", (survivor, fate)
        fields = fate.facts["fields"]
        assert (fields["kind"], fields["rank"]) == (kind, rank), (survivor, fate)
        assert fate.facts["now"] - began < within, (survivor, fate.facts["now"] - began)
        assert fate.facts["threads"] == [], survivor
        assert fate.code == 1, (survivor, fate)
        texts.add(fate.facts["text"])
    assert len(texts) == 1, texts
    return str(texts.pop())


def check_checkpoint(folder: Path, fates: list[Fate]) -> None:
    """Check that training resumes after step 0 with the losses of plain PyTorch."""
    assert saved(folder) is not None, fates
    last, losses = resumed(folder)
    assert last == 0
    torch.testing.assert_close(losses, unsplit()[1:], rtol=0, atol=1e-10)
