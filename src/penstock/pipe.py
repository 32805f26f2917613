"""`Pipe`: a model split into stages that run as a pipeline. The class that users construct.

`Pipe` checks arguments and hands every call to an engine: `LocalEngine` if all ranks are in this
process, `DistributedEngine` if each rank is a process.
"""

from __future__ import annotations

import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from penstock.checkpoint.pretrained_names import build_model_state, is_pretrained
from penstock.checkpoint.saver import SaveHandle, SaveHistory, check_keep
from penstock.config import (
    check_audit,
    check_choices,
    check_chunks,
    check_loss_fn,
    check_scale,
    resolve_chunks,
)
from penstock.data_parallel.clip import ClipGradOptions
from penstock.data_parallel.ddp import EnclosingDDP
from penstock.data_parallel.sync import Replicas
from penstock.errors import ArgumentError, PenstockTypeError, RunError
from penstock.microbatch import move_to_device
from penstock.model.example_hints import check_example, explained_example
from penstock.model.framework_attributes import (
    FRAMEWORK_MARKS,
    MODEL_ATTRIBUTES,
    WHOLE_MODEL_ATTRIBUTES,
    ModelForward,
    accept_recomputation,
    build_device_map,
    explain_model_attribute,
    explain_model_method,
    explain_set_attribute,
    find_base_model,
    find_dtype,
    find_pipe_class,
    has_attribute,
    has_method,
)
from penstock.model.outside_state import preserve_outside_state
from penstock.model.placement import (
    MemoryCap,
    PlacedPartition,
    SplitRequest,
    check_keeps_device,
    describe_placement,
    place_model,
)
from penstock.model.planner import build_process_request, replan, resolve_plan, wants_plan
from penstock.model.report import format_summary
from penstock.model.sequential import check_model
from penstock.model.sequential_stage import find_side_names_per_layer
from penstock.model.stage_wrapping import StageFn, wrap_stages
from penstock.model.traced.containers import HOOK_TABLES
from penstock.model.traced.units import UnitSelector
from penstock.planning.plan import Plan
from penstock.runtime import signals
from penstock.runtime.distributed.call_setup import DataPolicy
from penstock.runtime.distributed.process_groups import SLOW_CALL_TIMEOUT_FACTOR
from penstock.runtime.distributed.session import DistributedEngine
from penstock.runtime.distributed.setup import (
    DEFAULT_HEARTBEAT,
    build_process_context,
    check_same_pipe,
    check_same_weights,
    describe_layers,
    open_process_groups,
    sample_weights,
    sync_initial_state,
)
from penstock.runtime.distributed.topology import resolve_topology
from penstock.runtime.local_engine import LocalEngine
from penstock.runtime.memory import Memory
from penstock.runtime.memory_cap import ADAM_STATE_FACTOR, place_plan, place_within_memory
from penstock.runtime.memory_forecast import (
    MemoryForecast,
    build_example_loss,
    build_output_loss,
)
from penstock.runtime.preemption import (
    PreemptionPlan,
    PreemptionRequest,
    has_unused_gradients,
    report_saved,
)
from penstock.runtime.program_cache import ProgramCache
from penstock.runtime.request import Request
from penstock.runtime.step import (
    Engine,
    PreparedPipe,
    StepResult,
    run_forward,
    run_generate,
    run_step,
)
from penstock.schedules.cost import Cost
from penstock.schedules.ir import Schedule
from penstock.schedules.lowering import CHECKPOINT_MODES, Recomputation, resolve_recomputation
from penstock.schedules.notation import dumps
from penstock.schedules.registry import (
    ScheduleLike,
    build_schedule_factory,
    check_has_backward,
    resolve_schedule,
)
from penstock.schedules.timeline import Timeline
from penstock.schedules.verify import require_sound
from penstock.stage.caller_context import is_inside_cell
from penstock.stage.deferred_batchnorm import DeferredStatsBatchNorm, SharedSettings
from penstock.stage.loss import LossFn
from penstock.torch_compat import (
    DDP_IGNORED_NAMES,
    disable_compile,
    get_active_ddp,
    not_compiled,
    outside_compiler,
)
from penstock.tracebacks import add_hint, entry_point, fold_frames
from penstock.vocabulary import PIPE_ATTRIBUTES, explain_key_prefix, suggest

if TYPE_CHECKING:
    from penstock.checkpoint.local_state import OptimizerArgument
    from penstock.checkpoint.saver import PathLike, Saver

_log = logging.getLogger("penstock")


class Pipe(nn.Module):
    """A model split into stages that run on several devices at once, micro-batch by micro-batch.

    A pipe computes what the unsplit model computes: the same outputs, loss and gradients. It keeps
    the model's own parameters under their own names, so `pipe.parameters()` goes to an optimizer
    and `pipe.state_dict()` equals that of the model.

    An `nn.Sequential` is cut between its layers. Any other module needs an `example` batch. Its
    forward is traced once, and each stage then runs only its part of that forward.

    There are two ways to use a pipe:

    - `pipe(x)` behaves like the model, and `loss.backward()` works.
    - `pipe.step(x, target=y)` runs forward, loss and backward under any schedule.

    Args:
        module: The model. An `nn.Sequential`, or any other module together with `example`.
        chunks: The number of micro-batches that a batch is split into.
        checkpoint: Which micro-batches are recomputed in the backward instead of keeping their
            activations: "always", "except_last" or "never"; a list with one of these, or a bool,
            for each stage; or a function of (stage, micro-batch).
        deferred_batch_norm: Update the running statistics of BatchNorm once per batch instead of
            once per micro-batch.
        stages: The number of stages, or a list with the number of layers of each stage. Without
            `stages` and `devices`, neighbouring layers on the same device form a stage.
        devices: One device for each rank. Without it, ranks use the GPUs of the machine, or the
            CPU if there are none.
        schedule: The name of a schedule, such as "1f1b" or "zb-v", in any case, a `Schedule`, or
            the path of a file with one. PyTorch's names, such as "Interleaved1F1B" or
            "ScheduleZBVZeroBubble", are understood. Defaults to "gpipe".
        loss_fn: The loss of `step`, called as `loss_fn(output, target)`.
        reduction: How the losses of the micro-batches are combined: "mean" or "sum". By default
            that of `loss_fn`, or "mean".
        runtime: "threads" runs each rank in a thread; "inline" runs everything in the caller's
            thread, for debuggers; "graph" captures a whole step as a CUDA graph and launches it at
            once; "auto" uses "graph" where it is possible, and "threads" elsewhere.
        balance: What the cut balances: "time", "memory" or "parameters".
        example: A batch: a tensor, a tuple of inputs, or a dict of inputs by name. It is used to
            trace the model and to measure its layers.
        units: For a traced model, the submodules that are never cut: a path, a class, a function
            of name and module, or a list of these.
        memory: A cap on the bytes that each rank uses for parameters, gradients, the state of an
            Adam optimizer, and a step on the `example`: a number, a text such as "24GB" or
            "512 MiB", a fraction of the device such as 0.9 or "90%", or a list with one of these
            for each rank.
        target: The target of the example. With it, `memory` counts exactly what `loss_fn` keeps,
            and `balance="time"` how long it takes.
        plan: A plan of `penstock.plan`, or the path of a saved one. It decides about
            stages, schedule, chunks, recomputation and runtime. Without it, and with an `example`
            but neither `stages` nor `devices`, the pipe makes a plan for the devices that are
            there.
        stage_fn: Called as `stage_fn(module, index)` for each stage. It returns the module that
            computes the stage, for example `module` wrapped in `fully_shard`,
            `DistributedDataParallel` or `torch.compile`.
        mesh: A `DeviceMesh`. Each rank is then a process, which holds its own stages only. A mesh
            with the dims "pp" and "dp" makes several replicas that train together.
        group: A `ProcessGroup` whose processes are the ranks, instead of `mesh`.
        data: With processes, which ranks pass the batch: "all", or "first" for the first rank only.
        outputs: With processes, which ranks receive outputs: "last", or "all".
        shapes: With processes, whether shapes of messages are "learned" in the first call with
            inputs of certain shapes, or "sent" with every message.
        audit: Which training steps are compared with the unsplit model: "first" compares one
            micro-batch of the first step of each kind of batch, an integer n also of every n-th
            step, "off" none. If the numbers differ, the step raises an AuditError.
        heartbeat: With processes, the seconds without progress after which a rank is considered
            dead.
        n_microbatches: The same as `chunks`, as torch.distributed.pipelining calls it.

    Attributes:
        stages: The number of stages.
        devices: The devices of the ranks in this process.
        schedule: The name of the schedule.
        partition: The model cut into stages. `print` shows a table of them.
        device: The device of the first stage in this process.
        dtype: The dtype of the first parameter.
        hf_device_map: The device of each unit by name, for transformers and accelerate.

    A child, parameter or buffer of the model that has one of these names comes first. The `config`
    of a Hugging Face model, and what else training frameworks read, is that of the model.

    Raises:
        ArgumentError: If an argument is invalid or arguments contradict each other.
        PenstockTypeError: If an argument has the wrong type.
        CutError: If the forward of a traced model cannot be cut into these stages.
        InvalidScheduleError: If the schedule could deadlock or is incomplete.
        RemoteError: With processes, if another rank fails.

    >>> layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> pipe = Pipe(layers, chunks=2, stages=2, devices=["cpu", "cpu"])
    >>> pipe(torch.zeros(6, 4)).shape
    torch.Size([6, 2])
    """

    loss_fn: LossFn | None

    @entry_point
    def __init__(
        self,
        module: nn.Module,
        chunks: int = 1,
        checkpoint: Recomputation = "except_last",
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
        units: UnitSelector = None,
        memory: MemoryCap = None,
        target: Any = None,
        plan: Plan | PathLike | None = None,
        stage_fn: StageFn | None = None,
        mesh: DeviceMesh | None = None,
        group: ProcessGroup | None = None,
        data: str = "all",
        outputs: str = "last",
        shapes: str = "learned",
        heartbeat: float = DEFAULT_HEARTBEAT,
        audit: str | int = "first",
        n_microbatches: int | None = None,
    ) -> None:
        super().__init__()
        self._topology = topology = resolve_topology(mesh, group)
        groups = None if topology is None else open_process_groups(topology, devices, heartbeat)
        # Among processes, an error in the arguments of one rank must be raised on all of them, so
        # even the checks run inside the guard.
        guard = (
            nullcontext("")
            if groups is None
            else groups.guarded_call("making the pipe", SLOW_CALL_TIMEOUT_FACTOR)
        )
        with (
            guard as call_name,
            explained_example(module, example),
            preserve_outside_state(module, loss_fn),
        ):
            chunks = resolve_chunks(chunks, n_microbatches)
            check_chunks(chunks)
            if isinstance(module, Pipe):
                raise PenstockTypeError(
                    "the model is a pipe already. Make the new pipe from the model itself. As a "
                    "layer of another pipe, put it into an nn.Sequential."
                )
            check_model(module, chunks)
            check_example(example)
            check_choices(runtime=runtime, reduction=reduction)
            check_choices(data=data, outputs=outputs, shapes=shapes)
            check_loss_fn(loss_fn)
            check_audit(audit)
            self.chunks, self.checkpoint = chunks, checkpoint
            self.reduction, self.runtime, self.audit = reduction, runtime, audit
            # `nn.Module.__setattr__` would register a loss that is a module as a child.
            self.__dict__["loss_fn"] = loss_fn
            self._shared_settings: SharedSettings | None = None
            if deferred_batch_norm:
                converted = DeferredStatsBatchNorm.convert_deferred_batch_norm(module)
                self._shared_settings = SharedSettings(module, converted)
                module = converted
            split_request = SplitRequest(
                stages,
                devices,
                balance,
                example,
                chunks,
                units,
                memory,
                checkpoint,
                resolve_schedule(schedule),
                build_loss=build_output_loss(loss_fn, target),
            )
            data_policy = DataPolicy(data, outputs, shapes)
            # The ranks compare the layers as they are before stage_fn changes them.
            facts = {} if groups is None else describe_layers(module)
            weights = {} if groups is None else sample_weights(module)
            plan = resolve_plan(plan)
            self._plan, self._memory_forecast = plan, None
            self._replanned: list[Plan] = []  # the last plan of `replan`, after the one it replaces
            place = partial(place_model, module)
            if groups is not None:
                process = build_process_context(groups)
                if plan is not None:
                    split_request = build_process_request(
                        module, plan, split_request, process.ranks
                    )
                placed_partition = place(split_request, process)
            elif plan is not None or wants_plan(split_request):
                planned = place_plan(
                    module, split_request, plan, place, self._forecast_memory, target
                )
                self._plan, split_request, placed_partition, self._memory_forecast = planned
            elif memory is None:
                placed_partition = place(split_request)
            else:
                placed_partition, self._memory_forecast = place_within_memory(
                    split_request, place, partial(self._forecast_memory, batch=(example, target))
                )
            chunks, requested_schedule = split_request.chunks, split_request.schedule
            check_model(module, chunks)  # a plan may have chosen the number of micro-batches
            self.chunks, self.checkpoint = chunks, split_request.checkpoint
            if self._plan is not None and runtime == "threads":
                self.runtime = self._plan.runtime
            prepared_pipe = self._prepare(placed_partition, requested_schedule, stage_fn, chunks)
            if groups is not None and len(set(placed_partition.placement)) > 1:
                prepared_pipe = replace(prepared_pipe, partial_model=weakref.ref(module))
            self._prepared_pipe = prepared_pipe
            if groups is None:
                self._engine: Engine = LocalEngine(prepared_pipe)
            else:
                facts |= {
                    "schedule": dumps(self._schedule_choice(chunks)),
                    "reduction": f"{reduction}",
                }
                check_same_pipe(
                    groups,
                    call_name,
                    self._build_request(),
                    data_policy,
                    self._placed_partition,
                    facts,
                )
                check_same_weights(groups, weights)
                sync_initial_state(groups, self._placed_partition.tied_tensors, self._replicas)
                self._engine = DistributedEngine(groups, prepared_pipe, data_policy)
        self._enclosing_ddp = EnclosingDDP()
        self._step_hooks: OrderedDict[int, Callable[[StepResult], object]] = OrderedDict()
        self._chunk_advice = _ChunkAdvice()
        self._save_history = SaveHistory()
        self._preemption = PreemptionPlan()
        self.training = module.training
        # The children of the pipe are the model's own, under the model's names. A child may be
        # called "chunks" or "training", so no attribute is set from here on: it would replace it.
        self._modules.update(self._placed_partition.partition.children())
        # The first check records the modules around the units, with which later ones compare.
        self._placed_partition.partition.check_unchanged(self._modules)
        # Parameters and buffers of the model itself, outside of any child. The dictionaries are
        # shared with the model, so that both see later changes.
        registries = ("_parameters", "_buffers", "_non_persistent_buffers_set")
        root = vars(self._placed_partition.partition.root(module))
        self.__dict__.update((key, root[key]) for key in registries)

    def _prepare(
        self,
        placed_partition: PlacedPartition,
        schedule: str | Schedule | None,
        stage_fn: StageFn | None,
        chunks: int,
    ) -> PreparedPipe:
        """Wrap the stages with `stage_fn`, build the schedule and verify it."""
        self._placed_partition = replace(
            placed_partition,
            partition=wrap_stages(
                placed_partition.partition,
                stage_fn,
                placed_partition.stage_devices,
                placed_partition.tied_tensors,
            ),
        )
        graph = self._placed_partition.partition.graph
        self._schedule_choice = build_schedule_factory(
            schedule, self._placed_partition.placement, chunks, graph
        )
        first_schedule = self._schedule_choice(chunks)
        check_has_backward(first_schedule, self._schedule_choice.name)
        # The named schedules are sound for every graph. Their tests verify them.
        if isinstance(schedule, Schedule):
            require_sound(first_schedule, graph)
        self._replicas = Replicas(self._placed_partition.partition.compute_modules())
        return PreparedPipe(
            self._placed_partition,
            ProgramCache(self._schedule_choice, graph),
            self._replicas,
            self._modules,
            [getattr(self, name) for name in HOOK_TABLES],
        )

    def _forecast_memory(
        self,
        placed_partition: PlacedPartition,
        request: SplitRequest,
        batch: tuple[Any, Any],
        optimizer_factor: float = ADAM_STATE_FACTOR,
    ) -> MemoryForecast:
        """Return the bytes that a step on a batch and its target needs.

        The pipe need not be complete yet.
        """
        example, target = batch
        loss_fn = build_example_loss(self.loss_fn, target is not None)
        named = dict(example) if isinstance(example, Mapping) else {}
        inputs = () if named else example if isinstance(example, tuple) else (example,)
        # An example may be where the model was. A batch has to be on the device of the first stage.
        inputs = move_to_device(inputs, placed_partition.stage_devices[0])
        prepared = self._prepare(placed_partition, request.schedule, None, request.chunks)
        prepared = replace(prepared, layers=placed_partition.partition.children())
        step = replace(
            self._build_step_request(inputs, named, target, loss_fn),
            chunks=request.chunks,
            checkpoint=resolve_recomputation(
                request.checkpoint, len(placed_partition.placement), request.chunks
            ),
        )
        return LocalEngine(prepared).forecast_memory(step, optimizer_factor)

    def _build_request(
        self, inputs: tuple[Any, ...] = (), keyword_inputs: Mapping[str, Any] = {}, **arguments: Any
    ) -> Request:
        """Return a request with the arguments of a call and the options of the pipe."""
        if self._shared_settings is not None:
            self._shared_settings.sync()
        checkpoint = self.checkpoint
        if not isinstance(checkpoint, str) or checkpoint not in CHECKPOINT_MODES:
            stages = len(self._placed_partition.placement)
            checkpoint = resolve_recomputation(checkpoint, stages, self.chunks)
        return Request(
            inputs,
            keyword_inputs,
            chunks=self.chunks,
            checkpoint=checkpoint,
            training=self.training,
            runtime=self.runtime,
            reduction=self.reduction,
            audit=self.audit,
            **arguments,
        )

    # ---- training and inference -----------------------------------------------------------

    @ModelForward
    @not_compiled
    def forward(self, *inputs: Any, **keyword_inputs: Any) -> Any:
        """Return the output of the model for a batch. `loss.backward()` runs the backwards.

        The batch is split into `chunks` micro-batches and the outputs are put together again. All
        forwards run before the first backward, whatever the schedule is. To train under another
        order, use `step`.

        Args:
            *inputs: The inputs of the model, on the device of the first stage. Tensors are split
                along dim 0; see `Chunk` and `NoChunk` for others.
            **keyword_inputs: Inputs by name. In a Sequential they go to every layer whose forward
                has a parameter of that name.

        Returns:
            The output for the whole batch, on the device of the last stage. With processes, None on
            ranks that receive no outputs.

        Raises:
            BatchShapeError: If the inputs cannot be split into the same micro-batches.
            RunError: If the pipe cannot run, for example with gradients over several processes.

        >>> layers = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        >>> pipe = Pipe(layers, chunks=2, stages=2, devices=["cpu", "cpu"])
        >>> pipe(torch.ones(6, 4)).sum().backward()
        >>> pipe[0].weight.grad.shape
        torch.Size([8, 4])
        """
        # `entry_point` would add a frame, which the compiler would have to be kept out of.
        try:
            self._save_if_preempted(training=False)
            request = self._build_request(inputs, keyword_inputs)
            is_training = request.training and torch.is_grad_enabled()
            if is_training and not self._chunk_advice.was_given:
                self._note_few_chunks()
            return outside_compiler(run_forward)(self._prepared_pipe, request, self._engine)
        except Exception as error:
            fold_frames(error)
            raise

    @not_compiled
    def step(
        self,
        *inputs: Any,
        target: Any = None,
        outputs: bool = False,
        loss_fn: LossFn | None = None,
        scaler: torch.amp.GradScaler | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        scale: float | None = None,
        **keyword_inputs: Any,
    ) -> StepResult:
        """Run forward, loss and backward of a batch under the schedule, and add to `.grad`.

        The loss of the step is the mean (or the sum) of `loss_fn(output, target)` over the
        micro-batches. `loss_fn` returns a scalar tensor, or a `Weighted` loss, or a dict with
        "loss", perhaps "weight", and metrics under other names. Without weights, a mean counts the
        micro-batches by their rows.

        Under `torch.no_grad()` there is no backward and `.grad` stays as it is.

        Args:
            *inputs: The inputs of the model, as for `pipe(x)`.
            target: The target, split like the inputs and moved to the last stage. Without a
                `loss_fn`, it is the model's own input of that name, if it has one.
            outputs: Whether the result has the outputs of the model.
            loss_fn: A loss for this step, in place of the pipe's. Without any, the model
                computes the loss itself.
            scaler: A GradScaler. It scales the gradients, not the loss of the result.
            optimizer: An optimizer whose `step()` is called after the backwards. With
                `runtime="graph"` it becomes part of the captured step.
            scale: A factor for the gradients, not for the loss of the result. To accumulate the
                mean over 4 batches in `.grad`, use `scale=1 / 4`. A model that has an input of this
                name gets it instead.
            **keyword_inputs: Inputs by name, as for `pipe(x)`.

        Returns:
            A `StepResult` with the loss, outputs, metrics and the measured timeline.

        Raises:
            BatchShapeError: If the inputs cannot be split into the same micro-batches.
            ArgumentError: If `optimizer` or `scale` cannot be used here.
            RunError: If the pipe cannot run the step.

        >>> layers = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        >>> pipe = Pipe(layers, chunks=2, stages=2, devices=["cpu", "cpu"], schedule="1f1b")
        >>> x, y = torch.ones(6, 4), torch.zeros(6, 2)
        >>> result = pipe.step(x, target=y, loss_fn=nn.MSELoss())
        >>> result.loss.shape, pipe[0].weight.grad.shape
        (torch.Size([]), torch.Size([8, 4]))
        """
        try:
            self._save_if_preempted(training=True)
            if self._enclosing_ddp.is_wrapped or get_active_ddp() is not None:
                self._enclosing_ddp.check_step_allowed()
            if scale is not None and self._placed_partition.partition.has_input("scale"):
                keyword_inputs, scale = {**keyword_inputs, "scale": scale}, None
            if scale is not None:
                check_scale(scale)
            request = self._build_step_request(
                inputs, keyword_inputs, target, loss_fn, outputs, scaler, optimizer, scale
            )
            if optimizer is not None:
                request.check_optimizer(self.parameters())
            if torch.is_grad_enabled() and not self._chunk_advice.was_given:
                self._note_few_chunks()
            result = outside_compiler(run_step)(self._prepared_pipe, request, self._engine)
        except Exception as error:
            fold_frames(error)
            raise
        for hook in tuple(self._step_hooks.values()):
            hook(result)
        return result

    def _note_few_chunks(self) -> None:
        """Log once, before the first training step, if there are too few micro-batches."""
        if is_inside_cell():  # a layer of another pipe, whose micro-batches it splits once more
            return
        self._chunk_advice.was_given = True
        advice = self._advise_on_chunks()
        is_first_rank = not torch.distributed.is_initialized() or not torch.distributed.get_rank()
        if advice is not None and is_first_rank:
            _log.warning("penstock: chunks=%s", advice)

    def register_step_hook(self, hook: Callable[[StepResult], object]) -> RemovableHandle:
        """Call a function with the result of every `step` from now on, such as to log it.

        Args:
            hook: The function. It runs after the step, in the thread that called it; what it
                returns is ignored. With several processes it runs on every rank.

        Returns:
            A handle whose `remove()` takes the hook away.

        >>> layers = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        >>> pipe = Pipe(layers, chunks=2, stages=2, devices=["cpu", "cpu"], loss_fn=nn.MSELoss())
        >>> handle = pipe.register_step_hook(lambda result: print(result.metrics()["rows"]))
        >>> _ = pipe.step(torch.ones(6, 4), target=torch.zeros(6, 2))
        6
        >>> handle.remove()
        """
        handle = RemovableHandle(self._step_hooks)
        self._step_hooks[handle.id] = hook
        return handle

    def _build_step_request(
        self,
        inputs: tuple[Any, ...],
        keyword_inputs: dict[str, Any],
        target: Any,
        loss_fn: LossFn | None,
        outputs: bool = False,
        scaler: torch.amp.GradScaler | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        scale: float | None = None,
    ) -> Request:
        if loss_fn is None:
            loss_fn = self.loss_fn
        else:
            check_loss_fn(loss_fn)
        targets = () if target is None else (target,)
        # A model that computes its own loss may have an input called "target".
        if targets and loss_fn is None and self._placed_partition.partition.has_input("target"):
            keyword_inputs, targets = {**keyword_inputs, "target": target}, ()
        return self._build_request(
            inputs,
            keyword_inputs,
            target=targets,
            is_step=True,
            loss_fn=loss_fn,
            return_outputs=outputs,
            scaler=scaler,
            optimizer=optimizer,
            scale=1.0 if scale is None else scale,
            uses_model_loss=loss_fn is None,
        )

    @entry_point
    @not_compiled
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's own `generate`, with each layer where it is.

        It works for models of transformers and for any model with a method `generate`, and gives
        the tokens of the unsplit model. Its own code runs: caches of keys and values stay on the
        devices of their layers, and streamers, logits processors and stopping criteria work. There
        is no second copy of the model. The mode stays as it is: call `eval()` first, as for the
        model.

        With processes, every rank calls this with the same arguments, and gets the same tokens. The
        random state is that of the first rank. A streamer may be on some ranks only.

        Args:
            *args: The arguments of the model's `generate`.
            **kwargs: Those given by name.

        Returns:
            What the model's `generate` returns.

        Raises:
            PenstockTypeError: If the model has no `generate`.
            RemoteError: With processes, if another rank fails, or the arguments differ.
            RunError: With processes, if the model cannot be run together: a layer draws random
                numbers, or has shapes that depend on values.

        >>> from torch import nn
        >>> class Model(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8)
        ...
        ...     def forward(self, ids):
        ...         return self.head(self.embed(ids))
        ...
        ...     @torch.no_grad()
        ...     def generate(self, ids, new_tokens):
        ...         for _ in range(new_tokens):
        ...             ids = torch.cat([ids, self(ids)[:, -1:].argmax(-1)], dim=1)
        ...         return ids
        >>> ids = torch.zeros(2, 3, dtype=torch.long)
        >>> pipe = Pipe(Model(), stages=2, devices=["cpu", "cpu"], example=ids)
        >>> pipe.generate(ids, new_tokens=2).shape
        torch.Size([2, 5])
        """
        self._save_if_preempted(training=False)
        request = self._build_request(args, kwargs)
        return outside_compiler(run_generate)(self._prepared_pipe, request, self._engine)

    @entry_point
    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        """Clip the gradients by their norm over all stages and ranks.

        `nn.utils.clip_grad_norm_` on each rank would use the norm of that rank's stages only. A
        tied parameter counts once. With processes, every rank calls this.

        Args:
            max_norm: The largest norm that the gradients may have afterwards.
            norm_type: The order of the norm; `inf` is allowed.
            error_if_nonfinite: Raise if the norm is NaN or infinite.
            foreach: Passed on to PyTorch's functions.

        Returns:
            The norm before clipping.

        Raises:
            RunError: If `error_if_nonfinite` is set and the norm is not finite.

        >>> layers = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        >>> pipe = Pipe(layers, chunks=2, stages=2, devices=["cpu", "cpu"])
        >>> pipe(torch.ones(6, 4)).sum().backward()
        >>> norm = pipe.clip_grad_norm_(1.0)
        >>> bool(torch.isclose(pipe.clip_grad_norm_(1.0), torch.tensor(1.0)))
        True
        """
        options = ClipGradOptions(norm_type, error_if_nonfinite, foreach)
        return self._engine.clip_grad_norm(list(self.parameters()), max_norm, options)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep steps in the context from reducing the gradients of replicas.

        The gradients are accumulated, and the first step after the context reduces all of them.
        Without replicas it has no effect.

        >>> layers = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        >>> pipe = Pipe(layers, stages=2, devices=["cpu", "cpu"], loss_fn=nn.MSELoss())
        >>> x, y = torch.ones(6, 4), torch.zeros(6, 2)
        >>> with pipe.no_sync():
        ...     result = pipe.step(x, target=y)
        >>> result = pipe.step(x, target=y)  # with replicas, this one reduces
        """
        sync_enabled, self._replicas.sync_enabled = self._replicas.sync_enabled, False
        try:
            yield
        finally:
            self._replicas.sync_enabled = sync_enabled

    def forecast(self, cost: Cost | None = None) -> Timeline:
        """Simulate a training step.

        Args:
            cost: The seconds and bytes of each action. By default the measured costs of the last
                step; before the first step, equal costs for all stages.

        Returns:
            The simulated timeline.

        >>> layers = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        >>> pipe = Pipe(layers, chunks=8, checkpoint="never", stages=2, devices=["cpu", "cpu"])
        >>> f"{pipe.forecast().bubble:.1%} idle"
        '11.1% idle'
        """
        return self._engine.forecast(self._build_request(), cost)

    @disable_compile
    @entry_point
    def memory(
        self, *inputs: Any, target: Any = None, loss_fn: LossFn | None = None, **keyword_inputs: Any
    ) -> Memory:
        """Measure the bytes alive on each rank during a step.

        Two steps run in the caller's thread, and their effects are undone: gradients, buffers,
        attributes, inputs and random states stay as they are.

        Args:
            *inputs: The inputs of the model, as for `step`.
            target: The target, as for `step`.
            loss_fn: The loss, as for `step`.
            **keyword_inputs: Inputs by name, as for `step`.

        Returns:
            A `Memory` with the measured and the forecast bytes.

        Raises:
            RunError: If ranks are processes, or a stage is wrapped for data parallelism.

        >>> layers = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        >>> pipe = Pipe(layers, chunks=2, stages=2, devices=["cpu", "cpu"], loss_fn=nn.MSELoss())
        >>> len(pipe.memory(torch.ones(6, 4), target=torch.zeros(6, 2)).peak)
        2
        """
        request = self._build_step_request(inputs, keyword_inputs, target, loss_fn)
        return self._engine.measure_memory(request)

    @entry_point
    def summary(self) -> str:
        """Describe the stages: their layers, parameters and messages, and the slowest one.

        Returns:
            A table as text, with a line of advice.

        >>> layers = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        >>> pipe = Pipe(layers, stages=2, devices=["cpu", "cpu"])
        >>> "2 stages" in pipe.summary()
        True
        """
        # The cut of a plan follows from measurements that the report does not have.
        outline = self._placed_partition.partition.outline
        lines = [format_summary(outline, with_advice=self._plan is None)]
        if self._memory_forecast is not None:
            caps = self._placed_partition.memory
            lines.append(f"memory   {self._memory_forecast.describe(caps)}")
        if self._plan is not None:
            lines.append(f"plan     {self._plan.describe_choice()}: {self._describe_gain()}")
        if advice := self._advise_on_chunks():
            lines.append(f"chunks   {advice}")
        return "\n".join(lines)

    def _advise_on_chunks(self) -> str | None:
        """Return what to say if there are too few micro-batches to keep all ranks busy, or None.

        Whoever chose a plan or "naive" knows.
        """
        placement = self._placed_partition.placement
        is_chosen = self._plan is not None or self.schedule == "naive"
        if is_chosen or self.chunks >= len(set(placement)):
            return None
        stages, bubble = len(placement), self.forecast(Cost.even(placement)).bubble
        return (
            f"{self.chunks} for {stages} stages: the ranks are idle for {bubble:.0%} of the time. "
            f"Use chunks={2 * stages} or more."
        )

    def _describe_gain(self) -> str:
        if not self._replanned:
            return "pipe.replan() says whether another one is faster, as measured"
        before, after = self._replanned
        gain = 1 - after.seconds / before.seconds
        return f"a new plan would gain {gain:.0%}" if gain > 0.005 else "no new plan is faster"

    @entry_point
    def replan(
        self,
        *,
        chunks: int | Sequence[int] | None = None,
        solver_seconds: float = 10.0,
        progress: Callable[[str, float], None] | bool | None = None,
    ) -> Plan:
        """Plan again with the costs that the last step has measured in place of the profile.

        The pipe itself stays as it is. `Pipe(model, plan=pipe.replan())` makes another one, and
        `summary()` says how much faster it would be.

        Args:
            chunks: The number of micro-batches, or those to try.
            solver_seconds: How long the exact solver may run, if `ortools` is installed.
            progress: True to show a bar; or a function that is called with what is being done and
                the fraction that is done.

        Returns:
            The new plan.

        Raises:
            RunError: If the pipe has no plan, or has not run a step yet.

        >>> layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> x, y = torch.ones(8, 4), torch.zeros(8, 2)
        >>> pipe = Pipe(layers, example=x, chunks=4, schedule="1f1b", loss_fn=nn.MSELoss())
        >>> _ = pipe.step(x, target=y)
        >>> pipe.replan(chunks=4).chunks
        4
        """
        if self._plan is None:
            raise RunError(
                "the pipe was made without a plan, so there is no profile to correct. Make it with "
                "Pipe(model, example=batch), or with plan=."
            )
        cost = self.forecast().cost
        if cost == Cost.even(self._placed_partition.placement):
            raise RunError("nothing is measured yet. Run a step before you call pipe.replan().")
        before, after = replan(self._plan, cost, chunks, solver_seconds, progress)
        self._replanned[:] = before, after
        return after

    # ---- checkpoints ----------------------------------------------------------------------

    @entry_point
    def save(
        self,
        folder: PathLike,
        optimizer: OptimizerArgument = None,
        extra: Any = None,
        background: bool = False,
        keep: int = 2,
        model: bool = True,
    ) -> SaveHandle:
        """Write a checkpoint that any pipe of the same model can load, however it is split.

        It has parameters, buffers and optimizer states under the names of the unsplit model, and
        the state of the random generator. Older checkpoints are removed only when the new one is
        complete. With processes, every rank calls this.

        Args:
            folder: The folder of the checkpoints of a run.
            optimizer: An optimizer, or several, whose state is saved.
            extra: Numbers, strings, tensors, and lists and dicts of them, which `load` returns.
            background: Write in a background thread, so that training can go on at once. The next
                save waits for it.
            keep: How many checkpoints the folder keeps, with the new one.
            model: Whether parameters and buffers are saved. Without them, such as beside a
                `save_pretrained`, use `load` with `model=False`, too.

        Returns:
            A handle whose `wait()` waits until the checkpoint is written.

        Raises:
            ArgumentError: If an optimizer has parameters that are not the pipe's.
            CheckpointError: If another run saves to the folder, too.
            PenstockTypeError: If `optimizer` or `extra` has the wrong type.
            RemoteError: If a rank fails to write.

        >>> import tempfile
        >>> layers = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        >>> pipe = Pipe(layers, stages=2, devices=["cpu", "cpu"])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = pipe.save(folder, extra={"epoch": 3})
        ...     pipe.load(folder)
        {'epoch': 3}
        """
        with self._engine.guarded_slow_call(
            "saving", folder=Path(folder).absolute(), background=background, keep=keep, model=model
        ):
            return self._build_saver().save(folder, optimizer, extra, background, keep, model)

    @entry_point
    def save_on_preemption(
        self,
        folder: PathLike,
        optimizer: OptimizerArgument = None,
        extra: Callable[[], Any] | None = None,
        within: float = 25.0,
        keep: int = 2,
    ) -> None:
        """Save and exit when SIGTERM arrives: the job is preempted, or its time is over.

        The step that is under way is finished. At the next call of the pipe, before anything of it
        is computed, all ranks write one checkpoint and raise `SystemExit(143)`. With processes,
        every rank calls this; it is enough if one of them receives the signal. While gradients wait
        for an optimizer, as between steps that accumulate them, the pipe goes on to the next call
        without any.

        Call it in the main thread, and only if the process has no SIGTERM handler of its own. With
        one, the pipe leaves the signal to it.

        Args:
            folder: The folder of the checkpoints of a run, as for `save`.
            optimizer: An optimizer, or several, whose state is saved.
            extra: A function without arguments. What it returns at that moment is saved as the
                `extra` of `save`.
            within: Seconds from the signal to the end of the process. If they are over before the
                checkpoint is complete, every rank ends, and the last checkpoint stays. Launchers
                send SIGKILL after 30 seconds by default (torchrun, Slurm, Kubernetes).
            keep: How many checkpoints the folder keeps, with the new one, as for `save`.

        Raises:
            ArgumentError: If `within` is not a number above 0, or `keep` is not a number from 1 up.
            PenstockTypeError: If `extra` cannot be called.
            RunError: If the process has a SIGTERM handler of its own, or this is not the main
                thread.

        >>> import signal, tempfile
        >>> layers = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        >>> pipe = Pipe(layers, stages=2, devices=["cpu", "cpu"], loss_fn=nn.MSELoss())
        >>> folder = tempfile.mkdtemp()
        >>> pipe.save_on_preemption(folder, extra=lambda: {"step": step})
        >>> for step in range(100):
        ...     _ = pipe.step(torch.ones(6, 4), target=torch.zeros(6, 2))
        ...     pipe.zero_grad()
        ...     if step == 2:
        ...         signal.raise_signal(signal.SIGTERM)
        Traceback (most recent call last):
        SystemExit: 143
        >>> pipe.load(folder)
        {'step': 3}
        """
        request = PreemptionRequest(Path(folder).absolute(), optimizer, extra, within, keep)
        with self._engine.guarded_slow_call(
            "preparing to save on preemption", folder=request.folder, within=within, keep=keep
        ):
            request.check()
            check_keep(keep)
            signals.expect_preemption(within)
        self._engine.expect_preemption()
        self._preemption.request = request

    def _save_if_preempted(self, training: bool) -> None:
        """Save and exit if a rank was preempted, unless gradients would be lost."""
        request = self._preemption.request
        if request is None or not self._engine.is_preempted:
            return
        with self._engine.guarded_slow_call("saving on preemption", training=training):
            if self._engine.is_true_on_any_rank(has_unused_gradients(self.parameters())):
                return
        extra = None if request.extra is None else request.extra()
        self._preemption.request = None  # `extra` or a hook of the save may call the pipe
        saved = self.save(request.folder, request.optimizer, extra, keep=request.keep)
        report_saved(saved.path)
        signals.end_preemption()
        raise SystemExit(signals.PREEMPTED_EXIT_CODE)

    @entry_point
    def load(
        self,
        path: PathLike,
        optimizer: OptimizerArgument = None,
        trust: bool = False,
        model: bool = True,
    ) -> Any:
        """Read a checkpoint, however the model was split when it was saved.

        Everything is read and verified before anything is changed. After an error the model and
        the optimizers are as they were.

        Args:
            path: A folder of `save`, `save_pretrained` or torch.distributed.checkpoint, a
                .safetensors file, or the index of several.
            optimizer: An optimizer, or several, whose state is read. The state of the random
                generator is then restored, too.
            trust: Also load values that can only be read by running code from the file. Pass True
                only if you trust whoever wrote the checkpoint as you trust your own code.
            model: Whether parameters and buffers are read, or the optimizers alone.

        Returns:
            The `extra` that was given to `save`, or None.

        Raises:
            ArgumentError: If the checkpoint does not exist or belongs to another model.
            CheckpointError: If a file is damaged, or could run code. The message names the file.

        See `save` for an example.
        """
        with self._engine.guarded_slow_call(
            "loading", path=Path(path).absolute(), trust=trust, model=model
        ):
            return self._build_saver().load(path, optimizer, trust, model)

    @entry_point
    def export(self, file: PathLike) -> Path:
        """Write parameters and buffers to one .safetensors file, under the model's names.

        Args:
            file: The file to write. Its name ends in .safetensors.

        Returns:
            The path of the file.

        Raises:
            ArgumentError: If the name does not end in .safetensors.

        >>> import tempfile
        >>> layers = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        >>> pipe = Pipe(layers, stages=2, devices=["cpu", "cpu"])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     pipe.export(f"{folder}/model.safetensors").name
        'model.safetensors'
        """
        with self._engine.guarded_slow_call("exporting", file=Path(file).absolute()):
            return self._build_saver().export(file)

    @entry_point
    def save_pretrained(
        self, folder: PathLike, state_dict: None = None, *, is_main_process: bool = True
    ) -> Path:
        """Write a folder that `from_pretrained` of transformers or peft can read.

        Args:
            folder: The folder to write.
            state_dict: None, as the Trainer of transformers passes it. The pipe writes its own
                tensors, each rank those of its layers.
            is_main_process: Whether this process writes, as the Trainer passes it. The processes of
                a pipe always write together.

        Returns:
            The path of the folder.

        Raises:
            PenstockTypeError: If the model is not one of transformers or peft.
            ArgumentError: If a `state_dict` is given.
        """
        if state_dict is not None:
            raise ArgumentError(
                "save_pretrained was given a state_dict, but a pipe writes its own tensors. Leave "
                "it out, or load it first with pipe.load_state_dict(state_dict)."
            )
        if not is_main_process and self._engine.get_checkpoint_peers().channel is None:
            return Path(folder)
        with self._engine.guarded_slow_call("saving", folder=Path(folder).absolute()):
            return self._build_saver().save_pretrained(folder)

    def _build_saver(self) -> Saver:
        # Importing torch.distributed.checkpoint takes a second, so it waits for the first save.
        from penstock.checkpoint.saver import build_saver

        return build_saver(
            self, self._placed_partition, self._engine.get_checkpoint_peers(), self._save_history
        )

    # ---- nn.Module ------------------------------------------------------------------------

    @property
    def __class__(self) -> type[Any]:
        """The class of the pipe, which `isinstance` asks. See model/framework_attributes.py."""
        placed = self.__dict__.get("_placed_partition")  # None while the pipe is being made
        model = None if placed is None else placed.partition.model
        return find_pipe_class(type(self), model)

    @__class__.setter
    def __class__(self, kind: type[Any]) -> None:  # `replicate` and `fully_shard` set it
        vars(object)["__class__"].__set__(self, kind)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # pickle refuses a `__newobj__` of another class than `__class__`.
        reduced: Any = super().__reduce_ex__(max(2, protocol))
        return (_make_empty, *reduced[1:])

    def __getattr__(self, name: str) -> Any:
        # DistributedDataParallel reads this attribute of the module that it wraps. There is no
        # other way for a module to learn that it is being wrapped.
        if name == DDP_IGNORED_NAMES:
            self._enclosing_ddp.is_wrapped = True
        # Children come first: a model may have one that is called "stages" or "config".
        try:
            return super().__getattr__(name)
        except AttributeError:
            placed = self.__dict__.get("_placed_partition")  # None while the pipe is being made
            if placed is not None and name in _PIPE_ATTRIBUTES:
                return _PIPE_ATTRIBUTES[name](self)
            model = None if placed is None else placed.partition.model
            is_partial = self.__dict__.get("_topology") is not None
            names = MODEL_ATTRIBUTES if is_partial else MODEL_ATTRIBUTES | WHOLE_MODEL_ATTRIBUTES
            if name in names and hasattr(model, name):
                return getattr(model, name)
            if name in PIPE_ATTRIBUTES:
                hint = suggest(name, PIPE_ATTRIBUTES)
            elif has_method(model, name):
                hint = explain_model_method(model, name, is_partial)
            elif model is not None and has_attribute(model, name):
                hint = explain_model_attribute(model, name)
            else:
                raise
            raise AttributeError(f"'Pipe' object has no attribute '{name}'. {hint}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        # A module or a tensor may be a child, which comes first.
        if not isinstance(value, nn.Module | torch.Tensor):
            if name in _METHOD_NAMES and not callable(value):
                raise PenstockTypeError(
                    f"pipe.{name} is a method, and was to be replaced by {value!r}. Call it: "
                    f"pipe.{name}(...)."
                )
            if name in _FIXED_ATTRIBUTES:
                raise ArgumentError(
                    f"pipe.{name} = {value!r} would change nothing: the model is split when the "
                    f"pipe is made. Make another Pipe with {_FIXED_ATTRIBUTES[name]}."
                )
            if name == "chunks":
                check_chunks(value)
        if not self._has_own(name):
            model = self._placed_partition.partition.model
            if name in MODEL_ATTRIBUTES and hasattr(model, name):
                setattr(model, name, value)  # it is read from the model, too
                return
            if model is not None and name not in FRAMEWORK_MARKS and has_attribute(model, name):
                raise ArgumentError(explain_set_attribute(model, name, value))
        super().__setattr__(name, value)

    def _has_own(self, name: str) -> bool:
        """Return whether an attribute is the pipe's, or shared with the model, or not yet known."""
        if "_preemption" not in self.__dict__:  # the pipe is being made
            return True
        registries = self.__dict__, self._modules, self._parameters, self._buffers
        if any(name in registry for registry in registries) or name in _PIPE_ATTRIBUTES:
            return True
        return hasattr(type(self), name)

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.children())

    def __getitem__(self, index: int | slice) -> Any:
        layers = list(self)[index]
        return nn.Sequential(*layers) if isinstance(layers, list) else layers

    def side_names(self, first: bool) -> frozenset[str]:
        """Return the names of the keyword inputs that the layers take.

        A pipe may be a layer of another pipe, which then passes these inputs on.

        Args:
            first: Whether the pipe is the first layer, which takes positional inputs, too.

        Returns:
            The names.
        """
        return frozenset().union(*find_side_names_per_layer(self, first))

    def _get_name(self) -> str:
        # transformers.Trainer decides by this name whether label smoothing shifts the labels.
        model = self._placed_partition.partition.model
        return "Pipe" if model is None else type(find_base_model(model)).__name__

    def __repr__(self) -> str:
        options = f"chunks={self.chunks}, checkpoint={self.checkpoint!r}, runtime={self.runtime!r}"
        head = f"Pipe({options}, schedule={self._schedule_choice.name!r},"
        lines = [head, *(f"  {line}" for line in describe_placement(self._placed_partition))]
        return "\n".join(lines) + ")"

    def train(self, mode: bool = True) -> Pipe:
        """Set training mode for all layers, and for the modules around the stages.

        Args:
            mode: True for training, False for evaluation.

        Returns:
            The pipe.
        """
        settings = self._shared_settings
        if settings is None:
            super().train(mode)
        else:
            settings.sync()  # the model may have been set to another mode before
            super().train(mode)
            settings.sync()
        for module in self._placed_partition.partition.wrapper_modules:
            module.training = mode
        return self

    @entry_point
    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Copy parameters and buffers from a state dict of the model.

        Args:
            state_dict: The state dict of the unsplit model, or of a pipe of it. For a model of
                transformers or peft, also one with the names that `save_pretrained` writes.
            strict: Whether the keys must be exactly those of the model.
            assign: Whether to take the tensors themselves instead of copying their values.

        Returns:
            The missing and the unexpected keys, as `nn.Module.load_state_dict` does.

        Raises:
            RuntimeError: If keys or shapes differ. A prefix that a wrapper has added to all keys,
                such as "module.", is named in a note.
        """
        model = self._placed_partition.partition.model
        known_names = self.state_dict().keys()
        if model is not None and is_pretrained(model):
            state_dict = build_model_state(model, state_dict, known_names)
        try:
            return super().load_state_dict(state_dict, strict, assign)
        except Exception as error:
            hint = explain_key_prefix(state_dict, known_names)
            if hint:
                add_hint(error, hint)
            raise

    def _replicate_for_data_parallel(self) -> NoReturn:
        # nn.DataParallel calls this for its copies on other GPUs.
        raise RunError(
            "the pipe is wrapped in nn.DataParallel, which would copy all stages to every GPU. "
            "Leave the wrapper out: a pipe uses several GPUs itself. For replicas, use "
            "penstock.init(dp=2) under torchrun."
        )

    def _apply(self, fn: Any, recurse: bool = True) -> Pipe:
        """Apply a conversion such as `half()`, of the pipe or of a module that contains it."""
        check_keeps_device(fn, self._placed_partition.devices.values())
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._placed_partition.partition.refresh(fn)
        return self


def _make_empty(pipe_class: type[Pipe]) -> Pipe:
    """Return a pipe without its state, which pickle and copy put in."""
    return pipe_class.__new__(pipe_class)


_METHOD_NAMES = frozenset({"eval", "forward", "load", "parameters", "save", "step", "train"})
_FIXED_ATTRIBUTES = {
    "devices": "devices=",
    "partition": "stages= or units=",
    "schedule": "schedule=",
    "stages": "stages=",
}

# The attributes of a pipe that give way to a child, parameter or buffer of the same name.
_PIPE_ATTRIBUTES: dict[str, Callable[[Pipe], Any]] = {
    "stages": lambda pipe: len(pipe._placed_partition.partition.stages),
    "devices": lambda pipe: tuple(d.device for d in pipe._placed_partition.devices.values()),
    "schedule": lambda pipe: pipe._schedule_choice.name,
    "partition": lambda pipe: pipe._placed_partition.partition,
    "device": lambda pipe: next(iter(pipe._placed_partition.stage_devices.values())),
    "dtype": find_dtype,
    "hf_device_map": lambda pipe: build_device_map(pipe._placed_partition),
    # Under its two names in transformers, and what peft needs for it.
    "gradient_checkpointing_enable": lambda pipe: accept_recomputation(pipe.checkpoint),
    "activation_checkpointing_enable": lambda pipe: accept_recomputation(pipe.checkpoint),
    "enable_input_require_grads": lambda pipe: accept_recomputation(pipe.checkpoint),
}


class _ChunkAdvice:
    """Whether a pipe has said what too few micro-batches cost.

    An attribute of the pipe itself would count as a change of a layer where the pipe is one.
    """

    was_given = False
