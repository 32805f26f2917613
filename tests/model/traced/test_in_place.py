"""Tests that in-place changes between units on one stage are seen by all other stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock import CutError, PenstockError
from tests.model.traced.splitting import ONE_CUT, Four, assert_same, batches, made, piped
from tests.models.architecture import squares


class ChangedTwice(Four):
    """A tensor is sent once after its first change and once after its second."""

    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        z = self.c(self.b(y) + y)
        q = y * 1.0
        q.add_(1.0)
        z = z + q
        q.mul_(0.5)
        return self.d(z + q)


class ChangedByAView(Four):
    """A tensor is sent before and after it is changed through a view."""

    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        z = self.b(y.clone())
        y = y.clone()
        view = y[..., :2]
        z = self.c(z + y)
        view.mul_(2)
        return self.d(z + y)


class FreeThenChanged(Four):
    """A stage creates a tensor itself, and later receives it as another stage changed it."""

    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        mask = torch.ones_like(x)
        view = mask[..., :2]
        z = self.c(self.b(y)) + mask
        view += y[..., :2]
        z = z + mask
        view *= 0.5
        return self.d(z + mask)


class Statistics(Four):
    """PyTorch updates batch statistics without a new version; a recomputation must not."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: Tensor
        self.spread: Tensor
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("spread", torch.ones(4))

    def forward(self, x: Tensor) -> Any:
        y = self.b(self.a(x)).transpose(1, 2)
        y = functional.batch_norm(y, self.mean, self.spread, training=self.training)
        return self.d(self.c(y.transpose(1, 2)))


class Slices(Four):
    """Changes a slice of a tensor that another stage has made."""

    def forward(self, x: Tensor) -> Any:
        y = self.a(x) * 1.0
        z = self.b(y.clone())
        y[..., :2] += z[..., 2:]
        w = self.c(y.clone())
        y[..., 1:] *= 0.5
        y[..., 0] = w[..., 0]
        return self.d(w + y)


class Gathered(Four):
    """Each stage writes its part into one tensor."""

    def forward(self, x: Tensor) -> Any:
        out = x.new_empty(3, *x.shape)
        out[0] = self.a(x)
        out[1] = self.b(out[0].clone())
        out[2] = self.c(out[1].clone())
        return self.d(out.sum(0))


class Selected(Four):
    """Each stage writes into a view of a new tensor that earlier stages have changed."""

    def forward(self, x: Tensor) -> Any:
        out = x.new_zeros(3, *x.shape)
        y = x
        for at, unit in enumerate((self.a, self.b, self.c)):
            y = unit(y)
            out.select(0, at).copy_(y)
            out[at].narrow(-1, 0, 2).mul_(3)
        return self.d(out.sum(0))


class SideBySide(Four):
    """Changes one of two views of a new tensor."""

    def forward(self, x: Tensor) -> Any:
        out = torch.zeros(2, *x.shape, dtype=x.dtype)
        first, second = out[0], out[1]
        y = self.a(x)
        first += y
        return self.d(self.c(self.b(y)) + second + out.sum(0))


class Chained(Four):
    """Calls several in-place methods on a tensor that the next stage changes, too."""

    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        for unit in (self.b, self.c):
            r = unit(h)
            h = h.clone()
            h += r
            h.add_(r).mul_(0.7)
            torch.relu_(h)
        return self.d(h)


class Cloning(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.clone())


class ChangedForOneReader(Four):
    """Two stages receive a tensor, and the second one changes it."""

    def __init__(self) -> None:
        super().__init__()
        self.b = Cloning(4, 4)

    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        return self.d(y.add_(self.c(self.b(y))))


class Counted(Four):
    """Updates buffers of the parent in place and by assignment."""

    calls: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        y = self.a(x)
        self.mean = 0.9 * self.mean + y.detach().mean((0, 1))
        return self.d(self.c(self.b(y)))


class Same(nn.Module):
    """A unit that returns its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x


class GivenBack(Four):
    """A unit returns its argument, which an earlier stage then changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.same, self.c = Same(), Cloning(4, 4)

    def forward(self, x: Tensor) -> Any:
        x = self.b(self.a(x))
        y = self.same(x)
        y.mul_(2)
        return self.d(self.c(x) + y) + x


class TwoViews(Four):
    """Two views of a tensor that follows from the inputs are changed between different units."""

    def __init__(self) -> None:
        super().__init__()
        self.a = Cloning(4, 4)

    def forward(self, x: Tensor) -> Any:
        x = x.clone()
        first, second = x[..., :2], x[..., 2:]
        y = self.a(x)
        first.add_(1)
        y = self.c(self.b(y) + x)
        second.mul_(2)
        return self.d(x + y)


class AsksAfterAWrite(Four):
    """Asks whether a tensor requires grad, before and after a unit's output is written into it."""

    def forward(self, x: Tensor) -> Any:
        out = torch.zeros_like(x)
        factor = 2 if out.requires_grad else 3
        out.add_(self.a(x))
        y = self.c(self.b(out.clone()))
        return self.d(y * factor * (5 if out.requires_grad else 7)) + out


class HooksOnInputs(Four):
    """Registers a hook on a tensor that follows from the inputs and is used on all stages."""

    def forward(self, x: Tensor) -> Any:
        base = (x * 2).requires_grad_()
        base.register_hook(lambda gradient: gradient * 3)
        scaled = base * self.d.bias
        scaled.register_hook(lambda gradient: gradient * 3)
        for unit in (self.a, self.b, self.c, self.d):
            x = unit(x + base) + scaled
        return x


@pytest.mark.parametrize(
    "kind",
    [
        *(GivenBack, TwoViews, AsksAfterAWrite, HooksOnInputs),
        *(ChangedTwice, ChangedByAView, FreeThenChanged, Statistics, Slices, Gathered),
        *(SideBySide, Chained, Counted, Selected, ChangedForOneReader),
    ],
    ids=lambda kind: kind.__name__,
)
def test_in_place_changes_between_units(kind: type[nn.Module]) -> None:
    assert_same(kind)


class Hooking(nn.Linear):
    """Puts a hook on its input, as a layer that scales gradients does."""

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * 3)
        return super().forward(x)


class HookOnAnInput(Four):
    """Registers a hook on a tensor that follows from an input and is used on several stages."""

    def forward(self, x: Tensor) -> Any:
        scaled = x * 2
        if scaled.requires_grad:
            scaled.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        return self.d(self.c(self.b(self.a(scaled)))) + scaled


class HookAfterUse(Four):
    """The same with a hook on a tensor that an earlier operation has used."""

    def forward(self, x: Tensor) -> Any:
        scaled = x * 2
        y = self.a(scaled)
        if scaled.requires_grad:
            scaled.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        return self.d(self.c(self.b(y))) + scaled


class HookInAUnit(Four):
    """A unit registers a hook on a tensor that a later stage uses as well."""

    def __init__(self) -> None:
        super().__init__()
        self.b = Hooking(4, 4)

    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        return self.d(self.c(self.b(y)) + y)


class HookInAUnitOnly(HookInAUnit):
    """No other stage uses the tensor."""

    def forward(self, x: Tensor) -> Any:
        return self.d(self.c(self.b(self.a(x))))


def assert_same_input_gradients(kind: type[nn.Module], cuts: tuple[int, ...]) -> None:
    (x,) = batches(5)
    gradients = []
    for stages in (0, *cuts):
        model, given = made(kind), x.clone().requires_grad_()
        if stages:
            piped(model, given, stages).step(given)
        else:
            squares(model(given)).backward()
        gradients.append(given.grad)
    torch.testing.assert_close(gradients[1:], gradients[:1] * len(cuts), rtol=0, atol=1e-12)


def test_hook_on_a_tensor_of_several_stages() -> None:
    """The gradient of the input was wrong, and the audit does not compare that."""
    (x,) = batches(5)
    assert_same_input_gradients(HookOnAnInput, (2, 4))
    with pytest.raises(PenstockError, match="register_hook puts a hook on a tensor that stages 0,"):
        piped(made(HookAfterUse), x.clone().requires_grad_(), stages=2)


def test_hook_of_a_unit_on_its_argument() -> None:
    assert_same(HookInAUnitOnly, cuts=ONE_CUT)
    with pytest.raises(PenstockError, match="unit 'b' puts a hook on a tensor that stages 1, 2"):
        piped(made(HookInAUnit), batches(5)[0], stages=4)


class View(nn.Linear):
    """Returns a view, as a layer that removes a token does."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, 1:]


class Rectified(nn.Linear):
    """Changes its argument in place."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.relu_(x))


class ChangedView(Four):
    """A unit changes its argument in place, a view that another unit has returned.

    Tracing it ended the process: an exception was raised inside autograd's own code.
    """

    def __init__(self) -> None:
        super().__init__()
        self.a = View(4, 4)
        self.b = Rectified(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.d(self.c(self.b(self.a(x))))


class ChangedDraw(ChangedView):
    """A unit changes in place what was drawn from an input that requires a gradient."""

    def forward(self, x: Tensor) -> Any:
        return self.d(self.c(self.b(functional.dropout(x, 1e-12))))


def test_unit_changes_its_argument_in_place() -> None:
    assert_same(ChangedView, cuts=ONE_CUT)
    assert_same_input_gradients(ChangedDraw, (2, 3))


class Behind(Four):
    """The first stage reads a buffer that the last one changes."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Any:
        y = self.c(self.b(self.a(x + self.mean)))
        self.mean = 0.9 * self.mean + y.detach().mean((0, 1))
        return self.d(y)


def test_buffer_of_two_stages_changed_between_units_is_refused() -> None:
    (x,) = batches(5)
    with pytest.raises(PenstockError, match="the forward changes the buffer 'mean' between units"):
        piped(made(Behind), x, stages=3)


class Centred(Four):
    """Updates the mean of each unit in training, and subtracts it."""

    def __init__(self) -> None:
        super().__init__()
        for at in range(3):
            self.register_buffer(f"mean{at}", torch.zeros(4))

    def forward(self, x: Tensor) -> Any:
        for at, unit in enumerate((self.a, self.b, self.c)):
            x = unit(x)
            if self.training:
                mean = 0.9 * getattr(self, f"mean{at}") + x.detach().mean((0, 1))
                setattr(self, f"mean{at}", mean)
            x = x - getattr(self, f"mean{at}")
        return self.d(x)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_buffer_written_in_training_is_read_on_the_same_stage_in_eval(stages: int) -> None:
    """In eval mode, a stage that did not have the buffer was to read it."""
    (x,) = batches(5)
    model = made(Centred)
    pipe = piped(model, x, stages)
    pipe.step(x)
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(pipe.eval()(x), model(x), rtol=0, atol=1e-12)


class DrawnThenViewed(Four):
    """A view of a tensor that was drawn on one stage follows its later changes."""

    def forward(self, x: Tensor) -> Any:
        base = x * 1.5
        base.detach()[..., 2:].normal_(2.0, 0.0)
        view = base.transpose(0, 0)
        base.mul_(0.5)
        frozen = torch.zeros_like(base).detach().clone()
        base.add_(1)
        scaled, other = frozen * 2, view * 3
        y, z = self.a(other), self.b(view)
        return base + scaled + self.d(y) + self.c(scaled) + z + other + view


def test_view_of_a_drawn_tensor_on_other_stages() -> None:
    assert_same(DrawnThenViewed, (5,))


class Passing(nn.Module):
    """A unit that returns its input, perhaps after it has doubled it in place and copied it."""

    def __init__(self, doubles: bool) -> None:
        super().__init__()
        self.bias, self.doubles = nn.Parameter(torch.ones(1)), doubles

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2) + self.bias if self.doubles else x


class AliasChangedTwice(Four):
    """An alias on another stage is changed twice before it is used again."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Passing(False), Passing(True)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Any:
        base = x * 1.5
        alias, sums = base.detach(), torch.zeros_like(base)
        same = self.a(base)
        alias.detach()[..., :2].normal_(2.0, 0.0)
        sums[..., 2:] += same[..., 2:].clone()
        y = self.b(sums)
        same[..., :2] += alias[..., :2].clone()
        same[..., 2] = alias[..., 0].clone()
        return self.c(torch.zeros_like(y)) + self.d(same) + y


def test_alias_of_another_stage_that_is_changed_twice_is_refused() -> None:
    """Only the last change before the alias is used again was looked at."""
    (x,) = batches(5)
    with pytest.raises(CutError, match="changes a tensor in place, and stage 1 has a view of it"):
        piped(made(AliasChangedTwice), x, 4)
