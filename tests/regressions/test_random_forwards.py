"""Forwards that `make fuzz` found, cut down: equal to the unsplit model, or refused.

Each of them once trained on other numbers, or failed with an error of PyTorch.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import CutError, Pipe, PipeSequential, RunError

WIDTH = 4


class Block(nn.Module):
    """A linear layer around which a statement runs. `config` is shared with the model."""

    def __init__(self, statement: str, config: SimpleNamespace) -> None:
        super().__init__()
        self.lin, self.config = nn.Linear(WIDTH, WIDTH).double(), config
        self.register_buffer("mean", torch.zeros(WIDTH).double())
        self.statement, self.name, self.calls = compile(statement, "block", "exec"), "", 0

    def forward(self, x: Tensor) -> Tensor:
        names = {"self": self, "x": torch.tanh(self.lin(x)), "given": x}
        exec(self.statement, names)
        result: Tensor = names["x"]  # type: ignore[assignment]
        return result


class Model(nn.Module):
    """Blocks in a row, with statements before and after them."""

    def __init__(
        self,
        before: str = "",
        after: str = "",
        block: str = "",
        between: str = "",
        order: Sequence[int] = (0, 1, 2),
    ) -> None:
        super().__init__()
        self.config = SimpleNamespace(times=0.8, table={"gain": 1.1})
        self.blocks = nn.ModuleList(Block(block, self.config) for _ in range(3))
        statements = before, between, after
        self.before, self.between, self.after = (compile(s, "model", "exec") for s in statements)
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        names = {"self": self, "x": x, "given": x, "torch": torch, "halve": halve}
        exec(self.before, names)
        for number, index in enumerate(self.order):
            names["x"] = self.blocks[index](names["x"])
            if not number:
                exec(self.between, names)
        exec(self.after, names)
        result: Tensor = names["x"]  # type: ignore[assignment]
        return result


def halve(gradient: Tensor) -> Tensor:
    return gradient / 2


def squares(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def _assert_equal(
    model: Model, learns: bool = False, checkpoint: str = "never", audit: str = "first"
) -> None:
    """Train two steps as a pipe and unsplit, and compare losses and gradients."""
    unsplit, chunks = copy.deepcopy(model), 2
    x, target = torch.randn(2, 4, WIDTH).double()
    x.requires_grad_(learns)
    pipe = Pipe(
        model,
        chunks,
        stages=[1] * len(model.order),
        example=x.detach().clone().requires_grad_(learns),
        checkpoint=checkpoint,
        audit=audit,
    )
    for _ in range(2):
        given, own = (x.detach().clone().requires_grad_(learns) for _ in range(2))
        loss = pipe.step(given, target=target, loss_fn=squares).loss
        expected = 0.0
        for rows in (slice(0, 2), slice(2, 4)):
            share = squares(unsplit(own[rows]), target[rows]) / chunks
            share.backward()
            expected += share.item()
        assert abs(loss.item() - expected) < 1e-10
        tensors = [given, *model.parameters()], [own, *unsplit.parameters()]
        for actual, wanted in zip(*tensors, strict=True):
            assert (actual.grad is None) == (wanted.grad is None)
            if wanted.grad is not None:
                torch.testing.assert_close(actual.grad, wanted.grad, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("before", "after", "block"),
    [
        ("", "self.config.table['gain'] = 2", "x = x * self.config.table['gain']"),
        ("", "self.config.times = 1 + 0.1 * len(x)", "x = x * self.config.times"),
        ("x = x * self.config.times", "self.config.times = 0.5", ""),
        ("x = x * self.config.times\nself.config.times = 1 + 0.1 * len(x)", "", ""),
        # The next call multiplies by 0.5 twice. The first one does so once.
        ("x = x * self.config.times * 0.5", "self.config.times = 0.5", ""),
    ],
)
def test_forward_that_leaves_a_value_for_its_next_call_is_refused(
    before: str, after: str, block: str
) -> None:
    """The change was undone after each micro-batch, also where a unit or an input-only operation
    of the next call reads it."""
    with pytest.raises(CutError, match="depends on what an earlier call has left there"):
        _assert_equal(Model(before, after, block), audit="off")


def test_forward_may_leave_a_value_that_its_next_call_sets_first() -> None:
    model = Model("self.config.times = 2\nx = x * self.config.times", "self.config.times = 0.8")
    _assert_equal(model)


@pytest.mark.parametrize(
    "block",
    [
        "self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)",
        "self.name += '+'; x = x * len(self.name)",
        "self.calls += 1; x = x * self.calls",
    ],
)
def test_unit_on_several_stages_that_assigns_a_buffer_or_a_string_is_refused(block: str) -> None:
    """Each stage has a copy of the unit, so an assignment did not reach the others."""
    with pytest.raises(CutError, match=r"unit 'blocks\.0' changes \w+ in each of its calls"):
        _assert_equal(Model(block=block, order=(0, 1, 2, 0)), audit="off")


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
def test_hook_that_a_recomputed_forward_puts_on_an_input(checkpoint: str) -> None:
    """The first recomputation of each kind is done twice, and left its hook on the input."""
    hooked = (
        "y = x * 1.5\nif x.requires_grad:\n    x.register_hook(halve)\n"
        "x = y * 1.1\nif x.requires_grad:\n    x.register_hook(halve)\nz = x"
    )
    _assert_equal(Model(hooked, "x = x + z"), learns=True, checkpoint=checkpoint)


def test_change_of_a_tensor_after_unbind() -> None:
    """PyTorch cannot tell whether the columns, which nobody uses again, are leaves."""
    unbound = (
        "y = x * 1.5\nx = y\nfor column in y.unbind(1):\n    x = x + column[:, None]\n"
        "if x.requires_grad:\n    x.register_hook(halve)\ntorch.relu_(y)\nx = x + y"
    )
    _assert_equal(Model(unbound), learns=True)


@pytest.mark.parametrize("learns", [False, True])
def test_layer_that_asks_for_requires_grad_is_audited(learns: bool) -> None:
    """The audit ran the parts of a micro-batch without gradients, and compared them with the whole,
    or joined rows that did not require grad."""
    _assert_equal(Model(block="x = x * 0.9 if given.requires_grad else x + 0.1"), learns=learns)


@pytest.mark.parametrize("between", ["given.mul_(0.9)", "given[:, 1:].add_(0.1)", "x.mul_(2)"])
@pytest.mark.parametrize("asks", [False, True], ids=["traced", "asks for a value"])
def test_input_that_is_changed_after_a_unit_has_returned_a_view_of_it(
    between: str, asks: bool
) -> None:
    """The view counted as computed from the inputs alone, and its fake tensor as a real one."""
    value = "int(x.detach().sum() > 0); " if asks else ""
    model = Model(block=f"{value}x = given[:, :] if self.is_first else x", between=between)
    for number, module in enumerate(model.blocks):
        vars(module)["is_first"] = not number
    if asks:  # a dry run on fake tensors is not possible, so the trace does not show the view
        with pytest.raises(CutError, match="returned one of its arguments or a view of it"):
            _assert_equal(model, audit="off")
    else:
        _assert_equal(model)


class Saved(nn.Linear):
    """Changes what its activation has saved, which is an error if the input needs a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(super().forward(x))
        y.detach()[:, :2].mul_(0.5)
        return y


class Detached(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).detach()


@pytest.mark.parametrize("layer", [nn.Identity(), Detached(WIDTH, WIDTH)])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_recomputed_stage_whose_output_needs_no_gradient(layer: nn.Module, checkpoint: str) -> None:
    """A single output was taken to need one, as if it came from the stage's parameters."""
    layer.register_module("unused", nn.Linear(WIDTH, WIDTH))
    frozen, last = Saved(WIDTH, WIDTH).requires_grad_(False), nn.Linear(WIDTH, WIDTH)
    model, x = nn.Sequential(layer, frozen, last).double(), torch.randn(4, WIDTH).double()
    pipe = Pipe(model, 2, stages=3, checkpoint=checkpoint)
    loss = pipe.step(x, target=x, loss_fn=squares).loss
    assert abs(loss - squares(model(x), x)) < 1e-12
    assert all(parameter.grad is None for parameter in layer.parameters())


class Copies(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.clone()


class InPlace(nn.Linear):
    """Changes its input in place, which PyTorch refuses behind a backward hook."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(0.5))


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_backward_hook_behind_a_recomputed_stage_whose_output_needs_no_gradient(
    checkpoint: str,
) -> None:
    """The hook was put on an input that needs no gradient in the unsplit model."""
    layer, hooked, last = Copies(), InPlace(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    layer.register_module("unused", nn.Linear(WIDTH, WIDTH))
    hooked.register_full_backward_hook(lambda *_: None)
    model, x = nn.Sequential(layer, hooked, last).double(), torch.randn(4, WIDTH).double()
    pipe = Pipe(model, 2, stages=3, checkpoint=checkpoint)
    loss = pipe.step(x.clone(), target=x, loss_fn=squares).loss
    assert abs(loss - squares(model(x.clone()), x)) < 1e-12


class Asks(nn.Linear):
    """Keeps a mean in a buffer, of which the value depends on whether its input needs a grad."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.mean = 0.5 * self.mean + (x.detach().mean(0) if y.requires_grad else 0)
        return y


@pytest.mark.parametrize("audit", ["first", "off"])
def test_assigned_buffer_that_depends_on_requires_grad_is_found(audit: str) -> None:
    """In a forward that will be recomputed nothing requires grad. The output is the same."""
    model, x = nn.Sequential(Asks(), Asks()).double(), torch.randn(4, WIDTH).double()
    pipe = Pipe(model, 2, stages=2, checkpoint="always", audit=audit)
    with pytest.raises(RunError, match=r"stage [01] .* left another value in a buffer"):
        pipe.step(x, target=x, loss_fn=squares)


class Hooked(nn.Module):
    """Puts a hook on an input, and may return something else."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(halve)
        result: Tensor = self.lin(y)
        return result


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(x), self.right(x)


def test_hook_on_an_input_that_the_loss_does_not_depend_on_is_not_called() -> None:
    """It was called with None in the first step."""
    model, x = PipeSequential(Pair(), Hooked()).double(), torch.randn(4, WIDTH).double()
    pipe = Pipe(model, 2, stages=2, checkpoint="never")
    loss = pipe.step(x, target=x, loss_fn=squares).loss
    assert abs(loss - squares(model(x), x)) < 1e-12


class Reversible(torch.autograd.Function):
    """Scales by a number that the layer keeps for the backward, as reversible layers keep seeds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Any) -> Tensor:
        layer.factor = 1.5 * len(x)
        ctx.layer = layer
        result: Tensor = x * layer.factor
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.layer.factor, None


class Holder(nn.Module):
    factor = None


class ReversibleModel(Model):
    def __init__(self) -> None:
        super().__init__()
        self.holder = Holder()

    def forward(self, x: Tensor) -> Tensor:
        apply: Any = Reversible.apply
        result: Tensor = apply(super().forward(x), self.holder)
        return result


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_backward_that_reads_what_its_forward_has_left_on_a_module(checkpoint: str) -> None:
    """Attributes of modules around the units got their old values back before the backward."""
    _assert_equal(ReversibleModel(), checkpoint=checkpoint, audit="off")
