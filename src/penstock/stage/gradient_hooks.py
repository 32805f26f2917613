"""Hooks on accumulated gradients, which in a step run after each micro-batch.

`register_post_accumulate_grad_hook` means: once for each backward, with the whole gradient in
`.grad`. In a step, a stage has a backward for each micro-batch. A hook that only reads the gradient
sees it grow. A hook that changes it is wrong, because the next micro-batch is added to what it has
left: a clipped sum of clipped sums is not the clipped sum. A mask is the exception: the same
entries are set to 0 each time, and the others are left alone.

An optimizer that steps in such a hook changes the parameter itself, which other micro-batches need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.device.accelerator import is_captured
from penstock.errors import RunError
from penstock.stage.stage import Stage


class GradientHookWatch:
    """Raises if a hook on an accumulated gradient makes the step of a stage wrong.

    Args:
        stage: The stage, for messages.
        parameters: Its parameters that have such hooks.
    """

    def __init__(self, stage: Stage, parameters: Sequence[Tensor]) -> None:
        self._stage, self._parameters = stage, parameters
        self._versions: list[int] | None = None
        self._counts: dict[Tensor, int] = {}  # of the accumulations
        self._rewritten: set[Tensor] = set()
        # The entries that hooks have set to 0, and those that they have kept.
        self._masks: dict[Tensor, tuple[Tensor, Tensor]] = {}

    def check_not_stepped(self) -> None:
        """Raise if a hook has changed a parameter that another micro-batch still needs."""
        versions = [parameter._version for parameter in self._parameters]
        if self._versions is None:
            self._versions = versions
        if versions != self._versions:
            raise RunError(
                f"a parameter of {self._stage} was changed in the backward of one micro-batch, and "
                "other micro-batches still need it. It has a hook on its accumulated gradient "
                "(register_post_accumulate_grad_hook), such as an optimizer that steps in the "
                "backward. Call optimizer.step() after pipe.step, or use chunks=1."
            )

    @contextmanager
    def watch_backward(self, is_shared: Callable[[Tensor], bool]) -> Iterator[None]:
        """Look at the gradients before and after the hooks, in the backward of a micro-batch.

        `is_shared` tells whether several stages use a parameter. Each of them adds to its gradient,
        also if there is one micro-batch.
        """
        handles = []
        # A captured backward cannot read numbers. The step before it has been looked at.
        watched = [p for p in self._parameters if not is_captured(p.device)]
        for parameter in watched:
            hooks = parameter._post_accumulate_grad_hooks
            assert hooks is not None
            own_hooks = dict(hooks)
            before: list[_Gradient] = []
            hooks.clear()  # hooks run in the order in which they were registered
            handles.append(parameter.register_post_accumulate_grad_hook(partial(_note, before)))
            hooks.update(own_hooks)
            handles.append(
                parameter.register_post_accumulate_grad_hook(
                    partial(self._compare, before, is_shared)
                )
            )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _compare(
        self, before: list[_Gradient], is_shared: Callable[[Tensor], bool], parameter: Tensor
    ) -> None:
        """Compare the gradient that the hooks have left with the one that they got."""
        count = self._counts[parameter] = self._counts.get(parameter, 0) + 1
        gradient, version, copy = before.pop()
        is_same = parameter.grad is gradient and gradient._version == version
        if not is_same and not self._is_mask(parameter, copy):
            self._rewritten.add(parameter)
        if parameter in self._rewritten and (count > 1 or is_shared(parameter)):
            raise RunError(
                "a hook on an accumulated gradient (register_post_accumulate_grad_hook) changes "
                f"the .grad of a parameter of {self._stage}, of shape {tuple(parameter.shape)}. In "
                "pipe.step it runs after each micro-batch of each stage that uses the parameter, "
                "and the next one is added to what it has left. Change the gradients after "
                "pipe.step, or call pipe(x), whose backward runs such hooks once."
            )

    @torch.no_grad()
    def _is_mask(self, parameter: Tensor, before: Tensor) -> bool:
        """Return whether the hooks set the same entries to 0 as before, and changed no others."""
        if parameter.grad is None or parameter.grad.shape != before.shape:
            return False
        after = parameter.grad.detach().to_dense()
        is_set = before != 0
        is_cleared, is_kept = is_set & (after == 0), is_set & (after != 0)
        has_changed = (after != before) & ~is_cleared & ~(after.isnan() & before.isnan())
        if parameter in self._masks:
            is_cleared |= self._masks[parameter][0]
            is_kept |= self._masks[parameter][1]
        self._masks[parameter] = is_cleared, is_kept
        return not bool((has_changed | (is_cleared & is_kept)).any())


class _Gradient(NamedTuple):
    """A gradient as the hooks get it."""

    gradient: Tensor
    version: int
    copy: Tensor


def _note(gradients: list[_Gradient], parameter: Tensor) -> None:
    gradient = parameter.grad
    assert gradient is not None
    dense = gradient.detach().to_dense()
    gradients[:] = [_Gradient(gradient, gradient._version, dense.clone())]
