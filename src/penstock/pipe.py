"""`Pipe`: the object people touch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from penstock.cost import Cost
from penstock.errors import KindError, RunError
from penstock.notation import dumps
from penstock.options import check_chunks, check_loss, check_words
from penstock.partition.sequential import check_children
from penstock.partition.side import names_in_chain
from penstock.partition.split import Site, Wish, split
from penstock.partition.tied import ties_in_words
from penstock.run.asking import Answers, Lesson, Settings
from penstock.run.feed import Batch
from penstock.run.one_process import OneProcess
from penstock.run.processes.joining import check_same, first_decides, group_of, join, place_in
from penstock.run.processes.many import ManyProcesses, Sharing
from penstock.run.processes.ties import begin_alike
from penstock.run.programs import Programs
from penstock.run.training import StepResult
from penstock.schedules.choice import Asked, check_trains, choose, read
from penstock.stage.batchnorm import DeferredBatchNorm
from penstock.stage.compiled import never_compiled
from penstock.stage.reduction import LossFn
from penstock.stage.skip import verify_skippables
from penstock.timeline import Timeline
from penstock.verify import require_sound


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
    mesh, group          one dim of a DeviceMesh, or a ProcessGroup: each rank is a process, and
                         holds its own stages alone. The rest is for that:
    data                 given on all ranks, or on the first alone
    outputs              on the last rank, or on all
    shapes               of messages: learned in the first call with such inputs, or sent always
    heartbeat            seconds after which a rank that does not come on is given up

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
        mesh: DeviceMesh | None = None,
        group: ProcessGroup | None = None,
        data: str = "all",
        outputs: str = "last",
        shapes: str = "learned",
        heartbeat: float = 10.0,
    ) -> None:
        super().__init__()
        check_children(module)
        check_chunks(chunks)
        check_words(checkpoint=checkpoint, runtime=runtime, reduction=reduction)
        check_words(data=data, outputs=outputs, shapes=shapes)
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
        wish = Wish(stages, devices, balance, example, chunks)
        processes = group_of(mesh, group)
        team = None
        if processes is None:
            self._split = split(module, wish, asked)
        else:
            place = place_in(processes, devices)
            team = join(processes, place, heartbeat)
            site = Site(team.rank, team.size, place, first_decides(team))
            self._split = split(module, wish, asked, site)
        self._choice = choose(asked, self._split.placement, chunks, self._split.partition.graph)
        made = self._choice(chunks)
        check_trains(made, self._choice.name)
        require_sound(made, self._split.partition.graph)
        programs = Programs(self._choice, self._split.partition.graph)
        self._runs: Answers = OneProcess(self._split, programs)
        if team is not None:
            schedule_text = dumps(made)
            check_same(
                team,
                module,
                chunks=chunks,
                checkpoint=checkpoint,
                schedule=schedule_text,
                data=data,
                outputs=outputs,
                shapes=shapes,
                reduction=reduction,
            )
            begin_alike(self._split.ties, team.peers)
            self._runs = ManyProcesses(team, self._split, programs, Sharing(data, outputs, shapes))
        self._noticed = _Noticed()
        self.training = module.training
        # The children are the Sequential's own, under their own names, whatever those are: from
        # here on no attribute is set.
        self._modules.update(
            (name, layer)
            for stage in self._split.stages_here
            for name, layer in zip(stage.names, stage.layers, strict=True)
        )
        self._parameters.update(module._parameters)
        self._buffers.update(module._buffers)

    # ---- the two doors --------------------------------------------------------------------

    @never_compiled
    def forward(self, *inputs: Any, **side: Any) -> Any:
        """What the model computes of a batch; `loss.backward()` runs the backwards.

        Inputs by name go to every layer whose forward names them.
        """
        self._check_layers()
        return self._runs.forward(self._settings(), Batch(inputs, side))

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
        if torch.is_grad_enabled() and (self._noticed.wrapped or active is not None):
            raise RunError(
                "the pipe is wrapped in DistributedDataParallel, which averages the gradients of a "
                "forward, and step is none: call the wrapper, or leave it away and average .grad "
                "after each step with torch.distributed.all_reduce"
            )
        check_loss(loss_fn)
        self._check_layers()
        batch = Batch(inputs, side, () if target is None else (target,))
        lesson = Lesson(loss_fn or self.loss_fn, outputs, scaler)
        return self._runs.step(self._settings(), batch, lesson)

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
        return self._runs.forecast(self._settings(), cost)

    # ---- how they are run -----------------------------------------------------------------

    def _settings(self) -> Settings:
        return Settings(self.chunks, self.checkpoint, self.training, self.runtime, self.reduction)

    def _check_layers(self) -> None:
        here = self._split.stages_here
        known = [name for stage in here for name in stage.names]
        if list(self._modules) != known:
            raise RunError(
                f"the pipe was made of the layers {', '.join(known)}, and now has "
                f"{', '.join(self._modules)}: make the Pipe after the change"
            )
        for stage in here:
            for name, layer in zip(stage.names, stage.layers, strict=True):
                if self._modules.get(name) is not layer:
                    raise RunError(
                        f"layer '{name}' was replaced after the pipe was made, and would not run: "
                        "make the Pipe after the change, or change what is inside the layer"
                    )

    # ---- a module like any other ----------------------------------------------------------

    def __getattr__(self, name: str) -> torch.Tensor | nn.Module:
        if name == "_ddp_params_and_buffers_to_ignore":  # DDP asks it of the module that it wraps
            self._noticed.wrapped = True
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
            if not self._split.is_here(stage.index):
                lines.append(
                    f"  {stage} in the process of rank {self._split.placement[stage.index]}"
                )
                continue
            numbers = sum(p.numel() for layer in stage.layers for p in layer.parameters())
            place = self._split.place_of(stage.index)
            lines.append(f"  {stage} on {place!r}, {numbers:,} parameters")
        skips = Counter((key.name, src, dst) for key, src, dst in self._split.partition.routes)
        for (name, src, dst), times in skips.items():
            lines.append(
                f"  skip {name!r}: stage {src} to {dst}" + f", {times} times" * (times > 1)
            )
        here = self._split.stages_here
        tied = ties_in_words(here, self._split.placement)
        tied += [
            f"{tie.name}: on ranks {', '.join(map(str, tie.holders))}" for tie in self._split.ties
        ]
        return "\n".join(lines + [f"  tied {tie}" for tie in tied]) + ")"

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
        for place in self._split.places.values():
            try:
                moved = fn(torch.empty(0, device=place.device)).device != place.device
            except (RuntimeError, AssertionError):  # to a device that is not there
                moved = True
            if moved:
                raise _denied()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self


@dataclass
class _Noticed:
    """What was seen of the pipe's surroundings. A copy has its own."""

    wrapped: bool = False  # in DistributedDataParallel

    def __reduce__(self) -> tuple[type[_Noticed], tuple[()]]:
        return _Noticed, ()


def _denied() -> KindError:
    return KindError(
        "the stages of a pipe stay on the devices they were given, so moving it is denied: "
        "make another Pipe, with other devices; casting, as in pipe.to(torch.float16), is allowed"
    )
