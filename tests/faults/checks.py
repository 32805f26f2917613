"""Assertions that hold for every fault."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from penstock import saved
from tests.faults.disposable_ranks import RankOutcome
from tests.faults.training_run import resumed, unsplit


def others(size: int, rank: int) -> list[int]:
    return [other for other in range(size) if other != rank]


def check_cause(outcomes: list[RankOutcome], ranks: Iterable[int], kind: str, rank: int) -> str:
    """Return the text of the RemoteError that all these ranks raised.

    Check that the errors are equal, that the processes failed, and that no thread was left.
    """
    texts = set()
    for survivor in ranks:
        outcome = outcomes[survivor]
        assert outcome.facts.get("error") == "RemoteError", (survivor, outcome)
        fields = outcome.facts["fields"]
        assert (fields["kind"], fields["rank"]) == (kind, rank), (survivor, outcome)
        assert outcome.facts["threads"] == [], survivor
        assert outcome.code == 1, (survivor, outcome)
        texts.add(outcome.facts["text"])
    assert len(texts) == 1, texts
    return str(texts.pop())


def check_checkpoint(folder: Path, outcomes: list[RankOutcome]) -> None:
    """Check that training resumes after step 0 with the losses of plain PyTorch."""
    assert saved(folder) is not None, outcomes
    last, losses = resumed(folder)
    assert last == 0
    torch.testing.assert_close(losses, unsplit()[1:], rtol=0, atol=1e-10)
