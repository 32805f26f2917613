"""Branches on numbers of the rows, selections among rows, late hooks, and what hooks keep."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock import AuditError, Pipe, Weighted
from penstock.runtime.audit.reference import Reference
from penstock.runtime.audit.rows import RowsCheck
from penstock.stage.branches import BranchRecord, BranchWatch, RowWatch
from penstock.stage.rng import advance_caller_rng
from penstock.stage.row_statistics import RowStatistics
from tests.support import same_gradients

WIDTH, ROWS = 6, 16
each_door = pytest.mark.parametrize("door", ["call", "step"])


def rows(shift: float | Tensor = 0.0) -> Tensor:
    return torch.randn(ROWS, WIDTH, dtype=torch.float64) + shift


class Branching(nn.Module):
    """A layer that computes a function of its input and of a linear layer of it."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(WIDTH, WIDTH), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.linear(x))


class Blocks(nn.Module):
    """A model that is traced."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([layer, nn.Linear(WIDTH, WIDTH)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return x


def build(layer: nn.Module, is_traced: bool = False, **options: Any) -> tuple[Pipe, nn.Module]:
    """Return a pipe with a layer in it, and the unsplit model."""
    torch.manual_seed(0)
    whole = Blocks(layer) if is_traced else nn.Sequential(layer, nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    model = whole.double()
    given = {"chunks": 4, "stages": 2, "loss_fn": functional.mse_loss, **options}
    if is_traced:
        given["example"] = rows()
    return Pipe(copy.deepcopy(model), devices=["cpu"] * 2, **given), model


def train(pipe: Pipe, x: Tensor, door: str) -> None:
    if door == "step":
        pipe.step(x, target=torch.zeros_like(x))
    else:
        functional.mse_loss(pipe(x), torch.zeros_like(x)).backward()


def count_calls(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> list[tuple[Any, ...]]:
    """Return a list that gets the arguments of each call of a method."""
    calls: list[tuple[Any, ...]] = []
    method = getattr(owner, name)

    def call(*args: Any) -> Any:
        calls.append(args)
        return method(*args)

    monkeypatch.setattr(owner, name, call)
    return calls


def by_mean(x: Tensor, y: Tensor) -> Tensor:
    return y * 2 if x.mean() > 0 else y


def by_number(x: Tensor, y: Tensor) -> Tensor:
    return y * (2 if x.mean().item() > 0 else 3)


def by_list(x: Tensor, y: Tensor) -> Tensor:
    is_positive: Any = x.mean().gt(0).tolist()
    return y.sin() if is_positive else y.cos()


def by_shape(x: Tensor, y: Tensor) -> Tensor:
    return y * 2 if len(x[x.mean(1) > 0]) == len(x) else y


def by_classes(x: Tensor, y: Tensor) -> Tensor:
    return y / functional.one_hot((x.mean(1) > 0).long()).shape[1]


def by_repeats(x: Tensor, y: Tensor) -> Tensor:
    return y / len(torch.repeat_interleave((x.mean() > 0).long().view(1) + 1))


def by_positions_of_a_mask(x: Tensor, y: Tensor) -> Tensor:
    return y * 2 if len(torch.where(x.mean(1) > 0)[0]) else y


def by_size_in_a_tensor(x: Tensor, y: Tensor) -> Tensor:
    count: Any = 1 + (x.mean() > 0).long()
    return y / len(torch.arange(count))


def by_expanded_size(x: Tensor, y: Tensor) -> Tensor:
    count: Any = 1 + (x.mean() > 0).long()
    return y / len(torch.ones(1).expand(count))


def by_choice(x: Tensor, y: Tensor) -> Tensor:
    return functional.linear(y, torch.ones_like(y[0]).diag() * int(x.mean() > 0))


def by_error(x: Tensor, y: Tensor) -> Tensor:
    try:
        torch.linalg.cholesky(torch.diag_embed(x[:, :2]))
    except RuntimeError:
        return y
    return y * 2


@each_door
@pytest.mark.parametrize("is_traced", [False, True])
@pytest.mark.parametrize(
    "function",
    [
        *(by_mean, by_number, by_list, by_shape, by_choice, by_classes, by_repeats),
        *(by_positions_of_a_mask, by_size_in_a_tensor, by_expanded_size, by_error),
    ],
)
def test_branch_that_micro_batches_take_differently_later(
    function: Callable[[Tensor, Tensor], Tensor], is_traced: bool, door: str
) -> None:
    """All rows went one way in the steps that were audited, and each micro-batch its own later."""
    pipe, _ = build(Branching(function), is_traced)
    for _ in range(3):
        train(pipe, rows(9.0), door)
    sides = 9.0 * torch.arange(ROWS, dtype=torch.float64).sub(7.5).sign()[:, None]
    for _ in range(2):  # not only once
        with pytest.raises(AuditError, match=r"as `if x.mean\(\) > 0` does.* went different ways"):
            train(pipe, rows(sides), door)
    train(pipe, rows(9.0), door)


def test_branch_on_the_text_of_a_number() -> None:
    pipe, _ = build(Branching(lambda x, y: y if "-" in f"{x.mean():.3f}" else y * 2))
    for _ in range(3):
        train(pipe, rows(9.0), "step")
    sides = 9.0 * torch.arange(ROWS, dtype=torch.float64).sub(7.5).sign()[:, None]
    with pytest.raises(AuditError, match="went different ways"):
        train(pipe, rows(sides), "step")


def test_branch_on_a_sum_of_the_whole_batch() -> None:
    """The sum of a micro-batch is below the threshold, and that of the batch above."""
    pipe, _ = build(Branching(lambda x, y: y * 2 if x.sum() > 300 else y))
    with pytest.raises(AuditError, match="depends on how it is split"):
        train(pipe, rows(9.0), "step")


def by_sum(x: Tensor, y: Tensor) -> Tensor:
    return y * 2 if x.sum() > 300 else y


def by_deviation(x: Tensor, y: Tensor) -> Tensor:
    return y.sin() if 2 * x.std(0).max() - 1 > 15 else y


def by_range(x: Tensor, y: Tensor) -> Tensor:
    return y.sin() if bool(x.mean(1).max() - x.mean(1).min() > 15) else y


def by_norm(x: Tensor, y: Tensor) -> Tensor:
    return y.cos() if torch.linalg.vector_norm(x) > 80 else y


def by_count(x: Tensor, y: Tensor) -> Tensor:
    return y.cos() if torch.any((x > 5).sum((0, 1)) > 30) else y


def by_sum_as_number(x: Tensor, y: Tensor) -> Tensor:
    return y * 2 if x.sum().item() > 300 else y


def by_tensor(x: Tensor, y: Tensor) -> Tensor:
    return torch.where(x.sum() > 300, y * 2, y)


def by_clamp(x: Tensor, y: Tensor) -> Tensor:
    size: Tensor = torch.linalg.vector_norm(x).clamp(min=80.0)
    return y / size * 80.0


def by_gate(x: Tensor, y: Tensor) -> Tensor:
    return y * (1.0 + (x.std(0).max() > 8))


# The rows of a micro-batch are alike, and those of the batch are not.
STAIRS = 8.0 * torch.arange(ROWS, dtype=torch.float64).div(4).floor().sub(0.5)[:, None]


@each_door
@pytest.mark.parametrize("is_traced", [False, True])
@pytest.mark.parametrize(
    ("function", "shift"),
    [
        *((by_sum, 9.0), (by_norm, 9.0), (by_count, 9.0), (by_sum_as_number, 9.0)),
        *((by_deviation, STAIRS), (by_range, STAIRS), (by_gate, STAIRS)),
        *((by_tensor, 9.0), (by_clamp, 9.0)),
    ],
)
def test_threshold_that_only_the_whole_batch_crosses_later(
    function: Callable[[Tensor, Tensor], Tensor], shift: float | Tensor, is_traced: bool, door: str
) -> None:
    """The micro-batches all go one way, and the unsplit model the other."""
    pipe, model = build(Branching(function), is_traced)
    for _ in range(3):
        x = rows()
        train(pipe, x, door)
        functional.mse_loss(model(x), torch.zeros_like(x)).backward()
    assert same_gradients(pipe, model)
    large, one = rows(shift), torch.ones((), dtype=torch.float64)
    assert [function(part, one) == one for part in (*large.chunk(4), large)] == [1, 1, 1, 1, 0]
    with pytest.raises(AuditError, match="another way than the batch"):
        train(pipe, large, door)


@each_door
@pytest.mark.parametrize("function", [by_tensor, by_clamp])
def test_threshold_of_tensors_that_the_first_batch_crosses(
    function: Callable[[Tensor, Tensor], Tensor], door: str
) -> None:
    pipe, _ = build(Branching(function))
    with pytest.raises(AuditError, match=r"depends on how (it|the batch) is split"):
        train(pipe, rows(9.0), door)


def test_number_of_parameters_that_meets_rows_is_not_followed() -> None:
    """A weight that is divided by its norm is the same for all rows."""

    class Normalized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            weight = self.weight * 2
            output: Tensor = x @ (weight / weight.norm()) / weight.sum()
            return output

    statistics = RowStatistics()
    with BranchWatch(statistics=statistics):
        Normalized()(torch.randn(ROWS, WIDTH))
    assert not statistics.meets_rows
    assert not statistics.reads


@each_door
def test_watching_numbers_of_rows_adds_no_backwards_to_the_audit(
    door: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watch detached tensors, which looked like a gradient of the forward's own."""
    backwards = count_calls(monkeypatch, Reference, "run_backward")
    pipe, _ = build(Branching(lambda x, y: y * 2 if x.sum() > 1e6 else y))
    train(pipe, rows(), door)
    assert len(backwards) == 1


@pytest.mark.parametrize("is_traced", [False, True])
def test_sum_that_is_read_in_inference_mode(is_traced: bool) -> None:
    pipe, model = build(Branching(by_sum), is_traced)
    with torch.inference_mode():
        for _ in range(3):
            x = rows()
            assert torch.allclose(pipe(x), model(x), rtol=1e-12)
        with pytest.raises(AuditError, match="another way than the batch"):
            pipe(rows(9.0))


def test_sum_of_rows_that_are_changed_in_place_afterwards() -> None:
    """What the batch would have read is not known, so the whole batch is compared."""

    def branch(x: Tensor, y: Tensor) -> Tensor:
        is_large = y.sum() > 1e6
        return y.mul_(2.0) if not is_large else y

    pipe, model = build(Branching(branch))
    for _ in range(4):
        x = rows()
        train(pipe, x, "step")
        functional.mse_loss(model(x), torch.zeros_like(x)).backward()
    assert same_gradients(pipe, model)


@each_door
def test_numbers_that_lie_between_those_of_micro_batches_are_not_followed(
    door: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mask that is all true, a mean below a threshold."""

    def branch(x: Tensor, y: Tensor) -> Tensor:
        if (x < 100).all() and x.max() < 100 and 2 * x.mean() < 50:
            return y * 2
        return y * y.sum().detach()  # a sum that is not read

    followed = count_calls(monkeypatch, RowStatistics, "follow")
    pipe, model = build(Branching(branch))
    counts = []
    for _ in range(6):
        x = rows()
        train(pipe, x, door)
        functional.mse_loss(model(x), torch.zeros_like(x)).backward()
        counts.append(len(followed))
    assert same_gradients(pipe, model)
    # It looks for such numbers in the watched calls 1, 2 and 4, after the first call.
    assert [later > earlier for earlier, later in pairwise(counts)] == [1, 1, 0, 1, 0]


@each_door
def test_sum_of_random_numbers_is_not_drawn_for_the_batch(door: str) -> None:
    """The generator of the caller had advanced further than the layers had drawn."""

    def scale(x: Tensor, y: Tensor) -> Tensor:
        total = functional.dropout(x.sum(), 0.4)
        return y * (1 + (total > 1e6))

    pipe, _ = build(Branching(scale))
    x = rows()
    for seed in range(4):
        torch.manual_seed(seed)
        train(pipe, x, door)
        state = torch.get_rng_state()
        torch.manual_seed(seed)
        advance_caller_rng()
        assert torch.equal(state, torch.get_rng_state())


@each_door
def test_branch_that_makes_no_difference_is_compared_seldom(
    door: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mask is skipped where it masks nothing, as in many transformers."""
    pipe, model = build(Branching(lambda x, y: y.masked_fill(x < -5, 0.0) if (x < -5).any() else y))
    compared = count_whole_batches(monkeypatch)
    for index in range(12):
        x = rows()
        x[index, 0] = -6.0
        train(pipe, x, door)
        functional.mse_loss(model(x), torch.zeros_like(x)).backward()
    assert same_gradients(pipe, model)
    assert len(compared) == 2  # in the first step, and when the ways first differed


def by_packed_positions(x: Tensor, y: Tensor) -> Tensor:
    """Read a number that is not computed from the rows, as the masks of transformers do."""
    positions = torch.arange(WIDTH).unsqueeze(0).expand(x.shape[0], -1)
    return y if (positions.diff() == 1).all() else y * 2


def by_heads(x: Tensor, y: Tensor) -> Tensor:
    """Select from a dim that is not that of the rows, as attention does."""
    query, key = torch.stack([y, x]).unbind(0)
    table = torch.arange(2.0 * ROWS, dtype=x.dtype)[:WIDTH]
    return query * key.tanh() + table


def count_whole_batches(monkeypatch: pytest.MonkeyPatch) -> list[RowsCheck]:
    compared, compare = list[RowsCheck](), RowsCheck.compare_all_microbatches

    def count(check: RowsCheck) -> str | None:
        compared.append(check)
        return compare(check)

    monkeypatch.setattr(RowsCheck, "compare_all_microbatches", count)
    return compared


@each_door
@pytest.mark.parametrize("is_traced", [False, True])
@pytest.mark.parametrize("function", [by_packed_positions, by_heads])
def test_numbers_and_dims_that_are_not_of_the_rows_cost_no_forward_of_the_batch(
    function: Callable[[Tensor, Tensor], Tensor],
    is_traced: bool,
    door: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipe, model = build(Branching(function), is_traced)
    compared = count_whole_batches(monkeypatch)
    for _ in range(2):
        x = rows()
        train(pipe, x, door)
        functional.mse_loss(model(x), torch.zeros_like(x)).backward()
    assert same_gradients(pipe, model)
    assert not compared


def has_sixth_row(x: Tensor) -> bool:
    try:
        x[5]
    except IndexError:
        return False
    return True


@each_door
@pytest.mark.parametrize("is_traced", [False, True])
def test_error_that_only_micro_batches_raise(is_traced: bool, door: str) -> None:
    pipe, _ = build(Branching(lambda x, y: y * 2 if has_sixth_row(x) else y), is_traced)
    for _ in range(2):
        with pytest.raises(AuditError, match="depends on how"):
            train(pipe, rows(), door)


def solve(x: Tensor, y: Tensor) -> Tensor:
    inverse: Tensor = torch.linalg.inv(torch.diag_embed(x.square() + 1))
    return y + inverse.diagonal(dim1=1, dim2=2)


def solve_or_skip(x: Tensor, y: Tensor) -> Tensor:
    try:
        return solve(x, y)
    except RuntimeError:
        return y


@each_door
@pytest.mark.parametrize(
    ("function", "count"), [(solve, 0), (solve_or_skip, 2)], ids=["raised", "caught"]
)
def test_error_that_no_rows_raise(
    function: Callable[[Tensor, Tensor], Tensor],
    count: int,
    door: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Later steps are watched only if the layer catches the error."""
    pipe, model = build(Branching(function))
    watched = count_calls(monkeypatch, BranchRecord, "watch")
    for _ in range(3):
        x = rows()
        train(pipe, x, door)
        functional.mse_loss(model(x), torch.zeros_like(x)).backward()
    assert same_gradients(pipe, model)
    assert len(watched) == count


def by_arange(x: Tensor) -> bool:
    return bool(torch.arange(len(x)).sum() > 50)


def by_written_zeros(x: Tensor) -> bool:
    total = torch.zeros(2, dtype=x.dtype)
    total[:1][0] = x.sum()
    return bool(total.sum() > 300)


def by_data_of_zeros(x: Tensor) -> bool:
    total = torch.zeros((), dtype=x.dtype)
    total.data.add_(x.sum())
    return bool(total > 300)


def by_batch_norm(x: Tensor) -> bool:
    mean = torch.zeros(WIDTH, dtype=x.dtype)
    functional.batch_norm(x * len(x), mean, torch.ones_like(mean), training=True, momentum=1.0)
    return bool(mean.sum() > 300)


@each_door
@pytest.mark.parametrize("decide", [by_arange, by_written_zeros, by_data_of_zeros, by_batch_norm])
def test_number_that_the_rows_reach_in_other_ways(
    decide: Callable[[Tensor], bool], door: str
) -> None:
    """It is the same for a micro-batch and for two rows, and another one for the whole batch."""
    pipe, _ = build(Branching(lambda x, y: y * 2 if decide(x) else y))
    with pytest.raises(AuditError, match="depends on how"):
        train(pipe, rows(9.0), door)


def test_sizes_that_are_plain_numbers_or_constants_are_not_read_from_the_rows() -> None:
    x = rows()
    with RowWatch() as watch:
        constants: list[Any] = [torch.tensor(WIDTH), torch.tensor(0.5)]
        functional.one_hot(torch.zeros(ROWS, dtype=torch.int64), WIDTH)
        torch.full((ROWS, WIDTH), constants[1]) + torch.arange(constants[0])
        torch.where(x > 0, x, x.new_zeros(x.shape)).repeat_interleave(2, dim=0).expand(3, -1, -1)
    assert not watch.reads


def test_numbers_that_are_drawn_are_not_constant() -> None:
    """The watch calls a number constant only if it is the same in every forward."""
    for draw in (torch.bernoulli, torch.rand_like, functional.dropout, torch.empty_like):
        with RowWatch() as watch:
            bool((draw(torch.full((4,), 0.5)) > 0).any())
        assert watch.reads_rows, draw
    with RowWatch() as watch:
        bool((torch.full((4,), 0.5) > 0).any())
    assert not watch.reads_rows
    assert watch.reads == [("__bool__", True)]


class OwnLoss(nn.Module):
    """A model with a loss of its own, which is a function of the losses of its rows."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return self.function(x.square().mean(1)).mean()


@each_door
@pytest.mark.parametrize(
    "function",
    [
        lambda losses: losses.topk(min(4, len(losses))).values,
        lambda losses: losses.sort(descending=True).values[:4],
        lambda losses: losses[:4],
        lambda losses: losses.narrow(0, 0, min(4, len(losses))),
        lambda losses: losses.split(4)[0],
        lambda losses: torch.stack(list(losses)[:4]),
    ],
)
def test_own_loss_that_selects_rows(function: Callable[[Tensor], Tensor], door: str) -> None:
    """Of two rows, and of two micro-batches, it is the mean of all of them."""
    torch.manual_seed(0)
    model = OwnLoss(function).double()
    pipe = Pipe(model, chunks=8, stages=2, devices=["cpu"] * 2, example=rows())
    with pytest.raises(
        AuditError, match=r"8 parts of the batch.* same rows together.*depends on how"
    ):
        pipe.step(rows()) if door == "step" else pipe(rows()).backward()


@each_door
@pytest.mark.parametrize(
    "function",
    [
        lambda losses: losses if len(losses) <= 4 else 2 * losses,
        lambda losses: losses * max(3, min(4, losses.shape[0])),
        lambda losses: losses * (2 if losses.size(0) / 2 > 2 else 1),
        lambda losses: losses * max(1, losses.numel() - 8),
        lambda losses: losses * (1 + int(losses.shape[0]) // 8),
        lambda losses: losses * (1 + losses.shape[0] // 8),
    ],
)
def test_own_loss_that_depends_on_more_rows_than_two_micro_batches_have(
    function: Callable[[Tensor], Tensor], door: str
) -> None:
    torch.manual_seed(0)
    model = OwnLoss(function).double()
    pipe = Pipe(model, chunks=8, stages=2, devices=["cpu"] * 2, example=rows())
    for _ in range(2):  # not only once
        with pytest.raises(AuditError, match=r"goes by the number of its rows.* depends on how"):
            pipe.step(rows()) if door == "step" else pipe(rows()).backward()


@each_door
@pytest.mark.parametrize("is_traced", [False, True])
def test_layer_that_goes_by_the_number_of_rows_of_a_later_batch(is_traced: bool, door: str) -> None:
    """The batches of the first steps were too small for the branch."""
    pipe, model = build(Branching(lambda x, y: y * 2 if x.shape[0] > 8 else y), is_traced)
    for _ in range(2):
        x = rows()[:8]
        train(pipe, x, door)
        functional.mse_loss(model(x), torch.zeros_like(x)).backward()
    assert same_gradients(pipe, model)
    for _ in range(2):
        with pytest.raises(AuditError, match="goes by the number of its rows"):
            train(pipe, rows(), door)


@each_door
def test_number_of_rows_that_makes_no_difference(
    door: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes are compared with each other, and with limits that no batch reaches."""

    def reshape(x: Tensor, y: Tensor) -> Tensor:
        count, width = x.shape
        assert (y.shape[0], 2 * count % 2) == (count, 0)
        if count > 1000 or count * width < 1:
            return y * 0
        return y.view(count, 2, -1).flatten(1)[: x.size(0)] / count * x.shape[0]

    pipe, model = build(Branching(reshape))
    compared = count_calls(monkeypatch, RowsCheck, "compare_all_microbatches")
    monkeypatch.setattr("penstock.stage.branches._find_selection", lambda *_: None)
    for count in (ROWS, ROWS, 5):
        x = rows()[:count]
        train(pipe, x, door)
        functional.mse_loss(model(x), torch.zeros_like(x)).backward()
    assert same_gradients(pipe, model)
    assert not compared


def double_many(losses: Tensor) -> Tensor:
    return losses.mean() * (2 if len(losses) > 4 else 1)


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda y, t: double_many((y - t).square().mean(1)),
        lambda y, t: {"loss": double_many((y - t).square().mean(1)), "accuracy": y.mean()},
        lambda y, t: (y - t).square().mean() * (1 + y.shape[0] // 8),
        lambda y, t: (y - t).square().mean() * (2 if has_sixth_row(y) else 1),
        lambda y, t: Weighted(double_many((y - t).square().mean(1)), len(y)),
    ],
)
@pytest.mark.parametrize("count", [16, 15])
def test_loss_function_that_goes_by_the_number_of_rows(
    loss_fn: Callable[..., Any], count: int
) -> None:
    pipe, _ = build(nn.Linear(WIDTH, WIDTH), loss_fn=loss_fn, chunks=8)
    pipe.step(rows()[:4], target=rows()[:4])
    for _ in range(2):
        with pytest.raises(AuditError, match="the loss of the whole batch is"):
            pipe.step(rows()[:count], target=rows()[:count])


@pytest.mark.parametrize("is_weighted", [False, True])
def test_loss_function_that_divides_by_the_number_of_rows_is_compared_once(
    is_weighted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loss_fn(output: Tensor, target: Tensor) -> Any:
        loss = (output - target).square().sum() / len(output)
        return Weighted(loss, len(output)) if is_weighted else loss

    compared = count_calls(monkeypatch, Reference, "compute_loss")
    pipe, model = build(nn.Linear(WIDTH, WIDTH), loss_fn=loss_fn)
    for row_count in (16, 16, 16, 7, 16, 7):
        x, target = rows()[:row_count], rows()[:row_count]
        pipe.step(x, target=target)
        result = loss_fn(model(x), target)
        (result.loss if is_weighted else result).backward()
    assert same_gradients(pipe, model)
    assert [len(output) for _, (output, _) in compared] == [16, 7]


class LateHook(nn.Module):
    """A model that registers a hook in its first forward."""

    def __init__(self, register: Callable[[nn.Linear], object]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register, self.is_done = register, False

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_done:
            self.register(self.first)
            self.is_done = True
        output: Tensor = self.last(self.first(x).tanh())
        return output


def hook_forward(layer: nn.Linear) -> None:
    layer.register_forward_hook(lambda _, inputs, output: output * 2)


def hook_gradient(layer: nn.Linear) -> None:
    layer.weight.register_hook(lambda gradient: gradient * 2)


@each_door
@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("register", [hook_forward, hook_gradient])
def test_hook_that_is_registered_in_the_first_forward(
    register: Callable[[nn.Linear], object], chunks: int, door: str
) -> None:
    """Each stage registered one of its own."""
    model = LateHook(register).double()
    pipe = Pipe(
        model, chunks, "never", stages=2, devices=["cpu"] * 2, loss_fn=functional.mse_loss,
        example=rows(), balance="parameters",
    )  # fmt: skip
    with pytest.raises(AuditError, match=r"the forward adds or removes hooks of 'first"):
        train(pipe, rows(), door)


@each_door
def test_hook_that_a_layer_registers_on_its_child(door: str) -> None:
    pipe, model = build(LateHook(hook_forward), checkpoint="never")
    for _ in range(2):
        x = rows()
        train(pipe, x, door)
        functional.mse_loss(model(x), torch.zeros_like(x)).backward()
    assert same_gradients(pipe, model)


@pytest.mark.parametrize("detaches", [False, True])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("layer", "is_refused"), [(0, True), (1, True), (2, False)])
def test_loss_that_reads_what_a_hook_has_kept(
    layer: int, is_refused: bool, schedule: str, detaches: bool
) -> None:
    """It was of another micro-batch, by chance. In the last stage it is of the same."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).double()
    kept: dict[str, Tensor] = {}

    def keep(_: nn.Module, inputs: Any, output: Tensor) -> None:
        kept["features"] = output.detach() if detaches else output

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return ((output - target) * kept["features"]).square().mean()

    layers = copy.deepcopy(model)
    for sequential in (model, layers):
        sequential[layer].register_forward_hook(keep)
    pipe = Pipe(
        layers, 4, "never", stages=2, devices=["cpu"] * 2, loss_fn=loss_fn, schedule=schedule
    )
    x, target = rows(), rows()
    if is_refused:
        with pytest.raises(AuditError, match="loss_fn reads what layers of an earlier stage"):
            pipe.step(x, target=target)
        return
    for _ in range(2):
        pipe.step(x, target=target)
        loss_fn(model(x), target).backward()
    assert same_gradients(pipe, model)


class KeepsLoss(nn.Module):
    """A layer that leaves an auxiliary loss in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.auxiliary_loss = nn.Linear(WIDTH, WIDTH), torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        self.auxiliary_loss = y.square().mean()
        return y


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("is_traced", [False, True])
def test_auxiliary_losses_in_attributes_that_loss_fn_sums(is_traced: bool, schedule: str) -> None:
    """Those of the first stage are of another micro-batch when the loss is computed."""
    layers = [KeepsLoss().double() for _ in range(3)]

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        losses = torch.stack([layer.auxiliary_loss for layer in layers])
        return functional.mse_loss(output, target) + losses.sum()

    model = Blocks(nn.Identity()) if is_traced else nn.Sequential(*layers)
    if isinstance(model, Blocks):
        model.blocks = nn.ModuleList(layers)
    pipe = Pipe(
        model, 4, stages=2, devices=["cpu"] * 2, loss_fn=loss_fn, schedule=schedule,
        example=rows() if is_traced else None,
    )  # fmt: skip
    with pytest.raises(AuditError, match="loss_fn reads what layers of an earlier stage"):
        pipe.step(rows(), target=rows())


@each_door
@pytest.mark.parametrize("uses_float32", [False, True])
def test_rounding_of_float32_inside_a_float64_model(uses_float32: bool, door: str) -> None:
    """A product of other shapes rounds differently: a false alarm. Without float32 it is one."""

    def scale(x: Tensor, y: Tensor) -> Tensor:
        y = y * (1 + 1e-7 * len(y))  # as large as the rounding of float32
        return y + (1e-30 * y).float().double() if uses_float32 else y

    pipe, _ = build(Branching(scale))
    if uses_float32:
        train(pipe, rows(), door)
        return
    with pytest.raises(AuditError, match="depends on how"):
        train(pipe, rows(), door)
