"""Forwards that `make fuzz` found, cut down: equal to the unsplit model, or refused.

Each of them once trained on other numbers, or failed with an error of PyTorch.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from penstock import CutError, Pipe

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

    def __init__(self, before: str = "", after: str = "", block: str = "", twice: bool = False):
        super().__init__()
        self.config = SimpleNamespace(times=0.8, table={"gain": 1.1})
        self.blocks = nn.ModuleList(Block(block, self.config) for _ in range(3))
        self.before, self.after = (compile(code, "model", "exec") for code in (before, after))
        self.order = [0, 1, 2, 0] if twice else [0, 1, 2]

    def forward(self, x: Tensor) -> Tensor:
        names = {"self": self, "x": x, "torch": torch, "halve": halve}
        exec(self.before, names)
        for index in self.order:
            names["x"] = self.blocks[index](names["x"])
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
        _assert_equal(Model(block=block, twice=True), audit="off")


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
