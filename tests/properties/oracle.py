"""The oracle: the numbers of the unsplit model for a case.

It runs over micro-batches cut by `torch.split`, in the order in which each stage takes them:
batch statistics depend on that order, and random numbers on the cell. Where nothing depends on
the cut, the model also runs on the whole batch at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from penstock import Chunk, NoChunk, Op, Schedule, added_losses
from penstock.stage.rng import CellRngMode, advance_caller_rng, derive_cell_seed, peek_seed
from penstock.stage.skip import Skips, use_skips
from tests.properties.cases import Case
from tests.properties.layers import WIDTH
from tests.properties.losses import LOSSES, Loss, numbers
from tests.properties.models import Unit, packed
from tests.support import cut

Numbers = dict[str, Tensor | None]


# ---- batches ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """The arguments of a step, as given to a pipe; `leaves` are the tensors they are made of."""

    leaves: dict[str, Tensor]
    inputs: tuple[Any, ...]
    side: dict[str, Any]
    target: Any

    def parts(self, sizes: Sequence[int]) -> list[Batch]:
        """Return one batch per micro-batch, with `sizes` rows."""
        columns = [_parts(v, sizes) for v in (self.inputs, self.side, self.target)]
        return [Batch(self.leaves, *values) for values in zip(*columns, strict=True)]

    def whole(self) -> Batch:
        """Return the batch as the unsplit model takes it."""
        return self.parts([len(self.leaves["x"])])[0]


def _parts(value: Any, sizes: Sequence[int]) -> list[Any]:
    def part(leaf: Any, at: int) -> Any:
        if isinstance(leaf, NoChunk):
            return leaf.tensor
        if isinstance(leaf, Chunk):
            return leaf.tensor.split(list(sizes), leaf.dim)[at]
        if not isinstance(leaf, Tensor):
            return leaf
        found = leaf.split(list(sizes))[at]
        return (
            found if leaf.requires_grad else found.data
        )  # gives each part its own version counter

    leaves, spec = pytree.tree_flatten(value)
    made = [[part(leaf, at) for leaf in leaves] for at in range(len(sizes))]
    return [pytree.tree_unflatten(each, spec) for each in made]


def batch(case: Case, rows: int, seed: int) -> Batch:
    """Return a new batch, the same for the same seed."""
    torch.default_generator.manual_seed(seed)  # a hundred times as fast as torch.manual_seed
    leaves = {
        "x": numbers(rows),
        "gate": torch.rand(rows, 1, dtype=torch.float64),
        "shift": torch.randn(WIDTH, dtype=torch.float64),
        "columns": torch.rand(WIDTH, rows, dtype=torch.float64),
        "noted": numbers(rows),
    }
    target = LOSSES[case.loss].target(rows)
    for leaf in leaves.values():
        leaf.requires_grad_(case.learns)
    given = packed(case.model.given, leaves["x"])
    side = {
        "gate": leaves["gate"],
        "shift": NoChunk(leaves["shift"]),
        "columns": Chunk(leaves["columns"], dim=1),
        "note": {"parts": [leaves["noted"]], "none": None, "times": 0.5},
        "factor": 0.25,
    }
    wanted = {name: side[name] for name in side if name in case.model.takes}
    return Batch(leaves, given if type(given) is tuple else (given,), wanted, target)


# ---- the unsplit model --------------------------------------------------------------------


def layer_by_layer(model: nn.Module, layers: Sequence[nn.Module], value: Any, part: Batch) -> Any:
    """Run some layers of the model on a value."""
    first = next(iter(model.children()))
    spreads = type(model) is not nn.Sequential
    for layer in layers:
        takes = layer.takes if isinstance(layer, Unit) else ()
        side = {name: part.side[name] for name in takes}
        spread = isinstance(value, tuple) and (spreads or layer is first)
        value = layer(*value, **side) if spread else layer(value, **side)
    return value


def forwards(
    case: Case, model: nn.Sequential, parts: Sequence[Batch], orders: Sequence[Sequence[int]]
) -> tuple[list[Any], list[list[Tensor]]]:
    """Return the outputs of the micro-batches and their added losses.

    Each stage takes the micro-batches in its order, and draws the random numbers of a pipe's cells.
    """
    seed, drew = peek_seed(), False
    values = [part.inputs for part in parts]
    added: list[list[Tensor]] = [[] for _ in parts]
    skips = [Skips() for _ in parts]
    for stage, layers in enumerate(cut(list(model), case.counts)):
        for i in orders[stage]:
            with ExitStack() as stack:
                random = stack.enter_context(CellRngMode(derive_cell_seed(seed, stage, i)))
                stack.enter_context(use_skips(skips[i]))
                found = stack.enter_context(added_losses())
                values[i] = layer_by_layer(model, layers, values[i], parts[i])
            added[i] += found
            drew |= random.has_drawn
    if drew:
        advance_caller_rng()
    return values, added


@contextmanager
def deferred_statistics(model: nn.Module) -> Iterator[None]:
    """Update running statistics once at the end, by all inputs that a BatchNorm has seen."""
    given: dict[nn.BatchNorm1d, list[Tensor]] = {}
    with ExitStack() as stack:
        for layer in model.modules():
            if isinstance(layer, nn.BatchNorm1d) and layer.training:
                given[layer] = []
                layer.track_running_stats = False
                hook = layer.register_forward_pre_hook(lambda l, args: given[l].append(args[0]))
                stack.callback(hook.remove)
        yield
    for layer, seen in given.items():
        layer.track_running_stats = True
        with torch.no_grad():
            functional.batch_norm(
                torch.cat(seen), layer.running_mean, layer.running_var, training=True
            )
            layer.num_batches_tracked += 1  # type: ignore[assignment, operator]


def together(outputs: Sequence[Any]) -> Any:
    """Gather outputs into one: join tensors by rows, list other values."""
    flat = [pytree.tree_flatten(output) for output in outputs]
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    joined = [torch.cat(c) if isinstance(c[0], Tensor) else list(c) for c in columns]
    return pytree.tree_unflatten(joined, flat[0][1])


@dataclass(frozen=True)
class Read:
    """The result of a loss_fn."""

    loss: Tensor
    metrics: dict[str, Any]


def read(found: Any) -> Read:
    if isinstance(found, tuple):
        return Read(found[0], {})
    if isinstance(found, dict):
        return Read(found["loss"], {k: v for k, v in found.items() if k not in ("loss", "weight")})
    return Read(found, {})


def mean(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return the weighted sum; values of weight zero are left out, as they may be NaN."""
    terms = [value * weight for value, weight in zip(values, weights, strict=True) if weight]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def weights_of(loss: Loss, parts: Sequence[Batch], sizes: Sequence[int]) -> list[float]:
    if loss.weight is None:
        return [size / sum(sizes) for size in sizes]
    found = [loss.weight(part.target) for part in parts]
    return found if loss.reduction == "sum" else [weight / sum(found) for weight in found]


def stepped(
    case: Case, model: nn.Sequential, given: Batch, sizes: Sequence[int], schedule: Schedule
) -> Numbers:
    """Run a step of the unsplit model, micro-batch by micro-batch."""
    loss = LOSSES[case.loss]
    loss_fn = loss.function(case.model.output)
    parts = given.parts(sizes)
    with deferred_statistics(model) if case.deferred else nullcontext():
        outputs, added = forwards(case, model, parts, _order(schedule, Op.F))
    backwards = _order(schedule, Op.B, Op.I)[-1]
    if case.door == "call":
        for _ in range(case.backwards):
            total = _backwards_of_call(outputs, loss_fn, backwards, model, given)
        return numbers_of(model, given, total, {}, together(outputs))
    scores = [read(loss_fn(o, part.target)) for o, part in zip(outputs, parts, strict=True)]
    weights = weights_of(loss, parts, sizes)
    shares = weights if loss.returned else [size / sum(sizes) for size in sizes]
    terms = [_term(score.loss, weights[i], added[i], shares[i]) for i, score in enumerate(scores)]
    for i in backwards:
        if terms[i].requires_grad:
            terms[i].backward(retain_graph=True)  # inputs may have a graph of their own
    metrics = {}
    for name in scores[0].metrics:
        column = [score.metrics[name] for score in scores]
        one_number = isinstance(column[0], Tensor) and not column[0].dim()
        metrics[name] = mean(column, weights) if one_number else together(column)
    return numbers_of(model, given, _plus(terms[0], terms[1:]), metrics, together(outputs))


def _term(loss: Tensor, weight: float, added: Sequence[Tensor], share: float) -> Tensor:
    """Return the share of a micro-batch in the loss of the step; zero if its weight is zero."""
    term = loss * weight if weight else torch.zeros_like(loss)
    for one in added:
        term = term + one * share
    return term


def _plus(loss: Tensor, extra: Sequence[Tensor]) -> Tensor:
    for one in extra:
        loss = loss + one
    return loss


def _order(schedule: Schedule, *ops: Op) -> list[list[int]]:
    """Return the order in which each stage takes its micro-batches."""
    actions = [action for lane in schedule.lanes for action in lane if action.op in ops]
    return [[a.microbatch for a in actions if a.stage == s] for s in range(schedule.stages)]


def _backwards_of_call(
    outputs: Sequence[Any],
    loss_fn: Callable[..., Any],
    order: Sequence[int],
    model: nn.Module,
    given: Batch,
) -> Tensor:
    """Backpropagate the loss of the whole output, and return it.

    Gradients are first summed over micro-batches, then added to `.grad`.
    """
    tensors = [[t for t in pytree.tree_leaves(o) if _learns(t)] for o in outputs]
    ends = pytree.tree_map(
        lambda t: t.detach().requires_grad_() if _learns(t) else t, list(outputs)
    )
    total = read(loss_fn(together(ends), given.whole().target)).loss
    total.backward()
    leaves = [t for t in (*model.parameters(), *given.leaves.values()) if t.requires_grad]
    sums: dict[Tensor, Tensor] = {}
    for i in order:
        gradients = [t.grad for t in pytree.tree_leaves(ends[i]) if _learns(t)]
        pairs = [(t, g) for t, g in zip(tensors[i], gradients, strict=True) if g is not None]
        if not pairs:
            continue
        roots, seeds = zip(*pairs, strict=True)
        found = torch.autograd.grad(roots, leaves, seeds, retain_graph=True, allow_unused=True)
        for leaf, gradient in zip(leaves, found, strict=True):
            if gradient is not None:
                sums[leaf] = sums[leaf] + gradient if leaf in sums else gradient
    for leaf, gradient in sums.items():
        leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient
    return total


def _learns(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def whole(case: Case, model: nn.Sequential, given: Batch) -> Numbers:
    """Run a step of the unsplit model on the whole batch."""
    part = given.whole()
    loss_fn = LOSSES[case.loss].function(case.model.output)
    with added_losses() as extra:
        output = layer_by_layer(model, list(model), part.inputs, part)
    score = read(loss_fn(output, part.target))
    total = _plus(score.loss, extra)
    for left in reversed(range(case.backwards)):
        total.backward(retain_graph=left > 0)
    metrics = score.metrics if case.door == "step" else {}
    return numbers_of(model, given, total, metrics, together([output]))


# ---- numbers ------------------------------------------------------------------------------


def numbers_of(
    model: nn.Module, given: Batch, loss: Tensor, metrics: dict[str, Any], outputs: Any
) -> Numbers:
    """Return everything that a step computes or changes, by name."""
    found: Numbers = {"the loss": loss}
    for what, tree in (("output", outputs), ("metrics", metrics)):
        for path, leaf in pytree.tree_flatten_with_path(tree)[0]:
            if isinstance(leaf, Tensor):
                found[f"{what}{pytree.keystr(path)}"] = leaf
    for name, parameter in model.named_parameters():
        found[f"the gradient of {name}"] = parameter.grad
        found[f"the parameter {name}"] = parameter
    for name, buffer in model.named_buffers():
        found[f"the buffer {name}"] = buffer
    for name, leaf in given.leaves.items():
        found[f"the gradient of the input {name}"] = leaf.grad
        found[f"the input {name}"] = leaf
    return {name: None if t is None else t.detach().clone() for name, t in found.items()}
