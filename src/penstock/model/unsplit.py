"""Run a model that is cut into stages as the unsplit model, with the numbers of the pipe.

The audit of a step, and `penstock.check`, compare a pipe with the user's own forward. That forward
runs on the modules where they are: stages may be on several devices, and in a pipe each cell (a
stage on a micro-batch) draws from random generators of its own. So whenever the forward reaches
code of another stage, it switches to the generators and the device of that stage:

    in a unit        a forward pre-hook switches to the stage of this call of the unit, and moves
                     the arguments
    between units    a function mode switches to the stage that the trace gives the operation, if
                     some draw random numbers or there are several devices
    anywhere         if operands are on several devices, the function mode moves them
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from penstock.microbatch import move_to_device
from penstock.model.traced.torch_functions import is_metadata_only
from penstock.stage.fixed_draws import FixedDraws, ObservedDraws, SingleDraws
from penstock.stage.host_rng import HostRngCell
from penstock.stage.rng import DrawRedirect, derive_cell_seed, redirect_draws
from penstock.stage.stage import OUTSIDE
from penstock.torch_compat import pytree

# By function, the stages of its calls between units in order. None: it runs on every stage.
FunctionStages = Mapping[Any, Sequence[int | None]]


class UnsplitCells:
    """The cells of one micro-batch, for a forward of the unsplit model.

    Args:
        seed: The seed of the call of the pipe.
        num_stages: The number of stages.
        unit_stages: The units, each with the stages of its calls in order.
        function_stages: The stages of the operations between units.
        devices: The devices of the stages; empty if everything is on one device.
        fixes_draws: Whether random operations return fixed numbers: see `FixedDraws`. Draws from
            `random` and `numpy.random` are left as they are.
        separates_host_streams: Whether draws from `random` and `numpy.random` are those of the
            pipe, too. If not, `draws_host_random` tells that there were some.
        own_states: A dict that gets the states of the model's own generators before their first
            draws.
        keeps_numbers: Whether single random numbers, and those of `random` and `numpy.random`, are
            those of the pipe where others are fixed: see `SingleDraws`.
    """

    def __init__(
        self,
        seed: int,
        num_stages: int,
        unit_stages: Sequence[tuple[nn.Module, Sequence[int]]],
        function_stages: FunctionStages,
        devices: Sequence[torch.device] = (),
        fixes_draws: bool = False,
        separates_host_streams: bool = True,
        own_states: dict[torch.Generator, Tensor] | None = None,
        keeps_numbers: bool = False,
    ) -> None:
        self._seed, self._num_stages = seed, num_stages
        self._unit_stages, self._function_stages = unit_stages, function_stages
        self._devices = devices if len(set(devices)) > 1 else ()
        self._fixes_draws, self._keeps_numbers = fixes_draws, keeps_numbers
        self.uniform_level = 0.5  # of fixed draws: see `FixedDraws`
        self.has_uniform = False  # whether a cell has drawn uniform numbers that are fixed
        self._separates_host_streams, self._own_states = separates_host_streams, own_states
        self.has_drawn = False  # whether any cell has drawn random numbers
        self.uses_own_generator = False  # whether one has drawn from a generator of the model's
        self.draws_host_random = False  # whether one has drawn from `random` or `numpy.random`
        self.draws_number = False  # whether one has drawn a single number
        self.draws_scalar = False  # whether it was in a tensor without dims
        # The single numbers, and the states after the others, if they are kept. None: not known.
        self.numbers: Any = None

    @contextmanager
    def emulate(self, microbatch: int) -> Iterator[None]:
        """Run the unsplit model on a micro-batch in this context."""
        build_redirect = FixedDraws if self._fixes_draws else ObservedDraws
        redirects: list[DrawRedirect] = [
            (SingleDraws if self._keeps_numbers else build_redirect)(
                derive_cell_seed(self._seed, stage, microbatch), own_states=self._own_states
            )
            for stage in range(self._num_stages)
        ]
        fixed = [redirect for redirect in redirects if isinstance(redirect, FixedDraws)]
        for redirect in fixed:
            redirect.level = self.uniform_level
        host_rng = HostRngCell(self._seed, OUTSIDE, microbatch, nullcontext())
        if self._keeps_numbers:
            with host_rng, self._follow_stages(redirects, host_rng):
                yield
        elif self._fixes_draws and not self._devices:
            # The numbers are the same on every stage, so none is entered.
            with redirect_draws(redirects[0]):
                yield
        elif self._fixes_draws:
            with self._follow_stages(redirects, None):
                yield
        else:
            with host_rng, self._follow_stages(redirects, host_rng):
                yield
        self.has_uniform |= any(redirect.has_uniform for redirect in fixed)
        self.draws_host_random |= bool(host_rng.used)
        self.has_drawn |= self.draws_host_random or any(r.has_drawn for r in redirects)
        observed = [redirect for redirect in redirects if isinstance(redirect, ObservedDraws)]
        self.draws_number |= any(redirect.has_number for redirect in observed)
        self.draws_scalar |= any(redirect.has_scalar for redirect in observed)
        single = [redirect for redirect in redirects if isinstance(redirect, SingleDraws)]
        if single and not any(redirect.draws_others for redirect in single):
            self.numbers = [redirect.numbers for redirect in single], host_rng.describe_states()
        self.uses_own_generator |= any(r.used_own_generator for r in redirects)

    @contextmanager
    def _follow_stages(
        self, redirects: Sequence[DrawRedirect], host_rng: HostRngCell | None
    ) -> Iterator[None]:
        """Switch to the generators and the device of the stage of each unit and operation."""
        host_streams: list[AbstractContextManager[None]] = []  # of the units that are running
        with ExitStack() as hooks, ExitStack() as current_cell:
            current_stage: int | None = None

            def enter_stage(stage: int) -> None:
                nonlocal current_stage
                if stage != current_stage:
                    current_stage = stage
                    current_cell.close()
                    current_cell.enter_context(redirect_draws(redirects[stage]))
                    mode.current_device = self._devices[stage] if self._devices else None

            thread = threading.get_ident()
            mode = _StageSwitchMode(self._function_stages, enter_stage)
            call_counts: Counter[int] = Counter()  # calls of each unit so far

            def enter_unit(
                index: int, call_stages: Sequence[int], args: Any, kwargs: Any
            ) -> tuple[Any, Any] | None:
                if threading.get_ident() != thread:  # it calls the model at the same time
                    return None
                mode.unit_depth += 1
                stage = call_stages[min(call_counts[index], len(call_stages) - 1)]
                enter_stage(stage)
                # It takes longer than a small layer.
                if host_rng is not None and self._separates_host_streams:
                    host_streams.append(host_rng.draw_from(stage))
                    host_streams[-1].__enter__()
                call_counts[index] += 1
                device = mode.current_device
                return None if device is None else move_to_device((args, kwargs), device)

            def exit_unit() -> None:
                if threading.get_ident() == thread:
                    mode.unit_depth -= 1
                    if host_streams:
                        host_streams.pop().__exit__(None, None, None)

            for index, (unit, call_stages) in enumerate(self._unit_stages):
                # First of all hooks: a hook of the user's may draw, too.
                pre_hook = unit.register_forward_pre_hook(
                    lambda _, args, kwargs, index=index, stages=call_stages: enter_unit(
                        index, stages, args, kwargs
                    ),
                    prepend=True,
                    with_kwargs=True,
                )
                post_hook = unit.register_forward_hook(lambda *_: exit_unit(), always_call=True)
                hooks.callback(pre_hook.remove)
                hooks.callback(post_hook.remove)
            if self._function_stages or self._devices:
                hooks.enter_context(mode)
            enter_stage(0)
            yield


class _StageSwitchMode(TorchFunctionMode):
    """Lets an operation draw and compute where the stage that would run it does."""

    def __init__(self, function_stages: FunctionStages, enter_stage: Callable[[int], None]) -> None:
        super().__init__()
        self._stage_iterators = {func: iter(stages) for func, stages in function_stages.items()}
        self._enter_stage = enter_stage
        self.unit_depth = 0  # how many units are running, one inside another
        self.current_device: torch.device | None = None  # None: all stages are on one device

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Switch to the stage of this call, and run the function."""
        kwargs = kwargs or {}
        if (
            not self.unit_depth
            and func in self._stage_iterators
            and not is_metadata_only(func, args)
        ):
            stage = next(self._stage_iterators[func], None)
            if stage is not None:
                self._enter_stage(stage)
        if self.current_device is not None:
            args, kwargs = gather_operands(func, args, kwargs, self.current_device)
        return func(*args, **kwargs)


def gather_operands(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Move operands that are on several devices to one of them.

    An operation in place cannot move its first operand. PyTorch itself accepts a tensor without
    dims on another device.
    """
    operands = [
        leaf
        for leaf in pytree.tree_leaves((args, kwargs))
        if isinstance(leaf, Tensor) and leaf.dim()
    ]
    if len({operand.device for operand in operands}) < 2:
        return args, kwargs
    name = getattr(func, "__name__", "")
    in_place = name in ("__setitem__", "copy_") or (name.endswith("_") and name[:1] != "_")
    target = operands[0].device if in_place else device
    moved: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map_only(
        Tensor, lambda t: t.to(target) if t.dim() else t, (args, kwargs)
    )
    return moved
