"""`Pipe(mesh=mesh)` with the dims dp and pp: replicas train together, each on its own rows.

The expected values come from the unsplit model on the rows of all replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from penstock import Pipe, RemoteError, add_loss
from penstock.errors import RunError
from tests.data_parallel.replicas import (
    FAMILIES,
    Block,
    check_on_ranks,
    count_reductions,
    differing,
    half,
    mesh,
    model,
    pipe_of,
    replica_here,
    split_blocks,
    wrong_loss,
    wrong_norms,
)
from tests.distributed.ranks import ranks
from tests.support import batch, closely

UNEVEN = (9, 7)  # rows of each replica


def mine(tensor: Tensor, rows: Sequence[int] = UNEVEN) -> Tensor:
    part: Tensor = tensor.split(list(rows))[replica_here()]
    return part


# ---- losses -------------------------------------------------------------------------------


def classes(rows: int) -> tuple[Tensor, Tensor]:
    """Return a batch in which the second replica has fewer targets that count."""
    x, _ = batch(rows)
    target = torch.arange(rows) % 3
    target[UNEVEN[0] + 1 :: 2] = -100
    return x, target


def none_for_one(rows: int) -> tuple[Tensor, Tensor]:
    x, target = classes(rows)
    target[UNEVEN[0] :] = -100
    return x, target


def weighted(output: Tensor, target: Tensor) -> dict[str, Any]:
    """Return a mean over the rows whose first target is positive, their number, and metrics."""
    counts = (target[:, 0] > 0).double()
    per_row = (output - target).square().mean(dim=1)
    loss = (per_row * counts).sum() / counts.sum()
    far = (output - target).abs().mean(dim=1)
    return {
        "loss": loss,
        "weight": counts.sum(),
        "far": (far * counts).sum() / counts.sum(),
        "rows": output.detach()[:, 0],
    }


def weightless_replica(rows: int) -> tuple[Tensor, Tensor]:
    x, y = batch(rows)
    y[UNEVEN[0] :, 0] = -1
    return x, y


def with_metrics(output: Tensor, target: Tensor) -> dict[str, Any]:
    loss = nn.functional.mse_loss(output, target)
    return {"loss": loss, "far": (output - target).abs().mean(), "both": [loss.detach(), 2.0]}


def summing(output: Tensor, target: Tensor) -> dict[str, Any]:
    return {"loss": (output - target).square().sum(), "rows": len(output)}


cross_entropy = nn.functional.cross_entropy
by_class = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5]).double())

LOSSES: dict[str, tuple[Any, str | None, Callable[[int], tuple[Tensor, Tensor]]]] = {
    "rows": (nn.functional.mse_loss, None, batch),
    "metrics": (with_metrics, None, batch),
    "sum": (summing, "sum", batch),
    "a sum by PyTorch": (nn.MSELoss(reduction="sum"), None, batch),
    "ignored targets": (cross_entropy, None, classes),
    "class weights": (by_class, None, classes),
    "a replica without targets": (cross_entropy, None, none_for_one),
    "class weights, a replica without targets": (by_class, None, none_for_one),
    "weights": (weighted, None, batch),
    "a replica without weights": (weighted, None, weightless_replica),
}


def read(found: Any) -> tuple[Tensor, dict[str, Any]]:
    """Return the loss that a loss_fn has computed, and the other values beside it."""
    if not isinstance(found, dict):
        return found, {}
    return found["loss"], {n: v for n, v in found.items() if n in ("far", "both", "rows")}


def is_same(a: Any, b: Any) -> bool:
    if isinstance(a, list):
        return all(map(is_same, a, b))
    return closely(torch.as_tensor(a), torch.as_tensor(b).detach())


def of_the_whole_batch(kind: str, schedule: str) -> list[str]:
    loss_fn, reduction, data = LOSSES[kind]
    expected = model()
    pipe = pipe_of(model(), None, schedule, loss_fn=loss_fn, reduction=reduction, chunks=3)
    wrong = []
    for at in range(2):  # the second step accumulates gradients, with the row counts swapped
        rows = UNEVEN if at == 0 or "replica" in kind else UNEVEN[::-1]
        x, y = data(16)
        loss, beside = read(loss_fn(expected(x), y))
        loss.backward()
        with count_reductions() as found:
            result = pipe.step(mine(x, rows), target=mine(y, rows))
        wrong += [f"step {at}: {name}" for name in differing(pipe, expected)]
        wrong += wrong_loss(result.loss, loss)
        wrong += [] if (found.own, found.of_group) == (1, 0) else [f"{found.own} reductions"]
        for name, value in beside.items():
            if name == "rows" and kind != "sum":
                value = value.split(list(rows))[replica_here()]  # only this replica's rows
            wrong += [] if is_same(result.metrics[name], value) else [f"step {at}: {name}"]
    return wrong + wrong_norms(pipe, expected)


@pytest.mark.parametrize(
    ("kind", "schedule"), [*zip(LOSSES, (*FAMILIES, "zb-h1", "1f1b", "zb-v"), strict=True)]
)
def test_replicas_loss_metrics_and_gradients_match_the_whole_batch(
    kind: str, schedule: str
) -> None:
    check_on_ranks(4, of_the_whole_batch, kind, schedule)


def around(output: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(output, target) + 0.1 * output.square().mean()


def counted_differently() -> list[str]:
    """Step with micro-batches that count alike in each replica; those of one count less."""
    x, target = batch(16)[0], torch.arange(16) % 3
    pipe = pipe_of(model(), None, loss_fn=around, chunks=4)
    pipe.step(mine(x, (8, 8)), target=mine(target, (8, 8)))
    target[8::2] = -100
    message = "averages over more targets for each row in replica 0 than in replica 1"
    with pytest.raises((RunError, RemoteError), match=message):
        pipe.step(mine(x, (8, 8)), target=mine(target, (8, 8)))
    return []


def test_replicas_whose_losses_count_different_numbers_of_targets_are_refused() -> None:
    check_on_ranks(4, counted_differently)


class Adds(nn.Module):
    """A layer that adds an auxiliary loss."""

    def forward(self, x: Tensor) -> Tensor:
        add_loss(x.square().mean())
        return x


def added(kind: str) -> list[str]:
    loss_fn, _, data = LOSSES[kind]
    expected, layers = model(), model()
    layers[1] = nn.Sequential(nn.ReLU(inplace=True), Adds())
    pipe = pipe_of(layers, None, loss_fn=loss_fn)
    x, y = data(16)
    hidden = torch.relu(expected[0](x))
    loss = loss_fn(expected[2:](hidden), y) + hidden.square().mean()
    loss.backward()
    result = pipe.step(mine(x), target=mine(y))
    return wrong_loss(result.loss, loss) + differing(pipe, expected)


@pytest.mark.parametrize("kind", ["rows", "ignored targets"])
def test_replicas_weight_auxiliary_losses_by_rows(kind: str) -> None:
    check_on_ranks(4, added, kind)


# ---- no_sync, tied weights, inputs, grad scalers ------------------------------------------


def steps_that_wait(kind: str) -> list[str]:
    """Train a tied weight. Steps under no_sync count for their own rows."""
    loss_fn, reduction, data = LOSSES[kind]
    expected = model(tied=True)
    pipe = pipe_of(model(tied=True), None, "zb-h1", loss_fn=loss_fn, reduction=reduction)
    wrong = []
    for at, rows in enumerate([(9, 7), (4, 12), (8, 8), (13, 3)]):
        x, y = data(16)
        loss, _ = read(loss_fn(expected(x), y))
        loss.backward()
        with pipe.no_sync() if at < 2 else nullcontext(), count_reductions() as found:
            result = pipe.step(mine(x, rows), target=mine(y, rows))
        wrong += [] if found.own == (at >= 2) else [f"step {at}: {found.own} reductions"]
        wrong += wrong_loss(result.loss, loss)
        if at >= 2:
            wrong += [f"after step {at}: {name}" for name in differing(pipe, expected)]
    return wrong + wrong_norms(pipe, expected)


@pytest.mark.parametrize("kind", ["rows", "sum", "weights", "ignored targets"])
def test_replicas_no_sync_steps_are_reduced_by_the_next_step(kind: str) -> None:
    check_on_ranks(4, steps_that_wait, kind)


def gradients_of_inputs(kind: str) -> list[str]:
    loss_fn, _, data = LOSSES[kind]
    expected, pipe = model(), pipe_of(model(), None, loss_fn=loss_fn)
    x, y = data(16)
    here = mine(x).clone().requires_grad_()
    x.requires_grad_()
    read(loss_fn(expected(x), y))[0].backward()
    pipe.step(here, target=mine(y))
    if mesh().get_local_rank("pp") > 0:
        return [] if here.grad is None else ["a gradient on a rank without the first stage"]
    assert x.grad is not None
    assert here.grad is not None
    return [] if closely(here.grad, mine(x.grad)) else ["the input's"]


@pytest.mark.parametrize("kind", ["rows", "weights"])
def test_replicas_input_gradients_match_the_whole_loss(kind: str) -> None:
    check_on_ranks(4, gradients_of_inputs, kind)


# ---- state that replicas share ------------------------------------------------------------


def begun_differently() -> list[str]:
    """Return the tensors that differ between replicas after different initializations."""
    torch.manual_seed(dist.get_rank() // 2)  # the ranks of one replica build the same model
    layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 3))
    layers[1].register_buffer("drawn", torch.randn(3))
    pipe = Pipe(layers, chunks=1, mesh=mesh(), loss_fn=nn.functional.mse_loss, stages=[2, 2])
    states: list[dict[str, Any]] = [{n: t.clone() for n, t in pipe.state_dict().items()}]
    x, y = batch(16, torch.float32)
    for _ in range(2):
        pipe.step(mine(x), target=mine(y))
    states.append({name: p.grad for name, p in pipe.named_parameters()})
    with torch.no_grad():
        pipe.step(mine(x), target=mine(y))
    found: list[Any] = [None] * 4
    dist.all_gather_object(found, states)
    peer = found[(dist.get_rank() + 2) % 4]
    return [
        name
        for at, state in enumerate(states)
        for name, value in state.items()
        if not torch.equal(value, peer[at][name])
    ]


def test_replicas_start_with_the_state_of_the_first() -> None:
    check_on_ranks(4, begun_differently)


def statistics() -> list[str]:
    """Check the running statistics: before each step, those of the first replica, as in DDP."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    expected = nn.BatchNorm1d(6).double()
    pipe = Pipe(layers, chunks=1, mesh=mesh(), loss_fn=nn.functional.mse_loss, stages=[1, 1])
    for at in range(3):
        x, y = batch(16)
        x = x * (at + 1)
        expected(x.chunk(2)[0] if at < 2 else half(x))
        pipe.step(half(x), target=half(y))
    theirs = dict(expected.named_buffers(prefix="0"))
    return [name for name, b in pipe.named_buffers() if not closely(b, theirs[name])]


def test_replicas_take_buffers_of_the_first_before_each_step() -> None:
    check_on_ranks(4, statistics)


def reduced_by_wrappers(wrap: str) -> list[str]:
    """Let wrappers reduce some modules over the same processes; the pipe reduces the rest."""

    def around(module: nn.Module, index: int) -> nn.Module:
        if wrap == "ddp, half" and index == 0:
            return module
        if wrap.startswith("ddp"):
            return DistributedDataParallel(module, process_group=mesh()["dp"].get_group())
        for part in module.children() if wrap == "fsdp, blocks" else [module]:
            if wrap == "fsdp" or isinstance(part, Block):
                fully_shard(part, mesh=mesh()["dp"])
        return module

    expected = model()
    pipe = pipe_of(model(), None, "zb-v", stage_fn=around)
    wrong = []
    for rows in (UNEVEN, UNEVEN[::-1]):
        x, y = batch(16)
        loss = nn.functional.mse_loss(expected(x), y)
        loss.backward()
        with count_reductions() as found:
            result = pipe.step(mine(x, rows), target=mine(y, rows))
        wrong += differing(pipe, expected)
        wrong += wrong_loss(result.loss, loss)
        first = mesh().get_local_rank("pp") == 0
        own = first and wrap in ("ddp, half", "fsdp, blocks")
        wrong += [] if found.own == own else [f"{found.own} reductions of the pipe's own"]
    return wrong


@pytest.mark.parametrize("wrap", ["ddp", "ddp, half", "fsdp", "fsdp, blocks"])
def test_replicas_do_not_reduce_again_what_stage_fn_reduces(wrap: str) -> None:
    check_on_ranks(4, reduced_by_wrappers, wrap)


def evaluated() -> list[str]:
    """Under no_grad, a step returns the loss of all replicas; `pipe(x)` concerns this one only."""
    expected, pipe = model(), pipe_of(model(), None, outputs="all")
    x, y = batch(16)
    with torch.no_grad():
        output = expected(x)
        loss = nn.functional.mse_loss(output, y)
        found = pipe.step(mine(x), target=mine(y), outputs=True)
        wrong = wrong_loss(found.loss, loss)
        wrong += [] if closely(found.outputs, mine(output)) else ["outputs of a step"]
        if replica_here() == 0:
            wrong += [] if closely(pipe(mine(x)), mine(output)) else ["outputs"]
    return wrong


def test_replicas_evaluation_under_no_grad() -> None:
    check_on_ranks(4, evaluated)


def the_other_way_round() -> list[str]:
    """Use another order of dims, an unusual order of ranks, and data on the first rank only."""
    wrong = []
    strange = DeviceMesh("cpu", [[0, 1], [3, 2]], mesh_dim_names=("dp", "pp"))
    turned = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("pp", "dp"))
    for at, given in enumerate((strange, turned)):
        expected = model()
        pipe = Pipe(
            model(),
            chunks=4,
            schedule="zb-h1",
            stages=[4, 4],
            mesh=given,
            data="first",
            loss_fn=nn.functional.mse_loss,
        )
        x, y = batch(16)
        loss = nn.functional.mse_loss(expected(x), y)
        loss.backward()
        replica = pipe._engine.groups.topology.replica_index  # type: ignore[attr-defined]
        rows = [part.split(list(UNEVEN))[replica] for part in (x, y)]
        first = pipe._engine.groups.rank == 0  # type: ignore[attr-defined]
        result = pipe.step(rows[0], target=rows[1]) if first else pipe.step()
        wrong += [f"{at}: {name}" for name in differing(pipe, expected)]
        wrong += wrong_loss(result.loss, loss)
    return wrong


def test_replicas_on_meshes_with_other_dim_and_rank_orders() -> None:
    check_on_ranks(4, the_other_way_round)


def three_dims() -> list[str]:
    """Split layers over a third dim that the pipe does not know; it averages over dp only."""
    cube = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "pp", "tp"))

    expected = model()
    pipe = Pipe(
        model(),
        chunks=3,
        mesh=cube["dp", "pp"],
        stage_fn=lambda module, _: split_blocks(module, cube["tp"]),
        loss_fn=nn.functional.mse_loss,
    )
    x, y = batch(16)
    loss = nn.functional.mse_loss(expected(x), y)
    loss.backward()
    x, y = (part.split(list(UNEVEN))[cube.get_local_rank("dp")] for part in (x, y))
    result = pipe.step(x, target=y)
    wrong = differing(pipe, expected) + wrong_loss(result.loss, loss)
    return wrong + wrong_norms(pipe, expected)


def test_replicas_on_two_dims_of_a_three_dim_mesh() -> None:
    check_on_ranks(4, three_dims)


# ---- disagreement -------------------------------------------------------------------------


def disagreeing() -> list[str]:
    """Make replicas differ in several ways; each error is raised on all four ranks."""
    told = []

    def tell(act: Callable[[], object]) -> None:
        with pytest.raises(RemoteError) as error:
            act()
        told.append(str(error.value))

    replica = replica_here()
    tell(lambda: pipe_of(model(tied=replica == 1), None))
    pipe = pipe_of(model(), None)
    x, y = batch(16)
    scaler = torch.amp.GradScaler("cpu") if replica else None
    tell(lambda: pipe.step(mine(x), target=mine(y), scaler=scaler))

    def waiting() -> None:
        with pipe.no_sync() if replica else nullcontext():
            pipe.step(mine(x), target=mine(y))

    tell(waiting)
    metrics = with_metrics if replica else weighted
    tell(lambda: pipe.step(mine(x), target=mine(y), loss_fn=metrics))
    scale = 0.5 if replica == 1 and mesh().get_local_rank("pp") == 1 else 1.0

    def clipping() -> None:
        pipe.clip_grad_norm_(scale)
        pipe.step(mine(x), target=mine(y))  # the other replica learns of the error in this step

    tell(clipping)
    return told


def test_replicas_that_disagree_raise_an_error_that_says_how() -> None:
    for alike, scaler, waiting, metrics, clipped in ranks(4).run(disagreeing):
        assert "the replicas disagree about the pipe" in alike
        assert "on replica 0; Head" in alike
        assert "scaler: False on replica 0; True on replica 1" in scaler
        assert "no_sync: False on replica 0; True on replica 1" in waiting
        assert "the loss: by weights on replica 0; a mean by rows on replica 1" in metrics
        assert "clipping gradients (call 1) of replica 1" in clipped
        assert "max_norm: 1.0 on rank 0; 0.5 on rank 1" in clipped
