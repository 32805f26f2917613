"""`PenstockStrategy` and `PenstockFabricStrategy`: Lightning trains a module as a pipeline.

    from penstock.integrations.lightning import PenstockStrategy

    trainer = Trainer(accelerator="cpu", devices=2, strategy=PenstockStrategy(chunks=4))
    trainer.fit(module, loader)

The module, its `training_step` and its loss stay as they are. With the older package name, import
`penstock.integrations.pytorch_lightning`.
"""

from __future__ import annotations

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies.parallel import ParallelStrategy as _FabricParallelStrategy
from lightning.pytorch.strategies import ParallelStrategy, StrategyRegistry

from penstock.integrations.lightning_strategy import (
    FabricStrategyMixin,
    TrainerStrategyMixin,
    register_strategy,
)


class PenstockStrategy(TrainerStrategyMixin, ParallelStrategy):  # type: ignore[misc]
    """A strategy for Lightning's Trainer that runs the module as a pipeline.

    `training_step` is split as it is, with its loss. The pipe is made with the first batch.
    `Trainer(strategy="penstock", devices=2)` uses the defaults.

    Args:
        stages: The number of stages, as for `Pipe`.
        devices: With one process, a device for each rank. Default: those of the Trainer.
        chunks: The number of micro-batches of a batch. Default: two for each rank.
        schedule: The schedule, as for `Pipe`.
        dp: Under torchrun, the number of replicas of the pipe.
        mesh: Under torchrun, the mesh of `penstock.init`, if the script has called it.
        example: A batch of `training_step`, with which the pipe is made before the first one.
        loss_methods: With manual optimization, the names of methods that return a loss. They run
            under the schedule, and over processes.
        accelerator: As for other strategies of Lightning.
        cluster_environment: The same.
        checkpoint_io: The same.
        precision_plugin: The same.
        **pipe_options: Further options of `Pipe`, such as `checkpoint=` and `balance=`.

    Attributes:
        pipe: The pipe, or None before the first batch.
        result: The `StepResult` of the last training step, or None.

    Raises:
        ArgumentError: If an option cannot be followed.
    """


class PenstockFabricStrategy(FabricStrategyMixin, _FabricParallelStrategy):  # type: ignore[misc]
    """A strategy for Lightning's Fabric that runs modules as a pipeline.

    In one process, `model(x)` has a backward, and all forwards come before all backwards. Methods
    that return a loss, such as `training_step` or one marked with `mark_forward_method`, run under
    the schedule. Over processes, so does `model(batch)`, which has to return the loss.

    Args:
        stages: The number of stages, as for `Pipe`.
        devices: With one process, a device for each rank. Default: those of Fabric.
        chunks: The number of micro-batches of a batch. Default: two for each rank.
        schedule: The schedule, as for `Pipe`.
        dp: Under torchrun, the number of replicas of the pipe.
        mesh: Under torchrun, the mesh of `penstock.init`, if the script has called it.
        accelerator: As for other strategies of Fabric.
        cluster_environment: The same.
        checkpoint_io: The same.
        precision: The same.
        **pipe_options: Further options of `Pipe`, such as `checkpoint=` and `balance=`.

    Raises:
        ArgumentError: If an option cannot be followed.
    """


register_strategy(StrategyRegistry, PenstockStrategy)
register_strategy(STRATEGY_REGISTRY, PenstockFabricStrategy)
