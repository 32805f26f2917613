"""Tests that a pipe follows later changes of the model and the values of its inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import CutError, Pipe
from penstock.model.traced.dry_run import FakeTensorFactory, run_on_fakes
from penstock.model.traced.traced_partition import MAX_TRACES_PER_KEY, TracedPartition
from tests.model.traced.splitting import Four, assert_same, batches, made, piped
from tests.models.architecture import squares
from tests.support import same_gradients


class Set(Four):
    """A model whose forward depends on attributes of several types."""

    def __init__(self) -> None:
        super().__init__()
        self.scales: Any = (1.0, 1.0)
        self.more = [1.0]
        self.act: Any = torch.tanh
        self.mask = torch.ones(4)

    def forward(self, x: Tensor) -> Any:
        for unit in (self.a, self.b, self.c, self.d):
            x = self.act(unit(x)) * self.scales[0] * self.more[0] * self.mask
        return x


def _in_the_list(model: Any) -> None:
    model.more[0] = 3.0


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model, "scales", (2.0, 1.0)),
        lambda model: setattr(model, "more", [2.0]),
        _in_the_list,
        lambda model: setattr(model, "act", torch.relu),
        lambda model: setattr(model, "mask", torch.full((4,), 2.0)),
    ],
    ids=["tuple", "another list", "in the list", "function", "tensor"],
)
def test_attributes_set_on_the_model_after_tracing_are_used(change: Any) -> None:
    """Stages kept all attributes except plain ones from when the pipe was made."""
    (batch,) = batches(5)
    model = made(Set)
    pipe = piped(model, batch, 3)
    pipe(batch)
    change(model)
    torch.testing.assert_close(pipe(batch), model(batch))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), 1.0

    def forward(self, x: Tensor) -> Any:
        return self.linear(x) * self.scale


class Twice(nn.Module):
    """A model that calls one unit on two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.twice = nn.Linear(4, 4), nn.Linear(4, 4), Scaled()

    def forward(self, x: Tensor) -> Any:
        return self.twice(self.b(self.twice(self.a(x))))


def test_attribute_set_on_a_unit_of_two_stages_is_used_on_both() -> None:
    """The copy on the second stage kept the attributes from when the pipe was made."""
    (batch,) = batches(5)
    model: Any = made(Twice)
    pipe = piped(model, batch, 2)
    model.twice.scale = 2.0
    torch.testing.assert_close(pipe(batch), model(batch))


class Late(Four):
    """For some inputs only, it changes in place what an earlier stage has made."""

    def forward(self, x: Tensor, late: bool = False) -> Any:
        y = self.a(x)
        z = self.c(self.b(x))
        if late:
            y += z
        else:
            y = y + z
        return self.d(y)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_in_place_change_that_depends_on_the_inputs(checkpoint: str) -> None:
    """The stage had not changed its inputs before; with other inputs it does."""
    (batch,) = batches(5)
    model, unsplit = made(Late), made(Late)
    pipe = Pipe(
        model, 2, checkpoint, stages=[1, 3], devices=["cpu"] * 2, example=batch, loss_fn=squares
    )
    for late in (False, True, False):
        for piece in batch.chunk(2):
            (squares(unsplit(piece, late)) / 2).backward()
        pipe.step(batch, late=late)
    assert same_gradients(model, unsplit)


class OwnScale(Four):
    """For some inputs only, it multiplies a value of the first stage by a part of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.Parameter(torch.rand(3, 4) + 0.5)

    def forward(self, x: Tensor, late: bool = False) -> Any:
        y = self.a(x)
        z = (y + x if late else x) * self.scales[1]
        return self.d(self.c(self.b(z))) + y


def test_operation_that_depends_on_the_inputs_runs_where_its_parameter_is() -> None:
    """The product ran on the stage of its other argument, before the parameter's stage."""
    (batch,) = batches(5)
    model, unsplit = made(OwnScale), made(OwnScale)
    pipe = Pipe(model, 2, stages=[1, 3], devices=["cpu"] * 2, example=batch, loss_fn=squares)
    for late in (False, True, False):
        for piece in batch.chunk(2):
            (squares(unsplit(piece, late)) / 2).backward()
        pipe.step(batch, late=late)
    assert same_gradients(model, unsplit)


class SentAsItWas(Four):
    """Sends the result of a unit to the last stage, and then changes it on the first."""

    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        z = self.c(self.b(x) + y)
        y.mul_(0.5)
        return self.d(z + y)


def test_copy_of_a_sent_tensor_is_not_a_traced_operation() -> None:
    """The copy that a stage makes for another stage was taken for an operation of the forward."""
    assert_same(SentAsItWas)


class Asking(Four):
    """Reads a number from each batch."""

    def forward(self, x: Tensor) -> Any:
        largest = float(x.abs().max())
        return self.d(self.c(self.b(self.a(x)))) / largest


def test_trace_cache_is_bounded() -> None:
    """One trace was kept for every number that a forward had ever read."""
    model = made(Asking)
    example, *rest = batches(*[3] * (MAX_TRACES_PER_KEY + 3))
    pipe = piped(model, example, 2)
    for batch in rest:
        torch.testing.assert_close(
            pipe(batch), torch.cat([model(piece) for piece in batch.chunk(2)])
        )
    whole = pipe._placed_partition.partition
    assert isinstance(whole, TracedPartition)
    assert [len(ways) for ways in whole._memory.cache.values()] == [MAX_TRACES_PER_KEY] * len(
        whole._memory.cache
    )


class Filled(Four):
    """Fills a new tensor with the numbers of one unit, with the dtype of another."""

    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        z = self.c(self.b(y))
        return self.d(z + z.new_tensor(y.detach()))


@pytest.mark.filterwarnings("ignore:To copy construct")
def test_new_tensor_filled_with_values_of_another_stage() -> None:
    """Only for the first argument is the metadata enough; of the others the values count."""
    assert_same(Filled)


class Picks(nn.Linear):
    """A layer whose output shape depends on its values."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        picked = x.sum((0, 2)) > 0
        picked[0] = True
        return x[:, picked]


class Picked(Four):
    """A model that does not read the data-dependent shape."""

    def __init__(self) -> None:
        super().__init__()
        self.b = Picks(4, 4)

    def forward(self, x: Tensor) -> Any:
        y = self.b(self.a(x))
        return self.d(self.c(y) + y.square()).sum(1)


class PickedAndMeasured(Picked):
    """A model in which every stage reads the data-dependent shape."""

    def forward(self, x: Tensor) -> Any:
        y = self.b(self.a(x))
        return self.d(self.c(y)).sum(1) / y.square().shape[1]


class PickedApart(Picked):
    def forward(self, x: Tensor) -> Any:
        y = self.b(self.a(x))
        return self.d(self.c(sum(y.unbind(1))))


def test_data_dependent_shape() -> None:
    """A mean over the values that a unit had picked was divided by the number seen in the trace."""
    assert_same(Picked, lengths=(7, 7, 9))
    model, (example, batch) = made(PickedAndMeasured), batches(7, 7)
    pipe = piped(model, example, 3)
    with pytest.raises(CutError, match=r"unit 'b' returned a tensor of shape \(2, \d, 4\), but"):
        pipe(batch)
    pipe = piped(made(PickedApart), example, 3)
    with pytest.raises(CutError, match=r"unbind returned \d values, but the trace has \d"):
        pipe(batch)


class Anchors(nn.Linear):
    """A layer that keeps a tensor for the next call, and then reads its values."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.kept: Any = [torch.arange(4)]

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.kept = [one.to(x.dtype) for one in self.kept]
        kept: Tensor = self.kept[0]
        return x + kept[torch.where(kept > 1)[0]].sum()


class Anchored(Four):
    def __init__(self) -> None:
        super().__init__()
        self.b = Anchors()

    def forward(self, x: Tensor) -> Any:
        return self.d(self.c(self.b(self.a(x))))


def test_tensor_kept_by_a_unit_during_the_fake_dry_run() -> None:
    """The unit ran again with real tensors, and found the fake one that it had kept."""
    assert_same(Anchored)


def test_tied_weight_that_is_not_on_the_device_of_the_batch() -> None:
    """Its fake tensor was taken for a tensor of the unit in which it was first needed."""
    embedding, head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
    head.weight = embedding.weight
    factory = FakeTensorFactory(torch.device("meta"))
    ids = factory.from_tensor(torch.zeros(2, 3, dtype=torch.long))
    hidden, _ = run_on_fakes(factory, "embedding", embedding, (ids,), {}, {})
    output, _ = run_on_fakes(factory, "head", head, (hidden,), {}, {})
    assert output.shape == (2, 3, 8)


class Heads(nn.Module):
    """A layer that puts a second result into a list that it shares with the model."""

    def __init__(self, found: list[Tensor]) -> None:
        super().__init__()
        self.block, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.found = found

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(x)
        self.found[0] = self.head(x)
        return x


class Supervised(Four):
    def __init__(self) -> None:
        super().__init__()
        self.found = [torch.zeros(1, dtype=torch.float64)]
        self.heads = Heads(self.found)

    def forward(self, x: Tensor) -> Any:
        x = self.d(self.c(self.b(self.heads(self.a(x)))))
        return x, x + self.found[0]


def test_list_shared_by_a_unit_and_the_model() -> None:
    """Stages had copies of the list, and the model read the old contents of its own."""
    assert_same(Supervised)


class Noisy(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Any:
        return self.dropout(super().forward(x))


class Again(nn.Module):
    """A model whose first unit is its last one, too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = Noisy(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.inner(self.outer(self.inner(x)))


def test_copy_of_a_shared_unit_follows_train_and_eval() -> None:
    """The copy kept on applying dropout after `eval()`."""
    torch.manual_seed(0)
    model, x = Again(), torch.ones(6, 4)
    pipe = Pipe(model, 2, stages=[1, 1, 1], example=x, runtime="inline")
    with torch.no_grad():
        for mode in (False, True, False):
            pipe.train(mode)
            alike = torch.allclose(pipe(x), model.eval()(x))
            model.train(mode)
            assert alike is not mode
