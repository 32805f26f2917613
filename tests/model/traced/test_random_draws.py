"""Tests that random numbers drawn in place between units are the same on every stage.

Each draw has a spread of 0, so that the unsplit model is the oracle. Its tensor starts with other
contents: a stage that does not receive what was drawn computes with those.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock import CutError, Pipe
from tests.model.traced.splitting import ONE_CUT, Four, assert_same, batches, made, piped


def zeros(like: Tensor, width: int = 1) -> Tensor:
    return torch.zeros(*like.shape[:-1], width, dtype=like.dtype)


def drop_path(y: Tensor) -> Tensor:
    return y.new_empty((len(y), 1, 1)).bernoulli_(1.0).div_(0.5)


def dropout(y: Tensor) -> Tensor:
    kept = zeros(y) + 3
    functional.dropout(kept, 1e-15, training=True, inplace=True)
    return kept


def initialized(y: Tensor) -> Tensor:
    return nn.init.uniform_(zeros(y), 2.0, 2.0)


def out_of_normal(y: Tensor) -> Tensor:
    drawn = zeros(y)
    torch.normal(2.0, 0.0, tuple(drawn.shape), out=drawn)
    return drawn


def slice_of(y: Tensor) -> Tensor:
    both = zeros(y, 2)
    both[..., :1].normal_(2.0, 0.0)
    return both.sum(-1, keepdim=True)


def view_made_before(y: Tensor) -> Tensor:
    both = zeros(y, 2)
    first = both[..., :1]
    both.normal_(2.0, 0.0)
    return first


def drawn_twice(y: Tensor) -> Tensor:
    drawn = zeros(y).normal_(2.0, 0.0)
    before = drawn * 1
    return drawn.normal_(3.0, 0.0) + before


def through_data(y: Tensor) -> Tensor:
    drawn = zeros(y)
    drawn.data.random_(2, 3)
    return drawn


def rrelu(y: Tensor) -> Tensor:
    return functional.rrelu(zeros(y) - 2, 0.5, 0.5, training=True, inplace=True)


DRAWS = (
    *(drop_path, dropout, initialized, out_of_normal, slice_of, view_made_before, drawn_twice),
    *(through_data, rrelu),
)


def drawing_model(draw: Callable[[Tensor], Tensor]) -> type[nn.Module]:
    """Return a model that draws from its input for all units, and from the output of one."""

    class Drawing(Four):
        def forward(self, x: Tensor) -> Any:
            shared = draw(x)
            y = self.a(x) * shared
            y = self.b(y + draw(y))
            return self.d(self.c(y) * shared)

    return Drawing


@pytest.mark.parametrize("draw", DRAWS, ids=lambda draw: draw.__name__)
def test_draws_in_place_between_units(draw: Callable[[Tensor], Tensor]) -> None:
    """Only the stage that drew had the numbers; the others computed with the tensor as it was."""
    assert_same(drawing_model(draw), lengths=(5,), cuts=ONE_CUT)


class Noisy(Four):
    """Draws into a buffer that several stages read."""

    noise: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("noise", torch.zeros(4))

    def forward(self, x: Tensor) -> Any:
        self.noise.normal_(2.0, 0.0)
        return self.d(self.c(self.b(self.a(x) + self.noise) + self.noise) + self.noise)


def test_draw_into_a_buffer_between_units() -> None:
    assert_same(Noisy, lengths=(5, 5))


def test_all_stages_have_the_numbers_of_one_draw() -> None:
    class Plain(Four):
        def forward(self, x: Tensor) -> Any:
            noise = torch.empty_like(x).normal_()
            return self.d(self.c(self.b(self.a(x))) + (noise - noise))

    class Split(Four):
        def forward(self, x: Tensor) -> Any:
            noise = torch.empty_like(x).normal_()
            kept = self.a(x) * 0 + noise
            return self.d(self.c(self.b(self.a(x))) + (noise - kept.detach()))

    (x,) = batches(5)
    with torch.no_grad():
        expected = made(Plain)(x)
        torch.testing.assert_close(piped(made(Split), x, 4)(x), expected, rtol=0, atol=1e-12)


def generated(shape: Any, generator: torch.Generator, in_place: bool) -> Tensor:
    if in_place:
        return torch.empty(shape, dtype=torch.float64).uniform_(generator=generator)
    return torch.rand(shape, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("in_place", [True, False])
def test_one_stage_draws_from_a_generator_of_the_model(in_place: bool) -> None:
    """Every stage drew from the generator, each other numbers."""
    generator = torch.Generator()

    class Generating(Four):
        def forward(self, x: Tensor) -> Any:
            noise = generated(x.shape, generator, in_place)
            for unit in (self.a, self.b, self.c, self.d):
                x = unit(x) + noise
            return x

    (x,) = batches(5)
    state = generator.get_state()
    model = made(Generating)
    pipe = Pipe(model, 2, "never", stages=4, devices=["cpu"] * 4, example=x, balance="parameters")
    assert torch.equal(generator.get_state(), state), "the dry run has moved the generator"
    with torch.no_grad():
        expected = torch.cat([model(piece) for piece in x.chunk(2)])
        generator.set_state(state)
        torch.testing.assert_close(pipe(x), expected, rtol=0, atol=1e-12)


def test_generator_among_the_inputs_is_left_alone_by_a_dry_run() -> None:
    class Given(Four):
        def forward(self, x: Tensor, generator: torch.Generator, log: list[int]) -> Any:
            log.append(1)
            return self.d(self.a(x) + torch.rand(4, generator=generator))

    generator, log = torch.Generator(), list[int]()
    state = generator.get_state()
    Pipe(
        made(Given),
        1,
        "never",
        stages=2,
        devices=["cpu"] * 2,
        example=(*batches(5), generator, log),
    )
    assert torch.equal(generator.get_state(), state)
    assert log == []


def test_branch_on_random_numbers_is_refused_as_such() -> None:
    class Branching(Four):
        def forward(self, x: Tensor) -> Any:
            drawn = torch.empty(()).normal_()
            return self.d(self.a(x)) if drawn.exp() > 1 else self.d(self.b(x))

    with pytest.raises(CutError, match="reads a value that was computed from random numbers"):
        piped(made(Branching), batches(5)[0], stages=2)


SCRATCH = torch.zeros(4, dtype=torch.float64)


class ChangesAttribute(Four):
    def __init__(self) -> None:
        super().__init__()
        self.scratch = torch.zeros(4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Any:
        self.scratch[:2].normal_()
        return self.d(self.c(self.b(self.a(x)))) + self.scratch


class ChangesGlobal(Four):
    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        SCRATCH.add_(y.detach().mean((0, 1)))
        return self.d(self.c(self.b(y))) + SCRATCH


@pytest.mark.parametrize(
    ("kind", "name"), [(ChangesAttribute, "scratch"), (ChangesGlobal, "SCRATCH")]
)
def test_change_of_a_tensor_that_is_not_a_buffer_is_refused(
    kind: type[nn.Module], name: str
) -> None:
    """A recomputation repeated the change, and the stages wrote into each other's numbers."""
    with pytest.raises(CutError, match=f"the forward changes '{name}' in place, a tensor that is"):
        piped(made(kind), batches(5)[0], stages=2)


class DropsBetweenUnits(nn.Module):
    """Applies dropout between its two layers, in training."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Module()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.dropout(self.first(x), 0.3, self.block.training)
        y: Tensor = self.second(x)
        return y.square().mean()


def test_generator_stays_where_it_is_when_nothing_is_drawn_between_units_any_more() -> None:
    """The stages have no module whose mode tells that the dropout is off."""
    model, x = DropsBetweenUnits(), torch.randn(6, 4)
    pipe = Pipe(model, 2, stages=2, devices=["cpu"] * 2, example=x, units=["first", "second"])
    for is_training in (True, False, True):
        model.block.train(is_training)
        before = torch.get_rng_state()
        pipe.step(x)
        assert torch.equal(torch.get_rng_state(), before) is not is_training
