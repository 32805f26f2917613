"""The strategies of Lightning, without Lightning: what `lightning.py` gives to its base classes.

Lightning comes as two packages with classes of their own, `lightning` and `pytorch_lightning`. The
mix-ins here are the same for both, and import neither.

    Trainer calls                     the strategy
    training_step(batch, idx)         the method runs as a pipeline (`piped_module.py`)
    backward(loss)                    adds the gradients that the step has computed
    lightning_module_state_dict()     gathers the weights of all ranks, under their own names
    distributed_sampler_kwargs        replicas of the pipe count, not processes
"""

from __future__ import annotations

import inspect
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer

from penstock.data_parallel.clip import ClipGradOptions
from penstock.errors import ArgumentError, RunError
from penstock.integrations.method_calls import Door, MethodResult, find_metrics
from penstock.integrations.partial_state import (
    PartialOptimizers,
    gather_state_dict,
    list_parameters,
    load_state_dict,
)
from penstock.integrations.piped_module import PipedModule
from penstock.launch.init import init
from penstock.pipe import Pipe
from penstock.runtime.step import StepResult
from penstock.torch_compat import pytree

_SUPPORTED_PRECISIONS = frozenset(
    ("Precision", "MixedPrecision", "DoublePrecision", "HalfPrecision")
)
# Callbacks that need all parameters of the model in one process.
_WHOLE_MODEL_CALLBACKS = frozenset(("StochasticWeightAveraging", "WeightAveraging"))


class _PipelineProcesses:
    """The processes and devices of a strategy, and the pipes of its modules.

    Args:
        stages: The number of stages, as for `Pipe`.
        devices: With one process, a device for each rank. Default: those of the Trainer or Fabric.
        chunks: The number of micro-batches. Default: two for each rank.
        schedule: The schedule, as for `Pipe`.
        dp: Under torchrun, the number of replicas of the pipe.
        mesh: Under torchrun, the mesh of `penstock.init`, if the script has called it.
        pipe_options: Further options of `Pipe`.
    """

    parallel_devices: Any
    accelerator: Any

    def _set_options(
        self,
        stages: int | Sequence[int] | None,
        devices: Sequence[Any] | None,
        chunks: int | None,
        schedule: Any,
        dp: int,
        mesh: DeviceMesh | None,
        pipe_options: dict[str, Any],
    ) -> None:
        refused = {"module", "group", "loss_fn", "target", "data", "outputs", "example"}
        option_names = inspect.signature(Pipe.__init__).parameters.keys() - {"self"} - refused
        for name in pipe_options:
            if name not in option_names:
                raise ArgumentError(
                    f"{type(self).__name__} has no option {name!r}. It takes those of a Pipe, "
                    "such as checkpoint= and balance=, except for those of the loss and the data."
                )
        self._stages, self._chunks, self._schedule = stages, chunks, schedule
        self._devices = None if devices is None else [torch.device(d) for d in devices]
        self._dp, self._mesh, self._pipe_options = dp, mesh, pipe_options
        self._partial_optimizers = PartialOptimizers()
        self._compared_methods: set[str] = set()

    # ---- processes ------------------------------------------------------------------------

    @property
    def world_size(self) -> int:
        """The number of processes."""
        if distributed.is_available() and distributed.is_initialized():
            return distributed.get_world_size()
        return int(os.environ.get("WORLD_SIZE", 1)) if "RANK" in os.environ else 1

    @property
    def global_rank(self) -> int:
        """The rank of this process."""
        if distributed.is_available() and distributed.is_initialized():
            return distributed.get_rank()
        return int(os.environ.get("RANK", 0))

    @property
    def local_rank(self) -> int:
        """The rank of this process on its host."""
        return int(os.environ.get("LOCAL_RANK", 0))

    @property
    def node_rank(self) -> int:
        """The number of the host of this process."""
        return int(os.environ.get("GROUP_RANK", 0))

    @property
    def has_processes(self) -> bool:
        """Whether each rank of the pipe is a process."""
        return self.world_size > 1

    @property
    def is_distributed(self) -> bool:
        """Whether the Trainer has to give each process other rows: only if there are replicas.

        The ranks of one pipe get the same rows. So they need no sampler of their own.
        """
        return self.replicas > 1

    @property
    def is_global_zero(self) -> bool:
        """Whether this process writes files and logs."""
        return self.global_rank == 0

    def set_world_ranks(self) -> None:
        """Let only the first process print and log."""
        rank_zero_only.rank = self.global_rank

    @property
    def replicas(self) -> int:
        """The number of replicas of the pipe, which share the batch."""
        if not self.has_processes:
            return 1
        if self._mesh is None:
            return self._dp
        names = self._mesh.mesh_dim_names or ()
        return self._mesh.size(names.index("dp")) if "dp" in names else 1

    @property
    def distributed_sampler_kwargs(self) -> Any:
        """The arguments of a DistributedSampler: all ranks of a replica get the same rows."""
        if not self.is_distributed:
            return None
        ranks = self.world_size // self.replicas
        return {"num_replicas": self.replicas, "rank": self.global_rank // ranks}

    @property
    def root_device(self) -> torch.device:
        """The device of the first stage in this process, on which batches are put."""
        devices = self._devices or self.parallel_devices or [torch.device("cpu")]
        device: torch.device = devices[0]
        if self.has_processes:
            local_devices = self.parallel_devices or devices
            device = local_devices[self.local_rank % len(local_devices)]
        return device

    def setup_environment(self) -> None:
        """Connect the processes that torchrun has started."""
        if self.has_processes:
            if self._devices is not None:
                raise ArgumentError(
                    "devices= is for ranks in one process, but torchrun has started "
                    f"{self.world_size} processes. Leave it out: each process is a rank."
                )
            if self._mesh is None:
                self._mesh = self._make_mesh()
            self._align_random_generators()
        elif self._dp != 1:
            raise ArgumentError(
                f"dp={self._dp} needs several processes. Start the script with torchrun, or leave "
                "dp out."
            )
        self.accelerator.setup_device(self.root_device)

    def _make_mesh(self) -> DeviceMesh:
        if not distributed.is_initialized():
            return init(self._dp)
        size = self.world_size
        if size % self._dp:
            raise ArgumentError(f"{size} processes cannot form {self._dp} replicas of equal size.")
        kind = self.root_device.type
        if self._dp == 1:
            return init_device_mesh(kind, (size,), mesh_dim_names=("pp",))
        shape = (self._dp, size // self._dp)
        return init_device_mesh(kind, shape, mesh_dim_names=("dp", "pp"))

    def _align_random_generators(self) -> None:
        """Give all processes the random state of the first one.

        A loader that shuffles then gives all ranks of a pipe the same rows.
        """
        if self.has_processes:
            state = self.broadcast((torch.get_rng_state(), random.getstate()))
            torch.set_rng_state(state[0])
            random.setstate(state[1])

    def _check_same_batch(self, method: str, batch: Any) -> None:
        """Raise if the ranks of a pipe got different rows. The first batch of a method shows it."""
        if not self.has_processes or method in self._compared_methods:
            return
        self._compared_methods.add(method)
        leaves = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
        digest = [(tuple(leaf.shape), float(leaf.double().sum())) for leaf in leaves]
        digests: list[Any] = [None] * self.world_size
        distributed.all_gather_object(digests, digest)
        ranks = self.world_size // self.replicas
        first_rank = self.global_rank // ranks * ranks
        if digests[first_rank] != digest:
            raise RunError(
                f"{method} got other rows on rank {self.global_rank} than on rank {first_rank}, "
                "but the ranks of a pipe share a batch. Use the same order on all of them: seed "
                "the generator of the sampler, or call seed_everything."
            )

    def barrier(self, name: str | None = None) -> None:
        """Wait for all processes."""
        if self.has_processes and distributed.is_initialized():
            distributed.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of one process on all processes."""
        if not (self.has_processes and distributed.is_initialized()):
            return obj
        objects = [obj]
        distributed.broadcast_object_list(objects, src)
        return objects[0]

    def _reduce(self, tensor: Any, reduce_op: Any) -> Any:
        """Reduce a value over the replicas. All ranks of a pipe have the same value."""
        if not (self.has_processes and isinstance(tensor, Tensor)):
            return tensor
        name = str(reduce_op).rpartition(".")[2].lower()
        total = tensor.clone().to(self.root_device)
        if name in ("mean", "avg", "none"):
            total = total if total.is_floating_point() else total.float()
            distributed.all_reduce(total)
            return total / self.world_size
        operation = reduce_op if not isinstance(reduce_op, str) else name.upper()
        if isinstance(operation, str):
            operation = getattr(distributed.ReduceOp, operation)
        distributed.all_reduce(total, operation)
        if name == "sum":  # each replica counts once
            ranks = self.world_size // self.replicas
            total = total / ranks if total.is_floating_point() else total // ranks
        return total

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all processes, or any, decide for something."""
        if not self.has_processes:
            return decision
        value = torch.tensor(int(decision), device=self.root_device)
        operation = distributed.ReduceOp.MIN if all else distributed.ReduceOp.MAX
        distributed.all_reduce(value, operation)
        return bool(value)

    # ---- pipes ----------------------------------------------------------------------------

    def _make_piped(self, module: nn.Module) -> PipedModule:
        _check_can_be_split(module)
        for metric in find_metrics(module).values():
            self._adapt_metric(metric)
        return PipedModule(module, self._build_pipe, self._partial_optimizers.select)

    def _build_pipe(self, model: nn.Module, example: Any) -> Pipe:
        options: dict[str, Any] = {"schedule": self._schedule, **self._pipe_options}
        if self.has_processes:
            ranks = self.world_size // self.replicas
            options |= {"mesh": self._mesh, "stages": self._stages, "outputs": "all"}
        else:
            options["stages"], options["devices"] = self._stages, self._list_devices()
            ranks = len(options["devices"])
        chunks = 2 * ranks if self._chunks is None else self._chunks
        return Pipe(model, chunks, example=example, **options)

    def _list_devices(self) -> list[torch.device]:
        devices = list(self._devices or self.parallel_devices or [torch.device("cpu")])
        if len(devices) == 1 and devices[0].type == "cpu" and isinstance(self._stages, int):
            return devices * self._stages
        if len(devices) == 1 and self._stages is None:
            raise ArgumentError(
                f"there is one device ({devices[0]}), so nothing can be split. Ask the Trainer or "
                "Fabric for devices=2 or more, pass devices= to the strategy, or use torchrun."
            )
        return devices

    def _adapt_metric(self, metric: nn.Module) -> None:
        """Let a metric count each replica once, and put it where batches are."""
        modules: list[Any] = list(metric.modules())
        for module in modules:
            if hasattr(module, "distributed_available_fn"):
                if self.replicas == 1:
                    module.distributed_available_fn = _return_false
                elif getattr(module, "process_group", None) is None and self._mesh is not None:
                    module.process_group = self._mesh["dp"].get_group()
        metric.to(self.root_device)

    def _clip_gradients_norm(
        self,
        piped: PipedModule,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> Tensor:
        """Clip the gradients of an optimizer by their norm over all ranks."""
        parameters = list_parameters(optimizer)
        if not piped.is_partial:
            return nn.utils.clip_grad_norm_(
                parameters, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite
            )
        assert piped.pipe is not None
        options = ClipGradOptions(norm_type, error_if_nonfinite, None)
        return piped.pipe._engine.clip_grad_norm(parameters, max_norm, options)


def _return_false() -> bool:
    return False


def _check_can_be_split(module: nn.Module) -> None:
    if getattr(module, "_compiler_ctx", None) is not None or hasattr(module, "_orig_mod"):
        raise ArgumentError(
            "the module was compiled with torch.compile as a whole, and a pipe runs its parts. "
            "Compile its layers instead: layer.compile()."
        )


# ---- the Trainer ---------------------------------------------------------------------------------


class TrainerStrategyMixin(_PipelineProcesses):
    """The methods of a strategy of the Trainer. Put it in front of Lightning's ParallelStrategy."""

    # Of Lightning's class.
    lightning_module: Any
    precision_plugin: Any
    optimizers: Any
    checkpoint_io: Any
    batch_to_device: Any
    _layer_sync: Any

    strategy_name = "penstock"

    def __init__(
        self,
        stages: int | Sequence[int] | None = None,
        devices: Sequence[Any] | None = None,
        chunks: int | None = None,
        schedule: Any = "1f1b",
        *,
        dp: int = 1,
        mesh: DeviceMesh | None = None,
        example: Any = None,
        loss_methods: Sequence[str] = (),
        accelerator: Any = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        **pipe_options: Any,
    ) -> None:
        self._set_options(stages, devices, chunks, schedule, dp, mesh, pipe_options)
        self._example, self._loss_methods = example, tuple(loss_methods)
        self._piped: PipedModule | None = None
        super().__init__(  # type: ignore[call-arg]
            accelerator=accelerator,
            parallel_devices=self._devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )

    @property
    def pipe(self) -> Pipe | None:
        """The pipe, for its schedule, stages and timeline. None before the first batch."""
        return None if self._piped is None else self._piped.pipe

    @property
    def result(self) -> StepResult | None:
        """The result of the last training step, with its measured timeline."""
        return None if self._piped is None else self._piped.result

    # ---- set-up ---------------------------------------------------------------------------

    def connect(self, model: Any) -> None:
        """Keep the user's module."""
        if self._piped is not None and self._piped.module is not model:
            self._piped = None
        super().connect(model)  # type: ignore[misc]

    def setup(self, trainer: Any) -> None:
        """Check the options of the Trainer, and prepare optimizers and precision."""
        self._check_options(trainer)
        if self._piped is None:
            self._piped = self._make_piped(self.lightning_module)
        super().setup(trainer)  # type: ignore[misc]
        if self._example is not None and self._piped.pipe is None:
            batch = self.batch_to_device(self._example)
            with self.precision_plugin.train_step_context():
                self._piped.build("training_step", (batch, 0))

    def _check_options(self, trainer: Any) -> None:
        if self._layer_sync is not None:
            raise ArgumentError(
                "sync_batchnorm=True is not supported: BatchNorm of a pipe sees one micro-batch at "
                "a time. Leave it out, and see deferred_batch_norm= for the running statistics."
            )
        precision = type(self.precision_plugin).__name__
        if precision not in _SUPPORTED_PRECISIONS:
            raise ArgumentError(
                f"precision={self.precision_plugin.precision!r} ({precision}) is not supported by "
                "a pipe. Use '32-true', '64-true', '16-mixed', 'bf16-mixed', '16-true' or "
                "'bf16-true'."
            )
        step = getattr(self.lightning_module, "training_step", None)
        if step is not None and "dataloader_iter" in inspect.signature(step).parameters:
            raise ArgumentError(
                "training_step(dataloader_iter) is not supported: a pipe splits the batch, so it "
                "has to get one. Use training_step(batch, batch_idx)."
            )
        for callback in trainer.callbacks:
            names = {kind.__name__ for kind in type(callback).__mro__}
            if self.has_processes and names & _WHOLE_MODEL_CALLBACKS:
                raise ArgumentError(
                    f"the callback {type(callback).__name__} needs all parameters in one process, "
                    "but each process has its own stages. Leave it out, or train in one process."
                )

    def model_to_device(self) -> None:
        """Leave the parameters to the pipe, and tell the module where batches are."""
        for module in self.lightning_module.modules():
            if "_device" in vars(module):
                vars(module)["_device"] = self.root_device

    def setup_optimizers(self, trainer: Any) -> None:
        """Make the optimizers. Each process keeps the parameters that it has."""
        self._partial_optimizers.clear()
        super().setup_optimizers(trainer)  # type: ignore[misc]
        self._partial_optimizers.watch(self.optimizers)
        if self._piped is not None and self._piped.pipe is not None:
            self._partial_optimizers.select(self._piped)

    def setup_precision_plugin(self) -> None:
        """Connect the precision plugin, and let it clip by the norm over all ranks."""
        super().setup_precision_plugin()  # type: ignore[misc]
        if self.has_processes:
            self.precision_plugin.clip_grad_by_norm = self._clip_by_norm

    def _clip_by_norm(self, optimizer: Any, clip_val: float) -> None:
        assert self._piped is not None
        self._clip_gradients_norm(self._piped, optimizer, clip_val)

    def teardown(self) -> None:
        """Release the pipe. With processes it stays: no process has the whole module."""
        piped = self._piped
        if piped is not None and piped.is_partial:
            self.precision_plugin.teardown()
            self.accelerator.teardown()
            self.checkpoint_io.teardown()
            return
        self._piped = None
        super().teardown()  # type: ignore[misc]

    # ---- steps ----------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a training step, or the user's own loop in manual optimization."""
        with self.precision_plugin.train_step_context():
            if self.lightning_module.automatic_optimization:
                return self._compute_loss("training_step", *args, **kwargs)
            with self._doors():
                return self.lightning_module.training_step(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a validation step as a pipeline."""
        with self.precision_plugin.val_step_context():
            return self._compute_values("validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a test step as a pipeline."""
        with self.precision_plugin.test_step_context():
            return self._compute_values("test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a prediction step as a pipeline."""
        with self.precision_plugin.predict_step_context():
            return self._compute_values("predict_step", *args, **kwargs)

    def _compute_loss(self, method: str, *args: Any, **kwargs: Any) -> Any:
        assert self._piped is not None
        self._check_same_batch(method, (args, kwargs))
        scaler = getattr(self.precision_plugin, "scaler", None)
        result = self._piped.compute_loss(method, args, kwargs, scaler)
        self._piped.apply_result(result, method)
        return _join_output(result)

    def _compute_values(self, method: str, *args: Any, **kwargs: Any) -> Any:
        assert self._piped is not None
        self._check_same_batch(method, (args, kwargs))
        result = self._piped.compute_values(method, args, kwargs)
        self._piped.apply_result(result, method)
        return result.output

    @contextmanager
    def _doors(self) -> Iterator[None]:
        """Let the forward of the module, and methods that return a loss, run as a pipeline."""
        assert self._piped is not None
        module = self.lightning_module
        doors = {"forward": Door(self._call_forward)}
        for name in self._loss_methods:
            if not callable(getattr(module, name, None)):
                raise ArgumentError(
                    f"loss_methods has {name!r}, but {type(module).__name__} has no such method."
                )
            doors[name] = Door(partial(self._compute_loss, name))
        vars(module).update(doors)
        try:
            yield
        finally:
            for name in doors:
                vars(module).pop(name, None)

    def _call_forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.has_processes and torch.is_grad_enabled():
            raise ArgumentError(
                "manual optimization over several processes needs a method that returns the loss: "
                "the output of self(x) is on another process than the first layers. Move the "
                "forward and the loss into a method, such as compute_loss, call it in "
                "training_step, and pass loss_methods=('compute_loss',) to the strategy."
            )
        assert self._piped is not None
        return self._piped.call_forward(args, kwargs)

    # ---- communication --------------------------------------------------------------------

    def block_backward_sync(self) -> AbstractContextManager[None]:
        """Return a context for batches that are accumulated: replicas average at the last one."""
        assert self._piped is not None
        return self._piped.deferred_average() if self.replicas > 1 else nullcontext()

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a value over the replicas of the pipe."""
        return self._reduce(tensor, reduce_op)

    # ---- checkpoints ----------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the weights under their names in the unsplit module."""
        if self._piped is None:
            state: dict[str, Any] = self.lightning_module.state_dict()
            return state
        return gather_state_dict(self._piped)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights of a checkpoint, however the module was split when it was saved."""
        if self._piped is None:
            self.lightning_module.load_state_dict(checkpoint["state_dict"], strict=strict)
        else:
            load_state_dict(self._piped, checkpoint["state_dict"], strict)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the state of an optimizer, numbered as in the unsplit module."""
        optimizer = getattr(optimizer, "_optimizer", optimizer)
        return self._partial_optimizers.gather(optimizer, self._piped)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the states of the optimizers."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            self._partial_optimizers.load(optimizer, state)


def _join_output(result: MethodResult) -> Any:
    """Return what a training step returned: a loss, or a dict with a loss."""
    if isinstance(result.output, dict):
        return {"loss": result.loss, **result.output}
    return result.loss


# ---- Fabric --------------------------------------------------------------------------------------


class PipedForward(nn.Module):
    """A module that Fabric calls in place of the user's, and that runs it as a pipeline."""

    def __init__(self, piped: PipedModule, strategy: FabricStrategyMixin) -> None:
        super().__init__()
        self.module = piped.module
        self.__dict__["piped"], self.__dict__["strategy"] = piped, strategy

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of the user's module, or the method that Fabric has redirected."""
        piped: PipedModule = self.__dict__["piped"]
        method = _take_redirected_method(piped.module)
        self.__dict__["strategy"]._check_same_batch(method, (args, kwargs))
        needs_loss = torch.is_grad_enabled() and (method != "forward" or piped_over_processes(self))
        if needs_loss:
            scaler = getattr(self.__dict__["strategy"].precision, "scaler", None)
            result = piped.compute_loss(method, args, kwargs, scaler)
            piped.apply_result(result, method)
            return _join_output(result)
        if method == "forward":
            return piped.call_forward(args, kwargs)
        result = piped.compute_values(method, args, kwargs)
        piped.apply_result(result, method)
        return result.output


def piped_over_processes(module: PipedForward) -> bool:
    """Return whether the ranks of a piped module are processes."""
    strategy: FabricStrategyMixin = module.__dict__["strategy"]
    return strategy.has_processes


def _take_redirected_method(module: nn.Module) -> str:
    """Return the name of the method that Fabric wants to call, and undo its redirection.

    Fabric calls `model.training_step` through `forward`: it sets a function of its own as `forward`
    of the module, which knows the name.
    """
    forward = vars(module).pop("forward", None)
    if forward is None or inspect.ismethod(forward):
        return "forward"
    try:
        return str(inspect.getclosurevars(forward).nonlocals["method_name"])
    except (KeyError, TypeError) as error:
        raise ArgumentError(
            "this release of Fabric redirects methods in another way, so it is not known which one "
            "was called. Call model(...) itself, or use lightning 2.6."
        ) from error


class _AverageControl:
    """The object behind `fabric.no_backward_sync`."""

    def __init__(self, strategy: FabricStrategyMixin) -> None:
        self._strategy = strategy

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """Return a context for batches that are accumulated: replicas average after it."""
        if not enabled or self._strategy.replicas == 1:
            return nullcontext()
        return self._strategy._find_piped(module).deferred_average()


class FabricStrategyMixin(_PipelineProcesses):
    """The methods of a strategy of Fabric. Put it in front of Fabric's ParallelStrategy."""

    precision: Any  # of Fabric's class

    strategy_name = "penstock"

    def __init__(
        self,
        stages: int | Sequence[int] | None = None,
        devices: Sequence[Any] | None = None,
        chunks: int | None = None,
        schedule: Any = "1f1b",
        *,
        dp: int = 1,
        mesh: DeviceMesh | None = None,
        accelerator: Any = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision: Any = None,
        **pipe_options: Any,
    ) -> None:
        self._set_options(stages, devices, chunks, schedule, dp, mesh, pipe_options)
        self._piped_modules: list[PipedModule] = []
        super().__init__(  # type: ignore[call-arg]
            accelerator=accelerator,
            parallel_devices=self._devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision=precision,
        )
        self._backward_sync_control = _AverageControl(self)

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Return a module that runs as a pipeline. The pipe is made with the first batch."""
        precision = type(self.precision).__name__
        if precision not in _SUPPORTED_PRECISIONS:
            raise ArgumentError(
                f"precision={self.precision.precision!r} ({precision}) is not supported by a pipe."
            )
        self._piped_modules.append(self._make_piped(module))
        return PipedForward(self._piped_modules[-1], self)

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Remember an optimizer. Each process keeps the parameters that it has."""
        self._partial_optimizers.watch([optimizer])
        for piped in self._piped_modules:
            if piped.pipe is not None:
                self._partial_optimizers.select(piped)
        return optimizer

    def module_to_device(self, module: nn.Module) -> None:
        """Leave the parameters to the pipe."""

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a value over the replicas of the pipe."""
        return self._reduce(tensor, reduce_op)

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip the gradients of an optimizer by their norm over all ranks."""
        self.precision.unscale_gradients(optimizer)
        piped = self._find_piped(module)
        return self._clip_gradients_norm(piped, optimizer, max_norm, norm_type, error_if_nonfinite)

    def _find_piped(self, module: nn.Module) -> PipedModule:
        for piped in self._piped_modules:
            if module is piped.module or getattr(module, "module", None) is piped.module:
                return piped
        raise ArgumentError(f"{type(module).__name__} was not set up by fabric.setup.")

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return the weights under their names in the unsplit module."""
        return gather_state_dict(self._find_piped(module))

    def load_module_state_dict(
        self, module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True
    ) -> None:
        """Load weights, however the module was split when they were saved."""
        load_state_dict(self._find_piped(module), state_dict, strict)

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of an optimizer, numbered as in the unsplit module."""
        piped = self._piped_modules[0] if self._piped_modules else None
        return self._partial_optimizers.gather(optimizer, piped)


def register_strategy(registry: Any, strategy: type) -> None:
    """Let `strategy="penstock"` mean this class, in a registry of Lightning."""
    if "penstock" not in registry:
        registry.register("penstock", strategy, description="pipeline parallelism with Penstock")
