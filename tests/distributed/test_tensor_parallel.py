"""Tensor parallelism inside a pipe: blocks that communicate over a mesh dim of their own.

The meshes are (pp, tp) on four processes and (pp, dp, tp) on eight. Losses, gradients and outputs
equal those of the unsplit model.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from penstock import Pipe
from tests.data_parallel.replicas import check_on_ranks, differing, wrong_loss
from tests.distributed.ranks import SOAK, ranks
from tests.support import closely

MESHES = {4: {"pp": 2, "tp": 2}, 8: {"pp": 2, "dp": 2, "tp": 2}}


class Block(nn.Module):
    """A block that starts with a column-parallel layer and ends in a row-parallel one."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]


class Model(nn.Module):
    """A model whose forward is traced: blocks, and operations between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return x


def build_sequential() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(4))).double()


def build_traced() -> nn.Module:
    torch.manual_seed(0)
    return Model().double()


def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Split each block of a model over the processes of a mesh."""
    for block in model.modules():
        if isinstance(block, Block):
            plan: Any = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh, plan)
    return model


def compare(
    size: int, is_traced: bool, options: dict[str, Any], uses_group: bool = False
) -> list[str]:
    """Return what differs between a pipe and the unsplit model: two steps, and eval mode."""
    mesh = init_device_mesh("cpu", (*MESHES[size].values(),), mesh_dim_names=(*MESHES[size],))
    build = build_traced if is_traced else build_sequential
    expected, model = build(), parallelize(build(), mesh["tp"])
    torch.manual_seed(1)
    x, y = torch.randn(2, 8, 6).double()
    pipe_mesh, rows = mesh["pp"], slice(None)
    if "dp" in MESHES[size]:  # the replicas train on halves of the batch
        pipe_mesh = mesh["pp", "dp"]
        rows = slice(4 * mesh.get_local_rank("dp"), 4 * mesh.get_local_rank("dp") + 4)
    options |= {"group": pipe_mesh.get_group()} if uses_group else {"mesh": pipe_mesh}
    pipe = Pipe(model, 2, loss_fn=nn.functional.mse_loss, example=x[rows], **options)
    found = []
    for _ in range(2):
        loss = nn.functional.mse_loss(expected(x), y)
        loss.backward()
        result = pipe.step(x[rows], target=y[rows], outputs=True)
        found += wrong_loss(result.loss, loss) + differing(pipe, expected)
    pipe.eval()
    with torch.no_grad():
        output = pipe(x[rows])
    if output is not None and not closely(output, expected(x)[rows].detach()):
        found.append("the output differs")
    return found


@pytest.mark.parametrize(("schedule", "checkpoint"), [("1f1b", "never"), ("zb-v", "always")])
def test_stages_that_end_in_a_row_parallel_layer(schedule: str, checkpoint: str) -> None:
    options = {"schedule": schedule, "checkpoint": checkpoint, "balance": "parameters"}
    check_on_ranks(4, compare, 4, False, options)


MEASURED_CUTS = [(4, False, "time"), (8, True, "memory")]
if SOAK:
    MEASURED_CUTS += [(4, True, "memory"), (8, True, "time"), (8, False, "memory")]


@pytest.mark.parametrize(("size", "is_traced", "balance"), MEASURED_CUTS)
def test_measured_cut_of_tensor_parallel_blocks(size: int, is_traced: bool, balance: str) -> None:
    check_on_ranks(size, compare, size, is_traced, {"balance": balance})


def test_measured_cut_without_a_mesh_is_the_same_on_tensor_parallel_peers() -> None:
    check_on_ranks(4, compare, 4, True, {"balance": "time"}, True)


def send_dtensor() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    plan: Any = {"up": ColwiseParallel(), "down": RowwiseParallel(use_local_output=False)}
    model = build_sequential()
    for block in model.children():
        parallelize_module(block, mesh["tp"], plan)
    Pipe(model, 2, mesh=mesh["pp"]).step(torch.zeros(4, 6).double(), loss_fn=torch.sum)


def test_dtensor_between_processes_is_refused() -> None:
    with pytest.raises(AssertionError, match="a stage sends a DTensor of shape"):
        ranks(4).run(send_dtensor)
