"""Shared parts of the tests of pipes: the unsplit model as an oracle, and layers for models."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from penstock import Pipe, is_recomputing, pop, skippable, stash
from penstock.schedules.ir import Op
from penstock.schedules.lowering import join_split_backwards
from penstock.stage.deferred_batchnorm import DeferredStatsBatchNorm
from penstock.stage.rng import CellRngMode, advance_caller_rng, derive_cell_seed, peek_seed

torch.set_num_threads(1)  # tests run in parallel, on tiny tensors

SCHEDULES = {  # with the number of stages per rank in the tests
    "gpipe": 1,
    "naive": 1,
    "1f1b": 1,
    "eager-1f1b": 1,
    "interleaved": 2,
    "looped-bfs": 2,
    "zb-h1": 1,
    "zb-h2": 1,
    "interleaved-zb": 2,
    "zb-v": 2,
    "v-half": 2,
    "v-min": 2,
    "dualpipe-v": 2,
    "fit": 1,
}
RUNTIMES = ("inline", "threads")
CHECKPOINTS = ("always", "except_last", "never")
DOORS = ("call", "step")

each_schedule = pytest.mark.parametrize("schedule", SCHEDULES)
each_runtime = pytest.mark.parametrize("runtime", RUNTIMES)
each_checkpoint = pytest.mark.parametrize("checkpoint", CHECKPOINTS)
each_door = pytest.mark.parametrize("door", DOORS)

LossFn = Callable[[Tensor, Tensor], Tensor]

# ---- training steps of a pipe and of the unsplit model ------------------------------------


class Outcome(NamedTuple):
    """The results of a training step. The gradient of the input has the name ''."""

    loss: Tensor
    output: Tensor
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


def outcome(model: nn.Module, x: Tensor, loss: Tensor, output: Tensor) -> Outcome:
    gradients = {name: p.grad for name, p in model.named_parameters()}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return Outcome(loss.detach(), output.detach(), {**gradients, "": x.grad}, buffers)


def trained(pipe: Pipe, x: Tensor, target: Tensor, door: str) -> Outcome:
    """Run one training step of a pipe that has a loss_fn, by `step` or by a call and `backward`."""
    if door == "step":
        result = pipe.step(x, target=target, outputs=True)
        return outcome(pipe, x, result.loss, result.outputs)
    output = pipe(x)
    assert pipe.loss_fn is not None
    loss = pipe.loss_fn(output, target)
    loss.backward()
    return outcome(pipe, x, loss, output)


def order_of_backwards(pipe: Pipe, microbatches: int) -> list[int]:
    """Return the micro-batches in the order of their backwards, which all stages share."""
    schedule = join_split_backwards(pipe.forecast().program.schedule)
    actions = [action for lane in schedule.lanes for action in lane if action.op is Op.B]
    orders = [
        [a.microbatch for a in actions if a.stage == stage and a.microbatch < microbatches]
        for stage in range(schedule.stages)
    ]
    assert all(order == orders[0] for order in orders)
    return orders[0]


def cut(layers: Sequence[nn.Module], counts: Sequence[int]) -> list[Sequence[nn.Module]]:
    """Return the layers of each stage."""
    ends = [sum(counts[: at + 1]) for at in range(len(counts))]
    return [layers[end - count : end] for end, count in zip(ends, counts, strict=True)]


def forwards(model: nn.Sequential, pieces: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
    """Return the outputs of the micro-batches, with the random numbers of a pipe's cells."""
    seed = peek_seed()
    drew = False
    outputs = []
    for microbatch, piece in enumerate(pieces):
        value = piece
        for stage, layers in enumerate(cut(list(model), counts)):
            with CellRngMode(derive_cell_seed(seed, stage, microbatch)) as random:
                for layer in layers:
                    value = layer(value)
            drew |= random.has_drawn
        outputs.append(value)
    if drew:
        advance_caller_rng()
    return outputs


def unsplit(
    model: nn.Sequential,
    x: Tensor,
    target: Tensor,
    loss_fn: LossFn,
    *,
    chunks: int,
    counts: Sequence[int],
    order: Sequence[int],
    door: str,
    under: AbstractContextManager[Any] = nullcontext(),  # noqa: B008 (it has no state)
) -> Outcome:
    """Run one training step of the unsplit model, micro-batch by micro-batch.

    The forwards run in the context `under`, and the backwards in the given order. For the door
    "step", each backward adds its gradients to `.grad`, weighted by its rows. For the door "call",
    the gradients are summed first, and the sum is added to `.grad`. Floating-point addition is not
    associative, so a bitwise comparison needs the same order as the pipe.
    """
    pieces = x.chunk(chunks)
    for layer in model.modules():
        if isinstance(layer, DeferredStatsBatchNorm):
            layer.begin_minibatch(len(pieces))
    with under:
        outputs = forwards(model, pieces, counts)
    if door == "step":
        loss = _backwards_of_step(outputs, target.chunk(chunks), loss_fn, order)
    else:
        leaves = [*model.parameters(), *([x] if x.requires_grad else [])]
        loss = _backwards_of_call(outputs, target, loss_fn, order, leaves)
    return outcome(model, x, loss, torch.cat(outputs))


def _backwards_of_step(
    outputs: Sequence[Tensor], targets: Sequence[Tensor], loss_fn: LossFn, order: Sequence[int]
) -> Tensor:
    rows = sum(len(target) for target in targets)
    weighted = [
        loss_fn(output, target) * (len(target) / rows)
        for output, target in zip(outputs, targets, strict=True)
    ]
    for microbatch in order:
        weighted[microbatch].backward()
    total = weighted[0]
    for loss in weighted[1:]:
        total = total + loss
    return total


def _backwards_of_call(
    outputs: Sequence[Tensor],
    target: Tensor,
    loss_fn: LossFn,
    order: Sequence[int],
    leaves: Sequence[Tensor],
) -> Tensor:
    ends = [output.detach().requires_grad_() for output in outputs]
    loss = loss_fn(torch.cat(ends), target)
    loss.backward()
    sums: list[Tensor | None] = [None for _ in leaves]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    for microbatch in order:
        found = iter(
            torch.autograd.grad(
                outputs[microbatch], wanted, ends[microbatch].grad, allow_unused=True
            )
        )
        for at, leaf in enumerate(leaves):
            gradient = next(found) if leaf.requires_grad else None
            if gradient is not None:
                before = sums[at]
                sums[at] = gradient if before is None else before + gradient
    for leaf, gradient in zip(leaves, sums, strict=True):
        if gradient is not None:
            leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient
    return loss


def whole(model: nn.Module, x: Tensor, target: Tensor, loss_fn: LossFn) -> Outcome:
    """Run one training step of the unsplit model on the whole batch."""
    output = model(x)
    loss = loss_fn(output, target)
    loss.backward()
    return outcome(model, x, loss, output)


# ---- comparing ----------------------------------------------------------------------------

Same = Callable[[Tensor, Tensor], bool]


def bitwise(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


def closely(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=1e-10, atol=1e-10)


def differences(found: Outcome, expected: Outcome, same: Same = bitwise) -> list[str]:
    """Return descriptions of the results that differ."""

    def differ(a: Tensor | None, b: Tensor | None) -> bool:
        return (a is None) != (b is None) or (a is not None and b is not None and not same(a, b))

    assert found.gradients.keys() == expected.gradients.keys()
    assert found.buffers.keys() == expected.buffers.keys()
    pairs: dict[str, tuple[Tensor | None, Tensor | None]] = {
        "the loss": (found.loss, expected.loss),
        "the output": (found.output, expected.output),
    }
    for name, gradient in expected.gradients.items():
        pairs[f"the gradient of '{name}'"] = found.gradients[name], gradient
    for name, buffer in expected.buffers.items():
        pairs[f"the buffer '{name}'"] = found.buffers[name], buffer
    return [name for name, (a, b) in pairs.items() if differ(a, b)]


# ---- layers -------------------------------------------------------------------------------


@skippable(stash=["far"])
class Stash(nn.Module):
    """Stash twice the input, and pass the input on."""

    def forward(self, x: Tensor) -> Generator[Any, Any, Tensor]:
        yield stash("far", 2 * x)
        return x


@skippable(pop=["far"])
class Pop(nn.Module):
    """Add the popped tensor to the input."""

    def forward(self, x: Tensor) -> Generator[Any, Any, Tensor]:
        far: Tensor = yield pop("far")
        return x + far


class Watch(nn.Module):
    """Call a function with the input, and pass the input on."""

    def __init__(self, see: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.see = see

    def forward(self, x: Tensor) -> Tensor:
        self.see(x)
        return x


class Do(nn.Module):
    """Compute the output with a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *values: Any) -> Any:
        return self.function(*values)


class Marked(torch.autograd.Function):
    """Call `then` in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, then: Callable[[], object]) -> Tensor:
        ctx.then = then
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.then()
        return gradient, None


class Fails(nn.Module):
    """Raise in the backward, as long as `broken` is true."""

    broken = True

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Marked.apply(x, self._fail)  # type: ignore[no-untyped-call]
        return y

    def _fail(self) -> None:
        if self.broken:
            raise ZeroDivisionError("in a backward")


class Traced(nn.Module):
    """Multiply the input by a weight of one, and report each action to `tell`, such as 2F0.

    The first number in each row of a micro-batch is the index of the micro-batch.
    """

    def __init__(self, tell: Callable[[str], None], stage: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.tell, self.stage = tell, stage

    def forward(self, x: Tensor) -> Tensor:
        microbatch = int(x[0, 0])
        self.tell(f"{self.stage}{'R' if is_recomputing() else 'F'}{microbatch}")
        marked: Tensor = Marked.apply(  # type: ignore[no-untyped-call]
            x * self.weight, lambda: self.tell(f"{self.stage}B{microbatch}")
        )
        return marked


def numbered(microbatches: int, rows: int = 2) -> Tensor:
    """Return a batch for `Traced` layers."""
    return torch.arange(float(microbatches)).repeat_interleave(rows)[:, None].repeat(1, 3)


def network(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Return ten layers with a skip connection, BatchNorm, Dropout, and an in-place operation."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8),
        Stash(),
        nn.Tanh(),
        nn.Linear(8, 8),
        nn.BatchNorm1d(8),
        nn.ReLU(inplace=True),
        nn.Dropout(0.3),
        nn.Linear(8, 8),
        Pop(),
        nn.Linear(8, 3),
    ).to(dtype)


CUTS = {
    1: [10],
    2: [5, 5],
    4: [3, 2, 2, 3],
}  # with two stages, the second begins with the in-place ReLU


def plain(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Return four ordinary layers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3)).to(dtype)


def batch(rows: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Return an input with 6 columns and a target with 3."""
    torch.manual_seed(1)
    return torch.randn(rows, 6, dtype=dtype), torch.randn(rows, 3, dtype=dtype)


# ---- threads ------------------------------------------------------------------------------


def crews() -> list[str]:
    """Return the names of the worker threads of all pipes."""
    return [t.name for t in threading.enumerate() if t.name.startswith("penstock-")]


@contextmanager
def without_gc() -> Iterator[None]:
    """Disable garbage collection, so that only unreferenced objects are freed."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def ends(function: Callable[[], Any], within: float = 20.0) -> bool:
    """Return whether the function returns within the time limit."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(within)
    return not thread.is_alive()
