"""The texts of what an audit may find beside different numbers, with the cures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.errors import AuditError


def build_error(problem: str, is_step: bool) -> AuditError:
    """Return the error of an audit that has found a problem in a step, or in another call."""
    return AuditError(
        f"the audit of this {'step' if is_step else 'call'} found that {problem} "
        "The optimizer has not stepped. (audit='off' turns the audit off.)"
    )


def describe_advanced_iterator(name: str) -> str:
    """Return what is wrong if a forward advances an iterator of this type."""
    return (
        f"a layer or the loss advances an iterator ({name}). The unsplit model does so once for "
        "the whole batch, and a pipe for each micro-batch, so they compute with other values. "
        "Advance it outside of the forward, and pass the value as an input, or use chunks=1."
    )


def describe_state(changes: Sequence[str], is_ahead: bool, in_backward: bool = False) -> str:
    """Return what is wrong if a micro-batch computes with the state that another one has left.

    `is_ahead` says that only a counter that is far ahead makes a difference, and `in_backward` that
    the backward of a micro-batch changes state, too.
    """
    names = ", ".join(changes[:4]) or "a variable outside of the model"
    use = (
        "computes something else once it has grown"
        if is_ahead
        else "that of the next one computes with it"
    )
    change = "backward" if in_backward else "forward"
    return (
        f"the {change} of a micro-batch changes {names}, and "
        f"{use}. The unsplit model changes it once for the whole batch, after all rows have been "
        f"computed. Change such state outside of the {change}, after each step, or use chunks=1."
    )


def describe_evaluation_state(changes: Sequence[str]) -> str:
    """Return what is wrong if training computes with what calls in eval mode have left."""
    names = ", ".join(changes[:4]) or "a variable outside of the model"
    return (
        f"the forward in eval mode, or without gradients, changes {names}, and that in training "
        "computes with what it has left. The unsplit model leaves there what it computes from the "
        "whole batch, and a pipe what micro-batches give. Change such state outside of the "
        "forward, or use chunks=1."
    )


def describe_opaque_state(name: str) -> str:
    """Return what is wrong if each forward changes a value whose next one cannot be predicted."""
    return (
        f"each forward changes {name}, which is not a number, so the audit cannot test later "
        "values. The unsplit model changes it once for the whole batch, and a pipe for each "
        "micro-batch. Change it outside of the forward, after each step, or use chunks=1."
    )


def describe_shared_graph(changes: Sequence[str]) -> str:
    """Return what is wrong if micro-batches compute with one graph that a layer has kept."""
    names = ", ".join(changes[:4]) or "a variable outside of the model"
    return (
        f"the forward of a micro-batch changes {names}, and that of the next one computes with a "
        "tensor and its graph from there, such as a weight that is computed once in each step. "
        "The backward of one micro-batch frees that graph, and a recomputed forward leaves none, "
        "so its gradient would be lost. Compute it in each forward, or use chunks=1 and "
        "checkpoint='never'."
    )


def describe_backward_state(names: Sequence[str]) -> str:
    """Return what is wrong if a backward computes with what its forward has left for its rows."""
    text = ", ".join(names[:4]) or "a variable outside of the model"
    return (
        f"each forward leaves a tensor of its rows in {text}, and the backward of a layer reads it "
        "from there. In a pipe, forwards of other micro-batches come in between, and leave theirs. "
        "Keep it with ctx.save_for_backward, or in the closure of a hook on a tensor, or use "
        "chunks=1."
    )


KEPT_FOR_LOSS = (
    "loss_fn reads what layers of an earlier stage have left outside of their outputs, such as "
    "features that a hook keeps. When it runs, that may be of another micro-batch. Return such "
    "values from the model, or use chunks=1."
)


HOOKED_LEAF = (
    "loss_fn uses a tensor or a parameter of its own that has a hook (register_hook), and a step "
    "would call the hook for each micro-batch. Change that gradient after the step, move the "
    "parameter into the model, whose hooks see the gradient of the batch, or use chunks=1."
)


def describe_hooks(name: str) -> str:
    """Return what is wrong if the forward changes the hooks of a module or a parameter."""
    return (
        f"the forward adds or removes hooks of '{name}'. In a pipe, stages and micro-batches would "
        "do so at different times, and each stage for itself. Register hooks before the Pipe is "
        "made, or between steps."
    )


def describe_hidden_output(leaf: Any) -> str:
    """Return what is wrong if an object in the output has a tensor that the pipe does not see."""
    return (
        f"the model returns a {type(leaf).__name__} with a tensor inside, which is not one of the "
        "pipe's outputs, so a backward from it would reach the last stage only. Return tuples, "
        "lists or dicts."
    )


def describe_lost_rows(path: str) -> str:
    """Return what is wrong if an output had rows in earlier calls, and has none in this one."""
    return (
        f"the output{path} has no rows here, although it had in earlier calls, so that the pipe "
        "returns a list with what each micro-batch has returned. A layer may leave out the dim of "
        "a single row, as `x.squeeze()` does. Name the dim, as in `x.squeeze(-1)`."
    )
