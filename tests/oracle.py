"""The oracle of the tests: run one training step unsplit and as a pipe, and compare everything.

The unsplit model runs on the whole batch (`run_whole`), which is what users expect, or on one
micro-batch after another (`run_parts`), which is what a pipe computes if batch statistics or random
numbers depend on the cut. `run_parts` also sums gradients in the order of the pipe, so that the
results can be compared bit by bit. It shares no code with the library except the random seeds of
cells and the storage of skips.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from penstock import Chunk, NoChunk, Op, Pipe, PipeSequential, Schedule, added_losses
from penstock.schedules.lowering import join_split_backwards
from penstock.stage.rng import CellRngMode, advance_caller_rng, derive_cell_seed, peek_seed
from penstock.stage.skip import Skips, use_skips

LossFn = Callable[..., Any]
Numbers = dict[str, Tensor | None]

# ---- batches ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """The arguments of a step: positional inputs, inputs by name, and the target.

    `leaves` are the tensors that the arguments are computed from, where these are not leaves.
    """

    inputs: tuple[Any, ...]
    side: dict[str, Any] = field(default_factory=dict)
    target: Any = None
    leaves: dict[str, Tensor] | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Return the leaves by name, such as `input 0`, `mask` or `target`."""
        if self.leaves is not None:
            return self.leaves
        named = {f"input {at}": value for at, value in enumerate(self.inputs)}
        found = {}
        for name, value in {**named, **self.side, "target": self.target}.items():
            for path, leaf in pytree.tree_flatten_with_path(value)[0]:
                tensor = leaf.tensor if isinstance(leaf, Chunk | NoChunk) else leaf
                if isinstance(tensor, Tensor):
                    found[name + pytree.keystr(path)] = tensor
        return found

    def parts(self, sizes: Sequence[int]) -> list[Batch]:
        """Return one batch per micro-batch, with `sizes` rows."""
        columns = [_parts(value, sizes) for value in (self.inputs, self.side, self.target)]
        return [Batch(*values) for values in zip(*columns, strict=True)]

    def whole(self) -> Batch:
        """Return the batch as the unsplit model takes it."""

        def bare(leaf: Any) -> Any:
            return leaf.tensor if isinstance(leaf, Chunk | NoChunk) else leaf

        return Batch(*pytree.tree_map(bare, (self.inputs, self.side, self.target)))

    def detached(self) -> Batch:
        """Return the batch without gradients."""

        def detach(leaf: Any) -> Any:
            return leaf.detach() if isinstance(leaf, Tensor) else leaf

        return Batch(*pytree.tree_map(detach, (self.inputs, self.side, self.target)))


def _parts(value: Any, sizes: Sequence[int]) -> list[Any]:
    def part(leaf: Any, at: int) -> Any:
        if isinstance(leaf, NoChunk):
            return leaf.tensor
        if isinstance(leaf, Chunk):
            return leaf.tensor.split(list(sizes), leaf.dim)[at]
        if not isinstance(leaf, Tensor) or not leaf.dim():
            return leaf
        rows = leaf.split(list(sizes))[at]
        return rows if leaf.requires_grad else rows.data  # each part has its own version counter

    leaves, spec = pytree.tree_flatten(value)
    pieces = [[part(leaf, at) for leaf in leaves] for at in range(len(sizes))]
    return [pytree.tree_unflatten(piece, spec) for piece in pieces]


def sizes_of(rows: int, chunks: int) -> list[int]:
    """Return the rows of each micro-batch."""
    return [len(part) for part in torch.empty(rows).chunk(chunks)]


# ---- outcomes and their comparison --------------------------------------------------------


@dataclass
class Outcome:
    """Everything that a step computes or changes."""

    loss: Tensor
    output: Any
    gradients: Numbers  # of parameters and inputs, by name
    buffers: Numbers
    values: Numbers = field(default_factory=dict)  # of parameters and leaves after the step
    metrics: Any = None

    @staticmethod
    def of(
        module: nn.Module, batch: Batch, loss: Tensor, output: Any, metrics: Any = None
    ) -> Outcome:
        """Copy the state of a module and of a batch after a step."""
        leaves = batch.leaves or {}
        tensors = {**dict(module.named_parameters()), **batch.tensors()}
        loss, output, metrics = pytree.tree_map_only(Tensor, _copy, (loss, output, metrics))
        return Outcome(
            loss,
            output,
            {n: None if t.grad is None else _copy(t.grad) for n, t in tensors.items() if t.is_leaf},
            {name: _copy(buffer) for name, buffer in module.named_buffers()},
            {n: _copy(t) for n, t in {**dict(module.named_parameters()), **leaves}.items()},
            metrics,
        )

    def numbers(self) -> Numbers:
        """Return all tensors by name; of the outputs, those that have rows."""
        found: Numbers = {"the loss": self.loss}
        for kind, tree in (("output", self.output), ("metric", self.metrics)):
            for path, leaf in pytree.tree_flatten_with_path(tree)[0]:
                if isinstance(leaf, Tensor) and (leaf.dim() or kind == "metric"):
                    found[kind + pytree.keystr(path)] = leaf
        for kind, named in (
            ("gradient of", self.gradients),
            ("buffer", self.buffers),
            ("value of", self.values),
        ):
            found.update({f"the {kind} {name}": tensor for name, tensor in named.items()})
        return found


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


Same = Callable[[Tensor, Tensor], bool]


def bitwise(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal; NaN equals NaN."""
    if a.dtype != b.dtype or a.layout != b.layout:
        return False
    a, b = (t.to_dense() for t in (a, b))
    return torch.equal(a, b) or (a.shape == b.shape and torch.allclose(a, b, 0, 0, equal_nan=True))


def within(limit: float) -> Same:
    """Return a comparison up to an absolute and relative difference."""

    def close(a: Tensor, b: Tensor) -> bool:
        if a.shape != b.shape or a.layout != b.layout:
            return False
        wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
        a, b = (t.to_dense().to(wide) for t in (a, b))
        return torch.allclose(a, b, rtol=limit, atol=limit, equal_nan=True)

    return close


closely = within(1e-10)


def differences(found: Outcome, expected: Outcome, same: Same = bitwise) -> list[str]:
    """Return descriptions of the results that differ."""
    ours, theirs = found.numbers(), expected.numbers()
    wrong = [f"only one of them has {name}" for name in ours.keys() ^ theirs.keys()]
    for name in ours.keys() & theirs.keys():
        a, b = ours[name], theirs[name]
        if a is None or b is None:
            if a is not b:
                wrong.append(f"{name} is {'missing' if a is None else 'there, and should not be'}")
        elif not same(a, b):
            apart = (
                (a.to_dense().double() - b.to_dense().double()).abs()
                if a.shape == b.shape
                else None
            )
            wrong.append(
                f"{name} differs"
                + (
                    f" by {apart.max():.2g}"
                    if apart is not None and apart.numel()
                    else f": {tuple(a.shape)}, not {tuple(b.shape)}"
                )
            )
    return sorted(wrong)


# ---- a step of a pipe ---------------------------------------------------------------------


def run_pipe(pipe: Pipe, batch: Batch, door: str = "step", backwards: int = 1) -> Outcome:
    """Run `pipe.step`, or `pipe(x)`, the loss outside of it, and `loss.backward()`."""
    if door == "step":
        result = pipe.step(*batch.inputs, target=batch.target, outputs=True, **batch.side)
        return Outcome.of(pipe, batch, result.loss, result.outputs, result.metrics)
    output = pipe(*batch.inputs, **batch.side)
    loss = score(pipe.loss_fn, output, batch.whole().target).loss
    if loss.requires_grad:
        for left in reversed(range(backwards)):
            loss.backward(retain_graph=left > 0)
    return Outcome.of(pipe, batch, loss, output, {})


# ---- a step of the unsplit model ----------------------------------------------------------


@dataclass(frozen=True)
class Score:
    """The result of a loss function."""

    loss: Tensor
    weight: Any
    metrics: dict[str, Any]


def score(loss_fn: LossFn | None, output: Any, target: Any) -> Score:
    """Compute the loss; without a loss function, the model returns it."""
    targets = () if target is None else (target,)
    found = output if loss_fn is None else loss_fn(output, *targets)
    if isinstance(found, tuple):
        return Score(found[0], None if loss_fn is None else found[1], {})
    if isinstance(found, Mapping):
        rest = {name: value for name, value in found.items() if name not in ("loss", "weight")}
        return Score(found["loss"], found.get("weight"), rest)
    return Score(found if isinstance(found, Tensor) else found.loss, None, {})


def run_layers(model: nn.Module, layers: Sequence[nn.Module], value: Any, part: Batch) -> Any:
    """Run some layers of a Sequential on a value, with the keyword inputs that they take."""
    first = next(model.children())
    spreads = isinstance(model, PipeSequential)
    for layer in layers:
        names = inspect.signature(layer.forward).parameters.keys() & part.side.keys()
        side = {name: part.side[name] for name in names}
        spread = isinstance(value, tuple) and (spreads or layer is first)
        value = layer(*value, **side) if spread else layer(value, **side)
    return value


def is_chain(model: nn.Module) -> bool:
    """Return whether the model only runs its layers one after the other."""
    return isinstance(model, nn.Sequential) and type(model) in (nn.Sequential, PipeSequential)


def call(model: nn.Module, part: Batch) -> Any:
    """Run the model on a batch without `Chunk` and `NoChunk` wrappers."""
    if is_chain(model) and len(model):  # type: ignore[arg-type]
        return run_layers(model, list(model.children()), part.inputs, part)
    return model(*part.inputs, **part.side)


def run_whole(
    model: nn.Module, batch: Batch, loss_fn: LossFn | None = None, backwards: int = 1
) -> Outcome:
    """Run a step on the whole batch; without a backward if gradients are disabled."""
    part = batch.whole()
    with added_losses() as extra:
        output = call(model, part)
    found = score(loss_fn, output, part.target)
    total = _plus(found.loss, extra)
    if total.requires_grad:
        for left in reversed(range(backwards)):
            total.backward(retain_graph=left > 0)
    return Outcome.of(model, batch, total, gathered([output]), found.metrics)


def run_parts(
    model: nn.Module,
    batch: Batch,
    loss_fn: LossFn | None = None,
    *,
    sizes: Sequence[int],
    counts: Sequence[int] | None = None,
    door: str = "step",
    reduction: str | None = None,
    weigh: Callable[[Any], float] | None = None,
    forward_orders: Sequence[Sequence[int]] | None = None,
    backward_order: Sequence[int] | None = None,
    deferred: bool = False,
    backwards: int = 1,
    under: AbstractContextManager[Any] | None = None,
) -> Outcome:
    """Run a step micro-batch by micro-batch.

    Args:
        model: The unsplit model.
        batch: The arguments.
        loss_fn: The loss function; None if the model returns its loss.
        sizes: The rows of each micro-batch.
        counts: The layers of each stage of a Sequential, by default one. Cells draw their own
            random numbers.
        door: For "step", each backward adds its weighted gradients to `.grad`. For "call", the
            gradients are summed first. Floating-point addition is not associative, so a bitwise
            comparison needs the order of the pipe.
        reduction: "sum" if losses of micro-batches are summed.
        weigh: The weight of a micro-batch by its target, where the loss function returns none.
        forward_orders: The micro-batches in the order in which each stage takes them.
        backward_order: The micro-batches in the order of their backwards.
        deferred: Whether BatchNorm updates its statistics once, by the whole batch.
        backwards: The backwards of a call.
        under: The context of the forwards.
    """
    parts = batch.parts(sizes)
    order = range(len(sizes)) if backward_order is None else backward_order
    with deferred_statistics(model) if deferred else nullcontext(), under or nullcontext():
        outputs, added = _forwards(model, parts, counts, forward_orders)
    if door == "call":
        for _ in range(backwards):
            total = _backwards_of_call(outputs, loss_fn, order, model, batch)
        return Outcome.of(model, batch, total, gathered(outputs), {})
    scores = [score(loss_fn, o, part.target) for o, part in zip(outputs, parts, strict=True)]
    by_rows = [size / sum(sizes) for size in sizes] if sum(sizes) else [1.0]
    is_sum = "sum" in (reduction, getattr(loss_fn, "reduction", None))
    weights = _weights(scores, parts, by_rows, is_sum, weigh)
    returned = scores[0].weight is not None
    terms = [
        _term(one.loss, weights[i], added[i], weights[i] if returned else by_rows[i])
        for i, one in enumerate(scores)
    ]
    for i in order:
        if terms[i].requires_grad:
            terms[i].backward(retain_graph=True)  # inputs may have a graph of their own
    metrics = {}
    for name in scores[0].metrics:
        column = [one.metrics[name] for one in scores]
        one_number = isinstance(column[0], Tensor) and not column[0].dim()
        metrics[name] = _mean(column, weights) if one_number else gathered(column)
    return Outcome.of(model, batch, _plus(terms[0], terms[1:]), gathered(outputs), metrics)


def _forwards(
    model: nn.Module,
    parts: Sequence[Batch],
    counts: Sequence[int] | None,
    orders: Sequence[Sequence[int]] | None,
) -> tuple[list[Any], list[list[Tensor]]]:
    """Return the outputs of the micro-batches and their added losses."""
    seed, drew = peek_seed(), False
    values: list[Any] = [part.inputs for part in parts]
    added: list[list[Tensor]] = [[] for _ in parts]
    skips = [Skips() for _ in parts]
    chain = list(model.children()) if is_chain(model) else []
    stages = cut(chain, counts or [1] * len(chain)) if chain else [[model]]
    for stage, layers in enumerate(stages):
        for i in orders[stage] if orders else range(len(parts)):
            with ExitStack() as stack:
                random = stack.enter_context(CellRngMode(derive_cell_seed(seed, stage, i)))
                stack.enter_context(use_skips(skips[i]))
                found = stack.enter_context(added_losses())
                if chain:
                    values[i] = run_layers(model, layers, values[i], parts[i])
                else:
                    values[i] = model(*parts[i].inputs, **parts[i].side)
            added[i] += found
            drew |= random.has_drawn
    if drew:
        advance_caller_rng()
    return values, added


def cut(layers: Sequence[nn.Module], counts: Sequence[int]) -> list[Sequence[nn.Module]]:
    """Return the layers of each stage."""
    ends = [sum(counts[: at + 1]) for at in range(len(counts))]
    return [layers[end - count : end] for end, count in zip(ends, counts, strict=True)]


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


def gathered(outputs: Sequence[Any]) -> Any:
    """Gather outputs into one: join tensors by rows, list other values."""
    flat = [pytree.tree_flatten(output) for output in outputs]
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    joined = [torch.cat(c) if isinstance(c[0], Tensor) and c[0].dim() else list(c) for c in columns]
    return pytree.tree_unflatten(joined, flat[0][1])


def _weights(
    scores: Sequence[Score],
    parts: Sequence[Batch],
    by_rows: list[float],
    is_sum: bool,
    weigh: Callable[[Any], float] | None,
) -> list[float]:
    if is_sum:
        return [1.0] * len(scores)
    if weigh is None and scores[0].weight is None:
        return by_rows
    found = [
        float(weigh(part.target) if weigh else one.weight)
        for one, part in zip(scores, parts, strict=True)
    ]
    return [weight / sum(found) for weight in found]


def _term(loss: Tensor, weight: float, added: Sequence[Tensor], share: float) -> Tensor:
    """Return the share of a micro-batch in the loss of the step; zero if its weight is zero."""
    term = loss * weight if weight else torch.zeros_like(loss)
    for one in added:
        term = term + one * share
    return term


def _mean(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return the weighted sum; values of weight zero are left out, as they may be NaN."""
    terms = [value * weight for value, weight in zip(values, weights, strict=True) if weight]
    return _plus(terms[0], terms[1:])


def _plus(loss: Tensor, extra: Sequence[Tensor]) -> Tensor:
    for one in extra:
        loss = loss + one
    return loss


def _backwards_of_call(
    outputs: Sequence[Any],
    loss_fn: LossFn | None,
    order: Sequence[int],
    model: nn.Module,
    batch: Batch,
) -> Tensor:
    """Backpropagate the loss of the whole output, and return it.

    Gradients are first summed over micro-batches, then added to `.grad`.
    """
    tensors = [[t for t in pytree.tree_leaves(o) if _learns(t)] for o in outputs]
    ends = pytree.tree_map(
        lambda t: t.detach().requires_grad_() if _learns(t) else t, list(outputs)
    )
    total = score(loss_fn, gathered(ends), batch.whole().target).loss
    total.backward()
    leaves = [t for t in (*model.parameters(), *batch.tensors().values()) if t.requires_grad]
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


# ---- the orders of a schedule -------------------------------------------------------------


def orders_of(schedule: Schedule, *ops: Op) -> list[list[int]]:
    """Return the order in which each stage takes its micro-batches."""
    actions = [action for lane in schedule.lanes for action in lane if action.op in ops]
    return [[a.microbatch for a in actions if a.stage == s] for s in range(schedule.stages)]


def order_of_backwards(pipe: Pipe, microbatches: int) -> list[int]:
    """Return the micro-batches in the order of their backwards, which all stages share."""
    schedule = join_split_backwards(pipe.forecast().program.schedule)
    orders = [[i for i in order if i < microbatches] for order in orders_of(schedule, Op.B)]
    assert all(order == orders[0] for order in orders)
    return orders[0]


# ---- ranks that are processes -------------------------------------------------------------


def first_names(model: nn.Module) -> dict[str, str]:
    """Map each name of a parameter or buffer to the first name of the same tensor."""
    found: dict[str, str] = {}
    for listed in (model.named_parameters, model.named_buffers):
        first: dict[int, str] = {}
        for name, tensor in listed(remove_duplicate=False):
            found[name] = first.setdefault(id(tensor), name)
    return found


def merged(of_ranks: Sequence[Outcome], model: nn.Module) -> Outcome:
    """Merge the outcomes of all ranks into that of one process.

    What several ranks hold must be the same on each of them. Gradients of inputs are summed. Only
    ranks with outputs or metrics have them. The first outcome gives the values of inputs: only the
    layers of the first stage change an input as the model does.
    """
    names = first_names(model)
    first = of_ranks[0]
    found = Outcome(first.loss, None, {}, {}, {}, None)
    for rank, one in enumerate(of_ranks):
        assert bitwise(one.loss, first.loss), f"the loss is another on rank {rank}"
        for kind in ("output", "metrics"):
            if getattr(one, kind) is not None:
                setattr(found, kind, getattr(one, kind))
        for kind in ("gradients", "buffers", "values"):
            ours: Numbers = getattr(found, kind)
            for name, tensor in getattr(one, kind).items():
                known = name in names
                name = names.get(name, name)
                if not known and kind == "gradients":
                    ours[name] = plus(ours.get(name), tensor)
                elif name not in ours:
                    ours[name] = tensor
                elif known:
                    assert same_or_none(ours[name], tensor), f"{name} is another on rank {rank}"
    return found


def same_or_none(a: Tensor | None, b: Tensor | None) -> bool:
    """Return whether two tensors are bitwise equal, or both missing."""
    return a is b if a is None or b is None else bitwise(a, b)


def plus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Return the sum, where None counts as zero."""
    return (a if b is None else b) if a is None or b is None else a + b


# ---- shorter forms for one input and one target -------------------------------------------


def trained(pipe: Pipe, x: Tensor, target: Any, door: str) -> Outcome:
    """Run one training step of a pipe that has a loss_fn."""
    return run_pipe(pipe, Batch((x,), target=target), door)


def whole(model: nn.Module, x: Tensor, target: Any, loss_fn: LossFn | None) -> Outcome:
    """Run one training step of the unsplit model on the whole batch."""
    return run_whole(model, Batch((x,), target=target), loss_fn)


def unsplit(
    model: nn.Sequential,
    x: Tensor,
    target: Any,
    loss_fn: LossFn,
    *,
    chunks: int,
    counts: Sequence[int],
    order: Sequence[int],
    door: str,
    deferred: bool = False,
    under: AbstractContextManager[Any] | None = None,
) -> Outcome:
    """Run one training step of the unsplit model, micro-batch by micro-batch."""
    return run_parts(
        model,
        Batch((x,), target=target),
        loss_fn,
        sizes=sizes_of(len(x), chunks),
        counts=counts,
        door=door,
        backward_order=order,
        deferred=deferred,
        under=under,
    )
