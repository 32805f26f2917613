"""More features of models and training scripts: the second table of docs/features.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from penstock import NoChunk, Pipe, Weighted, add_loss
from tests.features.common import SIZE, Block, blocks, made_of, normalised
from tests.features.table import Feature, Trainee, called, given, twice
from tests.oracle import Batch, Outcome

# ---- inputs -------------------------------------------------------------------------------


class Masked(Block):
    def forward(self, x: Tensor, mask: Tensor, table: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x * mask + table)


def masked() -> nn.Sequential:
    torch.manual_seed(0)
    return made_of(Masked(), Block(), Masked(), Block())


def with_side_inputs() -> Batch:
    values = given()
    generator = torch.Generator().manual_seed(3)
    mask, table = (
        torch.rand(rows, SIZE, generator=generator, dtype=torch.float64) for rows in (8, 1)
    )
    side = {"mask": mask.requires_grad_(), "table": NoChunk(table)}
    return Batch(values.inputs, side, values.target)


class Splits(Block):
    """A block that returns a dict: tensors with and without gradients, a number, None."""

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return {"y": y, "pair": (x, y.detach() > 0), "times": 3, "none": None}


class Joins(Block):
    def forward(self, parts: Any) -> Tensor:
        x, positive = parts["pair"]
        return super().forward(parts["y"] * positive + parts["times"] * x.T.contiguous().T)


def passing_trees() -> nn.Sequential:
    torch.manual_seed(0)
    return made_of(Splits(), Joins(), Splits(), Joins())


# ---- losses -------------------------------------------------------------------------------


class Penalised(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        add_loss(0.1 * y.square().mean() + 0.3 * x.abs().mean())
        add_loss(self.norm.weight.square().sum().reshape(1, 1))
        return y


def penalised() -> nn.Sequential:
    torch.manual_seed(0)
    return made_of(Penalised(), Block(), Penalised(), Block())


def of_counted_rows(output: Tensor, target: Tensor) -> Weighted:
    """Return the mean loss of the rows whose first target is positive, and their number."""
    counts = (target[:, 0] > 0).double()
    number = counts.sum()
    loss = ((output - target).square().mean(1) * counts).sum() / number.clamp(min=1)
    return Weighted(loss, number)


def scaled(pipe: Pipe, batch: Batch) -> Outcome:
    """Run a step with a scaler, then `scaler.unscale_`."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    result = pipe.step(*batch.inputs, target=batch.target, outputs=True, scaler=scaler)
    scaler.unscale_(torch.optim.SGD([*pipe.parameters(), *batch.inputs]))
    return Outcome.of(pipe, batch, result.loss, result.outputs, result.metrics)


# ---- layers -------------------------------------------------------------------------------


def normalised_once() -> nn.Sequential:
    first, *others = blocks()
    return made_of(nn.Sequential(first, nn.BatchNorm1d(SIZE)), *others)


class Squared(torch.autograd.Function):
    """An autograd function that squares a matrix product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        y = x @ weight
        ctx.save_for_backward(x, weight, y)
        return y.square()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight, y = ctx.saved_tensors
        inner = 2 * y * gradients[0]
        return inner @ weight.T, x.T @ inner


class OwnFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SIZE, SIZE) / 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Squared.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return y


def own_functions() -> nn.Sequential:
    torch.manual_seed(0)
    return made_of(OwnFunction(), Block(), OwnFunction(), Block())


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).T


def parametrized() -> nn.Sequential:
    torch.manual_seed(0)
    square = nn.Linear(SIZE, SIZE)
    parametrize.register_parametrization(square, "weight", Symmetric())
    normed = parametrizations.weight_norm(nn.Linear(SIZE, SIZE))
    return made_of(square, nn.Tanh(), normed, Block())


def sharing_a_module() -> nn.Sequential:
    torch.manual_seed(0)
    shared = Block()
    return made_of(nn.Sequential(shared), Block(), nn.Sequential(shared), Block())


class Checkpointed(Block):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return y


def checkpointed() -> nn.Sequential:
    torch.manual_seed(0)
    return made_of(Block(), Checkpointed(), Checkpointed(), Block())


class Attends(nn.Module):
    """Attention over six positions, a convolution, and a functional linear."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.convolution = nn.Conv1d(1, 4, 3, padding=1)
        self.weight = nn.Parameter(torch.randn(1, 4) / 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.convolution(x[:, None]).transpose(1, 2)
        attended, _ = self.attention(y, y, y)
        return x + linear(torch.tanh(attended), self.weight)[..., 0]


def attending() -> nn.Sequential:
    torch.manual_seed(0)
    return made_of(*(Attends() for _ in range(4)))


class Looks(Block):
    """A block with an embedding of the sign of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.table((x[:, 0] > 0).long()))


def looking_up() -> nn.Sequential:
    torch.manual_seed(0)
    return made_of(*(Looks() for _ in range(4)))


# ---- hooks --------------------------------------------------------------------------------


def hooked() -> nn.Sequential:
    """Return a model with parameter, forward and backward hooks that change values."""
    model = blocks()
    for parameter in model[1].parameters():
        parameter.register_hook(lambda gradient: 2 * gradient)
    model[2].register_forward_hook(lambda module, given, output: 1.5 * output)
    model[2].register_forward_pre_hook(lambda module, given: (0.5 * given[0],))
    model[3].register_full_backward_hook(tripled)
    return model


def clipped() -> nn.Sequential:
    """Return a model whose hooks clip the gradients of parameters, before and after they add up."""
    model = blocks()
    for parameter in model[1].parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    for parameter in model[2].parameters():
        parameter.register_post_accumulate_grad_hook(clip_gradient)
    return model


def clip_gradient(parameter: Any) -> None:
    parameter.grad.clamp_(-0.01, 0.01)


def tripled(module: nn.Module, given: Any, gradients: Any) -> tuple[Tensor]:
    return (3 * given[0],)


# ---- modes --------------------------------------------------------------------------------


def evaluated(trainee: Trainee) -> Iterator[Outcome]:
    """Train for a step, then run in eval mode without gradients, also on a smaller batch."""
    yield trainee.step(given())
    trainee.module.eval()
    with torch.no_grad():
        for rows in (8, 3):
            yield trainee.step(given(rows).detached())


MORE = [
    Feature(
        "pipe(x)",
        "`pipe(x)`, a loss outside the pipe, and `loss.backward()`. All schedules run as `gpipe` "
        "here.",
        blocks,
        step=called,
    ),
    Feature(
        "keyword inputs",
        "A mask that is cut with the batch and requires a gradient, and a table that is not cut "
        "(`NoChunk`), go to the first and the third stage.",
        masked,
        lambda trainee: twice(trainee, with_side_inputs),
    ),
    Feature(
        "pytrees",
        "Stages pass on dicts that contain tuples, masks, numbers and `None`.",
        passing_trees,
    ),
    Feature(
        "loss weights",
        "The loss returns a weight: the number of rows that count, which differs between "
        "micro-batches.",
        blocks,
        loss_fn=of_counted_rows,
    ),
    Feature("added losses", "Layers of two stages call `penstock.add_loss`.", penalised),
    Feature(
        "GradScaler",
        "`step(scaler=...)`, then `scaler.unscale_`. The reference is the unsplit model without "
        "a scaler.",
        blocks,
        step=scaled,
    ),
    Feature(
        "evaluation",
        "A training step, then eval mode without gradients, with 8 rows and with 3.",
        normalised,
        evaluated,
        whole=False,
    ),
    Feature(
        "deferred BatchNorm",
        "`deferred_batch_norm=True`: outputs and gradients equal those of BatchNorm, and the "
        "running statistics equal those of a plain BatchNorm that sees the whole batch.",
        normalised_once,
        whole=False,
        options={"deferred_batch_norm": True},
    ),
    Feature(
        "attention",
        "`nn.MultiheadAttention`, `nn.Conv1d` and a functional `linear` in every stage.",
        attending,
    ),
    Feature("embedding", "An `nn.Embedding` in every stage.", looking_up),
    Feature(
        "custom Function",
        "Layers that pass their weight to a custom `torch.autograd.Function`.",
        own_functions,
    ),
    Feature(
        "parametrized",
        "A weight under `weight_norm`, and one under a custom parametrization.",
        parametrized,
    ),
    Feature(
        "shared module", "One module is part of the first and of the third stage.", sharing_a_module
    ),
    Feature(
        "inner checkpoint", "Two layers use `torch.utils.checkpoint` themselves.", checkpointed
    ),
    Feature(
        "hooks",
        "Hooks that change the gradients of parameters, of the outputs and inputs of a layer, "
        "and the gradients that a layer passes back.",
        hooked,
    ),
    Feature(
        "hooks and weights",
        "Hooks that clip the gradients of parameters, and a loss that returns weights.",
        clipped,
        loss_fn=of_counted_rows,
    ),
]
