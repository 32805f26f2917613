"""Steps that show nothing of mixed rows: without targets that count, or with equal rows.

An audit compares other rows then, or leaves the kind of call to the next one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock import (
    AuditError,
    Pipe,
    PipeSequential,
    RunError,
    Weighted,
    add_loss,
    added_losses,
)
from penstock.runtime.audit.reference import Reference
from tests.oracle import closely
from tests.runtime.audit.test_rows import ROWS, WIDTH, Layer, layers, made, rows, run_on

pytestmark = pytest.mark.usefixtures("double")


IGNORED = -100
Function = Callable[[Tensor], Tensor]

MIXING: dict[str, Function] = {
    "mean": lambda x: x - x.mean(0),
    "attention": lambda x: torch.softmax(x @ x.T, 1) @ x,
    "roll": lambda x: x + x.roll(1, 0),
    "first row": lambda x: x + x[:1],
}
# The rows that have labels.
LABELLED: dict[str, list[int]] = {
    "second half": list(range(8, 16)),
    "all but the first micro-batch": list(range(4, 16)),
    "last row": [15],
    "one row in three": [1, 4, 7, 10, 13],
}


def labels(labelled: list[int], seed: int = 3) -> Tensor:
    target = torch.full((ROWS,), IGNORED)
    generator = torch.Generator().manual_seed(seed)
    target[labelled] = torch.randint(WIDTH, (len(labelled),), generator=generator)
    return target


def weighted_loss(output: Tensor, target: Tensor) -> Weighted:
    return Weighted(functional.cross_entropy(output, target), (target != IGNORED).sum())


def clamped_loss(output: Tensor, target: Tensor) -> Weighted:
    """A loss of 0, and not nan, without labels."""
    losses = functional.cross_entropy(output, target, reduction="none")
    count = (target != IGNORED).sum()
    return Weighted(losses.sum() / count.clamp(min=1), count)


class Classifier(nn.Module):
    """A model that computes its own loss."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(WIDTH, WIDTH), Layer(function)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.last(self.middle(self.first(x)).tanh())
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


@pytest.mark.parametrize("labelled", LABELLED.values(), ids=list(LABELLED))
@pytest.mark.parametrize("function", MIXING.values(), ids=list(MIXING))
def test_rows_that_are_mixed_show_where_some_have_no_label(
    function: Function, labelled: list[int]
) -> None:
    pipe = made(layers(Layer(function)), loss_fn=nn.CrossEntropyLoss())
    with pytest.raises(AuditError, match="parts of the batch"):
        pipe.step(rows(), target=labels(labelled))


@pytest.mark.parametrize("loss_fn", [weighted_loss, clamped_loss])
def test_rows_that_are_mixed_show_where_the_first_ones_have_weight_0(loss_fn: Any) -> None:
    pipe = made(layers(Layer(MIXING["mean"])), loss_fn=loss_fn)
    with pytest.raises(AuditError, match="parts of the batch"):
        pipe.step(rows(), target=labels(LABELLED["second half"]))


@pytest.mark.parametrize("door", ["step", "call"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_that_are_mixed_show_in_a_loss_of_the_model(door: str, dtype: torch.dtype) -> None:
    target = labels(LABELLED["all but the first micro-batch"])
    x = rows().to(dtype)
    pipe = made(Classifier(MIXING["mean"]).to(dtype), example=(x, target))
    with pytest.raises(AuditError, match="of the batch"):
        pipe.step(x, target) if door == "step" else pipe(x, target)


def test_step_after_one_without_labels_is_audited() -> None:
    pipe = made(layers(Layer(MIXING["roll"])), loss_fn=nn.CrossEntropyLoss())
    pipe.step(rows(), target=labels([]))
    with pytest.raises(AuditError, match="parts of the batch"):
        pipe.step(rows(), target=labels(list(range(ROWS))))


def test_step_after_one_whose_loss_overflows_is_audited() -> None:
    pipe = made(layers(Layer(MIXING["roll"])), loss_fn=nn.MSELoss())
    assert pipe.step(rows(), target=rows(9) * 1e200).loss.isinf()
    with pytest.raises(AuditError, match="parts of the batch"):
        pipe.step(rows(), target=rows(9))


EQUAL: dict[str, Tensor] = {
    "ones": torch.ones(ROWS, WIDTH),
    "zeros": torch.zeros(ROWS, WIDTH),
    "one row": torch.linspace(-1, 1, WIDTH).repeat(ROWS, 1),
}


@pytest.mark.parametrize("door", ["step", "call"])
@pytest.mark.parametrize("chunks", [3, 4])
@pytest.mark.parametrize("first", EQUAL.values(), ids=list(EQUAL))
@pytest.mark.parametrize("function", MIXING.values(), ids=list(MIXING))
def test_call_after_one_with_equal_rows_is_audited(
    function: Function, first: Tensor, chunks: int, door: str
) -> None:
    pipe = made(layers(Layer(function)), loss_fn=nn.MSELoss(), chunks=chunks)
    run_on(pipe, door, first.double())
    with pytest.raises(AuditError, match="parts of the batch"):
        run_on(pipe, door, rows())


def test_rows_that_are_equal_in_groups_show_that_they_are_mixed() -> None:
    pipe = made(layers(Layer(MIXING["attention"])), loss_fn=nn.MSELoss())
    with pytest.raises(AuditError, match="4 parts of the batch"):
        pipe.step(rows()[:4].repeat_interleave(4, 0), target=rows(9))


def test_model_whose_tokens_are_all_the_same_at_first() -> None:
    model = nn.Sequential(
        nn.Embedding(9, WIDTH),
        nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0),  # with the rows on dim 1, by mistake
        nn.Flatten(),
        nn.Linear(3 * WIDTH, WIDTH),
    )
    pipe = made(model, loss_fn=nn.MSELoss())
    pipe.step(torch.zeros(ROWS, 3, dtype=torch.int64), target=rows(9))
    with pytest.raises(AuditError, match="parts of the batch"):
        pipe.step(torch.arange(3 * ROWS).view(ROWS, 3) % 9, target=rows(9))


class Average(nn.Module):
    """A layer that computes with a moving average of the micro-batches before."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = x - self.average
        self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        return y


@pytest.mark.parametrize("labelled", [*LABELLED.values(), [0, 1, 2, 3, 15]])
def test_state_of_other_microbatches_shows_where_some_have_no_label(labelled: list[int]) -> None:
    pipe = made(layers(Average()), loss_fn=nn.CrossEntropyLoss())
    with pytest.raises(AuditError, match=r"changes 1\.average, and that of the next one computes"):
        pipe.step(rows(), target=labels(labelled))


def test_state_that_no_labelled_microbatch_reads_is_audited_in_the_next_step() -> None:
    pipe = made(layers(Average()), loss_fn=nn.CrossEntropyLoss())
    pipe.step(rows(), target=labels([0, 1, 2, 3]))
    with pytest.raises(AuditError, match=r"changes 1\.average"):
        pipe.step(rows(), target=labels(list(range(ROWS))))


@pytest.mark.parametrize("labelled", LABELLED.values(), ids=list(LABELLED))
@pytest.mark.parametrize("middle", [nn.Identity, lambda: nn.BatchNorm1d(WIDTH, momentum=0.5)])
def test_rows_without_labels_change_nothing_in_other_models(
    middle: Callable[[], nn.Module], labelled: list[int]
) -> None:
    torch.manual_seed(0)
    model = layers(middle())
    unsplit, loss_fn = copy.deepcopy(model), nn.CrossEntropyLoss()
    pipe = made(model, loss_fn=loss_fn)
    target = labels(labelled)
    loss = pipe.step(rows(), target=target).loss
    for x, part in zip(rows().chunk(4), target.chunk(4), strict=True):  # BatchNorm's own rows
        share = (part != IGNORED).sum() / len(labelled)
        (loss_fn(unsplit(x), part).nan_to_num() * share).backward()
    for ours, theirs in zip(model.parameters(), unsplit.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert closely(ours.grad, theirs.grad)
    assert closely(loss, loss)
    assert all(map(closely, model.buffers(), unsplit.buffers()))


def count_references(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    counts: list[int] = []
    run_forward = Reference.run_forward

    def count(self: Reference, *args: Any, **kwargs: Any) -> Any:
        counts.append(1)
        return run_forward(self, *args, **kwargs)

    monkeypatch.setattr(Reference, "run_forward", count)
    return counts


def test_calls_with_equal_rows_are_audited_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = count_references(monkeypatch)
    pipe: Pipe = made(layers(), loss_fn=nn.MSELoss())
    counts_by_step = []
    for x in (torch.ones(ROWS, WIDTH), torch.zeros(ROWS, WIDTH), rows(), rows(2)):
        counts.clear()
        pipe.step(x, target=rows(9))
        counts_by_step.append(bool(counts))
    assert counts_by_step == [True, False, True, False]


def test_steps_with_few_labels_are_audited_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = count_references(monkeypatch)
    pipe = made(layers(), loss_fn=nn.CrossEntropyLoss())
    pipe.step(rows(), target=labels([5, 14]))
    assert counts
    counts.clear()
    pipe.step(rows(2), target=labels([5, 14]))
    assert not counts


def test_float32_inside_a_float64_model_hides_no_mixed_rows() -> None:
    def mix_a_little(x: Tensor) -> Tensor:
        return (x.float() + 1e-4 * x.float().mean(0)).double()

    pipe = made(layers(Layer(mix_a_little)), loss_fn=nn.MSELoss())
    with pytest.raises(AuditError, match="parts of the batch"):
        pipe.step(rows(), target=rows(9))


# ---- inputs that are equal in all rows so far --------------------------------------------------


class Gated(nn.Module):
    """A layer with a gate for each feature, and with a mask for each pair of positions."""

    def __init__(self, uses_mask: bool) -> None:
        super().__init__()
        self.linear, self.uses_mask = nn.Linear(WIDTH, WIDTH), uses_mask

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        if self.uses_mask:
            return torch.softmax(x @ x.mT + table, -1) @ x
        result: Tensor = self.linear(x * table)
        return result


@pytest.mark.parametrize("door", ["step", "call"])
@pytest.mark.parametrize(("uses_mask", "size"), [(False, WIDTH), (True, WIDTH), (True, 2)])
def test_table_with_as_many_entries_as_the_batch_has_rows(
    uses_mask: bool, size: int, door: str
) -> None:
    """It is split with the batch, and each row gets an entry. While all are equal, none differ."""
    torch.manual_seed(0)
    shape = (size, size, WIDTH) if uses_mask else (size, WIDTH)
    entries = (size, size) if uses_mask else (size,)
    model = PipeSequential(Gated(uses_mask), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    pipe = made(model, chunks=size, loss_fn=nn.MSELoss())
    generator = torch.Generator().manual_seed(1)

    def run_step(table: Tensor) -> None:
        x = torch.randn(shape, generator=generator)
        if door == "step":
            pipe.step(x, table=table, target=torch.ones(shape))
        else:
            pipe(x, table=table).square().mean().backward()

    run_step(torch.ones(entries))
    run_step(torch.ones(entries))
    with pytest.raises(AuditError, match=r"of the batch|two micro-batches together"):
        run_step(torch.randn(entries, generator=generator))


def test_mask_of_ones_is_audited_again_when_rows_are_padded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Masked(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return x * mask

    counts = count_references(monkeypatch)
    model = PipeSequential(nn.Linear(WIDTH, WIDTH), Masked(), nn.Linear(WIDTH, WIDTH))
    pipe = made(model, loss_fn=nn.MSELoss())
    ones, padded = torch.ones(ROWS, WIDTH), torch.tril(torch.ones(ROWS, WIDTH))
    audited = []
    for seed, mask in enumerate((ones, ones, padded, ones, padded)):
        counts.clear()
        pipe.step(rows(seed), mask=mask, target=rows(9))
        audited.append(bool(counts))
    assert audited == [True, False, True, False, False]


def test_layer_that_mixes_the_rows_of_its_mask_is_found_when_they_differ() -> None:
    class MaskedMean(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return x + mask.roll(1, 0)[:, None]

    model = PipeSequential(nn.Linear(WIDTH, WIDTH), MaskedMean(), nn.Linear(WIDTH, WIDTH))
    pipe = made(model, loss_fn=nn.MSELoss())
    pipe.step(rows(), mask=torch.ones(ROWS), target=rows(9))
    with pytest.raises(AuditError, match="parts of the batch"):
        pipe.step(rows(2), mask=torch.arange(ROWS) % 3.0, target=rows(9))


class Balanced(nn.Module):
    """A layer that adds a loss: a mean over rows, or the square of one."""

    def __init__(self, is_mean: bool) -> None:
        super().__init__()
        self.linear, self.is_mean = nn.Linear(WIDTH, WIDTH), is_mean

    def forward(self, x: Tensor) -> Tensor:
        shares = self.linear(x).softmax(1)
        add_loss(shares.square().mean() if self.is_mean else shares.mean(0).square().sum())
        output: Tensor = x * shares
        return output


@pytest.mark.parametrize("labelled", [range(ROWS), range(8, ROWS)])
@pytest.mark.parametrize("is_mean", [False, True])
def test_loss_that_a_layer_adds_beside_a_loss_that_counts_targets(
    is_mean: bool, labelled: Any
) -> None:
    torch.manual_seed(0)
    model = layers(Balanced(is_mean))
    unsplit, loss_fn = copy.deepcopy(model), nn.CrossEntropyLoss()
    pipe = made(model, loss_fn=loss_fn)
    target = labels(list(labelled))
    if not is_mean:
        with pytest.raises((AuditError, RunError), match=r"parts of the batch|not means over"):
            pipe.step(rows(), target=target)
        return
    loss = pipe.step(rows(), target=target).loss
    with added_losses() as added:
        output = unsplit(rows())
    expected = loss_fn(output, target) + torch.stack(list(added)).sum()
    expected.backward()
    assert closely(loss, expected.detach())
    for ours, theirs in zip(model.parameters(), unsplit.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert closely(ours.grad, theirs.grad)
