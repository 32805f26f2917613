"""The loss of a training step: how it is reduced, and the last stage that computes it.

The loss of a batch must equal the loss of the unsplit model. A micro-batch computes a mean over its
own rows, so the runtime needs a weight for each micro-batch:

    loss                                          weight of a micro-batch
    reduction="sum"                               1
    PyTorch's cross-entropy and NLL losses        the targets that are not ignored, times their
                                                  class weights (`TargetCounter`)
    a loss that returns a `Weighted` value        its weight
    any other mean                                its number of rows
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from penstock.device.accelerator import is_captured
from penstock.errors import RunError
from penstock.stage.aux_loss import CollectedLosses, sum_losses, thread_state
from penstock.stage.loss_hints import explain_loss_call
from penstock.stage.loss_terms import (
    Gates,
    LossTerm,
    LossTerms,
    TermComparison,
    find_loss_terms,
)
from penstock.stage.recompute import in_checkpointed_forward, in_recomputation, mark_only_run
from penstock.stage.row_means import RowMeanProver
from penstock.stage.stage import OUTSIDE, Stage, StageFunction
from penstock.torch_compat import (
    get_global_hook_ids,
    get_legacy_reduction,
    pytree,
    unwrap_compiled,
)
from penstock.tracebacks import add_hint

# ---- reduction ---------------------------------------------------------------------------------
#
# PyTorch's classification losses average over the targets that are not ignored, weighted by class.
# Rows then do not count the same, and their weights can be read from the targets.

LossFn = Callable[..., Any]

_COUNTED_LOSS_FUNCTIONS = (functional.cross_entropy, functional.nll_loss)
_COUNTED_LOSS_MODULES = tuple(
    getattr(nn, name)
    for name in ("CrossEntropyLoss", "NLLLoss", "LinearCrossEntropyLoss")  # the last: torch 2.13
    if hasattr(nn, name)
)
DEFAULT_IGNORE_INDEX = -100  # the default of PyTorch's losses

# Losses of PyTorch that combine each entry of the output with one of the target, and average.
_ENTRY_LOSSES = {
    nn.MSELoss: functional.mse_loss,
    nn.L1Loss: functional.l1_loss,
    nn.SmoothL1Loss: functional.smooth_l1_loss,
    nn.HuberLoss: functional.huber_loss,
    nn.BCELoss: functional.binary_cross_entropy,
    nn.BCEWithLogitsLoss: functional.binary_cross_entropy_with_logits,
}
_ENTRY_LOSS_FUNCTIONS = tuple(_ENTRY_LOSSES.values())


@dataclass(frozen=True)
class TargetCounter:
    """A function from the targets of a micro-batch to the weight of that micro-batch.

    The result stays on the device of the targets, so the host does not wait for the device.

    Attributes:
        ignore_index: The target that does not count.
        class_weights: The weight of each class, or None if all count 1.
        smooths_labels: Whether each target adds a part for every class to the loss.
    """

    ignore_index: int = DEFAULT_IGNORE_INDEX
    class_weights: Tensor | None = None
    smooths_labels: bool = False

    def __call__(self, target: Tensor) -> Tensor:
        """Return the weight as a float64 tensor with one element.

        >>> TargetCounter()(torch.tensor([3, 1, -100]))
        tensor(2., dtype=torch.float64)
        """
        if target.is_floating_point():  # class probabilities along dim 1: every row counts 1
            rows = target[:, 0].numel() if target.dim() > 1 else 1
            return torch.full((), rows, dtype=torch.float64, device=target.device)
        counts = target != self.ignore_index
        if self.class_weights is None:
            return counts.sum(dtype=torch.float64)
        # The ignored index, such as -100, is outside of the table. An invalid target is clamped as
        # well; the loss itself raises for it.
        classes = target.long().clamp(0, len(self.class_weights) - 1)
        weights = self.class_weights.detach().to(target.device)[classes]
        weight = weights.where(counts, 0).sum(dtype=torch.float64)
        if not self.smooths_labels:
            return weight
        is_divided_by_zero = (weight == 0) & counts.any()
        if is_captured(target.device):  # the host cannot read it: the loss becomes NaN
            return weight.masked_fill(is_divided_by_zero, torch.nan)
        if is_divided_by_zero:
            raise RunError(
                "all targets of a micro-batch have a class weight of 0, and with label_smoothing "
                "they add to the loss of the batch all the same. The loss of the micro-batch is "
                "divided by 0. Use ignore_index for targets that do not count, a small class "
                "weight in place of 0, or fewer chunks."
            )
        return weight


@dataclass(frozen=True)
class LossReduction:
    """The rule by which the losses of micro-batches form the loss of the batch.

    Attributes:
        is_sum: Whether the losses are summed. Otherwise they are averaged.
        target_counter: The weight of a micro-batch in the average. With None, the weight is what
            the loss returns with its value, or else the number of rows.
    """

    is_sum: bool
    target_counter: TargetCounter | None = None


def resolve_reduction(loss_fn: LossFn | None, requested: str | None) -> LossReduction:
    """Return the reduction that the caller requested, or else the one that the loss uses itself."""
    loss_fn = unwrap_compiled(loss_fn)
    keywords = loss_fn.keywords if isinstance(loss_fn, partial) else {}
    reduction = getattr(loss_fn, "reduction", keywords.get("reduction", "mean"))
    if keywords.get("size_average") is not None or keywords.get("reduce") is not None:
        reduction = get_legacy_reduction(keywords.get("size_average"), keywords.get("reduce"))
    if (requested or reduction) == "sum":
        return LossReduction(is_sum=True)
    return LossReduction(
        is_sum=False,
        target_counter=_find_target_counter(loss_fn, keywords) if reduction == "mean" else None,
    )


def _find_target_counter(loss_fn: Any, keywords: dict[str, Any]) -> TargetCounter | None:
    """Return a counter for one of PyTorch's classification losses, or None for any other loss."""
    function = loss_fn.func if isinstance(loss_fn, partial) and not loss_fn.args else loss_fn
    if function in _COUNTED_LOSS_FUNCTIONS:
        return build_target_counter(
            keywords.get("ignore_index", DEFAULT_IGNORE_INDEX),
            keywords.get("weight"),
            keywords.get("label_smoothing", 0.0),
        )
    # A subclass with a forward of its own may compute anything, and so may hooks.
    for loss_class in _COUNTED_LOSS_MODULES:
        if (
            isinstance(loss_fn, loss_class)
            and type(loss_fn).forward is loss_class.forward
            and not _has_own_code(loss_fn)
        ):
            ignored = loss_fn.ignore_index
            return build_target_counter(
                DEFAULT_IGNORE_INDEX if ignored is None else ignored,
                loss_fn.weight,
                getattr(loss_fn, "label_smoothing", 0.0),
            )
    return None


def build_target_counter(
    ignore_index: int, class_weights: Tensor | None, label_smoothing: float
) -> TargetCounter:
    """Return a counter for a mean cross-entropy with these arguments.

    With both class weights and label smoothing, weights are read from their device.
    """
    smooths = (
        bool(label_smoothing) and class_weights is not None and bool((class_weights == 0).any())
    )
    return TargetCounter(ignore_index, class_weights, smooths)


def identify_loss(loss_fn: LossFn | None) -> Any:
    """Return what two losses of one kind share: their code, or their class.

    The function itself would not do. Many scripts pass a new lambda in every step, and it may hold
    large tensors.
    """
    if isinstance(loss_fn, partial):
        loss_fn = loss_fn.func
    if isinstance(loss_fn, nn.Module):  # which takes 2 us to say that it has no such attribute
        return type(loss_fn)
    return getattr(loss_fn, "__code__", type(loss_fn))


def is_entry_mean(loss_fn: LossFn | None, output: Any, targets: tuple[Any, ...]) -> bool:
    """Return whether a loss is one of PyTorch's that is a mean over rows, for these arguments.

    Nothing has to be learnt from the operations that it runs. A prediction of shape (rows, 1) and a
    target of shape (rows) would be combined row by row.

    >>> is_entry_mean(functional.mse_loss, torch.ones(4, 1), (torch.ones(4, 1),))
    True
    >>> is_entry_mean(functional.mse_loss, torch.ones(4, 1), (torch.ones(4),))
    False
    """
    if isinstance(loss_fn, nn.Module):
        # Class weights are in buffers, and hooks may compute anything.
        has_weights = any(weight is not None for weight in vars(loss_fn)["_buffers"].values())
        has_own_code = _has_own_code(loss_fn) or any(get_global_hook_ids())
        if type(loss_fn) not in _ENTRY_LOSSES or has_weights or has_own_code:
            return False
    elif loss_fn not in _ENTRY_LOSS_FUNCTIONS:
        return False
    if type(output) is not Tensor or len(targets) != 1 or type(targets[0]) is not Tensor:
        return False
    shape, target_shape = output.shape, targets[0].shape
    return 0 < len(shape) == len(target_shape) and shape[0] == target_shape[0]


def _has_own_code(module: nn.Module) -> bool:
    """Return whether hooks, or a forward of the module itself, may change what it computes."""
    attributes = vars(module)
    hooks = attributes["_forward_hooks"] or attributes["_forward_pre_hooks"]
    return bool(hooks or "forward" in attributes)


class CrossEntropyRecorder(TorchFunctionMode):
    """Records the mean cross-entropies of a loss that has no graph, as terms of it."""

    def __init__(self) -> None:
        super().__init__()
        self.terms: list[LossTerm] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run a function, and look at its arguments if it is a cross-entropy."""
        kwargs = kwargs or {}
        if func in _COUNTED_LOSS_FUNCTIONS:
            arguments = inspect.signature(func).bind(*args, **kwargs).arguments
            index = arguments.get("ignore_index", DEFAULT_IGNORE_INDEX)
            if arguments.get("reduction", "mean") == "mean":
                count = TargetCounter(index, arguments.get("weight"))(arguments["target"])
                self.terms.append(LossTerm("NllLossBackward", (), (count,)))
        return func(*args, **kwargs)


# ---- the last stage ----------------------------------------------------------------------------


class Weighted(NamedTuple):
    """A loss that is a mean over something else than rows, with its weight.

    A loss function, or a model that computes its own loss, returns it for each micro-batch. The
    loss of the batch is then the mean by these weights.

    Attributes:
        loss: A tensor with one element.
        weight: How much this micro-batch counts, such as the number of tokens that are not ignored:
            a number, or a tensor with one element.

    >>> def loss_fn(logits, labels):
    ...     losses = functional.cross_entropy(logits, labels, reduction="none", ignore_index=0)
    ...     return Weighted(losses.sum() / (labels != 0).sum(), (labels != 0).sum())
    """

    loss: Tensor
    weight: Tensor | float


class LossExtras(NamedTuple):
    """The values that a micro-batch returns beside its loss.

    Attributes:
        weight: The weight of the micro-batch, a float64 tensor with one element, or None.
        metrics: The other entries of the dict that the loss returned.
        output: The output of the model in a tuple, if it was requested.
    """

    weight: Tensor | None = None
    metrics: dict[str, Any] = {}  # noqa: RUF012 (it is never changed)
    output: tuple[Any, ...] = ()


NO_EXTRAS = LossExtras()
_NULL_CONTEXT = nullcontext()
MODEL_ORIGIN = "the model, without a loss_fn, returned"
LOSS_FN_ORIGIN = "loss_fn returned"


def append_loss(
    stages: Sequence[Stage],
    loss_fn: LossFn | None,
    reduction: LossReduction,
    has_target: bool,
    return_outputs: bool,
    comparison: TermComparison,
) -> list[Stage]:
    """Return the stages of a training step: the last one computes the loss, too."""
    *others, last = stages
    with_loss = LossStageFunction(
        last.compute, loss_fn, reduction, has_target, return_outputs, comparison
    )
    return [*others, replace(last, compute=with_loss)]


@dataclass(frozen=True, eq=False)
class LossStageFunction:
    """The computation of the last stage, followed by the loss.

    The caller (`OUTSIDE`) sends the target, after the batch if this is also the first stage. It
    receives the loss and its `LossExtras`, if there are any. The stage runner appends the sum of
    the auxiliary losses.

    The loss function runs once for each micro-batch, as it may count or remember what it sees. If
    the micro-batch is recomputed, that is in the recomputation, which has the graph.

    Auxiliary losses are weighted by rows. If the loss returns a weight of its own, the sum of these
    weights is known only at the end of the step. The auxiliary losses are then added to the loss
    itself and share its weight.
    """

    compute: StageFunction
    loss_fn: LossFn | None
    reduction: LossReduction
    has_target: bool
    return_outputs: bool
    comparison: TermComparison | None = None
    # the output of a forward or recomputation, which the runner of the stage compares and removes
    model_outputs: list[Any] = field(default_factory=list)

    @cached_property
    def origin(self) -> str:
        """The beginning of error messages: who returned the loss."""
        return LOSS_FN_ORIGIN if self.loss_fn else MODEL_ORIGIN

    def __call__(self, inputs: Mapping[int, tuple[Any, ...]]) -> dict[int, tuple[Any, ...]]:
        """Run the stage and the loss. The loss takes the place of the output."""
        targets: tuple[Any, ...] = ()
        if self.has_target:
            *batch, target = inputs[OUTSIDE]
            inputs = {**inputs, OUTSIDE: tuple(batch)}
            targets = (target,)
        is_watched = self.comparison is not None and not in_checkpointed_forward()
        # With a graph, the terms of the loss are read from it.
        recorder = None if torch.is_grad_enabled() or not is_watched else CrossEntropyRecorder()
        # For each micro-batch, so without new contexts that do nothing.
        with _NULL_CONTEXT if self.loss_fn or recorder is None else recorder:
            outputs = self.compute(inputs)
        (output,) = outputs[OUTSIDE]
        if in_checkpointed_forward() or in_recomputation():
            self.model_outputs.append(output)
        if in_checkpointed_forward():
            return {dst: values for dst, values in outputs.items() if dst != OUTSIDE}
        aux_losses = thread_state.sink
        if isinstance(aux_losses, CollectedLosses):
            aux_losses.layer_count = len(aux_losses)
        if self.loss_fn is None:
            result = extract_model_loss(output)
        else:
            # One micro-batch shows what the loss function does with all of them.
            prover = self._build_prover(output, targets)
            with mark_only_run(), recorder or _NULL_CONTEXT, prover or _NULL_CONTEXT:
                try:
                    result = self.loss_fn(output, *targets)
                except Exception as error:
                    add_hint(error, explain_loss_call(self.loss_fn, output, targets))
                    raise
            if prover is not None and self.comparison is not None:
                value = result.get("loss") if isinstance(result, Mapping) else result
                is_known = torch.is_grad_enabled() and prover.proves(value, self.reduction.is_sum)
                adds_up = torch.is_grad_enabled() and prover.adds_up(value)
                # What is proved may still be multiplied by the number of rows.
                needs_totals = prover.goes_by_row_count or not is_known
                self.comparison.note_functions(
                    prover.function_names,
                    prover.goes_by_row_count,
                    prover.totals if needs_totals and adds_up else (),
                )
                needs_batch = self.comparison.has_new_row_counts or not (is_known or adds_up)
                self.comparison.keeps_outputs = needs_batch
        loss, extras = parse_loss(result, self.origin)
        target_counter = self.reduction.target_counter
        if extras.weight is not None:
            if self.comparison is not None:
                # A mean by weights is compared only if it goes by the number of rows.
                self.comparison.keeps_outputs &= self.comparison.has_new_row_counts
                self.comparison.note(None, self._list_kept_values(output, targets))
            _zero_grad_if_weightless(output, extras.weight)
            if isinstance(aux_losses, CollectedLosses) and aux_losses:
                loss = loss + sum_losses(aux_losses).to(loss.device)
                aux_losses.clear()
        elif target_counter is not None and targets and isinstance(targets[0], Tensor):
            weight = target_counter(targets[0])
            extras = extras._replace(weight=weight)
            # Without class weights, a weight of 0 means that all targets are ignored. PyTorch's
            # losses give those no gradient anyway.
            if target_counter.class_weights is not None:
                _zero_grad_if_weightless(output, weight)
        elif self.comparison is not None:
            terms = None
            if not self.reduction.is_sum:
                gates = self.comparison.gates if self.loss_fn is None else Gates.NONE
                terms = (
                    find_loss_terms(loss, gates) if recorder is None else LossTerms(recorder.terms)
                )
            self.comparison.note(terms, self._list_kept_values(output, targets))
        if self.return_outputs:
            extras = extras._replace(output=(output,))
        return {**outputs, OUTSIDE: (loss,) if extras is NO_EXTRAS else (loss, extras)}

    def _list_kept_values(self, output: Any, targets: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Return the arguments of the loss function, if the loss of the batch is computed, too."""
        if self.comparison is None or not self.comparison.keeps_outputs:
            return None
        values: tuple[Any, ...] = pytree.tree_map_only(Tensor, Tensor.detach, (output, *targets))
        return values

    def _build_prover(self, output: Any, targets: tuple[Any, ...]) -> RowMeanProver | None:
        """Return what follows the loss function on the first micro-batch of a step, if needed."""
        comparison = self.comparison
        if comparison is None or not comparison.keeps_outputs or comparison.kept_outputs:
            return None
        # Without a graph, nothing else shows that a number is a mean, and not a count.
        if torch.is_grad_enabled() and is_entry_mean(self.loss_fn, output, targets):
            comparison.keeps_outputs = False
            return None
        return RowMeanProver(output, targets, row_counts=comparison.row_counts)


@dataclass(frozen=True, eq=False)
class OutputStageFunction:
    """The computation of the last stage in `pipe(x)`, if the model returns a loss of its own.

    It raises if that is not a mean over rows, as the losses of micro-batches are averaged by rows.

    Attributes:
        compute: The computation of the stage.
        microbatches: The micro-batches whose forward has not run yet, in order.
        recomputed: Those whose forward will run once more and has not yet, in order.
        comparisons: Compare their losses: the cross-entropies in all of them, and all terms of
            those that have a graph. A forward that will be recomputed has none until then.
    """

    compute: StageFunction
    microbatches: list[int]
    recomputed: list[int]
    comparisons: tuple[TermComparison, TermComparison]

    def __call__(self, inputs: Mapping[int, tuple[Any, ...]]) -> dict[int, tuple[Any, ...]]:
        """Run the stage, and compare the terms of the loss in its output."""
        if in_recomputation():
            outputs = self.compute(inputs)
            if self.recomputed:
                self._compare_graph(outputs, self.recomputed.pop(0))
            return outputs
        if not self.microbatches:
            return self.compute(inputs)
        with CrossEntropyRecorder() as recorder:
            outputs = self.compute(inputs)
        microbatch, loss = self.microbatches.pop(0), find_loss_tensor(outputs[OUTSIDE][0])
        if isinstance(loss, Tensor) and not loss.dim():
            self.comparisons[0].note(LossTerms(recorder.terms))
        self.comparisons[0].add(microbatch)
        self._compare_graph(outputs, microbatch)
        if not self.microbatches:
            for comparison in self.comparisons:
                comparison.finish()
        return outputs

    def _compare_graph(self, outputs: Mapping[int, tuple[Any, ...]], microbatch: int) -> None:
        """Compare the terms of a loss that has a graph."""
        loss = find_loss_tensor(outputs[OUTSIDE][0])
        if isinstance(loss, Tensor) and not loss.dim() and loss.grad_fn is not None:
            self.comparisons[1].note(find_loss_terms(loss, self.comparisons[1].gates))
        self.comparisons[1].add(microbatch)


def extract_model_loss(output: Any) -> Any:
    """Return the loss in the output of a model that computes its own loss.

    It is `output.loss`, or the output itself. In a tuple it is the first element if that is a
    number, as in `(loss, logits)`, or else the only number, as in `(logits, loss)`. A `Weighted`
    value and a dict are returned whole.
    """
    if isinstance(output, Weighted):
        return output
    if isinstance(getattr(output, "loss", None), Tensor):
        return output.loss
    return _find_loss_in_tuple(output) if type(output) is tuple else output


def find_loss_tensor(output: Any) -> Any:
    """Return the tensor that is the loss in the output of a model, or else anything."""
    result = extract_model_loss(output)
    if isinstance(result, Weighted):
        return result.loss
    return result.get("loss") if isinstance(result, Mapping) else result


def has_weighted_loss(output: Any) -> bool:
    """Return whether a model returned its loss with a weight."""
    return isinstance(output, Weighted) or (isinstance(output, Mapping) and "weight" in output)


def _find_loss_in_tuple(output: tuple[Any, ...]) -> Any:
    """Return the loss in a tuple, or the tuple itself if it is not clear which value is the loss.

    A micro-batch of one row may have outputs with one element. Tensors without dims come first.
    """
    single = [v for v in output if _is_scalar_tensor(v) and v.is_floating_point()]
    numbers = [value for value in single if not value.dim()] or single
    if not numbers or (len(numbers) > 1 and numbers[0] is not output[0]):
        return output
    if not numbers[0].requires_grad and any(number.requires_grad for number in numbers):
        raise RunError(
            "the model returned a tuple whose first number does not require grad, although another "
            "number in it does, so it is not clear which one is the loss. Return the loss first, "
            "or a dict with a 'loss'."
        )
    return numbers[0]


def _is_scalar_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1


def parse_loss(result: Any, origin: str) -> tuple[Tensor, LossExtras]:
    """Split what a loss returned into the loss and its extras.

    Args:
        result: A loss, a `Weighted` value, or a dict with "loss", perhaps "weight", and metrics.
        origin: The beginning of error messages, such as "loss_fn returned".
    """
    if isinstance(result, Tensor):  # as nearly all
        return _parse_scalar("loss", result, origin), NO_EXTRAS
    if isinstance(result, Weighted):
        result = result._asdict()
    elif isinstance(result, tuple | list):
        raise RunError(
            f"{origin} a {type(result).__name__} of {len(result)} values, and it is not clear what "
            "they are. Return the loss alone; or a dict such as {'loss': loss, 'accuracy': "
            "accuracy}, whose other entries are metrics; or penstock.Weighted(loss, weight) if the "
            "loss is a mean over something else than rows."
        )
    if not isinstance(result, Mapping):
        return _parse_scalar("loss", result, origin), NO_EXTRAS
    if "loss" not in result:
        raise RunError(
            f"{origin} a dict without a 'loss'. Its keys are: "
            f"{', '.join(map(repr, result)) or '(none)'}. Add a 'loss', and a 'weight' if the mean "
            "is weighted; all other entries are metrics."
        )
    loss = _parse_scalar("loss", result["loss"], origin)
    weight = _parse_weight(result["weight"], loss, origin) if "weight" in result else None
    metrics = {name: v for name, v in result.items() if name not in ("loss", "weight")}
    return loss, LossExtras(weight, pytree.tree_map_only(Tensor, _detach_metric, metrics))


def _parse_scalar(name: str, value: Any, origin: str) -> Tensor:
    if isinstance(value, Tensor) and value.numel() == 1:
        scalar = value.reshape(()) if value.dim() else value
        # The loss may be a view into memory as large as the output, which it would keep alive.
        return scalar.clone()
    kind = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value)
    advice = "Reduce it to a scalar."
    if origin == MODEL_ORIGIN:
        advice = "Pass loss_fn= to Pipe or to step, or let the model return its loss as a scalar."
    raise RunError(f"a {name} must be a tensor with one element, but {origin} {kind}. {advice}")


def _parse_weight(value: Any, loss: Tensor, origin: str) -> Tensor:
    if isinstance(value, int | float):
        return torch.full((), value, dtype=torch.float64, device=loss.device)
    weight = _parse_scalar("weight", value, origin)
    if weight.requires_grad:
        raise RunError(
            f"{origin} a weight that requires grad, but weights are not differentiated. Detach it."
        )
    return weight.to(loss.device, torch.float64, copy=True)


def _detach_metric(metric: Tensor) -> Tensor:
    """Return a metric without its graph. A scalar is copied, as layers may change it in place."""
    return metric.detach() if metric.dim() else metric.detach().clone()


def _zero_grad_if_weightless(output: Any, weight: Tensor) -> None:
    """Zero the gradient of a micro-batch whose weight is 0.

    Its mean loss may be 0 / 0, and its gradient NaN. Multiplied by the weight, the gradient would
    still be NaN and spoil those of all other micro-batches. The weight is known on the device only,
    so hooks mask the gradient there.
    """
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, Tensor) and leaf.requires_grad and not isinstance(leaf, nn.Parameter):
            leaf.register_hook(partial(_mask_gradient, weight))


def _mask_gradient(weight: Tensor, gradient: Tensor) -> Tensor:
    return gradient.masked_fill(weight == 0, 0)
