"""`Pipe`: the object people touch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from penstock.checkpoint.saver import PendingSave, SaveHandle
from penstock.config import check_choices, check_chunks, check_loss_fn
from penstock.data_parallel.clip import ClipGradOptions
from penstock.data_parallel.ddp import EnclosingDDP
from penstock.data_parallel.sync import Replicas
from penstock.model.placement import (
    PlacedPartition,
    SplitRequest,
    build_move_error,
    check_keeps_device,
    check_no_device_argument,
    describe_placement,
    place_model,
)
from penstock.model.sequential import check_model
from penstock.model.sequential_stage import find_side_names_per_layer
from penstock.model.stage_wrapping import StageFn, wrap_stages
from penstock.model.traced.units import UnitSelector as AskedUnits
from penstock.runtime.distributed.call_setup import DataPolicy
from penstock.runtime.distributed.process_groups import SLOW_CALL_TIMEOUT_FACTOR
from penstock.runtime.distributed.session import DistributedEngine
from penstock.runtime.distributed.setup import (
    build_process_context,
    check_same_pipe,
    describe_layers,
    open_process_groups,
    sync_initial_state,
)
from penstock.runtime.distributed.topology import resolve_topology
from penstock.runtime.local_engine import LocalEngine
from penstock.runtime.memory import Memory
from penstock.runtime.program_cache import ProgramCache
from penstock.runtime.stage_inputs import Batch
from penstock.runtime.step_request import CallOptions, Engine, PreparedPipe, StepRequest
from penstock.runtime.train_step import StepResult
from penstock.schedules.cost import Cost
from penstock.schedules.ir import Schedule
from penstock.schedules.notation import dumps
from penstock.schedules.registry import (
    ScheduleLike,
    build_schedule_factory,
    check_has_backward,
    resolve_schedule,
)
from penstock.schedules.timeline import Timeline
from penstock.schedules.verify import require_sound
from penstock.stage.compile_support import disable_compile
from penstock.stage.deferred_batchnorm import DeferredStatsBatchNorm
from penstock.stage.loss import LossFn

if TYPE_CHECKING:
    from penstock.checkpoint.local_state import OptimizerArgument
    from penstock.checkpoint.saver import PathLike, Saver


class Pipe(nn.Module):
    """A model whose stages work on several devices at once, micro-batch by micro-batch.

    A Sequential is cut between its layers. Of any other module, each stage runs the forward, and of
    that its part: it needs an example, to find out what that is.

    chunks               micro-batches that a batch is cut into
    checkpoint           which of them are recomputed: always, except_last, never
    deferred_batch_norm  running statistics advance once a batch
    stages, devices      how many stages, or the layers of each; a device for each rank. Without
                         both, neighbours on one device are a stage of a Sequential
    balance, example     cut by time, memory or parameters, as measured on the example, a batch
    units, memory        of any other module: what a stage takes whole (a path, a class, a function
                         of name and module); the bytes that each device may have
    schedule             a name, a Schedule or a file; gpipe if left out
    loss_fn, reduction   of `step`: loss_fn(output, target), mean or sum
    runtime              threads; inline for a debugger; graph: each step is one launch, captured
                         as a CUDA graph; auto: graph where that can be, else threads
    stage_fn             stage_fn(module, index) gives what computes in the place of a stage's
                         layers: the module in fully_shard, DistributedDataParallel, torch.compile
    mesh, group          one dim of a DeviceMesh, or a ProcessGroup: each rank is a process, and
                         holds its own stages alone. With the dims pp and dp, there are copies that
                         train together. The rest is for that:
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
        module: nn.Module,
        chunks: int = 1,
        checkpoint: str = "except_last",
        deferred_batch_norm: bool = False,
        *,
        stages: int | Sequence[int] | None = None,
        devices: Sequence[Any] | None = None,
        schedule: ScheduleLike = None,
        loss_fn: LossFn | None = None,
        reduction: str | None = None,
        runtime: str = "threads",
        balance: str | None = None,
        example: Any = None,
        units: AskedUnits = None,
        memory: float | Sequence[float] | None = None,
        stage_fn: StageFn | None = None,
        mesh: DeviceMesh | None = None,
        group: ProcessGroup | None = None,
        data: str = "all",
        outputs: str = "last",
        shapes: str = "learned",
        heartbeat: float = 10.0,
    ) -> None:
        super().__init__()
        standing = resolve_topology(mesh, group)
        team = None if standing is None else open_process_groups(standing, devices, heartbeat)
        with (
            nullcontext("")
            if team is None
            else team.guarded_call("making the pipe", SLOW_CALL_TIMEOUT_FACTOR) as name
        ):
            check_model(module)
            check_chunks(chunks)
            check_choices(checkpoint=checkpoint, runtime=runtime, reduction=reduction)
            check_choices(data=data, outputs=outputs, shapes=shapes)
            check_loss_fn(loss_fn)
            self.chunks, self.checkpoint = chunks, checkpoint
            self.reduction, self.runtime = reduction, runtime
            self.__dict__["loss_fn"] = loss_fn  # not a child, if it is a module
            if deferred_batch_norm:
                module = DeferredStatsBatchNorm.convert_deferred_batch_norm(module)
            asked = resolve_schedule(schedule)
            wish = SplitRequest(stages, devices, balance, example, chunks, units, memory)
            sharing = DataPolicy(data, outputs, shapes)
            facts = {} if team is None else describe_layers(module)  # before stage_fn changes it
            placed = place_model(
                module, wish, asked, None if team is None else build_process_context(team)
            )
            arranged = self._prepare(placed, asked, stage_fn)
            if team is None:
                self._engine: Engine = LocalEngine(arranged)
            else:
                facts |= {
                    "schedule": dumps(self._schedule_choice(chunks)),
                    "reduction": f"{reduction}",
                }
                check_same_pipe(
                    team, name, self._get_call_options(), sharing, self._placed_partition, facts
                )
                sync_initial_state(team, self._placed_partition.tied_tensors, self._replicas)
                self._engine = DistributedEngine(team, arranged, sharing)
        self._enclosing_ddp = EnclosingDDP()
        self._pending_saves = PendingSave()
        self.training = module.training
        # The children are the model's own, under their own names, whatever those are: from here on
        # no attribute is set.
        self._modules.update(
            self._placed_partition.partition.children(self._placed_partition.local_stages)
        )
        self._placed_partition.partition.begin()
        own = ("_parameters", "_buffers", "_non_persistent_buffers_set")
        root = vars(self._placed_partition.partition.root(module))
        self.__dict__.update((key, root[key]) for key in own)

    def _prepare(
        self,
        placed_partition: PlacedPartition,
        schedule: str | Schedule | None,
        stage_fn: StageFn | None,
    ) -> PreparedPipe:
        """What runs, and in which order."""
        here = [stage.index for stage in placed_partition.local_stages]
        self._placed_partition = replace(
            placed_partition,
            partition=wrap_stages(
                placed_partition.partition, stage_fn, here, placed_partition.tied_tensors
            ),
        )
        graph = self._placed_partition.partition.graph
        self._schedule_choice = build_schedule_factory(
            schedule, self._placed_partition.placement, self.chunks, graph
        )
        made = self._schedule_choice(self.chunks)
        check_has_backward(made, self._schedule_choice.name)
        require_sound(made, graph)
        self._replicas = Replicas(self._placed_partition.partition.computing())
        return PreparedPipe(
            self._placed_partition,
            ProgramCache(self._schedule_choice, graph),
            self._replicas,
            self._modules,
        )

    def _get_call_options(self) -> CallOptions:
        return CallOptions(
            self.chunks, self.checkpoint, self.training, self.runtime, self.reduction
        )

    # ---- the two doors --------------------------------------------------------------------

    @disable_compile
    def forward(self, *inputs: Any, **side: Any) -> Any:
        """What the model computes of a batch; `loss.backward()` runs the backwards.

        Inputs by name go to every layer whose forward names them.
        """
        return self._engine.forward(self._get_call_options(), Batch(inputs, side))

    @disable_compile
    def step(
        self,
        *inputs: Any,
        target: Any = None,
        outputs: bool = False,
        loss_fn: LossFn | None = None,
        scaler: torch.amp.GradScaler | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **side: Any,
    ) -> StepResult:
        """Forward, loss and backward of a batch under the schedule; adds to `.grad`.

        The loss is `loss_fn(output, target)` of each micro-batch, and their mean (or their sum).
        It may come with a weight, as a tuple, or with a weight and metrics, as a dict. Under
        `torch.no_grad()` there is no backward. With `outputs`, the result has them. A `scaler`
        scales the gradients, and not the loss. An `optimizer` takes its step, too: in a captured
        step, in the same launch. Without a `loss_fn` the loss is the model's own, and `target` an
        input of its forward, if that names it.
        """
        self._enclosing_ddp.check_step_allowed()
        check_loss_fn(loss_fn)
        lesson = StepRequest(loss_fn or self.loss_fn, outputs, scaler, optimizer)
        lesson.validate()
        return self._engine.step(
            self._get_call_options(), self._build_batch(inputs, side, target, lesson), lesson
        )

    def _build_batch(
        self, inputs: Any, keyword_inputs: dict[str, Any], target: Any, request: StepRequest
    ) -> Batch:
        targets = () if target is None else (target,)
        if targets and request.loss_fn is None and self._placed_partition.partition.takes("target"):
            keyword_inputs, targets = (
                {**keyword_inputs, "target": target},
                (),
            )  # the model's own input of that name
        return Batch(inputs, keyword_inputs, targets, uses_model_loss=request.loss_fn is None)

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        """Clip by the norm over all stages, a tied parameter once; gives the norm before."""
        how = ClipGradOptions(norm_type, error_if_nonfinite, foreach)
        return self._engine.clip_grad_norm(list(self.parameters()), max_norm, how)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within, steps do not reduce the gradients of replicas: the first one after it does."""
        before, self._replicas.sync_enabled = self._replicas.sync_enabled, False
        try:
            yield
        finally:
            self._replicas.sync_enabled = before

    def forecast(self, cost: Cost | None = None) -> Timeline:
        """The timeline of a training step on paper: with the costs of the last step, if any."""
        return self._engine.forecast(self._get_call_options(), cost)

    @disable_compile
    def memory(
        self, *inputs: Any, target: Any = None, loss_fn: LossFn | None = None, **side: Any
    ) -> Memory:
        """The bytes alive on each rank over the actions of a step, beside the forecast's.

        Two steps are taken in the caller's thread to find out, and leave no trace: gradients,
        buffers, attributes, inputs and random states stay as they are.
        """
        check_loss_fn(loss_fn)
        lesson = StepRequest(loss_fn or self.loss_fn, return_outputs=False, scaler=None)
        batch = self._build_batch(inputs, side, target, lesson)
        return self._engine.measure_memory(self._get_call_options(), batch, lesson)

    def summary(self) -> str:
        """What each stage has, takes and gives; the slowest, and a line of advice."""
        return str(self._placed_partition.partition)

    # ---- checkpoints ----------------------------------------------------------------------

    def save(
        self,
        folder: PathLike,
        optimizer: OptimizerArgument = None,
        extra: Any = None,
        background: bool = False,
    ) -> SaveHandle:
        """Write a checkpoint that counts only when it is whole, and replaces the one before.

        Parameters, buffers and the optimizers' state, by the names of the unsplit model, and the
        generator of random numbers; `extra` is given back by `load`. In the background, training
        may go on at once: the next save, or `wait` of what this returns, waits for it.
        """
        with self._engine.guard_call(
            "saving", folder=Path(folder).absolute(), background=background
        ):
            return self._build_saver().save(folder, optimizer, extra, background)

    def load(self, path: PathLike, optimizer: OptimizerArgument = None) -> Any:
        """Read a checkpoint, however it was split; gives its `extra`.

        `path` is a folder of `save`, `save_pretrained` or torch.distributed.checkpoint, or a
        .safetensors file or its index. With optimizers, random numbers go on where they were, too.
        """
        with self._engine.guard_call("loading", path=Path(path).absolute()):
            return self._build_saver().load(path, optimizer)

    def export(self, file: PathLike) -> Path:
        """Write parameters and buffers to one .safetensors file."""
        with self._engine.guard_call("exporting", file=Path(file).absolute()):
            return self._build_saver().export(file)

    def save_pretrained(self, folder: PathLike) -> Path:
        """Write what `from_pretrained` reads: of a model of transformers, or adapters of peft."""
        with self._engine.guard_call("saving", folder=Path(folder).absolute()):
            return self._build_saver().save_pretrained(folder)

    def _build_saver(self) -> Saver:
        from penstock.checkpoint.saver import build_saver  # its import takes a second

        return build_saver(
            self, self._placed_partition, self._engine.get_checkpoint_peers(), self._pending_saves
        )

    # ---- a module like any other ----------------------------------------------------------

    def __getattr__(self, name: str) -> torch.Tensor | nn.Module:
        if name == "_ddp_params_and_buffers_to_ignore":  # DDP asks it of the module that it wraps
            self._enclosing_ddp.is_wrapped = True
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
        return frozenset().union(*find_side_names_per_layer(self, first))

    def __repr__(self) -> str:
        options = f"chunks={self.chunks}, checkpoint={self.checkpoint!r}, runtime={self.runtime!r}"
        head = f"Pipe({options}, schedule={self._schedule_choice.name!r},"
        return (
            "\n".join([head, *(f"  {line}" for line in describe_placement(self._placed_partition))])
            + ")"
        )

    def train(self, mode: bool = True) -> Pipe:
        """Also what is around the stages."""
        super().train(mode)
        for module in self._placed_partition.partition.around:
            module.training = mode
        return self

    def to(self, *args: Any, **kwargs: Any) -> Pipe:
        """Casting only: the stages stay where they are."""
        check_no_device_argument(args, kwargs)
        return super().to(*args, **kwargs)

    def cuda(self, device: Any = None) -> Pipe:
        """Denied."""
        raise build_move_error()

    def cpu(self) -> Pipe:
        """Denied."""
        raise build_move_error()

    def _apply(self, fn: Any, recurse: bool = True) -> Pipe:
        """What every other conversion comes to, also that of a module with the pipe in it."""
        check_keeps_device(fn, self._placed_partition.devices.values())
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._placed_partition.partition.refresh(fn)
        return self
