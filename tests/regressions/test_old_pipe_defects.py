"""Tests that the defects of `torch.distributed.pipeline.sync.Pipe` are not repeated here.

Defects 1, 7 and 9 (skips of tensors without gradients, deferred BatchNorm of small batches, skips
of several inputs) are rows of tests/features, defect 2 (autocast and inference mode in workers) is
in tests/stage/test_caller_context.py. Defect 11, the overhead per cell, is measured by
benchmarks.
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock import Pipe, is_checkpointing, verify_skippables
from penstock.model.sequential import find_layer_device
from tests.support import (
    Do,
    Pop,
    Stash,
    Watch,
    batch,
    closely,
    crews,
    differences,
    each_checkpoint,
    each_runtime,
    plain,
    same_gradients,
    trained,
)

# ---- 3. worker threads leaked -------------------------------------------------------------


def test_3_deleted_pipes_leave_no_threads() -> None:
    gc.collect()
    before = crews()
    x, _ = batch(4)
    for _ in range(50):
        pipe = Pipe(plain(), chunks=2, stages=4)
        pipe(x).sum().backward()
    del pipe
    assert crews() == before


# ---- 4. a pipe could not be deep-copied or pickled ----------------------------------------


def saved_and_loaded(pipe: Pipe) -> Any:
    file = io.BytesIO()
    torch.save(pipe, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "again",
    [copy.deepcopy, lambda pipe: pickle.loads(pickle.dumps(pipe)), saved_and_loaded],
    ids=["deepcopy", "pickle", "save"],
)
@pytest.mark.parametrize("used", [False, True])
def test_4_pipe_can_be_deepcopied_pickled_and_saved(
    again: Callable[[Pipe], Pipe], used: bool
) -> None:
    layers = list(plain())
    model = nn.Sequential(Stash(), nn.Dropout(0.0), *layers[:1], Do(_narrowed), Pop(), layers[3])
    x, target = torch.randn(5, 8, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    model[2] = nn.Linear(8, 8).double()
    pipe = Pipe(model, chunks=2, stages=3, loss_fn=functional.mse_loss)
    if used:
        pipe(x).sum().backward()
        pipe.step(x, target=target)
        pipe.zero_grad()
    other = again(pipe)
    found = trained(other, x, target, "step")
    assert all(p.grad is None for p in pipe.parameters())
    assert all(p is not q for p, q in zip(pipe.parameters(), other.parameters(), strict=True))
    assert differences(found, trained(pipe, x, target, "step")) == []


def _narrowed(x: Tensor) -> Tensor:
    return x.tanh()


# ---- 5. under checkpointing, retain_graph and autograd.grad failed ------------------------


@each_runtime
@each_checkpoint
def test_5_retain_graph_allows_several_backwards(checkpoint: str, runtime: str) -> None:
    x, target = batch(7)
    model = plain()
    pipe = Pipe(copy.deepcopy(model), 3, checkpoint, stages=4, runtime=runtime)
    loss = functional.mse_loss(pipe(x), target)
    for _ in range(2):
        loss.backward(retain_graph=True)
    loss.backward()
    expected = functional.mse_loss(model(x), target)
    expected.backward()
    assert same_gradients(pipe, model, times=3)
    with pytest.raises(RuntimeError, match="backward through"):
        loss.backward()


@each_runtime
@each_checkpoint
def test_5_autograd_grad_of_some_parameters_and_the_input(checkpoint: str, runtime: str) -> None:
    x, target = batch(7)
    model = plain()
    pipe = Pipe(copy.deepcopy(model), 3, checkpoint, stages=4, runtime=runtime)
    x.requires_grad_()
    found, wanted = (
        torch.autograd.grad(functional.mse_loss(m(x), target), [x, *m[2].parameters()])
        for m in (pipe, model)
    )
    assert all(closely(f, w) for f, w in zip(found, wanted, strict=True))
    assert all(p.grad is None for p in pipe.parameters())


# ---- 6. except_last checkpointed every micro-batch of a small batch -----------------------


@each_runtime
@pytest.mark.parametrize(
    ("rows", "expected"), [(3, [True, True, False]), (1, [False]), (8, [True] * 7 + [False])]
)
def test_6_except_last_is_the_last_micro_batch_of_a_small_batch(
    rows: int, expected: list[bool], runtime: str
) -> None:
    seen = []
    look = Watch(lambda x: seen.append(is_checkpointing()))
    pipe = Pipe(nn.Sequential(nn.Linear(6, 2), look), 8, stages=2, runtime=runtime)
    pipe(torch.randn(rows, 6))
    assert seen == expected


# ---- 8. verify_skippables did not look into nested Sequentials ----------------------------


def test_8_nested_skippables_are_verified() -> None:
    with pytest.raises(TypeError, match=r"no layer pops 'far', which is stashed"):
        verify_skippables(nn.Sequential(nn.Sequential(nn.ReLU(), Stash())))
    with pytest.raises(TypeError, match=r"'0.1' \(Pop\) pops 'far'"):
        Pipe(nn.Sequential(nn.Sequential(nn.ReLU(), Pop())))
    verify_skippables(nn.Sequential(nn.Sequential(Stash()), nn.Sequential(nn.ReLU(), Pop())))


# ---- 10. a module with only buffers counted as CPU ----------------------------------------


def test_10_device_of_a_layer_with_only_buffers() -> None:
    layer = nn.Module()
    layer.register_buffer("table", torch.zeros(3, device="meta"))
    assert find_layer_device(layer) == torch.device("meta")
    assert find_layer_device(nn.BatchNorm1d(3, affine=False).to("meta")) == torch.device("meta")


# ---- 12. CPU stages never overlapped ------------------------------------------------------


def test_12_cpu_stages_overlap() -> None:
    """Each stage waits inside a layer until the other stage is inside one, too."""
    meeting = threading.Barrier(2)

    def meet(x: Tensor) -> Tensor:
        if x[0, 0] == first[threading.current_thread().name]:
            meeting.wait(timeout=20)
        return x

    # micro-batch 1 in stage 0 beside micro-batch 0 in stage 1
    first = {"penstock-0": 1, "penstock-1": 0}
    pipe = Pipe(nn.Sequential(Do(meet), Do(meet)), 2, stages=2)
    x = torch.tensor([[0.0], [1.0]])
    assert torch.equal(pipe(x), x)
