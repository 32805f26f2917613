"""`Pipe`: the object people touch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock, RLock
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from penstock.batch import gather
from penstock.cost import Cost
from penstock.errors import KindError, RunError
from penstock.ir import Program
from penstock.partition.sequential import check_children
from penstock.partition.side import names_in_chain
from penstock.partition.split import Wish, split, ties
from penstock.run.call import Call, Measured
from penstock.run.feed import feed
from penstock.run.options import check_loss, check_options
from penstock.run.passage import Passage
from penstock.run.programs import Programs, Size
from penstock.run.threads import Crew
from penstock.run.training import StepResult, train
from penstock.run.weighing import Ledger, loss_scale
from penstock.schedules.choice import Asked, check_trains, choose, read
from penstock.stage.added import behind_call
from penstock.stage.batchnorm import DeferredBatchNorm
from penstock.stage.compiled import never_compiled
from penstock.stage.loss import ending_in_loss
from penstock.stage.reduction import LossFn, reduction_of
from penstock.stage.skip import verify_skippables
from penstock.stage.stage import Stage
from penstock.stage.tape import Keep
from penstock.timeline import Timeline, simulate
from penstock.verify import require_sound

if TYPE_CHECKING:
    from penstock.saving.holding import Holding
    from penstock.saving.optimizers import Optimizers
    from penstock.saving.saver import PathLike, Saver, Saving


class Pipe(nn.Module):
    """A Sequential whose stages work on several devices at once, micro-batch by micro-batch.

    chunks               micro-batches that a batch is cut into
    checkpoint           which of them are recomputed: always, except_last, never
    deferred_batch_norm  running statistics advance once a batch
    stages, devices      how many stages, or the layers of each; a device for each rank. Without
                         both, neighbours on one device are a stage
    balance, example     cut by time, memory or parameters, as measured on the example
    schedule             a name, a Schedule or a file; gpipe if left out
    loss_fn, reduction   of `step`: loss_fn(output, target), mean or sum
    runtime              threads, or inline for a debugger

    >>> layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> pipe = Pipe(layers, chunks=2, stages=2, devices=["cpu", "cpu"])
    >>> pipe(torch.zeros(6, 4)).shape
    torch.Size([6, 2])
    """

    loss_fn: LossFn | None

    def __init__(
        self,
        module: nn.Sequential,
        chunks: int = 1,
        checkpoint: str = "except_last",
        deferred_batch_norm: bool = False,
        *,
        stages: int | Sequence[int] | None = None,
        devices: Sequence[Any] | None = None,
        schedule: Asked = None,
        loss_fn: LossFn | None = None,
        reduction: str | None = None,
        runtime: str = "threads",
        balance: str | None = None,
        example: Any = None,
    ) -> None:
        super().__init__()
        check_children(module)
        check_options(chunks, checkpoint, runtime, reduction)
        check_loss(loss_fn)
        verify_skippables(module)
        self.chunks, self.checkpoint = chunks, checkpoint
        self.reduction, self.runtime = reduction, runtime
        self.__dict__["loss_fn"] = loss_fn  # not a child, if it is a module
        if deferred_batch_norm:
            converted = DeferredBatchNorm.convert_deferred_batch_norm(module)
            assert isinstance(converted, nn.Sequential)
            module = converted
        asked = read(schedule)
        self._split = split(module, Wish(stages, devices, balance, example, chunks), asked)
        self._choice = choose(asked, self._split.placement, chunks, self._split.partition.graph)
        made = self._choice(chunks)
        check_trains(made, self._choice.name)
        require_sound(made, self._split.partition.graph)
        self._deferred = [m for m in module.modules() if isinstance(m, DeferredBatchNorm)]
        self._programs = Programs(self._choice, self._split.partition.graph)
        self._made = _Made()
        self.training = module.training
        # The children are the Sequential's own, under their own names, whatever those are: from
        # here on no attribute is set.
        self._modules.update(module._modules)
        self._parameters.update(module._parameters)
        self._buffers.update(module._buffers)

    # ---- the two doors --------------------------------------------------------------------

    @never_compiled
    def forward(self, *inputs: Any, **side: Any) -> Any:
        """What the model computes of a batch; `loss.backward()` runs the backwards.

        Inputs by name go to every layer whose forward names them.
        """
        fed = feed(self._split, self.chunks, inputs, side)
        program, *phases = self._programs.halves(self._size(fed.chunks, torch.is_grad_enabled()))
        stages = behind_call(self._split.partition.stages)
        call = self._call(program, stages, torch.is_grad_enabled())
        passage = Passage(call, (phases[0], phases[1]), fed.given)
        tensors = passage.tracked() if torch.is_grad_enabled() else passage.forward()[0]
        return gather(passage.outputs(tensors), fed.rows)

    @never_compiled
    def step(
        self,
        *inputs: Any,
        target: Any = None,
        outputs: bool = False,
        loss_fn: LossFn | None = None,
        scaler: torch.amp.GradScaler | None = None,
        **side: Any,
    ) -> StepResult:
        """Forward, loss and backward of a batch under the schedule; adds to `.grad`.

        The loss is `loss_fn(output, target)` of each micro-batch, and their mean (or their sum).
        It may come with a weight, as a tuple, or with a weight and metrics, as a dict. Under
        `torch.no_grad()` there is no backward. With `outputs`, the result has them. A `scaler`
        scales the gradients, and not the loss.
        """
        active = DistributedDataParallel._get_active_ddp_module()  # that of a module around it
        if torch.is_grad_enabled() and (self._made.wrapped or active is not None):
            raise RunError(
                "the pipe is wrapped in DistributedDataParallel, which averages the gradients of a "
                "forward, and step is none: call the wrapper, or leave it away and average .grad "
                "after each step with torch.distributed.all_reduce"
            )
        check_loss(loss_fn)
        loss_fn = loss_fn or self.loss_fn
        extra = () if target is None else (target,)
        fed = feed(self._split, self.chunks, inputs, side, extra)
        if torch.is_grad_enabled():
            program, phase = self._programs.whole(self._size(fed.chunks))
        else:
            program, phase, _ = self._programs.halves(self._size(fed.chunks, False))
        rule = reduction_of(loss_fn, self.reduction)
        stages = ending_in_loss(
            self._split.partition.stages, loss_fn, rule.counting, bool(extra), outputs
        )
        scale = loss_scale(scaler, self._split.place_of(len(stages) - 1).device)
        ledger = Ledger(rule, fed.rows.shares(), fed.targets, scale)
        with self._turn():
            result = train(self._call(program, stages), program, phase, fed, ledger)
        if torch.is_grad_enabled():
            self._made.last = result.measured
        return result

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        """Clip by the norm over all stages, a tied parameter once; gives the norm before."""
        rest = norm_type, error_if_nonfinite, foreach
        return nn.utils.clip_grad_norm_(self.parameters(), max_norm, *rest)

    def forecast(self, cost: Cost | None = None) -> Timeline:
        """The timeline of a training step on paper: with the costs of the last step, if any."""
        program, _ = self._programs.whole(self._size(self.chunks))
        if cost is None and self._made.last is not None:
            cost = self._made.last.timeline.cost
        return simulate(program, cost)

    # ---- checkpoints ----------------------------------------------------------------------

    def save(
        self,
        folder: PathLike,
        optimizer: Optimizers = None,
        extra: Any = None,
        background: bool = False,
    ) -> Saving:
        """Write a checkpoint that counts only when it is whole, and replaces the one before.

        Parameters, buffers and the optimizers' state, by the names of the unsplit model, and the
        generator of random numbers; `extra` is given back by `load`. In the background, training
        may go on at once: the next save, or `wait` of what this returns, waits for it.
        """
        return self._saver().save(self._holding(), folder, optimizer, extra, background)

    def load(self, path: PathLike, optimizer: Optimizers = None) -> Any:
        """Read a checkpoint, however it was split; gives its `extra`.

        `path` is a folder of `save` or of torch.distributed.checkpoint, a .safetensors file or its
        .safetensors.index.json. With optimizers, random numbers go on where they were, too.
        """
        return self._saver().load(self._holding(), path, optimizer)

    def export(self, file: PathLike) -> Path:
        """Write parameters and buffers to one .safetensors file."""
        return self._saver().export(self._holding(), file)

    def _holding(self) -> Holding:
        from penstock.saving.holding import Holding, tied_names

        return Holding(self, tied_names(self))

    def _saver(self) -> Saver:
        """Made when first needed: torch.distributed.checkpoint takes a second to import."""
        from penstock.saving.saver import Saver

        self._made.saver = self._made.saver or Saver()
        return self._made.saver

    # ---- how they are run -----------------------------------------------------------------

    def _size(self, chunks: int, trains: bool = True) -> Size:
        return Size(chunks, self.training and trains, self.checkpoint)

    def _call(self, program: Program, stages: Sequence[Stage], tracked: bool = False) -> Call:
        schedule = program.schedule
        self._split.check(self._modules)
        for layer in self._deferred:
            layer.begin(schedule.chunks)
        grad = torch.is_grad_enabled()

        def keep(stage: int, microbatch: int) -> Keep:
            if not grad:
                return Keep.NOTHING
            return Keep.INPUTS if (stage, microbatch) in schedule.recomputed else Keep.GRAPH

        def divided(stage: int, microbatch: int) -> bool:
            return grad and (stage, microbatch) in schedule.divided

        alone = len(self._split.places) == 1  # then there is nothing to run beside
        crew = None if alone or self.runtime == "inline" else self._crew_at_hand()
        where = self._split.places, self._split.placement
        return Call(stages, *where, keep, divided, crew, tracked, schedule.chunks)

    def _turn(self) -> AbstractContextManager[object]:
        """Within, no other thread takes a step: it would find gradients of another unit."""
        if self._made.crew is not None:
            self._made.crew.check_caller()
        return self._made.stepping

    def _crew_at_hand(self) -> Crew:
        """The threads: made at the first call, and ended with the pipe."""
        with self._made.making:  # one crew, though several threads call
            if self._made.crew is None or not self._made.crew.here:
                self._made.crew = Crew(len(self._split.places))
            return self._made.crew

    # ---- a module like any other ----------------------------------------------------------

    def __getattr__(self, name: str) -> torch.Tensor | nn.Module:
        if name == "_ddp_params_and_buffers_to_ignore":  # DDP asks it of the module that it wraps
            self._made.wrapped = True
        return super().__getattr__(name)

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.children())

    def __getitem__(self, at: int | slice) -> Any:
        layers = list(self)[at]
        return nn.Sequential(*layers) if isinstance(layers, list) else layers

    def side_names(self, first: bool) -> frozenset[str]:
        """The inputs by name that its layers take."""
        return frozenset().union(*names_in_chain(self, first))

    def __repr__(self) -> str:
        options = f"chunks={self.chunks}, checkpoint={self.checkpoint!r}, runtime={self.runtime!r}"
        lines = [f"Pipe({options}, schedule={self._choice.name!r},"]
        for stage in self._split.partition.stages:
            numbers = sum(p.numel() for layer in stage.layers for p in layer.parameters())
            place = self._split.place_of(stage.index)
            lines.append(f"  {stage} on {place!r}, {numbers:,} parameters")
        skips = Counter((key.name, src, dst) for key, src, dst in self._split.partition.routes)
        for (name, src, dst), times in skips.items():
            lines.append(
                f"  skip {name!r}: stage {src} to {dst}" + f", {times} times" * (times > 1)
            )
        return "\n".join(lines + [f"  tied {tie}" for tie in ties(self._split)]) + ")"

    def to(self, *args: Any, **kwargs: Any) -> Pipe:
        """Casting only: the stages stay where they are."""
        try:
            device = torch._C._nn._parse_to(*args, **kwargs)[0]
        except RuntimeError:  # a device that is not there
            raise _denied() from None
        if device is not None:
            raise _denied()
        return super().to(*args, **kwargs)

    def cuda(self, device: Any = None) -> Pipe:
        """Denied."""
        raise _denied()

    def cpu(self) -> Pipe:
        """Denied."""
        raise _denied()

    def _apply(self, fn: Any, recurse: bool = True) -> Pipe:
        """What every other conversion comes to, also that of a module with the pipe in it."""
        for place in self._split.places:
            try:
                moved = fn(torch.empty(0, device=place.device)).device != place.device
            except (RuntimeError, AssertionError):  # to a device that is not there
                moved = True
            if moved:
                raise _denied()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self


@dataclass
class _Made:
    """What a pipe makes when it is first needed. A copy of the pipe makes its own."""

    crew: Crew | None = None
    making: Lock = field(default_factory=Lock)
    stepping: AbstractContextManager[object] = field(default_factory=RLock)
    last: Measured | None = None
    saver: Saver | None = None
    wrapped: bool = False  # in DistributedDataParallel

    def __reduce__(self) -> tuple[type[_Made], tuple[()]]:
        return _Made, ()


def _denied() -> KindError:
    return KindError(
        "the stages of a pipe stay on the devices they were given, so moving it is denied: "
        "make another Pipe, with other devices; casting, as in pipe.to(torch.float16), is allowed"
    )
