"""Functions that train with `PipeTrainer` on the ranks of a pipe over processes."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from transformers import set_seed

from tests.integrations.curve import Curve
from tests.integrations.curves import MODELS, make_arguments, make_pipe, train


def choose_processes(replicas: int) -> dict[str, Any]:
    """Return the options of a pipe over all processes, with this number of replicas."""
    if replicas == 1:
        return {"group": distributed.group.WORLD}
    ranks = distributed.get_world_size() // replicas
    return {"mesh": init_device_mesh("cpu", (replicas, ranks), mesh_dim_names=("dp", "pp"))}


def train_on_ranks(name: str, folder: str, replicas: int, options: dict[str, Any]) -> Curve:
    """Train on all ranks. Each replica gets its part of the rows."""
    return train(MODELS[name], folder, pipe_options=choose_processes(replicas), **options)


def predict_on_ranks(name: str, replicas: int, folder: str, outputs: str = "all") -> Any:
    """Return the predictions for all rows, which are gathered from the replicas."""
    from penstock.integrations.transformers import PipeTrainer

    set_seed(0)
    model, rows = MODELS[name].make(), MODELS[name].make_rows(7)
    pipe = make_pipe(model, rows, outputs=outputs, **choose_processes(replicas))
    arguments = make_arguments(folder, per_device_eval_batch_size=2)
    trainer = PipeTrainer(model=pipe, args=arguments, eval_dataset=rows)
    return torch.tensor(trainer.predict(rows).predictions)
