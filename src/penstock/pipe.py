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

from penstock.cost import Cost
from penstock.gradients.averaged import Surroundings
from penstock.gradients.clip import Clipping
from penstock.gradients.replicas import Replicas
from penstock.ir import Schedule
from penstock.notation import dumps
from penstock.options import check_chunks, check_loss, check_words
from penstock.partition.forward.units import Asked as AskedUnits
from penstock.partition.sequential import check_model
from penstock.partition.side import names_in_chain
from penstock.partition.split import Split, Wish, in_words, split
from penstock.partition.staying import check_casts, check_stays, denied
from penstock.partition.wrapping import StageFn, wrapped
from penstock.run.asking import Answers, Arrangement, Lesson, Settings
from penstock.run.feed import Batch
from penstock.run.memory import Memory
from penstock.run.one_process import OneProcess
from penstock.run.processes.joining import begin_alike, check_same, described, join, site_in
from penstock.run.processes.many import ManyProcesses
from penstock.run.processes.sharing import Sharing
from penstock.run.processes.standing import standing_in
from penstock.run.processes.team import SLOW
from penstock.run.programs import Programs
from penstock.run.training import StepResult
from penstock.saving.pending import Pending, Saving
from penstock.schedules.choice import Asked, check_trains, choose, read
from penstock.stage.batchnorm import DeferredBatchNorm
from penstock.stage.compiled import never_compiled
from penstock.stage.reduction import LossFn
from penstock.timeline import Timeline
from penstock.verify import require_sound

if TYPE_CHECKING:
    from penstock.saving.optimizers import Optimizers
    from penstock.saving.saver import PathLike, Saver


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
        schedule: Asked = None,
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
        standing = standing_in(mesh, group)
        team = None if standing is None else join(standing, devices, heartbeat)
        with nullcontext("") if team is None else team.call("making the pipe", SLOW) as name:
            check_model(module)
            check_chunks(chunks)
            check_words(checkpoint=checkpoint, runtime=runtime, reduction=reduction)
            check_words(data=data, outputs=outputs, shapes=shapes)
            check_loss(loss_fn)
            self.chunks, self.checkpoint = chunks, checkpoint
            self.reduction, self.runtime = reduction, runtime
            self.__dict__["loss_fn"] = loss_fn  # not a child, if it is a module
            if deferred_batch_norm:
                module = DeferredBatchNorm.convert_deferred_batch_norm(module)
            asked = read(schedule)
            wish = Wish(stages, devices, balance, example, chunks, units, memory)
            sharing = Sharing(data, outputs, shapes)
            facts = {} if team is None else described(module)  # before stage_fn changes it
            placed = split(module, wish, asked, None if team is None else site_in(team))
            arranged = self._arrange(placed, asked, stage_fn)
            if team is None:
                self._runs: Answers = OneProcess(arranged)
            else:
                facts |= {"schedule": dumps(self._choice(chunks)), "reduction": f"{reduction}"}
                check_same(team, name, self._settings(), sharing, self._split, facts)
                begin_alike(team, self._split.ties, self._replicas)
                self._runs = ManyProcesses(team, arranged, sharing)
        self._surroundings = Surroundings()
        self._saves = Pending()
        self.training = module.training
        # The children are the model's own, under their own names, whatever those are: from here on
        # no attribute is set.
        self._modules.update(self._split.partition.children(self._split.stages_here))
        self._split.partition.begin()
        own = ("_parameters", "_buffers", "_non_persistent_buffers_set")
        root = vars(self._split.partition.root(module))
        self.__dict__.update((key, root[key]) for key in own)

    def _arrange(
        self, cut: Split, asked: str | Schedule | None, stage_fn: StageFn | None
    ) -> Arrangement:
        """What runs, and in which order."""
        here = [stage.index for stage in cut.stages_here]
        self._split = replace(cut, partition=wrapped(cut.partition, stage_fn, here, cut.ties))
        graph = self._split.partition.graph
        self._choice = choose(asked, self._split.placement, self.chunks, graph)
        made = self._choice(self.chunks)
        check_trains(made, self._choice.name)
        require_sound(made, graph)
        self._replicas = Replicas(self._split.partition.computing())
        return Arrangement(
            self._split, Programs(self._choice, graph), self._replicas, self._modules
        )

    def _settings(self) -> Settings:
        return Settings(self.chunks, self.checkpoint, self.training, self.runtime, self.reduction)

    # ---- the two doors --------------------------------------------------------------------

    @never_compiled
    def forward(self, *inputs: Any, **side: Any) -> Any:
        """What the model computes of a batch; `loss.backward()` runs the backwards.

        Inputs by name go to every layer whose forward names them.
        """
        return self._runs.forward(self._settings(), Batch(inputs, side))

    @never_compiled
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
        self._surroundings.check_step()
        check_loss(loss_fn)
        lesson = Lesson(loss_fn or self.loss_fn, outputs, scaler, optimizer)
        lesson.check()
        return self._runs.step(self._settings(), self._batch(inputs, side, target, lesson), lesson)

    def _batch(self, inputs: Any, side: dict[str, Any], target: Any, lesson: Lesson) -> Batch:
        targets = () if target is None else (target,)
        if targets and lesson.loss_fn is None and self._split.partition.takes("target"):
            side, targets = {**side, "target": target}, ()  # the model's own input of that name
        return Batch(inputs, side, targets, scores_itself=lesson.loss_fn is None)

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        """Clip by the norm over all stages, a tied parameter once; gives the norm before."""
        how = Clipping(norm_type, error_if_nonfinite, foreach)
        return self._runs.clip(list(self.parameters()), max_norm, how)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within, steps do not reduce the gradients of replicas: the first one after it does."""
        before, self._replicas.reduces = self._replicas.reduces, False
        try:
            yield
        finally:
            self._replicas.reduces = before

    def forecast(self, cost: Cost | None = None) -> Timeline:
        """The timeline of a training step on paper: with the costs of the last step, if any."""
        return self._runs.forecast(self._settings(), cost)

    @never_compiled
    def memory(
        self, *inputs: Any, target: Any = None, loss_fn: LossFn | None = None, **side: Any
    ) -> Memory:
        """The bytes alive on each rank over the actions of a step, beside the forecast's.

        Two steps are taken in the caller's thread to find out, and leave no trace: gradients,
        buffers, attributes, inputs and random states stay as they are.
        """
        check_loss(loss_fn)
        lesson = Lesson(loss_fn or self.loss_fn, outputs=False, scaler=None)
        batch = self._batch(inputs, side, target, lesson)
        return self._runs.memory(self._settings(), batch, lesson)

    def summary(self) -> str:
        """What each stage has, takes and gives; the slowest, and a line of advice."""
        return str(self._split.partition)

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
        with self._runs.calling("saving", folder=Path(folder).absolute(), background=background):
            return self._saver().save(folder, optimizer, extra, background)

    def load(self, path: PathLike, optimizer: Optimizers = None) -> Any:
        """Read a checkpoint, however it was split; gives its `extra`.

        `path` is a folder of `save`, `save_pretrained` or torch.distributed.checkpoint, or a
        .safetensors file or its index. With optimizers, random numbers go on where they were, too.
        """
        with self._runs.calling("loading", path=Path(path).absolute()):
            return self._saver().load(path, optimizer)

    def export(self, file: PathLike) -> Path:
        """Write parameters and buffers to one .safetensors file."""
        with self._runs.calling("exporting", file=Path(file).absolute()):
            return self._saver().export(file)

    def save_pretrained(self, folder: PathLike) -> Path:
        """Write what `from_pretrained` reads: of a model of transformers, or adapters of peft."""
        with self._runs.calling("saving", folder=Path(folder).absolute()):
            return self._saver().save_pretrained(folder)

    def _saver(self) -> Saver:
        from penstock.saving.saver import saver_of  # its import takes a second

        return saver_of(self, self._split, self._runs.saves_with(), self._saves)

    # ---- a module like any other ----------------------------------------------------------

    def __getattr__(self, name: str) -> torch.Tensor | nn.Module:
        if name == "_ddp_params_and_buffers_to_ignore":  # DDP asks it of the module that it wraps
            self._surroundings.wrapped = True
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
        head = f"Pipe({options}, schedule={self._choice.name!r},"
        return "\n".join([head, *(f"  {line}" for line in in_words(self._split))]) + ")"

    def train(self, mode: bool = True) -> Pipe:
        """Also what is around the stages."""
        super().train(mode)
        for module in self._split.partition.around:
            module.training = mode
        return self

    def to(self, *args: Any, **kwargs: Any) -> Pipe:
        """Casting only: the stages stay where they are."""
        check_casts(args, kwargs)
        return super().to(*args, **kwargs)

    def cuda(self, device: Any = None) -> Pipe:
        """Denied."""
        raise denied()

    def cpu(self) -> Pipe:
        """Denied."""
        raise denied()

    def _apply(self, fn: Any, recurse: bool = True) -> Pipe:
        """What every other conversion comes to, also that of a module with the pipe in it."""
        check_stays(fn, self._split.places.values())
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._split.partition.refresh(fn)
        return self
