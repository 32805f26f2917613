"""`PenstockStrategy` and `PenstockFabricStrategy` for the package `pytorch_lightning`.

They are those of `penstock.integrations.lightning`, which describes their arguments, with the base
classes of this package.
"""

from __future__ import annotations

from lightning_fabric.strategies import STRATEGY_REGISTRY
from lightning_fabric.strategies.parallel import ParallelStrategy as _FabricParallelStrategy
from pytorch_lightning.strategies import ParallelStrategy, StrategyRegistry

from penstock.integrations.lightning_strategy import (
    FabricStrategyMixin,
    TrainerStrategyMixin,
    register_strategy,
)


class PenstockStrategy(TrainerStrategyMixin, ParallelStrategy):  # type: ignore[misc]
    """A strategy for Lightning's Trainer that runs the module as a pipeline."""


class PenstockFabricStrategy(FabricStrategyMixin, _FabricParallelStrategy):  # type: ignore[misc]
    """A strategy for Lightning's Fabric that runs modules as a pipeline."""


register_strategy(StrategyRegistry, PenstockStrategy)
register_strategy(STRATEGY_REGISTRY, PenstockFabricStrategy)
