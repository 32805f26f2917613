"""Tests of packed sequences between units, with the lengths in the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from penstock import CutError, Pipe, split
from tests.models.architecture import squares
from tests.support import same_gradients


class Packed(nn.Module):
    """A recurrent encoder with packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 4)
        self.first = nn.LSTM(4, 4, batch_first=True, bidirectional=True)
        self.mix = nn.Linear(8, 4)
        self.second = nn.GRU(4, 4, batch_first=True)
        self.out = nn.Linear(4, 3)

    def lengths(self, lengths: Tensor, x: Tensor) -> Tensor:
        return lengths

    def forward(self, tokens: Tensor, lengths: Tensor) -> Any:
        x = self.embed(tokens)
        many = self.lengths(lengths, x)
        packed = pack_padded_sequence(x, many, batch_first=True, enforce_sorted=False)
        x, _ = pad_packed_sequence(self.first(packed)[0], batch_first=True)
        packed = pack_padded_sequence(self.mix(x), many, batch_first=True, enforce_sorted=False)
        return self.out(self.second(packed)[1][-1])


class PackedByNumbers(Packed):
    """The lengths are computed from the output of a unit."""

    def lengths(self, lengths: Tensor, x: Tensor) -> Tensor:
        return (x.sum(-1) > 0).sum(-1).clamp(min=1)


def _batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(20, (4, 6), generator=generator)
    return tokens, torch.randint(1, 7, (4,), generator=generator)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_packed_sequences_train_as_the_unsplit_model(stages: int) -> None:
    """The dry run of units used lengths of 0 and failed. The next batch has other lengths."""
    torch.manual_seed(0)
    unsplit = Packed().double()
    model = Packed().double()
    model.load_state_dict(unsplit.state_dict())
    pipe = Pipe(
        model,
        chunks=2,
        stages=stages,
        devices=["cpu"] * stages,
        example=_batch(0),
        schedule="1f1b",
        loss_fn=squares,
        balance="parameters",
    )
    for seed in range(3):
        tokens, lengths = _batch(seed)
        for piece in zip(tokens.chunk(2), lengths.chunk(2), strict=True):
            (squares(unsplit(*piece)) / 2).backward()
        pipe.step(tokens, lengths)
    assert same_gradients(model, unsplit)


def test_packed_sequences_are_profiled_with_their_lengths() -> None:
    partition = split(Packed(), 2, example=_batch(0))
    assert sum(partition.counts) == 5


def test_packed_sequence_lengths_computed_by_a_unit_are_refused() -> None:
    with pytest.raises(CutError, match="_pack_padded_sequence reads a value"):
        split(PackedByNumbers(), 2, example=_batch(0), balance="parameters")
